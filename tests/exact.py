"""Softmax attention in fp64 by einsum, written apart from the package's own reference, and how far a result is off."""

from __future__ import annotations

import torch

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
"""Against this softmax on the unsharded tensors, as the design has it."""

SAME_BACKEND = {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 2e-3}
"""Against the same backend on one rank."""


def attention64(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [B, Sq, H, D], key and value [B, Sk, Hkv, D], mask [B or 1, 1, Sq or 1, Sk]; [B, Sq, H, D] in fp64."""
    batch, rows, heads, size = query.shape
    keys, kv_heads = key.shape[1], key.shape[2]
    grouped = query.double().reshape(batch, rows, kv_heads, heads // kv_heads, size)
    scores = torch.einsum("bqkgd,bskd->bkgqs", grouped, key.double()) * scale
    allowed = torch.ones(batch, 1, 1, rows, keys, dtype=torch.bool)
    if mask is not None:
        allowed = allowed & mask[:, :, None]
    if causal:
        allowed = allowed & (torch.arange(keys)[None, :] <= torch.arange(rows)[:, None])
    largest = torch.where(allowed, scores, -1e300).amax(dim=-1, keepdim=True)
    weights = torch.where(allowed, torch.exp(torch.minimum(scores - largest, torch.zeros(()))), 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    weights = weights / torch.where(total > 0, total, 1.0)
    return torch.einsum("bkgqs,bskd->bqkgd", weights, value.double()).reshape(batch, rows, heads, size)


def softmax64(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    seen: torch.Tensor,
    bias: torch.Tensor | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [B, Sq, H, Dv] and the log-sum-exp [B, H, Sq] of everything that a call may carry; differentiable.

    query [B, Sq, H, D], key [B, Sk, Hkv, D], value [B, Sk, Hkv, Dv], all fp64; seen: boolean, who looks at whom; seen
    and bias [B or 1, H or 1, Sq or 1, Sk]; sinks [H].
    """
    heads, rows, keys = query.shape[2], query.shape[1], key.shape[1]
    reads = torch.arange(heads) // (heads // key.shape[2])
    scores = torch.einsum("bqhd,bshd->bhqs", query, key[:, :, reads]) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores, seen = scores + bias, seen & (bias > float("-inf"))
    seen = seen.expand(query.shape[0], heads, rows, keys)
    # exp without a shift: the scores of tests are small, and a sum of exponentials is what is meant.
    weights = torch.where(seen, torch.where(seen, scores, 0.0).exp(), 0.0)
    total = weights.sum(dim=-1)
    if sinks is not None:
        total = total + sinks.exp()[:, None]
    blind = total == 0
    out = torch.einsum("bhqs,bshd->bqhd", weights / torch.where(blind, 1.0, total)[..., None], value[:, :, reads])
    return out, torch.where(blind, 1.0, total).log().masked_fill(blind, float("-inf"))


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """L2 norm of the difference over that of the exact values; infinite for anything that is not a number."""
    if result.shape != exact.shape or not bool(torch.isfinite(result).all()):
        return float("inf")
    exact = exact.double()
    return float((result.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def random_qkv(
    batch: int, rows: int, keys: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same tensors in every process."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int, count: int) -> torch.Tensor:
        return torch.randn(batch, length, count, size, generator=generator, dtype=torch.float64).to(dtype)

    return draw(rows, heads), draw(keys, kv_heads), draw(keys, kv_heads)
