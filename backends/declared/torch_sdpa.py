"""TORCH_SDPA: torch's scaled_dot_product_attention, which picks among its own kernels. It runs everywhere."""

from backends.interface import AttentionBackend, Capabilities, Variant
from backends.variant import EVERY_MASK


class TorchSdpaBackend(AttentionBackend):
    variants = (
        Variant(
            "torch",
            "backends.kernels.torch_sdpa.TorchSdpaImpl",
            takes=Capabilities(
                causal=True,
                grouped=True,
                masks=EVERY_MASK,
                bias=True,
                value_head_size=True,
                gradient=True,
                learned_gradient=True,
            ),
            compilation="traceable",
            run_on=("cpu", "cuda:9.0"),
        ),
    )

    @staticmethod
    def get_name() -> str:
        return "TORCH_SDPA"
