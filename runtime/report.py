"""What every rank selected, and why, merged into one report; pure functions, no torch and no Ray.

`merge` reports what ran (from the ranks' events); `from_selections` reports what would run. Both follow
docs/selection.schema.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from backends.options import as_mappings
from backends.selection import Selection
from parallel.events import AttentionRan
from parallel.plan import Strategy

VERSION = 1
COMPARED = ("backend", "variant", "class_path", "kernel", "strategy")
"""What ranks have to share for one (model, role), beside the number of layers; named as the report's fields."""


@dataclass(frozen=True)
class SelectionEntry:
    """One outcome of one (model, role, requirements); the fields are those of an entry in docs/selection.schema.json.

    kernel and ranks are None when nothing has run yet. layers: how many distinct layers had this outcome, on any rank.
    """

    model: str
    role: str
    requirements: Mapping[str, Any]
    kind: str
    category: str
    requested: str | None
    backend: str
    variant: str
    class_path: str
    kernel: str | None
    source: str
    key: str
    origin: str
    strategy: str
    degrees: Mapping[str, int]
    options: Mapping[str, Any]
    exchange_dtype: str
    exactness: str
    layers: int
    ranks: tuple[int, ...] | None
    rejected: tuple[Mapping[str, Any], ...]
    rejected_strategies: tuple[Mapping[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            **{entry.name: getattr(self, entry.name) for entry in fields(self)},
            "requirements": dict(self.requirements),
            "degrees": dict(self.degrees),
            "options": dict(self.options),
            "ranks": None if self.ranks is None else list(self.ranks),
            "rejected": [dict(rejected) for rejected in self.rejected],
            "rejected_strategies": [dict(rejected) for rejected in self.rejected_strategies],
        }


@dataclass(frozen=True)
class Side:
    """Ranks that had the same value."""

    ranks: tuple[int, ...]
    value: Any


@dataclass(frozen=True)
class Disagreement:
    """Something that ranks have to share and did not. entry: `model/role`. field: of the entry, or `present`."""

    entry: str
    field: str
    values: tuple[Side, ...]

    def __str__(self) -> str:
        sides = ", ".join(f"{_ranks_label(side.ranks)} {_value_text(self.field, side.value)}" for side in self.values)
        return f"{self.entry}, {self.field}: {sides}"

    def to_dict(self) -> dict[str, Any]:
        values = [{"ranks": list(side.ranks), "value": side.value} for side in self.values]
        return {"entry": self.entry, "field": self.field, "values": values}


@dataclass(frozen=True)
class SelectionReport:
    """The content of selection.json."""

    world_size: int
    entries: tuple[SelectionEntry, ...] = ()
    disagreements: tuple[Disagreement, ...] = ()

    @property
    def agreed(self) -> bool:
        return not self.disagreements

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "world_size": self.world_size,
            "agreed": self.agreed,
            "entries": [entry.to_dict() for entry in self.entries],
            "disagreements": [disagreement.to_dict() for disagreement in self.disagreements],
        }


def selection_fields(selection: Selection) -> dict[str, Any]:
    """A selection as plain values, with its requirements as a mapping and the rejected backends' faults as text."""
    return {
        "role": selection.role,
        "requirements": selection.requirements.to_dict(),
        "kind": selection.kind,
        "category": selection.category,
        "requested": selection.requested,
        "backend": selection.backend,
        "variant": selection.variant,
        "class_path": selection.class_path,
        "source": selection.source,
        "key": selection.key,
        "origin": selection.origin,
        "exchange_dtype": selection.exchange_dtype,
        "exactness": selection.exactness,
        "options": as_mappings(selection.options),
        "degrees": {"ulysses": selection.degrees[0], "ring": selection.degrees[1]},
        "rejected_strategies": tuple(
            {"strategy": rejected.strategy, "faults": [fault.rule for fault in rejected.faults]}
            for rejected in selection.rejected_strategies
        ),
        "rejected": tuple(
            {"backend": rejected.backend, "faults": [fault.rule for fault in rejected.faults]}
            for rejected in selection.rejected
        ),
    }


@dataclass
class _Outcome:
    """What is collected for an entry before it is frozen."""

    selection: Selection
    layers: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)


def merge(events: Iterable[tuple[int, AttentionRan]], world_size: int) -> SelectionReport:
    """The report of what ran, from every rank's (rank, event).

    One entry for each (model, role, requirements), and one for each outcome where ranks or layers differ in it, so that
    no entry speaks for a rank that ran something else. Raises ValueError for a rank outside the world.
    """
    ordered = sorted(events, key=lambda item: item[0])  # ranks report in any order; the report has one
    outcomes: dict[tuple[Any, ...], _Outcome] = {}
    for rank, event in ordered:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} reported a selection, and the world has ranks 0 to {world_size - 1}")
        key = (event.model, replace(event.selection, rejected=(), rejected_strategies=()), event.strategy, event.kernel)
        outcome = outcomes.setdefault(key, _Outcome(event.selection))
        outcome.layers.add(event.layer)
        outcome.ranks.add(rank)
    entries = tuple(
        _entry(model, outcome.selection, strategy, kernel, len(outcome.layers), tuple(sorted(outcome.ranks)))
        for (model, _, strategy, kernel), outcome in outcomes.items()
    )
    return SelectionReport(world_size, entries, _disagreements(ordered, world_size))


def from_selections(world_size: int, rows: Iterable[tuple[str, Selection, Strategy, int]]) -> SelectionReport:
    """The report of what would run, from (model, selection, strategy, layers); there are no ranks and kernels yet."""
    merged: dict[tuple[Any, ...], SelectionEntry] = {}
    for model, selection, strategy, layers in rows:
        key = (model, replace(selection, rejected=(), rejected_strategies=()), strategy)
        before = merged[key].layers if key in merged else 0
        merged[key] = _entry(model, selection, strategy, None, before + layers, None)
    return SelectionReport(world_size, tuple(merged.values()))


def _entry(
    model: str, selection: Selection, strategy: Strategy, kernel: str | None, layers: int, ranks: tuple[int, ...] | None
) -> SelectionEntry:
    return SelectionEntry(
        **selection_fields(selection),
        model=model,
        strategy=strategy,
        kernel=kernel,
        layers=layers,
        ranks=ranks,
    )


def _disagreements(events: Sequence[tuple[int, AttentionRan]], world_size: int) -> tuple[Disagreement, ...]:
    calls: dict[tuple[str, str], dict[int, list[AttentionRan]]] = {}
    for rank, event in events:
        calls.setdefault((event.model, event.selection.role), {}).setdefault(rank, []).append(event)
    found = []
    for (model, role), by_rank in calls.items():
        compared: dict[str, dict[int, Any]] = {"present": {rank: rank in by_rank for rank in range(world_size)}}
        for name in COMPARED:
            compared[name] = {rank: _over_layers(name, ran) for rank, ran in by_rank.items()}
        compared["layers"] = {rank: len({event.layer for event in ran}) for rank, ran in by_rank.items()}
        for name, values in compared.items():
            sides = _sides(values)
            if len(sides) > 1:
                found.append(Disagreement(f"{model}/{role}", name, sides))
    return tuple(found)


def _over_layers(name: str, ran: Iterable[AttentionRan]) -> Any:
    """A rank's value if all its layers share it, else each layer's, so that ranks that swap two layers differ."""
    by_layer: dict[str, set[str]] = {}
    for event in ran:
        value = getattr(event if name in ("kernel", "strategy") else event.selection, name)
        by_layer.setdefault(event.layer, set()).add(value)
    distinct = set().union(*by_layer.values())
    if len(distinct) == 1:
        return distinct.pop()
    return {layer: " and ".join(sorted(values)) for layer, values in sorted(by_layer.items())}


def _sides(values: Mapping[int, Any]) -> tuple[Side, ...]:
    by_value: dict[str, tuple[list[int], Any]] = {}
    for rank, value in sorted(values.items()):
        by_value.setdefault(json.dumps(value, sort_keys=True), ([], value))[0].append(rank)
    return tuple(Side(tuple(ranks), value) for ranks, value in by_value.values())


def table_columns(report: SelectionReport) -> tuple[str, ...]:
    """The headings of `table_rows`: `model` only for several models, `exactness` only if an entry is lossy."""
    model = ("model",) if _several_models(report) else ()
    exactness = ("exactness",) if _is_lossy(report) else ()
    return (*model, "role", "backend", "source", "strategy", *exactness, "layers", "ranks", "kernel")


def table_rows(report: SelectionReport) -> list[tuple[str, ...]]:
    """The entries as text for printing, a cell for each of `table_columns`; `-` where nothing has run yet."""
    headings, rows = table_columns(report), []
    for entry in report.entries:
        source = f"{entry.source}: {entry.key}" if entry.key else entry.source
        cells = {
            "model": entry.model,
            "role": entry.role,
            "backend": f"{entry.backend} ({', '.join((entry.variant, *_option_words(entry.options)))})",
            "source": f"{source} [{entry.origin}]" if entry.origin else source,
            "strategy": _strategy_text(entry),
            "exactness": entry.exactness,
            "layers": str(entry.layers),
            "ranks": "-" if entry.ranks is None else compact_ranks(entry.ranks),
            "kernel": entry.kernel or "-",
        }
        rows.append(tuple(cells[heading] for heading in headings))
    return rows


def _strategy_text(entry: SelectionEntry) -> str:
    """The strategy, with its degrees where there are two, and what its exchange loses."""
    ulysses, ring = entry.degrees["ulysses"], entry.degrees["ring"]
    text = entry.strategy if 1 in (ulysses, ring) else f"{entry.strategy} {ulysses}x{ring}"
    return text if entry.exchange_dtype == "same" else f"{text}, {entry.exchange_dtype}"


def _option_words(options: Mapping[str, Any]) -> Iterator[str]:
    """`quant.dtype_qk=int8` for each field that is set."""
    return (f"{block}.{name}={value}" for block, fields in options.items() for name, value in fields.items())


def note_lines(report: SelectionReport) -> list[str]:
    """What the table does not show: strategies and backends that were passed over and why, once for all roles; what an
    exchange loses; and disagreements.
    """
    passed_over: dict[tuple[str, str], list[str]] = {}
    for entry in report.entries:
        for rejected in (*entry.rejected_strategies, *entry.rejected):
            for fault in rejected["faults"]:
                name = rejected["strategy"] if "strategy" in rejected else rejected["backend"]
                roles = passed_over.setdefault((name, fault), [])
                if entry.role not in roles:
                    roles.append(entry.role)
    notes = [f"{', '.join(roles)}: not {backend}: {fault}" for (backend, fault), roles in passed_over.items()]
    quantised = dict.fromkeys(entry.role for entry in report.entries if entry.exchange_dtype == "fp8")
    if quantised:
        notes.append(f"{', '.join(quantised)}: lossy: Q, V and the output go between ranks as fp8")
    return notes + [f"the ranks differ: {disagreement}" for disagreement in report.disagreements]


def compact_ranks(ranks: Iterable[int]) -> str:
    """`0-3`, or `0-1,3`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _ranks_label(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {compact_ranks(ranks)}"


def _value_text(name: str, value: Any) -> str:
    if name == "present":
        return "ran it" if value else "did not run it"
    if isinstance(value, Mapping):
        return "; ".join(f"{layer} {choice}" for layer, choice in value.items())
    return str(value)


def _is_lossy(report: SelectionReport) -> bool:
    return any(entry.exactness != "exact" for entry in report.entries)


def _several_models(report: SelectionReport) -> bool:
    return len({entry.model for entry in report.entries}) > 1
