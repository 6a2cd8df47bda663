"""`raylysses explain`: what each role would get and why, on this machine or on one that is only assumed. No Ray,
torch or weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from backends.platforms.facts import ANY_VERSION, DeviceFacts, installed, local_device, local_gpus, parse_device
from backends.registry import Registry
from configs.faults import Fault, FaultError
from configs.schema import RunConfig
from parallel.plan import usable_world_sizes
from runtime.check import name_faults, raise_if_any, select_roles, settle_dtype, world_size_faults
from runtime.model_folder import read_folder
from runtime.placement import CPU_RANKS
from runtime.report import SelectionReport, from_selections


@dataclass(frozen=True)
class Explanation:
    """What would run. assumed: the facts that the answer rests on, as text by name. faults: of roles that nothing
    serves.
    """

    report: SelectionReport
    assumed: dict[str, str]
    faults: tuple[Fault, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.report.to_dict(),
            "assumed": self.assumed,
            "faults": [str(fault) for fault in self.faults],
        }


def explain(config: RunConfig, device: str = "here", packages: str = "here") -> Explanation:
    """The selections of a configuration. device: `here`, `cpu` or `cuda:9.0`; packages: `here`, `all` or
    `NAME=VERSION,...`.

    Raises FaultError for a configuration, a model folder or an option that cannot be read.
    """
    registry = Registry(config.attention.register)
    folder = read_folder(config.model.path, weights=False)
    raise_if_any(name_faults(config.attention, folder, registry))
    facts = assumed_device(config, device, packages, registry)
    gpus = len(local_gpus()) if device == "here" else 1
    limit = CPU_RANKS if facts.platform == "cpu" else max(gpus, 1)
    world_size = config.parallel.world_size or usable_world_sizes(folder.heads, limit)[-1]
    raise_if_any(world_size_faults(world_size, folder))
    dtype = settle_dtype(config, facts.platform)
    selected, faults = select_roles(config.attention, folder, facts, dtype, world_size, registry)
    rows = [(role.model, role.selection, role.strategy, role.layers) for role in selected]
    assumed = {
        "model": config.model.path,
        "device": facts.label + (" (this machine)" if device == "here" else " (assumed)"),
        "packages": _package_text(facts, packages),
        "ranks": f"{world_size}"
        + ("" if config.parallel.world_size else " (set parallel.world_size for another number)"),
        "dtype": dtype,
    }
    return Explanation(from_selections(world_size, rows), assumed, tuple(faults))


def assumed_device(config: RunConfig, device: str, packages: str, registry: Registry) -> DeviceFacts:
    """The facts that `--device` and `--packages` state. Raises FaultError for what they cannot mean."""
    known = registry.distributions()
    versions = installed(known) if packages in ("here", "all") else _parse_packages(packages, known)
    if device != "here":
        return parse_device(device, versions, packages == "all")
    wanted = config.run.device
    platform = ("cuda" if local_gpus() else "cpu") if wanted == "auto" else wanted
    facts = local_device(platform, known)
    return DeviceFacts(platform, facts.capability, facts.name, facts.memory_bytes, versions, packages == "all")


def _parse_packages(text: str, known: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for part in text.split(","):
        name, _, version = part.replace("==", "=").partition("=")
        name = name.strip().replace("_", "-").lower()
        if name not in known:
            rule = "no backend asks for that package"
            remedy = f"use here, all, or NAME=VERSION with a name out of {', '.join(known)}"
            raise FaultError([Fault("--packages", part, rule, remedy, known)])
        found[name] = version or ANY_VERSION
    return found


def _package_text(facts: DeviceFacts, packages: str) -> str:
    if facts.all_packages:
        return "all (assumed)"
    listed = (
        ", ".join(f"{name} {version}" for name, version in facts.packages.items()) or "none that a backend asks for"
    )
    return f"{listed} ({'installed here' if packages == 'here' else 'assumed'})"
