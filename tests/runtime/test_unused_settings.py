"""A request's settings that the model would not use are refused; a preset's give way."""

from __future__ import annotations

from dataclasses import replace

import pytest

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


def test_text_in_a_request_keeps_its_quotes_where_a_number_belongs() -> None:
    (fault,) = request_faults(replace(request_of(composed()), steps="4"), FOLDER)  # type: ignore[arg-type]
    assert str(fault).startswith("generate.steps='4': takes a whole number")
