"""What each key of `configs.schema` takes: a check, which returns the value to store, or a `Refusal`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any

from configs.checks import Check, Refusal, choice, optional, path, real, subset, switch, text, whole
from configs.faults import nearest
from configs.schema import (
    AGREEMENTS,
    AUTO,
    BLOCKS,
    DEVICES,
    DTYPES,
    EXCHANGE_DTYPES,
    IMAGE_FITS,
    ON_UNSUPPORTED,
    OUTPUTS,
    STRATEGIES,
    TRANSPORTS,
)

DEFAULT = "attention.default"
PER_ROLE = "attention.per_role"
REGISTER = "attention.register"
AGREEMENT = "attention.agreement"
GROUPS = ("model", "generate", "attention", "parallel", "cluster", "run")
RESERVED = ("backend", "version", "on_unsupported", *BLOCKS)
"""The keys of a choice, below `attention.default` and below a role: no role is called so."""

LONGEST_S = 1e6
"""No timeout is longer, in seconds; what waits for it counts in 32 bits of milliseconds."""


def name_of(name: Any) -> Any:
    """The name that a member of an Enum stands for; anything else is returned unchanged."""
    return name.name if isinstance(name, Enum) else name


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
    if not isinstance(value, str) or not value.strip():
        return Refusal("takes the name of a backend, or auto", "give a name such as TORCH_SDPA, or auto")
    return AUTO if value.casefold() == AUTO else value


def _version(value: Any, source: str) -> Any:
    if type(value) is int and value >= 1:
        return value
    rule = "takes a whole number of at least 1, the version of the backend's package"
    return Refusal(rule, "give one, such as 3, or leave it out")


def _option(value: Any, source: str) -> Any:
    """A field of an option block: any plain data, as only its backend knows more. A list is copied."""
    for item in value if isinstance(value, list) else [value]:
        if type(item) is str:
            checked = _OPTION_TEXT(item, source)
            if isinstance(checked, Refusal):
                return checked
        elif item is not None and type(item) not in (bool, int, float):
            return Refusal(
                "takes a scalar or a list of scalars", "write text, a number, true, false, or [A,B] of these"
            )
    return list(value) if isinstance(value, list) else value


def name_refusal(name: str) -> Refusal | None:
    """Why no backend can be called so; None if one can."""
    if re.fullmatch(r"[^\W\d][\w-]*", name) and name.casefold() != AUTO:
        return None
    rule = "is not a name of a backend: letters, digits, _ and -, and not auto"
    return Refusal(rule, "rename it, such as MY_BACKEND")


def _class_path(value: Any, source: str) -> Any:
    parts = value.split(".") if isinstance(value, str) else []
    if len(parts) >= 2 and all(part.isidentifier() for part in parts):
        return value
    return Refusal("takes the dotted path of a class", "write package.module.Class")


_DTYPE_WORDS = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_OPTION_TEXT = text(empty=True)
_SPEC_CHECKS: Mapping[str, Check] = MappingProxyType(
    {"backend": _backend, "version": optional(_version), "on_unsupported": choice(ON_UNSUPPORTED)}
)
_CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "model.path": path,
        "generate.prompt": optional(text(empty=True)),  # a file may leave it open; `compose` checks the outcome
        "generate.negative_prompt": text(empty=True),
        "generate.steps": whole(1),
        "generate.guidance": real(0),
        "generate.guidance_2": optional(real(0)),
        "generate.flow_shift": optional(real(0, above=True)),
        "generate.frames": whole(1, example=17),
        "generate.height": whole(1, example=128),
        "generate.width": whole(1, example=128),
        "generate.fps": whole(1, 1000),
        "generate.image": optional(path),
        "generate.image_fit": optional(choice(IMAGE_FITS)),
        DEFAULT: optional(_backend),
        AGREEMENT: choice(AGREEMENTS),
        "parallel.world_size": _ranks,
        "parallel.ulysses": _ranks,
        "parallel.ring": _ranks,
        "parallel.strategy": choice(STRATEGIES),
        "parallel.exchange_dtype": choice(EXCHANGE_DTYPES),
        "parallel.transport": choice(TRANSPORTS),
        "cluster.address": _address,
        "cluster.start_timeout_s": real(0, LONGEST_S, above=True),
        "cluster.stall_timeout_s": real(0, LONGEST_S, above=True),
        "run.seed": whole(0, 2**63 - 1),
        "run.dir": optional(path),
        "run.dtype": choice(DTYPES, _DTYPE_WORDS),
        "run.device": choice(DEVICES, {"gpu": "cuda", "nvidia": "cuda"}),
        "run.outputs": subset(OUTPUTS, not_yet=("report",)),
        "run.save_latents": switch,
    }
)


def known_keys() -> tuple[str, ...]:
    """Every dotted key that takes one value, without the open-ended ones, such as `attention.per_role.ROLE`."""
    return tuple(_CHECKS)


def check_value(key: str, value: Any, source: str) -> Any:
    """The value to store at the canonical `key`, converted (`3` to 3.0, `AUTO` to `auto`), or a `Refusal`."""
    if key.startswith(f"{REGISTER}."):
        return name_refusal(key.removeprefix(f"{REGISTER}.")) or _class_path(value, source)
    if key in _CHECKS:
        return _CHECKS[key](value, source)
    names, rest = split_spec(key.split("."))
    checked = _SPEC_CHECKS.get(rest[0] if rest else "backend", _option)(value, source)
    meant = nearest(names[-1], RESERVED, count=1)
    if isinstance(checked, Refusal) and not rest and meant:  # `self.verison=3` reads as a role
        return Refusal(checked.rule, f"did you mean {'.'.join(names[:-1])}.{meant[0]}?")
    return checked


def split_spec(path: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Where a choice stands, and what of it `path` names: (`attention.per_role.cross`, `quant.dtype_qk`)."""
    at = next((index for index, name in enumerate(path) if name in RESERVED), len(path))
    return tuple(path[:at]), tuple(path[at:])


def is_choice(key: str) -> bool:
    """Whether a key is one of `attention.default` or a role, or stands below it."""
    return key == DEFAULT or key.startswith((f"{DEFAULT}.", f"{PER_ROLE}."))


def is_block(key: str) -> bool:
    """Whether a key is that of a whole option block (`attention.default.quant`)."""
    return is_choice(key) and len(split_spec(key.split("."))[1]) == 1 and key.rpartition(".")[2] in BLOCKS


def owners(key: str) -> set[str]:
    """The keys which take `key` with them where a higher layer sets or removes them.

    A backend takes its own options, as they would not fit another one, but leaves the roles below it alone.
    """
    if not is_choice(key):
        return set()
    spec, rest = split_spec(key.split("."))
    above = {PER_ROLE} if key.startswith(f"{PER_ROLE}.") else set()
    return above | {".".join((*spec, *rest[:count])) for count in range(len(rest))}


def unknown_key(key: str, given: tuple[Any, str] | None = None) -> Refusal:
    """Why a key is not taken, and the way out.

    Args:
        key: a dotted key that does not exist.
        given: its value, and the value as written; None if the fault is not about a value.
    """
    name = next((name for name in _NOT_YET if name == key or name.endswith(f".{key}")), None)
    if name is not None:
        return Refusal("is not available yet", _NOT_YET[name])
    if key in ("resolution", "generate.resolution", "generate.size"):
        return Refusal("no such key", "set generate.height and generate.width")
    close, pool = _near_keys(key)
    if not close:
        return Refusal("no such key", f"use one of {', '.join(pool)}")
    refusals = {candidate: _refusal_of(candidate, given) for candidate in close}
    taking = [candidate for candidate, refusal in refusals.items() if refusal is None]
    if taking:
        return Refusal("no such key", f"did you mean {' or '.join(taking)}?")
    refusal = refusals[close[0]]
    return Refusal("no such key", f"did you mean {close[0]}? It {refusal.rule if refusal else ''}")


def _near_keys(key: str) -> tuple[list[str], list[str]]:
    """Keys that look like `key`, best first, and all keys of its group, or of all groups if it is in none."""
    choice_keys = (f"{DEFAULT}.{word}.FIELD" if word in BLOCKS else f"{DEFAULT}.{word}" for word in RESERVED)
    candidates = (*_CHECKS, "model", *choice_keys, f"{PER_ROLE}.ROLE", f"{REGISTER}.NAME")
    names = key.split(".")
    group = [candidate for candidate in candidates if candidate.split(".")[0] == names[0]]
    pool = group or list(candidates)
    # Single names decide first: whole paths of one group look alike, so that any of them would be near.
    by_leaf = {candidate.removesuffix(".FIELD").split(".")[-1]: candidate for candidate in reversed(pool)}
    leaves = nearest(names[-1], by_leaf) or (nearest(names[1], by_leaf) if len(names) > 2 else ())
    close = [by_leaf[leaf] for leaf in leaves]
    if not close and group:
        by_rest = {candidate.partition(".")[2]: candidate for candidate in group}
        close = [by_rest[rest] for rest in nearest(key.partition(".")[2], by_rest, count=1)]
    elif not close:
        close = list(nearest(key, candidates, count=1))
    return close, pool


def _refusal_of(key: str, given: tuple[Any, str] | None) -> Refusal | None:
    if given is None:
        return None
    if key == "model":  # the presets are known above this module
        return Refusal("takes the name of a preset", "write one")
    checked = check_value(key, *given)
    return checked if isinstance(checked, Refusal) else None


_NOT_YET: Mapping[str, str] = MappingProxyType(
    {
        "parallel.cfg": "leave it out; parallel.ulysses and parallel.ring use all ranks",
        "parallel.overlap": "leave it out",
        "run.retries": "leave it out, and start the run again if it fails",
        "run.checkpoint_every": "leave it out",
        "generate.prompts": "run once for each generate.prompt, or give a raylysses.Session several requests",
    }
)
"""Settings that other systems and later versions have, and what to do without them."""
