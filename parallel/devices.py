"""What a rank knows of its own device."""

from __future__ import annotations

import torch

from backends.platforms.facts import DeviceFacts, installed
from backends.registry import Registry


def facts_of(device: torch.device, registry: Registry) -> DeviceFacts:
    """The device as it is, with the packages that the registered backends ask for."""
    packages = installed(registry.distributions())
    if device.type == "cpu":
        return DeviceFacts("cpu", packages=packages)
    found = torch.cuda.get_device_properties(device)
    return DeviceFacts("cuda", (found.major, found.minor), found.name, found.total_memory, packages)
