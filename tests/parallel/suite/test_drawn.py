"""Thousands of drawn calls over 1 to 8 live ranks against fp64 softmax attention.

`pytest tests/parallel/suite/test_drawn.py` draws the same calls each time. `--calls 20000 --calls-seed 7` draws more,
and others. A failure ends with the smallest call that fails, written so that it can be put into KEPT, which is run
first: there it can be looked at, and stays.
"""

from __future__ import annotations

import pytest

from parallel.plan import Stream
from tests.parallel.suite.drawn import Drawn
from tests.parallel.suite.histogram import SHARES, lines, ran, shares
from tests.parallel.suite.search import Search, judge_calls
from tests.ranks import Ranks
from tests.summary import LINES

pytestmark = pytest.mark.ray

KEPT = (
    # Ranks whose window reaches replicated keys alone have a backward pass of the exchanged ones, too.
    Drawn(
        world_size=7,
        strategy="ring",
        kind="joint",
        streams=(Stream("text", 25, sharded=False), Stream("video", 3)),
        window=(6, 7),
        gradient=True,
    ),
    # Ranks without heads send back nothing of the log-sum-exp, and have a backward pass of that, too.
    Drawn(world_size=3, strategy="ulysses", lse=True, gradient=True),
    # Of a Ulysses group without sharded rows, ranks without heads go back through the exchange as the others do.
    *(
        Drawn(
            world_size=6,
            ulysses=3,
            ring=2,
            strategy=strategy,
            kind="joint",
            streams=(Stream("text", 5, sharded=False), Stream("video", length)),
            gradient=True,
        )
        for strategy in ("ring", "gather_kv")
        for length in (0, 1)
    ),
    Drawn(
        world_size=3,
        strategy="ulysses",
        kind="joint",
        streams=(Stream("text", 5, sharded=False), Stream("video", 0)),
        gradient=True,
    ),
    # Ranks with other numbers of rows refuse a window in the same words; also where one has as many rows as keys.
    Drawn(world_size=2, kind="cross", streams=(Stream("video", 9),), cross_keys=10, window=(None, 7)),
    Drawn(world_size=2, kind="cross", streams=(Stream("video", 9),), cross_keys=5, window=(None, 7)),
)


def test_calls_that_once_failed(eight_ranks: Ranks) -> None:
    for verdict in judge_calls(eight_ranks, KEPT):
        assert not verdict.complaints, verdict.case


@pytest.fixture(scope="module")
def search(eight_ranks: Ranks, pytestconfig: pytest.Config) -> Search:
    found = Search(eight_ranks)
    seed = pytestconfig.getoption("--calls-seed")
    found.run(pytestconfig.getoption("--calls"), seed)
    told = [f"Attention over live ranks, seed {seed}:", *lines(list(found.verdicts.values()))]
    pytestconfig.stash.setdefault(LINES, []).extend(told)
    return found


def test_every_call_is_exact_or_refused_by_all_ranks(search: Search, pytestconfig: pytest.Config) -> None:
    if search.failure is not None:
        raise search.failure
    assert not [verdict for verdict in search.verdicts.values() if verdict.complaints]
    assert len(ran(search.verdicts.values())) >= pytestconfig.getoption("--calls")


@pytest.mark.parametrize("share", SHARES)
def test_enough_of_the_calls_are_of_the_hard_sorts(search: Search, share: str) -> None:
    assert shares(ran(search.verdicts.values()))[share] >= SHARES[share][0]
