"""Every variant that the GPU at hand can run, over the calls that it takes, against fp64 softmax attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from backends.interface import AttentionMetadata, CallShape, Features, PackedLengths, Requirements, Variant
from backends.kernels.masking import whole_mask
from backends.kernels.reference import plain_attention_with_lse
from backends.platforms.facts import local_device
from backends.registry import Registry

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

HEADS = 4
LOSSY = 5e-2
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


def cases(*, lse: bool = False, only: str | None = None) -> Iterator[object]:
    """What the variants of this device take; the rest is refused, which needs no GPU to be tested. lse: with the
    log-sum-exp. only: of the features.
    """
    registry = Registry()
    device = local_device("cuda", registry.distributions())
    for name in registry.names():
        for variant in registry.get_class(name).variants:
            for dtype, size, kv_heads, causal, features in product(
                TOLERANCE, (64, 80, 128), (HEADS, HEADS // 2), (False, True), FEATURES
            ):
                plain = Requirements(size, HEADS, kv_heads, dtype, "cross", causal)
                call = plain.carrying(FEATURES[features])
                if only in (None, features) and not variant.faults(replace(call, lse=lse), device):
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


class Drawn:
    """A call with its tensors, as a layer makes it, and what it is to give."""

    def __init__(self, backend: str, variant: Variant, call: Requirements, length: tuple[int, int]) -> None:
        rows, keys = length
        if rows != keys and (call.causal or call.window):
            rows = keys  # positions are common then
        generator = torch.Generator("cuda").manual_seed(0)
        dtype, size, kv_heads = getattr(torch, call.dtype), call.head_size, call.num_kv_heads

        def draw(count: int, heads: int) -> torch.Tensor:
            return torch.randn(2, count, heads, size, device="cuda", generator=generator).to(dtype)

        self.call, self.rows, self.keys = call, rows, keys
        self.qkv = draw(rows, HEADS), draw(keys, kv_heads), draw(keys, kv_heads)
        impl = Registry().get_class(backend).get_impl_cls(variant)(softmax_scale=size**-0.5, causal=call.causal)
        impl.load()
        impl.prepare(self.qkv[0].device, dtype)
        self.impl = impl

    def plan(self, metadata: AttentionMetadata, keys: int) -> Any:
        shape = (2, self.rows, keys, HEADS, self.call.num_kv_heads, self.call.head_size)
        return self.impl.plan(CallShape(*shape, metadata.features, metadata.packed))

    def exact(self, metadata: AttentionMetadata) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = (tensor.double() for tensor in self.qkv)
        return plain_attention_with_lse(
            query,
            key,
            value,
            scale=self.call.head_size**-0.5,
            mask=whole_mask(query, key, metadata, causal=self.call.causal),
            soft_cap=metadata.soft_cap,
            sinks=metadata.sinks,
        )


def is_close(result: torch.Tensor, exact: torch.Tensor, dtype: str) -> bool:
    difference = torch.linalg.vector_norm(result.double() - exact)
    return bool(difference <= TOLERANCE[dtype] * torch.linalg.vector_norm(exact))


@pytest.mark.parametrize("length", LENGTHS, ids=str)
@pytest.mark.parametrize(("backend", "variant", "call", "features"), list(cases()))
def test_a_variant_is_exact_for_every_call_that_it_takes(
    backend: str, variant: Variant, call: Requirements, features: str, length: tuple[int, int]
) -> None:
    drawn = Drawn(backend, variant, call, length)
    metadata = metadata_of(features, drawn.rows, drawn.keys)
    with torch.no_grad():
        out = drawn.impl.forward(*drawn.qkv, metadata, drawn.plan(metadata, drawn.keys))
        exact, _ = drawn.exact(metadata)
    assert out.shape == exact.shape
    if variant.exactness == "exact":
        assert is_close(out, exact, call.dtype)
    else:
        assert torch.linalg.vector_norm(out.double() - exact) <= LOSSY * torch.linalg.vector_norm(exact)


@pytest.mark.parametrize("length", LENGTHS, ids=str)
@pytest.mark.parametrize(("backend", "variant", "call", "features"), list(cases(lse=True)))
def test_its_log_sum_exp_is_that_of_the_logits(
    backend: str, variant: Variant, call: Requirements, features: str, length: tuple[int, int]
) -> None:
    drawn = Drawn(backend, variant, call, length)
    metadata = metadata_of(features, drawn.rows, drawn.keys)
    with torch.no_grad():
        out, lse = drawn.impl.forward_with_lse(*drawn.qkv, metadata, drawn.plan(metadata, drawn.keys))
        exact, exact_lse = drawn.exact(metadata)
    assert is_close(out, exact, call.dtype)
    assert (lse.shape, lse.dtype) == (exact_lse.shape, torch.float32)
    blind = exact_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), blind)
    assert torch.allclose(lse.double().masked_fill(blind, 0), exact_lse.masked_fill(blind, 0), atol=1e-3)


@pytest.mark.parametrize(("backend", "variant", "call", "features"), list(cases(lse=True, only="plain")))
def test_two_halves_of_the_keys_merge_by_it_to_the_whole(
    backend: str, variant: Variant, call: Requirements, features: str
) -> None:
    if call.causal:
        pytest.skip("a half of the keys has other positions")
    drawn = Drawn(backend, variant, call, (175, 512))
    query, key, value = drawn.qkv
    none, halves = AttentionMetadata(), (slice(0, 200), slice(200, 512))
    with torch.no_grad():
        parts = [
            drawn.impl.forward_with_lse(query, key[:, half], value[:, half], none, drawn.plan(none, keys))
            for half, keys in zip(halves, (200, 312), strict=True)
        ]
        exact, exact_lse = drawn.exact(none)
    whole = torch.logaddexp(parts[0][1], parts[1][1]).double()
    out = sum(o.double() * (lse - whole).exp().transpose(1, 2)[..., None] for o, lse in parts)
    assert isinstance(out, torch.Tensor)
    assert is_close(out, exact, call.dtype)
    assert torch.allclose(whole, exact_lse, atol=1e-3)
