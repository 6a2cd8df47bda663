"""The transport that a configuration asks for."""

from __future__ import annotations

import torch

from configs.faults import Fault, FaultError
from configs.schema import ParallelConfig
from parallel.mesh import Mesh
from parallel.transport.base import Transport
from parallel.transport.nccl import NcclTransport, load_nccl
from parallel.transport.torch_dist import TorchTransport


def check_transport(transport: str, device: torch.device) -> None:
    """Check, without other ranks, that a transport serves tensors of this device.

    Args:
        transport: As `parallel.transport`.
        device: Where this rank's tensors live.

    Raises:
        FaultError: If it is nccl, and the device is no CUDA GPU or nccl4py does not work here.
    """
    if transport != "nccl":
        return
    if device.type != "cuda":
        rule = f"it moves tensors of CUDA GPUs, and this rank's device is {device}"
        raise FaultError([Fault("parallel.transport", transport, rule, "leave it on auto")])
    load_nccl(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def open_transport(config: ParallelConfig, mesh: Mesh) -> Transport:
    """`auto` is torch's. Every rank has to call it. Raises FaultError if nccl4py cannot serve here."""
    if config.transport == "nccl" and mesh.world_size > 1:
        return NcclTransport(mesh, load_nccl(torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return TorchTransport(mesh)
