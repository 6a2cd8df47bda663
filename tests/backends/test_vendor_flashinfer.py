"""FLASHINFER_ATTN's kernels over a stand-in of FlashInfer's wrapper, against softmax in fp64."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from backends.declared.flashinfer_attn import FlashinferQuant
from backends.interface import AttentionMetadata, CallShape, Features, PackedLengths
from backends.kernels import flashinfer_attn
from backends.kernels.flashinfer_attn import (
    FlashinferCuteDslImpl,
    FlashinferFa2Impl,
    FlashinferFa3Impl,
    FlashinferImpl,
)
from backends.kernels.masking import whole_mask
from backends.kernels.packages import imported
from backends.kernels.reference import plain_attention
from tests.backends.vendor_doubles import RaggedWrapper, put
from tests.exact import random_qkv, relative_error

SCALE = 0.3
CLOSE = 5e-3
CPU = torch.device("cpu")
NO_METADATA = AttentionMetadata()
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
every_kernel = pytest.mark.parametrize("kernel", [FlashinferFa2Impl, FlashinferFa3Impl, FlashinferCuteDslImpl])


@pytest.fixture(autouse=True)
def wrappers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RaggedWrapper]]:
    """The wrappers that were made, in order."""
    made: list[RaggedWrapper] = []
    monkeypatch.setattr(RaggedWrapper, "made", made, raising=False)
    prefill = SimpleNamespace(BatchPrefillWithRaggedKVCacheWrapper=RaggedWrapper)
    put(monkeypatch, flashinfer=SimpleNamespace(prefill=prefill), flashinfer__prefill=prefill)
    for clear in (imported.cache_clear, flashinfer_attn._WRAPPERS.clear):
        clear()
    yield made
    for clear in (imported.cache_clear, flashinfer_attn._WRAPPERS.clear):
        clear()


def exact(qkv: QKV, metadata: AttentionMetadata = NO_METADATA, *, causal: bool = False) -> torch.Tensor:
    query, key, value = (tensor.double() for tensor in qkv)
    mask = whole_mask(query, key, metadata, causal=causal)
    return plain_attention(query, key, value, scale=SCALE, mask=mask, soft_cap=metadata.soft_cap)


def run(
    kernel: type[FlashinferImpl],
    qkv: QKV,
    metadata: AttentionMetadata = NO_METADATA,
    *,
    causal: bool = False,
    quant: FlashinferQuant | None = None,
) -> torch.Tensor:
    """As a layer calls it: prepared, planned for the shape, then computed. Leaves its inputs as they were."""
    before = [tensor.clone() for tensor in qkv]
    impl = kernel(softmax_scale=SCALE, causal=causal, options=() if quant is None else (("quant", quant),))
    impl.prepare(CPU, qkv[0].dtype)
    query, key, _ = qkv
    shape = CallShape(
        *query.shape[:2], key.shape[1], query.shape[2], key.shape[2], query.shape[3], metadata.features, metadata.packed
    )
    out = impl.forward(*qkv, metadata, impl.plan(shape))
    assert (out.shape, out.dtype) == (query.shape, query.dtype)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(qkv, before, strict=True))
    return out


@every_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 37, 37, 4, 4, 64), (3, 19, 23, 6, 2, 64), (2, 5, 41, 4, 1, 128)], ids=str)
def test_attention_equals_softmax_in_fp64(
    kernel: type[FlashinferImpl], shape: tuple[int, int, int, int, int, int], dtype: torch.dtype
) -> None:
    qkv = random_qkv(*shape, dtype)
    assert relative_error(run(kernel, qkv), exact(qkv)) <= CLOSE


@every_kernel
def test_causal_attention_looks_at_no_later_key(kernel: type[FlashinferImpl]) -> None:
    qkv = random_qkv(2, 29, 29, 4, 2, 64, torch.bfloat16)
    assert relative_error(run(kernel, qkv, causal=True), exact(qkv, causal=True)) <= CLOSE


def test_the_wrapper_is_planned_as_published(wrappers: list[RaggedWrapper]) -> None:
    qkv = random_qkv(2, 5, 7, 4, 2, 64, torch.bfloat16)
    run(FlashinferFa3Impl, qkv, causal=False)
    (wrapper,) = wrappers
    (plan,) = wrapper.plans
    assert wrapper.backend == "fa3"
    assert (plan["qo_indptr"].tolist(), plan["kv_indptr"].tolist()) == ([0, 5, 10], [0, 7, 14])
    assert (plan["num_qo_heads"], plan["num_kv_heads"], plan["head_dim_qk"]) == (4, 2, 64)
    assert (plan["causal"], plan["window_left"], plan["logits_soft_cap"], plan["sm_scale"]) == (False, -1, 0.0, SCALE)
    assert {plan[name] for name in ("q_data_type", "kv_data_type", "o_data_type")} == {torch.bfloat16}


def test_a_shape_is_planned_once_before_its_first_call_for_all_layers(wrappers: list[RaggedWrapper]) -> None:
    layers = [FlashinferFa3Impl(softmax_scale=SCALE, causal=False) for _ in range(3)]
    shapes = [CallShape(1, rows, 7, 4, 2, 64) for rows in (5, 6)]
    for layer in layers:
        layer.prepare(CPU, torch.bfloat16)
        for shape in shapes:
            layer.plan(shape)
    assert [len(wrapper.plans) for wrapper in wrappers] == [1, 1]
    for layer, shape in zip(layers, (*shapes, shapes[0]), strict=True):
        qkv = random_qkv(1, shape.query_length, 7, 4, 2, 64, torch.bfloat16)
        for _ in range(2):
            layer.forward(*qkv, NO_METADATA, layer.plan(shape))
    assert [(len(wrapper.plans), wrapper.runs) for wrapper in wrappers] == [(1, 4), (1, 2)]
    assert wrappers[0].workspace is wrappers[1].workspace


def test_layers_of_other_geometry_share_no_wrapper(wrappers: list[RaggedWrapper]) -> None:
    qkv = random_qkv(1, 9, 9, 4, 2, 64, torch.bfloat16)
    for scale, causal in ((0.3, False), (0.4, False), (0.3, True)):
        FlashinferFa2Impl(softmax_scale=scale, causal=causal).forward(*qkv, NO_METADATA)
    assert [(wrapper.plans[0]["sm_scale"], wrapper.plans[0]["causal"]) for wrapper in wrappers] == [
        (0.3, False),
        (0.4, False),
        (0.3, True),
    ]


def test_wrappers_are_bounded(wrappers: list[RaggedWrapper]) -> None:
    limit = flashinfer_attn._WRAPPERS.limit
    impl = FlashinferFa2Impl(softmax_scale=SCALE, causal=False)
    for rows in range(1, limit + 4):
        impl.forward(*random_qkv(1, rows, 3, 2, 2, 64, torch.bfloat16), NO_METADATA)
    assert len(wrappers) == limit + 3
    assert len(flashinfer_attn._WRAPPERS) == limit


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("rows", [1, 21])
def test_a_mask_holds_alone_and_with_causality(causal: bool, batch: int, rows: int) -> None:
    qkv = random_qkv(2, 21, 21, 4, 2, 64, torch.bfloat16)
    mask = torch.rand(batch, 1, rows, 21, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[:, :, -1] = False  # rows that see nothing are zeros
    metadata = AttentionMetadata(mask)
    out = run(FlashinferFa2Impl, qkv, metadata, causal=causal)
    assert relative_error(out, exact(qkv, metadata, causal=causal)) <= CLOSE
    assert torch.equal(out[:, -1], torch.zeros_like(out[:, -1]))


def test_each_mask_is_planned_and_a_call_without_one_sees_none(wrappers: list[RaggedWrapper]) -> None:
    qkv = random_qkv(1, 9, 9, 2, 2, 64, torch.bfloat16)
    impl = FlashinferFa2Impl(softmax_scale=SCALE, causal=False)
    for share in (0.9, 0.5):
        metadata = AttentionMetadata(torch.rand(1, 1, 9, 9) < share)
        for _ in range(2):
            assert relative_error(impl.forward(*qkv, metadata), exact(qkv, metadata)) <= CLOSE
    assert relative_error(impl.forward(*qkv, NO_METADATA), exact(qkv)) <= CLOSE
    assert [(len(wrapper.plans), wrapper.runs) for wrapper in wrappers] == [(4, 4), (1, 1)]


def test_a_mask_beyond_the_kernels_counters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_attn, "_MASK_LIMIT", 80)
    qkv = random_qkv(1, 9, 9, 2, 2, 64, torch.bfloat16)
    impl = FlashinferFa2Impl(softmax_scale=SCALE, causal=False)
    with pytest.raises(ValueError, match=r"a mask of 81 entries: .* up to 80; use TORCH_SDPA"):
        impl.forward(*qkv, AttentionMetadata(torch.ones(1, 1, 1, 9, dtype=torch.bool)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(3, 2), (3, 0), (0, 0), (None, 4), (5, None), (None, None), (None, 0), (40, 40)])
def test_any_window_is_served(causal: bool, window: tuple[int | None, int | None]) -> None:
    qkv = random_qkv(2, 25, 25, 4, 2, 64, torch.bfloat16)
    metadata = AttentionMetadata(window=window)
    out = run(FlashinferFa2Impl, qkv, metadata, causal=causal)
    assert relative_error(out, exact(qkv, metadata, causal=causal)) <= CLOSE


@pytest.mark.parametrize(
    ("causal", "window", "planned"),
    [
        (True, (3, None), (True, 3, False)),
        (False, (3, 0), (True, 3, False)),
        (False, (None, 0), (True, -1, False)),
        (False, (3, None), (False, -1, True)),
        (False, (3, 2), (False, -1, True)),
    ],
)
def test_the_kernels_own_window_is_used_for_causal_rows_only(
    causal: bool, window: tuple[int | None, int | None], planned: tuple[bool, int, bool], wrappers: list[RaggedWrapper]
) -> None:
    qkv = random_qkv(1, 9, 9, 2, 2, 64, torch.bfloat16)
    run(FlashinferFa2Impl, qkv, AttentionMetadata(window=window), causal=causal)
    plan = wrappers[-1].plans[-1]
    assert (plan["causal"], plan["window_left"], wrappers[-1].mask is not None) == planned


@pytest.mark.parametrize("kernel", [FlashinferFa2Impl, FlashinferFa3Impl])
def test_scores_are_capped(kernel: type[FlashinferImpl]) -> None:
    qkv = random_qkv(1, 17, 17, 4, 2, 64, torch.bfloat16)
    metadata = AttentionMetadata(soft_cap=1.5)
    assert relative_error(run(kernel, qkv, metadata), exact(qkv, metadata)) <= CLOSE
    assert relative_error(exact(qkv), exact(qkv, metadata)) > 0.05


@every_kernel
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 3, 11), (19,), (0, 8, 0, 11), (18, 1)])
def test_documents_of_a_row_do_not_meet(kernel: type[FlashinferImpl], causal: bool, lengths: tuple[int, ...]) -> None:
    qkv = random_qkv(2, 19, 19, 4, 2, 64, torch.bfloat16)
    metadata = AttentionMetadata(packed=PackedLengths(lengths, lengths))
    assert relative_error(run(kernel, qkv, metadata, causal=causal), exact(qkv, metadata, causal=causal)) <= CLOSE


@pytest.mark.parametrize(("queries", "keys"), [((4, 6, 2), (9, 0, 3)), ((0, 12), (5, 7)), ((12, 0), (0, 12))])
@pytest.mark.parametrize("masked", [False, True])
def test_documents_of_queries_or_of_keys_alone_give_zeros(
    queries: tuple[int, ...], keys: tuple[int, ...], masked: bool
) -> None:
    qkv = random_qkv(2, 12, 12, 2, 2, 64, torch.bfloat16)
    mask = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(1)) < 0.7 if masked else None
    metadata = AttentionMetadata(mask, packed=PackedLengths(queries, keys))
    assert relative_error(run(FlashinferFa2Impl, qkv, metadata), exact(qkv, metadata)) <= CLOSE


@every_kernel
@pytest.mark.parametrize(("rows", "keys"), [(0, 7), (7, 0)])
def test_no_rows_and_no_keys_reach_no_kernel(
    kernel: type[FlashinferImpl], rows: int, keys: int, wrappers: list[RaggedWrapper]
) -> None:
    out = run(kernel, random_qkv(2, rows, keys, 4, 4, 64, torch.bfloat16))
    assert torch.equal(out, torch.zeros(2, rows, 4, 64, dtype=torch.bfloat16))
    assert wrappers == []


def test_the_layout_in_memory_is_no_matter() -> None:
    qkv = random_qkv(2, 13, 13, 4, 2, 64, torch.bfloat16)
    heads_first = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv)
    assert relative_error(run(FlashinferFa3Impl, heads_first), exact(qkv)) <= CLOSE  # type: ignore[arg-type]


# --- other dtypes in the kernel ---------------------------------------------------------------------------------------


def test_one_dtype_for_all_three_is_cast_and_cast_back(wrappers: list[RaggedWrapper]) -> None:
    qkv = random_qkv(1, 9, 9, 4, 2, 64, torch.bfloat16)
    out = run(FlashinferFa3Impl, qkv, quant=FlashinferQuant("float16", "float16"))
    assert wrappers[0].plans[0]["q_data_type"] == torch.float16
    assert relative_error(out, exact(qkv)) <= CLOSE


@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4])
@pytest.mark.parametrize("dtype_qk", [None, "float16", "bfloat16"])
def test_v_in_fp8_keeps_its_range_in_every_channel(size: float, dtype_qk: str | None) -> None:
    query, key, value = random_qkv(2, 17, 33, 4, 2, 64, torch.bfloat16)
    value = value * size * torch.logspace(-3, 0, 64)[None, None, None].to(torch.bfloat16)
    qkv = (query, key, value)
    out = run(FlashinferCuteDslImpl, qkv, quant=FlashinferQuant(dtype_qk, "fp8_e4m3"))
    plain = exact(qkv)
    for channel in (0, 63):
        assert relative_error(out[..., channel], plain[..., channel]) <= 5e-2


def test_v_of_zeros_in_fp8_gives_zeros() -> None:
    query, key, value = random_qkv(1, 5, 5, 2, 2, 64, torch.bfloat16)
    out = run(FlashinferCuteDslImpl, (query, key, value * 0), quant=FlashinferQuant(dtype_vo="fp8_e4m3"))
    assert torch.equal(out, torch.zeros_like(out))


def test_features_are_planned_when_their_values_are_known(wrappers: list[RaggedWrapper]) -> None:
    impl = FlashinferFa2Impl(softmax_scale=SCALE, causal=False)
    impl.prepare(CPU, torch.bfloat16)
    impl.plan(CallShape(1, 9, 9, 2, 2, 64, Features(soft_cap=True)))
    assert wrappers == []


def test_threads_have_masked_wrappers_of_their_own(wrappers: list[RaggedWrapper]) -> None:
    """One is planned for a mask and then runs with it, which another thread's plan must not come between."""
    qkv = random_qkv(1, 9, 9, 2, 2, 64, torch.bfloat16)
    masks = [torch.rand(1, 1, 9, 9, generator=torch.Generator().manual_seed(seed)) < 0.7 for seed in range(3)]
    barrier = threading.Barrier(3)  # so that no thread is gone, and its number given to another

    def at_once(mask: torch.Tensor) -> None:
        barrier.wait()
        run(FlashinferFa2Impl, qkv, AttentionMetadata(mask))
        barrier.wait()

    threads = [threading.Thread(target=at_once, args=(mask,)) for mask in masks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([wrapper for wrapper in wrappers if wrapper.mask is not None]) == 3
