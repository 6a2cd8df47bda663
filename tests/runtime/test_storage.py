"""A run folder that cannot be written to any more costs no results."""

from __future__ import annotations

import errno
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from backends.platforms.facts import LocalNode
from configs.compose import compose
from configs.faults import Fault, FaultError
from parallel.events import Artefact, Event, Phase
from runtime.bench.attention import Experiment, bench_attention
from runtime.bench.grid import parse_plans, parse_shapes
from runtime.bench.plot import plot
from runtime.bench.record import Facts
from runtime.bench.results import Row
from runtime.errors import StorageError
from runtime.generate import _Recorder
from runtime.progress import PlainProgress
from runtime.requests import Generation, request_of
from runtime.run_folder import RunFolder

LATENTS = np.ones((1, 2), np.float32)
FRAMES = np.zeros((1, 16, 16, 3), np.uint8)
Spoil = Callable[[RunFolder, pytest.MonkeyPatch], None]


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Recorder:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config, faults = compose(["generate.prompt=x", "parallel.world_size=1", "run.device=cpu"], environ={})
    assert config is not None, faults
    made = _Recorder(config, None, PlainProgress(1, io.StringIO()), request_of(config), LocalNode())
    made.storage.folder = RunFolder.create(tmp_path / "run", datetime.now())
    return made


def _remove(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(folder.path)


def _fill(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("append", "write_latents", "write_frames"):
        written = getattr(RunFolder, name)

        def write(self: RunFolder, *arguments: Any, written: Any = written) -> Any:
            if self.path == folder.path:
                raise OSError(errno.ENOSPC, "No space left on device")
            return written(self, *arguments)

        monkeypatch.setattr(RunFolder, name, write)


@pytest.mark.parametrize("spoil", [_remove, _fill])
def test_a_folder_that_is_full_or_gone_is_replaced(
    spoil: Spoil, recorder: _Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = recorder.storage.folder
    assert first is not None
    spoil(first, monkeypatch)

    recorder.on_event(0, Phase("load"))
    recorder.on_event(0, Artefact(0, "latents", LATENTS))
    recorder.write_outputs([Generation(recorder._request, FRAMES)])
    recorder.write_reports("failed")

    assert recorder.storage.folder is not None
    assert recorder.storage.folder.path != first.path
    fault = recorder.storage.fault
    assert fault is not None
    assert fault.key == "run.dir"
    assert str(recorder.storage.folder.path) in fault.rule
    assert StorageError([fault]).exit_code == 3
    np.testing.assert_array_equal(load_file(recorder.storage.folder.path / "latents.safetensors")["latents"], LATENTS)
    assert (recorder.storage.folder.path / "frames.png").is_file()
    assert json.loads((recorder.storage.folder.path / "summary.json").read_text())["status"] == "failed"
    recorder.storage.folder.close()


def test_frames_that_cannot_be_encoded_are_kept(recorder: _Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(frames: Any, fps: float, path: Path) -> None:
        raise FaultError([Fault("run.outputs", "video", "the encoder fails", "use another")])

    monkeypatch.setattr("runtime.run_folder.encode_video", fail)

    with pytest.raises(FaultError, match="the encoder fails"):
        recorder.write_outputs([Generation(recorder._request, FRAMES)])

    assert recorder.storage.folder is not None
    np.testing.assert_array_equal(np.load(recorder.storage.folder.path / "frames.npy"), FRAMES)


def _bench_folder_vanishes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = RunFolder.append
    vanished: list[Path] = []

    def append_later(self: RunFolder, rank: int, event: Event) -> None:
        if not vanished:
            vanished.append(self.path)
            shutil.rmtree(path)
        append(self, rank, event)

    monkeypatch.setattr(RunFolder, "append", append_later)


def _bench_disk_is_full(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(rows: Sequence[Row], facts: Facts, file: Path) -> None:
        if file.is_relative_to(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        plot(rows, facts, file)

    monkeypatch.setattr("runtime.bench.plot.plot", draw)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("spoil", [_bench_folder_vanishes, _bench_disk_is_full])
def test_a_bench_whose_folder_is_full_or_gone_keeps_its_figures_elsewhere(
    spoil: Callable[[Path, pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    path = tmp_path / "run"
    words = ["generate.prompt='-'", "parallel.world_size=1", "run.device=cpu", f"run.dir={path}"]
    config, faults = compose(words, environ={})
    assert config is not None, faults
    spoil(path, monkeypatch)

    with pytest.raises(StorageError, match="could not be written to during the run") as raised:
        bench_attention(config, Experiment(parse_shapes("1x6x6x16"), parse_plans("auto"), "REFERENCE", 1, False))

    assert raised.value.exit_code == 3
    (folder,) = elsewhere.glob("raylysses-run-*")
    assert str(folder) in str(raised.value)
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "config.yaml").is_file()
    kept = folder if spoil is _bench_folder_vanishes else path  # whatever was written before the disk was full
    content = json.loads((kept / "bench.json").read_text())
    assert content["status"] == "done"
    assert {row["outcome"] for row in content["rows"]} == {"timed"}
