"""A choice with its options: every spelling is the same settings, layers replace by choice, and faults name the key."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.compose import compose, to_mapping
from configs.faults import Fault
from configs.overrides import quote
from configs.schema import AttentionConfig, AttentionSpec

PROMPT = "generate.prompt=x"
BACKEND = "DIFFUSION_ATTENTION_BACKEND"


def attention(*words: str, file: Path | None = None, environ: Mapping[str, str] = {}) -> AttentionConfig:
    config, faults = compose([PROMPT, *words], file=file, environ=environ)
    assert config is not None, faults
    return config.attention


def faults_of(*words: str, file: Path | None = None) -> tuple[Fault, ...]:
    config, faults = compose([PROMPT, *words], file=file, environ={})
    assert config is None
    assert all(fault.key and fault.rule and fault.remedy for fault in faults)
    return faults


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes the value of `attention` into my.yaml; its path is relative, as a user would give it."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        Path("my.yaml").write_text(f"attention: {text}\n", encoding="utf-8")
        return Path("my.yaml")

    return write


# --- spellings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("attention.default=A", "attention.default.quant.dtype_qk=int8", "attention.default.version=4"),
        ("attention.default.version=4", "attention.default.quant.dtype_qk=int8", "attention.default.backend=A"),
        ("attention.default={backend: A, version: 4, quant: {dtype_qk: int8}}",),
        ("attention.default={backend: A, version: 4, quant.dtype_qk: int8}",),
        ("attention.default.quant={dtype_qk: int8}", "attention.default={backend: A, version: 4}"),
        ("-ac.backend", "A", "-ac.quant.dtype_qk", "int8", "-ac.version", "4"),
        ("-ac.default.backend=A", "-ac.default.quant={dtype_qk: int8}", "-ac.version=4"),
        ("--attention-config.quant.dtype_qk=int8", "-ac.default", "{backend: A, version: 4}"),
        ("-ac", '{"backend": "A", "quant": {"dtype_qk": "int8"}, "version": 4}'),
        ("-ac", '{"default": {"backend": "A", "quant": {"dtype_qk": "int8"}}}', "-ac", '{"version": 4}'),
        ("-ac", '{"quant.dtype_qk": "int8", "default": "A"}', "-ac.version=4"),
    ],
)
def test_the_spellings_of_a_default_are_the_same_settings(words: tuple[str, ...]) -> None:
    config = attention(*words)
    assert config.default == AttentionSpec("A", version=4, quant={"dtype_qk": "int8"})
    assert config.origins == dict.fromkeys(
        ("attention.default", "attention.default.quant.dtype_qk", "attention.default.version"), "command line"
    )


@pytest.mark.parametrize(
    "words",
    [
        ("attention.per_role.cross.image=A", "attention.per_role.cross.image.skip_softmax.threshold=0.1"),
        ("attention.per_role.cross={image: {backend: A, skip_softmax: {threshold: 0.1}}}",),
        ("attention.per_role={cross.image: {skip_softmax: {threshold: 0.1}}}", "-ac.per_role.cross.image", "A"),
        ("-ac.per_role.cross", "{image.skip_softmax.threshold: 0.1, image.backend: A}"),
        ("-ac", '{"per_role": {"cross": {"image": {"backend": "A", "skip_softmax": {"threshold": 0.1}}}}}'),
    ],
)
def test_the_spellings_of_a_role_are_the_same_settings(words: tuple[str, ...]) -> None:
    expected = {"cross.image": AttentionSpec("A", skip_softmax={"threshold": 0.1})}
    assert attention(*words).per_role == expected
    assert attention(*words, "attention.per_role.cross.options.x=1").per_role == {
        **expected,
        "cross": AttentionSpec(options={"x": 1}),
    }


_NAME = st.sampled_from(["a", "b", "backend", "version"])
_TEXT = st.text("aé1e-'\"${}: ", max_size=6).filter(lambda text: "${" not in text)
_VALUE = _TEXT | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
_BLOCK = st.dictionaries(_NAME, _VALUE | st.lists(_VALUE, max_size=2), min_size=1, max_size=2)
_TREE = st.fixed_dictionaries(
    {"backend": st.sampled_from(["A", "auto"])},
    optional={
        "version": st.integers(1, 9),
        "on_unsupported": st.sampled_from(["error", "fallback"]),
        "quant": _BLOCK,
        "skip_softmax": _BLOCK,
        "options": _BLOCK,
    },
)


def _spell(value: Any) -> str:
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_spell, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_spell(item)}' for key, item in value.items())}}}"
    return json.dumps(value)


def _leaves(tree: dict[str, Any], path: str) -> dict[str, Any]:
    below = [
        _leaves(item, f"{path}.{key}") if isinstance(item, dict) else {f"{path}.{key}": item}
        for key, item in tree.items()
    ]
    return {key: value for leaves in below for key, value in leaves.items()}


def _exact(config: AttentionConfig) -> str:
    """As text, as 1, 1.0 and True are equal."""
    specs = {"default": config.default, **config.per_role}
    return json.dumps(
        {key: spec and dataclasses.asdict(spec) for key, spec in specs.items()}, sort_keys=True, default=dict
    )


@given(_TREE, st.sampled_from(["default", "per_role.self", "per_role.cross.image"]), st.randoms(use_true_random=False))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nested_dotted_json_yaml_and_python_are_one(tmp_path: Path, tree: Any, place: str, random: Any) -> None:
    dotted = [f"attention.{key}={_spell(value)}" for key, value in _leaves(tree, place).items()]
    random.shuffle(dotted)
    nested = attention(f"attention.{place}={_spell(tree)}")
    file = tmp_path / "my.yaml"
    file.write_text(json.dumps({"attention": {place: tree}}), encoding="utf-8")
    names = place.split(".")
    python = {names[0]: tree if len(names) == 1 else {".".join(names[1:]): tree}}
    others = [
        attention(*dotted),
        attention(*(f"-ac.{word.removeprefix('attention.')}" for word in dotted)),
        attention("-ac", json.dumps({place: tree})),
        attention(file=file),
        AttentionConfig(**python),
    ]
    for other in others:
        assert other == nested
        assert _exact(other) == _exact(nested)


# --- one key twice, and what is not a choice ------------------------------------------------------------------------


def test_one_field_with_two_values_is_a_fault_that_names_both() -> None:
    for second in ("2", "true", "1.0", "'1'"):
        (fault,) = faults_of("attention.default.options.x=1", f"-ac.options.x={second}")
        assert fault.key == "attention.default.options.x"
        assert fault.rule == f"is given twice, as attention.default.options.x=1 and as -ac.options.x {second}"
    for value in ("1", "nan", "[a,null]"):
        words = (f"attention.default.options.x={value}", f"attention.default={{options: {{x: {value}}}}}")
        assert attention(*words).default is not None


@pytest.mark.parametrize(
    ("text", "key", "rule"),
    [
        ("default: {}", "attention.default", "is an empty mapping"),
        ("default: {quant: {}}", "attention.default.quant", "is an empty mapping for quant"),
        ("per_role: {a: {}}", "attention.per_role.a", "is an empty mapping for the role a"),
        ("per_role: {a: {options: {}}}", "attention.per_role.a.options", "is an empty mapping for options"),
        ("default: {quant: int8}", "attention.default.quant", "is a mapping from fields to values"),
        ("default: {quant: [int8]}", "attention.default.quant", "is a mapping from fields to values"),
        ("default: {quant: '${run.seed}'}", "attention.default.quant", "is a mapping from fields to values"),
        ("default: {quant: {x: {y: 1}}}", "attention.default.quant.x", "takes a scalar or a list of scalars"),
        ("default: {quant: {x: [[1]]}}", "attention.default.quant.x", "takes a scalar or a list of scalars"),
        ("default: {quant: {x: [{y: 1}]}}", "attention.default.quant.x", "takes a scalar or a list of scalars"),
        ("default: {quant: {x.y: 1}}", "attention.default.quant.x.y", "is below a field, which takes a scalar"),
        ("default: {quant: {1: x}}", "attention.default.quant", "has the key 1, which is not text"),
        ('default: {quant: {x: "a\\0b"}}', "attention.default.quant.x", "has a character that is not text"),
        ("default: {quant: {x: '???'}}", "attention.default.quant.x", "is marked as still to be set"),
        ("default: {version: 0}", "attention.default.version", "takes a whole number of at least 1"),
        ("default: {version: yes}", "attention.default.version", "takes a whole number of at least 1"),
        ("default: {version: '4'}", "attention.default.version", "takes a whole number of at least 1"),
        ("default: {version: {x: 1}}", "attention.default.version", "takes a whole number of at least 1"),
        ("default: {version.x: 1}", "attention.default.version.x", "is below version, which takes one value"),
        ("default: {on_unsupported: null}", "attention.default.on_unsupported", "takes error or fallback"),
        ("default: {backend: {backend: X}}", "attention.default", "takes the name of a backend"),
        ("per_role: {quant: {x: 1}}", "attention.per_role.quant", "called quant, which is a key of a role's choice"),
        ("per_role: {a: {version: {b: 1}}}", "attention.per_role.a.version", "takes a whole number"),
        ("per_role: {a.version.b: X}", "attention.per_role.a.version.b", "called version, which is a key of"),
        ("per_role: {a.backend.b: X}", "attention.per_role.a.backend.b", "called backend, which is a key of"),
        ("agreement: required", "attention.agreement", "takes require or negotiate"),
    ],
)
def test_what_is_not_a_choice_is_a_fault_that_names_it(written: Any, text: str, key: str, rule: str) -> None:
    (fault,) = faults_of(file=written(f"{{{text}}}"))
    assert fault.key == key
    assert rule in fault.rule
    assert fault.origin == "my.yaml"


def test_keys_beside_the_reserved_ones_of_a_role_are_a_fault_with_the_way_out(written: Any) -> None:
    (fault,) = faults_of(file=written("{per_role: {cross: {quant: {x: 1}, image: B}}}"))
    assert fault.key == "attention.per_role.cross"
    assert fault.rule == "has image beside the keys of a choice, for the role cross"
    assert fault.remedy == (
        "put the backend's options below quant, skip_softmax, options; write roles as cross: NAME and cross.ROLE: NAME"
    )
    (typo,) = faults_of("attention.per_role.cross={backend: A, quantt: {x: 1}}")
    assert typo.rule == "has quantt beside the keys of a choice, for the role cross"
    assert typo.remedy == "did you mean quant for quantt?"
    both, other = faults_of("attention.per_role.cross={version: 0, quantt.x: 1, image: B}")
    assert "quantt.x, image beside" in both.rule
    assert both.remedy.startswith("did you mean quant for quantt? Otherwise put the backend's options")
    assert other.key == "attention.per_role.cross.version"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("attention.default.quantt.x=1",), "attention.default.quantt.x"),
        (("attention.default={backend: A, quantt: {x: 1}}",), "attention.default.quantt"),
        (("-ac.quantt.x", "1"), "attention.quantt.x"),
        (("-ac", '{"quantt": {"x": 1}}'), "attention.quantt.x"),
        (("attention.quant.x=1",), "attention.quant.x"),
    ],
)
def test_a_wrong_key_of_the_default_suggests_the_nearest(words: tuple[str, ...], key: str) -> None:
    (fault,) = faults_of(*words)
    assert (fault.key, fault.rule) == (key, "no such key")
    assert fault.remedy == "did you mean attention.default.quant.FIELD?"
    (unlike,) = faults_of("attention.default.zzz=1")
    assert "attention.default.on_unsupported" in unlike.remedy


# --- layers ---------------------------------------------------------------------------------------------------------

FILE = """{
    default: {backend: A, version: 3, quant: {x: 1, y: 2}},
    per_role: {cross: {backend: B, on_unsupported: fallback, options: {z: 1}}, cross.image: {backend: C, version: 2}}
}"""


def test_a_backend_takes_the_lower_layers_options_of_its_own_choice_only(written: Any) -> None:
    config = attention("attention.per_role.cross=D", "attention.per_role.cross.quant.q=1", file=written(FILE))
    assert config.default == AttentionSpec("A", version=3, quant={"x": 1, "y": 2})
    assert config.per_role == {
        "cross": AttentionSpec("D", quant={"q": 1}),
        "cross.image": AttentionSpec("C", version=2),
    }
    assert "attention.per_role.cross.options.z" not in config.origins
    again = attention("attention.default=A", file=written(FILE))
    assert again.default == AttentionSpec("A")
    assert again.per_role["cross"].options == {"z": 1}
    assert attention("attention.default=null", file=written(FILE)).default is None


def test_options_alone_merge_by_field(written: Any) -> None:
    words = ("attention.default.quant.y=3", "attention.default.version=null", "-ac.per_role.cross.on_unsupported=error")
    config = attention(*words, file=written(FILE))
    assert config.default == AttentionSpec("A", quant={"x": 1, "y": 3})
    assert config.per_role["cross"] == AttentionSpec("B", options={"z": 1})
    assert config.origins["attention.default.quant.x"] == "my.yaml"
    assert config.origins["attention.default.quant.y"] == "command line"
    assert "attention.default.version" not in config.origins


def test_options_without_a_backend_stay_with_auto() -> None:
    config = attention("-ac.quant.x=1", "attention.per_role.a.version=4", "attention.per_role.b.version=null")
    assert config.default == AttentionSpec("auto", quant={"x": 1})
    assert config.per_role == {"a": AttentionSpec("auto", version=4)}
    assert set(config.origins) == {"attention.default.quant.x", "attention.per_role.a.version"}


def test_the_environment_sets_only_an_unset_backend(written: Any) -> None:
    environ = {BACKEND: "E"}
    assert attention("-ac.quant.x=1", environ=environ).default == AttentionSpec("E", quant={"x": 1})
    assert attention(file=written("{default.quant.x: 1}"), environ=environ).default == AttentionSpec(
        "E", quant={"x": 1}
    )
    assert attention("-ac.backend=A", "-ac.quant.x=1", environ=environ).default == AttentionSpec("A", quant={"x": 1})


def test_removals_take_a_choice_a_block_or_a_field(written: Any) -> None:
    file = written(FILE)
    assert attention("~attention.default", file=file).default is None
    assert attention("~attention.default", file=file, environ={BACKEND: "E"}).default == AttentionSpec("E")
    assert attention("~attention.default.quant.x", "~attention.default.version=3", file=file).default == AttentionSpec(
        "A", quant={"y": 2}
    )
    assert attention("~attention.per_role.cross", file=file).per_role == {"cross.image": AttentionSpec("C", version=2)}
    for words in (("~attention.default.quant",), ("attention.default.quant=null",)):
        assert attention(*words, file=file).default == AttentionSpec("A", version=3)
        assert attention(*words, "-ac.quant.z=1", file=file).default == AttentionSpec("A", version=3, quant={"z": 1})
    assert attention("~attention.default", "~attention.default.quant.x", file=file).default is None
    assert attention("~attention.per_role.a", file=written("{per_role.a.version: 3}")).per_role == {}


def test_a_removal_that_finds_nothing_is_a_fault(written: Any) -> None:
    file = written("{default.quant: {x: 1}}")
    faults = faults_of(
        "~attention.default.quant.y",
        "~attention.default.quant.x=true",
        "~attention.default.options",
        "~attention.per_role.a",
        "~attention.default.quant={x: 1}",
        "~attention.default.zzz",
        file=file,
    )
    rules = {fault.key: fault.rule for fault in faults if fault.key != "~attention.default.quant"}
    assert rules == {
        "~attention.default.quant.y": "no entry to remove",
        "~attention.default.quant.x": "does not match the value to remove, 1",
        "~attention.default.options": "no entry to remove",
        "~attention.per_role.a": "no entry to remove",
        "~attention.default.zzz": "no such key",
    }
    assert "~attention.default.quant.x" in next(fault.remedy for fault in faults if fault.key.endswith(".y"))


def test_agreement_is_a_plain_key(written: Any) -> None:
    assert attention().agreement == "require"
    file = written("{agreement: negotiate}")
    assert attention(file=file).agreement == "negotiate"
    assert attention(file=file).origins == {"attention.agreement": "my.yaml"}
    assert attention("-ac.agreement", "require", file=file).agreement == "require"
    assert attention("~attention.agreement", file=file).agreement == "require"


# --- interpolation, and the way back --------------------------------------------------------------------------------


def test_interpolations_in_options_see_the_merged_tree() -> None:
    config = attention(
        "-ac.backend=A",
        "-ac.version=${oc.decode:${oc.env:V}}",
        "-ac.quant.x=${run.seed}",
        "-ac.quant.y=[${attention.default.quant.x},'\\${x}']",
        "-ac.options.backend=${attention.default.backend}",
        "attention.per_role.a=${attention.default}",
        "attention.per_role.a.quant.x=${attention.default.quant.x}",
        environ={"V": "4"},
    )
    assert config.default == AttentionSpec("A", version=4, quant={"x": 0, "y": [0, "${x}"]}, options={"backend": "A"})
    assert config.per_role == {"a": AttentionSpec("A", quant={"x": 0})}


def test_an_interpolation_in_an_option_that_fails_is_a_fault() -> None:
    missing, mapping, number = faults_of(
        "-ac.quant.x=${nope}", "-ac.options.y=${attention.per_role.a}", "-ac.version=${run.dtype}", "-ac.per_role.a=A"
    )
    assert (missing.key, missing.value) == ("attention.default.quant.x", "${nope}")
    assert "'nope' not found" in missing.rule
    assert (mapping.key, number.key) == ("attention.default.options.y", "attention.default.version")
    assert "takes a scalar or a list of scalars" in mapping.rule
    assert "oc.decode" in number.remedy


def test_a_spec_is_written_as_a_name_or_as_a_mapping() -> None:
    config, _ = compose([PROMPT, "-ac.version=3", "-ac.quant.x='1e3'", "-ac.per_role.a=A"], environ={})
    assert config is not None
    assert to_mapping(config)["attention"] == {
        "agreement": "require",
        "default": {"backend": "auto", "version": 3, "quant": {"x": "${oc.decode:\"'1e3'\"}"}},
        "per_role": {"a": "A"},
    }


def test_what_is_written_composes_back(tmp_path: Path) -> None:
    config, _ = compose(
        [PROMPT, "-ac.quant={x: '1e3', y: 1e-7, z: [010, '1', 1, null]}", "-ac.per_role.a.version=2"], environ={}
    )
    assert config is not None
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(to_mapping(config)), encoding="utf-8")
    assert compose(file=file, environ={BACKEND: "E"}) == (config, ())
