"""torch.nn.functional.scaled_dot_product_attention, with torch choosing the kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from backends.interface import AttentionImpl, AttentionMetadata
from backends.kernels.cudnn_tiles import breaks_backward, chosen_by_torch, differentiated, lengthened
from backends.kernels.masking import causal_mask, whole_mask, zero_blind_rows


class TorchSdpaImpl(AttentionImpl):
    """by_cudnn: whether cuDNN may compute; not before `prepare`."""

    by_cudnn = False

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        self.by_cudnn = chosen_by_torch(device, dtype)

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
        mask, added = self._masks(query, key, metadata)
        plain_causal = self.causal and added is None
        learns = self.by_cudnn and not plain_causal and differentiated(query, key, value)
        if learns and breaks_backward(query.shape[1], key.shape[1]):
            key, value, added = lengthened(key, value, added)
        out = scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=added,
            is_causal=plain_causal,
            scale=self.softmax_scale,
            enable_gqa=True if query.shape[2] != key.shape[2] else False,  # noqa: SIM210  # graphs compare to no bool
        )
        return zero_blind_rows(out.transpose(1, 2), mask)

    def _masks(
        self, query: torch.Tensor, key: torch.Tensor, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Which keys are seen, and the mask as torch takes it: boolean, or added to the scores. With one of its own it
        takes no causality beside it.
        """
        mask, bias = metadata.mask, metadata.bias
        if bias is not None:
            mask = whole_mask(query, key, metadata, causal=self.causal)
            return mask, bias if mask is None else bias.masked_fill(~mask, float("-inf"))
        if mask is not None and self.causal:
            mask = mask & causal_mask(query, key)
        return mask, mask
