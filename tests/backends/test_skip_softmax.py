"""The skip-softmax calibration of a checkpoint, and what the option block means for a layer and a moment."""

from __future__ import annotations

import math
from typing import Any

import pytest

from backends.calibration import Calibration, Uncalibrated, read_calibration
from backends.layer_facts import DenoisingTime, LayerFacts
from backends.options import Place, layer_options
from backends.skip_softmax import LayerSkip, SkipSoftmax
from configs.faults import FaultError

FORMULA = "a * exp(b * target_sparsity)"
CURVE = Calibration(1000.0, 5.0, ("blocks.0.attn1", "*.attn2"))
NONE = Uncalibrated("its config.json has no sparse_attention_config")
PLACE = Place("attention.per_role.self", {"attention.per_role.self": "my.yaml"})


def written(**changes: Any) -> dict[str, Any]:
    """A config.json as NVIDIA's Model Optimizer leaves it; `changes` of the group."""
    group = {
        "algorithm": "skip_softmax",
        "threshold_scale_factor": {"formula": FORMULA, "coefficients": {"a": 1000.0, "b": 5.0}},
        "target_sparsity": 0.5,
        "ignore": ["blocks.0.attn1", "*.attn2"],
    }
    return {"sparse_attention_config": {"config_groups": {"group_0": group | changes}}}


def layer(name: str = "blocks.1.attn1", found: Calibration | Uncalibrated = CURVE, **others: Any) -> LayerFacts:
    return LayerFacts("transformer", name, found, **others)


# --- the calibration --------------------------------------------------------------------------------------------------


def test_a_calibration_is_read_as_it_is_published() -> None:
    assert read_calibration(written()) == CURVE


def test_an_older_one_has_no_groups_and_another_word_for_its_coefficients() -> None:
    scale = {"formula": "a*exp(b*target_sparsity)", "prefill": {"a": 2, "b": -1.5}}
    found = read_calibration({"sparse_attention_config": {"threshold_scale_factor": scale}})
    assert found == Calibration(2.0, -1.5)


def test_groups_of_other_algorithms_do_not_count() -> None:
    config = written()
    config["sparse_attention_config"]["config_groups"]["group_1"] = {"algorithm": "sparse_softmax"}
    assert read_calibration(config) == CURVE
    config["sparse_attention_config"]["config_groups"]["group_1"] = {"algorithm": "skip_softmax"}
    assert read_calibration(config) == Uncalibrated(
        "the sparse_attention_config of its config.json has 2 groups for skip_softmax"
    )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "its config.json has no sparse_attention_config"),
        ({"sparse_attention_config": "x"}, "has no groups for skip_softmax"),
        ({"sparse_attention_config": {"config_groups": {}}}, "has no groups for skip_softmax"),
        ({"sparse_attention_config": {"config_groups": [1]}}, "has no groups for skip_softmax"),
        (written(threshold_scale_factor=5000.0), "has no threshold_scale_factor with a formula"),
        (written(ignore="blocks.0"), "not a list of patterns"),
        (written(ignore=[0]), "not a list of patterns"),
    ],
)
def test_what_is_no_calibration_says_why(config: dict[str, Any], reason: str) -> None:
    found = read_calibration(config)
    assert isinstance(found, Uncalibrated)
    assert reason in found.reason


@pytest.mark.parametrize("formula", [None, 1, "a * b ** target_sparsity", "__import__('os').getpid()", "a + exp(b)"])
def test_another_formula_is_told_and_not_evaluated(formula: Any) -> None:
    scale = {"formula": formula, "coefficients": {"a": 1.0, "b": 1.0}}
    found = read_calibration(written(threshold_scale_factor=scale))
    assert isinstance(found, Uncalibrated)
    assert found.reason.endswith(f"is {formula!r}, and only {FORMULA} is understood")


@pytest.mark.parametrize(
    "coefficients",
    [
        *(None, 5, {}, {"a": 1.0}, {"a": "1", "b": 1.0}, {"a": True, "b": 1.0}, {"a": math.nan, "b": 1.0}),
        *({"a": 0, "b": 1.0}, {"a": -1, "b": 1.0}, {"a": 1.0, "b": math.inf}, {"a": 1.0, "b": 800}),
        *({"a": 1.0, "b": -math.inf}, {"a": 10**400, "b": 1.0}),
    ],
)
def test_coefficients_are_finite_numbers_with_a_curve(coefficients: Any) -> None:
    scale = {"formula": FORMULA, "coefficients": coefficients}
    assert isinstance(read_calibration(written(threshold_scale_factor=scale)), Uncalibrated)


@pytest.mark.parametrize(
    ("pattern", "name", "dense"),
    [
        ("blocks.0.attn1", "blocks.0.attn1", True),
        ("blocks.0.attn1", "blocks.10.attn1", False),
        ("transformer.blocks.0.attn1", "blocks.0.attn1", True),
        ("transformer_2.blocks.0.attn1", "blocks.0.attn1", False),
        ("*.attn2", "blocks.3.attn2", True),
        ("blocks.3.attn2", "blocks.3.attn2.image", True),
        ("blocks.[01].attn1", "blocks.1.attn1", True),
        ("BLOCKS.0.attn1", "blocks.0.attn1", False),
        ("blocks.0.attn", "blocks.0.attn1", False),
    ],
)
def test_ignored_layers_are_named_by_patterns(pattern: str, name: str, dense: bool) -> None:
    assert Calibration(1.0, 1.0, (pattern,)).ignores("transformer", name) is dense


# --- a layer ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 1.0])
def test_the_target_goes_through_the_curve_whatever_the_number_of_keys(sparsity: float) -> None:
    skip = SkipSoftmax(target_sparsity=sparsity).of_layer(layer())
    assert skip.factor(7) == skip.factor(75600) == pytest.approx(1000.0 * math.exp(5.0 * sparsity))


def test_an_ignored_layer_is_dense_under_a_target_and_not_under_a_threshold() -> None:
    ignored = layer("blocks.0.attn1")
    assert SkipSoftmax(target_sparsity=0.5).of_layer(ignored).factor(41) is None
    assert SkipSoftmax(threshold=0.002).of_layer(ignored).factor(41) == 0.002 * 41


def test_each_expert_has_its_own_curve() -> None:
    block = SkipSoftmax(target_sparsity=0.5)
    other = LayerFacts("transformer_2", "blocks.1.attn1", Calibration(3.0, 2.0))
    assert block.of_layer(layer()).calibrated == pytest.approx(1000.0 * math.exp(2.5))
    assert block.of_layer(other).calibrated == pytest.approx(3.0 * math.exp(1.0))


def test_a_target_without_a_calibration_is_refused_at_the_layer() -> None:
    blocks = (("skip_softmax", SkipSoftmax(target_sparsity=0.5)),)
    with pytest.raises(FaultError) as error:
        layer_options({"skip_softmax": SkipSoftmax}, blocks, layer(found=NONE), PLACE)
    (fault,) = error.value.faults
    assert (fault.key, fault.value) == ("attention.per_role.self.skip_softmax.target_sparsity", 0.5)
    assert fault.rule.startswith("transformer has no calibration of its own, which says the threshold: its config.json")
    assert fault.remedy == "set skip_softmax.threshold, or use a calibrated checkpoint"


def test_a_block_that_is_not_set_is_dense_for_its_layer() -> None:
    options = layer_options({"skip_softmax": SkipSoftmax}, (), layer(found=NONE), PLACE)
    assert options == (("skip_softmax", LayerSkip()),)


# --- the time ---------------------------------------------------------------------------------------------------------


def test_nothing_is_skipped_while_the_time_is_above_the_limit() -> None:
    time = DenoisingTime()
    skip = SkipSoftmax(0.002, None, 0.8).of_layer(layer(denoising=time))
    time.begin([1.0, 0.81, 0.8, 0.1])
    seen = []
    for _ in range(4):
        seen.append(skip.factor(100))
        time.advance()
    assert seen == [None, None, 0.2, 0.2]


def test_zero_is_no_limit_and_needs_no_time() -> None:
    assert SkipSoftmax(0.5, None, 0.0).of_layer(layer()).factor(2) == 1.0


@pytest.mark.parametrize("moment", ["before", "after the last step", "after"])
def test_a_layer_that_needs_the_time_raises_without_one(moment: str) -> None:
    time = DenoisingTime()
    skip = SkipSoftmax(None, 0.5, 0.9).of_layer(layer(denoising=time))
    if moment != "before":
        time.begin([0.5])
        assert skip.factor(9) is not None
        time.advance() if moment == "after the last step" else time.end()
    with pytest.raises(ValueError, match=r"skip_softmax.disabled_until_timestep=0.9: the denoising time is not known"):
        skip.factor(9)


def test_an_ignored_layer_needs_no_time() -> None:
    assert SkipSoftmax(None, 0.5, 0.9).of_layer(layer("blocks.0.attn1", denoising=DenoisingTime())).factor(9) is None


def test_a_layer_that_nobody_will_tell_the_time_is_refused_when_it_is_made() -> None:
    blocks = (("skip_softmax", SkipSoftmax(0.1, None, 0.9)),)
    with pytest.raises(
        FaultError, match=r"disabled_until_timestep=0.9: nobody tells blocks.1.attn1 the denoising time"
    ):
        layer_options({"skip_softmax": SkipSoftmax}, blocks, layer(), PLACE)
