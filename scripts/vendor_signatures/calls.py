"""What our kernels call in packages that need not be installed, read from our own code."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from backends.interface import AttentionImpl
from backends.kernels.flash_attn_hub import HubImpl
from backends.registry import Registry

_KERNELS = "backends.kernels"


@dataclass(frozen=True)
class Called:
    """path: a dotted path. origin: the distribution that has it, or the repository on the Hugging Face Hub. attributes:
    all that the same code calls as an attribute of something, among which are a class's methods.
    """

    path: str
    origin: str
    attributes: frozenset[str]


def called() -> tuple[Called, ...]:
    """The callables of every built-in variant that needs a package, once for each origin."""
    registry, found = Registry.built_in(), dict[tuple[str, str], Called]()
    for name in registry.names():
        backend = registry.get_class(name)
        for variant in backend.variants:
            for one in called_by(backend.get_impl_cls(variant), variant.distributions):
                found[one.path, one.origin] = one
    return tuple(found[key] for key in sorted(found))


def called_by(impl: type[AttentionImpl], distributions: tuple[str, ...]) -> Iterator[Called]:
    """What `impl` imports by path, and what it takes out of a kernel of the Hub."""
    paths, attributes = set[str](), set[str]()
    for owner in impl.__mro__:
        if owner.__module__.startswith(_KERNELS):
            module = sys.modules[owner.__module__]
            for node in _reached(module, owner.__name__):
                paths |= {path for path in (_imported(node, module, impl),) if path is not None}
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    attributes.add(node.func.attr)
    for path in sorted(paths):
        for distribution in distributions:
            yield Called(path, distribution, frozenset(attributes))
    if issubclass(impl, HubImpl):
        yield Called(f"{hub_module(impl.repository)}.{impl.function}", impl.repository, frozenset(attributes))


def hub_module(repository: str) -> str:
    """The name under which the module of a Hub kernel is built: `kernels-community/flash-attn2` has `flash_attn2`."""
    return repository.rpartition("/")[2].replace("-", "_")


def imports_of(module: ModuleType) -> Iterator[ast.Call]:
    """Every call of `imported` in a module, wherever it stands."""
    for node in ast.walk(_tree(module)):
        if _is_import(node):
            assert isinstance(node, ast.Call)  # noqa: S101 - for the type checker
            yield node


def _tree(module: ModuleType) -> ast.Module:
    return ast.parse(Path(inspect.getfile(module)).read_text(encoding="utf-8"))


def _is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "imported"


def _imported(node: ast.AST, module: ModuleType, impl: type[AttentionImpl]) -> str | None:
    """The path in a call `imported(...)`: a text, a constant of the module, or an attribute of the class."""
    if not isinstance(node, ast.Call) or not _is_import(node):
        return None
    (argument,) = node.args
    found: Any = None
    if isinstance(argument, ast.Constant):
        found = argument.value
    elif isinstance(argument, ast.Name):
        found = getattr(module, argument.id, None)
    elif isinstance(argument, ast.Attribute):
        found = getattr(impl, argument.attr, None)
    if not isinstance(found, str):
        raise ValueError(
            f"{module.__name__}, line {node.lineno}: imported({ast.unparse(argument)}) of {impl.__name__} is not a "
            "path that can be read here; pass a text, a constant of the module or an attribute of the class"
        )
    return found


def _reached(module: ModuleType, name: str) -> Iterator[ast.AST]:
    """The nodes of a class, and of the functions of its module that they name."""
    body = _tree(module).body
    known = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    waiting, seen = [name], {name}
    while waiting:
        for node in ast.walk(known[waiting.pop()]):
            yield node
            other = node.id if isinstance(node, ast.Name) else None
            if other is not None and other not in seen and isinstance(known.get(other), ast.FunctionDef):
                seen.add(other)
                waiting.append(other)
