"""The actor that holds a rank. It is sent to the workers by value, and imports nothing of this project until told to.

A directory with its own `configs/` or `backends/` can stand before ours on a worker's path, so what an import would
find there is compared with the driver's sources before anything is imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("configs", "backends", "parallel", "runtime")


MODELS = "models"
"""The folder, in the package `runtime`, of models that come along: they, too, must be the same on every node."""


def package_source(name: str) -> tuple[str, str] | None:
    """Where an import of a top-level package would look, and a digest of the Python files and models there; None if
    nothing is found.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    digest = hashlib.sha256()
    if Path(spec.origin).name != "__init__.py":
        return spec.origin, "not a package"
    for file in sorted((*folder.rglob("*.py"), *(folder / MODELS).rglob("*.*"))):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes() + b"\0")
    return str(folder), digest.hexdigest()


class RankActor:
    """One rank's process. The constructor does nothing, so that whatever fails comes back as an error of a method."""

    def __init__(self) -> None:
        self._rank: Any = None

    def identify(self, root: str) -> dict[str, Any]:
        """Node, GPU ids, process, and what the project's imports would find here. root: the driver's copy of the
        project.
        """
        import ray

        _find_project(root)
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        ordinals = [visible.split(",").index(gpu) if visible else int(gpu) for gpu in gpus]
        return {
            "node_id": context.get_node_id(),
            "host": ray.util.get_node_ip_address(),
            "hostname": socket.gethostname(),
            "pid": os.getpid(),
            "gpus": gpus,
            "ordinals": ordinals,
            "sources": {name: package_source(name) for name in PACKAGES},
        }

    def create(self, path: str) -> None:
        """Import the class that does the rank's work and make the rank."""
        module, _, name = path.rpartition(".")
        self._rank = getattr(importlib.import_module(module), name)()

    def call(self, method: str, *arguments: Any) -> Any:
        with _portable_errors():
            return getattr(self._rank, method)(*arguments)

    def stream(self, method: str, *arguments: Any) -> Iterator[Any]:
        with _portable_errors():
            yield from getattr(self._rank, method)(*arguments)


@contextlib.contextmanager
def _portable_errors() -> Iterator[None]:
    """An exception that would not survive its way to the driver goes there as a RuntimeError with its type and text."""
    import ray

    try:
        yield
    except Exception as error:
        try:
            ray.cloudpickle.loads(ray.cloudpickle.dumps(error))
        except Exception:  # noqa: BLE001  whatever an exception's own __reduce__ and __init__ may raise
            raise RuntimeError(f"{type(error).__module__}.{type(error).__qualname__}: {error}") from None
        raise


def probe(distributions: tuple[str, ...], expected: dict[str, tuple[str, str] | None], root: str) -> dict[str, Any]:
    """The GPUs and packages of the node that this runs on; a task without a GPU, sent by value like the actor.

    Only `sources` comes back if the node would import other code than the driver did.
    """
    _find_project(root)
    sources = {name: package_source(name) for name in PACKAGES}
    if any((sources[name] or ("", ""))[1] != (source or ("", ""))[1] for name, source in expected.items()):
        return {"sources": sources}
    from backends.platforms.facts import installed, local_gpus

    return {"sources": sources, "gpus": local_gpus(), "packages": installed(distributions)}


def process_state(pid: int) -> str:
    """What the operating system says of a process of this node: `stopped`, `running`, `sleeping`, ..., or `gone`."""
    import psutil

    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"


def _find_project(root: str) -> None:
    """Where nothing on the path bears our names, take the driver's copy if this node has one."""
    importlib.invalidate_caches()
    if importlib.util.find_spec(PACKAGES[0]) is None and Path(root, PACKAGES[0]).is_dir():
        sys.path.insert(0, root)
