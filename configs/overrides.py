"""One command-line override, `a.b=1`, `+a.b=1`, `~a.b` or `~a.b=1`; the grammar of its value is in `configs.values`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from configs.faults import Fault, FaultError
from configs.values import Sweep, ValueSyntaxError, parse_value

ORIGIN = "command line"

_KEY = re.compile(r"\w[\w-]*(\.\w[\w-]*)*")
_MARKS: tuple[tuple[str, Literal["set", "add", "remove"]], ...] = (
    ("++", "add"),
    ("+", "add"),
    ("~", "remove"),
    ("", "set"),
)


@dataclass(frozen=True)
class Override:
    """What one argument asks for.

    op: `set` (`a=1`), `add` (`+a=1`, also `++a=1`) or `remove` (`~a`, or `~a=1`: only if it is 1).
    value: None, bool, int, float, str, list or dict; None if `sweep` is given. `${...}` is kept as text.
    sweep: the values of `a=1,2`, `a=choice(1,2)` or `a=range(1,8,2)`; None for a single value.
    text: the whole argument, as written.
    """

    op: Literal["set", "add", "remove"]
    path: tuple[str, ...]
    value: Any
    sweep: tuple[Any, ...] | None
    text: str

    @property
    def key(self) -> str:
        """The dotted path."""
        return ".".join(self.path)

    @property
    def source(self) -> str | None:
        """The value as written (`1_000`, `'a, b'`), or None if there is no `=` (`~a`)."""
        _, equals, source = self.text.partition("=")
        return source.strip() if equals else None


def parse_override(text: str, position: int = 0) -> Override:
    """The override that `text` stands for; `position` is its index among the arguments, for the error text.

    Raises `FaultError` with one fault, and nothing else, on any other text.
    """
    mark, op = next((mark, op) for mark, op in _MARKS if text.startswith(mark))
    key, equals, source = text[len(mark) :].partition("=")
    place = f"argument {position + 1}"
    if not text.strip():
        raise _fault("''", None, f"is empty ({place})", "write KEY=VALUE, or leave it out")
    if not key:
        raise _fault(text, None, f"has no key ({place})", "write KEY=VALUE")
    if not _KEY.fullmatch(key):
        raise _fault(
            text, None, f"has a key that is not names joined by dots ({place})", "write KEY=VALUE, such as run.seed=1"
        )
    if op != "remove" and not equals:
        raise _fault(text, None, f"has no value ({place})", f"write {key}=VALUE, or {key}= for empty text")
    try:
        value = parse_value(source) if equals else None
    except ValueSyntaxError as error:
        character = len(text) - len(source) + error.at + 1
        rule = f"{error.rule} ({place}, character {character})"
        raise _fault(key, source, rule, error.remedy) from error
    if isinstance(value, Sweep):
        return Override(op, tuple(key.split(".")), None, value.values, text)
    return Override(op, tuple(key.split(".")), value, None, text)


def quote(text: str) -> str:
    """`text` as an override's value that composes to exactly `text`, whatever quotes and `${` are in it."""
    body = re.sub(r"(\\*)('|\Z)", lambda run: run[1] * 2 + ("\\'" if run[2] else ""), escape_interpolations(text))
    return f"'{body}'"


def escape_interpolations(text: str) -> str:
    """What OmegaConf resolves to `text`: `${` becomes `\\${`, and backslashes in front of it are doubled."""
    return re.sub(r"(\\*)\$\{", lambda run: run[1] * 2 + r"\${", text)


def _fault(key: str, value: str | None, rule: str, remedy: str) -> FaultError:
    return FaultError([Fault(key, value, rule, remedy, origin=ORIGIN)])
