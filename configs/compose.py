"""One run's configuration out of its layers, or everything that is wrong with them, at once.

Each layer replaces the ones before it, key by key: the dataclasses' defaults, a packaged preset, the user's YAML files
in the order given, the command line. A backend that a layer sets takes away the options that lower layers gave that
choice. The environment's one variable sets `attention.default` only if no layer does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from configs.faults import Fault, unknown_name_remedy
from configs.fields import REGISTER, known_keys
from configs.interpolate import Unresolved, resolve
from configs.layers import PRESET_KEY, Layer
from configs.mapping import SECTIONS, to_mapping
from configs.merge import DEFAULTS, Merged, attention_of, below, merge, unresolved_fault
from configs.schema import RunConfig
from configs.sources import (
    DEFAULT_PRESET,
    PUBLISHED_PREFIX,
    command_line_layer,
    environment_layer,
    file_layer,
    preset_layer,
    presets,
    published_models,
)
from configs.specs import registered_twice

__all__ = ["compose", "known_keys", "presets", "to_mapping"]

PROMPT = "generate.prompt"
MODEL_PATH = "model.path"
GUIDANCE = "generate.guidance"
UNGUIDED: Mapping[str, Any] = MappingProxyType({"generate.guidance_2": None, "generate.negative_prompt": ""})
"""Settings that only guidance reads, at the value that a run without guidance takes."""


def compose(
    arguments: Sequence[str] = (),
    *,
    file: Path | Sequence[Path] | None = None,
    environ: Mapping[str, str] | None = None,
    published: bool = False,
) -> tuple[RunConfig | None, tuple[Fault, ...]]:
    """Compose a run's configuration from its layers.

    Args:
        arguments: overrides (`configs.overrides`) and attention options (`configs.flags`), in any order.
        file: a YAML file, or several, each of which is a layer on top of the ones before it.
        environ: what `DIFFUSION_ATTENTION_BACKEND` and `${oc.env:NAME}` are read from; None is the process's
            environment.
        published: let a preset without a folder stand for its model as published (`published:NAME`); that is enough to
            plan a run, and not to start one.

    Returns:
        The configuration and no faults, or None and every fault of every layer.
    """
    files = () if file is None else (file,) if isinstance(file, Path) else tuple(file)
    read = [file_layer(path) for path in files]
    file_layers = [Layer({}, (layer,)) if isinstance(layer, Fault) else layer for layer in read]
    command_line = command_line_layer(arguments)
    preset_name, preset_faults = _preset_name((command_line, *reversed(file_layers)), environ)
    preset = preset_layer(preset_name)
    environment = environment_layer(os.environ if environ is None else environ)

    merged = merge([preset, *file_layers, command_line], environment, environ)
    if published and MODEL_PATH not in merged.settings and preset_name in published_models():
        merged = replace(merged, values={**merged.values, MODEL_PATH: PUBLISHED_PREFIX + preset_name})
    of_files = [fault for layer in file_layers for fault in layer.faults]
    faults = [*preset.faults, *of_files, *preset_faults, *command_line.faults, *merged.faults]
    faults += registered_twice(tuple(dict(below(merged.values, REGISTER))))
    if not any(isinstance(layer, Fault) for layer in read):  # the keys of an unreadable file are not missing
        faults += _missing(merged.values, faults, preset_name)
    if faults:
        return None, tuple(dict.fromkeys(faults))
    values = {**merged.values, **_idle_preset_values(merged)}
    sections = {section: schema(**dict(below(values, section))) for section, schema in SECTIONS.items()}
    return RunConfig(attention=attention_of(merged), **sections), ()


def _idle_preset_values(merged: Merged) -> dict[str, Any]:
    """Replace preset values that a higher layer's guidance leaves without a use.

    At guidance 1 or less the pipelines guide no stage and read no negative prompt. The user then need not add
    `generate.guidance_2=null generate.negative_prompt=""` to `generate.guidance=1`.
    """
    if merged.ranks.get(GUIDANCE, 0) == 0 or merged.values[GUIDANCE] > 1:
        return {}
    return {key: value for key, value in UNGUIDED.items() if merged.ranks.get(key) == 0}


def _preset_name(layers: Sequence[Layer], environ: Mapping[str, str] | None) -> tuple[str, list[Fault]]:
    """The preset that the highest layer names; with a fault, the default one, so that the rest can be checked."""
    setting = next((layer.settings[PRESET_KEY] for layer in layers if PRESET_KEY in layer.settings), None)
    if setting is None or setting.removes:
        return DEFAULT_PRESET, []
    name = setting.value
    if setting.pending:
        name = resolve({(PRESET_KEY,): name}, [(PRESET_KEY,)], environ)[(PRESET_KEY,)]
        if isinstance(name, Unresolved):
            return DEFAULT_PRESET, [unresolved_fault(setting, name)]
    if name in presets():
        return str(name), []
    remedy = unknown_name_remedy(str(name), presets())
    return DEFAULT_PRESET, [Fault(PRESET_KEY, str(name), "no such preset", remedy, presets(), setting.origin)]


def _missing(values: Mapping[str, Any], faults: Sequence[Fault], preset_name: str) -> list[Fault]:
    """The keys without a value and without a default, unless a fault speaks of them already."""
    reported = {fault.key for fault in faults}
    missing: list[Fault] = []
    if PROMPT not in reported and not (values.get(PROMPT) or "").strip():
        rule = "is empty" if values.get(PROMPT) is not None else "is not set"
        missing.append(Fault(PROMPT, None, rule, 'add --prompt "..."'))
    for key in known_keys():
        if key not in values and key not in DEFAULTS and key not in reported and key != PROMPT:
            remedy = "add model.path=FOLDER, a local diffusers folder" if key == MODEL_PATH else f"add {key}=VALUE"
            missing.append(Fault(key, None, f"is not set, and preset {preset_name} does not set it", remedy))
    return missing
