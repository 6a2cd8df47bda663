"""SAGE_ATTN_3: SageAttention 3, attention in 4-bit floating point. Not in any automatic order.

Read from `sageattention3_blackwell` in the repository thu-ml/SageAttention (api.py at 27b740f, api.cu at 726ebdb): its
kernel checks for compute capability 12.0 and for as many KV heads as query heads; head sizes 64 and 128, since for 256
the package calls torch instead; softmax scale head_size ** -0.5, no mask. Not run on hardware.
"""

from backends.interface import AttentionBackend, Capabilities, HeadSizes, Variant


class SageAttn3Backend(AttentionBackend):
    variants = (
        Variant(
            "fp4",
            "backends.kernels.sage_attn.SageAttn3Impl",
            chips=("cuda:12.0",),
            distributions=("sageattn3",),
            install="build sageattention3_blackwell of github.com/thu-ml/SageAttention",
            takes=Capabilities(
                causal=True,
                dtypes=("bfloat16", "float16"),
                head_sizes=HeadSizes(0, None, (64, 128)),
                masks=("none",),
            ),
            exactness="lossy-quantised",
        ),
    )

    @staticmethod
    def get_name() -> str:
        return "SAGE_ATTN_3"
