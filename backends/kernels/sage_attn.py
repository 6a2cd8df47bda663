"""SageAttention: version 1 (`sageattention` 1.0.6) in int8, and version 3 (`sageattn3`) in 4-bit floating point."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch

from backends.interface import AttentionMetadata, CallShape
from backends.kernels.packages import PackageImpl, imported
from backends.kernels.ragged import shape_of
from backends.options import Blocks

_BLOCK = 64
_MOST_PHANTOMS = 0.01
_ENTRIES = 1 << 31


class SageAttnImpl(PackageImpl):
    """The kernel counts keys in blocks of 64 and, unless it is causal, takes what the last block lacks for keys of
    score 0 without a value. Since the mean is off the keys, their share of a row is at most what they are of all keys;
    calls where that is more than the quantisation itself costs are refused.
    """

    path = "sageattention.core.sageattn"

    @classmethod
    def load(cls, options: Blocks = ()) -> None:
        if "smooth_k" not in inspect.signature(imported(cls.path)).parameters:
            raise ImportError("this sageattention is not version 1: pip install sageattention==1.0.6")

    def plan(self, shape: CallShape) -> None:
        self._check_keys(shape)
        rows = max(shape.query_length * shape.num_heads, shape.key_length * shape.num_kv_heads)
        entries = shape.batch * rows * shape.head_size
        if entries >= _ENTRIES:
            raise ValueError(
                f"a tensor of {entries} entries: SageAttention counts them in 32 bits, up to {_ENTRIES - 1}; use "
                "TORCH_SDPA for this role"
            )

    def _check_keys(self, shape: CallShape) -> None:
        phantoms = -shape.key_length % _BLOCK
        if self.causal or phantoms <= _MOST_PHANTOMS * shape.key_length:
            return
        raise ValueError(
            f"{shape.key_length} keys: SageAttention 1 counts them as {shape.key_length + phantoms}, which changes the "
            f"result by more than {_MOST_PHANTOMS:.0%}; give a multiple of {_BLOCK} keys or more than "
            f"{int(_BLOCK / _MOST_PHANTOMS)}, or use TORCH_SDPA for this role"
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> torch.Tensor:
        self.plan(shape_of(query, key, metadata))
        # The kernel would take the mean off the caller's own keys, in place.
        smooth = key - key.mean(dim=1, keepdim=True)
        out: torch.Tensor = imported(self.path)(
            query,
            smooth,
            value,
            tensor_layout="NHD",
            is_causal=self.causal,
            sm_scale=self.softmax_scale,
            smooth_k=False,
        )
        return out


class SageAttn3Impl(PackageImpl):
    """Its scale is that of the head size, and cannot be set."""

    path = "sageattn3.sageattn3_blackwell"

    def __init__(self, *, softmax_scale: float, causal: bool, options: Blocks = ()) -> None:
        super().__init__(softmax_scale=softmax_scale, causal=causal, options=options)
        self._check_scale(64, 128)

    def plan(self, shape: CallShape) -> None:
        self._check_scale(shape.head_size)

    def _check_scale(self, *sizes: int) -> None:
        if not any(math.isclose(self.softmax_scale, size**-0.5, rel_tol=1e-6) for size in sizes):
            allowed = " or ".join(f"{size**-0.5:.6g} (head size {size})" for size in sizes)
            raise ValueError(
                f"softmax_scale={self.softmax_scale:.6g}: SageAttention 3 has that of the head size alone, {allowed}; "
                "leave it at head_size ** -0.5, or use another backend for this role"
            )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> torch.Tensor:
        self._check_scale(query.shape[3])
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out: torch.Tensor = imported(self.path)(q, k.clone(), v, is_causal=self.causal)  # it changes K in place
        return out.transpose(1, 2)
