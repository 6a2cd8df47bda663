"""Before a forward all ranks agree on it, or every one of them raises the same error."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
import torch.distributed as dist

from parallel.agreement import ForwardFacts, RankDisagreementError, agree
from parallel.mesh import Mesh
from tests.parallel.layers import ONE_RANK
from tests.ranks import Ranks

GlooRanks = Callable[[int], Ranks]
FACTS = ForwardFacts(
    number=3,
    model="transformer",
    batch=1,
    streams="video 175, text 512 on each",
    carried="self nothing",
    gradient=False,
    dtype="float32",
    selections="self=TORCH_SDPA/torch/path",
)
OTHER = {
    "number": 4,
    "model": "transformer_2",
    "batch": 2,
    "streams": "video 176, text 512 on each",
    "carried": "self full mask",
    "gradient": True,
    "dtype": "bfloat16",
    "selections": "self=REFERENCE/plain/path",
}


def agree_with(mesh: Mesh, facts: ForwardFacts) -> str:
    agree(facts, mesh)
    return "agreed"


def exchange(mesh: Mesh) -> float:
    """Both groups still work."""
    agree(FACTS, mesh)
    tensor = torch.tensor([float(mesh.rank + 1)])
    dist.all_reduce(tensor, group=mesh.data)
    return float(tensor)


@pytest.mark.ray
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_are_about_to_run_the_same_forward_agree(gloo_ranks: GlooRanks, world_size: int) -> None:
    assert gloo_ranks(world_size).run(agree_with, FACTS) == ["agreed"] * world_size


@pytest.mark.ray
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("field", OTHER)
def test_a_disagreement_is_raised_on_every_rank_with_both_values(
    gloo_ranks: GlooRanks, world_size: int, field: str
) -> None:
    ranks = gloo_ranks(world_size)
    dissenting = replace(FACTS, **{field: OTHER[field]})
    facts = [FACTS] * (world_size - 1) + [dissenting]
    outcomes = ranks.outcomes(agree_with, [(mine,) for mine in facts])
    for outcome in outcomes:
        assert isinstance(outcome, RankDisagreementError)
        assert outcome.facts == tuple(facts)
        message = str(outcome)
        assert f"{field}: rank 0 has {getattr(FACTS, field)}" in message
        assert f"rank {world_size - 1} has {OTHER[field]}" in message
        assert message.endswith("; give all ranks the same configuration and inputs")
        assert not any(f"{other.name}:" in message for other in fields(ForwardFacts) if other.name != field)
    assert ranks.run(exchange) == [world_size * (world_size + 1) / 2] * world_size


@pytest.mark.ray
def test_all_differences_are_named_at_once(gloo_ranks: GlooRanks) -> None:
    dissenting = replace(FACTS, batch=3, number=9)
    for outcome in gloo_ranks(2).outcomes(agree_with, [(dissenting,), (FACTS,)]):
        assert "number: rank 0 has 9, rank 1 has 3; batch: rank 0 has 3, rank 1 has 1" in str(outcome)


def test_a_single_rank_agrees_with_itself() -> None:
    agree(FACTS, ONE_RANK)


def test_a_disagreement_survives_pickling() -> None:
    error = RankDisagreementError((FACTS, replace(FACTS, batch=2)))
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is RankDisagreementError
    assert (back.facts, str(back)) == (error.facts, str(error))


def test_every_field_of_the_facts_has_a_test() -> None:
    assert set(OTHER) == {field.name for field in fields(ForwardFacts)}


def test_texts_become_numbers_that_are_the_same_in_every_process() -> None:
    assert FACTS.numbers() == FACTS.numbers()
    assert FACTS.numbers()[0] == 3
    assert replace(FACTS, model="self").numbers()[1] == 7184761924116163360
    assert all(-(2**63) <= number < 2**63 for number in FACTS.numbers())
