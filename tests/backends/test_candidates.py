"""What a rank could run of a role on which its group may settle: every variant, and what a fallback allows."""

from __future__ import annotations

import pytest

from backends.platforms.facts import DeviceFacts
from backends.registry import Registry
from backends.requirements import Requirements
from backends.selection import Agreed, Candidates, Choice
from backends.selector import Selector
from configs.schema import AttentionConfig, AttentionSpec

CALL = Requirements(128, 4, 4, "bfloat16", "self")
BOTH = DeviceFacts("cuda", (9, 0), packages={"fa3-fwd": "0.0.3", "flash-attn-4": "4.0.0b36"})
FA4 = DeviceFacts("cuda", (9, 0), packages={"flash-attn-4": "4.0.0b36"})
NONE = DeviceFacts("cuda", (9, 0))
WISH = AttentionConfig(default=AttentionSpec("FLASH_ATTN", on_unsupported="fallback"))


def candidates(device: DeviceFacts, config: AttentionConfig) -> Candidates | None:
    return Selector(device, config, Registry()).candidates("self", CALL)


def named(found: Candidates | None) -> list[str]:
    assert found is not None
    return [f"{choice.backend}/{choice.variant}" for choice in found.valid]


def choice_of(backend: str, variant: str) -> Choice:
    return Choice(backend, variant, Registry().class_path(backend))


def test_every_variant_that_serves_is_a_candidate_in_its_order() -> None:
    assert named(candidates(BOTH, AttentionConfig()))[:2] == ["FLASH_ATTN/fa3", "FLASH_ATTN/fa4"]
    assert named(candidates(FA4, AttentionConfig()))[0] == "FLASH_ATTN/fa4"


def test_a_variant_that_does_not_serve_beside_one_that_does_says_why() -> None:
    found = candidates(BOTH, AttentionConfig())
    assert found is not None
    reasons = {(rejected.backend, rejected.variant): rejected.faults for rejected in found.rejected}
    assert "is not installed" in reasons["FLASH_ATTN", "fa2"][0].rule


def test_an_explicit_choice_has_candidates_only_if_it_may_fall_back() -> None:
    assert candidates(BOTH, AttentionConfig(default=AttentionSpec("TORCH_SDPA"))) is None
    wish = AttentionConfig(default=AttentionSpec("TORCH_SDPA", on_unsupported="fallback"))
    assert named(candidates(BOTH, wish))[:2] == ["TORCH_SDPA/torch", "FLASH_ATTN/fa3"]
    assert "FLASH_ATTN/fa3" not in named(candidates(NONE, WISH))


def test_a_pinned_version_is_one_variant_before_the_platforms() -> None:
    pinned = AttentionConfig(default=AttentionSpec("FLASH_ATTN", version=4, on_unsupported="fallback"))
    assert named(candidates(BOTH, pinned))[:2] == ["FLASH_ATTN/fa4", "FLASH_ATTN/fa3"]


@pytest.mark.parametrize(
    ("config", "source", "requested"), [(AttentionConfig(), "agreed", None), (WISH, "default", "FLASH_ATTN")]
)
def test_an_agreed_variant_is_taken_where_another_would_come_first(
    config: AttentionConfig, source: str, requested: str | None
) -> None:
    agreement = {("self", CALL): Agreed(choice_of("FLASH_ATTN", "fa4"))}
    chosen = Selector(BOTH, config, Registry(), agreement).select("self", CALL)
    assert (chosen.backend, chosen.variant) == ("FLASH_ATTN", "fa4")
    assert (chosen.source, chosen.requested) == (source, requested)


def test_an_agreed_fallback_replaces_an_explicit_choice_that_this_rank_could_run() -> None:
    agreement = {("self", CALL): Agreed(choice_of("TORCH_SDPA", "torch"))}
    chosen = Selector(BOTH, WISH, Registry(), agreement).select("self", CALL)
    assert (chosen.backend, chosen.source, chosen.requested) == ("TORCH_SDPA", "agreed", "FLASH_ATTN")
    (own,) = Selector(NONE, WISH, Registry(), agreement).select("self", CALL).rejected
    assert own.backend == "FLASH_ATTN"
