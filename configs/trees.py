"""From a tree, as a file or an argument gives it, to the settings in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from configs.choices import choice_key, read_choices
from configs.faults import Fault
from configs.fields import GROUPS, REGISTER, is_choice, known_keys, unknown_key
from configs.interpolate import is_interpolated
from configs.layers import PRESET_KEY, Path, Setting, Written, children, fault_of, setting_of, source_of


def flatten(path: Path, value: Any, raw: Any, written: Written) -> Iterator[Setting | Fault]:
    """The settings in the tree `value`, which stands at `path`; `raw` is the same tree with scalars as written."""
    key = ".".join(path)
    if is_choice(f"{key}."):
        yield from read_choices(path, value, raw, written)
    elif path[:2] == ("attention", "register"):
        yield from _registrations(path, value, raw, written)
    elif key == PRESET_KEY and value is not None and not isinstance(value, dict):
        yield _preset_name(value, raw, written)
    elif key in GROUPS or not path:
        if isinstance(value, dict):
            yield from children(path, value, raw, written, flatten)
        elif value is not None:
            members = ", ".join(known for known in known_keys() if known.startswith(f"{key}."))
            yield fault_of(key, value, raw, written, "is a group of keys, not a value", f"set one of {members}")
    elif key in known_keys():
        yield setting_of(key, value, raw, written)
    elif isinstance(value, dict) and value:
        yield from children(path, value, raw, written, flatten)
    else:
        refusal = unknown_key(key, (value, source_of(value, raw)))
        yield fault_of(key, value, raw, written, refusal.rule, refusal.remedy)


def canonical_key(path: Path) -> str | None:
    """The key of the one setting that `path` spells, or None if there is no such key."""
    key = ".".join(path)
    if is_choice(f"{key}."):
        return choice_key(path)
    if path[:2] == ("attention", "register"):
        return key
    return key if key in (*known_keys(), PRESET_KEY) else None


def _registrations(path: tuple[str, ...], value: Any, raw: Any, written: Written) -> Iterator[Setting | Fault]:
    key = ".".join(path)
    if not written.trusts_code:
        if value not in (None, {}):
            rule = "names code to import, which a file must not do"
            yield fault_of(key, value, raw, written, rule, f"give {REGISTER}.NAME=CLASS on the command line")
    elif len(path) == 3:
        yield setting_of(key, value, raw, written)
    elif len(path) == 2 and isinstance(value, dict):
        yield from children(path, value, raw, written, flatten)
    else:
        rule = "is not the name of one backend"
        yield fault_of(key, value, raw, written, rule, f"write {REGISTER}.NAME=package.module.Class")


def _preset_name(value: Any, raw: Any, written: Written) -> Setting | Fault:
    if isinstance(value, str) and value:
        source = source_of(value, raw)
        text = written.text or f"{PRESET_KEY}: {source}"
        return Setting(PRESET_KEY, value, source, written.origin, text, pending=is_interpolated(value))
    return fault_of(PRESET_KEY, value, raw, written, "takes the name of a preset", "write its name, such as tiny-wan")
