"""`raylysses bench attention`: the driver of an experiment, from the grid to the run folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from backends.registry import Registry
from configs.compose import to_mapping
from configs.faults import FaultError
from configs.schema import AttentionConfig, ParallelConfig, RunConfig
from parallel.events import Phase, Step
from runtime.bench.choice import NOTHING, refuse_if_nothing_is_served, settle_choice
from runtime.bench.grid import Shape, cases_of, common_heads, own_settings, parse_backends
from runtime.bench.record import Facts, record
from runtime.bench.results import Checked, Refused, Results, RoundDone, wrong
from runtime.bench.spec import BenchSpec
from runtime.bench.table import lines_of
from runtime.errors import RankPlace, StorageError, TerminatedError, WrongResultError
from runtime.live import LiveRanks
from runtime.preflight import Ground, refuse_shadows, survey_ranks
from runtime.progress import Progress, make_progress
from runtime.run_folder import RunFolder
from runtime.settled import asked_lines, file_mapping, settle_ranks
from runtime.signals import signals_held, terminated_by_signal
from runtime.step_meter import DONE, duration
from runtime.storage import Storage
from runtime.summary import Status, failure_of

WORKER = "runtime.bench.worker.BenchRank"


@dataclass(frozen=True)
class Experiment:
    """shapes x plans x backends (None: as the configuration says). rounds: timed calls of each. causal: of all."""

    shapes: tuple[Shape, ...]
    plans: dict[str, ParallelConfig]
    backends: str | None
    rounds: int
    causal: bool


def command_of(asked: Experiment) -> list[str]:
    """The command that repeats an experiment, as words, without its configuration."""
    options = {
        "--shapes": ",".join(map(str, asked.shapes)),
        "--plans": ",".join(asked.plans),
        "--backends": asked.backends,
        "--rounds": str(asked.rounds),
    }
    words = [word for name, value in options.items() if value is not None for word in (name, value)]
    causal = ["--causal"] if asked.causal else []
    return ["raylysses", "bench", "attention", *words, *causal]


class _Recorder:
    """Shows what the ranks report, and keeps it in the run folder, which is made when they have their places."""

    def __init__(
        self,
        config: RunConfig,
        asked: Experiment,
        path: Path | None,
        progress: Progress,
        registry: Registry,
        command: Sequence[str],
    ) -> None:
        self._config, self._asked, self._path, self._progress = config, asked, path, progress
        self._registry, self._command = registry, command
        self._settled = config
        self.storage = Storage(self._write_config, progress.message)
        self.results: Results | None = None
        self.facts: Facts | None = None
        self._finished: dict[int, int] = {}
        self._began = time.monotonic()

    def on_survey(self, ground: Ground) -> None:
        self._settled = settle_ranks(self._config, ground.device.platform, ground.world_size, ground.dtype)

    def on_placed(self, places: Sequence[RankPlace]) -> None:
        self._progress.expect(len(places))
        self.storage.create(self._path, datetime.now())

    def _write_config(self, folder: RunFolder) -> None:
        """config.yaml as it stands: without `--backends`, the choice is settled once every cell has the same backend.

        The names in `--backends` and `--plans` are the question that a bench asks; they stay in the command.
        """
        rows = () if self.results is None or self._asked.backends is not None else self.results.rows()
        config = replace(self._settled, attention=settle_choice(self._settled.attention, rows, self._registry))
        written = own_settings(file_mapping(config))
        folder.write_config(
            written,
            command_of(self._asked),
            self._registry.registrations(),
            self._command,
            asked_lines(own_settings(to_mapping(self._config)), written),
        )

    def begin(self, results: Results, ground: Ground, places: Sequence[RankPlace]) -> None:
        config, asked = self._config, self._asked
        self.results = results
        self.facts = Facts(ground.device, ground.dtype, tuple(places), asked.rounds, asked.causal, config.run.seed)
        self._began = time.monotonic()
        self.write("running")

    def on_event(self, rank: int, event: Any) -> None:
        if isinstance(event, Refused | Checked | RoundDone) and self.results is not None:
            self.results.add(event)
        elif isinstance(event, Phase | Step):
            self._progress.on_event(rank, event)
            self.storage.store(lambda folder: folder.append(rank, event))
            if isinstance(event, Phase) and event.name == DONE and event.request is not None:
                self._on_shape_done(event.request)

    def _on_shape_done(self, index: int) -> None:
        """When the last rank is done with a shape: what is known of it, and how long the others may take."""
        self._finished[index] = self._finished.get(index, 0) + 1
        if self.facts is None or self._finished[index] < len(self.facts.places):
            return
        self.write("running")
        shapes, spent = self._asked.shapes, time.monotonic() - self._began
        left = len(shapes) - index - 1
        ahead = f", about {duration(spent / (index + 1) * left)} to go at this rate" if left else ""
        self._progress.message(f"{shapes[index]}: done after {duration(spent)}{ahead}")

    def write(self, status: Status, error: BaseException | None = None) -> None:
        """Write config.yaml and bench.json as they stand; nothing before the ranks have their places."""
        if self.results is None or self.facts is None:
            return
        self.storage.store(self._write_config)
        failure = None if error is None else failure_of(error)
        content = record(status, self.facts, self.results.rows(), failure)
        self.storage.store(lambda folder: folder.write_bench(content))

    def show(self) -> None:
        """The table, once there is something in it."""
        rows = () if self.results is None else self.results.rows()
        if any(row.outcome != "pending" for row in rows):
            sys.stdout.write("".join(f"{line}\n" for line in lines_of(rows)))


def bench_attention(config: RunConfig, asked: Experiment, *, worker: str = WORKER, command: Sequence[str] = ()) -> Path:
    """Run the grid.

    Args:
        config: The run.
        asked: The grid.
        worker: Dotted path of the class that does a rank's work.
        command: The command line that asked for it, as words, for config.yaml.

    Returns:
        The run folder, which has bench.json and bench.png.

    Raises:
        FaultError: Before any rank starts, for what cannot be served.
        PlacementError: Before any rank starts, for resources that are not available.
        WrongResultError: After the whole grid, if a result was wrong.
        StorageError: The run folder could not be written to; what was measured since then is in a temporary folder.
        RankError: A rank failed.
        StallError: Ranks hang.
    """
    registry = Registry(config.attention.register)
    backends = parse_backends(asked.backends, config.attention, registry)
    refuse_shadows()
    path = Path(config.run.dir).absolute() if config.run.dir is not None else None
    RunFolder.refuse(path)
    exchange = config.parallel.exchange_dtype
    asked = replace(asked, plans={name: replace(plan, exchange_dtype=exchange) for name, plan in asked.plans.items()})
    with terminated_by_signal(), make_progress(1, requests=len(asked.shapes), noun="shape", unit="round") as progress:
        recorder = _Recorder(config, asked, path, progress, registry, command)
        live = LiveRanks(config, progress.message)
        try:
            survey = partial(_survey, config, asked, backends, registry, recorder.on_survey)
            ground = live.start(survey, worker, recorder.on_placed)
            cases = cases_of(asked.shapes, asked.plans, backends, ground.world_size)
            results = Results(cases, asked.shapes, ground.world_size)
            recorder.begin(results, ground, live.group.places)
            spec = BenchSpec(cases, asked.shapes, asked.rounds, asked.causal)
            each = [(rank, spec) for rank in live.specs(ground, config, registry.paths())]
            live.group.drive("bench", each, recorder.on_event)
        except BaseException as error:
            live.close(error)
            with signals_held():
                stopped = isinstance(error, KeyboardInterrupt | TerminatedError)
                try:
                    recorder.write("interrupted" if stopped else "failed", error)
                except StorageError as second:  # the first error is the one to report
                    progress.message(str(second))
                recorder.show()
                if recorder.storage.folder is not None:
                    progress.message(f"what the bench recorded until then is in {recorder.storage.folder.path}")
            raise
        finally:
            live.close()
            recorder.storage.close()
    return _concluded(recorder, results)


def _survey(
    config: RunConfig,
    asked: Experiment,
    backends: dict[str, AttentionConfig],
    registry: Registry,
    on_survey: Callable[[Ground], None],
) -> Ground:
    """What the cluster gives, if anything of the grid is served there. Raises PlacementError, and FaultError."""
    ground = survey_ranks(config, common_heads(asked.shapes), registry)
    cases = cases_of(asked.shapes, asked.plans, backends, ground.world_size)
    refuse_if_nothing_is_served(cases, asked.causal, ground.dtype, ground.world_size, ground.device, registry)
    on_survey(ground)
    return ground


def _concluded(recorder: _Recorder, results: Results) -> Path:
    """Writes what there is to see, and raises for what is wrong."""
    from runtime.bench.plot import plot

    facts = recorder.facts
    if facts is None:
        raise RuntimeError("a bench that has run had no places")
    rows = results.rows()
    bad = wrong(rows)
    error = WrongResultError(tuple(f"{row.case}: {row.why}" for row in bad)) if bad else None
    recorder.show()
    recorder.write("failed" if bad else "done", error)
    recorder.storage.store(lambda folder: plot(rows, facts, folder.path / "bench.png"))
    if error is not None:
        raise error
    if not any(row.outcome == "timed" and not row.case.is_baseline for row in rows):
        raise FaultError([replace(NOTHING, rule=f"{NOTHING.rule}; the table says why")])
    recorder.storage.raise_if_replaced()
    if recorder.storage.folder is None:
        raise RuntimeError("a bench that has run had no places")
    return recorder.storage.folder.path
