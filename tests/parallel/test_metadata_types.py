"""A field of a call's metadata that is of another type is refused with value, rule and way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backends.interface import AttentionMetadata, PackedLengths
from parallel.attention import Attention
from tests.parallel.layers import context_of

PAIR = "it is a pair of whole numbers or None, (keys before, keys after), or None"
LENGTHS = "it is a PackedLengths of two tuples of whole numbers, or None"


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        *(("window", value, PAIR) for value in (5, (1,), (1, 2, 3), (1.0, None), ("1", 1), (True, 1), [1, 1])),
        ("packed", ((4,), (4,)), LENGTHS),
        ("packed", PackedLengths([4], (4,)), LENGTHS),  # type: ignore[arg-type]
        ("packed", PackedLengths((4.0,), (4,)), LENGTHS),  # type: ignore[arg-type]
        ("packed", PackedLengths((4,), None), LENGTHS),  # type: ignore[arg-type]
        ("soft_cap", "30", "it is a finite number above 0, or None"),
        ("soft_cap", True, "it is a finite number above 0, or None"),
        ("mask", [[True]], "it is a tensor, or None"),
        ("sinks", 0.5, "it is a tensor, or None"),
    ],
)
def test_another_type_is_refused_before_anything_runs(name: str, value: Any, rule: str) -> None:
    layer = Attention(2, 16, role="self", kind="self", context=context_of(backend="REFERENCE"), name="blocks.0.attn1")
    q = torch.randn(1, 4, 2, 16)
    with pytest.raises(ValueError, match=r"blocks\.0\.attn1: ") as caught:
        layer(q, q, q, AttentionMetadata(**{name: value}))
    assert str(caught.value) == f"blocks.0.attn1: {name} is {value!r}; {rule}"


def test_what_is_no_metadata_is_refused() -> None:
    layer = Attention(2, 16, role="self", kind="self", context=context_of(backend="REFERENCE"))
    q = torch.randn(1, 4, 2, 16)
    with pytest.raises(ValueError, match=r"metadata is {'window': None}; it is an AttentionMetadata, or None"):
        layer(q, q, q, {"window": None})  # type: ignore[arg-type]
