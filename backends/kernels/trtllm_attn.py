"""TensorRT-LLM's ragged attention as FlashInfer ships it (`trtllm_ragged_attention_deepseek`)."""

from __future__ import annotations

from typing import Any

import torch

from backends.interface import AttentionMetadata, CallShape
from backends.kernels.packages import PackageImpl, imported
from backends.kernels.ragged import PlacedCall, RaggedCall, RaggedImpl
from backends.kernels.workspaces import Workspace
from backends.options import Blocks
from backends.skip_softmax import LayerSkip

_WORKSPACE = Workspace(128 << 20)
_DENSE = LayerSkip()
_QUANTISED = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}


_QUANTISE = "flashinfer.prefill.trtllm_sage_attention_quantize"


class TrtllmAttnImpl(RaggedImpl, PackageImpl):
    """With `quant`, Q and K become int8 or fp8 with a scale for each block of rows, and V fp8 with one for each
    channel (SageAttention). With `skip_softmax` (a `LayerSkip`), blocks of keys whose weights stay below a
    threshold are skipped.
    """

    path = "flashinfer.prefill.trtllm_ragged_attention_deepseek"

    @classmethod
    def load(cls, options: Blocks = ()) -> None:
        super().load(options)
        imported(_QUANTISE)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        super().prepare(device, dtype)
        _WORKSPACE.on(device)

    def plan(self, shape: CallShape) -> PlacedCall:
        call = RaggedCall.of(shape)
        self._check(call)
        return PlacedCall.on(self.device, call)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        placed: PlacedCall,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        call, dtype = placed.call, query.dtype
        scales: dict[str, Any] = {}
        if self._dtype_qk is not None:
            query, key, value, scales = self._quantised(query, key, value, placed)
        # Lengths on the host beside those on the device: else the wrapper may ask the device for them.
        out: torch.Tensor = imported(self.path)(
            query=query,
            key=key,
            value=value,
            workspace_buffer=_WORKSPACE.on(query.device),
            seq_lens=placed.key_lengths,
            max_q_len=max(call.query_lengths),
            max_kv_len=max(call.key_lengths),
            bmm1_scale=self.softmax_scale,
            bmm2_scale=1.0,
            o_sf_scale=1.0,
            batch_size=len(call.taking_part),
            window_left=-1,
            cum_seq_lens_q=placed.query_offsets,
            cum_seq_lens_kv=placed.key_offsets,
            enable_pdl=None,
            is_causal=self.causal,
            return_lse=False,
            skip_softmax_threshold_scale_factor=self._skip.factor(max(call.key_lengths)),
            q_seq_lens_cpu=torch.tensor(call.query_lengths, dtype=torch.int32),
            kv_seq_lens_cpu=torch.tensor(call.key_lengths, dtype=torch.int32),
            **scales,
        )
        return out.to(dtype)

    def _quantised(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, placed: PlacedCall
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Q, K and V in few bits, and their scales. The mean of the keys is taken off them first, which no softmax
        notices and which leaves more of the bits for what differs.
        """
        q_block, k_block = self.options["quant"].block_sizes
        q, k, v, q_scale, k_scale, v_scale, _ = imported(_QUANTISE)(
            query,
            key,
            value,
            q_block_size=q_block,
            k_block_size=k_block,
            qk_quant_dtype=_QUANTISED[str(self._dtype_qk)],
            cum_seq_lens_q=placed.query_offsets,
            cum_seq_lens_kv=placed.key_offsets,
            smooth_k=True,
        )
        scales = {
            "sage_attn_sfs": (q_scale, k_scale, None, v_scale),
            "num_elts_per_sage_attn_blk": (q_block, k_block, 0, 1),
        }
        return q, k, v, scales

    @property
    def _dtype_qk(self) -> str | None:
        quant = self.options.get("quant")
        return None if quant is None else quant.dtype_qk

    @property
    def _skip(self) -> LayerSkip:
        found: LayerSkip = self.options.get("skip_softmax", _DENSE)
        return found

    def _check(self, call: RaggedCall) -> None:
        threshold = self._skip.threshold
        if threshold > 0 and len(set(call.key_lengths)) > 1:
            raise ValueError(
                f"skip_softmax.threshold={threshold}: it holds for one number of keys, and the documents have "
                f"{call.key_lengths}; leave it out for this role"
            )
        if self._dtype_qk is None:
            return
        block, shortest = self.options["quant"].block_sizes[1], min(call.key_lengths, default=None)
        if shortest is not None and shortest < block:
            raise ValueError(
                f"quant.k_block_size={block}: a block is longer than a sequence of {shortest} keys; use a smaller "
                "block, or leave quant out for this role"
            )
