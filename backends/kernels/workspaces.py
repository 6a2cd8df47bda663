"""Scratch memory of kernels, and other things that layers share, kept for the keys that were used last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Place = tuple[torch.device, int]


class Recent(Generic[Key, Value]):
    """What was made for the `limit` keys that were asked for last. Threads may share it; one makes at a time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[Key, Value] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            value = self._kept[key] = make()
            while len(self._kept) > self.limit:
                self._kept.popitem(last=False)
            return value

    def drop(self, key: Key) -> None:
        with self._lock:
            self._kept.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)


class Workspace:
    """One buffer of zeros for each device and stream: kernels of one stream follow each other and may share it, those
    of two may run at once. A buffer that is dropped is freed in the order of its own stream, behind its last kernel.
    """

    def __init__(self, size: int, limit: int = 8) -> None:
        self.size = size
        self._buffers: Recent[Place, torch.Tensor] = Recent(limit)

    def on(self, device: torch.device) -> torch.Tensor:
        """`size` bytes for the device's current stream."""

        def make() -> torch.Tensor:
            return torch.zeros(self.size, dtype=torch.uint8, device=device)

        return self._buffers.get(place_of(device), make)

    def clear(self) -> None:
        self._buffers.clear()


def place_of(device: torch.device) -> Place:
    """A device and its current stream."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return device, stream
