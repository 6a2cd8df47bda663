"""REFERENCE: plain softmax attention, the yardstick of the others. Slow and quadratic in memory by intent."""

from backends.interface import AttentionBackend, Capabilities, Variant
from backends.variant import EVERY_MASK


class ReferenceBackend(AttentionBackend):
    variants = (
        Variant(
            "plain",
            "backends.kernels.reference.ReferenceImpl",
            takes=Capabilities(
                causal=True,
                grouped=True,
                masks=EVERY_MASK,
                bias=True,
                value_head_size=True,
                window=True,
                soft_cap=True,
                sinks=True,
                packed=True,
                lse=True,
                gradient=True,
                lse_gradient=True,
                learned_gradient=True,
            ),
            compilation="traceable",
            run_on=("cpu", "cuda:9.0"),
        ),
    )

    @staticmethod
    def get_name() -> str:
        return "REFERENCE"
