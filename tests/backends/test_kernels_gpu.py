"""A part of the grid of `scripts/check_backends.py` on the GPU at hand: every claim, feature by feature."""

from __future__ import annotations

from dataclasses import replace

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
LENGTHS = ((129, 129), (129, 192), (1, 128))
LOWERED = 120.0
"""So that a log-sum-exp is the logarithm of no normal fp32 number."""


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


GRADIENTS = [
    (claim, replace(call, rows=rows, keys=keys))
    for claim in CLAIMS
    if not claim.lossy
    for feature in ("plain", "full")
    for call in calls_of(claim, feature)[:1]
    for rows, keys in ((129, 192), (1, 128), (64, 64), (256, 320))
    if claim.takes(replace(call, rows=rows, keys=keys), DEVICE, gradient=True)
]


@pytest.mark.parametrize(("claim", "call"), GRADIENTS, ids=lambda value: getattr(value, "name", str(value)))
def test_rows_of_low_scores_have_gradients(claim: Claim, call: Call) -> None:
    outcome = measure(claim, Exact(call, torch.device("cuda"), LOWERED), DEVICE)
    assert outcome.fault is None
    assert "gradient" in outcome.errors


TAKE_A_BIAS = [claim for claim in CLAIMS if claim.takes(Call("bfloat16", 64, 2, False, "bias", 129, 129), DEVICE)]


@pytest.mark.parametrize("claim", TAKE_A_BIAS, ids=lambda claim: claim.name)
@pytest.mark.parametrize("keys", [129, 192])
def test_a_bias_may_begin_anywhere(claim: Claim, keys: int) -> None:
    exact = Exact(Call("bfloat16", 64, 2, False, "bias", 129, keys), torch.device("cuda"))
    bias = exact.metadata.bias
    assert bias is not None
    around = torch.full((*bias.shape[:2], bias.shape[2] + 2, keys + 3), float("nan"), device="cuda", dtype=bias.dtype)
    view = around[:, :, 1:-1, 1 : keys + 1]
    view.copy_(bias)
    exact.metadata = replace(exact.metadata, bias=view)
    assert measure(claim, exact, DEVICE).fault is None
