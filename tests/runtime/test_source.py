"""Code of another project under our names is found before it is imported, in the driver and on the nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from configs.faults import FaultError
from runtime.bootstrap import PACKAGES, package_source
from runtime.group import require_same_sources
from runtime.source import (
    REQUIREMENTS,
    differing_sources,
    misplaced_imports,
    missing_requirements,
    own_sources,
    shadows,
)
from tests.conftest import CHECKOUT


def test_this_process_imports_its_own_packages() -> None:
    assert misplaced_imports() == []
    assert shadows(CHECKOUT) == []
    assert differing_sources(own_sources(), own_sources()) == []


@pytest.mark.parametrize("stranger", ["configs/__init__.py", "backends.py"])
def test_a_stranger_in_a_directory_is_found(stranger: str, tmp_path: Path) -> None:
    (tmp_path / stranger).parent.mkdir(exist_ok=True)
    (tmp_path / stranger).write_text("")

    assert shadows(tmp_path) == [(stranger.removesuffix(".py").split("/")[0], tmp_path / stranger)]


def test_a_folder_of_settings_without_code_is_no_stranger(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yaml").write_text("run: {seed: 1}")

    assert shadows(tmp_path) == []


def test_a_stranger_on_the_path_is_misplaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "backends").mkdir()
    (tmp_path / "backends" / "__init__.py").write_text("")
    monkeypatch.delitem(sys.modules, "backends")
    monkeypatch.syspath_prepend(str(tmp_path))

    assert misplaced_imports() == [("backends", tmp_path / "backends")]


def test_a_changed_file_changes_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = package_source("some_package")
    (package / "more.py").write_text("x = 1")
    after = package_source("some_package")

    assert before is not None
    assert after is not None
    assert before[0] == after[0] == str(package)
    assert before[1] != after[1]
    assert package_source("no_such_package") is None


def test_a_node_with_other_code_is_refused_by_package_and_path() -> None:
    found = own_sources() | {"backends": ("/elsewhere/backends", "another digest"), "parallel": None}

    with pytest.raises(FaultError) as caught:
        require_same_sources(found, "10.0.0.9")

    text = str(caught.value)
    assert "package backends=/elsewhere/backends: an import of it on 10.0.0.9 finds other code" in text
    assert "package parallel: 10.0.0.9 cannot import it" in text
    assert len(caught.value.faults) == len(PACKAGES) - 2


@pytest.mark.parametrize("name", ["configs", "runtime"])
def test_the_public_names_say_which_folder_is_taken_for_ours(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    environ = {**os.environ, "PYTHONPATH": str(CHECKOUT)}

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)

    script = python("-c", "from raylysses import compose")
    command = python("-m", "raylysses", "--help")

    assert f"ImportError: import={tmp_path / name}: " in script.stderr
    assert f"rename {name}" in script.stderr
    assert command.returncode == 2, command.stderr
    assert f"error: import={tmp_path / name}: " in command.stderr
    assert "Traceback" not in command.stderr


@pytest.mark.parametrize("module", ["runtime", "raylysses"])
def test_without_its_requirements_a_command_names_the_one_to_install_them(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", module, "--help"], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert f"-m pip install -c {CHECKOUT / 'constraints.txt'} -e {CHECKOUT}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_requirements_of_a_command_are_those_of_the_project() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]

    assert tuple(re.split(r"[\[>=<]", line)[0] for line in project["dependencies"]) == REQUIREMENTS
    assert missing_requirements() == []
