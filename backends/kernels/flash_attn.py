"""FlashAttention 2 (`flash-attn`), 3 (`fa3-fwd`) and 4 (`flash-attn-4`), forward only, on [B, S, H, D] tensors as they
are.
"""

from __future__ import annotations

from typing import Any

import torch

from backends.interface import AttentionMetadata, CallShape
from backends.kernels.packages import FlashImpl, first, imported
from backends.kernels.ragged import PlacedCall, RaggedImpl

RAGGED = "flash_attn.flash_attn_varlen_func"


class FlashAttn2Impl(RaggedImpl, FlashImpl):
    """Its masks count from the last row and the last key: the same as from the first ones, since causal calls and
    those with a window have as many queries as keys.
    """

    path = "flash_attn.flash_attn_func"

    @classmethod
    def load(cls) -> None:
        super().load()
        imported(RAGGED)

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
        return FlashImpl.forward(self, query, key, value, metadata, plan)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        placed: PlacedCall,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        ragged = placed.settings()
        return first(imported(RAGGED)(query, key, value, **ragged, **self.settings(metadata)))

    def settings(self, metadata: AttentionMetadata) -> dict[str, Any]:
        before, after = metadata.window if metadata.window is not None else (None, None)
        return {
            **super().settings(metadata),
            "window_size": (-1 if before is None else before, -1 if after is None else after),
            "softcap": metadata.soft_cap or 0.0,
        }


class FlashAttn3Impl(FlashImpl):
    path = "fa3_fwd_interface.flash_attn_func"


class FlashAttn4Impl(FlashImpl):
    path = "flash_attn.cute.flash_attn_func"
