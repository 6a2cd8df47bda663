"""Contexts and tensors for tests of attention layers, in the tests' own process and on live ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from backends.interface import Kind
from backends.platforms.facts import DeviceFacts, local_device
from backends.registry import Registry
from configs.schema import AttentionConfig, AttentionSpec, ParallelConfig
from parallel.attention import Attention
from parallel.context import AttentionContext
from parallel.events import AttentionRan
from parallel.mesh import Mesh
from parallel.pieces import take
from parallel.plan import ShardPlan
from parallel.transport.base import Transport
from parallel.transport.torch_dist import TorchTransport

CPU = torch.device("cpu")
ONE_RANK = Mesh(0, 1, CPU)


def context_of(
    mesh: Mesh = ONE_RANK,
    *,
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
    register: dict[str, str] | None = None,
    emit: Callable[[Any], None] = lambda event: None,
    parallel: ParallelConfig | None = None,
    transport: Transport | None = None,
) -> AttentionContext:
    """The context of a rank whose roles all go to one backend, or to the platform's choice. transport: torch's."""
    config = AttentionConfig(default=None if backend is None else AttentionSpec(backend))
    name = str(dtype).removeprefix("torch.")
    registry = Registry(register)
    facts = DeviceFacts("cpu") if mesh.device == CPU else local_device(mesh.device.type, registry.distributions())
    parallel = parallel or ParallelConfig()
    return AttentionContext(
        mesh, transport or TorchTransport(mesh), registry, config, facts, name, emit, parallel=parallel
    )


def collecting(mesh: Mesh = ONE_RANK, **options: Any) -> tuple[AttentionContext, list[AttentionRan]]:
    """A context, and the list of the events that it will have got."""
    events: list[AttentionRan] = []
    return context_of(mesh, emit=events.append, **options), events


def rows_of(tensor: torch.Tensor, plan: ShardPlan, rank: int) -> torch.Tensor:
    """A rank's rows of [B, S, ...]."""
    return take(tensor, plan.rows[rank])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the last bit: NaNs and the sign of zero count."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def layer_with(context: AttentionContext, heads: int, size: int, *, kind: Kind = "self", **options: Any) -> Attention:
    """A layer of a context, in a role that is called as its kind."""
    return Attention(heads, size, role=kind, kind=kind, context=context, **options)
