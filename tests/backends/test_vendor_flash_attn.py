"""FLASH_ATTN's kernels other than 3 and 4, over stand-ins with the published signatures, against softmax in fp64."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends.interface import AttentionImpl, AttentionMetadata, CallShape, PackedLengths
from backends.kernels import vendor_flash_attn
from backends.kernels.flash_attn import FlashAttn2Impl
from backends.kernels.masking import whole_mask
from backends.kernels.packages import imported
from backends.kernels.reference import plain_attention
from backends.kernels.vendor_flash_attn import AiterImpl, MateImpl, NpuFusionImpl, XpuImpl
from tests.backends.vendor_doubles import attend, band, documents, put
from tests.exact import random_qkv, relative_error

SCALE = 0.3
CLOSE = 5e-3
NO_METADATA = AttentionMetadata()
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
CALLS: list[dict[str, Any]] = []
ALL = [FlashAttn2Impl, AiterImpl, NpuFusionImpl, XpuImpl, MateImpl]
every_kernel = pytest.mark.parametrize("kernel", ALL)


def dense(q: Any, k: Any, v: Any, scale: float, allowed: torch.Tensor, soft_cap: float = 0.0) -> torch.Tensor:
    return torch.stack([attend(*row, scale, allowed, soft_cap) for row in zip(q, k, v, strict=True)]).to(q.dtype)


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    CALLS.append(locals())
    allowed = band(q.shape[1], k.shape[1], causal=causal, before=window_size[0], after=window_size[1])
    return dense(q, k, v, softmax_scale, allowed, softcap)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> torch.Tensor:
    CALLS.append(locals())
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max()))
    parts = []
    for rows, keys in zip(documents(cu_seqlens_q), documents(cu_seqlens_k), strict=True):
        n, m = rows.stop - rows.start, keys.stop - keys.start
        allowed = band(n, m, causal=causal, before=window_size[0], after=window_size[1])
        parts.append(attend(q[rows], k[keys], v[keys], softmax_scale, allowed, softcap))
    return torch.cat(parts).to(q.dtype)


def aiter_flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    bias: Any = None,
    alibi_slopes: Any = None,
    deterministic: bool = True,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    how_v3_bf16_cvt: int = 1,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
) -> torch.Tensor:
    CALLS.append(locals())
    return dense(q, k, v, softmax_scale, band(q.shape[1], k.shape[1], causal=causal))


def npu_fusion_attention(
    query: Any,
    key: Any,
    value: Any,
    head_num: int,
    input_layout: str,
    pse: Any = None,
    padding_mask: Any = None,
    atten_mask: Any = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
) -> tuple[Any, ...]:
    CALLS.append(locals())
    assert (input_layout, head_num) == ("BSND", query.shape[2])
    if atten_mask is None:
        allowed = band(query.shape[1], key.shape[1], causal=False)
    else:  # counted from the first row and the first key
        assert sparse_mode == 2
        assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
        allowed = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril()
    return dense(query, key, value, scale, allowed), torch.empty(0), torch.empty(0), torch.empty(0), 0, 0, 0


def xpu_flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    max_seqlen_q: int,
    cu_seqlens_q: Any,
    max_seqlen_k: int,
    cu_seqlens_k: Any = None,
    seqused_k: Any = None,
    q_v: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = None,
    softcap: float = 0.0,
    **others: Any,
) -> torch.Tensor:
    assert window_size is None
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=softmax_scale, causal=causal
    )


def mate_flash_attn_func(
    q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: bool = False, **others: Any
) -> torch.Tensor:
    CALLS.append(locals())
    return dense(q, k, v, softmax_scale, band(q.shape[1], k.shape[1], causal=causal))


PUBLISHED: list[tuple[str, str, Callable[..., Any]]] = [
    ("flash_attn", "flash_attn_func", flash_attn_func),
    ("flash_attn", "flash_attn_varlen_func", flash_attn_varlen_func),
    ("aiter", "flash_attn_func", aiter_flash_attn_func),
    ("torch_npu", "npu_fusion_attention", npu_fusion_attention),
    ("vllm_xpu_kernels.flash_attn_interface", "flash_attn_varlen_func", xpu_flash_attn_varlen_func),
    ("flash_attn_interface", "flash_attn_func", mate_flash_attn_func),
]


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    modules: dict[str, dict[str, Any]] = {}
    for module, name, function in PUBLISHED:
        modules.setdefault(module.replace(".", "__"), {})[name] = function
    put(monkeypatch, vllm_xpu_kernels=SimpleNamespace(), **{k: SimpleNamespace(**v) for k, v in modules.items()})
    cached = (imported, vendor_flash_attn._hidden_from_causal)
    for function in cached:
        function.cache_clear()
    CALLS.clear()
    yield
    for function in cached:
        function.cache_clear()


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


@pytest.mark.parametrize(
    ("module", "name", "double"), PUBLISHED, ids=[f"{module}.{name}" for module, name, _ in PUBLISHED]
)
def test_the_stand_ins_have_the_parameters_of_the_packages(
    module: str, name: str, double: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read from flash-attn 2.8.3, amd-aiter 0.1.7, torch-npu 2.14 (its documentation), vllm-xpu-kernels 0.1.16 and MATE
    at 3f58cc3; each is checked where it is installed.
    """
    monkeypatch.undo()
    pytest.importorskip(module, reason=f"needs {module}")
    theirs = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in theirs.values()):
        pytest.skip(f"{module} publishes no signature in Python")
    ours = [p for p in inspect.signature(double).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    assert {p.name for p in ours} <= set(theirs)
