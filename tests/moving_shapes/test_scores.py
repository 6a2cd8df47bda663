"""Scores: intervals, confusion, comparison; and the script over real ranks."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from moving_shapes.judge import Verdict
from moving_shapes.scores import Trial, confusion, differences, interval, scores, table
from moving_shapes.sheet import picture, strip
from tests.conftest import CHECKOUT
from tests.runtime.command import environment

RED = Verdict("red", "circle", "left")
PAIR = Verdict("blue+red", "square+circle", "crossing")


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    # Wilson's interval as printed in tables for 95 %.
    [(10, 10, 0.7225, 1.0), (0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (95, 100, 0.8882, 0.9785)],
)
def test_the_interval_is_wilsons(right: int, count: int, low: float, high: float) -> None:
    assert interval(right, count) == pytest.approx((low, high), abs=1e-4)


def test_scores_count_each_attribute_and_what_it_was_taken_for() -> None:
    trials = [
        Trial("a", 0, RED, RED),
        Trial("b", 1, RED, Verdict("blue", "circle", "right")),
        Trial("c", 2, PAIR, PAIR),
        Trial("d", 3, PAIR, Verdict("red", "circle", "left")),
    ]
    result = scores(trials)
    assert result["accuracy"] == {"colour": 0.5, "shape": 0.75, "direction": 0.5}
    assert result["n"] == 4
    assert confusion(trials, "colour") == {
        "blue": {"blue": 1},
        "blue+red": {"red": 1},
        "red": {"blue": 1, "red": 2},
    }
    lines = table(result).splitlines()
    assert lines[1].split() == ["colour", "2/4", "50.0%", "15.0%", "to", "85.0%"]
    assert ["blue+red", ".", "1"] in [line.split() for line in lines]
    with pytest.raises(ValueError, match="no trials"):
        scores([])


def test_differences_name_the_trial() -> None:
    one = [asdict(Trial("a", 0, RED, RED)), asdict(Trial("b", 1, RED, RED))]
    other = [one[0], asdict(Trial("b", 1, RED, PAIR))]
    assert differences(one, one) == []
    assert differences(one, other) == ["trial 1 (b): red circle left here, blue+red square+circle crossing there"]


def score(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHECKOUT / "scripts" / "score_tiny_wan.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment())


@pytest.mark.parametrize("count", [1, 3, 14])
def test_a_sheet_holds_every_strip_with_its_caption(count: int) -> None:
    def video(number: int) -> Any:
        return np.stack([np.full((8, 10, 3), 10 * number + frame, np.uint8) for frame in range(16)])

    strips = [strip(video(number), f"prompt {number}", number != 2) for number in range(count)]
    pixels = np.asarray(picture(strips))
    found = [tuple(pixel) for pixel in pixels.reshape(-1, 3)]
    for number in range(count):
        for frame in (0, 3, 6, 9, 12, 15):
            assert found.count((10 * number + frame,) * 3) >= 80
    reddish = (pixels[..., 0] > 150) & (pixels[..., 1] < 60)
    assert bool(reddish.any()) == (count > 2)


@pytest.mark.ray
def test_the_script_scores_over_ranks_and_compares(tmp_path: Path) -> None:
    """The first prompts of held-out wording, as they are asked for: the shipped model makes what it is asked for."""
    file, sheet, shared = (
        tmp_path / "scores.json",
        tmp_path / "sheet.png",
        ("--prompts", "2", "run.device=cpu", "generate.steps=10"),
    )
    done = score(*shared, "--json", str(file), "--sheet", str(sheet), "parallel.world_size=2")
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    schema = json.loads((CHECKOUT / "docs" / "scores.schema.json").read_text())
    assert list(Draft202012Validator(schema).iter_errors(result)) == []
    assert result["accuracy"] == {"colour": 1.0, "shape": 1.0, "direction": 1.0}
    assert [trial["seed"] for trial in result["trials"]] == [0, 1]
    assert {entry["strategy"] for entry in result["selection"]} == {"ulysses", "local"}
    assert sheet.stat().st_size > 1000
    assert "self   TORCH_SDPA (torch)  platform" in done.stderr

    result["trials"][1]["seen"]["colour"] = "red"
    file.write_text(json.dumps(result))
    done = score(*shared, "--against", str(file), "parallel.world_size=1")
    assert done.returncode == 6, done.stderr
    assert "trial 1 (look here: the purple triangle goes to the right" in done.stdout
    assert "trial 0" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompts", "0"), "--prompts=0: it takes 1 or more"),
        (("generate.step=4",), "did you mean generate.steps?"),
        (("generate.frames=16",), "a video has 4n + 1 frames"),
        (("--json", "no/such/folder/file.json"), "--json=no/such/folder/file.json: it cannot be written"),
        (("--json", "/"), "--json=/: it cannot be written (Is a directory)"),
        (("--sheet", "/dev/null"), "no kind of picture ends so; write /dev/null.png"),
        (("--seed", "7"), "unrecognized arguments: --seed"),
        (("--against", "nowhere.json"), "it takes a file that --json wrote"),
        (("--against", "{folder}/scores.json"), "it has 1 other videos"),
        (("--against", "{folder}/strange.json"), "it takes a file that --json wrote"),
        (("run.outputs=[video]",), "run.outputs=[video]: is set by this script"),
        (("+run.seed=7",), "run.seed=7: is set by this script"),
        (("-ac.backend", "TORCH_SPDA"), "did you mean TORCH_SDPA?"),
        (("model.path=/nowhere",), "there is no such folder"),
    ],
)
def test_the_script_refuses_before_it_starts_anything(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    trial = {"prompt": "another", "seed": 0, "seen": {"colour": "red"}}
    (tmp_path / "scores.json").write_text(json.dumps({"trials": [trial]}))
    (tmp_path / "strange.json").write_text(json.dumps({"trials": 5}))
    done = score(*(word.replace("{folder}", str(tmp_path)) for word in arguments))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
