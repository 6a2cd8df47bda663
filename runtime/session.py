"""One live group of ranks that serves many requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

from backends.platforms.facts import DeviceFacts
from backends.registry import Registry
from configs.faults import Fault
from configs.schema import AttentionConfig, AttentionSpec, ModelConfig, RunConfig
from parallel.events import Artefact, AttentionRan
from runtime import ray_api
from runtime.check import raise_if_any, request_faults
from runtime.errors import DisagreementError, PlacementError, RankPlace
from runtime.group import RankGroup
from runtime.model_folder import BUILT_IN_PREFIX, FolderFacts
from runtime.placement import CPU_RANKS, least_world_size
from runtime.preflight import Ground, check_without_ray, is_local, survey
from runtime.report import SelectionReport, merge
from runtime.requests import Generation, Request
from runtime.setup import RankSpec
from runtime.signals import StarterThread, signals_held, terminated_by_signal


class Observer:
    """What a session tells; override what is wanted."""

    def on_message(self, text: str) -> None:
        """What the session does or has decided, as a line."""

    def on_placed(self, places: Sequence[RankPlace]) -> None:
        """The ranks have their places, and are about to load."""

    def on_event(self, rank: int, event: Any) -> None:
        """An event of a rank (`parallel.events`), as it arrives."""


class Session:
    """A group of ranks with a loaded model, as a context manager.

    Entering checks everything that can be checked, then places, starts and wires the ranks; leaving stops them,
    whatever happened. attention: instead of the configuration's own; anything but an `AttentionConfig` is its default
    choice. worker: dotted path of the class that does a rank's work.

    Raises FaultError for what cannot be served, PlacementError for what is not there, RankError, DisagreementError and
    StallError for what goes wrong.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        attention: AttentionConfig | AttentionSpec | Mapping[str, Any] | Enum | str | None = None,
        observer: Observer | None = None,
        worker: str = "runtime.worker.Rank",
    ) -> None:
        if attention is not None:
            chosen = attention if isinstance(attention, AttentionConfig) else AttentionConfig(backend=attention)
            config = replace(config, attention=chosen)
        self.config = config
        self.device: DeviceFacts | None = None
        self.world_size = 0
        self._observer = observer if observer is not None else Observer()
        self._worker = worker
        self._registry = Registry(config.attention.register)
        self._group = RankGroup(config.cluster)
        self._folder: FolderFacts | None = None
        self._ran: list[tuple[int, AttentionRan]] = []
        self._owns_cluster = False
        self._starter = StarterThread()

    def __enter__(self) -> Session:
        # What is registered while the session lives is another session's.
        self._registry = Registry.exactly(Registry(self.config.attention.register).paths())
        folder = self.check()
        try:
            with terminated_by_signal():
                self._start(folder)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def places(self) -> tuple[RankPlace, ...]:
        """Where the ranks run, by rank; empty before they are placed."""
        return self._group.places

    @property
    def registrations(self) -> dict[str, str]:
        """Name -> class path of the backends that the ranks know beside the built-in ones."""
        return self._registry.registrations()

    @property
    def report(self) -> SelectionReport:
        """What every rank's layers have run so far, merged."""
        return merge(self._ran, self.world_size)

    def check(self, requests: Sequence[Request] = ()) -> FolderFacts:
        """The model folder's facts, if nothing speaks against the run that can be known without Ray and torch."""
        if self._folder is None or requests:
            self._folder = check_without_ray(self.config, requests, self._registry)
        return self._folder

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Serve the requests in order. Raises FaultError if one cannot be served, before any rank starts on one."""
        if not self._group.running:
            raise RuntimeError(
                "the session has no ranks now: use it as a context manager, `with Session(config) as session:`"
            )
        folder = self.check()
        raise_if_any(fault for request in requests for fault in request_faults(request, folder))
        made: dict[int, dict[str, Any]] = {index: {} for index in range(len(requests))}

        def on_event(rank: int, event: Any) -> None:
            if isinstance(event, AttentionRan):
                self._ran.append((rank, event))
            elif isinstance(event, Artefact):
                made[event.request][event.name] = event.array
            self._observer.on_event(rank, event)

        with terminated_by_signal():
            self._group.drive("run", [(tuple(requests),)] * self.world_size, on_event)
        report = self.report
        if not report.agreed:
            raise DisagreementError(tuple(map(str, report.disagreements)))
        return [Generation(request, **made[index]) for index, request in enumerate(requests)]

    def close(self) -> None:
        """Stop the ranks, give back what they held, and stop the cluster if it is this session's own; repeatable."""
        with signals_held():
            if self._owns_cluster:
                self._group.kill()
                ray_api.disconnect()
                self._owns_cluster = False
            else:
                self._group.close()
            self._starter.release()

    def _start(self, folder: FolderFacts) -> None:
        tell = self._observer.on_message
        tell(f"connecting to {_cluster_name(self.config)}")
        self._starter = StarterThread()
        self._owns_cluster = not ray_api.joins_other(self.config.cluster.address)
        _connect(self.config, self._starter)
        ground = survey(self.config, folder, self._registry)
        self.device, self.world_size = ground.device, ground.world_size
        chosen = "" if self.config.parallel.world_size else " (parallel.world_size=auto)"
        tell(f"{ground.world_size} ranks on {ground.device.label}, {ground.dtype}{chosen}")
        self._group.place(ground.world_size, ground.device.platform, ground.nodes)
        self._observer.on_placed(self.places)
        tell("importing torch and the model's library on every rank")
        self._group.create(self._worker)
        self._group.set_up(self._specs(folder, ground), self._observer.on_event)

    def _specs(self, folder: FolderFacts, ground: Ground) -> list[RankSpec]:
        store = self._group.open_store()
        path = self.config.model.path
        # Ranks have working directories of their own.
        absolute = path if path.startswith(BUILT_IN_PREFIX) else str(Path(path).absolute())
        config = replace(self.config, model=ModelConfig(absolute))
        return [
            RankSpec(
                rank=place.rank,
                world_size=ground.world_size,
                platform=ground.device.platform,
                ordinal=place.ordinal,
                host=place.host,
                several_nodes=len({place.node_id for place in self.places}) > 1,
                dtype=ground.dtype,
                pipeline=folder.pipeline,
                store=store,
                # The driver is to notice a stall before a collective gives up and blames the peer that waited.
                timeout_s=2 * self.config.cluster.stall_timeout_s,
                backends=self._registry.paths(),
                config=config,
            )
            for place in self.places
        ]


def _cluster_name(config: RunConfig) -> str:
    if ray_api.inside_job():
        return "the job's Ray cluster"
    return "a Ray cluster of this run's own" if is_local(config) else f"the Ray cluster at {config.cluster.address}"


def _connect(config: RunConfig, starter: StarterThread) -> None:
    """Raises PlacementError if no cluster can be joined or started; signals wait until it is known."""
    address = config.cluster.address
    remedy = "start one with `ray start --head` and give its HOST:PORT, or use cluster.address=local"
    if address != "local" and not ray_api.inside_job() and not ray_api.answers_as_ray(address):
        raise PlacementError([Fault("cluster.address", address, "no Ray cluster answers there", remedy)])
    ranks = config.parallel.world_size or max(least_world_size(config.parallel), CPU_RANKS)
    with signals_held(repeat=True):
        try:
            starter.run(lambda: ray_api.connect(address, ranks))
        except Exception as error:  # Ray raises anything here, bare Exception included
            rule = f"Ray could not be {'started' if is_local(config) else 'joined'} ({_first_line(error)})"
            raise PlacementError([Fault("cluster.address", address, rule, remedy)]) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
