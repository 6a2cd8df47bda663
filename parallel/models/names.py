"""What a configuration names and a model or the registry does not have. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from backends.entries import resolve_entry
from backends.options import Place, model_faults, ownerless_faults, read_blocks
from backends.registry import Registry
from configs.faults import Fault, FaultError, nearest, unknown_name_remedy
from configs.fields import DEFAULT, PER_ROLE, RESERVED
from configs.schema import AUTO, AttentionConfig, AttentionSpec
from configs.sources import ENVIRONMENT
from configs.specs import registered_twice
from parallel.models.facts import ModelFacts


def name_faults(config: AttentionConfig, models: Mapping[str, ModelFacts], registry: Registry) -> list[Fault]:
    """Find the names in a configuration that stand for nothing, and the choices that nothing uses.

    Args:
        config: what was asked for.
        models: the facts of each model, by its name.
        registry: the backends that the run knows.

    Returns:
        Faults of roles that the models do not have, of backends that are not registered, of registrations that cannot
        be loaded, of option blocks, and, if there are none of these, of choices that no role uses.
    """
    roles = {role.role for model in models.values() for role in model.roles}
    categories = {role.category for model in models.values() for role in model.roles}
    parents = {role.rsplit(".", depth)[0] for role in roles for depth in range(1, role.count(".") + 1)}
    known = tuple(sorted(roles | categories | parents))
    used = {resolve_entry(role.role, role.category, config).key for model in models.values() for role in model.roles}
    found = []
    for key, spec in _choices(config).items():
        role = key.removeprefix(f"{PER_ROLE}.")
        if key != DEFAULT and role not in known:
            rule = f"the model has no role {role!r}; its roles are {', '.join(sorted(roles))}"
            remedy = _role_remedy(role, known)
            found.append(Fault(key, spec.backend, rule, remedy, known, config.origins.get(key, "")))
        # The environment's backend is a last resort, so that a wrong one matters only where a role uses it.
        if key in used or config.origins.get(key) != ENVIRONMENT:
            found += _backend_name_faults(key, spec.backend, config, registry)
    others = [name for name in registry.names() if name not in config.register]
    found += registered_twice(tuple(config.register), others)
    for name in config.register:
        try:
            registry.get_class(name)
        except FaultError as error:
            found += error.faults
    found += _option_faults(config, models, registry)
    return found or _unused_entries(config, used)


def _choices(config: AttentionConfig) -> dict[str, AttentionSpec]:
    """Every choice by its key."""
    choices = {f"{PER_ROLE}.{role}": spec for role, spec in config.per_role.items()}
    return choices if config.default is None else {**choices, DEFAULT: config.default}


def _role_remedy(role: str, known: tuple[str, ...]) -> str:
    """`did you mean cross?`, or the key of a choice that was misspelled as a role: `self.verison`."""
    parent, _, last = role.rpartition(".")
    meant = nearest(last, RESERVED, count=1) if parent in known else ()
    return f"did you mean attention.per_role.{parent}.{meant[0]}?" if meant else unknown_name_remedy(role, known)


def _option_faults(config: AttentionConfig, models: Mapping[str, ModelFacts], registry: Registry) -> list[Fault]:
    """What is wrong with the options of a choice on any device, and what the checkpoint lacks for them."""
    found = []
    for key, spec in _choices(config).items():
        place = Place(key, config.origins)
        if spec.backend == AUTO:
            found += ownerless_faults(spec, place, registry)
        elif spec.backend in registry.names():
            try:
                blocks, faults = read_blocks(registry.get_class(spec.backend), spec, place, registry)
            except FaultError:
                continue  # a class that cannot be loaded is told about where it was registered
            found += faults or [
                fault
                for model, facts in models.items()
                if any(resolve_entry(role.role, role.category, config).key == key for role in facts.roles)
                for fault in model_faults(blocks, model, facts.calibration, place)
            ]
    return found


def _unused_entries(config: AttentionConfig, used: Collection[str]) -> list[Fault]:
    """Faults of choices that no role of the model falls back to."""
    found = []
    for key, spec in _choices(config).items():
        if key in used or spec == AttentionSpec(AUTO) or key in config.may_be_unused:
            continue
        rule = "no role of the model falls back to it, as each has a nearer choice"
        found.append(Fault(key, spec.backend, rule, "leave it out", (), config.origins.get(key, "")))
    return found


def _backend_name_faults(key: str, name: str, config: AttentionConfig, registry: Registry) -> list[Fault]:
    if name == AUTO or name in registry.names():
        return []
    known = (AUTO, *registry.names())
    close = unknown_name_remedy(name, known)
    remedy = f"{close}{' Or' if close.endswith('?') else ', or'} add attention.register.{name}=package.module.Class"
    return [Fault(key, name, "no backend has that name", remedy, known, config.origins.get(key, ""))]
