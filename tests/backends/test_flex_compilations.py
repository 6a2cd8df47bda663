"""FLEX_ATTENTION serves any number of kinds of calls, though torch compiles a code only so often, and keeps little."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask

from backends.interface import AttentionMetadata
from backends.kernels import flex_attention
from backends.kernels.flex_attention import FlexAttentionImpl
from tests.exact import attention64, random_qkv, relative_error

SCALE = 0.3
CPU = torch.device("cpu")
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "new": lambda x: x,
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "of a fused projection": lambda x: torch.stack((x, x, x), 2)[:, :, 1],
    "behind other rows": lambda x: torch.cat((x[:, :3], x), 1)[:, 3:],
    "elements apart": lambda x: torch.stack((x, x), -1)[..., 0],
}


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    flex_attention._COMPILED.clear()
    yield
    flex_attention._COMPILED.clear()


def made(scale: float = SCALE, *, causal: bool = False) -> FlexAttentionImpl:
    impl = FlexAttentionImpl(softmax_scale=scale, causal=causal)
    impl.prepare(CPU, torch.float32)
    return impl


def test_one_layer_serves_every_layout_mode_and_length() -> None:
    impl = made(causal=True)
    for length, (name, laid), mode in itertools.product(
        (150, 200, 301), LAYOUTS.items(), (torch.no_grad, torch.inference_mode, torch.enable_grad)
    ):
        qkv = random_qkv(2, length, length, 4, 2, 16, torch.float32)
        exact = attention64(*qkv, scale=SCALE, causal=True)
        with mode():
            out = impl.forward(*(laid(tensor) for tensor in qkv), AttentionMetadata())
        assert relative_error(out, exact) <= 1e-5, (length, name, mode)


def test_masks_in_any_layout_are_read_right() -> None:
    impl = made()
    mask = torch.rand(2, 1, 150, 150, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[..., 0] = True
    qkv = random_qkv(2, 150, 150, 4, 2, 16, torch.float32)
    exact = attention64(*qkv, scale=SCALE, mask=mask)
    turned = mask.transpose(2, 3).contiguous().transpose(2, 3)
    apart = torch.stack((mask, ~mask), -1)[..., 0]
    for laid in (mask, turned, apart, torch.cat((~mask, mask), 1)[:, 1:]):
        assert relative_error(impl.forward(*qkv, AttentionMetadata(laid)), exact) <= 1e-5


def test_an_expanded_mask_is_not_copied_at_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    ordered = flex_attention._in_order
    monkeypatch.setattr(flex_attention, "_in_order", lambda tensor: sizes.append(tensor.numel()) or ordered(tensor))
    mask = (torch.rand(1, 1, 1, 150, generator=torch.Generator().manual_seed(3)) < 0.6).expand(2, 4, 150, 150)
    qkv = random_qkv(2, 150, 150, 4, 2, 16, torch.float32)
    out = made().forward(*qkv, AttentionMetadata(mask))
    assert relative_error(out, attention64(*qkv, scale=SCALE, mask=mask[:, :1])) <= 1e-5
    assert sizes[0] == 150


def within(width: int) -> Callable[..., torch.Tensor]:
    def sees(batch: Any, head: Any, row: Any, key: Any) -> Any:
        return (row - key).abs() <= width

    return sees


def causal(batch: Any, head: Any, row: Any, key: Any) -> Any:
    return row >= key


def test_more_masks_of_a_callers_own_than_torch_compiles_of_one_code() -> None:
    impl = made()
    qkv = random_qkv(1, 200, 200, 2, 2, 16, torch.float32)
    rows, keys = torch.arange(200)[:, None], torch.arange(200)
    for width in range(12):
        asked = AttentionMetadata(
            block_mask=create_block_mask(and_masks(causal, within(width)), None, None, 200, 200, device="cpu")
        )
        seen = (rows >= keys) & ((rows - keys).abs() <= width)
        exact = attention64(*qkv, scale=SCALE, mask=seen[None, None])
        assert relative_error(impl.forward(*qkv, asked), exact) <= 1e-5


class Shifted:
    """A mask that is an object: torch compiles it anew for each."""

    def __init__(self, by: int) -> None:
        self.by = torch.tensor(by)

    def __call__(self, batch: Any, head: Any, row: Any, key: Any) -> Any:
        return row + self.by >= key


def test_nothing_of_a_callers_mask_is_kept_and_the_limit_of_one_code_is_no_end_of_it() -> None:
    impl = made()
    qkv = random_qkv(1, 150, 150, 1, 1, 8, torch.float32)
    rows, keys = torch.arange(150)[:, None], torch.arange(150)
    alive = []
    for by in range(11):
        mask = functools.partial(Shifted.__call__, Shifted(by))
        alive.append(weakref.ref(mask.args[0].by))
        asked = AttentionMetadata(block_mask=create_block_mask(mask, None, None, 150, 150, device="cpu"))
        exact = attention64(*qkv, scale=SCALE, mask=(rows + by >= keys)[None, None])
        assert relative_error(impl.forward(*qkv, asked), exact) <= 1e-5
        del mask, asked
    flex_attention._COMPILED.clear()
    torch._dynamo.reset()
    gc.collect()
    assert [reference() is not None for reference in alive] == [False] * 11
    assert flex_attention._COMPILED.limit <= 128


def test_a_soft_cap_of_each_call_keeps_a_bounded_number_of_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention._COMPILED, "limit", 3)
    qkv = random_qkv(1, 20, 20, 1, 1, 8, torch.float32)
    for cap in range(1, 8):
        made().forward(*qkv, AttentionMetadata(soft_cap=float(cap)))
    assert len(flex_attention._COMPILED) == 3
