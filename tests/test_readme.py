"""What the README says is true: its Python runs, its keys and names exist, its commands are accepted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

from configs.compose import known_keys, presets
from configs.schema import RunConfig
from tests.conftest import CHECKOUT
from tests.runtime.command import raylysses

README = (CHECKOUT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)


def commands() -> list[list[str]]:
    text = "\n".join(block for language, block in BLOCKS if language == "bash").replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in text.splitlines() if line.strip()]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [block for language, block in BLOCKS if language == "python"]

    exec(compile(example, "README.md", "exec"), {})

    assert "[(33, 128, 128, 3), (33, 128, 128, 3)]" in capsys.readouterr().out


def test_the_explain_commands_answer() -> None:
    found = [words for words in commands() if words[:2] == ["raylysses", "explain"]]
    assert len(found) == 3
    for command in found:
        outcome = raylysses(*command[1:])

        assert outcome.code == 0, outcome.err
        assert "FLASH_ATTN (fa3)" in outcome.out


def test_the_yaml_example_is_taken(tmp_path: Path) -> None:
    (example,) = [block for language, block in BLOCKS if language == "yaml"]
    (tmp_path / "my.yaml").write_text(example)

    outcome = raylysses("explain", "--config", str(tmp_path / "my.yaml"), "--device", "cuda:9.0", "--packages", "all")

    assert outcome.code == 0, outcome.err
    assert "FLASH_ATTN (fa3)" in outcome.out


def test_the_commands_name_keys_and_presets_that_exist() -> None:
    settings = [word for words in commands() for word in words if re.match(r"[a-z_.]+=", word)]
    known = {*known_keys(), "model"}

    assert settings
    for setting in settings:
        key, _, value = setting.partition("=")
        assert key in known or key.startswith(("attention.per_role.", "attention.register.")), setting
        assert key != "model" or value in presets()


def test_every_setting_is_documented() -> None:
    documented = set(re.findall(r"`([a-z_]+\.[a-z_0-9]+)", (CHECKOUT / "docs" / "settings.md").read_text()))

    scalar_keys = {key for key in known_keys() if not key.startswith(("attention.per_role.", "attention.register."))}
    assert scalar_keys <= documented
    assert RunConfig.__dataclass_fields__.keys() == {key.partition(".")[0] for key in known_keys()} | {"attention"}


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (CHECKOUT / target.partition("#")[0]).exists(), target


def test_the_first_picture_is_a_small_animation() -> None:
    path = CHECKOUT / re.findall(r"!\[[^]]*\]\(([^)]+)\)", README)[0]
    assert path.stat().st_size < 300_000
    with Image.open(path) as image:
        frames = [np.asarray(frame.convert("RGB"), np.int16) for frame in ImageSequence.Iterator(image)]
    assert len(frames) == 33
    columns = [np.nonzero(frame[..., 0] - frame[..., 1] > 100)[1].mean() for frame in (frames[0], frames[-1])]
    assert columns[1] - columns[0] > 40  # the circle moves right


@pytest.mark.ray
def test_the_backend_of_the_guide_serves(tmp_path: Path) -> None:
    guide = (CHECKOUT / "docs" / "backends.md").read_text()
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name, text in re.findall(r"```python\n# my_package/(\w+\.py)\n(.*?)```", guide, re.DOTALL):
        (package / name).write_text(text)
    settings = ["attention.register.MINE=my_package.declared.MyBackend", "attention.per_role.self=MINE"]

    outcome = raylysses("explain", "--device", "cpu", *settings, environ={"PYTHONPATH": str(tmp_path)})

    assert outcome.code == 0, outcome.err
    assert "MINE (plain)" in outcome.out
    run = ["generate.steps=1", "generate.frames=5", "generate.height=64", "generate.width=64", "run.outputs=[]"]
    done = raylysses(
        "generate",
        "--prompt",
        "a cat",
        *settings,
        *run,
        f"run.dir={tmp_path}/run",
        environ={"PYTHONPATH": str(tmp_path)},
    )
    assert done.code == 0, done.err
    assert "my_package.kernel.MyImpl" in done.out
