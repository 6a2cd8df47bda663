"""Puts layers on top of each other, key by key, resolves interpolations, and builds the attention configuration."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from configs.checks import Refusal
from configs.faults import Fault, shortened
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
from configs.layers import LEFT_OPEN, PRESET_KEY, STILL_TO_BE_SET, Layer, Setting, refusal_fault, render, same
from configs.mapping import SECTIONS, plain
from configs.schema import AttentionConfig
from configs.specs import assemble

ENVIRONMENT_RANK = -1


@dataclass(frozen=True)
class Merged:
    """What the layers come to.

    values: each key's value, without the keys whose value is at fault.
    settings: the setting that each value came from.
    ranks: the index of the layer that set a key; `ENVIRONMENT_RANK` for the environment.
    faults: removals that found nothing, and interpolations that could not be resolved.
    """

    values: Mapping[str, Any]
    settings: Mapping[str, Setting]
    ranks: Mapping[str, int]
    faults: tuple[Fault, ...]

    def __getitem__(self, key: str) -> Any:
        return self.values.get(key, DEFAULTS[key])


def merge(layers: Sequence[Layer], environment: Layer, environ: Mapping[str, str] | None) -> Merged:
    """Merge layers, the lowest first.

    Args:
        layers: the first is the preset, to whose values a removal returns a key.
        environment: its settings count where no layer has the key.
        environ: what `${oc.env:NAME}` reads; None is the process's environment.
    """
    merged: dict[str, Setting] = {}
    ranks: dict[str, int] = {}
    faults: list[Fault] = []
    for rank, layer in enumerate(layers):
        before = dict(merged)
        faults += _apply(layer, merged, layers[0])
        changed = (key for key, setting in merged.items() if before.get(key) is not setting)
        ranks |= {key: 0 if merged[key] is layers[0].settings.get(key) else rank for key in changed}
    for key, setting in environment.settings.items():
        if key not in merged:
            merged[key], ranks[key] = setting, ENVIRONMENT_RANK
    merged.pop(PRESET_KEY, None)
    ranks = {key: ranks[key] for key in merged}
    values, unresolved = _resolved(merged, environ)
    return Merged(values, merged, ranks, (*faults, *unresolved))


def attention_of(merged: Merged) -> AttentionConfig:
    """The attention configuration of settings without faults."""
    specs = assemble({key: value for key, value in merged.values.items() if is_choice(key)})
    return AttentionConfig(
        default=specs.pop(DEFAULT, None),
        per_role=dict(below(specs, PER_ROLE)),
        register=dict(below(merged.values, REGISTER)),
        origins={
            key: merged.settings[key].origin
            for key, value in merged.values.items()
            if value is not None and (is_choice(key) or key == AGREEMENT)
        },
        agreement=merged[AGREEMENT],
        may_be_unused=frozenset(_may_be_unused(merged)),
    )


def below(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """What stands below `prefix`, by the rest of its key."""
    return ((key.removeprefix(f"{prefix}."), value) for key, value in values.items() if key.startswith(f"{prefix}."))


def unresolved_fault(setting: Setting, unresolved: Unresolved) -> Fault:
    """The fault of an interpolation without a value."""
    rule = f"cannot be resolved ({unresolved.reason})"
    remedy = "set what it points at, or write the value itself (\\${ is a plain ${)"
    return Fault(setting.key, setting.source, rule, remedy, origin=setting.origin)


def _may_be_unused(merged: Merged) -> Iterator[str]:
    """Choices that a higher layer replaced role by role, that another value points at, or that are a last resort."""
    roles = {key: merged.ranks[key] for key in merged.values if key.startswith(f"{PER_ROLE}.") and _is_backend(key)}
    pointers = [(key, str(setting.value)) for key, setting in merged.settings.items() if setting.pending]
    for key in [*roles, DEFAULT]:
        own = [rank for name, rank in merged.ranks.items() if key == name or key in owners(name)]
        if not own:
            continue
        highest = max(own)
        is_replaced = highest == ENVIRONMENT_RANK or any(rank > highest for rank in roles.values())
        pattern = re.compile(rf"(?<![\w.]){re.escape(key)}(?![\w-])")
        if is_replaced or any(name != key and pattern.search(text) for name, text in pointers):
            yield key


def _apply(layer: Layer, merged: dict[str, Setting], preset: Layer) -> Iterator[Fault]:
    """Puts a layer on top of `merged`, in place; what its removals do not find is a fault."""
    before = dict(merged)
    for key in before:
        if any(owner in layer.settings for owner in owners(key)):
            del merged[key]
    for key, setting in layer.settings.items():
        if setting.removes and key not in (PER_ROLE, PRESET_KEY):
            yield from _removal_faults(setting, before)
            merged.pop(key, None)
            if key in preset.settings:
                merged[key] = preset.settings[key]
        elif key not in (PER_ROLE, PRESET_KEY) and not is_block(key):
            merged[key] = setting


def _removal_faults(setting: Setting, lower_layers: Mapping[str, Setting]) -> Iterator[Fault]:
    """What is wrong with `~key` over the settings of lower layers."""
    key = setting.key
    lower = lower_layers.get(key)
    value = lower.value if lower else DEFAULTS.get(key)
    if lower is None and key not in known_keys() and not any(key in owners(name) for name in lower_layers):
        entries = ", ".join(f"~{name}" for name in lower_layers if name not in known_keys())
        remedy = f"leave it out, or use {entries}" if entries else "leave it out"
        yield Fault(f"~{key}", None, "no entry to remove", remedy, origin=setting.origin)
    elif setting.source is not None and not same(value, setting.value):
        set_to = lower.source if lower else render(plain(key, value))
        rule = f"does not match the value to remove, {shortened(str(set_to))}"
        yield Fault(f"~{key}", setting.source, rule, f"write ~{key}, without a value", origin=setting.origin)


def _resolved(merged: Mapping[str, Setting], environ: Mapping[str, str] | None) -> tuple[dict[str, Any], list[Fault]]:
    """Every setting's value, interpolations resolved and checked; keys whose interpolation fails are left out."""
    values = {key: setting.value for key, setting in merged.items() if not setting.pending}
    pending = {key: setting for key, setting in merged.items() if setting.pending}
    if not pending:
        return values, []
    tree = {_node(key): plain(key, value) for key, value in {**DEFAULTS, **values}.items()}
    tree |= {_node(key): setting.value for key, setting in pending.items()}
    resolved = resolve(tree, [_node(key) for key in pending], environ)
    faults: list[Fault] = []
    for key, setting in pending.items():
        value = resolved[_node(key)]
        if setting.value == STILL_TO_BE_SET:
            faults.append(refusal_fault(setting, LEFT_OPEN))
            continue
        if isinstance(value, Unresolved):
            faults.append(unresolved_fault(setting, value))
            continue
        if _is_backend(key) and isinstance(value, dict) and "backend" in value:
            value = value["backend"]  # it points at a whole choice
        checked = check_value(key, value, render(value))
        if isinstance(checked, Refusal):
            remedy = checked.remedy
            if isinstance(value, str) and (key in NUMBERS or (is_choice(key) and key.endswith(".version"))):
                remedy = "wrap it as ${oc.decode:...}, which reads text as a number"
            refusal = Refusal(f"{checked.rule}, and resolves to {shortened(repr(value))}", remedy, checked.allowed)
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


DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        f"{section}.{field.name}": field.default
        for section, schema in {**SECTIONS, "attention": AttentionConfig}.items()
        for field in dataclasses.fields(schema)
        if field.default is not dataclasses.MISSING
    }
)
NUMBERS = frozenset(
    f"{section}.{field.name}"
    for section, schema in SECTIONS.items()
    for field in dataclasses.fields(schema)
    if "int" in str(field.type) or "float" in str(field.type)
)
