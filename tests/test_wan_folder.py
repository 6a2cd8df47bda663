"""Built folders: deterministic, and loadable by stock diffusers."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import wan_folder
from tests import wan_folders

CHECKOUT = Path(__file__).resolve().parents[1]
TEXT_TO_VIDEO = sorted(name for name, spec in wan_folders.SPECS.items() if spec.image_encoder is None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny-wan"
    wan_folder.build(folder)
    return folder


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shrunk")


def _contents(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _pipeline(folder: Path) -> Any:
    import diffusers

    class_name = json.loads((folder / "model_index.json").read_text())["_class_name"]
    pipeline = getattr(diffusers, class_name).from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _generate(pipeline: Any, prompt: str = "a red square", output: str = "pt", **changes: Any) -> Any:
    import torch

    size = {"num_frames": 5, "height": 64, "width": 64, "num_inference_steps": 2}
    generator = torch.Generator().manual_seed(0)
    return pipeline(prompt=prompt, output_type=output, generator=generator, **(size | changes)).frames


def _assert_video(video: Any) -> None:
    import torch

    assert tuple(video.shape) == (1, 5, 3, 64, 64)
    assert torch.isfinite(video).all()
    assert video.std() > 0.1


def test_the_same_seed_gives_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    wan_folder.build(tmp_path, seed=0)
    assert _contents(tmp_path) == _contents(tiny)


def test_another_seed_gives_other_weights(tiny: Path, tmp_path: Path) -> None:
    wan_folder.build(tmp_path, seed=1)
    ours, other = _contents(tiny), _contents(tmp_path)
    assert ours.keys() == other.keys()
    weights = [name for name in ours if name.endswith(".safetensors")]
    assert len(weights) == 3
    assert all(ours[name] != other[name] for name in weights)


def test_building_leaves_the_callers_random_state_and_dtype(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(7)
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.bfloat16)
    try:
        wan_folder.build(tmp_path)
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_tokenizer_has_every_prompt_and_masks_its_padding(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny / "tokenizer")
    prompts = ["a red cat", "", "赤い猫 🐈\n\tété", "x" * 1000]
    batch = tokenizer(
        prompts, padding="max_length", max_length=512, truncation=True, return_attention_mask=True, return_tensors="pt"
    )
    lengths = [min(len(prompt.encode()) + 1, 512) for prompt in prompts]
    assert tuple(batch.input_ids.shape) == (4, 512)
    assert batch.attention_mask.sum(dim=1).tolist() == lengths
    assert all(row[length - 1] == tokenizer.eos_token_id for row, length in zip(batch.input_ids, lengths, strict=True))
    assert (batch.input_ids[batch.attention_mask == 0] == tokenizer.pad_token_id).all()
    assert not (batch.input_ids == tokenizer.unk_token_id).any()
    assert tokenizer.decode(tokenizer(prompts[2]).input_ids, skip_special_tokens=True) == prompts[2]


def test_stock_diffusers_generates_from_the_built_in_model(tiny: Path) -> None:
    _assert_video(_generate(_pipeline(tiny)))


@pytest.mark.parametrize("kind", ["attn1", "attn2"])
@pytest.mark.parametrize("change", ["silent", "swapped heads"])
def test_attention_decides_the_latents(tiny: Path, kind: str, change: str) -> None:
    import torch

    pipeline = _pipeline(tiny)
    expected = _generate(pipeline, output="latent")
    weight = getattr(pipeline.transformer.blocks[-1], kind).to_out[0].weight.data
    if change == "silent":
        weight.zero_()
    else:
        weight.copy_(torch.cat([weight[:, 64:128], weight[:, :64], weight[:, 128:]], dim=1))
    assert (_generate(pipeline, output="latent") - expected).norm() > 1e-2 * expected.norm()


def test_the_prompt_decides_the_latents(tiny: Path) -> None:
    pipeline = _pipeline(tiny)
    expected = _generate(pipeline, output="latent")
    assert (_generate(pipeline, "a blue circle", output="latent") - expected).norm() > 1e-2 * expected.norm()


def test_bfloat16_stays_finite(tiny: Path) -> None:
    import diffusers
    import torch

    pipeline = diffusers.WanPipeline.from_pretrained(tiny, dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    _assert_video(_generate(pipeline).float())


@pytest.mark.parametrize("name", TEXT_TO_VIDEO)
def test_stock_diffusers_generates_from_the_shrunk_text_models(shrunk: Path, name: str) -> None:
    pipeline = _pipeline(wan_folders.folder(name, shrunk))
    _assert_video(_generate(pipeline))
    assert (pipeline.transformer_2 is not None) == (name == "wan2.2-t2v-a14b")
    assert pipeline.config.expand_timesteps == (name == "wan2.2-ti2v-5b")


def test_stock_diffusers_generates_from_the_shrunk_image_model(shrunk: Path) -> None:
    from PIL import Image

    pipeline = _pipeline(wan_folders.folder("wan2.1-i2v", shrunk))
    image = Image.effect_noise((64, 64), 80).convert("RGB")
    _assert_video(_generate(pipeline, image=image))


@pytest.mark.parametrize("name", sorted(wan_folders.SPECS))
def test_the_written_configs_have_every_field_of_the_spec(shrunk: Path, name: str) -> None:
    spec, folder = wan_folders.SPECS[name], wan_folders.folder(name, shrunk)
    written = {
        "model_index.json": spec.model_index,
        "transformer/config.json": spec.transformer,
        "vae/config.json": spec.vae,
        "scheduler/scheduler_config.json": spec.scheduler,
    }
    for file, config in written.items():
        found = json.loads((folder / file).read_text())
        assert {key: found.get(key, "absent") for key in config} == config


def test_the_script_builds_the_asked_size_and_refuses_a_full_folder(tmp_path: Path) -> None:
    script, folder = CHECKOUT / "scripts" / "build_tiny_wan.py", tmp_path / "model"
    command = [sys.executable, str(script), str(folder), "--layers", "1", "--heads", "2"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    config = json.loads((folder / "transformer" / "config.json").read_text())
    assert (config["num_layers"], config["num_attention_heads"]) == (1, 2)

    again = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
    assert "--force" in again.stderr


def test_a_folder_is_not_built_inside_a_process_group(tmp_path: Path) -> None:
    """There, transformers writes files on rank 0 only: a build must be refused, not half done."""
    import torch.distributed

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="before its process joins a group"):
            wan_folder.build(tmp_path / "model")
    finally:
        torch.distributed.destroy_process_group()
