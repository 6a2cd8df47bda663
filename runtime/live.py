"""A connection to Ray with a group of ranks on it: opened for a session or a bench, and always closed."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from configs.faults import Fault
from configs.schema import RunConfig
from runtime import ray_api
from runtime.errors import PlacementError, RankPlace, TerminatedError
from runtime.group import RankGroup
from runtime.placement import CPU_RANKS, least_world_size
from runtime.setup import RankSpec
from runtime.signals import StarterThread, signals_held

if TYPE_CHECKING:
    from runtime.preflight import Ground


STOP_S = 1.5
"""How long a run that a signal has stopped waits for Ray."""


class LiveRanks:
    """The processes of all ranks.

    Args:
        config: The run.
        tell: Called with what is done and what was decided, as lines.

    Attributes:
        group: The ranks, to drive them.
        ray_messages: What Ray reported of the cluster meanwhile, for the run folder.
        start_s: Seconds of each finished phase of the start: connect, place, import, load.
    """

    def __init__(self, config: RunConfig, tell: Callable[[str], None]) -> None:
        self._config = config
        self._tell = tell
        self.group = RankGroup(config.cluster)
        self.ray_messages: list[str] = []
        self.start_s: dict[str, float] = {}
        self._owns_cluster = False
        self._connected = False
        self._let_ray_print: Callable[[], None] | None = None
        self._starter = StarterThread()

    def start(
        self, survey: Callable[[], Ground], worker: str, on_placed: Callable[[Sequence[RankPlace]], None]
    ) -> Ground:
        """Join or start the cluster, survey it, place the ranks, and make their workers (a dotted path).

        Raises what `survey` and `RankGroup` raise, and PlacementError if there is no cluster.
        """
        config = self._config
        self._tell(f"connecting to {_cluster_name(config)}")
        self._starter = StarterThread()
        self._owns_cluster = not ray_api.joins_other(config.cluster.address)
        self._let_ray_print = ray_api.keep_messages(self.ray_messages)
        was_connected = ray_api.is_connected()
        with self.timed("connect"):
            _connect(config, self._starter)
            self._connected = not was_connected
            ground = survey()
        chosen = "" if config.parallel.world_size else " (parallel.world_size=auto)"
        ranks = "1 rank" if ground.world_size == 1 else f"{ground.world_size} ranks"
        self._tell(f"{ranks} on {ground.device.label}, {ground.dtype}{chosen}")
        if ground.notice:
            self._tell(ground.notice)
        with self.timed("place"):
            self.group.place(ground.world_size, ground.device.platform, ground.nodes)
        on_placed(self.group.places)
        self._tell("importing torch and the model's library on every rank")
        with self.timed("import"):
            self.group.create(worker)
        return ground

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Record the seconds of a phase of the start, if it finishes."""
        began = time.monotonic()
        yield
        self.start_s[phase] = time.monotonic() - began

    def specs(self, ground: Ground, config: RunConfig, backends: dict[str, str], pipeline: str = "") -> list[RankSpec]:
        """What each rank is told; the first one has opened its store by then."""
        store, places = self.group.open_store(), self.group.places
        return [
            RankSpec(
                rank=place.rank,
                world_size=ground.world_size,
                platform=ground.device.platform,
                ordinal=place.ordinal,
                host=place.host,
                several_nodes=len({place.node_id for place in places}) > 1,
                dtype=ground.dtype,
                pipeline=pipeline,
                store=store,
                # The driver is to notice a stall before a collective gives up and blames the peer that waited.
                timeout_s=2 * config.cluster.stall_timeout_s,
                backends=backends,
                config=config,
            )
            for place in places
        ]

    def close(self, error: BaseException | None = None) -> None:
        """Stop the ranks, return what they held, and leave the cluster if `start` joined or started it; repeatable.

        Args:
            error: Why, if not because the work is done. After a signal the wait for Ray is short.
        """
        stopped = isinstance(error, KeyboardInterrupt | TerminatedError)
        with signals_held(repeat=True):
            if self._owns_cluster:
                self.group.kill()
            else:
                self.group.close()
            if self._owns_cluster or self._connected:
                ray_api.disconnect(at_most_s=STOP_S if stopped else None)
                self._owns_cluster = self._connected = False
            if self._let_ray_print is not None:
                self._let_ray_print()
                self._let_ray_print = None
            self._starter.release()


def is_local(config: RunConfig) -> bool:
    """True if the run starts a cluster of its own, on this node."""
    return config.cluster.address == "local" and not ray_api.inside_job()


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
            reason = _whole_reason(error)
            rule = f"Ray could not be {'started' if is_local(config) else 'joined'} ({reason})"
            remedy = _start_remedy(reason) if is_local(config) else _join_remedy(reason, remedy)
            if ray_api.is_connected():  # a working directory that could not be uploaded
                ray_api.disconnect()
            raise PlacementError([Fault("cluster.address", address, rule, remedy)]) from error


def _whole_reason(error: Exception) -> str:
    """Type and text of what Ray raised, as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)}" if lines else type(error).__name__


def _join_remedy(reason: str, remedy: str) -> str:
    """The way out for a cluster that is there; Ray uploads the working directory of a process under `uv run`."""
    if "working_dir" not in reason:
        return remedy
    return (
        f"run `{sys.executable} -m raylysses` without `uv run`, which makes Ray upload {Path.cwd()} to the "
        "cluster, or list its large files in a .rayignore there"
    )


def _start_remedy(reason: str) -> str:
    """The way out for a cluster of the run's own; cluster.address=local is in use already."""
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    if "AF_UNIX" in reason:
        return f"set RAY_TMPDIR (or TMPDIR) to a short path, such as /tmp: Ray's sockets under {folder} are too long"
    return f"look at Ray's logs under {folder}/ray, or start one with `ray start --head` and give its HOST:PORT"
