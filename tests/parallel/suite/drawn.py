"""One call of an attention layer over some ranks, as plain values; its tensors follow from its seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from backends.interface import AttentionMetadata, Kind, PackedLengths
from backends.requirements import MaskKind
from configs.schema import ParallelConfig
from parallel.plan import Stream

Layout = Literal["contiguous", "heads_first", "batch_last", "sliced", "strided"]
Spread = Literal["none", "shared", "per_head"]
CPU = torch.device("cpu")
QueryKeyValue = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Drawn:
    """strategy, ulysses, ring: what is asked for. streams: of all rows; cross-attention has one, of the queries, and
    cross_keys keys on every rank. value_size: of V. documents: how many, 0 for no packing. layouts: of query, key and
    value. lse: the log-sum-exp is wanted, too. gradient: a backward pass follows.
    """

    world_size: int = 1
    strategy: str = "auto"
    ulysses: int | None = None
    ring: int | None = None
    kind: Kind = "self"
    streams: tuple[Stream, ...] = (Stream("video", 5),)
    cross_keys: int = 0
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    size: int = 4
    value_size: int = 4
    causal: bool = False
    mask: MaskKind = "none"
    bias: Spread = "none"
    window: tuple[int | None, int | None] | None = None
    soft_cap: float | None = None
    sinks: bool = False
    documents: int = 0
    backend: str | None = "REFERENCE"
    dtype: str = "float64"
    layouts: tuple[Layout, Layout, Layout] = ("contiguous", "contiguous", "contiguous")
    lse: bool = False
    gradient: bool = False
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(strategy=self.strategy, ulysses=self.ulysses, ring=self.ring)

    @property
    def queries(self) -> int:
        return sum(stream.length for stream in self.streams if stream.queries)

    @property
    def keys(self) -> int:
        return self.cross_keys if self.kind == "cross" else sum(stream.length for stream in self.streams)

    def generator(self, purpose: int) -> torch.Generator:
        return torch.Generator().manual_seed(10 * self.seed + purpose)

    def tensors(self) -> QueryKeyValue:
        """Of all rows and heads, the same in every process."""
        generator = self.generator(1)

        def draw(rows: int, heads: int, size: int) -> torch.Tensor:
            values = torch.randn(self.batch, rows, heads, size, generator=generator, dtype=torch.float64)
            return values.to(self.torch_dtype)

        return (
            draw(self.queries, self.heads, self.size),
            draw(self.keys, self.kv_heads, self.size),
            draw(self.keys, self.kv_heads, self.value_size),
        )

    def loss_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What a loss multiplies outputs [B, Sq, H, Dv] and log-sum-exps [B, H, Sq] with."""
        generator = self.generator(2)
        out = torch.randn(self.batch, self.queries, self.heads, self.value_size, generator=generator).double()
        return out, torch.randn(self.batch, self.heads, self.queries, generator=generator).double()

    def metadata(self, device: torch.device = CPU) -> AttentionMetadata:
        generator = self.generator(3)
        sinks = torch.randn(self.heads, generator=generator).to(self.torch_dtype) if self.sinks else None
        mask = self._mask(generator) if self.mask not in ("none", "block") else None
        packed = self._packed(generator) if self.documents else None
        bias = self._bias(generator) if self.bias != "none" else None
        return AttentionMetadata(
            mask=None if mask is None else mask.to(device),
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=None if sinks is None else sinks.to(device),
            packed=packed,
            bias=None if bias is None else bias.to(device),
            block_mask=self._block_mask(device) if self.mask == "block" else None,
        )

    def _mask(self, generator: torch.Generator) -> torch.Tensor:
        """Dense or sparse, with rows that see nothing in some, for one batch row or all."""
        density, blind, of_batch, by_row = torch.rand(4, generator=generator).tolist()
        batch = self.batch if of_batch < 0.5 else 1
        heads = self.heads if self.mask == "per_head" else 1
        rows = 1 if self.mask == "key_padding" or (self.mask == "per_head" and by_row < 0.3) else self.queries
        mask = torch.rand(batch, heads, rows, self.keys, generator=generator) < (0.2, 0.6, 0.95)[int(3 * density)]
        if blind < 0.3:
            mask &= torch.rand(batch, heads, rows, 1, generator=generator) < 0.7
        return mask

    def _bias(self, generator: torch.Generator) -> torch.Tensor:
        heads = self.heads if self.bias == "per_head" else 1
        batch = self.batch if float(torch.rand(1, generator=generator)) < 0.5 else 1
        bias = torch.randn(batch, heads, self.queries, self.keys, generator=generator)
        hidden = torch.rand(bias.shape, generator=generator) < 0.15
        return bias.masked_fill(hidden, float("-inf")).to(self.torch_dtype)

    def _packed(self, generator: torch.Generator) -> PackedLengths:
        """Documents with other query than key lengths where the call has other queries than keys."""

        def cut(rows: int) -> tuple[int, ...]:
            ends = torch.randint(rows + 1, (self.documents - 1,), generator=generator).sort().values.tolist()
            return tuple(stop - start for start, stop in zip([0, *ends], [*ends, rows], strict=True))

        query = cut(self.queries)
        return PackedLengths(query, query if self.queries == self.keys else cut(self.keys))

    @property
    def mask_mod(self) -> Callable[[Any, Any, Any, Any], Any]:
        """Of a block mask: which heads see how far, and every head its own where the seed is odd."""
        by_head = self.seed % 2

        def seen(batch: Any, head: Any, row: Any, key: Any) -> Any:
            return (key <= row + by_head * head) & (row - key < 9 + by_head * 2 * head)

        return seen

    def _block_mask(self, device: torch.device) -> BlockMask:
        heads = self.heads if self.seed % 2 else None
        size = 16 if device == CPU else 128
        return create_block_mask(self.mask_mod, None, heads, self.queries, self.keys, str(device), BLOCK_SIZE=size)


def laid_out(tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """(memory, view): the same values [B, S, H, D] as a view of memory that has something else around them."""
    batch, rows, heads, size = tensor.shape
    if layout == "heads_first":
        memory = tensor.transpose(1, 2).contiguous()
        return memory, memory.transpose(1, 2)
    if layout == "batch_last":
        memory = tensor.permute(1, 2, 3, 0).contiguous()
        return memory, memory.permute(3, 0, 1, 2)
    if layout == "sliced":
        memory = tensor.new_full((batch, rows + 2, heads + 1, size + 3), float("nan"))
        view = memory[:, 1 : rows + 1, :heads, 2 : size + 2]
    elif layout == "strided":
        memory = tensor.new_full((batch, 2 * rows, heads, size), float("nan"))
        view = memory[:, ::2]
    else:
        memory = view = tensor.clone(memory_format=torch.contiguous_format)
    view.copy_(tensor)
    return memory, view
