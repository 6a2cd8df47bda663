"""A part of the grid of `scripts/check_backends.py` on the GPU at hand: every claim, feature by feature."""

from __future__ import annotations

import pytest
import torch

from backends.platforms.facts import local_device
from backends.registry import Registry
from kernel_grid.cases import DTYPES, FEATURES, Call, Claim, claims
from kernel_grid.measure import Exact, measure

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = local_device("cuda", Registry().distributions())
CLAIMS = list(claims(Registry(), DEVICE))
LENGTHS = ((129, 129), (129, 192))


def calls_of(claim: Claim, feature: str) -> list[Call]:
    """Grouped KV heads, causal or not, with the first dtype and head size that the claim takes."""
    for dtype in DTYPES:
        for size in (128, 64, 80):
            plain = [
                Call(dtype, size, 2, causal, feature, rows, keys)
                for causal in (False, True)
                for rows, keys in LENGTHS
                if rows == keys or not (causal or FEATURES[feature].window)
            ]
            taken = [call for call in plain if claim.takes(call, DEVICE) and not (call.causal and feature == "block")]
            if taken:
                return taken
    return []


CASES = [(claim, feature) for claim in CLAIMS for feature in FEATURES if calls_of(claim, feature)]


@pytest.mark.parametrize(("claim", "feature"), CASES, ids=lambda value: getattr(value, "name", value))
def test_a_claim_holds(claim: Claim, feature: str) -> None:
    outcomes = [measure(claim, Exact(call, torch.device("cuda")), DEVICE) for call in calls_of(claim, feature)]
    assert [outcome.fault for outcome in outcomes if outcome.fault] == []
    assert any(outcome.errors for outcome in outcomes)
