"""Ascend NPUs: FlashAttention where its package serves the chip, else torch's own kernel. Not run on hardware."""

from backends.platforms.facts import DeviceFacts


def priority(device: DeviceFacts) -> tuple[str, ...]:
    return ("FLASH_ATTN", "TORCH_SDPA", "REFERENCE")
