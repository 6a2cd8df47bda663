"""Who holds which rows and heads: a pure function of global facts. No torch here, and no communication."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from configs.faults import Fault, FaultError

Strategy = Literal["local", "ulysses"]
QKV = 3


def split(length: int, parts: int) -> tuple[range, ...]:
    """`length` items over `parts` owners, in order, no padding; the first `length % parts` owners hold one more."""
    size, extra = divmod(length, parts)
    starts = [part * size + min(part, extra) for part in range(parts + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def usable_world_sizes(heads: int, limit: int | None = None) -> tuple[int, ...]:
    """The numbers of ranks that divide `heads`, up to `limit`."""
    top = heads if limit is None else min(heads, limit)
    return tuple(size for size in range(1, top + 1) if heads % size == 0)


def head_fault(heads: int, world_size: int, origin: str = "") -> Fault | None:
    """The fault of a number of ranks that does not divide the heads; None if it does."""
    if heads % world_size == 0:
        return None
    usable = tuple(map(str, usable_world_sizes(heads)))
    rule = f"{world_size} ranks do not divide the model's {heads} attention heads"
    return Fault("parallel.world_size", world_size, rule, f"use {' or '.join(usable)}", usable, origin)


@dataclass(frozen=True)
class ExchangeCounts:
    """Items that one rank sends to, and receives from, each rank in one all-to-all."""

    sends: tuple[int, ...]
    receives: tuple[int, ...]

    def times(self, factor: int) -> ExchangeCounts:
        return ExchangeCounts(
            tuple(count * factor for count in self.sends), tuple(count * factor for count in self.receives)
        )


@dataclass(frozen=True)
class ShardPlan:
    """How one stream's rows and one layer's heads lie over the ranks.

    rows[r]: the rows of the sequence that rank r holds outside attention. heads[r]: the heads that rank r computes
    inside it. Every rank derives the same plan from the global length, so no sizes are ever exchanged.
    """

    rows: tuple[range, ...]
    heads: tuple[range, ...]

    @property
    def world_size(self) -> int:
        return len(self.rows)

    @property
    def length(self) -> int:
        return self.rows[-1].stop

    @property
    def num_heads(self) -> int:
        return self.heads[-1].stop

    def scatter_heads(self, rank: int) -> ExchangeCounts:
        """Packed Q, K and V: my rows of everybody's heads against everybody's rows of my heads; in (row, head)
        pairs.
        """
        mine, my_heads = len(self.rows[rank]), len(self.heads[rank])
        return ExchangeCounts(
            tuple(QKV * mine * len(heads) for heads in self.heads),
            tuple(QKV * len(rows) * my_heads for rows in self.rows),
        )

    def gather_heads(self, rank: int) -> ExchangeCounts:
        """The output on its way back; in (row, head) pairs."""
        mine, my_heads = len(self.rows[rank]), len(self.heads[rank])
        return ExchangeCounts(
            tuple(len(rows) * my_heads for rows in self.rows),
            tuple(mine * len(heads) for heads in self.heads),
        )

    def gather_rows(self, rank: int) -> ExchangeCounts:
        """Every rank's rows to every rank; in rows."""
        mine = len(self.rows[rank])
        return ExchangeCounts((mine,) * self.world_size, tuple(len(rows) for rows in self.rows))

    def sent_pairs(self, rank: int) -> int:
        """(row, head) pairs that leave a rank in one attention call: Q, K and V on the way in, the output on the way
        back.
        """
        mine, my_heads = len(self.rows[rank]), len(self.heads[rank])
        return QKV * mine * (self.num_heads - my_heads) + (self.length - mine) * my_heads

    def sent_rows(self, rank: int) -> int:
        """Rows that leave a rank in one gathering of rows."""
        return len(self.rows[rank]) * (self.world_size - 1)


def plan_sequence(length: int, heads: int, world_size: int) -> ShardPlan:
    """The plan of a sharded sequence. Raises FaultError if the ranks do not divide the heads."""
    fault = head_fault(heads, world_size)
    if fault is not None:
        raise FaultError([fault])
    return ShardPlan(split(length, world_size), split(heads, world_size))
