"""Choices from Python: any form gives the same plain specs, or faults that name the place."""

from __future__ import annotations

import copy
import dataclasses
import enum
import pickle
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from configs.faults import FaultError
from configs.schema import AttentionConfig, AttentionSpec, RunSettings


class Backend(enum.Enum):
    TORCH_SDPA = "some.class.path"
    AUTO = None


class Named(enum.StrEnum):
    FLASH_ATTN = "flash"


@dataclass(frozen=True)
class Quant:
    dtype_qk: str | None = None
    dtype_pv: str | None = None
    skip: tuple[int, ...] | None = None


@pytest.mark.parametrize(
    ("register", "key", "rule"),
    [
        (None, "attention.register", "is a mapping from names to class paths"),
        (5, "attention.register", "is a mapping from names to class paths"),
        ({1: "a.B"}, "attention.register", "is a mapping from names to class paths"),
        ({"A": "x"}, "attention.register.A", "takes the dotted path of a class"),
        ({"A": int}, "attention.register.A", "takes the dotted path of a class"),
        ({"Auto": "a.B"}, "attention.register.Auto", "is not a name of a backend"),
        ({"A b": "a.B"}, "attention.register.A b", "is not a name of a backend"),
    ],
)
def test_registrations_from_python_are_checked_as_those_of_the_command_line(register: Any, key: str, rule: str) -> None:
    for others in ({}, {"default": "X"}):
        assert faults_of(register=register, **others)[key].startswith(rule)
    assert AttentionConfig(register={"A": "a.B"}, default="X").register == {"A": "a.B"}  # type: ignore[arg-type]


def faults_of(**fields: Any) -> dict[str, str]:
    with pytest.raises(FaultError) as caught:
        AttentionConfig(**fields)
    assert all(fault.remedy for fault in caught.value.faults)
    return {fault.key: fault.rule for fault in caught.value.faults}


@pytest.mark.parametrize(
    "choice",
    [
        "TORCH_SDPA",
        Backend.TORCH_SDPA,
        AttentionSpec("TORCH_SDPA"),
        AttentionSpec(Backend.TORCH_SDPA),  # type: ignore[arg-type]
        {"backend": "TORCH_SDPA"},
        {"backend": Backend.TORCH_SDPA, "version": None, "quant": None},
        MappingProxyType({"backend": "TORCH_SDPA"}),
    ],
)
def test_a_choice_is_a_name_a_member_a_mapping_or_a_spec(choice: Any) -> None:
    expected = AttentionSpec("TORCH_SDPA")
    assert AttentionConfig(choice).default == expected
    assert AttentionConfig(backend=choice) == AttentionConfig(default=choice)
    assert AttentionConfig(per_role={"cross.image": choice}).per_role == {"cross.image": expected}
    assert type(AttentionConfig(choice).default.backend) is str  # type: ignore[union-attr]


@pytest.mark.parametrize("auto", ["auto", "AUTO", "Auto", Backend.AUTO])
def test_any_spelling_of_auto_is_auto(auto: Any) -> None:
    assert AttentionSpec(auto).backend == "auto"
    assert AttentionConfig(auto).default == AttentionSpec()
    assert AttentionConfig(per_role={"a": auto}).per_role["a"] == AttentionSpec("auto")


def test_a_member_that_is_text_counts_by_its_name() -> None:
    assert AttentionSpec(Named.FLASH_ATTN).backend == "FLASH_ATTN"
    assert type(AttentionSpec(Named.FLASH_ATTN).backend) is str


def test_roles_nest_at_any_depth() -> None:
    nested = {"cross": {"image": {"late": "A", "early.on": {"backend": "B", "version": 2}}}, "self": AttentionSpec("C")}
    assert AttentionConfig(per_role=nested).per_role == {  # type: ignore[arg-type]
        "cross.image.late": AttentionSpec("A"),
        "cross.image.early.on": AttentionSpec("B", version=2),
        "self": AttentionSpec("C"),
    }
    assert AttentionConfig(per_role=None).per_role == AttentionConfig(per_role={}).per_role == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "block", [{"dtype_qk": "int8", "skip": [1]}, Quant("int8", skip=(1,)), {"dtype_qk": "int8", "skip": (1,)}]
)
def test_a_block_is_a_mapping_or_a_dataclass(block: Any) -> None:
    expected = AttentionSpec("A", quant={"dtype_qk": "int8", "skip": [1]})
    assert AttentionSpec("A", quant=block) == expected
    assert AttentionSpec("A", quant=block).blocks == {"quant": {"dtype_qk": "int8", "skip": (1,)}}
    assert AttentionConfig({"backend": "A", "quant": block}).default == expected  # type: ignore[arg-type]
    assert AttentionConfig(per_role={"x": {"quant": block, "backend": "A"}}).per_role == {"x": expected}  # type: ignore[dict-item]
    assert AttentionSpec("A").blocks == {}


def test_text_from_python_is_never_an_interpolation() -> None:
    spec = AttentionSpec("A", options={"x": "${run.seed}", "y": ["\\${z}"]})
    assert AttentionConfig({"backend": "A", "options": spec.options}).default == spec  # type: ignore[arg-type]
    assert spec.options == {"x": "${run.seed}", "y": ("\\${z}",)}


def test_what_is_given_is_copied_and_left_as_it_is() -> None:
    given = {"cross": {"backend": "A", "quant": {"x": [1, 2]}}, "self": Backend.TORCH_SDPA}
    before = copy.deepcopy(given)
    config = AttentionConfig(per_role=given)  # type: ignore[arg-type]
    spec = AttentionSpec("A", quant=given["cross"]["quant"])  # type: ignore[index]
    specs = {"a": spec}
    normal = AttentionConfig(per_role=specs)
    assert given == before
    given["cross"]["quant"]["x"].append(3)  # type: ignore[index]
    specs["b"] = spec
    assert config.per_role["cross"].quant == spec.quant == {"x": (1, 2)}
    assert normal.per_role == {"a": spec}


def test_specs_and_configurations_pickle_compare_hash_and_replace() -> None:
    spec = AttentionSpec("A", 2, "fallback", quant={"x": 1}, options={"y": [None]})
    config = AttentionConfig(spec, {"a.b": spec}, agreement="negotiate")
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert len({spec, dataclasses.replace(spec), AttentionSpec("A")}) == 2
    assert dataclasses.replace(config, default=None) == AttentionConfig(None, {"a.b": spec}, agreement="negotiate")
    assert config != AttentionConfig(spec, {"a.b": spec})
    assert config != AttentionConfig(dataclasses.replace(spec, quant={"x": 2}), {"a.b": spec}, agreement="negotiate")


def test_a_normal_configuration_keeps_its_specs() -> None:
    spec = AttentionSpec("A", quant={"x": 1})
    assert AttentionConfig(spec).default is spec
    assert AttentionConfig(per_role={"a": spec}).per_role["a"] is spec


def test_default_and_its_shorthand_exclude_each_other() -> None:
    assert "backend, which is short for it" in faults_of(default="A", backend="A")["attention.default"]


def test_every_fault_of_a_configuration_comes_at_once() -> None:
    faults = faults_of(
        default=3,
        per_role={
            "a": {"version": "4", "quant": {"x": object()}, "options": {}},
            "b": {},
            "c": {"backend": "A", "d": "B"},
            "quant": "A",
            "e..f": "A",
            "g": None,
            "h": {"quant": {"x": Named.FLASH_ATTN}},
            "i": {"on_unsupported": "fall"},
        },
        agreement="always",
    )
    assert faults == {
        "attention.default": "takes the name of a backend, or auto",
        "attention.agreement": "takes require or negotiate",
        "attention.per_role.a.version": "takes a whole number of at least 1, the version of the backend's package",
        "attention.per_role.a.quant.x": "takes a scalar or a list of scalars",
        "attention.per_role.a.options": "is an empty mapping for options",
        "attention.per_role.b": "is an empty mapping for the role b",
        "attention.per_role.c": "has d beside the keys of a choice, for the role c",
        "attention.per_role.quant": "has a role that is called quant, which is a key of a role's choice",
        "attention.per_role": "has the key e..f, which is not text, or not names joined by dots",
        "attention.per_role.g": "takes the name of a backend, or auto",
        "attention.per_role.h.quant.x": "takes a scalar or a list of scalars",
        "attention.per_role.i.on_unsupported": "takes error or fallback",
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"per_role": "A"},
        {"per_role": {1: "A"}},
        {"per_role": AttentionSpec("A")},
        {"per_role": {"a": {"image": "A"}, "a.image": "B"}},
        {"default": ["A"]},
        {"default": {"backend": "A", "quantt": {"x": 1}}},
        {"backend": " "},
        {"agreement": None},
    ],
)
def test_a_wrong_type_or_shape_is_a_fault(fields: dict[str, Any]) -> None:
    assert len(faults_of(**fields)) == 1


def test_only_a_version_and_blocks_may_be_none() -> None:
    for fields in ({"backend": None}, {"on_unsupported": None}):
        with pytest.raises(FaultError):
            AttentionSpec(**fields)  # type: ignore[arg-type]


def test_every_fault_of_a_spec_comes_at_once() -> None:
    with pytest.raises(FaultError) as caught:
        AttentionSpec(
            None,  # type: ignore[arg-type]
            True,
            "maybe",
            quant=Quant(),  # type: ignore[arg-type]
            skip_softmax={"a.b": 1, "c": {"d": 1}},
            options="x",  # type: ignore[arg-type]
        )
    assert {fault.key: fault.value for fault in caught.value.faults} == {
        "AttentionSpec": "null",
        "AttentionSpec.version": "true",
        "AttentionSpec.on_unsupported": "maybe",
        "AttentionSpec.quant": "{}",
        "AttentionSpec.skip_softmax.a.b": "1",
        "AttentionSpec.skip_softmax.c": "{d: 1}",
        "AttentionSpec.options": "x",
    }


@pytest.mark.parametrize("block", [{"x": [1, {"y": [2]}]}])
def test_option_blocks_take_only_plain_data(block: Any) -> None:
    with pytest.raises(FaultError):
        AttentionSpec("A", options=block)


def test_nothing_can_change_a_configuration_from_outside() -> None:
    register = {"MINE": "a.B"}
    config = AttentionConfig(AttentionSpec("A", options={"x": [1]}), {"self": "B"}, register)  # type: ignore[dict-item]
    register["OTHER"] = "c.D"
    assert config.register == {"MINE": "a.B"}
    assert config.default is not None
    for mapping in (config.per_role, config.register, config.origins, config.default.options):
        with pytest.raises(TypeError):
            mapping["x"] = 1  # type: ignore[index]
    assert config.default.options == {"x": (1,)}
    assert hash(config) == hash(copy.deepcopy(config)) == hash(pickle.loads(pickle.dumps(config)))
    assert dataclasses.asdict(config)["default"]["options"] == {"x": (1,)}


def test_omegaconf_containers_are_mappings_and_lists() -> None:
    blocks = OmegaConf.create({"quant": {"x": [1, "${..y}"], "y": 2}})
    spec = AttentionSpec("A", quant=blocks.quant)
    assert spec.quant == {"x": (1, 2), "y": 2}
    assert AttentionSpec("A", options={"x": OmegaConf.create([1])}).options == {"x": (1,)}
    assert AttentionSpec("A", quant=DictConfig(None)) == AttentionSpec("A")
    roles = OmegaConf.create({"cross": {"image": "A"}, "self": {"backend": "B", "options": {"x": [1]}}})
    assert AttentionConfig(per_role=roles).per_role == {
        "cross.image": AttentionSpec("A"),
        "self": AttentionSpec("B", options={"x": [1]}),
    }
    assert AttentionConfig(register=OmegaConf.create({"A": "a.B"})).register == {"A": "a.B"}
    with pytest.raises(FaultError, match=r"AttentionSpec\.version=\?\?\?: is marked as still to be set"):
        AttentionSpec("A", version="???")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [AttentionSpec, AttentionConfig, RunSettings])
def test_a_misspelt_field_is_answered_with_the_nearest(kind: type) -> None:
    name, meant = {"RunSettings": ("sed", "seed")}.get(kind.__name__, ("bakend", "backend"))
    with pytest.raises(FaultError) as caught:
        kind(**{name: "A"})
    assert str(caught.value) == f"{kind.__name__}.{name}: no such field; did you mean {meant}?"
