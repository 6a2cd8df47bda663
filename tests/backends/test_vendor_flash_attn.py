"""FLASH_ATTN's kernels other than 3 and 4, over stand-ins with the published signatures, against softmax in fp64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from backends.interface import AttentionImpl, AttentionMetadata, CallShape, PackedLengths
from backends.kernels.flash_attn import FlashAttn2Impl
from backends.kernels.masking import whole_mask
from backends.kernels.reference import plain_attention
from backends.kernels.vendor_flash_attn import AiterImpl, MateImpl, NpuFusionImpl, XpuImpl
from tests.backends.flash_answers import CALLS
from tests.backends.flash_doubles import PUBLISHED, packages
from tests.backends.vendor_doubles import put
from tests.exact import random_qkv, relative_error

SCALE = 0.3
CLOSE = 5e-3
NO_METADATA = AttentionMetadata()
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
ALL = [FlashAttn2Impl, AiterImpl, NpuFusionImpl, XpuImpl, MateImpl]
every_kernel = pytest.mark.parametrize("kernel", ALL)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with packages(monkeypatch):
        yield


def exact(qkv: QKV, metadata: AttentionMetadata = NO_METADATA, *, causal: bool = False) -> torch.Tensor:
    query, key, value = (tensor.double() for tensor in qkv)
    mask = whole_mask(query, key, metadata, causal=causal)
    return plain_attention(query, key, value, scale=SCALE, mask=mask, soft_cap=metadata.soft_cap)


def run(
    kernel: type[AttentionImpl], qkv: QKV, metadata: AttentionMetadata = NO_METADATA, *, causal: bool = False
) -> torch.Tensor:
    query, key, _ = qkv
    impl = kernel(softmax_scale=SCALE, causal=causal)
    impl.prepare(query.device, query.dtype)
    shape = CallShape(
        *query.shape[:2], key.shape[1], query.shape[2], key.shape[2], query.shape[3], metadata.features, metadata.packed
    )
    planned = impl.plan(shape)
    out = impl.forward(*qkv, metadata, *(() if planned is None else (planned,)))
    assert (out.shape, out.dtype) == (query.shape, query.dtype)
    return out


@every_kernel
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 37, 37, 4, 4, 64), (3, 19, 19, 6, 2, 64), (2, 23, 23, 4, 1, 128)], ids=str)
def test_attention_equals_softmax_in_fp64(
    kernel: type[AttentionImpl], shape: tuple[int, int, int, int, int, int], dtype: torch.dtype, causal: bool
) -> None:
    qkv = random_qkv(*shape, dtype)
    assert relative_error(run(kernel, qkv, causal=causal), exact(qkv, causal=causal)) <= CLOSE


@every_kernel
def test_queries_and_keys_may_differ_in_number(kernel: type[AttentionImpl]) -> None:
    qkv = random_qkv(2, 5, 41, 4, 2, 64, torch.bfloat16)
    assert relative_error(run(kernel, qkv), exact(qkv)) <= CLOSE


@pytest.mark.parametrize("kernel", [FlashAttn2Impl, AiterImpl, NpuFusionImpl, MateImpl])
def test_the_tensors_are_passed_as_they_are(kernel: type[AttentionImpl]) -> None:
    qkv = random_qkv(2, 5, 7, 4, 2, 64, torch.bfloat16)
    run(kernel, qkv)
    (call,) = CALLS
    names = ("query", "key", "value") if kernel is NpuFusionImpl else ("q", "k", "v")
    assert all(call[name] is tensor for name, tensor in zip(names, qkv, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(3, 2), (3, 0), (0, 0), (None, 4), (5, None), (None, None), (40, 40)])
@pytest.mark.parametrize("packed", [None, PackedLengths((12, 0, 13), (12, 0, 13))])
def test_flash_attention_2_serves_any_window(
    causal: bool, window: tuple[int | None, int | None], packed: PackedLengths | None
) -> None:
    qkv = random_qkv(2, 25, 25, 4, 2, 64, torch.bfloat16)
    whole = AttentionMetadata(window=window)
    metadata = AttentionMetadata(window=window, packed=packed)
    out = run(FlashAttn2Impl, qkv, metadata, causal=causal)
    assert relative_error(out, exact(qkv, metadata, causal=causal)) <= CLOSE
    assert CALLS[0]["window_size"] == tuple(-1 if side is None else side for side in whole.window or ())


@pytest.mark.parametrize("packed", [None, PackedLengths((6, 11), (9, 8))])
def test_flash_attention_2_caps_scores(packed: PackedLengths | None) -> None:
    qkv = random_qkv(1, 17, 17, 4, 2, 64, torch.bfloat16)
    metadata = AttentionMetadata(soft_cap=1.5, packed=packed)
    assert relative_error(run(FlashAttn2Impl, qkv, metadata), exact(qkv, metadata)) <= CLOSE
    assert CALLS[0]["softcap"] == 1.5


@pytest.mark.parametrize("kernel", [FlashAttn2Impl, XpuImpl])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 3, 11), (19,), (0, 8, 0, 11)])
def test_documents_of_a_row_do_not_meet(kernel: type[AttentionImpl], causal: bool, lengths: tuple[int, ...]) -> None:
    qkv = random_qkv(2, 19, 19, 4, 2, 64, torch.bfloat16)
    metadata = AttentionMetadata(packed=PackedLengths(lengths, lengths))
    assert relative_error(run(kernel, qkv, metadata, causal=causal), exact(qkv, metadata, causal=causal)) <= CLOSE


@pytest.mark.parametrize("kernel", [FlashAttn2Impl, XpuImpl])
def test_documents_without_keys_give_zeros(kernel: type[AttentionImpl]) -> None:
    qkv = random_qkv(1, 12, 12, 4, 2, 64, torch.bfloat16)
    metadata = AttentionMetadata(packed=PackedLengths((4, 6, 2), (9, 0, 3)))
    assert relative_error(run(kernel, qkv, metadata), exact(qkv, metadata)) <= CLOSE


@every_kernel
def test_a_missing_package_is_an_import_error_when_it_is_loaded(
    kernel: type[AttentionImpl], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, _, _ in PUBLISHED:
        put(monkeypatch, **{module.replace(".", "__"): None})
    with pytest.raises(ImportError):
        kernel.load()


@every_kernel
def test_the_reported_kernel_is_what_is_called(kernel: type[AttentionImpl]) -> None:
    module, _, name = kernel(softmax_scale=1.0, causal=False).kernel.rpartition(".")
    assert (module, name) in [(published, function) for published, function, _ in PUBLISHED]
