#!/usr/bin/env python3
"""Score the tiny model: generate videos for held-out prompts on one live group of ranks, and judge what they show.

Prompt i of N with seed number s of S is generated with the run seed i * S + s. Settings are those of `raylysses
generate`. The JSON file is described in docs/tiny-wan.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]  # a checkout need not be installed

from configs.compose import compose
from configs.faults import FaultError
from configs.overrides import quote
from configs.schema import RunConfig
from runtime.errors import DisagreementError, RankError, StallError, TerminatedError
from runtime.requests import request_of
from runtime.session import Session

EXAMPLE = """example:
  python scripts/score_tiny_wan.py --prompts 24 --json one.json parallel.world_size=1
  python scripts/score_tiny_wan.py --prompts 24 --against one.json parallel.world_size=2 attention.default=REFERENCE
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line and exit with 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24, metavar="N", help="held-out prompts, 0 to N-1 (default: 24)")
    parser.add_argument("--seeds", type=int, default=1, metavar="S", help="videos of each prompt (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write scores, confusion and every verdict there")
    parser.add_argument("--sheet", type=Path, metavar="FILE", help="write a picture with a row of frames per video")
    parser.add_argument("--against", type=Path, metavar="FILE", help="exit with 1 unless the verdicts are that file's")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the run")
    return parser


def _configure(settings: Sequence[str]) -> RunConfig:
    fixed = ["run.outputs=[frames]", f"generate.prompt={quote('a held-out prompt')}"]
    config, faults = compose([*settings, *fixed])
    if config is None or faults:
        raise FaultError(faults)
    return config


def _score(config: RunConfig, prompts: int, seeds: int) -> tuple[dict[str, Any], list[Any]]:
    """The scores of the videos, and of each a row of frames [H, W, 3]."""
    import numpy as np

    from moving_shapes.judge import expected, judge
    from moving_shapes.scores import Trial, scores
    from moving_shapes.wording import held_out

    trials, rows = [], []
    session = Session(config)
    session.check([request_of(config)])
    with session:
        print(f"{session.world_size} ranks on {session.device.label if session.device else '?'}", file=sys.stderr)
        began = time.monotonic()
        for seed in range(prompts * seeds):
            prompt, scene = held_out(seed // seeds)
            (video,) = session.generate([replace(request_of(config), prompt=prompt, seed=seed)])
            trials.append(Trial(prompt, seed, expected(scene), judge(video.frames)))
            rows.append(np.concatenate(video.frames[np.linspace(0, len(video.frames) - 1, 6).round().astype(int)], 1))
            left = (time.monotonic() - began) / len(trials) * (prompts * seeds - len(trials))
            mark = "" if trials[-1].expected == trials[-1].seen else f"  seen: {trials[-1].seen}"
            print(f"{len(trials)} of {prompts * seeds}, {left:.0f} s left: {prompt}{mark}", file=sys.stderr)
        facts = {"world_size": session.world_size, "selection": session.report.to_dict()["entries"]}
        facts |= {"device": session.device.label if session.device else None, "dtype": config.run.dtype}
    return {**scores(trials), **facts, "model": config.model.path, "steps": config.generate.steps}, rows


def _write_sheet(rows: Sequence[Any], path: Path) -> None:
    import numpy as np
    from PIL import Image

    columns = 4 if len(rows) > 12 else 1
    blank = np.full_like(rows[0], 255)
    padded = [*rows, *[blank] * (-len(rows) % columns)]
    per_column = len(padded) // columns
    blocks = [np.concatenate(padded[start : start + per_column]) for start in range(0, len(padded), per_column)]
    Image.fromarray(np.concatenate(blocks, 1)).save(path)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    options = parser.parse_intermixed_args(arguments)
    for name in ("prompts", "seeds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}={getattr(options, name)}: it takes 1 or more")
    for file in (options.json, options.sheet):
        if file is not None and not file.absolute().parent.is_dir():
            parser.error(f"{file}: there is no folder {file.absolute().parent}; make it first")
    against = None
    if options.against is not None:
        try:
            against = json.loads(options.against.read_text(encoding="utf-8"))["trials"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"--against={options.against}: it takes a file that --json wrote ({error!r})")
    try:
        config = _configure(options.settings)
        result, rows = _score(config, options.prompts, options.seeds)
    except FaultError as error:
        print("\n".join(f"error: {fault}" for fault in error.faults), file=sys.stderr)
        return error.exit_code
    except (RankError, DisagreementError, StallError, TerminatedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.json is not None:
        options.json.write_text(json.dumps({**result, "settings": options.settings}, indent=1) + "\n", encoding="utf-8")
    if options.sheet is not None:
        _write_sheet(rows, options.sheet)

    from moving_shapes.scores import differences, table

    print(table(result))
    if against is None:
        return 0
    found = differences(result["trials"], against)
    print("\n".join(found) if found else f"\nall {result['n']} verdicts are those of {options.against}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
