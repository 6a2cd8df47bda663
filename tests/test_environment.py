"""When scripts/environment.sh makes a virtual environment: with a Python that only notes what it is asked to do."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT

PYTHON = """#!/usr/bin/env bash
case "$*" in
  --version) echo "Python $VERSION" ;;
  *_base_executable*) echo "$HOME_OF_PYTHON/python3" ;;
  *base_prefix*) echo "$HOME_OF_PYTHON" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip "*) echo "$*" >>"$ASKED"; exit "${FAILS:-0}" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("scripts/environment.sh", "pyproject.toml", "constraints.txt"):
        copy = tmp_path / "checkout" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((CHECKOUT / name).read_text())
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path / "checkout"


def installs(checkout: Path, keep: str = "keep", **variables: str) -> int:
    """How often pip is asked for anything when the script is sourced."""
    asked = checkout.parent / "asked"
    asked.write_text("")
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHON"},
        "PATH": f"{checkout.parent / 'bin'}:{os.environ['PATH']}",
        "ASKED": str(asked),
        "VERSION": "3.11.9",
        "HOME_OF_PYTHON": str(checkout.parent / "bin"),
        **variables,
    }
    script = f'source scripts/environment.sh .venv-x "[dev]" {keep}; test -x "$python"'
    done = subprocess.run(["bash", "-c", script], cwd=checkout, env=environment, capture_output=True, text=True)
    assert (done.returncode == 0) == ("FAILS" not in variables), done.stderr
    return len(asked.read_text().splitlines())


def test_an_environment_is_kept_while_it_is_made_of_the_same_files(checkout: Path) -> None:
    assert [installs(checkout), installs(checkout), installs(checkout)] == [2, 0, 0]
    constraints = checkout / "constraints.txt"
    constraints.write_text(constraints.read_text() + "# another\n")
    assert [installs(checkout), installs(checkout)] == [2, 0]
    assert [installs(checkout, VERSION="3.12.1"), installs(checkout, VERSION="3.12.1")] == [2, 0]


def test_an_environment_that_was_moved_or_not_finished_is_made_anew(checkout: Path) -> None:
    assert installs(checkout, FAILS="1") == 1
    assert installs(checkout) == 2
    moved = checkout.rename(checkout.parent / "moved")
    assert installs(moved) == 2


def test_an_environment_that_is_active_is_kept_or_made_anew_from_the_python_beneath_it(checkout: Path) -> None:
    assert installs(checkout) == 2
    active = {"PATH": f"{checkout / '.venv-x' / 'bin'}:{os.environ['PATH']}"}
    (checkout / ".venv-x" / "bin" / "python3").symlink_to("python")
    assert installs(checkout, **active) == 0
    assert installs(checkout, keep="", **active) == 2


def test_without_the_word_it_is_always_new(checkout: Path) -> None:
    assert [installs(checkout, keep=""), installs(checkout, keep="")] == [2, 2]
