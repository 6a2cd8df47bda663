"""What a rank does with drawn calls, and what it tells of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from backends.interface import AttentionMetadata
from configs.faults import FaultError
from configs.schema import ParallelConfig
from parallel.attention import Attention
from parallel.events import Traffic
from parallel.mesh import Mesh
from parallel.pieces import take
from parallel.plan import ShardPlan
from parallel.rows import Rows, rows
from parallel.traffic import call_traffic
from parallel.transport.base import Transport
from parallel.transport.choice import open_transport
from tests.parallel.layers import context_of
from tests.parallel.suite.drawn import Drawn, laid_out
from tests.parallel.suite.reference import loss_of

Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Refused:
    """moved: exchanges that had been made by then."""

    error: str
    moved: int


@dataclass(frozen=True)
class Ran:
    """This rank's results, widened to fp64 (torch's own pickling is slow), with the positions of its rows.

    gradients: of its rows of query, key and value, and of sinks and bias. untouched: whether its inputs, and what lies
    around them in memory, are as they were. contiguous: whether its results are. refuses_another:
    whether a second call with the plan, which carries something else, is refused before an exchange. moved, planned:
    exchanges of the forward pass.
    """

    strategy: str
    degrees: tuple[int, int]
    dtypes: tuple[str, str]
    query_rows: list[int]
    key_rows: list[int]
    out: Numbers
    lse: Numbers | None
    gradients: tuple[Numbers, ...]
    untouched: bool
    contiguous: bool
    refuses_another: bool
    moved: Traffic
    planned: Traffic


Outcome = Refused | Ran


def run_calls(mesh: Mesh, cases: Sequence[Drawn], transport: str = "torch") -> list[Outcome]:
    """One after the other, on all ranks of the mesh alike."""
    carrier = open_transport(ParallelConfig(transport=transport), mesh)
    return [_run(mesh, case, carrier) for case in cases]


def _run(mesh: Mesh, case: Drawn, transport: Transport) -> Outcome:
    context = context_of(
        mesh, dtype=case.torch_dtype, backend=case.backend, parallel=case.parallel, transport=transport
    )
    transport.take_traffic()  # that of the last call's backward pass
    carried = case.metadata(mesh.device)
    try:
        layer = Attention(
            case.heads,
            case.size,
            role=case.kind,
            kind=case.kind,
            num_kv_heads=case.kv_heads,
            value_head_size=case.value_size,
            causal=case.causal,
            features=carried.features,
            lse=case.lse,
            gradient=case.gradient,
            learned_gradient=case.gradient and (case.sinks or case.bias != "none"),
            context=context,
        )
        plan, query_rows, key_rows = _held(layer, case, mesh)
        held = (query_rows, key_rows, key_rows)
        whole = [tensor.to(mesh.device) for tensor in case.tensors()]
        mine = [take(tensor, place) for tensor, place in zip(whole, held, strict=True)]
        inputs = _Inputs(case, mine, carried)
        out, lse = _called(layer, case, inputs, plan)
    except (FaultError, ValueError) as error:
        return Refused(f"{type(error).__name__}: {error}", sum(context.transport.take_traffic().calls.values()))
    moved = context.transport.take_traffic()
    refuses_another = _refuses_another(layer, case, inputs, plan)
    gradients = _gradients(case, inputs, plan, query_rows, (out, lse)) if case.gradient else ()
    return Ran(
        strategy=layer.strategy,
        degrees=(layer.way.grid.ulysses, layer.way.grid.ring),
        dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in (out, out if lse is None else lse)),  # type: ignore[arg-type]
        query_rows=list(query_rows),
        key_rows=list(key_rows),
        out=_numbers(out),
        lse=None if lse is None else _numbers(lse),
        gradients=gradients,
        untouched=inputs.untouched,
        contiguous=out.is_contiguous() and (lse is None or lse.is_contiguous()),
        refuses_another=refuses_another,
        moved=moved,
        planned=_planned(layer, case, plan, mesh),
    )


def _held(layer: Attention, case: Drawn, mesh: Mesh) -> tuple[ShardPlan, Rows, Rows]:
    """The plan of the call, and the queries and keys that this rank has."""
    plan = layer.plan_of(*case.streams)
    if case.kind == "cross":
        return plan, plan.query_rows(mesh.rank), rows(range(case.keys))
    return plan, plan.query_rows(mesh.rank), plan.key_rows(mesh.rank)


class _Inputs:
    """The rank's query, key and value in their layouts, and the learned tensors that the call carries."""

    def __init__(self, case: Drawn, mine: Sequence[torch.Tensor], carried: AttentionMetadata) -> None:
        laid = [laid_out(tensor, layout) for tensor, layout in zip(mine, case.layouts, strict=True)]
        self._memory = [memory for memory, _ in laid]
        self._before = [memory.clone() for memory in self._memory]
        self._strides = [view.stride() for _, view in laid]
        self.qkv = [view.detach().requires_grad_(case.gradient) for _, view in laid]
        self.carried = carried
        self.learned = [tensor for tensor in (carried.sinks, carried.bias) if tensor is not None]
        for tensor in self.learned:
            tensor.requires_grad_(case.gradient)

    @property
    def untouched(self) -> bool:
        """Bit for bit; a NaN around the values is one still."""
        same = (
            torch.equal(now.flatten().view(torch.uint8), before.flatten().view(torch.uint8))
            for now, before in zip(self._memory, self._before, strict=True)
        )
        return all(same) and [tensor.stride() for tensor in self.qkv] == self._strides


def _called(
    layer: Attention, case: Drawn, inputs: _Inputs, plan: ShardPlan
) -> tuple[torch.Tensor, torch.Tensor | None]:
    query, key, value = inputs.qkv
    if case.lse:
        return layer.forward_with_lse(query, key, value, inputs.carried, plan=plan)
    return layer(query, key, value, inputs.carried, plan=plan), None


def _refuses_another(layer: Attention, case: Drawn, inputs: _Inputs, plan: ShardPlan) -> bool:
    """Whether a second call with the plan is refused, without an exchange, if it has a soft cap and the first had none,
    or the other way round. Local layers agree on nothing.
    """
    if layer.strategy == "local":
        return True
    other = replace(inputs.carried, soft_cap=1.0 if inputs.carried.soft_cap is None else None)
    call = layer.forward_with_lse if case.lse else layer
    try:
        call(*inputs.qkv, other, plan=plan)
    except (FaultError, ValueError):
        return not layer.context.transport.take_traffic().calls
    return False


def _gradients(
    case: Drawn,
    inputs: _Inputs,
    plan: ShardPlan,
    query_rows: Rows,
    results: tuple[torch.Tensor, torch.Tensor | None],
) -> tuple[Numbers, ...]:
    """Rows that all ranks have bear an equal part of the loss on each."""
    device = results[0].device
    weights = [weight.to(device) for weight in case.loss_weights()]
    of_out, of_lse = (take(w, query_rows, dim) for w, dim in zip(weights, (1, 2), strict=True))
    shared = set(range(case.queries)).intersection(query_rows) - _sharded_queries(case)
    parts = [1 / case.world_size if row in shared else 1.0 for row in query_rows]
    part = torch.tensor(parts, dtype=torch.float64, device=device)
    loss_of(*results, (of_out * part[:, None, None], of_lse * part)).backward()
    learned = [*inputs.qkv, *inputs.learned]
    return tuple(_numbers(torch.zeros_like(t) if t.grad is None else t.grad) for t in learned)


def _sharded_queries(case: Drawn) -> set[int]:
    found: set[int] = set()
    at = 0
    for stream in case.streams:
        if stream.queries:
            found |= set(range(at, at + stream.length)) if stream.sharded else set()
            at += stream.length
    return found


def _planned(layer: Attention, case: Drawn, plan: ShardPlan, mesh: Mesh) -> Traffic:
    if layer.strategy == "local":
        return Traffic()
    return call_traffic(
        plan,
        mesh.rank,
        batch=case.batch,
        head_size=case.size,
        value_head_size=case.value_size,
        element_size=case.torch_dtype.itemsize,
        lse=case.lse,
        gradient=case.gradient,
    )


def _numbers(tensor: torch.Tensor) -> Numbers:
    numbers: Numbers = tensor.detach().cpu().double().contiguous().numpy()
    return numbers
