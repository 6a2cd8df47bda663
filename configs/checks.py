"""Checks of one value: `check(value, source)` gives the value to store, converted (3 to 3.0), or a `Refusal`.

`source` is the value as it was written, which is what a number given for a text stands for.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from configs.faults import nearest, shortened


@dataclass(frozen=True)
class Refusal:
    """Why a value is not taken, and the way out; both read on after `key=value:`."""

    rule: str
    remedy: str
    allowed: tuple[str, ...] = ()


Check = Callable[[Any, str], Any]


def whole(minimum: int, maximum: int | None = None, *, example: int = 8) -> Check:
    """A whole number between the two, which count in; True is none."""
    limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    shown = max(minimum, example) if maximum is None else min(max(minimum, example), maximum)

    def check(value: Any, source: str) -> Any:
        if type(value) is int and minimum <= value and (maximum is None or value <= maximum):
            return value
        return Refusal(f"takes a whole number {limits}", f"give one, such as {shown}")

    return check


def real(minimum: float, maximum: float = math.inf, *, above: bool = False) -> Check:
    """A finite number between the two, which count in, but for the minimum if `above`; it is stored as a float."""
    limits = f"above {minimum:g}" if above else f"of at least {minimum:g}"
    limits += "" if maximum == math.inf else f" and at most {maximum:g}"
    example = 3.0 if minimum < 3 <= maximum else minimum + 1 if maximum == math.inf else (minimum + maximum) / 2

    def check(value: Any, source: str) -> Any:
        if type(value) in (int, float):
            try:
                number = float(value)
            except OverflowError:  # an int beyond the largest float
                number = math.inf
            low_enough = math.isfinite(number) and number <= maximum
            if low_enough and (number > minimum if above else number >= minimum):
                return number
        return Refusal(f"takes a finite number {limits}", f"give one, such as {example}")

    return check


def text(*, empty: bool = False) -> Check:
    """Text that a file can hold; a number stands for its digits as they were written."""

    def check(value: Any, source: str) -> Any:
        if type(value) in (int, float):
            value = source
        if not isinstance(value, str):
            return Refusal("takes text", f"put it in quotes, as '{source}'")
        if any(char == "\0" or "\ud800" <= char <= "\udfff" for char in value):
            return Refusal("has a character that is not text", "leave it out")
        if value == "???":
            return Refusal("is marked as still to be set", "set it, or leave it out")
        if not value.strip() and not empty:
            return Refusal("is empty", "give it a value, or leave it out")
        return value

    return check


def path(value: Any, source: str) -> Any:
    """The path of a file or a folder; `~` is the home folder, which shells leave alone behind `key=`."""
    checked = text()(value, source)
    return checked if isinstance(checked, Refusal) else os.path.expanduser(checked)


def switch(value: Any, source: str) -> Any:
    """True or False; a check itself."""
    if isinstance(value, bool):
        return value
    return Refusal("takes true or false", "write one of the two words", ("true", "false"))


def choice(names: tuple[str, ...], others: Mapping[str, str] = MappingProxyType({})) -> Check:
    """One of `names`, as they are spelled there. others: word -> which of them it stands for elsewhere."""

    def check(value: Any, source: str) -> Any:
        if isinstance(value, str) and value in names:
            return value
        meant = others.get(value.casefold(), value) if isinstance(value, str) else value
        return Refusal(f"takes {_listed(names, 'or')}", _near(meant, names), names)

    return check


def subset(names: tuple[str, ...], not_yet: tuple[str, ...] = ()) -> Check:
    """A list of some of `names`, each once, or of none; it is stored as a tuple. not_yet: names of later versions."""

    def check(value: Any, source: str) -> Any:
        takes = f"takes a list of {_listed(names, 'and')}"
        if not isinstance(value, list):
            return Refusal(takes, f"write [{','.join(names)}], or less", names)
        for item in value:
            if item in not_yet:
                return Refusal(f"{takes}; {item} is not available yet", f"leave {item} out", names)
            if item not in names:
                return Refusal(f"{takes}, not {shortened(str(item))}", _near(item, names), names)
        if len(set(value)) != len(value):
            return Refusal("has a name twice in the list", "keep each name once", names)
        return tuple(value)

    return check


def optional(check: Check) -> Check:
    """None, or what `check` takes."""
    return lambda value, source: None if value is None else check(value, source)


def _listed(names: tuple[str, ...], joint: str) -> str:
    return f"{', '.join(names[:-1])} {joint} {names[-1]}" if len(names) > 1 else names[0]


def _near(value: Any, names: tuple[str, ...]) -> str:
    close = nearest(str(value), names)
    return f"did you mean {' or '.join(close)}?" if close else "use one of these names"
