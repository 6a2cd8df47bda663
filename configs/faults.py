"""The one shape in which anything is refused, on every floor."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

LONGEST_SHOWN = 80
"""How many characters of a value a message shows; the fault's attribute has all of them."""
_LONG_WORD = re.compile(r"\S{200,}")
"""No rule has such a word of its own: it repeats a part of a value or a key."""


@dataclass(frozen=True)
class Fault:
    """One thing that cannot be served.

    key: the dotted key, or the name of the fact, that is at fault (`attention.per_role.self`).
    value: the offending value as the user wrote it; None if the fault is not about a value.
    rule: what was broken, as a clause (`head size 80 is not supported; it takes 64, 128`).
    remedy: the way out, as an imperative clause (`use TORCH_SDPA, or leave it on auto`).
    allowed: the values that would have been accepted, when they can be listed.
    origin: where the value came from (`command line`, `my.yaml`, `environment`, `preset tiny-wan`, `default`).
    """

    key: str
    value: Any
    rule: str
    remedy: str
    allowed: tuple[str, ...] = ()
    origin: str = ""

    def __hash__(self) -> int:
        return hash((self.key, self.rule, self.remedy, self.origin))  # the value may be a list

    def __str__(self) -> str:
        value = None if self.value is None else str(self.value)
        subject = shortened(self.key) if value is None else f"{shortened(self.key)}={shortened(value)}"
        clause = f"{self.rule}; {self.remedy}"
        if value is not None and len(value) > LONGEST_SHOWN:  # a clause may repeat it
            clause = clause.replace(value, shortened(value))
        clause = _LONG_WORD.sub(lambda word: shortened(word[0]), clause)
        origin = f" [{self.origin}]" if self.origin else ""
        return f"{subject}: {clause}{origin}"


class FaultError(Exception):
    """A request that cannot be served, with every fault that was found.

    It survives pickling: the exception is rebuilt from its faults, and its other attributes are put back.
    """

    exit_code = 2

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults: tuple[Fault, ...] = tuple(faults)
        super().__init__(self.faults)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.faults,), dict(self.__dict__))

    def __str__(self) -> str:
        return "\n".join(str(fault) for fault in self.faults)


def shortened(text: str) -> str:
    """The text as a message shows it: one longer than 80 characters loses its end."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> tuple[str, ...]:
    """Up to `count` of `known` that look like `name`, best first; case does not matter."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    if name.casefold() in by_folded:
        return (by_folded[name.casefold()],)
    matches = difflib.get_close_matches(name.casefold(), by_folded, n=count, cutoff=0.6)
    return tuple(by_folded[match] for match in matches)


def unknown_name_remedy(name: str, known: Sequence[str]) -> str:
    """`did you mean X?`, or the list of all known names when nothing is near."""
    close = nearest(name, known)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"use one of {', '.join(known)}"
