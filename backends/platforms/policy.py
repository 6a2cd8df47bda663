"""Which backends a platform tries, in which order, when nobody asked for one."""

from __future__ import annotations

from backends.platforms import cpu, cuda
from backends.platforms.facts import DeviceFacts

_PRIORITIES = {"cpu": cpu.priority, "cuda": cuda.priority}


def priority(device: DeviceFacts) -> tuple[str, ...]:
    """Backend names, most wanted first. Raises KeyError for a platform without a policy."""
    return _PRIORITIES[device.platform](device)
