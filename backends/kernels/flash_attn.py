"""FlashAttention 3 (`fa3-fwd`) and 4 (`flash-attn-4`), forward only, on [B, S, H, D] tensors as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from backends.interface import AttentionImpl, AttentionMetadata


@functools.cache
def _flash_attn_3() -> Callable[..., Any]:
    from fa3_fwd_interface import flash_attn_func

    return flash_attn_func  # type: ignore[no-any-return]


@functools.cache
def _flash_attn_4() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_func

    return flash_attn_func  # type: ignore[no-any-return]


def _first(result: Any) -> torch.Tensor:
    # Some versions return (output, LSE) whatever was asked for.
    out = result[0] if isinstance(result, tuple) else result
    return out  # type: ignore[no-any-return]


class FlashAttn3Impl(AttentionImpl):
    @property
    def kernel(self) -> str:
        return "fa3_fwd_interface.flash_attn_func"

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        return _first(_flash_attn_3()(query, key, value, softmax_scale=self.softmax_scale, causal=self.causal))


class FlashAttn4Impl(AttentionImpl):
    @property
    def kernel(self) -> str:
        return "flash_attn.cute.flash_attn_func"

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        return _first(_flash_attn_4()(query, key, value, softmax_scale=self.softmax_scale, causal=self.causal))
