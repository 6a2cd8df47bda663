"""One small exchange before ranks do something together: all are about to do the same, or none of them does it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, fields
from hashlib import blake2b
from typing import ClassVar

import torch
import torch.distributed as dist

from backends.interface import AttentionMetadata, PackedLengths
from backends.requirements import NO_FEATURES, Features
from parallel.mesh import Mesh
from parallel.plan import Stream
from parallel.transport.guard import exchange


@dataclass(frozen=True)
class Facts:
    """What must be equal on all ranks, as numbers and as text to show. Facts of any kind are equally many numbers, so
    that ranks which are before different things can tell.
    """

    before: ClassVar[str]
    remedy: ClassVar[str]

    def numbers(self) -> tuple[int, ...]:
        """The facts as 64-bit numbers; texts by a digest that is the same in every process."""
        return tuple(value if isinstance(value, int) else _digest(value) for value in astuple(self))


@dataclass(frozen=True)
class ForwardFacts(Facts):
    """Of a model's forward.

    number: of the forward, counted from 1 by its model. streams: every stream's name and length. carried: what the
    calls of each role carry beside Q, K and V (mask kinds). gradient: whether any are recorded, since exchanges with a
    backward pass are others. selections: every role, its heads, what serves it, and its
    strategy with its degrees.
    """

    before: ClassVar[str] = "a forward"
    remedy: ClassVar[str] = "give all ranks the same configuration and inputs"
    number: int
    model: str
    batch: int
    streams: str
    carried: str
    gradient: bool
    dtype: str
    selections: str


@dataclass(frozen=True)
class CallFacts(Facts):
    """Of the first call with a plan, outside a model's forward.

    number: how many plans were agreed on in the context, this one included. layer: its name, its heads, what serves it
    and how. plan: its streams, heads and strategy. batch, dtype, device: of the query. carried: beside Q, K and V, with
    gradients and log-sum-exps if there are any. fault: why the rank refuses the call; empty if it does not.
    """

    before: ClassVar[str] = "the first call with a plan"
    remedy: ClassVar[str] = (
        "make the same call on every rank, with rows of one batch, dtype and kind of device, and a plan of the same "
        "streams"
    )
    number: int
    layer: str
    plan: str
    batch: int
    dtype: str
    device: str
    carried: str
    fault: str


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Carried:
    """What a call carries beside Q, K and V, as far as ranks can compare it: shapes of tensors, and all else by value.

    mask: of the mask or the block mask. The numbers in a tensor are not compared.
    """

    features: Features
    mask: Shape | None
    bias: Shape | None
    window: tuple[int | None, int | None] | None
    soft_cap: float | None
    packed: PackedLengths | None

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> Carried:
        features = metadata.features
        if features == NO_FEATURES:
            return NOTHING  # most calls, which have no time to construct another
        mask, bias = metadata.mask if metadata.block_mask is None else metadata.block_mask, metadata.bias
        return cls(
            features=features,
            mask=None if mask is None else tuple(mask.shape),
            bias=None if bias is None else tuple(bias.shape),
            window=metadata.window,
            soft_cap=metadata.soft_cap,
            packed=metadata.packed,
        )

    @property
    def has_values(self) -> bool:
        """Whether `features` leaves out something that decides the result."""
        return self.window is not None or self.soft_cap is not None or self.packed is not None

    def __str__(self) -> str:
        found = [] if self.mask is None else [f"{self.features.mask} mask {self.mask}"]
        found += [] if self.bias is None else [f"bias {self.bias}"]
        found += ["sinks"] * self.features.sinks
        found += [] if self.window is None else [f"window {self.window}"]
        found += [] if self.soft_cap is None else [f"soft_cap {self.soft_cap}"]
        if self.packed is not None:
            found.append(f"documents of {self.packed.query} queries and {self.packed.key} keys")
        return " and ".join(found) or "nothing"


NOTHING = Carried(NO_FEATURES, mask=None, bias=None, window=None, soft_cap=None, packed=None)


def _shown(value: object) -> object:
    return "none" if value == "" else value


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


class RankDisagreementError(Exception):
    """Ranks that were about to do different things. facts[r] is what rank r was about to do."""

    def __init__(self, facts: tuple[Facts, ...]) -> None:
        self.facts = facts
        super().__init__(facts)

    def __str__(self) -> str:
        kinds = list(dict.fromkeys(type(each) for each in self.facts))
        if len(kinds) > 1:
            what = "; ".join(f"rank {r} is before {each.before}: {each}" for r, each in enumerate(self.facts))
            return f"ranks disagree on what comes next; {what}; make the same calls in the same order on every rank"
        (kind,) = kinds
        names = [each.name for each in fields(kind) if len({getattr(f, each.name) for f in self.facts}) > 1]
        if "fault" in names:
            names = ["fault"]  # a call that is refused has no more to compare
        differing = [
            f"{name}: " + ", ".join(f"rank {r} has {_shown(getattr(f, name))}" for r, f in enumerate(self.facts))
            for name in names
        ]
        return f"ranks disagree before {kind.before}; {'; '.join(differing)}; {kind.remedy}"


def agree(facts: Facts, mesh: Mesh) -> None:
    """Compare the facts of all ranks over the control group: one exchange of a few numbers, if they agree.

    Raises RankDisagreementError, on every rank, if they do not, and ExchangeError if not all ranks take part.
    """
    if mesh.control is None:
        return
    mine = torch.tensor(facts.numbers(), dtype=torch.int64)
    gathered = [torch.empty_like(mine) for _ in range(mesh.world_size)]
    with exchange(f"the agreement before {facts.before}"):
        dist.all_gather(gathered, mine, group=mesh.control)
    if any(not torch.equal(mine, other) for other in gathered):
        # Every rank has seen the same numbers, so all of them come here, and can afford to exchange the texts.
        told: list[Facts] = [facts] * mesh.world_size
        with exchange(f"the agreement before {facts.before}"):
            dist.all_gather_object(told, facts, group=mesh.control)
        raise RankDisagreementError(tuple(told))


def streams_text(streams: Iterable[Stream]) -> str:
    return ", ".join(map(_stream_text, streams))


def _stream_text(stream: Stream) -> str:
    if stream.sharded:
        return f"{stream.name} {stream.length}"
    return f"{stream.name} {stream.length} on each" + ("" if stream.queries else ", keys alone")


def features_text(features: Features) -> str:
    found = [name for name, value in asdict(features).items() if value is True]
    if features.mask != "none":
        found.insert(0, f"{features.mask} mask")
    return " and ".join(found) or "nothing"
