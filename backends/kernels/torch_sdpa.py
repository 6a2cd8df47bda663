"""torch.nn.functional.scaled_dot_product_attention, with torch choosing the kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from backends.interface import AttentionImpl, AttentionMetadata
from backends.kernels.masking import causal_mask, zero_blind_rows


class TorchSdpaImpl(AttentionImpl):
    @property
    def kernel(self) -> str:
        return "torch.nn.functional.scaled_dot_product_attention"

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> torch.Tensor:
        mask = metadata.mask
        if mask is not None and self.causal:  # torch takes one or the other
            mask = mask & causal_mask(query, key)
        out = scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=self.causal and mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return zero_blind_rows(out.transpose(1, 2), mask)
