"""Parts of the keys put together by their log-sum-exps."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.kernels.reference import plain_attention, plain_attention_with_lse
from parallel.merge import Weighed, merge, merge_rows, merge_sinks, nothing
from tests.exact import random_qkv

INF = float("inf")
QUERY, KEY, VALUE = random_qkv(2, 5, 9, 3, 3, 4, torch.float64)


def part(keys: slice, mask: torch.Tensor | None = None) -> Weighed:
    return plain_attention_with_lse(QUERY, KEY[:, keys], VALUE[:, keys], scale=0.5, mask=mask)


@given(st.lists(st.integers(0, 9), max_size=4), st.permutations(range(5)))
def test_parts_in_any_order_are_the_whole(cuts: list[int], order: list[int]) -> None:
    ends = [0, *sorted(cuts), 9]
    parts = [slice(low, high) for low, high in pairwise(ends)]
    whole = nothing(QUERY, 4)
    for index in order:
        if index < len(parts) and parts[index].start < parts[index].stop:
            whole = merge(whole, part(parts[index]))
    out, lse = part(slice(0, 9))
    assert torch.allclose(whole[0], out, atol=1e-13)
    assert torch.allclose(whole[1], lse, atol=1e-13)


def test_minus_infinity_is_neutral_and_twice_it_gives_zeros() -> None:
    empty, some = nothing(QUERY, 4), part(slice(0, 4))
    for merged in (merge(empty, some), merge(some, empty)):
        assert all(torch.equal(*pair) for pair in zip(merged, some, strict=True))
    out, lse = merge(empty, nothing(QUERY, 4))
    assert not bool(out.any())
    assert bool((lse == -INF).all())
    assert not bool(merge((out, lse), empty)[0].any())


@pytest.mark.parametrize("scale", [1e-4, 300.0, 3000.0])
def test_large_and_small_logits_stay_in_range(scale: float) -> None:
    query, key, value = (tensor.float() for tensor in (QUERY * scale, KEY, VALUE))
    halves = [plain_attention_with_lse(query, key[:, s], value[:, s], scale=1.0) for s in (slice(4), slice(4, 9))]
    out, _ = merge(*halves)
    assert torch.allclose(out, plain_attention(query, key, value, scale=1.0), atol=1e-5)


def test_some_of_the_rows_are_merged_and_the_others_stay() -> None:
    whole, more = part(slice(0, 4)), part(slice(4, 9))
    out, lse = merge_rows(whole, (more[0][:, 1:3], more[1][:, :, 1:3]), range(1, 3))
    both = part(slice(0, 9))
    assert torch.allclose(out[:, 1:3], both[0][:, 1:3], atol=1e-13)
    assert torch.allclose(lse[:, :, 1:3], both[1][:, :, 1:3], atol=1e-13)
    for untouched in ([0], [3, 4]):
        assert torch.equal(out[:, untouched], whole[0][:, untouched])
        assert torch.equal(lse[:, :, untouched], whole[1][:, :, untouched])


def test_sinks_are_one_part_more() -> None:
    sinks = torch.tensor([-1.0, 0.0, 5.0], dtype=torch.float64)
    out, lse = merge_sinks(merge(part(slice(0, 4)), part(slice(4, 9))), sinks)
    exact, exact_lse = plain_attention_with_lse(QUERY, KEY, VALUE, scale=0.5, sinks=sinks)
    assert torch.allclose(out, exact, atol=1e-13)
    assert torch.allclose(lse, exact_lse, atol=1e-13)
    blind, sunk = merge_sinks(nothing(QUERY, 4), sinks)
    assert not bool(blind.any())
    assert torch.equal(sunk, sinks[None, :, None].expand_as(sunk))


def test_the_result_is_wide_and_the_parts_may_be_narrow() -> None:
    narrow = tuple(tensor.bfloat16() for tensor in (QUERY, KEY, VALUE))
    one, other = (
        plain_attention_with_lse(narrow[0], narrow[1][:, keys], narrow[2][:, keys], scale=1.0)
        for keys in (slice(4), slice(4, 9))
    )
    out, lse = merge(one, other)
    assert (out.dtype, lse.dtype, one[0].dtype) == (torch.float32, torch.float32, torch.bfloat16)


def test_gradients_of_blind_rows_are_zeros() -> None:
    tensors = [tensor.clone().requires_grad_() for tensor in (*part(slice(0, 4)), *part(slice(4, 9)))]
    with torch.no_grad():
        tensors[1][0, 0, 0] = tensors[3][0, 0, 0] = -INF
        tensors[3][1, 1, 1] = -INF
    out, lse = merge((tensors[0], tensors[1]), (tensors[2], tensors[3]))
    (out.sum() + lse[lse > -INF].sum()).backward()
    assert all(bool(tensor.grad.isfinite().all()) for tensor in tensors if tensor.grad is not None)
    assert not bool(tensors[0].grad[0, 0, 0].any())  # type: ignore[index]
