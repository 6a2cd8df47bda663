"""Choices of backends out of Python's objects, and out of composed settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from configs.choices import read_choices
from configs.faults import Fault, FaultError
from configs.fields import AGREEMENT, DEFAULT, PER_ROLE, REGISTER, RESERVED, is_block, name_of, split_spec
from configs.frozen import FrozenMapping, frozen
from configs.interpolate import plain_data
from configs.layers import Setting, Written, fault_of, gather, setting_of
from configs.schema import AGREEMENTS, BLOCKS, AttentionConfig, AttentionSpec

_SPEC = "AttentionSpec"


def spec_fields(spec: AttentionSpec) -> dict[str, Any]:
    """The fields of a spec that is being made, checked and copied as plain data; raises `FaultError`."""
    tree = {name: plain_data(getattr(spec, name)) for name in RESERVED}
    tree = {name: value for name, value in tree.items() if value is not None or name in ("backend", "on_unsupported")}
    values = _checked(read_choices((_SPEC,), choice_tree(tree), None, Written("", literal=True)))
    return {name: frozen(value) for name, value in _fields(values)[_SPEC].items()}


def config_fields(config: AttentionConfig, backend: Any) -> dict[str, Any]:
    """The fields of a configuration that is being made, likewise, with dotted roles and whole specs.

    backend: what was given as shorthand for `default`.
    """
    copies = {"register": frozen(_named(plain_data(config.register))), "origins": frozen(config.origins)}
    registered = _registrations(copies["register"])
    if backend is None and _is_normal(config) and not any(isinstance(item, Fault) for item in registered):
        return {"per_role": FrozenMapping(config.per_role), **copies}
    written = Written("", literal=True)
    default = config.default if backend is None else backend
    per_role = choice_tree(config.per_role)
    found = [setting_of(AGREEMENT, config.agreement, None, written), *registered]
    if default is not None:
        found += read_choices(tuple(DEFAULT.split(".")), choice_tree(default), None, written)
    if backend is not None and config.default is not None:
        rule = "is given as default and as backend, which is short for it"
        found.append(Fault(DEFAULT, None, rule, "keep one of the two"))
    found += read_choices(tuple(PER_ROLE.split(".")), {} if per_role is None else per_role, None, written)
    values = _checked(found)
    del values[AGREEMENT]
    specs = assemble({key: value for key, value in values.items() if not key.startswith(f"{REGISTER}.")})
    return {
        "default": specs.pop(DEFAULT, None),
        "per_role": FrozenMapping({key.removeprefix(f"{PER_ROLE}."): spec for key, spec in specs.items()}),
        **copies,
    }


def _named(register: Any) -> Any:
    """Registrations with names in place of members of an Enum; anything else than a mapping is returned unchanged."""
    if not isinstance(register, Mapping):
        return register
    return {name_of(name): path for name, path in register.items()}


def _registrations(register: Any) -> list[Setting | Fault]:
    written = Written("", literal=True)
    if isinstance(register, Mapping) and all(isinstance(name, str) for name in register):
        settings = [setting_of(f"{REGISTER}.{name}", path, None, written) for name, path in register.items()]
        return [*settings, *registered_twice(tuple(register))]
    rule = "is a mapping from names to class paths"
    return [fault_of(REGISTER, register, None, written, rule, 'write {"MINE": "package.module.Class"}')]


def registered_twice(names: Sequence[str], known: Sequence[str] = ()) -> list[Fault]:
    """Faults of names that differ from another one, of `names` or `known`, by upper and lower case alone."""
    found = []
    spellings = {name.casefold(): name for name in known}
    for name in names:
        other = spellings.setdefault(name.casefold(), name)
        if other != name:
            rule = f"differs from {other} by upper and lower case alone"
            found.append(Fault(f"{REGISTER}.{name}", None, rule, "rename one of the two"))
    return found


def assemble(values: Mapping[str, Any]) -> dict[str, AttentionSpec]:
    """Specs by key (`attention.per_role.cross`) out of the values of canonical keys at and below them.

    None leaves a backend or a version out, and where nothing is left there is no spec.
    """
    return {key: AttentionSpec(**fields) for key, fields in _fields(values).items() if fields}


def _fields(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    specs: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        path, rest = split_spec(key.split("."))
        fields = specs.setdefault(".".join(path), {})
        if len(rest) == 2:
            fields.setdefault(rest[0], {})[rest[1]] = value
        elif value is not None:
            fields[rest[0] if rest else "backend"] = value
    return specs


def _checked(found: Iterable[Setting | Fault]) -> dict[str, Any]:
    layer = gather(found)
    if layer.faults:
        raise FaultError(layer.faults)
    return {key: setting.value for key, setting in layer.settings.items() if key != PER_ROLE and not is_block(key)}


def _is_normal(config: AttentionConfig) -> bool:
    """Whether there is nothing to change, as where `dataclasses.replace` makes one configuration out of another."""
    return (
        (config.default is None or isinstance(config.default, AttentionSpec))
        and isinstance(config.per_role, Mapping)
        and all(_is_entry(role, spec) for role, spec in config.per_role.items())
        and config.agreement in AGREEMENTS
    )


def _is_entry(role: Any, spec: Any) -> bool:
    if not isinstance(role, str) or not isinstance(spec, AttentionSpec):
        return False
    return all(name and name not in RESERVED for name in role.split("."))


def choice_tree(value: Any) -> Any:
    """A choice, roles with choices, or a whole configuration, as the tree that a file would give."""
    value = plain_data(value)
    if isinstance(value, Enum):
        return name_of(value)
    if isinstance(value, AttentionSpec):
        return {name: _options(getattr(value, name)) for name in RESERVED if name == "backend" or _is_set(value, name)}
    if isinstance(value, Mapping):
        return {name: _entry(name, item) for name, item in value.items()}
    return value


def _is_set(spec: AttentionSpec, name: str) -> bool:
    return bool(getattr(spec, name) != getattr(AttentionSpec, name))


def _entry(name: Any, item: Any) -> Any:
    _, rest = split_spec(name.split(".")) if isinstance(name, str) else ((), ())
    return _options(item) if rest and rest[0] in BLOCKS else choice_tree(item)


def _options(value: Any) -> Any:
    """An option block, or a field of one. A dataclass has every field, so that None in it says nothing."""
    value = plain_data(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _options({name: item for name, item in dataclasses.asdict(value).items() if item is not None})
    if isinstance(value, Mapping):
        return {name: _options(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value
