"""SAGE_ATTN: SageAttention 1, attention in int8 by kernels in Triton. Not in any automatic order.

Read from `sageattention` 1.0.6: Q and K become int8 with a scale for each 128 and 64 rows, V becomes float16; head
sizes 64, 96 and 128; no mask. On H200 it was within 1.3e-2 of fp64 (relative L2 norm).
"""

from backends.interface import AttentionBackend, Capabilities, HeadSizes, Variant

_PACKAGE = "sageattention"


class SageAttnBackend(AttentionBackend):
    variants = (
        Variant(
            "int8",
            "backends.kernels.sage_attn.SageAttnImpl",
            chips=("cuda:8.0", "cuda:8.6", "cuda:8.9", "cuda:9.0", "cuda:12.0", "cuda:12.1"),
            distributions=(_PACKAGE,),
            install=f"pip install {_PACKAGE}==1.0.6",
            at_least=((_PACKAGE, "1.0.6"),),
            below=((_PACKAGE, "2"),),
            takes=Capabilities(
                causal=True,
                grouped=True,
                dtypes=("bfloat16", "float16", "float32"),
                head_sizes=HeadSizes(0, None, (64, 96, 128)),
                masks=("none",),
            ),
            exactness="lossy-quantised",
            run_on=("cuda:9.0",),
        ),
    )

    @staticmethod
    def get_name() -> str:
        return "SAGE_ATTN"
