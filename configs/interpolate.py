"""Resolves `${generate.height}` and `${oc.env:NAME}` over the merged settings, key by key, to see every failure."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from omegaconf import Container, OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from omegaconf.resolvers import oc

from configs.faults import Fault, FaultError

_REFERENCE = re.compile(r"\$\{([\w.-]+)\}")
_ONE_ENVIRONMENT_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Unresolved:
    """Why an interpolation has no value."""

    reason: str


def is_interpolated(value: Any) -> bool:
    """Whether a value, or one inside of it, is for OmegaConf to resolve, or at least to unescape (`\\${`)."""
    if isinstance(value, list):
        return any(is_interpolated(item) for item in value)
    if isinstance(value, dict):
        return any(is_interpolated(item) for item in value.values())
    return isinstance(value, str) and "${" in value


def syntax_error(value: Any) -> str | None:
    """What is wrong with the spelling of the interpolations in `value`; None if nothing is."""
    try:
        OmegaConf.create({"value": value})
    except GrammarParseError as error:
        return _first_line(error)
    return None


def resolve(
    values: Mapping[tuple[str, ...], Any], pending: Collection[tuple[str, ...]], environ: Mapping[str, str] | None
) -> dict[tuple[str, ...], Any]:
    """The resolved value, or `Unresolved`, of each path in `pending`; `values` is everything that can be pointed at."""
    broken = {path: error for path in pending if (error := syntax_error(values[path])) is not None}
    nested: dict[str, Any] = {}
    for path, value in values.items():
        node = nested
        for name in path[:-1]:
            node = node.setdefault(name, {})
        if path not in broken:
            node[path[-1]] = value
    tree = OmegaConf.create(nested)
    with _environment(environ):
        return {path: Unresolved(broken[path]) if path in broken else _read(tree, path, values) for path in pending}


def plain_data(value: Any) -> Any:
    """What an OmegaConf container holds, with its interpolations resolved; any other value as it is.

    Raises:
        FaultError: an interpolation without a value. Values that are still to be set stay `???`.
    """
    if not isinstance(value, Container):
        return value
    try:
        return OmegaConf.to_container(value, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        leaves = dict(_leaves((), OmegaConf.to_container(value, resolve=False)))
        key = str(getattr(error, "full_key", None) or "attention")
        reason = _reason(error, leaves, tuple(key.split(".")))
        raise FaultError([Fault(key, None, f"cannot be resolved ({reason})", "set what it points at")]) from error


def _leaves(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(value, dict):
        yield path, value
        return
    for name, item in value.items():
        yield from _leaves((*path, str(name)), item)


def _read(tree: Any, path: tuple[str, ...], values: Mapping[tuple[str, ...], Any]) -> Any:
    try:
        for name in path:
            tree = tree[name]
        if isinstance(tree, Container):
            return OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
        return tree
    except (OmegaConfBaseException, RecursionError) as error:
        return Unresolved(_reason(error, values, path))


def _reason(error: Exception, values: Mapping[tuple[str, ...], Any], path: tuple[str, ...]) -> str:
    """Why an interpolation at `path` has no value; `values` is everything that can be pointed at."""
    circle = _circle(values, [path])
    if circle is not None:
        return f"it goes in a circle: {' -> '.join(map(_dotted, circle))}"
    if isinstance(error, RecursionError):
        return "it refers to itself"
    if isinstance(error, MissingMandatoryValue | InterpolationToMissingValueError):
        return "it points at a value that is still to be set, ???"
    return _first_line(error)


def _circle(values: Mapping[tuple[str, ...], Any], trail: list[tuple[str, ...]]) -> list[tuple[str, ...]] | None:
    """The first circle of references that the last path of `trail` leads to; None if there is none."""
    text = str(values.get(trail[-1], ""))
    for reference in _REFERENCE.findall(text) if "${" in text else ():
        target = tuple(reference.split("."))
        for path in values:
            if path[: len(target)] != target:
                continue
            if path in trail:
                return [*trail[trail.index(path) :], path]
            circle = _circle(values, [*trail, path])
            if circle is not None:
                return circle
    return None


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(path).removesuffix(".backend")


def _first_line(error: Exception) -> str:
    """OmegaConf's message without its context lines, and without the exception that a resolver raised."""
    line = str(error).partition("\n")[0].strip()
    return line.partition(" raised while resolving interpolation: ")[2].strip("\"'") or line


@contextmanager
def _environment(environ: Mapping[str, str] | None) -> Iterator[None]:
    """Lets `${oc.env:NAME}` read `environ`. Resolvers belong to the process, so the stock one is put back."""
    if environ is None:
        yield
        return
    unset = object()

    def read(key: str, default: Any = unset) -> str | None:
        if key not in environ and default is unset:
            raise KeyError(f"Environment variable '{key}' not found")
        value = environ.get(key, default)
        return None if value is None else str(value)

    with _ONE_ENVIRONMENT_AT_A_TIME:
        OmegaConf.register_resolver("oc.env", read, replace=True, annotation_validation="off")
        try:
            yield
        finally:
            OmegaConf.register_resolver("oc.env", oc.env, replace=True, annotation_validation="off")
