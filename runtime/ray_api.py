"""Every call to Ray, typed. Nothing else in the project imports it, but the actor itself."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import ray
import ray.cloudpickle
import ray.exceptions
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from runtime import bootstrap

POLL_S = 0.5
# Ray narrows CUDA_VISIBLE_DEVICES to the actor's own GPU unless told not to; peer access and symmetric memory need
# all of them.
KEEP_DEVICES_VISIBLE = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


@dataclass(frozen=True)
class Node:
    """node_id, address and resources (all of them, busy or not) of a node that is alive."""

    node_id: str
    host: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Died:
    """A rank's process ended without an exception of its own.

    Attributes:
        message: Ray's own report, often several paragraphs.
        out_of_memory: Whether Ray killed the process because its node ran low on memory.
    """

    message: str
    out_of_memory: bool = False


@dataclass(frozen=True)
class Raised:
    """A rank's method raised. cause: the exception itself. traceback: as text."""

    cause: BaseException
    traceback: str


@dataclass(frozen=True)
class Ended:
    """A rank's stream is complete."""


@dataclass(frozen=True)
class Yielded:
    value: Any


Item = Yielded | Ended | Raised | Died


def inside_job() -> bool:
    """True in the driver of a submitted Ray job: its cluster is given by Ray."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def is_connected() -> bool:
    """Whether this process is connected to a cluster."""
    return bool(ray.is_initialized())


def joins_other(address: str) -> bool:
    """True if a session with that address joins a cluster that is not its own to stop."""
    return ray.is_initialized() or inside_job() or address != "local"


def answers_as_ray(address: str, timeout_s: float = 5.0) -> bool:
    """Whether a gRPC server, as a Ray head is one, is at HOST:PORT. Ray itself would try for minutes, and print."""
    channel = grpc.insecure_channel(address)
    try:
        grpc.channel_ready_future(channel).result(timeout=timeout_s)
    except grpc.FutureTimeoutError:
        return False
    finally:
        channel.close()
    return True


def connect(address: str, cpus: int) -> None:
    """Join or start a cluster; see `joins_other`. Whatever Ray raises is left as it is."""
    if ray.is_initialized():
        return
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": True}
    if inside_job():
        ray.init(**quiet)
    elif address != "local":
        ray.init(address=address, **quiet)
    else:
        with _without_uv_upload():
            ray.init(address="local", num_cpus=max(cpus, os.cpu_count() or 1), include_dashboard=False, **quiet)


@contextlib.contextmanager
def _without_uv_upload() -> Iterator[None]:
    """Keep Ray from uploading the working directory because the process was started by `uv run`.

    Ray does so to give workers the driver's environment, and refuses a folder of more than 512 MiB. The workers of a
    cluster that this process starts use its interpreter anyway. The switch is an environment variable, which Ray reads
    when it is imported (2.60).
    """
    constants: Any = importlib.import_module("ray._private.ray_constants")
    enabled = constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV
    constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    try:
        yield
    finally:
        constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = enabled


def disconnect(*, at_most_s: float | None = None) -> None:
    """Leave the cluster; one that `connect` started here is stopped with all its processes.

    Args:
        at_most_s: How long to wait, in seconds; then Ray goes on in a thread of its own. A signal to the whole process
            group takes the processes of the cluster, too, and Ray waits 8 s for them (2.60).
    """
    thread = threading.Thread(target=ray.shutdown, name="shutdown", daemon=True)
    thread.start()
    thread.join(at_most_s)


def keep_messages(messages: list[str]) -> Callable[[], None]:
    """Append what Ray would print about the cluster (dead nodes, killed workers) to `messages`.

    Ray prints these on standard output even with `log_to_driver=False`, and offers no switch (2.60): the function that
    prints them is replaced.

    Returns:
        A function that lets Ray print again.
    """
    worker: Any = importlib.import_module("ray._private.worker")
    printing = worker.print_to_stdstream

    def keep(data: dict[str, Any], ignore_prefix: bool = False) -> None:
        messages.extend(data["lines"])

    worker.print_to_stdstream = keep
    return lambda: setattr(worker, "print_to_stdstream", printing)


def is_alive(node_id: str) -> bool:
    """Whether the cluster still counts a node among its own."""
    return any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())


def nodes() -> tuple[Node, ...]:
    alive = [node for node in ray.nodes() if node["Alive"]]
    return tuple(
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in alive
    )


def driver_node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def free(resource: str) -> float:
    """How much of `CPU` or `GPU` no one holds, over all nodes."""
    return float(ray.available_resources().get(resource, 0.0))


Sources = dict[str, tuple[str, str] | None]


def probe_node(
    node_id: str, distributions: tuple[str, ...], sources: Sources, root: str, timeout_s: float
) -> dict[str, Any]:
    """The GPUs and packages of a node, by a task that takes no resources there (see `runtime.bootstrap.probe`).

    Raises TimeoutError if the node does not answer in time.
    """
    _send_by_value()
    strategy = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    task = ray.remote(bootstrap.probe).options(num_cpus=0, num_gpus=0, scheduling_strategy=strategy)
    answer: dict[str, Any] = ray.get(task.remote(distributions, sources, root), timeout=timeout_s)
    return answer


def process_state(node_id: str, pid: int, timeout_s: float = 3.0) -> str:
    """The state of a process on a node (see `runtime.bootstrap.process_state`); `unknown` if the node does not answer.

    A task asks for it, because a stopped process cannot answer itself.
    """
    if node_id == driver_node():
        return bootstrap.process_state(pid)
    _send_by_value()
    strategy = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    task = ray.remote(bootstrap.process_state).options(num_cpus=0, scheduling_strategy=strategy)
    try:
        return str(ray.get(task.remote(pid), timeout=timeout_s))
    except ray.exceptions.RayError:  # GetTimeoutError, too
        return "unknown"


class Placement:
    """The reserved resources of all ranks: one bundle each.

    Attributes:
        name: Its name in Ray's dashboard, unique in the cluster; the names of its actors and of their tasks begin so.
    """

    def __init__(self, ranks: int, *, gpus_per_rank: int, one_node: bool) -> None:
        bundle = {"CPU": 1.0} | ({"GPU": float(gpus_per_rank)} if gpus_per_rank else {})
        self._gpus = gpus_per_rank
        self.name = f"raylysses-{uuid.uuid4().hex[:8]}"
        strategy = "STRICT_PACK" if one_node else "PACK"
        self._group = placement_group([bundle] * ranks, strategy=strategy, name=self.name)

    def wait(self, timeout_s: float) -> bool:
        """True as soon as all bundles are reserved; False if they are not within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self._group.wait(min(POLL_S, timeout_s)):
            if time.monotonic() > deadline:
                return False
        return True

    def start_actor(self, bundle: int) -> Actor:
        """Start a rank's process.

        Which rank it becomes is decided when its node and its GPU are known. Its name counts bundles, therefore, and
        the names of its tasks have the rank.
        """
        _send_by_value()
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        options: dict[str, Any] = {
            "name": f"{self.name}-process{bundle}",
            "num_cpus": 1,
            "num_gpus": self._gpus,
            "scheduling_strategy": strategy,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        if self._gpus:
            options["runtime_env"] = {"env_vars": KEEP_DEVICES_VISIBLE}
        return Actor(ray.remote(bootstrap.RankActor).options(**options).remote())

    def remove(self) -> None:
        remove_placement_group(self._group)


class Actor:
    """The handle of a rank's process; the process ends when it is killed, or with its placement."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def identify(self, root: str) -> Any:
        return self._handle.identify.remote(root)

    def create(self, path: str) -> Any:
        return self._handle.create.remote(path)

    def call(self, method: str, *arguments: Any) -> Any:
        """Start a method; wait for its result with `outcomes`."""
        return self._handle.call.remote(method, *arguments)

    def stream(self, task: str, method: str, *arguments: Any) -> Stream:
        """Start a method that yields.

        Args:
            task: The name of the call in Ray's dashboard and in the process's title.
            method: The rank's method.
            arguments: Its arguments.
        """
        return Stream(self._handle.stream.options(num_returns="streaming", name=task).remote(method, *arguments))

    def kill(self) -> None:
        ray.kill(self._handle)


class Stream:
    """The values that a rank's method yields, in order."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def take(self) -> Item:
        """The next item; call when `ready` has named the stream."""
        try:
            return Yielded(ray.get(next(self.generator)))
        except StopIteration:
            return Ended()
        except ray.exceptions.RayError as error:
            return trouble_of(error)


def trouble_of(error: ray.exceptions.RayError) -> Raised | Died:
    """What an error of a remote call says about its rank."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause if isinstance(error.cause, BaseException) else error
        return Raised(cause, str(error))
    return Died(str(error).strip(), isinstance(error, ray.exceptions.OutOfMemoryError))


def ready(streams: Sequence[Stream], timeout_s: float) -> list[Stream]:
    """The streams that have an item, an end or an error; empty after `timeout_s` seconds without one."""
    by_generator = {stream.generator: stream for stream in streams}
    done, _ = ray.wait(list(by_generator), num_returns=1, timeout=timeout_s, fetch_local=True)
    return [by_generator[generator] for generator in done]


def outcomes(references: Sequence[Any], timeout_s: float) -> list[Yielded | Raised | Died | None]:
    """How started calls ended, in order, as soon as all have or one has failed; None for those that have not ended.

    Waits at most `timeout_s` seconds.
    """
    found: dict[int, Yielded | Raised | Died] = {}
    deadline = time.monotonic() + timeout_s
    while len(found) < len(references) and time.monotonic() < deadline:
        waiting = [index for index in range(len(references)) if index not in found]
        done, _ = ray.wait([references[index] for index in waiting], num_returns=1, timeout=POLL_S)
        for index in waiting:
            if references[index] in done:
                found[index] = _outcome(references[index])
        if any(not isinstance(outcome, Yielded) for outcome in found.values()):
            break
    return [found.get(index) for index in range(len(references))]


def _outcome(reference: Any) -> Yielded | Raised | Died:
    try:
        return Yielded(ray.get(reference))
    except ray.exceptions.RayError as error:
        return trouble_of(error)


def _send_by_value() -> None:
    """Workers get the actor's code with the call: they must not import it from what may be another project's
    `runtime`.
    """
    ray.cloudpickle.register_pickle_by_value(importlib.import_module(bootstrap.__name__))
