"""What a diffusers folder holds, and whether it is whole; read without torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.faults import Fault, FaultError, unknown_name_remedy
from parallel.models import describe
from parallel.models.facts import ModelFacts
from runtime.tiny_wan import BUILT_IN

KEY = "model.path"
BUILT_IN_PREFIX = "built-in:"
PIPELINES = ("WanPipeline", "WanImageToVideoPipeline")
SHIFTS = {"flow_shift", "shift"}
TRANSFORMERS = ("transformer", "transformer_2")
GIVE_FOLDER = "give a local folder that diffusers' save_pretrained wrote"


@dataclass(frozen=True)
class FolderFacts:
    """models: by component name (`transformer`, `transformer_2`). temporal, spatial: pixels per latent, in frames and
    in rows. shifts: whether the scheduler has a flow shift to set.
    """

    pipeline: str
    models: Mapping[str, ModelFacts]
    temporal: int
    spatial: int
    takes_image: bool
    shifts: bool

    @property
    def heads(self) -> int:
        return next(iter(self.models.values())).heads


def read_folder(path: str) -> FolderFacts:
    """The facts of a folder, or of a built-in model. Raises FaultError with everything that is missing or cut short."""
    if path.startswith(BUILT_IN_PREFIX):
        return _built_in(path)
    folder = Path(path)
    if not folder.is_dir():
        raise FaultError([Fault(KEY, path, "there is no such folder", GIVE_FOLDER)])
    index = _read_json(folder / "model_index.json", path)
    components = [name for name, value in index.items() if isinstance(value, list) and value[0] is not None]
    faults = [fault for name in components for fault in _component_faults(folder / name, path)]
    if faults:
        raise FaultError(faults)
    configs = {
        name: _read_json(folder / name / "config.json", path) for name in (*TRANSFORMERS, "vae") if name in components
    }
    scheduler = _read_json(folder / "scheduler" / "scheduler_config.json", path)
    return _facts(index, {**configs, "scheduler": scheduler}, path)


def _built_in(path: str) -> FolderFacts:
    name = path.removeprefix(BUILT_IN_PREFIX)
    if name not in BUILT_IN:
        known = tuple(BUILT_IN_PREFIX + known for known in BUILT_IN)
        raise FaultError([Fault(KEY, path, "no built-in model has that name", unknown_name_remedy(path, known), known)])
    spec = BUILT_IN[name]
    index = {"_class_name": spec.pipeline, **spec.model_index}
    configs = {
        "transformer": dict(spec.transformer, _class_name="WanTransformer3DModel"),
        "vae": dict(spec.vae),
        "scheduler": dict(spec.scheduler),
    }
    return _facts(index, configs, path)


def _facts(index: Mapping[str, Any], configs: Mapping[str, Mapping[str, Any]], path: str) -> FolderFacts:
    pipeline = str(index.get("_class_name"))
    if pipeline not in PIPELINES:
        rule = f"its pipeline is {pipeline}, which is not served"
        raise FaultError([Fault(KEY, path, rule, f"give a folder of {' or '.join(PIPELINES)}", PIPELINES)])
    models = {name: describe(configs[name]) for name in TRANSFORMERS if name in configs}
    if not models or "vae" not in configs:
        missing = "a transformer" if not models else "a vae"
        raise FaultError([Fault(KEY, path, f"it has no {missing[2:]}", GIVE_FOLDER)])
    vae = configs["vae"]
    temporal, spatial = int(vae.get("scale_factor_temporal") or 4), int(vae.get("scale_factor_spatial") or 8)
    shifts = not SHIFTS.isdisjoint(configs["scheduler"])
    return FolderFacts(pipeline, models, temporal, spatial, pipeline == "WanImageToVideoPipeline", shifts)


def _read_json(file: Path, path: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        rule = f"{file.relative_to(path)} is missing or cannot be read ({error.strerror})"
        raise FaultError([Fault(KEY, path, rule, GIVE_FOLDER)]) from error
    except ValueError as error:
        rule = f"{file.relative_to(path)} is not JSON ({error})"
        raise FaultError([Fault(KEY, path, rule, "copy the folder again")]) from error
    if not isinstance(content, dict):
        raise FaultError([Fault(KEY, path, f"{file.relative_to(path)} is not a mapping", GIVE_FOLDER)])
    return content


def _component_faults(folder: Path, path: str) -> list[Fault]:
    if not folder.is_dir():
        return [Fault(KEY, path, f"its component {folder.name} is missing", "copy the folder again")]
    expected = {folder / shard for index in folder.glob("*.safetensors.index.json") for shard in _shards(index)}
    missing = [
        Fault(KEY, path, f"{file.relative_to(path)} is missing", "copy the folder again")
        for file in sorted(expected)
        if not file.is_file()
    ]
    cut = [
        Fault(KEY, path, f"{file.relative_to(path)} {problem}", "copy the folder again")
        for file in sorted(folder.glob("*.safetensors"))
        if (problem := weights_problem(file)) is not None
    ]
    return missing + cut + _missing_weights(folder, path)


def _missing_weights(folder: Path, path: str) -> list[Fault]:
    is_network = (folder / "config.json").is_file() and not (folder / "preprocessor_config.json").is_file()
    has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    if not is_network or has_weights or any(folder.glob("tokenizer*")):
        return []
    return [Fault(KEY, path, f"{folder.name} has no weights", "copy the folder again")]


def _shards(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        return {f"(the shards that {index.name} fails to name)"}


def weights_problem(file: Path) -> str | None:
    """What is wrong with a safetensors file as far as its size and header tell; None if it is whole.

    The format: 8 bytes with the header's length, a JSON header with each tensor's place, then the tensors.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            return "is cut short: it has no header"
        length = struct.unpack("<Q", prefix)[0]
        if length > size - 8:
            return "is cut short inside its header"
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            return "has a damaged header"
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    expected = 8 + length + max(ends, default=0)
    return None if size == expected else f"has {size} bytes, and its header announces {expected}"
