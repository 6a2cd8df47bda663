"""What `raylysses bench attention` is asked for: shapes x plans x backends. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, gcd
from typing import Any

from backends.entries import resolve_entry
from backends.registry import Registry
from configs.faults import Fault, FaultError, nearest
from configs.schema import AUTO, STRATEGIES, AttentionConfig, ParallelConfig
from configs.sources import ENVIRONMENT

ROLE = "self"
KERNEL = "kernel"
"""The plan of a baseline: one rank's kernel, without an exchange."""
_SHAPE = re.compile(r"[1-9]\d*(x[1-9]\d*){3,4}")
_PLAN = re.compile(r"(?P<ulysses>[1-9]\d*)x(?P<ring>[1-9]\d*)(:(?P<strategy>\w+))?")
_BETWEEN_GROUPS = ("ring", "gather_kv")
_OF_PLANS = ("parallel.strategy", "parallel.ulysses", "parallel.ring")
_OF_VIDEOS = ("generate", "model", "run.outputs", "run.save_latents")


@dataclass(frozen=True)
class Shape:
    """Of one call over all ranks: batch, rows of the whole sequence, heads, head size, KV heads."""

    batch: int
    length: int
    heads: int
    head_size: int
    kv_heads: int

    def __str__(self) -> str:
        text = f"{self.batch}x{self.length}x{self.heads}x{self.head_size}"
        return text if self.kv_heads == self.heads else f"{text}x{self.kv_heads}"

    def of_one_rank(self, world_size: int) -> Shape:
        """The share of the busiest rank: the full sequence, H/P heads, rounded up, with KV heads that divide them."""
        heads = ceil(self.heads / world_size)
        kv_heads = gcd(heads, ceil(self.kv_heads / world_size))
        return replace(self, heads=heads, kv_heads=kv_heads)


@dataclass(frozen=True)
class Case:
    """A cell of the grid: a shape by a plan and a backend, as they were asked for; or a baseline, whose plan is
    `KERNEL`. index: its place in the grid.
    """

    index: int
    shape: Shape
    plan: str
    backend: str
    attention: AttentionConfig
    parallel: ParallelConfig

    @property
    def is_baseline(self) -> bool:
        return self.plan == KERNEL

    def __str__(self) -> str:
        return f"{self.shape} {self.plan} {self.backend}"


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """BxSxHxD or BxSxHxDxHkv, separated by commas. Raises FaultError with every fault."""
    found, faults = [], []
    for word in _words(text):
        numbers = tuple(int(number) for number in word.split("x")) if _SHAPE.fullmatch(word) else ()
        if not numbers:
            rule = "is no shape: batch x rows x heads x head size, and KV heads if they are fewer"
            faults.append(Fault("--shapes", word, rule, "write it as in 1x4608x24x128 or 1x4608x24x128x8"))
            continue
        batch, length, heads, head_size, *fewer = numbers
        shape = Shape(batch, length, heads, head_size, *(fewer or [heads]))
        if shape.heads % shape.kv_heads:
            rule = f"{shape.heads} query heads are no multiple of {shape.kv_heads} KV heads"
            faults.append(Fault("--shapes", word, rule, "give a number of KV heads that divides the query heads"))
        found.append(shape)
    _raise("--shapes", text, _words(text), faults)
    return tuple(found)


def parse_plans(text: str) -> dict[str, ParallelConfig]:
    """Names out of `STRATEGIES`, or degrees as in 2x2 (Ulysses x ring) and 2x2:gather_kv. Raises FaultError."""
    found, faults = {}, []
    for word in _words(text):
        degrees = _PLAN.fullmatch(word)
        if degrees is not None and degrees["strategy"] not in (None, *_BETWEEN_GROUPS):
            rule = f"degrees go with {' or '.join(_BETWEEN_GROUPS)}, which moves keys between the Ulysses groups"
            plain = word.partition(":")[0]
            remedy = f"write {plain} or {plain}:gather_kv"
            faults.append(Fault("--plans", word, rule, remedy, _BETWEEN_GROUPS))
        elif degrees is not None:
            strategy = degrees["strategy"] or AUTO
            found[word] = ParallelConfig(ulysses=int(degrees["ulysses"]), ring=int(degrees["ring"]), strategy=strategy)
        elif word in STRATEGIES:
            found[word] = ParallelConfig(strategy=word)
        else:
            close = nearest(word, STRATEGIES)
            remedy = f"did you mean {' or '.join(close)}?" if close else f"use {', '.join(STRATEGIES)}, or 2x2"
            rule = "is no plan: a strategy, or degrees of Ulysses x ring"
            faults.append(Fault("--plans", word, rule, remedy, STRATEGIES))
    _raise("--plans", text, _words(text), faults)
    return found


def parse_backends(text: str | None, config: AttentionConfig, registry: Registry) -> dict[str, AttentionConfig]:
    """The configuration of each backend that is named; without names the one at hand, by what it says of `self`.
    Raises FaultError.
    """
    others = [role for role in config.per_role if role != ROLE]
    if others:
        key, rule = f"attention.per_role.{others[0]}", f"a bench has the role {ROLE} alone, and nothing would use it"
        raise FaultError([Fault(key, None, rule, "leave it out", origin=config.origins.get(key, ""))])
    if text is None:
        entry = resolve_entry(ROLE, ROLE, config)
        return {AUTO if entry.explicit is None else entry.explicit.backend: config}
    if config.origins.get("attention.default") == ENVIRONMENT:  # a last resort, and --backends names the backends
        config = replace(config, default=None)
    if config.default is not None or config.per_role:
        key = "attention.default" if config.default is not None else f"attention.per_role.{next(iter(config.per_role))}"
        rule = "nothing would use it, as --backends names the backends"
        raise FaultError([Fault(key, None, rule, "leave one of the two out", origin=config.origins.get(key, ""))])
    found, faults = {}, []
    known = (AUTO, *registry.names())
    for word in _words(text):
        if word not in known:
            close = nearest(word, known)
            remedy = f"did you mean {' or '.join(close)}?" if close else "see raylysses backends"
            faults.append(Fault("--backends", word, "no backend has that name", remedy, known))
        found[word] = (
            replace(config, default=None)
            if word == AUTO
            else AttentionConfig(backend=word, register=config.register, agreement=config.agreement)
        )
    _raise("--backends", text, _words(text), faults)
    return found


def unused_settings(words: Sequence[str]) -> list[Fault]:
    """Faults of overrides that a bench has no use for."""
    found = []
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        if key in _OF_PLANS:
            found.append(Fault(key, value, "the plans are given with --plans", "write --plans ring,2x2 and the like"))
        elif key.startswith(_OF_VIDEOS):
            found.append(Fault(key, value, "a bench makes no video, and nothing would use it", "leave it out"))
    return found


def own_settings(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a bench has a use for, of a configuration as a file has it."""
    found: dict[str, Any] = {}
    for group, values in mapping.items():
        kept = {
            name: value for name, value in values.items() if not f"{group}.{name}".startswith((*_OF_VIDEOS, *_OF_PLANS))
        }
        if kept:
            found[group] = kept
    return found


def cases_of(
    shapes: Sequence[Shape],
    plans: dict[str, ParallelConfig],
    backends: dict[str, AttentionConfig],
    world_size: int,
) -> tuple[Case, ...]:
    """The grid, shape by shape, the baselines of a shape before its cells."""

    def cells() -> Iterator[tuple[Shape, str, str, ParallelConfig]]:
        for shape in shapes:
            for backend in backends:
                yield shape.of_one_rank(world_size), KERNEL, backend, ParallelConfig()
            for plan, backend in product(plans, backends):
                yield shape, plan, backend, plans[plan]

    return tuple(
        Case(index, shape, plan, backend, backends[backend], parallel)
        for index, (shape, plan, backend, parallel) in enumerate(cells())
    )


def common_heads(shapes: Sequence[Shape]) -> int:
    """The largest number that divides the heads of every shape."""
    return gcd(*(shape.heads for shape in shapes))


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _raise(option: str, text: str, words: Sequence[str], faults: Sequence[Fault]) -> None:
    if faults:
        raise FaultError(faults)
    if not words:
        raise FaultError([Fault(option, text, "names nothing", "give at least one, or leave the option out")])
