"""From a role to a backend: role, its parents, its category, the default, the platform, in that order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from backends.interface import AttentionBackend, Probe, Validation, Variant
from backends.options import Blocks, Place, ownerless_faults, read_blocks
from backends.platforms.facts import DeviceFacts
from backends.platforms.policy import priority
from backends.registry import Registry
from backends.requirements import Requirements
from backends.selection import Agreed, Agreement, Candidates, Choice, Rejected, Selection, Source
from configs.faults import Fault, FaultError
from configs.schema import AUTO, AttentionConfig, AttentionSpec


@dataclass(frozen=True)
class Entry:
    """The configuration entry that decides for a role; spec is None when nothing was set."""

    spec: AttentionSpec | None
    source: Source
    key: str = ""
    origin: str = ""

    @property
    def explicit(self) -> AttentionSpec | None:
        """The spec, if it names a backend."""
        return self.spec if self.spec is not None and self.spec.backend != AUTO else None


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


@dataclass(frozen=True)
class _Asked:
    """One question to a selector. allowed: whether backends that ask for permission have it."""

    role: str
    category: str
    required: Requirements
    entry: Entry
    allowed: bool


class Selector:
    """The selections of one device under one configuration, each worked out once.

    agreement: what the ranks settled on for automatic roles. probe: what the process that will run a kernel asks of
    one that would serve. What is cached goes when a backend is registered or a
    registration ends, so that no model gets a mixture of the old and the new.
    """

    def __init__(
        self,
        device: DeviceFacts,
        config: AttentionConfig,
        registry: Registry,
        agreement: Agreement | None = None,
        probe: Probe | None = None,
    ) -> None:
        self.device = device
        self.config = config
        self.registry = registry
        self._agreement = agreement or {}
        self._probe = probe
        self._cached: dict[tuple[str, Requirements, str | None, bool], Selection] = {}
        self._generation = registry.generation

    def select(
        self,
        role: str,
        requirements: Requirements,
        *,
        category: str | None = None,
        allow_trtllm_default: bool = False,
    ) -> Selection:
        """The backend that serves a role.

        An explicit choice runs or is refused, unless its spec says `on_unsupported: fallback`; an automatic one is
        the platform's first candidate that serves. allow_trtllm_default: whether that may be one that asks for the
        model's permission. Raises FaultError with every fault of the explicit choice, or of all candidates.
        """
        generation = self.registry.generation
        if self._generation is not generation:
            self._cached.clear()
            self._generation = generation
        key = (role, requirements, category, allow_trtllm_default)
        found = self._cached.get(key)
        if found is None:
            within = category or requirements.kind
            entry = resolve_entry(role, within, self.config)
            found = self._select(_Asked(role, within, requirements, entry, allow_trtllm_default))
            if self.registry.generation is not generation:  # another thread's: begin again with what holds now
                return self.select(role, requirements, category=category, allow_trtllm_default=allow_trtllm_default)
            self._cached[key] = found
        return found

    def candidates(self, requirements: Requirements, *, allow_trtllm_default: bool = False) -> Candidates:
        """All that serves an automatic role here, best first, and why the others do not."""
        valid: list[Choice] = []
        rejected: list[Rejected] = []
        for backend, validation in self._considered(requirements, allow_trtllm_default):
            name = backend.get_name()
            if validation.variant is None:
                rejected.append(Rejected(name, validation.faults))
            else:
                valid.append(Choice(name, validation.variant.name, self.registry.class_path(name)))
        return Candidates(tuple(valid), tuple(rejected))

    def _considered(self, required: Requirements, allowed: bool) -> Iterator[tuple[type[AttentionBackend], Validation]]:
        """The platform's backends in its order, each with its verdict."""
        for name in priority(self.device):
            backend = self.registry.get_class(name)
            if backend.asks_permission and not allowed:
                yield backend, Validation(None, (_PERMISSION,))
            else:
                yield backend, backend.validate(required, self.device, probe=self._probe)

    def _select(self, asked: _Asked) -> Selection:
        entry, place = asked.entry, Place(asked.entry.key, self.config.origins)
        spec = entry.explicit
        if spec is None:
            if entry.spec is not None and (faults := ownerless_faults(entry.spec, place, self.registry)):
                raise FaultError(faults)
            return self._automatic(asked, ())
        backend = self.registry.get_class(spec.backend, entry.key, entry.origin)
        blocks, faults = read_blocks(backend, spec, place, self.registry)
        if faults:
            raise FaultError(faults)
        validation = backend.validate(
            asked.required, self.device, version=spec.version, blocks=blocks, probe=self._probe
        )
        if validation.variant is not None:
            return self._made(asked, backend, validation.variant, blocks=blocks)
        refused = Rejected(spec.backend, validation.faults)
        if spec.on_unsupported == "error":
            raise FaultError(_refusal(asked, (refused,), self.config))
        return self._automatic(replace(asked, entry=replace(entry, source="platform")), (refused,))

    def _automatic(self, asked: _Asked, rejected: tuple[Rejected, ...]) -> Selection:
        agreed = self._agreement.get((asked.role, asked.required))
        if agreed is not None:
            return self._agreed(replace(asked, entry=replace(asked.entry, source="agreed")), agreed, rejected)
        for backend, validation in self._considered(asked.required, asked.allowed):
            if validation.variant is not None:
                return self._made(asked, backend, validation.variant, rejected)
            rejected = (*rejected, Rejected(backend.get_name(), validation.faults))
        raise FaultError(_refusal(asked, rejected, self.config))

    def _agreed(self, asked: _Asked, agreed: Agreed, rejected: tuple[Rejected, ...]) -> Selection:
        """What the ranks agreed on, which this rank has to serve too."""
        backend = self.registry.get_class(agreed.choice.backend)
        variant = next(variant for variant in backend.variants if variant.name == agreed.choice.variant)
        faults = variant.faults(asked.required, self.device)
        if faults:
            raise FaultError(_refusal(asked, (Rejected(agreed.choice.backend, faults),), self.config))
        return self._made(asked, backend, variant, (*rejected, *agreed.rejected))

    def _made(
        self,
        asked: _Asked,
        backend: type[AttentionBackend],
        variant: Variant,
        rejected: tuple[Rejected, ...] = (),
        blocks: Blocks = (),
    ) -> Selection:
        spec, name = asked.entry.explicit, backend.get_name()
        return Selection(
            role=asked.role,
            kind=asked.required.kind,
            category=asked.category,
            requirements=asked.required,
            requested=None if spec is None else spec.backend,
            backend=name,
            variant=variant.name,
            class_path=self.registry.class_path(name),
            source=asked.entry.source,
            key=asked.entry.key,
            origin=asked.entry.origin,
            exactness=backend.exactness_of(variant, blocks),
            rejected=rejected,
            options=blocks,
        )


_PERMISSION = Fault(
    "allow_trtllm_default",
    False,
    "it is chosen automatically only for layers that allow it, and this one does not",
    "name it for the role, or construct the layer with allow_trtllm_default=True",
)


def _refusal(asked: _Asked, rejected: tuple[Rejected, ...], config: AttentionConfig) -> list[Fault]:
    """The faults of a role that nothing serves, about the key that the user set, or about the role's own key. A fault
    of an option keeps its own path below it.
    """
    entry = asked.entry
    key = entry.key or f"attention.per_role.{asked.role}"
    options = {"version", *(entry.spec.blocks if entry.spec is not None else ())}
    return [
        replace(
            fault,
            key=f"{key}.{fault.key}",
            origin=config.origins.get(f"{key}.{fault.key}", entry.origin),
        )
        if fault.key.split(".")[0] in options
        else replace(fault, key=key, value=candidate.backend, origin=entry.origin)
        for candidate in rejected
        for fault in candidate.faults
    ]


def select(
    role: str,
    requirements: Requirements,
    device: DeviceFacts,
    config: AttentionConfig,
    registry: Registry,
    *,
    category: str | None = None,
    allow_trtllm_default: bool = False,
) -> Selection:
    """One selection, as `Selector.select` makes it."""
    selector = Selector(device, config, registry)
    return selector.select(role, requirements, category=category, allow_trtllm_default=allow_trtllm_default)


def get_attn_backend_for_role(
    role: str,
    requirements: Requirements,
    device: DeviceFacts,
    config: AttentionConfig,
    registry: Registry,
    *,
    role_category: str | None = None,
    allow_trtllm_default: bool = False,
) -> tuple[type[AttentionBackend], AttentionSpec | None]:
    """The backend class of a role and the spec that chose it; the spec is None when the platform chose.

    Raises FaultError as `select` does.
    """
    selector = Selector(device, config, registry)
    selection = selector.select(role, requirements, category=role_category, allow_trtllm_default=allow_trtllm_default)
    entry = resolve_entry(role, role_category or requirements.kind, config)
    chose = entry.explicit if selection.source not in ("platform", "agreed") else None
    return registry.get_class(selection.backend), chose
