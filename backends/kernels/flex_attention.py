"""torch.nn.attention.flex_attention: masks, windows, causality, documents and soft caps, compiled into one kernel; or
a `BlockMask` of the caller's, as it is.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from backends.interface import AttentionImpl, AttentionMetadata, CallShape, PackedLengths
from backends.kernels.ragged import shape_of
from backends.kernels.workspaces import Recent

_BLOCK = 128
Window = tuple[int | None, int | None]
Modifier = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Bounds:
    """What keeps rows from keys, but for a mask. Each row sees keys from a first to a last one."""

    device: torch.device
    rows: int
    keys: int
    causal: bool
    window: Window | None
    packed: PackedLengths | None

    @property
    def are_none(self) -> bool:
        return not self.causal and self.packed is None and self.window in (None, (None, None))

    def of_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first key of each row and the one after its last, on the host."""
        position = torch.arange(self.rows)
        first, end = torch.zeros_like(position), torch.full_like(position, self.keys)
        if self.packed is not None:
            starts = torch.tensor(tuple(accumulate(self.packed.key, initial=0)))
            document = torch.repeat_interleave(torch.tensor(self.packed.query))
            first, end = starts[document], starts[document + 1]
        before, after = self.window if self.window is not None else (None, None)
        if self.causal:
            after = 0 if after is None else min(after, 0)
        if before is not None:
            first = torch.maximum(first, position - before)
        if after is not None:
            end = torch.minimum(end, position + after + 1)
        return first, torch.maximum(first, end)


Blocks = tuple[torch.Tensor, torch.Tensor]
"""How many blocks of keys each block of rows has [1, 1, rows], and which, these first [1, 1, rows, keys]."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Bounds on their device. sees: whether a row sees a key. met: blocks that have to be computed; whole: those of
    them in which every row sees every key; cut: the others.
    """

    sees: Modifier
    met: Blocks
    cut: Blocks
    whole: Blocks
    lengths: tuple[int, int]

    @classmethod
    def of(cls, bounds: Bounds) -> Layout:
        first, end = bounds.of_rows()
        firsts, ends = torch.split(first, _BLOCK), torch.split(end, _BLOCK)
        begin = torch.arange(0, bounds.keys, _BLOCK)
        stop = (begin + _BLOCK).clamp_max(bounds.keys)
        met = (stop > _column(torch.min, firsts)) & (begin < _column(torch.max, ends))
        whole = met & (begin >= _column(torch.max, firsts)) & (stop <= _column(torch.min, ends))
        device = bounds.device
        return cls(
            sees=_between(first.to(device), end.to(device)),
            met=_listed(met, device),
            cut=_listed(met & ~whole, device),
            whole=_listed(whole, device),
            lengths=(bounds.rows, bounds.keys),
        )

    def block_mask(self, mask: torch.Tensor | None, *, gradient: bool) -> BlockMask:
        """mask: [B, H, Sq, Sk], asked for every key of the blocks that are met: what it says is on the device, so that
        no block is left out for it. gradient: with the blocks of rows that a block of keys meets, for the backward.
        """
        made = functools.partial(
            BlockMask.from_kv_blocks, BLOCK_SIZE=_BLOCK, seq_lengths=self.lengths, compute_q_blocks=gradient
        )
        if mask is None:
            return made(*self.cut, *self.whole, mask_mod=self.sees)
        return made(*self.met, mask_mod=_both(self.sees, mask))


_LAYOUTS: Recent[Bounds, Layout] = Recent(32)


class FlexAttentionImpl(AttentionImpl):
    alignment = 1

    @property
    def kernel(self) -> str:
        return "torch.nn.attention.flex_attention.flex_attention"

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device

    def plan(self, shape: CallShape) -> None:
        """Lays out the blocks, but for calls with a window, which is not known yet."""
        if not shape.features.window and shape.query_length and shape.key_length:
            self._layout(Bounds(self.device, shape.query_length, shape.key_length, self.causal, None, shape.packed))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> torch.Tensor:
        return self.forward_with_lse(query, key, value, metadata, plan)[0]

    def forward_with_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The kernel knows its log-sum-exp in any case: asking for it always saves compiling it twice."""
        out, aux = self._attend(query, key, value, metadata)
        return out.transpose(1, 2), aux.lse

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata) -> Any:
        metadata = replace(metadata, mask=None if metadata.mask is None else _in_order(_narrow(metadata.mask)))
        shape = shape_of(query, key, metadata)
        lengths = shape.query_length, shape.key_length
        gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        blocks = (
            metadata.block_mask
            if metadata.block_mask is not None
            else self._blocks(query.device, shape, metadata, gradient)
        )
        cap = None if metadata.soft_cap is None else _capped(metadata.soft_cap)
        kind = (
            (query.device.type, query.dtype, shape.batch, query.shape[2:], value.shape[2:], *_length_class(*lengths)),
            (_kind_of(metadata), blocks is None, metadata.soft_cap, self.softmax_scale),
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), gradient),
            tuple((tensor.requires_grad, tensor.is_inference()) for tensor in (query, key, value)),
        )
        q, k, v = (_in_order(tensor).transpose(1, 2) for tensor in (query, key, value))
        grouped = shape.num_heads != shape.num_kv_heads
        return _run(kind, q, k, v, cap, blocks, self.softmax_scale, grouped)

    def _blocks(
        self, device: torch.device, shape: CallShape, metadata: AttentionMetadata, gradient: bool
    ) -> BlockMask | None:
        lengths = shape.query_length, shape.key_length
        bounds = Bounds(device, *lengths, self.causal, metadata.window, metadata.packed)
        mask = None if metadata.mask is None else metadata.mask.expand(shape.batch, shape.num_heads, *lengths)
        if mask is None and bounds.are_none:
            return None
        return self._layout(bounds).block_mask(mask, gradient=gradient)

    def _layout(self, bounds: Bounds) -> Layout:
        return _LAYOUTS.get(bounds, lambda: Layout.of(bounds))


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Modifier | None,
    block_mask: BlockMask | None,
    scale: float,
    enable_gqa: bool,
) -> Any:
    aux = AuxRequest(lse=True)
    return flex_attention(query, key, value, score_mod, block_mask, scale, enable_gqa, return_aux=aux)


_COMPILED: Recent[Hashable, Callable[..., Any]] = Recent(128)


def _run(kind: tuple[Any, ...], *arguments: Any) -> Any:
    """`_call`, compiled for calls of one kind. Torch compiles a code eight times and then no more: for what no kind
    tells apart, such as the objects that a caller's mask reads, there is another code after that.
    """
    make = functools.partial(_compile, kind[0][0])
    try:
        return _COMPILED.get(kind, make)(*arguments)
    except FailOnRecompileLimitHit:
        _COMPILED.drop(kind)
        return _COMPILED.get(kind, make)(*arguments)


def _compile(device: str) -> Callable[..., Any]:
    """`_call` with code of its own. On CPU it is traced and not compiled further, which is the computation as plain
    tensor operations.
    """
    own = types.FunctionType(_call.__code__.replace(), _call.__globals__, _call.__name__)
    return torch.compile(own, fullgraph=True, backend="eager" if device == "cpu" else "inductor")


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the strides of a new tensor, for which torch compiles; a copy if they are others."""
    return tensor.reshape(-1).view(tensor.shape)


def _narrow(mask: torch.Tensor) -> torch.Tensor:
    """Without the dimensions that are one row of memory over and over, which would be copied so often."""
    return mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]


def _length_class(rows: int, keys: int) -> tuple[bool, ...]:
    """Torch compiles anew where there is one row or key, or one block of them, or as many of these as of those."""
    blocks = ceil(rows / _BLOCK), ceil(keys / _BLOCK)
    return rows == 1, keys == 1, blocks[0] == 1, blocks[1] == 1, rows == keys, blocks[0] == blocks[1]


def _kind_of(metadata: AttentionMetadata) -> Hashable:
    """What code a mask is compiled into: where it is broadcast, or what it calls."""
    if metadata.block_mask is not None:
        return _code_of(metadata.block_mask.mask_mod, _DEPTH)
    return None if metadata.mask is None else tuple(size == 1 for size in metadata.mask.shape)


_DEPTH = 4
"""How far masks that are made of others (`and_masks`) are looked into."""


def _code_of(called: Any, depth: int) -> Hashable:
    """What torch makes code of: a function, the numbers and functions that it closes over, and the names of the types
    of the rest. It keeps none of the caller's objects.
    """
    if isinstance(called, bool | int | float | str):
        return type(called).__name__, called
    code = getattr(called, "__code__", None)
    if code is None or depth == 0:
        return f"{type(called).__module__}.{type(called).__qualname__}"
    return code, tuple(_code_of(value, depth - 1) for value in _closed_over(called))


def _closed_over(function: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # a variable without a value yet
            continue
        yield from value if isinstance(value, tuple) else (value,)


def _between(first: torch.Tensor, end: torch.Tensor) -> Modifier:
    def sees(batch: Any, head: Any, row: Any, key: Any) -> torch.Tensor:
        seen: torch.Tensor = (key >= first[row]) & (key < end[row])
        return seen

    return sees


def _both(within: Modifier, mask: torch.Tensor) -> Modifier:
    def sees(batch: Any, head: Any, row: Any, key: Any) -> torch.Tensor:
        return within(batch, head, row, key) & mask[batch, head, row, key]

    return sees


def _capped(cap: float) -> Modifier:
    def capped(score: torch.Tensor, batch: Any, head: Any, row: Any, key: Any) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def _column(pick: Callable[[torch.Tensor], torch.Tensor], parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """[blocks of rows, 1]"""
    return torch.stack([pick(part) for part in parts])[:, None]


def _listed(chosen: torch.Tensor, device: torch.device) -> Blocks:
    """chosen: [blocks of rows, blocks of keys]."""
    order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True)
    count, which = (x.to(device, torch.int32)[None, None].contiguous() for x in (chosen.sum(dim=-1), order))
    return count, which
