"""The log-sum-exp beside the result, against fp64, over all combinations of features; and what it is there for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends.interface import AttentionImpl, AttentionMetadata, CallShape, PackedLengths
from backends.kernels import flashinfer_attn
from backends.kernels.flash_attn import FlashAttn2Impl, FlashAttn3Impl, FlashAttn4Impl
from backends.kernels.flashinfer_attn import FlashinferCuteDslImpl, FlashinferFa2Impl, FlashinferFa3Impl
from backends.kernels.reference import ReferenceImpl
from backends.registry import Registry
from tests.backends import flash_doubles
from tests.backends.vendor_doubles import RaggedWrapper, put
from tests.exact import TOLERANCE, random_qkv, relative_error

SCALE = 0.3
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
NO_METADATA = AttentionMetadata()
ROWS, HEADS = 13, 4
FLASH = [FlashAttn2Impl, FlashAttn3Impl, FlashAttn4Impl]
FLASHINFER = [FlashinferFa2Impl, FlashinferFa3Impl, FlashinferCuteDslImpl]


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(RaggedWrapper, "made", [], raising=False)
    prefill = SimpleNamespace(BatchPrefillWithRaggedKVCacheWrapper=RaggedWrapper)
    put(monkeypatch, flashinfer=SimpleNamespace(prefill=prefill), flashinfer__prefill=prefill)
    flashinfer_attn._WRAPPERS.clear()
    with flash_doubles.packages(monkeypatch):
        yield
    flashinfer_attn._WRAPPERS.clear()


def lse64(query: torch.Tensor, key: torch.Tensor, metadata: AttentionMetadata, *, causal: bool) -> torch.Tensor:
    """[B, H, Sq], term by term, row by row: nothing of it is the package's."""
    batch, rows, heads, _ = query.shape
    shared = heads // key.shape[2]
    found = torch.full((batch, heads, rows), float("-inf"), dtype=torch.float64)
    mask, lengths = metadata.mask, metadata.packed
    for b, h, i in itertools.product(range(batch), range(heads), range(rows)):
        scores = key[b, :, h // shared].double() @ query[b, i, h].double() * SCALE
        if metadata.soft_cap is not None:
            scores = metadata.soft_cap * torch.tanh(scores / metadata.soft_cap)
        seen = [j for j in range(key.shape[1]) if not (causal and j > i)]
        if metadata.window is not None:
            before, after = (float("inf") if side is None else side for side in metadata.window)
            seen = [j for j in seen if i - before <= j <= i + after]
        if lengths is not None:
            document = torch.repeat_interleave(torch.tensor(lengths.key))
            mine = int(torch.repeat_interleave(torch.tensor(lengths.query))[i])
            seen = [j for j in seen if int(document[j]) == mine]
        if mask is not None:
            whole = mask.expand(batch, heads, rows, key.shape[1])
            seen = [j for j in seen if whole[b, h, i, j]]
        logits = scores[seen].exp().sum()
        if metadata.sinks is not None:
            logits = logits + metadata.sinks[h].double().exp()
        found[b, h, i] = logits.log()
    return found


def mask_of(kind: str) -> torch.Tensor | None:
    """Of `full` and `per_head` masks, row 3 sees nothing."""
    if kind == "none":
        return None
    heads, rows = (HEADS if kind == "per_head" else 1), (1 if kind == "key_padding" else ROWS)
    mask = torch.rand(2, heads, rows, ROWS, generator=torch.Generator().manual_seed(5)) < 0.6
    if kind != "key_padding":
        mask[:, :, 3] = False
    return mask


def with_lse(
    kernel: type[AttentionImpl], qkv: QKV, metadata: AttentionMetadata = NO_METADATA, *, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As a layer calls it; what `forward` returns is the same."""
    query, key, _ = qkv
    impl = kernel(softmax_scale=SCALE, causal=causal)
    impl.load()
    impl.prepare(query.device, query.dtype)
    shape = CallShape(
        *query.shape[:2], key.shape[1], query.shape[2], key.shape[2], query.shape[3], metadata.features, metadata.packed
    )
    plan = impl.plan(shape)
    out, lse = impl.forward_with_lse(*qkv, metadata, plan)
    assert torch.equal(out, impl.forward(*qkv, metadata, plan))
    assert lse.shape == (query.shape[0], query.shape[2], query.shape[1])
    assert lse.dtype == (torch.float64 if query.dtype == torch.float64 else torch.float32)
    return out, lse


def assert_close(lse: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    blind = exact == float("-inf")
    assert torch.equal(lse == float("-inf"), blind)
    assert relative_error(lse.masked_fill(blind, 0), exact.masked_fill(blind, 0)) <= tolerance


def merged(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over all keys, from that over parts of them."""
    whole = torch.logsumexp(torch.stack([lse.double() for _, lse in parts]), dim=0)
    shares = [(lse - whole).exp().nan_to_num(0) for _, lse in parts]
    out = sum(o.double() * share.transpose(1, 2)[..., None] for (o, _), share in zip(parts, shares, strict=True))
    assert isinstance(out, torch.Tensor)
    return out, whole


# --- REFERENCE --------------------------------------------------------------------------------------------------------

FEATURES: list[tuple[str, Any, Any, Any]] = list(
    itertools.product(
        ("none", "key_padding", "full", "per_head"),
        (None, (3, 2), (None, 1)),
        (None, 1.5),
        (None, PackedLengths((5, 0, 6, 2), (5, 3, 0, 5))),
    )
)


@pytest.mark.parametrize(("mask", "window", "soft_cap", "packed"), FEATURES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_reference_is_exact_for_every_combination(
    mask: str, window: Any, soft_cap: float | None, packed: PackedLengths | None, causal: bool, with_sinks: bool
) -> None:
    qkv = random_qkv(2, ROWS, ROWS, HEADS, 2, 16, torch.float64)
    sinks = torch.linspace(-2, 1, HEADS) if with_sinks else None
    metadata = AttentionMetadata(mask_of(mask), window, soft_cap, sinks, packed)
    out, lse = with_lse(ReferenceImpl, qkv, metadata, causal=causal)
    exact = lse64(*qkv[:2], metadata, causal=causal)
    assert_close(lse, exact, 1e-12)
    without_keys = lse64(*qkv[:2], AttentionMetadata(mask_of(mask), window, None, None, packed), causal=causal)
    blind = (without_keys == float("-inf")).transpose(1, 2)
    assert not out[blind].any()
    assert with_sinks or bool((exact == float("-inf")).any()) == bool(blind.any())


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("rows", "keys", "kv_heads"), [(5, 21, 4), (21, 5, 2), (7, 7, 1), (3, 0, 2), (0, 4, 2)])
def test_the_reference_takes_every_dtype_and_shape(dtype: torch.dtype, rows: int, keys: int, kv_heads: int) -> None:
    qkv = random_qkv(2, rows, keys, HEADS, kv_heads, 16, dtype)
    _, lse = with_lse(ReferenceImpl, qkv)
    assert_close(lse, lse64(*qkv[:2], NO_METADATA, causal=False), min(TOLERANCE[dtype], 1e-5))


def test_large_scores_do_not_overflow() -> None:
    query, key, value = random_qkv(1, 5, 9, HEADS, HEADS, 16, torch.float32)
    _, lse = with_lse(ReferenceImpl, (query * 300, key * 300, value))
    assert torch.isfinite(lse).all()


# --- the vendors' kernels, by doubles ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [*FLASH, *FLASHINFER])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
def test_units_and_layout_are_ours(kernel: type[AttentionImpl], causal: bool, kv_heads: int) -> None:
    qkv = random_qkv(2, ROWS, ROWS, HEADS, kv_heads, 64, torch.bfloat16)
    _, lse = with_lse(kernel, qkv, causal=causal)
    assert_close(lse, lse64(*qkv[:2], NO_METADATA, causal=causal), 1e-6)


@pytest.mark.parametrize("kernel", [*FLASH, *FLASHINFER])
def test_without_keys_a_row_has_minus_infinity(kernel: type[AttentionImpl]) -> None:
    out, lse = with_lse(kernel, random_qkv(2, 5, 0, HEADS, HEADS, 64, torch.bfloat16))
    assert not out.any()
    assert bool((lse == float("-inf")).all())


@pytest.mark.parametrize("kernel", [*FLASH, *FLASHINFER])
@pytest.mark.parametrize(
    "lengths", [((5, 3, 5), (4, 2, 7)), ((13,), (13,)), ((6, 3, 4), (9, 0, 4)), ((13, 0), (0, 13))]
)
def test_documents_have_their_own(kernel: type[AttentionImpl], lengths: tuple[Any, Any]) -> None:
    qkv = random_qkv(2, ROWS, ROWS, HEADS, 2, 64, torch.bfloat16)
    metadata = AttentionMetadata(packed=PackedLengths(*lengths))
    _, lse = with_lse(kernel, qkv, metadata)
    assert_close(lse, lse64(*qkv[:2], metadata, causal=False), 1e-6)


@pytest.mark.parametrize("kernel", [FlashAttn2Impl, FlashAttn4Impl, FlashinferFa2Impl])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, (3, 2), (4, None)])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_and_caps_are_of_the_logits(
    kernel: type[AttentionImpl], soft_cap: float | None, window: Any, causal: bool
) -> None:
    qkv = random_qkv(2, ROWS, ROWS, HEADS, 2, 64, torch.bfloat16)
    metadata = AttentionMetadata(window=window, soft_cap=soft_cap)
    _, lse = with_lse(kernel, qkv, metadata, causal=causal)
    assert_close(lse, lse64(*qkv[:2], metadata, causal=causal), 1e-6)


@pytest.mark.parametrize("kind", ["key_padding", "full"])
def test_flashinfers_large_negative_number_becomes_infinity(kind: str) -> None:
    qkv = random_qkv(2, ROWS, ROWS, HEADS, 2, 64, torch.bfloat16)
    metadata = AttentionMetadata(mask_of(kind))
    _, lse = with_lse(FlashinferFa2Impl, qkv, metadata)
    assert_close(lse, lse64(*qkv[:2], metadata, causal=False), 1e-6)


# --- what it is for, and who has none ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [ReferenceImpl, *FLASH, *FLASHINFER])
def test_parts_of_the_keys_merge_to_the_whole(kernel: type[AttentionImpl]) -> None:
    query, key, value = random_qkv(2, 9, 20, HEADS, 2, 64, torch.bfloat16)
    parts = [with_lse(kernel, (query, key[:, part], value[:, part])) for part in (slice(0, 7), slice(7, 20))]
    out, lse = merged(parts)
    exact, exact_lse = with_lse(ReferenceImpl, (query.double(), key.double(), value.double()))
    assert relative_error(out, exact) <= 5e-3
    assert_close(lse, exact_lse, 1e-6)


def test_sinks_go_to_one_part_alone_and_rows_may_see_one_part_only() -> None:
    query, key, value = random_qkv(2, ROWS, ROWS, HEADS, 2, 16, torch.float64)
    mask = mask_of("full")
    assert mask is not None
    mask[:, :, 2, :6] = False
    sinks = torch.linspace(-2, 1, HEADS)
    parts = [
        with_lse(ReferenceImpl, (query, key[:, part], value[:, part]), AttentionMetadata(mask[..., part], sinks=given))
        for part, given in ((slice(0, 6), sinks), (slice(6, ROWS), None))
    ]
    out, lse = merged(parts)
    exact, exact_lse = with_lse(ReferenceImpl, (query, key, value), AttentionMetadata(mask, sinks=sinks))
    assert relative_error(out, exact) <= 1e-12
    assert_close(lse, exact_lse, 1e-12)


def test_a_kernel_without_one_says_so_and_the_declarations_know() -> None:
    qkv = random_qkv(1, 3, 3, HEADS, HEADS, 128, torch.bfloat16)
    for name in Registry.built_in().names():
        backend = Registry.built_in().get_class(name)
        for variant in backend.variants:
            kernel = backend.get_impl_cls(variant)
            overridden = kernel.forward_with_lse is not AttentionImpl.forward_with_lse
            assert overridden == variant.takes.lse, (name, variant.name)
            if not overridden:
                impl = kernel(softmax_scale=128**-0.5, causal=False)
                with pytest.raises(
                    TypeError, match="returns no log-sum-exp: use a backend that declares lse"
                ) as raised:
                    impl.forward_with_lse(*qkv, NO_METADATA)
                assert impl.kernel in str(raised.value)
