"""What arguments of a layer, and the fields of a call's metadata, are made of; whether they fit the call is for
`parallel.calls`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import timedelta
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import BlockMask

from backends.interface import AttentionMetadata, Features, PackedLengths
from backends.layer_facts import DenoisingTime
from backends.requirements import kind_fault, size_fault
from configs.faults import Fault, FaultError
from parallel.grid import Stream


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
    """Returns what is wrong with the first field that is of another type than `AttentionMetadata` says, or None."""
    problem = _problem(metadata)
    if problem is None:
        return None
    name, value, rule = problem
    return f"{name} is {value!r}; {rule}, or None"


def wrong_dimensions(metadata: AttentionMetadata) -> str | None:
    """Returns which table of keys has other than four dimensions, or None."""
    for name, table in (("mask", metadata.mask), ("bias", metadata.bias)):
        if table is not None and table.dim() != 4:
            return f"{name} is of shape {tuple(table.shape)}; give a tensor [B or 1, 1 or H, Sq or 1, Sk]"
    return None


def wrong_streams(streams: tuple[Any, ...]) -> str | None:
    """Returns what is wrong with the arguments of `plan_of`, or None."""
    if not streams:
        return "no streams; give a Stream for each run of tokens, such as Stream('video', 75600)"
    for stream in streams:
        if not isinstance(stream, Stream):
            return (
                f"{stream!r:.80} is not a Stream; give a Stream for each run of tokens, such as Stream('video', 75600)"
            )
    return None


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


def raise_wrong_arguments(**arguments: Any) -> None:
    """Raise FaultError for arguments of `sequence_parallel` and `attention_context_of` of another type.

    Args:
        arguments: Values by the names in `_ARGUMENTS`; None is left to the caller, except for `name`.

    Raises:
        FaultError: With a fault for each wrong argument.
    """
    faults = []
    for name, value in arguments.items():
        fits, rule, remedy = _ARGUMENTS[name]
        if (value is not None or name == "name") and not fits(value):
            faults.append(Fault(name, repr(value), f"expected {rule}", remedy))
    if faults:
        raise FaultError(faults)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value.is_floating_point


_ARGUMENTS: Mapping[str, tuple[Callable[[Any], bool], str, str]] = {
    "dtype": (_is_floating, "a floating-point torch.dtype", "pass one such as torch.bfloat16"),
    "control": (
        # A rank outside a group has a number in its place; it is refused with the ranks of the group.
        lambda value: isinstance(value, dist.ProcessGroup) or value == dist.GroupMember.NON_GROUP_MEMBER,
        "a ProcessGroup that contains this rank",
        "leave it out, and one is formed",
    ),
    "timeout": (
        lambda value: isinstance(value, timedelta) and value > timedelta(0),
        "a datetime.timedelta above 0",
        "pass one such as timedelta(seconds=60)",
    ),
    "name": (
        lambda value: isinstance(value, str) and bool(value.strip()),
        "a name of at least one character",
        'pass one such as "transformer"',
    ),
    "denoising": (lambda value: isinstance(value, DenoisingTime), "a DenoisingTime", "pass raylysses.DenoisingTime()"),
    "on_event": (callable, "a function of one event", "pass one such as print"),
}
"""Of each argument: whether a value fits, what is expected, and the way out."""
