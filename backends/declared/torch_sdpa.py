"""TORCH_SDPA: torch's scaled_dot_product_attention, which picks among its own kernels. It runs everywhere."""

from backends.interface import AttentionBackend, Variant


class TorchSdpaBackend(AttentionBackend):
    variants = (Variant("torch", "backends.kernels.torch_sdpa.TorchSdpaImpl"),)

    @staticmethod
    def get_name() -> str:
        return "TORCH_SDPA"
