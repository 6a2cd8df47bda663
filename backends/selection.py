"""What a selection is, as a value that travels from the ranks to the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from backends.options import Blocks
from backends.requirements import Kind, Requirements
from backends.variant import Exactness
from configs.faults import Fault

Source = Literal["role", "parent", "category", "default", "platform", "agreed", "model"]
"""Which entry decided; `model`: the model brings its own attention (`custom_attention`)."""


@dataclass(frozen=True)
class Rejected:
    """A backend that was considered before the chosen one, and why it does not serve. variant: if it is only that."""

    backend: str
    faults: tuple[Fault, ...]
    variant: str = ""


@dataclass(frozen=True)
class RejectedStrategy:
    """A strategy that was considered before the chosen one, and why it does not serve: `ring 1x3`, degrees included."""

    strategy: str
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class Choice:
    """What serves a role, as far as ranks must share it."""

    backend: str
    variant: str
    class_path: str
    options: Blocks = ()


@dataclass(frozen=True)
class Candidates:
    """Everything that a role could get on one device if its ranks settle on it, best first, and what it could not."""

    valid: tuple[Choice, ...]
    rejected: tuple[Rejected, ...]


@dataclass(frozen=True)
class Agreed:
    """What all ranks settled on for a role. rejected: what would have come before it on some of them."""

    choice: Choice
    rejected: tuple[Rejected, ...] = ()


RoleKey = tuple[str, Requirements]
Agreement = Mapping[RoleKey, Agreed]


@dataclass(frozen=True)
class Selection:
    """Which backend serves a role, who asked for it, and what was turned down on the way.

    requested: the backend named by the configuration; None when the platform chose. source: which entry decided. key,
    origin: the configuration key that decided and where it was set; empty when nothing was set. options: the
    backend's own blocks, as it reads them. degrees: Ulysses x ring, of the strategy that it was chosen for.
    exchange_dtype: what carries Q, V and the output between ranks, `same` or `fp8`. exactness: of both together.
    """

    role: str
    kind: Kind
    category: str
    requirements: Requirements
    requested: str | None
    backend: str
    variant: str
    class_path: str
    source: Source
    key: str
    origin: str
    exactness: Exactness
    rejected: tuple[Rejected, ...] = ()
    options: Blocks = ()
    degrees: tuple[int, int] = (1, 1)
    rejected_strategies: tuple[RejectedStrategy, ...] = ()
    exchange_dtype: str = "same"
