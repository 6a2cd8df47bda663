"""The grammar of an override's value: Hydra's surface and values, not YAML 1.1's (`yes`, `010` and `1:30` are text).

value    := [ element { "," element } ]         more than one element is a sweep; nothing at all is ''
element  := sweep | list | dict | quoted | plain
sweep    := "choice(" element { "," element } ")" | "range(" number { "," number } ")"      outermost only
list     := "[" [ element { "," element } ] "]"
dict     := "{" [ key ":" element { "," key ":" element } ] "}"
quoted   := '...' or "..."; a backslash counts only in front of the quote, where it is doubled or escapes the quote
plain    := text without structure characters, unless escaped; ${...} is kept as it is written
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal, DecimalException
from typing import Any

MAX_DEPTH = 32
MAX_RANGE = 10_000

_INT = re.compile(r"[+-]?(0|[1-9](_?[0-9])*)")
_FLOAT = re.compile(
    r"""[+-]?(
        (0|[1-9](_?[0-9])*)? \.[0-9](_?[0-9])* ([eE][+-]?[0-9](_?[0-9])*)?
        | (0|[1-9](_?[0-9])*) \.? ([eE][+-]?[0-9](_?[0-9])*)
        | (0|[1-9](_?[0-9])*) \.
        | inf | nan
    )""",
    re.VERBOSE | re.IGNORECASE,
)
_WORDS = {"null": None, "true": True, "false": False}
_FUNCTION = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\(")
_ESCAPABLE = "\\()[]{}:=,'\"# \t"
_STRUCTURE = "()[]{}='\"#"
_CLOSING = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True)
class Sweep:
    """Several values for one key, of which one run takes one."""

    values: tuple[Any, ...]


class ValueSyntaxError(ValueError):
    """The text is not a value: what is wrong, the way out, and at which character (counted from 0)."""

    def __init__(self, rule: str, remedy: str, at: int) -> None:
        super().__init__(rule, remedy, at)
        self.rule = rule
        self.remedy = remedy
        self.at = at


def parse_value(text: str) -> Any:
    """The value that `text` stands for, or a `Sweep`; raises `ValueSyntaxError`."""
    return _Parser(text).whole()


def primitive(text: str) -> Any:
    """null, true, false (any case), an int, a float, or the text itself; ValueError on an int too long for Python."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def reads_as_text(text: str) -> bool:
    """Whether `text`, unquoted, is text, rather than a number or a word such as null."""
    return not (text.lower() in _WORDS or _INT.fullmatch(text) or _FLOAT.fullmatch(text))


class _Parser:
    """Recursive descent over one value. `close` is the bracket that ends the surrounding group, '' outside of all."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def whole(self) -> Any:
        self.skip_space()
        if self.at == len(self.text):
            return ""
        elements = [self.element("", 0)]
        while self.take(","):
            elements.append(self.element("", 0))
        if len(elements) == 1:
            return elements[0]
        if any(isinstance(element, Sweep) for element in elements):
            raise ValueSyntaxError("mixes choice() or range() with a list of values", "use one of the two", 0)
        return Sweep(tuple(elements))

    def element(self, close: str, depth: int) -> Any:
        """One element; afterwards the position is at a comma, at `close` or at the end."""
        self.skip_space()
        if depth > MAX_DEPTH:
            raise ValueSyntaxError(f"is nested more than {MAX_DEPTH} deep", "flatten it, or quote the value", self.at)
        start = self.text[self.at : self.at + 1]
        if start in ("'", '"') and start:
            value: Any = self.quoted(start)
        elif start == "[":
            value = self.group("[", depth)
        elif start == "{":
            value = self.dictionary(depth)
        elif function := _FUNCTION.match(self.text, self.at):
            value = self.sweep(function[1], close)
        else:
            return self.plain(close)
        self.skip_space()
        if self.at < len(self.text) and self.text[self.at] not in ("," + close):
            raise ValueSyntaxError("has text after a closed quote or bracket", "quote the whole value", self.at)
        return value

    def group(self, opening: str, depth: int) -> list[Any]:
        """The elements between `opening` and its partner."""
        start, close = self.at, _CLOSING[opening]
        self.at += 1
        elements: list[Any] = []
        if self.take(close):
            return elements
        while True:
            elements.append(self.element(close, depth + 1))
            if self.take(close):
                return elements
            self.expect_comma(opening, start)

    def dictionary(self, depth: int) -> dict[str, Any]:
        start = self.at
        self.at += 1
        entries: dict[str, Any] = {}
        if self.take("}"):
            return entries
        while True:
            key = self.dict_key(start)
            if key in entries:
                raise ValueSyntaxError(f"has the key {key} twice in one mapping", "keep one of the two", self.at)
            entries[key] = self.element("}", depth + 1)
            if self.take("}"):
                return entries
            self.expect_comma("{", start)

    def dict_key(self, start: int) -> str:
        """A key is always text, quoted or plain, and ends at a colon."""
        self.skip_space()
        begin = self.at
        if self.text[self.at : self.at + 1] in ("'", '"') and self.at < len(self.text):
            key = self.quoted(self.text[self.at])
        else:
            while self.at < len(self.text) and self.text[self.at] not in _STRUCTURE + ",:":
                self.at += 1
            key = self.text[begin : self.at].strip()
        if self.at == len(self.text):
            raise _unclosed("{", start)
        if not key or not self.take(":"):
            raise ValueSyntaxError("has a mapping entry without KEY: in front", "write {KEY: VALUE}", begin)
        return key

    def sweep(self, name: str, close: str) -> Sweep:
        start = self.at
        if name not in ("choice", "range"):
            raise ValueSyntaxError(
                f"calls {name}(), which does not exist", "use choice() or range(), or quote it", start
            )
        if close:
            raise ValueSyntaxError("has a sweep inside another value", "sweep the whole value, or quote it", start)
        self.at += len(name)
        arguments = self.group("(", 0)
        if not arguments:
            raise ValueSyntaxError(f"has an empty {name}()", f"give {name}() at least one value", start)
        return Sweep(tuple(arguments) if name == "choice" else _range(arguments, start))

    def quoted(self, quote: str) -> str:
        start = self.at
        self.at += 1
        parts: list[str] = []
        while self.at < len(self.text):
            begin = self.at
            while self.text[self.at : self.at + 1] == "\\":
                self.at += 1
            slashes = self.at - begin
            following = self.text[self.at : self.at + 1]
            self.at += 1
            if following != quote:
                parts.append("\\" * slashes + following)
                continue
            parts.append("\\" * (slashes // 2))
            if slashes % 2 == 0:
                return "".join(parts)
            parts.append(quote)
        raise ValueSyntaxError(f"has a quote {quote} that is never closed", "close it, or escape it", start)

    def plain(self, close: str) -> Any:
        """Unquoted text; escapes and interpolations make it a string, otherwise it may be a number or a word."""
        parts: list[str] = []
        kept = 0  # what is behind it is trailing space, which only an escape keeps
        is_text = False
        begin = self.at
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "," or (close and char == close):
                break
            if self.text.startswith("${", self.at):
                parts.append(self.interpolation())
            elif char == "\\" and self.text[self.at + 1 : self.at + 2] in _ESCAPABLE and self.at + 1 < len(self.text):
                parts.append(self.text[self.at + 1])
                self.at += 2
            elif char in _STRUCTURE:
                raise _stray(char, self.at)
            else:
                parts.append(char)
                self.at += 1
                if not char.isspace():
                    kept = len(parts)
                continue
            is_text, kept = True, len(parts)
        if not kept:
            raise ValueSyntaxError("has an empty element", "give it a value, or write '' for empty text", begin)
        text = "".join(parts[:kept])
        if is_text:
            return text
        try:
            return primitive(text)
        except ValueError as error:  # Python's limit on the digits of an int
            raise ValueSyntaxError("is a number with too many digits", "use a smaller number", begin) from error

    def interpolation(self) -> str:
        """`${...}` as written, with its nested braces; braces in quotes do not count."""
        begin = self.at
        self.at += 2
        depth = 1
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in "'\"":
                self.quoted(char)
                continue
            self.at += 1
            depth += (char == "{") - (char == "}")
            if depth == 0:
                return self.text[begin : self.at]
        raise ValueSyntaxError("has a ${ that is never closed", "add the missing }", begin)

    def skip_space(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def take(self, char: str) -> bool:
        self.skip_space()
        found = self.text[self.at : self.at + 1] == char
        self.at += found
        return found

    def expect_comma(self, opening: str, start: int) -> None:
        if not self.take(","):
            raise _unclosed(opening, start)


def _unclosed(opening: str, at: int) -> ValueSyntaxError:
    return ValueSyntaxError(f"has a {opening} that is never closed", f"add the missing {_CLOSING[opening]}", at)


def _stray(char: str, at: int) -> ValueSyntaxError:
    if char in ")]}":
        return ValueSyntaxError(f"has a {char} that was never opened", "remove it, or quote the value", at)
    return ValueSyntaxError(f"has a {char} in unquoted text", "quote the value, or put a backslash in front of it", at)


def _range(arguments: list[Any], at: int) -> tuple[Any, ...]:
    """range(stop), range(start, stop) or range(start, stop, step), as in Python; decimal, as 0.1 has no float."""
    if len(arguments) > 3 or any(isinstance(a, bool) or not isinstance(a, int | float) for a in arguments):
        raise ValueSyntaxError("has a range() of other than one to three numbers", "write range(START,STOP,STEP)", at)
    too_many = ValueSyntaxError(f"has a range() of no values, or of more than {MAX_RANGE}", "change its limits", at)
    try:
        if all(isinstance(argument, int) for argument in arguments):
            whole = range(*arguments)
            if not 0 < len(whole) <= MAX_RANGE:
                raise too_many
            return tuple(whole)
        numbers = [Decimal(str(argument)) for argument in arguments]
        start, stop = (Decimal(0), numbers[0]) if len(numbers) == 1 else numbers[:2]
        step = numbers[2] if len(numbers) == 3 else Decimal(1)
        count = ((stop - start) / step).to_integral_value(ROUND_CEILING)
        if not 0 < count <= MAX_RANGE:
            raise too_many
        return tuple(float(start + index * step) for index in range(int(count)))
    except OverflowError as error:  # more values than a length can say
        raise too_many from error
    except (DecimalException, ValueError) as error:
        if error is too_many:
            raise
        raise ValueSyntaxError(
            "has a range() that never ends", "use finite limits and a step other than 0", at
        ) from error
