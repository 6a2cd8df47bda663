"""The dtype of attention under `torch.autocast`."""

from __future__ import annotations

import torch


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype to which autocast casts the inputs of attention, as `scaled_dot_product_attention` does.

    Args:
        device_type: The type of the tensors' device, such as "cuda".

    Returns:
        The dtype; None outside of autocast.
    """
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)
