"""Which heads each rank of a Ulysses group computes. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from parallel.rows import split


@dataclass(frozen=True)
class HeadSplit:
    """query[u] and kv[u] are half-open ranges of global head indices.

    Query head i always reads KV head i // (H // Hkv), so a KV head that several ranks need stands in each of their
    ranges (replication), never padded. A rank may have none. group: H // Hkv.
    """

    query: tuple[range, ...]
    kv: tuple[range, ...]
    group: int

    @property
    def num_heads(self) -> int:
        return self.query[-1].stop

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads // self.group

    @cached_property
    def even(self) -> bool:
        """Whether all ranks have equally many heads, and no KV head goes to two: one strided copy packs them."""
        sizes = {(len(query), len(kv)) for query, kv in zip(self.query, self.kv, strict=True)}
        return len(sizes) == 1 and sum(map(len, self.kv)) == self.num_kv_heads

    def heads_at(self, rank: int) -> int:
        """Heads that a rank gets of Q, K and V together: what it costs to send it one row."""
        return len(self.query[rank]) + 2 * len(self.kv[rank])

    def kv_of(self, rank: int) -> tuple[int, ...] | None:
        """For each query head of a rank, which of its KV heads it reads; None where a kernel works it out itself, as
        the rank's query heads are whole groups or lie within one.
        """
        mine, first = self.query[rank], self.kv[rank].start
        reads = tuple(head // self.group - first for head in mine)
        if not reads or reads == self._kernel_reads(rank):
            return None
        return reads

    def _kernel_reads(self, rank: int) -> tuple[int, ...]:
        heads = len(self.query[rank])
        share = heads // max(len(self.kv[rank]), 1)
        return tuple(head // share for head in range(heads))

    @cached_property
    def expands(self) -> bool:
        """Whether some rank's KV heads have to be repeated for its kernel; then those of all are, to be alike."""
        return any(self.kv_of(rank) is not None for rank in range(len(self.query)))

    @cached_property
    def expansion(self) -> tuple[tuple[int, ...] | None, ...]:
        """For each rank, the KV head that its kernel is given for each query head; None where it gets them as they
        are.
        """
        if not self.expands:
            return (None,) * len(self.query)
        return tuple(self.kv_of(rank) or self._kernel_reads(rank) or None for rank in range(len(self.query)))

    @property
    def largest(self) -> tuple[int, int]:
        """Query and KV heads as the kernel of the busiest rank gets them."""
        rank = max(range(len(self.query)), key=lambda r: len(self.query[r]))
        return len(self.query[rank]), len(self.query[rank]) if self.expands else len(self.kv[rank])


def split_heads(heads: int, kv_heads: int, ranks: int) -> HeadSplit:
    """Heads over ranks, as evenly as can be; whole KV groups where the ranks divide the KV heads."""
    group = heads // kv_heads
    query = split(heads, ranks)
    kv = tuple(range(q.start // group, -(-q.stop // group)) if q else range(0, 0) for q in query)
    return HeadSplit(query, kv, group)
