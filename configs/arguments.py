"""Settings out of Python's arguments, for code that has no command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from configs.compose import compose
from configs.faults import Fault, FaultError, nearest, unknown_name_remedy
from configs.overrides import ORIGIN
from configs.schema import AttentionConfig, AttentionSpec, ParallelConfig

AttentionArgument = AttentionConfig | AttentionSpec | Mapping[str, Any] | Sequence[str] | str | None
ARGUMENT = "argument"
PARALLEL_KEYS = ("parallel.strategy", "parallel.ulysses", "parallel.ring")
_FIELDS = ("default", "per_role", "register", "agreement", "backend")


def library_settings(
    attention: AttentionArgument, parallel: Mapping[str, Any]
) -> tuple[AttentionConfig, ParallelConfig]:
    """What a caller asks for. attention: an `AttentionConfig`; a spec or a name for every role; a mapping of its fields
    (`{"default": ..., "per_role": ...}`); or overrides (`attention.per_role.self=NAME`), of `PARALLEL_KEYS`, too.
    parallel: fields of `ParallelConfig`, None for those that are left alone.

    Raises FaultError with all that is wrong.
    """
    overrides = _overrides(attention)
    keys = [text.lstrip("+~").partition("=")[0] for text in overrides]
    foreign = [
        _foreign(key, text)
        for key, text in zip(keys, overrides, strict=True)
        if not key.startswith("attention.") and key not in PARALLEL_KEYS
    ]
    given = [f"parallel.{name}={value}" for name, value in parallel.items() if value is not None]
    # The composition is of a whole run; nobody here is going to generate anything.
    config, faults = compose(["generate.prompt='-'", *(() if foreign else overrides), *given])
    if foreign or config is None:
        raise FaultError([*foreign, *(replace(fault, origin=_renamed(fault.origin)) for fault in faults)])
    chosen = _config(attention)
    if chosen is None:
        origins = {key: _renamed(origin) for key, origin in config.attention.origins.items()}
        chosen = replace(config.attention, origins=origins)
    return chosen, config.parallel


def _overrides(attention: AttentionArgument) -> list[str]:
    if isinstance(attention, str):
        return [attention] if "=" in attention else []
    if attention is None or isinstance(attention, AttentionConfig | AttentionSpec | Mapping):
        return []
    return list(attention)


def _config(attention: AttentionArgument) -> AttentionConfig | None:
    """The configuration that the argument is; None where it is made of overrides."""
    if isinstance(attention, AttentionConfig):
        return attention
    if isinstance(attention, AttentionSpec) or (isinstance(attention, str) and "=" not in attention):
        return AttentionConfig(backend=attention)
    if not isinstance(attention, Mapping):
        return None
    unknown: Iterable[Any] = [name for name in attention if name not in _FIELDS]
    faults = [
        Fault(f"attention.{name}", None, "no such field of a configuration", unknown_name_remedy(str(name), _FIELDS))
        for name in unknown
    ]
    if faults:
        raise FaultError(faults)
    return AttentionConfig(**attention)


def _foreign(key: str, text: str) -> Fault:
    rule = "nothing would use it: here the attention is configured, and the ranks and the model are the caller's"
    close = nearest(key, PARALLEL_KEYS)
    remedy = f"did you mean {' or '.join(close)}?" if close else f"give attention.* and {', '.join(PARALLEL_KEYS)} only"
    return Fault(key, text.partition("=")[2] or None, rule, remedy, origin=ARGUMENT)


def _renamed(origin: str) -> str:
    return ARGUMENT if origin == ORIGIN else origin
