"""The rows of a bench as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.bench.results import Row
from runtime.progress import aligned

HEADINGS = ("shape", "plan", "backend", "strategy", "ms", "quartiles", "efficiency", "error", "sent MiB")


def lines_of(rows: Sequence[Row]) -> list[str]:
    """Formats the results of a bench.

    Args:
        rows: The cells of the grid; the baselines precede the cells of their shape.

    Returns:
        The table, with the column `exactness` only if a cell is lossy, and below it why cells have no figures.
    """
    lossy = any(row.checked is not None and row.checked.exactness != "exact" for row in rows)
    table = [HEADINGS, *(_cells(row) for row in rows)]
    if lossy:
        exactness = ("-" if row.checked is None else row.checked.exactness for row in rows)
        table = [(*cells, cell) for cells, cell in zip(table, ("exactness", *exactness), strict=True)]
    cells: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.why:
            cells.setdefault((row.outcome, row.why), []).append(str(row.case))
    return [*aligned(table), *(f"{outcome}: {why}  [{', '.join(of)}]" for (outcome, why), of in cells.items())]


def _cells(row: Row) -> tuple[str, ...]:
    shape = str(row.case.shape)
    checked = row.checked
    if checked is None:
        return (shape, row.case.plan, row.case.backend, "-", row.outcome, "-", "-", "-", "-")
    strategy = "-" if row.case.is_baseline else f"{checked.strategy} {checked.degrees[0]}x{checked.degrees[1]}"
    backend = f"{checked.backend} ({checked.variant})"
    figures = (row.milliseconds, row.low, row.high)
    return (
        shape,
        row.case.plan,
        backend,
        strategy,
        row.outcome if row.milliseconds is None else f"{row.milliseconds:.4g}",
        "-" if None in figures else f"{row.low:.4g}-{row.high:.4g}",
        "-" if row.efficiency is None or row.case.is_baseline else f"{row.efficiency:.3f}",
        f"{checked.error:.1e}",
        "-" if row.case.is_baseline else f"{checked.bytes_sent / 2**20:.4g}",
    )
