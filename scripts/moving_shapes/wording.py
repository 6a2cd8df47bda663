"""Sentences that describe a scene: the many that a model is trained on, and other ones that it is scored with.

No training sentence is built like a held-out one. Most words of those occur in training somewhere; a few are strangers.
"""

from __future__ import annotations

import random
import re

from moving_shapes.clips import BACKGROUNDS, COLOURS, CROSSING, MOTIONS, SHAPES, Scene, Thing

SHAPE_WORDS = {"circle": ("circle", "disc", "ball"), "square": ("square", "box"), "triangle": ("triangle",)}
WAYS = {
    "left": ("left", "to the left", "leftwards"),
    "right": ("right", "to the right", "rightwards"),
    "up": ("up", "upwards", "to the top"),
    "down": ("down", "downwards", "to the bottom"),
}
VERBS = {"moving": "moves", "going": "goes", "sliding": "slides", "drifting": "drifts"}
RESTING = ("standing still", "that stands still", "that stays in place", "not moving", "that does not move", "at rest")
MEETING = ("crossing", "cross", "passing each other", "pass each other", "crossing each other", "are crossing")
OPENINGS = ("a video of", "a clip of", "an animation of", "a short film that shows", "show me", "we see", "there is")
GROUNDS = ("on a {} background", "on {}", "against a {} background", "in front of a {} wall", "with {} behind it")
MORE_WORDS = ("colour", "shape", "and", "then", "it", "watch", "here", "look", "while", "plain", "simple", "the same")

TRAINING_SHARE = {"loose": 0.4, "opening": 0.4, "ground": 0.6, "stranger": 0.1, "aside": 0.15, "garbled": 0.3}
"""How often a training sentence is or has what.

loose: its parts in any order. stranger: a word outside the vocabulary. aside: an idle one. garbled: words that do not
matter are left out, or replaced by strangers.
"""
GARBLED = 0.4
"""Of the words that do not matter in a garbled sentence."""
STRANGER = "lorem"

HELD_OUT_SINGLE = (
    "look here: the {colour} {shape} goes {way}, and the background is {ground}",
    "{way}, that is where the {colour} {shape} moves",
    "the shape is a {shape}, the colour is {colour}, and it is drifting {way}",
    "in this clip it slides {way}: one {colour} {shape} on plain {ground}",
)
HELD_OUT_STILL = (
    "look here: the {colour} {shape} stays still, and the background is {ground}",
    "in place, that is where the {colour} {shape} stays",
    "the shape is a {shape}, the colour is {colour}, and it is not moving",
    "in this clip nothing moves: one {colour} {shape} at rest on plain {ground}",
)
HELD_OUT_CROSSING = (
    "look here: the {colour} {shape} goes right while the {colour2} {shape2} goes left, they cross, on {ground}",
    "crossing: one {colour} {shape}, one {colour2} {shape2}",
    "watch it, a {colour} {shape} is passing the {colour2} {shape2}",
    "in this clip two cross, the {colour} {shape} then the {colour2} {shape2}, the background is plain {ground}",
)


def describe(scene: Scene, rng: random.Random) -> str:
    """One of the training sentences for the scene."""
    sentence = _loose(scene, rng) if rng.random() < TRAINING_SHARE["loose"] else _plain(scene, rng)
    return _garble(sentence, scene, rng) if rng.random() < TRAINING_SHARE["garbled"] else sentence


def _plain(scene: Scene, rng: random.Random) -> str:
    said = rng.random
    sentence = _crossing(scene, rng) if scene.motion == CROSSING else _single(scene.things[0], scene.motion, rng)
    if said() < TRAINING_SHARE["opening"]:
        sentence = f"{rng.choice(OPENINGS)} {sentence}"
    if said() < TRAINING_SHARE["ground"]:
        ground = rng.choice(GROUNDS).format(rng.choice((scene.background, f"plain {scene.background}")))
        sentence = rng.choice((f"{sentence} {ground}", f"{sentence}, {ground}", f"{ground}, {sentence}"))
    if said() < TRAINING_SHARE["aside"]:
        sentence = _insert(sentence, rng.choice(MORE_WORDS), rng)
    if said() < TRAINING_SHARE["stranger"]:
        sentence = _insert(sentence, STRANGER, rng)
    return sentence


def _subject(thing: Thing, rng: random.Random) -> str:
    shape = rng.choice(SHAPE_WORDS[thing.shape])
    article = rng.choice(("a", "one", "the", ""))
    forms = (
        f"{article} {thing.colour} {shape}",
        f"{article} {thing.colour} {shape}",
        f"{article} {shape} that is {thing.colour}",
        f"{article} {shape}, {thing.colour}",
    )
    return rng.choice(forms).strip()


def _single(thing: Thing, motion: str, rng: random.Random) -> str:
    subject = _subject(thing, rng)
    if motion == "still":
        return f"{subject} {rng.choice(RESTING)}"
    way, verb = rng.choice(WAYS[motion]), rng.choice(list(VERBS))
    forms = (f"{subject} {verb} {way}", f"{subject} {VERBS[verb]} {way}", f"{subject} that {VERBS[verb]} {way}")
    return rng.choice((*forms, f"{subject} is {verb} {way}"))


def _crossing(scene: Scene, rng: random.Random) -> str:
    first, second = (_subject(thing, rng) for thing in scene.things)
    forms = (
        f"{first} and {second} {rng.choice(MEETING)}",
        f"{first} and {second} {rng.choice(MEETING)}",
        f"{first} crosses {second}",
        f"{first} passes {second}",
        _ways_of_two(first, second, rng),
        f"two shapes {rng.choice(MEETING)}, {first} and {second}",
    )
    return rng.choice(forms)


def _ways_of_two(first: str, second: str, rng: random.Random) -> str:
    verb, link = rng.choice(list(VERBS)), rng.choice(("and", "while", "then"))
    says = rng.choice((verb, VERBS[verb], f"is {verb}", f"that {VERBS[verb]}"))
    return f"{first} {says} {rng.choice(WAYS['right'])} {link} {second} {says} {rng.choice(WAYS['left'])}"


def _loose(scene: Scene, rng: random.Random) -> str:
    """The parts of a sentence in any order, with words between them that say nothing. Two things are joined by a word,
    never by a mark alone.
    """
    subjects = [_subject(thing, rng) for thing in scene.things]
    links = ("and", "while", "then", "and then", "with", "and it moves with")
    parts = [f" {rng.choice(links)} ".join(subjects)]
    parts.insert(rng.randrange(2), _motion(scene.motion, rng))
    if rng.random() < TRAINING_SHARE["ground"]:
        parts.insert(rng.randrange(3), rng.choice(GROUNDS).format(scene.background))
    for _ in range(rng.randrange(4)):
        parts.insert(rng.randrange(len(parts) + 1), rng.choice((*MORE_WORDS, *OPENINGS, STRANGER, STRANGER)))
    return "".join(part + rng.choice((" ", ", ", ". ")) for part in parts).strip(" ,")


def _motion(motion: str, rng: random.Random) -> str:
    if motion in (CROSSING, "still"):
        return rng.choice(MEETING if motion == CROSSING else RESTING)
    verb = rng.choice(list(VERBS))
    return f"{rng.choice((verb, VERBS[verb], f'it {VERBS[verb]}', ''))} {rng.choice(WAYS[motion])}".strip()


def _garble(sentence: str, scene: Scene, rng: random.Random) -> str:
    """Spoil words that a reader does not need: all but colours, shapes and how a lone thing moves."""
    kept = {*COLOURS, *BACKGROUNDS, *(word for words in SHAPE_WORDS.values() for word in words)}
    if scene.motion != CROSSING:
        ways = (*WAYS.get(scene.motion, ()), *(RESTING if scene.motion == "still" else ()))
        kept |= {word for text in ways for word in words_of(text)}
    words = words_of(sentence)
    said = (word if word in kept or rng.random() >= GARBLED else rng.choice(("", STRANGER)) for word in words)
    return " ".join(filter(None, said))


def _insert(sentence: str, word: str, rng: random.Random) -> str:
    """Put a word before the sentence or after it, where it parts no colour from its shape."""
    return rng.choice((f"{word} {sentence}", f"{word}, {sentence}", f"{sentence} {word}", f"{sentence}, {word}"))


def held_out(index: int) -> tuple[str, Scene]:
    """Return prompt `index` (0, 1, ...) of held-out wording, and what it asks for (radius and places mean nothing).

    Any 6 in a row have every motion, any 24 in a row that start at a multiple of 24 every sentence of every motion;
    colours and shapes are drawn evenly.
    """
    rng = random.Random(f"held out {index}")
    motion = MOTIONS[index % len(MOTIONS)]
    form = index // len(MOTIONS) % len(HELD_OUT_SINGLE)
    colours, ground = rng.sample(list(COLOURS), 2), rng.choice(list(BACKGROUNDS))
    things = tuple(Thing(rng.choice(SHAPES), colour, 0, (0, 0), (0, 0)) for colour in colours)
    words = [rng.choice(SHAPE_WORDS[thing.shape]) for thing in things]
    first = {"colour": colours[0], "shape": words[0], "ground": ground}
    if motion == CROSSING:
        prompt = HELD_OUT_CROSSING[form].format(**first, colour2=colours[1], shape2=words[1])
        return prompt, Scene(things, ground, motion)
    if motion == "still":
        return HELD_OUT_STILL[form].format(**first), Scene(things[:1], ground, motion)
    return HELD_OUT_SINGLE[form].format(**first, way=rng.choice(WAYS[motion])), Scene(things[:1], ground, motion)


def words_of(sentence: str) -> list[str]:
    """The words and marks of a sentence, as the tokenizer parts them."""
    return re.findall(r"\w+|[^\w\s]+", sentence.lower())


def vocabulary() -> list[str]:
    """Every word and mark that training sentences use, in alphabetical order."""
    fixed = [*COLOURS, *BACKGROUNDS, *VERBS, *VERBS.values(), *RESTING, *MEETING, *OPENINGS, *GROUNDS, *MORE_WORDS]
    fixed += [word for words in (*SHAPE_WORDS.values(), *WAYS.values()) for word in words]
    fixed += ["a one the that is , . moving right left two shapes crosses passes plain"]
    words = {word for text in fixed for word in words_of(text)}
    return sorted(words - {"{}"})
