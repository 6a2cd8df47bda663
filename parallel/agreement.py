"""One small exchange before a model's forward: all ranks run the same forward of the same shapes, or none of them
runs it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields

import torch
import torch.distributed as dist

from parallel.mesh import Mesh


def digest(parts: Iterable[str]) -> int:
    """A number that differs when the texts do; the same in every process, unlike `hash`."""
    return zlib.crc32("\0".join(parts).encode())


@dataclass(frozen=True)
class ForwardFacts:
    """What must be equal on all ranks before a forward. model, dtype and selections are digests of names."""

    number: int
    model: int
    batch: int
    length: int
    heads: int
    dtype: int
    selections: int


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
    """Compare the facts of all ranks over the control group. Raises RankDisagreementError, on every rank, if they
    differ.
    """
    if mesh.control is None:
        return
    mine = torch.tensor(astuple(facts), dtype=torch.int64)
    gathered = [torch.empty_like(mine) for _ in range(mesh.world_size)]
    dist.all_gather(gathered, mine, group=mesh.control)
    if any(not torch.equal(mine, other) for other in gathered):
        raise RankDisagreementError(tuple(ForwardFacts(*row.tolist()) for row in gathered))
