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
from runtime.summary import RequestRecord, Status, failure_of, summary, versions
from runtime.video import encoder_fault


class _Recorder(Observer):
    """Keeps what the ranks report, in the run folder, and shows it."""

    def __init__(self, folder: RunFolder, progress: Progress, request: Request) -> None:
        self._folder = folder
        self._progress = progress
        self._request = request
        self._started = time.monotonic()
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

    def write_summary(self, session: Session, status: Status, error: BaseException | None = None) -> None:
        steps = {rank: tuple(events) for rank, events in self._steps.items()}
        asked = self._request
        self._folder.write_summary(
            summary(
                status=status,
                world_size=session.world_size,
                device=session.device.label if session.device is not None else "",
                ranks=session.places,
                requests=[RequestRecord(0, asked.prompt, asked.seed, asked.steps, self._ran, steps)],
                elapsed_s=time.monotonic() - self._started,
                versions=versions(),
                error=None if error is None else failure_of(error),
            )
        )


def generate(config: RunConfig) -> Path:
    """Make one video and its run folder; returns the folder. Raises what `Session` raises."""
    image, faults = read_image(config)
    if "video" in config.run.outputs:
        fault = encoder_fault()
        faults += [] if fault is None else [fault]
    raise_if_any(faults)
    request = request_of(config, image)
    Session(config).check([request])
    path = Path(config.run.dir) if config.run.dir is not None else RunFolder.default_path(datetime.now())
    with RunFolder.create(path.absolute()) as folder, make_progress(1) as progress:
        folder.write_config(to_mapping(config))
        recorder = _Recorder(folder, progress, request)
        session = Session(config, observer=recorder)
        try:
            with session:
                recorder.write_summary(session, "running")
                (generation,) = session.generate([request])
            _write_outputs(generation, config, folder)
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt | TerminatedError)
            recorder.write_summary(session, "interrupted" if stopped else "failed", error)
            _write_traceback(folder, error)
            raise
        finally:
            folder.write_selection(session.report)
        recorder.write_summary(session, "done")
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
