"""TRTLLM_ATTN: TensorRT-LLM's attention for datacenter Blackwell, as FlashInfer ships it. Not run on hardware.

Read from `flashinfer-python` 0.7.4, whose signature 0.6.18 has too: compute capability 10.0, 10.3 and 10.7; head size
128; no masks and no soft cap, and windows for causal attention only. Of the quantised kernels, those for int8 are
published for 10.0 alone, and none is for causal attention. FlashInfer downloads the kernels when they are first used,
unless the package flashinfer-cubin brings them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from backends.interface import AttentionBackend, Capabilities, HeadSizes, Requirements, Variant
from backends.options import Blocks, option
from backends.skip_softmax import SkipSoftmax
from backends.variant import Exactness
from configs.checks import Refusal, choice
from configs.faults import Fault

BLOCK_SIZES = (1, 4, 16)
_DEFAULT_BLOCKS = (1, 16)
_IMPL = "backends.kernels.trtllm_attn.TrtllmAttnImpl"
_FLASHINFER = "flashinfer-python"
_TAKES = Capabilities(
    causal=True, grouped=True, dtypes=("bfloat16",), head_sizes=HeadSizes(0, None, (128,)), masks=("none",), packed=True
)


def _block_size(value: Any, source: str) -> Any:
    if type(value) is int and value in BLOCK_SIZES:
        return value
    return Refusal("takes 1, 4 or 16, the blocks that kernels exist for", "use one of these", ("1", "4", "16"))


@dataclass(frozen=True)
class TrtllmQuant:
    """Attention in few bits, as SageAttention has it (arXiv:2410.02367).

    dtype_qk: of Q and K in their product; V is fp8 then. q_block_size, k_block_size: how many rows share one scale, 1
    and 16 by default.
    """

    dtype_qk: str | None = option(choice(("int8", "fp8_e4m3")))
    q_block_size: int | None = option(_block_size)
    k_block_size: int | None = option(_block_size)

    @property
    def block_sizes(self) -> tuple[int, int]:
        return self.q_block_size or _DEFAULT_BLOCKS[0], self.k_block_size or _DEFAULT_BLOCKS[1]

    def faults(self) -> Iterator[Refusal]:
        blocks = {"q_block_size": self.q_block_size, "k_block_size": self.k_block_size}
        given = [f"{name}={size}" for name, size in blocks.items() if size is not None]
        if given and self.dtype_qk is None:
            rule = f"{' and '.join(given)} are blocks of quantised rows, and dtype_qk, which quantises them, is not set"
            yield Refusal(rule, "set dtype_qk to int8 or fp8_e4m3, or leave the block sizes out")


def _variant(name: str, *chips: str) -> Variant:
    return Variant(
        name,
        _IMPL,
        chips=chips,
        distributions=(_FLASHINFER,),
        install=f"pip install '{_FLASHINFER}>=0.6.18'",
        at_least=((_FLASHINFER, "0.6.18"),),
        takes=_TAKES,
    )


class TrtllmAttnBackend(AttentionBackend):
    variants = (_variant("sm100", "cuda:10.0"), _variant("sm103", "cuda:10.3", "cuda:10.7"))
    blocks: ClassVar[Mapping[str, type]] = {"skip_softmax": SkipSoftmax, "quant": TrtllmQuant}
    asks_permission = True

    @staticmethod
    def get_name() -> str:
        return "TRTLLM_ATTN"

    @classmethod
    def option_faults(cls, variant: Variant, required: Requirements, blocks: Blocks) -> Iterator[Fault]:
        dtype, skips = _dtype_qk(blocks), _skips(blocks)
        if dtype == "int8" and variant.name != "sm100":
            rule = (
                f"the int8 kernels are for compute capability 10.0 only, and this is for {' and '.join(variant.chips)}"
            )
            yield Fault("quant.dtype_qk", dtype, rule, "use fp8_e4m3, or leave quant out", ("fp8_e4m3",))
        if dtype is not None and required.causal:
            rule = "the quantised kernels are not for causal attention"
            yield Fault("quant.dtype_qk", dtype, rule, "leave quant out for this role")
        if skips is not None and dtype is not None:
            rule = f"no kernel is published that also takes quant.dtype_qk={dtype}"
            yield Fault(f"skip_softmax.{skips[0]}", skips[1], rule, "leave one of the two out")
        if skips is not None and skips[0] == "threshold" and required.packed:
            rule = "it holds for one number of keys, and packed documents have several"
            yield Fault("skip_softmax.threshold", skips[1], rule, "leave it out for this role")

    @classmethod
    def exactness_of(cls, variant: Variant, blocks: Blocks) -> Exactness:
        if _dtype_qk(blocks) is not None:
            return "lossy-quantised"
        return "lossy-sparse" if _skips(blocks) is not None else variant.exactness


def _dtype_qk(blocks: Blocks) -> str | None:
    quant: TrtllmQuant | None = dict(blocks).get("quant")
    return None if quant is None else quant.dtype_qk


def _skips(blocks: Blocks) -> tuple[str, float] | None:
    skip: SkipSoftmax | None = dict(blocks).get("skip_softmax")
    return None if skip is None else skip.setting
