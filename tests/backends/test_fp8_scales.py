"""FlashAttention 3 in fp8: the scale of a KV group is that of all its heads, and goes to the kernel with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from backends.declared.flash_attn import FlashQuant
from backends.interface import AttentionMetadata, CallShape, PackedLengths
from backends.kernels.flash_attn import FlashAttn3Impl
from backends.kernels.masking import whole_mask
from backends.kernels.reference import plain_attention
from tests.backends import flash_doubles
from tests.exact import random_qkv, relative_error

SCALE = 64**-0.5
CLOSE = 0.12
"""fp8_e4m3 keeps three bits; a head that is cut off is wrong by more than half."""


@pytest.fixture(autouse=True)
def fa3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with flash_doubles.packages(monkeypatch):
        yield


@pytest.mark.parametrize("packed", [None, PackedLengths((13, 7, 20), (13, 7, 20))], ids=["whole", "documents"])
@pytest.mark.parametrize("largest", range(6))
@pytest.mark.parametrize("causal", [False, True])
def test_heads_of_one_kv_group_may_differ_in_size(causal: bool, largest: int, packed: PackedLengths | None) -> None:
    batch = 1 if packed is not None else 2
    query, key, value = random_qkv(batch, 40, 40, 6, 2, 64, torch.bfloat16)
    query[:, :, largest] *= 30
    key[:, :, largest // 3] *= 5
    value[:, :, 1] *= 20
    impl = FlashAttn3Impl(softmax_scale=SCALE / 30, causal=causal, options=(("quant", FlashQuant("fp8_e4m3")),))
    impl.prepare(query.device, query.dtype)
    metadata = AttentionMetadata(packed=packed)
    plan = impl.plan(CallShape(batch, 40, 40, 6, 2, 64, metadata.features, packed))
    out = impl.forward(query, key, value, metadata, plan)
    mask = whole_mask(query, key, metadata, causal=causal)
    exact = plain_attention(query.double(), key.double(), value.double(), scale=SCALE / 30, mask=mask)
    for head in range(6):
        assert relative_error(out[:, :, head], exact[:, :, head]) <= CLOSE
