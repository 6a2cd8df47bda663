"""What a rank is told, what it answers, and whether the answers agree; plain values, no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from backends.platforms.facts import DeviceFacts
from backends.selection import Agreed, Agreement, Candidates, Choice, Rejected, RoleKey, Selection
from configs.faults import Fault
from configs.schema import RunConfig
from parallel.plan import Strategy
from runtime.errors import RankPlace

Row = tuple[str, Selection, Strategy, int]
"""Model, selection, strategy and number of layers of one role."""


@dataclass(frozen=True)
class RankSpec:
    """What a rank is told at set-up. dtype and platform are settled (`auto` is the driver's to decide).

    ordinal: of its GPU among those that the process sees. host: its node's address. several_nodes: whether the group
    spans more than one. store: host and port of the store that the first rank keeps.
    backends: name -> class path, the only ones that it knows. timeout_s: of joining, and of any collective.
    agreement: what the ranks settled on, once they have.
    """

    rank: int
    world_size: int
    platform: str
    ordinal: int
    host: str
    several_nodes: bool
    dtype: str
    pipeline: str
    store: tuple[str, int]
    timeout_s: float
    backends: Mapping[str, str]
    config: RunConfig
    agreement: Agreement = field(default_factory=dict)


@dataclass(frozen=True)
class Wired:
    """What a rank has resolved on its own facts, before any collective of the model: a selection and its layers, by
    model.

    candidates: of the roles that are left to the platform, or may fall back to it, all that this rank could run, best
    first.
    """

    rows: tuple[Row, ...]
    device: DeviceFacts
    candidates: Mapping[RoleKey, Candidates] = field(default_factory=dict)


def negotiate(resolved: Mapping[int, Wired], places: Sequence[RankPlace]) -> Agreement:
    """For each role that may be settled and ranks resolved differently, the first rank's best candidate that all have.

    A role without one is left out: it stays a disagreement.
    """
    settled: dict[RoleKey, Agreed] = {}
    if len({len(other.rows) for other in resolved.values()}) > 1:
        return settled  # other models: nothing to settle
    for index, row in enumerate(resolved[0].rows):
        key = (row[1].role, row[1].requirements)
        differing = any(_choice(row) != _choice(other.rows[index]) for other in resolved.values())
        if not differing or not all(key in other.candidates for other in resolved.values()):
            continue
        valid = {rank: other.candidates[key].valid for rank, other in resolved.items()}
        common = [choice for choice in valid[0] if all(choice in others for others in valid.values())]
        if common:
            settled[key] = Agreed(common[0], _passed_over(common[0], key, resolved, places))
    return settled


def _passed_over(
    chosen: Choice, key: RoleKey, resolved: Mapping[int, Wired], places: Sequence[RankPlace]
) -> tuple[Rejected, ...]:
    """What some ranks would have taken before the chosen one, and why others cannot."""
    better: dict[Choice, None] = {}
    for other in resolved.values():
        valid = other.candidates[key].valid
        better |= dict.fromkeys(valid[: valid.index(chosen)])
    return tuple(
        Rejected(choice.backend, _reasons(choice, other, key, places[rank]))
        for choice in better
        for rank, other in sorted(resolved.items())
        if choice not in other.candidates[key].valid
    )


def _reasons(choice: Choice, other: Wired, key: RoleKey, place: RankPlace) -> tuple[Fault, ...]:
    """Why a rank cannot run a choice of another one."""
    rejected = other.candidates[key].rejected
    listed = [r.faults for r in rejected if r.backend == choice.backend and r.variant in ("", choice.variant)]
    rule = f"{choice.backend}/{choice.variant} is not among the candidates of {other.device.label}"
    faults = listed[0] if listed else (Fault("device", other.device.label, rule, "name a backend for the role"),)
    return tuple(replace(fault, rule=f"on {place}: {fault.rule}") for fault in faults)


def disagreements(
    wired: Mapping[int, Wired], places: Sequence[RankPlace], settled: Collection[tuple[str, str]] = ()
) -> tuple[str, ...]:
    """A line for each role that ranks resolved differently, with both sides and their facts; settled: (model, role) of
    those that do not count.
    """
    first = wired[0]
    lines = []
    for rank, other in sorted(wired.items()):
        for mine, theirs in zip(first.rows, other.rows, strict=False):
            if _choice(mine) != _choice(theirs) and (mine[0], mine[1].role) not in settled:
                lines.append(
                    f"{mine[0]}/{mine[1].role}: {places[0]} chose {_choice_text(mine)} on {first.device.label} with "
                    f"{dict(first.device.packages)}; {places[rank]} chose {_choice_text(theirs)} on "
                    f"{other.device.label} with {dict(other.device.packages)}"
                )
        if len(first.rows) != len(other.rows):
            lines.append(f"{places[0]} has {len(first.rows)} roles, {places[rank]} has {len(other.rows)}")
    return tuple(lines)


def _choice(row: Row) -> tuple[Any, ...]:
    model, selection, strategy, layers = row
    return (model, selection.role, selection.backend, selection.variant, selection.class_path, strategy, layers)


def _choice_text(row: Row) -> str:
    return f"{row[1].backend}/{row[1].variant} ({row[2]}, {row[3]} layers)"
