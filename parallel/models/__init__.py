"""Where a model's attention meets the runtime: one module per model family, found by the transformer's class name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from configs.faults import Fault, FaultError, unknown_name_remedy
from parallel.models.facts import ModelFacts

FAMILIES: Mapping[str, str] = {"WanTransformer3DModel": "parallel.models.wan"}


def family_of(transformer_config: Mapping[str, Any]) -> ModuleType:
    """The module that describes and wires a transformer. Raises FaultError for a class that none serves."""
    name = str(transformer_config.get("_class_name"))
    if name not in FAMILIES:
        known = tuple(FAMILIES)
        rule = "no model family of that transformer class is supported"
        raise FaultError([Fault("model.path", name, rule, unknown_name_remedy(name, known), known)])
    return importlib.import_module(FAMILIES[name])


def describe(transformer_config: Mapping[str, Any]) -> ModelFacts:
    """The attention facts of a transformer from its config.json; imports no torch. Raises FaultError."""
    facts: ModelFacts = family_of(transformer_config).describe(transformer_config)
    return facts
