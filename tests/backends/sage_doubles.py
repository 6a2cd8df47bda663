"""Stand-ins for SageAttention 1 and 3: their recorded signatures, over attention in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends.kernels.packages import imported
from tests.backends.published import as_published
from tests.backends.vendor_doubles import put
from tests.exact import attention64

CALLS: list[dict[str, Any]] = []


def int8(rows: torch.Tensor, block: int) -> torch.Tensor:
    """[B, S, H, D] as int8 with a scale for each block and head, and back."""
    parts = []
    for part in rows.double().split(block, dim=1):
        scale = part.abs().amax(dim=(1, 3), keepdim=True).clamp_min(1e-30) / 127
        parts.append((part / scale).round() * scale)
    return torch.cat(parts, dim=1)


@as_published("sageattention.core.sageattn")
def sageattn(
    q: Any,
    k: Any,
    v: Any,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: Any = None,
    smooth_k: bool = True,
    **kwargs: Any,
) -> torch.Tensor:
    CALLS.append(locals())
    assert tensor_layout == "NHD"
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.float16, torch.bfloat16, torch.float32)
    assert q.size(-1) in (64, 96, 128)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert not kwargs
    if smooth_k:
        k -= k.mean(dim=1, keepdim=True)  # in place, as the package does
    lacking = 0 if is_causal else -k.shape[1] % 64
    assert not is_causal or q.shape[1] == k.shape[1]
    keys = torch.nn.functional.pad(int8(k, 64), (0, 0, 0, 0, 0, lacking))
    values = torch.nn.functional.pad(v.to(torch.float16), (0, 0, 0, 0, 0, lacking))
    return attention64(int8(q, 128), keys, values, scale=sm_scale, causal=is_causal).to(q.dtype)


@as_published("sageattn3.sageattn3_blackwell")
def sageattn3_blackwell(
    q: Any, k: Any, v: Any, attn_mask: Any = None, is_causal: bool = False, per_block_mean: bool = True, **kwargs: Any
) -> torch.Tensor:
    CALLS.append(locals())
    assert q.shape[1] == k.shape[1]
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.size(-1) in (64, 128)
    assert attn_mask is None
    assert not kwargs
    k -= k.mean(dim=-2, keepdim=True)
    rows = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return attention64(*rows, scale=q.size(-1) ** -0.5, causal=is_causal).transpose(1, 2).to(q.dtype).contiguous()


@contextmanager
def packages(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both, as if they were installed."""
    core = SimpleNamespace(sageattn=sageattn)
    put(patch, sageattention=SimpleNamespace(core=core), sageattention__core=core)
    put(patch, sageattn3=SimpleNamespace(sageattn3_blackwell=sageattn3_blackwell))
    imported.cache_clear()
    CALLS.clear()
    yield
    imported.cache_clear()
