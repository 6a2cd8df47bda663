"""Stand-ins for what other vendors than NVIDIA publish with FlashAttention's interface, or one like it: their newest
recorded signatures.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.backends.flash_answers import CALLS, dense
from tests.backends.published import as_published
from tests.backends.vendor_doubles import attend, band, documents


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
