#!/usr/bin/env python3
"""Train the tiny Wan that Raylysses ships, from nothing but this code, in pieces of some minutes.

Each piece reads the folder that the last one wrote, and writes a whole stock diffusers folder with a model card.
`vae` comes first, `transformer` then; either may be repeated, but a changed VAE needs a new transformer. `card` trains
nothing: it puts scores that score_tiny_wan.py measured into the model card.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent))  # a checkout need not be installed

EXAMPLE = """example, on two GPUs; without torchrun it takes one, or the CPU:
  torchrun --nproc-per-node 2 scripts/train_tiny_wan.py vae --to /tmp/piece-1 --minutes 8
  torchrun --nproc-per-node 2 scripts/train_tiny_wan.py transformer --from /tmp/piece-1 --to /tmp/piece-2 --minutes 8
  python scripts/train_tiny_wan.py card --to /tmp/piece-2 --scores scores.json
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line and exit with 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piece", choices=("vae", "transformer", "card"), help="what to train or write")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="where to write the result")
    parser.add_argument("--from", dest="start", type=Path, metavar="FOLDER", help="the result of the last piece")
    parser.add_argument("--minutes", type=float, default=8.0, help="of training steps (default: 8)")
    parser.add_argument("--steps", type=int, help="end after so many steps, if that is sooner")
    parser.add_argument("--seed", type=int, default=0, help="of weights, scenes and noise (default: 0)")
    parser.add_argument("--batch", type=int, help="clips per GPU and step (default: 24 for the VAE, else 128)")
    parser.add_argument("--bank", type=int, default=24_000, help="clips per GPU to encode for the transformer")
    parser.add_argument("--scores", type=Path, metavar="FILE", help="what score_tiny_wan.py --json wrote, for the card")
    parser.add_argument(
        "--crossing", type=float, default=1 / 6, help="share of clips in which two cross (default: 1/6)"
    )
    parser.add_argument("--shift", type=float, default=3.0, help="of the transformer's training times (default: 3)")
    parser.add_argument("--rate", type=float, help="highest learning rate (default: 0.002 for the VAE, else 0.0015)")
    parser.add_argument("--eager", action="store_true", help="do not compile: starts sooner, runs slower")
    return parser


def _write_card(parser: _Parser, folder: Path, scores: Path | None) -> int:
    from moving_shapes.card import add_scores, write_card

    try:
        if scores is not None:
            add_scores(folder, json.loads(scores.read_text(encoding="utf-8")))
        write_card(folder)
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"card: {folder} must be a trained folder and --scores a file of score_tiny_wan.py ({error!r})")
    print(f"wrote {folder / 'README.md'}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    for name in ("minutes", "steps", "batch", "bank", "rate", "shift"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name}={value}: it takes more than 0")
    if options.start is not None and not (options.start / "model_index.json").is_file():
        parser.error(f"--from={options.start}: no diffusers folder is there; give the --to of the last piece")
    if options.start is None and options.piece == "transformer":
        parser.error("transformer needs --from: the folder of a piece that trained the VAE")

    if options.piece == "card":
        return _write_card(parser, options.to, options.scores)

    import torch

    from moving_shapes.card import write_card
    from moving_shapes.model import TinyWan
    from moving_shapes.piece import Limits, ranks_of_torchrun
    from moving_shapes.transformer_piece import Lesson, train_transformer
    from moving_shapes.vae_piece import train_vae

    torch.set_float32_matmul_precision("high")
    limits = Limits(options.minutes, options.steps, options.seed, options.rate)
    with ranks_of_torchrun() as ranks:
        model = TinyWan.new(options.seed) if options.start is None else TinyWan.load(options.start)
        compiled = not options.eager
        if options.piece == "vae":
            train_vae(model, ranks, limits, batch=options.batch or 24, compiled=compiled)
        else:
            lesson = Lesson(options.batch or 128, options.bank, options.crossing, options.shift)
            train_transformer(model, ranks, limits, lesson, compiled=compiled)
    # Outside the process group, inside which transformers would write on the first rank alone, and wait for it.
    if ranks.rank == 0:
        model.save(options.to)
        write_card(options.to)
        print(f"wrote {options.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
