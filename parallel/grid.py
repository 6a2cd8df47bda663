"""The ranks of a call as a grid, the streams of tokens over them, and what an exchange between them moves. No torch
here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stream:
    """A run of tokens. Of a sharded one each rank holds some rows; of a replicated one (`sharded=False`) all ranks hold
    all. queries: whether its rows ask; those of a replicated one may be keys and values only.

    Raises ValueError for a negative length, and for a sharded stream without queries.
    """

    name: str
    length: int
    sharded: bool = True
    queries: bool = True

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ValueError(f"stream {self.name} has {self.length} rows; it has at least none")
        if self.sharded and not self.queries:
            raise ValueError(f"stream {self.name} is sharded and asks nothing; only a replicated one may be keys alone")


@dataclass(frozen=True)
class Grid:
    """Ulysses degree x ring degree. Rank r * ulysses + u is place u of Ulysses group r and place r of ring group u, so
    that a Ulysses group is a run of ranks, which a node can hold.
    """

    ulysses: int = 1
    ring: int = 1

    @property
    def size(self) -> int:
        return self.ulysses * self.ring

    def __str__(self) -> str:
        return f"{self.ulysses}x{self.ring}"

    def place(self, rank: int) -> tuple[int, int]:
        """(r, u) of a rank."""
        return divmod(rank, self.ulysses)

    def ulysses_group(self, rank: int) -> range:
        first = rank - rank % self.ulysses
        return range(first, first + self.ulysses)

    def ring_group(self, rank: int) -> range:
        return range(rank % self.ulysses, self.size, self.ulysses)


@dataclass(frozen=True)
class ExchangeCounts:
    """Items that one rank sends to, and receives from, each rank of a group in one all-to-all."""

    sends: tuple[int, ...]
    receives: tuple[int, ...]

    def times(self, factor: int) -> ExchangeCounts:
        return ExchangeCounts(
            tuple(count * factor for count in self.sends), tuple(count * factor for count in self.receives)
        )

    @property
    def reversed(self) -> ExchangeCounts:
        return ExchangeCounts(self.receives, self.sends)
