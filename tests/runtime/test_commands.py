"""Options of every command: how often each may be given, and which layers they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from runtime.cli import cli, run
from runtime.commands import SingleOption

Caught = pytest.CaptureFixture[str]


def commands(group: click.Group = cli) -> Iterator[click.Command]:
    for command in group.commands.values():
        if isinstance(command, click.Group):
            yield from commands(command)
        else:
            yield command


def test_no_option_of_any_command_drops_a_value() -> None:
    options = [option for command in commands() for option in command.params if isinstance(option, click.Option)]
    assert len(options) > 10
    assert all(option.is_flag or option.multiple or isinstance(option, SingleOption) for option in options)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("explain --device cpu --device cuda:9.0", "--device: is given twice, as cpu and as cuda:9.0; keep one"),
        ("generate --prompt a run.seed=1 --prompt=b", "--prompt: is given twice, as a and as b; keep one"),
        ("bench attention --rounds 2 --rounds 3 --rounds 4", "--rounds: is given 3 times, as 2 and as 3 and as 4"),
        ("backends --check a.md --check b.md", "--check: is given twice, as a.md and as b.md; keep one"),
    ],
)
def test_an_option_with_two_values_is_refused_and_both_are_named(line: str, message: str, capsys: Caught) -> None:
    assert run(line.split()) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_one_value_twice_is_one_value(capsys: Caught) -> None:
    assert run(["explain", "--device", "cuda:9.0", "--device=cuda:9.0"]) == 0
    assert "cuda:9.0 (assumed)" in capsys.readouterr().out


def test_several_files_merge_in_order_and_all_their_faults_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Caught
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("attention: {default: TORCH_SDPA}\nparallel.world_size: 2\n")
    Path("b.yaml").write_text("attention: {per_role: {self: REFERENCE, cross: REFERENCE}}\n")
    assert run(["explain", "--device", "cpu", "--config", "a.yaml", "--config", "b.yaml"]) == 0
    assert "attention.per_role.self [b.yaml]" in capsys.readouterr().out
    Path("c.yaml").write_text("attention: {default: TORCH_SDPA}\n")
    assert run(["explain", "--config", "b.yaml", "--config", "c.yaml"]) == 2
    assert "attention.default=TORCH_SDPA: no role of the model falls back to it" in capsys.readouterr().err
    Path("b.yaml").write_text("run.sed: 1\n")
    assert run(["explain", "--config", "b.yaml", "--config", "gone.yaml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == ["run.sed=1", "gone.yaml"]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("explain --device cpu attention.per_role.self=REFERENCE attention.per_role.cross=REFERENCE", 0),
        ("explain --device cpu attention.default=REFERENCE", 0),
        ("explain --device cpu attention.per_role.self=REFERENCE", 2),
        ("explain --device cpu", 2),
    ],
)
def test_a_wrong_backend_in_the_environment_is_a_fault_only_where_it_would_be_used(
    line: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: Caught
) -> None:
    monkeypatch.setenv("DIFFUSION_ATTENTION_BACKEND", "NO_SUCH")
    assert run(line.split()) == code
    assert ("attention.default=NO_SUCH: no backend has that name" in capsys.readouterr().err) is (code == 2)


def test_roles_that_point_at_the_default_use_it(capsys: Caught) -> None:
    default = ["attention.default=REFERENCE", "attention.per_role.self=${attention.default}"]
    assert run(["explain", "--device", "cpu", *default, "attention.per_role.cross=${attention.default}"]) == 0
