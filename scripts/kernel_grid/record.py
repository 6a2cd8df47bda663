"""What a run of the grid found, by claim, as one JSON value."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_FAULTS = 12


@dataclass
class Found:
    """Of one claim. refused: calls that its plan does not take. sizes: of heads. errors: the largest of
    each dtype and comparison.
    """

    passed: int = 0
    refused: int = 0
    failed: int = 0
    sizes: set[int] = field(default_factory=set)
    synchronises: Counter[str] = field(default_factory=Counter)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Mapping[str, Any]) -> None:
        call, fault = outcome["call"], outcome["fault"]
        self.sizes.add(call["head_size"])
        if outcome["synchronises"]:
            self.synchronises[call["feature"]] += 1
        if outcome.get("refused"):
            self.refused += 1
            return
        if fault is not None:
            self.failed += 1
            causal = "causal " if call["causal"] else ""
            self.kinds[f"{call['dtype']} {call['head_size']} {causal}{call['feature']}: {fault[:90]}"] += 1
            if len(self.faults) < MOST_FAULTS:
                self.faults.append({"call": call, "fault": fault})
            return
        self.passed += 1
        worst = self.errors.setdefault(call["dtype"], {})
        for name, error in outcome["errors"].items():
            worst[name] = max(worst.get(name, 0.0), float(f"{error:.3g}"))


def summary(outcomes: Iterable[Mapping[str, Any]], claims: Mapping[str, Any]) -> dict[str, Any]:
    """By claim: what it claims, how many calls passed, and the largest errors."""
    found: dict[str, Found] = defaultdict(Found)
    for outcome in outcomes:
        found[outcome["claim"]].add(outcome)
    return {
        name: {
            "takes": takes,
            "head_sizes": sorted(found[name].sizes),
            "passed": found[name].passed,
            "failed": found[name].failed,
            "refused_by_its_plan": found[name].refused,
            "largest_errors": found[name].errors,
            "waits_for_the_device": dict(found[name].synchronises),
            "faults": found[name].faults,
            "kinds_of_faults": dict(found[name].kinds.most_common(40)),
        }
        for name, takes in claims.items()
    }
