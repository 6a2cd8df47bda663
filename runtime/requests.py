"""One video to make, as it travels to the ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

from configs.schema import RunConfig


@dataclass(frozen=True)
class Request:
    """One video to make.

    Sizes are in pixels and frames. image: the first frame of an image-to-video request, as the bytes of an image file.
    image_fit: how it meets the video's proportions: `crop` (also None), `pad` or `stretch`.
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
    image_fit: str | None = None


def with_plain_numbers(request: Request) -> Request:
    """The request with numbers of numpy's as Python's."""
    return replace(request, **{field.name: _plain(getattr(request, field.name)) for field in fields(request)})


def _plain(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


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
        image_fit=make.image_fit,
    )


def caption_of(request: Request, model: str) -> tuple[str, str]:
    """Say what a video was made from, for people.

    Args:
        request: The request.
        model: The model's path, as the configuration names it.

    Returns:
        The prompt, and a line with the settings.
    """
    guidance = f"{request.guidance:g}" if request.guidance_2 is None else f"{request.guidance:g}/{request.guidance_2:g}"
    settings = (
        f"seed {request.seed}",
        f"model {model}",
        f"{request.steps} steps",
        f"guidance {guidance}",
        f"{request.width} x {request.height}",
        f"{request.frames} frames at {request.fps} fps",
        *(("first frame given",) if request.image is not None else ()),
    )
    return request.prompt, ", ".join(settings)


@dataclass(frozen=True)
class Generation:
    """What a request came to.

    frames: uint8 [F, H, W, 3], None if no output asked for it. latents: float32, likewise. first_frame: the picture
    that the model got, as the bytes of a PNG file; None without one.
    """

    request: Request
    frames: Any = None
    latents: Any = None
    first_frame: bytes | None = None
