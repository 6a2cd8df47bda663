"""Lengths for which the gradients of cuDNN's attention are no numbers, and how calls get around them.

Rows that see nothing, or whose log-sum-exp is below -88, overflow in its backward pass if the last tile of 128 keys is
half full (pytorch/pytorch#196678), or if a single query meets a multiple of 64 keys (NVIDIA/cudnn-frontend#1072). Both
were seen with cuDNN 9.19 on an H200, with masks and without, for no other remainder of the keys, and not in calls that
are causal by themselves.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

TILE = 64
LONGER = 8
"""Keys more: what cuDNN loads stays aligned, and the remainder is one of those that are right."""


def breaks_backward(rows: int, keys: int) -> bool:
    """Whether the gradients of so many queries and keys may be no numbers."""
    return keys % (2 * TILE) == TILE or (rows == 1 and keys % TILE == 0)


def chosen_by_torch(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch by itself may take cuDNN's kernel: for narrow dtypes, from Hopper on."""
    narrow = dtype in (torch.bfloat16, torch.float16)
    return narrow and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def differentiated(*tensors: torch.Tensor) -> bool:
    """Whether a backward pass may follow."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def lengthened(
    key: torch.Tensor, value: torch.Tensor, added: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Key and value [B, Sk, Hkv, D] with some keys more, and the mask [B or 1, H or 1, Sq or 1, Sk], boolean or
    additive, that hides these.
    """
    if added is None:
        added = torch.ones(1, 1, 1, key.shape[1], dtype=torch.bool, device=key.device)
    hidden = False if added.dtype == torch.bool else float("-inf")
    return pad(key, (0, 0, 0, 0, 0, LONGER)), pad(value, (0, 0, 0, 0, 0, LONGER)), pad(added, (0, LONGER), value=hidden)
