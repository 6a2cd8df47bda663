"""`raylysses generate`: one request on a group of its own, and a run folder of what came of it."""

from __future__ import annotations

import platform
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from backends.platforms.facts import LocalNode
from configs.compose import to_mapping
from configs.faults import Fault, FaultError
from configs.schema import RunConfig
from parallel.events import Artefact, PromptCut, RequestRan, Step
from runtime import ray_api
from runtime.check import raise_if_any, read_image
from runtime.errors import PlacementError, RankError, RankPlace, StallError, StorageError, TerminatedError
from runtime.progress import Progress, make_progress, print_selection
from runtime.requests import Generation, Request, caption_of, request_of
from runtime.run_folder import RunFolder
from runtime.session import Observer, Session
from runtime.settled import asked_lines, file_mapping
from runtime.signals import signals_held, terminated_by_signal
from runtime.storage import Storage
from runtime.summary import Driver, RequestRecord, Status, failure_of, summary, versions
from runtime.video import encoder_fault

OF_IMAGES = ("generate.image", "generate.image_fit")


class _Recorder(Observer):
    """Shows what the ranks report, and keeps it in the run folder, which is made when they have their places."""

    def __init__(
        self,
        config: RunConfig,
        path: Path | None,
        progress: Progress,
        request: Request,
        node: LocalNode | None = None,
        command: Sequence[str] = (),
    ) -> None:
        self.storage = Storage(self._write_config, progress.message)
        self.session = Session(config, observer=self, node=node)
        self._config = config
        self._command = command
        self._path = path
        self._progress = progress
        self._request = request
        self._began, self._started = datetime.now().astimezone(), time.monotonic()
        self._ran: dict[int, RequestRan] = {}
        self._steps: dict[int, list[Step]] = defaultdict(list)
        self._cuts: list[PromptCut] = []

    def on_message(self, text: str) -> None:
        self._progress.message(text)

    def on_placed(self, places: Sequence[RankPlace]) -> None:
        self._progress.expect(len(places))
        self.storage.create(self._path, self._began)
        self.write_reports("running")

    def on_event(self, rank: int, event: Any) -> None:
        self.storage.store(lambda folder: folder.append(rank, event))
        if isinstance(event, Artefact) and event.name == "latents":  # at once: decoding may fail
            self.storage.store(lambda folder: folder.write_latents(event.array))
        self._progress.on_event(rank, event)
        if isinstance(event, RequestRan):
            self._ran[rank] = event
        elif isinstance(event, Step):
            self._steps[rank].append(event)
        elif isinstance(event, PromptCut):
            self._cuts.append(event)

    def write_outputs(self, generations: Sequence[Generation]) -> None:
        """The sheets and videos of finished requests; frames that cannot be encoded are kept as an array."""
        for index, generation in enumerate(generations):
            if generation.first_frame is not None:
                self._write_first_frame(index, generation.first_frame)
            if generation.frames is not None:
                self._write_frames(index, generation.frames, generation.request)

    def _write_first_frame(self, index: int, content: bytes) -> None:
        self.storage.store(lambda folder: folder.write_first_frame(content, index))

    def _write_frames(self, index: int, frames: Any, request: Request) -> None:
        caption, outputs = caption_of(request, self._config.model.path), self._config.run.outputs
        self._progress.begin("video" if "video" in outputs else "sheet")
        try:
            self.storage.store(lambda folder: folder.write_frames(frames, request.fps, outputs, index, caption))
        except StorageError:
            raise
        except FaultError:
            self.storage.store(lambda folder: folder.write_raw_frames(frames, index))
            self._progress.message("no video could be encoded; the frames are in frames.npy")
            raise

    def _write_config(self, folder: RunFolder) -> None:
        written = file_mapping(self.session.settled)
        asked, registered = asked_lines(to_mapping(self._config), written), self.session.registrations
        folder.write_config(written, registered=registered, started=self._command, asked=asked)

    def write_reports(self, status: Status, error: BaseException | None = None) -> None:
        """Write config.yaml, summary.json and selection.json as they stand; nothing before there is a folder."""
        if self.storage.folder is None:
            return
        steps = {rank: tuple(events) for rank, events in self._steps.items()}
        asked, session = self._request, self.session
        content = summary(
            status=status,
            driver=Driver(self._began, sys.argv, platform.node()),
            world_size=session.world_size,
            device=session.device.label if session.device is not None else "",
            device_notice=session.device_notice,
            ranks=session.places,
            gpu_names=session.gpu_names,
            selection=session.report,
            start_s=session.start_s,
            requests=[RequestRecord(0, asked.prompt, asked.seed, asked.steps, self._ran, steps, self._cuts)],
            elapsed_s=self.elapsed_s,
            versions=versions(),
            error=None if error is None else failure_of(error),
        )
        self.storage.store(self._write_config)
        self.storage.store(lambda folder: folder.write_summary(content))
        self.storage.store(lambda folder: folder.write_selection(session.report))
        self.storage.store(lambda folder: folder.write_ray_log(session.ray_messages))
        if isinstance(error, StallError):
            for rank, stack in error.stacks.items():
                self.storage.store(lambda folder, rank=rank, stack=stack: folder.write_traceback(rank, stack))  # type: ignore[misc]
                error.add_note(
                    f"the stack of rank {rank} is in {self.storage.folder.path}/ranks/rank{rank}.traceback.txt"
                )
        if isinstance(error, RankError):
            for trouble in (error.trouble, *error.consequences):
                if trouble.traceback:
                    rank, text = trouble.place.rank, trouble.traceback
                    self.storage.store(lambda folder, rank=rank, text=text: folder.write_traceback(rank, text))  # type: ignore[misc]
            if error.trouble.traceback:
                name = f"rank{error.trouble.place.rank}.traceback.txt"
                what = "traceback" if error.trouble.kind == "raised" else "full report"
                error.add_note(f"its {what} is in {self.storage.folder.path / 'ranks' / name}")

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started


def generate(config: RunConfig, command: Sequence[str] = ()) -> Path:
    """Make one video and its run folder. Raises what `Session` raises.

    Args:
        config: The run.
        command: The command line that asked for it, as words, for config.yaml.

    Returns:
        The run folder.
    """
    with terminated_by_signal(), make_progress(1) as progress:
        path = Path(config.run.dir).absolute() if config.run.dir is not None else None
        node = LocalNode()
        request = _checked_request(config, path, node)
        if config.run.dir is None and ray_api.inside_job():
            progress.message(
                "run.dir is not set: the run goes into the job's working directory, which Ray deletes some day"
            )
        recorder = _Recorder(config, path, progress, request, node, command)
        session = recorder.session
        try:
            try:
                with session:
                    session.generate([request])
            finally:
                recorder.write_outputs(session.finished)
            recorder.write_reports("done")
            recorder.storage.raise_if_replaced()
        except BaseException as error:
            with signals_held():
                stopped = isinstance(error, KeyboardInterrupt | TerminatedError)
                try:
                    recorder.write_reports("interrupted" if stopped else "failed", error)
                except StorageError as second:  # the first error is the one to report
                    progress.message(str(second))
            if recorder.storage.folder is not None:
                progress.message(f"what the run recorded until then is in {recorder.storage.folder.path}")
            raise
        finally:
            recorder.storage.close()
        progress.message(f"done in {recorder.elapsed_s:.0f} s")
    print_selection(session.report, sys.stdout)
    if recorder.storage.folder is None:
        raise RuntimeError("a session that has generated had no places")
    return recorder.storage.folder.path


def _checked_request(config: RunConfig, path: Path | None, node: LocalNode) -> Request:
    """The request, if nothing that can be known before anything starts speaks against it.

    Raises:
        FaultError: every fault at once, those of run.dir and of lacking resources included.
        PlacementError: if nothing but resources is lacking.
    """
    image, faults = read_image(config.generate.image)
    unread = bool(faults)
    if "video" in config.run.outputs:
        fault = encoder_fault()
        faults += [] if fault is None else [fault]
    lacking: list[Fault] = []
    request = request_of(config, image)
    try:
        Session(config, node=node).check([request])
    except PlacementError as error:
        lacking += error.faults
    except FaultError as error:
        # A file that cannot be read leaves the request without an image, which would be reported as missing.
        faults += [fault for fault in error.faults if not (unread and fault.key in OF_IMAGES)]
    try:
        RunFolder.refuse(path)
    except FaultError as error:
        faults += error.faults
    raise_if_any(faults, lacking)
    return request
