"""The arguments of library calls: every form gives the same configuration, and values are literal."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from omegaconf import DictConfig, ListConfig, OmegaConf

from backends.registry import DiffusionAttentionBackendEnum
from configs.arguments import attention_settings, library_settings
from configs.faults import FaultError
from configs.schema import AttentionConfig, AttentionSpec, ParallelConfig
from tests.configs.composing import BACKEND


class Named(enum.StrEnum):
    TORCH_SDPA = "sdpa"


@dataclasses.dataclass
class Choice:
    backend: str = "TORCH_SDPA"
    on_unsupported: str = "error"


def settings(attention: Any, environ: Mapping[str, str] = {}) -> AttentionConfig:
    return attention_settings(attention, environ)


def faults_of(attention: Any, parallel: Mapping[str, Any] = {}) -> list[str]:
    with pytest.raises(FaultError) as caught:
        library_settings(attention, parallel, {})
    assert all(fault.remedy for fault in caught.value.faults)
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.parametrize(
    "form",
    [
        "TORCH_SDPA",
        DiffusionAttentionBackendEnum.TORCH_SDPA,
        Named.TORCH_SDPA,
        AttentionSpec("TORCH_SDPA"),
        AttentionConfig(backend="TORCH_SDPA"),
        {"backend": "TORCH_SDPA"},
        {"backend": Named.TORCH_SDPA, "on_unsupported": "error", "per_role": None},
        {"default": "TORCH_SDPA"},
        {"default": {"backend": DiffusionAttentionBackendEnum.TORCH_SDPA}, "per_role": {}},
        MappingProxyType({"default": AttentionSpec("TORCH_SDPA")}),
        "attention.default=TORCH_SDPA",
        ["attention.default=TORCH_SDPA"],
        ("attention.default.backend=TORCH_SDPA",),
        OmegaConf.create({"name": "TORCH_SDPA", "at": {"default": "${name}"}}).at,
        OmegaConf.create({"backend": "TORCH_SDPA", "version": None}),
        OmegaConf.structured(Choice),
        ListConfig(["attention.default=TORCH_SDPA"]),
    ],
    ids=repr,
)
def test_every_form_of_one_choice_is_the_same_configuration(form: Any) -> None:
    assert settings(form) == AttentionConfig(AttentionSpec("TORCH_SDPA"))
    assert settings(form, {BACKEND: "OTHER"}) == AttentionConfig(AttentionSpec("TORCH_SDPA"))


@pytest.mark.parametrize(
    "form",
    [
        AttentionSpec("A", on_unsupported="fallback", quant={"x": [1]}),
        {"backend": "A", "on_unsupported": "fallback", "quant": {"x": (1,)}},
        {"default": "A", "on_unsupported": "fallback", "quant.x": [1]},
        ["attention.default=A", "attention.default.on_unsupported=fallback", "attention.default.quant.x=[1]"],
        OmegaConf.create({"backend": "A", "on_unsupported": "fallback", "quant": {"x": [1]}}),
        {"default": {"backend": "A", "on_unsupported": "fallback", "quant": OmegaConf.create({"x": [1]})}},
    ],
    ids=repr,
)
def test_every_form_of_a_choice_with_options_is_the_same_configuration(form: Any) -> None:
    assert settings(form).default == AttentionSpec("A", on_unsupported="fallback", quant={"x": [1]})


@pytest.mark.parametrize(
    "form",
    [
        None,
        {},
        AttentionConfig(),
        {"per_role": {"self": "A"}},
        {"default": None, "per_role": {"self": "A"}},
        AttentionConfig(per_role={"self": AttentionSpec("A")}),
        "attention.per_role.self=A",
        OmegaConf.create({"per_role": {"self": "A"}}),
        DictConfig(None),
    ],
    ids=repr,
)
def test_the_environment_fills_an_unset_default_of_every_form(form: Any) -> None:
    config = settings(form, {BACKEND: "B"})
    assert config.default == AttentionSpec("B")
    assert config.origins["attention.default"] == f"environment variable {BACKEND}"
    assert config.may_be_unused == {"attention.default"}
    assert config.per_role == settings(form).per_role
    assert settings(form, {BACKEND: " "}).default is None


def test_text_is_literal_but_in_overrides() -> None:
    assert settings({"backend": "A", "options": {"x": "${y}"}}).default == AttentionSpec("A", options={"x": "${y}"})
    pointing = settings(["attention.default=A", "attention.per_role.self=${attention.default}"])
    assert pointing.per_role == {"self": AttentionSpec("A")}


def test_parallel_arguments_are_literal() -> None:
    assert library_settings(None, {"strategy": "ring", "ulysses": 1, "ring": None}, {})[1] == ParallelConfig(
        ulysses=1, strategy="ring"
    )
    assert library_settings("parallel.strategy=ring", {"ring": 2}, {})[1] == ParallelConfig(ring=2, strategy="ring")
    (fault,) = faults_of(None, {"strategy": "ulysses,ring"})
    assert fault.startswith("parallel.strategy=ulysses,ring: takes auto, local, ulysses, ring or gather_kv; did you")
    (fault,) = faults_of(None, {"ulysses": "2"})
    assert fault.startswith("parallel.ulysses='2': takes a whole number")
    (fault,) = faults_of("parallel.ring=3", {"ring": 2})
    assert "is given twice, as parallel.ring=3 and as parallel.ring: 2" in fault


@pytest.mark.parametrize(
    ("form", "beginning"),
    [
        (3, "attention=int: takes a backend's name, a member of an Enum"),
        ([1], "attention=list: takes a backend's name"),
        (" ", "attention.default= : takes the name of a backend"),
        ({"defualt": "A"}, "attention.defualt=A: no such key; did you mean attention.default?"),
        ({"backend": "A", "default": "B"}, "attention.default: is given twice, as "),
        ({1: "A"}, "attention: has the key 1, which is not text"),
        ("run.seed=3", "run.seed=3: this call configures attention, and nothing would use it"),
        ("attention.default=A,B", "attention.default=A,B: is a sweep of 2 values"),
        (OmegaConf.create({"default": "???"}), "attention.default=???: is marked as still to be set"),
        (OmegaConf.create({"default": {"version": "???"}}), "attention.default.version=???: is marked as still"),
        (OmegaConf.create({"default": "${a}", "a": "${default}"}), "default: cannot be resolved (it goes in a circle"),
        (OmegaConf.create({"default": "${a}", "a": "???"}), "default: cannot be resolved (it points at a value that"),
        (OmegaConf.create({"default": "${gone}"}), "default: cannot be resolved (Interpolation key 'gone' not found)"),
    ],
    ids=repr,
)
def test_what_is_no_form_is_refused_with_a_way_out(form: Any, beginning: str) -> None:
    assert faults_of(form)[0].startswith(beginning)


def test_a_whole_run_is_not_composed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("configs.sources._PRESETS", None)
    assert settings("A").default == AttentionSpec("A")
    (fault,) = faults_of("attention.default=${generate.steps}")
    assert "cannot be resolved" in fault
