"""The transport over torch.distributed: gloo on CPU, NCCL on GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist

from parallel.plan import ExchangeCounts
from parallel.transport.base import Peers, Rotation, Transport


class TorchTransport(Transport):
    """Carries exchanges over the mesh's groups."""

    def _all_to_all(self, received: torch.Tensor, send: torch.Tensor, counts: ExchangeCounts, peers: Peers) -> None:
        dist.all_to_all_single(
            received,
            send,
            output_split_sizes=list(counts.receives),
            input_split_sizes=list(counts.sends),
            group=peers.group,
        )

    def _to_all(self, received: torch.Tensor, message: torch.Tensor, counts: ExchangeCounts, peers: Peers) -> None:
        parts = torch.split(received, list(counts.receives))
        parts[peers.place].copy_(message)
        others = [place for place in range(len(peers.ranks)) if place != peers.place]
        operations = [
            dist.P2POp(call, tensor, group=peers.group, group_peer=place)
            for place in others
            for call, tensor in ((dist.isend, message), (dist.irecv, parts[place]))
            if tensor.numel()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def _pass_on(self, received: torch.Tensor, message: torch.Tensor, peers: Peers) -> Rotation:
        ring = len(peers.ranks)
        operations = []
        if message.numel():
            following = (peers.place + 1) % ring
            operations.append(dist.P2POp(dist.isend, message, group=peers.group, group_peer=following))
        if received.numel():
            previous = (peers.place - 1) % ring
            operations.append(dist.P2POp(dist.irecv, received, group=peers.group, group_peer=previous))
        works = dist.batch_isend_irecv(operations) if operations else ()
        return Rotation(received, tuple(work.wait for work in works))
