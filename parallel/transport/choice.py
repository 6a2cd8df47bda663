"""The transport that a configuration asks for."""

from __future__ import annotations

import torch

from configs.schema import ParallelConfig
from parallel.mesh import Mesh
from parallel.transport.base import Transport
from parallel.transport.nccl import NcclTransport, load_nccl
from parallel.transport.torch_dist import TorchTransport


def open_transport(config: ParallelConfig, mesh: Mesh) -> Transport:
    """`auto` is torch's. Every rank has to call it. Raises FaultError if nccl4py cannot serve here."""
    if config.transport == "nccl" and mesh.world_size > 1:
        return NcclTransport(mesh, load_nccl(torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return TorchTransport(mesh)
