"""TRTLLM_ATTN's kernel over a stand-in of FlashInfer's functions, against softmax in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends.declared.trtllm_attn import TrtllmQuant
from backends.interface import AttentionMetadata, CallShape, PackedLengths
from backends.kernels.masking import whole_mask
from backends.kernels.packages import imported
from backends.kernels.reference import plain_attention
from backends.kernels.trtllm_attn import TrtllmAttnImpl
from backends.layer_facts import DenoisingTime
from backends.skip_softmax import LayerSkip
from tests.backends.vendor_doubles import Trtllm, put
from tests.exact import random_qkv, relative_error

SCALE = 0.09
CLOSE = 5e-3
NO_METADATA = AttentionMetadata()
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trtllm]:
    double = Trtllm()
    put(monkeypatch, flashinfer=SimpleNamespace(prefill=double), flashinfer__prefill=double)
    imported.cache_clear()
    yield double
    imported.cache_clear()


def draw(batch: int, rows: int, keys: int, heads: int = 4, kv_heads: int = 2) -> QKV:
    return random_qkv(batch, rows, keys, heads, kv_heads, 128, torch.bfloat16)


def exact(qkv: QKV, metadata: AttentionMetadata = NO_METADATA, *, causal: bool = False) -> torch.Tensor:
    query, key, value = (tensor.double() for tensor in qkv)
    return plain_attention(query, key, value, scale=SCALE, mask=whole_mask(query, key, metadata, causal=causal))


def impl_of(*, causal: bool = False, **blocks: Any) -> TrtllmAttnImpl:
    impl = TrtllmAttnImpl(softmax_scale=SCALE, causal=causal, options=tuple(blocks.items()))
    impl.prepare(torch.device("cpu"), torch.bfloat16)
    return impl


def run(impl: TrtllmAttnImpl, qkv: QKV, metadata: AttentionMetadata = NO_METADATA) -> torch.Tensor:
    query, key, _ = qkv
    shape = CallShape(*query.shape[:2], key.shape[1], query.shape[2], key.shape[2], 128, metadata.features)
    out = impl.forward(*qkv, metadata, impl.plan(shape) if metadata.packed is None else None)
    assert (out.shape, out.dtype) == (query.shape, query.dtype)
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 37, 37, 4, 4), (3, 19, 19, 6, 2), (2, 23, 23, 4, 1)], ids=str)
def test_attention_equals_softmax_in_fp64(shape: tuple[int, int, int, int, int], causal: bool) -> None:
    qkv = draw(*shape)
    assert relative_error(run(impl_of(causal=causal), qkv), exact(qkv, causal=causal)) <= CLOSE


def test_queries_and_keys_may_differ_in_number() -> None:
    qkv = draw(2, 5, 41)
    assert relative_error(run(impl_of(), qkv), exact(qkv)) <= CLOSE


def test_the_function_is_called_as_published(flashinfer: Trtllm) -> None:
    qkv = draw(2, 5, 7)
    run(impl_of(causal=False), qkv)
    (call,) = flashinfer.calls
    assert call["query"].shape == (10, 4, 128)
    assert call["key"].shape == call["value"].shape == (14, 2, 128)
    assert (call["cum_seq_lens_q"].tolist(), call["cum_seq_lens_kv"].tolist()) == ([0, 5, 10], [0, 7, 14])
    assert call["cum_seq_lens_q"].dtype == call["seq_lens"].dtype == torch.int32
    assert (call["max_q_len"], call["max_kv_len"], call["batch_size"]) == (5, 7, 2)
    assert (call["bmm1_scale"], call["bmm2_scale"], call["window_left"]) == (SCALE, 1.0, -1)
    assert (call["is_causal"], call["return_lse"], call["backend"]) == (False, False, "trtllm-gen")
    assert call["skip_softmax_threshold_scale_factor"] is None
    assert call["sage_attn_sfs"] == (None, None, None, None)


def test_the_workspace_is_shared_and_zero(flashinfer: Trtllm) -> None:
    for _ in range(2):
        run(impl_of(), draw(1, 5, 5))
    first, second = (call["workspace_buffer"] for call in flashinfer.calls)
    assert first is second
    assert first.numel() == 128 << 20


def test_what_depends_on_the_shape_is_planned_once(flashinfer: Trtllm) -> None:
    impl = impl_of()
    plan = impl.plan(CallShape(1, 5, 5, 4, 2, 128))
    for _ in range(2):
        impl.forward(*draw(1, 5, 5), NO_METADATA, plan)
    first, second = flashinfer.calls
    assert all(first[name] is second[name] for name in ("cum_seq_lens_q", "cum_seq_lens_kv", "seq_lens"))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 3, 11), (19,), (0, 8, 0, 11)])
def test_documents_of_a_row_do_not_meet(lengths: tuple[int, ...], causal: bool) -> None:
    qkv = draw(2, 19, 19)
    metadata = AttentionMetadata(packed=PackedLengths(lengths, lengths))
    assert relative_error(run(impl_of(causal=causal), qkv, metadata), exact(qkv, metadata, causal=causal)) <= CLOSE


def test_documents_without_keys_give_zeros() -> None:
    qkv = draw(1, 12, 12)
    metadata = AttentionMetadata(packed=PackedLengths((4, 6, 2), (9, 0, 3)))
    out = run(impl_of(), qkv, metadata)
    assert torch.equal(out[:, 4:10], torch.zeros_like(out[:, 4:10]))
    assert relative_error(out, exact(qkv, metadata)) <= CLOSE


@pytest.mark.parametrize(("rows", "keys"), [(0, 7), (7, 0)])
def test_no_rows_and_no_keys_reach_no_kernel(rows: int, keys: int, flashinfer: Trtllm) -> None:
    out = run(impl_of(), draw(2, rows, keys))
    assert torch.equal(out, torch.zeros(2, rows, 4, 128, dtype=torch.bfloat16))
    assert flashinfer.calls == []


# --- quant ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "close"), [("int8", 3e-2), ("fp8_e4m3", 6e-2)])
@pytest.mark.parametrize("blocks", [(None, None), (4, 1), (16, 16)])
@pytest.mark.parametrize("packed", [None, PackedLengths((33, 31), (20, 44))])
def test_quantised_attention_is_near(
    dtype: str, close: float, blocks: tuple[int | None, int | None], packed: PackedLengths | None, flashinfer: Trtllm
) -> None:
    qkv = draw(1, 64, 64)
    metadata = AttentionMetadata(packed=packed)
    out = run(impl_of(quant=TrtllmQuant(dtype, *blocks)), qkv, metadata)
    assert 1e-3 < relative_error(out, exact(qkv, metadata)) <= close
    (quantised,), (call,) = flashinfer.quantisations, flashinfer.calls
    expected = (blocks[0] or 1, blocks[1] or 16)
    assert (quantised["q_block_size"], quantised["k_block_size"]) == expected
    assert quantised["qk_quant_dtype"] == {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}[dtype]
    assert quantised["cum_seq_lens_q"] is call["cum_seq_lens_q"]
    assert call["num_elts_per_sage_attn_blk"] == (*expected, 0, 1)
    assert call["query"].dtype == call["key"].dtype == quantised["qk_quant_dtype"]
    assert call["value"].dtype == torch.float8_e4m3fn


def test_the_mean_of_the_keys_costs_no_bits() -> None:
    query, key, value = draw(1, 64, 64)
    qkv = (query, key + 8, value)
    assert relative_error(run(impl_of(quant=TrtllmQuant("int8")), qkv), exact(qkv)) <= 4e-2


def test_a_sequence_shorter_than_a_block_is_refused() -> None:
    impl = impl_of(quant=TrtllmQuant("int8"))
    with pytest.raises(ValueError, match=r"quant.k_block_size=16: a block is longer than a sequence of 7 keys; use a"):
        run(impl, draw(1, 20, 7))
    run(impl_of(quant=TrtllmQuant("int8", k_block_size=4)), draw(1, 20, 7))


def test_without_dtype_qk_nothing_is_quantised(flashinfer: Trtllm) -> None:
    run(impl_of(quant=TrtllmQuant()), draw(1, 5, 5))
    assert flashinfer.quantisations == []


# --- skip_softmax -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skip", "factor"),
    [(LayerSkip(), None), (LayerSkip(threshold=0.002), 0.002 * 41), (LayerSkip(calibrated=12182.5), 12182.5)],
)
def test_a_threshold_is_given_per_key_and_a_calibrated_factor_as_it_is(
    skip: LayerSkip, factor: float | None, flashinfer: Trtllm
) -> None:
    run(impl_of(skip_softmax=skip), draw(2, 5, 41))
    assert flashinfer.calls[0]["skip_softmax_threshold_scale_factor"] == factor


def test_the_threshold_holds_for_one_number_of_keys() -> None:
    impl = impl_of(skip_softmax=LayerSkip(threshold=0.1))
    metadata = AttentionMetadata(packed=PackedLengths((5, 5), (4, 6)))
    with pytest.raises(ValueError, match=r"skip_softmax.threshold=0.1: .* have \(4, 6\); leave it out"):
        run(impl, draw(1, 10, 10), metadata)


def test_the_time_of_each_call_decides_whether_it_skips(flashinfer: Trtllm) -> None:
    time = DenoisingTime()
    impl = impl_of(skip_softmax=LayerSkip(calibrated=9.0, until=0.8, denoising=time))
    time.begin([0.9, 0.8])
    run(impl, draw(1, 5, 5))
    time.advance()
    run(impl, draw(1, 5, 5))
    assert [call["skip_softmax_threshold_scale_factor"] for call in flashinfer.calls] == [None, 9.0]
    time.end()
    with pytest.raises(ValueError, match="the denoising time is not known"):
        run(impl, draw(1, 5, 5))


def test_documents_of_any_length_share_a_calibrated_factor(flashinfer: Trtllm) -> None:
    metadata = AttentionMetadata(packed=PackedLengths((5, 5), (4, 6)))
    run(impl_of(skip_softmax=LayerSkip(calibrated=9.0)), draw(1, 10, 10), metadata)
    assert flashinfer.calls[0]["skip_softmax_threshold_scale_factor"] == 9.0
