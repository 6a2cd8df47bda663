"""CPU: torch's fused kernel, and the plain softmax where it does not serve."""

from backends.platforms.facts import DeviceFacts


def priority(device: DeviceFacts) -> tuple[str, ...]:
    return ("TORCH_SDPA", "REFERENCE")
