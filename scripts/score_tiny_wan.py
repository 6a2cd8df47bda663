#!/usr/bin/env python3
"""Score the tiny model: generate videos for held-out prompts on one live group of ranks, and judge what they show.

Prompt i of N with seed number s of S is generated with the run seed i * S + s. Settings and attention options are
those of `raylysses generate`. The JSON file is described in docs/tiny-wan.md. It exits with 6 if --against finds other
verdicts, and otherwise with the codes of `raylysses`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]  # a checkout need not be installed

from configs.compose import compose
from configs.faults import Fault, FaultError
from configs.flags import split
from configs.overrides import quote
from configs.schema import RunConfig
from runtime.errors import DisagreementError, RankError, StallError, TerminatedError
from runtime.progress import print_selection
from runtime.requests import Request, request_of
from runtime.session import Session
from runtime.signals import terminated_by_signal

if TYPE_CHECKING:
    from moving_shapes.sheet import Strip

EXAMPLE = """example:
  python scripts/score_tiny_wan.py --prompts 24 --json one.json parallel.world_size=1
  python scripts/score_tiny_wan.py --prompts 24 --against one.json parallel.world_size=2 attention.default=REFERENCE
"""
OTHER_VERDICTS, INTERRUPTED = 6, 130
OWN_KEYS = ("generate.prompt", "generate.image", "run.outputs", "run.seed", "run.dir", "run.save_latents")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line and exit with 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> _Parser:
    parser = _Parser(
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--prompts", type=int, default=24, metavar="N", help="held-out prompts, 0 to N-1 (default: 24)")
    parser.add_argument("--seeds", type=int, default=1, metavar="S", help="videos of each prompt (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write scores, confusion and every verdict there")
    parser.add_argument("--sheet", type=Path, metavar="FILE", help="write a picture of every video with its prompt")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="exit with 6 unless the verdicts are those of this --json file"
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the run")
    return parser


@dataclass(frozen=True)
class _Task:
    """One video to make. scene: what a faultless one shows."""

    request: Request
    scene: Any


def _configure(settings: Sequence[str]) -> RunConfig:
    own = [text for text in settings if text.lstrip("+~").partition("=")[0] in OWN_KEYS]
    if own:
        key, _, value = own[0].lstrip("+~").partition("=")
        raise FaultError([Fault(key, value, "is set by this script, for each video", "leave it out")])
    fixed = ["run.outputs=[frames]", f"generate.prompt={quote('a held-out prompt')}"]
    config, faults = compose([*fixed, *settings])
    if config is None or faults:
        raise FaultError(faults)
    return config


def _tasks(config: RunConfig, prompts: int, seeds: int) -> Iterator[_Task]:
    from moving_shapes.wording import held_out

    for seed in range(prompts * seeds):
        prompt, scene = held_out(seed // seeds)
        yield _Task(replace(request_of(config), prompt=prompt, seed=seed), scene)


def _score(config: RunConfig, tasks: Sequence[_Task], strips: list[Strip] | None) -> dict[str, Any]:
    """The scores of the videos; `strips`, if it is a list, gets one of each."""
    from moving_shapes.judge import expected, judge
    from moving_shapes.scores import Trial, scores
    from moving_shapes.sheet import strip

    trials: list[Trial] = []
    session = Session(config)
    session.check([task.request for task in tasks])
    with session:
        device = session.device.label if session.device is not None else ""
        print(f"{session.world_size} {'rank' if session.world_size == 1 else 'ranks'} on {device}", file=sys.stderr)
        began = time.monotonic()
        for task in tasks:
            (video,) = session.generate([task.request])
            trial = Trial(task.request.prompt, task.request.seed, expected(task.scene), judge(video.frames))
            trials.append(trial)
            if len(trials) == 1:
                print_selection(session.report, sys.stderr)
            if strips is not None:
                strips.append(strip(video.frames, trial.prompt, trial.expected == trial.seen))
            left = (time.monotonic() - began) / len(trials) * (len(tasks) - len(trials))
            mark = "" if trial.expected == trial.seen else f"  seen: {trial.seen}"
            print(f"{len(trials)} of {len(tasks)}, {left:.0f} s left: {trial.prompt}{mark}", file=sys.stderr)
        entries = session.report.to_dict()["entries"]
    return {
        **scores(trials),
        "model": config.model.path,
        "steps": config.generate.steps,
        "dtype": entries[0]["requirements"]["dtype"],
        "device": device,
        "world_size": session.world_size,
        "selection": entries,
    }


def _check_files(parser: _Parser, json_file: Path | None, sheet: Path | None) -> None:
    """Refuse now what could not be written after the last video."""
    from PIL import Image

    for option, file in (("--json", json_file), ("--sheet", sheet)):
        if file is not None:
            try:
                file.open("a").close()
            except OSError as error:
                parser.error(f"{option}={file}: it cannot be written ({error.strerror}); name a file that can")
    if sheet is not None and sheet.suffix.lower() not in Image.registered_extensions():
        parser.error(f"--sheet={sheet}: no kind of picture ends so; write {sheet.with_suffix('.png')}")


def _read_against(parser: _Parser, file: Path, tasks: Sequence[_Task]) -> list[dict[str, Any]]:
    """The trials of an older file, if they are about the same videos."""
    try:
        trials: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["trials"]
        made = [(trial["prompt"], trial["seed"]) for trial in trials if dict(trial["seen"])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"--against={file}: it takes a file that --json wrote ({error!r})")
    if [(task.request.prompt, task.request.seed) for task in tasks] != made[: len(tasks)]:
        parser.error(f"--against={file}: it has {len(made)} other videos; use the same --prompts and --seeds")
    return trials[: len(tasks)]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    words, flags = split(sys.argv[1:] if arguments is None else arguments, ("--json", "--sheet", "--against"))
    options = parser.parse_intermixed_args(words)
    settings = [*options.settings, *(word for flag in flags for word in (flag.option, flag.value) if word is not None)]
    for name in ("prompts", "seeds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}={getattr(options, name)}: it takes 1 or more")
    try:
        import scipy  # noqa: F401
    except ModuleNotFoundError:
        parser.error("the judge needs scipy, which is not installed: pip install scipy")
    try:
        config = _configure(settings)
        tasks = list(_tasks(config, options.prompts, options.seeds))
        against = None if options.against is None else _read_against(parser, options.against, tasks)
        _check_files(parser, options.json, options.sheet)
        strips: list[Strip] | None = None if options.sheet is None else []
        with terminated_by_signal():
            result = _score(config, tasks, strips)
    except FaultError as error:
        print("\n".join(f"error: {fault}" for fault in error.faults), file=sys.stderr)
        return error.exit_code
    except (RankError, DisagreementError, StallError, TerminatedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted; the ranks were stopped", file=sys.stderr)
        return INTERRUPTED

    from moving_shapes.scores import differences, table

    print(table(result))
    if options.json is not None:
        options.json.write_text(json.dumps({**result, "settings": settings}, indent=1) + "\n", encoding="utf-8")
    if options.sheet is not None and strips is not None:
        from moving_shapes import sheet

        sheet.write(strips, options.sheet)
    if against is None:
        return 0
    found = differences(result["trials"], against)
    print("\n".join(["", *found]) if found else f"\nall {result['n']} verdicts are those of {options.against}")
    return OTHER_VERDICTS if found else 0


if __name__ == "__main__":
    sys.exit(main())
