"""Backends that join the built-in ones by other ways than a run's configuration: installed packages and Python code.

Names and class paths only. What is registered holds for every `Registry` of this process, those that exist included;
a session takes what it finds when it is entered, and sends it to its ranks.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from types import TracebackType
from typing import TypeVar, overload

from backends.declarations import check, load, registration_key
from backends.interface import AttentionBackend
from configs.faults import Fault, FaultError
from configs.fields import name_of, name_refusal

ENTRY_POINTS = "raylysses.backends"
"""The entry-point group of packages that bring backends: `NAME = "package.module:Class"`."""

Declared = TypeVar("Declared", bound=type[AttentionBackend])


class Registration:
    """A registration that was made; as a context manager it ends with the block. Of several of one name, the last
    that has not ended counts. It can be entered once.
    """

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path

    def __enter__(self) -> None:
        with _lock:
            if self not in _registrations:
                raise RuntimeError(f"the registration of {self.name} has ended; register it again")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _registrations
        with _lock:
            _registrations = tuple(other for other in _registrations if other is not self)


_registrations: tuple[Registration, ...] = ()  # another tuple after each change, by which a cache knows it
_lock = threading.Lock()


@overload
def register_diffusion_backend(name: str | enum.Enum, path: str) -> Registration: ...
@overload
def register_diffusion_backend(name: str | enum.Enum) -> Callable[[Declared], Declared]: ...
def register_diffusion_backend(
    name: str | enum.Enum, path: str | None = None
) -> Registration | Callable[[Declared], Declared]:
    """Give a name, a new one or a built-in one, the declaration at `path`; without a path, decorate its class.

    It is loaded and checked at once, and replaces an earlier choice from the next selection on. Raises FaultError if
    ranks cannot import the class, or if it is no declaration of a backend of that name.
    """
    key = name_of(name)
    if not isinstance(key, str):
        raise TypeError(f"a backend's name is text, not {key!r}; write @register_diffusion_backend(NAME)")
    _check_name(key)
    if path is not None:
        load(key, path)
        return _register(key, path)

    def decorate(declared: Declared) -> Declared:
        path = f"{declared.__module__}.{declared.__qualname__}"
        if declared.__module__ == "__main__" or "." in declared.__qualname__:
            rule = "cannot be imported by ranks, which are other processes"
            raise FaultError([Fault(registration_key(key), path, rule, "define the class at the top of a module")])
        check(key, path, declared)
        _register(key, path)
        return declared

    return decorate


def _check_name(name: str) -> None:
    refusal = name_refusal(name)
    if refusal is not None:
        raise FaultError([Fault(registration_key(name), name, refusal.rule, refusal.remedy)])


def _register(name: str, path: str) -> Registration:
    global _registrations
    registration = Registration(name, path)
    with _lock:
        _registrations = (*_registrations, registration)
    return registration


def end_registrations(name: str) -> None:
    """End every registration of a name that Python code made. Entry points of installed packages stay."""
    global _registrations
    with _lock:
        _registrations = tuple(other for other in _registrations if other.name != name)


def generation() -> tuple[Registration, ...]:
    """Another object after each registration and each end of one."""
    return _registrations


def registered() -> Mapping[str, str]:
    """Name -> class path of everything that installed packages and Python code have registered; code comes last."""
    with _lock:
        return _installed() | {registration.name: registration.path for registration in _registrations}


@cache
def _installed() -> dict[str, str]:
    """Two packages that bring one name: the path of the first in the alphabet, on every node alike."""
    points = sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda point: point.value, reverse=True)
    return {point.name: f"{point.module}.{point.attr}".rstrip(".") for point in points}
