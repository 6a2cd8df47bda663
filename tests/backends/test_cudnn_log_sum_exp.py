"""CUDNN_ATTN's log-sum-exp: what torch's own operator for cuDNN is asked, by a double that answers by its words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backends.interface import AttentionMetadata
from backends.kernels.cudnn_attn import CudnnAttnImpl
from backends.kernels.masking import repeat_kv_heads, whole_mask
from backends.kernels.reference import plain_attention_with_lse
from tests.exact import random_qkv, relative_error

SCALE = 0.25


def cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """`aten::_scaled_dot_product_cudnn_attention` of [B, H, S, D]; causality counts from the first key."""
    assert compute_log_sumexp
    assert scale is not None
    assert attn_bias is None or (attn_bias.dtype == query.dtype and not is_causal), "cuDNN takes one of the two"
    assert attn_bias is None or attn_bias.shape == (*query.shape[:3], key.shape[2])
    k, v = (repeat_kv_heads(x.transpose(1, 2), query.shape[1]).transpose(1, 2).double() for x in (key, value))
    scores = query.double() @ k.mT * scale
    if attn_bias is not None:
        scores = scores + attn_bias.double()
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), float("-inf"))
    lse = torch.logsumexp(scores, -1, keepdim=True)
    out = (scores - lse).exp() @ v
    return out.to(query.dtype), lse.float(), *([None] * 7)


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("carried", ["nothing", "mask", "bias", "both"])
def test_masks_and_causality_reach_cudnn_as_one(
    carried: str, causal: bool, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", cudnn)
    qkv = random_qkv(2, 12, 12, 4, kv_heads, 16, torch.bfloat16)
    drawn = torch.Generator().manual_seed(2)
    mask = (torch.rand(2, 1, 12, 12, generator=drawn) < 0.6) if carried in ("mask", "both") else None
    if mask is not None:
        mask[:, :, 5] = False  # a row that sees nothing
    bias = torch.randn(2, 4, 12, 12, generator=drawn).bfloat16() if carried in ("bias", "both") else None
    metadata = AttentionMetadata(mask, bias=bias)
    impl = CudnnAttnImpl(softmax_scale=SCALE, causal=causal)
    impl.prepare(torch.device("cpu"), torch.bfloat16)
    out, lse = impl.forward_with_lse(*qkv, metadata)
    double = [tensor.double() for tensor in qkv]
    seen = whole_mask(qkv[0], qkv[1], metadata, causal=causal)
    exact, exact_lse = plain_attention_with_lse(
        *double, scale=SCALE, mask=seen, bias=None if bias is None else bias.double()
    )
    blind = exact_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), blind)
    assert bool(blind.any()) == (mask is not None)
    assert relative_error(out, exact) <= 5e-3
    assert relative_error(lse.masked_fill(blind, 0), exact_lse.masked_fill(blind, 0)) <= 1e-5
