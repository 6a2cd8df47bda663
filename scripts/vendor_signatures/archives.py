"""Wheels, source distributions and GitHub's archives as folders of texts; nothing is unpacked or run."""

from __future__ import annotations

import hashlib
import re
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Archive:
    """source: the file's name, or `OWNER/NAME@COMMIT`. origin: the distribution, with dashes, or the repository on the
    Hugging Face Hub. version: the distribution's, or the commit. files: path -> content of its Python files.
    """

    source: str
    origin: str
    version: str
    files: Mapping[str, bytes]

    def text(self, path: str) -> str:
        return self.files[path].decode("utf-8")

    def sha256(self, path: str) -> str:
        return hashlib.sha256(self.files[path]).hexdigest()


def read(argument: str) -> Archive:
    """`PATH` of a wheel or a source distribution, or `ORIGIN:OWNER/NAME=PATH` of an archive as GitHub makes it. Raises
    ValueError for anything else.
    """
    about, equals, given = argument.rpartition("=")
    path = Path(given)
    if not path.is_file():
        raise ValueError(f"{given}: is no file; give a wheel, a source distribution or ORIGIN:OWNER/NAME=ARCHIVE")
    files, commit = _zipped(path) if zipfile.is_zipfile(path) else _tarred(path)
    python = {name: content for name, content in files.items() if name.endswith(".py")}
    if equals:
        origin, colon, repository = about.partition(":")
        if not colon or commit is None:
            raise ValueError(f"{argument}: is not ORIGIN:OWNER/NAME=ARCHIVE with an archive that names its commit")
        return Archive(f"{repository}@{commit}", origin, commit, python)
    named = [name for name in files if re.fullmatch(r"[^/]+\.dist-info/METADATA|[^/]+/PKG-INFO", name)]
    if len(named) != 1:
        raise ValueError(f"{given}: is neither a wheel nor a source distribution; else write ORIGIN:OWNER/NAME={given}")
    metadata = Parser().parsestr(files[named[0]].decode("utf-8"), headersonly=True)
    return Archive(path.name, normalised(metadata["Name"]), metadata["Version"], python)


def normalised(distribution: str) -> str:
    """The spelling of package indexes."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _wanted(name: str) -> bool:
    return name.endswith((".py", "METADATA", "PKG-INFO"))


def _zipped(path: Path) -> tuple[dict[str, bytes], str | None]:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if _wanted(name)]
        return {name: archive.read(name) for name in names}, _commit(archive.comment.decode("ascii", "replace"))


def _tarred(path: Path) -> tuple[dict[str, bytes], str | None]:
    try:
        with tarfile.open(path) as archive:
            files = {}
            for member in archive:
                content = archive.extractfile(member) if member.isfile() and _wanted(member.name) else None
                if content is not None:
                    files[member.name] = content.read()
            return files, _commit(archive.pax_headers.get("comment", ""))
    except tarfile.TarError as error:
        raise ValueError(f"{path}: is neither a zip nor a tar ({error})") from error


def _commit(comment: str) -> str | None:
    """Git writes the commit of an archive into its comment."""
    return comment if _COMMIT.fullmatch(comment) else None
