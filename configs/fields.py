"""What each key of `configs.schema` takes: a check, which returns the value to store, or a `Refusal`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from configs.faults import nearest
from configs.schema import AUTO, DEVICES, DTYPES, OUTPUTS, AttentionSpec

DEFAULT = "attention.default"
PER_ROLE = "attention.per_role"
REGISTER = "attention.register"
GROUPS = ("model", "generate", "attention", "parallel", "cluster", "run")


@dataclass(frozen=True)
class Refusal:
    """Why a value is not taken, and the way out; both read on after `key=value:`."""

    rule: str
    remedy: str
    allowed: tuple[str, ...] = ()


LONGEST_S = 1e6
"""No timeout is longer, in seconds; what waits for it counts in 32 bits of milliseconds."""

# check(value, source): `source` is the value as it was written, which is what a number given for a text stands for.
Check = Callable[[Any, str], Any]


def _whole(minimum: int, maximum: int | None = None) -> Check:
    limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def check(value: Any, source: str) -> Any:
        if type(value) is int and minimum <= value and (maximum is None or value <= maximum):
            return value
        return Refusal(f"takes a whole number {limits}", f"give one, such as {max(minimum, 8)}")

    return check


def _real(minimum: float, maximum: float = math.inf, *, above: bool = False) -> Check:
    limits = f"above {minimum:g}" if above else f"of at least {minimum:g}"
    limits += "" if maximum == math.inf else f" and at most {maximum:g}"

    def check(value: Any, source: str) -> Any:
        if type(value) in (int, float):
            try:
                number = float(value)
            except OverflowError:  # an int beyond the largest float
                number = math.inf
            low_enough = math.isfinite(number) and number <= maximum
            if low_enough and (number > minimum if above else number >= minimum):
                return number
        return Refusal(f"takes a finite number {limits}", "give one, such as 3.0")

    return check


def _text(*, empty: bool = False) -> Check:
    def check(value: Any, source: str) -> Any:
        if type(value) in (int, float):
            value = source
        if not isinstance(value, str):
            return Refusal("takes text", f"put it in quotes, as '{source}'")
        if any(char == "\0" or "\ud800" <= char <= "\udfff" for char in value):
            return Refusal("has a character that is not text", "leave it out")
        if value == "???":
            return Refusal("is marked as still to be set", "set it, or leave it out")
        if not value.strip() and not empty:
            return Refusal("is empty", "give it a value, or leave it out")
        return value

    return check


def _switch(value: Any, source: str) -> Any:
    if isinstance(value, bool):
        return value
    return Refusal("takes true or false", "write one of the two words", ("true", "false"))


def _choice(names: tuple[str, ...]) -> Check:
    def check(value: Any, source: str) -> Any:
        if isinstance(value, str) and value in names:
            return value
        return Refusal(f"takes {_listed(names, 'or')}", _near(value, names), names)

    return check


def _subset(names: tuple[str, ...]) -> Check:
    def check(value: Any, source: str) -> Any:
        takes = f"takes a list of {_listed(names, 'and')}"
        if not isinstance(value, list):
            return Refusal(takes, f"write [{','.join(names)}], or less", names)
        for item in value:
            if item not in names:
                return Refusal(f"{takes}, not {item}", _near(item, names), names)
        if len(set(value)) != len(value):
            return Refusal("has a name twice in the list", "keep each name once", names)
        return tuple(value)

    return check


def _optional(check: Check) -> Check:
    return lambda value, source: None if value is None else check(value, source)


def _ranks(value: Any, source: str) -> Any:
    if value is None or (isinstance(value, str) and value.casefold() == AUTO):
        return None
    if type(value) is int and value >= 1:
        return value
    return Refusal("takes a whole number of at least 1, or auto", "give the number of ranks, or leave it on auto")


def _address(value: Any, source: str) -> Any:
    if isinstance(value, str):
        host, _, port = value.rpartition(":")
        is_address = re.fullmatch(r"[\w.-]+|\[[0-9a-fA-F:]+\]", host) and port.isdecimal() and int(port) < 65536
        if value == "local" or is_address:
            return value
    remedy = "write the address that `ray start --head` prints, such as 10.0.0.1:6379, or local"
    return Refusal("takes local, or HOST:PORT of a Ray head", remedy)


def _backend(value: Any, source: str) -> Any:
    """A name, which `backends` checks. It comes as a mapping where an interpolation points at another choice."""
    if isinstance(value, dict) and set(value) >= {"backend"}:
        value = value["backend"]
    if not isinstance(value, str) or not value.strip():
        return Refusal("takes the name of a backend, or auto", "give a name such as TORCH_SDPA, or auto")
    return AttentionSpec(AUTO if value.casefold() == AUTO else value)


def _backend_or_none(value: Any, source: str) -> Any:
    return None if value in (None, {"backend": None}) else _backend(value, source)


def _class_path(value: Any, source: str) -> Any:
    parts = value.split(".") if isinstance(value, str) else []
    if len(parts) >= 2 and all(part.isidentifier() for part in parts):
        return value
    return Refusal("takes the dotted path of a class", "write package.module.Class")


def _listed(names: tuple[str, ...], joint: str) -> str:
    return f"{', '.join(names[:-1])} {joint} {names[-1]}"


def _near(value: Any, names: tuple[str, ...]) -> str:
    close = nearest(str(value), names)
    return f"did you mean {' or '.join(close)}?" if close else "use one of these names"


_CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "model.path": _text(),
        "generate.prompt": _optional(_text(empty=True)),  # a file may leave it open; `compose` checks the outcome
        "generate.negative_prompt": _text(empty=True),
        "generate.steps": _whole(1),
        "generate.guidance": _real(0),
        "generate.guidance_2": _optional(_real(0)),
        "generate.flow_shift": _optional(_real(0, above=True)),
        "generate.frames": _whole(1),
        "generate.height": _whole(1),
        "generate.width": _whole(1),
        "generate.fps": _whole(1, 1000),
        "generate.image": _optional(_text()),
        DEFAULT: _backend_or_none,
        "parallel.world_size": _ranks,
        "cluster.address": _address,
        "cluster.start_timeout_s": _real(0, LONGEST_S, above=True),
        "cluster.stall_timeout_s": _real(0, LONGEST_S, above=True),
        "run.seed": _whole(0, 2**63 - 1),
        "run.dir": _optional(_text()),
        "run.dtype": _choice(DTYPES),
        "run.device": _choice(DEVICES),
        "run.outputs": _subset(OUTPUTS),
        "run.save_latents": _switch,
    }
)


def known_keys() -> tuple[str, ...]:
    """Every dotted key that takes one value, without the open-ended ones, such as `attention.per_role.ROLE`."""
    return tuple(_CHECKS)


def check_value(key: str, value: Any, source: str) -> Any:
    """The value to store at `key`, converted (`3` to 3.0, a backend's name to an `AttentionSpec`), or a `Refusal`."""
    if key.startswith(f"{PER_ROLE}."):
        return _backend(value, source)
    if key.startswith(f"{REGISTER}."):
        return _class_path(value, source)
    return _CHECKS[key](value, source)


def unknown_key_remedy(key: str) -> str:
    """`did you mean generate.steps?` for `generate.step`, `genrate.steps` and `steps`; otherwise the keys there are."""
    candidates = (*_CHECKS, "model", f"{DEFAULT}.backend", f"{PER_ROLE}.ROLE", f"{REGISTER}.NAME")
    group = [candidate for candidate in candidates if candidate.split(".")[0] == key.split(".")[0]]
    # The last name decides first: whole paths of one group look alike, so that any of them would be near.
    pool = group or candidates
    by_leaf = {candidate.split(".")[-1]: candidate for candidate in reversed(pool)}
    close = [by_leaf[leaf] for leaf in nearest(key.split(".")[-1], by_leaf)] or list(nearest(key, candidates, count=1))
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"use one of {', '.join(pool)}"
