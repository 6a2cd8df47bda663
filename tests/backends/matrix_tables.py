"""What is chosen on every platform and generation, written by hand; `test_matrix` compares.

The comments cite where a row comes from: "contract" is the selection contract of vLLM-Omni 0.30 (its platform policies
and capability tables), "vllm" the feature tables of vLLM 0.33; "mended" is where those have a defect and the row is
what should hold.
"""

from __future__ import annotations

from typing import Any

CALLS = {"128": (128, "none"), "80": (80, "none"), "128 masked": (128, "full"), "80 masked": (80, "full")}
SDPA = dict.fromkeys(CALLS, "TORCH_SDPA")
FLASH = {**SDPA, "128": "FLASH_ATTN", "80": "FLASH_ATTN"}  # a mask goes to the first that takes it, never lost
CUDNN = dict.fromkeys(CALLS, "CUDNN_ATTN")  # which takes masks, as measured on H200
FLASH_CUDNN = {**CUDNN, "128": "FLASH_ATTN", "80": "FLASH_ATTN"}

# Device -> call -> what a role without a choice gets, with every package there.
AUTOMATIC: dict[str, dict[str, str]] = {
    "cpu": SDPA,  # mended: contract 4.1 has no CPU route at all
    "cuda:7.5": SDPA,  # contract 4.2, automatic 5 and 6: FlashAttention from 8.0 on
    "cuda:8.0": FLASH_CUDNN,  # contract 4.2 (P12); mended: masks are an input of the choice
    "cuda:9.0": FLASH_CUDNN,  # contract 4.2 (P12), vllm 1.5
    "cuda:10.0": CUDNN,  # contract 4.2, automatic 2 and 3 (P11)
    "cuda:12.0": CUDNN,  # contract 4.2, automatic 2 and 3: major 12 is Blackwell there
    "rocm:gfx942": FLASH,  # contract 4.3: aiter on gfx942 and gfx950
    "npu": FLASH,  # contract 4.6
    "xpu": {**FLASH, "80": "TORCH_SDPA"},  # contract 4.4; mended: head sizes that are not compiled in
    "musa:3.1": FLASH,  # contract 4.5: from 3.1 on
}
# The same where the layer allows a backend that asks for permission: contract 4.2, automatic 1 (P10).
PERMITTED = {**AUTOMATIC, "cuda:10.0": {**AUTOMATIC["cuda:10.0"], "128": "TRTLLM_ATTN"}}

# Backend -> device -> call -> the variant that serves an explicit choice; what is not here is refused (P15).
EXPLICIT: dict[str, dict[str, dict[str, str]]] = {
    "REFERENCE": {device: dict.fromkeys(CALLS, "plain") for device in AUTOMATIC},
    "TORCH_SDPA": {device: dict.fromkeys(CALLS, "torch") for device in AUTOMATIC},  # contract 3: any size, masks
    "CUDNN_ATTN": {  # contract 4.2 (P6); mended: the chip is checked
        device: dict.fromkeys(CALLS, "cudnn") for device in ("cuda:8.0", "cuda:9.0", "cuda:10.0", "cuda:12.0")
    },
    "FLASH_ATTN": {
        "cuda:8.0": {"128": "fa2", "80": "fa2"},  # vllm 2.1: FA2 from 8.0 on, multiples of 8 up to 256
        "cuda:9.0": {"128": "fa3", "80": "fa3"},  # vllm 1.6: FA3 by default on major 9
        "cuda:10.0": {"128": "fa4-blackwell", "80": "fa4-blackwell"},  # contract 4.2 (P4): FA4 only on Blackwell
        # cuda:12.0, mended: vllm 1.6, an SM100 kernel that lands on SM120
        "rocm:gfx942": {"128": "rocm-aiter", "80": "rocm-aiter"},
        "npu": {"128": "npu", "80": "npu"},
        "xpu": {"128": "xpu"},
        "musa:3.1": {"128": "musa", "80": "musa"},
    },
    # contract 4.2 (P3): 8.x and 9.x; mended: any multiple of 8, and masks are refused
    "FLASH_ATTN_HUB": {d: {"128": "flash-attn2", "80": "flash-attn2"} for d in ("cuda:8.0", "cuda:9.0")},
    "FLASH_ATTN_3_HUB": {"cuda:9.0": {"128": "flash-attn3"}},  # contract 3 and 4.2 (P3)
    "FLASHINFER_ATTN": {  # contract 3 and 4.2 (P5); contract 5.5: cute-dsl takes no mask, fa2 does
        "cuda:8.0": {"128": "fa2", "128 masked": "fa2"},
        "cuda:9.0": {"128": "fa3", "128 masked": "fa2"},
        "cuda:10.0": {"128": "cute-dsl", "128 masked": "fa2"},
        "cuda:12.0": {"128": "fa2", "128 masked": "fa2"},
    },
    "TRTLLM_ATTN": {"cuda:10.0": {"128": "sm100"}},  # contract 4.2 (P7); mended: the head size is checked
    # contract 4.2: SAGE_ATTN by its list of chips; mended: head sizes are those of the package, not multiples of 32
    "SAGE_ATTN": {device: {"128": "int8"} for device in ("cuda:8.0", "cuda:9.0", "cuda:12.0")},
    "SAGE_ATTN_3": {"cuda:12.0": {"128": "fp4"}},  # contract 4.2; mended: the kernel is for 12.0, not from 10.0 on
    "FLEX_ATTENTION": {  # in none of the contracts: torch's documentation, kernels/flex of its Inductor
        "cpu": dict.fromkeys(CALLS, "plain"),
        **{
            d: {"128": "compiled", "128 masked": "compiled"} for d in ("cuda:8.0", "cuda:9.0", "cuda:10.0", "cuda:12.0")
        },
    },
}

HALVES = ("bfloat16", "float16")
TO_256 = (8, 64, 80, 96, 128, 136, 192, 256)
FA4 = "causal grouped window soft_cap sinks packed lse"
SIZES = (1, 8, 12, 20, 64, 80, 96, 128, 136, 192, 256, 320, 512, 768, 776)
EVERY_MASK = ("key_padding", "full", "per_head")
ALL_MASKS = (*EVERY_MASK, "block")
# Backend and variant -> dtypes, head sizes out of SIZES, masks, and what else its calls may ask.
TAKES: dict[tuple[str, str], tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...], str]] = {
    ("REFERENCE", "plain"): (
        ("float64", "float32", *HALVES),
        SIZES,
        EVERY_MASK,
        "causal grouped value_head_size bias window soft_cap sinks packed lse gradient learned_gradient lse_gradient",
    ),
    ("TORCH_SDPA", "torch"): (
        ("float64", "float32", *HALVES),
        SIZES,
        EVERY_MASK,  # contract 5.1 passes 4D masks on
        # contract 10, 12: packed calls are refused, not ignored
        "causal grouped value_head_size bias gradient learned_gradient",
    ),
    ("CUDNN_ATTN", "cudnn"): (HALVES, (8, 64, 80, 96, 128), EVERY_MASK, "causal grouped bias lse gradient"),
    # contract 7.5: the log-sum-exp of versions 2, 3 and 4 merges the blocks of a ring
    ("FLASH_ATTN", "fa3"): (("bfloat16",), (8, 64, 80, 96, 128, 192, 256), (), "causal grouped soft_cap packed lse"),
    ("FLASH_ATTN", "fa4"): (HALVES, (64, 80, 96, 128), (), f"{FA4} gradient lse_gradient"),  # as measured on H200
    ("FLASH_ATTN", "fa4-blackwell"): (HALVES, (8, 64, 80, 96, 128), (), FA4),  # vllm 1.6: TMEM
    ("FLASH_ATTN", "fa2"): (HALVES, TO_256, (), "causal grouped window soft_cap packed lse gradient"),
    ("FLASH_ATTN", "rocm-aiter"): (HALVES, TO_256, (), "causal grouped"),
    ("FLASH_ATTN", "npu"): (("float32", *HALVES), SIZES[:-1], (), "causal grouped"),
    ("FLASH_ATTN", "xpu"): (HALVES, (64, 128, 256), (), "causal grouped packed"),
    ("FLASH_ATTN", "musa"): (HALVES, (8, 64, 80, 96, 128, 136, 192, 256, 320, 512), (), "causal grouped"),
    # no windows, soft caps and documents are claimed of them; contract 5.3 loses documents silently
    ("FLASH_ATTN_HUB", "flash-attn2"): (HALVES, TO_256, (), "causal grouped lse gradient"),
    ("FLASH_ATTN_3_HUB", "flash-attn3"): (HALVES, (64, 96, 128, 192, 256), (), "causal grouped lse gradient"),
    ("FLASHINFER_ATTN", "fa3"): (HALVES, (64, 128), (), "causal grouped packed lse"),
    ("FLASHINFER_ATTN", "cute-dsl"): (HALVES, (64, 128), (), "causal grouped packed lse"),
    ("FLASHINFER_ATTN", "fa2"): (
        HALVES,
        (64, 128),
        ("key_padding", "full"),  # contract 5.5: boolean masks; mended: no head's mask for all
        "causal grouped window soft_cap packed lse",
    ),
    ("TRTLLM_ATTN", "sm100"): (("bfloat16",), (128,), (), "causal grouped packed"),  # contract 5.6 (B11)
    ("TRTLLM_ATTN", "sm103"): (("bfloat16",), (128,), (), "causal grouped packed"),
    ("SAGE_ATTN", "int8"): (("float32", *HALVES), (64, 96, 128), (), "causal grouped"),  # contract 5.7; its sageattn
    # contract 5.8: fewer KV heads are not implemented; mended: 256, which its package gives to torch
    ("SAGE_ATTN_3", "fp4"): (HALVES, (64, 128), (), "causal"),
    ("FLEX_ATTENTION", "compiled"): (  # as measured on H200
        ("bfloat16",),
        (64, 128),
        ALL_MASKS,
        "causal grouped value_head_size window soft_cap packed lse gradient lse_gradient",
    ),
    ("FLEX_ATTENTION", "plain"): (  # torch 2.13: no sinks; no smallest size on CPU
        ("float64", "float32", *HALVES),
        SIZES,
        ALL_MASKS,
        "causal grouped value_head_size window soft_cap packed lse",
    ),
}
SWITCHES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "grouped": {"num_kv_heads": 4},
    "value_head_size": {"value_head_size": 16},
    **{name: {name: True} for name in ("bias", "window", "soft_cap", "sinks", "packed", "lse", "gradient")},
    "learned_gradient": {"learned_gradient": True},
    "lse_gradient": {"lse": True, "gradient": True},
}
# Chips beside those of AUTOMATIC.
MORE_CHIPS = (
    *("cuda:8.6", "cuda:8.9", "cuda:10.3", "cuda:10.7", "cuda:11.0", "cuda:12.1"),
    *("rocm:gfx90a", "rocm:gfx950", "musa:2.1"),
)
AMPERE_ON = "cuda:8.0 cuda:9.0 cuda:10.0 cuda:12.0 cuda:8.6 cuda:8.9 cuda:10.3 cuda:10.7 cuda:11.0 cuda:12.1"
# Variant -> the chips of both that it is built for.
BUILT: dict[tuple[str, str], str] = {
    ("REFERENCE", "plain"): " ".join((*AUTOMATIC, *MORE_CHIPS)),
    ("TORCH_SDPA", "torch"): " ".join((*AUTOMATIC, *MORE_CHIPS)),
    ("CUDNN_ATTN", "cudnn"): AMPERE_ON,
    ("FLASH_ATTN", "fa3"): "cuda:9.0",
    ("FLASH_ATTN", "fa4"): "cuda:9.0",
    ("FLASH_ATTN", "fa4-blackwell"): "cuda:10.0 cuda:10.3 cuda:10.7 cuda:11.0",  # mended: vllm 1.6 has SM110 on FA2
    ("FLASH_ATTN", "fa2"): "cuda:8.0 cuda:9.0 cuda:8.6 cuda:8.9",
    ("FLASH_ATTN", "rocm-aiter"): "rocm:gfx942 rocm:gfx950",  # contract 4.3: not gfx90a
    ("FLASH_ATTN", "npu"): "npu",
    ("FLASH_ATTN", "xpu"): "xpu",
    ("FLASH_ATTN", "musa"): "musa:3.1",
    ("FLASH_ATTN_HUB", "flash-attn2"): "cuda:8.0 cuda:9.0 cuda:8.6 cuda:8.9",  # contract 4.2
    ("FLASH_ATTN_3_HUB", "flash-attn3"): "cuda:9.0",
    ("FLASHINFER_ATTN", "fa3"): "cuda:9.0",
    ("FLASHINFER_ATTN", "cute-dsl"): "cuda:10.0 cuda:10.3 cuda:10.7",
    ("FLASHINFER_ATTN", "fa2"): "cuda:8.0 cuda:9.0 cuda:10.0 cuda:12.0 cuda:8.6 cuda:8.9 cuda:10.3 cuda:10.7 cuda:12.1",
    ("TRTLLM_ATTN", "sm100"): "cuda:10.0",
    ("TRTLLM_ATTN", "sm103"): "cuda:10.3 cuda:10.7",
    ("SAGE_ATTN", "int8"): "cuda:8.0 cuda:9.0 cuda:12.0 cuda:8.6 cuda:8.9 cuda:12.1",  # contract 4.2
    ("SAGE_ATTN_3", "fp4"): "cuda:12.0",
    ("FLEX_ATTENTION", "compiled"): AMPERE_ON,
    ("FLEX_ATTENTION", "plain"): "cpu",
}
# Variant -> a package whose version is too old for it.
TOO_OLD: dict[tuple[str, str], tuple[str, str]] = {
    ("CUDNN_ATTN", "cudnn"): ("nvidia-cudnn-cu13", "9.4"),  # contract 4.2 (P11): 9.5
    ("FLASH_ATTN", "fa3"): ("fa3-fwd", "0.0.2"),
    ("FLASH_ATTN", "fa4"): ("flash-attn-4", "4.0.0b35"),
    ("FLASH_ATTN", "fa4-blackwell"): ("flash-attn-4", "4.0.0b9"),
    ("FLASH_ATTN", "fa2"): ("flash-attn", "2.6.1"),  # contract 5.2: mended, no comparison of texts
    ("FLASH_ATTN", "rocm-aiter"): ("amd-aiter", "0.1.6"),
    ("FLASH_ATTN", "xpu"): ("vllm-xpu-kernels", "0.1.15"),
    ("FLASH_ATTN_HUB", "flash-attn2"): ("kernels", "0.16.0"),
    ("FLASH_ATTN_3_HUB", "flash-attn3"): ("kernels", "0.16.0"),
    ("FLASHINFER_ATTN", "fa3"): ("flashinfer-python", "0.6.17"),
    ("FLASHINFER_ATTN", "cute-dsl"): ("flashinfer-python", "0.7.3"),
    ("FLASHINFER_ATTN", "fa2"): ("flashinfer-python", "0.6.17"),
    ("TRTLLM_ATTN", "sm100"): ("flashinfer-python", "0.6.17"),
    ("TRTLLM_ATTN", "sm103"): ("flashinfer-python", "0.6.17"),
    ("SAGE_ATTN", "int8"): ("sageattention", "1.0.5"),
}
TOO_NEW: dict[tuple[str, str], tuple[str, str]] = {("SAGE_ATTN", "int8"): ("sageattention", "2.0.0")}
NEEDS_NO_PACKAGE = {
    *(("REFERENCE", "plain"), ("TORCH_SDPA", "torch"), ("CUDNN_ATTN", "cudnn")),
    *(("FLEX_ATTENTION", "compiled"), ("FLEX_ATTENTION", "plain")),
}
