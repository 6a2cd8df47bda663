"""FlashAttention of other vendors than NVIDIA, each with the interface that its package publishes."""

from __future__ import annotations

import functools
from typing import Any

import torch

from backends.interface import AttentionMetadata
from backends.kernels.packages import FlashImpl, PackageImpl, first, imported
from backends.kernels.ragged import PlacedCall, RaggedImpl


@functools.cache
def _hidden_from_causal(device: torch.device) -> torch.Tensor:
    """The mask that stands for causality of any length: 2048 by 2048, True where a query may not look."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)


class AiterImpl(FlashImpl):
    """AMD's AITER."""

    path = "aiter.flash_attn_func"


class MateImpl(FlashImpl):
    """Moore Threads' MATE, through its wrapper with FlashAttention 3's interface."""

    path = "flash_attn_interface.flash_attn_func"


class NpuFusionImpl(PackageImpl):
    """Ascend's fusion attention. Without a mask it computes everything; its sparse mode 2 is causality counted from the
    first row and the first key.
    """

    path = "torch_npu.npu_fusion_attention"

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
        result = imported(self.path)(
            query, key, value, head_num=query.shape[2], input_layout="BSND", scale=self.softmax_scale, **causal
        )
        return first(tuple(result))


class XpuImpl(RaggedImpl, FlashImpl):
    """vLLM's kernels for Intel GPUs."""

    path = "vllm_xpu_kernels.flash_attn_interface.flash_attn_varlen_func"

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        placed: PlacedCall,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        return first(imported(self.path)(query, key, value, **placed.settings(), **self.settings(metadata)))
