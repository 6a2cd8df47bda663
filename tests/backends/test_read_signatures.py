"""Signatures are read out of wheels, source distributions and archives of repositories, and nothing of them is run."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.backends.published import FILE
from vendor_signatures.archives import Archive, read
from vendor_signatures.calls import Called
from vendor_signatures.reader import Parameter, find
from vendor_signatures.record import dump, load, merged, signatures_in

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "89abcdef" * 5
PLAIN = "POSITIONAL_OR_KEYWORD"
FILES = {
    "pkg/__init__.py": """
raise SystemExit("it was run")
from .core import attend as attend_here, Wrapper
from pkg.more import *
try:
    from ._compiled import later
except ImportError:
    from .core import later
""",
    "pkg/core.py": """
from typing import overload
def attend(q, /, k: "Tensor", v=None, *rest, scale: float = 1 / 8, dtype=torch.int8, size=(-1, -1), must, **others): ...
def later(a, b=DEFAULT): ...
class Wrapper:
    def __init__(self, workspace, layout="NHD"): ...
    @overload
    def run(self, q: int): ...
    @decorated(trace=None)
    def run(self, q, *, return_lse=False): ...
    def other(self): ...
""",
    "pkg/more/__init__.py": "from .deep import starred",
    "pkg/more/deep.py": "if True:\n    def starred(x): ...\n",
    "pkg/docs.py": '''
add_docstr(
    "fused",
    """
about it
pkg.fused(Tensor query, int[]? sizes=[1, 2], *, float scale=1., str layout="") -> (Tensor, Tensor)
"""
)
''',
}
ABOUT = "Metadata-Version: 2.4\nName: My_Pkg\nVersion: 1.2.3\n\nName: another\n"


def wheel(folder: Path, files: dict[str, str] = FILES) -> Path:
    path = folder / "my_pkg-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr("my_pkg-1.2.3.dist-info/METADATA", ABOUT)
    return path


def packed(path: Path, root: str, about: dict[str, str], comment: str | None = None) -> Path:
    headers = {} if comment is None else {"comment": comment}
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT, pax_headers=headers) as archive:
        for name, text in {**FILES, **about}.items():
            member = tarfile.TarInfo(f"{root}/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return read(str(wheel(tmp_path)))


def parameters(archive: Archive, path: str) -> list[tuple[str, str, str | None]]:
    (found,) = find(archive, path, frozenset()).values()
    return [(part.name, part.kind, part.default) for part in found.parameters]


def test_every_kind_of_parameter_is_read_with_its_default_as_text(archive: Archive) -> None:
    assert parameters(archive, "pkg.core.attend") == [
        ("q", "POSITIONAL_ONLY", None),
        ("k", PLAIN, None),
        ("v", PLAIN, "None"),
        ("rest", "VAR_POSITIONAL", None),
        ("scale", "KEYWORD_ONLY", "1 / 8"),
        ("dtype", "KEYWORD_ONLY", "torch.int8"),
        ("size", "KEYWORD_ONLY", "(-1, -1)"),
        ("must", "KEYWORD_ONLY", None),
        ("others", "VAR_KEYWORD", None),
    ]


@pytest.mark.parametrize(
    ("path", "file", "names"),
    [
        ("pkg.attend_here", "pkg/core.py", "q k v rest scale dtype size must others"),
        ("pkg.starred", "pkg/more/deep.py", "x"),
        ("pkg.later", "pkg/core.py", "a b"),
    ],
)
def test_imports_are_followed_to_the_definition(archive: Archive, path: str, file: str, names: str) -> None:
    (found,) = find(archive, path, frozenset()).values()
    assert (found.file, [part.name for part in found.parameters]) == (file, names.split())


def test_of_a_class_those_methods_are_read_that_are_called(archive: Archive) -> None:
    found = find(archive, "pkg.Wrapper", frozenset({"run", "append"}))
    assert {path: [part.name for part in one.parameters] for path, one in found.items()} == {
        "pkg.Wrapper.__init__": ["self", "workspace", "layout"],
        "pkg.Wrapper.run": ["self", "q", "return_lse"],
    }


def test_an_operator_is_read_out_of_the_documentation(archive: Archive) -> None:
    assert parameters(archive, "pkg.fused") == [
        ("query", PLAIN, None),
        ("sizes", PLAIN, "[1, 2]"),
        ("scale", "KEYWORD_ONLY", "1.0"),
        ("layout", "KEYWORD_ONLY", "''"),
    ]
    assert find(archive, "pkg.fused", frozenset())["pkg.fused"].read_from == "documentation"


@pytest.mark.parametrize("path", ["pkg.missing", "pkg.more.missing", "other.attend"])
def test_what_is_not_there_is_an_error(archive: Archive, path: str) -> None:
    with pytest.raises(LookupError, match=f"my_pkg-1.2.3-py3-none-any.whl has no {path}"):
        find(archive, path, frozenset())


def test_wheels_source_distributions_and_repositories_give_the_same(archive: Archive, tmp_path: Path) -> None:
    source = read(str(packed(tmp_path / "my_pkg-1.2.3.tar.gz", "my_pkg-1.2.3", {"PKG-INFO": ABOUT})))
    argument = f"my-pkg:me/kernels={packed(tmp_path / 'x.tar.gz', f'kernels-{COMMIT}/src', {}, COMMIT)}"
    repository = read(argument)
    assert [(one.origin, one.version, one.source) for one in (archive, source, repository)] == [
        ("my-pkg", "1.2.3", "my_pkg-1.2.3-py3-none-any.whl"),
        ("my-pkg", "1.2.3", "my_pkg-1.2.3.tar.gz"),
        ("my-pkg", COMMIT, f"me/kernels@{COMMIT}"),
    ]
    every = [Called("pkg.attend_here", "my-pkg", frozenset()), Called("pkg.attend_here", "another", frozenset())]
    entries = [signatures_in(one, every) for one in (archive, source, repository)]
    assert all(len(found) == 1 for found in entries)
    assert len({found[0].parameters for found in entries}) == 1
    assert {found[0].sha256 for found in entries} == {hashlib.sha256(FILES["pkg/core.py"].encode()).hexdigest()}


def test_an_archive_without_its_commit_or_its_name_is_refused(tmp_path: Path) -> None:
    plain = packed(tmp_path / "x.tar.gz", "kernels-main", {})
    with pytest.raises(ValueError, match="with an archive that names its commit"):
        read(f"my-pkg:me/kernels={plain}")
    with pytest.raises(ValueError, match="neither a wheel nor a source distribution; else write ORIGIN:OWNER/NAME="):
        read(str(plain))
    (tmp_path / "text.whl").write_text("no archive")
    with pytest.raises(ValueError, match="neither a zip nor a tar"):
        read(str(tmp_path / "text.whl"))
    with pytest.raises(ValueError, match="is no file"):
        read(str(tmp_path / "missing.whl"))


def test_what_is_read_again_is_replaced_and_what_is_no_longer_called_goes(archive: Archive, tmp_path: Path) -> None:
    every = [Called("pkg.later", "my-pkg", frozenset()), Called("pkg.Wrapper", "my-pkg", frozenset({"run"}))]
    first = merged((), signatures_in(archive, every), every)
    assert [entry.callable for entry in first] == ["pkg.Wrapper.__init__", "pkg.Wrapper.run", "pkg.later"]
    changed = {**FILES, "pkg/core.py": FILES["pkg/core.py"].replace("b=DEFAULT", "b=DEFAULT, c=2")}
    again = merged(first, signatures_in(read(str(wheel(tmp_path, changed))), every), every)
    assert [entry.callable for entry in again] == [entry.callable for entry in first]
    assert again[-1].parameters[-1] == Parameter("c", PLAIN, "2")
    assert merged(again, (), every[1:]) == again[:2]
    dump(tmp_path / "signatures.json", again)
    assert load(tmp_path / "signatures.json") == again
    assert len(json.loads((tmp_path / "signatures.json").read_text())) == 3


def test_of_a_repository_one_commit_is_kept(tmp_path: Path) -> None:
    every = [Called("pkg.later", "my-pkg", frozenset())]
    entries = merged((), signatures_in(read(str(wheel(tmp_path))), every), every)
    for commit in ("0" * 40, "1" * 40):
        path = packed(tmp_path / f"{commit}.tar.gz", f"kernels-{commit}", {}, commit)
        entries = merged(entries, signatures_in(read(f"my-pkg:me/kernels={path}"), every), every)
    assert [entry.version for entry in entries] == ["1" * 40, "1.2.3"]


def test_the_command_says_what_an_archive_lacks_and_leaves_the_file(tmp_path: Path) -> None:
    out = tmp_path / "signatures.json"
    out.write_bytes(FILE.read_bytes())
    command = [sys.executable, "scripts/read_signatures.py", "--out", str(out), str(wheel(tmp_path))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: my_pkg-1.2.3-py3-none-any.whl: our kernels call nothing of my-pkg\n"
    assert out.read_bytes() == FILE.read_bytes()
