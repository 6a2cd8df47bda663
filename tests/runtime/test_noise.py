"""All noise of a request comes from its seed, alike on every rank, and ranks compare what it came to."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from runtime.errors import DisagreementError, RankPlace
from runtime.latents import latent_differences
from runtime.noise import fingerprint, seeded_noise
from runtime.requests import request_of
from runtime.session import Session
from tests.runtime.test_session import SIZES, TINY_WAN, config_of, distance, picture
from tests.wan_folders import folder

EULER = ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True})
DPM = ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"})
CPU = torch.device("cpu")
PLACES = tuple(RankPlace(rank, "n", f"10.0.0.{rank}", f"host{rank}", 100 + rank) for rank in range(3))


def scheduler(name: str, options: dict[str, Any]) -> Any:
    flow_options = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"} if name.startswith("DPM") else {}
    return getattr(diffusers, name).from_config({**flow_options, **options})


def with_scheduler(model: Path, name: str, options: dict[str, Any], path: Path) -> Path:
    shutil.copytree(model, path)
    scheduler(name, options).save_pretrained(path / "scheduler")
    index = json.loads((path / "model_index.json").read_text())
    (path / "model_index.json").write_text(json.dumps({**index, "scheduler": ["diffusers", name]}))
    return path


def stepped(kind: tuple[str, dict[str, Any]], seed: int) -> torch.Tensor:
    made = scheduler(*kind)
    made.set_timesteps(4)
    sample = torch.ones(1, 4, 3, 2, 2)
    with seeded_noise(made, seed, CPU):
        for time in made.timesteps:
            sample = made.step(0.1 * sample, time, sample, return_dict=False)[0]
    return sample


@pytest.mark.parametrize("kind", [EULER, DPM], ids=["euler", "dpm"])
def test_noise_of_a_step_follows_the_seed_and_leaves_the_global_generator_alone(
    kind: tuple[str, dict[str, Any]],
) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = stepped(kind, 3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(stepped(kind, 3), first)
    assert not torch.allclose(stepped(kind, 4), first)


class _GlobalNoise:
    """A scheduler whose step knows no generator."""

    def step(self, output: torch.Tensor) -> torch.Tensor:
        return output + torch.randn(output.shape)


def test_a_scheduler_that_knows_no_generator_follows_the_seed_too() -> None:
    made = []
    for seed in (3, 3, 4):
        with seeded_noise(_GlobalNoise(), seed, CPU) as generator:
            made.append(_GlobalNoise().step(torch.zeros(8)))
            assert not torch.equal(made[-1], torch.randn(8, generator=generator))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_a_scheduler_is_left_as_it_was() -> None:
    made = scheduler(*EULER)
    with seeded_noise(made, 3, CPU):
        assert "step" in vars(made)
    assert "step" not in vars(made)


def test_every_value_of_the_latents_counts_in_their_fingerprint() -> None:
    latents = torch.randn(1, 8, 3, 10, 6, generator=torch.Generator().manual_seed(0))
    whole = fingerprint(latents)
    assert len(whole) == 1024
    assert sum(whole) == pytest.approx(float(latents.double().sum()))
    for place in (0, 777, latents.numel() - 1):
        other = latents.clone()
        other.view(-1)[place] += 1
        assert fingerprint(other) != whole


def test_latents_that_differ_are_named_by_rank_and_rounding_is_not() -> None:
    latents = torch.randn(1, 8, 3, 10, 6, generator=torch.Generator().manual_seed(0))
    ranks = {0: fingerprint(latents), 1: fingerprint(latents * (1 + 1e-7)), 2: fingerprint(latents.flip(2))}
    (line,) = latent_differences(4, ranks, PLACES)
    assert line.startswith("request 4: the latents of rank 2 on host2 (10.0.0.2, pid 102) are off by ")
    assert "rank 0 on host0" in line
    nothing = dict.fromkeys(range(2), (float("nan"),))
    assert len(latent_differences(0, nothing, PLACES)) == 2

    error = DisagreementError((line,), "latents")
    again = pickle.loads(pickle.dumps(error))
    assert (again.subject, str(again)) == ("latents", str(error))
    assert "the ranks' latents differ" in str(error)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("model", "kind"), [("tiny-wan", EULER), ("tiny-wan", DPM), ("wan2.1-i2v", EULER)], ids=["euler", "dpm", "image"]
)
def test_a_scheduler_that_draws_noise_gives_the_same_on_any_number_of_ranks(
    model: str, kind: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    source = TINY_WAN if model == "tiny-wan" else folder(model, tmp_path)
    path = with_scheduler(source, *kind, tmp_path / "stochastic")
    image = None if model == "tiny-wan" else picture(*SIZES[8][1:])
    made: list[Any] = []
    for world_size in (1, 2):
        config = config_of(path, world_size)
        request = request_of(config, image)
        with Session(config) as session:
            made += [video.latents for video in session.generate([request, request, replace(request, seed=1)])]

    np.testing.assert_array_equal(made[0], made[1])
    np.testing.assert_array_equal(made[3], made[4])
    assert distance(made[3], made[0]) <= 1e-5
    assert distance(made[5], made[2]) <= 1e-5
    assert distance(made[2], made[0]) > 0.1


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_ranks_whose_latents_differ_end_the_run() -> None:
    config = config_of(TINY_WAN, 2)
    with (
        pytest.raises(DisagreementError, match=r"the latents of rank 1 on .* are off by 0\.001 ") as caught,
        Session(config, worker="tests.runtime.doubles.OffLatentsRank") as session,
    ):
        session.generate([request_of(config)])
    assert caught.value.exit_code == 4
