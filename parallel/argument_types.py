"""What arguments of a layer, and the fields of a call's metadata, are made of; whether they fit the call is for
`parallel.calls`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from backends.interface import AttentionMetadata, Features, PackedLengths
from backends.requirements import kind_fault, size_fault


def layer_problem(kind: Any, features: Any, softmax_scale: Any, sizes: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with the arguments of a layer, or None.

    A scale is above 0: torch's kernel on CPU scales the minus infinity of hidden keys, too.

    Args:
        kind: What was passed as the kind.
        features: What was passed as the features.
        softmax_scale: What was passed as the scale of the scores.
        sizes: Numbers of heads and head sizes, by the names of their arguments.
    """
    faults = (kind_fault(kind), *(size_fault(name, size) for name, size in sizes.items()))
    if any(faults):
        return "; ".join(f"{f.key} is {f.value}; {f.rule}; {f.remedy}" for f in faults if f is not None)
    if not isinstance(features, Features):
        return f"features is {features!r}; it is a Features, such as Features(mask='full')"
    number = isinstance(softmax_scale, Real) and not isinstance(softmax_scale, bool)
    if softmax_scale is not None and not (number and math.isfinite(softmax_scale) and softmax_scale > 0):
        return f"softmax_scale is {softmax_scale!r}; it is a finite number above 0, or None for head_size ** -0.5"
    return None


def wrong_types(metadata: AttentionMetadata) -> str | None:
    """What is wrong with the first field that is of another type than `AttentionMetadata` says."""
    problem = _problem(metadata)
    if problem is None:
        return None
    name, value, rule = problem
    return f"{name} is {value!r}; {rule}, or None"


def _problem(metadata: AttentionMetadata) -> tuple[str, Any, str] | None:
    """(field, value, rule) of the first one."""
    if not isinstance(metadata, AttentionMetadata):
        return "metadata", metadata, "it is an AttentionMetadata"
    for name in ("mask", "bias", "sinks"):
        value = getattr(metadata, name)
        if value is not None and not isinstance(value, torch.Tensor):
            return name, value, "it is a tensor"
    if metadata.block_mask is not None and not isinstance(metadata.block_mask, BlockMask):
        return "block_mask", metadata.block_mask, "it is a BlockMask of torch's"
    window, cap, packed = metadata.window, metadata.soft_cap, metadata.packed
    sides = window if isinstance(window, tuple) else (0.0,)
    if window is not None and (len(sides) != 2 or not all(side is None or type(side) is int for side in sides)):
        return "window", window, "it is a pair of whole numbers or None, (keys before, keys after)"
    if cap is not None and type(cap) not in (int, float):
        return "soft_cap", cap, "it is a finite number above 0"
    if packed is not None and not (isinstance(packed, PackedLengths) and _is_lengths(packed)):
        return "packed", packed, "it is a PackedLengths of two tuples of whole numbers"
    return None


def _is_lengths(packed: PackedLengths) -> bool:
    return all(
        isinstance(lengths, tuple) and all(type(length) is int for length in lengths)
        for lengths in (packed.query, packed.key)
    )
