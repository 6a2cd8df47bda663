"""What is known of a device, as plain values, so that a policy can be evaluated for hardware that is not here."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from configs.faults import Fault, FaultError

ANY_VERSION = "any"


def _none() -> Mapping[str, str]:
    return MappingProxyType({})


@dataclass(frozen=True)
class DeviceFacts:
    """platform: `cpu` or `cuda`. capability: CUDA compute capability. packages: distribution name -> version.

    all_packages: assume that every package is there (for hardware and environments that are not).
    """

    platform: str
    capability: tuple[int, int] | None = None
    name: str = ""
    memory_bytes: int = 0
    packages: Mapping[str, str] = field(default_factory=_none)
    all_packages: bool = False

    @property
    def label(self) -> str:
        """`cpu`, or `cuda:9.0`."""
        return (
            self.platform if self.capability is None else f"{self.platform}:{self.capability[0]}.{self.capability[1]}"
        )

    def has(self, distribution: str) -> bool:
        return self.all_packages or distribution in self.packages

    def version(self, distribution: str) -> str | None:
        return self.packages.get(distribution)

    def __reduce__(self) -> tuple[object, ...]:  # a mapping proxy does not pickle
        values = (self.platform, self.capability, self.name, self.memory_bytes, dict(self.packages), self.all_packages)
        return (DeviceFacts, values)


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


def parse_device(text: str, packages: Mapping[str, str], all_packages: bool) -> DeviceFacts:
    """`cpu` or `cuda:9.0` as assumed facts. Raises FaultError for anything else."""
    platform, _, capability = text.partition(":")
    if text == "cpu":
        return DeviceFacts("cpu", packages=packages, all_packages=all_packages)
    if platform == "cuda":
        major, dot, minor = capability.partition(".")
        if dot and major.isdecimal() and minor.isdecimal():
            facts = DeviceFacts("cuda", (int(major), int(minor)), packages=packages, all_packages=all_packages)
            return facts
    rule = "is not a device; it is `cpu`, or `cuda:` and a compute capability"
    raise FaultError([Fault("--device", text, rule, "use cpu, cuda:9.0 (Hopper) or cuda:10.0 (Blackwell)")])
