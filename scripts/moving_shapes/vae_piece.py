"""Training the VAE: clips of moving shapes in, the same clips out."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch.nn.functional import max_pool3d

from moving_shapes.clips import draw, sample
from moving_shapes.model import TinyWan
from moving_shapes.piece import Limits, Ranks, train
from moving_shapes.whole_clip import WholeClip

RATE = 2e-3
KL_WEIGHT = 1e-4
SHAPE_WEIGHT = 4.0
"""How much more a pixel on a shape or beside it counts than one of the background."""
BESIDE = 4
"""Pixels."""


class VaeLoss(torch.nn.Module):
    """Absolute and squared error of the decoded clip, and the divergence of the latents from a unit Gaussian."""

    def __init__(self, whole: WholeClip) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, clip: torch.Tensor, covered: torch.Tensor) -> torch.Tensor:
        """Clips [B, 3, F, H, W] in -1..1 and their cover [B, 1, F, H, W]."""
        mean, log_variance = self.whole.encode(clip)
        latents = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        error = self.whole.decode(latents).float() - clip
        near = max_pool3d(covered, (1, 2 * BESIDE + 1, 2 * BESIDE + 1), 1, (0, BESIDE, BESIDE)) > 0
        weighted = (1 + SHAPE_WEIGHT * near) * (0.5 * error.abs() + error.square())
        divergence = 0.5 * (mean.float().square() + log_variance.float().exp() - 1 - log_variance.float())
        return weighted.mean() + KL_WEIGHT * divergence.mean()


def train_vae(model: TinyWan, ranks: Ranks, limits: Limits, *, batch: int, compiled: bool) -> None:
    """Train `model.vae` in place, set its latents' mean and deviation, and add to the history.

    What was trained on the latents of the VAE as it was is forgotten.
    """
    fresh = TinyWan.new(limits.seed)
    model.transformer, model.text_encoder = fresh.transformer, fresh.text_encoder
    model.history = [piece for piece in model.history if piece["piece"] == "vae"]
    vae = model.vae.to(ranks.device).train()
    whole = WholeClip(vae)
    loss = VaeLoss(whole)
    if compiled:
        loss.compile()

    def batch_of(rng: random.Random) -> tuple[torch.Tensor, ...]:
        return draw([sample(rng) for _ in range(batch)], device=ranks.device)

    record = train(loss, batch_of, ranks, limits, rate=RATE)
    vae.eval()
    measured = _measure(whole, ranks, limits, clips=8 * batch * ranks.count)
    vae.register_to_config(latents_mean=measured.pop("latents_mean"), latents_std=measured.pop("latents_std"))
    model.history.append({"piece": "vae", "batch": batch * ranks.count, **record, **measured})


@torch.no_grad()
def _measure(whole: WholeClip, ranks: Ranks, limits: Limits, clips: int, at_once: int = 16) -> dict[str, Any]:
    """Mean and deviation of each latent channel, and the error of decoded clips that training did not see.

    at_once: clips per round; fewer where fewer are asked for.
    """
    at_once = min(at_once, clips // ranks.count)
    rng = random.Random(limits.stream("measure", ranks))
    sums, errors = torch.zeros(2, whole.vae.config.z_dim, device=ranks.device), torch.zeros(2, device=ranks.device)
    rounds = -(-clips // (at_once * ranks.count))
    for _ in range(rounds):
        clip, covered = draw([sample(rng) for _ in range(at_once)], device=ranks.device)
        with torch.autocast(ranks.device.type, torch.bfloat16):
            mean, log_variance = whole.encode(clip)
            decoded = whole.decode(mean).float().clamp(-1, 1)
        mean, variance = mean.float(), log_variance.float().exp()
        # Of the samples, not of the means: a channel that tells nothing keeps deviation one, and its means stay small.
        sums += torch.stack([mean.mean((0, 2, 3, 4)), (mean.square() + variance).mean((0, 2, 3, 4))]) / rounds
        square = (decoded - clip).square()
        errors += torch.stack([square.mean(), (square * covered).sum() / (3 * covered.sum())]) / rounds
    sums, errors = ranks.mean(sums), ranks.mean(errors)
    means, deviations = sums[0], (sums[1] - sums[0].square()).sqrt()
    psnr = {
        name: round(10 * math.log10(4 / value), 2)
        for name, value in zip(("psnr", "shape_psnr"), errors.tolist(), strict=True)
    }
    ranks.say(f"on new clips: PSNR {psnr['psnr']} dB, on the shapes alone {psnr['shape_psnr']} dB")
    return {"latents_mean": means.tolist(), "latents_std": deviations.tolist(), **psnr}
