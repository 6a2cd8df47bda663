"""The ranks of one run: reserved, started, checked, ordered, set up, driven, and stopped."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from backends.platforms.facts import DeviceFacts
from backends.selection import Agreement
from configs.faults import Fault, FaultError
from configs.schema import ClusterConfig
from runtime import ray_api
from runtime.errors import DisagreementError, PlacementError, RankError, RankPlace
from runtime.placement import fits_one_node, order_ranks
from runtime.setup import RankSpec, Wired, disagreements, negotiate
from runtime.source import ROOT, differing_sources, own_sources
from runtime.supervisor import OnEvent, Supervisor, trouble

UNPLACED = "not yet known"


class RankGroup:
    """Processes for `world_size` ranks on a platform, in rank order: the driver's node first, GPUs by number.

    Raises PlacementError if the resources do not become free or a process does not answer in time, FaultError if a node
    would run other code than the driver's, RankError if a process is lost. `close` may be called at any time.

    Attributes:
        places: Where each rank runs, in rank order; empty before `place`.
        devices: The device by rank, as the rank reports it in `set_up`.
    """

    def __init__(self, cluster: ClusterConfig) -> None:
        self._cluster = cluster
        self._placement: ray_api.Placement | None = None
        self._actors: list[ray_api.Actor] = []
        self.places: tuple[RankPlace, ...] = ()
        self.devices: dict[int, DeviceFacts] = {}

    def place(self, world_size: int, platform: str, nodes: Sequence[ray_api.Node]) -> None:
        """Reserve a bundle for each rank and start its process; sets `places`."""
        self.places, self.devices = (), {}
        timeout = self._cluster.start_timeout_s
        one_node = fits_one_node(world_size, platform, nodes)
        self._placement = ray_api.Placement(world_size, gpus_per_rank=int(platform == "cuda"), one_node=one_node)
        if not self._placement.wait(timeout):
            rule = f"the cluster's resources were taken for {timeout:g} s"
            remedy = "wait for other runs to end, use fewer ranks, or raise cluster.start_timeout_s"
            raise PlacementError([Fault("parallel.world_size", world_size, rule, remedy)])
        self._actors = [self._placement.start_actor(bundle) for bundle in range(world_size)]
        unplaced = [RankPlace(rank, "", UNPLACED, UNPLACED, 0) for rank in range(world_size)]
        answers = self._answers([actor.identify(str(ROOT)) for actor in self._actors], unplaced)
        for answer in answers:
            require_same_sources(answer["sources"], answer["host"])
        order, self.places = order_ranks(answers, ray_api.driver_node())
        self._actors = [self._actors[index] for index in order]

    def create(self, worker: str) -> None:
        """Import what the ranks need, on all at once, and make the objects that do their work."""
        self._answers([actor.create(worker) for actor in self._actors], self.places)

    def open_store(self) -> tuple[str, int]:
        """Host and port of the store that the first rank keeps, where the group meets."""
        host = self.places[0].host
        (port,) = self._answers([self._actors[0].call("open_store", host)], self.places[:1])
        return host, port

    def set_up(self, specs: Sequence[RankSpec], on_event: OnEvent) -> None:
        """Resolve every role on every rank, settle what differs if the configuration allows it, then load and wire the
        model. Raises DisagreementError if ranks resolved a role differently, before any of them loads.
        """
        resolved = self._wired("resolve", specs, on_event)
        self.devices = {rank: wired.device for rank, wired in resolved.items()}
        agreement: Agreement = {}
        if specs[0].config.attention.agreement == "negotiate":
            agreement = negotiate(resolved, self.places)
        settled = {(row[0], row[1].role) for row in resolved[0].rows if (row[1].role, row[1].requirements) in agreement}
        self._require_agreement(resolved, settled)
        wired = self._wired("setup", [replace(spec, agreement=agreement) for spec in specs], on_event)
        self._require_agreement(wired, set())

    def _require_agreement(self, wired: Mapping[int, Wired], settled: Collection[tuple[str, str]]) -> None:
        lines = disagreements(wired, self.places, settled)
        if lines:
            raise DisagreementError(lines)

    def _wired(self, method: str, specs: Sequence[RankSpec], on_event: OnEvent) -> dict[int, Wired]:
        """What every rank answers to `resolve` or `setup`."""
        wired: dict[int, Wired] = {}

        def sort_out(rank: int, event: Any) -> None:
            if isinstance(event, Wired):
                wired[rank] = event
            else:
                on_event(rank, event)

        self.drive(method, [(spec,) for spec in specs], sort_out)
        return wired

    def drive(self, method: str, arguments: Sequence[tuple[Any, ...]], on_event: OnEvent) -> None:
        """Run a streaming method on every rank to its end. Raises RankError and StallError (see `Supervisor`)."""
        run = self._placement.name if self._placement is not None else "raylysses"
        streams = [
            actor.stream(f"{run}-rank{rank}.{method}", method, *args)
            for rank, (actor, args) in enumerate(zip(self._actors, arguments, strict=True))
        ]
        Supervisor(self.places, on_event, self._cluster.stall_timeout_s).drive(streams)

    @property
    def running(self) -> bool:
        """Whether there are processes to drive."""
        return bool(self._actors)

    def close(self) -> None:
        """Kill the processes and give the resources back to the cluster."""
        for actor in self._actors:
            actor.kill()
        if self._placement is not None:
            self._placement.remove()
        self._forget()

    def kill(self) -> None:
        """Kill the processes of ranks on this node by their ids, before the cluster itself is stopped.

        A signal to the whole process group has taken Ray's own processes too, and calls to Ray would wait for them.
        """
        for place in self.places if self.running else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(place.pid, signal.SIGKILL)
        self._forget()

    def _forget(self) -> None:
        self._actors = []
        self._placement = None

    def _answers(self, references: Sequence[Any], places: Sequence[RankPlace]) -> list[Any]:
        timeout = self._cluster.start_timeout_s
        outcomes = ray_api.outcomes(references, timeout)
        for place, outcome in zip(places, outcomes, strict=True):
            if isinstance(outcome, ray_api.Raised | ray_api.Died):
                raise RankError(trouble(place, "start", outcome))
        silent = [place.rank for place, outcome in zip(places, outcomes, strict=True) if outcome is None]
        if silent:
            rule = f"the processes of ranks {silent} did not answer within {timeout:g} s"
            remedy = "raise cluster.start_timeout_s, or look at their nodes' load"
            raise PlacementError([Fault("start", None, rule, remedy)])
        return [outcome.value for outcome in outcomes if isinstance(outcome, ray_api.Yielded)]


def require_same_sources(found: ray_api.Sources, host: str) -> None:
    """Raises FaultError if an import on a node would find other code than the driver's."""
    faults = [_source_fault(name, found[name], host) for name in differing_sources(own_sources(), found)]
    if faults:
        raise FaultError(faults)


def _source_fault(name: str, source: tuple[str, str] | None, host: str) -> Fault:
    where = None if source is None else source[0]
    rule = (
        f"{host} cannot import it"
        if where is None
        else f"an import of it on {host} finds other code or models than the driver's"
    )
    remedy = "run from a directory without a package of that name, and with the same Raylysses on every node"
    return Fault(f"package {name}", where, rule, remedy)
