"""What was worked out of a call's masks, kept for the other layers and calls that carry the same ones."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from typing import TypeVar

import torch
from torch.nn.attention.flex_attention import BlockMask

LIMIT = 2**30
"""Bytes of what is kept, beside what the callers hold in any case. What was not asked for longest goes first."""

Made = TypeVar("Made", torch.Tensor, BlockMask)
Source = torch.Tensor | BlockMask | None


class Kept:
    """Results by the object that they are made of, and by what is asked of it.

    Objects are known as such, not by what they say; they are not held: with an object goes what was made of it. A
    tensor that was written to is another one. Nothing is kept of tensors that record gradients, or cannot tell whether
    they were written to (those of inference mode).
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.bytes = 0
        self._limit = limit
        self._made: OrderedDict[Hashable, tuple[int, torch.Tensor | BlockMask, int]] = OrderedDict()
        self._sources: dict[int, tuple[weakref.ref[torch.Tensor | BlockMask], set[Hashable]]] = {}

    def __len__(self) -> int:
        return len(self._made)

    def get(self, source: Source, asked: Hashable, make: Callable[[], Made]) -> Made:
        """The result of an earlier call with these, or that of `make`. source: None for what is made of `asked` alone.

        Nobody may write to it, as it has many users.
        """
        if torch.compiler.is_compiling():
            return make()  # what is compiled makes it in its graph
        if isinstance(source, torch.Tensor) and (source.requires_grad or source.is_inference()):
            return make()
        version = source._version if isinstance(source, torch.Tensor) else 0
        key = (id(source), torch.is_inference_mode_enabled(), asked)
        found = self._made.get(key)
        if found is not None and found[0] == version:
            self._made.move_to_end(key)
            return found[1]  # type: ignore[return-value]
        made = make()
        self._drop(key)
        if source is not None:
            self._watch(source).add(key)
        if isinstance(made, torch.Tensor):
            made = made.data  # a view would hold the source that it is of
        self._made[key] = version, made, _bytes(made, source)
        self.bytes += self._made[key][2]
        while self.bytes > self._limit:
            self._drop(next(iter(self._made)))
        return made

    def _watch(self, source: torch.Tensor | BlockMask) -> set[Hashable]:
        """The keys of what was made of it, which go when it goes."""
        place = id(source)
        if place not in self._sources:
            self._sources[place] = weakref.ref(source, partial(_forget, weakref.ref(self), place)), set()
        return self._sources[place][1]

    def _drop(self, key: Hashable) -> None:
        found = self._made.pop(key, None)
        self.bytes -= 0 if found is None else found[2]

    def forget(self, place: int) -> None:
        _, keys = self._sources.pop(place, (None, set()))
        for key in keys:
            self._drop(key)


def _forget(kept: weakref.ref[Kept], place: int, gone: object) -> None:
    of = kept()
    if of is not None:
        of.forget(place)


def _bytes(made: torch.Tensor | BlockMask, source: Source) -> int:
    """What a result takes by itself."""
    if isinstance(made, BlockMask):
        parts = (made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)
        return sum(part.nbytes for part in parts if part is not None)
    if isinstance(source, torch.Tensor) and source.untyped_storage().data_ptr() == made.untyped_storage().data_ptr():
        return 0
    return made.untyped_storage().nbytes()
