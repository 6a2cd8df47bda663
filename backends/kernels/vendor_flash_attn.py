"""FlashAttention of other vendors than NVIDIA, each with the interface that its package publishes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from backends.interface import AttentionImpl, AttentionMetadata
from backends.kernels.flash_attn import first
from backends.kernels.ragged import PlacedCall, RaggedImpl


@functools.cache
def _aiter() -> Callable[..., Any]:
    from aiter import flash_attn_func

    return flash_attn_func  # type: ignore[no-any-return]


@functools.cache
def _fusion_attention() -> Callable[..., Any]:
    from torch_npu import npu_fusion_attention

    return npu_fusion_attention  # type: ignore[no-any-return]


@functools.cache
def _xpu_ragged() -> Callable[..., Any]:
    from vllm_xpu_kernels.flash_attn_interface import flash_attn_varlen_func

    return flash_attn_varlen_func  # type: ignore[no-any-return]


@functools.cache
def _mate() -> Callable[..., Any]:
    from flash_attn_interface import flash_attn_func

    return flash_attn_func  # type: ignore[no-any-return]


@functools.cache
def _hidden_from_causal(device: torch.device) -> torch.Tensor:
    """The mask that stands for causality of any length: 2048 by 2048, True where a query may not look."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)


class AiterImpl(AttentionImpl):
    """AMD's AITER."""

    @property
    def kernel(self) -> str:
        return "aiter.flash_attn_func"

    @classmethod
    def load(cls) -> None:
        _aiter()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> torch.Tensor:
        return first(_aiter()(query, key, value, softmax_scale=self.softmax_scale, causal=self.causal))


class NpuFusionImpl(AttentionImpl):
    """Ascend's fusion attention. Without a mask it computes everything; its sparse mode 2 is causality counted from the
    first row and the first key.
    """

    @property
    def kernel(self) -> str:
        return "torch_npu.npu_fusion_attention"

    @classmethod
    def load(cls) -> None:
        _fusion_attention()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> torch.Tensor:
        causal: dict[str, Any] = {}
        if self.causal:
            causal = {"atten_mask": _hidden_from_causal(query.device), "sparse_mode": 2}
        result = _fusion_attention()(
            query, key, value, head_num=query.shape[2], input_layout="BSND", scale=self.softmax_scale, **causal
        )
        return first(tuple(result))


class XpuImpl(RaggedImpl):
    """vLLM's kernels for Intel GPUs."""

    @property
    def kernel(self) -> str:
        return "vllm_xpu_kernels.flash_attn_interface.flash_attn_varlen_func"

    @classmethod
    def load(cls) -> None:
        _xpu_ragged()

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        placed: PlacedCall,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        return first(
            _xpu_ragged()(
                query,
                key,
                value,
                max_seqlen_q=max(placed.call.query_lengths),
                cu_seqlens_q=placed.query_offsets,
                max_seqlen_k=max(placed.call.key_lengths),
                cu_seqlens_k=placed.key_offsets,
                softmax_scale=self.softmax_scale,
                causal=self.causal,
            )
        )


class MateImpl(AttentionImpl):
    """Moore Threads' MATE, through its wrapper with FlashAttention 3's interface."""

    @property
    def kernel(self) -> str:
        return "flash_attn_interface.flash_attn_func"

    @classmethod
    def load(cls) -> None:
        _mate()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> torch.Tensor:
        return first(_mate()(query, key, value, softmax_scale=self.softmax_scale, causal=self.causal))
