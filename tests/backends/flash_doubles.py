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
from tests.backends.published import as_published
from tests.backends.vendor_doubles import FP8, attend, band, documents, put, scores_of

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


@as_published("aiter.flash_attn_func")
def aiter_flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    bias: Any = None,
    alibi_slopes: Any = None,
    deterministic: bool = True,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    how_v3_bf16_cvt: int = 1,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
) -> torch.Tensor:
    CALLS.append(locals())
    return dense(q, k, v, softmax_scale, band(q.shape[1], k.shape[1], causal=causal))


@as_published("torch_npu.npu_fusion_attention")
def npu_fusion_attention(
    query: Any,
    key: Any,
    value: Any,
    head_num: int,
    input_layout: str,
    pse: Any = None,
    padding_mask: Any = None,
    atten_mask: Any = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
) -> tuple[Any, ...]:
    CALLS.append(locals())
    assert (input_layout, head_num) == ("BSND", query.shape[2])
    if atten_mask is None:
        allowed = band(query.shape[1], key.shape[1], causal=False)
    else:  # counted from the first row and the first key
        assert sparse_mode == 2
        assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
        allowed = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril()
    return dense(query, key, value, scale, allowed), torch.empty(0), torch.empty(0), torch.empty(0), 0, 0, 0


@as_published("vllm_xpu_kernels.flash_attn_interface.flash_attn_varlen_func")
def xpu_flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    max_seqlen_q: Any,
    cu_seqlens_q: Any,
    max_seqlen_k: Any,
    cu_seqlens_k: Any = None,
    seqused_k: Any = None,
    q_v: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    return_softmax_lse: bool = False,
    out: Any = None,
    scheduler_metadata: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    num_splits: int = 0,
    fa_version: Any = "DEFAULT_FA_VERSION",
    s_aux: Any = None,
    num_splits_kv: Any = None,
    is_mix_batch: bool = True,
    host_kv_lens: Any = None,
) -> torch.Tensor:
    CALLS.append(locals())
    assert window_size is None
    parts = []
    for rows, keys in zip(documents(cu_seqlens_q), documents(cu_seqlens_k), strict=True):
        allowed = band(rows.stop - rows.start, keys.stop - keys.start, causal=causal)
        parts.append(attend(q[rows], k[keys], v[keys], softmax_scale, allowed))
    return torch.cat(parts).to(q.dtype)


@as_published("flash_attn_interface.flash_attn_func")
def mate_flash_attn_func(
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
    num_splits: int = 0,
    pack_gqa: Any = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    return_softmax_lse: bool = False,
    sinks: Any = None,
    s_aux: Any = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Any = None,
) -> torch.Tensor:
    CALLS.append(locals())
    return dense(q, k, v, softmax_scale, band(q.shape[1], k.shape[1], causal=causal))


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
