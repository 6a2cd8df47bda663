"""The rows of a bench as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runtime.bench.results import Row


def plot(rows: Sequence[Row], path: Path) -> None:
    """A panel for each shape: a bar for each cell that was timed, with its quartiles and its efficiency, and a line
    where the baseline is. Cells without figures are left out.
    """
    from matplotlib.figure import Figure  # without pyplot, which would look for a display

    shapes = list(dict.fromkeys(str(row.case.shape) for row in rows if not row.case.is_baseline))
    panels = [[row for row in rows if str(row.case.shape) == shape and _is_bar(row)] for shape in shapes]
    heights = [max(len(panel), 1) for panel in panels]
    figure = Figure(figsize=(9, 1.2 * len(panels) + 0.36 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[height + 1.2 for height in heights])[:, 0]
    for axis, shape, panel in zip(axes, shapes, panels, strict=True):
        axis.set_title(f"{shape} (B x S x H x D)", loc="left", fontsize=10)
        axis.set_xlabel("ms", fontsize=9)
        axis.tick_params(labelsize=8)
        labels = [_label(row) for row in panel]
        times = [row.milliseconds or 0.0 for row in panel]
        spread = [
            [time - (row.low or time) for time, row in zip(times, panel, strict=True)],
            [(row.high or time) - time for time, row in zip(times, panel, strict=True)],
        ]
        places = range(len(panel))
        axis.barh(places, times, color="#4c78a8", xerr=spread, error_kw={"elinewidth": 1, "ecolor": "#444444"})
        axis.set_yticks(places, labels)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        for place, row in zip(places, panel, strict=True):
            if row.efficiency is not None:
                axis.text(row.high or 0.0, place, f"  {row.efficiency:.2f}", va="center", fontsize=8)
        baseline = next((row.baseline_ms for row in panel if row.baseline_ms), None)
        if baseline is not None:
            axis.axvline(baseline, color="#e45756", linewidth=1.2, label="kernel alone, H/P heads")
            axis.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2, frameon=False)
    figure.savefig(path, dpi=120)


def _label(row: Row) -> str:
    if row.checked is None:
        return str(row.case)
    plan, strategy = row.case.plan, row.checked.strategy
    return f"{plan if plan == strategy else f'{plan}: {strategy}'}, {row.checked.backend}"


def _is_bar(row: Row) -> bool:
    return row.milliseconds is not None and not row.case.is_baseline
