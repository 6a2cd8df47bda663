"""One layer of settings: from a tree, as a file or an argument gives it, to dotted keys with checked values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from configs.faults import Fault
from configs.fields import DEFAULT, GROUPS, PER_ROLE, REGISTER, Refusal, check_value, known_keys, unknown_key_remedy
from configs.interpolate import is_interpolated
from configs.values import reads_as_text

PRESET_KEY = "model"


@dataclass(frozen=True)
class Setting:
    """One value for one key.

    key: canonical: `attention.per_role.cross` also for `attention.per_role.cross.backend`. `model` is the preset's
        name, and `attention.per_role` itself stands for "no roles of a lower layer".
    value: what `check_value` made of it; if `pending`, as written, with interpolations to resolve first.
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
    """Where a tree comes from. text: the argument, empty for a file; trusts_code: whether it may name classes."""

    origin: str
    text: str = ""
    trusts_code: bool = False


def gather(found: Iterable[Setting | Fault]) -> Layer:
    """A layer out of settings in any order; one key with two different values is a fault that names both."""
    settings: dict[str, Setting] = {}
    faults: list[Fault] = []
    for item in found:
        if isinstance(item, Fault):
            faults.append(item)
            continue
        first = settings.setdefault(item.key, item)
        if (first.removes, first.value) != (item.removes, item.value):
            rule = f"is given twice, as {first.text} and as {item.text}"
            faults.append(Fault(item.key, None, rule, "keep one of the two", origin=item.origin))
    return Layer(settings, tuple(dict.fromkeys(faults)))


def flatten(path: tuple[str, ...], value: Any, raw: Any, written: Written) -> Iterator[Setting | Fault]:
    """The settings in the tree `value`, which stands at `path`; `raw` is the same tree with scalars as written."""
    key = ".".join(path)
    if path[:2] == ("attention", "per_role"):
        yield from _roles(path, value, raw, written)
    elif path[:2] == ("attention", "register"):
        yield from _registrations(path, value, raw, written)
    elif key in (DEFAULT, f"{DEFAULT}.backend"):
        if key == DEFAULT and isinstance(value, dict) and value:
            yield from _children(path, value, raw, written)
        else:
            yield _setting(DEFAULT, value, raw, written)
    elif key == PRESET_KEY and value is not None and not isinstance(value, dict):
        yield _preset_name(value, raw, written)
    elif key in GROUPS or not path:
        if isinstance(value, dict):
            yield from _children(path, value, raw, written)
        elif value is not None:
            members = ", ".join(known for known in known_keys() if known.startswith(f"{key}."))
            yield _fault(key, value, raw, written, "is a group of keys, not a value", f"set one of {members}")
    elif key in known_keys():
        yield _setting(key, value, raw, written)
    elif isinstance(value, dict) and value:
        yield from _children(path, value, raw, written)
    else:
        yield _fault(key, value, raw, written, "no such key", unknown_key_remedy(key))


def canonical_key(path: tuple[str, ...]) -> str | None:
    """The key of the one setting that `path` spells, or None if there is no such key."""
    key = ".".join(path)
    if (path[:2] == ("attention", "per_role") and len(path) > 3) or key == f"{DEFAULT}.backend":
        return key.removesuffix(".backend")
    if path[:2] in (("attention", "per_role"), ("attention", "register")):
        return key
    return key if key in (*known_keys(), PRESET_KEY) else None


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


def _children(path: tuple[str, ...], value: dict[Any, Any], raw: Any, written: Written) -> Iterator[Setting | Fault]:
    """A mapping's entries; a dotted key in it (`cross.image: X`) is a path."""
    for name, item in value.items():
        if not isinstance(name, str) or not all(name.split(".")):
            rule = f"has the key {render(name)}, which is not text, or not names joined by dots"
            yield Fault(
                ".".join(path) or written.origin, None, rule, "put it in quotes, or rename it", origin=written.origin
            )
            continue
        below = raw.get(name) if isinstance(raw, dict) else None
        yield from flatten((*path, *name.split(".")), item, below, written)


def _roles(path: tuple[str, ...], value: Any, raw: Any, written: Written) -> Iterator[Setting | Fault]:
    role = path[2:]
    if "backend" in role[:-1] or role == ("backend",):
        rule = "has a role that is called backend, which is the key of a role's choice"
        yield _fault(".".join(path), value, raw, written, rule, f"write {PER_ROLE}.ROLE.backend=NAME")
    elif role and role[-1] == "backend":
        yield _setting(".".join(path[:-1]), value, raw, written)
    elif not role and value is None:
        yield Setting(PER_ROLE, None, "null", written.origin, written.text or f"{PER_ROLE}: null")
    elif not isinstance(value, dict):
        if role:
            yield _setting(".".join(path), value, raw, written)
        else:
            remedy = f"write {PER_ROLE}.ROLE=NAME, or {DEFAULT}=NAME for all roles"
            yield _fault(PER_ROLE, value, raw, written, "is a mapping from roles to backends", remedy)
    elif role and not value:
        rule = f"is an empty mapping for the role {'.'.join(role)}"
        yield _fault(".".join(path), value, raw, written, rule, "give it a backend, or leave it out")
    elif role and "backend" in value and len(value) > 1:
        others = ", ".join(str(name) for name in value if name != "backend")
        rule = f"has both a backend and roles below it ({others}) for the role {'.'.join(role)}"
        remedy = f"write the roles as dotted keys, {role[-1]}: NAME and {role[-1]}.ROLE: NAME"
        yield Fault(".".join(path), None, rule, remedy, origin=written.origin)
    else:
        yield from _children(path, value, raw, written)


def _registrations(path: tuple[str, ...], value: Any, raw: Any, written: Written) -> Iterator[Setting | Fault]:
    key = ".".join(path)
    if not written.trusts_code:
        if value not in (None, {}):
            rule = "names code to import, which a file must not do"
            yield _fault(key, value, raw, written, rule, f"give {REGISTER}.NAME=CLASS on the command line")
    elif len(path) == 3:
        yield _setting(key, value, raw, written)
    elif len(path) == 2 and isinstance(value, dict):
        yield from _children(path, value, raw, written)
    else:
        rule = "is not the name of one backend"
        yield _fault(key, value, raw, written, rule, f"write {REGISTER}.NAME=package.module.Class")


def _preset_name(value: Any, raw: Any, written: Written) -> Setting | Fault:
    if isinstance(value, str) and value:
        source = _source(value, raw)
        text = written.text or f"{PRESET_KEY}: {source}"
        return Setting(PRESET_KEY, value, source, written.origin, text, pending=is_interpolated(value))
    return _fault(PRESET_KEY, value, raw, written, "takes the name of a preset", "write its name, such as tiny-wan")


def _setting(key: str, value: Any, raw: Any, written: Written) -> Setting | Fault:
    source = _source(value, raw)
    setting = Setting(key, value, source, written.origin, written.text or f"{key}: {source}", is_interpolated(value))
    if setting.pending:
        return setting
    checked = check_value(key, value, source)
    if isinstance(checked, Refusal):
        return refusal_fault(setting, checked)
    return Setting(key, checked, source, written.origin, setting.text)


def _source(value: Any, raw: Any) -> str:
    return raw if isinstance(raw, str) and raw != value else render(value)


def _fault(key: str, value: Any, raw: Any, written: Written, rule: str, remedy: str) -> Fault:
    return Fault(key or written.origin, _source(value, raw), rule, remedy, origin=written.origin)
