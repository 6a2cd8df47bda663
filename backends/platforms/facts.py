"""What is known of a device, as plain values, so that a policy can be evaluated for hardware that is not here."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
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


def local_gpus() -> tuple[tuple[str, tuple[int, int], int], ...]:
    """(name, compute capability, memory in bytes) of every NVIDIA GPU of this node, by nvidia-smi: no CUDA context is
    made.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError):
        return ()  # a driver that does not answer has no usable GPU
    return parse_gpus(answer)


def parse_gpus(answer: str) -> tuple[tuple[str, tuple[int, int], int], ...]:
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


def local_device(platform: str, distributions: Iterable[str]) -> DeviceFacts:
    """The facts of this node's first device of a platform. Raises FaultError if there is none."""
    packages = MappingProxyType(installed(distributions))
    if platform == "cpu":
        return DeviceFacts("cpu", packages=packages)
    gpus = local_gpus()
    if not gpus:
        rule = "this node has no NVIDIA GPU that nvidia-smi can see"
        raise FaultError([Fault("run.device", platform, rule, "use run.device=cpu", ("cpu",))])
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
