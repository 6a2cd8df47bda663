"""Training: the VAE over a whole clip is the stock one, text is made as WanPipeline makes it, and the script runs."""

import copy
import json
import random
import subprocess
import sys
from pathlib import Path

import diffusers
import pytest
import torch

import train_tiny_wan
from moving_shapes.clips import draw, sample
from moving_shapes.model import TinyWan, word_tokenizer
from moving_shapes.piece import Limits, rate_at
from moving_shapes.transformer_piece import FlowLoss, encode_text, tokenize
from moving_shapes.whole_clip import WholeClip
from runtime.model_folder import folder_of
from tests.conftest import CHECKOUT

SHIPPED = folder_of("built-in:tiny-wan")
SCRIPT = CHECKOUT / "scripts" / "train_tiny_wan.py"


@pytest.fixture(scope="module")
def model() -> TinyWan:
    return TinyWan.load(SHIPPED)


@pytest.mark.parametrize("frames", [1, 5, 17])
@torch.no_grad()
def test_one_pass_over_a_clip_is_the_stock_walk_through_it(model: TinyWan, frames: int) -> None:
    clip, _ = draw([sample(random.Random(seed)) for seed in range(2)], frames=frames, size=32)
    whole = WholeClip(copy.deepcopy(model.vae)).eval()
    expected = model.vae.encode(clip).latent_dist
    mean, log_variance = whole.encode(clip)
    torch.testing.assert_close(mean, expected.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(log_variance, expected.logvar, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole.decode(mean).clamp(-1, 1), model.vae.decode(mean).sample, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_text_is_padded_as_the_pipeline_pads_it(model: TinyWan) -> None:
    prompts = ["a red circle moving right", "", "watch: two strangers!"]
    pipeline = diffusers.WanPipeline.from_pretrained(SHIPPED)
    expected, _ = pipeline.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=512)
    ours = encode_text(model.text_encoder, *tokenize(model.tokenizer, prompts, torch.device("cpu")))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_shipped_model_predicts_the_velocity_of_its_own_world(model: TinyWan) -> None:
    """The velocity of a clip that it never saw, at times all over: guessing nothing gives a loss of about 2."""
    rng = random.Random("never seen")
    scenes = [sample(rng, motion) for motion in ("left", "up", "crossing", "still")]
    latents = model.vae.encode(draw(scenes)[0]).latent_dist.mean
    mean, deviation = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (model.vae.config.latents_mean, model.vae.config.latents_std)
    )
    torch.manual_seed(0)
    words = tokenize(model.tokenizer, [""] * len(scenes), torch.device("cpu"))
    loss = FlowLoss(model.transformer, model.text_encoder, shift=3.0)((latents - mean) / deviation, *words)
    assert float(loss) < 0.3


def test_a_tokenizer_knows_words_and_marks_the_rest() -> None:
    tokenizer = word_tokenizer(["circle", "red", ","])
    assert tokenizer("A RED circle, red").input_ids == [2, 4, 3, 5, 4, 1]
    with pytest.raises(ValueError, match="do not fit in a vocabulary of 128"):
        word_tokenizer([str(number) for number in range(126)])


def test_weights_that_float16_cannot_hold_are_not_saved(tmp_path: Path) -> None:
    for value in (float("nan"), 1e5):
        model = TinyWan.new(0)
        model.vae.decoder.conv_in.bias.data[0] = value
        with pytest.raises(OverflowError, match="the training diverged"):
            model.save(tmp_path / "model")


def test_the_rate_rises_and_falls_and_a_piece_ends_by_steps_or_minutes() -> None:
    assert rate_at(0.0, 0) == pytest.approx(1 / 200)
    assert rate_at(0.5, 10_000) == pytest.approx(0.5)
    assert rate_at(1.0, 10_000) == pytest.approx(0.0)
    assert Limits(minutes=1e9, steps=10, seed=0).progress(0.0, 5) == pytest.approx(0.5)
    assert Limits(minutes=1e-9, steps=10, seed=0).progress(0.0, 5) > 1


def train(*arguments: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=CHECKOUT)


def test_pieces_follow_each_other_and_leave_a_stock_folder_with_a_card(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    done = train("vae", "--to", str(first), "--steps", "1", "--batch", "1", "--eager")
    assert done.returncode == 0, done.stderr
    options = ("--steps", "2", "--batch", "2", "--bank", "3", "--eager", "--seed", "1")
    done = train("transformer", "--from", str(first), "--to", str(second), *options, ranks=2)
    assert done.returncode == 0, done.stderr
    assert "step 2: loss" in done.stdout
    assert done.stdout.count("wrote ") == 1

    history = json.loads((second / "training.json").read_text())
    assert [(piece["piece"], piece["steps"], piece["gpus"]) for piece in history] == [
        ("vae", 1, 1),
        ("transformer", 2, 2),
    ]
    pipeline = diffusers.WanPipeline.from_pretrained(second)
    vae = diffusers.WanPipeline.from_pretrained(first).vae
    assert {part.dtype for part in (pipeline.vae, pipeline.transformer, pipeline.text_encoder)} == {torch.float32}
    assert all(torch.equal(value, vae.state_dict()[name]) for name, value in pipeline.vae.state_dict().items())
    assert pipeline.vae.config.latents_std != diffusers.AutoencoderKLWan().config.latents_std
    untrained = TinyWan.new(0).transformer.half().state_dict()
    assert any(not torch.equal(v, untrained[k].float()) for k, v in pipeline.transformer.state_dict().items())

    scores = tmp_path / "scores.json"
    interval = {name: [0.5, 1.0] for name in ("colour", "shape", "direction")}
    result = {"accuracy": dict.fromkeys(interval, 0.75), "interval": interval, "n": 4, "steps": 30, "settings": []}
    result["model"] = str(second)
    confusion = {name: {"red": {"blue": 1, "red": 3}} for name in interval}
    scores.write_text(json.dumps({**result, "device": "cpu", "dtype": "float32", "confusion": confusion}))
    for _ in range(2):
        assert train_tiny_wan.main(["card", "--to", str(second), "--scores", str(scores)]) == 0
    card = (second / "README.md").read_text()
    assert card.count("## Scores") == 1
    assert "| colour | 75.0% | 50.0% to 100.0% | red seen as blue: 1 |" in card
    assert "| transformer | 1 | 2 | 4 |" in card


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("transformer", "--to", "x"), "transformer needs --from"),
        (("vae", "--to", "x", "--from", "nowhere"), "--from=nowhere: no trained folder is there"),
        (("vae", "--to", "x", "--shift", "3"), "--shift=3.0: vae does not use it"),
        (("transformer", "--to", "x", "--crossing", "2"), "--crossing=2.0: it takes 0 to 1"),
        (("vae", "--to", "x", "--minutes", "nan"), "--minutes=nan: it takes more than 0"),
        (("vae", "--to", "docs"), "--to=docs: the folder is not empty"),
        (("vae", "--to", "README.md"), "--to=README.md: it cannot be made"),
        (("vae", "--to", "x", "--steps", "0"), "--steps=0: it takes more than 0"),
        (("card", "--to", "nowhere"), "card --to=nowhere --scores=None: takes a trained folder"),
        (("vea", "--to", "x"), "invalid choice: 'vea'"),
    ],
)
def test_the_script_refuses_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = train(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_shipped_folder_is_whole_small_and_in_16_bits() -> None:
    from safetensors.numpy import load_file

    weights = sorted(SHIPPED.glob("*/*.safetensors"))
    assert [file.parent.name for file in weights] == ["text_encoder", "transformer", "vae"]
    assert {str(array.dtype) for file in weights for array in load_file(file).values()} == {"float16"}
    assert sum(file.stat().st_size for file in SHIPPED.rglob("*") if file.is_file()) <= 16 * 2**20
    card = (SHIPPED / "README.md").read_text()
    assert "## Training" in card
    assert "## Scores" in card
