"""The recorded signatures: a JSON file with one entry for each callable and version, one parameter a line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vendor_signatures.archives import Archive
from vendor_signatures.calls import Called
from vendor_signatures.reader import Parameter, find


@dataclass(frozen=True)
class Signature:
    """callable: a dotted path. distribution: as pip names it, or the repository on the Hugging Face Hub. version: the
    distribution's, or a commit. source: the archive that it was read from. file, sha256: of the text in it. read_from:
    `definition` or `documentation`.
    """

    callable: str
    distribution: str
    version: str
    source: str
    file: str
    sha256: str
    read_from: str
    parameters: tuple[Parameter, ...]


def signatures_in(archive: Archive, every: Iterable[Called]) -> tuple[Signature, ...]:
    """Those of the archive's origin. Raises LookupError if one of them is not there, or there is none."""
    found = []
    for one in every:
        if one.origin == archive.origin:
            for path, what in find(archive, one.path, one.attributes).items():
                found.append(
                    Signature(
                        callable=path,
                        distribution=one.origin,
                        version=archive.version,
                        source=archive.source,
                        file=what.file,
                        sha256=archive.sha256(what.file),
                        read_from=what.read_from,
                        parameters=what.parameters,
                    )
                )
    if not found:
        raise LookupError(f"{archive.source}: our kernels call nothing of {archive.origin}")
    return tuple(found)


def merged(old: Iterable[Signature], new: Iterable[Signature], every: Iterable[Called]) -> tuple[Signature, ...]:
    """`new` in place of what was read of the same version, or of the same repository at any commit; what is no longer
    called goes.
    """
    wanted = [(one.path, one.origin) for one in every]
    new = tuple(new)
    again = {_release(entry) for entry in new}
    kept = [
        entry
        for entry in old
        if _release(entry) not in again
        and any(entry.distribution == origin and _is_of(entry.callable, path) for path, origin in wanted)
    ]
    return tuple(sorted((*kept, *new), key=lambda entry: (entry.callable, entry.distribution, entry.source)))


def _release(entry: Signature) -> tuple[str, str]:
    """Commits have no order that could be seen here, so there is one of a repository."""
    repository, at, _ = entry.source.partition("@")
    return entry.distribution, repository if at else entry.version


def _is_of(recorded: str, path: str) -> bool:
    return recorded == path or recorded.rpartition(".")[0] == path


def load(path: Path) -> tuple[Signature, ...]:
    """The entries of a file; none if it is not there."""
    if not path.is_file():
        return ()
    entries = json.loads(path.read_text(encoding="utf-8"))
    return tuple(
        Signature(**{**entry, "parameters": tuple(Parameter(*values) for values in entry["parameters"])})
        for entry in entries
    )


def dump(path: Path, entries: Iterable[Signature]) -> None:
    """A parameter is [name, kind, default], the default as source text or null."""
    blocks = []
    for entry in entries:
        about = {key: value for key, value in vars(entry).items() if key != "parameters"}
        lines = [f"    {json.dumps(key)}: {json.dumps(value)}," for key, value in about.items()]
        rows = [f"      {json.dumps([part.name, part.kind, part.default])}" for part in entry.parameters]
        lines += ['    "parameters": [', ",\n".join(rows), "    ]"]
        blocks.append("  {\n" + "\n".join(lines) + "\n  }")
    path.write_text("[\n" + ",\n".join(blocks) + "\n]\n", encoding="utf-8")
