"""Which calls the vendors' backends take on which chip, against tables written by hand."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import pytest

from backends.interface import AttentionBackend, AttentionImpl, Requirements, Variant
from backends.platforms.facts import DeviceFacts, parse_device
from backends.registry import Registry

BACKENDS = ("FLASHINFER_ATTN", "TRTLLM_ATTN", "FLASH_ATTN")
CHIPS = (
    "cpu",
    "cuda:7.5",
    "cuda:8.0",
    "cuda:8.9",
    "cuda:9.0",
    "cuda:10.0",
    "cuda:10.3",
    "cuda:10.7",
    "cuda:11.0",
    "cuda:12.0",
    "rocm:gfx90a",
    "rocm:gfx942",
    "rocm:gfx950",
    "npu",
    "xpu",
    "musa:2.2",
    "musa:3.1",
)


def device(label: str, packages: Mapping[str, str] | None = None) -> DeviceFacts:
    return parse_device(label, packages or {}, packages is None)


def backend_of(name: str) -> type[AttentionBackend]:
    return Registry().get_class(name)


def variant_of(backend: str, name: str) -> Variant:
    return next(variant for variant in backend_of(backend).variants if variant.name == name)


def call(size: int = 128, dtype: str = "bfloat16", **others: Any) -> Requirements:
    return Requirements(size, 4, others.pop("num_kv_heads", 4), dtype, "self", **others)


def chosen(backend: str, required: Requirements, on: DeviceFacts, version: int | None = None) -> str | None:
    found = backend_of(backend).validate(required, on, version=version).variant
    return found.name if found else None


@pytest.mark.parametrize(
    ("backend", "served"),
    [
        (
            "FLASHINFER_ATTN",
            {
                "cuda:8.0": "fa2",
                "cuda:8.9": "fa2",
                "cuda:9.0": "fa3",
                "cuda:10.0": "cute-dsl",
                "cuda:10.3": "cute-dsl",
                "cuda:10.7": "cute-dsl",
                "cuda:12.0": "fa2",
            },
        ),
        ("TRTLLM_ATTN", {"cuda:10.0": "sm100", "cuda:10.3": "sm103", "cuda:10.7": "sm103"}),
        (
            "FLASH_ATTN",
            {
                "cuda:8.0": "fa2",
                "cuda:8.9": "fa2",
                "cuda:9.0": "fa3",
                "cuda:10.0": "fa4-blackwell",
                "cuda:10.3": "fa4-blackwell",
                "cuda:10.7": "fa4-blackwell",
                "cuda:11.0": "fa4-blackwell",
                "rocm:gfx942": "rocm-aiter",
                "rocm:gfx950": "rocm-aiter",
                "npu": "npu",
                "xpu": "xpu",
                "musa:3.1": "musa",
            },
        ),
    ],
)
def test_each_chip_has_its_variant(backend: str, served: dict[str, str]) -> None:
    assert {label: chosen(backend, call(), device(label)) for label in CHIPS} == {
        label: served.get(label) for label in CHIPS
    }


HALVES = {"bfloat16", "float16"}
# (backend, variant) -> head sizes of those below, dtypes, masks, and the other features
TAKES: dict[tuple[str, str], tuple[set[int], set[str], set[str], set[str]]] = {
    ("FLASHINFER_ATTN", "fa3"): ({64, 128}, HALVES, {"none"}, {"causal", "grouped", "packed", "lse"}),
    ("FLASHINFER_ATTN", "cute-dsl"): ({64, 128}, HALVES, {"none"}, {"causal", "grouped", "packed", "lse"}),
    ("FLASHINFER_ATTN", "fa2"): (
        {64, 128},
        HALVES,
        {"none", "key_padding", "full"},
        {"causal", "grouped", "soft_cap", "packed", "window", "lse"},
    ),
    ("TRTLLM_ATTN", "sm100"): ({128}, {"bfloat16"}, {"none"}, {"causal", "grouped", "packed"}),
    ("TRTLLM_ATTN", "sm103"): ({128}, {"bfloat16"}, {"none"}, {"causal", "grouped", "packed"}),
    ("FLASH_ATTN", "fa2"): (
        {64, 72, 80, 128, 192, 256},
        HALVES,
        {"none"},
        {"causal", "grouped", "soft_cap", "packed", "window", "lse", "gradient"},
    ),
    ("FLASH_ATTN", "rocm-aiter"): ({64, 72, 80, 128, 192, 256}, HALVES, {"none"}, {"causal", "grouped"}),
    ("FLASH_ATTN", "npu"): (
        {64, 72, 80, 127, 128, 192, 256, 320},
        {*HALVES, "float32"},
        {"none"},
        {"causal", "grouped"},
    ),
    ("FLASH_ATTN", "xpu"): ({64, 128, 256}, HALVES, {"none"}, {"causal", "grouped", "packed"}),
    ("FLASH_ATTN", "musa"): ({64, 72, 80, 128, 192, 256, 320}, HALVES, {"none"}, {"causal", "grouped"}),
}


@pytest.mark.parametrize(("backend", "name"), TAKES)
def test_a_variant_takes_exactly_what_the_table_says(backend: str, name: str) -> None:
    takes = variant_of(backend, name).takes
    sizes, dtypes, masks, features = TAKES[backend, name]

    def served(**asked: Any) -> bool:
        asked = {"size": 128, "dtype": "bfloat16", **asked}
        return not list(takes.faults(call(**asked)))

    assert {size for size in (64, 72, 80, 127, 128, 192, 256, 320) if served(size=size)} == sizes
    assert {dtype for dtype in ("float64", "float32", *HALVES) if served(dtype=dtype)} == dtypes
    assert {mask for mask in ("none", "key_padding", "full", "per_head") if served(mask=mask)} == masks
    switches = ("causal", "window", "soft_cap", "sinks", "packed", "lse", "gradient")
    assert {name for name in switches if served(**{name: True})} == features - {"grouped"}
    assert served(num_kv_heads=2) is ("grouped" in features)
    assert not served(value_head_size=64)


@pytest.mark.parametrize(
    ("backend", "claimed"),
    [
        ("FLASH_ATTN", {"fa3": ("cuda:9.0",), "fa4": ("cuda:9.0",)}),
        ("FLASHINFER_ATTN", {"fa3": ("cuda:9.0",), "fa2": ("cuda:9.0",)}),
        ("TRTLLM_ATTN", {}),
    ],
)
def test_no_more_is_claimed_to_have_run_on_hardware_than_has(backend: str, claimed: dict[str, tuple[str, ...]]) -> None:
    assert {variant.name: variant.run_on for variant in backend_of(backend).variants if variant.run_on} == claimed


@pytest.mark.parametrize(
    ("required", "label", "variant"),
    [
        (call(mask="key_padding"), "cuda:9.0", "fa2"),
        (call(mask="full", causal=True), "cuda:10.0", "fa2"),
        (call(window=True), "cuda:9.0", "fa2"),
        (call(soft_cap=True), "cuda:9.0", "fa2"),
        (call(soft_cap=True), "cuda:10.0", "fa2"),
        (call(packed=True), "cuda:10.0", "cute-dsl"),
        (call(mask="per_head"), "cuda:9.0", None),
    ],
    ids=str,
)
def test_flashinfer_goes_on_to_the_kernel_that_takes_the_call(
    required: Requirements, label: str, variant: str | None
) -> None:
    assert chosen("FLASHINFER_ATTN", required, device(label)) == variant


def test_the_versions_of_flash_attention_can_be_asked_for() -> None:
    on = device("cuda:9.0")
    assert [chosen("FLASH_ATTN", call(), on, version) for version in (None, 2, 3, 4)] == ["fa3", "fa2", "fa3", "fa4"]
    assert chosen("FLASH_ATTN", call(window=True), on) == "fa4"
    (fault,) = backend_of("FLASH_ATTN").validate(call(), on, version=5).faults
    assert fault.rule == "FLASH_ATTN has no version 5; it has 3, 4, 2"


@pytest.mark.parametrize(
    ("backend", "label", "packages", "variant", "rule"),
    [
        ("TRTLLM_ATTN", "cuda:10.0", {}, None, "the package flashinfer-python is not installed"),
        ("TRTLLM_ATTN", "cuda:10.0", {"flashinfer-python": "0.6.17"}, None, "is too old; it needs 0.6.18 or newer"),
        ("TRTLLM_ATTN", "cuda:10.0", {"flashinfer-python": "0.6.18"}, "sm100", ""),
        ("FLASHINFER_ATTN", "cuda:9.0", {"flashinfer-python": "0.6.9"}, None, "is too old; it needs 0.6.18 or newer"),
        ("FLASHINFER_ATTN", "cuda:10.0", {"flashinfer-python": "0.6.18"}, "fa2", ""),
        ("FLASHINFER_ATTN", "cuda:10.0", {"flashinfer-python": "0.7.4"}, "cute-dsl", ""),
        (
            "FLASH_ATTN",
            "cuda:8.0",
            {"flash-attn": "2.6.1"},
            None,
            "2.6.1 is too old; it needs 2.6.2 or newer",
        ),
        ("FLASH_ATTN", "cuda:8.0", {"flash-attn": "2.6.2rc1"}, None, "is too old; it needs 2.6.2 or newer"),
        ("FLASH_ATTN", "cuda:8.0", {"flash-attn": "2.6.2+cu12"}, "fa2", ""),
        ("FLASH_ATTN", "cuda:8.0", {"flash-attn": "unknown"}, None, "unknown is too old; it needs 2.6.2 or newer"),
        ("FLASH_ATTN", "cuda:9.0", {"flash-attn-4": "4.0.0b18"}, None, "is too old; it needs 4.0.0b36 or newer"),
        ("FLASH_ATTN", "cuda:10.0", {"flash-attn-4": "4.0.0b3"}, None, "is too old; it needs 4.0.0b36 or newer"),
        ("FLASH_ATTN", "cuda:9.0", {"flash-attn-4": "4.0.0"}, "fa4", ""),
        ("FLASH_ATTN", "cuda:9.0", {"flash-attn-4": "any"}, "fa4", ""),
        ("FLASH_ATTN", "cuda:9.0", {"fa3-fwd": "0.0.2"}, None, "is too old; it needs 0.0.3 or newer"),
        ("SAGE_ATTN", "cuda:9.0", {"sageattention": "1.0.6"}, "int8", ""),
        (
            "SAGE_ATTN",
            "cuda:9.0",
            {"sageattention": "2.2.0"},
            None,
            "2.2.0 is too new; it needs one below 2",
        ),
        ("SAGE_ATTN", "cuda:9.0", {"sageattention": "2.0.0b1"}, None, "2.0.0b1 is too new; it needs one below 2"),
        ("SAGE_ATTN", "cuda:9.0", {"sageattention": "any"}, "int8", ""),
        ("FLASH_ATTN", "cuda:8.0", {"flash-attn": "2.8.3.post2"}, "fa2", ""),
        ("FLASH_ATTN", "cuda:9.0", {"flash-attn": "2.8.3"}, "fa2", ""),
        ("FLASH_ATTN", "rocm:gfx942", {"amd-aiter": "0.1.7.post2.dev18"}, "rocm-aiter", ""),
        ("FLASH_ATTN", "xpu", {"vllm-xpu-kernels": "0.1.15"}, None, "is too old; it needs 0.1.16 or newer"),
        ("FLASH_ATTN", "npu", {}, None, "the package torch-npu is not installed (pip install torch-npu)"),
        ("FLASH_ATTN", "musa:3.1", {"flash-attn": "2.8.3"}, None, "the package flash-attn-3 is not installed"),
    ],
)
def test_packages_and_their_versions(
    backend: str, label: str, packages: dict[str, str], variant: str | None, rule: str
) -> None:
    on = device(label, packages)
    assert chosen(backend, call(), on) == variant
    assert variant is not None or any(rule in fault.rule for fault in backend_of(backend).validate(call(), on).faults)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_variant_names_an_implementation(backend: str) -> None:
    for variant in backend_of(backend).variants:
        module, _, name = variant.kernels.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), name), AttentionImpl)
        assert backend_of(backend).get_impl_cls(variant).__name__ == name


def test_only_trtllm_asks_for_permission() -> None:
    assert [name for name in Registry().names() if backend_of(name).asks_permission] == ["TRTLLM_ATTN"]
