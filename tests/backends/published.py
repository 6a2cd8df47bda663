"""Doubles are bound to the recorded signatures of what they stand for: a call that a release does not take fails.

`signatures.json` is made by `scripts/read_signatures.py` from the vendors' packages; each entry names its source.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from packaging.version import Version

from vendor_signatures.record import Signature, load

FILE = Path(__file__).with_name("signatures.json")
RECORDED = load(FILE)
DOUBLES: dict[str, Callable[..., Any]] = {}
"""What stands for a callable, by its dotted path."""
BOUND: set[str] = set()
"""The callables whose doubles were called."""
Double = TypeVar("Double", bound=Callable[..., Any])


def releases(path: str) -> tuple[Signature, ...]:
    """The recorded signatures of a callable, oldest release first. Raises KeyError if there is none."""
    found = [entry for entry in RECORDED if entry.callable == path]
    if not found:
        raise KeyError(f"no signature of {path} is recorded: run scripts/read_signatures.py on its package")
    return tuple(found if len(found) == 1 else sorted(found, key=lambda entry: Version(entry.version)))


def as_inspect(entry: Signature) -> inspect.Signature:
    """Its defaults are source texts."""
    return inspect.Signature(
        [
            inspect.Parameter(
                part.name,
                getattr(inspect.Parameter, part.kind),
                default=inspect.Parameter.empty if part.default is None else part.default,
            )
            for part in entry.parameters
        ]
    )


def as_published(path: str, *, bound: bool = False) -> Callable[[Double], Double]:
    """Every call of the double has to fit every recorded release. bound: the double is the method of an object that
    stands for the module, and the callable has no `self`. Raises KeyError if nothing is recorded.
    """
    bindings = [(entry, as_inspect(entry)) for entry in releases(path)]

    def decorate(double: Double) -> Double:
        @functools.wraps(double)
        def call(*args: Any, **kwargs: Any) -> Any:
            for entry, signature in bindings:
                try:
                    signature.bind(*args[bound:], **kwargs)
                except TypeError as error:
                    raise TypeError(f"{path} of {entry.distribution} {entry.version}: {error}") from None
            BOUND.add(path)
            return double(*args, **kwargs)

        DOUBLES[path] = functools.partial(double, None) if bound else double
        return call  # type: ignore[return-value]

    return decorate


def differences(double: Callable[..., Any], entry: Signature) -> Iterator[str]:
    """How a double's parameters differ from those of a release."""
    ours, theirs = inspect.signature(double).parameters, entry.parameters
    if tuple(ours) != tuple(part.name for part in theirs):
        yield f"{tuple(ours)} are not {tuple(part.name for part in theirs)}"
        return
    for part in theirs:
        mine = ours[part.name]
        if mine.kind.name != part.kind:
            yield f"{part.name} is {mine.kind.name}, not {part.kind}"
        if (mine.default is inspect.Parameter.empty) != (part.default is None):
            yield f"{part.name} has {mine.default!r} for a default, not {part.default}"
        elif part.default is not None and not _is_written(mine.default, part.default):
            yield f"{part.name} is {mine.default!r} by default, not {part.default}"


def _is_written(value: Any, source: str) -> bool:
    try:
        literal = ast.literal_eval(source)
    except ValueError:
        return str(value) == source  # `torch.int8`
    return type(value) is type(literal) and bool(value == literal)
