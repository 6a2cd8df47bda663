from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from configs.compose import compose, to_mapping
from configs.faults import FaultError
from configs.overrides import quote
from parallel.events import Artefact, Phase, RequestRan, Step, Traffic
from runtime.report import merge
from runtime.run_folder import RunFolder
from tests.runtime.report_values import CROSS, MISSING, ROOT, SELF, check_schema, ran


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path, clock=lambda: 1000.5)


NOW = datetime(2026, 3, 4, 5, 6, 7)


def lines(folder: RunFolder, rank: int = 0) -> list[dict[str, Any]]:
    text = (folder.path / "ranks" / f"rank{rank}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_a_new_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    assert RunFolder.create(tmp_path / "a" / "b", NOW).path.is_dir()
    (tmp_path / "empty").mkdir()
    assert RunFolder.create(tmp_path / "empty", NOW).path.is_dir()


def test_of_two_runs_that_want_one_folder_one_gets_it(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", NOW)
    with pytest.raises(FaultError, match=r"run\.dir=.*is not empty"):
        RunFolder.create(tmp_path / "run", NOW)


def test_to_ask_whether_a_folder_is_taken_makes_nothing(tmp_path: Path) -> None:
    RunFolder.refuse(tmp_path / "new" / "run")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FaultError, match="cannot be made"):
        RunFolder.refuse(tmp_path / ("x" * 300))


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "video.mp4").touch()
    with pytest.raises(FaultError, match="exists and is not empty") as caught:
        RunFolder.create(tmp_path, NOW)
    fault = caught.value.faults[0]
    assert (fault.key, fault.value) == ("run.dir", str(tmp_path))
    assert "another folder" in fault.remedy


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_in_the_way_is_refused(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(FaultError, match=r"^run\.dir="):
        RunFolder.create(file / below, NOW)


def test_without_a_path_a_free_folder_is_named_for_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [RunFolder.create(None, NOW).path.relative_to(tmp_path).as_posix() for _ in range(3)]
    assert names == ["runs/20260304-050607", "runs/20260304-050607-2", "runs/20260304-050607-3"]


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    barrier, made = threading.Barrier(8), []

    def work() -> None:
        barrier.wait()
        made.append(RunFolder.create(None, NOW).path)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 8


def test_a_folder_that_nobody_may_write_to_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(FaultError, match=f"cannot be made .{tmp_path} cannot be written to."):
        RunFolder.refuse(tmp_path / "a" / "run")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FaultError, match=r"run\.dir=runs: cannot be made"):
        RunFolder.refuse(None)


def test_a_default_folder_is_not_looked_for_behind_a_link_that_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(tmp_path / "unmounted")
    with pytest.raises(FaultError, match="runs is no folder"):
        RunFolder.refuse(None)
    with pytest.raises(FaultError, match="cannot be made"):
        RunFolder.create(None, NOW)


def test_a_run_that_took_any_name_is_in_no_others_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RunFolder.create(Path("runs/new"), NOW)
    RunFolder.refuse(None)
    assert RunFolder.create(None, NOW).path.name == "20260304-050607"


@pytest.mark.parametrize(
    "prompt", ["a ${fox} \\\\${x}: off", "1e3", "ein Füchslein 狐 🦊, " * 20, "two\x85lines\u2028"]
)
def test_the_configuration_comes_back_as_it_was(folder: RunFolder, prompt: str) -> None:
    arguments = [
        f"generate.prompt={quote(prompt)}",
        "run.seed=5",
        "attention.per_role.a.b=TORCH_SDPA",
        "run.outputs=[]",
    ]
    config, faults = compose(arguments, environ={})
    assert config is not None, faults
    path = folder.write_config(MappingProxyType(to_mapping(config)))
    command = shlex.split(path.read_text(encoding="utf-8").split("\n")[1].removeprefix("#"))
    assert command == ["raylysses", "generate", "--config", str(path)]
    assert compose(file=path, environ={}) == (config, ())
    assert config.generate.prompt == prompt


@pytest.mark.parametrize("word", ["two\nlines", "it's\ta \\ tab\x1b[0m", "\x85\u2028 \udcff", "a 狐's ${den}"])
def test_the_command_that_started_a_run_stays_one_comment_that_the_shell_reads_back(
    folder: RunFolder, word: str
) -> None:
    path = folder.write_config({"run": {"seed": 5}}, started=["raylysses", word], asked=["run.dtype: auto"])
    lines = path.read_text(encoding="utf-8").splitlines()
    assert yaml.safe_load(path.read_text(encoding="utf-8")) == {"run": {"seed": 5}}
    assert lines[-3:] == ["#   run.dtype: auto", "run:", "  seed: 5"]
    printed = subprocess.run(["bash", "-c", f"printf %s {lines[3].split(maxsplit=2)[2]}"], capture_output=True)
    assert printed.stdout == word.encode("utf-8", "surrogateescape")


def test_text_in_any_script_stays_readable_in_the_configuration(folder: RunFolder) -> None:
    assert "prompt: 狐 🦊\n" in folder.write_config({"generate": {"prompt": "狐 🦊"}}).read_text(encoding="utf-8")


def test_a_traceback_lies_beside_the_ranks_events(folder: RunFolder) -> None:
    path = folder.write_traceback(2, "Traceback\n  here\n")
    assert path == folder.path / "ranks" / "rank2.traceback.txt"
    assert path.read_text(encoding="utf-8") == "Traceback\n  here\n"


def test_an_attention_event_keeps_why_and_the_shapes(folder: RunFolder) -> None:
    folder.append(0, ran(SELF))
    folder.append(0, ran(CROSS))
    first, second = lines(folder)
    assert (first["event"], first["time"], first["layer"]) == ("attention_ran", 1000.5, "blocks.0.self")
    assert first["shapes"] == {"query_rows": [1, 5, 4, 64], "query": [1, 10, 2, 64], "key": [1, 10, 2, 64]}
    assert first["rejected"] == [{"backend": "FLASH_ATTN", "faults": [MISSING.rule]}]
    assert first["requirements"]["head_size"] == 64
    assert second["key"] == "attention.per_role.cross"


def test_every_kind_of_event_is_a_line(folder: RunFolder) -> None:
    sent = Traffic({"scatter_heads": 1}, {"scatter_heads": 8})
    latents = np.zeros((1, 2, 3), np.float32)
    finished = RequestRan(0, sent, sent, MappingProxyType({"transformer": 2}), {"denoise": 0.5}, {"transformer": 5})
    with folder:
        for event in (Phase("load"), Step(0, 1, 8, 0.25), finished, Artefact(0, "latents", latents)):
            folder.append(3, event)
    common = {"time": 1000.5}
    traffic = {"scatter_heads": {"calls": 1, "bytes_sent": 8}}
    assert lines(folder, 3) == [
        {"event": "phase", **common, "name": "load", "request": None},
        {"event": "step", **common, "request": 0, "step": 1, "steps": 8, "seconds": 0.25},
        {
            "event": "request_ran",
            **common,
            "request": 0,
            "planned": traffic,
            "measured": traffic,
            "forwards": {"transformer": 2},
            "seconds": {"denoise": 0.5},
            "rows": {"transformer": 5},
            "peak_memory_bytes": 0,
        },
        {"event": "artefact", **common, "request": 0, "name": "latents", "shape": [1, 2, 3], "dtype": "float32"},
    ]


def test_a_line_survives_a_process_that_dies_right_after_it(tmp_path: Path) -> None:
    program = f"""
import os
from pathlib import Path
from parallel.events import Step
from runtime.run_folder import RunFolder
from datetime import datetime
folder = RunFolder.create(Path({str(tmp_path / "run")!r}), datetime.now())
folder.append(1, Step(0, 1, 2, 0.5))
folder.append(1, Step(0, 2, 2, 0.5))
os._exit(9)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (9, "")
    assert [line["step"] for line in lines(RunFolder(tmp_path / "run"), 1)] == [1, 2]


def test_no_heavy_library_is_imported_by_the_writers() -> None:
    program = "import sys, runtime.run_folder, runtime.progress, runtime.summary; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"torch", "ray", "diffusers", "numpy", "PIL", "imageio_ffmpeg", "safetensors", "rich"}
    assert not heavy & set(done.stdout.replace("'", "").strip("[]\n").split(", "))


def test_the_selection_and_the_summary_are_json_files(folder: RunFolder) -> None:
    selection = folder.write_selection(merge([(0, ran())], 1))
    check_schema("selection", json.loads(selection.read_text(encoding="utf-8")))
    assert '\n  "world_size": 1' in selection.read_text(encoding="utf-8")
    folder.write_summary({"prompt": "füchse"})
    folder.write_summary({"prompt": "füchse, again"})
    assert json.loads((folder.path / "summary.json").read_text(encoding="utf-8")) == {"prompt": "füchse, again"}
    assert sorted(path.name for path in folder.path.iterdir()) == ["selection.json", "summary.json"]


def test_a_summary_that_cannot_be_written_leaves_the_old_one(folder: RunFolder) -> None:
    folder.write_summary({"elapsed_s": 1})
    with pytest.raises(ValueError, match="JSON"):
        folder.write_summary({"elapsed_s": float("nan")})
    assert json.loads((folder.path / "summary.json").read_text(encoding="utf-8")) == {"elapsed_s": 1}


def test_latents_come_back(folder: RunFolder) -> None:
    latents = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1)
    assert folder.write_latents(latents).name == "latents.safetensors"
    path = folder.write_latents(latents, request=1)
    assert path.name == "latents-1.safetensors"
    loaded = load_file(path)
    assert list(loaded) == ["latents"]
    np.testing.assert_array_equal(loaded["latents"], latents)
    assert len(list(folder.path.iterdir())) == 2


def test_later_requests_have_numbered_names_and_only_what_was_asked_for(folder: RunFolder) -> None:
    frames = np.zeros((3, 16, 16, 3), np.uint8)
    assert [path.name for path in folder.write_frames(frames, 8, ("video", "frames"))] == ["frames.png", "video.mp4"]
    assert [path.name for path in folder.write_frames(frames, 8, ("video",), request=2)] == ["video-2.mp4"]
    assert [path.name for path in folder.write_frames(frames, 8, ("frames",), request=2)] == ["frames-2.png"]
    assert folder.write_frames(frames, 8, ("report",)) == ()
    assert len(list(folder.path.iterdir())) == 4
