"""Who holds which rows and heads: a pure function of global facts. No torch here, and no communication."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal

from parallel.grid import ExchangeCounts, Grid, Stream
from parallel.heads import HeadSplit, split_heads
from parallel.rows import Rows, chain, rows, split

__all__ = [
    "ExchangeCounts",
    "ExchangeDtype",
    "Grid",
    "HeadSplit",
    "ShardPlan",
    "Share",
    "Strategy",
    "Stream",
    "plan_sequence",
    "plan_streams",
    "split",
    "split_heads",
    "usable_world_sizes",
]

Strategy = Literal["local", "ulysses", "ring", "ulysses_ring", "gather_kv", "ulysses_gather_kv"]
ExchangeDtype = Literal["same", "fp8"]
"""How Q, V and the output go through a Ulysses group: as they are, or as fp8 (`parallel.exchange`)."""


def usable_world_sizes(heads: int, limit: int | None = None) -> tuple[int, ...]:
    """The numbers of ranks that divide `heads`, up to `limit`."""
    top = heads if limit is None else min(heads, limit)
    return tuple(size for size in range(1, top + 1) if heads % size == 0)


@dataclass(frozen=True)
class Share:
    """What one rank holds and computes. Positions count through all streams of a plan in order: query positions through
    those that ask, key positions through all.

    query_rows, key_rows: what it holds outside attention. sent_queries, sent_keys: those of sharded streams among them.
    queries: what its Ulysses group asks. keys: the group's keys of sharded streams, which travel. fixed_keys: those of
    replicated streams, which never do. fixed_queries: those of `queries` that replicated streams ask; all ranks get
    their results.
    """

    query_rows: Rows
    key_rows: Rows
    sent_queries: Rows
    sent_keys: Rows
    queries: Rows
    keys: Rows
    fixed_queries: Rows
    fixed_keys: Rows


@dataclass(frozen=True)
class ShardPlan:
    """How the rows of streams and the heads of a layer lie over the ranks of a grid.

    heads: which each place of a Ulysses group computes. strategy: how a call moves what it needs. zigzag: of a sharded
    stream every ring place holds an early and a late piece, so that causal work is balanced; its rows are then two
    runs. exchange: what carries Q, V and the output. agreed: it is of a forward that all ranks have agreed on; calls
    with another plan are agreed on when the first of them comes. Every rank derives the same plan from global lengths,
    so no sizes are ever exchanged.
    """

    streams: tuple[Stream, ...]
    heads: HeadSplit
    grid: Grid
    strategy: Strategy
    zigzag: bool = False
    exchange: ExchangeDtype = "same"
    agreed: bool = False

    @property
    def world_size(self) -> int:
        return self.grid.size

    @property
    def num_heads(self) -> int:
        return self.heads.num_heads

    @cached_property
    def main(self) -> int:
        """The index of the first sharded stream."""
        return next((index for index, stream in enumerate(self.streams) if stream.sharded), 0)

    @property
    def length(self) -> int:
        """Of the first sharded stream."""
        return self.streams[self.main].length

    @property
    def rows(self) -> tuple[Rows, ...]:
        """The rows of the first sharded stream that each rank holds outside attention.

        Calls over several streams need `query_rows` and `key_rows`.
        """
        return self.held[self.main]

    def query_rows(self, rank: int) -> Rows:
        """Return the rows of a query tensor [B, Sq, ...] of all streams with queries that a rank holds, in order."""
        return self.shares[self._checked(rank)].query_rows

    def key_rows(self, rank: int) -> Rows:
        """Return the rows of a key or value tensor [B, Sk, ...] of all streams that a rank holds, in order."""
        return self.shares[self._checked(rank)].key_rows

    def stream_rows(self, stream: str | int, rank: int) -> Rows:
        """Return the rows of one stream's own tensor [B, S, ...] that a rank holds, in order.

        Args:
            stream: Its name, or its index among the plan's streams.
            rank: Rank of the mesh.

        Raises:
            ValueError: For a rank or a stream that the plan does not have, and a name that several streams have.
        """
        return self.held[self.index_of(stream)][self._checked(rank)]

    def index_of(self, stream: str | int) -> int:
        """Return the index of a stream, given by its name or its index. Raises ValueError as `stream_rows` does."""
        names = [each.name for each in self.streams]
        if type(stream) is int and 0 <= stream < len(names):
            return stream
        if isinstance(stream, str) and names.count(stream) == 1:
            return names.index(stream)
        if stream in names:
            raise ValueError(f"stream is {stream!r}; several streams of the plan have this name: give its index")
        raise ValueError(f"stream is {stream!r:.80}; the plan has {', '.join(names)}: give a name or an index")

    def _checked(self, rank: int) -> int:
        if type(rank) is int and 0 <= rank < self.world_size:
            return rank
        raise ValueError(f"rank is {rank!r:.80}; the plan is for ranks 0 to {self.world_size - 1}")

    @cached_property
    def held(self) -> tuple[tuple[Rows, ...], ...]:
        """held[stream][rank]: the rows of a stream that a rank holds outside attention."""
        return tuple(self._held(stream) for stream in self.streams)

    def _held(self, stream: Stream) -> tuple[Rows, ...]:
        if not stream.sharded:
            return (rows(range(stream.length)),) * self.world_size
        if not self.zigzag:
            return tuple(rows(part) for part in split(stream.length, self.world_size))
        pieces = split(stream.length, 2 * self.grid.ring)
        by_ring = [rows(pieces[r], pieces[-1 - r]) for r in range(self.grid.ring)]
        return tuple(whole.cut(part) for whole in by_ring for part in split(len(whole), self.grid.ulysses))

    @cached_property
    def query_length(self) -> int:
        return sum(stream.length for stream in self.streams if stream.queries)

    @cached_property
    def key_length(self) -> int:
        return sum(stream.length for stream in self.streams)

    @cached_property
    def ordered(self) -> bool:
        """Whether the rows of a Ulysses group, one rank after another, are in order and all that there is."""
        return len(self.streams) == 1 and self.streams[0].sharded

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """By rank."""
        asking = tuple(index for index, stream in enumerate(self.streams) if stream.queries)
        every = tuple(range(len(self.streams)))
        sharded = tuple(index for index in every if self.streams[index].sharded)
        ranks = range(self.world_size)
        sent_queries = [self._joined(asking, sharded, rank) for rank in ranks]
        sent_keys = [self._joined(every, sharded, rank) for rank in ranks]
        fixed = tuple(index for index in every if index not in sharded)
        fixed_queries = self._joined(asking, fixed, 0)
        by_ring = [fixed_queries.cut(part) for part in split(len(fixed_queries), self.grid.ring)]
        shares = []
        for rank in ranks:
            group, mine = self.grid.ulysses_group(rank), by_ring[self.grid.place(rank)[0]]
            shares.append(
                Share(
                    query_rows=self._joined(asking, asking, rank),
                    key_rows=self._joined(every, every, rank),
                    sent_queries=sent_queries[rank],
                    sent_keys=sent_keys[rank],
                    queries=chain((*(sent_queries[other] for other in group), mine)).sorted,
                    keys=chain(tuple(sent_keys[other] for other in group)).sorted,
                    fixed_queries=mine,
                    fixed_keys=self._joined(every, fixed, rank),
                )
            )
        return tuple(shares)

    def _joined(self, space: tuple[int, ...], chosen: tuple[int, ...], rank: int) -> Rows:
        """What a rank holds of the chosen streams, in the positions of the streams in `space`."""
        starts = dict(zip(space, accumulate((self.streams[i].length for i in space), initial=0), strict=False))
        return chain(tuple(self.held[index][rank].shifted(starts[index]) for index in space if index in chosen))

    def scatter_heads(self, rank: int) -> ExchangeCounts:
        """Packed Q, K and V within a Ulysses group: my rows of everybody's heads against everybody's rows of my heads;
        in (row, head) pairs.
        """
        return self._scattered[rank]

    @cached_property
    def _scattered(self) -> tuple[ExchangeCounts, ...]:
        rows, heads = [len(share.sent_keys) for share in self.shares], self.heads
        places = range(self.grid.ulysses)
        return tuple(
            ExchangeCounts(
                tuple(rows[rank] * heads.heads_at(place) for place in places),
                tuple(
                    rows[other] * heads.heads_at(rank % self.grid.ulysses) for other in self.grid.ulysses_group(rank)
                ),
            )
            for rank in range(self.world_size)
        )

    @cached_property
    def returns_to_all(self) -> bool:
        """Whether the results go to ranks of other Ulysses groups, too: those of replicated streams do."""
        return self.grid.ring > 1 and any(stream.queries and not stream.sharded for stream in self.streams)

    @property
    def returns(self) -> bool:
        """Whether results have to move at all."""
        return self.grid.ulysses > 1 or self.returns_to_all

    def return_group(self, rank: int) -> range:
        """The ranks that exchange results."""
        return range(self.world_size) if self.returns_to_all else self.grid.ulysses_group(rank)

    def returned_rows(self, source: int, target: int) -> int:
        """How many rows of a result one rank computes for another: the other's own, if they are of one Ulysses group,
        and those that every rank gets.
        """
        together = self.grid.place(source)[0] == self.grid.place(target)[0]
        own = len(self.shares[target].sent_queries) if together else 0
        return own + len(self.shares[source].fixed_queries)

    def gather_heads(self, rank: int) -> ExchangeCounts:
        """The output on its way back; in (row, head) pairs."""
        return self._gathered[rank]

    @cached_property
    def _gathered(self) -> tuple[ExchangeCounts, ...]:
        heads = [len(self.heads.query[self.grid.place(rank)[1]]) for rank in range(self.world_size)]
        return tuple(
            ExchangeCounts(
                tuple(self.returned_rows(rank, other) * heads[rank] for other in self.return_group(rank)),
                tuple(self.returned_rows(other, rank) * heads[other] for other in self.return_group(rank)),
            )
            for rank in range(self.world_size)
        )

    def gather_keys(self, rank: int) -> ExchangeCounts:
        """The travelling keys of my heads, from every place of the ring to every other; in (row, head) pairs. There are
        as many values.
        """
        heads = len(self.heads.kv[self.grid.place(rank)[1]])
        counts = tuple(len(self.shares[other].keys) * heads for other in self.grid.ring_group(rank))
        return ExchangeCounts((counts[self.grid.place(rank)[0]],) * len(counts), counts)

    def gather_rows(self, rank: int, stream: str | int | None = None) -> ExchangeCounts:
        """Every rank's rows of a sharded stream (default: the first) to every rank; in rows."""
        held = self.held[self.main if stream is None else self.index_of(stream)]
        return ExchangeCounts((len(held[rank]),) * self.world_size, tuple(map(len, held)))

    def sent_pairs(self, rank: int) -> int:
        """(row, head) pairs that leave a rank in one call under Ulysses: Q, K and V on the way in, the output on the
        way back.
        """
        place = self.grid.place(rank)[1]
        there, back = self.scatter_heads(rank).sends, self.gather_heads(rank).sends
        at = self.return_group(rank).index(rank)
        return sum(there) - there[place] + sum(back) - back[at]

    def sent_rows(self, rank: int) -> int:
        """Rows that leave a rank in one gathering of rows."""
        return len(self.rows[rank]) * (self.world_size - 1)


@lru_cache(maxsize=256)
def plan_streams(
    streams: tuple[Stream, ...],
    heads: int,
    grid: Grid,
    strategy: Strategy,
    *,
    kv_heads: int | None = None,
    zigzag: bool = False,
    exchange: ExchangeDtype = "same",
    agreed: bool = False,
) -> ShardPlan:
    """The plan of a call; the same object for the same facts, as it works out much. heads, kv_heads: of the whole
    layer; kv_heads divide heads.
    """
    split = split_heads(heads, kv_heads or heads, grid.ulysses)
    return ShardPlan(streams, split, grid, strategy, zigzag, exchange, agreed)


def plan_sequence(length: int, heads: int, world_size: int, kv_heads: int | None = None) -> ShardPlan:
    """The plan of one sharded sequence under Ulysses over all ranks."""
    strategy: Strategy = "local" if world_size == 1 else "ulysses"
    return plan_streams((Stream("sequence", length),), heads, Grid(world_size), strategy, kv_heads=kv_heads)
