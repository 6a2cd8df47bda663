"""Where layers come from: packaged presets, the user's YAML file, the environment's one variable, the command line."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # OmegaConf's own parser, for line numbers and scalars as written
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.checks import Refusal
from configs.faults import LONGEST_SHOWN, Fault, FaultError
from configs.fields import DEFAULT, GROUPS, PER_ROLE, check_value, is_block, unknown_key
from configs.flags import settings_of, split
from configs.interpolate import syntax_error
from configs.layers import PRESET_KEY, Layer, Setting, Written, gather, render
from configs.overrides import ORIGIN, Override, parse_override, quote
from configs.trees import canonical_key, flatten

BACKEND_VARIABLE = "DIFFUSION_ATTENTION_BACKEND"
ENVIRONMENT = f"environment variable {BACKEND_VARIABLE}"
DEFAULT_PRESET = "tiny-wan"

PUBLISHED_PREFIX = "published:"
"""Begins a `model.path` that stands for a preset's model as published: its sizes, without a folder."""

_PRESETS = Path(__file__).parent / "model"
_PUBLISHED = _PRESETS / "published"


def presets() -> tuple[str, ...]:
    """The names that `model=NAME` takes, sorted."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.yaml")))


def preset_layer(name: str) -> Layer:
    """The settings of a packaged preset; `name` is one of `presets()`."""
    return _yaml_layer(_PRESETS / f"{name}.yaml", Written(f"preset {name}"))


def published_models() -> tuple[str, ...]:
    """The presets whose model's published sizes are known, sorted."""
    return tuple(sorted(path.stem for path in _PUBLISHED.glob("*.yaml")))


def published_model(name: str) -> dict[str, dict[str, Any]]:
    """Read the sizes of a published model.

    Args:
        name: one of `published_models()`.

    Returns:
        The fields of a diffusers folder's JSON files that size a run, by file: `model_index`, and each network's
        config.json by the network's name.
    """
    content: dict[str, dict[str, Any]] = yaml.safe_load((_PUBLISHED / f"{name}.yaml").read_text(encoding="utf-8"))
    return content


def file_layer(path: Path) -> Layer | Fault:
    """The settings of a user's file; a fault if it cannot be read as a whole."""
    try:
        return _yaml_layer(path, Written(str(path)))
    except _UnreadableError as error:
        return Fault(str(path), None, error.rule, error.remedy)


def environment_layer(environ: Mapping[str, str]) -> Layer:
    """`attention.default` from the environment, for when nothing else sets it; a blank variable counts as unset."""
    value = environ.get(BACKEND_VARIABLE, "").strip()
    if not value:
        return Layer({}, ())
    checked = check_value(DEFAULT, value, value)
    return Layer({DEFAULT: Setting(DEFAULT, checked, value, ENVIRONMENT, f"{BACKEND_VARIABLE}={value}")}, ())


def command_line_layer(arguments: Sequence[str]) -> Layer:
    """The settings and removals of all arguments, overrides and attention options; their order does not matter."""
    overrides, flags = split(arguments)
    found = [item for position, text in enumerate(overrides) for item in _argument(text, position)]
    return gather([*found, *settings_of(flags, found)])


def _argument(text: str, position: int) -> Iterator[Setting | Fault]:
    try:
        override = parse_override(text, position)
    except FaultError as error:
        yield from error.faults
        return
    if override.sweep is not None:
        yield _sweep_fault(override, override.sweep)
    elif override.op == "remove":
        yield _removal(override)
    else:
        written = Written(ORIGIN, text, trusts_code=True)
        yield from flatten(override.path, override.value, override.source, written)


def _sweep_fault(override: Override, values: Sequence[Any]) -> Fault:
    """The fault of several values for one key; its ways out are those that the key takes."""
    key, source = canonical_key(override.path), override.source or ""
    if key is None:
        refusal = unknown_key(override.key)
        remedy = f"{refusal.remedy} One run takes one value of it" if refusal.remedy.endswith("?") else refusal.remedy
        return Fault(override.key, source, refusal.rule, remedy, origin=ORIGIN)

    def takes(value: Any) -> bool:
        return key == PRESET_KEY or not isinstance(check_value(key, value, render(value)), Refusal)

    ways = []
    single = next((value for value in values if takes(value)), None)
    if single is not None:
        ways.append(f"give one of them, such as {override.key}={render(single)}")
    if takes(source) and key != PRESET_KEY and len(source) <= LONGEST_SHOWN:
        ways.append(f'quote it, "{override.key}={quote(source)}"')
    if takes(list(values)) and key != PRESET_KEY and len(values) <= 8:
        ways.append(f"use brackets for a list, {override.key}={render(list(values))}")
    rule = f"is a sweep of {len(values)} values; one run takes one value"
    return Fault(override.key, source, rule, ", or ".join(ways) or "give one value", origin=ORIGIN)


def _removal(override: Override) -> Setting | Fault:
    key = canonical_key(override.path)
    if key is None and override.key in GROUPS:
        return Fault(f"~{override.key}", None, "is a group of keys", "remove its keys one by one", origin=ORIGIN)
    if key is None:
        refusal = unknown_key(override.key)
        return Fault(f"~{override.key}", None, refusal.rule, refusal.remedy, origin=ORIGIN)
    if (key == PER_ROLE or is_block(key)) and override.source is not None:
        rule = "removes all that is below it"
        return Fault(f"~{key}", override.source, rule, f"write ~{key}, without a value", origin=ORIGIN)
    value = override.value
    if override.source is not None and key != PRESET_KEY:
        value = check_value(key, override.value, override.source)
        if isinstance(value, Refusal):
            return Fault(f"~{key}", override.source, value.rule, value.remedy, value.allowed, ORIGIN)
    return Setting(key, value, override.source, ORIGIN, override.text, removes=True)


class _UnreadableError(Exception):
    def __init__(self, rule: str, remedy: str) -> None:
        super().__init__(rule, remedy)
        self.rule = rule
        self.remedy = remedy


def _yaml_layer(path: Path, written: Written) -> Layer:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise _UnreadableError(f"cannot be read: {error.strerror}", "name a YAML file that exists") from error
    except UnicodeDecodeError as error:
        raise _UnreadableError(f"is not UTF-8 text at byte {error.start}", "save it as UTF-8") from error
    try:
        broken, text = _without_broken_interpolations(text, written.origin)
        raw = yaml.load(text, Loader=yaml.BaseLoader)  # scalars as they are written, which 1e-3 and 010 need
        tree = OmegaConf.load(io.StringIO(text))
    except yaml.MarkedYAMLError as error:
        raise _UnreadableError(*_syntax(error)) from error
    except RecursionError as error:
        raise _UnreadableError("is nested too deep, or contains itself", "make it flat") from error
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError) as error:
        raise _UnreadableError(str(error).partition("\n")[0], "correct the file's YAML") from error
    if not isinstance(tree, DictConfig) or (isinstance(raw, str) and tree):
        raise _UnreadableError("does not hold a mapping", "write KEY: VALUE lines")
    content = OmegaConf.to_container(tree, resolve=False)
    layer = gather(flatten((), content, raw, written))
    return Layer(layer.settings, broken + layer.faults)


def _syntax(error: yaml.MarkedYAMLError) -> tuple[str, str]:
    mark = error.problem_mark or error.context_mark
    line = f"line {mark.line + 1}" if mark else "an unknown line"
    problem = ", ".join(part for part in (error.context, error.problem) if part)
    return f"is not valid YAML at {line} ({problem})", "correct that line"


def _without_broken_interpolations(text: str, origin: str) -> tuple[tuple[Fault, ...], str]:
    """Takes them out, as OmegaConf stops at the first one and would hide all other faults of the file."""
    if "${" not in text:
        return (), text
    document = yaml.compose(text, Loader=yaml.SafeLoader)
    faults = tuple(_drop_broken(document, (), origin))
    return faults, yaml.serialize(document) if faults else text


def _drop_broken(node: Any, path: tuple[str, ...], origin: str) -> Iterator[Fault]:
    """Removes broken interpolations below a mapping or sequence node, and reports them."""
    mapping = isinstance(node, yaml.MappingNode)
    if not mapping and not isinstance(node, yaml.SequenceNode):
        return
    kept = []
    for item in node.value:
        below, inside = ((*path, str(item[0].value)), item[1]) if mapping else (path, item)
        written = inside.value if isinstance(inside, yaml.ScalarNode) else ""
        if "${" in written and (error := syntax_error(written)) is not None:
            rule = f"is not a valid interpolation ({error})"
            yield Fault(".".join(below), written, rule, "write ${KEY}, or \\${ for a plain ${", origin=origin)
        else:
            kept.append(item)
            yield from _drop_broken(inside, below, origin)
    node.value = kept
