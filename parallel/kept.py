"""What was worked out of a plan and positions, kept for the other layers and calls that need the same: masks of windows
and causality for a block, and indices. What is made of a caller's mask is made anew, since nothing tells for sure
whether a tensor was written to: collectives, `.data` and shared memory leave its version as it is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Self

import torch

LIMIT = 2**30
"""Bytes of what is kept. What was not asked for longest goes first."""
ENTRIES = 1024


class Kept:
    """Tensors by what they say. Nobody may write to one, as it has many users. Threads may share it."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.bytes = 0
        self._limit = limit
        self._made: OrderedDict[Hashable, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._made)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def get(self, asked: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of an earlier call with these, or that of `make`, of which `asked` tells everything."""
        if torch.compiler.is_compiling():
            return make()  # what is compiled makes it in its graph
        key = (torch.is_inference_mode_enabled(), asked)
        with self._lock:
            found = self._made.get(key)
            if found is not None:
                self._made.move_to_end(key)
                return found
            made = make()
            if type(made) is not torch.Tensor:
                return made  # of a mode that only plays through what real calls do
            self._made[key] = made
            self.bytes += made.nbytes
            while self.bytes > self._limit or len(self._made) > ENTRIES:
                self.bytes -= self._made.popitem(last=False)[1].nbytes
        return made
