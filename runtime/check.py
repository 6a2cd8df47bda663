"""Everything that can be refused before an actor starts: configuration, model folder, request and selections; all
faults at once.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm
from pathlib import Path

from backends.entries import resolve_entry
from backends.options import Place, model_faults, ownerless_faults, read_blocks
from backends.platforms.facts import DeviceFacts
from backends.registry import Registry
from backends.selection import Selection
from backends.selector import Selector
from configs.faults import Fault, FaultError, nearest, unknown_name_remedy
from configs.fields import RESERVED
from configs.schema import AUTO, TRANSPORTS, AttentionConfig, AttentionSpec, ParallelConfig, RunConfig
from configs.sources import ENVIRONMENT
from parallel.plan import Strategy
from parallel.planner import plan_role
from runtime.model_folder import FolderFacts
from runtime.requests import Request

NCCL_PACKAGE = "nccl4py"


@dataclass(frozen=True)
class RoleSelection:
    """What a role of a model gets, and over how many layers."""

    model: str
    selection: Selection
    strategy: Strategy
    layers: int


def settle_dtype(config: RunConfig, platform: str) -> str:
    """The dtype that is asked for; `auto` is float32 on CPU, and bfloat16 on accelerators."""
    if config.run.dtype != AUTO:
        return config.run.dtype
    return "float32" if platform == "cpu" else "bfloat16"


def name_faults(config: AttentionConfig, folder: FolderFacts, registry: Registry) -> list[Fault]:
    """Roles that the model does not have, backends that nobody registered, and registrations that are none."""
    roles = {role.role for model in folder.models.values() for role in model.roles}
    categories = {role.category for model in folder.models.values() for role in model.roles}
    parents = {role.rsplit(".", depth)[0] for role in roles for depth in range(1, role.count(".") + 1)}
    known = tuple(sorted(roles | categories | parents))
    found = []
    for role, spec in config.per_role.items():
        key = f"attention.per_role.{role}"
        if role not in known:
            rule = f"the model has no role {role!r}; its roles are {', '.join(sorted(roles))}"
            remedy = _role_remedy(role, known)
            found.append(Fault(key, spec.backend, rule, remedy, known, config.origins.get(key, "")))
        found += _backend_name_faults(key, spec.backend, config, registry)
    if config.default is not None:
        found += _backend_name_faults("attention.default", config.default.backend, config, registry)
    for name in config.register:
        try:
            registry.get_class(name)
        except FaultError as error:
            found += error.faults
    found += _option_faults(config, folder, registry)
    return found or _unused_entries(config, folder)


def _role_remedy(role: str, known: tuple[str, ...]) -> str:
    """`did you mean cross?`, or the key of a choice that was misspelled as a role: `self.verison`."""
    parent, _, last = role.rpartition(".")
    meant = nearest(last, RESERVED, count=1) if parent in known else ()
    return f"did you mean attention.per_role.{parent}.{meant[0]}?" if meant else unknown_name_remedy(role, known)


def _option_faults(config: AttentionConfig, folder: FolderFacts, registry: Registry) -> list[Fault]:
    """What is wrong with the options of a choice on any device, and what the checkpoint lacks for them."""
    specs = {f"attention.per_role.{role}": spec for role, spec in config.per_role.items()}
    if config.default is not None:
        specs["attention.default"] = config.default
    found = []
    for key, spec in specs.items():
        place = Place(key, config.origins)
        if spec.backend == AUTO:
            found += ownerless_faults(spec, place, registry)
        elif spec.backend in registry.names():
            try:
                blocks, faults = read_blocks(registry.get_class(spec.backend), spec, place, registry)
            except FaultError:
                continue  # a class that cannot be loaded is told about where it was registered
            found += faults or [
                fault
                for model, facts in folder.models.items()
                if any(resolve_entry(role.role, role.category, config).key == key for role in facts.roles)
                for fault in model_faults(blocks, model, facts.calibration, place)
            ]
    return found


def _unused_entries(config: AttentionConfig, folder: FolderFacts) -> list[Fault]:
    """Choices that no role of the model falls back to. The environment's is a last resort: it may be unused."""
    roles = {(role.role, role.category) for model in folder.models.values() for role in model.roles}
    used = {resolve_entry(role, category, config).key for role, category in roles}
    found = []
    for key in (*(f"attention.per_role.{role}" for role in config.per_role), "attention.default"):
        origin = config.origins.get(key, "")
        spec = config.default if key == "attention.default" else config.per_role[key.split(".", 2)[2]]
        if key in used or spec in (None, AttentionSpec(AUTO)) or origin == ENVIRONMENT:
            continue
        rule = "no role of the model falls back to it, as each has a nearer choice"
        found.append(Fault(key, spec.backend if spec else None, rule, "leave it out", (), origin))
    return found


def _backend_name_faults(key: str, name: str, config: AttentionConfig, registry: Registry) -> list[Fault]:
    if name == AUTO or name in registry.names():
        return []
    known = (AUTO, *registry.names())
    close = unknown_name_remedy(name, known)
    remedy = f"{close}{' Or' if close.endswith('?') else ', or'} add attention.register.{name}=package.module.Class"
    return [Fault(key, name, "no backend has that name", remedy, known, config.origins.get(key, ""))]


def request_faults(request: Request, folder: FolderFacts) -> list[Fault]:
    """Sizes that the model would have to round or cannot place, and what it would leave unused or lacks."""
    return [*_size_faults(request, folder), *_guidance_faults(request, folder), *_image_faults(request, folder)]


def _size_faults(request: Request, folder: FolderFacts) -> list[Fault]:
    found = []
    model = next(iter(folder.models.values()))
    if (request.frames - 1) % folder.temporal:
        below = (request.frames - 1) // folder.temporal * folder.temporal + 1
        rule = f"a video has {folder.temporal}n + 1 frames"
        found.append(Fault("generate.frames", request.frames, rule, f"use {below} or {below + folder.temporal}"))
    for name, size, unit in (("height", request.height, model.patch[1]), ("width", request.width, model.patch[2])):
        step = lcm(folder.spatial * unit, 16)
        if size % step:
            below = max(size // step * step, step)
            rule = f"it must be a multiple of {step}"
            found.append(Fault(f"generate.{name}", size, rule, f"use {below} or {below + step}"))
        elif size // (folder.spatial * unit) > model.axis_limit:
            limit = model.axis_limit * folder.spatial * unit
            found.append(Fault(f"generate.{name}", size, f"the model places at most {limit} pixels", f"use {limit}"))
    if ((request.frames - 1) // folder.temporal + 1) // model.patch[0] > model.axis_limit:
        limit = (model.axis_limit * model.patch[0] - 1) * folder.temporal + 1
        found.append(Fault("generate.frames", request.frames, f"the model places at most {limit}", f"use {limit}"))
    return found


def _guidance_faults(request: Request, folder: FolderFacts) -> list[Fault]:
    found = []
    if request.guidance_2 is not None and not folder.two_stage:
        rule = "the model has one stage, and nothing would use it"
        found.append(Fault("generate.guidance_2", request.guidance_2, rule, "leave it out"))
    if request.negative_prompt and request.guidance <= 1:
        rule = f"without guidance (generate.guidance={request.guidance:g}) nothing would use it"
        found.append(
            Fault("generate.negative_prompt", request.negative_prompt, rule, "raise generate.guidance above 1")
        )
    return found


def _image_faults(request: Request, folder: FolderFacts) -> list[Fault]:
    if folder.takes_image and request.image is None:
        rule = f"the model ({folder.pipeline}) starts from an image"
        return [Fault("generate.image", None, rule, "add generate.image=FILE")]
    if request.image is not None and not folder.takes_image:
        rule = f"the model ({folder.pipeline}) takes no image"
        return [Fault("generate.image", None, rule, "leave it out, or give an image-to-video folder")]
    return []


def read_image(path: str | None) -> tuple[bytes | None, list[Fault]]:
    """The bytes of an image file that can be opened to its last row; none for None."""
    if path is None:
        return None, []
    from PIL import Image

    try:
        content = Path(path).read_bytes()
        with Image.open(io.BytesIO(content)) as picture:
            picture.load()
    except (SyntaxError, Image.DecompressionBombError) as error:  # what Pillow raises for a damaged or a huge file
        return None, [Fault("generate.image", path, f"it cannot be opened ({error})", "give a PNG or JPEG file")]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        return None, [Fault("generate.image", path, f"it cannot be read ({reason})", "give a whole PNG or JPEG file")]
    return content, []


def probed_packages(registry: Registry) -> tuple[str, ...]:
    """The distributions that a choice may depend on."""
    return (*registry.distributions(), NCCL_PACKAGE)


def transport_faults(config: ParallelConfig, device: DeviceFacts) -> list[Fault]:
    """Why a transport that was asked for cannot move tensors of the ranks' devices."""
    if config.transport != "nccl":
        return []
    if device.platform != "cuda":
        rule = f"it moves tensors of NVIDIA GPUs, and the ranks are on {device.label}"
        return [Fault("parallel.transport", "nccl", rule, "leave it on auto", TRANSPORTS)]
    if not device.has(NCCL_PACKAGE):
        rule = f"it needs the package {NCCL_PACKAGE}, which is not installed"
        return [Fault("parallel.transport", "nccl", rule, f"install {NCCL_PACKAGE}, or leave it on auto", TRANSPORTS)]
    return []


def select_roles(
    config: RunConfig, folder: FolderFacts, device: DeviceFacts, dtype: str, world_size: int, registry: Registry
) -> tuple[list[RoleSelection], list[Fault]]:
    """What every role of every model gets on a device, and the faults of those that get nothing; also that of a
    transport that cannot serve there.
    """
    selected: list[RoleSelection] = []
    faults = transport_faults(config.parallel, device)
    selector = Selector(device, config.attention, registry)
    for model, facts in folder.models.items():
        for role in facts.roles:
            try:
                planned = plan_role(role, dtype, world_size, config.parallel, selector)
            except FaultError as error:
                faults += [fault for fault in error.faults if fault not in faults]
                continue
            selected.append(RoleSelection(model, planned.selection, planned.way.strategy, role.layers))
    return selected, faults


def raise_if_any(faults: Iterable[Fault]) -> None:
    """Raises FaultError with each fault once, however many requests have it."""
    found = tuple(dict.fromkeys(faults))
    if found:
        raise FaultError(found)
