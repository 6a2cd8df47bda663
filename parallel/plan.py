"""Who holds which rows and heads: a pure function of global facts. No torch here, and no communication."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Strategy = Literal["local", "ulysses"]


def split(length: int, parts: int) -> tuple[range, ...]:
    """`length` items over `parts` owners, in order, no padding; the first `length % parts` owners hold one more."""
    size, extra = divmod(length, parts)
    starts = [part * size + min(part, extra) for part in range(parts + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def usable_world_sizes(heads: int, limit: int | None = None) -> tuple[int, ...]:
    """The numbers of ranks that divide `heads`, up to `limit`."""
    top = heads if limit is None else min(heads, limit)
    return tuple(size for size in range(1, top + 1) if heads % size == 0)


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each rank of a Ulysses group computes.

    query[r] and kv[r] are half-open ranges of global head indices. Query head i always reads KV head i // (H // Hkv),
    so a KV head that several ranks need stands in each of their ranges (replication), never padded. A rank may have
    none. group: H // Hkv.
    """

    query: tuple[range, ...]
    kv: tuple[range, ...]
    group: int

    @property
    def num_heads(self) -> int:
        return self.query[-1].stop

    @property
    def even(self) -> bool:
        """Whether all ranks have equally many heads, and no KV head goes to two: one strided copy packs them."""
        sizes = {(len(query), len(kv)) for query, kv in zip(self.query, self.kv, strict=True)}
        return len(sizes) == 1 and sum(map(len, self.kv)) == self.num_kv_heads

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads // self.group

    def heads_at(self, rank: int) -> int:
        """Heads that a rank gets of Q, K and V together: what it costs to send it one row."""
        return len(self.query[rank]) + 2 * len(self.kv[rank])

    def kv_of(self, rank: int) -> tuple[int, ...] | None:
        """For each query head of a rank, which of its KV heads it reads; None where a kernel works it out itself, as
        the rank's query heads are whole groups or lie within one.
        """
        mine, first = self.query[rank], self.kv[rank].start
        reads = tuple(head // self.group - first for head in mine)
        kernel_reads = len(mine) // max(len(self.kv[rank]), 1)
        if not reads or reads == tuple(i // kernel_reads for i in range(len(mine))):
            return None
        return reads

    @property
    def expands(self) -> bool:
        """Whether some rank's KV heads have to be repeated for its kernel; then those of all are, to be alike."""
        return any(self.kv_of(rank) is not None for rank in range(len(self.query)))

    @property
    def largest(self) -> tuple[int, int]:
        """Query and KV heads as the kernel of the busiest rank gets them."""
        rank = max(range(len(self.query)), key=lambda r: len(self.query[r]))
        return len(self.query[rank]), len(self.query[rank]) if self.expands else len(self.kv[rank])


def split_heads(heads: int, kv_heads: int, world_size: int) -> HeadSplit:
    """Heads over ranks, as evenly as can be; whole KV groups where the ranks divide the KV heads."""
    group = heads // kv_heads
    query = split(heads, world_size)
    kv = tuple(range(q.start // group, -(-q.stop // group)) if q else range(0, 0) for q in query)
    return HeadSplit(query, kv, group)


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

    rows[r]: the rows of the sequence that rank r holds outside attention. heads: those that each rank computes inside
    it. Every rank derives the same plan from the global length, so no sizes are ever exchanged.
    """

    rows: tuple[range, ...]
    heads: HeadSplit

    @property
    def world_size(self) -> int:
        return len(self.rows)

    @property
    def length(self) -> int:
        return self.rows[-1].stop

    @property
    def num_heads(self) -> int:
        return self.heads.num_heads

    def scatter_heads(self, rank: int) -> ExchangeCounts:
        """Packed Q, K and V: my rows of everybody's heads against everybody's rows of my heads; in (row, head)
        pairs.
        """
        mine = len(self.rows[rank])
        return ExchangeCounts(
            tuple(mine * self.heads.heads_at(other) for other in range(self.world_size)),
            tuple(len(rows) * self.heads.heads_at(rank) for rows in self.rows),
        )

    def gather_heads(self, rank: int) -> ExchangeCounts:
        """The output on its way back; in (row, head) pairs."""
        mine, my_heads = len(self.rows[rank]), len(self.heads.query[rank])
        return ExchangeCounts(
            tuple(len(rows) * my_heads for rows in self.rows),
            tuple(mine * len(heads) for heads in self.heads.query),
        )

    def gather_rows(self, rank: int) -> ExchangeCounts:
        """Every rank's rows to every rank; in rows."""
        mine = len(self.rows[rank])
        return ExchangeCounts((mine,) * self.world_size, tuple(len(rows) for rows in self.rows))

    def sent_pairs(self, rank: int) -> int:
        """(row, head) pairs that leave a rank in one attention call: Q, K and V on the way in, the output on the way
        back.
        """
        there, back = self.scatter_heads(rank).sends, self.gather_heads(rank).sends
        return sum(there) - there[rank] + sum(back) - back[rank]

    def sent_rows(self, rank: int) -> int:
        """Rows that leave a rank in one gathering of rows."""
        return len(self.rows[rank]) * (self.world_size - 1)


def plan_sequence(length: int, heads: int, world_size: int, kv_heads: int | None = None) -> ShardPlan:
    """The plan of a sharded sequence. heads, kv_heads: of the whole layer; kv_heads divide heads."""
    return ShardPlan(split(length, world_size), split_heads(heads, kv_heads or heads, world_size))
