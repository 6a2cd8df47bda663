"""One small exchange before a model's forward: all ranks run the same forward of the same shapes, or none of them
runs it.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from hashlib import blake2b

import torch
import torch.distributed as dist

from parallel.mesh import Mesh


@dataclass(frozen=True)
class ForwardFacts:
    """What must be equal on all ranks before a forward, as numbers and as text to show.

    number: of the forward, counted from 1 by its model. streams: every stream's name and length. carried: what the
    calls of each role carry beside Q, K and V (mask kinds). gradient: whether any are recorded, since exchanges with a
    backward pass are others. selections: every role, its heads, what serves it, and its
    strategy with its degrees.
    """

    number: int
    model: str
    batch: int
    streams: str
    carried: str
    gradient: bool
    dtype: str
    selections: str

    def numbers(self) -> tuple[int, ...]:
        """The facts as 64-bit numbers of a fixed count; texts by a digest that is the same in every process."""
        return tuple(value if isinstance(value, int) else _digest(value) for value in astuple(self))


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


class RankDisagreementError(Exception):
    """Ranks that were about to run different forwards. facts[r] is what rank r was about to run."""

    def __init__(self, facts: tuple[ForwardFacts, ...]) -> None:
        self.facts = facts
        super().__init__(facts)

    def __str__(self) -> str:
        differing = [
            f"{field.name}: " + ", ".join(f"rank {r} has {getattr(f, field.name)}" for r, f in enumerate(self.facts))
            for field in fields(ForwardFacts)
            if len({getattr(f, field.name) for f in self.facts}) > 1
        ]
        return f"ranks disagree before a forward; {'; '.join(differing)}; start all ranks from one configuration"


def agree(facts: ForwardFacts, mesh: Mesh) -> None:
    """Compare the facts of all ranks over the control group: one exchange of a few numbers, if they agree.

    Raises RankDisagreementError, on every rank, if they do not.
    """
    if mesh.control is None:
        return
    mine = torch.tensor(facts.numbers(), dtype=torch.int64)
    gathered = [torch.empty_like(mine) for _ in range(mesh.world_size)]
    dist.all_gather(gathered, mine, group=mesh.control)
    if any(not torch.equal(mine, other) for other in gathered):
        # Every rank has seen the same numbers, so all of them come here, and can afford to exchange the texts.
        told: list[ForwardFacts] = [facts] * mesh.world_size
        dist.all_gather_object(told, facts, group=mesh.control)
        raise RankDisagreementError(tuple(told))
