"""Bare layers: ranks that are about to make different calls, or of which one refuses its own, all raise before the
first collective; what they agreed on holds for as long as they keep the plan.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import parallel.admission
from backends.interface import AttentionMetadata, PackedLengths
from configs.schema import ParallelConfig
from parallel.agreement import CallFacts, ForwardFacts, RankDisagreementError, agree
from parallel.attention import Attention
from parallel.mesh import Mesh
from parallel.pieces import take
from parallel.plan import ShardPlan, Stream, plan_streams
from parallel.transport.errors import ExchangeError
from tests.parallel.cases import Case, GlooRanks, exact, layer_of, metadata_of, tensors_of
from tests.parallel.layers import CPU, context_of

USUAL = Case((Stream("video", 8),), batch=1)
STRATEGIES = {name: ParallelConfig(strategy=name) for name in ("ulysses", "ring", "gather_kv")}
META = torch.device("meta")


@dataclass(frozen=True)
class Asked:
    """A call of one rank. change: of Q, K and V. scale: of the softmax; None for the layer's own."""

    case: Case = USUAL
    strategy: str = "ulysses"
    change: str = ""
    lse: bool = False
    scale: float | None = None


CHANGES: dict[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]] = {
    "": lambda qkv: qkv,
    "K of another batch": lambda qkv: [qkv[0], qkv[1].repeat(2, 1, 1, 1), qkv[2]],
    "K and V of another batch": lambda qkv: [qkv[0], *(each.repeat(2, 1, 1, 1) for each in qkv[1:])],
    "K of another dtype": lambda qkv: [qkv[0], qkv[1].float(), qkv[2]],
    "V of another dtype": lambda qkv: [qkv[0], qkv[1], qkv[2].float()],
    "K on another device": lambda qkv: [qkv[0], qkv[1].to(META), qkv[2]],
    "all on another device": lambda qkv: [each.to(META) for each in qkv],
    "a row less": lambda qkv: [each[:, 1:] for each in qkv],
    "no dimensions": lambda qkv: [qkv[0][0, 0, 0, 0], *qkv[1:]],
    "no key": lambda qkv: [qkv[0], None, qkv[2]],  # type: ignore[list-item]
    "a list": lambda qkv: [qkv[0], qkv[1], [1.0]],  # type: ignore[list-item]
    "gradients": lambda qkv: [each.requires_grad_() for each in qkv],
    "gradients of Q": lambda qkv: [qkv[0].requires_grad_(), *qkv[1:]],
    "gradients of K": lambda qkv: [qkv[0], qkv[1].requires_grad_(), qkv[2]],
}


def call(mesh: Mesh, asked: Asked, layer: Attention | None = None, plan: ShardPlan | None = None) -> float:
    """The largest difference from the whole answer."""
    layer = layer or layer_of(mesh, asked.case, STRATEGIES[asked.strategy], lse=True, softmax_scale=asked.scale)
    plan = plan or layer.plan_of(*asked.case.streams)
    held = plan.shares[mesh.rank].query_rows
    query, key, value = CHANGES[asked.change]([take(tensor, held) for tensor in tensors_of(asked.case)])
    carried = metadata_of(asked.case)
    if asked.lse:
        out, _ = layer.forward_with_lse(query, key, value, carried, plan=plan)
    else:
        out = layer(query, key, value, carried, plan=plan)
    return float((out - take(exact(asked.case)[0], held)).abs().amax()) if out.numel() else 0.0


def watched(mesh: Mesh, asked: Asked) -> tuple[float | Exception, int]:
    """What became of the call, and how many exchanges of rows were begun on this rank."""
    begun = 0
    names = ("all_to_all_single", "batch_isend_irecv")
    real = {name: getattr(dist, name) for name in names}

    def counted(name: str) -> Callable[..., Any]:
        def collective(*args: Any, **options: Any) -> Any:
            nonlocal begun
            begun += 1
            return real[name](*args, **options)

        return collective

    try:
        for name in names:
            setattr(dist, name, counted(name))
        return call(mesh, asked), begun
    except (ValueError, RankDisagreementError) as error:
        return error, begun
    finally:
        for name in names:
            setattr(dist, name, real[name])


# --- other calls on other ranks ---------------------------------------------------------------------------------------

OTHER = {
    "another batch": (Asked(replace(USUAL, batch=2)), "batch: rank 0 has 1, rank 1 has 2"),
    "another dtype": (Asked(replace(USUAL, dtype=torch.float32)), "dtype: rank 0 has float64, rank 1 has float32"),
    # 7 and 8 rows give the first rank 4 of them each: its own plan would notice nothing
    "another length": (Asked(replace(USUAL, streams=(Stream("video", 7),))), "plan: rank 0 has video 8; "),
    "other streams": (Asked(replace(USUAL, streams=(Stream("a", 4), Stream("b", 4)))), "has a 4, b 4; "),
    "other heads": (Asked(replace(USUAL, heads=4, kv_heads=4)), "plan: rank 0 has video 8; 6/6 heads by "),
    "a mask": (Asked(replace(USUAL, carried=("full",))), "carried: rank 0 has nothing, rank 1 has full mask"),
    "gradients": (Asked(change="gradients"), "carried: rank 0 has nothing, rank 1 has nothing, with gradients"),
    "another scale": (Asked(scale=0.5), "scaled by 0.5, by "),
    "log-sum-exps": (Asked(lse=True), "carried: rank 0 has nothing, rank 1 has nothing, with log-sum-exps"),
}


@pytest.mark.ray
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", OTHER)
def test_other_calls_are_refused_on_every_rank_before_the_first_collective(
    gloo_ranks: GlooRanks, strategy: str, name: str
) -> None:
    other, said = OTHER[name]
    ranks = gloo_ranks(2)
    results = ranks.run_each(watched, [(Asked(strategy=strategy),), (replace(other, strategy=strategy),)])
    for error, begun in results:
        assert isinstance(error, RankDisagreementError)
        assert begun == 0
        assert str(error).startswith("ranks disagree before the first call with a plan; ")
        assert said in str(error)
        assert "; make the same call on every rank" in str(error)
    assert results[0][0].facts == results[1][0].facts
    assert max(ranks.run(call, Asked(strategy=strategy))) < 1e-11


@pytest.mark.ray
def test_another_strategy_is_refused_on_every_rank(gloo_ranks: GlooRanks) -> None:
    for error, begun in gloo_ranks(2).run_each(watched, [(Asked(strategy="ring"),), (Asked(strategy="gather_kv"),)]):
        assert "by ring 1x2, rank 1 has video 8; 6/6 heads by gather_kv 1x2" in str(error)
        assert begun == 0


REFUSED = {
    "K of another batch": r"attention: key \(2, 4, 6, 8\) and value \(1, 4, 6, 8\) must both be \(1, 4, 6, 8\)",
    "K and V of another batch": r"attention: key \(2, 4, 6, 8\) and value \(2, 4, 6, 8\) must both be \(1, 4, 6, 8\)",
    "K of another dtype": "have one dtype, not torch.float64, torch.float32, torch.float64; cast them to one",
    "V of another dtype": "have one dtype, not torch.float64, torch.float64, torch.float32; cast them to one",
    "K on another device": "attention: key is on meta, and query on cpu; move them to one device",
    "all on another device": "are on meta, and the ranks exchange tensors on cpu; move them there",
    "a row less": "attention: 3 query rows at hand; the plan gives this rank 4",
    "no dimensions": r"attention: query is of shape \(\); give a tensor \[B, S, H, D\]",
    "no key": r"attention: key is None; give a tensor",
    "a list": r"attention: value is \[1.0\]; give a tensor",
}


@pytest.mark.ray
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("change", REFUSED)
def test_a_call_that_one_rank_refuses_is_refused_on_all(gloo_ranks: GlooRanks, strategy: str, change: str) -> None:
    ranks = gloo_ranks(3)
    usual = Asked(replace(USUAL, streams=(Stream("video", 12),)), strategy)
    results = ranks.run_each(watched, [(usual,), (replace(usual, change=change),), (usual,)])
    with pytest.raises(ValueError, match=REFUSED[change]) as own:
        raise results[1][0]
    for error, begun in results:
        assert begun == 0
        if error is not results[1][0]:
            assert isinstance(error, RankDisagreementError)
            assert f"with a plan; fault: rank 0 has none, rank 1 has {own.value}, rank 2 has none; " in str(error)
    assert max(ranks.run(call, usual)) < 1e-11


@pytest.mark.ray
def test_a_call_that_all_ranks_refuse_gets_each_ranks_own_error(gloo_ranks: GlooRanks) -> None:
    for error, begun in gloo_ranks(2).run(watched, Asked(change="K of another dtype")):
        assert isinstance(error, ValueError)
        assert "must have one dtype" in str(error)
        assert begun == 0


def without_a_plan(mesh: Mesh) -> str:
    layer = layer_of(mesh, USUAL, STRATEGIES["ring"])
    plan = layer.plan_of(*USUAL.streams)
    mine = [take(tensor, plan.rows[mesh.rank]) for tensor in tensors_of(USUAL)]
    try:
        layer(mine[0], mine[1], mine[2], plan=None if mesh.rank else plan)
    except (ValueError, RankDisagreementError) as error:
        return str(error)
    return ""


@pytest.mark.ray
def test_a_call_without_a_plan_is_refused_on_every_rank(gloo_ranks: GlooRanks) -> None:
    told, own = gloo_ranks(2).run(without_a_plan)
    assert own.startswith("attention: a sharded sequence needs plan=...")
    assert f"fault: rank 0 has none, rank 1 has {own}" in told


LEARNING = ("gradients of Q", "gradients of K", "gradients of K")


@pytest.mark.ray
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_may_learn_other_inputs(gloo_ranks: GlooRanks, strategy: str) -> None:
    """What is exchanged goes the same way on all of them."""
    usual = Asked(replace(USUAL, streams=(Stream("video", 12),)), strategy)
    results = gloo_ranks(3).run_each(watched, [(replace(usual, change=change),) for change in LEARNING])
    assert max(found for found, _ in results) < 1e-11


OTHER_VALUES = {"window": AttentionMetadata(window=(1, 1)), "soft cap": AttentionMetadata(soft_cap=1.0)}
OTHER_VALUES["documents"] = AttentionMetadata(packed=PackedLengths((4, 4), (4, 4)))
VALUES = {"window": AttentionMetadata(window=(2, 1)), "soft cap": AttentionMetadata(soft_cap=1.5)}
VALUES["documents"] = AttentionMetadata(packed=PackedLengths((5, 3), (5, 3)))


def with_values(mesh: Mesh, name: str) -> str:
    context = context_of(mesh, dtype=torch.float64, backend="REFERENCE", parallel=STRATEGIES["ulysses"])
    layer = Attention(6, 8, role="self", kind="self", features=VALUES[name].features, context=context)
    plan = layer.plan_of(*USUAL.streams)
    mine = [take(tensor, plan.rows[mesh.rank]) for tensor in tensors_of(USUAL)]
    try:
        layer(mine[0], mine[1], mine[2], (OTHER_VALUES if mesh.rank else VALUES)[name], plan=plan)
    except RankDisagreementError as error:
        return str(error)
    return ""


@pytest.mark.ray
@pytest.mark.parametrize("name", VALUES)
def test_ranks_with_other_values_of_what_a_call_carries_all_raise(gloo_ranks: GlooRanks, name: str) -> None:
    for told in gloo_ranks(2).run(with_values, name):
        assert "carried: rank 0 has " in told


# --- once for each plan -----------------------------------------------------------------------------------------------


def count_exchanges(mesh: Mesh) -> list[int]:
    """Agreements so far: after calls of three layers with one plan, again with another plan, and on a local layer."""
    seen, real = 0, dist.all_gather

    def all_gather(*args: Any, **options: Any) -> Any:
        nonlocal seen
        seen += 1
        assert options["group"] is mesh.control
        return real(*args, **options)

    dist.all_gather = all_gather
    try:
        first = layer_of(mesh, USUAL, STRATEGIES["ulysses"])
        layers = [first, *(Attention(6, 8, role="self", kind="self", context=first.context) for _ in range(2))]
        plan, found = first.plan_of(*USUAL.streams), []
        for _ in range(2):
            for layer in layers:
                call(mesh, Asked(), layer, plan)
        found.append(seen)
        call(mesh, Asked(), layers[1], first.plan_of(*USUAL.streams))
        call(mesh, Asked(), layers[2], plan)
        found.append(seen)
        call(mesh, Asked(), first, first.plan_among(*USUAL.streams, agreed=True))
        cross = Attention(6, 8, role="cross", kind="cross", context=first.context)
        cross(*tensors_of(USUAL))
        found.append(seen)
    finally:
        dist.all_gather = real
    return found


@pytest.mark.ray
def test_the_ranks_agree_once_for_each_plan_and_never_for_a_layer_or_a_call(gloo_ranks: GlooRanks) -> None:
    assert gloo_ranks(2).run(count_exchanges) == [[1, 2, 2]] * 2


def change_the_batch(mesh: Mesh) -> tuple[str, float]:
    layer = layer_of(mesh, USUAL, STRATEGIES["ring"])
    plan = layer.plan_of(*USUAL.streams)
    call(mesh, Asked(), layer, plan)
    other, said = Asked(replace(USUAL, batch=2)), ""
    try:
        call(mesh, other, layer, plan)
    except ValueError as error:
        said = str(error)
    for later in (Asked(change="gradients"), Asked(lse=True)):
        with pytest.raises(ValueError, match="and the ranks agreed on batch 1 of"):
            call(mesh, later, layer, plan)
    return said, max(call(mesh, other, layer, layer.plan_of(*USUAL.streams)), call(mesh, Asked(), layer, plan))


@pytest.mark.ray
def test_a_plan_is_of_one_batch_and_another_one_is_agreed_on_anew(gloo_ranks: GlooRanks) -> None:
    for said, error in gloo_ranks(2).run(change_the_batch):
        assert said == (
            "attention: the call is of batch 2 of torch.float64 on cpu, and the ranks agreed on batch 1 of "
            "torch.float64 on cpu for its plan; make another with plan_of, on every rank"
        )
        assert error < 1e-11


# --- later calls with a plan ------------------------------------------------------------------------------------------

FULL = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril(2)
BIAS = torch.zeros(1, 1, 8, 8, dtype=torch.float64)
WAS = AttentionMetadata(mask=FULL, bias=BIAS, window=(2, 1), soft_cap=1.5, packed=PackedLengths((5, 3), (5, 3)))
NOW = {
    "nothing": AttentionMetadata(),
    "no mask": replace(WAS, mask=None),
    "a mask of another kind": replace(WAS, mask=FULL[:, :, :1]),
    "a mask of each head": replace(WAS, mask=FULL.expand(1, 6, 8, 8)),
    "no bias": replace(WAS, bias=None),
    "a bias of each head": replace(WAS, bias=BIAS.expand(1, 6, 8, 8)),
    "sinks": replace(WAS, sinks=torch.zeros(6, dtype=torch.float64)),
    "another window": replace(WAS, window=(1, 1)),
    "another soft cap": replace(WAS, soft_cap=1.0),
    "other documents": replace(WAS, packed=PackedLengths((4, 4), (4, 4))),
}


def carry_another_thing_later(mesh: Mesh, strategy: str) -> tuple[dict[str, str], bool, int]:
    """What each later call was refused with, whether the agreed call goes on, and exchanges of refused calls."""
    context = context_of(mesh, dtype=torch.float64, backend="REFERENCE", parallel=STRATEGIES[strategy])
    layer = Attention(6, 8, role="self", kind="self", features=WAS.features, context=context)
    plan = layer.plan_of(*USUAL.streams)
    query, key, value = (take(tensor, plan.query_rows(mesh.rank)) for tensor in tensors_of(USUAL))
    first, said = layer(query, key, value, WAS, plan=plan), {}
    context.transport.take_traffic()
    for name, metadata in NOW.items():
        try:
            layer(query, key, value, metadata, plan=plan)
        except ValueError as error:
            said[name] = str(error)
    moved = sum(context.transport.take_traffic().calls.values())
    return said, torch.equal(layer(query, key, value, WAS, plan=plan), first), moved


@pytest.mark.ray
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_later_call_that_carries_something_else_is_refused_before_its_exchange(
    gloo_ranks: GlooRanks, strategy: str
) -> None:
    for said, same, moved in gloo_ranks(2).run(carry_another_thing_later, strategy):
        assert set(said) == set(NOW)
        assert said["nothing"].startswith("attention: the call carries nothing, and the ranks agreed on full mask (")
        assert (
            " and window (2, 1) and soft_cap 1.5 and documents of (5, 3) queries and (5, 3) keys for its"
            in (said["nothing"])
        )
        assert all(text.endswith(" for its plan; make another with plan_of, on every rank") for text in said.values())
        assert (same, moved) == (True, 0)


def share_a_plan_among_other_layers(mesh: Mesh) -> dict[str, str]:
    context = context_of(mesh, dtype=torch.float64, backend="REFERENCE", parallel=STRATEGIES["ulysses"])
    usual: dict[str, Any] = {"role": "self", "kind": "self", "context": context}
    first = Attention(6, 8, **usual)
    plan = first.plan_of(*USUAL.streams)
    query, key, value = (take(tensor, plan.query_rows(mesh.rank)) for tensor in tensors_of(USUAL))
    expected, said = first(query, key, value, plan=plan), {}
    assert torch.equal(Attention(6, 8, **usual, name="the next one")(query, key, value, plan=plan), expected)
    others = {"role": {"role": "other"}, "scale": {"softmax_scale": 0.5}, "causal": {"causal": True}}
    for name, change in others.items():
        layer = Attention(6, 8, **(usual | change))
        try:
            layer(query, key, value, plan=plan)
        except ValueError as error:
            said[name] = str(error)
        layer(query, key, value, plan=layer.plan_of(*USUAL.streams))  # the way out
    return said


@pytest.mark.ray
def test_a_plan_serves_layers_that_were_constructed_alike_and_no_others(gloo_ranks: GlooRanks) -> None:
    for said in gloo_ranks(2).run(share_a_plan_among_other_layers):
        assert set(said) == {"role", "scale", "causal"}
        assert all("the ranks agreed on its plan for a layer that is self=REFERENCE/" in text for text in said.values())
        assert all(
            text.endswith("; make a plan with the plan_of of this layer, on every rank") for text in said.values()
        )
        assert "; this one is self=REFERENCE/" in said["scale"]
        assert " scaled by 0.5, by ulysses" in said["scale"]


def checkpoint_a_layer(mesh: Mesh, reentrant: bool) -> str:
    layer = layer_of(mesh, USUAL, STRATEGIES["ulysses"])
    plan = layer.plan_of(*USUAL.streams)
    query, key, value = (take(t, plan.query_rows(mesh.rank)).requires_grad_() for t in tensors_of(USUAL))

    def block(*qkv: torch.Tensor) -> torch.Tensor:
        return layer(*qkv, plan=plan)

    try:
        checkpoint(block, query, key, value, use_reentrant=reentrant).sum().backward()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.ray
def test_reentrant_checkpointing_is_refused_with_what_works(gloo_ranks: GlooRanks) -> None:
    for said in gloo_ranks(2).run(checkpoint_a_layer, True):
        assert "batch 1 of torch.float64 on cpu with gradients, and the ranks agreed on batch 1 of torch" in said
        assert said.endswith("another without, and torch.utils.checkpoint with use_reentrant=False")
    assert gloo_ranks(2).run(checkpoint_a_layer, False) == ["", ""]


def forward_or_call(mesh: Mesh) -> None:
    if mesh.rank == 0:
        agree(ForwardFacts(1, "model", 1, "video 8", "self nothing", False, "float64", "self"), mesh)
    else:
        call(mesh, Asked())


@pytest.mark.ray
def test_a_rank_before_a_forward_and_one_before_a_call_both_raise(gloo_ranks: GlooRanks) -> None:
    for error in gloo_ranks(2).outcomes(forward_or_call, [(), ()]):
        assert isinstance(error, RankDisagreementError)
        assert "rank 0 is before a forward: ForwardFacts(number=1, " in str(error)
        assert "rank 1 is before the first call with a plan: CallFacts(number=1, " in str(error)
        assert str(error).endswith("; make the same calls in the same order on every rank")


def test_facts_of_all_kinds_are_equally_many_numbers() -> None:
    assert len(fields(CallFacts)) == len(fields(ForwardFacts))


def test_a_disagreement_on_calls_survives_pickling() -> None:
    facts = CallFacts(1, "layer", "video 8", 1, "float64", "cpu", "nothing", "")
    error = RankDisagreementError((facts, replace(facts, fault="no")))
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), back.facts, str(back)) == (RankDisagreementError, error.facts, str(error))
    assert "fault: rank 0 has none, rank 1 has no" in str(back)


def test_a_rank_whose_peers_do_not_answer_raises_its_own_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def unanswered(facts: CallFacts, mesh: Mesh) -> None:
        raise ExchangeError("the agreement", "timed out")

    monkeypatch.setattr(parallel.admission, "agree", unanswered)
    layer = layer_of(Mesh(0, 2, CPU), USUAL, STRATEGIES["ulysses"])
    query, key, value = (tensor[:, :4] for tensor in tensors_of(USUAL))
    with pytest.raises(ValueError, match=r"^attention: a sharded sequence needs plan=") as caught:
        layer(query, key, value)
    assert isinstance(caught.value.__cause__, ExchangeError)
    with pytest.raises(ExchangeError, match="timed out"):
        layer(query, key, value, plan=layer.plan_of(*USUAL.streams))


def test_plans_with_pieces_at_other_places_are_refused() -> None:
    layer = layer_of(Mesh(0, 2, CPU), replace(USUAL, causal=True), STRATEGIES["ring"])
    whole = plan_streams(USUAL.streams, 6, layer.way.grid, "ring")
    query, key, value = (tensor[:, :4] for tensor in tensors_of(USUAL))
    with pytest.raises(ValueError, match="an early and a late piece of the rows, and this one one piece of the rows"):
        layer(query, key, value, plan=whole)
    plain = layer_of(Mesh(0, 2, CPU), USUAL, STRATEGIES["ring"])
    with pytest.raises(ValueError, match="one piece of the rows, and this one an early and a late piece"):
        plain(query, key, value, plan=layer.plan_of(*USUAL.streams))
