"""FlashInfer's ragged prefill (`BatchPrefillWithRaggedKVCacheWrapper`), with the kernels of one of its backends.

A wrapper is planned for a geometry, and then serves every layer that has it. It cannot go back from a mask to none, so
masked calls have wrappers of their own; those are planned again for each mask. The log-sum-exp of the kernels is
[rows, H] in fp32, to the base 2.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from backends.interface import AttentionImpl, AttentionMetadata, CallShape
from backends.kernels.masking import blind_lse, whole_mask, zero_blind_rows
from backends.kernels.packages import imported
from backends.kernels.ragged import RaggedCall, nothing_with_lse, offsets, shape_of
from backends.kernels.workspaces import Place, Recent, Workspace, place_of
from backends.options import Blocks
from backends.requirements import Features

_MASK_LIMIT = (1 << 31) - 1
_FP8 = torch.float8_e4m3fn
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "fp8_e4m3": _FP8}


_WRAPPER = "flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper"


@dataclass(frozen=True)
class Geometry:
    """What a wrapper is planned for. window_left: how far back a causal query looks, -1 for all the way."""

    backend: str
    call: RaggedCall
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    causal: bool
    window_left: int
    soft_cap: float
    dtype: torch.dtype
    masked: bool


_WORKSPACE = Workspace(128 << 20)
_WRAPPERS: Recent[tuple[Place, int, Geometry], Any] = Recent(16)  # each holds 8 MiB on the device, and as many pinned


def _planned(geometry: Geometry, device: torch.device, mask: torch.Tensor | None) -> Any:
    """A wrapper that is ready to run on the device's current stream."""

    def make() -> Any:
        wrapper = imported(_WRAPPER)(_WORKSPACE.on(device), "NHD", backend=geometry.backend)
        if not geometry.masked:
            _plan(wrapper, geometry, None)
        return wrapper

    thread = threading.get_ident() if geometry.masked else 0  # it is planned for one mask, and then runs with it
    wrapper = _WRAPPERS.get((place_of(device), thread, geometry), make)
    if geometry.masked:
        _plan(wrapper, geometry, mask)
    return wrapper


def _plan(wrapper: Any, geometry: Geometry, mask: torch.Tensor | None) -> None:
    call = geometry.call
    wrapper.plan(
        offsets(call.query_lengths),  # on the host, where the planning is; the wrapper puts them on the device
        offsets(call.key_lengths),
        geometry.num_heads,
        geometry.num_kv_heads,
        geometry.head_size,
        custom_mask=mask,
        causal=geometry.causal,
        window_left=geometry.window_left,
        logits_soft_cap=geometry.soft_cap,
        sm_scale=geometry.scale,
        q_data_type=geometry.dtype,
        kv_data_type=geometry.dtype,
        o_data_type=geometry.dtype,
    )


@dataclass(frozen=True, eq=False)
class _Ready:
    """A planned wrapper and what it is to run on. scale: [H, D], for the result."""

    wrapper: Any
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    call: RaggedCall
    mask: torch.Tensor | None
    scale: torch.Tensor | None
    dtype: torch.dtype

    def output(self, rows: torch.Tensor) -> torch.Tensor:
        scaled = rows if self.scale is None else rows * self.scale
        return zero_blind_rows(self.call.all_rows(scaled.to(self.dtype)), self.mask)


class FlashinferImpl(AttentionImpl):
    """backend: the name under which the wrapper has the kernels."""

    backend: ClassVar[str]
    _device: torch.device | None = None
    _dtype: torch.dtype | None = None

    @property
    def kernel(self) -> str:
        return f"{_WRAPPER}[{self.backend}]"

    @classmethod
    def load(cls, options: Blocks = ()) -> None:
        imported(_WRAPPER)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        _WORKSPACE.on(device)

    def plan(self, shape: CallShape) -> RaggedCall:
        """The documents; and the wrapper of a call without features, which a call with some has to bring."""
        call = RaggedCall.of(shape)
        bare = shape.features in (Features(), Features(packed=True))
        if bare and call.taking_part and self._device is not None and self._dtype is not None:
            geometry = self._geometry(call, shape, AttentionMetadata(), self._dtype)
            _planned(geometry, self._device, None)
        return call

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> torch.Tensor:
        ready = self._ready(query, key, value, metadata, plan)
        return torch.zeros_like(query) if ready is None else ready.output(ready.wrapper.run(*ready.qkv))

    def forward_with_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ready = self._ready(query, key, value, metadata, plan)
        if ready is None:
            return nothing_with_lse(query, value)
        rows, lse = ready.wrapper.run(*ready.qkv, return_lse=True)
        natural = ready.call.all_rows(lse * math.log(2), float("-inf")).transpose(1, 2)
        return ready.output(rows), blind_lse(natural, ready.mask)

    def _ready(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata, plan: Any
    ) -> _Ready | None:
        """None if no document takes part."""
        shape = shape_of(query, key, metadata)
        call: RaggedCall = RaggedCall.of(shape) if plan is None else plan
        if not call.taking_part:
            return None
        geometry = self._geometry(call, shape, metadata, query.dtype)
        mask = self._mask(call, query, key, metadata) if geometry.masked else None
        entries = None if mask is None else call.mask_entries(mask)
        v, scale = self._value(call.key_rows(value))
        q, k = call.query_rows(query).to(geometry.dtype), call.key_rows(key).to(geometry.dtype)
        if scale is not None:
            scale = scale.repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=0)
        return _Ready(_planned(geometry, query.device, entries), (q, k, v), call, mask, scale, query.dtype)

    def _geometry(
        self, call: RaggedCall, shape: CallShape, metadata: AttentionMetadata, dtype: torch.dtype
    ) -> Geometry:
        bounds = _bounds(self.causal, metadata.window) if metadata.mask is None else None
        return Geometry(
            backend=self.backend,
            call=call,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            scale=self.softmax_scale,
            causal=bounds is not None and bounds[0],
            window_left=-1 if bounds is None else bounds[1],
            soft_cap=metadata.soft_cap or 0.0,
            dtype=self._dtype_of("dtype_qk") or dtype,
            masked=bounds is None,
        )

    def _mask(
        self, call: RaggedCall, query: torch.Tensor, key: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor | None:
        """Mask, causality, window and documents as one: the kernel takes no other beside a mask."""
        entries = sum(rows * keys for rows, keys in zip(call.query_lengths, call.key_lengths, strict=True))
        if entries > _MASK_LIMIT:
            raise ValueError(
                f"a mask of {entries} entries: FlashInfer counts them in 32 bits, up to {_MASK_LIMIT}; use TORCH_SDPA "
                "for this role"
            )
        return whole_mask(query, key, metadata, causal=self.causal)

    def _value(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """V as the kernel gets it, and for fp8 what each channel [Hkv, D] of the result is to be multiplied with."""
        dtype = self._dtype_of("dtype_vo")
        if dtype is None:
            return value, None
        if dtype != _FP8:
            return value.to(dtype), None
        scale = value.abs().amax(dim=0).float().clamp_min(1e-12) / torch.finfo(_FP8).max
        return (value.float() / scale).to(_FP8), scale

    def _dtype_of(self, field: str) -> torch.dtype | None:
        name = getattr(self.options.get("quant"), field, None)
        return None if name is None else _DTYPES[name]


def _bounds(causal: bool, window: tuple[int | None, int | None] | None) -> tuple[bool, int] | None:
    """(causal, window_left), or None for a window that takes a mask: the kernel's own counts on causality."""
    before, after = window if window is not None else (None, None)
    causal = causal or after == 0
    if before is None and (causal or after is None):
        return causal, -1
    return (True, before) if causal and before is not None else None


class FlashinferFa2Impl(FlashinferImpl):
    backend = "fa2"


class FlashinferFa3Impl(FlashinferImpl):
    backend = "fa3"


class FlashinferCuteDslImpl(FlashinferImpl):
    backend = "cute-dsl"
