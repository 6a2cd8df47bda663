#!/usr/bin/env python3
"""Time every attention backend that this GPU can run, on the shapes of video models: bf16, head size 128, one sample,
no mask. All backends take turns in every round; a figure is the median over the rounds. The baseline is TORCH_SDPA.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]  # a checkout need not be installed

import torch

from backends.interface import AttentionMetadata, CallShape
from backends.kernels.reference import plain_attention
from backends.platforms.facts import local_device
from backends.platforms.policy import priority
from backends.registry import Registry
from kernel_grid.cases import Claim, claims
from kernel_grid.jobs import wanted

SHAPES = ((4608, 6), (18720, 6), (32760, 10), (75600, 10))
"""Rows and heads: an image, and Wan 14B's 480p and 720p clips on four ranks."""
HEAD_SIZE = 128
BASELINE = "TORCH_SDPA/torch"
CHECKED_ROWS = 128
BEGIN, END = (
    "<!-- kernels: begin; `scripts/bench_backends.py --write FILE` makes what follows -->",
    "<!-- kernels: end -->",
)
EXAMPLE = """example:
  python scripts/bench_backends.py --rounds 9 --json kernels.json --write docs/performance.md
"""


@dataclass(frozen=True)
class Timed:
    """One backend on one shape. error: relative L2, against fp64, of some rows. first_s: the first call, compilation
    and all. host_us: what a call takes of the host's time.
    """

    claim: str
    rows: int
    heads: int
    milliseconds: float
    tflops: float
    of_baseline: float
    error: float
    first_s: float
    host_us: float


def main() -> int:
    options = _parser().parse_args()
    registry = Registry()
    device = local_device("cuda", registry.distributions())
    every = [c for c in claims(registry, device) if wanted(c.name, [*options.only, BASELINE] if options.only else [])]
    every = [c for c in every if c.backend.get_name() != "REFERENCE"]  # it holds all scores in memory
    timed = [t for rows, heads in SHAPES for t in measure(every, rows, heads, options.rounds)]
    found = {
        "date": date.today().isoformat(),
        "processor": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "packages": {n: v for n in sorted(registry.distributions()) if (v := device.version(n))},
        "rounds": options.rounds,
        "automatic_order": list(priority(device)),
        "timed": [asdict(entry) for entry in timed],
    }
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    table = markdown(timed, f"{found['processor']}, torch {found['torch']}, {found['date']}")
    print(table)
    if options.write:
        page = options.write.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        options.write.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="BACKEND[/VARIANT]", help="beside the baseline")
    parser.add_argument("--rounds", type=int, default=9, help="calls of each backend and shape (default: 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table between the marks of a page")
    return parser


def measure(every: list[Claim], rows: int, heads: int, rounds: int) -> list[Timed]:
    """Every backend on one shape, in turns."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, rows, heads, HEAD_SIZE)
    qkv = [torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16) for _ in range(3)]
    picked = torch.linspace(0, rows - 1, CHECKED_ROWS, device="cuda").long()
    exact = plain_attention(qkv[0][:, picked].double(), qkv[1].double(), qkv[2].double(), scale=HEAD_SIZE**-0.5)
    runs, first, errors = {}, {}, {}
    for claim in every:
        run = _call(claim, qkv)
        start = time.perf_counter()
        try:
            out = run()
        except (RuntimeError, ValueError, AssertionError) as error:
            print(f"{claim.name} at {rows} x {heads}: {type(error).__name__}: {str(error)[:200]}")
            continue
        torch.cuda.synchronize()
        first[claim.name] = time.perf_counter() - start
        errors[claim.name] = float((out[:, picked].double() - exact).norm() / exact.norm())
        runs[claim.name] = run
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            samples[name].append(_milliseconds(run))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    flops = 4 * rows * rows * heads * HEAD_SIZE
    return [
        Timed(
            name,
            rows,
            heads,
            milliseconds,
            flops / milliseconds / 1e9,
            medians[BASELINE] / milliseconds,
            errors[name],
            first[name],
            _host_us(runs[name]),
        )
        for name, milliseconds in medians.items()
    ]


def _call(claim: Claim, qkv: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    blocks = {name: schema() for name, schema in claim.backend.blocks.items()} | dict(claim.blocks)
    impl = claim.backend.get_impl_cls(claim.variant)(
        softmax_scale=HEAD_SIZE**-0.5, causal=False, options=tuple(blocks.items())
    )
    impl.load()
    impl.prepare(qkv[0].device, qkv[0].dtype)
    none, (_, rows, heads, size) = AttentionMetadata(), qkv[0].shape
    plan = impl.plan(CallShape(1, rows, rows, heads, heads, size))

    @torch.no_grad()
    def run() -> torch.Tensor:
        return impl.forward(qkv[0], qkv[1], qkv[2], none, plan)

    return run


def _milliseconds(run: Callable[[], torch.Tensor]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _host_us(run: Callable[[], torch.Tensor], calls: int = 10) -> float:
    """Of calls that are queued one after another."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / calls * 1e6


def markdown(timed: list[Timed], where: str) -> str:
    """A row for each backend, fastest first on the longest shape; a column for each shape."""
    cells = {(entry.claim, entry.rows): entry for entry in timed}
    longest = SHAPES[-1][0]
    last = {entry.claim: cells.get((entry.claim, longest), entry) for entry in timed}
    names = sorted(last, key=lambda name: last[name].milliseconds)
    titles = [f"{rows} x {heads}: ms (TFLOP/s, of {BASELINE.partition('/')[0]})" for rows, heads in SHAPES]
    lines = [("backend", *titles, "error", "host us")]
    lines.append(("---",) * len(lines[0]))
    for name in names:
        row = [cells.get((name, rows)) for rows, _ in SHAPES]
        figures = ("-" if t is None else f"{t.milliseconds:.3g} ({t.tflops:.0f}, {t.of_baseline:.2f})" for t in row)
        found = [t for t in row if t is not None]
        host = f"{min(t.host_us for t in found):.0f}"
        lines.append((name, *figures, f"{max(t.error for t in found):.1e}", host))
    return f"{where}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
