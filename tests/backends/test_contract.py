"""What the selection contract promises of the enum's members, the registry, and what one call may ask."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest

from backends import registrations
from backends.declared.reference import ReferenceBackend
from backends.declared.torch_sdpa import TorchSdpaBackend
from backends.interface import AttentionBackend, Requirements, Variant
from backends.platforms.facts import DeviceFacts
from backends.registrations import register_diffusion_backend
from backends.registry import DiffusionAttentionBackendEnum, Registry
from backends.selector import get_attn_backend_for_role, get_diffusion_attn_backend_cls, select
from configs.faults import FaultError
from configs.schema import AttentionConfig, AttentionSpec

REFERENCE = DiffusionAttentionBackendEnum.REFERENCE
CPU = DeviceFacts("cpu")
CALL = Requirements(64, 8, 8, "float32", "self")


class Replacement(ReferenceBackend):
    """Serves under the built-in name."""


REPLACEMENT = f"{__name__}.Replacement"


class Bounded(AttentionBackend):
    """Names packages in each of the three ways."""

    variants = (
        Variant(
            "one",
            "backends.kernels.reference.ReferenceImpl",
            distributions=("pytest",),
            at_least=(("hypothesis", "1"),),
            below=(("numpy", "2"),),
        ),
    )

    @staticmethod
    def get_name() -> str:
        return "BOUNDED"


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    before = registrations._registrations
    yield
    registrations._registrations = before


def test_the_policy_of_a_device_answers_with_the_path_of_a_class_that_serves() -> None:
    hopper = DeviceFacts("cuda", (9, 0), packages={"fa3-fwd": "0.0.3"})
    call = Requirements(128, 8, 8, "bfloat16", "self")
    assert get_diffusion_attn_backend_cls(call, hopper) == DiffusionAttentionBackendEnum.FLASH_ATTN.get_path()
    assert get_diffusion_attn_backend_cls(CALL, CPU, selected="REFERENCE") == REFERENCE.get_path()
    other = Registry({"REFERENCE": REPLACEMENT})
    assert get_diffusion_attn_backend_cls(CALL, CPU, selected=REFERENCE, registry=other) == REPLACEMENT


def test_the_policy_of_a_device_refuses_an_explicit_choice_that_cannot_run() -> None:
    with pytest.raises(FaultError, match="it runs on"):
        get_diffusion_attn_backend_cls(CALL, CPU, selected="CUDNN_ATTN")


def test_a_registration_replaces_a_members_path_and_not_its_value() -> None:
    value = REFERENCE.value
    assert (REFERENCE.get_path(), REFERENCE.get_class(), REFERENCE.is_overridden()) == (value, ReferenceBackend, False)
    register_diffusion_backend(REFERENCE, REPLACEMENT)
    assert (REFERENCE.get_path(), REFERENCE.get_class()) == (REPLACEMENT, Replacement)
    assert REFERENCE.is_overridden()
    assert REFERENCE.get_path(include_classname=False) == __name__
    assert REFERENCE.value == value
    assert not DiffusionAttentionBackendEnum.TORCH_SDPA.is_overridden()


def test_clearing_an_override_gives_the_next_selection_the_built_in_class() -> None:
    registry, config = Registry(), AttentionConfig(backend=REFERENCE)
    with register_diffusion_backend("TORCH_SDPA", "backends.declared.torch_sdpa.TorchSdpaBackend"):
        register_diffusion_backend("REFERENCE", REPLACEMENT)
        register_diffusion_backend(REFERENCE, REPLACEMENT)
        assert get_attn_backend_for_role("self", CALL, CPU, config, registry)[0] is Replacement
        REFERENCE.clear_override()
        assert get_attn_backend_for_role("self", CALL, CPU, config, registry)[0] is ReferenceBackend
        assert not REFERENCE.is_overridden()
        REFERENCE.clear_override()  # there is none left
        assert "TORCH_SDPA" in registrations.registered()


def test_roles_resolve_in_the_promised_order_and_the_platform_returns_no_spec() -> None:
    def chosen(**per_role: Any) -> tuple[type[AttentionBackend], AttentionSpec | None]:
        config = AttentionConfig(default=per_role.pop("default", None), per_role=per_role)
        return get_attn_backend_for_role("mine", CALL, CPU, config, Registry(), role_category="near")

    reference, sdpa = AttentionSpec("REFERENCE"), AttentionSpec("TORCH_SDPA")
    assert chosen(mine=reference, near=sdpa, default=sdpa) == (ReferenceBackend, reference)
    assert chosen(near=reference, default=sdpa) == (ReferenceBackend, reference)
    assert chosen(default=reference) == (ReferenceBackend, reference)
    assert chosen() == (TorchSdpaBackend, None)


@pytest.mark.parametrize("member", DiffusionAttentionBackendEnum)
def test_a_member_is_a_name_wherever_a_backend_is_named(member: Any) -> None:
    registry = Registry()
    assert DiffusionAttentionBackendEnum[member.name] is member
    assert registry.get_class(member) is registry.get_class(member.name) is member.get_class()
    assert registry.class_path(member) == member.value
    assert Registry({member: member.value}).names() == registry.names()
    assert Registry.exactly({member: member.value}).names() == (member.name,)
    config = AttentionConfig(per_role={"self": member}, register={member: member.value})
    assert config.per_role["self"] == AttentionSpec(member) == AttentionSpec(member.name)
    assert config.register == {member.name: member.value}
    assert AttentionConfig(backend=member) == AttentionConfig(default=AttentionSpec(member.name))


def test_a_member_of_any_enum_is_a_name() -> None:
    class Mine(Enum):
        REFERENCE = 1

    assert Registry().get_class(Mine.REFERENCE) is ReferenceBackend
    assert DiffusionAttentionBackendEnum[Mine.REFERENCE] is REFERENCE  # type: ignore[misc]
    assert select("self", CALL, CPU, AttentionConfig(backend=Mine.REFERENCE), Registry()).backend == "REFERENCE"


@pytest.mark.parametrize("error", [KeyError, FaultError])
def test_a_misspelt_member_gets_the_nearest_name(error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        DiffusionAttentionBackendEnum["TORCH_SPDA"]
    assert "TORCH_SPDA: no backend has that name; did you mean TORCH_SDPA" in str(caught.value)
    with pytest.raises(error, match="did you mean TORCH_SDPA"):
        Registry().get_class("TORCH_SPDA")
    with pytest.raises(error, match="use one of REFERENCE, TORCH_SDPA"):
        Registry().get_class(3)  # type: ignore[arg-type]


def test_a_member_looked_up_by_a_name_in_place_of_a_path_says_how() -> None:
    with pytest.raises(ValueError, match=r"DiffusionAttentionBackendEnum\['TORCH_SDPA'\]"):
        DiffusionAttentionBackendEnum("TORCH_SPDA")


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("kind", "selfe", "it is one of self, cross, joint; did you mean self"),
        ("mask", "ful", "did you mean full"),
        *(("head_size", size, "it is a whole number of at least 1") for size in (-1, 0, "64", True, 64.0, None)),
        *((name, 0, "it is a whole number of at least 1") for name in ("num_heads", "num_kv_heads", "value_head_size")),
        ("dtype", 3, "it is the name of a dtype"),
        ("causal", "no", "it is True or False"),
    ],
)
def test_a_call_that_no_layer_makes_is_refused(field: str, value: Any, rule: str) -> None:
    fields = CALL.to_dict() | {field: value}
    with pytest.raises(FaultError, match=rule) as caught:
        Requirements(**fields)
    assert [fault.key for fault in caught.value.faults] == [field]


def test_every_impossible_value_of_a_call_is_named_at_once() -> None:
    with pytest.raises(FaultError) as caught:
        Requirements(-1, 0, 8, "float32", "selfe")  # type: ignore[arg-type]
    assert [fault.key for fault in caught.value.faults] == ["kind", "head_size", "num_heads"]


def test_every_package_that_a_variant_names_is_looked_up() -> None:
    path = f"{__name__}.Bounded"
    assert set(Registry.exactly({"BOUNDED": path}).distributions()) == {"pytest", "hypothesis", "numpy"}
