"""Option blocks: read as their backend declares them, and refused with the owner named where they belong to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from backends.interface import AttentionBackend, Requirements, Variant
from backends.options import Blocks, as_mappings, option
from backends.platforms.facts import DeviceFacts
from backends.registry import Registry
from backends.selection import Selection
from backends.selector import select
from backends.variant import Exactness
from configs.checks import Refusal, choice, real, whole
from configs.faults import Fault, FaultError
from configs.schema import AttentionConfig, AttentionSpec

HERE = __name__
CPU = DeviceFacts("cpu")
CALL = Requirements(head_size=64, num_heads=4, num_kv_heads=4, dtype="float32", kind="self")


@dataclass(frozen=True)
class Rounding:
    bits: int | None = option(whole(2, 8))
    mode: str = option(choice(("near", "down")), default="near")
    share: float | None = option(real(0, 1))

    def faults(self) -> Iterator[Refusal]:
        if self.share is not None and self.bits is None:
            yield Refusal("has a share and no bits", "give both")


class RoundingBackend(AttentionBackend):
    variants = (
        Variant("old", "backends.kernels.reference.ReferenceImpl", version=1),
        Variant("new", "backends.kernels.reference.ReferenceImpl", version=2),
    )
    blocks: ClassVar[Mapping[str, type]] = {"quant": Rounding}

    @staticmethod
    def get_name() -> str:
        return "ROUNDING"

    @classmethod
    def option_faults(cls, variant: Variant, required: Requirements, blocks: Blocks) -> Iterator[Fault]:
        if variant.name == "old" and dict(blocks):
            yield Fault("quant", None, "the old kernel rounds nothing", "use version 2")

    @classmethod
    def exactness_of(cls, variant: Variant, blocks: Blocks) -> Exactness:
        return "lossy-quantised" if any(block.bits for _, block in blocks) else "exact"


def chosen(spec: AttentionSpec, origins: dict[str, str] | None = None) -> Selection:
    config = AttentionConfig(per_role={"self": spec}, origins=origins or {})
    return select("self", CALL, CPU, config, Registry({"ROUNDING": f"{HERE}.RoundingBackend"}))


class PlainBackend(AttentionBackend):
    """In the place of the only backend that has `skip_softmax`."""

    variants = (Variant("plain", "backends.kernels.reference.ReferenceImpl"),)

    @staticmethod
    def get_name() -> str:
        return "TRTLLM_ATTN"


def refused(spec: AttentionSpec, origins: dict[str, str] | None = None) -> tuple[Fault, ...]:
    with pytest.raises(FaultError) as caught:
        chosen(spec, origins)
    return caught.value.faults


def test_a_block_reaches_the_selection_as_its_backend_declares_it() -> None:
    selection = chosen(AttentionSpec("ROUNDING", quant={"bits": 4}))
    assert selection.options == (("quant", Rounding(4)),)
    assert as_mappings(selection.options) == {"quant": {"bits": 4, "mode": "near"}}
    assert (selection.variant, selection.exactness) == ("new", "lossy-quantised")
    assert hash(selection)


def test_without_a_block_there_are_no_options() -> None:
    selection = chosen(AttentionSpec("ROUNDING"))
    assert (selection.options, selection.variant, selection.exactness) == ((), "old", "exact")


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"bits": 9}, "takes a whole number from 2 to 8"),
        ({"bits": True}, "takes a whole number from 2 to 8"),
        ({"bits": "4"}, "takes a whole number from 2 to 8"),
        ({"bits": 4.0}, "takes a whole number from 2 to 8"),
        ({"bits": 4, "share": float("nan")}, "takes a finite number of at least 0 and at most 1"),
        ({"bits": 4, "share": float("inf")}, "takes a finite number of at least 0 and at most 1"),
        ({"mode": "up"}, "takes near or down"),
    ],
)
def test_a_value_that_the_field_does_not_take_is_refused(values: dict[str, Any], rule: str) -> None:
    (fault,) = refused(AttentionSpec("ROUNDING", quant=values))
    assert fault.key.startswith("attention.per_role.self.quant.")
    assert fault.rule == rule


def test_every_fault_of_a_block_is_found_at_once_with_its_origin() -> None:
    origins = {"attention.per_role.self.quant.bits": "my.yaml", "attention.per_role.self": "command line"}
    faults = refused(AttentionSpec("ROUNDING", quant={"bits": 1, "mod": "near"}), origins)
    assert [(fault.key, fault.origin) for fault in faults] == [
        ("attention.per_role.self.quant.bits", "my.yaml"),
        ("attention.per_role.self.quant.mod", ""),
    ]
    assert faults[1].remedy == "did you mean mode?"


def test_fields_that_do_not_go_together_are_refused() -> None:
    (fault,) = refused(AttentionSpec("ROUNDING", quant={"share": 0.5}))
    assert (fault.key, fault.rule) == ("attention.per_role.self.quant", "has a share and no bits")


def test_a_block_of_another_backend_names_its_owner() -> None:
    (fault,) = refused(AttentionSpec("TORCH_SDPA", quant={"bits": 4}))
    assert fault.key == "attention.per_role.self.quant"
    assert fault.rule.startswith("TORCH_SDPA takes no block quant; it belongs to ")
    assert "ROUNDING" in fault.allowed


def test_a_block_that_no_backend_takes_says_so() -> None:
    config = AttentionConfig(per_role={"self": AttentionSpec("TORCH_SDPA", skip_softmax={"target_sparsity": 0.5})})
    with pytest.raises(FaultError) as caught:
        select("self", CALL, CPU, config, Registry({"TRTLLM_ATTN": f"{HERE}.PlainBackend"}))
    (fault,) = caught.value.faults
    assert (fault.rule, fault.remedy) == ("TORCH_SDPA takes no block skip_softmax; no backend takes it", "leave it out")


def test_options_without_a_backend_are_refused() -> None:
    faults = refused(AttentionSpec("auto", quant={"bits": 4}, version=2, on_unsupported="fallback"))
    assert [fault.key for fault in faults] == [
        f"attention.per_role.self.{path}" for path in ("quant", "version", "on_unsupported")
    ]
    assert "belongs to a backend, and none is named" in faults[0].rule


def test_a_version_is_strict() -> None:
    assert chosen(AttentionSpec("ROUNDING", version=2)).variant == "new"
    (fault,) = refused(AttentionSpec("ROUNDING", version=3))
    assert (fault.key, fault.value) == ("attention.per_role.self.version", 3)
    assert fault.rule == "ROUNDING has no version 3; it has 1, 2"
    (fault,) = refused(AttentionSpec("ROUNDING", version=1, quant={"bits": 4}))
    assert fault.rule == "the old kernel rounds nothing"
    (fault,) = refused(AttentionSpec("TORCH_SDPA", version=1))
    assert fault.rule == "TORCH_SDPA has no versions to choose from"


def test_an_option_that_is_null_is_as_if_it_were_not_set() -> None:
    assert chosen(AttentionSpec("ROUNDING", quant={"mode": None, "bits": 4})).options == (("quant", Rounding(4)),)


def test_a_fault_of_an_option_has_the_options_own_origin() -> None:
    origins = {"attention.per_role.self": "my.yaml", "attention.per_role.self.version": "command line"}
    (fault,) = refused(AttentionSpec("ROUNDING", version=3), origins)
    assert fault.origin == "command line"


class Twice(RoundingBackend):
    variants = (*RoundingBackend.variants, RoundingBackend.variants[0])


@dataclass
class Thawed:
    bits: int | None = option(whole(2, 8))


class WithThawedBlock(RoundingBackend):
    blocks: ClassVar[Mapping[str, type]] = {"quant": Thawed}


class WrongBlock(RoundingBackend):
    blocks: ClassVar[Mapping[str, type]] = {"rounding": Rounding}


class NotADataclass(RoundingBackend):
    blocks: ClassVar[Mapping[str, type]] = {"quant": dict}


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("WrongBlock", "has none of the names quant"),
        ("NotADataclass", "is not a frozen dataclass whose fields are made"),
        ("WithThawedBlock", "is not a frozen dataclass whose fields are made"),
        ("Twice", "two of its variants have one name"),
    ],
)
def test_a_declaration_with_an_odd_block_is_no_backend(name: str, rule: str) -> None:
    with pytest.raises(FaultError, match=rule):
        Registry({"ROUNDING": f"{HERE}.{name}"}).get_class("ROUNDING")


def test_a_selector_forgets_what_an_override_has_changed() -> None:
    from backends.registrations import register_diffusion_backend
    from backends.selector import Selector

    registry = Registry()
    selector = Selector(CPU, AttentionConfig(), registry)
    assert selector.select("self", CALL).variant == "torch"
    assert selector.select("self", CALL) is selector.select("self", CALL)
    with register_diffusion_backend("TORCH_SDPA", f"{HERE}.MySdpa"):
        assert selector.select("self", CALL).variant == "mine"
    assert selector.select("self", CALL).variant == "torch"


class MySdpa(RoundingBackend):
    variants = (Variant("mine", "backends.kernels.reference.ReferenceImpl"),)

    @staticmethod
    def get_name() -> str:
        return "TORCH_SDPA"
