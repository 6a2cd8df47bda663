"""Which entry of the configuration decides for a role: its own, its parents', its category's, the default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backends.selection import Source
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
