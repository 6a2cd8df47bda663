"""One piece of training: a loss, its optimiser, its schedule by the clock, and the same steps on every rank."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

REPORT_EVERY_S = 15.0
AGREE_EVERY = 20
"""Steps between two readings of the first rank's clock."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together, each on its own device."""

    rank: int
    count: int
    device: torch.device

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean of a tensor over the ranks."""
        if self.count > 1:
            dist.all_reduce(value)
            value = value / self.count
        return value


@contextmanager
def ranks_of_torchrun() -> Iterator[Ranks]:
    """The ranks that torchrun started, or the one process that it did not."""
    rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if count > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield Ranks(rank, count, device)
    finally:
        if count > 1:
            dist.destroy_process_group()


@dataclass(frozen=True)
class Limits:
    """When a piece ends: after `minutes`, or after `steps` if that comes first. rate: highest learning rate, if not the
    piece's own. number: how many pieces came before.
    """

    minutes: float
    steps: int | None
    seed: int
    rate: float | None = None
    number: int = 0

    def stream(self, purpose: str, ranks: Ranks) -> str:
        """The seed of random numbers that no other purpose, rank or piece of the same training has."""
        return f"{purpose} {self.seed} {self.number} {ranks.rank}"

    def progress(self, began: float, step: int) -> float:
        """0 at the first step, 1 at the end."""
        by_clock = (time.monotonic() - began) / (60 * self.minutes)
        return max(by_clock, step / self.steps if self.steps else 0.0)


def rate_at(progress: float, step: int, *, warm_up: int = 200) -> float:
    """The share of the highest learning rate: up over the first steps, then down a cosine to nothing at the end."""
    return min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def train(
    loss_of: torch.nn.Module,
    batch_of: Callable[[random.Random], tuple[torch.Tensor, ...]],
    ranks: Ranks,
    limits: Limits,
    *,
    rate: float,
    average: float | None = None,
) -> dict[str, Any]:
    """Train the parameters of `loss_of` until the limits; returns what there is to record.

    loss_of: maps a batch to a scalar loss. batch_of: draws a batch from this rank's own random numbers. rate: the
    highest learning rate of AdamW. average: the decay of a moving average of the weights (after Karras et al. 2024,
    its warm-up), which the parameters hold in the end.
    """
    rate = rate if limits.rate is None else limits.rate
    rng = random.Random(limits.stream("batches", ranks))
    torch.manual_seed(rng.getrandbits(63))
    weights: list[torch.Tensor] = [parameter for parameter in loss_of.parameters() if parameter.requires_grad]
    averages = [weight.detach().clone() for weight in weights] if average is not None else []
    fused = ranks.device.type == "cuda"
    optimiser = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.99), weight_decay=0.01, fused=fused)
    model = torch.nn.parallel.DistributedDataParallel(loss_of) if ranks.count > 1 else loss_of
    began, told, step, progress = time.monotonic(), time.monotonic(), 0, 0.0
    losses: list[torch.Tensor] = []
    curve: list[tuple[int, float]] = []
    while progress < 1:
        for group in optimiser.param_groups:
            group["lr"] = rate * rate_at(progress, step)
        with torch.autocast(ranks.device.type, torch.bfloat16):
            loss = model(*batch_of(rng))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        step += 1
        if average is not None:
            torch._foreach_lerp_(averages, weights, 1 - min(average, step / (step + 10)))
        losses.append(loss.detach())
        if ranks.count == 1 or step % AGREE_EVERY == 0 or step == limits.steps:
            progress = _agreed(limits.progress(began, step), ranks)
        if time.monotonic() - told > REPORT_EVERY_S or progress >= 1:
            told = time.monotonic()
            curve.append((step, float(torch.stack(losses).mean())))
            losses.clear()
            left = f", {(1 / progress - 1) * (told - began):.0f} s left" if progress > 0 else ""
            ranks.say(f"step {step}: loss {curve[-1][1]:.4f}, {step / (told - began):.1f} steps/s{left}")
    for weight, mean in zip(weights, averages, strict=False):
        weight.data.copy_(mean)
    return {
        "steps": step,
        "seconds": round(time.monotonic() - began, 1),
        "gpus": ranks.count,
        "device": torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu",
        "seed": limits.seed,
        "learning_rate": rate,
        "loss": [{"step": step, "mean": round(value, 5)} for step, value in curve],
    }


def _agreed(progress: float, ranks: Ranks) -> float:
    """The first rank's progress, so that all end after the same step."""
    if ranks.count == 1:
        return progress
    held = torch.tensor(progress, dtype=torch.float64, device=ranks.device)
    dist.broadcast(held, src=0)
    return float(held)
