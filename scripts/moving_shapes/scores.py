"""Verdicts on many videos: how often each attribute is right, how sure that is, and what is taken for what."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moving_shapes.judge import Verdict

ATTRIBUTES = ("colour", "shape", "direction")
CONFIDENCE = 0.95
_QUANTILE = 1.959964
"""Of the normal distribution, for CONFIDENCE on two sides."""


@dataclass(frozen=True)
class Trial:
    """One video that was asked for and judged."""

    prompt: str
    seed: int
    expected: Verdict
    seen: Verdict


def interval(right: int, count: int) -> tuple[float, float]:
    """The score interval of a proportion (Wilson 1927), at CONFIDENCE."""
    share, spread = right / count, _QUANTILE**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = _QUANTILE * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def confusion(trials: Sequence[Trial], attribute: str) -> dict[str, dict[str, int]]:
    """How often each expected value was seen as what. The two things of a crossing count one by one, by position in
    the alphabet of colours, unless another number of things was seen.
    """
    counts: dict[str, Counter[str]] = {}
    for trial in trials:
        expected, seen = (getattr(verdict, attribute) for verdict in (trial.expected, trial.seen))
        pairs = list(zip(expected.split("+"), seen.split("+"), strict=False))
        if expected.count("+") != seen.count("+"):
            pairs = [(expected, seen)]
        for wanted, found in pairs:
            counts.setdefault(wanted, Counter())[found] += 1
    return {wanted: dict(sorted(counts[wanted].items())) for wanted in sorted(counts)}


def scores(trials: Sequence[Trial]) -> dict[str, Any]:
    """Accuracy, interval and confusion by attribute, the number of trials, and the trials themselves, as JSON takes it.

    Raises ValueError without trials.
    """
    if not trials:
        raise ValueError("no trials: there is nothing to score")
    right = {name: sum(getattr(t.expected, name) == getattr(t.seen, name) for t in trials) for name in ATTRIBUTES}
    return {
        "accuracy": {name: right[name] / len(trials) for name in ATTRIBUTES},
        "interval": {name: list(interval(right[name], len(trials))) for name in ATTRIBUTES},
        "confidence": CONFIDENCE,
        "n": len(trials),
        "confusion": {name: confusion(trials, name) for name in ATTRIBUTES},
        "trials": [asdict(trial) for trial in trials],
    }


def differences(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where two lists of trials of the same videos, as `scores` writes them, have different verdicts."""
    found = []
    for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        if mine["seen"] != theirs["seen"]:
            found.append(
                f"trial {number} ({mine['prompt']}): {_words(mine['seen'])} here, {_words(theirs['seen'])} there"
            )
    return found


def _words(seen: Mapping[str, str]) -> str:
    return " ".join(seen[name] for name in ATTRIBUTES)


def table(result: Mapping[str, Any]) -> str:
    """The scores as lines of text: accuracies first, then what was mistaken for what."""
    lines = [f"{'attribute':10} {'right':>9}  {'accuracy':>8}  {CONFIDENCE:.0%} interval"]
    for name in ATTRIBUTES:
        accuracy, (low, high), count = result["accuracy"][name], result["interval"][name], result["n"]
        lines.append(f"{name:10} {round(accuracy * count):4}/{count:<4}  {accuracy:8.1%}  {low:.1%} to {high:.1%}")
    for name in ATTRIBUTES:
        lines += ["", *_matrix(name, result["confusion"][name])]
    return "\n".join(lines)


def _matrix(name: str, counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    seen = sorted({found for row in counts.values() for found in row})
    first = max(len(f"{name}: asked for"), *(len(wanted) for wanted in counts))
    widths = [max(len(found), 4) for found in seen]
    lines = [f"{f'{name}: asked for':{first}}  " + "  ".join(f"{f:>{w}}" for f, w in zip(seen, widths, strict=True))]
    for wanted, row in counts.items():
        cells = "  ".join(f"{row.get(f) or '.':>{w}}" for f, w in zip(seen, widths, strict=True))
        lines.append(f"{wanted:{first}}  {cells}")
    return lines
