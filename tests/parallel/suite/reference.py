"""The exact answer to a drawn call, in fp64 on the whole sequence, written apart from the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backends.interface import AttentionMetadata
from tests.exact import softmax64
from tests.parallel.suite.drawn import Drawn


@dataclass(frozen=True)
class Exact:
    """gradients: of query, key, value, and of sinks and bias where there are some; empty without a backward pass."""

    out: torch.Tensor
    lse: torch.Tensor
    gradients: tuple[torch.Tensor, ...] = ()


def exact(case: Drawn) -> Exact:
    carried = case.metadata()
    given = [*case.tensors(), *(tensor for tensor in (carried.sinks, carried.bias) if tensor is not None)]
    learned = [tensor.double().requires_grad_(case.gradient) for tensor in given]
    rest = learned[3:]
    out, lse = softmax64(
        learned[0],
        learned[1],
        learned[2],
        scale=case.size**-0.5,
        seen=seen(case, carried),
        soft_cap=carried.soft_cap,
        sinks=rest.pop(0) if carried.sinks is not None else None,
        bias=rest.pop(0) if carried.bias is not None else None,
    )
    if not case.gradient:
        return Exact(out, lse)
    weights = case.loss_weights()
    loss = loss_of(out, lse if case.lse else None, weights)
    gradients = torch.autograd.grad(loss, learned, allow_unused=True, materialize_grads=True)
    return Exact(out.detach(), lse.detach(), tuple(gradients))


def loss_of(out: torch.Tensor, lse: torch.Tensor | None, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows that see nothing have no log-sum-exp to learn from."""
    loss = (out.double() * weights[0]).sum()
    return loss if lse is None else loss + (lse.double().masked_fill(torch.isinf(lse), 0) * weights[1]).sum()


def seen(case: Drawn, carried: AttentionMetadata) -> torch.Tensor:
    """[B or 1, H or 1, Sq, Sk], True where a query may look at a key; minus infinities of a bias aside."""
    row, key = torch.arange(case.queries)[:, None], torch.arange(case.keys)[None]
    visible = torch.ones(1, 1, case.queries, case.keys, dtype=torch.bool)
    if case.causal:
        visible = visible & (key <= row)
    if case.window is not None:
        before, after = case.window
        visible = visible & (before is None or key >= row - before) & (after is None or key <= row + after)
    if carried.packed is not None:
        lengths = (carried.packed.query, carried.packed.key)
        asking, asked = (torch.tensor([i for i, n in enumerate(each) for _ in range(n)]) for each in lengths)
        visible = visible & (asking[:, None] == asked[None])
    if carried.mask is not None:
        visible = visible & carried.mask
    if case.mask == "block":
        head = torch.arange(case.heads)[:, None, None]
        visible = visible & case.mask_mod(0, head, row, key)
    return visible
