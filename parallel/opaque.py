"""Attention as one operator that torch.compile does not look into, for kernels that it cannot trace.

An operator takes tensors and numbers, so a tensor with a number stands for the layer's kernel: as a number it would be
compiled into the graph, and every layer had a graph of its own. The table of kernels holds them no longer than their
layers do.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence

import torch

from backends.interface import AttentionMetadata, PackedLengths

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata], torch.Tensor]


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
        """Raises ValueError, while it is traced, for what the operator cannot carry."""
        if metadata.block_mask is not None:
            raise ValueError("a block_mask in a compiled graph: call the layer outside of it, or give a mask")
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
            raise ValueError(
                "a kernel that is one operator in a graph has no gradient there: use TORCH_SDPA, or no graph"
            )
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
