"""Backends that join the built-in ones by other ways than a run's configuration: installed packages and Python code.

Names and class paths only. What is registered holds for every `Registry` of this process, those that exist included;
a session sends it to its ranks.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module, metadata
from types import TracebackType
from typing import TypeVar, overload

from backends.interface import AttentionBackend
from configs.faults import Fault, FaultError

ENTRY_POINTS = "raylysses.backends"
"""The entry-point group of packages that bring backends: `NAME = "package.module:Class"`."""

Declared = TypeVar("Declared", bound=type[AttentionBackend])
_GIVE_PATH = "give the dotted path of an importable class, such as my_package.my_module.MyBackend"

_registered: dict[str, str] = {}


class Registration:
    """A registration that was made; as a context manager it ends with the block, and what it replaced returns."""

    def __init__(self, name: str, before: str | None) -> None:
        self._name = name
        self._before = before

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is None:
            _registered.pop(self._name, None)
        else:
            _registered[self._name] = self._before


@overload
def register_diffusion_backend(name: str | enum.Enum, path: str) -> Registration: ...
@overload
def register_diffusion_backend(name: str | enum.Enum) -> Callable[[Declared], Declared]: ...
def register_diffusion_backend(
    name: str | enum.Enum, path: str | None = None
) -> Registration | Callable[[Declared], Declared]:
    """Give a name, a new one or a built-in one, the declaration at `path`; without a path, decorate its class.

    It is loaded and checked at once, and replaces an earlier choice from the next selection on. Raises FaultError if
    the class cannot be imported by ranks, or is no declaration of a backend of that name.
    """
    key = name.name if isinstance(name, enum.Enum) else name
    if path is not None:
        load(key, path)
        return _register(key, path)

    def decorate(declared: Declared) -> Declared:
        path = f"{declared.__module__}.{declared.__qualname__}"
        if declared.__module__ == "__main__" or "<locals>" in path:
            rule = "cannot be imported by ranks, which are other processes"
            raise FaultError([Fault(_key(key), path, rule, "define the class at the top of a module")])
        check(key, path, declared)
        _register(key, path)
        return declared

    return decorate


def _register(name: str, path: str) -> Registration:
    before = _registered.get(name)
    _registered[name] = path
    return Registration(name, before)


def registered() -> Mapping[str, str]:
    """Name -> class path of everything that installed packages and Python code have registered; code comes last."""
    return _installed() | _registered


@cache
def _installed() -> dict[str, str]:
    return {point.name: point.value.replace(":", ".") for point in metadata.entry_points(group=ENTRY_POINTS)}


def load(name: str, path: str) -> type[AttentionBackend]:
    """The declaration at a dotted path. Raises FaultError if there is none, or it is not one of that name."""
    module, _, attribute = path.rpartition(".")
    if not module:
        raise FaultError([Fault(_key(name), path, "is not the path of a class in a module", _GIVE_PATH)])
    try:
        found = getattr(import_module(module), attribute, None)
    except (Exception, SystemExit) as error:
        rule = f"cannot be imported: {type(error).__name__}: {error}"
        raise FaultError([Fault(_key(name), path, rule, _GIVE_PATH)]) from error
    if found is None:
        raise FaultError([Fault(_key(name), path, f"{module} has no {attribute}", "name a class that it has")])
    return check(name, path, found)


def check(name: str, path: str, found: object) -> type[AttentionBackend]:
    """`found` itself. Raises FaultError unless it is a declaration with variants, of that name, that can be called as
    the selection calls it.
    """
    if not (isinstance(found, type) and issubclass(found, AttentionBackend)):
        remedy = "derive it from backends.interface.AttentionBackend"
        raise FaultError([Fault(_key(name), path, "is not an AttentionBackend class", remedy)])
    if not getattr(found, "variants", ()):
        raise FaultError([Fault(_key(name), path, "declares no variants", "give it `variants`, one for each kernel")])
    for method in ("get_name", "validate", "validate_configuration", "get_impl_cls"):
        asked, has = (inspect.signature(getattr(owner, method)) for owner in (AttentionBackend, found))
        if tuple(asked.parameters) != tuple(has.parameters):
            rule = f"its {method} takes {_arguments(has)}, and is called with {_arguments(asked)}"
            raise FaultError([Fault(_key(name), path, rule, f"give {method} these parameters")])
    if found.get_name() != name:
        rule = f"its get_name() is {found.get_name()}, and a backend has one name everywhere"
        raise FaultError([Fault(_key(name), path, rule, f"register it as {_key(found.get_name())}")])
    return found


def _arguments(signature: inspect.Signature) -> str:
    return f"({', '.join(signature.parameters)})"


def _key(name: str) -> str:
    return f"attention.register.{name}"
