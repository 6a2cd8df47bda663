"""What a video shows, by plain image analysis: colour and shape of what stands out from the background, and its motion.

The judge is not told what was asked for. It takes the colour of the frames' rim for the background, finds the pixels
that differ, names their colours by the nearest of COLOURS, fits a circle, a square and a triangle of equal area, and
fits a straight line to the path of the centre of mass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import ndimage

from moving_shapes.clips import COLOURS, CROSSING, SHAPES, SIZE, STEPS, Scene, distances

Floats = npt.NDArray[np.floating[Any]]
Mask = npt.NDArray[np.bool_]

NOTHING, OTHER = "nothing", "other"

RIM = 4
"""Pixels at each border that are taken for background."""
SMOOTHING = 1.0
"""Deviation in pixels of the Gaussian that takes noise out of a frame."""
STANDS_OUT = 45.0
"""Least distance in RGB (0 to 255) between a pixel of a thing and the background."""
CORE_WINDOW, CORE_CONTRAST = 13, 0.9
"""A pixel tells a thing's colour if it stands out at least this much, compared with the most in a window about it.

So the edge of a blurred thing, where its colour mixes with the background's, has no say."""
LEAST_CORE = 20
"""Core pixels a frame, on average, under which a video shows nothing."""
LEAST_SHARE = 0.2
"""Of all core pixels, for a colour to count as a thing."""
LEAST_TRAVEL = 12.0
"""Pixels from the first to the last frame (of a video of 128) under which a thing is still."""
LEAST_SLANT = 1.5
"""A motion is along an axis if it is this many times the motion along the other."""
LEAST_OVERLAP = 0.7
"""Intersection over union with the best shape, under which a thing is none of the shapes."""


@dataclass(frozen=True)
class Seen:
    """One thing in a video: the nearest of COLOURS, one of SHAPES or OTHER, one of STEPS or OTHER."""

    colour: str
    shape: str
    motion: str


@dataclass(frozen=True)
class Verdict:
    """What a video shows, each as one word; those of two things are joined by `+`, in alphabetical order of colour."""

    colour: str
    shape: str
    direction: str


def expected(scene: Scene) -> Verdict:
    """The verdict on a faultless video of the scene."""
    things = sorted(scene.things, key=lambda thing: thing.colour)
    return Verdict("+".join(t.colour for t in things), "+".join(t.shape for t in things), scene.motion)


def judge(frames: npt.NDArray[np.uint8]) -> Verdict:
    """Judge a video of frames [F, H, W, 3]; H and W may differ from 128, then lengths are taken in proportion."""
    things = sorted(find(frames), key=lambda thing: thing.colour)
    if not things:
        return Verdict(NOTHING, NOTHING, NOTHING)
    motions = sorted(thing.motion for thing in things)
    alone = len(things) == 1
    direction = things[0].motion if alone else CROSSING if motions == ["left", "right"] else "+".join(motions)
    return Verdict("+".join(t.colour for t in things), "+".join(t.shape for t in things), direction)


def find(frames: npt.NDArray[np.uint8]) -> list[Seen]:
    """Every thing in the video: one of each colour that takes a fair share of what stands out."""
    scale = min(frames.shape[1:3]) / SIZE
    smooth = ndimage.gaussian_filter(frames.astype(np.float32), (0, SMOOTHING * scale, SMOOTHING * scale, 0))
    background = _background(smooth)
    colours = _colours(smooth, background, scale)
    nearest = np.stack([_apart(smooth, colour) for colour in (background, *colours.values())]).argmin(0)
    return [_describe(name, nearest, number, scale) for number, name in enumerate(colours, start=1)]


def _background(smooth: Floats) -> Floats:
    rim = np.ones(smooth.shape[1:3], bool)
    rim[RIM:-RIM, RIM:-RIM] = False
    result: Floats = np.median(smooth[:, rim], axis=(0, 1))
    return result


def _apart(pixels: Floats, colour: Floats) -> Floats:
    """Distance in RGB between each pixel [..., 3] and one colour [3]."""
    difference = pixels - colour
    result: Floats = np.sqrt(np.einsum("...c,...c->...", difference, difference))
    return result


def _colours(smooth: Floats, background: Floats, scale: float) -> dict[str, Floats]:
    """The measured colour of each thing, by its name."""
    contrast = _apart(smooth, background)
    window = max(3, round(CORE_WINDOW * scale))
    most = ndimage.maximum_filter(contrast, (1, window, window))
    core = smooth[(contrast > STANDS_OUT) & (contrast >= CORE_CONTRAST * most)]
    if len(core) < LEAST_CORE * scale**2 * len(smooth):
        return {}
    palette = np.array(list(COLOURS.values()), np.float32)
    named = np.stack([_apart(core, colour) for colour in palette]).argmin(0)
    names = list(COLOURS)
    shares = {names[number]: count / len(core) for number, count in Counter(named.tolist()).items()}
    taken = [name for name, share in shares.items() if share >= LEAST_SHARE] or [max(shares, key=lambda n: shares[n])]
    return {name: np.median(core[named == names.index(name)], axis=0) for name in taken}


def _describe(name: str, nearest: npt.NDArray[np.intp], number: int, scale: float) -> Seen:
    masks = [_largest(frame == number) for frame in nearest]
    areas = np.array([mask.sum() for mask in masks])
    others = [ndimage.binary_dilation((frame != number) & (frame != 0), iterations=3) for frame in nearest]
    # While another thing touches it, a thing may be half hidden.
    free = np.array([not (mask & other).any() for mask, other in zip(masks, others, strict=True)])
    whole = (areas > 0.7 * np.median(areas[areas > 0])) & (free | (free.sum() < len(free) / 4))
    chosen = [mask for mask, taken in zip(masks, whole, strict=True) if taken]
    times = np.flatnonzero(whole)
    return Seen(name, _shape(chosen), _motion(times, [_centre(mask) for mask in chosen], len(masks), scale))


def _largest(mask: Mask) -> Mask:
    labels, count = ndimage.label(mask)
    if count < 2:
        return mask
    result: Mask = labels == 1 + np.bincount(labels.ravel())[1:].argmax()
    return result


def _centre(mask: Mask) -> tuple[float, float]:
    """Centre of mass (x, y) in pixels, of a mask that is not empty."""
    rows, columns = np.nonzero(mask)
    return float(columns.mean()) + 0.5, float(rows.mean()) + 0.5


def _shape(masks: Sequence[Mask]) -> str:
    overlaps = np.mean([_overlaps(mask) for mask in masks], axis=0)
    return SHAPES[int(overlaps.argmax())] if overlaps.max() >= LEAST_OVERLAP else OTHER


def _overlaps(mask: Mask) -> list[float]:
    """Intersection over union of a mask and each of SHAPES, of the same area and centre of mass."""
    x, y = _centre(mask)
    radius = torch.tensor(np.sqrt(mask.sum() / np.pi))
    across = torch.arange(mask.shape[1])[None, :] + 0.5 - x
    along = torch.arange(mask.shape[0])[:, None] + 0.5 - y
    drawn = [(distance <= 0).numpy() for distance in distances(across, along, radius)]
    return [float((mask & shape).sum() / (mask | shape).sum()) for shape in drawn]


def _motion(times: npt.NDArray[np.intp], centres: Sequence[tuple[float, float]], frames: int, scale: float) -> str:
    """Name the travel from the first frame to the last, along the straight line that fits the centres best."""
    if len(times) < 2:
        return OTHER
    travel = np.polyfit(times, np.array(centres), 1)[0] * (frames - 1) / scale
    if np.abs(travel).max() < LEAST_TRAVEL:
        return "still"
    along = int(np.abs(travel).argmax())
    if np.abs(travel[along]) < LEAST_SLANT * np.abs(travel[1 - along]):
        return OTHER
    step = tuple(int(np.sign(travel[along])) if axis == along else 0 for axis in (0, 1))
    return next(name for name, direction in STEPS.items() if direction == step)
