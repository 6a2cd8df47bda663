"""One rank: it joins the group, loads and wires the model, and generates. Created by the actor, driven by the
session.
"""

from __future__ import annotations

import os
import queue
import resource
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from backends.layer_facts import DenoisingTime
from backends.platforms.facts import DeviceFacts
from backends.registry import Registry
from configs.faults import Fault, FaultError
from parallel.context import AttentionContext
from parallel.devices import facts_of
from parallel.events import Artefact, Event, Phase, RequestRan, Step, sum_traffic
from parallel.mesh import Mesh, open_mesh
from parallel.models import family_of
from parallel.models.sharding import ShardedModel
from parallel.transport.base import Transport
from parallel.transport.choice import open_transport
from parallel.transport.guard import exchange
from runtime.model_folder import BUILT_IN_PREFIX, folder_of, read_folder
from runtime.noise import fingerprint
from runtime.pipelines import FIRST, PhaseClock, clocked, decode, denoise, load_pipeline
from runtime.prompts import prompt_cuts
from runtime.requests import Request
from runtime.resolve import resolved_roles
from runtime.setup import RankSpec, Wired
from runtime.stuck import BEAT_S, beat_of


class Member:
    """A process that joins a group and computes in a thread. Methods are called one at a time."""

    spec: RankSpec
    device: torch.device
    mesh: Mesh

    def __init__(self) -> None:
        self._store: TCPStore | None = None

    def open_store(self, host: str) -> int:
        """The port of a store for the group to meet at. The socket that is bound is the one that serves: no port
        race.
        """
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def take_place(self, spec: RankSpec) -> None:
        """What this rank is, before it meets the others."""
        self.spec = spec
        self.device = torch.device("cpu" if spec.platform == "cpu" else f"{spec.platform}:{spec.ordinal}")

    def join(self) -> None:
        """Meet the others; blocks until all are there."""
        spec = self.spec
        if spec.several_nodes:
            bind_to_interface(spec.host)
        if self._store is None:
            with exchange("joining the group"):
                self._store = TCPStore(*spec.store, is_master=False, wait_for_workers=False)
        self.mesh = open_mesh(self._store, spec.rank, spec.world_size, self.device, spec.timeout_s)

    def open_transport(self) -> Transport:
        return open_transport(self.spec.config.parallel, self.mesh)

    def device_facts(self, registry: Registry) -> DeviceFacts:
        """This rank's own device, as it is."""
        return facts_of(self.device, registry)


class Rank(Member):
    """The work of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self._models: list[ShardedModel] = []

    def resolve(self, spec: RankSpec) -> Iterator[Event | Wired]:
        """What every role gets on this rank's own facts, before anything is loaded."""
        yield Phase("resolve")
        self.take_place(spec)
        registry = Registry.exactly(spec.backends)
        yield resolved_roles(spec, self.device_facts(registry), registry)

    def setup(self, spec: RankSpec) -> Iterator[Event | Wired]:
        yield from in_thread(lambda emit: self._setup(spec, emit), self.device)

    def run(self, requests: tuple[Request, ...]) -> Iterator[Event]:
        yield from in_thread(lambda emit: self._run(requests, emit), self.device)

    def _setup(self, spec: RankSpec, emit: Callable[[Any], None]) -> None:
        self.spec = spec
        folder = _folder(spec.config.model.path)
        emit(Phase("join"))
        self.join()
        emit(Phase("load"))
        dtype: torch.dtype = getattr(torch, spec.dtype)
        make = spec.config.generate
        denoising = DenoisingTime()
        self.pipe = load_pipeline(folder, spec.pipeline, self.mesh, dtype, make.flow_shift, denoising)
        self._emit = emit
        registry = Registry.exactly(spec.backends)
        models = read_folder(spec.config.model.path, weights=False).models
        self.transport = self.open_transport()
        context = AttentionContext(
            mesh=self.mesh,
            transport=self.transport,
            registry=registry,
            config=spec.config.attention,
            device=self.device_facts(registry),
            dtype=spec.dtype,
            emit=lambda event: self._emit(event),
            agreement=spec.agreement,
            calibrations={name: facts.calibration for name, facts in models.items()},
            denoising=denoising,
            parallel=spec.config.parallel,
        )
        for name in ("transformer", "transformer_2"):
            model = getattr(self.pipe, name, None)
            if model is not None:
                self._models.append(family_of({"_class_name": type(model).__name__}).wire(model, context, name))
        emit(Wired(tuple(row for model in self._models for row in model.selections()), context.device))

    def _run(self, requests: tuple[Request, ...], emit: Callable[[Any], None]) -> None:
        self._emit = emit
        for index, request in enumerate(requests):
            self._generate(index, request, emit)

    def _generate(self, index: int, request: Request, emit: Callable[[Any], None]) -> None:
        settings = self.spec.config.run
        device = self.mesh.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        clock = PhaseClock(lambda name: emit(Phase(name, index)), device)
        if self.mesh.rank == FIRST:
            for cut in prompt_cuts(self.pipe.tokenizer, index, request):
                emit(cut)
        with clocked(self.pipe, clock):
            latents = denoise(
                self.pipe, request, clock, lambda step, seconds: emit(Step(index, step, request.steps, seconds))
            )
            if not torch.isfinite(latents).all():
                raise ArithmeticError(f"the latents of request {index} are not finite; see selection.json for what ran")
            if self.mesh.rank == FIRST and settings.save_latents:
                emit(Artefact(index, "latents", latents.float().cpu().numpy()))
            if self.mesh.rank == FIRST and settings.outputs:
                clock.enter("decode")
                emit(Artefact(index, "frames", decode(self.pipe, latents)))
        emit(self._accounts(index, clock, latents))

    def _accounts(self, index: int, clock: PhaseClock, latents: torch.Tensor) -> RequestRan:
        taken = {model.name: model.take_planned() for model in self._models}
        on_gpu = self.mesh.device.type == "cuda"
        return RequestRan(
            request=index,
            planned=sum_traffic([traffic for traffic, _ in taken.values()]),
            measured=self.transport.take_traffic(),
            forwards={name: forwards for name, (_, forwards) in taken.items()},
            seconds=dict(clock.seconds),
            rows={model.name: model.rows for model in self._models},
            peak_memory_bytes=(torch.cuda.max_memory_allocated(self.mesh.device) if on_gpu else peak_process_bytes()),
            latents=fingerprint(latents),
        )


def peak_process_bytes() -> int:
    """The largest resident set of this process so far, in bytes; it cannot be reset between requests."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def bind_to_interface(host: str) -> None:
    """Let gloo and NCCL listen where the other nodes find this one, unless the environment already says where.

    gloo takes the address that the host's own name resolves to, which is often the loopback; only these variables
    move it.
    """
    names = [name for name, found in psutil.net_if_addrs().items() if any(each.address == host for each in found)]
    for name in names[:1]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _folder(path: str) -> Path:
    folder = folder_of(path)
    if not folder.is_dir():
        rule = f"there is no such folder on {socket.gethostname()}"
        remedy = "put the model at the same path on every node"
        if path.startswith(BUILT_IN_PREFIX):
            remedy = "install Raylysses again on that node"
        raise FaultError([Fault("model.path", path, rule, remedy)])
    return folder


_DONE = object()


def in_thread(work: Callable[[Callable[[Any], None]], None], device: torch.device | None) -> Iterator[Any]:
    """What `work` emits, as it emits it, from a thread of its own; its exception, if it raises, is raised here.

    A generator cannot yield from inside a pipeline's callback, and the driver wants each event when it happens. Where
    the work emits nothing for a while, a `Beat` says that the process lives and what its work does.
    """
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threads: list[int] = []

    def body() -> None:
        threads.append(threading.get_ident())
        try:
            if device is not None and device.type == "cuda":
                torch.cuda.set_device(device)  # the current device is a property of the thread
            work(events.put)
        finally:
            events.put(_DONE)

    with ThreadPoolExecutor(1, thread_name_prefix="rank") as pool:
        outcome = pool.submit(body)
        while True:
            try:
                event = events.get(timeout=BEAT_S)
            except queue.Empty:
                event = beat_of(threads[0] if threads else 0)
            if event is _DONE:
                break
            yield event
        outcome.result()
