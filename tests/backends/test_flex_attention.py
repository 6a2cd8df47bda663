"""FLEX_ATTENTION on CPU, where it is traced and not compiled further, against softmax in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from backends.interface import AttentionMetadata, CallShape, PackedLengths, Requirements
from backends.kernels import flex_attention
from backends.kernels.flex_attention import Bounds, FlexAttentionImpl, Layout
from backends.kernels.masking import whole_mask
from backends.kernels.reference import plain_attention_with_lse
from backends.platforms.facts import parse_device
from backends.registry import Registry
from tests.exact import TOLERANCE, random_qkv, relative_error

SCALE = 0.3
CPU = torch.device("cpu")
NO_METADATA = AttentionMetadata()
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
MASKS = ("none", "key_padding", "full", "per_head")


@pytest.fixture(autouse=True)
def layouts() -> Iterator[None]:
    flex_attention._LAYOUTS.clear()
    yield
    flex_attention._LAYOUTS.clear()


def mask_of(kind: str, batch: int, heads: int, rows: int, keys: int) -> torch.Tensor | None:
    """Of `full` and `per_head` masks, the last row sees nothing."""
    if kind == "none":
        return None
    shape = (batch, heads if kind == "per_head" else 1, 1 if kind == "key_padding" else rows, keys)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.6
    if kind != "key_padding":
        mask[:, :, -1] = False
    return mask


def check(qkv: QKV, metadata: AttentionMetadata = NO_METADATA, *, causal: bool = False) -> None:
    """As a layer calls it, with the log-sum-exp and without, and planned or not."""
    query, key, value = qkv
    impl = FlexAttentionImpl(softmax_scale=SCALE, causal=causal)
    impl.load()
    impl.prepare(query.device, query.dtype)
    shape = CallShape(
        *query.shape[:2], key.shape[1], query.shape[2], key.shape[2], query.shape[3], metadata.features, metadata.packed
    )
    plan = impl.plan(shape)
    out, lse = impl.forward_with_lse(*qkv, metadata, plan)
    again = impl.forward(*qkv, metadata, plan)
    double = query.double(), key.double(), value.double()
    mask = whole_mask(query, key, metadata, causal=causal)
    exact, exact_lse = plain_attention_with_lse(*double, scale=SCALE, mask=mask, soft_cap=metadata.soft_cap)
    assert out.dtype == again.dtype == query.dtype
    assert relative_error(out, exact) <= TOLERANCE[query.dtype]
    assert relative_error(again, exact) <= TOLERANCE[query.dtype]
    blind = exact_lse == float("-inf")
    assert lse.dtype == (torch.float64 if query.dtype == torch.float64 else torch.float32)
    assert torch.equal(lse == float("-inf"), blind)
    assert relative_error(lse.masked_fill(blind, 0), exact_lse.masked_fill(blind, 0)) <= min(
        TOLERANCE[query.dtype], 1e-5
    )
    assert not out.transpose(1, 2)[blind].any()


@pytest.mark.parametrize(
    ("dtype", "causal"),
    [(torch.float64, False), (torch.float32, True), (torch.bfloat16, False), (torch.float16, True)],
    ids=str,
)
@pytest.mark.parametrize(
    "shape",
    [(3, 19, 19, 2, 2, 5), (2, 150, 150, 6, 2, 16), (1, 1, 1, 1, 1, 8)],
    ids=str,
)
def test_attention_equals_softmax_in_fp64(
    shape: tuple[int, int, int, int, int, int], dtype: torch.dtype, causal: bool
) -> None:
    check(random_qkv(*shape, dtype), causal=causal)


@pytest.mark.parametrize(("rows", "keys"), [(5, 300), (300, 5), (129, 257), (1, 9)])
@pytest.mark.parametrize("mask", MASKS)
def test_queries_and_keys_may_differ_in_number(rows: int, keys: int, mask: str) -> None:
    qkv = random_qkv(2, rows, keys, 4, 2, 16, torch.float32)
    check(qkv, AttentionMetadata(mask_of(mask, 2, 4, rows, keys)))


COMBINATIONS: list[tuple[Any, ...]] = list(
    itertools.product(
        MASKS,
        (None, (3, 2), (140, None)),
        (None, 1.5),
        (None, PackedLengths((50, 0, 140, 10), (50, 3, 0, 147))),
    )
)
EVERY_OTHER = [(*features, bool(place % 2)) for place, features in enumerate(COMBINATIONS) if place % 5 in (0, 3)]
"""Two of five, with causality and without: all of them take minutes."""


@pytest.mark.parametrize(("mask", "window", "soft_cap", "packed", "causal"), EVERY_OTHER, ids=str)
def test_features_hold_together(
    mask: str, window: Any, soft_cap: float | None, packed: PackedLengths | None, causal: bool
) -> None:
    qkv = random_qkv(2, 200, 200, 4, 2, 16, torch.float32)
    metadata = AttentionMetadata(mask_of(mask, 2, 4, 200, 200), window, soft_cap, packed=packed)
    check(qkv, metadata, causal=causal)


def test_a_mask_of_one_item_is_for_all() -> None:
    qkv = random_qkv(3, 20, 20, 4, 4, 16, torch.float32)
    check(qkv, AttentionMetadata(mask_of("full", 1, 4, 20, 20)))


def test_v_may_have_another_head_size() -> None:
    query, key, _ = random_qkv(2, 20, 30, 4, 2, 16, torch.float32)
    value = torch.randn(2, 30, 2, 24, generator=torch.Generator().manual_seed(1))
    check((query, key, value))
    check((query, key, value), AttentionMetadata(mask_of("full", 2, 4, 20, 30)))


def test_the_layout_in_memory_is_no_matter() -> None:
    qkv = random_qkv(2, 31, 31, 4, 2, 16, torch.float32)
    check(tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv), causal=True)  # type: ignore[arg-type]


def test_many_lengths_are_no_end_of_it() -> None:
    for rows in range(20, 32):
        check(random_qkv(1, rows, rows + 1, 2, 2, 16, torch.float32), AttentionMetadata(soft_cap=2.0))
        check(random_qkv(1, rows, rows, 2, 2, 16, torch.float32), causal=True)


def test_a_mask_that_is_written_to_is_read_anew() -> None:
    qkv = random_qkv(1, 20, 20, 2, 2, 16, torch.float32)
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool)
    check(qkv, AttentionMetadata(mask))
    mask[:, :, 4:, 7:] = False
    check(qkv, AttentionMetadata(mask))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (3, 2), (300, None), (None, 130)])
@pytest.mark.parametrize("packed", [None, PackedLengths((100, 0, 412, 10), (100, 3, 400, 19))])
@pytest.mark.parametrize(("rows", "keys"), [(522, 522)])
def test_blocks_that_are_left_out_have_nothing_and_whole_ones_everything(
    rows: int, keys: int, causal: bool, window: Any, packed: PackedLengths | None
) -> None:
    layout = Layout.of(Bounds(CPU, rows, keys, causal, window, packed))
    query, key = torch.empty(1, rows, 1, 1), torch.empty(1, keys, 1, 1)
    mask = whole_mask(query, key, AttentionMetadata(window=window, packed=packed), causal=causal)
    seen = torch.ones(rows, keys, dtype=torch.bool) if mask is None else mask[0, 0]
    for row, key_block in itertools.product(range(-(-rows // 128)), range(-(-keys // 128))):
        part = seen[row * 128 : row * 128 + 128, key_block * 128 : key_block * 128 + 128]
        met, whole = (
            key_block in blocks[1][0, 0, row, : int(blocks[0][0, 0, row])].tolist()
            for blocks in (layout.met, layout.whole)
        )
        assert met or not part.any()
        assert not whole or bool(part.all())
        if packed is None:
            assert whole == bool(part.all())
            assert met == bool(part.any())


def test_blocks_are_laid_out_once_for_all_layers_and_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Bounds] = []
    of = Layout.of
    monkeypatch.setattr(Layout, "of", lambda bounds: made.append(bounds) or of(bounds))
    layers = [FlexAttentionImpl(softmax_scale=SCALE, causal=True) for _ in range(3)]
    qkv = random_qkv(1, 20, 20, 2, 2, 16, torch.float32)
    for layer in layers:
        layer.prepare(CPU, torch.float32)
        layer.plan(CallShape(1, 20, 20, 2, 2, 16))
        assert len(made) == 1
        layer.forward(*qkv, NO_METADATA)
    for _ in range(2):
        layers[0].forward(*qkv, AttentionMetadata(window=(3, 0)))
    assert len(made) == 2


def test_a_small_head_size_of_v_is_refused_on_gpus_only() -> None:
    backend = Registry.built_in().get_class("FLEX_ATTENTION")
    call = Requirements(64, 4, 4, "bfloat16", "self", value_head_size=8)
    (fault,) = backend.validate(call, parse_device("cuda:9.0", {}, all_packages=True)).faults
    assert fault.rule == "a head size of V of 8 is not supported; it takes 64, 128"
    assert backend.validate(call, parse_device("cpu", {}, all_packages=True)).variant is not None
