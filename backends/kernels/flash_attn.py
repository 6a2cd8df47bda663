"""FlashAttention 2 (`flash-attn`), 3 (`fa3-fwd`) and 4 (`flash-attn-4`), forward only, on [B, S, H, D] tensors as they
are. All of them give the log-sum-exp as natural logarithms in fp32, [B, H, Sq], and that of ragged calls as [H, rows].
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from backends.interface import AttentionMetadata, CallShape
from backends.kernels.packages import FlashImpl, first, imported
from backends.kernels.ragged import PlacedCall, RaggedImpl, nothing_with_lse

RAGGED = "flash_attn.flash_attn_varlen_func"


class FlashLseImpl(FlashImpl):
    """lse_switch: the argument that makes the kernel return (output, LSE, ...)."""

    lse_switch: ClassVar[str]

    def forward_with_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        asked = {**self.settings(metadata), self.lse_switch: True}
        out, lse, *_ = imported(self.path)(query, key, value, **asked)
        return out, _none_is_minus_infinity(lse)


class FlashAttn2Impl(RaggedImpl, FlashLseImpl):
    """Its masks count from the last row and the last key: the same as from the first ones, since causal calls and
    those with a window have as many queries as keys.
    """

    path = "flash_attn.flash_attn_func"
    lse_switch = "return_attn_probs"

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

    def forward_with_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if metadata.packed is None:
            return super().forward_with_lse(query, key, value, metadata)
        placed = self.placed(query, key, metadata, plan)
        call = placed.call
        if not call.taking_part:
            return nothing_with_lse(query)
        asked = {**placed.settings(), **self.settings(metadata), self.lse_switch: True}
        out, lse, *_ = imported(RAGGED)(*call.rows(query, key, value), **asked)
        rows = _none_is_minus_infinity(_unpadded(lse, call.query_lengths)).T
        return call.all_rows(out), call.all_rows(rows, float("-inf")).transpose(1, 2)

    def settings(self, metadata: AttentionMetadata) -> dict[str, Any]:
        before, after = metadata.window if metadata.window is not None else (None, None)
        return {
            **super().settings(metadata),
            "window_size": (-1 if before is None else before, -1 if after is None else after),
            "softcap": metadata.soft_cap or 0.0,
        }


class FlashAttn3Impl(FlashLseImpl):
    path = "fa3_fwd_interface.flash_attn_func"
    lse_switch = "return_attn_probs"


class FlashAttn4Impl(FlashLseImpl):
    path = "flash_attn.cute.flash_attn_func"
    lse_switch = "return_lse"


def _none_is_minus_infinity(lse: torch.Tensor) -> torch.Tensor:
    """Versions 2 and 3 write plus infinity for a row without keys."""
    return lse.masked_fill(lse == float("inf"), float("-inf"))


def _unpadded(lse: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """[H, rows]; the first releases of 2.6 have [documents, H, longest]."""
    if lse.dim() == 2:
        return lse
    return torch.cat([lse[index, :, :length] for index, length in enumerate(lengths)], dim=1)
