"""What a diffusers folder holds, and whether it is whole; read without torch."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.faults import Fault, FaultError, unknown_name_remedy
from configs.sources import PUBLISHED_PREFIX, published_model, published_models
from parallel.models import describe
from parallel.models.facts import ModelFacts

KEY = "model.path"
BUILT_IN_PREFIX = "built-in:"
BUILT_IN = ("tiny-wan",)
"""The models that come with this package, as folders of `runtime/models`."""
WITH_IMAGE = "WanImageToVideoPipeline"
PIPELINES = ("WanPipeline", WITH_IMAGE)
SHIFTS = {"flow_shift", "shift"}
TRANSFORMERS = ("transformer", "transformer_2")
GIVE_FOLDER = "give a local folder that diffusers' save_pretrained wrote"
COPY_AGAIN = "copy the folder again"


@dataclass(frozen=True)
class FolderFacts:
    """models: by component name (`transformer`, `transformer_2`). temporal, spatial: pixels per latent, in frames and
    in rows. takes_image, needs_image: whether a request may have a first frame, and whether it must. shifts: whether
    the scheduler has a flow shift to set. two_stage: whether a second transformer takes over.
    """

    pipeline: str
    models: Mapping[str, ModelFacts]
    temporal: int
    spatial: int
    takes_image: bool
    needs_image: bool
    shifts: bool
    two_stage: bool

    @property
    def heads(self) -> int:
        return next(iter(self.models.values())).heads


def folder_of(path: str) -> Path:
    """Where on this node the model of `model.path` is. Raises FaultError for `built-in:` and a name that none has."""
    if not path.startswith(BUILT_IN_PREFIX):
        return Path(path)
    name = path.removeprefix(BUILT_IN_PREFIX)
    if name not in BUILT_IN:
        known = tuple(BUILT_IN_PREFIX + known for known in BUILT_IN)
        raise FaultError([Fault(KEY, path, "no built-in model has that name", unknown_name_remedy(path, known), known)])
    return Path(__file__).parent / "models" / name


def _way_to(path: str) -> str:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", path) or path.startswith(".") or Path(path).parent.exists():
        return GIVE_FOLDER
    name = path.rpartition("/")[2]
    if "wan" not in name.casefold():
        return f"{GIVE_FOLDER}; models of the Wan 2.1 and 2.2 families are served ({' or '.join(PIPELINES)})"
    return f"for a model of the Hugging Face Hub, run `hf download {path} --local-dir {name}`; then model.path={name}"


def read_folder(path: str, *, weights: bool = True) -> FolderFacts:
    """The facts of a folder; without `weights`, from its JSON files alone, or of a model as published.

    Raises FaultError with everything that is missing or cut short.
    """
    if path.startswith(PUBLISHED_PREFIX):
        return _published(path, weights=weights)
    folder = folder_of(path)
    if not _is_folder(folder):
        raise FaultError([_fault(path, "there is no such folder", _way_to(path))])
    index = _read_json(folder / "model_index.json", path)
    components = [name for name, value in index.items() if isinstance(value, list) and value and value[0] is not None]
    if weights:
        faults = [fault for name in components for fault in _component_faults(folder / name, path)]
        if faults:
            raise FaultError(faults)
    configs = {
        name: _read_json(folder / name / "config.json", path) for name in (*TRANSFORMERS, "vae") if name in components
    }
    scheduler = folder / "scheduler" / "scheduler_config.json"
    configs["scheduler"] = _read_json(scheduler, path) if weights or scheduler.is_file() else {}
    return _facts(index, configs, path)


def _published(path: str, *, weights: bool) -> FolderFacts:
    """The facts of `published:NAME`. Raises FaultError if weights are needed, and for an unknown name."""
    known = tuple(PUBLISHED_PREFIX + name for name in published_models())
    if path not in known:
        raise FaultError(
            [Fault(KEY, path, "no published model has that name", unknown_name_remedy(path, known), known)]
        )
    if weights:
        raise FaultError([_fault(path, "it names the sizes of a published model, without weights", GIVE_FOLDER)])
    files = published_model(path.removeprefix(PUBLISHED_PREFIX))
    return _facts(files["model_index"], {**files, "scheduler": {}}, path)


def _facts(index: Mapping[str, Any], configs: Mapping[str, Mapping[str, Any]], path: str) -> FolderFacts:
    pipeline = str(index.get("_class_name"))
    if pipeline not in PIPELINES:
        rule = f"its pipeline is {pipeline}, which is not served"
        raise FaultError([_fault(path, rule, f"give a folder of {' or '.join(PIPELINES)}")])
    missing = [
        name
        for name in ("transformer", "vae")
        if not (name in configs or (name == "transformer" and "transformer_2" in configs))
    ]
    if missing:
        raise FaultError([_fault(path, f"it has no {' and no '.join(missing)}", GIVE_FOLDER)])
    try:
        models = {name: describe(configs[name]) for name in TRANSFORMERS if name in configs}
        vae = configs["vae"]
        temporal, spatial = int(vae.get("scale_factor_temporal") or 4), int(vae.get("scale_factor_spatial") or 8)
    except FaultError as error:
        raise FaultError([_fault(path, fault.rule, fault.remedy) for fault in error.faults]) from error
    except (TypeError, ValueError) as error:
        raise FaultError([_fault(path, f"vae/config.json cannot be read ({error})", COPY_AGAIN)]) from error
    return FolderFacts(
        pipeline=pipeline,
        models=models,
        temporal=max(temporal, 1),
        spatial=max(spatial, 1),
        # A model with a timestep for each token (Wan 2.2 TI2V) takes a first frame as tokens without noise, although
        # its folder names the pipeline without one.
        takes_image=pipeline == WITH_IMAGE or index.get("expand_timesteps") is True,
        needs_image=pipeline == WITH_IMAGE,
        shifts=not SHIFTS.isdisjoint(configs["scheduler"]),
        two_stage=index.get("boundary_ratio") is not None,
    )


def _fault(path: str, rule: str, remedy: str) -> Fault:
    return Fault(KEY, path, rule, remedy)


def _is_folder(folder: Path) -> bool:
    try:
        return folder.is_dir()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _read_json(file: Path, path: str) -> dict[str, Any]:
    name = file.relative_to(folder_of(path))
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        rule = f"{name} is missing or cannot be read ({error.strerror})"
        raise FaultError([_fault(path, rule, GIVE_FOLDER)]) from error
    except (ValueError, RecursionError) as error:
        raise FaultError([_fault(path, f"{name} is not JSON ({error})", COPY_AGAIN)]) from error
    if not isinstance(content, dict):
        raise FaultError([_fault(path, f"{name} is not a mapping", GIVE_FOLDER)])
    return content


def _component_faults(folder: Path, path: str) -> list[Fault]:
    """What is missing of a component, or cut short."""
    if not folder.is_dir():
        return [_fault(path, f"its component {folder.name} is missing", COPY_AGAIN)]
    problems: dict[Path, str] = {}
    for index in folder.glob("*.safetensors.index.json"):
        for shard in _shards(index):
            if shard is None:
                problems[index] = "names no shards"
            elif not (folder / shard).is_file():
                problems[folder / shard] = "is missing"
    files = sorted(folder.glob("*.safetensors"))
    problems |= {file: problem for file in files if (problem := weights_problem(file)) is not None}
    if not files and not any(folder.glob("*.bin")) and _is_network(folder):
        problems[folder] = "has no weights"
    return [
        _fault(path, f"{file.relative_to(folder_of(path))} {problem}", COPY_AGAIN) for file, problem in problems.items()
    ]


def _is_network(folder: Path) -> bool:
    others = ("preprocessor_config.json", "tokenizer_config.json", "scheduler_config.json")
    return (folder / "config.json").is_file() and not any((folder / name).is_file() for name in others)


def _shards(index: Path) -> list[str | None]:
    """The files that an index names; [None] if it cannot be read."""
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [None]
    return [name if isinstance(name, str) else None for name in names]


def weights_problem(file: Path) -> str | None:
    """What is wrong with a safetensors file as far as its size and header tell; None if it is whole.

    The format: 8 bytes with the header's length, a JSON header with each tensor's place, then the tensors.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if length > size - 8:
                return "is cut short in its header"
            header = json.loads(stream.read(length))
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return "has a damaged header"
    expected = 8 + length + max(ends, default=0)
    return None if size == expected else f"has {size} bytes, and its header announces {expected}"
