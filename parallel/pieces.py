"""Rows of tensors by their positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallel.opaque import outside_graphs
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


@outside_graphs
def take(tensor: torch.Tensor, wanted: Rows, dim: int = 1) -> torch.Tensor:
    """Return some rows of a tensor that holds all rows.

    Args:
        tensor: All rows along `dim`, such as [B, S, H, D].
        wanted: Rows of a plan, such as `plan.query_rows(rank)`.
        dim: Dimension of the rows.

    Returns:
        The rows in the order of `wanted`; a view where they are one slice.

    Raises:
        ValueError: For an argument of another type, and for rows that the tensor does not have.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"take: tensor is {tensor!r:.80}; give a tensor, such as [B, S, H, D]")
    if not isinstance(wanted, Rows):
        raise ValueError(f"take: rows are {wanted!r:.80}; give rows of a plan, such as plan.query_rows(rank)")
    if type(dim) is not int or not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"take: dim is {dim!r:.80}; the tensor has {tensor.dim()} dimensions")
    last = max((run.stop for run in wanted.runs), default=0)
    if last > tensor.shape[dim]:
        shape = tuple(tensor.shape)
        raise ValueError(f"take: row {last - 1} of a tensor {shape}, dimension {dim}; give the tensor of all rows")
    whole = Rows((range(tensor.shape[dim]),)) if tensor.shape[dim] else Rows()
    return assemble(wanted, [(tensor, whole)], dim)
