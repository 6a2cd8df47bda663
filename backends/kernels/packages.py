"""Kernels out of packages that may not be there: imported when they are first needed, by dotted path."""

from __future__ import annotations

import functools
import importlib
from typing import Any, ClassVar

import torch

from backends.interface import AttentionImpl, AttentionMetadata
from backends.options import Blocks


@functools.cache
def imported(path: str) -> Any:
    """What stands at a dotted path, such as `flash_attn.flash_attn_func`. Raises what the import raises."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def first(result: Any) -> torch.Tensor:
    """The output. Some versions return (output, LSE) whatever was asked for."""
    out = result[0] if isinstance(result, tuple) else result
    return out  # type: ignore[no-any-return]


class PackageImpl(AttentionImpl):
    """A kernel at `path`."""

    path: ClassVar[str]

    @property
    def kernel(self) -> str:
        return self.path

    @classmethod
    def load(cls, options: Blocks = ()) -> None:
        imported(cls.path)


class FlashImpl(PackageImpl):
    """A kernel with FlashAttention's interface, on [B, S, H, D] tensors as they are, forward only."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> torch.Tensor:
        return first(imported(self.path)(query, key, value, **self.settings(metadata)))

    def settings(self, metadata: AttentionMetadata) -> dict[str, Any]:
        """What the kernel is called with beside the tensors."""
        return {"softmax_scale": self.softmax_scale, "causal": self.causal}
