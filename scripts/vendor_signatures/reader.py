"""The parameters of a callable at a dotted path, found in the texts of an archive with `ast`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from vendor_signatures.archives import Archive


@dataclass(frozen=True)
class Parameter:
    """kind: as `inspect` names it. default: its source, None if there is none."""

    name: str
    kind: str
    default: str | None


@dataclass(frozen=True)
class Found:
    """read_from: `definition`, or `documentation` where the package has the signature only in its documentation."""

    file: str
    parameters: tuple[Parameter, ...]
    read_from: str = "definition"


Definition = ast.FunctionDef | ast.ClassDef


def find(archive: Archive, path: str, attributes: frozenset[str]) -> dict[str, Found]:
    """Of a function its own signature; of a class those of `__init__` and of the methods that are among `attributes`.
    By path. Raises LookupError if the archive has no such thing.
    """
    module, _, name = path.rpartition(".")
    defined = _definition(archive, module, name, ())
    if defined is None:
        documented = _documented(archive, path, name)
        if documented is None:
            raise LookupError(f"{archive.source} has no {path}")
        return {path: documented}
    file, node = defined
    if isinstance(node, ast.FunctionDef):
        return {path: Found(file, tuple(_parameters(node.args)))}
    methods = {method.name: method for method in node.body if isinstance(method, ast.FunctionDef)}  # last one counts
    return {
        f"{path}.{method}": Found(file, tuple(_parameters(methods[method].args)))
        for method in sorted(methods.keys() & (attributes | {"__init__"}))
    }


def _file_of(archive: Archive, module: str) -> str | None:
    """The file of a module, in whatever folder of the archive its package lies; the outermost."""
    inside = module.replace(".", "/")
    ends = (f"{inside}/__init__.py", f"{inside}.py")
    found = [file for file in archive.files if any(file == end or file.endswith(f"/{end}") for end in ends)]
    return min(found, key=lambda file: (file.count("/"), file), default=None)


def _definition(archive: Archive, module: str, name: str, seen: tuple[str, ...]) -> tuple[str, Definition] | None:
    """Where a name of a module is defined, through the imports that hand it on."""
    file = _file_of(archive, module)
    if file is None or file in seen:
        return None
    package = module if file.endswith("/__init__.py") else module.rpartition(".")[0]
    found: tuple[str, Definition] | None = None
    for node in _statements(ast.parse(archive.text(file)).body):
        if isinstance(node, Definition) and node.name == name:
            found = (file, node)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*" or (alias.asname or alias.name) == name:
                    origin = _absolute(node, package)
                    wanted = name if alias.name == "*" else alias.name
                    found = _definition(archive, origin, wanted, (*seen, file)) or found
    return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module that run when it is imported, with those under `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            handlers = node.handlers if isinstance(node, ast.Try) else []
            yield from _statements([*(part for handler in handlers for part in handler.body), *node.orelse, *node.body])


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    above = parts[: len(parts) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def _parameters(arguments: ast.arguments) -> Iterator[Parameter]:
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    for index, argument in enumerate(positional):
        kind = "POSITIONAL_ONLY" if index < len(arguments.posonlyargs) else "POSITIONAL_OR_KEYWORD"
        default = None if index < required else ast.unparse(arguments.defaults[index - required])
        yield Parameter(argument.arg, kind, default)
    if arguments.vararg is not None:
        yield Parameter(arguments.vararg.arg, "VAR_POSITIONAL", None)
    for argument, given in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield Parameter(argument.arg, "KEYWORD_ONLY", None if given is None else ast.unparse(given))
    if arguments.kwarg is not None:
        yield Parameter(arguments.kwarg.arg, "VAR_KEYWORD", None)


def _documented(archive: Archive, path: str, name: str) -> Found | None:
    """Operators in C++ have no definition in Python; one of torch's schema in a string beside the name does then:
    `f(Tensor query, int[]? prefix=None, *, float scale=1.) -> Tensor`.
    """
    for file, content in sorted(archive.files.items()):
        if f'"{name}"'.encode() not in content or f"{path}(".encode() not in content:
            continue
        for node in ast.walk(ast.parse(content)):
            arguments = node.args if isinstance(node, ast.Call) else []
            texts = [part.value for part in arguments if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            if texts[:1] == [name]:
                schema = re.search(rf"^{re.escape(path)}\((.*)\) *->", texts[-1], re.MULTILINE)
                if schema is not None:
                    return Found(file, tuple(_of_schema(schema[1])), "documentation")
    return None


def _of_schema(schema: str) -> Iterator[Parameter]:
    kind = "POSITIONAL_OR_KEYWORD"
    for part in re.split(r", *(?![^\[]*\])", schema):
        if part == "*":
            kind = "KEYWORD_ONLY"
            continue
        declared, equals, default = part.partition("=")
        source = ast.unparse(ast.parse(default.strip(), mode="eval")) if equals else None
        yield Parameter(declared.split()[-1], kind, source)
