"""Stand-ins for vendors' packages: the published signatures, over plain attention in fp64 that fails where the real
kernels would, or leaves what they leave undefined as not a number.
"""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import pytest
import torch

from tests.backends.published import as_published

FP8 = torch.float8_e4m3fn


def put(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
    """Stand-ins where an import finds them; `a__b` is the module a.b."""
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name.replace("__", "."), module)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    allowed: torch.Tensor | None = None,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [n, H, D], key and value [m, Hkv, D], allowed [n, m]; rows that see nothing are not a number."""
    v = value.double().repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    weights = torch.softmax(scores_of(query, key, scale, allowed, soft_cap, sinks), dim=-1)[..., : len(key)]
    return torch.einsum("hnm,mhd->nhd", weights, v)


def scores_of(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    allowed: torch.Tensor | None = None,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[H, n, m], and with sinks a column more."""
    k = key.double().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("nhd,mhd->hnm", query.double(), k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))
    if sinks is None:
        return scores
    return torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(query), 1)), dim=-1)


def band(rows: int, keys: int, *, causal: bool, before: int = -1, after: int = -1) -> torch.Tensor:
    """[rows, keys], counted from the last row and the last key, as FlashAttention and FlashInfer have it."""
    distance = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
    allowed = torch.ones(rows, keys, dtype=torch.bool)
    if before >= 0:
        allowed &= distance >= -before
    if after >= 0:
        allowed &= distance <= after
    return allowed & (distance <= 0) if causal else allowed


def documents(offsets: torch.Tensor) -> list[slice]:
    return [slice(first, last) for first, last in itertools.pairwise(offsets.tolist())]


class RaggedWrapper:
    """`flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper`, as flashinfer-python 0.7.4 has it."""

    made: list[RaggedWrapper]

    @as_published("flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper.__init__")
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        kv_indptr_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        assert kv_layout == "NHD"
        assert float_workspace_buffer.numel() >= 128 << 20
        self.workspace, self.backend = float_workspace_buffer, backend
        self.mask: torch.Tensor | None = None
        self.plans: list[dict[str, Any]] = []
        self.runs = 0
        self.made.append(self)

    @as_published("flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper.plan")
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: Any = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: Any = None,
        sm_scale: Any = None,
        rope_scale: Any = None,
        rope_theta: Any = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Any = None,
        token_pos_in_items_ptr: Any = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Any = None,
        fixed_split_size: Any = None,
        disable_split_kv: bool = False,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        max_token_per_sequence: Any = None,
        max_sequence_kv: Any = None,
        v_indptr: Any = None,
        o_indptr: Any = None,
        qo_indptr_cpu: Any = None,
        kv_indptr_cpu: Any = None,
        uniform_q_len: Any = None,
        use_token_head_sf: bool = False,
    ) -> None:
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
        assert qo_indptr.diff().min() > 0
        assert kv_indptr.diff().min() > 0
        if window_left >= 0:
            assert causal, "the scheduler cuts the keys at the window, and only causal rows end there"
        if custom_mask is not None:
            if self.backend != "fa2":
                raise NotImplementedError(f"{self.backend} does not support custom_mask")
            self.mask = custom_mask  # stays for later plans
        self.plans.append({key: value for key, value in locals().items() if key not in ("self", "custom_mask")})

    @as_published("flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper.run")
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        o_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: Any = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        plan = self.plans[-1]
        self.runs += 1
        assert (q.dtype, k.dtype) == (plan["q_data_type"], plan["kv_data_type"])
        if self.backend != "cute-dsl":
            assert v.dtype == k.dtype
        assert all(tensor.is_contiguous() for tensor in (q, k, v))
        assert (q.shape[0], k.shape[0]) == (int(plan["qo_indptr"][-1]), int(plan["kv_indptr"][-1]))
        parts, sums, first = [], [], 0
        for rows, keys in zip(documents(plan["qo_indptr"]), documents(plan["kv_indptr"]), strict=True):
            n, m = rows.stop - rows.start, keys.stop - keys.start
            allowed = band(n, m, causal=plan["causal"], before=plan["window_left"])
            if self.mask is not None:  # causal is ignored then
                allowed = self.mask[first : first + n * m].view(n, m)
                first += n * m
            settings = (plan["sm_scale"], allowed, plan["logits_soft_cap"] or 0.0)
            parts.append(attend(q[rows], k[keys], v[keys], *settings))
            sums.append(torch.logsumexp(scores_of(q[rows], k[keys], *settings), dim=-1).T)
        assert self.mask is None or first == self.mask.numel()
        result = torch.cat(parts).to(plan["o_data_type"])
        if not return_lse:
            return result
        assert (lse_base, lse_layout) == ("log2", "NH")
        return result, (torch.cat(sums) / math.log(2)).clamp_min(-5e4).float()  # 5e4 is the kernels' infinity


class Trtllm:
    """The functions of `flashinfer.prefill` that TRTLLM_ATTN calls, as flashinfer-python 0.7.4 has them."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.quantisations: list[dict[str, Any]] = []

    @as_published("flashinfer.prefill.trtllm_ragged_attention_deepseek", bound=True)
    def trtllm_ragged_attention_deepseek(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        workspace_buffer: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int,
        max_kv_len: int,
        bmm1_scale: Any,
        bmm2_scale: Any,
        o_sf_scale: float,
        batch_size: int,
        window_left: int,
        cum_seq_lens_q: torch.Tensor,
        cum_seq_lens_kv: torch.Tensor,
        enable_pdl: Any,
        is_causal: bool,
        return_lse: bool,
        attention_sinks: Any = None,
        skip_softmax_threshold_scale_factor: Any = None,
        out: Any = None,
        lse: Any = None,
        sage_attn_sfs: Any = (None, None, None, None),
        num_elts_per_sage_attn_blk: Any = (0, 0, 0, 0),
        backend: str = "trtllm-gen",
        q_seq_lens_cpu: Any = None,
        kv_seq_lens_cpu: Any = None,
        use_fp16_softmax: Any = None,
        uses_spcompress: Any = None,
        skip_all_rows_active_check: bool = True,
    ) -> torch.Tensor:
        self.calls.append({key: value for key, value in locals().items() if key != "self"})
        assert (query.shape[2], key.shape[2], value.shape[2]) == (128, 128, 128)
        assert all(tensor.is_contiguous() for tensor in (query, key, value))
        assert not workspace_buffer.any()
        rows, keys = documents(cum_seq_lens_q), documents(cum_seq_lens_kv)
        assert len(rows) == len(keys) == batch_size
        assert [d.stop - d.start for d in keys] == seq_lens.tolist() == kv_seq_lens_cpu.tolist()
        assert [d.stop - d.start for d in rows] == q_seq_lens_cpu.tolist()
        assert min(*q_seq_lens_cpu.tolist(), *seq_lens.tolist()) > 0
        assert (max_q_len, max_kv_len) == (int(q_seq_lens_cpu.max()), int(seq_lens.max()))
        q, k, v = query.double(), key.double(), value.double()
        if sage_attn_sfs[0] is not None:
            q_block, k_block, _, _ = num_elts_per_sage_attn_blk
            q = q * _row_scales(sage_attn_sfs[0], rows, q_block)[..., None]
            k = k * _row_scales(sage_attn_sfs[1], keys, k_block)[..., None]
            v = v * sage_attn_sfs[3]
        parts = []
        for at, to in zip(rows, keys, strict=True):
            allowed = band(at.stop - at.start, to.stop - to.start, causal=is_causal)
            parts.append(attend(q[at], k[to], v[to], bmm1_scale, allowed) * bmm2_scale)
        return torch.cat(parts).to(torch.bfloat16)

    @as_published("flashinfer.prefill.trtllm_sage_attention_quantize", bound=True)
    def trtllm_sage_attention_quantize(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        q_block_size: int = 1,
        k_block_size: int = 16,
        qk_quant_dtype: torch.dtype = torch.int8,
        cum_seq_lens_q: Any = None,
        cum_seq_lens_kv: Any = None,
        smooth_k: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        self.quantisations.append({key: value for key, value in locals().items() if key != "self"})
        mean = key.float().mean(dim=0)
        smoothed = key.float() - mean if smooth_k else key.float()
        q, q_scale = _block_quantised(query.float(), documents(cum_seq_lens_q), q_block_size, qk_quant_dtype)
        k, k_scale = _block_quantised(smoothed, documents(cum_seq_lens_kv), k_block_size, qk_quant_dtype)
        v_scale = value.float().abs().amax(dim=0) / 448
        v = (value.float() / v_scale).to(FP8)
        return (q, k, v, q_scale, k_scale, v_scale, mean) if smooth_k else (q, k, v, q_scale, k_scale, v_scale)


def _block_quantised(
    rows: torch.Tensor, parts: list[slice], block: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with one scale for each head and block; the blocks of each document begin anew."""
    largest = 127.0 if dtype == torch.int8 else 448.0
    scales = torch.full((rows.shape[1], -(-rows.shape[0] // block) + len(parts) - 1), float("nan"))
    quantised = torch.empty_like(rows)
    for number, part in enumerate(parts):
        for start in range(part.start, part.stop, block):
            piece = slice(start, min(start + block, part.stop))
            scale = rows[piece].abs().amax(dim=(0, 2)) / largest
            scales[:, part.start // block + number + (start - part.start) // block] = scale
            quantised[piece] = rows[piece] / scale[:, None]
    return (quantised.round() if dtype == torch.int8 else quantised).to(dtype), scales


def _row_scales(scales: torch.Tensor, parts: list[slice], block: int) -> torch.Tensor:
    """[rows, H]."""
    found = []
    for number, part in enumerate(parts):
        at = torch.arange(part.stop - part.start) // block + part.start // block + number
        found.append(scales[:, at].T)
    return torch.cat(found).double()
