"""A backend that takes `skip_softmax` on any device, importable by name: dense, it notes what it was told to skip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from backends.interface import AttentionBackend, AttentionMetadata, Variant
from backends.kernels.torch_sdpa import TorchSdpaImpl
from backends.skip_softmax import SkipSoftmax

SKIPPING = {"SKIPPING": f"{__name__}.SkippingBackend"}


class SkippingImpl(TorchSdpaImpl):
    factors: ClassVar[list[float | None]] = []

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> torch.Tensor:
        self.factors.append(self.options["skip_softmax"].factor(key.shape[1]))
        return super().forward(query, key, value, metadata)


class SkippingBackend(AttentionBackend):
    variants = (Variant("dense", f"{__name__}.SkippingImpl"),)
    blocks: ClassVar[Mapping[str, type]] = {"skip_softmax": SkipSoftmax}

    @staticmethod
    def get_name() -> str:
        return "SKIPPING"
