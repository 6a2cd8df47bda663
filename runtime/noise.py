"""All randomness of a request comes from its seed, alike on every rank, and ranks' latents can be compared."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from runtime.latents import FINGERPRINT_PIECES

_GLOBAL_STREAM = 0x5EED
"""Keeps torch's global generator off the sequence of the request's own, which starts from the seed itself."""


@contextmanager
def seeded_noise(scheduler: Any, seed: int, device: torch.device) -> Iterator[torch.Generator]:
    """Yields the request's generator, and lets the scheduler's steps draw from it.

    diffusers' Wan pipelines call `scheduler.step` without a generator, so that a scheduler that adds noise in a step
    would draw from torch's global one, which differs between requests and ranks. The generator is on the CPU: its
    noise depends neither on the device nor on the number of ranks. torch's global generators are seeded, too, for
    schedulers that know no generator, and are put back afterwards.

    Args:
        scheduler: A diffusers scheduler; its `step` is replaced inside the context.
        seed: The request's seed.
        device: The device whose global generator is seeded beside the CPU's.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed_global(generator)
        step = scheduler.step
        if "generator" not in inspect.signature(step).parameters:
            yield generator
            return

        def seeded_step(*args: Any, **kwargs: Any) -> Any:
            return step(*args, **{"generator": generator, **kwargs})

        scheduler.step = seeded_step
        try:
            yield generator
        finally:
            del scheduler.step


def seed_global(generator: torch.Generator) -> None:
    """Seeds torch's global generators from the request's seed; called again where ranks have drawn differently."""
    torch.manual_seed(generator.initial_seed() ^ _GLOBAL_STREAM)


def fingerprint(latents: torch.Tensor) -> tuple[float, ...]:
    """Sums of 1024 equal pieces of the latents in float64, in memory order, zero-padded; every value counts in one."""
    flat = latents.detach().flatten().double()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % FINGERPRINT_PIECES))
    return tuple(padded.view(FINGERPRINT_PIECES, -1).sum(1).tolist())
