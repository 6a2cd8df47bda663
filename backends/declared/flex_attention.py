"""FLEX_ATTENTION: torch's flex_attention, masks and caps compiled into one kernel. Not in any automatic order.

Read from torch 2.13 (`torch/nn/attention/flex_attention.py`, `torch/_inductor/kernel/flex`): on CUDA a Triton kernel,
for head sizes from 16 on, of Q and K as of V; on CPU the same computation as plain tensor operations, which holds all
scores in memory, has no smallest head size and no backward. Of what the kernel takes, `compiled` says what was tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from backends.interface import AttentionBackend, Capabilities, HeadSizes, Requirements, Variant
from backends.options import Blocks
from backends.variant import EVERY_MASK, USE_ANOTHER
from configs.faults import Fault

_IMPL = "backends.kernels.flex_attention.FlexAttentionImpl"
_TAKES = Capabilities(
    masks=(*EVERY_MASK, "block"),
    causal=True,
    grouped=True,
    value_head_size=True,
    window=True,
    soft_cap=True,
    packed=True,
    lse=True,
)


class FlexAttentionBackend(AttentionBackend):
    variants = (
        Variant(
            "compiled",
            _IMPL,
            chips=("cuda:8.x", "cuda:9.x", "cuda:10.x", "cuda:11.x", "cuda:12.x"),
            takes=replace(
                _TAKES,
                dtypes=("bfloat16",),
                head_sizes=HeadSizes(0, None, (64, 128)),
                gradient=True,
                lse_gradient=True,
            ),
            run_on=("cuda:9.0",),
            compilation="eager",  # its own torch.compile fails below the autograd level at which an operator runs
        ),
        Variant("plain", _IMPL, chips=("cpu",), takes=_TAKES, run_on=("cpu",), compilation="eager"),
    )

    @staticmethod
    def get_name() -> str:
        return "FLEX_ATTENTION"

    @classmethod
    def option_faults(cls, variant: Variant, required: Requirements, blocks: Blocks) -> Iterator[Fault]:
        sizes, size = variant.takes.head_sizes, required.value_head_size
        if size is not None and size not in sizes:
            rule = f"a head size of V of {size} is not supported; it takes {sizes}"
            yield Fault("value_head_size", size, rule, USE_ANOTHER)
