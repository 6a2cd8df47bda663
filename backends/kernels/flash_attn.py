"""FlashAttention 2 (`flash-attn`), 3 (`fa3-fwd`) and 4 (`flash-attn-4`) on [B, S, H, D] tensors as they are, and on the
rows of packed documents. All of them give the log-sum-exp as natural logarithms in fp32, [B, H, Sq], and that of ragged
calls as [H, rows].
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from backends.interface import AttentionMetadata, CallShape
from backends.kernels.packages import FlashImpl, first, imported
from backends.kernels.ragged import PlacedCall, RaggedImpl, nothing_with_lse
from backends.options import Blocks

FP8 = torch.float8_e4m3fn
QueryKeyValue = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class FlashPackedImpl(RaggedImpl, FlashImpl):
    """A version that takes documents, too.

    Its causality and windows count from the last row and the last key: the same as from the first ones, since causal
    calls and those with a window have as many queries as keys. ragged: the path of the function for documents.
    lse_switch: the argument that makes both return (output, LSE, ...).
    """

    ragged: ClassVar[str]
    lse_switch: ClassVar[str]

    @classmethod
    def load(cls, options: Blocks = ()) -> None:
        super().load(options)
        imported(cls.ragged)

    def plan(self, shape: CallShape) -> PlacedCall | None:
        return None if shape.packed is None else super().plan(shape)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> torch.Tensor:
        if metadata.packed is not None:
            return RaggedImpl.forward(self, query, key, value, metadata, plan)
        tensors, scales = self.inputs(query, key, value)
        return first(imported(self.path)(*tensors, **scales, **self.settings(metadata)))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        placed: PlacedCall,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        return first(self._of_documents(query, key, value, placed, self.settings(metadata)))

    def forward_with_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        asked = {**self.settings(metadata), self.lse_switch: True}
        if metadata.packed is None:
            tensors, scales = self.inputs(query, key, value)
            out, lse, *_ = imported(self.path)(*tensors, **scales, **asked)
            return out, _none_is_minus_infinity(lse)
        placed = self.placed(query, key, metadata, plan)
        call = placed.call
        if not call.taking_part:
            return nothing_with_lse(query, value)
        out, lse, *_ = self._of_documents(*call.rows(query, key, value), placed, asked)
        rows = _none_is_minus_infinity(lse).T
        return call.all_rows(out), call.all_rows(rows, float("-inf")).transpose(1, 2)

    def inputs(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: int | None = None
    ) -> tuple[QueryKeyValue, dict[str, torch.Tensor]]:
        """The tensors as the kernel gets them, and its arguments that belong to them. documents: how many there are,
        in tensors of rows.
        """
        return (query, key, value), {}

    def _of_documents(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, placed: PlacedCall, asked: dict[str, Any]
    ) -> Any:
        tensors, scales = self.inputs(query, key, value, len(placed.call.taking_part))
        return imported(self.ragged)(*tensors, **placed.settings(), **scales, **asked)


class FlashAttn2Impl(FlashPackedImpl):
    path = "flash_attn.flash_attn_func"
    ragged = "flash_attn.flash_attn_varlen_func"
    lse_switch = "return_attn_probs"

    def settings(self, metadata: AttentionMetadata) -> dict[str, Any]:
        before, after = metadata.window if metadata.window is not None else (None, None)
        return {
            **super().settings(metadata),
            "window_size": (-1 if before is None else before, -1 if after is None else after),
            "softcap": metadata.soft_cap or 0.0,
        }


class FlashAttn3Impl(FlashPackedImpl):
    path = "fa3_fwd_interface.flash_attn_func"
    ragged = "fa3_fwd_interface.flash_attn_varlen_func"
    lse_switch = "return_attn_probs"

    def settings(self, metadata: AttentionMetadata) -> dict[str, Any]:
        return {**super().settings(metadata), "softcap": metadata.soft_cap or 0.0}

    def inputs(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: int | None = None
    ) -> tuple[QueryKeyValue, dict[str, torch.Tensor]]:
        if getattr(self.options.get("quant"), "dtype_qk", None) is None:
            return (query, key, value), {}
        kv_heads = key.shape[-2]
        quantised = {name: _to_fp8(x, kv_heads) for name, x in zip("qkv", (query, key, value), strict=True)}
        scales = {f"{name}_descale": _of_each(scale, documents) for name, (_, scale) in quantised.items()}
        return (quantised["q"][0], quantised["k"][0], quantised["v"][0]), scales


class FlashAttn4Impl(FlashPackedImpl):
    path = "flash_attn.cute.flash_attn_func"
    ragged = "flash_attn.cute.flash_attn_varlen_func"
    lse_switch = "return_lse"

    def settings(self, metadata: AttentionMetadata) -> dict[str, Any]:
        return {
            **super().settings(metadata),
            "window_size": metadata.window if metadata.window is not None else (None, None),
            "softcap": metadata.soft_cap or 0.0,
            "learnable_sink": metadata.sinks,
        }


def _to_fp8(tensor: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, S, H, D], or [rows, H, D], in fp8 with one scale for the heads of each KV group: [B, Hkv], or [Hkv]."""
    grouped = tensor.view(*tensor.shape[:-2], kv_heads, tensor.shape[-2] // kv_heads, tensor.shape[-1])
    scale = grouped.abs().amax(dim=(-4, -2, -1)).float().clamp_min(1e-12) / torch.finfo(FP8).max
    scaled = grouped.float() / scale[..., None, :, None, None]
    return scaled.to(FP8).flatten(-3, -2), scale


def _of_each(scale: torch.Tensor, documents: int | None) -> torch.Tensor:
    """[B, Hkv], or the scale of all rows for each document."""
    return scale if documents is None else scale.expand(documents, -1)


def _none_is_minus_infinity(lse: torch.Tensor) -> torch.Tensor:
    """Versions 2 and 3 write plus infinity for a row without keys."""
    return lse.masked_fill(lse == float("inf"), float("-inf"))
