"""What ranks settle on where their automatic choices differ, from what each of them could run."""

from __future__ import annotations

from dataclasses import replace

from backends.platforms.facts import DeviceFacts
from backends.registry import Registry
from backends.requirements import Requirements
from backends.selection import Agreed, Candidates, Choice, Rejected, Selection
from backends.selector import Selector
from configs.faults import Fault
from configs.schema import AttentionConfig
from runtime.errors import RankPlace
from runtime.setup import Row, Wired, disagreements, negotiate

CALL = Requirements(head_size=64, num_heads=4, num_kv_heads=4, dtype="float32", kind="self")
KEY = ("self", CALL)
A, B, C = (Choice(name, "v", f"my.{name}") for name in "ABC")
PLACES = tuple(RankPlace(rank, "node", "10.0.0.1", "host", 100 + rank) for rank in range(3))
NO_A = Rejected("A", (Fault("packages", None, "the package a is not installed", "install it"),))


def rank(*valid: Choice, rejected: tuple[Rejected, ...] = (), automatic: bool = True) -> Wired:
    """A rank that took the first of what it could run."""
    first = valid[0]
    chosen = Selection(
        *("self", "self", "self", CALL, None, first.backend, first.variant, first.class_path, "platform", "", ""),
        exactness="exact",
    )
    candidates = {KEY: Candidates(valid, rejected)} if automatic else {}
    return Wired((("transformer", chosen, "local", 2),), DeviceFacts("cpu"), candidates)


def test_the_first_ranks_best_that_all_can_run_is_taken_with_the_reasons() -> None:
    ranks = {0: rank(A, B, C), 1: rank(C, B, rejected=(NO_A,)), 2: rank(B, C, rejected=(NO_A,))}
    agreed = negotiate(ranks, PLACES)
    assert agreed.keys() == {KEY}
    assert agreed[KEY].choice == B
    reasons = [fault.rule for rejected in agreed[KEY].rejected for fault in rejected.faults if rejected.backend == "A"]
    assert [reason.split(" (")[0] for reason in reasons] == ["on rank 1 on host", "on rank 2 on host"]
    assert all(reason.endswith("the package a is not installed") for reason in reasons)


def test_ranks_with_several_variants_settle_on_one_that_all_have() -> None:
    """A rank with the packages of two FlashAttentions and one with the second alone."""
    call = Requirements(head_size=128, num_heads=4, num_kv_heads=4, dtype="bfloat16", kind="self")
    wired = {}
    for number, packages in enumerate(({"fa3-fwd": "0.0.3", "flash-attn-4": "4.0.0"}, {"flash-attn-4": "4.0.0"})):
        device = DeviceFacts("cuda", (9, 0), packages=packages)
        selector = Selector(device, AttentionConfig(), Registry())
        found = selector.candidates("self", call)
        assert found is not None
        row: Row = ("transformer", selector.select("self", call), "local", 2)
        wired[number] = Wired((row,), device, {("self", call): found})
    assert [each.rows[0][1].variant for each in wired.values()] == ["fa3", "fa4"]
    (agreed,) = negotiate(wired, PLACES).values()
    assert (agreed.choice.backend, agreed.choice.variant) == ("FLASH_ATTN", "fa4")
    ((reason,),) = [rejected.faults for rejected in agreed.rejected]
    assert reason.rule.startswith(f"on {PLACES[1]}: the package fa3-fwd")
    assert "is not installed" in reason.rule


def test_what_does_not_differ_is_left_alone() -> None:
    assert negotiate({0: rank(A, B), 1: rank(A, C)}, PLACES) == {}


def test_without_a_common_candidate_or_where_a_rank_was_told_nothing_is_settled() -> None:
    assert negotiate({0: rank(A), 1: rank(B)}, PLACES) == {}
    assert negotiate({0: rank(A, B), 1: rank(B, automatic=False)}, PLACES) == {}


def test_ranks_with_other_models_settle_nothing_and_disagree() -> None:
    ranks = {0: rank(A), 1: replace(rank(A), rows=())}
    assert negotiate(ranks, PLACES) == {}
    assert disagreements(ranks, PLACES) == (f"{PLACES[0]} has 1 roles, {PLACES[1]} has 0",)


def test_every_part_of_a_choice_counts_as_a_disagreement() -> None:
    base = rank(A)
    ((model, chosen, strategy, layers),) = base.rows
    others = [
        (model, replace(chosen, class_path="your.A"), strategy, layers),
        (model, replace(chosen, variant="w"), strategy, layers),
        (model, chosen, "ulysses", layers),
        (model, chosen, strategy, layers + 1),
    ]
    for other in others:
        assert len(disagreements({0: base, 1: replace(base, rows=(other,))}, PLACES)) == 1  # type: ignore[arg-type]
    assert disagreements({0: base, 1: base}, PLACES) == ()
    assert isinstance(Agreed(A).rejected, tuple)
