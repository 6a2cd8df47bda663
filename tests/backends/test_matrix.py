"""What is chosen on every platform and generation, against tables written by hand.

The comments cite where a row comes from: "contract" is the selection contract of vLLM-Omni 0.30 (its platform policies
and capability tables), "vllm" the feature tables of vLLM 0.33; "mended" is where those have a defect and the row is
what should hold. Every predicate decides some cell: without it, or turned round, the comparison fails.
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

NAMES = [member.name for member in DiffusionAttentionBackendEnum]
CALLS = {"128": (128, "none"), "80": (80, "none"), "128 masked": (128, "full"), "80 masked": (80, "full")}
SDPA = dict.fromkeys(CALLS, "TORCH_SDPA")
FLASH = {**SDPA, "128": "FLASH_ATTN", "80": "FLASH_ATTN"}  # a mask goes to the first that takes it, never lost

# Device -> call -> what a role without a choice gets, with every package there.
AUTOMATIC: dict[str, dict[str, str]] = {
    "cpu": SDPA,  # mended: contract 4.1 has no CPU route at all
    "cuda:7.5": SDPA,  # contract 4.2, automatic 5 and 6: FlashAttention from 8.0 on
    "cuda:8.0": FLASH,  # contract 4.2 (P12); mended: masks are an input of the choice
    "cuda:9.0": FLASH,  # contract 4.2 (P12), vllm 1.5
    "cuda:10.0": {  # contract 4.2, automatic 2 and 3 (P11); the mask: cuDNN takes none here, FlashInfer does
        "128": "CUDNN_ATTN",
        "80": "CUDNN_ATTN",
        "128 masked": "FLASHINFER_ATTN",
        "80 masked": "TORCH_SDPA",  # contract 3: FlashInfer has head sizes 64, 128 and 256
    },
    "cuda:12.0": {  # contract 4.2, automatic 2 and 3: major 12 is Blackwell there
        "128": "CUDNN_ATTN",
        "80": "CUDNN_ATTN",
        "128 masked": "FLASHINFER_ATTN",
        "80 masked": "TORCH_SDPA",
    },
    "rocm:gfx942": FLASH,  # contract 4.3: aiter on gfx942 and gfx950
    "npu": FLASH,  # contract 4.6
    "xpu": {**FLASH, "80": "TORCH_SDPA"},  # contract 4.4; mended: head sizes that are not compiled in
    "musa:3.1": FLASH,  # contract 4.5: from 3.1 on
}
# The same where the layer allows a backend that asks for permission: contract 4.2, automatic 1 (P10).
PERMITTED = {**AUTOMATIC, "cuda:10.0": {**AUTOMATIC["cuda:10.0"], "128": "TRTLLM_ATTN"}}

# Backend -> device -> call -> the variant that serves an explicit choice; what is not here is refused (P15).
EXPLICIT: dict[str, dict[str, dict[str, str]]] = {
    "REFERENCE": {device: dict.fromkeys(CALLS, "plain") for device in AUTOMATIC},
    "TORCH_SDPA": {device: dict.fromkeys(CALLS, "torch") for device in AUTOMATIC},  # contract 3: any size, masks
    "CUDNN_ATTN": {  # contract 4.2 (P6); mended: the chip is checked, and masks are refused instead of ignored
        device: {"128": "cudnn", "80": "cudnn"} for device in ("cuda:8.0", "cuda:9.0", "cuda:10.0", "cuda:12.0")
    },
    "FLASH_ATTN": {
        "cuda:8.0": {"128": "fa2", "80": "fa2"},  # vllm 2.1: FA2 from 8.0 on, multiples of 8 up to 256
        "cuda:9.0": {"128": "fa3", "80": "fa3"},  # vllm 1.6: FA3 by default on major 9
        "cuda:10.0": {"128": "fa4-blackwell", "80": "fa4-blackwell"},  # contract 4.2 (P4): FA4 only on Blackwell
        # cuda:12.0, mended: vllm 1.6, an SM100 kernel that lands on SM120
        "rocm:gfx942": {"128": "rocm-aiter", "80": "rocm-aiter"},
        "npu": {"128": "npu", "80": "npu"},
        "xpu": {"128": "xpu"},
        "musa:3.1": {"128": "musa", "80": "musa"},
    },
    "FLASHINFER_ATTN": {  # contract 3 and 4.2 (P5); contract 5.5: cute-dsl takes no mask, fa2 does
        "cuda:8.0": {"128": "fa2", "128 masked": "fa2"},
        "cuda:9.0": {"128": "fa3", "128 masked": "fa2"},
        "cuda:10.0": {"128": "cute-dsl", "128 masked": "fa2"},
        "cuda:12.0": {"128": "fa2", "128 masked": "fa2"},
    },
    "TRTLLM_ATTN": {"cuda:10.0": {"128": "sm100"}},  # contract 4.2 (P7); mended: the head size is checked
}

HALVES = ("bfloat16", "float16")
TO_256 = (8, 64, 80, 96, 128, 136, 192, 256)
SIZES = (1, 8, 12, 20, 64, 80, 96, 128, 136, 192, 256, 320, 512, 768, 776)
EVERY_MASK = ("key_padding", "full", "per_head")
# Backend and variant -> dtypes, head sizes out of SIZES, masks, and what else its calls may ask.
TAKES: dict[tuple[str, str], tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...], str]] = {
    ("REFERENCE", "plain"): (
        ("float64", "float32", *HALVES),
        SIZES,
        EVERY_MASK,
        "causal grouped value_head_size window soft_cap sinks packed gradient",
    ),
    ("TORCH_SDPA", "torch"): (
        ("float64", "float32", *HALVES),
        SIZES,
        EVERY_MASK,  # contract 5.1 passes 4D masks on
        "causal grouped value_head_size gradient",  # contract 10, 12: packed calls are refused, not ignored
    ),
    ("CUDNN_ATTN", "cudnn"): (HALVES, (8, 64, 80, 96, 128), (), "causal grouped"),
    ("FLASH_ATTN", "fa3"): (("bfloat16",), TO_256, (), "causal grouped"),
    ("FLASH_ATTN", "fa4"): (HALVES, TO_256, (), "causal grouped"),
    ("FLASH_ATTN", "fa4-blackwell"): (HALVES, (8, 64, 80, 96, 128, 256), (), "causal grouped"),  # vllm 1.6: TMEM
    ("FLASH_ATTN", "fa2"): (HALVES, TO_256, (), "causal grouped window soft_cap packed"),
    ("FLASH_ATTN", "rocm-aiter"): (HALVES, TO_256, (), "causal grouped"),
    ("FLASH_ATTN", "npu"): (("float32", *HALVES), SIZES[:-1], (), "causal grouped"),
    ("FLASH_ATTN", "xpu"): (HALVES, (64, 128, 256), (), "causal grouped packed"),
    ("FLASH_ATTN", "musa"): (HALVES, (8, 64, 80, 96, 128, 136, 192, 256, 320, 512), (), "causal grouped"),
    ("FLASHINFER_ATTN", "fa3"): (HALVES, (64, 128, 256), (), "causal grouped soft_cap packed"),
    ("FLASHINFER_ATTN", "cute-dsl"): (HALVES, (64, 128, 256), (), "causal grouped packed"),
    ("FLASHINFER_ATTN", "fa2"): (
        HALVES,
        (64, 128, 256),
        ("key_padding", "full"),  # contract 5.5: boolean masks; mended: no head's mask for all
        "causal grouped window soft_cap packed",
    ),
    ("TRTLLM_ATTN", "sm100"): (("bfloat16",), (128,), (), "causal grouped packed"),  # contract 5.6 (B11)
    ("TRTLLM_ATTN", "sm103"): (("bfloat16",), (128,), (), "causal grouped packed"),
}
SWITCHES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "grouped": {"num_kv_heads": 4},
    "value_head_size": {"value_head_size": 16},
    **{name: {name: True} for name in ("window", "soft_cap", "sinks", "packed", "lse", "gradient")},
}
# Chips beside those of AUTOMATIC.
MORE_CHIPS = ("cuda:8.9", "cuda:10.3", "cuda:10.7", "cuda:11.0", "rocm:gfx90a", "rocm:gfx950", "musa:2.1")
# Variant -> the chips of both that it is built for.
BUILT: dict[tuple[str, str], str] = {
    ("REFERENCE", "plain"): " ".join((*AUTOMATIC, *MORE_CHIPS)),
    ("TORCH_SDPA", "torch"): " ".join((*AUTOMATIC, *MORE_CHIPS)),
    ("CUDNN_ATTN", "cudnn"): "cuda:8.0 cuda:9.0 cuda:10.0 cuda:12.0 cuda:8.9 cuda:10.3 cuda:10.7 cuda:11.0",
    ("FLASH_ATTN", "fa3"): "cuda:9.0",
    ("FLASH_ATTN", "fa4"): "cuda:9.0",
    ("FLASH_ATTN", "fa4-blackwell"): "cuda:10.0 cuda:10.3 cuda:10.7 cuda:11.0",  # mended: vllm 1.6 has SM110 on FA2
    ("FLASH_ATTN", "fa2"): "cuda:8.0 cuda:9.0 cuda:8.9",
    ("FLASH_ATTN", "rocm-aiter"): "rocm:gfx942 rocm:gfx950",  # contract 4.3: not gfx90a
    ("FLASH_ATTN", "npu"): "npu",
    ("FLASH_ATTN", "xpu"): "xpu",
    ("FLASH_ATTN", "musa"): "musa:3.1",
    ("FLASHINFER_ATTN", "fa3"): "cuda:9.0",
    ("FLASHINFER_ATTN", "cute-dsl"): "cuda:10.0 cuda:10.3 cuda:10.7",
    ("FLASHINFER_ATTN", "fa2"): "cuda:8.0 cuda:9.0 cuda:10.0 cuda:12.0 cuda:8.9 cuda:10.3 cuda:10.7",
    ("TRTLLM_ATTN", "sm100"): "cuda:10.0",
    ("TRTLLM_ATTN", "sm103"): "cuda:10.3 cuda:10.7",
}
# Variant -> a package whose version is too old for it.
TOO_OLD: dict[tuple[str, str], tuple[str, str]] = {
    ("CUDNN_ATTN", "cudnn"): ("nvidia-cudnn-cu13", "9.4"),  # contract 4.2 (P11): 9.5
    ("FLASH_ATTN", "fa2"): ("flash-attn", "2.5.9"),  # contract 5.2: mended, no comparison of texts
    ("FLASH_ATTN", "rocm-aiter"): ("amd-aiter", "0.1.6"),
    ("FLASH_ATTN", "xpu"): ("vllm-xpu-kernels", "0.1.15"),
    ("FLASHINFER_ATTN", "fa3"): ("flashinfer-python", "0.6.17"),
    ("FLASHINFER_ATTN", "cute-dsl"): ("flashinfer-python", "0.7.3"),
    ("FLASHINFER_ATTN", "fa2"): ("flashinfer-python", "0.6.17"),
    ("TRTLLM_ATTN", "sm100"): ("flashinfer-python", "0.6.17"),
    ("TRTLLM_ATTN", "sm103"): ("flashinfer-python", "0.6.17"),
}
NEEDS_NO_PACKAGE = {("REFERENCE", "plain"), ("TORCH_SDPA", "torch"), ("CUDNN_ATTN", "cudnn")}

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
            tuple(mask for mask in EVERY_MASK if takes(mask=mask)),
            " ".join(switch for switch, asked in SWITCHES.items() if takes(**asked)),
        )
        labels = (*AUTOMATIC, *MORE_CHIPS)
        built = [label for label in labels if variant.chip_fault(device_of(label)) is None]
        cells[name, variant.name, "built for"] = " ".join(built)
        cells[name, variant.name, "8 heads on 3"] = takes(num_kv_heads=3)
        bare = replace(device, all_packages=False)
        cells[name, variant.name, "no package"] = not variant.faults(base, bare)
        if (name, variant.name) in TOO_OLD:
            old = replace(bare, packages=dict([TOO_OLD[name, variant.name]]))
            cells[name, variant.name, "old package"] = not variant.faults(base, old)
    for switch, asked in SWITCHES.items():
        cells["what nothing declares", switch] = not list(Capabilities().faults(call(**asked)))
    return cells


def expected_taken() -> Cells:
    cells: Cells = dict(TAKES)
    for name, variant in TAKES:
        cells[name, variant, "built for"] = BUILT[name, variant]
        cells[name, variant, "8 heads on 3"] = False
        cells[name, variant, "no package"] = (name, variant) in NEEDS_NO_PACKAGE
        if (name, variant) in TOO_OLD:
            cells[name, variant, "old package"] = False
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
    *("causal", "window", "soft_cap", "sinks", "packed", "lse", "gradient"),
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


def mutants(variant: Variant) -> Iterator[Variant]:
    """The variant with one thing of its declaration turned round."""
    takes = variant.takes
    for name in ("causal", "grouped", "value_head_size", "window", "soft_cap", "sinks", "packed", "lse", "gradient"):
        yield replace(variant, takes=replace(takes, **{name: not getattr(takes, name)}))
    for mask in EVERY_MASK:
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
    assert all(list(least.faults(call(mask=mask))) for mask in EVERY_MASK)
