"""Whether what the ranks did with a call is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tests.parallel.suite.drawn import Drawn
from tests.parallel.suite.on_rank import Outcome, Ran, Refused
from tests.parallel.suite.reference import Exact, exact
from tests.parallel.suite.refusals import refusal

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 5e-3, "float16": 5e-3}
"""Relative L2 error of the results, as the design has it."""
OF_GRADIENTS = {"float64": 1e-11, "float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
OF_LSE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-5, "float16": 1e-5}
"""Of its scale, at least 1. It is in fp32 where the values are narrow."""
OF_FUSED_LSE = 1e-4
"""Of kernels that are written for GPUs, which take exponentials of lower precision."""
FUSED = ("FLASH_ATTN", "CUDNN_ATTN", None)


@dataclass(frozen=True)
class Verdict:
    """complaints: what is wrong; none for a call that went as it has to. refused: by all ranks, rightly."""

    case: Drawn
    complaints: tuple[str, ...]
    refused: bool
    strategy: str = ""
    degrees: tuple[int, int] = (1, 1)


def judge(case: Drawn, outcomes: Sequence[Outcome], device_type: str = "cpu") -> Verdict:
    """outcomes: of all ranks, in order. device_type: where they ran."""
    ran = [outcome for outcome in outcomes if isinstance(outcome, Ran)]
    refused = [outcome for outcome in outcomes if isinstance(outcome, Refused)]
    expected = refusal(case, device_type)
    if refused:
        complaints = tuple(_wrong_refusals(refused, len(ran), expected))
        return Verdict(case, complaints, refused=not complaints)
    complaints = tuple(_wrong_results(case, ran))
    if expected is not None:
        complaints = (f"it ran, and has to be refused: {expected}", *complaints)
    return Verdict(case, complaints, refused=False, strategy=ran[0].strategy, degrees=ran[0].degrees)


def _wrong_refusals(refused: Sequence[Refused], ran: int, expected: str | None) -> Iterator[str]:
    if expected is None:
        yield f"refused, and has to run: {refused[0].error}"
    if ran:
        yield f"{ran} ranks ran it, and the others refused: {refused[0].error}"
    if len({outcome.error for outcome in refused}) > 1:
        yield f"ranks refused with other words: {sorted({outcome.error for outcome in refused})}"
    if any(outcome.moved for outcome in refused):
        yield f"refused after an exchange: {refused[0].error}"


def _wrong_results(case: Drawn, ran: Sequence[Ran]) -> Iterator[str]:
    answer = exact(case)
    if len({(result.strategy, result.degrees) for result in ran}) > 1:
        yield "ranks went other ways"
    yield from _wrong_rows(case, ran)
    for rank, result in enumerate(ran):
        if not result.untouched:
            yield f"rank {rank} changed its inputs"
        if not result.contiguous:
            yield f"a result of rank {rank} is not contiguous"
        if not result.refuses_another:
            yield f"rank {rank} did not refuse a second call that carries something else"
        if result.moved != result.planned:
            yield f"rank {rank} moved {result.moved}, planned was {result.planned}"
        wide = "float64" if case.dtype == "float64" else "float32"
        if result.dtypes != (case.dtype, wide if case.lse else case.dtype):
            yield f"rank {rank} returned {result.dtypes}"
    if max(row for result in ran for row in (-1, *result.query_rows)) < case.queries:
        yield from _wrong_out(case, ran, answer)
        if case.lse:
            yield from _wrong_lse(case, ran, answer)
        if case.gradient:
            yield from _wrong_gradients(case, ran, answer)


def _wrong_rows(case: Drawn, ran: Sequence[Ran]) -> Iterator[str]:
    """A sharded stream's rows are with one rank each, a replicated one's with all."""
    held = Counter(row for result in ran for row in result.query_rows)
    asking = [stream for stream in case.streams if stream.queries]
    expected = [1 if stream.sharded else case.world_size for stream in asking for _ in range(stream.length)]
    if held != Counter(dict(enumerate(expected))):
        yield f"rows are with so many ranks: {dict(held)}"


def _wrong_out(case: Drawn, ran: Sequence[Ran], answer: Exact) -> Iterator[str]:
    norm = float(answer.out.norm())
    for rank, result in enumerate(ran):
        expected = answer.out[:, result.query_rows]
        got = torch.tensor(result.out)
        if got.shape != expected.shape:
            yield f"rank {rank} returned {tuple(got.shape)} for {tuple(expected.shape)}"
        elif not (error := float((got - expected).norm())) <= TOLERANCE[case.dtype] * norm:
            yield f"the output of rank {rank} is off by {error / norm if norm else error:.3g}"


def _wrong_lse(case: Drawn, ran: Sequence[Ran], answer: Exact) -> Iterator[str]:
    for rank, result in enumerate(ran):
        expected = answer.lse[:, :, result.query_rows]
        got = torch.tensor(result.lse) if result.lse is not None else torch.empty(0)
        if got.shape != expected.shape or not torch.equal(torch.isinf(got), torch.isinf(expected)):
            yield f"the log-sum-exp of rank {rank} is {tuple(got.shape)} for {tuple(expected.shape)}, or infinite"
            continue
        finite = torch.isfinite(expected)
        error = (got - expected)[finite].abs() / expected[finite].abs().clamp_min(1)
        allowed = OF_FUSED_LSE if case.backend in FUSED and case.dtype == "bfloat16" else OF_LSE[case.dtype]
        if not bool((error <= allowed).all()):
            yield f"the log-sum-exp of rank {rank} is off by {float(error.max()):.3g}"


def _wrong_gradients(case: Drawn, ran: Sequence[Ran], answer: Exact) -> Iterator[str]:
    """Those of all ranks, put to their places and summed up, against the whole; by the largest of them, since one of
    them may vanish (of one key, the query's).
    """
    norm = max(float(gradient.norm()) for gradient in answer.gradients)
    names = ("query", "key", "value", *(["sinks"] if case.sinks else []), *(["bias"] if case.bias != "none" else []))
    for index, (name, expected) in enumerate(zip(names, answer.gradients, strict=True)):
        summed = torch.zeros_like(expected)
        for result in ran:
            got = torch.tensor(result.gradients[index])
            if index < 3:
                summed[:, result.query_rows if index == 0 else result.key_rows] += got
            else:
                summed += got
        if not (error := float((summed - expected).norm())) <= OF_GRADIENTS[case.dtype] * norm:
            yield f"the gradient of {name} is off by {error / norm if norm else error:.3g}"
