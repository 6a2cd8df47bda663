"""Every backend that serves on the GPU at hand, against fp64 softmax attention; needs CUDA devices."""

from __future__ import annotations

import pytest
import torch

from backends.interface import AttentionMetadata, CallShape, Requirements
from backends.kernels.masking import whole_mask
from backends.kernels.reference import plain_attention
from backends.platforms.facts import local_device
from backends.registry import Registry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCE = {"bfloat16": 5e-3, "float16": 5e-3, "float32": 1e-5}
CASES = [
    pytest.param(backend, variant.name, id=f"{backend}-{variant.name}")
    for backend in Registry().names()
    for variant in Registry().get_class(backend).variants
]


def mask_of(kind: str, rows: int, keys: int) -> torch.Tensor | None:
    """A third of the keys is hidden; of a full mask the first row sees nothing."""
    if kind == "none":
        return None
    generator = torch.Generator("cuda").manual_seed(1)
    mask = torch.rand(2, 1, rows if kind == "full" else 1, keys, device="cuda", generator=generator) < 0.7
    mask[..., 0] = True
    if kind == "full":
        mask[:, :, 0] = False
    return mask


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "key_padding", "full"])
@pytest.mark.parametrize("length", [(7, 7), (129, 129), (1000, 1000), (175, 512)])
@pytest.mark.parametrize("head_size", [64, 80, 128])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("backend", "variant"), CASES)
def test_a_variant_that_serves_is_exact(
    backend: str,
    variant: str,
    dtype: str,
    kv_heads: int,
    head_size: int,
    length: tuple[int, int],
    mask: str,
    causal: bool,
) -> None:
    if causal and length[0] != length[1]:
        pytest.skip("causal attention has as many queries as keys")
    registry = Registry()
    declared = next(v for v in registry.get_class(backend).variants if v.name == variant)
    required = Requirements(head_size, 4, kv_heads, dtype, "cross", causal, mask)  # type: ignore[arg-type]
    refused = declared.faults(required, local_device("cuda", registry.distributions()))
    if refused:
        pytest.skip(str(refused[0]))
    generator = torch.Generator("cuda").manual_seed(0)
    kind = getattr(torch, dtype)

    def draw(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(2, rows, heads, head_size, device="cuda", generator=generator).to(kind)

    query, key, value = draw(length[0], 4), draw(length[1], kv_heads), draw(length[1], kv_heads)
    metadata = AttentionMetadata(mask_of(mask, *length))
    impl = registry.get_class(backend).get_impl_cls(declared)(softmax_scale=head_size**-0.5, causal=causal)
    impl.load()
    impl.prepare(query.device, kind)
    shape = CallShape(2, *length, 4, kv_heads, head_size, metadata.features)

    with torch.no_grad():
        out = impl.forward(query, key, value, metadata, impl.plan(shape)).double()
        allowed = whole_mask(query, key, metadata, causal=causal)
        exact = plain_attention(query.double(), key.double(), value.double(), scale=head_size**-0.5, mask=allowed)

    assert out.shape == exact.shape
    assert torch.linalg.vector_norm(out - exact) <= TOLERANCE[dtype] * torch.linalg.vector_norm(exact)
