"""What is said of prompts that are longer than what the text encoder reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from runtime.generate import generate
from runtime.prompts import TEXT_TOKENS, prompt_cuts
from runtime.requests import Request
from runtime.run_folder import event_fields
from tests.runtime.test_session import TINY_WAN, config_of

REQUEST = Request("a red circle", "", 0, 3, 3.0, None, 5, 64, 64, 8)


def test_a_prompt_that_fits_has_nothing_to_say() -> None:
    assert prompt_cuts(AutoTokenizer.from_pretrained(TINY_WAN / "tokenizer"), 0, REQUEST) == ()


def test_what_is_left_out_of_long_prompts_is_counted_and_shown() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_WAN / "tokenizer")
    word = "circle "
    per_word = len(tokenizer(word * 10).input_ids) - len(tokenizer(word * 9).input_ids)
    words = TEXT_TOKENS // per_word + 20
    text = word * words + "moving left"
    tokens = len(tokenizer(text.strip()).input_ids)
    both = prompt_cuts(tokenizer, 2, replace(REQUEST, prompt=text, negative_prompt=text))

    assert [(cut.request, cut.name, cut.tokens, cut.limit) for cut in both] == [
        (2, "prompt", tokens, 512),
        (2, "negative_prompt", tokens, 512),
    ]
    assert both[0].left_out.endswith("moving left")
    assert len(tokenizer(both[0].left_out).input_ids) - 1 == pytest.approx(tokens - 512, abs=2)
    assert f"the last {tokens - 512} are left out, from 'c" in both[0].text
    assert event_fields(both[0])["left_out"] == both[0].left_out
    without_guidance = replace(REQUEST, guidance=1.0, negative_prompt=text)
    assert prompt_cuts(tokenizer, 0, without_guidance) == ()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_says_what_it_left_out_of_a_prompt_and_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "a red circle moving right " * 150
    config = config_of(TINY_WAN, 1, 8, f"run.dir={tmp_path}/run")
    path = generate(replace(config, generate=replace(config.generate, prompt=prompt)))

    summary = json.loads((path / "summary.json").read_text())
    left_out = summary["requests"][0]["tokens_left_out"]
    assert set(left_out) == {"prompt"}
    assert f"the last {left_out['prompt']} are left out" in capsys.readouterr().err
    assert '"prompt_cut"' in (path / "ranks" / "rank0.jsonl").read_text()
