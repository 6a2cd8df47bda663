"""Composition: the choices of backends, where they come from, and the names that are registered."""

from __future__ import annotations

from typing import Any

import pytest

from configs.compose import compose
from configs.schema import AttentionSpec
from tests.configs.composing import BACKEND, PROMPT, composed, refused


def test_the_spellings_of_a_choice_are_one_key() -> None:
    config = composed(
        "attention.default=Auto",
        "attention.default={backend: auto}",
        "attention.per_role.cross.backend=A",
        "attention.per_role.cross=A",
    )
    assert config.attention.default == AttentionSpec("auto")
    assert config.attention.per_role == {"cross": AttentionSpec("A")}
    (fault,) = refused("attention.per_role.cross=A", "attention.per_role.cross.backend=B")
    assert fault.key == "attention.per_role.cross"


def test_roles_nest_by_dots_at_any_depth(written: Any) -> None:
    file = written("attention:\n  per_role:\n    cross: {image: {late: X}, text.early: {backend: Y}}\n    self: auto\n")
    config = composed(file=file)
    assert {role: spec.backend for role, spec in config.attention.per_role.items()} == {
        "cross.image.late": "X",
        "cross.text.early": "Y",
        "self": "auto",
    }


def test_a_role_and_its_child_merge_in_any_order(written: Any) -> None:
    arguments = ("attention.per_role.cross=A", "+attention.per_role.cross.image=B")
    for ordered in (arguments, arguments[::-1]):
        config = composed(*ordered, file=written("attention: {per_role: {self: C}}"))
        assert {role: spec.backend for role, spec in config.attention.per_role.items()} == {
            "cross": "A",
            "cross.image": "B",
            "self": "C",
        }


@pytest.mark.parametrize(
    ("text", "key", "rule"),
    [
        ("{a: {backend: X, b: Y}}", "attention.per_role.a", "has b beside the keys of a choice, for the role a"),
        ("{a: {b: {}}}", "attention.per_role.a.b", "empty mapping for the role a.b"),
        ("{a: null}", "attention.per_role.a", "takes the name of a backend"),
        ("{a: 3}", "attention.per_role.a", "takes the name of a backend"),
        ("{a: yes}", "attention.per_role.a", "takes the name of a backend"),
        ("{a: {backend: {x: y}}}", "attention.per_role.a", "takes the name of a backend"),
        ("{backend: X}", "attention.per_role.backend", "called backend"),
        ("X", "attention.per_role", "mapping from roles"),
        ("[X]", "attention.per_role", "mapping from roles"),
    ],
)
def test_a_malformed_role_is_a_fault_that_names_it(written: Any, text: str, key: str, rule: str) -> None:
    (fault,) = refused(file=written(f"attention:\n  per_role: {text}\n"))
    assert fault.key == key
    assert rule in fault.rule


def test_origins_say_where_each_choice_came_from(written: Any) -> None:
    file = written("attention: {per_role: {self: A, cross: B}}")
    config = composed("attention.per_role.cross=C", file=file, environ={BACKEND: "D"})
    assert config.attention.origins == {
        "attention.per_role.self": "my.yaml",
        "attention.per_role.cross": "command line",
        "attention.default": "environment variable DIFFUSION_ATTENTION_BACKEND",
    }


def test_the_environment_is_the_last_resort(written: Any) -> None:
    environ = {BACKEND: "D"}
    assert composed(environ=environ).attention.default == AttentionSpec("D")
    assert composed(environ={BACKEND: "AUTO"}).attention.default == AttentionSpec("auto")
    assert composed(environ={BACKEND: ""}).attention.default is None
    assert composed("attention.default=E", environ=environ).attention.default == AttentionSpec("E")
    assert composed(file=written("attention.default: F"), environ=environ).attention.default == AttentionSpec("F")
    assert composed("attention.default=null", environ=environ).attention.default is None


def test_the_environment_of_the_process_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND, "D")
    monkeypatch.setenv("RUN_FOLDER", "out")
    config, _ = compose([PROMPT, "run.dir=${oc.env:RUN_FOLDER}"])
    assert config is not None
    assert (config.attention.default, config.run.dir) == (AttentionSpec("D"), "out")


def test_names_are_registered_on_the_command_line_only(written: Any) -> None:
    assert composed("attention.register.MINE=pkg.mod.Cls").attention.register == {"MINE": "pkg.mod.Cls"}
    (fault,) = refused(file=written("attention: {register: {MINE: pkg.mod.Cls}}"))
    assert fault.key == "attention.register"
    assert "command line" in fault.remedy
    assert refused("attention.register.MINE=Cls", "attention.register.A.b=x.Y")[1].key == "attention.register.A.b"
