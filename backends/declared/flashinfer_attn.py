"""FLASHINFER_ATTN: FlashInfer's ragged prefill kernels, compiled when they are first used.

Read from `flashinfer-python` 0.7.4 (0.6.18 has the same methods): which of the kernels takes a mask or a soft cap, and
which head sizes all of them have. `fa2` takes a mask, so that it also serves any window, as one where the kernel has
none of its own (its own is causal). `cute-dsl` alone takes V in another dtype than Q and K; its kernel for head size
128 is downloaded when it is first used, or compiled. `fa3` and `fa2` were run on H200; `cute-dsl` and all kernels on
other chips have not been run on hardware.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from backends.interface import AttentionBackend, Capabilities, HeadSizes, Requirements, Variant
from backends.options import Blocks, option
from backends.requirements import MaskKind
from backends.variant import Exactness
from configs.checks import choice
from configs.faults import Fault

FP8 = "fp8_e4m3"
_PACKAGE = "flashinfer-python"
_UNMASKED: tuple[MaskKind, ...] = ("none",)
_MASKED: tuple[MaskKind, ...] = ("none", "key_padding", "full")


@dataclass(frozen=True)
class FlashinferQuant:
    """Other dtypes than the call's inside the kernel, with their range and precision; the result is in the call's.

    dtype_qk: of Q and K. dtype_vo: of V; with fp8, every channel of V is scaled to the range of fp8.
    """

    dtype_qk: str | None = option(choice(("float16", "bfloat16")))
    dtype_vo: str | None = option(choice(("float16", "bfloat16", FP8)))


def _takes(masks: tuple[MaskKind, ...], *, window: bool, soft_cap: bool) -> Capabilities:
    return Capabilities(
        causal=True,
        grouped=True,
        dtypes=("bfloat16", "float16"),
        head_sizes=HeadSizes(0, None, (64, 128)),
        masks=masks,
        window=window,
        soft_cap=soft_cap,
        packed=True,
        lse=True,
    )


def _variant(
    name: str, kernels: str, least: str, takes: Capabilities, *chips: str, run_on: tuple[str, ...] = ()
) -> Variant:
    return Variant(
        name,
        f"backends.kernels.flashinfer_attn.{kernels}",
        chips=chips,
        distributions=(_PACKAGE,),
        install=f"pip install '{_PACKAGE}>={least}'",
        at_least=((_PACKAGE, least),),
        takes=takes,
        run_on=run_on,
    )


class FlashinferAttnBackend(AttentionBackend):
    variants = (
        _variant(
            "fa3",
            "FlashinferFa3Impl",
            "0.6.18",
            _takes(_UNMASKED, window=False, soft_cap=False),
            "cuda:9.x",
            run_on=("cuda:9.0",),
        ),
        _variant(
            "cute-dsl",
            "FlashinferCuteDslImpl",
            "0.7.4",
            _takes(_UNMASKED, window=False, soft_cap=False),
            "cuda:10.x",
        ),
        _variant(
            "fa2",
            "FlashinferFa2Impl",
            "0.6.18",
            _takes(_MASKED, window=True, soft_cap=True),
            "cuda:8.x",
            "cuda:9.x",
            "cuda:10.x",
            "cuda:12.x",
            run_on=("cuda:9.0",),
        ),
    )
    blocks: ClassVar[Mapping[str, type]] = {"quant": FlashinferQuant}

    @staticmethod
    def get_name() -> str:
        return "FLASHINFER_ATTN"

    @classmethod
    def option_faults(cls, variant: Variant, required: Requirements, blocks: Blocks) -> Iterator[Fault]:
        quant = _quant(blocks)
        dtype_qk, dtype_vo = quant.dtype_qk or required.dtype, quant.dtype_vo or required.dtype
        if dtype_qk != dtype_vo and variant.name != "cute-dsl":
            rule = f"V in {dtype_vo} beside Q and K in {dtype_qk} is for cute-dsl only, on compute capability 10.x"
            name = "quant.dtype_qk" if quant.dtype_vo is None else "quant.dtype_vo"
            yield Fault(name, quant.dtype_vo or quant.dtype_qk, rule, "give both one dtype, or leave quant out")

    @classmethod
    def exactness_of(cls, variant: Variant, blocks: Blocks) -> Exactness:
        quant = _quant(blocks)
        return variant.exactness if quant == FlashinferQuant() else "lossy-quantised"


def _quant(blocks: Blocks) -> FlashinferQuant:
    quant: FlashinferQuant = dict(blocks).get("quant", FlashinferQuant())
    return quant
