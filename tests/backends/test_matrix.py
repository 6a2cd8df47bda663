"""What is chosen on every platform and generation, against the tables of `matrix_tables`, which are written by hand.

Every predicate decides some cell: without it, or turned round, the comparison fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from backends.interface import AttentionBackend, Capabilities, HeadSizes, Requirements, Variant
from backends.platforms.facts import DeviceFacts, parse_device
from backends.registry import DiffusionAttentionBackendEnum, Registry
from backends.selector import Selector
from configs.faults import Fault, FaultError
from configs.schema import AttentionConfig, AttentionSpec
from tests.backends.matrix_tables import (
    ALL_MASKS,
    AUTOMATIC,
    BUILT,
    CALLS,
    EXPLICIT,
    HALVES,
    MORE_CHIPS,
    NEEDS_NO_PACKAGE,
    PERMITTED,
    SIZES,
    SWITCHES,
    TAKES,
    TOO_NEW,
    TOO_OLD,
)

NAMES = [member.name for member in DiffusionAttentionBackendEnum]
ROLE, CATEGORY = "video.self", "family"
LEVELS = {"role": "video.self", "parent": "video", "category": "family"}
Cells = dict[tuple[str, ...], Any]


def call(size: int = 128, mask: str = "none", **asked: Any) -> Requirements:
    base = Requirements(size, 8, 8, "bfloat16", "self", mask=mask)  # type: ignore[arg-type]
    return replace(base, **asked)


def config_of(source: str, backend: str) -> AttentionConfig:
    if source == "default":
        return AttentionConfig(default=AttentionSpec(backend))
    return AttentionConfig(per_role={LEVELS[source]: AttentionSpec(backend)} if source in LEVELS else {})


def device_of(label: str) -> DeviceFacts:
    return parse_device(label, {}, all_packages=True)


def chosen(selector: Selector, name: str, *, allowed: bool = False) -> tuple[str, str, str] | None:
    """Backend, variant and source of a call out of CALLS; None if it is refused."""
    size, mask = CALLS[name]
    try:
        selection = selector.select(ROLE, call(size, mask), category=CATEGORY, allow_trtllm_default=allowed)
    except FaultError:
        return None
    return selection.backend, selection.variant, selection.source


# --- the cells as they are, and as they are written above -----------------------------------------------------------


def selected() -> Cells:
    cells: Cells = {}
    for device in AUTOMATIC:
        for source in ("role", "parent", "category", "default", "platform"):
            selector = Selector(device_of(device), config_of(source, "auto"), Registry())
            for name in CALLS:
                for allowed in (False, True):
                    found = chosen(selector, name, allowed=allowed)
                    cells[device, source, name, f"allowed={allowed}"] = found and (found[0], found[2])
        for source in ("role", "parent", "category", "default"):
            for backend in NAMES:
                selector = Selector(device_of(device), config_of(source, backend), Registry())
                for name in CALLS:
                    cells[device, source, name, backend] = chosen(selector, name)
    return cells


def expected_selections() -> Cells:
    cells: Cells = {}
    for device in AUTOMATIC:
        for source in ("role", "parent", "category", "default", "platform"):
            for name in CALLS:
                cells[device, source, name, "allowed=False"] = (AUTOMATIC[device][name], "platform")
                cells[device, source, name, "allowed=True"] = (PERMITTED[device][name], "platform")
        for source in ("role", "parent", "category", "default"):
            for backend in NAMES:
                for name in CALLS:
                    variant = EXPLICIT[backend].get(device, {}).get(name)
                    cells[device, source, name, backend] = variant and (backend, variant, source)
    return cells


def variants() -> Iterator[tuple[str, Variant, DeviceFacts]]:
    """Every variant, with a device of its own that has every package."""
    for name in NAMES:
        for variant in Registry().get_class(name).variants:
            chip = variant.chips[0]
            whole = f"{chip}:9.0" if chip in ("cuda", "musa") else chip.replace(".x", ".0")
            yield name, variant, device_of(whole)


def taken() -> Cells:
    cells: Cells = {}
    for name, variant, device in variants():
        base = call(64 if not variant.faults(call(64), device) else 128)

        def takes(
            variant: Variant = variant, device: DeviceFacts = device, base: Requirements = base, **a: Any
        ) -> bool:
            return not variant.faults(replace(base, **a), device)

        cells[name, variant.name] = (
            tuple(d for d in ("float64", "float32", *HALVES, "int8") if takes(dtype=d)),
            tuple(size for size in SIZES if takes(head_size=size)),
            tuple(mask for mask in ALL_MASKS if takes(mask=mask)),
            " ".join(switch for switch, asked in SWITCHES.items() if takes(**asked)),
        )
        labels = (*AUTOMATIC, *MORE_CHIPS)
        built = [label for label in labels if variant.chip_fault(device_of(label)) is None]
        cells[name, variant.name, "built for"] = " ".join(built)
        cells[name, variant.name, "8 heads on 3"] = takes(num_kv_heads=3)
        bare = replace(device, all_packages=False)
        cells[name, variant.name, "no package"] = not variant.faults(base, bare)
        for cell, packages in (("old package", TOO_OLD), ("new package", TOO_NEW)):
            if (name, variant.name) in packages:
                other = replace(bare, packages=dict([packages[name, variant.name]]))
                cells[name, variant.name, cell] = not variant.faults(base, other)
    for switch, asked in SWITCHES.items():
        cells["what nothing declares", switch] = not list(Capabilities().faults(call(**asked)))
    return cells


def expected_taken() -> Cells:
    cells: Cells = dict(TAKES)
    for name, variant in TAKES:
        cells[name, variant, "built for"] = BUILT[name, variant]
        cells[name, variant, "8 heads on 3"] = False
        cells[name, variant, "no package"] = (name, variant) in NEEDS_NO_PACKAGE
        for cell, packages in (("old package", TOO_OLD), ("new package", TOO_NEW)):
            if (name, variant) in packages:
                cells[name, variant, cell] = False
    for switch in SWITCHES:
        cells["what nothing declares", switch] = False
    return cells


def differences() -> Iterator[str]:
    """Every cell that is not as written; the quick ones first."""
    for found, written in ((taken, expected_taken), (selected, expected_selections)):
        is_so, should = found(), written()
        for key in dict.fromkeys((*should, *is_so)):
            if is_so.get(key) != should.get(key):
                yield f"{key}: {is_so.get(key)}, not {should.get(key)}"


def is_noticed() -> bool:
    return next(differences(), None) is not None


def test_every_cell_is_as_it_is_written() -> None:
    assert list(differences()) == []
    assert len(selected()) == 10 * 4 * (5 * 2 + 4 * len(NAMES))


# --- every predicate decides something ------------------------------------------------------------------------------

PREDICATES = (
    *("head_size", "value_head_size", "dtype", "mask", "num_kv_heads"),
    *("causal", "bias", "window", "soft_cap", "sinks", "packed", "lse", "gradient", "learned_gradient"),
)


def without(key: str) -> Callable[..., Iterator[Fault]]:
    """`Capabilities.faults` that forgets one predicate."""
    faults = Capabilities.faults
    return lambda self, required: (fault for fault in faults(self, required) if fault.key != key)


@pytest.mark.parametrize("key", PREDICATES)
def test_a_predicate_that_is_gone_shows(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Capabilities, "faults", without(key))
    assert is_noticed()


def test_chips_and_packages_that_are_not_checked_show(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Variant, "chip_fault", lambda self, device: None)
        assert is_noticed()
    with monkeypatch.context() as patch:
        patch.setattr(Variant, "_package_faults", lambda self, device: iter(()))
        assert is_noticed()


LAST = ("sinks", "packed", "lse", "gradient", "learned_gradient")


def mutants(variant: Variant) -> Iterator[Variant]:
    """The variant with one thing of its declaration turned round."""
    takes = variant.takes
    for name in (*("causal", "bias", "grouped", "value_head_size", "window", "soft_cap"), *LAST):
        yield replace(variant, takes=replace(takes, **{name: not getattr(takes, name)}))
    if takes.lse and takes.gradient:
        yield replace(variant, takes=replace(takes, lse_gradient=not takes.lse_gradient))
    for mask in ALL_MASKS:
        masks = tuple(m for m in takes.masks if m != mask) if mask in takes.masks else (*takes.masks, mask)
        yield replace(variant, takes=replace(takes, masks=masks))  # type: ignore[arg-type]
    for dtype in ("float64", "float32", *HALVES):
        dtypes = tuple(d for d in takes.dtypes if d != dtype) if dtype in takes.dtypes else (*takes.dtypes, dtype)
        yield replace(variant, takes=replace(takes, dtypes=dtypes or ("int8",)))
    yield replace(variant, takes=replace(takes, head_sizes=HeadSizes(4, takes.head_sizes.limit, takes.head_sizes.also)))
    yield replace(variant, takes=replace(takes, head_sizes=HeadSizes(0, None, (16,))))
    for chip in variant.chips:
        yield replace(variant, chips=tuple(other for other in variant.chips if other != chip) or ("cuda:1.0",))
    yield replace(variant, distributions=() if variant.distributions else ("nobodys-package",))
    if variant.at_least:
        yield replace(variant, at_least=())
    if variant.below:
        yield replace(variant, below=())


@pytest.mark.parametrize("name", NAMES)
def test_a_declaration_that_is_turned_round_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Registry().get_class(name)
    for place, variant in enumerate(backend.variants):
        for mutant in mutants(variant):
            changed = (*backend.variants[:place], mutant, *backend.variants[place + 1 :])
            monkeypatch.setattr(backend, "variants", changed)
            assert is_noticed(), mutant
            monkeypatch.undo()


@pytest.mark.parametrize("name", NAMES)
def test_permission_that_is_turned_round_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: type[AttentionBackend] = Registry().get_class(name)
    automatic = {found for calls in AUTOMATIC.values() for found in calls.values()} | {"TRTLLM_ATTN"}
    monkeypatch.setattr(backend, "asks_permission", not backend.asks_permission)
    assert is_noticed() == (name in automatic)


def test_capabilities_that_say_nothing_take_the_least() -> None:
    least = Capabilities()
    assert not list(least.faults(call()))
    for asked in SWITCHES.values():
        assert list(least.faults(call(**asked)))
    assert all(list(least.faults(call(mask=mask))) for mask in ALL_MASKS)
