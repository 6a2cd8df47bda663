"""The model card: what the model is, what was done to its weights, and how well it does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moving_shapes.clips import BACKGROUNDS, COLOURS, FRAMES, MOTIONS, SHAPES, SIZE
from moving_shapes.model import HISTORY, SCORES
from moving_shapes.scores import ATTRIBUTES
from moving_shapes.wording import vocabulary
from runtime.model_folder import folder_of

CARD = "README.md"
KEPT = ("accuracy", "interval", "n", "steps", "settings", "device", "dtype", "confusion")
"""Of a file of scores; the verdicts stay there."""


def write_card(folder: Path, result: Mapping[str, Any] | None = None) -> None:
    """Write the card of the model in `folder` from its history.

    result: what `score_tiny_wan.py --json` wrote about this folder; it goes into the history in place of older scores.
    Raises ValueError if it is about another model.
    """
    history = json.loads((folder / HISTORY).read_text(encoding="utf-8"))
    if result is not None:
        if folder_of(result["model"]).resolve() != folder.resolve():
            raise ValueError(f"the scores are of model.path={result['model']}")
        history = [piece for piece in history if piece["piece"] != SCORES]
        history.append({"piece": SCORES, **{key: result[key] for key in KEPT}})
    text = _card(folder, history)
    (folder / HISTORY).write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")
    (folder / CARD).write_text(text, encoding="utf-8")


def _card(folder: Path, history: Sequence[Mapping[str, Any]]) -> str:
    weights = {path.parent.name: path.stat().st_size / 2**20 for path in sorted(folder.glob("*/*.safetensors"))}
    parts = [*_introduction(weights), *_training([piece for piece in history if piece["piece"] != SCORES])]
    for piece in history:
        if piece["piece"] == SCORES:
            parts += _scores(piece)
    return "\n".join(parts) + "\n"


def _introduction(weights: Mapping[str, float]) -> list[str]:
    words = " ".join(word for word in vocabulary() if word.isalpha())
    sizes = ", ".join(f"{name} {size:.1f} MiB" for name, size in weights.items())
    return [
        "# tiny-wan",
        "",
        "A text-to-video model of moving shapes, small enough for a CPU: stock diffusers classes (`WanPipeline`,",
        "`AutoencoderKLWan`, `WanTransformer3DModel`, `UMT5EncoderModel`), trained from nothing on clips that",
        "`scripts/train_tiny_wan.py` of Raylysses draws. It shows what a backend or a parallel plan does to a video.",
        "",
        f"- It makes {FRAMES} frames of {SIZE} x {SIZE}; other sizes were not trained.",
        f"- Colours: {', '.join(COLOURS)}. Shapes: {', '.join(SHAPES)}. Motions: {', '.join(MOTIONS)}.",
        f"- Backgrounds: {', '.join(BACKGROUNDS)}; one at random if the prompt names none.",
        f"- Weights, in float16: {sizes}.",
        f"- Words: {words}. Any other word is one and the same token.",
    ]


def _training(pieces: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = ("piece", "seed", "steps", "clips a step", "seconds", "GPUs", "loss, first and last mean", "PSNR")
    lines = ["", "## Training", "", f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for piece in pieces:
        loss = piece["loss"]
        psnr = f"{piece['psnr']} dB; on shapes {piece['shape_psnr']} dB" if "psnr" in piece else ""
        gpus = f"{piece['gpus']} x {piece['device']}"
        row = [piece["piece"], piece["seed"], piece["steps"], piece["batch"], round(piece["seconds"]), gpus]
        lines.append(f"| {' | '.join(map(str, row))} | {loss[0]['mean']:.4f}, {loss[-1]['mean']:.4f} | {psnr} |")
    return [*lines, "", f"The whole record is in `{HISTORY}`."]


def _scores(piece: Mapping[str, Any]) -> list[str]:
    settings = " ".join(piece["settings"]) or "no settings"
    where = f"{piece['device']}, {piece['dtype']}, {settings}"
    made = f"{piece['n']} videos for held-out prompts, {piece['steps']} steps, {where}:"
    lines = ["", "## Scores", "", made, ""]
    lines += ["| attribute | accuracy | 95 % interval | mistaken |", "| --- | --- | --- | --- |"]
    for name in ATTRIBUTES:
        low, high = piece["interval"][name]
        wrong = [
            f"{wanted} seen as {seen}: {count}"
            for wanted, row in piece["confusion"][name].items()
            for seen, count in row.items()
            if seen != wanted
        ]
        accuracy = piece["accuracy"][name]
        lines.append(f"| {name} | {accuracy:.1%} | {low:.1%} to {high:.1%} | {'; '.join(wrong) or 'none'} |")
    return lines
