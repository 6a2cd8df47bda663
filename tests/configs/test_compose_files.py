"""Composition: several files are layers in the order given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from configs.schema import AttentionSpec
from tests.configs.composing import BACKEND, composed, refused


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[Path]:
    monkeypatch.chdir(tmp_path)
    return Path("a.yaml"), Path("b.yaml")


def test_a_later_file_wins_key_by_key_and_origins_name_the_right_one(files: Sequence[Path]) -> None:
    files[0].write_text("generate: {steps: 5, fps: 4}\nattention: {per_role: {self: A, cross: B}}\n")
    files[1].write_text("generate.steps: 6\nattention: {per_role: {cross: C}}\n")
    config = composed("run.seed=3", file=files)
    assert (config.generate.steps, config.generate.fps, config.run.seed) == (6, 4, 3)
    assert config.attention.per_role == {"self": AttentionSpec("A"), "cross": AttentionSpec("C")}
    assert config.attention.origins == {"attention.per_role.self": "a.yaml", "attention.per_role.cross": "b.yaml"}
    assert composed(file=files[::-1]).generate.steps == 5


def test_a_backend_of_a_later_file_takes_the_options_of_an_earlier_one_away(files: Sequence[Path]) -> None:
    files[0].write_text("attention.default: {backend: A, version: 3, quant: {x: 1}}")
    files[1].write_text("attention.default: B")
    assert composed(file=files).attention.default == AttentionSpec("B")
    assert composed(file=files[::-1]).attention.default == AttentionSpec("A", version=3, quant={"x": 1})
    files[1].write_text("attention.default.version: 4")
    assert composed(file=files).attention.default == AttentionSpec("A", version=4, quant={"x": 1})


def test_the_last_file_that_names_a_preset_decides(files: Sequence[Path]) -> None:
    files[0].write_text("model: wan2.1-t2v-1.3b\nmodel.path: /m\n")
    files[1].write_text("model: tiny-wan\n")
    assert composed(file=files).generate.steps == 30
    assert composed(file=files[::-1]).generate.steps == 50


def test_the_faults_of_every_file_are_told_together(files: Sequence[Path]) -> None:
    files[0].write_text("run: {seeed: 1}\n")
    files[1].write_text("run: {seed: x}\n")
    faults = refused(file=[*files, Path("missing.yaml")])
    assert [(fault.key, fault.origin) for fault in faults] == [
        ("run.seeed", "a.yaml"),
        ("run.seed", "b.yaml"),
        ("missing.yaml", ""),
    ]


@pytest.mark.parametrize(
    ("first", "second", "arguments", "spare"),
    [
        ("attention.default: A", "attention.per_role: {self: B}", (), True),
        ("attention.per_role: {self: B}", "attention.default: A", (), False),
        ("attention: {default: A, per_role: {self: B}}", "", (), False),
        ("attention: {default: A}", "", ("attention.per_role.self=B", "attention.per_role.cross=C"), True),
        ("attention: {per_role: {self: B}}", "", ("attention.default=A",), False),
        ("attention: {default: A, per_role: {self: B}}", "", ("attention.default.version=3",), False),
        ("", "", ("attention.default=A", "attention.per_role.self=${attention.default}"), True),
        ("", "", ("attention.default=A", "attention.per_role.self=${attention.default_x:}"), None),
        ("", "", ("attention.default=A", "attention.per_role.self=B"), False),
    ],
)
def test_a_default_may_be_unused_where_a_higher_layer_replaced_it_or_a_role_points_at_it(
    files: Sequence[Path], first: str, second: str, arguments: tuple[str, ...], spare: bool | None
) -> None:
    files[0].write_text(first)
    files[1].write_text(second)
    if spare is None:
        refused(*arguments, file=files)
    else:
        assert ("attention.default" in composed(*arguments, file=files).attention.may_be_unused) is spare


def test_the_environment_may_always_be_unused() -> None:
    config = composed("attention.per_role.self=A", environ={BACKEND: "B"})
    assert config.attention.may_be_unused == {"attention.default"}


@pytest.mark.parametrize("blank", ["", " ", "\t\n"])
def test_a_blank_environment_variable_is_unset(blank: str) -> None:
    assert composed(environ={BACKEND: blank}).attention.default is None
    assert composed("attention.default=A", environ={BACKEND: blank}).attention.default == AttentionSpec("A")
