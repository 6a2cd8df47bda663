"""The judge on clips whose content is known: clean, noisy and blurred; and on what is no such clip."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from scipy import ndimage

from moving_shapes.clips import COLOURS, MOTIONS, SHAPES, SIZE, Scene, Thing, draw, sample, to_uint8
from moving_shapes.judge import NOTHING, OTHER, Verdict, expected, judge

Frames = npt.NDArray[np.uint8]


def frames_of(scene: Scene, frames: int = 33, size: int = SIZE) -> Frames:
    return to_uint8(draw([scene], frames=frames, size=size)[0])[0].numpy()


def blurred(frames: Frames, deviation: float) -> Frames:
    return ndimage.gaussian_filter(frames.astype(np.float32), (0, deviation, deviation, 0)).round().astype(np.uint8)


def noisy(frames: Frames, deviation: float) -> Frames:
    noise = np.random.default_rng(0).normal(0, deviation, frames.shape)
    return (frames + noise).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize(
    ("spoil", "allowed"),
    [
        pytest.param(lambda frames: frames, 0, id="clean"),
        pytest.param(lambda frames: noisy(frames, 20), 0, id="noisy"),
        pytest.param(lambda frames: blurred(frames, 3), 2, id="blurred"),
        pytest.param(lambda frames: noisy(blurred(frames, 2), 15), 1, id="both"),
    ],
)
def test_the_judge_reads_drawn_clips(spoil: Callable[[Frames], Frames], allowed: int) -> None:
    rng = random.Random(3)
    wrong = []
    for _ in range(60):
        scene = sample(rng)
        seen = judge(spoil(frames_of(scene)))
        if seen != expected(scene):
            wrong.append((scene, seen))
    assert len(wrong) <= allowed, wrong


RED_CIRCLE = Scene((Thing("circle", "red", 16, (40, 60), (90, 60)),), "black", "right")


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_colour_and_shape_has_its_name(colour: str, shape: str) -> None:
    thing = replace(RED_CIRCLE.things[0], colour=colour, shape=shape)
    assert judge(frames_of(replace(RED_CIRCLE, things=(thing,)))) == Verdict(colour, shape, "right")


@pytest.mark.parametrize("motion", MOTIONS)
def test_a_video_played_backwards_moves_the_other_way(motion: str) -> None:
    backwards = {"left": "right", "right": "left", "up": "down", "down": "up"}
    seen = judge(frames_of(sample(random.Random(5), motion))[::-1])
    assert seen.direction == backwards.get(motion, motion)


@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize("frames", [9, 33])
def test_lengths_are_taken_in_proportion(size: int, frames: int) -> None:
    assert judge(frames_of(RED_CIRCLE, frames, size)) == Verdict("red", "circle", "right")


def test_a_plain_and_a_noisy_background_show_nothing() -> None:
    nothing = Verdict(NOTHING, NOTHING, NOTHING)
    plain = np.full((33, SIZE, SIZE, 3), 80, np.uint8)
    assert judge(plain) == nothing
    assert judge(noisy(plain, 20)) == nothing


def test_slow_slanted_and_shapeless_things_are_not_named_otherwise() -> None:
    thing = RED_CIRCLE.things[0]
    slow = replace(RED_CIRCLE, things=(replace(thing, end=(45, 60)),))
    assert judge(frames_of(slow)).direction == "still"
    slanted = replace(RED_CIRCLE, things=(replace(thing, start=(40, 40), end=(80, 80)),))
    assert judge(frames_of(slanted)).direction == OTHER
    bar = np.full((33, SIZE, SIZE, 3), 15, np.uint8)
    bar[:, 60:66, 30:90] = COLOURS["red"]
    assert judge(bar) == Verdict("red", OTHER, "still")


def test_two_colours_are_two_things() -> None:
    left = Thing("square", "blue", 14, (90, 90), (40, 90))
    two = Scene((RED_CIRCLE.things[0], left), "white", "crossing")
    assert judge(frames_of(two)) == Verdict("blue+red", "square+circle", "crossing") == expected(two)
    one_way = replace(two, things=(two.things[0], replace(left, start=(40, 90), end=(90, 90))))
    assert judge(frames_of(one_way)).direction == "right+right"
    half = frames_of(replace(RED_CIRCLE, things=(replace(RED_CIRCLE.things[0], colour="green"),)))
    split = frames_of(RED_CIRCLE)
    split[16:] = half[16:]
    assert judge(split).colour == "green+red"
