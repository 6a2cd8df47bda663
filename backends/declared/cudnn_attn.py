"""CUDNN_ATTN: cuDNN's fused attention, reached through torch's scaled_dot_product_attention with every other kernel
shut out.
"""

from backends.interface import AttentionBackend, Variant


class CudnnAttnBackend(AttentionBackend):
    variants = (
        Variant(
            "cudnn",
            "backends.kernels.cudnn_attn.CudnnAttnImpl",
            platforms=("cuda",),
            capabilities=((8, None), (9, None), (10, None), (11, None), (12, None)),
            head_size_step=8,
            head_size_limit=128,
            dtypes=("bfloat16", "float16"),
            masks=("none",),
        ),
    )

    @staticmethod
    def get_name() -> str:
        return "CUDNN_ATTN"
