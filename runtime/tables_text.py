"""The feature tables as Markdown between two marks of a page, and the check that the page still says the same."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from configs.faults import Fault, FaultError
from runtime.tables import DEVICES, FeatureRow, Tables

BEGIN = "<!-- feature tables: begin; `raylysses backends --write FILE` makes what follows -->"
END = "<!-- feature tables: end -->"
SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
FEATURES = (
    *("causal", "bias", "window", "soft_cap", "sinks", "grouped", "value_head_size", "packed"),
    *("lse", "gradient", "lse_gradient", "learned_gradient"),
)
FEATURE_TITLES = (
    *("causal", "additive mask", "window", "soft cap", "sinks", "GQA", "V size", "packed"),
    *("LSE", "gradient", "LSE's gradient", "gradient of masks and sinks"),
)


def markdown(tables: Tables) -> str:
    """Three tables: where each variant runs, what its calls may be, and the automatic order of each device."""
    chips = _table(
        ("backend", "variant", "version", "package", "devices", "exactness", "torch.compile", "run on hardware"),
        [_chip_cells(row) for row in tables.features],
    )
    calls = _table(
        ("backend", "variant", "dtypes", "head sizes", "masks", *FEATURE_TITLES, "strategies", "options"),
        [_call_cells(row) for row in tables.features],
    )
    order = _table(("devices", "automatic order, first that serves"), _order_cells(tables))
    return "\n\n".join((chips, calls, order))


def _chip_cells(row: FeatureRow) -> tuple[str, ...]:
    return (
        row.backend,
        row.variant,
        "-" if row.version is None else str(row.version),
        " or ".join(f"`{name}`" for name in row.packages) or "torch",
        compact_devices(row.devices),
        row.exactness,
        row.compilation,
        ", ".join(row.run_on) or "not run on hardware",
    )


def _call_cells(row: FeatureRow) -> tuple[str, ...]:
    return (
        row.backend,
        row.variant,
        ", ".join(SHORT[dtype] for dtype in row.dtypes),
        row.head_sizes,
        ", ".join(row.masks) or "no",
        *("yes" if getattr(row, name) else "no" for name in FEATURES),
        ", ".join(row.strategies),
        ", ".join(row.options) or "-",
    )


def _order_cells(tables: Tables) -> list[tuple[str, ...]]:
    """Devices of one platform that have one order share a row."""
    rows: list[tuple[str, ...]] = []
    for _, group in groupby(tables.priorities, lambda row: (row.device.partition(":")[0], row.backends)):
        members = list(group)
        marked = (f"{n} (if the layer allows it)" if n in members[0].permitted else n for n in members[0].backends)
        rows.append((compact_devices([row.device for row in members]), ", ".join(marked)))
    return rows


def compact_devices(labels: Sequence[str]) -> str:
    """`cpu; cuda 9.0, 10.0; npu`: the chips of a platform behind its name; `all` for the whole grid."""
    if tuple(labels) == DEVICES:
        return "all"
    parts = []
    for platform, group in groupby(labels, lambda label: label.partition(":")[0]):
        chips = [label.partition(":")[2] for label in group]
        parts.append(f"{platform} {', '.join(chips)}".strip())
    return "; ".join(parts)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def written(page: str, tables: Tables, path: Path, option: str) -> str:
    """The page with the tables between its marks. option: that named the page. Raises FaultError if it does not have
    both marks once.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        rule = "has no place for the tables"
        raise FaultError([Fault(option, path, rule, f"put the lines {BEGIN} and {END} there, once each")])
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{markdown(tables)}\n\n{END}{rest.split(END)[1]}"


def drift(page: str, tables: Tables, path: Path) -> list[str]:
    """The lines in which a page differs from what the predicates say, as a diff; none if it is true."""
    fresh = written(page, tables, path, "--check")
    lines = difflib.unified_diff(page.splitlines(), fresh.splitlines(), str(path), "what the backends say", "", "", 0)
    return list(lines)


def read_page(path: Path, option: str) -> str:
    """The text of a page. option: that named it. Raises FaultError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"it cannot be read ({getattr(error, 'strerror', None) or error})"
        raise FaultError([Fault(option, path, rule, "give a Markdown file")]) from error


def write_page(path: Path, content: str, option: str) -> None:
    """Replace a page. option: that named it. Raises FaultError if it cannot be written."""
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        rule = f"it cannot be written ({error.strerror})"
        raise FaultError([Fault(option, path, rule, "give a file that you may change")]) from error


def text(tables: Tables) -> str:
    """The same for a terminal: a paragraph for each variant, then the orders."""
    paragraphs = [_paragraph(row) for row in tables.features]
    orders = [f"  {devices:<44} {order}" for devices, order in _order_cells(tables)]
    return "\n\n".join((*paragraphs, "\n".join(("Automatic order, first that serves", *orders))))


def _paragraph(row: FeatureRow) -> str:
    titles = dict(zip(FEATURES, FEATURE_TITLES, strict=True))
    taken = [titles[name] for name in FEATURES if getattr(row, name)]
    refused = [titles[name] for name in FEATURES if not getattr(row, name)]
    lines = {
        "runs on": f"{compact_devices(row.devices)}; tests passed on: {', '.join(row.run_on) or 'no hardware'}",
        "package": " or ".join(row.packages) or "torch",
        "dtypes": ", ".join(SHORT[dtype] for dtype in row.dtypes),
        "head sizes": row.head_sizes,
        "masks": ", ".join(row.masks) or "no",
        "takes": ", ".join(taken) or "nothing more",
        "refuses": ", ".join(refused) or "nothing",
        "options": ", ".join(row.options) or "-",
        "result": f"{row.exactness}; torch.compile: {row.compilation}; strategies: {', '.join(row.strategies)}",
    }
    version = "" if row.version is None else f", version {row.version}"
    return "\n".join((f"{row.backend} ({row.variant}{version})", *(f"  {k:<11} {v}" for k, v in lines.items())))
