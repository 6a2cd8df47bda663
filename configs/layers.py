"""One layer of settings: dotted keys with checked values, and how one is made of what a tree holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from configs.checks import Refusal
from configs.faults import Fault, shortened
from configs.fields import check_value
from configs.interpolate import is_interpolated
from configs.values import reads_as_text

PRESET_KEY = "model"
STILL_TO_BE_SET = "???"
LEFT_OPEN = Refusal("is marked as still to be set", "set it, or leave it out")
Path = tuple[str, ...]


@dataclass(frozen=True)
class Setting:
    """One value for one key.

    key: canonical: `attention.per_role.cross` also for `attention.per_role.cross.backend`. `model` is the preset's
        name; `attention.per_role` itself, or an option block, stands for "nothing below it of a lower layer".
    value: what `check_value` made of it; if `pending`, as written: `???`, or interpolations to resolve first.
    source: the value as written.
    text: the whole setting as written, to tell two of them apart.
    removes: `~key`: take away what lower layers set; `source` is None unless it names the only value to take away.
    """

    key: str
    value: Any
    source: str | None
    origin: str
    text: str
    pending: bool = False
    removes: bool = False


@dataclass(frozen=True)
class Layer:
    """The settings of one origin, by key, and what was wrong with the others."""

    settings: Mapping[str, Setting]
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class Written:
    """Where a tree comes from.

    text: the argument, empty for a file.
    trusts_code: whether it may name classes.
    literal: whether `${...}` in it is plain text.
    """

    origin: str
    text: str = ""
    trusts_code: bool = False
    literal: bool = False


Reader = Callable[[Path, Any, Any, Written], Iterator[Setting | Fault]]
"""(path, value, raw, written): the settings in the tree `value` at `path`; `raw` has its scalars as written."""


def gather(found: Iterable[Setting | Fault]) -> Layer:
    """A layer out of settings in any order; one key with two different values is a fault that names both."""
    settings: dict[str, Setting] = {}
    faults: list[Fault] = []
    for item in found:
        if isinstance(item, Fault):
            faults.append(item)
            continue
        first = settings.setdefault(item.key, item)
        if first.removes != item.removes or not same(first.value, item.value):
            texts = (first.text, item.text)
            if first.text == item.text:  # one argument, such as a JSON, has both
                texts = (f"{first.key}={first.source}", f"{item.key}={item.source}")
            rule = f"is given twice, as {' and as '.join(map(shortened, texts))}"
            faults.append(Fault(item.key, None, rule, "keep one of the two", origin=item.origin))
    return Layer(settings, tuple(dict.fromkeys(faults)))


def render(value: Any) -> str:
    """A value in the spelling of an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(render, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {render(item)}' for name, item in value.items())}}}"
    if isinstance(value, str) and not reads_as_text(value):
        return f"'{value}'"
    return str(value)


def refusal_fault(setting: Setting, refusal: Refusal) -> Fault:
    """The fault of a value that its key does not take."""
    return Fault(setting.key, setting.source, refusal.rule, refusal.remedy, refusal.allowed, setting.origin)


def same(first: Any, second: Any) -> bool:
    """Whether two values are one; unlike `==` it tells 1 from True and from 1.0, and takes NaN for NaN."""
    return repr(first) == repr(second)


def children(path: Path, value: dict[Any, Any], raw: Any, written: Written, read: Reader) -> Iterator[Setting | Fault]:
    """What `read` finds in a mapping's entries; a dotted key in it (`cross.image: X`) is a path."""
    for name, item in value.items():
        if not isinstance(name, str) or not all(name.split(".")):
            rule = f"has the key {render(name)}, which is not text, or not names joined by dots"
            key = ".".join(path) or written.origin
            yield Fault(key, None, rule, "put it in quotes, or rename it", origin=written.origin)
            continue
        below = raw.get(name) if isinstance(raw, dict) else None
        yield from read((*path, *name.split(".")), item, below, written)


def setting_of(key: str, value: Any, raw: Any, written: Written) -> Setting | Fault:
    """The setting of one value, checked unless it has interpolations."""
    source = source_of(value, raw)
    # A higher layer may still set what this one leaves open.
    pending = not written.literal and (_is_left_open(value) or is_interpolated(value))
    setting = Setting(key, value, source, written.origin, written.text or f"{key}: {source}", pending)
    if setting.pending:
        return setting
    checked = LEFT_OPEN if _is_left_open(value) else check_value(key, value, source)
    if isinstance(checked, Refusal):
        return refusal_fault(setting, checked)
    return Setting(key, checked, source, written.origin, setting.text)


def cleared(key: str, written: Written) -> Setting:
    """The setting that takes away what lower layers set below `key`."""
    return Setting(key, None, "null", written.origin, written.text or f"{key}: null")


def fault_of(key: str, value: Any, raw: Any, written: Written, rule: str, remedy: str) -> Fault:
    """The fault of one value, or of a whole tree."""
    return Fault(key or written.origin, source_of(value, raw), rule, remedy, origin=written.origin)


def source_of(value: Any, raw: Any) -> str:
    """A value as it was written: `raw`, where that says more than the value."""
    return raw if isinstance(raw, str) and raw != value else render(value)


def _is_left_open(value: Any) -> bool:
    return isinstance(value, str) and value == STILL_TO_BE_SET
