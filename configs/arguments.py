"""The attention and parallel arguments of library calls, which have no command line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from configs.faults import Fault, FaultError, nearest
from configs.fields import DEFAULT, RESERVED
from configs.interpolate import plain_data
from configs.layers import Layer, Setting, Written, children, gather, setting_of
from configs.merge import attention_of, below, merge
from configs.overrides import ORIGIN
from configs.schema import AttentionConfig, AttentionSpec, ParallelConfig
from configs.sources import command_line_layer, environment_layer
from configs.specs import choice_tree
from configs.trees import flatten

AttentionArgument = AttentionConfig | AttentionSpec | Enum | Mapping[str, Any] | Sequence[str] | str | None
ARGUMENT = "argument"
PARALLEL_KEYS = (
    "parallel.strategy",
    "parallel.ulysses",
    "parallel.ring",
    "parallel.exchange_dtype",
    "parallel.transport",
)
_FORMS = (
    "a backend's name, a member of an Enum, an AttentionSpec, an AttentionConfig, a mapping, or overrides KEY=VALUE"
)


def attention_settings(attention: AttentionArgument, environ: Mapping[str, str] | None = None) -> AttentionConfig:
    """Read the `attention` argument of a library call.

    Args:
        attention: one of these forms. None; a backend's name; a member of an Enum, by its name; an `AttentionSpec`; an
            `AttentionConfig`; a mapping of a choice (`{"backend": ..., "version": ...}`), of a configuration
            (`{"default": ..., "per_role": {...}}`) or of both; one override (`attention.per_role.self=NAME`) or a list
            of them. OmegaConf's containers count as mappings and lists. Only overrides may hold interpolations.
        environ: what sets an unset `attention.default`; None is the process's environment.

    Returns:
        The configuration, whose `default` is the environment's backend if the argument sets none.

    Raises:
        FaultError: everything that is wrong with the argument.
    """
    return _read(attention, {}, (), environ)[0]


def library_settings(
    attention: AttentionArgument, parallel: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> tuple[AttentionConfig, ParallelConfig]:
    """Read the arguments of a call that configures attention and parallelism.

    Args:
        attention: as `attention_settings` reads it; overrides may also set `PARALLEL_KEYS`.
        parallel: fields of `ParallelConfig`, taken literally; None leaves a field at its default.
        environ: as in `attention_settings`.

    Returns:
        The attention configuration, and the parallel one.

    Raises:
        FaultError: everything that is wrong with the arguments.
    """
    return _read(attention, parallel, PARALLEL_KEYS, environ)


def _read(
    attention: AttentionArgument,
    parallel: Mapping[str, Any],
    others: tuple[str, ...],
    environ: Mapping[str, str] | None,
) -> tuple[AttentionConfig, ParallelConfig]:
    """others: the keys beside `attention.*` that overrides may set."""
    literal = Written(ARGUMENT, literal=True)
    found = list(_settings(plain_data(attention), others))
    found += [
        setting_of(f"parallel.{name}", value, None, literal) for name, value in parallel.items() if value is not None
    ]
    layer = gather(found)
    environment = environment_layer(os.environ if environ is None else environ)
    merged = merge([Layer({}, ()), layer], environment, environ)
    faults = [*layer.faults, *(replace(fault, origin=_renamed(fault.origin)) for fault in merged.faults)]
    if faults:
        raise FaultError(dict.fromkeys(faults))
    degrees = ParallelConfig(**dict(below(merged.values, "parallel")))
    config = attention_of(merged)
    return (_with_default(attention, config) if isinstance(attention, AttentionConfig) else config), degrees


def _with_default(given: AttentionConfig, last_resort: AttentionConfig) -> AttentionConfig:
    """The caller's configuration; its default is the environment's if it has none."""
    if given.default is not None or last_resort.default is None:
        return given
    return replace(
        given,
        default=last_resort.default,
        origins={**given.origins, **last_resort.origins},
        may_be_unused=given.may_be_unused | last_resort.may_be_unused,
    )


def _settings(attention: Any, others: tuple[str, ...]) -> Iterator[Setting | Fault]:
    """The settings that an argument stands for, without those of an `AttentionConfig`."""
    if attention is None or isinstance(attention, AttentionConfig):
        return
    if isinstance(attention, Mapping):
        yield from _mapping_settings(choice_tree(attention))
    elif isinstance(attention, Enum | AttentionSpec) or (isinstance(attention, str) and "=" not in attention):
        yield from _mapping_settings({"default": choice_tree(attention)})
    elif isinstance(attention, str):
        yield from _override_settings([attention], others)
    elif isinstance(attention, Sequence) and all(isinstance(text, str) for text in attention):
        yield from _override_settings(attention, others)
    else:
        yield Fault("attention", type(attention).__name__, f"takes {_FORMS}", "pass one of these", origin=ARGUMENT)


def _mapping_settings(tree: Mapping[Any, Any]) -> Iterator[Setting | Fault]:
    """The settings of a configuration's fields and of a choice's, which are those of the default."""
    written = Written(ARGUMENT, trusts_code=True, literal=True)
    given = {name: value for name, value in tree.items() if value is not None}
    of_choice = {name: value for name, value in given.items() if str(name).partition(".")[0] in RESERVED}
    of_config = {name: value for name, value in given.items() if name not in of_choice}
    yield from children(("attention",), of_config, None, written, flatten)
    yield from children(tuple(DEFAULT.split(".")), of_choice, None, written, flatten)


def _override_settings(overrides: Sequence[str], others: tuple[str, ...]) -> Iterator[Setting | Fault]:
    keys = [text.lstrip("+~").partition("=")[0] for text in overrides]
    foreign = [
        _foreign(key, text, others)
        for key, text in zip(keys, overrides, strict=True)
        if not key.startswith("attention.") and key not in others
    ]
    yield from foreign
    if not foreign:
        layer = command_line_layer(overrides)
        yield from (replace(item, origin=_renamed(item.origin)) for item in layer.settings.values())
        yield from (replace(item, origin=_renamed(item.origin)) for item in layer.faults)


def _foreign(key: str, text: str, others: tuple[str, ...]) -> Fault:
    rule = "this call configures attention, and nothing would use it"
    close = nearest(key, others)
    remedy = f"did you mean {' or '.join(close)}?" if close else f"give {', '.join(('attention.*', *others))} only"
    return Fault(key, text.partition("=")[2] or None, rule, remedy, origin=ARGUMENT)


def _renamed(origin: str) -> str:
    return ARGUMENT if origin == ORIGIN else origin
