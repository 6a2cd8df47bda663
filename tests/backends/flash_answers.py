"""What FlashAttention answers, in fp64, and the calls that the stand-ins of its packages were given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.backends.vendor_doubles import FP8, attend, documents, scores_of

CALLS: list[dict[str, Any]] = []


def dense(
    q: Any, k: Any, v: Any, scale: float, allowed: torch.Tensor, soft_cap: float = 0.0, sinks: Any = None
) -> torch.Tensor:
    rows = [attend(*row, scale, allowed, soft_cap, sinks) for row in zip(q, k, v, strict=True)]
    return torch.stack(rows).to(q.dtype)


def dense_lse(
    q: Any, k: Any, scale: float, allowed: torch.Tensor, soft_cap: float = 0.0, sinks: Any = None
) -> torch.Tensor:
    """[B, H, n], natural; as all of them, plus infinity for rows without keys but in version 4."""
    return torch.stack([lse_of(*row, scale, allowed, soft_cap, sinks) for row in zip(q, k, strict=True)])


def lse_of(
    q: Any, k: Any, scale: float, allowed: torch.Tensor, soft_cap: float = 0.0, sinks: Any = None
) -> torch.Tensor:
    lse = torch.logsumexp(scores_of(q, k, scale, allowed, soft_cap, sinks), dim=-1).float()
    return lse.masked_fill(lse == float("-inf"), float("inf"))


def ragged(
    tensors: tuple[Any, Any, Any],
    offsets: tuple[Any, Any],
    longest: tuple[int, int],
    scale: float,
    allowed_of: Callable[[int, int], torch.Tensor],
    soft_cap: float,
    sinks: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of all documents, and their log-sum-exp [H, rows]."""
    q, k, v = tensors
    assert offsets[0].dtype == offsets[1].dtype == torch.int32
    assert longest == (int(offsets[0].diff().max()), int(offsets[1].diff().max()))
    parts, sums = [], []
    for rows, keys in zip(documents(offsets[0]), documents(offsets[1]), strict=True):
        allowed = allowed_of(rows.stop - rows.start, keys.stop - keys.start)
        parts.append(attend(q[rows], k[keys], v[keys], scale, allowed, soft_cap, sinks))
        sums.append(lse_of(q[rows], k[keys], scale, allowed, soft_cap, sinks))
    return torch.cat(parts).to(q.dtype), torch.cat(sums, dim=1)


def unscaled(tensor: Any, descale: Any, documents_of: int | None = None) -> Any:
    """fp8 [B, S, H, D], or [rows, H, D] of documents with one scale, as the numbers that it stands for."""
    if descale is None:
        return tensor
    assert tensor.dtype == FP8
    batch = tensor.shape[0] if documents_of is None else documents_of
    assert descale.dtype == torch.float32
    assert descale.shape[0] == batch
    scale = descale.repeat_interleave(tensor.shape[-2] // descale.shape[1], dim=1)
    return tensor.double() * (scale[:, None, :, None] if documents_of is None else scale[0, :, None])
