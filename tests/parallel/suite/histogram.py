"""What the drawn calls were like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from tests.parallel.suite.drawn import Drawn
from tests.parallel.suite.judge import Verdict


def uneven_rows(case: Drawn) -> bool:
    """Whether a sharded stream leaves some ranks fewer rows than others."""
    return any(stream.sharded and stream.length % case.world_size for stream in case.streams)


def masked(case: Drawn) -> bool:
    return case.mask != "none" or case.bias != "none"


SHARES: Mapping[str, tuple[float, Callable[[Verdict], bool]]] = {
    "uneven S": (0.25, lambda verdict: uneven_rows(verdict.case)),
    "uneven heads": (0.25, lambda verdict: verdict.case.heads % verdict.degrees[0] != 0),
    "ring": (0.15, lambda verdict: verdict.strategy == "ring"),
    "U x ring": (0.15, lambda verdict: verdict.strategy == "ulysses_ring"),
    "joint": (0.15, lambda verdict: verdict.case.kind == "joint"),
    "masks": (0.15, lambda verdict: masked(verdict.case)),
    "P >= 3": (0.15, lambda verdict: verdict.case.world_size >= 3),
}
"""The least share of the calls that ran, and which calls count."""


def ran(verdicts: Iterable[Verdict]) -> list[Verdict]:
    return [verdict for verdict in verdicts if not verdict.refused]


def shares(verdicts: Sequence[Verdict]) -> dict[str, float]:
    return {name: sum(map(counts, verdicts)) / len(verdicts) for name, (_, counts) in SHARES.items()}


def lines(verdicts: Sequence[Verdict]) -> list[str]:
    """For people: shares, and how many calls there were of each sort."""
    running = ran(verdicts)
    told = [f"{len(running)} calls ran, and {len(verdicts) - len(running)} were refused by all ranks alike"]
    told += [f"  {name}: {share:.0%} (at least {SHARES[name][0]:.0%})" for name, share in shares(running).items()]
    return told + [f"  {name}: {_counted(map(sort, running))}" for name, sort in _SORTS.items()]


_SORTS: Mapping[str, Callable[[Verdict], str]] = {
    "strategy": lambda verdict: verdict.strategy,
    "ranks": lambda verdict: str(verdict.case.world_size),
    "degrees": lambda verdict: "x".join(map(str, verdict.degrees)),
    "kind": lambda verdict: verdict.case.kind + (", causal" if verdict.case.causal else ""),
    "mask": lambda verdict: verdict.case.mask,
    "beside a mask": lambda verdict: _beside(verdict.case),
    "backend": lambda verdict: verdict.case.backend or "auto",
    "dtype": lambda verdict: verdict.case.dtype,
    "layout of Q": lambda verdict: verdict.case.layouts[0],
    "heads": lambda verdict: _heads(verdict.case),
    "batch": lambda verdict: str(verdict.case.batch),
    "rows for each rank": lambda verdict: _rows(verdict.case),
    "asked for": lambda verdict: _asked(verdict.case),
}


def _counted(found: Iterable[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(Counter(found).items()))


def _beside(case: Drawn) -> str:
    carried = {
        "bias": case.bias != "none",
        "window": case.window is not None,
        "soft cap": case.soft_cap is not None,
        "sinks": case.sinks,
        "documents": case.documents > 0,
    }
    names = [name for name, there in carried.items() if there]
    return "nothing" if not names else names[0] if len(names) == 1 else "several"


def _heads(case: Drawn) -> str:
    if case.kv_heads == case.heads:
        return "all"
    return "one KV head" if case.kv_heads == 1 else "groups"


def _rows(case: Drawn) -> str:
    rows = sum(stream.length for stream in case.streams if stream.sharded)
    return "none" if not rows else "none for some" if rows < case.world_size else "some for all"


def _asked(case: Drawn) -> str:
    return " and ".join(["out", *(["lse"] if case.lse else []), *(["gradient"] if case.gradient else [])])
