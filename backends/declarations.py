"""Loading the declaration of a backend by its path, and what makes a class one."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import get_args

from backends.interface import AttentionBackend, Capabilities, Variant
from backends.platforms.facts import is_version
from backends.requirements import MaskKind
from backends.variant import DTYPES, EVERYWHERE
from configs.faults import Fault, FaultError, nearest, unknown_name_remedy
from configs.schema import BLOCKS

_GIVE_PATH = "give the dotted path of an importable class, such as my_package.my_module.MyBackend"
_CALLS: Mapping[str, tuple[int, tuple[str, ...]]] = MappingProxyType(
    {
        "get_name": (0, ()),
        "validate": (2, ("version", "blocks", "probe")),
        "validate_configuration": (2, ()),
        "option_faults": (3, ()),
        "exactness_of": (2, ()),
        "get_impl_cls": (1, ()),
    }
)
"""With how many arguments, and which named ones, the selection calls each method."""
_TUPLES = ("chips", "distributions", "at_least", "below", "run_on")
_CHIP = re.compile(r"(cpu|npu|xpu)|(cuda|musa)(:[0-9]+\.([0-9]+|x))?|rocm(:gfx[0-9a-f]{3,5})?")
_loaded: dict[tuple[str, str], tuple[ModuleType, type[AttentionBackend]]] = {}


def registration_key(name: str) -> str:
    """The setting that registers a name."""
    return f"attention.register.{name}"


def load(name: str, path: str) -> type[AttentionBackend]:
    """The declaration at a dotted path. Raises FaultError if there is none, or it is not one of that name."""
    key = registration_key(name)
    module, _, attribute = path.rpartition(".")
    if (name, path) in _loaded:
        home, declared = _loaded[name, path]
        if sys.modules.get(module) is home and home.__dict__.get(attribute) is declared:
            return declared  # type: ignore[no-any-return]  # checked before, and its module still has it
    if not module:
        raise FaultError([Fault(key, path, "is not the path of a class in a module", _GIVE_PATH)])
    try:
        found = getattr(import_module(module), attribute, None)
    except (Exception, SystemExit) as error:
        rule = f"cannot be imported: {type(error).__name__}: {error}"
        raise FaultError([Fault(key, path, rule, _GIVE_PATH)]) from error
    if found is None:
        raise FaultError([Fault(key, path, f"{module} has no {attribute}", "name a class that it has")])
    checked = check(name, path, found)
    _loaded[name, path] = (sys.modules[module], checked)
    return checked


def check(name: str, path: str, found: object) -> type[AttentionBackend]:
    """`found` itself. Raises FaultError unless it is a declaration with variants, of that name, that can be called as
    the selection calls it.
    """
    if not (isinstance(found, type) and issubclass(found, AttentionBackend)):
        remedy = "derive it from backends.interface.AttentionBackend"
        raise FaultError([Fault(registration_key(name), path, "is not an AttentionBackend class", remedy)])
    fault = _variant_fault(name, path, found) or _block_fault(name, path, found) or _method_fault(name, path, found)
    if fault is not None:
        raise FaultError([fault])
    return found


def _variant_fault(name: str, path: str, found: type[AttentionBackend]) -> Fault | None:
    key = registration_key(name)
    variants = getattr(found, "variants", ())
    if not variants:
        return Fault(key, path, "declares no variants", "give it `variants`, one for each kernel")
    if not isinstance(variants, tuple) or not all(isinstance(variant, Variant) for variant in variants):
        return Fault(key, path, "its variants are not a tuple of Variant", "write variants = (Variant(...),)")
    names = [variant.name for variant in variants]
    if len(set(names)) < len(names):
        return Fault(key, path, f"two of its variants have one name ({', '.join(names)})", "rename one")
    for variant in variants:
        for field in _TUPLES:
            if not isinstance(getattr(variant, field), tuple):
                rule = f"{field} of its variant {variant.name} is {getattr(variant, field)!r}, not a tuple"
                return Fault(key, path, rule, f"write {field}=(...,)")
        if not isinstance(variant.takes, Capabilities):
            rule = f"what its variant {variant.name} takes is {variant.takes!r}, not Capabilities"
            return Fault(key, path, rule, "write takes=Capabilities(...)")
        if (misspelled := _misspelled(variant)) is not None:
            return Fault(key, path, *misspelled)
    return None


def _misspelled(variant: Variant) -> tuple[str, str] | None:
    """(rule, remedy) of a chip, a dtype or a mask that no device or call has: the variant would never be chosen."""
    for field in ("chips", "run_on"):
        for chip in getattr(variant, field):
            if not (isinstance(chip, str) and _CHIP.fullmatch(chip)):
                platform = str(chip).partition(":")[0]
                close = () if platform in EVERYWHERE else nearest(platform, EVERYWHERE, count=1)
                near = f"did you mean the platform {close[0]}? Write" if close else "write"
                rule = f"{chip!r} in {field} of its variant {variant.name} is no chip"
                return rule, f"{near} cuda, cuda:9.0, cuda:10.x, rocm:gfx942, musa:3.1, cpu, npu or xpu"
    for name, version in (*variant.at_least, *variant.below):
        if not is_version(version):
            rule = f"{version!r} of {name} in its variant {variant.name} is no version"
            return rule, "write it as pip does, as in 2.8.3"
    for field, known in (("dtypes", DTYPES), ("masks", get_args(MaskKind))):
        given = getattr(variant.takes, field)
        if not isinstance(given, tuple):
            return f"{field} of its variant {variant.name} is {given!r}, not a tuple", f"write {field}=(...,)"
        for name in given:
            if name not in known:
                rule = f"{name!r} in {field} of its variant {variant.name} is none of {', '.join(known)}"
                return rule, unknown_name_remedy(str(name), known)
    return None


def _block_fault(name: str, path: str, found: type[AttentionBackend]) -> Fault | None:
    key = registration_key(name)
    for block, schema in dict(found.blocks).items():
        if block not in BLOCKS:
            rule = f"its option block {block} has none of the names {', '.join(BLOCKS)}"
            return Fault(key, path, rule, "call it options", BLOCKS)
        frozen = dataclasses.is_dataclass(schema) and schema.__dataclass_params__.frozen  # type: ignore[attr-defined]
        if (
            not dataclasses.is_dataclass(schema)
            or not frozen
            or not all("check" in f.metadata for f in dataclasses.fields(schema))
        ):
            rule = f"its option block {block} is not a frozen dataclass whose fields are made with `option(check)`"
            return Fault(key, path, rule, "make it one, see backends.options")
    return None


def _method_fault(name: str, path: str, found: type[AttentionBackend]) -> Fault | None:
    key = registration_key(name)
    for method, (count, names) in _CALLS.items():
        problem = _call_problem(getattr(found, method, None), count, names)
        if problem is not None:
            return Fault(key, path, f"its {method} {problem}", "define it as AttentionBackend does")
    try:
        own: object = found.get_name()
    except (Exception, SystemExit) as error:  # whatever a stranger's code raises
        rule = f"its get_name() raises {type(error).__name__}: {error}"
        raise FaultError([Fault(key, path, rule, "return the name from it")]) from error
    if own is None:
        return Fault(key, path, "has no get_name() of its own", f"let it return {name!r}")
    if own != name:
        rule = f"its get_name() is {own}, and a backend has one name everywhere"
        return Fault(key, path, rule, f"register it as {registration_key(str(own))}")
    return None


def _call_problem(method: object, count: int, names: tuple[str, ...]) -> str | None:
    if not callable(method):
        return "is not a method"
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError) as error:
        return f"has no signature ({error})"
    try:
        signature.bind(*range(count), **dict.fromkeys(names))
    except TypeError:
        with_names = f" and {', '.join(names)}" if names else ""
        return f"takes {signature}, and is called with {count} arguments{with_names}"
    return None
