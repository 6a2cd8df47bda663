"""Option blocks: the typed settings that belong to a backend, checked against its declaration.

A block is a frozen dataclass whose fields are made with `option(check)`. A `faults()` method of it may refuse fields
that do not go together, and `model_faults(model, calibration)` what a checkpoint lacks for them. A block that means
another thing for each layer has `layer_faults(layer)` and `of_layer(layer)`, which is what the layer's kernel gets.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from backends.calibration import Calibration, Uncalibrated
from backends.layer_facts import LayerFacts
from configs.checks import Check, Refusal
from configs.faults import Fault, FaultError, unknown_name_remedy
from configs.layers import render
from configs.schema import AUTO, AttentionSpec

if TYPE_CHECKING:
    from backends.interface import AttentionBackend

Blocks = tuple[tuple[str, Any], ...]
"""Option blocks as they are handed on: (name, frozen dataclass), hashable."""


def option(check: Check, default: Any = None) -> Any:
    """A field of an option block: `check` of `configs.checks` for every value but the default."""
    return field(default=default, metadata={"check": check})


class Owners(Protocol):
    """Who takes an option block: the registry."""

    def owners(self, block: str) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Place:
    """Where a spec stands: its key (`attention.per_role.cross`), and the origins of all keys."""

    key: str
    origins: Mapping[str, str]

    def fault(self, path: str, value: Any, rule: str, remedy: str, allowed: tuple[str, ...] = ()) -> Fault:
        """A fault of what is set at `path` below the spec."""
        key = f"{self.key}.{path}"
        below = (origin for name, origin in self.origins.items() if name.startswith(f"{key}."))
        return Fault(key, value, rule, remedy, allowed, self.origins.get(key) or next(below, ""))


def read_blocks(
    backend: type[AttentionBackend], spec: AttentionSpec, place: Place, owners: Owners
) -> tuple[Blocks, list[Fault]]:
    """The spec's option blocks as the backend declares them, and every fault of them."""
    blocks: list[tuple[str, Any]] = []
    faults: list[Fault] = []
    for name, values in sorted(spec.blocks.items()):
        if name not in backend.blocks:
            faults.append(_foreign(name, backend.get_name(), place, owners))
            continue
        block, found = _read(backend.blocks[name], name, values, place)
        faults += found
        if block is not None:
            blocks.append((name, block))
    return tuple(blocks), faults


def ownerless_faults(spec: AttentionSpec, place: Place, owners: Owners) -> list[Fault]:
    """The faults of options beside `auto`: they belong to a backend, and none is named."""
    found = [_foreign(name, AUTO, place, owners) for name in spec.blocks]
    if spec.version is not None:
        found.append(place.fault("version", spec.version, "no backend is named that has versions", "name one"))
    if spec.on_unsupported != "error":
        rule = "no backend is named that could be unsupported"
        found.append(place.fault("on_unsupported", spec.on_unsupported, rule, "name one, or leave it out"))
    return found


def _foreign(block: str, backend: str, place: Place, owners: Owners) -> Fault:
    takers = owners.owners(block)
    rule = (
        f"{backend} takes no block {block}" if backend != AUTO else f"{block} belongs to a backend, and none is named"
    )
    belongs = f"; it belongs to {' and '.join(takers)}" if takers else "; no backend takes it"
    remedy = f"leave it out, or use {' or '.join(takers)}" if takers else "leave it out"
    return place.fault(block, None, rule + belongs, remedy, takers)


def _read(schema: type, name: str, values: Mapping[str, Any], place: Place) -> tuple[Any, list[Fault]]:
    checks: dict[str, Check] = {entry.name: entry.metadata["check"] for entry in dataclasses.fields(schema)}
    faults: list[Fault] = []
    read: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{name}.{key}"
        if key not in checks:
            faults.append(place.fault(path, value, f"{name} has no {key}", unknown_name_remedy(key, tuple(checks))))
            continue
        if value is None:
            continue  # as if it were not set
        given = list(value) if isinstance(value, tuple) else value
        checked = checks[key](given, render(given))
        if isinstance(checked, Refusal):
            shown = render(value) if isinstance(value, str) else value  # text that looks like a number has quotes
            faults.append(place.fault(path, shown, checked.rule, checked.remedy, checked.allowed))
        else:
            read[key] = tuple(checked) if isinstance(checked, list) else checked
    if faults:
        return None, faults
    block = schema(**read)
    return block, [place.fault(name, None, refusal.rule, refusal.remedy) for refusal in _own_faults(block)]


def model_faults(blocks: Blocks, model: str, calibration: Calibration | Uncalibrated, place: Place) -> list[Fault]:
    """What the checkpoint of a model (`transformer`) lacks for the options."""
    return _placed(blocks, "model_faults", (model, calibration), place)


def layer_options(schemas: Mapping[str, type], blocks: Blocks, layer: LayerFacts, place: Place) -> Blocks:
    """The options of one layer as its kernel gets them; a block of `schemas` that is not set has its defaults.

    Raises FaultError for what the layer lacks for them.
    """
    faults = _placed(blocks, "layer_faults", (layer,), place)
    if faults:
        raise FaultError(faults)
    full = {**{name: schema() for name, schema in schemas.items()}, **dict(blocks)}
    return tuple((name, block.of_layer(layer) if hasattr(block, "of_layer") else block) for name, block in full.items())


def _placed(blocks: Blocks, method: str, arguments: tuple[Any, ...], place: Place) -> list[Fault]:
    return [
        place.fault(f"{name}.{field}", getattr(block, field), refusal.rule, refusal.remedy, refusal.allowed)
        for name, block in blocks
        if hasattr(block, method)
        for field, refusal in getattr(block, method)(*arguments)
    ]


def _own_faults(block: Any) -> Iterator[Refusal]:
    own = getattr(block, "faults", None)
    yield from own() if own is not None else ()


@functools.cache
def field_names(schema: type) -> tuple[str, ...]:
    """The fields of an option block, for the tables."""
    return tuple(entry.name for entry in dataclasses.fields(schema))


def as_mappings(blocks: Blocks) -> dict[str, dict[str, Any]]:
    """Blocks as plain data for a report, without what was not set."""
    return {
        name: {key: value for key, value in dataclasses.asdict(block).items() if value is not None}
        for name, block in blocks
    }
