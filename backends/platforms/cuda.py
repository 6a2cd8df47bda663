"""NVIDIA GPUs: FlashAttention first up to Hopper; on Blackwell the vendor's own kernels (TRT-LLM where the model allows
it, cuDNN, FlashInfer) before it; torch's own kernels everywhere else.

Whether a candidate runs on the chip is its declaration's to say: this is only the order.
"""

from backends.platforms.facts import DeviceFacts

BLACKWELL = 10


def priority(device: DeviceFacts) -> tuple[str, ...]:
    if device.capability is not None and device.capability[0] >= BLACKWELL:
        return ("TRTLLM_ATTN", "CUDNN_ATTN", "FLASHINFER_ATTN", "FLASH_ATTN", "TORCH_SDPA", "REFERENCE")
    return ("FLASH_ATTN", "CUDNN_ATTN", "TORCH_SDPA", "REFERENCE")
