"""Which backends a platform tries, in which order, when nobody asked for one."""

from __future__ import annotations

from backends.platforms import cpu, cuda, musa, npu, rocm, xpu
from backends.platforms.facts import DeviceFacts

_PRIORITIES = {
    "cpu": cpu.priority,
    "cuda": cuda.priority,
    "rocm": rocm.priority,
    "npu": npu.priority,
    "xpu": xpu.priority,
    "musa": musa.priority,
}
PLATFORMS = tuple(_PRIORITIES)


def priority(device: DeviceFacts) -> tuple[str, ...]:
    """Backend names, most wanted first. Raises KeyError for a platform without a policy."""
    return _PRIORITIES[device.platform](device)
