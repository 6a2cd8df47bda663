"""The choices of backends in a tree: at and below `attention.default` and `attention.per_role`.

A mapping that has one of the reserved keys (`backend`, `quant`, ...) is a choice, any other one holds roles. The
backend of a choice, its version, and each field of its option blocks are settings of their own, so that arguments and
layers merge by field; the backend's key is that of the choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from configs.faults import Fault, nearest
from configs.fields import DEFAULT, PER_ROLE, RESERVED, split_spec
from configs.layers import Path, Setting, Written, children, cleared, fault_of, setting_of
from configs.schema import BLOCKS

_DEFAULT = tuple(DEFAULT.split("."))
_ROLES = tuple(PER_ROLE.split("."))


def read_choices(path: Path, value: Any, raw: Any, written: Written) -> Iterator[Setting | Fault]:
    """The settings in the tree `value` at `path`, as `configs.layers.Reader` has it.

    `path` may also start with one name of another place where a choice stands, for that one's faults.
    """
    spec, rest = split_spec(path)
    if spec == _ROLES and not rest:
        yield from _roles(path, value, raw, written)
    elif spec[:2] == _DEFAULT and len(spec) > 2:
        yield fault_of(".".join(path), value, raw, written, "no such key", _word_remedy(spec[2]))
    elif not rest:
        yield from _choice(path, value, raw, written)
    elif spec == _ROLES or (rest[0] not in BLOCKS and len(rest) > 1):
        yield _misplaced(path, value, raw, written)
    elif rest[0] in BLOCKS:
        yield from _block(path, value, raw, written)
    else:
        yield setting_of(".".join(spec if rest == ("backend",) else path), value, raw, written)


def choice_key(path: Path) -> str | None:
    """The canonical key of what `path` spells at or below one of the two, or None if there is no such key."""
    spec, rest = split_spec(path)
    if (spec == _ROLES and rest) or (spec[:2] == _DEFAULT and len(spec) > 2):
        return None
    if rest == ("backend",):
        return ".".join(spec)
    is_key = len(rest) < 2 or (rest[0] in BLOCKS and len(rest) == 2)
    return ".".join(path) if is_key else None


def _roles(path: Path, value: Any, raw: Any, written: Written) -> Iterator[Setting | Fault]:
    if value is None:
        yield cleared(PER_ROLE, written)
    elif isinstance(value, dict):
        yield from children(path, value, raw, written, read_choices)
    else:
        remedy = f"write {PER_ROLE}.ROLE=NAME, or {DEFAULT}=NAME for all roles"
        yield fault_of(PER_ROLE, value, raw, written, "is a mapping from roles to backends", remedy)


def _choice(path: Path, value: Any, raw: Any, written: Written) -> Iterator[Setting | Fault]:
    key = ".".join(path)
    if not isinstance(value, dict):
        yield setting_of(key, value, raw, written)
        return
    if not value:
        rule = f"is an empty mapping for the role {_role(path)}" if path[:2] == _ROLES else "is an empty mapping"
        yield fault_of(key, value, raw, written, rule, "give it a backend, or leave it out")
        return
    words = [name for name in value if str(name).partition(".")[0] in RESERVED]
    others = [str(name) for name in value if name not in words]
    if words and others and path[:2] == _ROLES:
        rule = f"has {', '.join(others)} beside the keys of a choice, for the role {_role(path)}"
        yield Fault(key, None, rule, _others_remedy(path[-1], others), origin=written.origin)
        value = {name: value[name] for name in words}
    yield from children(path, value, raw, written, read_choices)


def _block(path: Path, value: Any, raw: Any, written: Written) -> Iterator[Setting | Fault]:
    """An option block, or a field of one."""
    key, (spec, (block, *names)) = ".".join(path), split_spec(path)
    if len(names) > 1:
        remedy = f"write {'.'.join((*spec, block, names[0]))}=VALUE"
        yield fault_of(key, value, raw, written, "is below a field, which takes a scalar or a list of scalars", remedy)
    elif names:
        yield setting_of(key, value, raw, written)
    elif value is None:
        yield cleared(key, written)
    elif not isinstance(value, dict):
        yield fault_of(key, value, raw, written, "is a mapping from fields to values", f"write {key}.FIELD=VALUE")
    elif not value:
        rule = f"is an empty mapping for {block}"
        yield fault_of(key, value, raw, written, rule, f"write {key}.FIELD=VALUE, or leave it out")
    else:
        yield from children(path, value, raw, written, read_choices)


def _misplaced(path: Path, value: Any, raw: Any, written: Written) -> Fault:
    """The fault of a reserved key that is used as a role, or has something below it that is none of its fields."""
    spec, (word, *_) = split_spec(path)
    usual = f"{word}.FIELD" if word in BLOCKS else word
    if path[:2] == _ROLES:
        rule = f"has a role that is called {word}, which is a key of a role's choice"
        return fault_of(".".join(path), value, raw, written, rule, f"write {PER_ROLE}.ROLE.{usual}=VALUE")
    rule = f"is below {word}, which takes one value"
    return fault_of(".".join(path), value, raw, written, rule, f"write {'.'.join(spec)}.{usual}=VALUE")


def _role(path: Path) -> str:
    return ".".join(path[2:])


def _word_remedy(name: str) -> str:
    close = nearest(name, RESERVED)
    keys = [f"{DEFAULT}.{word}{'.FIELD' if word in BLOCKS else ''}" for word in close or RESERVED]
    return f"did you mean {' or '.join(keys)}?" if close else f"use one of {', '.join(keys)}"


def _others_remedy(role: str, others: list[str]) -> str:
    """The way out for keys beside the reserved ones: a typo of one of these, or roles."""
    close = [(name, nearest(name.partition(".")[0], RESERVED, count=1)) for name in others]
    meant = [f"{words[0]} for {name.partition('.')[0]}" for name, words in close if words]
    roles = f"put the backend's options below {', '.join(BLOCKS)}; write roles as {role}: NAME and {role}.ROLE: NAME"
    if not meant:
        return roles
    return f"did you mean {' and '.join(meant)}?" + (f" Otherwise {roles}" if len(meant) < len(others) else "")
