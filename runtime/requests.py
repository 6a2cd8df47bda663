"""One video to make, as it travels to the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from configs.schema import RunConfig


@dataclass(frozen=True)
class Request:
    """Sizes in pixels and frames. image: the first frame of an image-to-video request, as the bytes of an image
    file.
    """

    prompt: str
    negative_prompt: str
    seed: int
    steps: int
    guidance: float
    guidance_2: float | None
    frames: int
    height: int
    width: int
    fps: int
    image: bytes | None = None


def request_of(config: RunConfig, image: bytes | None = None) -> Request:
    """The request that a configuration asks for."""
    make = config.generate
    return Request(
        prompt=make.prompt,
        negative_prompt=make.negative_prompt,
        seed=config.run.seed,
        steps=make.steps,
        guidance=make.guidance,
        guidance_2=make.guidance_2,
        frames=make.frames,
        height=make.height,
        width=make.width,
        fps=make.fps,
        image=image,
    )


@dataclass(frozen=True)
class Generation:
    """What a request came to. frames: uint8 [F, H, W, 3], None if no output asked for it. latents: float32,
    likewise.
    """

    request: Request
    frames: Any = None
    latents: Any = None
