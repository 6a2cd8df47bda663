"""A small layer of one rank or more, its inputs, and what its calls can carry."""

from __future__ import annotations

from typing import Any

import torch

from backends.interface import (
    AttentionMetadata,
    PackedLengths,
)
from parallel.attention import Attention
from tests.exact import random_qkv
from tests.parallel.layers import context_of

HEADS, SIZE, LENGTH = 4, 16, 12


def layer_of(context: Any = None, role: str = "self", **options: Any) -> Attention:
    return Attention(HEADS, SIZE, role=role, kind="self", context=context or context_of(), name="blocks.0", **options)


def qkv() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return random_qkv(2, LENGTH, LENGTH, HEADS, HEADS, SIZE, torch.float32)


def drawn(*shape: int) -> torch.Tensor:
    """A mask that is the same in every process."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(4)) < 0.7


CARRIED = {
    "key_padding": AttentionMetadata(drawn(2, 1, 1, LENGTH)),
    "full": AttentionMetadata(drawn(1, 1, LENGTH, LENGTH)),
    "per_head": AttentionMetadata(drawn(1, HEADS, LENGTH, LENGTH)),
    "window": AttentionMetadata(window=(2, None)),
    "soft_cap": AttentionMetadata(soft_cap=3.0),
    "sinks": AttentionMetadata(sinks=torch.linspace(-1, 2, HEADS)),
    "packed": AttentionMetadata(packed=PackedLengths((5, 0, 7), (5, 0, 7))),
}
