"""What a layer promises of its arguments and of what its backend returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backends.kernels.reference import ReferenceImpl
from backends.platforms.facts import parse_device
from backends.registry import Registry
from backends.requirements import NO_FEATURES
from backends.selector import Selector
from configs.faults import FaultError
from configs.schema import AttentionConfig, ParallelConfig
from parallel.attention import Attention
from parallel.planner import RoleCall, choose
from parallel.restrict import _seen
from parallel.rows import rows
from parallel.transport.base import _Exchange
from tests.exact import random_qkv
from tests.parallel.layers import CPU, context_of

HEADS, SIZE, ROWS = 4, 16, 4  # as many rows as heads: a wrong layout has the right shape


def layer_of(**options: Any) -> Attention:
    return Attention(
        HEADS, SIZE, role="self", kind="self", context=context_of(backend="REFERENCE"), lse=True, **options
    )


class LongerImpl(ReferenceImpl):
    def forward_with_lse(self, *args: Any, **kwargs: Any) -> Any:
        out, lse = super().forward_with_lse(*args, **kwargs)
        return out, lse.transpose(1, 2)


class NarrowImpl(ReferenceImpl):
    def forward_with_lse(self, *args: Any, **kwargs: Any) -> Any:
        out, lse = super().forward_with_lse(*args, **kwargs)
        return out, lse.bfloat16()


class NoneImpl(ReferenceImpl):
    def forward_with_lse(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs), None


@pytest.mark.parametrize(
    ("impl", "rows", "found"),
    [
        (LongerImpl, 7, r"a log-sum-exp of torch\.float32 \(2, 7, 4\)"),
        (NarrowImpl, 7, r"a log-sum-exp of torch\.bfloat16 \(2, 4, 7\)"),
        (NoneImpl, 7, "no log-sum-exp"),
    ],
)
def test_a_log_sum_exp_of_another_layout_or_dtype_is_refused(impl: Any, rows: int, found: str) -> None:
    layer = layer_of(impl_overrides={"REFERENCE": impl})
    qkv = random_qkv(2, rows, rows, HEADS, HEADS, SIZE, torch.float32)
    with pytest.raises(ValueError, match=rf"of REFERENCE returned {found}; .* \[B, H, Sq\]"):
        layer.forward_with_lse(*qkv)


def test_a_layer_that_will_be_differentiated_gets_what_can_be() -> None:
    call = RoleCall("self", 6, 6, 128, "bfloat16", gradient=True, features=NO_FEATURES)
    selector = Selector(parse_device("cuda:9.0", {}, all_packages=True), AttentionConfig(), Registry.built_in())
    planned = choose(call, 4, ParallelConfig(), lambda required: selector.select("self", required))
    assert not list(
        Registry.built_in()
        .get_class(planned.selection.backend)
        .validate(call.required(planned.way), selector.device)
        .faults
    )
    assert layer_of(gradient=True).rules.required.gradient


@pytest.mark.parametrize("parallel", [ParallelConfig(ulysses=2), ParallelConfig(ring=3)])
def test_degrees_that_one_rank_cannot_make_up_are_refused(parallel: ParallelConfig) -> None:
    context = context_of(backend="REFERENCE", parallel=parallel)
    with pytest.raises(FaultError, match="do not make up 1 ranks"):
        Attention(HEADS, SIZE, role="self", kind="self", context=context)


def test_a_ring_that_costs_the_backend_says_how_to_have_it() -> None:
    selector = Selector(parse_device("cpu", {}, all_packages=False), AttentionConfig(), Registry.built_in())
    call = RoleCall("self", 6, 6, 64, "float32", features=NO_FEATURES)
    planned = choose(call, 4, ParallelConfig(), lambda required: selector.select("self", required))
    (rejected,) = planned.selection.rejected_strategies
    (fault,) = rejected.faults
    assert (rejected.strategy, fault.key, fault.value) == ("ulysses_ring 2x2", "parallel.strategy", "auto")
    assert fault.remedy == "set parallel.ulysses=2 parallel.strategy=ring to have it"
    asked = choose(
        call, 4, ParallelConfig(ulysses=2, strategy="ring"), lambda required: selector.select("self", required)
    )
    assert str(asked.way) == "ulysses_ring 2x2"


def test_a_second_derivative_through_an_exchange_raises() -> None:
    class Same:
        def move(self, verb: str, send: torch.Tensor, counts: Any, peers: Any) -> torch.Tensor:
            return send * 1

    class Counts:
        reversed = None

    sent = torch.ones(3, requires_grad=True)
    moved = _Exchange.apply(sent, Same(), "verb", Counts(), None)
    (gradient,) = torch.autograd.grad((moved**3).sum(), sent, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("window", [(None, None), (2, None), (None, 1), (0, 0), (3, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_of_any_positions_is_the_same_as_by_distance(window: Any, causal: bool) -> None:
    queries, keys = rows(range(4, 6), range(9, 12)), rows(range(1), range(3, 7), range(10, 11))
    before, after = (10**6 if side is None else side for side in window)
    distance = torch.tensor(list(keys)) - torch.tensor(list(queries))[:, None]
    exact = (distance >= -before) & (distance <= (min(after, 0) if causal else after))
    assert torch.equal(_seen(queries, keys, window, causal, CPU)[0, 0], exact)
