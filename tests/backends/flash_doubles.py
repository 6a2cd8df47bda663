"""Stand-ins for the packages with FlashAttention's interface: their newest recorded signatures, over attention in
fp64. A call has to fit the older ones that are recorded, too (`tests.backends.published`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends.kernels import vendor_flash_attn
from backends.kernels.packages import imported
from tests.backends.flash_answers import CALLS, dense, dense_lse, ragged, unscaled
from tests.backends.flash_vendor_doubles import (
    aiter_flash_attn_func,
    mate_flash_attn_func,
    npu_fusion_attention,
    xpu_flash_attn_varlen_func,
)
from tests.backends.published import as_published
from tests.backends.vendor_doubles import band, put


@as_published("flash_attn.flash_attn_func")
def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    CALLS.append(locals())
    allowed = band(q.shape[1], k.shape[1], causal=causal, before=window_size[0], after=window_size[1])
    out = dense(q, k, v, softmax_scale, allowed, softcap).nan_to_num(0)
    return (out, dense_lse(q, k, softmax_scale, allowed, softcap), None) if return_attn_probs else out


@as_published("flash_attn.flash_attn_varlen_func")
def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    CALLS.append(locals())

    def allowed(rows: int, keys: int) -> torch.Tensor:
        return band(rows, keys, causal=causal, before=window_size[0], after=window_size[1])

    out, lse = ragged(
        (q, k, v), (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), softmax_scale, allowed, softcap
    )
    return (out, lse, None) if return_attn_probs else out


@as_published("fa3_fwd_interface.flash_attn_func")
def fa3_flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: Any = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Any = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    CALLS.append(locals())
    assert window_size == (-1, -1)  # built without
    q, k, v = (unscaled(x, scale) for x, scale in ((q, q_descale), (k, k_descale), (v, v_descale)))
    allowed = band(q.shape[1], k.shape[1], causal=causal)
    out = dense(q, k, v, softmax_scale, allowed, softcap).nan_to_num(0).to(torch.bfloat16)
    return (out, dense_lse(q, k, softmax_scale, allowed, softcap)) if return_attn_probs else out


@as_published("fa3_fwd_interface.flash_attn_varlen_func")
def fa3_flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Any = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    CALLS.append(locals())
    assert window_size == (-1, -1)
    count = len(cu_seqlens_q) - 1
    q, k, v = (unscaled(x, scale, count) for x, scale in ((q, q_descale), (k, k_descale), (v, v_descale)))

    def allowed(rows: int, keys: int) -> torch.Tensor:
        return band(rows, keys, causal=causal)

    out, lse = ragged(
        (q, k, v), (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), softmax_scale, allowed, softcap
    )
    return (out.to(torch.bfloat16), lse) if return_attn_probs else out.to(torch.bfloat16)


@as_published("flash_attn.cute.flash_attn_func")
def fa4_flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    qv: Any = None,
    gather_kv_indices: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (None, None),
    learnable_sink: Any = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Any = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: Any = None,
) -> Any:
    CALLS.append(locals())
    before, after = (-1 if side is None else side for side in window_size)
    allowed = band(q.shape[1], k.shape[1], causal=causal, before=before, after=after)
    out = dense(q, k, v, softmax_scale, allowed, softcap, learnable_sink).nan_to_num(0)
    lse = dense_lse(q, k, softmax_scale, allowed, softcap, learnable_sink)
    return out, lse.masked_fill(lse == float("inf"), float("-inf")) if return_lse else None


@as_published("flash_attn.cute.flash_attn_varlen_func")
def fa4_flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    qv: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    min_seqlen_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    gather_kv_indices: Any = None,
    page_table: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (None, None),
    learnable_sink: Any = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Any = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: Any = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: Any = None,
) -> Any:
    CALLS.append(locals())
    before, after = (-1 if side is None else side for side in window_size)

    def allowed(rows: int, keys: int) -> torch.Tensor:
        return band(rows, keys, causal=causal, before=before, after=after)

    offsets, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    out, lse = ragged((q, k, v), offsets, longest, softmax_scale, allowed, softcap, learnable_sink)
    return out, lse.masked_fill(lse == float("inf"), float("-inf")) if return_lse else None


PUBLISHED: list[tuple[str, str, Callable[..., Any]]] = [
    ("flash_attn", "flash_attn_func", flash_attn_func),
    ("flash_attn", "flash_attn_varlen_func", flash_attn_varlen_func),
    ("fa3_fwd_interface", "flash_attn_func", fa3_flash_attn_func),
    ("fa3_fwd_interface", "flash_attn_varlen_func", fa3_flash_attn_varlen_func),
    ("flash_attn.cute", "flash_attn_func", fa4_flash_attn_func),
    ("flash_attn.cute", "flash_attn_varlen_func", fa4_flash_attn_varlen_func),
    ("aiter", "flash_attn_func", aiter_flash_attn_func),
    ("torch_npu", "npu_fusion_attention", npu_fusion_attention),
    ("vllm_xpu_kernels.flash_attn_interface", "flash_attn_varlen_func", xpu_flash_attn_varlen_func),
    ("flash_attn_interface", "flash_attn_func", mate_flash_attn_func),
]


@contextmanager
def packages(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """All of them, as if they were installed."""
    modules: dict[str, dict[str, Any]] = {}
    for module, name, function in PUBLISHED:
        modules.setdefault(module.replace(".", "__"), {})[name] = function
    put(patch, vllm_xpu_kernels=SimpleNamespace(), **{k: SimpleNamespace(**v) for k, v in modules.items()})
    cached = (imported, vendor_flash_attn._hidden_from_causal)
    for function in cached:
        function.cache_clear()
    CALLS.clear()
    yield
    for function in cached:
        function.cache_clear()
