"""CUDNN_ATTN: cuDNN's fused attention, reached through torch's scaled_dot_product_attention with every other kernel
shut out.
"""

from backends.interface import AttentionBackend, Capabilities, HeadSizes, Variant
from backends.variant import EVERY_MASK


class CudnnAttnBackend(AttentionBackend):
    variants = (
        Variant(
            "cudnn",
            "backends.kernels.cudnn_attn.CudnnAttnImpl",
            chips=("cuda:8.x", "cuda:9.x", "cuda:10.x", "cuda:11.x", "cuda:12.x"),
            at_least=(("nvidia-cudnn-cu12", "9.5"), ("nvidia-cudnn-cu13", "9.5")),
            takes=Capabilities(
                causal=True,
                grouped=True,
                dtypes=("bfloat16", "float16"),
                head_sizes=HeadSizes(8, 128),
                masks=EVERY_MASK,
                bias=True,
                lse=True,
                gradient=True,
            ),
            compilation="traceable",
            run_on=("cuda:9.0",),
        ),
    )

    @staticmethod
    def get_name() -> str:
        return "CUDNN_ATTN"
