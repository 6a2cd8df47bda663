"""Attention over parts of the keys, put together by the parts' log-sum-exps (as in Ring Attention, Liu et al., 2023,
arXiv:2310.01889).

Outputs are [B, S, H, D], log-sum-exps [B, H, S], natural, in fp32 or fp64. A part without keys has minus infinity and
counts for nothing; rows without any key are zeros with minus infinity.
"""

from __future__ import annotations

import torch

Weighed = tuple[torch.Tensor, torch.Tensor]
"""An output and its log-sum-exp."""


def merge(one: Weighed, other: Weighed) -> Weighed:
    """Attention over the keys of both parts; outputs in the log-sum-exps' dtype."""
    (out, lse), (more, more_lse) = one, other
    # Any number near the larger one keeps the exponentials in range, so no gradient has to flow through it.
    largest = torch.maximum(lse, more_lse).detach()
    largest = largest.masked_fill(largest == float("-inf"), 0)
    weight, more_weight = torch.exp(lse - largest), torch.exp(more_lse - largest)
    total = weight + more_weight
    blind = total == 0
    total = total.masked_fill(blind, 1)
    merged = out.to(lse.dtype) * _by_row(weight / total) + more.to(lse.dtype) * _by_row(more_weight / total)
    return merged, (largest + torch.log(total)).masked_fill(blind, float("-inf"))


def merge_rows(whole: Weighed, part: Weighed, rows: range) -> Weighed:
    """`merge` for some of the rows; the others stay as they are."""
    out, lse = whole
    if len(rows) == out.shape[1]:
        return merge(whole, part)
    mine = slice(rows.start, rows.stop)
    merged, merged_lse = merge((out[:, mine], lse[:, :, mine]), part)
    return (
        torch.cat((out[:, : rows.start], merged, out[:, rows.stop :]), dim=1),
        torch.cat((lse[:, :, : rows.start], merged_lse, lse[:, :, rows.stop :]), dim=2),
    )


def merge_sinks(whole: Weighed, sinks: torch.Tensor) -> Weighed:
    """sinks [H]: a logit more for each row, which has no value."""
    out, lse = whole
    logits = sinks.to(lse.dtype)[:, None].expand_as(lse)
    return merge(whole, (torch.zeros_like(out), logits))


def nothing(query: torch.Tensor, value_size: int) -> Weighed:
    """The result of a query over no keys."""
    batch, rows, heads, _ = query.shape
    lse = query.new_full((batch, heads, rows), float("-inf"), dtype=wide(query.dtype))
    return query.new_zeros(batch, rows, heads, value_size, dtype=wide(query.dtype)), lse


def wide(dtype: torch.dtype) -> torch.dtype:
    """Of log-sum-exps, and of what is summed up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _by_row(weights: torch.Tensor) -> torch.Tensor:
    return weights.transpose(1, 2).unsqueeze(-1)
