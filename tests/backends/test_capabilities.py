"""Which calls each backend takes on which device, against a table written by hand."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.interface import AttentionBackend, HeadSizes, Requirements, Variant
from backends.platforms.facts import DeviceFacts
from backends.registry import DiffusionAttentionBackendEnum, Registry

SIZES = (64, 80, 127, 128, 136, 256, 320)
DTYPES = ("float64", "float32", "bfloat16", "float16")
CAPABILITIES = {"cpu": None, "8.0": (8, 0), "9.0": (9, 0), "10.0": (10, 0), "12.0": (12, 0)}
PACKAGES = {
    "none": {},
    "fa3": {"fa3-fwd": "0.0.3"},
    "fa4": {"flash-attn-4": "4.0.0b36"},
    "both": {"fa3-fwd": "0.0.3", "flash-attn-4": "4.0.0b36"},
}
EVERY_SIZE = set(SIZES)
STEPS_TO_128 = {64, 80, 128}
FA3_SIZES = {64, 80, 128, 256}

# (backend, device, packages, dtype) -> the variant and the head sizes that it takes; what is not here is refused.
FLASH_ATTN = {
    ("9.0", "fa3", "bfloat16"): ("fa3", FA3_SIZES),
    ("9.0", "both", "bfloat16"): ("fa3", FA3_SIZES),
    ("9.0", "fa4", "bfloat16"): ("fa4", STEPS_TO_128),
    ("9.0", "fa4", "float16"): ("fa4", STEPS_TO_128),
    ("9.0", "both", "float16"): ("fa4", STEPS_TO_128),
    ("10.0", "fa4", "bfloat16"): ("fa4-blackwell", STEPS_TO_128),
    ("10.0", "fa4", "float16"): ("fa4-blackwell", STEPS_TO_128),
    ("10.0", "both", "bfloat16"): ("fa4-blackwell", STEPS_TO_128),
    ("10.0", "both", "float16"): ("fa4-blackwell", STEPS_TO_128),
}
CUDNN_DEVICES = ("8.0", "9.0", "10.0", "12.0")
CUDNN_DTYPES = ("bfloat16", "float16")


def expected(backend: str, device: str, packages: str, dtype: str, size: int) -> str | None:
    if backend == "TORCH_SDPA":
        return "torch"
    if backend == "REFERENCE":
        return "plain"
    if backend == "CUDNN_ATTN":
        served = device in CUDNN_DEVICES and dtype in CUDNN_DTYPES and size in STEPS_TO_128
        return "cudnn" if served else None
    if backend == "FLEX_ATTENTION":
        if device == "cpu":
            return "plain"
        return "compiled" if device in CUDNN_DEVICES and dtype == "bfloat16" and size in {64, 128} else None
    if backend != "FLASH_ATTN":
        return None  # their packages are not there
    variant, sizes = FLASH_ATTN.get((device, packages, dtype), (None, set()))
    return variant if size in sizes else None


def device_of(name: str, packages: str = "none") -> DeviceFacts:
    platform = "cpu" if name == "cpu" else "cuda"
    return DeviceFacts(platform, CAPABILITIES[name], packages=PACKAGES[packages])


def call(size: int = 128, dtype: str = "bfloat16", mask: str = "none") -> Requirements:
    return Requirements(size, 4, 4, dtype, "self", mask=mask)  # type: ignore[arg-type]


def backend_of(name: str) -> type[AttentionBackend]:
    return Registry().get_class(name)


def rules(backend: str, required: Requirements, device: DeviceFacts) -> list[str]:
    return [fault.rule for fault in backend_of(backend).validate_configuration(required, device)]


@pytest.mark.parametrize("backend", [member.name for member in DiffusionAttentionBackendEnum])
@pytest.mark.parametrize("device", CAPABILITIES)
@pytest.mark.parametrize("packages", PACKAGES)
def test_a_backend_takes_exactly_what_the_table_says(backend: str, device: str, packages: str) -> None:
    facts = device_of(device, packages)
    for dtype, size in itertools.product(DTYPES, SIZES):
        validation = backend_of(backend).validate(call(size, dtype), facts)
        got = validation.variant.name if validation.variant else None
        assert got == expected(backend, device, packages, dtype, size), (dtype, size)
        assert (got is None) == bool(validation.faults)


@pytest.mark.parametrize(
    ("backend", "device", "takes_masks"),
    [
        ("TORCH_SDPA", "cpu", True),
        ("TORCH_SDPA", "9.0", True),
        ("REFERENCE", "cpu", True),
        ("CUDNN_ATTN", "9.0", True),
        ("FLASH_ATTN", "9.0", False),
        ("FLASH_ATTN", "10.0", False),
    ],
)
def test_flash_attention_takes_no_mask(backend: str, device: str, takes_masks: bool) -> None:
    facts = device_of(device, "both")
    assert backend_of(backend).validate_configuration(call(), facts) == []
    assert (rules(backend, call(mask="full"), facts) == []) is takes_masks


@pytest.mark.parametrize(
    ("backend", "capability", "runs"),
    [
        ("CUDNN_ATTN", (7, 5), False),
        ("CUDNN_ATTN", (8, 9), True),
        ("CUDNN_ATTN", (10, 3), True),
        ("CUDNN_ATTN", (11, 0), True),
        ("CUDNN_ATTN", (12, 1), True),
        ("CUDNN_ATTN", (13, 0), False),
        ("CUDNN_ATTN", None, False),
        ("FLASH_ATTN", (7, 5), False),
        ("FLASH_ATTN", (8, 9), True),
        ("FLASH_ATTN", (9, 1), True),
        ("FLASH_ATTN", (12, 0), False),
        ("FLASH_ATTN", (10, 3), True),
        ("FLASH_ATTN", (11, 0), True),
        ("FLASH_ATTN", None, False),
        ("TORCH_SDPA", (7, 5), True),
        ("TORCH_SDPA", None, True),
    ],
)
def test_chips_beside_the_table(backend: str, capability: tuple[int, int] | None, runs: bool) -> None:
    facts = DeviceFacts("cuda", capability, all_packages=True)
    assert (rules(backend, call(), facts) == []) is runs


@pytest.mark.parametrize("backend", ["CUDNN_ATTN", "FLASH_ATTN"])
def test_a_platform_without_the_kernels_is_refused_whatever_its_capability(backend: str) -> None:
    for platform in ("cpu", "vulkan"):
        found = rules(backend, call(), DeviceFacts(platform, (9, 0), all_packages=True))
        assert found
        assert all(f"only, and this is {platform}:9.0" in rule for rule in found)


def test_the_plain_backends_run_on_every_platform_that_is_known_and_nowhere_else() -> None:
    for backend in ("TORCH_SDPA", "REFERENCE"):
        for platform in ("cpu", "cuda", "rocm", "npu", "xpu", "musa"):
            assert rules(backend, call(), DeviceFacts(platform)) == []
        (rule,) = rules(backend, call(), DeviceFacts("vulkan"))
        assert rule == "it runs on cpu, cuda, rocm, npu, xpu, musa only, and this is vulkan"


def test_a_dtype_that_no_kernel_has_is_refused_everywhere() -> None:
    for backend in ("TORCH_SDPA", "REFERENCE", "CUDNN_ATTN", "FLASH_ATTN"):
        assert rules(backend, call(dtype="int8"), device_of("9.0", "both"))


def test_assumed_packages_stand_for_installed_ones() -> None:
    assert rules("FLASH_ATTN", call(), DeviceFacts("cuda", (9, 0), all_packages=True)) == []


def test_another_chips_variant_has_nothing_to_say_where_one_fits_the_chip() -> None:
    on_blackwell = rules("FLASH_ATTN", call(), device_of("10.0"))
    assert on_blackwell == ["the package flash-attn-4 is not installed (pip install 'flash-attn-4>=4.0.0b36')"]


def test_faults_of_one_variant_name_it_and_shared_ones_stand_once() -> None:
    assert rules("FLASH_ATTN", call(size=127, dtype="float16"), device_of("9.0", "both")) == [
        "variant fa3: head size 127 is not supported; it takes multiples of 8 up to 128, and 192, 256",
        "variant fa3: dtype float16 is not supported; it takes bfloat16",
        "variant fa4: head size 127 is not supported; it takes 64, 80, 96, 112, 128",
        "variant fa2: the package flash-attn is not installed (pip install 'flash-attn>=2.6.2')",
        "variant fa2: head size 127 is not supported; it takes multiples of 8 up to 256",
    ]


def test_without_packages_each_variant_says_what_to_install() -> None:
    assert rules("FLASH_ATTN", call(), device_of("9.0")) == [
        "variant fa3: the package fa3-fwd is not installed (pip install 'fa3-fwd>=0.0.3')",
        "variant fa4: the package flash-attn-4 is not installed (pip install 'flash-attn-4>=4.0.0b36')",
        "variant fa2: the package flash-attn is not installed (pip install 'flash-attn>=2.6.2')",
    ]


def test_every_fault_of_a_call_is_found_at_once() -> None:
    found = backend_of("CUDNN_ATTN").validate_configuration(
        replace(call(300, "float32"), window=True), device_of("9.0")
    )
    assert [(fault.key, fault.value) for fault in found] == [
        ("head_size", 300),
        ("dtype", "float32"),
        ("window", True),
    ]
    assert found[1].allowed == ("bfloat16", "float16")
    assert found[1].remedy.startswith("set run.dtype, ")


def test_a_wrong_chip_is_said_with_the_chips_that_would_do() -> None:
    (fault,) = backend_of("CUDNN_ATTN").validate_configuration(call(64), DeviceFacts("cuda", (7, 5)))
    assert fault.rule == "it runs on cuda:8.x, cuda:9.x, cuda:10.x, cuda:11.x, cuda:12.x only, and this is cuda:7.5"
    assert fault.allowed == ("cuda:8.x", "cuda:9.x", "cuda:10.x", "cuda:11.x", "cuda:12.x")


def test_a_wrong_chip_hides_nothing_that_every_variant_refuses() -> None:
    asked = replace(call(300), dtype="float32", mask="per_head", sinks=True)
    found = backend_of("FLASH_ATTN").validate_configuration(asked, DeviceFacts("cpu"))
    assert {fault.key for fault in found} >= {"device", "head_size", "dtype", "mask"}
    assert found[0].key == "device"
    assert len(set(found)) == len(found)


def test_what_some_variant_for_the_platform_takes_is_no_fault_beside_a_wrong_chip() -> None:
    asked = replace(call(64), dtype="float16", window=True)  # fa3 takes neither, fa2 and fa4 take both
    (fault,) = backend_of("FLASH_ATTN").validate_configuration(asked, DeviceFacts("cuda", (7, 5)))
    assert fault.key == "device"


@pytest.mark.parametrize(
    ("sizes", "words", "taken"),
    [
        (HeadSizes(), "any size", (1, 7, 1000)),
        (HeadSizes(8), "multiples of 8", (8, 64, 1024)),
        (HeadSizes(limit=64), "any size up to 64", (1, 63, 64)),
        (HeadSizes(8, 128, (192, 256)), "multiples of 8 up to 128, and 192, 256", (8, 128, 192, 256)),
        (HeadSizes(0, None, (64, 128)), "64, 128", (64, 128)),
    ],
)
def test_the_rule_of_head_sizes_is_readable_and_holds(sizes: HeadSizes, words: str, taken: tuple[int, ...]) -> None:
    assert str(sizes) == words
    assert all(size in sizes for size in taken)
    assert 2000 not in sizes or sizes.limit is None
    assert 65 not in sizes or (sizes.step == 1 and sizes.limit is None)


def test_one_of_several_packages_is_enough() -> None:
    variant = Variant("v", "k", distributions=("one", "two"), install="pip install one")
    assert variant.faults(call(), DeviceFacts("cpu", packages={"two": "1"})) == ()
    (fault,) = variant.faults(call(), DeviceFacts("cpu"))
    assert (fault.key, fault.value, fault.allowed) == ("packages", None, ("one", "two"))
    assert fault.rule == "the package one or two is not installed (pip install one)"


REQUIREMENTS = st.builds(
    Requirements,
    head_size=st.integers(1, 400),
    num_heads=st.integers(1, 64),
    num_kv_heads=st.integers(1, 64),
    dtype=st.sampled_from([*DTYPES, "int8"]),
    kind=st.sampled_from(["self", "cross", "joint"]),
    causal=st.booleans(),
    mask=st.sampled_from(["none", "key_padding", "full", "per_head"]),
    value_head_size=st.none() | st.integers(1, 400),
    **dict.fromkeys(("window", "soft_cap", "sinks", "packed", "lse", "gradient", "learned_gradient"), st.booleans()),
)
DEVICES = st.builds(
    DeviceFacts,
    platform=st.sampled_from(["cpu", "cuda", "rocm", "npu", "xpu", "musa", "vulkan"]),
    capability=st.none() | st.tuples(st.integers(6, 13), st.integers(0, 9)),
    packages=st.sampled_from([MappingProxyType(dict(packages)) for packages in PACKAGES.values()]),
    all_packages=st.booleans(),
)


@settings(max_examples=300)
@given(name=st.sampled_from([member.name for member in DiffusionAttentionBackendEnum]), call=REQUIREMENTS, on=DEVICES)
def test_there_are_no_faults_exactly_if_a_variant_serves(name: str, call: Requirements, on: DeviceFacts) -> None:
    backend = backend_of(name)
    validation = backend.validate(call, on)
    faults = backend.validate_configuration(call, on)
    assert (faults == []) == (validation.variant is not None)
    serving = [variant for variant in backend.variants if variant.faults(call, on) == ()]
    assert validation.variant == (serving[0] if serving else None)
    assert len(set(map(str, faults))) == len(faults)
    assert all(fault.key and fault.rule and fault.remedy for fault in faults)
    assert pickle.loads(pickle.dumps(faults)) == faults


@given(call=REQUIREMENTS)
def test_requirements_become_plain_values(call: Requirements) -> None:
    assert Requirements(**call.to_dict()) == call
    plain = Requirements(call.head_size, call.num_heads, call.num_kv_heads, call.dtype, call.kind)
    assert (plain.causal, plain.mask) == (False, "none")
    assert pickle.loads(pickle.dumps(call)) == call
