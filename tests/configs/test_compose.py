"""Composition: which layer wins, and that every fault is reported at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import schema
from configs.compose import compose, known_keys, presets
from configs.overrides import quote
from configs.schema import AttentionSpec
from configs.sources import preset_layer
from tests.configs.composing import composed, refused

# --- layers ---------------------------------------------------------------------------------------------------------


def test_a_prompt_is_all_that_the_default_preset_needs() -> None:
    config = composed()
    assert config.model.path == "built-in:tiny-wan"
    assert config.generate.prompt == "a cat"
    assert config.generate.steps == 30
    assert config.attention == schema.AttentionConfig()
    assert config.run == schema.RunSettings()


def test_a_higher_layer_replaces_a_lower_one(written: Any) -> None:
    file = written("generate: {prompt: a dog, steps: 5, height: 64}\nrun: {seed: 3}\n")
    config = composed("generate.steps=6", file=file, prompt=None)
    assert (config.generate.prompt, config.generate.steps, config.generate.height) == ("a dog", 6, 64)
    assert (config.generate.width, config.run.seed) == (128, 3)


def test_keys_in_a_file_may_be_dotted(written: Any) -> None:
    assert composed(file=written("generate.steps: 5\nrun.seed: 4\n")).generate.steps == 5


def test_empty_groups_and_an_empty_file_set_nothing(written: Any) -> None:
    assert composed(file=written("generate:\nattention:\n  per_role:\n")) == composed(file=written("")) == composed()


def test_the_command_line_picks_the_preset_over_the_file(written: Any) -> None:
    file = written("model: wan2.1-t2v-1.3b\nmodel.path: /m\n")
    assert composed(file=file).generate.steps == 50
    config = composed("model=tiny-wan", file=file)
    assert (config.generate.steps, config.model.path) == (30, "/m")
    assert composed("model=${oc.env:M}", environ={"M": "tiny-wan"}) == composed()


@pytest.mark.parametrize("name", presets())
def test_a_preset_sets_model_and_generate_but_no_prompt(name: str) -> None:
    layer = preset_layer(name)
    assert layer.faults == ()
    assert all(key.split(".")[0] in ("model", "generate") for key in layer.settings)
    assert "generate.prompt" not in layer.settings
    config = composed(f"model={name}", "model.path=folder")
    assert config.generate.frames % 4 == 1


def test_a_preset_without_a_folder_asks_for_one() -> None:
    (fault,) = refused("model=wan2.2-ti2v-5b")
    assert fault.key == "model.path"
    assert fault.remedy == "add model.path=FOLDER, a local diffusers folder"


def test_an_unknown_preset_names_the_nearest() -> None:
    (fault,) = refused("model=tiny-wam")
    assert str(fault) == "model=tiny-wam: no such preset; did you mean tiny-wan? [command line]"
    assert fault.allowed == presets()


# --- the prompt -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), ("generate.prompt=",), ("generate.prompt=' '",), ("generate.prompt=null",)])
def test_a_missing_prompt_is_a_fault_with_the_way_out(arguments: tuple[str, ...]) -> None:
    config, (fault,) = compose(arguments, environ={})
    assert config is None
    assert (fault.key, fault.remedy) == ("generate.prompt", 'add --prompt "..."')


def test_a_file_may_leave_the_prompt_open(written: Any) -> None:
    assert composed(file=written("generate:\n  prompt:\n")).generate.prompt == "a cat"


@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(
        lambda text: text.strip() and text != "???"
    )
)
@settings(max_examples=60, deadline=None)
def test_a_quoted_prompt_arrives_as_it_is(text: str) -> None:
    assert composed(f"generate.prompt={quote(text)}", prompt=None).generate.prompt == text


# --- all faults at once ---------------------------------------------------------------------------------------------


def test_every_fault_of_every_layer_is_reported(written: Any) -> None:
    file = written("generate: {fps: '${', steps: 0, frame: 3}\nextra: {a: 1}\n")
    faults = refused("=1", "run.seed=1.5", "run.dtype=float8", "a=[1", "run.dir=${nope}", "model=x", file=file)
    assert {fault.key for fault in faults} == {
        "generate.fps",
        "generate.steps",
        "generate.frame",
        "extra.a",
        "=1",
        "run.seed",
        "run.dtype",
        "a",
        "run.dir",
        "model",
    }
    assert {fault.origin for fault in faults} == {"my.yaml", "command line"}


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("generate.step=4", "generate.step=4: no such key; did you mean generate.steps? [command line]"),
        ("steps=4", "steps=4: no such key; did you mean generate.steps? [command line]"),
        ("+genrate.steps=4", "genrate.steps=4: no such key; did you mean generate.steps? [command line]"),
        ("backend=X", "backend=X: no such key; did you mean attention.default.backend? [command line]"),
        (
            "attention.per_rol.a=X",
            "attention.per_rol.a=X: no such key; did you mean attention.per_role.ROLE? [command line]",
        ),
        ("~generate.step", "~generate.step: no such key; did you mean generate.steps? [command line]"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(argument: str, text: str) -> None:
    (fault,) = refused(argument)
    assert str(fault) == text


def test_an_unknown_key_that_resembles_nothing_lists_the_keys() -> None:
    (fault,) = refused("zzz=1")
    assert all(key in fault.remedy for key in known_keys())


def test_one_key_twice_is_a_fault_that_names_both_unless_equal() -> None:
    assert composed("run.seed=4", "run.seed=4").run.seed == 4
    assert composed("generate.guidance=4", "+generate.guidance=4.0").generate.guidance == 4.0
    (fault,) = refused("run.seed=4", "run.seed=5")
    assert fault.key == "run.seed"
    assert "run.seed=4 and as run.seed=5" in fault.rule
    assert refused("run.seed=4", "~run.seed")[0].key == "run.seed"


def test_a_file_that_sets_one_key_twice_is_a_fault(written: Any) -> None:
    (fault,) = refused(file=written("run.seed: 4\nrun: {seed: 5}\n"))
    assert "run.seed: 4 and as run.seed: 5" in fault.rule


def test_a_sweep_is_a_fault_in_one_run() -> None:
    (fault,) = refused("run.outputs=video,frames")
    assert fault.rule == "is a sweep of 2 values; one run takes one value"
    assert fault.remedy == "use brackets for a list, run.outputs=[video, frames]"


# --- removal --------------------------------------------------------------------------------------------------------


def test_a_removal_goes_back_to_the_default(written: Any) -> None:
    file = written("generate: {steps: 3}\nrun: {seed: 5}\nattention: {default: A, per_role: {self: B, cross: C}}\n")
    config = composed("~generate.steps", "~run.seed=5", "~attention.per_role.cross", "~attention.default", file=file)
    assert (config.generate.steps, config.run.seed, config.attention.default) == (30, 0, None)
    assert dict(config.attention.per_role) == {"self": AttentionSpec("B")}
    assert composed("~attention.per_role", file=file).attention.per_role == {}
    assert composed("attention.per_role=null", "attention.per_role.x=Y", file=file).attention.per_role == {
        "x": AttentionSpec("Y")
    }


def test_a_removal_that_finds_nothing_is_a_fault(written: Any) -> None:
    file = written("generate: {steps: 3}\nattention: {per_role: {self: B}}\n")
    faults = refused("~attention.per_role.cross", "~generate.steps=4", "~generate", file=file)
    assert {fault.key for fault in faults} == {"~attention.per_role.cross", "~generate.steps", "~generate"}
    assert "~attention.per_role.self" in next(fault.remedy for fault in faults if fault.key.endswith("cross"))


# --- imports --------------------------------------------------------------------------------------------------------


def test_composing_imports_nothing_heavy() -> None:
    heavy = "'torch', 'numpy', 'ray', 'rich', 'click'"
    code = f"import sys, configs.compose; print([name for name in ({heavy}) if name in sys.modules])"
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
