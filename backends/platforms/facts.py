"""What is known of a device, as plain values, so that a policy can be evaluated for hardware that is not here."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType

from packaging.version import InvalidVersion, Version

from configs.faults import Fault, FaultError, nearest

ANY_VERSION = "any"


def is_version(text: str) -> bool:
    """Whether it can be compared with others, as pip does it."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def _none() -> Mapping[str, str]:
    return MappingProxyType({})


@dataclass(frozen=True)
class DeviceFacts:
    """platform: `cpu`, `cuda`, `rocm`, `npu`, `xpu` or `musa`. capability: compute capability (CUDA, MUSA). packages:
    distribution name -> version. architecture: of a ROCm GPU (`gfx942`).

    all_packages: assume that every package is there (for hardware and environments that are not).
    """

    platform: str
    capability: tuple[int, int] | None = None
    name: str = ""
    memory_bytes: int = 0
    packages: Mapping[str, str] = field(default_factory=_none)
    all_packages: bool = False
    architecture: str = ""

    @property
    def label(self) -> str:
        """`cpu`, `cuda:9.0` or `rocm:gfx942`."""
        if self.capability is not None:
            return f"{self.platform}:{self.capability[0]}.{self.capability[1]}"
        return f"{self.platform}:{self.architecture}" if self.architecture else self.platform

    def has(self, distribution: str) -> bool:
        return self.all_packages or distribution in self.packages

    def version(self, distribution: str) -> str | None:
        return self.packages.get(distribution)

    def __reduce__(self) -> tuple[object, ...]:  # a mapping proxy does not pickle
        values = [getattr(self, entry.name) for entry in fields(self)]
        return (DeviceFacts, tuple(dict(value) if isinstance(value, Mapping) else value for value in values))


def installed(distributions: Iterable[str]) -> dict[str, str]:
    """The versions of those distributions that are installed here."""
    found: dict[str, str] = {}
    for name in distributions:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


Gpu = tuple[str, tuple[int, int], int]
"""Name, compute capability, and memory in bytes."""


@dataclass(frozen=True)
class GpuQuery:
    """The NVIDIA GPUs of a node. problem: why nvidia-smi is there and gave no answer; empty without a problem."""

    gpus: tuple[Gpu, ...] = ()
    problem: str = ""


class LocalNode:
    """This node's GPUs, which nvidia-smi is asked for once, when they are first needed."""

    @cached_property
    def query(self) -> GpuQuery:
        return query_gpus()

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.query.gpus

    @property
    def notice(self) -> str:
        """What to tell a user whose run went to the CPU because nvidia-smi failed; empty if it was not asked."""
        problem = self.query.problem if "query" in self.__dict__ else ""
        return f"no GPU is used: {problem}; repair the driver, or set run.device=cpu" if problem else ""

    @property
    def no_gpu_rule(self) -> str:
        return self.query.problem or "this node has no NVIDIA GPU that nvidia-smi can see"


def local_gpus() -> tuple[Gpu, ...]:
    """Every NVIDIA GPU of this node; none if nvidia-smi fails."""
    return query_gpus().gpus


def query_gpus(timeout_s: float = 30) -> GpuQuery:
    """Ask nvidia-smi for this node's NVIDIA GPUs. No CUDA context is made."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return GpuQuery()
    query = [tool, "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=timeout_s, check=True).stdout
    except subprocess.CalledProcessError as error:
        said = " ".join((error.stderr or error.stdout or "").split())[:120]
        return GpuQuery(problem=f"nvidia-smi failed with exit code {error.returncode}{f' ({said})' if said else ''}")
    except subprocess.TimeoutExpired:
        return GpuQuery(problem=f"nvidia-smi did not answer within {timeout_s:g} s")
    except OSError as error:
        return GpuQuery(problem=f"nvidia-smi cannot be started ({error.strerror})")
    gpus = parse_gpus(answer)
    unread = " ".join(answer.split())[:120] if not gpus else ""
    return GpuQuery(gpus, f"nvidia-smi listed no usable GPU ({unread})" if unread else "")


def parse_gpus(answer: str) -> tuple[Gpu, ...]:
    """The rows of `nvidia-smi --query-gpu=name,compute_cap,memory.total`; rows it cannot read (`[N/A]`) are left
    out.
    """
    rows = []
    for line in answer.splitlines():
        parts = [part.strip() for part in line.split(",")]
        try:
            major, minor = (int(number) for number in parts[1].split("."))
            rows.append((parts[0], (major, minor), int(parts[2]) << 20))
        except (IndexError, ValueError):
            continue
    return tuple(rows)


def local_device(platform: str, distributions: Iterable[str], node: LocalNode | None = None) -> DeviceFacts:
    """The facts of this node's first device of a platform. Raises FaultError if there is none.

    node: what is known of this node's GPUs; without it, nvidia-smi is asked.
    """
    node = node or LocalNode()
    packages = MappingProxyType(installed(distributions))
    if platform == "cpu":
        return DeviceFacts("cpu", packages=packages)
    gpus = node.gpus
    if not gpus:
        raise FaultError([Fault("run.device", platform, node.no_gpu_rule, "use run.device=cpu", ("cpu",))])
    name, capability, memory = gpus[0]
    return DeviceFacts(platform, capability, name, memory, packages)


_PRODUCTS = MappingProxyType(
    {"gpu": "cuda:9.0", "a100": "cuda:8.0", "l40s": "cuda:8.9", "h100": "cuda:9.0", "h200": "cuda:9.0"}
    | {"b200": "cuda:10.0", "b300": "cuda:10.3", "mi300x": "rocm:gfx942", "mi355x": "rocm:gfx950"}
)
_UNDOTTED = MappingProxyType(
    {"80": "8.0", "86": "8.6", "89": "8.9", "90": "9.0", "100": "10.0", "103": "10.3", "120": "12.0", "121": "12.1"}
)
_EXAMPLES = "cpu, cuda:9.0 (Hopper), cuda:10.0 (Blackwell), rocm:gfx942, npu, xpu or musa:3.1"


def parse_device(text: str, packages: Mapping[str, str], all_packages: bool) -> DeviceFacts:
    """A device in the spelling of `DeviceFacts.label`, as assumed facts. Raises FaultError for anything else."""
    platform, _, chip = text.partition(":")
    facts = DeviceFacts(platform, packages=packages, all_packages=all_packages)
    if _is_device(text):
        if platform == "rocm":
            return replace(facts, architecture=chip)
        major, _, minor = chip.partition(".")
        return replace(facts, capability=(int(major), int(minor))) if chip else facts
    rule = "is not a device; it is a platform, for cuda and musa with a compute capability, for rocm with a gfx name"
    meant = _meant(platform, chip)
    remedy = f"did you mean {meant}?" if meant and meant != text and _is_device(meant) else f"use {_EXAMPLES}"
    raise FaultError([Fault("--device", text, rule, remedy)])


def _is_device(text: str) -> bool:
    return re.fullmatch(r"cpu|npu|xpu|(cuda|musa):[0-9]+\.[0-9]+|rocm:gfx[0-9a-f]{3,5}", text) is not None


def _meant(platform: str, chip: str) -> str | None:
    """The nearest device: of a product's name, of a capability without its minor, of a misspelt platform."""
    name = platform.casefold()
    if name in _PRODUCTS:
        return _PRODUCTS[name]
    if name in ("cpu", "npu", "xpu"):  # too short for a likeness to say which
        return name
    close = nearest(name, ("cuda", "rocm", "musa"), count=1)
    if not close:
        return None
    chip = chip or {"cuda": "9.0", "rocm": "gfx942", "musa": "3.1"}[close[0]]
    if close[0] == "cuda" and chip.isdecimal():
        chip = {**{str(major): f"{major}.0" for major in range(7, 13)}, **_UNDOTTED}.get(chip, chip)
    return f"{close[0]}:{chip}"
