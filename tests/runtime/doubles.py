"""Backends and ranks that misbehave on purpose, importable by rank processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from backends.declared.reference import ReferenceBackend
from backends.interface import AttentionBackend, AttentionMetadata, Variant
from backends.kernels.torch_sdpa import TorchSdpaImpl
from backends.platforms.facts import DeviceFacts
from backends.registry import Registry
from parallel.events import Event, RequestRan
from parallel.plan import ExchangeCounts
from parallel.transport.base import Peers, Transport
from parallel.transport.torch_dist import TorchTransport
from runtime.pipelines import PhaseClock
from runtime.requests import Request
from runtime.setup import RankSpec, Wired
from runtime.worker import Rank

CALLS_BEFORE_TROUBLE = 20


class _CountingImpl(TorchSdpaImpl):
    calls = 0

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        type(self).calls += 1
        troubled = type(self).trouble is not _CountingImpl.trouble and dist.get_rank() == 1
        if troubled and type(self).calls > CALLS_BEFORE_TROUBLE:
            self.trouble()
        return super().forward(query, key, value, metadata)

    def trouble(self) -> None:
        raise NotImplementedError


class RaisingImpl(_CountingImpl):
    def trouble(self) -> None:
        raise ArithmeticError("the kernel met a number that it does not like")


class StuckImpl(_CountingImpl):
    def trouble(self) -> None:
        time.sleep(3600)


class TwoArgumentError(Exception):
    """One that cannot be rebuilt from its own arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class UnportableImpl(_CountingImpl):
    def trouble(self) -> None:
        raise TwoArgumentError("this", "that")


class NotANumberImpl(_CountingImpl):
    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        return super().forward(query, key, value, metadata) * float("nan")


class NarrowImpl(_CountingImpl):
    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        return super().forward(query, key, value, metadata)[:, :-1]


class UnportableBackend(AttentionBackend):
    variants = (Variant("unportable", "tests.runtime.doubles.UnportableImpl"),)

    @staticmethod
    def get_name() -> str:
        return "UNPORTABLE"


class NotANumberBackend(AttentionBackend):
    variants = (Variant("nan", "tests.runtime.doubles.NotANumberImpl"),)

    @staticmethod
    def get_name() -> str:
        return "NOT_A_NUMBER"


class NarrowBackend(AttentionBackend):
    variants = (Variant("narrow", "tests.runtime.doubles.NarrowImpl"),)

    @staticmethod
    def get_name() -> str:
        return "NARROW"


class RenamedReferenceBackend(ReferenceBackend):
    """No fault: another class under a built-in name."""

    variants = (Variant("renamed", "backends.kernels.reference.ReferenceImpl"),)


class RaisingBackend(AttentionBackend):
    variants = (Variant("raising", "tests.runtime.doubles.RaisingImpl"),)

    @staticmethod
    def get_name() -> str:
        return "RAISING"


class StuckBackend(AttentionBackend):
    variants = (Variant("stuck", "tests.runtime.doubles.StuckImpl"),)

    @staticmethod
    def get_name() -> str:
        return "STUCK"


class OddFactsRank(Rank):
    """The last rank believes that it has a Hopper GPU, so that automatic choices differ."""

    def device_facts(self, registry: Registry) -> DeviceFacts:
        if self.spec.rank == self.spec.world_size - 1:
            return DeviceFacts("cuda", (9, 0), packages={"fa3-fwd": "0.0.3"})
        return super().device_facts(registry)


class SwappedPathRank(Rank):
    """The last rank knows another class by the name of a built-in backend."""

    def resolve(self, spec: RankSpec) -> Iterator[Event | Wired]:
        if spec.rank == spec.world_size - 1:
            spec = replace(spec, backends={**spec.backends, "REFERENCE": f"{__name__}.RenamedReferenceBackend"})
        yield from super().resolve(spec)


class _IdentityTransport(TorchTransport):
    """Every rank keeps what it would have sent."""

    def _exchange(self, verb: str, send: torch.Tensor, counts: ExchangeCounts, peers: Peers) -> torch.Tensor:
        return super()._exchange(verb, send, counts, peers) if verb == "gather_rows" else send.clone()


class _NoAttention(torch.nn.Module):
    def forward(self, hidden_states: torch.Tensor, *others: Any) -> torch.Tensor:
        return torch.zeros_like(hidden_states)


class SkippingRank(Rank):
    """The last rank leaves out one of its layers."""

    def _setup(self, spec: RankSpec, emit: Callable[[Any], None]) -> None:
        super()._setup(spec, emit)
        if spec.rank == spec.world_size - 1:
            self.pipe.transformer.blocks[2].attn1 = _NoAttention()


class IdentityRank(Rank):
    def open_transport(self) -> Transport:
        return _IdentityTransport(self.mesh)


class SecondRequestFails(Rank):
    """Raises at the second request of a call, after the first is finished."""

    def _generate(self, index: int, request: Request, emit: Callable[[Any], None]) -> None:
        if index == 1:
            raise ArithmeticError("the second request fails")
        super()._generate(index, request, emit)


class OffLatentsRank(Rank):
    """The second rank reports latents that are off by a part in a thousand."""

    def _accounts(self, index: int, clock: PhaseClock, latents: torch.Tensor) -> RequestRan:
        return super()._accounts(index, clock, latents * (1.001 if self.mesh.rank == 1 else 1.0))
