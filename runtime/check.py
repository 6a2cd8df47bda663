"""Everything that can be refused before an actor starts: configuration, model folder, request and selections; all
faults at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import lcm
from pathlib import Path

from backends.platforms.facts import DeviceFacts
from backends.registry import Registry
from backends.selection import Selection
from backends.selector import Selector
from configs.checks import Refusal
from configs.faults import Fault, FaultError
from configs.fields import check_value
from configs.layers import render
from configs.schema import AUTO, TRANSPORTS, ParallelConfig, RunConfig
from parallel.planner import Way, plan_role
from runtime.errors import PlacementError
from runtime.first_frame import picture_faults
from runtime.model_folder import WITH_IMAGE, FolderFacts
from runtime.requests import Request

NCCL_PACKAGE = "nccl4py"


@dataclass(frozen=True)
class RoleSelection:
    """What a role of a model gets, and over how many layers."""

    model: str
    selection: Selection
    way: Way
    layers: int


def settle_dtype(config: RunConfig, platform: str) -> str:
    """The dtype that is asked for; `auto` is float32 on CPU, and bfloat16 on accelerators."""
    if config.run.dtype != AUTO:
        return config.run.dtype
    return "float32" if platform == "cpu" else "bfloat16"


def request_faults(request: Request, folder: FolderFacts) -> list[Fault]:
    """Sizes that the model would have to round or cannot place, and what it would leave unused or lacks."""
    return _value_faults(request) or [
        *_size_faults(request, folder),
        *_guidance_faults(request, folder),
        *_image_faults(request, folder),
    ]


def _value_faults(request: Request) -> list[Fault]:
    """Fields that the setting of the same name would not take: a request need not come from settings."""
    found = []
    for field in fields(request):
        key, value = f"{'run' if field.name == 'seed' else 'generate'}.{field.name}", getattr(request, field.name)
        if field.name == "image":
            found += [] if value is None else picture_faults(value)
            continue
        if value is None and field.name not in ("guidance_2", "image_fit"):
            checked = Refusal("is missing", "give it a value")
        else:
            checked = check_value(key, value, repr(value))
        if isinstance(checked, Refusal):
            shown = render(value) if isinstance(value, str) else value  # text that looks like a number has quotes
            found.append(Fault(key, shown, checked.rule, checked.remedy, checked.allowed))
        elif isinstance(checked, str) and not isinstance(value, str):
            found.append(Fault(key, value, "takes text", f"write {str(value)!r}"))
    return found


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
    elif request.guidance_2 is not None and request.guidance <= 1:
        remedy = "leave it out (null), or raise generate.guidance above 1"
        found.append(Fault("generate.guidance_2", request.guidance_2, _unguided(request), remedy))
    if request.negative_prompt and request.guidance <= 1:
        remedy = "leave it out, or raise generate.guidance above 1"
        found.append(Fault("generate.negative_prompt", request.negative_prompt, _unguided(request), remedy))
    return found


def _unguided(request: Request) -> str:
    """The pipelines guide either every stage or none, by the first stage's scale."""
    return f"without guidance (generate.guidance={request.guidance:g}) nothing would use it"


def _image_faults(request: Request, folder: FolderFacts) -> list[Fault]:
    found = []
    if folder.needs_image and request.image is None:
        rule = f"the model ({folder.pipeline}) starts from an image"
        found.append(Fault("generate.image", None, rule, "add generate.image=FILE"))
    if request.image is not None and not folder.takes_image:
        rule = f"the model's pipeline ({folder.pipeline}) takes no image"
        remedy = f"leave it out, or give a folder whose model_index.json names {WITH_IMAGE}"
        found.append(Fault("generate.image", None, rule, remedy))
    if request.image is None and request.image_fit is not None and not folder.needs_image:
        rule = "without generate.image nothing would use it"
        found.append(Fault("generate.image_fit", request.image_fit, rule, "leave it out, or add generate.image=FILE"))
    return found


def read_image(path: str | None) -> tuple[bytes | None, list[Fault]]:
    """The bytes of an image file that can serve as a first frame; none for None."""
    if path is None:
        return None, []
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        return None, [Fault("generate.image", path, f"it cannot be read ({reason})", "give a whole PNG or JPEG file")]
    faults = picture_faults(content, path)
    return (None if faults else content), faults


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
            selected.append(RoleSelection(model, planned.selection, planned.way, role.layers))
    return selected, faults


def raise_if_any(faults: Iterable[Fault], lacking: Iterable[Fault] = ()) -> None:
    """Raise every fault once, however many requests have it.

    Args:
        faults: what is wrong with the configuration or the requests.
        lacking: resources that are not available.

    Raises:
        PlacementError: if resources alone are at fault.
        FaultError: if anything else is, with the lacking resources after it.
    """
    found, missing = tuple(dict.fromkeys(faults)), tuple(dict.fromkeys(lacking))
    if found:
        raise FaultError((*found, *missing))
    if missing:
        raise PlacementError(missing)
