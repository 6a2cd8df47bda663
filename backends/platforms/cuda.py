"""NVIDIA GPUs: FlashAttention first up to Hopper, cuDNN first on Blackwell, torch's own kernels everywhere else."""

from backends.platforms.facts import DeviceFacts

BLACKWELL = 10


def priority(device: DeviceFacts) -> tuple[str, ...]:
    if device.capability is not None and device.capability[0] >= BLACKWELL:
        return ("CUDNN_ATTN", "FLASH_ATTN", "TORCH_SDPA", "REFERENCE")
    return ("FLASH_ATTN", "CUDNN_ATTN", "TORCH_SDPA", "REFERENCE")
