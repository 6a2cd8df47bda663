"""What a block of queries, keys and heads is told: exactly what the whole call says of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.interface import AttentionMetadata, PackedLengths
from backends.kernels.masking import whole_mask
from parallel.kept import Kept
from parallel.restrict import of_heads, of_rows
from parallel.rows import Rows, rows

CPU = torch.device("cpu")
LENGTH, HEADS = 12, 4
SHAPES = (
    None,
    (2, 1, 1, LENGTH),
    (1, 1, LENGTH, LENGTH),
    (2, HEADS, LENGTH, LENGTH),
    (1, HEADS, 1, LENGTH),
)


@st.composite
def positions(draw: st.DrawFn) -> Rows:
    ends = sorted(draw(st.sets(st.integers(0, LENGTH), min_size=2, max_size=6)))
    return rows(*(range(low, high) for low, high in zip(ends[::2], ends[1::2], strict=False)))


@st.composite
def carried(draw: st.DrawFn) -> AttentionMetadata:
    shape = draw(st.sampled_from(SHAPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    found: dict[str, Any] = {}
    if shape is not None:
        found["mask"] = torch.rand(shape, generator=generator) < 0.6
    if draw(st.booleans()):
        found["window"] = (draw(st.none() | st.integers(0, 4)), draw(st.none() | st.integers(0, 4)))
    if draw(st.booleans()):
        cuts = [0, *sorted(draw(st.lists(st.integers(0, LENGTH), max_size=3))), LENGTH]
        lengths = tuple(high - low for low, high in pairwise(cuts))
        found["packed"] = PackedLengths(lengths, lengths)
    return AttentionMetadata(**found)


def visible(metadata: AttentionMetadata, queries: int, keys: int, causal: bool) -> torch.Tensor:
    query, key = torch.zeros(2, queries, HEADS, 1), torch.zeros(2, keys, HEADS, 1)
    mask = whole_mask(query, key, metadata, causal=causal)
    seen = torch.ones(1, 1, 1, 1, dtype=torch.bool) if mask is None else mask
    return seen.expand(2, HEADS, queries, keys)


@given(carried(), positions(), positions(), st.booleans())
def test_a_block_is_told_what_the_call_says_of_its_rows(
    metadata: AttentionMetadata, queries: Rows, keys: Rows, causal: bool
) -> None:
    block = of_rows(metadata, queries, keys, CPU, Kept(), causal=causal)
    assert block.window is None
    whole = visible(metadata, LENGTH, LENGTH, causal)
    expected = whole[:, :, list(queries)][:, :, :, list(keys)]
    assert torch.equal(visible(block, len(queries), len(keys), False), expected)


@given(carried(), st.integers(0, HEADS), st.integers(0, HEADS))
def test_heads_are_cut_out_of_what_is_of_each_head(metadata: AttentionMetadata, one: int, other: int) -> None:
    heads = range(min(one, other), max(one, other))
    sinks = torch.arange(HEADS, dtype=torch.float32)
    cut = of_heads(AttentionMetadata(metadata.mask, metadata.window, None, sinks, metadata.packed), heads)
    assert cut.sinks is not None
    assert cut.sinks.tolist() == list(heads)
    assert (cut.window, cut.packed) == (metadata.window, metadata.packed)
    if metadata.mask is not None and metadata.mask.shape[1] > 1:
        assert cut.mask is not None
        assert torch.equal(cut.mask, metadata.mask[:, heads.start : heads.stop])
    else:
        assert cut.mask is metadata.mask


def test_what_is_of_no_head_or_row_stays_the_same_object() -> None:
    plain = AttentionMetadata(soft_cap=3.0)
    assert of_heads(plain, range(2)) is plain
    padding = AttentionMetadata(torch.ones(1, 1, 1, LENGTH, dtype=torch.bool))
    assert of_heads(padding, range(2)) is padding
