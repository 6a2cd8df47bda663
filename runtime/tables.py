"""The feature tables: what every backend takes, found by asking its predicates over a grid of calls and devices.

Nothing here knows a backend: a cell is what `Variant.faults` answers, so the tables cannot say anything else than a
selection does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import reduce
from itertools import product
from math import gcd
from typing import Any, get_args

from backends.interface import AttentionBackend, Requirements, Variant
from backends.options import field_names
from backends.platforms.facts import DeviceFacts, parse_device
from backends.platforms.policy import priority
from backends.registry import Registry
from backends.requirements import MaskKind
from backends.variant import DTYPES
from configs.faults import FaultError
from parallel.planner import RINGS

DEVICES = (
    *("cpu", "cuda:7.5", "cuda:8.0", "cuda:8.6", "cuda:8.9", "cuda:9.0", "cuda:10.0", "cuda:10.3"),
    *(
        "cuda:10.7",
        "cuda:11.0",
        "cuda:12.0",
        "cuda:12.1",
        "rocm:gfx90a",
        "rocm:gfx942",
        "rocm:gfx950",
        "npu",
        "xpu",
        "musa:2.1",
        "musa:3.1",
    ),
)
"""A chip of every platform and generation that some declaration or policy tells from another."""
LARGEST_HEAD = 1024
MASKS: tuple[MaskKind, ...] = get_args(MaskKind)
STRATEGIES = ("local", "ulysses", "ring", "gather_kv")
"""Each alone; where both are served, so are Ulysses groups with the other between them."""
SWITCHES = ("causal", "bias", "window", "soft_cap", "sinks", "packed", "lse", "gradient", "learned_gradient")
_BASE = Requirements(head_size=128, num_heads=8, num_kv_heads=8, dtype="bfloat16", kind="self")


@dataclass(frozen=True)
class FeatureRow:
    """What one variant takes. devices: of `DEVICES`. options: `block.field` of its backend. strategies: of the
    exchange around it. run_on: where its tests have passed on hardware.
    """

    backend: str
    variant: str
    version: int | None
    packages: tuple[str, ...]
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    head_sizes: str
    masks: tuple[str, ...]
    causal: bool
    bias: bool
    window: bool
    soft_cap: bool
    sinks: bool
    grouped: bool
    value_head_size: bool
    packed: bool
    lse: bool
    gradient: bool
    lse_gradient: bool
    learned_gradient: bool
    strategies: tuple[str, ...]
    options: tuple[str, ...]
    exactness: str
    compilation: str
    run_on: tuple[str, ...]


@dataclass(frozen=True)
class PriorityRow:
    """The automatic order on a device: of the platform's list, those that have a variant for the chip. permitted: which
    of them only a layer that allows it gets.
    """

    device: str
    backends: tuple[str, ...]
    permitted: tuple[str, ...]


@dataclass(frozen=True)
class Tables:
    features: tuple[FeatureRow, ...]
    priorities: tuple[PriorityRow, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def tables(registry: Registry) -> Tables:
    """The tables of every backend of a registry that can be loaded."""
    backends = []
    for name in registry.names():
        with contextlib.suppress(FaultError):  # it is refused when it is chosen
            backends.append(registry.get_class(name))
    features = tuple(row for backend in backends for row in feature_rows(backend))
    return Tables(features, tuple(_priority_row(label, registry) for label in DEVICES))


def feature_rows(backend: type[AttentionBackend]) -> tuple[FeatureRow, ...]:
    """What each of a backend's variants takes."""
    return tuple(_feature_row(backend, variant) for variant in backend.variants)


def _devices() -> Iterator[DeviceFacts]:
    """Every device of the grid, with all packages, so that only chips and calls decide."""
    return (parse_device(label, {}, all_packages=True) for label in DEVICES)


def _priority_row(label: str, registry: Registry) -> PriorityRow:
    device = parse_device(label, {}, all_packages=True)
    classes = {name: registry.get_class(name) for name in priority(device)}
    runs = {
        name: backend
        for name, backend in classes.items()
        if any(variant.chip_fault(device) is None for variant in backend.variants)
    }
    return PriorityRow(label, tuple(runs), tuple(name for name, backend in runs.items() if backend.asks_permission))


def _feature_row(backend: type[AttentionBackend], variant: Variant) -> FeatureRow:
    devices = tuple(device for device in _devices() if variant.chip_fault(device) is None)
    device = devices[0]

    def takes(**asked: Any) -> bool:
        return not variant.faults(replace(base, **asked), device)

    base = _base_call(variant, device)
    sizes = {size for size in range(1, LARGEST_HEAD + 1) if takes(head_size=size)}
    return FeatureRow(
        backend=backend.get_name(),
        variant=variant.name,
        version=variant.version,
        packages=variant.distributions,
        devices=tuple(each.label for each in devices),
        dtypes=tuple(dtype for dtype in DTYPES if takes(dtype=dtype)),
        head_sizes=describe_sizes(sizes),
        masks=tuple(mask for mask in MASKS if mask != "none" and takes(mask=mask)),
        grouped=takes(num_kv_heads=base.num_heads // 2),
        lse_gradient=takes(lse=True, gradient=True),
        value_head_size=takes(value_head_size=base.head_size * 2),
        strategies=tuple(strategy for strategy in STRATEGIES if takes(lse=strategy in RINGS)),
        options=tuple(f"{block}.{name}" for block, schema in backend.blocks.items() for name in field_names(schema)),
        exactness=variant.exactness,
        compilation=variant.compilation,
        run_on=variant.run_on,
        **{switch: takes(**{switch: True}) for switch in SWITCHES},
    )


def _base_call(variant: Variant, device: DeviceFacts) -> Requirements:
    """A plain call that the variant takes. Raises ValueError if it takes none of the grid: its row would be empty."""
    for dtype, size in product(DTYPES[1:], (128, 64, *range(8, LARGEST_HEAD + 1, 8))):
        call = replace(_BASE, dtype=dtype, head_size=size)
        if not variant.faults(call, device):
            return call
    raise ValueError(f"variant {variant.name} takes no plain call on {device.label}")


def describe_sizes(sizes: Iterable[int]) -> str:
    """`any`, `multiples of 8 up to 128, and 256`, or the sizes themselves; from the set of those that are taken."""
    found = sorted(sizes)
    if found == list(range(1, LARGEST_HEAD + 1)):
        return "any"
    step = reduce(gcd, found)
    run = 1
    while run < len(found) and found[run] == found[run - 1] + step:
        run += 1
    if found[0] != step or run < 4:
        return ", ".join(map(str, found))
    also = f", and {', '.join(map(str, found[run:]))}" if found[run:] else ""
    limit = "" if found[run - 1] + step > LARGEST_HEAD else f" up to {found[run - 1]}"
    return f"multiples of {step}{limit}{also}" if step > 1 else f"any{limit}{also}"
