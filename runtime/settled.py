"""The values that a run settled on, in place of `auto`, so that its config.yaml repeats it on any machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from backends.entries import resolve_entry
from backends.registry import Registry
from configs.mapping import to_mapping
from configs.schema import AUTO, DEVICES, AttentionSpec, ClusterConfig, ParallelConfig, RunConfig
from runtime.model_folder import BUILT_IN_PREFIX
from runtime.report import SelectionEntry

SETTINGS_OF_STRATEGIES = {
    "ulysses": "ulysses",
    "ring": "ring",
    "ulysses_ring": "ring",
    "gather_kv": "gather_kv",
    "ulysses_gather_kv": "gather_kv",
}
"""Strategy of a plan -> the value of `parallel.strategy` that gives it, with its degrees."""


def settle_ranks(config: RunConfig, platform: str, world_size: int, dtype: str) -> RunConfig:
    """Replace what is known once the ranks have their places.

    Args:
        config: The run as composed.
        platform: Platform of the ranks, such as `cpu` or `cuda`.
        world_size: Number of ranks.
        dtype: Name of the model's dtype.

    Returns:
        The run with its world size, device, dtype and transport, and with absolute paths.
    """
    parallel, image = config.parallel, config.generate.image
    transport = "torch" if parallel.transport == AUTO else parallel.transport  # see parallel.transport.choice
    device = platform if platform in DEVICES else config.run.device
    return replace(
        config,
        model=replace(config.model, path=absolute_model_path(config.model.path)),
        generate=replace(config.generate, image=None if image is None else str(Path(image).absolute())),
        parallel=replace(parallel, world_size=world_size, transport=transport),
        run=replace(config.run, device=device, dtype=dtype),
    )


def absolute_model_path(path: str) -> str:
    """A `model.path` that means the same in every working directory."""
    return path if path.startswith(BUILT_IN_PREFIX) else str(Path(path).absolute())


def settle_roles(
    config: RunConfig, roles: Mapping[str, str], entries: Sequence[SelectionEntry], registry: Registry
) -> RunConfig:
    """Replace what is known once the roles have run: the strategy, its degrees, and each role's backend and version.

    A role that has not run, or whose layers ran different backends, keeps the choice that it was given. So does the
    strategy if roles differ in it. Every role gets an entry of its own, since a choice that no role uses is refused.

    Args:
        config: The run.
        roles: Category of every role of the run's models.
        entries: What the roles ran.
        registry: The backends of the run.

    Returns:
        The run with these choices; the same run if nothing has run.
    """
    if not entries:
        return config
    per_role: dict[str, AttentionSpec] = {}
    for role, category in roles.items():
        chosen = resolve_entry(role, category, config.attention).spec
        ran = [entry for entry in entries if entry.role == role and entry.source != "model"]
        specs = [_settled_spec(chosen, entry, registry) for entry in ran]
        per_role[role] = specs[0] if specs and all(spec == specs[0] for spec in specs) else chosen or AttentionSpec()
    attention = replace(config.attention, default=None, per_role=per_role)
    return replace(config, attention=attention, parallel=_settled_strategy(config.parallel, entries))


def _settled_spec(chosen: AttentionSpec | None, entry: SelectionEntry, registry: Registry) -> AttentionSpec:
    """The choice that gives the backend that ran and nothing else."""
    automatic = chosen is None or chosen.backend == AUTO or entry.source in ("platform", "agreed")
    spec = AttentionSpec(entry.backend, **entry.options) if chosen is None or automatic else chosen
    return pinned(spec, entry.variant, registry)


def pinned(spec: AttentionSpec, variant: str, registry: Registry) -> AttentionSpec:
    """Name the version of the variant that ran, where the backend has versions, and allow no other backend.

    Args:
        spec: A choice that names its backend.
        variant: Name of the backend's variant that ran.
        registry: The backends of the run.

    Returns:
        The choice that gives the same version or is refused.
    """
    variants = registry.get_class(spec.backend).variants
    versions = [each.version for each in variants if each.name == variant]
    return replace(spec, version=versions[0] if versions else spec.version, on_unsupported="error")


def _settled_strategy(parallel: ParallelConfig, entries: Iterable[SelectionEntry]) -> ParallelConfig:
    """The strategy and degrees that every role with calls between ranks has; else those that were set."""
    ran = {
        (SETTINGS_OF_STRATEGIES[entry.strategy], entry.degrees["ulysses"], entry.degrees["ring"])
        for entry in entries
        if entry.strategy != "local"
    }
    if len(ran) != 1:
        return parallel
    strategy, ulysses, ring = ran.pop()
    return replace(parallel, strategy=strategy, ulysses=ulysses, ring=ring)


def file_mapping(config: RunConfig) -> dict[str, Any]:
    """The content of config.yaml, without the run's folder and its cluster: a repeated run has its own."""
    mapping = to_mapping(config)
    del mapping["run"]["dir"], mapping["cluster"]["address"]
    return mapping


def asked_lines(asked: Mapping[str, Any], written: Mapping[str, Any]) -> list[str]:
    """List the settings that config.yaml replaces or leaves out, as `key: value` lines with the value asked for.

    Args:
        asked: The configuration as composed, as `to_mapping` has it.
        written: The content of config.yaml.

    Returns:
        The lines, in the order of the keys. Defaults that are left out have none.
    """
    defaults = {"cluster.address": ClusterConfig.address}
    before, after = _flat(asked), _flat(written)
    lines = []
    for key in dict.fromkeys([*before, *after]):
        value = before.get(key)
        replaced = key in after and after[key] != value
        left_out = key not in after and value is not None and value != defaults.get(key)
        if replaced or left_out:
            lines.append(f"{key}: {_shown(value)}")
    return lines


def _flat(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key; a choice of a backend is one value."""
    flat = {f"{group}.{name}": value for group, values in mapping.items() for name, value in values.items()}
    per_role = flat.pop("attention.per_role", None) or {}
    return flat | {f"attention.per_role.{role}": choice for role, choice in per_role.items()}


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)
