"""A run folder that cannot be written to any more costs no results."""

from __future__ import annotations

import errno
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from backends.platforms.facts import LocalNode
from configs.compose import compose
from configs.faults import Fault, FaultError
from parallel.events import Artefact, Phase
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
    made.folder = RunFolder.create(tmp_path / "run", datetime.now())
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
    first = recorder.folder
    assert first is not None
    spoil(first, monkeypatch)

    recorder.on_event(0, Phase("load"))
    recorder.on_event(0, Artefact(0, "latents", LATENTS))
    recorder.write_outputs([Generation(recorder._request, FRAMES)])
    recorder.write_reports("failed")

    assert recorder.folder is not None
    assert recorder.folder.path != first.path
    fault = recorder.storage_fault
    assert fault is not None
    assert fault.key == "run.dir"
    assert str(recorder.folder.path) in fault.rule
    assert StorageError([fault]).exit_code == 3
    np.testing.assert_array_equal(load_file(recorder.folder.path / "latents.safetensors")["latents"], LATENTS)
    assert (recorder.folder.path / "frames.png").is_file()
    assert json.loads((recorder.folder.path / "summary.json").read_text())["status"] == "failed"
    recorder.folder.close()


def test_frames_that_cannot_be_encoded_are_kept(recorder: _Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(frames: Any, fps: float, path: Path) -> None:
        raise FaultError([Fault("run.outputs", "video", "the encoder fails", "use another")])

    monkeypatch.setattr("runtime.run_folder.encode_video", fail)

    with pytest.raises(FaultError, match="the encoder fails"):
        recorder.write_outputs([Generation(recorder._request, FRAMES)])

    assert recorder.folder is not None
    np.testing.assert_array_equal(np.load(recorder.folder.path / "frames.npy"), FRAMES)
