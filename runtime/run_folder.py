"""The folder that a run leaves behind. This is its only writer, and it runs in the driver only.

What is read as a whole (JSON, YAML, images, video) appears when it is complete; the ranks' events are appended line by
line and are there when the process is killed right after.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from configs.faults import Fault, FaultError
from parallel.events import Artefact, AttentionRan, Event, Phase, PromptCut, RequestRan, Step
from runtime.report import SelectionReport, selection_fields
from runtime.video import encode_video, write_contact_sheet

RUNS = Path("runs")
ANOTHER = "name another folder with run.dir, or leave it out for runs/<time>"
UNICODE_LINE_ENDS = "\x85\u2028\u2029"


class _TakenError(FaultError):
    """Another run has the folder."""


class RunFolder:
    """Writes one run folder that exists; `create` makes a new one. Leaving its context closes the ranks' files.

    Requests count from 0; request 0 has the plain names (`video.mp4`), request n the numbered ones (`video-n.mp4`).
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._ranks: dict[int, TextIO] = {}

    @classmethod
    def create(cls, path: Path | None, now: datetime) -> RunFolder:
        """Makes the folder; without a path `runs/<YYYYmmdd-HHMMSS>` under the working directory, with -2, -3, ... if
        that is taken. Raises FaultError (run.dir) if the path holds something already, or cannot be made.
        """
        if path is not None:
            return cls(_made(path))
        first = RUNS.absolute() / f"{now:%Y%m%d-%H%M%S}"
        others = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
        candidates = itertools.chain((first,), others)
        while True:
            with contextlib.suppress(_TakenError):  # by a run that began in the same second
                return cls(_made(next(candidates)))

    @staticmethod
    def refuse(path: Path | None) -> None:
        """Raises FaultError (run.dir) if the path holds something already, or its folder cannot be written to. Makes
        nothing.
        """
        wanted = path if path is not None else RUNS
        try:
            if wanted.exists() and not wanted.is_dir():
                raise _refused(wanted, "is a file, not a folder")
            if path is not None and path.is_dir() and any(path.iterdir()):
                raise _TakenError([_fault(path, "exists and is not empty, and a run never writes over another")])
            there = next(
                folder for folder in (wanted.absolute(), *wanted.absolute().parents) if os.path.lexists(folder)
            )
        except (OSError, ValueError) as error:
            raise _refused(wanted, f"cannot be made ({getattr(error, 'strerror', None) or error})") from error
        if not there.is_dir():
            raise _refused(wanted, f"cannot be made ({there} is no folder)")
        if not os.access(there, os.W_OK | os.X_OK):
            raise _refused(wanted, f"cannot be made ({there} cannot be written to)")

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the ranks' files; a later `append` opens its file again."""
        while self._ranks:
            self._ranks.popitem()[1].close()

    def write_config(
        self,
        mapping: Mapping[str, Any],
        command: Sequence[str] = ("raylysses", "generate"),
        registered: Mapping[str, str] | None = None,
        started: Sequence[str] = (),
        asked: Sequence[str] = (),
    ) -> Path:
        """Write config.yaml, which `--config` takes, below comments that say how to repeat the run.

        Args:
            mapping: The content, as a file for `configs.compose.compose`.
            command: The command that repeats the run, without `--config`.
            registered: Class paths of registered backends, by name. A file may not name code to import, so that they
                are arguments of the command.
            started: The command that started the run; empty for a run that Python code started.
            asked: Lines on the settings that differ from what was asked for.

        Returns:
            The path of the file.
        """
        import yaml  # type: ignore[import-untyped]  # OmegaConf cannot escape line ends

        plain = _plain(mapping)
        # Text stays readable in any script, but for line ends that YAML would fold into a space.
        readable = not any(end in text for text in _texts(plain) for end in UNICODE_LINE_ENDS)
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=readable, width=1_000_000)
        path, here = self.path.absolute() / "config.yaml", Path.cwd()
        file = path.relative_to(here) if path.is_relative_to(here) else path
        registrations = [f"attention.register.{name}={class_path}" for name, class_path in (registered or {}).items()]
        header = ["To repeat this run:", f"  {shell_command([*command, '--config', str(file), *registrations])}"]
        if started:
            header += ["It was started with:", f"  {shell_command(started)}"]
        if asked:
            header += ["Settings as they were asked for, which this file replaces by what was used, or leaves out:"]
            header += [f"  {line}" for line in asked]
        return self._write_text("config.yaml", "".join(f"# {line}\n" for line in header) + text)

    def append(self, rank: int, event: Event) -> None:
        """One line in ranks/rank{rank}.jsonl, handed to the operating system before this returns."""
        if rank not in self._ranks:
            folder = self.path / "ranks"
            folder.mkdir(exist_ok=True)
            self._ranks[rank] = (folder / f"rank{rank}.jsonl").open("a", encoding="utf-8")
        line = {"event": _snake_case(type(event).__name__), "time": self._clock(), **event_fields(event)}
        file = self._ranks[rank]
        file.write(json.dumps(line, ensure_ascii=False) + "\n")
        file.flush()

    def write_ray_log(self, messages: Iterable[str]) -> None:
        """ray.log: what Ray said of the cluster during the run; no file if it said nothing."""
        text = "".join(f"{message.rstrip()}\n" for message in messages)
        if text:
            self._write_text("ray.log", text)

    def write_traceback(self, rank: int, text: str) -> Path:
        """ranks/rank{rank}.traceback.txt: the traceback of a rank, or Ray's whole report on its dead process."""
        (self.path / "ranks").mkdir(exist_ok=True)
        return self._write_text(f"ranks/rank{rank}.traceback.txt", text.rstrip("\n") + "\n")

    def write_selection(self, report: SelectionReport) -> Path:
        """selection.json, as docs/selection.schema.json has it."""
        return self._write_json("selection.json", report.to_dict())

    def write_bench(self, mapping: Mapping[str, Any]) -> Path:
        """bench.json, as docs/bench.schema.json has it (see `runtime.bench.record.record`)."""
        return self._write_json("bench.json", mapping)

    def write_summary(self, mapping: Mapping[str, Any]) -> Path:
        """summary.json, as docs/summary.schema.json has it (see `runtime.summary.summary`)."""
        return self._write_json("summary.json", mapping)

    def write_frames(
        self, frames: Any, fps: float, outputs: Collection[str], request: int = 0, caption: Sequence[str] = ()
    ) -> tuple[Path, ...]:
        """Write the contact sheet and the video of a request.

        The sheet is written first: it is kept even if the video cannot be encoded.

        Args:
            frames: uint8 [F, H, W, 3].
            fps: Frames per second.
            outputs: `frames` for the contact sheet, `video` for the video.
            request: The request's number, from 0.
            caption: Paragraphs above the frames of the sheet.

        Returns:
            The paths that were written.

        Raises:
            FaultError: The video could not be encoded.
        """
        written = []
        if "frames" in outputs:
            written.append(self._named("frames", ".png", request))
            write_contact_sheet(frames, fps, written[-1], caption)
        if "video" in outputs:
            video = self._named("video", ".mp4", request)
            encode_video(frames, fps, video)
            written.append(video)
        return tuple(written)

    def write_first_frame(self, content: bytes, request: int = 0) -> Path:
        """first_frame.png: the picture that the model started from, given as the bytes of that file."""
        path = self._named("first_frame", ".png", request)
        part = path.with_name(f".{path.name}.part")
        part.write_bytes(content)
        os.replace(part, path)
        return path

    def write_latents(self, array: Any, request: int = 0) -> Path:
        """latents.safetensors with one tensor, `latents`, in the array's dtype (numpy has no bfloat16; use float32)."""
        import numpy as np
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        path = self._named("latents", ".safetensors", request)
        part = path.with_name(f".{path.name}.part")
        try:
            save_file({"latents": np.ascontiguousarray(array)}, part)
        except SafetensorError as error:  # what it makes of a full disk
            raise OSError(str(error)) from error
        os.replace(part, path)
        return path

    def write_raw_frames(self, frames: Any, request: int = 0) -> Path:
        """frames.npy: uint8 [F, H, W, 3], for frames that no encoder could make a video of."""
        import numpy as np

        path = self._named("frames", ".npy", request)
        part = path.with_name(f".{path.name}.part")
        with part.open("wb") as file:
            np.save(file, frames)
        os.replace(part, path)
        return path

    def _named(self, stem: str, suffix: str, request: int) -> Path:
        return self.path / (f"{stem}-{request}{suffix}" if request else f"{stem}{suffix}")

    def _write_json(self, name: str, content: Mapping[str, Any]) -> Path:
        return self._write_text(name, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def _write_text(self, name: str, text: str) -> Path:
        """Written beside, then renamed: a reader sees the old file or the new one, never half of one."""
        path = self.path / name
        part = path.with_name(f".{path.name}.part")
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        return path


def shell_command(words: Iterable[str]) -> str:
    """Quote words as one line that bash and zsh read back; a word's line ends and control characters are escaped."""
    return " ".join(shlex.quote(word) if word.isprintable() else _escaped(word) for word in words)


def _escaped(word: str) -> str:
    def escape(character: str) -> str:
        if character.isprintable() and character not in "\\'":
            return character
        return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))

    return f"$'{''.join(map(escape, word))}'"


def event_fields(event: Event) -> dict[str, Any]:
    """An event as plain values for JSON; a selection's fields stand beside its layer's, an array is only described."""
    match event:
        case AttentionRan():
            return {
                "model": event.model,
                "layer": event.layer,
                **selection_fields(event.selection),
                "strategy": event.strategy,
                "kernel": event.kernel,
                # Under a name of their own: `key` is the configuration key of the selection.
                "shapes": {
                    "query_rows": list(event.query_rows),
                    "query": list(event.query),
                    "key": list(event.key),
                },
            }
        case Phase():
            return {"name": event.name, "request": event.request}
        case Step():
            return {"request": event.request, "step": event.step, "steps": event.steps, "seconds": event.seconds}
        case PromptCut():
            return asdict(event)
        case RequestRan():
            return {
                "request": event.request,
                "planned": event.planned.to_dict(),
                "measured": event.measured.to_dict(),
                "forwards": dict(event.forwards),
                "seconds": dict(event.seconds),
                "rows": dict(event.rows),
                "peak_memory_bytes": event.peak_memory_bytes,
            }
        case Artefact():
            array = event.array
            shape = [int(size) for size in array.shape]
            return {"request": event.request, "name": event.name, "shape": shape, "dtype": str(array.dtype)}


def _made(path: Path) -> Path:
    RunFolder.refuse(path)
    try:
        # Of two runs that found the folder free at once, one makes this, and it is the folder's owner.
        (path / "ranks").mkdir(parents=True)
    except (OSError, ValueError) as error:
        if isinstance(error, FileExistsError) and path.is_dir():
            raise _TakenError([_fault(path, "was taken by another run just now")]) from error
        raise _refused(path, f"cannot be made ({getattr(error, 'strerror', None) or error})") from error
    return path


def _refused(path: Path, rule: str) -> FaultError:
    return FaultError([_fault(path, rule)])


def _fault(path: Path, rule: str) -> Fault:
    return Fault("run.dir", str(path), rule, ANOTHER)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _plain(value: Any) -> Any:
    """Mappings as dicts and sequences as lists, the only ones that YAML's safe dialect has."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
