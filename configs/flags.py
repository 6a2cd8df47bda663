"""Attention options in the spelling of serving engines, beside `key=value` overrides.

`--attention-backend NAME`, `--attention-config.PATH VALUE`, `--attention-config JSON`, and `-ac` for
`--attention-config`. They are part of the command line's layer, and each stands for settings below `attention`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from configs.faults import LONGEST_SHOWN, Fault
from configs.fields import DEFAULT, RESERVED
from configs.layers import Setting, Written
from configs.overrides import ORIGIN
from configs.trees import flatten
from configs.values import MAX_DEPTH, Sweep, ValueSyntaxError, parse_value

BACKEND = "--attention-backend"
CONFIG = "--attention-config"
SHORT = "-ac"
_NAMES = (BACKEND, CONFIG, SHORT)
_NAME = re.compile(r"\w[\w-]*")
"""One name in a path, as in the key of an override."""


@dataclass(frozen=True)
class Flag:
    """One option. path: what it names below `attention`. value: None if no value follows the option."""

    name: str
    path: tuple[str, ...]
    value: str | None

    @property
    def option(self) -> str:
        """The option as written, without its value."""
        return ".".join((self.name, *self.path))

    @property
    def words(self) -> tuple[str, ...]:
        """The option and its value as two arguments."""
        return (self.option,) if self.value is None else (self.option, self.value)

    @property
    def text(self) -> str:
        return f"{self.option} {self.value}"


def split(words: Sequence[str], values_follow: Sequence[str] = ()) -> tuple[list[str], list[Flag]]:
    """Part attention options, with the words that are their values, from all other words, which keep their order.

    values_follow: options of others whose next word is a value, whatever it looks like.
    """
    others: list[str] = []
    flags: list[Flag] = []
    rest = list(reversed(words))
    while rest:
        word = rest.pop()
        flag = _flag(word)
        if flag is None:
            others.append(word)
            if word in values_follow and rest:
                others.append(rest.pop())
        elif flag.value is None and rest and not rest[-1].startswith("-"):
            flags.append(Flag(flag.name, flag.path, rest.pop()))
        else:
            flags.append(flag)
    return others, flags


def _flag(word: str) -> Flag | None:
    option, equals, value = word.partition("=")
    name, *path = option.split(".")
    if name not in _NAMES:
        return None
    return Flag(name, tuple(path), value if equals else None)


def settings_of(flags: Sequence[Flag], others: Sequence[Setting | Fault]) -> Iterator[Setting | Fault]:
    """What the options set. others: what the overrides of the same command line set."""
    found = [(flag, item) for flag in flags for item in _settings(flag)]
    yield from (item for _, item in found)
    spellings = [item for flag, item in found if flag.name != BACKEND] + list(others)
    written = [item.text for item in spellings if isinstance(item, Setting) and item.key == DEFAULT]
    for shorthand in (flag for flag in flags if flag.name == BACKEND and written):
        rule = f"is short for {DEFAULT}, and mutually exclusive with {' and '.join(written)}"
        yield Fault(BACKEND, shorthand.value, rule, "keep one of the two", origin=ORIGIN)


def _settings(flag: Flag) -> Iterator[Setting | Fault]:
    if flag.value is None:
        example = '\'{"default": "TORCH_SDPA"}\'' if flag.option in (CONFIG, SHORT) else "TORCH_SDPA"
        yield Fault(flag.option, None, "has no value", f"write {flag.option} {example}", origin=ORIGIN)
    elif flag.name == BACKEND and flag.path:
        remedy = f"write {BACKEND} NAME, or {CONFIG}.{'.'.join(flag.path)} VALUE"
        yield Fault(flag.option, flag.value, "has a path, and takes none", remedy, origin=ORIGIN)
    elif not all(map(_NAME.fullmatch, flag.path)):
        remedy = f"write {CONFIG}.per_role.ROLE NAME, or {BACKEND} NAME"
        yield Fault(flag.option, flag.value, "is not names joined by dots", remedy, origin=ORIGIN)
    elif flag.name == BACKEND or flag.path:
        yield from _path_settings(flag, flag.value)
    else:
        yield from _json_settings(flag, flag.value)


def _path_settings(flag: Flag, text: str) -> Iterator[Setting | Fault]:
    try:
        value = parse_value(text)
    except ValueSyntaxError as error:
        yield Fault(flag.option, text, f"{error.rule} (character {error.at + 1})", error.remedy, origin=ORIGIN)
        return
    if isinstance(value, Sweep):
        yield Fault(flag.option, text, "is a sweep; one run takes one value", "give one value", origin=ORIGIN)
        return
    yield from _flatten(flag, flag.path or ("backend",), value)


def _json_settings(flag: Flag, text: str) -> Iterator[Setting | Fault]:
    remedy = f'write {flag.option} \'{{"default": "NAME", "per_role": {{"cross": "NAME"}}}}\''
    try:
        value = json.loads(text, object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:
        hint = f"; for one backend, {BACKEND} {text}" if text.isidentifier() and len(text) <= LONGEST_SHOWN else ""
        yield Fault(flag.option, text, f"is not JSON ({error})", remedy + hint, origin=ORIGIN)
        return
    if not isinstance(value, dict):
        yield Fault(flag.option, text, "is not a mapping", remedy, origin=ORIGIN)
        return
    if _depth(value) > MAX_DEPTH:
        rule = f"is nested more than {MAX_DEPTH} deep"
        yield Fault(flag.option, text, rule, "write roles as dotted keys", origin=ORIGIN)
        return
    for name, item in value.items():
        path = tuple(name.split("."))
        if all(map(_NAME.fullmatch, path)):
            yield from _flatten(flag, path, item)
        else:
            rule = f"has the key {name!r}, which is not names joined by dots"
            yield Fault(flag.option, text, rule, remedy, origin=ORIGIN)


def _depth(value: Any) -> int:
    """How many mappings and lists stand inside each other; counted level by level, as it may be many."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [below for item in level for below in (item.values() if isinstance(item, dict) else item)]
    return depth


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"it has the key {twice!r} twice")
    return dict(pairs)


def _flatten(flag: Flag, path: tuple[str, ...], value: Any) -> Iterator[Setting | Fault]:
    """path: below `attention`, but for the keys of a choice, which are those of the default."""
    full = ("attention", *(("default",) if path[0] in RESERVED else ()), *path)
    yield from flatten(full, value, value, Written(ORIGIN, flag.text, trusts_code=True))
