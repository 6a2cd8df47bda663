"""A configuration as plain data, which a file can hold and which composes back to it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from configs.overrides import escape_interpolations
from configs.schema import (
    AUTO,
    AttentionSpec,
    ClusterConfig,
    GenerateConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    RunSettings,
)

SECTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "model": ModelConfig,
        "generate": GenerateConfig,
        "parallel": ParallelConfig,
        "cluster": ClusterConfig,
        "run": RunSettings,
    }
)
"""The groups of keys whose dataclasses have one field for each key; `attention` has open-ended ones."""

# Such text is a number to OmegaConf's YAML 1.2, and text to PyYAML's 1.1, which therefore does not quote it.
_EXPONENT = re.compile(r"[+-]?[0-9][0-9_]*\.?[0-9_]*[eE][+-]?[0-9]+")


def to_mapping(config: RunConfig) -> dict[str, Any]:
    """The whole configuration as plain data; as YAML it is a `file` for `compose` that gives an equal `RunConfig`.

    Write it with PyYAML's `allow_unicode` off: when on, PyYAML writes U+0085 so that it comes back as a space.

    `attention.register` is left out, as a file must not name code to import: a configuration that has it comes back
    equal only with the same `attention.register.NAME=CLASS` arguments.
    """
    mapping: dict[str, Any] = {
        section: {
            field.name: plain(f"{section}.{field.name}", getattr(getattr(config, section), field.name))
            for field in dataclasses.fields(schema)
        }
        for section, schema in SECTIONS.items()
    }
    attention = config.attention
    mapping["attention"] = {
        "agreement": attention.agreement,
        "default": None if attention.default is None else _spec(attention.default),
        "per_role": {role: _spec(spec) for role, spec in attention.per_role.items()} or None,
    }
    return mapping


def plain(key: str, value: Any) -> Any:
    """A stored value as YAML would give it."""
    if value is None and key in ("parallel.world_size", "parallel.ulysses", "parallel.ring"):
        return AUTO
    if isinstance(value, str):
        return escape_interpolations(value)
    if isinstance(value, list | tuple):
        return [plain(key, item) for item in value]
    return value


def _spec(spec: AttentionSpec) -> Any:
    """A name where there is nothing but the backend, otherwise a mapping of what is set."""
    unset = AttentionSpec()
    keys = {
        name: getattr(spec, name)
        for name in ("version", "on_unsupported")
        if getattr(spec, name) != getattr(unset, name)
    }
    blocks = {name: {key: _option(value) for key, value in block.items()} for name, block in spec.blocks.items()}
    if not keys and not blocks:
        return _option(spec.backend)
    return {"backend": _option(spec.backend), **keys, **blocks}


def _option(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_option(item) for item in value]
    if isinstance(value, str) and _EXPONENT.fullmatch(value):
        return f"${{oc.decode:\"'{value}'\"}}"
    return plain("", value)
