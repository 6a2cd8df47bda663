"""The ranks of a call as a grid, the streams of tokens over them, and what an exchange between them moves. No torch
here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stream:
    """A run of tokens.

    Args:
        name: How plans and messages call it.
        length: Number of rows over all ranks.
        sharded: True if each rank holds some of the rows, False if every rank holds all of them.
        queries: False for rows that are keys and values only; they have to be replicated.

    Raises:
        ValueError: For an argument of another type, a negative length, or a sharded stream without queries.
    """

    name: str
    length: int
    sharded: bool = True
    queries: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"the name of a stream is {self.name!r:.80}; give text, such as 'video'")
        if type(self.length) is not int or self.length < 0:
            raise ValueError(f"length of stream {self.name} is {self.length!r:.80}; give a whole number of at least 0")
        for name in ("sharded", "queries"):
            value = getattr(self, name)
            if type(value) is not bool:
                raise ValueError(f"{name} of stream {self.name} is {value!r:.80}; give True or False")
        if self.sharded and not self.queries:
            raise ValueError(
                f"stream {self.name} is sharded and has no queries; only replicated streams may be keys alone: pass "
                "sharded=False, or leave out queries=False"
            )


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
