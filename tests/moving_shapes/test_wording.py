"""Training and held-out sentences: they say what the scene is, and never meet."""

import random
from collections import Counter

import pytest

from moving_shapes.clips import COLOURS, CROSSING, MOTIONS, SHAPES, SIZE, draw, sample
from moving_shapes.judge import expected
from moving_shapes.wording import SHAPE_WORDS, WAYS, describe, held_out, vocabulary, words_of


def said(words: list[str], names: dict[str, tuple[str, ...]]) -> list[str]:
    spoken = {word: name for name, texts in names.items() for text in texts for word in words_of(text)}
    return [spoken[word] for word in words if word in spoken]


@pytest.mark.parametrize("source", ["training", "held out"])
def test_a_sentence_names_what_its_scene_holds(source: str) -> None:
    rng = random.Random(0)
    for index in range(600):
        scene = sample(rng)
        prompt = describe(scene, rng)
        if source == "held out":
            prompt, scene = held_out(index)
        words = words_of(prompt)
        # "colour" and "shape" may stand aside; the names never do.
        assert [word for word in words if word in COLOURS] == [thing.colour for thing in scene.things], prompt
        assert said(words, SHAPE_WORDS) == [thing.shape for thing in scene.things], prompt
        ways = {way: tuple(set(words_of(" ".join(texts))) - {"to", "the"}) for way, texts in WAYS.items()}
        spoken = said(words, ways)
        if scene.motion == CROSSING:
            assert spoken in ([], ["right"], ["left"], ["right", "left"]), prompt
        else:
            assert spoken == ([] if scene.motion == "still" else [scene.motion]), prompt


def test_held_out_prompts_are_fixed_balanced_and_never_in_training() -> None:
    held = [held_out(index) for index in range(120)]
    assert held == [held_out(index) for index in range(120)]
    assert Counter(scene.motion for _, scene in held) == dict.fromkeys(MOTIONS, 20)
    for names in (COLOURS, SHAPES):
        counts = Counter(
            name for _, scene in held for thing in scene.things for name in (thing.colour, thing.shape) if name in names
        )
        assert min(counts.values()) >= 140 / len(names) / 2
    rng = random.Random(1)
    trained = {describe(sample(rng), rng) for _ in range(20_000)}
    assert not trained & {prompt for prompt, _ in held}
    assert held[0][0] == "look here: the blue triangle goes left, and the background is white"


def test_the_vocabulary_has_every_training_word_but_the_stranger() -> None:
    rng = random.Random(2)
    words = {word for _ in range(10_000) for word in words_of(describe(sample(rng), rng))}
    assert words ^ set(vocabulary()) == {"lorem"}
    assert len(vocabulary()) == len(set(vocabulary())) < 125


def test_sampled_scenes_stay_inside_and_cover_everything() -> None:
    rng = random.Random(4)
    scenes = [sample(rng) for _ in range(300)]
    assert {scene.motion for scene in scenes} == set(MOTIONS)
    assert {thing.colour for scene in scenes for thing in scene.things} == set(COLOURS)
    assert all(expected(scene).direction == scene.motion for scene in scenes)
    _, covered = draw(scenes[:40], frames=5)
    rim = covered.clone()
    rim[..., 1:-1, 1:-1] = 0
    assert float(rim.max()) == 0
    area = covered[0, 0, 0].sum() / (3.14159 * sum(thing.radius**2 for thing in scenes[0].things))
    assert abs(float(area) - 1) < 0.03
    assert covered.shape == (40, 1, 5, SIZE, SIZE)
