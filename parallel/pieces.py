"""Rows of tensors by their positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallel.rows import Rows, find

Part = tuple[torch.Tensor, Rows]
"""A tensor and the positions that it holds along the dimension in question."""


def assemble(wanted: Rows, parts: Sequence[Part], dim: int = 1) -> torch.Tensor:
    """The wanted positions, in their order, out of tensors that hold them; a view where one slice of one is enough.

    Raises KeyError for a position that none holds.
    """
    slices = find(wanted, tuple(held for _, held in parts))
    tensors = [parts[piece.part][0].narrow(dim, piece.start, piece.stop - piece.start) for piece in slices]
    if not tensors:
        return parts[0][0].narrow(dim, 0, 0)
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=dim)


def take(tensor: torch.Tensor, wanted: Rows, dim: int = 1) -> torch.Tensor:
    """The wanted rows of a tensor that holds all of them, from the first on."""
    whole = Rows((range(tensor.shape[dim]),)) if tensor.shape[dim] else Rows()
    return assemble(wanted, [(tensor, whole)], dim)
