"""Every variant that the GPU at hand can run, over the calls that it takes, against fp64 softmax attention."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from backends.interface import AttentionMetadata, CallShape, Features, PackedLengths, Requirements, Variant
from backends.kernels.masking import whole_mask
from backends.kernels.reference import plain_attention
from backends.platforms.facts import local_device
from backends.registry import Registry

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

HEADS = 4
TOLERANCE = {"bfloat16": 5e-3, "float16": 5e-3, "float32": 1e-5}
LENGTHS = [(7, 7), (129, 129), (1000, 1000), (175, 512)]
FEATURES = {
    "plain": Features(),
    "key_padding": Features(mask="key_padding"),
    "full": Features(mask="full"),
    "per_head": Features(mask="per_head"),
    "window": Features(window=True),
    "soft_cap": Features(soft_cap=True),
    "sinks": Features(sinks=True),
    "packed": Features(packed=True),
}


def cases() -> Iterator[object]:
    """What the variants of this device take; the rest is refused, which needs no GPU to be tested."""
    registry = Registry()
    device = local_device("cuda", registry.distributions())
    for name in registry.names():
        for variant in registry.get_class(name).variants:
            for dtype, size, kv_heads, causal, features in product(
                TOLERANCE, (64, 80, 128), (HEADS, HEADS // 2), (False, True), FEATURES
            ):
                plain = Requirements(size, HEADS, kv_heads, dtype, "cross", causal)
                call = plain.carrying(FEATURES[features])
                if not variant.faults(call, device):
                    text = f"{name}-{variant.name}-{dtype}-{size}-{kv_heads}-{'causal' if causal else 'all'}-{features}"
                    yield pytest.param(name, variant, call, features, id=text)


def metadata_of(features: str, rows: int, keys: int) -> AttentionMetadata:
    """What a call with the features carries. Of a full mask the first row sees nothing."""
    generator = torch.Generator("cuda").manual_seed(1)

    def mask(heads: int, queries: int) -> torch.Tensor:
        drawn = torch.rand(2, heads, queries, keys, device="cuda", generator=generator) < 0.7
        drawn[..., 0] = True
        if queries > 1:
            drawn[:, :, 0] = False
        return drawn

    cut = (rows // 3, keys // 3)
    made = {
        "plain": AttentionMetadata(),
        "key_padding": AttentionMetadata(mask(1, 1)),
        "full": AttentionMetadata(mask(1, rows)),
        "per_head": AttentionMetadata(mask(HEADS, rows)),
        "window": AttentionMetadata(window=(5, 3)),
        "soft_cap": AttentionMetadata(soft_cap=2.0),
        "sinks": AttentionMetadata(sinks=torch.linspace(-1, 2, HEADS, device="cuda")),
        "packed": AttentionMetadata(packed=PackedLengths((cut[0], rows - cut[0]), (cut[1], keys - cut[1]))),
    }
    return made[features]


@pytest.mark.parametrize("length", LENGTHS, ids=str)
@pytest.mark.parametrize(("backend", "variant", "call", "features"), list(cases()))
def test_a_variant_is_exact_for_every_call_that_it_takes(
    backend: str, variant: Variant, call: Requirements, features: str, length: tuple[int, int]
) -> None:
    rows, keys = length
    if rows != keys and (call.causal or call.window):
        rows = keys  # positions are common then
    generator = torch.Generator("cuda").manual_seed(0)
    dtype, size, kv_heads = getattr(torch, call.dtype), call.head_size, call.num_kv_heads

    def draw(count: int, heads: int) -> torch.Tensor:
        return torch.randn(2, count, heads, size, device="cuda", generator=generator).to(dtype)

    query, key, value = draw(rows, HEADS), draw(keys, kv_heads), draw(keys, kv_heads)
    metadata = metadata_of(features, rows, keys)
    impl = Registry().get_class(backend).get_impl_cls(variant)(softmax_scale=size**-0.5, causal=call.causal)
    impl.load()
    impl.prepare(query.device, dtype)
    shape = CallShape(2, rows, keys, HEADS, kv_heads, size, metadata.features, metadata.packed)

    with torch.no_grad():
        out = impl.forward(query, key, value, metadata, impl.plan(shape)).double()
        exact = plain_attention(
            query.double(),
            key.double(),
            value.double(),
            scale=size**-0.5,
            mask=whole_mask(query, key, metadata, causal=call.causal),
            soft_cap=metadata.soft_cap,
            sinks=metadata.sinks,
        )

    assert out.shape == exact.shape
    assert torch.linalg.vector_norm(out - exact) <= TOLERANCE[call.dtype] * torch.linalg.vector_norm(exact)
