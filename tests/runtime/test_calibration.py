"""Skip-softmax by the calibration of a checkpoint: refused by the driver without one, one for each expert, told the
time of each step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.calibration import Calibration, Uncalibrated
from backends.layer_facts import DenoisingTime
from backends.registry import Registry
from configs.faults import FaultError
from configs.schema import AttentionConfig, AttentionSpec
from parallel.context import AttentionContext
from parallel.models import wan
from parallel.models.names import name_faults
from runtime.model_folder import read_folder
from runtime.pipelines import PhaseClock, clocked, denoise, load_pipeline
from runtime.requests import Request
from tests.parallel.layers import ONE_RANK, context_of
from tests.parallel.skipping import SKIPPING, SkippingImpl
from tests.runtime.command import raylysses
from tests.wan_folders import folder

CURVES = {"transformer": (1000.0, 5.0), "transformer_2": (3.0, 2.0)}
DENSE = ["blocks.0.attn1", "blocks.*.attn2"]


def calibrate(path: Path, curves: Mapping[str, tuple[float, float]]) -> None:
    for name, (a, b) in curves.items():
        file = path / name / "config.json"
        scale = {"formula": "a * exp(b * target_sparsity)", "coefficients": {"a": a, "b": b}}
        group = {"algorithm": "skip_softmax", "threshold_scale_factor": scale, "ignore": DENSE}
        config = json.loads(file.read_text())
        file.write_text(json.dumps({**config, "sparse_attention_config": {"config_groups": {"group_0": group}}}))


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    """A folder of two transformers, each with a calibration of its own."""
    path = folder("wan2.2-t2v-a14b", tmp_path)
    calibrate(path, CURVES)
    return path


def sparse(**block: Any) -> AttentionConfig:
    return AttentionConfig(
        default=AttentionSpec("TRTLLM_ATTN", skip_softmax=block),
        origins={"attention.default.skip_softmax.target_sparsity": "my.yaml"},
    )


# --- the driver -------------------------------------------------------------------------------------------------------


def test_each_expert_carries_its_own_calibration(experts: Path) -> None:
    models = read_folder(str(experts)).models
    assert {name: facts.calibration for name, facts in models.items()} == {
        name: Calibration(a, b, tuple(DENSE)) for name, (a, b) in CURVES.items()
    }


def test_a_target_is_taken_where_every_expert_is_calibrated(experts: Path) -> None:
    assert name_faults(sparse(target_sparsity=0.5), read_folder(str(experts)).models, Registry()) == []


def test_the_expert_that_is_not_calibrated_is_named(tmp_path: Path) -> None:
    path = folder("wan2.2-t2v-a14b", tmp_path)
    calibrate(path, {"transformer": CURVES["transformer"]})
    (fault,) = name_faults(sparse(target_sparsity=0.5), read_folder(str(path)).models, Registry())
    assert (fault.key, fault.value) == ("attention.default.skip_softmax.target_sparsity", 0.5)
    assert fault.rule == (
        "transformer_2 has no calibration of its own, which says the threshold: "
        "its config.json has no sparse_attention_config"
    )
    assert fault.origin == "my.yaml"
    assert name_faults(sparse(threshold=0.5), read_folder(str(path)).models, Registry()) == []


def test_a_damaged_calibration_hinders_nobody_who_does_not_need_it(tmp_path: Path) -> None:
    path = folder("wan2.1-t2v", tmp_path)
    calibrate(path, {"transformer": (-1.0, 1.0)})
    found = read_folder(str(path))
    assert isinstance(found.models["transformer"].calibration, Uncalibrated)
    assert name_faults(AttentionConfig(), found.models, Registry()) == []


def test_a_target_without_a_calibration_is_refused_before_anything_starts(tmp_path: Path) -> None:
    setting = "attention.default={backend: TRTLLM_ATTN, skip_softmax: {target_sparsity: 0.5}}"
    for command in (("generate", "--prompt", "a cat", f"run.dir={tmp_path / 'run'}", "run.device=cpu"), ("explain",)):
        outcome = raylysses(*command, setting)
        assert outcome.code == 2, outcome.err
        assert "attention.default.skip_softmax.target_sparsity=0.5: transformer has no calibration" in outcome.err
        assert "set skip_softmax.threshold, or use a calibrated checkpoint [command line]" in outcome.err
    assert not (tmp_path / "run").exists()


def test_explain_says_that_a_target_is_lossy(experts: Path) -> None:
    setting = "attention.default={backend: TRTLLM_ATTN, skip_softmax: {target_sparsity: 0.5}}"
    for file in experts.glob("transformer*/config.json"):  # the kernels have one head size
        file.write_text(json.dumps({**json.loads(file.read_text()), "attention_head_dim": 128}))
    device = ("--device", "cuda:10.0", "--packages", "all", "--json")
    outcome = raylysses("explain", *device, f"model.path={experts}", setting)
    assert outcome.code == 0, outcome.err
    entries = json.loads(outcome.out)["entries"]
    assert {(entry["model"], entry["exactness"]) for entry in entries} == {(name, "lossy-sparse") for name in CURVES}
    assert all(entry["options"] == {"skip_softmax": {"target_sparsity": 0.5}} for entry in entries)


# --- the rank ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def factors() -> Iterator[list[float | None]]:
    SkippingImpl.factors.clear()
    yield SkippingImpl.factors
    SkippingImpl.factors.clear()


def context_with(path: Path, denoising: DenoisingTime, **block: Any) -> AttentionContext:
    """What a rank hands to the models of a folder; its self-attention skips."""
    config = AttentionConfig(per_role={"self": AttentionSpec("SKIPPING", skip_softmax=block)}, register=SKIPPING)
    models = read_folder(str(path), weights=False).models
    calibrations = {name: facts.calibration for name, facts in models.items()}
    base = context_of(register=SKIPPING)
    return replace(base, config=config, calibrations=calibrations, denoising=denoising)


def wired_pipeline(path: Path, **block: Any) -> Any:
    denoising = DenoisingTime()
    pipe = load_pipeline(path, "WanPipeline", ONE_RANK, torch.float32, None, denoising)
    context = context_with(path, denoising, **block)
    for name in CURVES:
        wan.wire(getattr(pipe, name), context, name)
    return pipe


def skips(pipe: Any, model: str) -> list[Any]:
    blocks = getattr(pipe, model).blocks
    return [block.attn1.processor.attention.impl.options["skip_softmax"] for block in blocks]


def test_the_layers_of_each_expert_have_its_factor_and_ignored_ones_none(experts: Path) -> None:
    pipe = wired_pipeline(experts, target_sparsity=0.5)
    for name, (a, b) in CURVES.items():
        ignored, calibrated = skips(pipe, name)
        assert ignored.factor(10) is None
        assert calibrated.factor(10) == pytest.approx(Calibration(a, b).factor(0.5))


def test_every_forward_knows_its_own_time_and_both_experts_share_it(experts: Path, factors: list[float | None]) -> None:
    pipe = wired_pipeline(experts, threshold=1.0, disabled_until_timestep=0.6)
    told: list[tuple[float, float | None]] = []
    for name in CURVES:
        model = getattr(pipe, name)
        model.register_forward_pre_hook(
            lambda _, args, kwargs: told.append((float(kwargs["timestep"][0]), pipe.denoising.now)), with_kwargs=True
        )
    request = Request("a cat", "", 1, steps=6, guidance=3.0, guidance_2=None, frames=5, height=32, width=32, fps=8)
    for _ in range(2):
        with clocked(pipe, PhaseClock(lambda phase: None, torch.device("cpu"))):
            denoise(pipe, request, PhaseClock(lambda phase: None, torch.device("cpu")), lambda step, seconds: None)
        assert pipe.denoising.now is None

    assert len(told) == 2 * 6 * 2  # two requests of six steps, with and without the prompt
    assert all(now == pytest.approx(timestep / 1000) for timestep, now in told)
    skipped = [factor is not None for factor in factors]
    assert skipped == [time <= 600 for time, _ in told for _ in range(2)]  # two blocks
    assert 0 < sum(skipped) < len(skipped)


def test_a_layer_that_was_told_no_time_raises(experts: Path) -> None:
    pipe = wired_pipeline(experts, threshold=1.0, disabled_until_timestep=0.6)
    inputs = {
        "hidden_states": torch.zeros(1, 16, 2, 4, 4),
        "encoder_hidden_states": torch.zeros(1, 8, 64),
        "timestep": torch.ones(1),
    }
    with torch.no_grad(), pytest.raises(ValueError, match="the denoising time is not known, as no denoising is"):
        pipe.transformer(**inputs)


def test_a_rank_without_the_calibration_refuses_as_the_driver_does(tmp_path: Path) -> None:
    path = folder("wan2.2-t2v-a14b", tmp_path)
    with pytest.raises(FaultError, match="transformer has no calibration of its own"):
        wired_pipeline(path, target_sparsity=0.5)
