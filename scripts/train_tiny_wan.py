#!/usr/bin/env python3
"""Train the tiny Wan that Raylysses ships, from nothing but this code, in pieces of some minutes.

Each piece reads the folder that the last one wrote, and writes a whole stock diffusers folder with a model card.
`vae` comes first, `transformer` then; either may be repeated, but a changed VAE needs a new transformer. `card` trains
nothing: it puts scores that score_tiny_wan.py measured into the model card.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]  # a checkout need not be installed

EXAMPLE = """example, on two GPUs; without torchrun it takes one, or the CPU:
  torchrun --nproc-per-node 2 scripts/train_tiny_wan.py vae --to /tmp/piece-1 --minutes 8
  torchrun --nproc-per-node 2 scripts/train_tiny_wan.py transformer --from /tmp/piece-1 --to /tmp/piece-2 --minutes 8
  python scripts/train_tiny_wan.py card --to /tmp/piece-2 --scores scores.json
"""
ONLY_FOR = {
    "start": ("vae", "transformer"),
    "steps": ("vae", "transformer"),
    "batch": ("vae", "transformer"),
    "rate": ("vae", "transformer"),
    "eager": ("vae", "transformer"),
    "bank": ("transformer",),
    "crossing": ("transformer",),
    "shift": ("transformer",),
    "scores": ("card",),
}
OPTIONS = {"start": "from"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line and exit with 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> _Parser:
    parser = _Parser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("piece", choices=("vae", "transformer", "card"), help="what to train or write")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="where to write the result")
    parser.add_argument("--from", dest="start", type=Path, metavar="FOLDER", help="the result of the last piece")
    parser.add_argument("--minutes", type=float, default=8.0, help="of training steps (default: 8)")
    parser.add_argument("--steps", type=int, help="end after so many steps, if that is sooner")
    parser.add_argument("--seed", type=int, default=0, help="of weights, scenes and noise (default: 0)")
    parser.add_argument("--batch", type=int, help="clips per GPU and step (default: 24 for the VAE, else 128)")
    parser.add_argument("--bank", type=int, help="clips per GPU to encode for the transformer (default: 24000)")
    parser.add_argument("--crossing", type=float, help="share of the bank in which two things cross (default: 1/6)")
    parser.add_argument("--shift", type=float, help="of the transformer's training times (default: 3)")
    parser.add_argument("--scores", type=Path, metavar="FILE", help="what score_tiny_wan.py --json wrote, for the card")
    parser.add_argument("--rate", type=float, help="highest learning rate (default: 0.002 for the VAE, else 0.0015)")
    parser.add_argument("--eager", action="store_true", help="do not compile: starts sooner, runs slower")
    return parser


def _write_card(parser: _Parser, folder: Path, scores: Path | None) -> int:
    from moving_shapes.card import write_card

    try:
        write_card(folder, None if scores is None else json.loads(scores.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"takes a trained folder, and --scores a file that score_tiny_wan.py wrote about it ({error!r})"
        parser.error(f"card --to={folder} --scores={scores}: {rule}")
    print(f"wrote {folder / 'README.md'}")
    return 0


def _check(parser: _Parser, options: argparse.Namespace) -> None:
    """Refuse now what would fail after minutes of training, or be ignored."""
    for name in ("minutes", "steps", "batch", "bank", "rate", "shift"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"--{name}={value}: it takes more than 0")
    if options.crossing is not None and not 0 <= options.crossing <= 1:
        parser.error(f"--crossing={options.crossing}: it takes 0 to 1")
    for name, value in vars(options).items():
        pieces = ONLY_FOR.get(name)
        if value not in (None, False) and pieces is not None and options.piece not in pieces:
            parser.error(f"--{OPTIONS.get(name, name)}={value}: {options.piece} does not use it; leave it out")
    if options.piece == "card":
        return
    if options.start is not None and not (options.start / "training.json").is_file():
        parser.error(f"--from={options.start}: no trained folder is there; give the --to of the last piece")
    if options.start is None and options.piece == "transformer":
        parser.error("transformer needs --from: the folder of a piece that trained the VAE")
    try:
        options.to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--to={options.to}: it cannot be made ({error.strerror}); give another folder")
    if int(os.environ.get("RANK", 0)) == 0 and any(options.to.iterdir()):
        parser.error(f"--to={options.to}: the folder is not empty; give another")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(parser, options)
    if options.piece == "card":
        return _write_card(parser, options.to, options.scores)

    import torch

    from moving_shapes.card import write_card
    from moving_shapes.model import TinyWan
    from moving_shapes.piece import Limits, ranks_of_torchrun
    from moving_shapes.transformer_piece import Lesson, train_transformer
    from moving_shapes.vae_piece import train_vae

    torch.set_float32_matmul_precision("high")
    with ranks_of_torchrun() as ranks:
        model = TinyWan.new(options.seed) if options.start is None else TinyWan.load(options.start)
        limits = Limits(options.minutes, options.steps, options.seed, options.rate, len(model.history))
        compiled = not options.eager
        if options.piece == "vae":
            train_vae(model, ranks, limits, batch=options.batch or 24, compiled=compiled)
        else:
            asked = {name: getattr(options, name) for name in ("batch", "bank", "crossing", "shift")}
            lesson = Lesson(**{name: value for name, value in asked.items() if value is not None})
            train_transformer(model, ranks, limits, lesson, compiled=compiled)
    # Outside the process group, inside which transformers would write on the first rank alone, and wait for it.
    if ranks.rank == 0:
        try:
            model.save(options.to)
        except OverflowError as error:
            parser.error(f"{error}; try a lower --rate")
        write_card(options.to)
        print(f"wrote {options.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
