"""The option blocks `quant` and `skip_softmax`: whose they are, what they take, and what they do to a choice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from backends.declared.flashinfer_attn import FlashinferQuant
from backends.declared.trtllm_attn import TrtllmQuant
from backends.platforms.facts import DeviceFacts, parse_device
from backends.registry import Registry
from backends.requirements import Requirements
from backends.selection import Selection
from backends.selector import Selector
from backends.skip_softmax import SkipSoftmax
from configs.faults import Fault, FaultError
from configs.schema import AttentionConfig, AttentionSpec

B200 = DeviceFacts("cuda", (10, 0), all_packages=True)
B300 = DeviceFacts("cuda", (10, 3), all_packages=True)
H100 = DeviceFacts("cuda", (9, 0), all_packages=True)
CALL = Requirements(128, 4, 4, "bfloat16", "self")


def select(
    backend: str, blocks: Mapping[str, Any], *, on: DeviceFacts = B200, required: Requirements = CALL
) -> Selection:
    origins = {"attention.default.skip_softmax.threshold": "my.yaml"}
    config = AttentionConfig(default=AttentionSpec(backend, **blocks), origins=origins)
    return Selector(on, config, Registry()).select("self", required)


def faults(backend: str, blocks: Mapping[str, Any], **others: Any) -> list[Fault]:
    with pytest.raises(FaultError) as error:
        select(backend, blocks, **others)
    return list(error.value.faults)


def fault(backend: str, blocks: Mapping[str, Any], **others: Any) -> Fault:
    (found,) = faults(backend, blocks, **others)
    return found


def needs(**changes: Any) -> Requirements:
    return Requirements(**{**CALL.to_dict(), **changes})


# --- owners -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["FLASHINFER_ATTN", "TORCH_SDPA", "FLASH_ATTN", "CUDNN_ATTN"])
def test_skip_softmax_is_trtllms_alone(backend: str) -> None:
    found = fault(backend, {"skip_softmax": {"threshold": 0.1}})
    assert (found.key, found.origin) == ("attention.default.skip_softmax", "my.yaml")
    assert found.rule == f"{backend} takes no block skip_softmax; it belongs to TRTLLM_ATTN"
    assert found.remedy == "leave it out, or use TRTLLM_ATTN"


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "CUDNN_ATTN"])
def test_quant_is_for_those_that_declare_it(backend: str) -> None:
    found = fault(backend, {"quant": {"dtype_qk": "int8"}})
    assert {"FLASHINFER_ATTN", "TRTLLM_ATTN"} <= set(found.allowed)
    assert found.rule.startswith(f"{backend} takes no block quant; it belongs to ")


@pytest.mark.parametrize("blocks", [{"quant": {"dtype_qk": None}}, {"skip_softmax": {"threshold": None}}])
def test_a_block_of_nothing_asks_for_nothing(blocks: Mapping[str, Any]) -> None:
    assert select("TRTLLM_ATTN", blocks).exactness == "exact"


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-0.1, math.inf, -math.inf, math.nan, True, "0.1", 10**400])
def test_a_threshold_is_a_finite_number_of_at_least_zero(value: Any) -> None:
    found = fault("TRTLLM_ATTN", {"skip_softmax": {"threshold": value}})
    assert found.key == "attention.default.skip_softmax.threshold"
    shown = repr(value) if isinstance(value, str) else value  # text keeps its quotes
    assert found.value == shown or math.isnan(value)
    assert found.rule == "takes a finite number of at least 0"


@pytest.mark.parametrize("value", [0, 0.0, 1, 0.25, 1e6])
def test_any_other_number_is_a_threshold(value: float) -> None:
    ((name, block),) = select("TRTLLM_ATTN", {"skip_softmax": {"threshold": value}}).options
    assert (name, block) == ("skip_softmax", SkipSoftmax(float(value)))


def test_what_nothing_would_consume_is_no_field() -> None:
    found = fault("TRTLLM_ATTN", {"skip_softmax": {"thresold": 0.5, "threshold": 0.1}})
    assert (found.key, found.rule) == ("attention.default.skip_softmax.thresold", "skip_softmax has no thresold")


@pytest.mark.parametrize("field", ["target_sparsity", "disabled_until_timestep"])
@pytest.mark.parametrize("value", [-0.1, 1.1, math.inf, math.nan, True, "0.5"])
def test_parts_of_a_whole_are_numbers_from_zero_to_one(field: str, value: Any) -> None:
    found = fault("TRTLLM_ATTN", {"skip_softmax": {field: value}})
    assert found.key == f"attention.default.skip_softmax.{field}"
    assert found.rule == "takes a finite number of at least 0 and at most 1"


def test_a_threshold_and_a_target_exclude_each_other() -> None:
    found = fault("TRTLLM_ATTN", {"skip_softmax": {"threshold": 0, "target_sparsity": 0.5}})
    assert found.key == "attention.default.skip_softmax"
    assert found.rule == "threshold=0 and target_sparsity=0.5 both say what is skipped"
    assert found.remedy == "keep one of the two"


def test_a_time_alone_is_refused_as_it_would_do_nothing() -> None:
    found = fault("TRTLLM_ATTN", {"skip_softmax": {"disabled_until_timestep": 0.5}})
    assert found.rule == "disabled_until_timestep=0.5 says when, and nothing says what is skipped"


@pytest.mark.parametrize("value", ["float16", "bfloat16", "fp4", "INT8", 8, True])
def test_trtllm_quantises_to_two_dtypes(value: Any) -> None:
    found = fault("TRTLLM_ATTN", {"quant": {"dtype_qk": value}})
    assert (found.rule, found.allowed) == ("takes int8 or fp8_e4m3", ("int8", "fp8_e4m3"))


@pytest.mark.parametrize("field", ["q_block_size", "k_block_size"])
@pytest.mark.parametrize("value", [0, 2, 8, 32, -1, 1.0, True, "16"])
def test_blocks_are_those_that_kernels_exist_for(field: str, value: Any) -> None:
    found = fault("TRTLLM_ATTN", {"quant": {"dtype_qk": "int8", field: value}})
    assert found.key == f"attention.default.quant.{field}"
    assert found.rule == "takes 1, 4 or 16, the blocks that kernels exist for"
    assert found.allowed == ("1", "4", "16")


@pytest.mark.parametrize(
    ("given", "expected"), [({}, (1, 16)), ({"q_block_size": 16}, (16, 16)), ({"k_block_size": 4}, (1, 4))]
)
def test_blocks_have_defaults(given: dict[str, int], expected: tuple[int, int]) -> None:
    ((_, block),) = select("TRTLLM_ATTN", {"quant": {"dtype_qk": "int8", **given}}).options
    assert isinstance(block, TrtllmQuant)
    assert block.block_sizes == expected


def test_blocks_without_a_dtype_are_refused() -> None:
    found = fault("TRTLLM_ATTN", {"quant": {"q_block_size": 4, "k_block_size": 1}})
    assert found.key == "attention.default.quant"
    assert found.rule.startswith("q_block_size=4 and k_block_size=1 are blocks of quantised rows, and dtype_qk")
    assert found.remedy == "set dtype_qk to int8 or fp8_e4m3, or leave the block sizes out"


@pytest.mark.parametrize("field", ["dtype_vo", "flashinfer_backend", "dtype"])
def test_trtllm_has_no_field_that_it_would_ignore(field: str) -> None:
    assert fault("TRTLLM_ATTN", {"quant": {field: "bfloat16"}}).rule == f"quant has no {field}"


@pytest.mark.parametrize(
    ("field", "value", "takes"),
    [
        ("dtype_qk", "int8", "takes float16 or bfloat16"),
        ("dtype_qk", "fp8_e4m3", "takes float16 or bfloat16"),
        ("dtype_vo", "int8", "takes float16, bfloat16 or fp8_e4m3"),
        ("dtype_vo", 8, "takes float16, bfloat16 or fp8_e4m3"),
    ],
)
def test_flashinfer_takes_other_dtypes_than_trtllm(field: str, value: Any, takes: str) -> None:
    assert fault("FLASHINFER_ATTN", {"quant": {field: value}}).rule == takes


@pytest.mark.parametrize("field", ["q_block_size", "flashinfer_backend"])
def test_flashinfer_has_no_field_that_it_would_ignore(field: str) -> None:
    assert fault("FLASHINFER_ATTN", {"quant": {field: 1}}).rule == f"quant has no {field}"


def test_every_fault_of_the_blocks_is_found_at_once() -> None:
    blocks = {"quant": {"dtype_qk": "fp4", "k_block_size": 3}, "skip_softmax": {"threshold": -1}}
    assert sorted(found.key for found in faults("TRTLLM_ATTN", blocks)) == [
        "attention.default.quant.dtype_qk",
        "attention.default.quant.k_block_size",
        "attention.default.skip_softmax.threshold",
    ]


# --- what options do to a choice --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "blocks", "exactness"),
    [
        ("TRTLLM_ATTN", {}, "exact"),
        ("TRTLLM_ATTN", {"quant": {"dtype_qk": "int8"}}, "lossy-quantised"),
        ("TRTLLM_ATTN", {"quant": {"dtype_qk": "fp8_e4m3"}}, "lossy-quantised"),
        ("TRTLLM_ATTN", {"skip_softmax": {"threshold": 0.0}}, "exact"),
        ("TRTLLM_ATTN", {"skip_softmax": {"threshold": 0.001}}, "lossy-sparse"),
        ("TRTLLM_ATTN", {"skip_softmax": {"target_sparsity": 0.0}}, "lossy-sparse"),
        ("TRTLLM_ATTN", {"skip_softmax": {"target_sparsity": 0.5, "disabled_until_timestep": 0.9}}, "lossy-sparse"),
        ("FLASHINFER_ATTN", {"quant": {"dtype_qk": "float16", "dtype_vo": "float16"}}, "lossy-quantised"),
        ("FLASHINFER_ATTN", {"quant": {"dtype_vo": None}}, "exact"),
        ("FLASH_ATTN", {"quant": {"dtype_qk": "fp8_e4m3"}}, "lossy-quantised"),
        ("FLASH_ATTN", {"quant": {"dtype_qk": None}}, "exact"),
        ("FLASHINFER_ATTN", {"quant": {"dtype_vo": "fp8_e4m3"}}, "lossy-quantised"),
    ],
)
def test_the_selection_says_whether_the_result_is_exact(
    backend: str, blocks: Mapping[str, Any], exactness: str
) -> None:
    on = parse_device("cuda:9.0", {}, all_packages=True) if backend == "FLASH_ATTN" else B200
    assert select(backend, blocks, on=on).exactness == exactness


def test_fp8_is_for_flash_attention_3_and_head_sizes_that_it_has() -> None:
    on = parse_device("cuda:9.0", {"flash-attn-4": "4.0.0b36"}, all_packages=False)
    rules = [found.rule for found in faults("FLASH_ATTN", {"quant": {"dtype_qk": "fp8_e4m3"}}, on=on)]
    assert any("is for FlashAttention 3 on cuda:9.0 only" in rule for rule in rules)
    on = parse_device("cuda:9.0", {"fa3-fwd": "0.0.3"}, all_packages=False)
    small = replace(CALL, head_size=72)
    rules = [found.rule for found in faults("FLASH_ATTN", {"quant": {"dtype_qk": "fp8_e4m3"}}, on=on, required=small)]
    assert any("is for head sizes that are multiples of 16, and this is 72" in rule for rule in rules)


@pytest.mark.parametrize("field", ["threshold", "target_sparsity"])
def test_quantised_kernels_skip_nothing(field: str) -> None:
    found = fault("TRTLLM_ATTN", {"skip_softmax": {field: 0.1}, "quant": {"dtype_qk": "int8"}})
    assert found.key == f"attention.default.skip_softmax.{field}"
    assert "no kernel is published that also takes quant.dtype_qk=int8" in found.rule


def test_int8_kernels_are_for_one_chip() -> None:
    assert select("TRTLLM_ATTN", {"quant": {"dtype_qk": "fp8_e4m3"}}, on=B300).variant == "sm103"
    found = fault("TRTLLM_ATTN", {"quant": {"dtype_qk": "int8"}}, on=B300)
    assert (found.key, found.allowed) == ("attention.default.quant.dtype_qk", ("fp8_e4m3",))
    assert "for compute capability 10.0 only, and this is for cuda:10.3 and cuda:10.7" in found.rule


@pytest.mark.parametrize(
    ("blocks", "changes", "rule"),
    [
        ({"quant": {"dtype_qk": "int8"}}, {"causal": True}, "the quantised kernels are not for causal attention"),
        (
            {"skip_softmax": {"threshold": 0.1}},
            {"packed": True},
            "it holds for one number of keys, and packed documents",
        ),
    ],
)
def test_what_the_kernels_do_not_combine_is_refused(
    blocks: Mapping[str, Any], changes: Mapping[str, Any], rule: str
) -> None:
    assert fault("TRTLLM_ATTN", blocks, required=needs(**changes)).rule.startswith(rule)


def test_a_calibrated_factor_holds_for_packed_documents_of_any_length() -> None:
    blocks = {"skip_softmax": {"target_sparsity": 0.5}}
    assert select("TRTLLM_ATTN", blocks, required=needs(packed=True)).exactness == "lossy-sparse"


@pytest.mark.parametrize(
    ("quant", "on", "dtype", "variant"),
    [
        ({"dtype_qk": "float16", "dtype_vo": "float16"}, H100, "bfloat16", "fa3"),
        ({"dtype_qk": "bfloat16"}, H100, "bfloat16", "fa3"),
        ({"dtype_vo": "fp8_e4m3"}, B200, "bfloat16", "cute-dsl"),
        ({"dtype_qk": "float16"}, B200, "bfloat16", "cute-dsl"),
        ({"dtype_vo": "fp8_e4m3"}, H100, "bfloat16", None),
        ({"dtype_qk": "float16"}, H100, "bfloat16", None),
        ({"dtype_vo": "bfloat16"}, H100, "float16", None),
    ],
)
def test_v_of_another_dtype_is_for_the_kernels_that_have_it(
    quant: Mapping[str, str], on: DeviceFacts, dtype: str, variant: str | None
) -> None:
    required = needs(dtype=dtype)
    if variant is not None:
        chosen = select("FLASHINFER_ATTN", {"quant": quant}, on=on, required=required)
        assert (chosen.variant, chosen.options) == (variant, (("quant", FlashinferQuant(**quant)),))
        return
    found = faults("FLASHINFER_ATTN", {"quant": quant}, on=on, required=required)
    assert {item.key for item in found} == {f"attention.default.quant.{next(iter(quant))}"}
    assert all("is for cute-dsl only, on compute capability 10.x" in item.rule for item in found)
    assert all(item.value == next(iter(quant.values())) for item in found)
