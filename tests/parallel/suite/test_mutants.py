"""The suite sees what it is there to see: a few calls are right, and with a fault in the ranks they are not."""

from __future__ import annotations

import pytest
import ray

from parallel.plan import Stream
from tests.parallel.suite.drawn import Drawn
from tests.parallel.suite.judge import judge
from tests.parallel.suite.mutants import MUTANTS, run_mutated
from tests.parallel.suite.search import judge_calls
from tests.ranks import Ranks

pytestmark = pytest.mark.ray

TEXT, VIDEO = Stream("text", 5, sharded=False), Stream("video", 11)
CALLS = {
    "some rows": Drawn(2, "ulysses", streams=(Stream("video", 9),), heads=5, kv_heads=5),
    "more rows": Drawn(2, "ulysses", streams=(Stream("video", 14),), heads=5, kv_heads=5),
    "groups": Drawn(2, "ulysses", streams=(Stream("video", 8),), heads=8, kv_heads=4, batch=2),
    "wide values": Drawn(2, "ulysses", streams=(Stream("video", 8),), heads=4, kv_heads=4, value_size=6),
    "masked": Drawn(2, "ulysses", streams=(Stream("video", 12),), heads=4, kv_heads=4, mask="full", seed=1),
    "masked ring": Drawn(2, "ring", streams=(Stream("video", 12),), heads=3, kv_heads=3, mask="key_padding", seed=2),
    "ring": Drawn(3, "ring", streams=(Stream("video", 13),), heads=4, kv_heads=2, batch=2, lse=True),
    "text": Drawn(2, "ulysses", kind="joint", streams=(TEXT, VIDEO), heads=4, kv_heads=2),
    "text, both ways": Drawn(4, ulysses=2, ring=2, kind="joint", streams=(VIDEO, TEXT), heads=3, kv_heads=3),
}
SEEN_BY = {
    "a row dropped": {"some rows", "ring", "text", "text, both ways"},
    "two heads swapped": {"some rows", "more rows", "groups", "masked", "text", "text, both ways"},
    "text counted twice": {"text"},
    "the mask ignored": {"masked", "masked ring"},
    "a wrong LSE layout": {"masked ring", "ring", "text, both ways"},
    "a stale plan": {"more rows"},
    "values as wide as keys": {"wide values"},
    "heads-first results": {"some rows", "more rows", "groups", "masked", "ring", "text", "wide values"},
    "an agreement ignored": {"some rows", "masked ring", "ring", "text, both ways", "wide values"},
    "a KV head off by one": {"some rows", "more rows", "groups", "masked", "text, both ways"},
}
"""Which calls have to turn red; others may."""


def test_the_calls_are_right_without_a_fault(eight_ranks: Ranks) -> None:
    assert not [verdict for verdict in judge_calls(eight_ranks, list(CALLS.values())) if verdict.complaints]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_mutant_turns_the_suite_red(eight_ranks: Ranks, mutant: str) -> None:
    red = set()
    for size in (2, 3, 4):
        names = [name for name, case in CALLS.items() if case.world_size == size]
        cases = [CALLS[name] for name in names]
        by_rank = ray.get(eight_ranks.start_among_first(size, run_mutated, mutant, cases), timeout=120)
        verdicts = [judge(case, [found[place] for found in by_rank]) for place, case in enumerate(cases)]
        red |= {name for name, verdict in zip(names, verdicts, strict=True) if verdict.complaints}
    assert red >= SEEN_BY[mutant], f"{mutant} was not seen by {SEEN_BY[mutant] - red}"


def test_ranks_are_as_they_were_after_the_mutants(eight_ranks: Ranks) -> None:
    test_the_calls_are_right_without_a_fault(eight_ranks)
