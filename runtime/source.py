"""Is the code that runs the code that was meant?

It is asked before anything else of this project is imported, so it imports the standard library only.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from runtime.bootstrap import PACKAGES, package_source

ROOT = Path(__file__).resolve().parent.parent
OTHER_NAMES = {"grpcio": "grpc", "imageio-ffmpeg": "imageio_ffmpeg", "pillow": "PIL"}
REQUIREMENTS = (
    "accelerate",
    "click",
    "diffusers",
    "ftfy",
    "grpcio",
    "imageio",
    "imageio-ffmpeg",
    "matplotlib",
    "numpy",
    "omegaconf",
    "packaging",
    "pillow",
    "psutil",
    "ray",
    "rich",
    "safetensors",
    "torch",
    "transformers",
)
"""Distributions that every command needs, as pyproject.toml lists them; OTHER_NAMES has modules of another name."""


def missing_requirements() -> list[str]:
    """The requirements that this interpreter cannot import; nothing is imported to find out."""
    return [name for name in REQUIREMENTS if importlib.util.find_spec(OTHER_NAMES.get(name, name)) is None]


def requirements_message(missing: Iterable[str], root: Path = ROOT) -> str:
    """What is missing and the command that installs it."""
    target = f"-c {root / 'constraints.txt'} -e {root}" if (root / "pyproject.toml").is_file() else "raylysses"
    rule = f"it lacks {', '.join(missing)}; run `{sys.executable} -m pip install {target}`"
    return f"python={sys.executable}: {rule}, or use the Python of another environment"


def own_sources() -> dict[str, tuple[str, str] | None]:
    """Folder and digest of each of the four packages, as this process imports them."""
    return {name: package_source(name) for name in PACKAGES}


def shadows(directory: Path, root: Path = ROOT) -> list[tuple[str, Path]]:
    """Packages and modules in a directory that bear our names and are not ours. Workers search the working directory
    first.
    """
    found = []
    for name in PACKAGES:
        for candidate in (directory / name / "__init__.py", directory / f"{name}.py"):
            if candidate.is_file() and candidate.resolve() not in (root / name / "__init__.py", root / f"{name}.py"):
                found.append((name, candidate))
    return found


def misplaced_imports(root: Path = ROOT) -> list[tuple[str, Path]]:
    """Our package names that an import in this process would find elsewhere than beside `runtime`."""
    found = []
    for name in PACKAGES:
        source = package_source(name)
        if source is not None and Path(source[0]).resolve() != root / name:
            found.append((name, Path(source[0])))
    return found


def shadow_message(name: str, path: Path) -> tuple[str, str, str]:
    """Value, rule and way out for a package or module that an import would take for ours."""
    stranger = path if path.stem == name else path.parent
    rule = f"it stands before Raylysses's own package {name!r} on the import path"
    return str(stranger), rule, f"run from another directory, or rename {stranger.name}"


def differing_sources(
    driver: Mapping[str, tuple[str, str] | None],
    rank: Mapping[str, tuple[str, str] | None],
    names: Iterable[str] = PACKAGES,
) -> list[str]:
    """The packages whose files on a rank are not the driver's."""
    return [name for name in names if (rank[name] or ("", ""))[1] != (driver[name] or ("", ""))[1]]
