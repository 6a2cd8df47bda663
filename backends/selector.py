"""From a role to a backend: role, its parents, its category, the default, the platform, in that order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from backends.interface import AttentionBackend, Rejected, Requirements, Selection, Source
from backends.platforms.facts import DeviceFacts
from backends.platforms.policy import priority
from backends.registry import Registry
from configs.faults import Fault, FaultError
from configs.schema import AUTO, AttentionConfig, AttentionSpec


@dataclass(frozen=True)
class Entry:
    """The configuration entry that decides for a role; spec is None when nothing was set."""

    spec: AttentionSpec | None
    source: Source
    key: str = ""
    origin: str = ""


def resolve_entry(role: str, category: str, config: AttentionConfig) -> Entry:
    """The entry that decides for a role: `a.b.c`, `a.b`, `a`, the category, the default, else the platform."""
    for name, source in _lookup_order(role, category):
        if name in config.per_role:
            return _entry(config.per_role[name], source, f"attention.per_role.{name}", config)
    if config.default is not None:
        return _entry(config.default, "default", "attention.default", config)
    return Entry(None, "platform")


def _lookup_order(role: str, category: str) -> Iterator[tuple[str, Source]]:
    yield role, "role"
    parts = role.split(".")
    for length in range(len(parts) - 1, 0, -1):
        yield ".".join(parts[:length]), "parent"
    yield category, "category"


def _entry(spec: AttentionSpec, source: Source, key: str, config: AttentionConfig) -> Entry:
    # `auto` is a value: this role goes to the platform, whatever the default says.
    return Entry(spec, "platform" if spec.backend == AUTO else source, key, config.origins.get(key, ""))


def select(
    role: str,
    requirements: Requirements,
    device: DeviceFacts,
    config: AttentionConfig,
    registry: Registry,
    *,
    category: str | None = None,
) -> Selection:
    """The backend that serves a role on a device.

    An explicit choice runs or is refused; an automatic one is the platform's first candidate that serves. Raises
    FaultError with every fault of the explicit choice, or of all candidates.
    """
    category = category or requirements.kind
    entry = resolve_entry(role, category, config)
    explicit = entry.spec is not None and entry.spec.backend != AUTO
    names = (entry.spec.backend,) if explicit and entry.spec else priority(device)
    rejected: list[Rejected] = []
    for name in names:
        backend = registry.get_class(name, entry.key, entry.origin)
        validation = backend.validate(requirements, device)
        if validation.variant is None:
            rejected.append(Rejected(name, validation.faults))
            continue
        return Selection(
            role=role,
            kind=requirements.kind,
            category=category,
            requirements=requirements,
            requested=name if explicit else None,
            backend=name,
            variant=validation.variant.name,
            class_path=registry.class_path(name),
            source=entry.source,
            key=entry.key,
            origin=entry.origin,
            exactness=backend.exactness,
            rejected=tuple(rejected),
        )
    raise FaultError(_refusal(role, entry, rejected))


def _refusal(role: str, entry: Entry, rejected: list[Rejected]) -> list[Fault]:
    """The faults of a role that nothing serves, about the key that the user set, or about the role's own key."""
    key = entry.key or f"attention.per_role.{role}"
    return [
        replace(fault, key=key, value=candidate.backend, origin=entry.origin)
        for candidate in rejected
        for fault in candidate.faults
    ]


def get_attn_backend_for_role(
    role: str,
    requirements: Requirements,
    device: DeviceFacts,
    config: AttentionConfig,
    registry: Registry,
    *,
    role_category: str | None = None,
) -> tuple[type[AttentionBackend], AttentionSpec | None]:
    """The backend class of a role and the spec that chose it; the spec is None when the platform chose.

    Raises FaultError as `select` does.
    """
    selection = select(role, requirements, device, config, registry, category=role_category)
    spec = AttentionSpec(selection.requested) if selection.requested is not None else None
    return registry.get_class(selection.backend), spec
