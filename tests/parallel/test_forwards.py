"""Ranks that are about to do different things all raise before a collective; a layer out of turn is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

from backends.interface import AttentionMetadata, Features, PackedLengths
from configs.schema import ParallelConfig
from parallel.agreement import RankDisagreementError
from parallel.attention import Attention
from parallel.forwards import Forwards, LayerOrderError
from parallel.mesh import Mesh
from parallel.pieces import take
from parallel.plan import Stream
from tests.exact import relative_error
from tests.parallel.cases import Case, exact, metadata_of, tensors_of
from tests.parallel.layers import CPU, context_of
from tests.ranks import Ranks

GlooRanks = Callable[[int], Ranks]
ULYSSES = ParallelConfig(strategy="ulysses")
USUAL = Case((Stream("video", 8),), batch=1, carried=("key_padding",))
LAYERS = 3


@dataclass(frozen=True)
class Asked:
    """A model's forwards over these cases, on one rank."""

    cases: tuple[Case, ...] = (USUAL,)
    parallel: ParallelConfig = ULYSSES
    name: str = "model"
    count: int = 0
    skips: int | None = None


def forwards_of(mesh: Mesh, asked: Asked) -> Forwards:
    case = asked.cases[0]
    context = context_of(mesh, dtype=case.dtype, backend=case.backend, parallel=asked.parallel)
    layers = [
        Attention(
            case.heads,
            case.size,
            role="self",
            kind="self",
            features=metadata_of(case).features,
            context=context,
            name=f"layer {index}",
        )
        for index in range(LAYERS)
    ]
    forwards = Forwards(asked.name, layers, mesh)
    forwards.count = asked.count
    return forwards


def run_forward(forwards: Forwards, mesh: Mesh, case: Case, skips: int | None = None) -> float:
    """The largest error of its layers on this rank."""
    forwards.begin(*case.streams, batch=case.batch, dtype=case.dtype)
    whole, _ = exact(case)
    errors = [0.0]
    for index, layer in enumerate(forwards.layers):
        if index == skips:
            continue
        plan = forwards.plan_for(layer, metadata_of(case))
        share = plan.shares[mesh.rank]
        mine = [take(tensor, share.query_rows) for tensor in tensors_of(case)]
        out = layer(*mine, metadata_of(case), plan=plan)
        if out.numel():
            errors.append(relative_error(out, take(whole, share.query_rows)))
    forwards.finish()
    return max(errors)


def run_asked(mesh: Mesh, asked: Asked) -> float:
    forwards = forwards_of(mesh, asked)
    return max(run_forward(forwards, mesh, case, asked.skips) for case in asked.cases)


# --- ranks that disagree ----------------------------------------------------------------------------------------------


DISAGREEING = {
    "another length": (replace(USUAL, streams=(Stream("video", 30),)), ULYSSES, "streams"),
    # 7 and 8 rows give the first rank 4 of them each: its own plan would notice nothing
    "a length that the first rank cannot tell": (replace(USUAL, streams=(Stream("video", 7),)), ULYSSES, "streams"),
    "other streams": (replace(USUAL, streams=(Stream("text", 2), Stream("video", 6))), ULYSSES, "streams"),
    "another batch": (replace(USUAL, batch=2), ULYSSES, "batch"),
    "other heads": (replace(USUAL, heads=4, kv_heads=4), ULYSSES, "selections"),
    "another split": (USUAL, ParallelConfig(strategy="ring"), "selections"),
    "another exchange": (USUAL, ParallelConfig(strategy="ulysses", exchange_dtype="fp8"), "selections"),
    "another dtype": (replace(USUAL, dtype=torch.float32), ULYSSES, "dtype"),
    "another kind of mask": (replace(USUAL, carried=("full",)), ULYSSES, "carried"),
    "no mask": (replace(USUAL, carried=()), ULYSSES, "carried"),
    "another backend": (replace(USUAL, backend="TORCH_SDPA"), ULYSSES, "selections"),
}


@pytest.mark.ray
@pytest.mark.parametrize("name", DISAGREEING)
def test_every_rank_raises_the_same_and_the_group_goes_on(gloo_ranks: GlooRanks, name: str) -> None:
    case, parallel, field = DISAGREEING[name]
    ranks = gloo_ranks(2)
    for asked in ([Asked(), Asked((case,), parallel)], [Asked((case,), parallel), Asked()]):
        first, second = ranks.outcomes(run_asked, [(each,) for each in asked])
        assert isinstance(first, RankDisagreementError)
        assert isinstance(second, RankDisagreementError)
        assert first.facts == second.facts
        assert f"{field}: rank 0 has {getattr(first.facts[0], field)}, rank 1 has " in str(first)
        differing = {
            name for name in vars(first.facts[0]) if getattr(first.facts[0], name) != getattr(first.facts[1], name)
        }
        assert field in differing
    assert max(ranks.run(run_asked, Asked())) < 1e-12


@pytest.mark.ray
def test_ranks_in_different_forwards_or_models_all_raise(gloo_ranks: GlooRanks) -> None:
    for other, field in ((Asked(count=1), "number"), (Asked(name="model_2"), "model")):
        for outcome in gloo_ranks(3).outcomes(run_asked, [(Asked(),), (Asked(),), (other,)]):
            assert isinstance(outcome, RankDisagreementError)
            assert f"{field}: rank 0 has " in str(outcome)


ONE, OTHER = USUAL, replace(USUAL, streams=(Stream("video", 7),), heads=4, kv_heads=4)


def alternate(mesh: Mesh, turns: tuple[int, ...]) -> float:
    """Two models, whose plans a rank may take for each other, in turns."""
    models = [(forwards_of(mesh, Asked((case,), name=name)), case) for case, name in ((ONE, "one"), (OTHER, "other"))]
    return max(run_forward(*(models[turn][0], mesh, models[turn][1])) for turn in turns)


@pytest.mark.ray
def test_two_plans_may_alternate_and_ranks_out_of_step_all_raise(gloo_ranks: GlooRanks) -> None:
    ranks = gloo_ranks(2)
    assert max(ranks.run(alternate, (0, 1, 0, 1, 1, 0))) < 1e-12
    for outcome in ranks.outcomes(alternate, [((0, 1, 0),), ((0, 0, 1),)]):
        assert isinstance(outcome, RankDisagreementError)
        assert "model: rank 0 has other, rank 1 has one" in str(outcome)
    assert max(ranks.run(alternate, (0, 1))) < 1e-12


@pytest.mark.ray
def test_lengths_may_change_from_forward_to_forward(gloo_ranks: GlooRanks) -> None:
    cases = tuple(replace(USUAL, streams=(Stream("video", length),)) for length in (8, 7, 1, 29, 8))
    assert max(gloo_ranks(3).run(run_asked, Asked(cases))) < 1e-12


@pytest.mark.ray
@pytest.mark.parametrize("skipped", range(LAYERS))
def test_a_rank_that_skips_a_layer_raises_and_its_peers_get_no_result(ray_cluster: None, skipped: int) -> None:
    ranks = Ranks(2)
    try:
        waiting, skipping = ranks.start(run_asked, [(Asked(),), (Asked(skips=skipped),)])
        with pytest.raises(LayerOrderError) as caught:
            ray.get(skipping, timeout=60)
        named = f"layer {skipped + 1}" if skipped + 1 < LAYERS else None
        assert (caught.value.called, caught.value.expected) == (named, f"layer {skipped}")
        assert ray.wait([waiting], timeout=0)[0] == []  # it waits for the layer that was skipped
        ranks.kill(1)  # as a supervisor does
        with pytest.raises(RuntimeError, match=r"(?i)connection|closed|reset"):
            ray.get(waiting, timeout=60)
    finally:
        ranks.close()


# --- turns, on one rank -----------------------------------------------------------------------------------------------


def begun() -> Forwards:
    forwards = forwards_of(Mesh(0, 2, CPU), Asked())
    forwards.begin(*USUAL.streams, batch=1, dtype=USUAL.dtype)
    return forwards


def call(forwards: Forwards, *indices: int) -> None:
    for index in indices:
        forwards.plan_for(forwards.layers[index], metadata_of(USUAL))


@pytest.mark.parametrize(
    ("calls", "called", "expected"),
    [
        ((1,), "layer 1", "layer 0"),
        ((0, 0), "layer 0", "layer 1"),
        ((0, 2), "layer 2", "layer 1"),
        ((0, 1, 2, 0), "layer 0", None),
    ],
)
def test_a_layer_out_of_turn_is_refused(calls: tuple[int, ...], called: str, expected: str | None) -> None:
    with pytest.raises(LayerOrderError) as caught:
        call(begun(), *calls)
    assert (caught.value.model, caught.value.called, caught.value.expected) == ("model", called, expected)
    assert str(caught.value).startswith(f"model: {called} was called, and ")


def test_a_forward_that_ends_early_is_refused_before_its_last_exchange() -> None:
    forwards = begun()
    call(forwards, 0, 1)
    with pytest.raises(LayerOrderError, match=r"model: the forward ends, and it is the turn of layer 2; "):
        forwards.finish()
    call(forwards, 2)
    forwards.finish()


def test_a_new_forward_starts_with_the_first_layer_whatever_became_of_the_last() -> None:
    forwards = begun()
    call(forwards, 0)
    forwards.begin(*USUAL.streams, batch=1, dtype=USUAL.dtype)
    call(forwards, 0, 1, 2)
    assert forwards.count == 2


@pytest.mark.parametrize(("batch", "dtype"), [(2, torch.float64), (1, torch.float16)])
def test_a_call_of_another_batch_or_dtype_than_was_agreed_on_is_refused(batch: int, dtype: torch.dtype) -> None:
    forwards = begun()
    query = torch.zeros(batch, 1, 6, 8, dtype=dtype)
    with pytest.raises(ValueError, match=f"the call is of batch {batch} of {dtype}; the ranks agreed on batch 1 of"):
        forwards.plan_for(forwards.layers[0], metadata_of(USUAL), query=query)
    agreed = torch.zeros(1, 1, 6, 8, dtype=USUAL.dtype)
    assert forwards.plan_for(forwards.layers[0], metadata_of(USUAL), query=agreed) is not None


def test_outside_a_forward_there_are_no_plans() -> None:
    forwards = begun()
    assert forwards.plan is not None
    forwards.end()
    assert forwards.plan is None
    with pytest.raises(RuntimeError, match=r"model: layer 0 was called outside the model's own forward"):
        call(forwards, 0)


def test_on_one_rank_layers_may_be_skipped() -> None:
    forwards = forwards_of(Mesh(0, 1, CPU), Asked())
    forwards.begin(*USUAL.streams, batch=1, dtype=USUAL.dtype)
    call(forwards, 2, 0)
    forwards.finish()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (AttentionMetadata(), "nothing"),
        (metadata_of(replace(USUAL, carried=("full",))), r"full mask \(1, 1, 8, 8\)"),
        (None, "nothing"),
    ],
)
def test_a_call_that_carries_something_else_is_refused_before_its_exchange(given: Any, text: str) -> None:
    forwards = begun()
    with pytest.raises(
        ValueError, match=f"^layer 0: the call carries {text}; the ranks agreed on key_padding mask for"
    ):
        forwards.plan_for(forwards.layers[0], given)


def test_a_forward_may_carry_something_else_than_its_layers_were_made_for() -> None:
    forwards = begun()
    packed = replace(USUAL, carried=("packed",))
    forwards.begin(*USUAL.streams, batch=1, dtype=USUAL.dtype, carried={"self": metadata_of(packed)})
    forwards.plan_for(forwards.layers[0], metadata_of(packed))
    with pytest.raises(
        ValueError, match=r"key_padding mask \(1, 1, 1, 8\); the ranks agreed on documents of \(2, 0, 1, 5\)"
    ):
        call(forwards, 1)


def with_values(metadata: AttentionMetadata, *, agreed: bool) -> tuple[Forwards, Attention]:
    mesh = Mesh(0, 2, CPU)
    context = context_of(mesh, dtype=torch.float64, backend="REFERENCE", parallel=ULYSSES)
    layer = Attention(6, 8, role="self", kind="self", features=metadata.features, context=context)
    forwards = Forwards("model", [layer], mesh)
    carried = {"self": metadata} if agreed else None
    forwards.begin(*USUAL.streams, batch=1, dtype=torch.float64, carried=carried)
    return forwards, layer


VALUES = {
    "window": (AttentionMetadata(window=(1, 1)), AttentionMetadata(window=(2, 1))),
    "soft_cap": (AttentionMetadata(soft_cap=1.0), AttentionMetadata(soft_cap=2.0)),
    "documents": (
        AttentionMetadata(packed=PackedLengths((5, 3), (5, 3))),
        AttentionMetadata(packed=PackedLengths((4, 4), (4, 4))),
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_forward_refuses_values_that_the_ranks_did_not_agree_on(name: str) -> None:
    agreed, other = VALUES[name]
    forwards, layer = with_values(agreed, agreed=True)
    with pytest.raises(ValueError, match=rf"attention: the call carries {name} .*; the ranks agreed on {name} .* for"):
        forwards.plan_for(layer, other)
    assert forwards.plan_for(layer, agreed).agreed
    forwards, layer = with_values(agreed, agreed=False)
    with pytest.raises(ValueError, match=r"agreed on no values .*; give carried={'self': metadata} to begin$"):
        forwards.plan_for(layer, agreed)


@pytest.mark.parametrize("given", [{"mask": None}, AttentionMetadata(torch.ones(8, dtype=torch.bool)), Features()])
def test_a_forward_refuses_metadata_of_another_type_or_shape(given: Any) -> None:
    forwards = begun()
    with pytest.raises(ValueError, match=r"layer 0: (metadata|mask) is .*; (it is an AttentionMetadata|give a tensor)"):
        forwards.plan_for(forwards.layers[0], given)
    with pytest.raises(ValueError, match=r"model: carried\['self'\]: (metadata|mask) is "):
        forwards.begin(*USUAL.streams, batch=1, dtype=USUAL.dtype, carried={"self": given})


@pytest.mark.parametrize("given", [None, metadata_of(replace(USUAL, carried=("full",)))], ids=["nothing", "full mask"])
def test_a_call_with_other_metadata_than_its_plan_was_asked_for_is_refused(given: AttentionMetadata | None) -> None:
    forwards = begun()
    layer, plan = forwards.layers[0], forwards.plan_for(forwards.layers[0], metadata_of(USUAL))
    mine = [take(tensor, plan.rows[0]) for tensor in tensors_of(USUAL)]
    with pytest.raises(ValueError, match=r"and plan_for was given key_padding mask .*; give both the same metadata"):
        layer(mine[0], mine[1], mine[2], given, plan=plan)


def test_a_call_in_a_forward_returns_log_sum_exps_exactly_if_its_layer_was_constructed_to() -> None:
    forwards = begun()
    layer, plan = forwards.layers[0], forwards.plan_for(forwards.layers[0], metadata_of(USUAL))
    mine = [take(tensor, plan.rows[0]) for tensor in tensors_of(USUAL)]
    with pytest.raises(ValueError, match="the call returns log-sum-exps, and the layer was constructed with lse=False"):
        layer.forward_with_lse(mine[0], mine[1], mine[2], metadata_of(USUAL), plan=plan)


def test_the_error_of_a_layer_out_of_turn_survives_pickling() -> None:
    error = LayerOrderError("model", None, "layer 2")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is LayerOrderError
    assert (back.model, back.called, back.expected, str(back)) == ("model", None, "layer 2", str(error))


def count_control(mesh: Mesh) -> tuple[int, int]:
    """Collectives of the control group in three forwards, and what they moved at most, in bytes."""
    seen: list[int] = []
    real = dist.all_gather

    def all_gather(out: Any, tensor: torch.Tensor, group: Any = None) -> Any:
        assert group is mesh.control
        seen.append(tensor.numel() * tensor.element_size())
        return real(out, tensor, group=group)

    dist.all_gather = all_gather
    try:
        run_asked(mesh, Asked((USUAL,) * 3))
    finally:
        dist.all_gather = real
    return len(seen), max(seen)


@pytest.mark.ray
def test_agreement_is_one_small_exchange_a_forward(gloo_ranks: GlooRanks) -> None:
    assert gloo_ranks(2).run(count_control) == [(3, 8 * 8)] * 2
