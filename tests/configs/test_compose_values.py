"""Composition: what each key takes, and what interpolations become."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest

from configs.compose import compose, known_keys
from configs.schema import AttentionSpec, RunConfig
from tests.configs.composing import PROMPT, composed, refused

# --- types and ranges -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argument",
    [
        "generate.steps=1.5",
        "generate.steps=true",
        "generate.steps=0",
        "generate.steps='4'",
        "generate.steps=null",
        "generate.steps=[4]",
        "generate.steps={a: 1}",
        "generate.frames=0",
        "generate.height=-1",
        "generate.fps=0",
        "generate.guidance=-0.1",
        "generate.guidance=nan",
        "generate.guidance=inf",
        "generate.guidance_2=true",
        "generate.guidance=" + "9" * 400,
        "generate.negative_prompt=true",
        "generate.negative_prompt=null",
        "generate.prompt=???",
        "generate.image=",
        "run.seed=-1",
        "run.seed=9223372036854775808",
        "run.dtype=BFLOAT16",
        "run.device=gpu",
        "run.outputs=video",
        "run.outputs=[video,video]",
        "run.outputs=[[video]]",
        "run.outputs=[report]",
        "run.save_latents=yes",
        "run.save_latents=1",
        "cluster.start_timeout_s=0",
        "cluster.stall_timeout_s=inf",
        "cluster.address=null",
        "parallel.world_size=0",
        "parallel.world_size=2.0",
        "parallel.world_size=many",
        "model=3",
        "generate=3",
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_one_fault(argument: str) -> None:
    arguments = [argument] if argument.startswith("generate.prompt") else [PROMPT, argument]
    config, (fault,) = compose(arguments, environ={})
    assert config is None
    assert fault.key == argument.partition("=")[0]
    assert fault.value == argument.partition("=")[2]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("generate.guidance=4", 4.0),
        ("generate.guidance_2=null", None),
        ("generate.negative_prompt=", ""),
        ("generate.negative_prompt=1_000", "1_000"),
        ("generate.image=1e-3", "1e-3"),
        ("run.dir=null", None),
        ("run.seed=9223372036854775807", 2**63 - 1),
        ("run.outputs=[]", ()),
        ("run.outputs=[frames]", ("frames",)),
        ("run.save_latents=TRUE", True),
        ("parallel.world_size=4", 4),
        ("parallel.world_size=Auto", None),
    ],
)
def test_a_value_is_stored_in_its_field_s_type(argument: str, value: Any) -> None:
    group, _, name = argument.partition("=")[0].partition(".")
    stored = getattr(getattr(composed(argument), group), name)
    assert (stored, type(stored)) == (value, type(value))


def test_a_file_s_yaml_1_1_surprises_meet_the_type_checks(written: Any) -> None:
    faults = refused(file=written("generate: {negative_prompt: yes, steps: '8'}\nrun: {dtype: on, on: 1}\n"))
    assert {(fault.key, fault.value) for fault in faults} == {
        ("generate.negative_prompt", "yes"),
        ("generate.steps", "'8'"),
        ("run.dtype", "on"),
        ("run", None),
    }
    assert composed(file=written("run: {dir: 0010, save_latents: yes}\n")).run.dir == "0010"


def test_the_checks_cover_exactly_the_schema() -> None:
    fields = {
        f"{section.name}.{field.name}"
        for section in dataclasses.fields(RunConfig)
        for field in dataclasses.fields(typing.get_type_hints(RunConfig)[section.name])
    }
    assert fields - set(known_keys()) == {
        "attention.per_role",
        "attention.register",
        "attention.origins",
        "attention.may_be_unused",
    }
    assert set(known_keys()) < fields


@pytest.mark.parametrize(
    "address", ["auto", "foo", "127.0.0.1", "ray://10.0.0.1:10001", "http://h:8265", "a:b", "h:70000"]
)
def test_a_cluster_is_local_or_an_address(address: str) -> None:
    config, faults = compose(["generate.prompt=x", f"cluster.address='{address}'"], environ={})

    assert config is None
    (fault,) = faults
    assert fault.rule == "takes local, or HOST:PORT of a Ray head"


@pytest.mark.parametrize("prompt", ["a\0b", "a\udcffb"])
def test_text_that_no_file_can_hold_is_refused(prompt: str) -> None:
    config, faults = compose([f"generate.prompt='{prompt}'"], environ={})

    assert config is None
    assert "has a character that is not text" in {fault.rule for fault in faults}


@pytest.mark.parametrize(
    "setting", ["cluster.stall_timeout_s=1e300", "cluster.start_timeout_s=1e7", "generate.fps=100000"]
)
def test_numbers_that_nothing_could_count_to_are_refused(setting: str) -> None:
    assert compose(["generate.prompt=x", setting], environ={})[0] is None


# --- interpolation --------------------------------------------------------------------------------------------------


def test_interpolations_see_the_merged_tree(written: Any) -> None:
    file = written("generate: {width: '${generate.height}'}\nrun: {dir: 'runs/${run.seed}-${oc.env:WHO}'}\n")
    config = composed("generate.height=64", "run.seed=7", file=file, environ={"WHO": "me"})
    assert (config.generate.width, config.run.dir) == (64, "runs/7-me")
    config = composed("attention.per_role.a=${attention.default}", "attention.default=A", "attention.per_role.a.b=B")
    assert config.attention.per_role == {"a": AttentionSpec("A"), "a.b": AttentionSpec("B")}


def test_the_given_environment_does_not_outlive_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHO", "process")
    assert composed("run.dir=${oc.env:WHO}", environ={"WHO": "given"}).run.dir == "given"
    config, _ = compose([PROMPT, "run.dir=${oc.env:WHO}"])
    assert config is not None
    assert config.run.dir == "process"


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("${nope}", "'nope' not found"),
        ("${oc.env:NOT_SET}", "'NOT_SET' not found"),
        ("${nope:1}", "Unsupported interpolation type nope"),
        ("${generate.steps}", "it goes in a circle: generate.steps -> generate.steps"),
        ("${oc.env:TEXT}", "resolves to 'many'"),
    ],
)
def test_an_interpolation_that_fails_is_a_fault(value: str, rule: str) -> None:
    (fault,) = refused(f"generate.steps={value}", environ={"TEXT": "many"})
    assert (fault.key, fault.value) == ("generate.steps", value)
    assert rule in fault.rule
