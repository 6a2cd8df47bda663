"""Drawn calls by the batch over live ranks, each judged once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import ray
from hypothesis import HealthCheck, Phase
from hypothesis.strategies import SearchStrategy

from tests.parallel.suite.drawing import batches
from tests.parallel.suite.drawn import Drawn
from tests.parallel.suite.histogram import ran
from tests.parallel.suite.judge import Verdict, judge
from tests.parallel.suite.on_rank import run_calls
from tests.ranks import Ranks

BATCHES_OF_A_ROUND = 10
"""hypothesis starts to vary what it drew before after so many."""


class RanksBrokeError(AssertionError):
    """Some rank raised where others may wait for it; nothing more can be run on these ranks."""

    def __init__(self, case: Drawn, errors: dict[int, str]) -> None:
        told = "\n".join(f"rank {rank}: {error}" for rank, error in errors.items())
        super().__init__(f"ranks broke at\n{case}\n{told}")


class _StopDrawing(BaseException):
    """hypothesis lets it through: without ranks there is nothing to shrink with."""


@dataclass
class Search:
    """drawn: what is drawn from. shrinks: whether what is wrong is made smaller, which takes many calls more. verdicts:
    in the order in which the calls were drawn. failure: why it stopped early, with the smallest call.
    """

    ranks: Ranks
    drawn: SearchStrategy[tuple[Drawn, ...]] = field(default_factory=batches)
    shrinks: bool = True
    verdicts: dict[Drawn, Verdict] = field(default_factory=dict)
    failure: AssertionError | None = None

    def run(self, count: int, seed: int) -> None:
        """Draws until so many calls ran; the same ones for the same seed."""
        round_of_seed = seed << 16
        while self.failure is None and len(ran(self.verdicts.values())) < count:
            self._round(round_of_seed)
            round_of_seed += 1

    def _round(self, seed: int) -> None:
        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=BATCHES_OF_A_ROUND,
            database=None,
            deadline=None,
            phases=(Phase.generate, *([Phase.shrink] if self.shrinks else [])),
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(self.drawn)
        def every_call_is_right(batch: tuple[Drawn, ...]) -> None:
            self._judge_batch(batch)

        try:
            every_call_is_right()
        except AssertionError as error:
            self.failure = error
        except _StopDrawing as stop:
            self.failure = stop.args[0]

    def _judge_batch(self, batch: tuple[Drawn, ...]) -> None:
        new = list(dict.fromkeys(case for case in batch if case not in self.verdicts))
        try:
            self.verdicts |= {verdict.case: verdict for verdict in judge_calls(self.ranks, new)}
        except RanksBrokeError as error:
            raise _StopDrawing(error) from error
        wrong = [self.verdicts[case] for case in batch if self.verdicts[case].complaints]
        if wrong:
            smallest = min(wrong, key=lambda verdict: len(repr(verdict.case)))
            raise AssertionError("\n".join((repr(smallest.case), *smallest.complaints)))


def judge_calls(ranks: Ranks, cases: Sequence[Drawn]) -> list[Verdict]:
    """Those of one number of ranks go there in one message. Raises RanksBrokeError."""
    together: dict[int, list[Drawn]] = {}
    for case in cases:
        together.setdefault(case.world_size, []).append(case)
    started = {size: ranks.start_among_first(size, run_calls, mine) for size, mine in together.items()}
    verdicts = []
    for size, mine in together.items():
        by_rank = _returned(started[size])
        errors = {rank: str(outcome) for rank, outcome in enumerate(by_rank) if isinstance(outcome, Exception)}
        if errors:
            raise RanksBrokeError(_culprit(ranks.again(size), mine), errors)
        for place, case in enumerate(mine):
            verdicts.append(judge(case, [outcomes[place] for outcomes in by_rank], ranks.device_type))
    return verdicts


def _returned(references: Sequence[Any]) -> list[Any]:
    """What each rank returned, or its error; mismatched exchanges of gloo end the process."""
    found: list[Any] = []
    for reference in references:
        try:
            found.append(ray.get(reference, timeout=600))
        except (ray.exceptions.RayTaskError, ray.exceptions.RayActorError) as error:
            found.append(error)
    return found


def _culprit(fresh: Ranks, cases: Sequence[Drawn]) -> Drawn:
    """The first of the calls that breaks new ranks; the last, if none does so again."""
    try:
        for case in cases:
            if any(
                isinstance(got, Exception)
                for got in _returned(fresh.start_among_first(fresh.world_size, run_calls, [case]))
            ):
                return case
    finally:
        fresh.close()
    return cases[-1]
