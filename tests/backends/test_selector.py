"""From a role to a backend: which entry decides, and what happens when an explicit or automatic choice cannot run."""

from __future__ import annotations

import pickle

import pytest

from backends.declared.cudnn_attn import CudnnAttnBackend
from backends.declared.flash_attn import FlashAttnBackend
from backends.declared.reference import ReferenceBackend
from backends.declared.torch_sdpa import TorchSdpaBackend
from backends.entries import resolve_entry
from backends.interface import Requirements
from backends.platforms.facts import DeviceFacts
from backends.platforms.policy import priority
from backends.registry import Registry
from backends.selector import get_attn_backend_for_role, select
from configs.faults import FaultError
from configs.schema import AUTO, AttentionConfig, AttentionSpec

CPU = DeviceFacts("cpu")
HOPPER = DeviceFacts("cuda", (9, 0))
FA3 = {"fa3-fwd": "0.0.3"}
CALL = Requirements(head_size=128, num_heads=4, num_kv_heads=4, dtype="bfloat16", kind="cross")
ROLE, CATEGORY = "a.b.c", "group"
BLACKWELL = ("TRTLLM_ATTN", "CUDNN_ATTN", "FLASHINFER_ATTN", "FLASH_ATTN", "TORCH_SDPA", "REFERENCE")
OTHERS = ("rocm", "npu", "xpu", "musa")

# From the strongest to the weakest: the entry's key, what it names, and the source that it is reported as.
LEVELS = (
    ("attention.per_role.a.b.c", "REFERENCE", "role"),
    ("attention.per_role.a.b", "TORCH_SDPA", "parent"),
    ("attention.per_role.a", "REFERENCE", "parent"),
    ("attention.per_role.group", "TORCH_SDPA", "category"),
    ("attention.default", "REFERENCE", "default"),
)


def config_of(entries: dict[str, str]) -> AttentionConfig:
    """Entries by full key; each has an origin that names its key."""
    per_role = {
        key.removeprefix("attention.per_role."): AttentionSpec(backend)
        for key, backend in entries.items()
        if key != "attention.default"
    }
    default = AttentionSpec(entries["attention.default"]) if "attention.default" in entries else None
    return AttentionConfig(default, per_role, origins={key: f"origin of {key}" for key in entries})


@pytest.mark.parametrize("top", range(len(LEVELS)))
def test_the_strongest_entry_decides(top: int) -> None:
    config = config_of({key: backend for key, backend, _ in LEVELS[top:]})
    key, backend, source = LEVELS[top]
    chosen = select(ROLE, CALL, CPU, config, Registry(), category=CATEGORY)
    assert (chosen.key, chosen.requested, chosen.backend, chosen.source) == (key, backend, backend, source)
    assert chosen.origin == f"origin of {key}"
    assert (chosen.role, chosen.kind, chosen.category, chosen.requirements) == (ROLE, "cross", CATEGORY, CALL)


@pytest.mark.parametrize("top", range(len(LEVELS)))
def test_auto_goes_to_the_platform_whatever_the_weaker_entries_say(top: int) -> None:
    key = LEVELS[top][0]
    weaker = {weaker_key: "REFERENCE" for weaker_key, _, _ in LEVELS[top + 1 :]}
    chosen = select(ROLE, CALL, CPU, config_of({key: AUTO, **weaker}), Registry(), category=CATEGORY)
    assert (chosen.requested, chosen.backend, chosen.source) == (None, "TORCH_SDPA", "platform")
    assert (chosen.key, chosen.origin) == (key, f"origin of {key}")


@pytest.mark.parametrize("top", range(1, len(LEVELS)))
def test_auto_in_a_weaker_entry_decides_nothing(top: int) -> None:
    strongest, backend, source = LEVELS[0]
    chosen = select(ROLE, CALL, CPU, config_of({strongest: backend, LEVELS[top][0]: AUTO}), Registry())
    assert (chosen.backend, chosen.source) == (backend, source)


def test_without_entries_the_platform_decides() -> None:
    chosen = select(ROLE, CALL, CPU, AttentionConfig(), Registry())
    assert (chosen.requested, chosen.backend, chosen.source) == (None, "TORCH_SDPA", "platform")
    assert (chosen.key, chosen.origin, chosen.rejected) == ("", "", ())


def test_the_category_defaults_to_the_kind() -> None:
    config = config_of({"attention.per_role.cross": "REFERENCE"})
    chosen = select("ltx2.audio", CALL, CPU, config, Registry())
    assert (chosen.category, chosen.source, chosen.backend) == ("cross", "category", "REFERENCE")
    other = select("ltx2.audio", CALL, CPU, config, Registry(), category="self")
    assert (other.category, other.source) == ("self", "platform")


def test_entries_of_other_roles_say_nothing() -> None:
    config = config_of({"attention.per_role.a.b.c.d": "REFERENCE", "attention.per_role.b": "REFERENCE"})
    assert resolve_entry("a.b.c", "group", config).source == "platform"
    assert resolve_entry("ab", "group", config_of({"attention.per_role.a": "REFERENCE"})).source == "platform"


def test_an_entry_without_an_origin_has_an_empty_one() -> None:
    config = AttentionConfig(per_role={"a": AttentionSpec("REFERENCE")})
    assert resolve_entry("a", "group", config).origin == ""


def test_an_explicit_choice_that_serves_is_reported_in_full() -> None:
    config = config_of({"attention.default": "FLASH_ATTN"})
    chosen = select("self", CALL, DeviceFacts("cuda", (9, 0), packages=FA3), config, Registry())
    assert (chosen.backend, chosen.variant, chosen.exactness) == ("FLASH_ATTN", "fa3", "exact")
    assert chosen.class_path == "backends.declared.flash_attn.FlashAttnBackend"
    assert pickle.loads(pickle.dumps(chosen)) == chosen


@pytest.mark.parametrize("top", range(len(LEVELS)))
def test_an_explicit_choice_that_cannot_run_raises_all_its_faults_about_its_own_key(top: int) -> None:
    key = LEVELS[top][0]
    call = Requirements(head_size=300, num_heads=4, num_kv_heads=4, dtype="float32", kind="cross", window=True)
    with pytest.raises(FaultError) as caught:
        select(ROLE, call, HOPPER, config_of({key: "CUDNN_ATTN"}), Registry(), category=CATEGORY)
    faults = caught.value.faults
    assert {(fault.key, fault.value, fault.origin) for fault in faults} == {(key, "CUDNN_ATTN", f"origin of {key}")}
    rules = " | ".join(fault.rule for fault in faults)
    assert len(faults) == 3
    assert all(words in rules for words in ("head size 300", "dtype float32", "a window"))
    assert all("REFERENCE" in fault.remedy for fault in faults)
    assert f"{key}=CUDNN_ATTN: head size 300 is not supported; it takes multiples of 8 up to 128;" in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).faults == faults


def test_an_explicit_choice_never_falls_back() -> None:
    for name, device in (("CUDNN_ATTN", CPU), ("FLASH_ATTN", CPU), ("FLASH_ATTN", HOPPER)):
        with pytest.raises(FaultError) as caught:
            select("self", CALL, device, config_of({"attention.default": name}), Registry())
        assert {fault.value for fault in caught.value.faults} == {name}


def test_an_unknown_name_is_refused_about_the_key_that_named_it() -> None:
    with pytest.raises(FaultError) as caught:
        select("self", CALL, CPU, config_of({"attention.per_role.self": "TORCH_SPDA"}), Registry())
    (fault,) = caught.value.faults
    assert (fault.key, fault.value) == ("attention.per_role.self", "TORCH_SPDA")
    assert fault.origin == "origin of attention.per_role.self"
    assert fault.remedy == "did you mean TORCH_SDPA?"


@pytest.mark.parametrize(
    ("packages", "dtype", "chosen", "turned_down"),
    [
        (FA3, "bfloat16", "FLASH_ATTN", ()),
        ({}, "bfloat16", "CUDNN_ATTN", ("FLASH_ATTN",)),
        (FA3, "float32", "TORCH_SDPA", ("FLASH_ATTN", "CUDNN_ATTN")),
    ],
)
@pytest.mark.parametrize("entries", [{}, {"attention.default": AUTO}])
def test_the_platform_takes_the_first_candidate_that_serves_and_lists_the_others(
    packages: dict[str, str], dtype: str, chosen: str, turned_down: tuple[str, ...], entries: dict[str, str]
) -> None:
    call = Requirements(head_size=128, num_heads=4, num_kv_heads=4, dtype=dtype, kind="self")
    device = DeviceFacts("cuda", (9, 0), packages=packages)
    selection = select("self", call, device, config_of(entries), Registry())
    assert selection.backend == chosen
    assert tuple(rejected.backend for rejected in selection.rejected) == turned_down
    for rejected in selection.rejected:
        backend = Registry().get_class(rejected.backend)
        assert list(rejected.faults) == backend.validate_configuration(call, device) != []


@pytest.mark.parametrize("entries", [{}, {"attention.per_role.self": AUTO}])
def test_when_nothing_serves_every_candidate_is_listed(entries: dict[str, str]) -> None:
    call = Requirements(head_size=128, num_heads=4, num_kv_heads=4, dtype="int8", kind="self")
    with pytest.raises(FaultError) as caught:
        select("self", call, HOPPER, config_of(entries), Registry())
    candidates = dict.fromkeys(fault.value for fault in caught.value.faults)
    assert tuple(candidates) == priority(HOPPER) == ("FLASH_ATTN", "CUDNN_ATTN", "TORCH_SDPA", "REFERENCE")
    assert {fault.key for fault in caught.value.faults} == {"attention.per_role.self"}
    origin = "origin of attention.per_role.self" if entries else ""
    assert {fault.origin for fault in caught.value.faults} == {origin}


@pytest.mark.parametrize(
    ("device", "first"),
    [
        (CPU, ("TORCH_SDPA", "REFERENCE")),
        (DeviceFacts("cuda"), ("FLASH_ATTN", "CUDNN_ATTN", "TORCH_SDPA", "REFERENCE")),
        (DeviceFacts("cuda", (8, 9)), ("FLASH_ATTN", "CUDNN_ATTN", "TORCH_SDPA", "REFERENCE")),
        (DeviceFacts("cuda", (10, 0)), BLACKWELL),
        (DeviceFacts("cuda", (12, 0)), BLACKWELL),
        *((DeviceFacts(platform), ("FLASH_ATTN", "TORCH_SDPA", "REFERENCE")) for platform in OTHERS),
    ],
)
def test_each_platform_has_its_order(device: DeviceFacts, first: tuple[str, ...]) -> None:
    assert priority(device) == first
    assert set(first) <= set(Registry().names())


def test_a_platform_without_a_policy_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="vulkan"):
        priority(DeviceFacts("vulkan"))


def test_the_class_of_a_role_comes_with_the_spec_that_chose_it() -> None:
    explicit = config_of({"attention.default": "REFERENCE", "attention.per_role.cross": AUTO})
    registry = Registry()
    assert get_attn_backend_for_role("self", CALL, CPU, explicit, registry, role_category="self") == (
        ReferenceBackend,
        AttentionSpec("REFERENCE"),
    )
    assert get_attn_backend_for_role("cross", CALL, CPU, explicit, registry) == (TorchSdpaBackend, None)
    assert get_attn_backend_for_role("self", CALL, HOPPER, AttentionConfig(), registry) == (CudnnAttnBackend, None)
    with_fa3 = DeviceFacts("cuda", (9, 0), packages=FA3)
    assert get_attn_backend_for_role("self", CALL, with_fa3, AttentionConfig(), registry) == (FlashAttnBackend, None)
    with pytest.raises(FaultError):
        get_attn_backend_for_role("self", CALL, CPU, config_of({"attention.default": "FLASH_ATTN"}), registry)
