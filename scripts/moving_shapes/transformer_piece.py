"""Training the transformer and the text encoder: flow matching on latents of moving shapes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from moving_shapes.clips import CROSSING, STEPS, Scene, draw, sample
from moving_shapes.model import CAPTION_LENGTH, SCORES, TEXT_LENGTH, TinyWan
from moving_shapes.piece import Limits, Ranks, train
from moving_shapes.whole_clip import WholeClip
from moving_shapes.wording import describe

RATE = 1.5e-3
SHIFT = 3.0
"""Of the training times, as of the sampler's: more of them near pure noise, where it is decided what a video shows."""
CROSSING_SHARE = 1 / 6
"""Of the clips."""
DROPPED = 0.1
"""Share of prompts replaced by the empty one, for classifier-free guidance."""
AVERAGE = 0.9995


class FlowLoss(torch.nn.Module):
    """Squared error of the velocity from clip to noise (Lipman et al. 2022, as Wan parametrises it)."""

    def __init__(self, transformer: Any, text_encoder: Any, shift: float) -> None:
        super().__init__()
        self.shift = shift
        self.transformer = transformer
        self.text_encoder = text_encoder

    def forward(self, latents: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Normalised latents [B, C, F, H, W]; token numbers and mask [B, CAPTION_LENGTH]."""
        text = encode_text(self.text_encoder, tokens, mask)
        noise = torch.randn_like(latents)
        early = torch.randn(len(latents), device=latents.device).sigmoid()
        sigma = self.shift * early / (1 + (self.shift - 1) * early)
        noisy = torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1, 1))
        velocity = self.transformer(noisy, 1000 * sigma, text, return_dict=False)[0]
        error: torch.Tensor = velocity.float() - (noise - latents)
        return error.square().mean()


def encode_text(text_encoder: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The rows that WanPipeline makes of a prompt: those of its tokens, then zeros, TEXT_LENGTH in all."""
    rows = text_encoder(tokens, mask).last_hidden_state * mask.unsqueeze(-1)
    return torch.nn.functional.pad(rows, (0, 0, 0, TEXT_LENGTH - rows.shape[1]))


def tokenize(tokenizer: Any, prompts: list[str], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token numbers and mask [B, CAPTION_LENGTH]."""
    made = tokenizer(prompts, padding="max_length", max_length=CAPTION_LENGTH, truncation=True, return_tensors="pt")
    return made.input_ids.to(device, non_blocking=True), made.attention_mask.to(device, non_blocking=True)


@dataclass(frozen=True)
class Lesson:
    """What a piece for the transformer teaches. batch: clips per rank and step. bank: clips that each rank encodes
    first. crossing: the share of them in which two things cross. shift: of the training times.
    """

    batch: int = 128
    bank: int = 24_000
    crossing: float = CROSSING_SHARE
    shift: float = SHIFT


def train_transformer(model: TinyWan, ranks: Ranks, limits: Limits, lesson: Lesson, *, compiled: bool) -> None:
    """Train `model.transformer` and `model.text_encoder` in place, and add to the history."""
    model.history = [piece for piece in model.history if piece["piece"] != SCORES]  # they were of other weights
    scenes, latents = _fill_bank(model, ranks, limits, lesson)
    transformer, text_encoder = model.transformer.to(ranks.device).train(), model.text_encoder.to(ranks.device).train()
    loss = FlowLoss(transformer, text_encoder, lesson.shift)
    if compiled:
        model.transformer.compile()

    def batch_of(rng: random.Random) -> tuple[torch.Tensor, ...]:
        chosen = [rng.randrange(len(scenes)) for _ in range(lesson.batch)]
        prompts = ["" if rng.random() < DROPPED else describe(scenes[index], rng) for index in chosen]
        return latents[torch.tensor(chosen, device=latents.device)], *tokenize(model.tokenizer, prompts, ranks.device)

    record = train(loss, batch_of, ranks, limits, rate=RATE, average=AVERAGE)
    model.transformer.eval()
    model.text_encoder.eval()
    facts: dict[str, float] = {"batch": lesson.batch * ranks.count, "clips": lesson.bank * ranks.count}
    facts |= {"crossing": round(lesson.crossing, 3), "shift": lesson.shift}
    model.history.append({"piece": "transformer", **facts, **record})


@torch.no_grad()
def _fill_bank(
    model: TinyWan, ranks: Ranks, limits: Limits, lesson: Lesson, at_once: int = 32
) -> tuple[list[Scene], torch.Tensor]:
    """Scenes, and their normalised latents [N, C, F, H, W] on the device; each rank has its own."""
    whole = WholeClip(model.vae.to(ranks.device).eval())
    mean, deviation = (
        torch.tensor(values, device=ranks.device).view(1, -1, 1, 1, 1)
        for values in (model.vae.config.latents_mean, model.vae.config.latents_std)
    )
    rng = random.Random(limits.stream("bank", ranks))
    scenes: list[Scene] = []
    latents: list[torch.Tensor] = []
    while len(scenes) < lesson.bank:
        drawn = [_scene(rng, lesson) for _ in range(min(at_once, lesson.bank - len(scenes)))]
        with torch.autocast(ranks.device.type, torch.bfloat16):
            encoded, _ = whole.encode(draw(drawn, device=ranks.device)[0])
        scenes += drawn
        latents.append((encoded.float() - mean) / deviation)
        if len(scenes) // at_once % 200 == 0:
            ranks.say(f"encoded {len(scenes)} of {lesson.bank} clips")
    return scenes, torch.cat(latents)


def _scene(rng: random.Random, lesson: Lesson) -> Scene:
    return sample(rng, CROSSING if rng.random() < lesson.crossing else rng.choice(list(STEPS)))
