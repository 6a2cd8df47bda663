"""What `Session` makes of its attention argument, before it starts anything."""

from __future__ import annotations

from typing import Any

import pytest

import raylysses
from tests.configs.composing import BACKEND, composed


@pytest.mark.parametrize(
    "form",
    [
        raylysses.DiffusionAttentionBackendEnum.REFERENCE,
        {"default": "REFERENCE", "per_role": {}},
        {"backend": "REFERENCE"},
        "attention.default=REFERENCE",
    ],
    ids=repr,
)
def test_a_session_takes_every_form_of_attention(form: Any) -> None:
    session = raylysses.Session(composed("attention.default=TORCH_SDPA"), attention=form)
    assert session.config.attention == raylysses.AttentionConfig("REFERENCE")


def test_the_environment_fills_the_argument_but_not_a_composed_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND, "REFERENCE")
    given = raylysses.Session(composed(), attention={"per_role": {"self": "TORCH_SDPA"}}).config.attention
    assert given.default == raylysses.AttentionSpec("REFERENCE")
    assert raylysses.Session(composed()).config.attention.default is None
