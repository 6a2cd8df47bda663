"""One live group of ranks that serves many requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from backends.platforms.facts import DeviceFacts, LocalNode
from backends.registry import Registry
from configs.arguments import AttentionArgument, attention_settings
from configs.schema import ModelConfig, RunConfig
from parallel.events import Artefact, AttentionRan, PromptCut, RequestRan
from runtime.check import raise_if_any, request_faults
from runtime.errors import DisagreementError, RankPlace
from runtime.first_frame import first_frame
from runtime.latents import latent_differences
from runtime.live import LiveRanks
from runtime.model_folder import FolderFacts
from runtime.preflight import Ground, check_without_ray, survey
from runtime.report import SelectionReport, merge
from runtime.requests import Generation, Request, with_plain_numbers
from runtime.settled import absolute_model_path, settle_ranks, settle_roles
from runtime.signals import terminated_by_signal


class Observer:
    """What a session tells; override what is wanted."""

    def on_message(self, text: str) -> None:
        """What the session does or has decided, as a line."""

    def on_placed(self, places: Sequence[RankPlace]) -> None:
        """The ranks have their places, and are about to load."""

    def on_event(self, rank: int, event: Any) -> None:
        """An event of a rank (`parallel.events`), as it arrives."""

    def on_generation(self, index: int, generation: Generation) -> None:
        """Every rank has finished request `index` of the call; later requests may still fail."""


class Session:
    """A group of ranks with a loaded model, as a context manager.

    Entering checks everything that can be checked, then places, starts and wires the ranks; leaving stops them,
    whatever happened.

    Args:
        config: the run.
        attention: replaces `config.attention`, in any form that `configs.arguments.attention_settings` reads; None
            keeps it.
        observer: is notified of messages, placement and events.
        worker: dotted path of the class that does a rank's work.
        node: what is known of this node's GPUs, for sessions that share it; None asks nvidia-smi, if it is needed.

    Raises:
        FaultError: a configuration or a request that cannot be served.
        PlacementError: resources that are not available.
        RankError, DisagreementError, StallError: ranks that fail, differ or hang.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        attention: AttentionArgument = None,
        observer: Observer | None = None,
        worker: str = "runtime.worker.Rank",
        node: LocalNode | None = None,
    ) -> None:
        if attention is not None:
            config = replace(config, attention=attention_settings(attention))
        self.config = config
        self.device: DeviceFacts | None = None
        self.device_notice = ""
        self.world_size = 0
        self._dtype = ""
        self._observer = observer if observer is not None else Observer()
        self._worker = worker
        self._node = node or LocalNode()
        self._registry = Registry(config.attention.register)
        self._live = LiveRanks(config, self._observer.on_message)
        self._folder: FolderFacts | None = None
        self._ran: list[tuple[int, AttentionRan]] = []
        self._finished: list[Generation] = []

    def __enter__(self) -> Session:
        if self._live.group.running:
            raise RuntimeError("the session has live ranks already: leave it before you enter it again")
        self._forget_last_group()
        folder = self.check()
        try:
            with terminated_by_signal():
                self._start(folder)
        except BaseException as error:
            self._live.close(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.close(error)

    @property
    def places(self) -> tuple[RankPlace, ...]:
        """Where the ranks run, by rank; empty before they are placed."""
        return self._live.group.places

    @property
    def gpu_names(self) -> dict[int, str]:
        """The name of each rank's GPU as the rank reports it, empty on a CPU; no ranks before they have."""
        return {rank: device.name for rank, device in self._live.group.devices.items()}

    @property
    def start_s(self) -> dict[str, float]:
        """Seconds of each finished phase of the start: connect, place, import, load."""
        return dict(self._live.start_s)

    @property
    def ray_messages(self) -> list[str]:
        """What Ray reported of the cluster, such as lost nodes and killed processes; the run folder's `ray.log`."""
        return self._live.ray_messages

    @property
    def registrations(self) -> dict[str, str]:
        """Name -> class path of the backends that the ranks know beside the built-in ones."""
        return self._registry.registrations()

    @property
    def settled(self) -> RunConfig:
        """The configuration with what the run has settled on so far in place of `auto`: what a repeated run needs."""
        if self.device is None or self._folder is None:
            return self.config
        config = settle_ranks(self.config, self.device.platform, self.world_size, self._dtype)
        models = self._folder.models.values()
        roles = {role.role: role.category for model in models for role in model.roles}
        return settle_roles(config, roles, self.report.entries, self._registry)

    @property
    def finished(self) -> tuple[Generation, ...]:
        """The requests of the last `generate` call that every rank finished, in order, also if the call raised."""
        return tuple(self._finished)

    @property
    def report(self) -> SelectionReport:
        """What every rank's layers have run so far, merged."""
        return merge(self._ran, self.world_size)

    def check(self, requests: Sequence[Request] = ()) -> FolderFacts:
        """The model folder's facts, if nothing speaks against the run that can be known without Ray and torch."""
        if self._folder is None or requests:
            self._folder = check_without_ray(self.config, requests, self._registry, self._node)
        return self._folder

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Serve the requests in order. Raises FaultError if one cannot be served, before any rank starts on one.

        Whatever it raises once ranks have started on them, RankError and KeyboardInterrupt included, has stopped the
        ranks: enter the session anew. `finished` then has what was complete.
        """
        if not isinstance(requests, Sequence) or not all(isinstance(request, Request) for request in requests):
            raise TypeError(f"generate takes a list of Request, not {_kinds(requests)}; see raylysses.request_of")
        if not self._live.group.running:
            raise RuntimeError(
                "the session has no ranks now: use it as a context manager, `with Session(config) as session:`"
            )
        requests = tuple(map(with_plain_numbers, requests))
        folder = self.check()
        raise_if_any(fault for request in requests for fault in request_faults(request, folder))
        made: dict[int, dict[str, Any]] = {index: {} for index in range(len(requests))}
        waiting = dict.fromkeys(range(len(requests)), self.world_size)
        self._finished = []
        latents: dict[int, dict[int, tuple[float, ...]]] = {index: {} for index in range(len(requests))}

        def on_event(rank: int, event: Any) -> None:
            if isinstance(event, AttentionRan):
                self._ran.append((rank, event))
            elif isinstance(event, Artefact):
                made[event.request][event.name] = event.array
            elif isinstance(event, PromptCut):
                self._observer.on_message(event.text)
            elif isinstance(event, RequestRan):
                latents[event.request][rank] = event.latents
            self._observer.on_event(rank, event)
            if isinstance(event, RequestRan):
                waiting[event.request] -= 1
                if waiting[event.request] == 0:
                    differences = latent_differences(event.request, latents[event.request], self.places)
                    if differences:
                        raise DisagreementError(differences, "latents")
                    frame = frames[event.request]
                    generation = Generation(requests[event.request], **made[event.request], first_frame=frame)
                    self._finished.append(generation)
                    self._observer.on_generation(event.request, generation)

        frames = [self._first_frame(request) for request in requests]
        fitted = tuple(replace(request, image=frame) for request, frame in zip(requests, frames, strict=True))
        try:
            with terminated_by_signal():
                self._live.group.drive("run", [(fitted,)] * self.world_size, on_event)
            report = self.report
            if not report.agreed:
                raise DisagreementError(tuple(map(str, report.disagreements)))
        except BaseException as error:  # other ranks may wait for one that is gone
            self._live.close(error)
            raise
        return list(self._finished)

    def _first_frame(self, request: Request) -> bytes | None:
        """The picture that the model gets, and a message if that is not all of it."""
        if request.image is None:
            return None
        frame = first_frame(request.image, request.height, request.width, request.image_fit)
        if frame.note:
            self._observer.on_message(frame.note)
        return frame.content

    def close(self) -> None:
        """Stop the ranks, give back what they held, and stop the cluster if it is this session's own; repeatable."""
        self._live.close()

    def _forget_last_group(self) -> None:
        """Reset everything that belongs to one group of ranks; the next group may differ in all of it."""
        # A backend that is registered after this point belongs to a later session.
        self._registry = Registry.exactly(Registry(self.config.attention.register).paths())
        self._live = LiveRanks(self.config, self._observer.on_message)
        self._folder = None  # the model folder may have changed
        self._ran = []
        if self.device is not None:
            self._node = LocalNode()  # so may its GPUs
        self.device, self.device_notice, self.world_size = None, "", 0

    def _start(self, folder: FolderFacts) -> None:
        ground = self._live.start(lambda: self._survey(folder), self._worker, self._observer.on_placed)
        # Ranks have working directories of their own.
        config = replace(self.config, model=ModelConfig(absolute_model_path(self.config.model.path)))
        with self._live.timed("load"):
            specs = self._live.specs(ground, config, self._registry.paths(), folder.pipeline)
            self._live.group.set_up(specs, self._observer.on_event)

    def _survey(self, folder: FolderFacts) -> Ground:
        """What the cluster gives; the session knows it from here on, before the ranks have their places."""
        ground = survey(self.config, folder, self._registry, self._node)
        self.device, self.device_notice = ground.device, ground.notice
        self.world_size, self._dtype = ground.world_size, ground.dtype
        return ground


def _kinds(given: Any) -> str:
    """The types of what was given, and not the values, which may be whole images."""
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        return type(given).__name__
    return f"a list of {', '.join(sorted({type(item).__name__ for item in given}))}"
