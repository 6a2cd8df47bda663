"""Draws the rows of a bench as bars."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.bench.record import Facts
from runtime.bench.results import Row

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with colour blindness tell apart, then some of Paul Tol's.
COLOURS = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#f0e442", "#d55e00"),
    *("#332288", "#999933", "#882255", "#999999", "#ddcc77"),
)
LONGEST_REASON = 120
EFFICIENCY = "efficiency = time of the kernel alone / time of the call; at 100% the exchange costs nothing"
BASELINE_LABEL = "kernel alone: one rank's share of the heads, no exchange"


def plot(rows: Sequence[Row], facts: Facts, path: Path) -> None:
    """Write `figure_of` as a picture in the format of the path's suffix."""
    figure_of(rows, facts).savefig(path, dpi=120)


def figure_of(rows: Sequence[Row], facts: Facts) -> Figure:
    """Draw a panel for each shape with a row for each cell, and a line at the baseline's time.

    A timed cell is a bar of its median with a whisker between its quartiles, followed by the milliseconds and the
    efficiency. A cell without figures is a hatched box with its outcome and a short reason.

    Args:
        rows: The cells of the grid, baselines included.
        facts: Device, dtype and ranks, for the title.

    Returns:
        The figure; it belongs to no display.
    """
    from matplotlib.figure import Figure  # without pyplot, which would look for a display
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    cells = [row for row in rows if not row.case.is_baseline]
    colours = _colours(cells)
    panels: dict[str, list[Row]] = {}
    for row in cells:
        panels.setdefault(str(row.case.shape), []).append(row)
    heights = [0.34 * len(panel) + 0.95 for panel in panels.values()]
    figure = Figure(figsize=(10, sum(heights) + 1.5), layout="constrained")
    figure.suptitle(_title(facts), x=0.01, ha="left", fontsize=10)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (shape, panel) in zip(axes, panels.items(), strict=True):
        _draw(axis, shape, panel, colours)
    entries: list[Artist] = [Patch(facecolor=colour, label=backend) for backend, colour in colours.items()]
    entries.append(Line2D([], [], color="#444444", linewidth=1, label="quartiles"))
    if any(row.baseline_ms for row in cells):
        entries.append(Line2D([], [], color="black", linewidth=1.4, linestyle="--", label=BASELINE_LABEL))
    if any(row.milliseconds is None for row in cells):
        entries.append(Patch(facecolor="white", edgecolor="#999999", hatch="////", label="not timed"))
    figure.legend(handles=entries, loc="outside lower left", ncols=3, fontsize=8, frameon=False)
    return figure


def _draw(axis: Axes, shape: str, panel: Sequence[Row], colours: Mapping[str, str]) -> None:
    """Draw the panel of one shape."""
    kv_heads = " x KV heads" if shape.count("x") == 4 else ""
    axis.set_title(f"{shape}  (batch x rows x heads x head size{kv_heads})", loc="left", fontsize=10)
    axis.set_xlabel("milliseconds per call, median of the rounds (shorter is better)", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.set_yticks(range(len(panel)), [_label(row) for row in panel])
    axis.set_ylim(len(panel) - 0.4, -0.6)
    longest = max((row.high or 0.0 for row in panel), default=0.0) or 1.0
    axis.set_xlim(0, longest * 1.35)  # room for the figures behind the longest bar
    for place, row in enumerate(panel):
        if row.milliseconds is None:
            axis.barh(place, longest * 1.35, color="white", edgecolor="#cccccc", hatch="////", height=0.7)
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            axis.text(longest * 0.02, place, _reason(row), va="center", fontsize=7.5, color="#444444", bbox=box)
            continue
        low, high = row.low or row.milliseconds, row.high or row.milliseconds
        axis.barh(place, row.milliseconds, color=colours[_backend(row)], height=0.7)
        axis.hlines(place, low, high, color="#444444", linewidth=1)
        axis.text(high, place, f"  {_figures(row)}", va="center", fontsize=8)
    baseline = next((row.baseline_ms for row in panel if row.baseline_ms), None)
    if baseline is not None:
        axis.axvline(baseline, color="black", linewidth=1.4, linestyle="--")


def _title(facts: Facts) -> str:
    ranks, nodes = len(facts.places), len({place.node_id for place in facts.places})
    device = facts.device.name or facts.device.label
    where = f"{ranks} rank{'s' if ranks > 1 else ''} on {nodes} node{'s' if nodes > 1 else ''}"
    causal = "causal attention" if facts.causal else "attention"
    return f"raylysses bench: {causal}, {facts.dtype}, {where}, {device}, {facts.rounds} rounds\n{EFFICIENCY}"


def _figures(row: Row) -> str:
    time = f"{row.milliseconds:.3g} ms"
    return time if row.efficiency is None else f"{time}, efficiency {row.efficiency:.0%}"


def _reason(row: Row) -> str:
    text = f"{row.outcome}: {row.why}" if row.why else row.outcome
    return textwrap.shorten(text, LONGEST_REASON, placeholder="\u2026")


def _label(row: Row) -> str:
    plan, strategy = row.case.plan, None if row.checked is None else row.checked.strategy
    return f"{plan if strategy in (None, plan) else f'{plan}: {strategy}'}, {_backend(row)}"


def _backend(row: Row) -> str:
    return row.case.backend if row.checked is None else row.checked.backend


def _colours(cells: Sequence[Row]) -> dict[str, str]:
    """A colour for each backend that was timed."""
    backends = dict.fromkeys(_backend(row) for row in cells if row.milliseconds is not None)
    return {backend: COLOURS[place % len(COLOURS)] for place, backend in enumerate(backends)}
