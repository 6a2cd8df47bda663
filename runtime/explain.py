"""`raylysses explain`: what each role would get and why, on this machine or on one that is only assumed. No Ray,
torch or weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from backends.platforms.facts import (
    ANY_VERSION,
    DeviceFacts,
    LocalNode,
    installed,
    is_version,
    local_device,
    parse_device,
)
from backends.registry import Registry
from configs.faults import Fault, FaultError
from configs.schema import AUTO, RunConfig
from configs.sources import PUBLISHED_PREFIX
from parallel.models.names import name_faults
from runtime.check import (
    RoleSelection,
    probed_packages,
    raise_if_any,
    read_image,
    request_faults,
    select_roles,
    settle_dtype,
)
from runtime.memory import NOT_COUNTED, MemoryEstimate, estimate_memory
from runtime.model_folder import FolderFacts, read_folder
from runtime.placement import CPU_RANKS, default_world_size
from runtime.report import SelectionReport, from_selections
from runtime.requests import request_of


@dataclass(frozen=True)
class Alternative:
    """A backend that a role does not get. faults: why it could not serve; empty if it could, and was not asked."""

    model: str
    role: str
    backend: str
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """What would run. assumed: the facts that the answer rests on, as text by name. faults: of roles that nothing
    serves. alternatives: every other backend for every role. memory: of a rank; None with faults.
    """

    report: SelectionReport
    assumed: dict[str, str]
    faults: tuple[Fault, ...]
    alternatives: tuple[Alternative, ...]
    memory: MemoryEstimate | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.report.to_dict(),
            "assumed": self.assumed,
            "faults": [str(fault) for fault in self.faults],
            "alternatives": [asdict(alternative) for alternative in self.alternatives],
            "memory": None if self.memory is None else {**asdict(self.memory), "not_counted": NOT_COUNTED},
        }

    def alternative_lines(self) -> list[str]:
        """`self, cross: not SAGE_ATTN: ...` for what the table's own notes do not say, and who else would serve."""
        told = {(entry.model, entry.role, r["backend"]) for entry in self.report.entries for r in entry.rejected}
        grouped: dict[tuple[str, str], list[str]] = {}
        for other in self.alternatives:
            if (other.model, other.role, other.backend) in told:
                continue
            roles = grouped.setdefault((other.backend, "; ".join(other.faults)), [])
            if other.role not in roles:
                roles.append(other.role)
        serving: dict[str, list[str]] = {}
        for (name, fault), roles in grouped.items():
            if not fault:
                serving.setdefault(", ".join(roles), []).append(name)
        could = [f"{roles}: would serve too: {', '.join(sorted(names))}" for roles, names in serving.items()]
        refused = sorted((name, faults, ", ".join(roles)) for (name, faults), roles in grouped.items() if faults)
        return could + [f"{roles}: not {name}: {faults}" for name, faults, roles in refused]


def explain(config: RunConfig, device: str = "here", packages: str = "here") -> Explanation:
    """The selections of a configuration. device: `here`, or as `parse_device` takes it; packages: `here`, `all`, `none`
    or `NAME=VERSION,...`.

    Raises FaultError for a configuration, a model folder or an option that cannot be read.
    """
    registry = Registry(config.attention.register)
    folder = read_folder(config.model.path, weights=False)
    raise_if_any(name_faults(config.attention, folder.models, registry))
    node = LocalNode()
    facts = assumed_device(config, device, packages, registry, node)
    gpus = len(node.gpus) if facts.platform == "cuda" and device == "here" else 1
    limit = CPU_RANKS if facts.platform == "cpu" else max(gpus, 1)
    world_size = default_world_size(config.parallel, folder.heads, limit)
    dtype = settle_dtype(config, facts.platform)
    selected, faults = select_roles(config, folder, facts, dtype, world_size, registry)
    faults += _request_faults(config, folder)
    rows = [(role.model, role.selection, role.way.strategy, role.layers) for role in selected]
    assumed = {
        "model": _model_text(config.model.path),
        "device": facts.label
        + (f" (this machine{'; ' + node.notice if node.notice else ''})" if device == "here" else " (assumed)"),
        "packages": _package_text(facts, packages),
        "ranks": f"{world_size}"
        + ("" if config.parallel.world_size else " (set parallel.world_size for another number)"),
        "dtype": dtype,
    }
    others = tuple(_alternatives(selected, facts, registry))
    memory = None if faults else estimate_memory(folder, selected, request_of(config), dtype)
    return Explanation(from_selections(world_size, rows), assumed, tuple(faults), others, memory)


def _model_text(path: str) -> str:
    if not path.startswith(PUBLISHED_PREFIX):
        return path
    return f"{path.removeprefix(PUBLISHED_PREFIX)} as published (no folder given; generate needs model.path=FOLDER)"


def _request_faults(config: RunConfig, folder: FolderFacts) -> list[Fault]:
    """What `generate` would refuse of the request; as of a prompt, nobody need give an image here."""
    image, faults = read_image(config.generate.image)
    found = request_faults(request_of(config, image), folder)
    return faults + [fault for fault in found if fault.key != "generate.image" or image is not None]


def _alternatives(selected: Iterable[RoleSelection], device: DeviceFacts, registry: Registry) -> Iterator[Alternative]:
    for role in selected:
        for name in sorted(registry.names()):
            if name != role.selection.backend:
                try:
                    faults = registry.get_class(name).validate_configuration(role.selection.requirements, device)
                except FaultError as error:  # a class that cannot be loaded: refused when it is chosen
                    faults = list(error.faults)
                rules = tuple(fault.rule for fault in faults)
                yield Alternative(role.model, role.selection.role, name, rules)


def assumed_device(config: RunConfig, device: str, packages: str, registry: Registry, node: LocalNode) -> DeviceFacts:
    """The facts that `--device` and `--packages` state. Raises FaultError for what they cannot mean."""
    known = probed_packages(registry)
    versions = {} if packages == "none" else installed(known)
    if packages not in ("here", "all", "none"):
        versions = _parse_packages(packages, known)
    wanted = config.run.device
    if device != "here":
        facts = parse_device(device, versions, packages == "all")
        if wanted not in (AUTO, facts.platform):
            rule = f"is not the platform of --device {device}"
            raise FaultError([Fault("run.device", wanted, rule, "leave one of the two out")])
        return facts
    platform = ("cuda" if node.gpus else "cpu") if wanted == "auto" else wanted
    facts = local_device(platform, known, node)
    return replace(facts, packages=versions, all_packages=packages == "all")


def _parse_packages(text: str, known: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for part in text.split(","):
        name, stated, version = part.strip().replace("==", "=").partition("=")
        name = name.strip().replace("_", "-").lower()
        if name not in known:
            rule = "no backend asks for that package"
            remedy = f"use here, all, none, or NAME=VERSION with a name out of {', '.join(known)}"
            raise FaultError([Fault("--packages", part, rule, remedy, known)])
        if stated and not is_version(version):
            rule = f"{version or 'nothing'} is no version"
            raise FaultError([Fault("--packages", part, rule, f"give one, such as {name}=1.0, or the name alone")])
        found[name] = version if stated else ANY_VERSION
    return found


def _package_text(facts: DeviceFacts, packages: str) -> str:
    if facts.all_packages:
        return "all (assumed)"
    listed = ", ".join(f"{name} {version}" for name, version in sorted(facts.packages.items()))
    listed = listed or "none that a backend asks for"
    return f"{listed} ({'installed here' if packages == 'here' else 'assumed'})"
