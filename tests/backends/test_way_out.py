"""The way out of a refusal names a backend that serves the call, never the one that was refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backends.interface import AttentionBackend, Capabilities, Requirements, Variant
from backends.platforms.facts import DeviceFacts
from backends.registry import Registry
from backends.selector import select
from configs.faults import Fault, FaultError
from configs.schema import AttentionConfig, AttentionSpec

CPU = DeviceFacts("cpu")
CALL = Requirements(head_size=64, num_heads=4, num_kv_heads=4, dtype="float32", kind="self")


class Picky(AttentionBackend):
    variants = (Variant("picky", "a.B", takes=Capabilities(dtypes=("float16",))),)

    @staticmethod
    def get_name() -> str:
        return "PICKY"


def refused(backend: str | None, call: Requirements, registry: Registry | None = None) -> tuple[Fault, ...]:
    config = AttentionConfig(default=None if backend is None else AttentionSpec(backend))
    with pytest.raises(FaultError) as caught:
        select("self", call, CPU, config, registry or Registry())
    return caught.value.faults


def test_a_backend_is_not_the_way_out_of_its_own_refusal() -> None:
    (fault,) = refused("TORCH_SDPA", replace(CALL, sinks=True))
    assert (fault.value, fault.remedy) == ("TORCH_SDPA", "use REFERENCE, or leave it on auto")


def test_one_that_would_refuse_the_call_too_is_not_the_way_out() -> None:
    with_sinks = {
        fault.remedy.removeprefix("set run.dtype, ") for fault in refused("FLASH_ATTN", replace(CALL, sinks=True))
    }
    assert with_sinks == {"use REFERENCE, or leave it on auto"}
    plain = {fault.remedy.removeprefix("set run.dtype, ") for fault in refused("FLASH_ATTN", CALL)}
    assert plain == {"use TORCH_SDPA, or leave it on auto"}


def test_a_call_that_nothing_takes_has_to_be_changed() -> None:
    remedies = {fault.remedy for fault in refused("TORCH_SDPA", replace(CALL, dtype="float8", sinks=True))}
    assert remedies == {
        "set run.dtype, change the call, which no backend takes on cpu",
        "change the call, which no backend takes on cpu",
    }


def test_an_automatic_role_is_not_sent_back_to_auto() -> None:
    only = Registry.exactly({name: path for name, path in Registry.built_in().paths().items() if name != "REFERENCE"})
    picky = f"{__name__}.Picky"
    registry = Registry.exactly({**only.paths(), "REFERENCE": picky.replace("Picky", "Refusing"), "PICKY": picky})
    faults = refused(None, replace(CALL, dtype="float16", sinks=True), registry)
    assert {fault.remedy for fault in faults} == {"change the call, which no backend takes on cpu"}


class Refusing(AttentionBackend):
    variants = (Variant("refusing", "a.B", takes=Capabilities(dtypes=("float16",))),)

    @staticmethod
    def get_name() -> str:
        return "REFERENCE"
