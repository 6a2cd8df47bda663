"""The attention processor of Wan: project, normalise, rotate, attend, project back; on this rank's rows."""

from __future__ import annotations

from typing import Any

import torch

from parallel.attention import Attention
from parallel.models.sharding import ShardedModel

RotaryTables = tuple[torch.Tensor, torch.Tensor]


def rotate_pairs(rows: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    """Rotary embedding of interleaved pairs (Su et al., 2021, arXiv:2104.09864).

    rows [B, S, H, D]; tables: cosines and sines [1, S, 1, D], each value standing twice. Computed in the tables'
    precision, returned in the rows' dtype.
    """
    cosines, sines = tables
    even, odd = rows[..., 0::2], rows[..., 1::2]
    cos, sin = cosines[..., 0::2], sines[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(rows)


class WanAttentionProcessor:
    """Serves one WanAttention through diffusers' `set_processor`.

    attention: of the video rows to themselves or to the text. image: of the video rows to the image keys, which stand
    before the text in `encoder_hidden_states`; None where the model has none. Keys from an encoder are replicated:
    they are never exchanged.
    """

    def __init__(self, attention: Attention, sharded: ShardedModel, image: Attention | None = None) -> None:
        self.attention = attention
        self.image = image
        self.sharded = sharded

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: RotaryTables | None = None,
    ) -> torch.Tensor:
        if attention_mask is not None:
            raise ValueError(f"{self.attention.name}: Wan passes no attention mask, and this processor serves none")
        source, image_source = hidden_states, None
        if encoder_hidden_states is not None:
            image_tokens = self.sharded.image_tokens if self.image is not None else 0
            image_source, source = encoder_hidden_states[:, :image_tokens], encoder_hidden_states[:, image_tokens:]
        query, key, value = self._project(attn, hidden_states, source)
        if rotary_emb is not None:
            query, key = rotate_pairs(query, rotary_emb), rotate_pairs(key, rotary_emb)
        out = self.attention(query, key, value, plan=self.sharded.forwards.plan_for(self.attention, query=query))
        if self.image is not None and image_source is not None:
            image_key = attn.norm_added_k(attn.add_k_proj(image_source)).unflatten(2, (attn.heads, -1))
            image_value = attn.add_v_proj(image_source).unflatten(2, (attn.heads, -1))
            plan = self.sharded.forwards.plan_for(self.image, query=query)
            out = out + self.image(query, image_key, image_value, plan=plan)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3)))  # type: ignore[no-any-return]

    @staticmethod
    def _project(
        attn: Any, rows: torch.Tensor, source: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query = attn.norm_q(attn.to_q(rows)).unflatten(2, (attn.heads, -1))
        key = attn.norm_k(attn.to_k(source)).unflatten(2, (attn.heads, -1))
        value = attn.to_v(source).unflatten(2, (attn.heads, -1))
        return query, key, value
