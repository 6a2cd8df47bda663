"""A request's settings that the model would not use are refused; a preset's give way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from configs.compose import presets
from runtime.check import request_faults
from runtime.model_folder import read_folder
from runtime.requests import request_of
from tests.configs.composing import composed

FOLDER = read_folder("built-in:tiny-wan", weights=False)
TWO_STAGES = replace(FOLDER, two_stage=True)


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        (("generate.guidance=1", "generate.guidance_2=6"), ["generate.guidance_2"]),
        (("generate.guidance=1", "generate.negative_prompt=dark"), ["generate.negative_prompt"]),
        (("generate.guidance=2", "generate.guidance_2=1", "generate.negative_prompt=dark"), []),
        (("generate.guidance=1", "generate.guidance_2=null"), []),
        (("generate.guidance=1",), []),
    ],
)
def test_without_guidance_a_second_scale_and_a_negative_prompt_are_refused(
    settings: tuple[str, ...], keys: list[str]
) -> None:
    faults = request_faults(request_of(composed(*settings)), TWO_STAGES)
    assert [fault.key for fault in faults] == keys
    assert all("raise generate.guidance above 1" in fault.remedy for fault in faults)


def test_a_presets_second_scale_gives_way_to_no_guidance() -> None:
    preset = ("model=wan2.2-t2v-a14b", "model.path=folder")
    assert composed(*preset).generate.guidance_2 == 3.0
    assert composed(*preset, "generate.guidance=1").generate.guidance_2 is None
    assert composed(*preset, "generate.guidance=5").generate.guidance_2 == 3.0
    assert composed(*preset, "generate.guidance=1", "generate.guidance_2=3").generate.guidance_2 == 3.0


WAN_PRESETS = tuple(name for name in presets() if name.startswith("wan"))
WAN_DEFAULT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，"
    "丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，"
    "杂乱的背景，三条腿，背景人很多，倒着走"
)
"""`sample_neg_prompt` of wan/configs/shared_config.py, the same in Wan 2.1 and Wan 2.2."""


@pytest.mark.parametrize("name", WAN_PRESETS)
def test_a_wan_preset_has_the_negative_prompt_of_wans_own_code(name: str) -> None:
    prefix = "镜头晃动，" if name == "wan2.1-i2v-14b" else ""
    assert composed(f"model={name}", "model.path=folder").generate.negative_prompt == prefix + WAN_DEFAULT


@pytest.mark.parametrize("name", WAN_PRESETS)
def test_a_presets_negative_prompt_gives_way_to_no_guidance(name: str) -> None:
    preset = (f"model={name}", "model.path=folder", "generate.guidance=1")
    assert composed(*preset).generate.negative_prompt == ""
    assert composed(*preset, "generate.negative_prompt=dark").generate.negative_prompt == "dark"
    assert composed(*preset[:2], "generate.negative_prompt=''").generate.negative_prompt == ""


def test_text_in_a_request_keeps_its_quotes_where_a_number_belongs() -> None:
    (fault,) = request_faults(replace(request_of(composed()), steps="4"), FOLDER)  # type: ignore[arg-type]
    assert str(fault).startswith("generate.steps='4': takes a whole number")
