"""One run's configuration out of its layers, or everything that is wrong with them, at once.

Layers, each of which replaces the ones before it, key by key: the dataclasses' defaults, a packaged preset, the user's
YAML file, the command line. A backend that a layer sets takes away the options that lower layers gave that choice. The
environment's one variable sets `attention.default` only if none of these does.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from configs.checks import Refusal
from configs.faults import Fault, unknown_name_remedy
from configs.fields import (
    AGREEMENT,
    DEFAULT,
    PER_ROLE,
    REGISTER,
    check_value,
    is_block,
    is_choice,
    known_keys,
    owners,
    split_spec,
)
from configs.interpolate import Unresolved, resolve
from configs.layers import PRESET_KEY, Layer, Setting, refusal_fault, render, same
from configs.mapping import SECTIONS, plain, to_mapping
from configs.schema import AttentionConfig, RunConfig
from configs.sources import (
    DEFAULT_PRESET,
    command_line_layer,
    environment_layer,
    file_layer,
    preset_layer,
    presets,
)
from configs.specs import assemble

__all__ = ["compose", "known_keys", "presets", "to_mapping"]

PROMPT = "generate.prompt"


def compose(
    arguments: Sequence[str] = (), *, file: Path | None = None, environ: Mapping[str, str] | None = None
) -> tuple[RunConfig | None, tuple[Fault, ...]]:
    """The configuration that `arguments` ask for on top of `file`, or None and every fault.

    arguments: overrides (`configs.overrides`) and attention options (`configs.flags`), in any order.
    environ: what `DIFFUSION_ATTENTION_BACKEND` and `${oc.env:NAME}` are read from; None is the process's environment.
    """
    command_line = command_line_layer(arguments)
    from_file = Layer({}, ()) if file is None else file_layer(file)
    file_is_lost = isinstance(from_file, Fault)
    if isinstance(from_file, Fault):
        from_file = Layer({}, (from_file,))
    preset_name, preset_faults = _preset_name((command_line, from_file), environ)
    preset = preset_layer(preset_name)
    environment = environment_layer(os.environ if environ is None else environ)

    merged: dict[str, Setting] = dict(preset.settings)
    faults = [*preset.faults, *from_file.faults, *preset_faults, *environment.faults, *command_line.faults]
    faults += _apply(from_file, merged, preset)
    faults += _apply(command_line, merged, preset)
    for key, setting in environment.settings.items():
        merged.setdefault(key, setting)
    merged.pop(PRESET_KEY, None)

    values, unresolved = _resolved(merged, environ)
    faults += unresolved
    if not file_is_lost:  # its keys are not missing, they are unread
        faults += _missing(values, faults, preset_name)
    if faults:
        return None, tuple(dict.fromkeys(faults))
    return _build(values, merged), ()


def _preset_name(layers: Sequence[Layer], environ: Mapping[str, str] | None) -> tuple[str, list[Fault]]:
    """The preset that the highest layer names; with a fault, the default one, so that the rest can be checked."""
    setting = next((layer.settings[PRESET_KEY] for layer in layers if PRESET_KEY in layer.settings), None)
    if setting is None or setting.removes:
        return DEFAULT_PRESET, []
    name = setting.value
    if setting.pending:
        name = resolve({(PRESET_KEY,): name}, [(PRESET_KEY,)], environ)[(PRESET_KEY,)]
        if isinstance(name, Unresolved):
            return DEFAULT_PRESET, [_unresolved_fault(setting, name)]
    if name in presets():
        return str(name), []
    remedy = unknown_name_remedy(str(name), presets())
    return DEFAULT_PRESET, [Fault(PRESET_KEY, str(name), "no such preset", remedy, presets(), setting.origin)]


def _apply(layer: Layer, merged: dict[str, Setting], preset: Layer) -> Iterator[Fault]:
    """Puts a layer on top of `merged`, in place; what its removals do not find is a fault."""
    below = dict(merged)
    for key in below:
        if any(owner in layer.settings for owner in owners(key)):
            del merged[key]
    for key, setting in layer.settings.items():
        if setting.removes and key not in (PER_ROLE, PRESET_KEY):
            yield from _removal_faults(setting, below)
            merged.pop(key, None)
            if key in preset.settings:
                merged[key] = preset.settings[key]
        elif key not in (PER_ROLE, PRESET_KEY) and not is_block(key):
            merged[key] = setting


def _removal_faults(setting: Setting, below: Mapping[str, Setting]) -> Iterator[Fault]:
    """What is wrong with `~key` over the settings `below` it."""
    key = setting.key
    lower = below.get(key)
    value = lower.value if lower else _DEFAULTS.get(key)
    if lower is None and key not in known_keys() and not any(key in owners(name) for name in below):
        entries = ", ".join(f"~{name}" for name in below if name not in known_keys())
        remedy = f"leave it out, or use {entries}" if entries else "leave it out"
        yield Fault(f"~{key}", None, "no entry to remove", remedy, origin=setting.origin)
    elif setting.source is not None and not same(value, setting.value):
        rule = f"does not match the value to remove, {lower.source if lower else render(plain(key, value))}"
        yield Fault(f"~{key}", setting.source, rule, f"write ~{key}, without a value", origin=setting.origin)


def _resolved(merged: Mapping[str, Setting], environ: Mapping[str, str] | None) -> tuple[dict[str, Any], list[Fault]]:
    """Every setting's value, interpolations resolved and checked; keys whose interpolation fails are left out."""
    values = {key: setting.value for key, setting in merged.items() if not setting.pending}
    pending = {key: setting for key, setting in merged.items() if setting.pending}
    if not pending:
        return values, []
    tree = {_node(key): plain(key, value) for key, value in {**_DEFAULTS, **values}.items()}
    tree |= {_node(key): setting.value for key, setting in pending.items()}
    resolved = resolve(tree, [_node(key) for key in pending], environ)
    faults: list[Fault] = []
    for key, setting in pending.items():
        value = resolved[_node(key)]
        if isinstance(value, Unresolved):
            faults.append(_unresolved_fault(setting, value))
            continue
        if _is_backend(key) and isinstance(value, dict) and "backend" in value:
            value = value["backend"]  # it points at a whole choice
        checked = check_value(key, value, render(value))
        if isinstance(checked, Refusal):
            remedy = checked.remedy
            if isinstance(value, str) and (key in _NUMBERS or (is_choice(key) and key.endswith(".version"))):
                remedy = "wrap it as ${oc.decode:...}, which reads text as a number"
            refusal = Refusal(f"{checked.rule}, and resolves to {value!r}", remedy, checked.allowed)
            faults.append(refusal_fault(setting, refusal))
        else:
            values[key] = checked
    return {key: values[key] for key in merged if key in values}, faults


def _node(key: str) -> tuple[str, ...]:
    """Where a key stands in the tree of interpolations; a choice is a mapping there, as options and roles are below."""
    path = tuple(key.split("."))
    return (*path, "backend") if _is_backend(key) else path


def _is_backend(key: str) -> bool:
    return is_choice(key) and not split_spec(key.split("."))[1]


def _unresolved_fault(setting: Setting, unresolved: Unresolved) -> Fault:
    rule = f"cannot be resolved ({unresolved.reason})"
    remedy = "set what it points at, or write the value itself (\\${ is a plain ${)"
    return Fault(setting.key, setting.source, rule, remedy, origin=setting.origin)


def _missing(values: Mapping[str, Any], faults: Sequence[Fault], preset_name: str) -> list[Fault]:
    """The keys without a value and without a default, unless a fault speaks of them already."""
    reported = {fault.key for fault in faults}
    missing: list[Fault] = []
    if PROMPT not in reported and not (values.get(PROMPT) or "").strip():
        rule = "is empty" if values.get(PROMPT) is not None else "is not set"
        missing.append(Fault(PROMPT, None, rule, 'add --prompt "..."'))
    for key in known_keys():
        if key not in values and key not in _DEFAULTS and key not in reported and key != PROMPT:
            remedy = "add model.path=FOLDER, a local diffusers folder" if key == "model.path" else f"add {key}=VALUE"
            missing.append(Fault(key, None, f"is not set, and preset {preset_name} does not set it", remedy))
    return missing


def _build(values: Mapping[str, Any], merged: Mapping[str, Setting]) -> RunConfig:
    sections = {section: schema(**dict(_below(values, section))) for section, schema in SECTIONS.items()}
    specs = assemble({key: value for key, value in values.items() if is_choice(key)})
    attention = AttentionConfig(
        default=specs.pop(DEFAULT, None),
        per_role=dict(_below(specs, PER_ROLE)),
        register=dict(_below(values, REGISTER)),
        origins={
            key: merged[key].origin
            for key, value in values.items()
            if value is not None and (is_choice(key) or key == AGREEMENT)
        },
        agreement=values.get(AGREEMENT, _DEFAULTS[AGREEMENT]),
    )
    return RunConfig(attention=attention, **sections)


def _below(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    return ((key.removeprefix(f"{prefix}."), value) for key, value in values.items() if key.startswith(f"{prefix}."))


_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        f"{section}.{field.name}": field.default
        for section, schema in {**SECTIONS, "attention": AttentionConfig}.items()
        for field in dataclasses.fields(schema)
        if field.default is not dataclasses.MISSING
    }
)
_NUMBERS = frozenset(
    f"{section}.{field.name}"
    for section, schema in SECTIONS.items()
    for field in dataclasses.fields(schema)
    if "int" in str(field.type) or "float" in str(field.type)
)
