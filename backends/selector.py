"""From a role to a backend: role, its parents, its category, the default, the platform, in that order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from backends.entries import Entry, resolve_entry
from backends.interface import AttentionBackend, Probe, Validation, Variant
from backends.options import Blocks, Place, ownerless_faults, read_blocks
from backends.platforms.facts import DeviceFacts
from backends.platforms.policy import priority
from backends.registry import Registry
from backends.requirements import Requirements
from backends.selection import Agreed, Agreement, Candidates, Choice, Rejected, Selection
from backends.variant import USE_ANOTHER
from configs.faults import Fault, FaultError
from configs.schema import AttentionConfig, AttentionSpec


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

    def candidates(
        self, role: str, requirements: Requirements, *, category: str | None = None, allow_trtllm_default: bool = False
    ) -> Candidates | None:
        """All that a role could get here, best first, every variant of it, and why not the others; None for a role
        whose explicit choice runs or is refused.
        """
        entry = resolve_entry(role, category or requirements.kind, self.config)
        verdicts = self._considered(requirements, allow_trtllm_default)
        found = [self._candidates(backend, requirements, verdict) for backend, verdict in verdicts]
        spec = entry.explicit
        if spec is not None:
            if spec.on_unsupported == "error":
                return None
            backend, blocks = self._explicit(entry, spec)
            verdict = self._verdict(backend, requirements, spec, blocks)
            found.insert(0, self._candidates(backend, requirements, verdict, spec.version, blocks))
        valid = dict.fromkeys(choice for part in found for choice in part.valid)
        return Candidates(tuple(valid), tuple(rejected for part in found for rejected in part.rejected))

    def _candidates(
        self,
        backend: type[AttentionBackend],
        required: Requirements,
        verdict: Validation,
        version: int | None = None,
        blocks: Blocks = (),
    ) -> Candidates:
        """A backend's variants that serve, that of the verdict first, and the faults of the others for this chip."""
        name, first = backend.get_name(), verdict.variant
        if first is None:
            return Candidates((), (Rejected(name, verdict.faults),))
        path = self.registry.class_path(name)
        valid, rejected = [Choice(name, first.name, path, blocks)], []
        for variant in backend.variants:
            if variant is first or version not in (None, variant.version) or variant.chip_fault(self.device):
                continue
            faults = (*variant.faults(required, self.device), *backend.option_faults(variant, required, blocks))
            if not faults and self._probe is not None:
                faults = tuple(self._probe(backend, variant, blocks))
            if faults:
                rejected.append(Rejected(name, faults, variant.name))
            else:
                valid.append(Choice(name, variant.name, path, blocks))
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
        entry, spec = asked.entry, asked.entry.explicit
        if spec is None:
            place = Place(entry.key, self.config.origins)
            if entry.spec is not None and (faults := ownerless_faults(entry.spec, place, self.registry)):
                raise FaultError(faults)
            return self._automatic(asked, ())
        backend, blocks = self._explicit(entry, spec)
        verdict = self._verdict(backend, asked.required, spec, blocks)
        refused = () if verdict.variant is not None else (Rejected(spec.backend, verdict.faults),)
        agreed = self._agreement.get((asked.role, asked.required))
        if agreed is not None and spec.on_unsupported == "fallback":
            return self._agreed(asked, agreed, refused, blocks)
        if verdict.variant is not None:
            return self._made(asked, backend, verdict.variant, blocks=blocks)
        if spec.on_unsupported == "error":
            raise FaultError(self._refusal(asked, refused))
        return self._automatic(replace(asked, entry=replace(entry, source="platform")), refused)

    def _explicit(self, entry: Entry, spec: AttentionSpec) -> tuple[type[AttentionBackend], Blocks]:
        """The class and the options of an explicit choice. Raises FaultError for what no device would take."""
        backend = self.registry.get_class(spec.backend, entry.key, entry.origin)
        blocks, faults = read_blocks(backend, spec, Place(entry.key, self.config.origins), self.registry)
        if faults:
            raise FaultError(faults)
        return backend, blocks

    def _verdict(
        self, backend: type[AttentionBackend], required: Requirements, spec: AttentionSpec, blocks: Blocks
    ) -> Validation:
        return backend.validate(required, self.device, version=spec.version, blocks=blocks, probe=self._probe)

    def _automatic(self, asked: _Asked, rejected: tuple[Rejected, ...]) -> Selection:
        agreed = self._agreement.get((asked.role, asked.required))
        if agreed is not None:
            return self._agreed(asked, agreed, rejected)
        for backend, validation in self._considered(asked.required, asked.allowed):
            if validation.variant is not None:
                return self._made(asked, backend, validation.variant, rejected)
            rejected = (*rejected, Rejected(backend.get_name(), validation.faults))
        raise FaultError(self._refusal(asked, rejected))

    def _agreed(self, asked: _Asked, agreed: Agreed, rejected: tuple[Rejected, ...], blocks: Blocks = ()) -> Selection:
        """What the ranks agreed on, which this rank has to serve too. blocks: of the explicit choice; if that serves
        on all ranks, its entry has decided.
        """
        choice, spec = agreed.choice, asked.entry.explicit
        backend = self.registry.get_class(choice.backend)
        variant = next(variant for variant in backend.variants if variant.name == choice.variant)
        faults = variant.faults(asked.required, self.device)
        if faults:
            raise FaultError(self._refusal(asked, (Rejected(choice.backend, faults),)))
        as_asked = spec is not None and (spec.backend, blocks) == (choice.backend, choice.options)
        if not as_asked or spec is None or spec.version not in (None, variant.version):
            asked = replace(asked, entry=replace(asked.entry, source="agreed"))
        return self._made(asked, backend, variant, (*rejected, *agreed.rejected), choice.options)

    def _refusal(self, asked: _Asked, rejected: tuple[Rejected, ...]) -> list[Fault]:
        """The faults of a role that nothing serves, about the key that the user set, or about the role's own key. A
        fault of an option keeps its own path below it.
        """
        entry, origins = asked.entry, self.config.origins
        key = entry.key or f"attention.per_role.{asked.role}"
        options = {"version", *(entry.spec.blocks if entry.spec is not None else ())}
        another = self._another(asked, {candidate.backend for candidate in rejected})
        found = []
        for candidate in rejected:
            for fault in candidate.faults:
                told = replace(fault, remedy=fault.remedy.replace(USE_ANOTHER, another))
                if fault.key.split(".")[0] in options:
                    path = f"{key}.{fault.key}"
                    found.append(replace(told, key=path, origin=origins.get(path, entry.origin)))
                else:
                    found.append(replace(told, key=key, value=candidate.backend, origin=entry.origin))
        return found

    def _another(self, asked: _Asked, refused: set[str]) -> str:
        """The way out for a call that these backends do not take: one that does, if there is one."""
        names = [name for name in (*_SERVE_MOST, *sorted(self.registry.names())) if name not in refused]
        serving = next((name for name in names if self._serves(name, asked.required)), None)
        if serving is None:
            return f"change the call, which no backend takes on {self.device.label}"
        automatic = any(self._serves(n, asked.required, asked.allowed) for n in priority(self.device))
        return f"use {serving}, or leave it on auto" if automatic else f"use {serving}"

    def _serves(self, name: str, required: Requirements, allowed: bool = True) -> bool:
        try:
            backend = self.registry.get_class(name)
        except FaultError:  # one that cannot be loaded serves nothing
            return False
        permitted = allowed or not backend.asks_permission
        return permitted and backend.validate(required, self.device, probe=self._probe).variant is not None

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


_SERVE_MOST = ("TORCH_SDPA", "REFERENCE")
_PERMISSION = Fault(
    "allow_trtllm_default",
    False,
    "it is chosen automatically only for layers that allow it, and this one does not",
    "name it for the role, or construct the layer with allow_trtllm_default=True",
)


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


def get_diffusion_attn_backend_cls(
    requirements: Requirements,
    device: DeviceFacts,
    *,
    selected: str | None = None,
    registry: Registry | None = None,
    allow_trtllm_default: bool = False,
) -> str:
    """Return the qualified class path of the backend that a device's policy takes for a call.

    Args:
        requirements: What the call asks.
        device: Where it runs.
        selected: An explicit choice, a name or a member of an Enum; None leaves it to the device's priorities.
        registry: The known backends; None is those that are built in or registered.
        allow_trtllm_default: Whether an automatic choice may be a backend that asks for the model's permission.

    Raises:
        FaultError: With every fault of the explicit choice, or of all candidates.
    """
    known = Registry() if registry is None else registry
    config = AttentionConfig(backend=selected)
    role = requirements.kind
    return select(role, requirements, device, config, known, allow_trtllm_default=allow_trtllm_default).class_path
