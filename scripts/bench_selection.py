"""Time what a selection costs: a cached lookup, a first one, and `raylysses explain` as a whole command.

No GPU and no model are needed; the targets are in docs/backends.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout need not be installed

from backends.platforms.facts import parse_device
from backends.registry import Registry
from backends.requirements import Requirements
from backends.selector import Selector
from configs.schema import AttentionConfig, AttentionSpec

CALL = Requirements(head_size=128, num_heads=8, num_kv_heads=8, dtype="bfloat16", kind="cross")
ROUNDS = 7
EXAMPLE = "example: python scripts/bench_selection.py --json selection-cost.json"


def selector() -> Selector:
    """A device with a long list of candidates, and a configuration with entries to walk through."""
    config = AttentionConfig(per_role={"video.self": AttentionSpec("REFERENCE"), "audio": AttentionSpec("auto")})
    return Selector(parse_device("cuda:10.0", {}, all_packages=True), config, Registry())


def cached_us(lookups: int = 100_000) -> float:
    """Microseconds of a lookup that was made before."""
    chooser = selector()
    chooser.select("video.audio_to_video", CALL, category="cross")
    began = time.perf_counter()
    for _ in range(lookups):
        chooser.select("video.audio_to_video", CALL, category="cross")
    return 1e6 * (time.perf_counter() - began) / lookups


def first_us(calls: int = 100) -> float:
    """Microseconds of a selection that was not made before, with every declaration loaded."""
    chooser = selector()
    asked = [replace(CALL, num_heads=8 * count) for count in range(1, calls + 1)]
    chooser.select("self", replace(CALL, dtype="float32"))
    began = time.perf_counter()
    for call in asked:
        chooser.select("video.audio_to_video", call, category="cross")
    return 1e6 * (time.perf_counter() - began) / calls


def explain_ms() -> float:
    """Milliseconds of the command in a process of its own."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "raylysses", "explain", "--device", "cuda:9.0", "--packages", "all"]
    subprocess.run(command, check=True, capture_output=True)
    return 1e3 * (time.perf_counter() - began)


MEASURED: dict[str, tuple[Callable[[], float], float]] = {
    "cached lookup, us": (cached_us, 1.0),
    "first selection, us": (first_us, 200.0),
    "raylysses explain, ms": (explain_ms, 700.0),
}
"""What is measured, and its target."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLE)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    arguments = parser.parse_args()
    taken: dict[str, list[float]] = {name: [] for name in MEASURED}
    for _ in range(ROUNDS):  # interleaved, so that a busy moment does not hit one of them alone
        for name, (measure, _target) in MEASURED.items():
            taken[name].append(measure())
    print(f"{'median of ' + str(ROUNDS):<24}{'measured':>10}{'target':>10}")
    for name, (_measure, target) in MEASURED.items():
        print(f"{name:<24}{statistics.median(taken[name]):>10.2f}{target:>10.0f}")
    if arguments.json is not None:
        figures = {name: {"runs": runs, "median": statistics.median(runs)} for name, runs in taken.items()}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
