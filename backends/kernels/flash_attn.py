"""FlashAttention 2 (`flash-attn`), 3 (`fa3-fwd`) and 4 (`flash-attn-4`), forward only, on [B, S, H, D] tensors as they
are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from backends.interface import AttentionImpl, AttentionMetadata, CallShape
from backends.kernels.ragged import PlacedCall, RaggedImpl


@functools.cache
def _flash_attn_2() -> Callable[..., Any]:
    from flash_attn import flash_attn_func

    return flash_attn_func  # type: ignore[no-any-return]


@functools.cache
def _flash_attn_2_ragged() -> Callable[..., Any]:
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func  # type: ignore[no-any-return]


@functools.cache
def _flash_attn_3() -> Callable[..., Any]:
    from fa3_fwd_interface import flash_attn_func

    return flash_attn_func  # type: ignore[no-any-return]


@functools.cache
def _flash_attn_4() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_func

    return flash_attn_func  # type: ignore[no-any-return]


def first(result: Any) -> torch.Tensor:
    """The output. Some versions return (output, LSE) whatever was asked for."""
    out = result[0] if isinstance(result, tuple) else result
    return out  # type: ignore[no-any-return]


class FlashAttn2Impl(RaggedImpl):
    """Its masks count from the last row and the last key: the same as from the first ones, since causal calls and
    those with a window have as many queries as keys.
    """

    @property
    def kernel(self) -> str:
        return "flash_attn.flash_attn_func"

    @classmethod
    def load(cls) -> None:
        _flash_attn_2()
        _flash_attn_2_ragged()

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
            return super().forward(query, key, value, metadata, plan)
        return first(_flash_attn_2()(query, key, value, **self._settings(metadata)))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        placed: PlacedCall,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        return first(
            _flash_attn_2_ragged()(
                query,
                key,
                value,
                cu_seqlens_q=placed.query_offsets,
                cu_seqlens_k=placed.key_offsets,
                max_seqlen_q=max(placed.call.query_lengths),
                max_seqlen_k=max(placed.call.key_lengths),
                **self._settings(metadata),
            )
        )

    def _settings(self, metadata: AttentionMetadata) -> dict[str, Any]:
        before, after = metadata.window if metadata.window is not None else (None, None)
        return {
            "softmax_scale": self.softmax_scale,
            "causal": self.causal,
            "window_size": (-1 if before is None else before, -1 if after is None else after),
            "softcap": metadata.soft_cap or 0.0,
        }


class FlashAttn3Impl(AttentionImpl):
    @property
    def kernel(self) -> str:
        return "fa3_fwd_interface.flash_attn_func"

    @classmethod
    def load(cls) -> None:
        _flash_attn_3()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> torch.Tensor:
        return first(_flash_attn_3()(query, key, value, softmax_scale=self.softmax_scale, causal=self.causal))


class FlashAttn4Impl(AttentionImpl):
    @property
    def kernel(self) -> str:
        return "flash_attn.cute.flash_attn_func"

    @classmethod
    def load(cls) -> None:
        _flash_attn_4()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> torch.Tensor:
        return first(_flash_attn_4()(query, key, value, softmax_scale=self.softmax_scale, causal=self.causal))
