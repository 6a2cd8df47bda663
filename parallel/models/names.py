"""What a configuration names and a model or the registry does not have. No torch here."""

from __future__ import annotations

from collections.abc import Mapping

from backends.entries import resolve_entry
from backends.options import Place, model_faults, ownerless_faults, read_blocks
from backends.registry import Registry
from configs.faults import Fault, FaultError, nearest, unknown_name_remedy
from configs.fields import RESERVED
from configs.schema import AUTO, AttentionConfig, AttentionSpec
from configs.sources import ENVIRONMENT
from parallel.models.facts import ModelFacts


def name_faults(config: AttentionConfig, models: Mapping[str, ModelFacts], registry: Registry) -> list[Fault]:
    """Roles that the models do not have, backends that nobody registered, and registrations that are none. models: by
    name.
    """
    roles = {role.role for model in models.values() for role in model.roles}
    categories = {role.category for model in models.values() for role in model.roles}
    parents = {role.rsplit(".", depth)[0] for role in roles for depth in range(1, role.count(".") + 1)}
    known = tuple(sorted(roles | categories | parents))
    found = []
    for role, spec in config.per_role.items():
        key = f"attention.per_role.{role}"
        if role not in known:
            rule = f"the model has no role {role!r}; its roles are {', '.join(sorted(roles))}"
            remedy = _role_remedy(role, known)
            found.append(Fault(key, spec.backend, rule, remedy, known, config.origins.get(key, "")))
        found += _backend_name_faults(key, spec.backend, config, registry)
    if config.default is not None:
        found += _backend_name_faults("attention.default", config.default.backend, config, registry)
    for name in config.register:
        try:
            registry.get_class(name)
        except FaultError as error:
            found += error.faults
    found += _option_faults(config, models, registry)
    return found or _unused_entries(config, models)


def _role_remedy(role: str, known: tuple[str, ...]) -> str:
    """`did you mean cross?`, or the key of a choice that was misspelled as a role: `self.verison`."""
    parent, _, last = role.rpartition(".")
    meant = nearest(last, RESERVED, count=1) if parent in known else ()
    return f"did you mean attention.per_role.{parent}.{meant[0]}?" if meant else unknown_name_remedy(role, known)


def _option_faults(config: AttentionConfig, models: Mapping[str, ModelFacts], registry: Registry) -> list[Fault]:
    """What is wrong with the options of a choice on any device, and what the checkpoint lacks for them."""
    specs = {f"attention.per_role.{role}": spec for role, spec in config.per_role.items()}
    if config.default is not None:
        specs["attention.default"] = config.default
    found = []
    for key, spec in specs.items():
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


def _unused_entries(config: AttentionConfig, models: Mapping[str, ModelFacts]) -> list[Fault]:
    """Choices that no role of the model falls back to. The environment's is a last resort: it may be unused."""
    roles = {(role.role, role.category) for model in models.values() for role in model.roles}
    used = {resolve_entry(role, category, config).key for role, category in roles}
    found = []
    for key in (*(f"attention.per_role.{role}" for role in config.per_role), "attention.default"):
        origin = config.origins.get(key, "")
        spec = config.default if key == "attention.default" else config.per_role[key.split(".", 2)[2]]
        if key in used or spec in (None, AttentionSpec(AUTO)) or origin == ENVIRONMENT:
            continue
        rule = "no role of the model falls back to it, as each has a nearer choice"
        found.append(Fault(key, spec.backend if spec else None, rule, "leave it out", (), origin))
    return found


def _backend_name_faults(key: str, name: str, config: AttentionConfig, registry: Registry) -> list[Fault]:
    if name == AUTO or name in registry.names():
        return []
    known = (AUTO, *registry.names())
    close = unknown_name_remedy(name, known)
    remedy = f"{close}{' Or' if close.endswith('?') else ', or'} add attention.register.{name}=package.module.Class"
    return [Fault(key, name, "no backend has that name", remedy, known, config.origins.get(key, ""))]
