"""The kernels against fp64 softmax, and what the vendors' kernels are called with."""

from __future__ import annotations

import pkgutil
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from backends.interface import AttentionImpl, AttentionMetadata
from backends.kernels import torch_sdpa
from backends.kernels.cudnn_attn import CudnnAttnImpl
from backends.kernels.cudnn_tiles import LONGER, breaks_backward
from backends.kernels.flash_attn import FlashAttn3Impl, FlashAttn4Impl
from backends.kernels.packages import imported
from backends.kernels.reference import ReferenceImpl
from backends.kernels.torch_sdpa import TorchSdpaImpl
from tests.exact import TOLERANCE, attention64, random_qkv, relative_error

NO_MASK = AttentionMetadata()
SCALE = 0.3

plain_kernels = pytest.mark.parametrize("kernel", [ReferenceImpl, TorchSdpaImpl])

# B, Sq, Sk, H, Hkv, D
SHAPES = [
    (1, 1, 1, 1, 1, 8),
    (1, 37, 37, 4, 4, 32),
    (3, 19, 19, 2, 2, 16),
    (2, 5, 41, 4, 4, 32),
    (2, 41, 5, 4, 4, 32),
    (2, 17, 23, 6, 2, 16),
    (2, 17, 23, 6, 1, 16),
    (1, 175, 175, 4, 2, 64),
]


def run(
    kernel: type[AttentionImpl],
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    scale: float = SCALE,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernel's result, checked to be of the query's shape and dtype, and to leave its inputs as they were."""
    before = [tensor.clone() for tensor in qkv]
    out = kernel(softmax_scale=scale, causal=causal).forward(*qkv, AttentionMetadata(mask))
    assert (out.shape, out.dtype) == (qkv[0].shape, qkv[0].dtype)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(qkv, before, strict=True))
    return out


def random_mask(batch: int, rows: int, keys: int, seed: int = 1) -> torch.Tensor:
    """[batch, 1, rows, keys]; about half of it is True, and every row has a key."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(batch, 1, rows, keys, generator=generator) < 0.5
    mask[..., 0] = True
    return mask


@plain_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_attention_equals_softmax_in_fp64(
    kernel: type[AttentionImpl], shape: tuple[int, int, int, int, int, int], dtype: torch.dtype
) -> None:
    qkv = random_qkv(*shape, dtype)
    assert relative_error(run(kernel, qkv), attention64(*qkv, scale=SCALE)) <= TOLERANCE[dtype]


@plain_kernels
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask_batch", [1, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_a_mask_holds_for_every_head_alone_and_with_causality(
    kernel: type[AttentionImpl], dtype: torch.dtype, causal: bool, mask_batch: int, heads: int, kv_heads: int
) -> None:
    qkv = random_qkv(3, 29, 29, heads, kv_heads, 16, dtype)
    mask = random_mask(mask_batch, 29, 29)
    exact = attention64(*qkv, scale=SCALE, causal=causal, mask=mask)
    assert relative_error(run(kernel, qkv, causal=causal, mask=mask), exact) <= TOLERANCE[dtype]


@plain_kernels
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[1] == s[2]], ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_causal_attention_looks_at_no_later_key(
    kernel: type[AttentionImpl], shape: tuple[int, int, int, int, int, int], dtype: torch.dtype
) -> None:
    query, key, value = random_qkv(*shape, dtype)
    out = run(kernel, (query, key, value), causal=True)
    exact = attention64(query, key, value, scale=SCALE, causal=True)
    assert relative_error(out, exact) <= TOLERANCE[dtype]
    middle = shape[1] // 2
    changed = value.clone()
    changed[:, middle:] += 1
    assert torch.equal(run(kernel, (query, key, changed), causal=True)[:, :middle], out[:, :middle])


@plain_kernels
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("mask_batch", [1, 2])
def test_rows_that_may_look_at_nothing_are_exact_zeros(
    kernel: type[AttentionImpl], dtype: torch.dtype, mask_batch: int
) -> None:
    qkv = random_qkv(2, 13, 21, 4, 2, 16, dtype)
    mask = random_mask(mask_batch, 13, 21)
    mask[:, :, 5] = False
    mask[0, :, 7:9] = False
    out = run(kernel, qkv, mask=mask)
    assert relative_error(out, attention64(*qkv, scale=SCALE, mask=mask)) <= TOLERANCE[dtype]
    blind = ~mask.any(dim=-1)[:, 0].expand(2, 13)
    assert blind.sum() in (4, 6)
    assert torch.equal(out[blind], torch.zeros_like(out[blind]))
    assert bool((out[~blind] != 0).any(dim=-1).all())


@plain_kernels
def test_a_mask_that_leaves_nothing_gives_zeros(kernel: type[AttentionImpl]) -> None:
    qkv = random_qkv(2, 7, 7, 4, 4, 16, torch.float32)
    out = run(kernel, qkv, mask=torch.zeros(2, 1, 7, 7, dtype=torch.bool))
    assert torch.equal(out, torch.zeros_like(out))


@plain_kernels
def test_a_row_that_the_mask_and_causality_leave_nothing_is_zero(kernel: type[AttentionImpl]) -> None:
    qkv = random_qkv(1, 6, 6, 2, 2, 8, torch.float32)
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    mask[..., 0] = False  # the first row may look at the first key only
    out = run(kernel, qkv, causal=True, mask=mask)
    assert torch.equal(out[:, 0], torch.zeros_like(out[:, 0]))
    assert relative_error(out, attention64(*qkv, scale=SCALE, causal=True, mask=mask)) <= TOLERANCE[torch.float32]


@plain_kernels
def test_a_mask_of_keys_stands_for_all_rows(kernel: type[AttentionImpl]) -> None:
    qkv = random_qkv(2, 9, 17, 4, 4, 16, torch.float32)
    mask = torch.arange(17)[None, None, None] < torch.tensor([17, 6])[:, None, None, None]
    exact = attention64(*qkv, scale=SCALE, mask=mask)
    assert relative_error(run(kernel, qkv, mask=mask), exact) <= TOLERANCE[torch.float32]


@plain_kernels
@pytest.mark.parametrize("causal", [False, True])
def test_the_layout_in_memory_is_no_matter(kernel: type[AttentionImpl], causal: bool) -> None:
    query, key, value = random_qkv(2, 31, 31, 4, 2, 16, torch.float32)
    heads_first = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
    every_other = tuple(torch.repeat_interleave(x, 2, dim=1)[:, ::2] for x in (query, key, value))
    packed = torch.cat((query, key, value), dim=2)
    unpacked = (packed[:, :, :4], packed[:, :, 4:6], packed[:, :, 6:])
    exact = attention64(query, key, value, scale=SCALE, causal=causal)
    for qkv in (heads_first, every_other, unpacked):
        assert not qkv[0].is_contiguous()
        assert relative_error(run(kernel, qkv, causal=causal), exact) <= TOLERANCE[torch.float32]


@plain_kernels
def test_items_of_a_batch_do_not_meet(kernel: type[AttentionImpl]) -> None:
    query, key, value = random_qkv(3, 11, 11, 4, 4, 16, torch.float32)
    value = torch.arange(3.0)[:, None, None, None].expand_as(value)
    out = run(kernel, (query, key, value))
    assert torch.allclose(out, value, atol=1e-5)


@plain_kernels
def test_large_logits_give_no_nan(kernel: type[AttentionImpl]) -> None:
    qkv = random_qkv(1, 16, 16, 2, 2, 16, torch.float32)
    big = (qkv[0] * 100, qkv[1] * 100, qkv[2])
    assert relative_error(run(kernel, big, scale=1.0), attention64(*big, scale=1.0)) <= 1e-3


@plain_kernels
def test_no_rows_give_no_rows(kernel: type[AttentionImpl]) -> None:
    query, key, value = random_qkv(2, 0, 9, 4, 4, 16, torch.float32)
    assert run(kernel, (query, key, value)).shape == (2, 0, 4, 16)


@plain_kernels
def test_the_reported_kernel_is_the_callable(kernel: type[AttentionImpl]) -> None:
    assert callable(pkgutil.resolve_name(kernel(softmax_scale=1.0, causal=False).kernel))


# --- the vendors' kernels, by doubles ---------------------------------------------------------------------------------


@pytest.fixture
def qkv() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return random_qkv(2, 5, 7, 4, 2, 16, torch.bfloat16)


class Double:
    """A vendor's function: notes how it was called, answers what it was told to."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.allowed: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        self.allowed.append(_cur_sdpa_kernel_backends())
        return self.answer


@pytest.fixture
def flash_modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands in for both wheels; gives the setter of their function."""

    def put(function: Double) -> None:
        wheel = SimpleNamespace(flash_attn_func=function)
        for module in ("fa3_fwd_interface", "flash_attn", "flash_attn.cute"):
            monkeypatch.setitem(sys.modules, module, wheel)  # type: ignore[arg-type]
        imported.cache_clear()

    yield put
    imported.cache_clear()


@pytest.mark.parametrize(
    ("kernel", "name", "none"),
    [
        (FlashAttn3Impl, "fa3_fwd_interface.flash_attn_func", {"softcap": 0.0}),
        (
            FlashAttn4Impl,
            "flash_attn.cute.flash_attn_func",
            {"softcap": 0.0, "window_size": (None, None), "learnable_sink": None},
        ),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_lse", [False, True])
def test_flash_attention_gets_the_tensors_as_they_are(
    kernel: type[AttentionImpl],
    name: str,
    none: dict[str, Any],
    causal: bool,
    with_lse: bool,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    flash_modules: Any,
) -> None:
    out = torch.zeros_like(qkv[0])
    double = Double((out, torch.zeros(2, 4, 5)) if with_lse else out)
    flash_modules(double)
    impl = kernel(softmax_scale=0.25, causal=causal)
    assert impl.forward(*qkv, NO_MASK) is out
    ((args, kwargs),) = double.calls
    assert len(args) == 3
    assert all(got is given for got, given in zip(args, qkv, strict=True))
    assert kwargs == {"softmax_scale": 0.25, "causal": causal, **none}
    assert impl.kernel == name


def test_each_flash_attention_imports_its_own_wheel(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], flash_modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    third, fourth = Double(qkv[0]), Double(qkv[0])
    flash_modules(fourth)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", SimpleNamespace(flash_attn_func=third))  # type: ignore[arg-type]
    for kernel in (FlashAttn3Impl, FlashAttn4Impl, FlashAttn4Impl):
        kernel(softmax_scale=1.0, causal=False).forward(*qkv, NO_MASK)
    assert (len(third.calls), len(fourth.calls)) == (1, 2)


@pytest.mark.parametrize("kernel", [FlashAttn3Impl, FlashAttn4Impl])
def test_a_missing_wheel_is_an_import_error_when_it_is_used(
    kernel: type[AttentionImpl],
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    flash_modules: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flash_modules(Double(None))
    for module in ("fa3_fwd_interface", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    impl = kernel(softmax_scale=1.0, causal=False)
    with pytest.raises(ImportError):
        impl.forward(*qkv, NO_MASK)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_cudnn_is_the_only_kernel_that_torch_may_use(
    causal: bool, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    qkv = random_qkv(2, 5, 7, 4, kv_heads, 16, torch.bfloat16)
    answer = torch.randn(2, 4, 5, 16)
    double = Double(answer)
    monkeypatch.setattr(torch_sdpa, "scaled_dot_product_attention", double)
    before = _cur_sdpa_kernel_backends()
    impl = CudnnAttnImpl(softmax_scale=0.25, causal=causal)
    out = impl.forward(*qkv, NO_MASK)
    assert torch.equal(out, answer.transpose(1, 2))
    ((args, kwargs),) = double.calls
    assert len(args) == 3
    for got, given in zip(args, qkv, strict=True):
        assert got.data_ptr() == given.data_ptr()
        assert torch.equal(got, given.transpose(1, 2))
    assert kwargs == {"attn_mask": None, "is_causal": causal, "scale": 0.25, "enable_gqa": kv_heads != 4}
    assert double.allowed == [[SDPBackend.CUDNN_ATTENTION]]
    assert _cur_sdpa_kernel_backends() == before
    assert impl.kernel == "torch.nn.functional.scaled_dot_product_attention[CUDNN_ATTENTION]"


def test_torch_sdpa_leaves_the_kernel_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = random_qkv(1, 5, 5, 4, 4, 16, torch.float32)
    double = Double(torch.randn(1, 4, 5, 16))
    monkeypatch.setattr(torch_sdpa, "scaled_dot_product_attention", double)
    mask = random_mask(1, 5, 5)
    TorchSdpaImpl(softmax_scale=0.25, causal=True).forward(*qkv, AttentionMetadata(mask))
    ((_, kwargs),) = double.calls
    assert torch.equal(kwargs.pop("attn_mask"), mask & torch.ones(5, 5, dtype=torch.bool).tril())
    assert kwargs == {"is_causal": False, "scale": 0.25, "enable_gqa": False}
    assert double.allowed[0] == _cur_sdpa_kernel_backends()
    assert len(double.allowed[0]) > 1


def test_without_cudnn_the_call_raises_and_nothing_else_serves_it() -> None:
    qkv = random_qkv(1, 5, 5, 4, 4, 16, torch.bfloat16)
    with pytest.raises(RuntimeError):
        CudnnAttnImpl(softmax_scale=1.0, causal=False).forward(*qkv, NO_MASK)


# --- lengths that cuDNN's backward pass does not take ---------------------------------------------------------------


def test_the_lengths_that_break_gradients_of_cudnn() -> None:
    breaking = {(rows, keys) for rows in (1, 7, 128) for keys in range(1, 400) if breaks_backward(rows, keys)}
    half_full, whole = (64, 192, 320), (128, 256, 384)
    assert breaking == {*((rows, keys) for rows in (1, 7, 128) for keys in half_full), *((1, keys) for keys in whole)}
    assert not any(breaks_backward(rows, keys + LONGER) for rows, keys in breaking)


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "chosen"),
    [
        ("cuda:0", torch.bfloat16, (9, 0), True),
        ("cuda:0", torch.float16, (10, 0), True),
        ("cuda:0", torch.float32, (9, 0), False),
        ("cuda:0", torch.bfloat16, (8, 0), False),
        ("cpu", torch.bfloat16, (9, 0), False),
    ],
)
def test_where_torch_may_choose_cudnn(
    device: str, dtype: torch.dtype, capability: tuple[int, int], chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for kernel, expected in ((TorchSdpaImpl, chosen), (CudnnAttnImpl, True)):
        impl = kernel(softmax_scale=SCALE, causal=False)
        impl.prepare(torch.device(device), dtype)
        assert impl.by_cudnn is expected


@pytest.mark.parametrize("carried", ["nothing", "mask", "bias", "learned bias"])
@pytest.mark.parametrize("causal", [False, True])
def test_keys_more_change_nothing(carried: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU the detour is forced: results and gradients are those of the call as it is."""
    generator = torch.Generator().manual_seed(0)
    keys = 64
    mask = random_mask(2, keys, keys)
    mask[:, :, 3] = False
    bias = torch.randn(1, 4, keys, keys, generator=generator, dtype=torch.float64)
    metadata = AttentionMetadata(mask if carried == "mask" else None, bias=bias if "bias" in carried else None)
    upstream = torch.randn(2, keys, 4, 16, generator=generator, dtype=torch.float64)
    seen: list[int] = []
    real = torch_sdpa.scaled_dot_product_attention

    def watched(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append(key.shape[2])
        return real(query, key, value, **options)

    monkeypatch.setattr(torch_sdpa, "scaled_dot_product_attention", watched)
    found = []
    for by_cudnn in (False, True):
        impl = TorchSdpaImpl(softmax_scale=SCALE, causal=causal)
        impl.by_cudnn = by_cudnn
        inputs = [tensor.requires_grad_() for tensor in random_qkv(2, keys, keys, 4, 2, 16, torch.float64)]
        learned = [bias.detach().requires_grad_()] if carried == "learned bias" else []
        call = replace(metadata, bias=learned[0]) if learned else metadata
        out = impl.forward(*inputs, call)
        found.append((out.detach(), *torch.autograd.grad(out, [*inputs, *learned], upstream)))
        with torch.no_grad():
            impl.forward(*inputs, call)
    for plain, longer in zip(*found, strict=True):
        assert plain.shape == longer.shape
        assert relative_error(longer, plain) < 1e-12
    plain_causal = causal and carried == "nothing"
    assert seen == [keys, keys, keys if plain_causal else keys + LONGER, keys]
