"""FLASH_ATTN: FlashAttention, in the version that is installed and built for the chip, best first.

What each package takes is read from it: `fa3-fwd` 0.0.3 is built without fp16, backward and windows
(`fa3_fwd_config.CONFIG`), and with fp8; `flash-attn-4` 4.0.0b36 limits head sizes per chip (`_validate_head_dims`),
and differentiates its log-sum-exp, too; `flash-attn` 2.8.3 takes windows, and soft caps, which 2.6.0 and 2.6.1 forget
in their backward; `amd-aiter` 0.1.7 drops a window of no keys, so no window is asked of it; `torch-npu` 2.14 by its
documentation; of `vllm-xpu-kernels` 0.1.16 the head sizes that are compiled in, without a window, since it computes
others in plain torch; of MATE's `flash_attn_3` the documentation of its repository. The log-sum-exp comes with
`return_attn_probs` of `fa3-fwd` and `flash-attn`, and with `return_lse` of `flash-attn-4`, of which no beta before the
one that was run is taken: 4.0.0b8 caps scores wrongly, 4.0.0b18 takes sinks in bfloat16 alone.
On Hopper FlashAttention 3 comes first: it has the higher throughput there.
FlashAttention 2, that on Blackwell, and those of other vendors than NVIDIA have not been run on hardware.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from backends.interface import AttentionBackend, Capabilities, HeadSizes, Requirements, Variant
from backends.options import Blocks, option
from backends.variant import USE_ANOTHER, Exactness
from configs.checks import choice
from configs.faults import Fault

FP8 = "fp8_e4m3"
FA4_DIFFERENTIATED = HeadSizes(0, None, (64, 128))
"""Of 4.0.0b36 on Hopper. It gives gradients for 16, 48 and 80 as well, and they are wrong."""

_FA4 = "backends.kernels.flash_attn.FlashAttn4Impl"
_VENDORS = "backends.kernels.vendor_flash_attn"
_FA4_LEAST = "4.0.0b36"
_INSTALL_FA4 = f"pip install 'flash-attn-4>={_FA4_LEAST}'"
_HALVES = ("bfloat16", "float16")
_TO_256 = Capabilities(causal=True, grouped=True, dtypes=_HALVES, head_sizes=HeadSizes(8, 256), masks=("none",))
_TO_256_LSE = replace(_TO_256, lse=True, packed=True, soft_cap=True)
_FA4_TAKES = replace(_TO_256_LSE, window=True, sinks=True)


@dataclass(frozen=True)
class FlashQuant:
    """Attention in few bits. dtype_qk: of Q and K in their product; V is fp8 then. Each KV head of a sample, and the
    query heads that read it, have one scale.
    """

    dtype_qk: str | None = option(choice((FP8,)))


class FlashAttnBackend(AttentionBackend):
    variants = (
        Variant(
            "fa3",
            "backends.kernels.flash_attn.FlashAttn3Impl",
            chips=("cuda:9.0",),
            distributions=("fa3-fwd",),
            install="pip install 'fa3-fwd>=0.0.3'",
            at_least=(("fa3-fwd", "0.0.3"),),
            takes=replace(_TO_256_LSE, dtypes=("bfloat16",), head_sizes=HeadSizes(8, 128, (192, 256))),
            version=3,
            run_on=("cuda:9.0",),
        ),
        Variant(
            "fa4",
            _FA4,
            chips=("cuda:9.0",),
            distributions=("flash-attn-4",),
            install=_INSTALL_FA4,
            at_least=(("flash-attn-4", _FA4_LEAST),),
            takes=replace(
                _FA4_TAKES, head_sizes=HeadSizes(0, None, (64, 80, 96, 112, 128)), gradient=True, lse_gradient=True
            ),
            version=4,
            run_on=("cuda:9.0",),
        ),
        Variant(
            "fa4-blackwell",
            _FA4,
            chips=("cuda:10.x", "cuda:11.x"),
            distributions=("flash-attn-4",),
            install=_INSTALL_FA4,
            at_least=(("flash-attn-4", _FA4_LEAST),),
            takes=replace(_FA4_TAKES, head_sizes=HeadSizes(8, 128)),
            version=4,
        ),
        Variant(
            "fa2",
            "backends.kernels.flash_attn.FlashAttn2Impl",
            chips=("cuda:8.x", "cuda:9.x"),
            distributions=("flash-attn",),
            install="pip install 'flash-attn>=2.6.2'",
            at_least=(("flash-attn", "2.6.2"),),
            takes=replace(_TO_256_LSE, window=True, gradient=True),
            version=2,
        ),
        Variant(
            "rocm-aiter",
            f"{_VENDORS}.AiterImpl",
            chips=("rocm:gfx942", "rocm:gfx950"),
            distributions=("amd-aiter",),
            install="pip install amd-aiter",
            at_least=(("amd-aiter", "0.1.7"),),
            takes=_TO_256,
        ),
        Variant(
            "npu",
            f"{_VENDORS}.NpuFusionImpl",
            chips=("npu",),
            distributions=("torch-npu",),
            install="pip install torch-npu",
            takes=Capabilities(
                causal=True, grouped=True, dtypes=(*_HALVES, "float32"), head_sizes=HeadSizes(1, 768), masks=("none",)
            ),
        ),
        Variant(
            "xpu",
            f"{_VENDORS}.XpuImpl",
            chips=("xpu",),
            distributions=("vllm-xpu-kernels",),
            install="pip install vllm-xpu-kernels",
            at_least=(("vllm-xpu-kernels", "0.1.16"),),
            takes=Capabilities(
                causal=True,
                grouped=True,
                dtypes=_HALVES,
                head_sizes=HeadSizes(0, None, (64, 128, 256)),
                masks=("none",),
                packed=True,
            ),
        ),
        Variant(
            "musa",
            f"{_VENDORS}.MateImpl",
            chips=("musa:3.1",),
            distributions=("flash-attn-3",),
            install="build the wheel of MATE's wrappers/flash-attention",
            takes=Capabilities(
                causal=True, grouped=True, dtypes=_HALVES, head_sizes=HeadSizes(8, 512), masks=("none",)
            ),
            version=3,
        ),
    )

    blocks: ClassVar[Mapping[str, type]] = {"quant": FlashQuant}

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @classmethod
    def option_faults(cls, variant: Variant, required: Requirements, blocks: Blocks) -> Iterator[Fault]:
        dtype, size = _dtype_qk(blocks), required.head_size
        if dtype is not None and variant.name != "fa3":
            rule = "is for FlashAttention 3 on cuda:9.0 only"
            yield Fault("quant.dtype_qk", dtype, rule, "set version=3 there, or leave quant out")
        elif dtype is not None and size % 16:
            rule = f"is for head sizes that are multiples of 16, and this is {size}"
            yield Fault("quant.dtype_qk", dtype, rule, "leave quant out for this role")
        if required.gradient and variant.name == "fa4" and size not in FA4_DIFFERENTIATED:
            rule = f"differentiation with head size {size} is not supported; it is with {FA4_DIFFERENTIATED}"
            yield Fault("gradient", True, rule, USE_ANOTHER)

    @classmethod
    def exactness_of(cls, variant: Variant, blocks: Blocks) -> Exactness:
        return variant.exactness if _dtype_qk(blocks) is None else "lossy-quantised"


def _dtype_qk(blocks: Blocks) -> str | None:
    quant: FlashQuant | None = dict(blocks).get("quant")
    return None if quant is None else quant.dtype_qk
