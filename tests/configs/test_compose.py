"""Composition: which layer wins, what each key takes, and that every fault is reported at once."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs import schema
from configs.compose import compose, known_keys, presets, to_mapping
from configs.faults import Fault
from configs.overrides import quote
from configs.schema import AttentionSpec, RunConfig
from configs.sources import preset_layer

PROMPT = "generate.prompt=a cat"
BACKEND = "DIFFUSION_ATTENTION_BACKEND"


def composed(
    *arguments: str, file: Path | None = None, environ: Mapping[str, str] = {}, prompt: str | None = PROMPT
) -> RunConfig:
    config, faults = compose((*([prompt] if prompt else []), *arguments), file=file, environ=environ)
    assert faults == ()
    assert config is not None
    return config


def refused(*arguments: str, file: Path | None = None, environ: Mapping[str, str] = {}) -> tuple[Fault, ...]:
    config, faults = compose((PROMPT, *arguments), file=file, environ=environ)
    assert config is None
    assert faults
    assert all(fault.key and fault.rule and fault.remedy for fault in faults)
    return faults


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes my.yaml into the working directory; its path is relative, as a user would give it."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        Path("my.yaml").write_text(text, encoding="utf-8")
        return Path("my.yaml")

    return write


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
    assert "'video,frames'" in fault.remedy
    assert "[video, frames]" in fault.remedy


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
    assert fields - set(known_keys()) == {"attention.per_role", "attention.register", "attention.origins"}
    assert set(known_keys()) < fields


# --- attention ------------------------------------------------------------------------------------------------------


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
        ("{a: {backend: X, b: Y}}", "attention.per_role.a", "both a choice and roles below it (b) for the role a"),
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
        ("${generate.steps}", "Recursive interpolation"),
        ("${oc.env:TEXT}", "resolves to 'many'"),
    ],
)
def test_an_interpolation_that_fails_is_a_fault(value: str, rule: str) -> None:
    (fault,) = refused(f"generate.steps={value}", environ={"TEXT": "many"})
    assert (fault.key, fault.value) == ("generate.steps", value)
    assert rule in fault.rule


# --- the file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("run:\n  seed: [1,\n", "not valid YAML at line 3"),
        ("run: {seed: 1}\nrun: {seed: 2}\n", "line 2"),
        ("- 1\n", "does not hold a mapping"),
        ("just text\n", "does not hold a mapping"),
        ("3\n", "Invalid loaded object"),
        ("a: \x01", "unacceptable character"),
        ("a: !!set {x}", "not a supported"),
        ("a: &x [*x]", "recursive"),
        ("a: " + "[" * 3000, "nest"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_fault(written: Any, text: str, rule: str) -> None:
    config, (fault,) = compose([], file=written(text), environ={})
    assert config is None
    assert fault.key == "my.yaml"
    assert rule in fault.rule


def test_a_missing_or_undecodable_file_is_a_fault(tmp_path: Path) -> None:
    assert "No such file" in refused(file=tmp_path / "none.yaml")[0].rule
    assert "cannot be read" in refused(file=tmp_path)[0].rule
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9")
    assert "UTF-8" in refused(file=tmp_path / "latin.yaml")[0].rule


# --- the round trip -------------------------------------------------------------------------------------------------

_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20) | st.text(
    "\\${}'\" :#1e-", max_size=12
)
_LINE = _TEXT.filter(lambda text: text.strip() and text != "???")
_COUNT = st.integers(1, 10**6)
_TIMEOUT = st.floats(min_value=0, max_value=1e6, exclude_min=True)
_POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)
_OPTION = _TEXT.filter(lambda text: text != "???") | st.sampled_from(["1e3", "-1_0E+5", "no", "010", "${x}"])
_OPTION |= st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
_FIELD = st.sampled_from(["dtype_qk", "threshold", "backend", "quant", "on"])
_BLOCK = st.none() | st.dictionaries(_FIELD, _OPTION | st.lists(_OPTION, max_size=3), min_size=1, max_size=3)
_SPEC = st.builds(
    AttentionSpec,
    st.sampled_from(["auto", "TORCH_SDPA", "FLASH_ATTN", "no", "null", "${x", "1e3"]),
    version=st.none() | st.integers(1, 9),
    on_unsupported=st.sampled_from(schema.ON_UNSUPPORTED),
    quant=_BLOCK,
    skip_softmax=_BLOCK,
    options=_BLOCK,
)
_ROLE = st.lists(st.sampled_from(["self", "cross", "a_b", "1", "on", "x y"]), min_size=1, max_size=3).map(".".join)
_CONFIGS = st.builds(
    RunConfig,
    model=st.builds(schema.ModelConfig, path=_LINE),
    generate=st.builds(
        schema.GenerateConfig,
        prompt=_LINE,
        negative_prompt=_TEXT.filter(lambda text: text != "???"),
        steps=_COUNT,
        guidance=_POSITIVE,
        guidance_2=st.none() | _POSITIVE,
        flow_shift=st.none() | _POSITIVE,
        frames=_COUNT,
        height=_COUNT,
        width=_COUNT,
        fps=st.integers(1, 1000),
        image=st.none() | _LINE,
    ),
    attention=st.builds(
        schema.AttentionConfig,
        default=st.none() | _SPEC,
        per_role=st.dictionaries(_ROLE, _SPEC, max_size=4),
        register=st.just({}),
        origins=st.just({}),
        agreement=st.sampled_from(schema.AGREEMENTS),
    ),
    parallel=st.builds(schema.ParallelConfig, world_size=st.none() | _COUNT),
    cluster=st.builds(
        schema.ClusterConfig,
        address=st.sampled_from(["local", "10.0.0.1:6379", "[::1]:6379"]),
        start_timeout_s=_TIMEOUT,
        stall_timeout_s=_TIMEOUT,
    ),
    run=st.builds(
        schema.RunSettings,
        seed=st.integers(0, 2**63 - 1),
        dir=st.none() | _LINE,
        dtype=st.sampled_from(schema.DTYPES),
        device=st.sampled_from(schema.DEVICES),
        outputs=st.lists(st.sampled_from(schema.OUTPUTS), unique=True).map(tuple),
        save_latents=st.booleans(),
    ),
)


@given(_CONFIGS)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_a_resolved_configuration_composes_to_itself(tmp_path: Path, config: RunConfig) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(to_mapping(config), sort_keys=False), encoding="utf-8")
    again, faults = compose(file=file, environ={BACKEND: "OTHER"})
    assert faults == ()
    assert again == config
    assert again is not None
    assert repr(again.attention.default) == repr(config.attention.default)  # 1, 1.0 and True are equal
    assert repr(again.attention.per_role) == repr(config.attention.per_role)


def test_a_configuration_survives_pickling_with_its_origins() -> None:
    config = composed("attention.per_role.a=A", "attention.register.MINE=pkg.mod.Cls")
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert again.attention.origins == config.attention.origins == {"attention.per_role.a": "command line"}


def test_composing_imports_nothing_heavy() -> None:
    heavy = "'torch', 'numpy', 'ray', 'rich', 'click'"
    code = f"import sys, configs.compose; print([name for name in ({heavy}) if name in sys.modules])"
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


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
