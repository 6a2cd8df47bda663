"""The two ways around code that torch.compile cannot trace: a function that runs outside graphs, and a kernel as one
operator of a graph.

An operator takes tensors and numbers, so a tensor with a number stands for the layer's kernel: a plain number would be
compiled into the graph, and every layer would need a graph of its own. The table of kernels holds a kernel only as long
as its layer lives.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch

from backends.interface import AttentionMetadata, PackedLengths

P = ParamSpec("P")
R = TypeVar("R")
OUTSIDE = (
    "Raylysses works on shard plans, exchanges rows between ranks, and runs some kernels and calls with gradients "
    "outside compiled graphs; compile without fullgraph=True (a graph then ends before the call, another follows it)"
)
"""What torch tells a caller who asks for one graph without breaks."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata], torch.Tensor]


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Makes torch.compile end its graph before each call of a function and begin another one after it.

    Nothing in the function is traced, and its arguments are neither guarded nor compiled in: plans, turns and counters
    are read at each call. With `fullgraph=True` torch refuses the call while tracing, with `OUTSIDE` as the reason.

    Args:
        function: A function or method that exchanges tensors, changes Python state, or works on shard plans.

    Returns:
        The function, at 0.4 us per call outside compiled code.
    """
    disabled: Callable[P, R] = torch.compiler.disable(function, reason=OUTSIDE)  # type: ignore[no-untyped-call]
    return disabled


class Opaque:
    """A kernel that graphs call through the operator. attend: the kernel, with plans and all; gone with its layer."""

    def __init__(self, attend: Attend) -> None:
        number = next(_NUMBERS)
        self.attend = attend
        self.handle = torch.tensor(number)
        _HELD[number] = self

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """The kernel's output [B, S, H, Dv], without gradients; metadata without a block_mask."""
        window, packed = metadata.window, metadata.packed
        out: torch.Tensor = _attend(
            query,
            key,
            value,
            self.handle,
            metadata.mask,
            metadata.bias,
            metadata.sinks,
            None if window is None else [-1 if side is None else side for side in window],
            metadata.soft_cap,
            None if packed is None else list(packed.query),
            None if packed is None else list(packed.key),
        )
        return out


_NUMBERS = itertools.count()
_HELD: weakref.WeakValueDictionary[int, Opaque] = weakref.WeakValueDictionary()


@torch.library.custom_op("raylysses::attend", mutates_args=())
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    handle: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    window: Sequence[int] | None,
    soft_cap: float | None,
    packed_query: Sequence[int] | None,
    packed_key: Sequence[int] | None,
) -> torch.Tensor:
    sides = None if window is None else tuple(None if side < 0 else side for side in window)
    documents = packed_query is not None and packed_key is not None
    metadata = AttentionMetadata(
        mask=mask,
        bias=bias,
        sinks=sinks,
        window=None if sides is None else (sides[0], sides[1]),
        soft_cap=soft_cap,
        packed=PackedLengths(tuple(packed_query or ()), tuple(packed_key or ())) if documents else None,
    )
    out = _HELD[int(handle)].attend(query, key, value, metadata)
    return out.contiguous()  # as the graph expects it


@_attend.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    handle: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    window: Sequence[int] | None,
    soft_cap: float | None,
    packed_query: Sequence[int] | None,
    packed_key: Sequence[int] | None,
) -> torch.Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])
