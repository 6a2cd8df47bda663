"""A hint that is followed is accepted, and settings of other systems are answered by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.compose import compose, known_keys
from tests.configs.composing import PROMPT, refused

NAMES = sorted({name for key in known_keys() for name in key.split(".")})
VALUES = [
    "1",
    "4",
    "0.5",
    "text",
    "true",
    "null",
    "auto",
    "[a]",
    "[video]",
    "1,2",
    "a,b",
    "TORCH_SDPA,REFERENCE",
    "'x,y'",
]


@st.composite
def misspelt(draw: Any) -> str:
    """A name with a letter added, dropped or changed; or as it is."""
    name: str = draw(st.sampled_from(NAMES))
    at = draw(st.integers(0, len(name)))
    width, letter = draw(st.sampled_from([(0, "x"), (1, ""), (1, "e"), (0, "")]))
    return name[:at] + letter + name[at + width :] or "x"


def followed(remedy: str, argument: str) -> list[str]:
    """The arguments that a remedy suggests instead of one."""
    value = argument.partition("=")[2]
    if remedy.startswith("did you mean ") and remedy.endswith("?"):
        return [f"{name}={value}" for name in remedy.removeprefix("did you mean ").removesuffix("?").split(" or ")]
    quoted = re.findall(r'quote it, "(.*)"(?=, or|$)', remedy)
    bracketed = re.findall(r"use brackets for a list, (.*)$", remedy)
    single = re.findall(r"give one of them, such as (.*?)(?=, or (?:quote|use brackets)|$)", remedy)
    return quoted + bracketed + single


def accepts(argument: str) -> bool:
    """Whether no fault speaks of the argument's own key."""
    base = [] if argument.startswith("generate.prompt") else [PROMPT]
    faults = compose([*base, argument], environ={})[1]
    key = argument.partition("=")[0]
    return not any(fault.key == key or key.startswith(f"{fault.key}.") for fault in faults)


@given(st.lists(misspelt(), min_size=1, max_size=3).map(".".join), st.sampled_from(VALUES))
def test_a_hint_that_is_followed_is_accepted(key: str, value: str) -> None:
    argument = f"{key}={value}"
    for fault in compose([PROMPT, argument], environ={})[1]:
        for suggestion in followed(fault.remedy, argument):
            assert accepts(suggestion), (argument, fault.remedy)


@pytest.mark.parametrize("key", known_keys())
@pytest.mark.parametrize("value", ["1,2", "a,b", "video,frames", "1.5,x", "float32,bfloat16", "ulysses,ring"])
def test_every_way_out_of_a_sweep_is_accepted(key: str, value: str) -> None:
    _, faults = compose([*([] if key == "generate.prompt" else [PROMPT]), f"{key}={value}"], environ={})
    (fault,) = [fault for fault in faults if fault.key == key]
    assert "sweep of 2 values" in fault.rule
    assert all(map(accepts, followed(fault.remedy, f"{key}={value}"))), fault.remedy


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("parallel.cfg=2", "parallel.cfg=2: is not available yet; leave it out; parallel.ulysses"),
        ("run.retries=3", "run.retries=3: is not available yet; leave it out"),
        ("retries=3", "retries=3: is not available yet"),
        ("run.checkpoint_every=5", "run.checkpoint_every=5: is not available yet"),
        ("generate.prompts=a.txt", "generate.prompts=a.txt: is not available yet; run once for each generate.prompt"),
        ("generate.resolution=480p", "generate.resolution=480p: no such key; set generate.height and generate.width"),
        ("run.outputs=[report]", "run.outputs=[report]: takes a list of video and frames; report is not available yet"),
        ("generate.steps=2,4", "one run takes one value; give one of them, such as generate.steps=2 [command line]"),
        ("generate.step=x", "did you mean generate.steps? It takes a whole number of at least 1"),
    ],
)
def test_settings_that_are_not_there_are_answered_by_name(argument: str, message: str) -> None:
    (fault,) = refused(argument)
    assert message in str(fault)


def test_a_long_value_is_cut_where_it_is_shown_and_kept_in_the_fault() -> None:
    long = "x" * 1_000_000
    arguments = [
        (f"run.dtype={long}",),
        (f"{long}=1",),
        (f"run.seed=1{long}",),
        (f"run.outputs=[{long}]",),
        ("-ac", long),
        (f"attention.per_role.{long}={{}}",),
        (f"run.dir={long}", "run.dir=y"),
        (f"attention.default={long}", f"attention.default.backend={long}y"),
        (f"model={long}",),
        (f"run.dir=${{{long}}}",),
        (f"generate.steps={long},1",),
    ]
    for words in arguments:
        for fault in refused(*words):
            assert len(str(fault)) < 1500, words[0][:40]
    assert refused(f"run.dtype={long}")[0].value == long


def test_two_values_in_one_json_are_both_named() -> None:
    (fault,) = refused("-ac", '{"default": "A", "backend": "B"}')
    assert fault.rule == "is given twice, as attention.default=A and as attention.default=B"
