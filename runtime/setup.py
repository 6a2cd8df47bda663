"""What a rank is told, what it answers, and whether the answers agree; plain values, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.interface import Selection
from backends.platforms.facts import DeviceFacts
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


@dataclass(frozen=True)
class Wired:
    """What a rank has resolved on its own facts, before any collective of the model: a selection and its layers, by
    model.
    """

    rows: tuple[Row, ...]
    device: DeviceFacts


def disagreements(wired: Mapping[int, Wired], places: Sequence[RankPlace]) -> tuple[str, ...]:
    """A line for each role that ranks resolved differently, with both sides and their facts."""
    first = wired[0]
    lines = []
    for rank, other in sorted(wired.items()):
        for mine, theirs in zip(first.rows, other.rows, strict=False):
            if _choice(mine) != _choice(theirs):
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
