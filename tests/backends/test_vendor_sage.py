"""SAGE_ATTN and SAGE_ATTN_3 over stand-ins with the published signatures, against softmax in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends.interface import AttentionMetadata, CallShape
from backends.kernels.sage_attn import SageAttn3Impl, SageAttnImpl
from backends.platforms.facts import parse_device
from backends.registry import Registry
from tests.backends.sage_doubles import CALLS, packages
from tests.backends.vendor_doubles import put
from tests.exact import attention64, random_qkv, relative_error

LOSSY = {"int8": 3e-2, "fp4": 0.3}
NO_METADATA = AttentionMetadata()
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with packages(monkeypatch):
        yield


def run(kernel: type[SageAttnImpl] | type[SageAttn3Impl], qkv: QKV, *, causal: bool = False) -> torch.Tensor:
    """As a layer calls it; leaves its inputs as they were."""
    before = [tensor.clone() for tensor in qkv]
    query, key, _ = qkv
    impl = kernel(softmax_scale=query.shape[3] ** -0.5, causal=causal)
    impl.load()
    impl.prepare(query.device, query.dtype)
    shape = CallShape(*query.shape[:2], key.shape[1], query.shape[2], key.shape[2], query.shape[3])
    out = impl.forward(*qkv, NO_METADATA, impl.plan(shape))
    assert (out.shape, out.dtype) == (query.shape, query.dtype)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(qkv, before, strict=True))
    return out


def exact(qkv: QKV, *, causal: bool = False) -> torch.Tensor:
    return attention64(*qkv, scale=qkv[0].shape[3] ** -0.5, causal=causal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 70, 128, 4, 4, 64), (2, 5, 64, 6, 2, 96), (2, 33, 192, 4, 1, 128)], ids=str)
def test_int8_is_near_softmax_in_fp64(shape: tuple[int, int, int, int, int, int], dtype: torch.dtype) -> None:
    query, key, value = random_qkv(*shape, dtype)
    qkv = (query, key + 3, value)  # keys with a mean, which is taken off them
    assert relative_error(run(SageAttnImpl, qkv), exact(qkv)) <= LOSSY["int8"]


@pytest.mark.parametrize("rows", [1, 37, 64, 100])
def test_causal_int8_takes_any_number_of_keys(rows: int) -> None:
    qkv = random_qkv(2, rows, rows, 4, 2, 64, torch.bfloat16)
    assert relative_error(run(SageAttnImpl, qkv, causal=True), exact(qkv, causal=True)) <= LOSSY["int8"]


@pytest.mark.parametrize("keys", [1, 63, 65, 100, 512 + 1, 6208 + 1])
def test_keys_that_the_kernel_would_make_up_are_refused(keys: int) -> None:
    impl = SageAttnImpl(softmax_scale=0.1, causal=False)
    rule = f"{keys} keys: SageAttention 1 counts them as .* multiple of 64 keys or more than 6400, or use TORCH_SDPA"
    with pytest.raises(ValueError, match=rule):
        impl.plan(CallShape(1, 7, keys, 4, 4, 64))
    with pytest.raises(ValueError, match=rule):
        impl.forward(*random_qkv(1, 7, keys, 2, 2, 64, torch.bfloat16), NO_METADATA)
    assert CALLS == []


@pytest.mark.parametrize("keys", [64, 4608, 6401, 6463, 18720, 32760, 75600])
def test_what_they_may_weigh_is_less_than_the_quantisation(keys: int) -> None:
    SageAttnImpl(softmax_scale=0.1, causal=False).plan(CallShape(1, 7, keys, 4, 4, 64))
    assert (-keys % 64) / keys <= 0.01


def test_the_few_that_are_left_stay_within_the_bound() -> None:
    qkv = random_qkv(1, 9, 6401, 2, 2, 64, torch.float32)
    assert relative_error(run(SageAttnImpl, qkv), exact(qkv)) <= LOSSY["int8"]


def test_tensors_beyond_the_kernels_counters_are_refused() -> None:
    impl = SageAttnImpl(softmax_scale=0.1, causal=False)
    impl.plan(CallShape(1, 1 << 18, 1 << 18, 40, 40, 128))
    with pytest.raises(ValueError, match=r"a tensor of 2684354560 entries: .* use TORCH_SDPA"):
        impl.plan(CallShape(2, 1 << 18, 1 << 18, 40, 40, 128))


def test_it_is_called_as_published() -> None:
    query, key, value = random_qkv(2, 5, 64, 4, 2, 64, torch.bfloat16)
    run(SageAttnImpl, (query, key, value))
    (call,) = CALLS
    assert call["q"] is query
    assert call["v"] is value
    assert (call["is_causal"], call["sm_scale"], call["smooth_k"]) == (False, 0.125, False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 37, 37, 4, 4, 64), (2, 130, 130, 1, 1, 128)], ids=str)
def test_fp4_is_called_as_published(
    shape: tuple[int, int, int, int, int, int], dtype: torch.dtype, causal: bool
) -> None:
    qkv = random_qkv(*shape, dtype)
    assert relative_error(run(SageAttn3Impl, qkv, causal=causal), exact(qkv, causal=causal)) <= LOSSY["fp4"]
    (call,) = CALLS
    assert call["q"].shape == (shape[0], shape[3], shape[1], shape[5])
    assert call["is_causal"] is causal


def test_fp4_has_no_other_scale_than_that_of_the_head_size() -> None:
    with pytest.raises(ValueError, match=r"softmax_scale=0\.3: .* 0\.125 \(head size 64\) or .*; leave it at"):
        SageAttn3Impl(softmax_scale=0.3, causal=False)
    impl = SageAttn3Impl(softmax_scale=0.125, causal=False)
    impl.plan(CallShape(1, 5, 5, 2, 2, 64))
    with pytest.raises(ValueError, match=r"softmax_scale=0\.125: .* 0\.0883883 \(head size 128\); leave it at"):
        impl.plan(CallShape(1, 5, 5, 2, 2, 128))
    with pytest.raises(ValueError, match="SageAttention 3 has that of the head size alone"):
        impl.forward(*random_qkv(1, 5, 5, 2, 2, 128, torch.bfloat16), NO_METADATA)


@pytest.mark.parametrize("kernel", [SageAttnImpl, SageAttn3Impl])
def test_a_missing_package_is_an_import_error_when_it_is_loaded(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, sageattention=None, sageattention__core=None, sageattn3=None)
    with pytest.raises(ImportError):
        kernel.load()


def test_another_version_is_an_import_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    second = SimpleNamespace(sageattn=lambda q, k, v, tensor_layout="HND", return_lse=False, **kwargs: q)
    put(monkeypatch, sageattention__core=second)
    with pytest.raises(ImportError, match=r"not version 1: pip install sageattention==1\.0\.6"):
        SageAttnImpl.load()


@pytest.mark.parametrize("name", ["SAGE_ATTN", "SAGE_ATTN_3"])
def test_both_say_that_they_are_lossy_and_where_they_have_run(name: str) -> None:
    (variant,) = Registry.built_in().get_class(name).variants
    ran = ("cuda:9.0",) if name == "SAGE_ATTN" else ()
    assert (variant.exactness, variant.run_on) == ("lossy-quantised", ran)
    assert variant.chip_fault(parse_device("cuda:10.0", {}, all_packages=True)) is not None
