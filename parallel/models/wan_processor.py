"""The attention processor of Wan: project, normalise, rotate, attend, project back; on this rank's rows."""

from __future__ import annotations

from typing import Any

import torch

from configs.faults import Fault, FaultError
from parallel.attention import Attention
from parallel.models.autocast import autocast_dtype
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

    @property
    def layers(self) -> tuple[Attention, ...]:
        """Its layers, in the order in which it calls them."""
        return (self.attention,) if self.image is None else (self.attention, self.image)

    @property
    def _attention_backend(self) -> None:
        """Where diffusers' `set_attention_backend` puts its choice, which nothing here would use."""
        return

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        if backend is not None:
            rule = "the model's sequence is shared, and Raylysses chooses its backends"
            remedy = 'pass attention=... to sequence_parallel, as in attention="TORCH_SDPA"'
            raise FaultError([Fault("set_attention_backend", getattr(backend, "value", backend), rule, remedy)])

    @property
    def _parallel_config(self) -> None:
        """Where diffusers' `enable_parallelism` puts its configuration."""
        return

    @_parallel_config.setter
    def _parallel_config(self, config: Any) -> None:
        if config is not None:
            rule = "the model's sequence is shared already"
            remedy = "pass ulysses=... or ring=... to sequence_parallel, or call close() first"
            raise FaultError([Fault("enable_parallelism", None, rule, remedy)])

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
        out = self._attend(self.attention, query, key, value)
        if self.image is not None and image_source is not None:
            image_key, image_value = self._project_image(attn, image_source)
            image_key = attn.norm_added_k(image_key)
            image_key, image_value = (each.unflatten(2, (attn.heads, -1)) for each in (image_key, image_value))
            out = out + self._attend(self.image, query, image_key, image_value)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3)))  # type: ignore[no-any-return]

    def _attend(self, layer: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention in one dtype.

        Under autocast norms give fp32 and projections 16 bits. Q, K and V are cast as autocast casts those of
        `scaled_dot_product_attention`, and the backend runs without autocast, which would round what it keeps in fp32.
        """
        device_type = query.device.type
        dtype = autocast_dtype(device_type)
        if dtype is None:
            out: torch.Tensor = layer(query, key, value, plan=self.sharded.plan_for(layer, query))
            return out
        if query.dtype != torch.float64:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        with torch.autocast(device_type, enabled=False):
            out = layer(query, key, value, plan=self.sharded.plan_for(layer, query))
        return out

    @staticmethod
    def _project(
        attn: Any, rows: torch.Tensor, source: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not attn.fused_projections:
            query, key, value = attn.to_q(rows), attn.to_k(source), attn.to_v(source)
        elif attn.is_cross_attention:
            query, (key, value) = attn.to_q(rows), attn.to_kv(source).chunk(2, dim=-1)
        else:
            query, key, value = attn.to_qkv(rows).chunk(3, dim=-1)
        query = attn.norm_q(query).unflatten(2, (attn.heads, -1))
        key = attn.norm_k(key).unflatten(2, (attn.heads, -1))
        return query, key, value.unflatten(2, (attn.heads, -1))

    @staticmethod
    def _project_image(attn: Any, source: torch.Tensor) -> tuple[Any, Any]:
        if attn.fused_projections:
            key, value = attn.to_added_kv(source).chunk(2, dim=-1)
            return key, value
        return attn.add_k_proj(source), attn.add_v_proj(source)
