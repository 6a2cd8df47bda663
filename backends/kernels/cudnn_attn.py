"""cuDNN's fused attention through torch; if cuDNN does not take the call, torch raises instead of using another
kernel. It takes none with a single key: that is one product, which is computed as it is written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from backends.interface import AttentionMetadata
from backends.kernels.masking import blind_lse, zero_blind_rows
from backends.kernels.reference import ReferenceImpl
from backends.kernels.torch_sdpa import TorchSdpaImpl


class CudnnAttnImpl(TorchSdpaImpl):
    by_cudnn = True

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Nothing: every call is cuDNN's."""

    @property
    def _plain(self) -> ReferenceImpl:
        return ReferenceImpl(softmax_scale=self.softmax_scale, causal=self.causal)

    @property
    def kernel(self) -> str:
        return f"{super().kernel}[{SDPBackend.CUDNN_ATTENTION.name}]"

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> torch.Tensor:
        if key.shape[1] == 1:
            return self._plain.forward(query, key, value, metadata)
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return super().forward(query, key, value, metadata)

    def forward_with_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """By the operator that torch's own dispatch ends in, which alone returns the log-sum-exp."""
        if key.shape[1] == 1:
            return self._plain.forward_with_lse(query, key, value, metadata)
        mask, added = self._masks(query, key, metadata)
        if added is not None and added.dtype == torch.bool:
            added = torch.zeros_like(added, dtype=query.dtype).masked_fill(~added, float("-inf"))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            None if added is None else added.expand(query.shape[0], query.shape[2], query.shape[1], key.shape[1]),
            True,
            is_causal=self.causal and added is None,
            scale=self.softmax_scale,
        )
        return zero_blind_rows(out.transpose(1, 2), mask), blind_lse(lse.view(lse.shape[:3]), mask)
