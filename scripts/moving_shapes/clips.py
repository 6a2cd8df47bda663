"""Clips of one or two plain shapes that move over a plain background, drawn from signed distances."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

Colour = tuple[int, int, int]

COLOURS: dict[str, Colour] = {
    "red": (225, 45, 45),
    "green": (40, 170, 70),
    "blue": (45, 85, 225),
    "yellow": (245, 210, 45),
    "purple": (150, 60, 200),
    "cyan": (50, 200, 215),
}
BACKGROUNDS: dict[str, Colour] = {"black": (15, 15, 15), "grey": (80, 80, 80), "white": (240, 240, 240)}
SHAPES = ("circle", "square", "triangle")
STEPS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1), "still": (0, 0)}
"""Direction of one shape's motion, x to the right and y down."""
CROSSING = "crossing"
MOTIONS = (*STEPS, CROSSING)

SIZE = 128
FRAMES = 33

SQUARE_HALF_SIDE = math.sqrt(math.pi) / 2
TRIANGLE_CIRCUMRADIUS = math.sqrt(4 * math.pi / (3 * math.sqrt(3)))
"""In units of the radius of the circle of equal area: shapes of one radius have one area."""

EDGE = 1.5
"""Width in pixels over which an edge goes from the shape's colour to the background's."""


@dataclass(frozen=True)
class Thing:
    """One shape. radius: in pixels, of the circle of the same area. start, end: its centre of mass in pixels, (x, y),
    in the first and in the last frame; between them it moves evenly.
    """

    shape: str
    colour: str
    radius: float
    start: tuple[float, float]
    end: tuple[float, float]


@dataclass(frozen=True)
class Scene:
    """One thing with a motion out of STEPS, or two that are CROSSING: the first goes right, the second left."""

    things: tuple[Thing, ...]
    background: str
    motion: str


def sample(rng: random.Random, motion: str | None = None) -> Scene:
    """Draw a scene in which everything stays inside the frame; every motion is as likely as the others."""
    motion = rng.choice(MOTIONS) if motion is None else motion
    background = rng.choice(list(BACKGROUNDS))
    if motion == CROSSING:
        return Scene(_crossing(rng), background, motion)
    return Scene((_single(rng, motion),), background, motion)


def _single(rng: random.Random, motion: str) -> Thing:
    radius = rng.uniform(15, 21)
    margin = radius * TRIANGLE_CIRCUMRADIUS + 2
    room = SIZE - 2 * margin
    travel = rng.uniform(40, room)
    dx, dy = (travel * step for step in STEPS[motion])
    x = rng.uniform(margin + abs(dx) / 2, SIZE - margin - abs(dx) / 2)
    y = rng.uniform(margin + abs(dy) / 2, SIZE - margin - abs(dy) / 2)
    start, end = (x - dx / 2, y - dy / 2), (x + dx / 2, y + dy / 2)
    return Thing(rng.choice(SHAPES), rng.choice(list(COLOURS)), radius, start, end)


def _crossing(rng: random.Random) -> tuple[Thing, Thing]:
    colours = rng.sample(list(COLOURS), 2)
    middle, apart = SIZE / 2 + rng.uniform(-8, 8), rng.choice((-1, 1)) * rng.uniform(10, 22)
    things = []
    for colour, sign in zip(colours, (1, -1), strict=True):
        radius = rng.uniform(12, 16)
        margin = radius * TRIANGLE_CIRCUMRADIUS + 2
        travel = rng.uniform(50, SIZE - 2 * margin)
        x = SIZE / 2 + rng.uniform(-1, 1) * (SIZE - 2 * margin - travel) / 2
        y = middle + sign * apart
        start, end = (x - sign * travel / 2, y), (x + sign * travel / 2, y)
        things.append(Thing(rng.choice(SHAPES), colour, radius, start, end))
    return things[0], things[1]


def draw(
    scenes: Sequence[Scene], *, frames: int = FRAMES, size: int = SIZE, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return clips [B, 3, F, size, size] in -1..1, and how much of a shape each pixel holds [B, 1, F, size, size]."""
    colour = torch.tensor([BACKGROUNDS[scene.background] for scene in scenes], dtype=torch.float32, device=device)
    clip = colour[:, :, None, None, None].expand(-1, -1, frames, size, size)
    covered = torch.zeros(len(scenes), 1, frames, size, size, device=device)
    for layer in range(max(len(scene.things) for scene in scenes)):
        held = [index for index, scene in enumerate(scenes) if layer < len(scene.things)]
        things = [scenes[index].things[layer] for index in held]
        cover = torch.zeros_like(covered)
        cover[held] = _cover(things, frames, size, device)
        paint = torch.zeros_like(colour)
        paint[held] = torch.tensor([COLOURS[thing.colour] for thing in things], dtype=torch.float32, device=device)
        clip = torch.lerp(clip, paint[:, :, None, None, None], cover)
        covered = torch.maximum(covered, cover)
    return clip / 127.5 - 1, covered


def _cover(things: Sequence[Thing], frames: int, size: int, device: torch.device | str) -> torch.Tensor:
    """The part of each pixel that a thing covers, [B, 1, F, size, size]."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None, None]

    scale = size / SIZE
    time = torch.linspace(0, 1, frames, device=device)[None, :, None, None]
    pixel = torch.arange(size, device=device) + 0.5
    x, y = (
        pixel.view(shape) - scale * torch.lerp(column(starts), column(ends), time)
        for shape, starts, ends in (
            ((1, 1, 1, -1), [thing.start[0] for thing in things], [thing.end[0] for thing in things]),
            ((1, 1, -1, 1), [thing.start[1] for thing in things], [thing.end[1] for thing in things]),
        )
    )
    distance = torch.stack(distances(x, y, scale * column([thing.radius for thing in things])))
    chosen = torch.tensor([SHAPES.index(thing.shape) for thing in things], device=device)
    distance = distance[chosen, torch.arange(len(things), device=device)]
    return (0.5 - distance / EDGE).clamp(0, 1)[:, None]


def distances(x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor) -> list[torch.Tensor]:
    """Distance in pixels to the edge of each of SHAPES, negative inside; x and y are taken from its centre of mass."""
    circle = torch.hypot(x, y) - radius
    square = torch.maximum(x.abs(), y.abs()) - SQUARE_HALF_SIDE * radius
    sides = torch.maximum(x.abs() * math.sqrt(3) / 2 - y / 2, y)
    triangle = sides - TRIANGLE_CIRCUMRADIUS / 2 * radius  # an inradius is half of it
    return [circle, square, triangle]


def to_uint8(clip: torch.Tensor) -> torch.Tensor:
    """Frames [..., F, H, W, 3] in uint8, of clips [..., 3, F, H, W] in -1..1."""
    return ((clip.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).movedim(-4, -1)
