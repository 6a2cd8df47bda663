"""From a configuration and a cluster to what the ranks will be: the platform, how many, in which dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from backends.platforms.facts import DeviceFacts, LocalNode, installed, local_device
from backends.registry import Registry
from configs.faults import Fault, FaultError
from configs.schema import AUTO, RunConfig
from parallel.models.names import name_faults
from runtime import ray_api
from runtime.check import probed_packages, raise_if_any, request_faults, select_roles, settle_dtype
from runtime.errors import PlacementError
from runtime.group import require_same_sources
from runtime.live import is_local
from runtime.model_folder import FolderFacts, read_folder
from runtime.placement import choose_world_size, feasibility_fault, least_world_size
from runtime.requests import Request
from runtime.source import ROOT, own_sources, shadow_message, shadows


@dataclass(frozen=True)
class Ground:
    """What a run stands on. device: of the ranks, as far as the driver can know it. notice: why they use no GPU."""

    device: DeviceFacts
    world_size: int
    dtype: str
    nodes: tuple[ray_api.Node, ...]
    notice: str = ""


def refuse_shadows() -> None:
    """Raises FaultError if the working directory holds packages that ranks would take for ours."""
    shadowing = shadows(Path.cwd())
    if shadowing:
        raise FaultError(Fault("import", *shadow_message(name, path)) for name, path in shadowing)


def check_without_ray(
    config: RunConfig, requests: Sequence[Request], registry: Registry, node: LocalNode
) -> FolderFacts:
    """Check everything that needs neither a cluster nor torch.

    Returns:
        The facts of the model folder.

    Raises:
        FaultError: everything that is wrong, lacking resources included.
        PlacementError: if nothing but resources is lacking.
    """
    refuse_shadows()
    device, lacking = _device_here(config, registry, node) if is_local(config) else (None, [])
    try:
        folder = read_folder(config.model.path)
    except FaultError as error:
        raise_if_any(error.faults, lacking)
        raise
    faults = name_faults(config.attention, folder.models, registry)
    if config.generate.flow_shift is not None and not folder.shifts:
        rule = "the folder's scheduler has no flow shift"
        faults.append(Fault("generate.flow_shift", config.generate.flow_shift, rule, "leave it at null"))
    faults += [fault for request in requests for fault in request_faults(request, folder)]
    if device is not None:
        known = {(fault.key, fault.rule) for fault in faults}
        dtype = settle_dtype(config, device.platform)
        _, refused = select_roles(config, folder, device, dtype, least_world_size(config.parallel), registry)
        faults += [fault for fault in refused if (fault.key, fault.rule) not in known]
    raise_if_any(faults, lacking)
    return folder


def _device_here(config: RunConfig, registry: Registry, node: LocalNode) -> tuple[DeviceFacts | None, list[Fault]]:
    """This node's device, which a local cluster's ranks will have, and the resources that the run lacks here."""
    try:
        device = _local_device(config.run.device, registry, node)
    except PlacementError as error:
        return None, list(error.faults)
    world_size = least_world_size(config.parallel)
    if device.platform == "cuda" and world_size > len(node.gpus):
        rule = f"this node has {len(node.gpus)} GPUs, and a rank takes a whole one"
        remedy = f"use at most {len(node.gpus)}, or run.device=cpu"
        return device, [Fault("parallel.world_size", world_size, rule, remedy)]
    return device, []


def survey(config: RunConfig, folder: FolderFacts, registry: Registry, node: LocalNode | None = None) -> Ground:
    """What the connected cluster gives the run. Raises PlacementError for what it lacks, FaultError for what cannot
    be served on it.
    """
    ground = survey_ranks(config, folder.heads, registry, node)
    raise_if_any(select_roles(config, folder, ground.device, ground.dtype, ground.world_size, registry)[1])
    return ground


def survey_ranks(config: RunConfig, heads: int, registry: Registry, node: LocalNode | None = None) -> Ground:
    """The ranks that the connected cluster gives, and their dtype, whatever they are going to compute. heads: an
    automatic number of ranks divides them. Raises PlacementError.
    """
    nodes = ray_api.nodes()
    node = node or LocalNode()
    local = is_local(config)
    device = _local_device(config.run.device, registry, node) if local else _probe(config, nodes, registry)
    free_gpus = int(ray_api.free("GPU")) if device.platform == "cuda" else 0
    world_size = choose_world_size(config, device.platform, heads, free_gpus)
    fault = feasibility_fault(world_size, device.platform, nodes)
    if fault is not None:
        raise PlacementError([fault])
    return Ground(device, world_size, settle_dtype(config, device.platform), nodes, node.notice)


def _local_device(wanted: str, registry: Registry, node: LocalNode) -> DeviceFacts:
    platform = local_platform(wanted, node)
    if platform == "cuda" and not node.gpus:
        raise PlacementError([Fault("run.device", wanted, node.no_gpu_rule, "use run.device=cpu", ("cpu",))])
    return local_device(platform, probed_packages(registry), node)


def local_platform(wanted: str, node: LocalNode) -> str:
    """The platform of this node's ranks: what is wanted, or `cuda` if there is a GPU and torch is built for it."""
    if wanted != AUTO:
        return wanted
    torch_is_cpu_build = installed(["torch"]).get("torch", "").endswith("+cpu")
    return "cuda" if not torch_is_cpu_build and node.gpus else "cpu"


def _probe(config: RunConfig, nodes: Sequence[ray_api.Node], registry: Registry) -> DeviceFacts:
    """The device of the first node that has what is wanted; each rank resolves again on its own facts."""
    wanted = config.run.device
    with_gpu = [node for node in nodes if node.gpus >= 1]
    platform = ("cuda" if with_gpu else "cpu") if wanted == AUTO else wanted
    if platform == "cpu":
        return local_device("cpu", probed_packages(registry))
    if not with_gpu:
        rule = "no node of the cluster has a GPU"
        raise PlacementError([Fault("run.device", wanted, rule, "use run.device=cpu")])
    host, timeout = with_gpu[0].host, config.cluster.start_timeout_s
    try:
        answer = ray_api.probe_node(with_gpu[0].node_id, probed_packages(registry), own_sources(), str(ROOT), timeout)
    except TimeoutError as error:
        rule = f"the node {host} did not answer within {timeout:g} s"
        remedy = "raise cluster.start_timeout_s, or look at the node's load"
        raise PlacementError([Fault("run.device", wanted, rule, remedy)]) from error
    require_same_sources(answer["sources"], host)
    if not answer["gpus"]:
        rule = f"the node {host} offers GPUs, and nvidia-smi sees none there"
        raise PlacementError([Fault("run.device", wanted, rule, "repair the driver, or use run.device=cpu")])
    name, capability, memory = answer["gpus"][0]
    return DeviceFacts("cuda", capability, name, memory, answer["packages"])
