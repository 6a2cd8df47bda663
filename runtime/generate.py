"""`raylysses generate`: one request on a group of its own, and a run folder of what came of it."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from configs.compose import to_mapping
from configs.schema import RunConfig
from parallel.events import RequestRan, Step
from runtime.check import raise_if_any, read_image
from runtime.errors import RankError, RankPlace, TerminatedError
from runtime.progress import Progress, make_progress, print_selection
from runtime.requests import Generation, Request, request_of
from runtime.run_folder import RunFolder
from runtime.session import Observer, Session
from runtime.summary import Failure, RequestRecord, Status, failure_of, summary, versions


class _Recorder(Observer):
    """Keeps what the ranks report, in the run folder and for the summary, and shows it."""

    def __init__(self, folder: RunFolder, progress: Progress) -> None:
        self._folder = folder
        self._progress = progress
        self._ran: dict[int, RequestRan] = {}
        self._steps: dict[int, list[Step]] = defaultdict(list)

    def on_message(self, text: str) -> None:
        self._progress.message(text)

    def on_placed(self, places: Sequence[RankPlace]) -> None:
        self._progress.expect(len(places))

    def on_event(self, rank: int, event: Any) -> None:
        self._folder.append(rank, event)
        self._progress.on_event(rank, event)
        if isinstance(event, RequestRan):
            self._ran[rank] = event
        elif isinstance(event, Step):
            self._steps[rank].append(event)

    def record(self, request: Request) -> RequestRecord:
        steps = {rank: tuple(events) for rank, events in self._steps.items()}
        return RequestRecord(0, request.prompt, request.seed, request.steps, self._ran, steps)


def generate(config: RunConfig) -> Path:
    """Make one video and its run folder; returns the folder. Raises what `Session` raises."""
    started = time.monotonic()
    image, faults = read_image(config)
    raise_if_any(faults)
    request = request_of(config, image)
    Session(config).check([request])
    path = Path(config.run.dir) if config.run.dir is not None else RunFolder.default_path(datetime.now())
    with RunFolder.create(path.absolute()) as folder, make_progress(1) as progress:
        folder.write_config(to_mapping(config))
        recorder = _Recorder(folder, progress)
        session = Session(config, observer=recorder)
        status: Status = "failed"
        failure: Failure | None = None
        try:
            with session:
                (generation,) = session.generate([request])
            _write_outputs(generation, config, folder)
            status = "done"
        except BaseException as error:
            status = "interrupted" if isinstance(error, KeyboardInterrupt | TerminatedError) else "failed"
            failure = failure_of(error)
            _write_traceback(folder, error)
            raise
        finally:
            folder.write_selection(session.report)
            folder.write_summary(
                summary(
                    status=status,
                    world_size=session.world_size,
                    device=session.device.label if session.device is not None else "",
                    ranks=session.places,
                    requests=[recorder.record(request)],
                    elapsed_s=time.monotonic() - started,
                    versions=versions(),
                    error=failure,
                )
            )
    print_selection(session.report, sys.stdout)
    return folder.path


def _write_outputs(generation: Generation, config: RunConfig, folder: RunFolder) -> None:
    if generation.frames is not None:
        folder.write_frames(generation.frames, generation.request.fps, config.run.outputs)
    if generation.latents is not None:
        folder.write_latents(generation.latents)


def _write_traceback(folder: RunFolder, error: BaseException) -> None:
    if isinstance(error, RankError) and error.trouble.traceback:
        folder.write_traceback(error.trouble.place.rank, error.trouble.traceback)
