"""The record of the grid as a table between two marks of a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BEGIN = "<!-- grid: begin; `scripts/check_backends.py --json FILE --page PAGE` makes what follows -->"
END = "<!-- grid: end -->"
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_TITLES = (
    *("backend, variant, options", "run", "head sizes", "calls that passed", "failed", "refused by its plan"),
    *("jobs that had no time", "largest errors", "waits for the device"),
)


def table(claims: Mapping[str, Any]) -> str:
    """A row for each claim. Errors: relative L2 of outputs and gradients, absolute of log-sum-exps."""
    rows = [_TITLES, ("---",) * len(_TITLES), *(_row(name, claim) for name, claim in sorted(claims.items()))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def written(page: str, claims: Mapping[str, Any]) -> str:
    """The page with the table between its marks. Raises ValueError if it does not have both once."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page has no place for the table: put the lines {BEGIN} and {END} there, once each")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table(claims)}\n\n{END}{rest.split(END)[1]}"


def _row(name: str, claim: Mapping[str, Any]) -> tuple[str, ...]:
    run = claim["run"]
    packages = "".join(f", {package} {version}" for package, version in claim["packages"].items())
    waits = claim["waits_for_the_device"]
    return (
        name,
        f"{run['date']}, {run['processor']}, torch {run['torch']}{packages}",
        ", ".join(map(str, claim["head_sizes"])),
        str(claim["passed"]),
        str(claim["failed"]),
        str(claim["refused_by_its_plan"]),
        str(len(run["unfinished"])),
        "; ".join(_errors(dtype, found) for dtype, found in claim["largest_errors"].items()),
        ", ".join(sorted(waits)) or "no",
    )


def _errors(dtype: str, found: Mapping[str, float]) -> str:
    return f"{_SHORT[dtype]}: " + ", ".join(f"{what.replace('_', ' ')} {error:.1e}" for what, error in found.items())
