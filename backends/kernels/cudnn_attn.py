"""cuDNN's fused attention through torch; if cuDNN does not take the call, torch raises instead of using another
kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from backends.interface import AttentionMetadata
from backends.kernels.torch_sdpa import TorchSdpaImpl


class CudnnAttnImpl(TorchSdpaImpl):
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
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return super().forward(query, key, value, metadata)
