"""Deeply immutable plain data, for the fields of frozen configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

V = TypeVar("V")


class FrozenMapping(Mapping[str, V]):
    """A mapping that nothing can change; it is equal to a dict of the same items.

    Unlike `types.MappingProxyType` it pickles, copies and hashes, so that configurations do.

    Args:
        items: copied, but not deeply: see `frozen`.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, V] | None = None) -> None:
        self._items: dict[str, V] = dict(items or {})

    def __getitem__(self, key: str) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)

    def __reduce__(self) -> tuple[Any, ...]:
        return (FrozenMapping, (self._items,))


def frozen(value: Any) -> Any:
    """Copy plain data deeply, mappings as `FrozenMapping` and lists as tuples."""
    if isinstance(value, Mapping):
        return FrozenMapping({name: frozen(item) for name, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(frozen(item) for item in value)
    return value
