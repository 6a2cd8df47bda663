#!/usr/bin/env python3
"""Check every attention backend that this machine can run, over the calls that it claims, against fp64 softmax
attention: head sizes, dtypes, grouped KV heads, masks, causality, windows, soft caps, sinks, packed documents and
ragged lengths; outputs, log-sum-exps and gradients. It exits with 1 if a case fails or the time does not suffice.

The record that --json writes is described in docs/backends.md; that of an H200 is docs/measured/kernel-grid.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]  # a checkout need not be installed

from backends.platforms.facts import DeviceFacts, local_device
from backends.registry import Registry
from kernel_grid.cases import DTYPES, FEATURES, KV_HEADS, LENGTHS, Claim, claims, head_sizes
from kernel_grid.crew import run_jobs, work
from kernel_grid.jobs import jobs_of, wanted
from kernel_grid.page import written
from kernel_grid.record import summary

EXAMPLE = """example:
  python scripts/check_backends.py --device cpu --dtypes float32 --head-sizes 64 --only REFERENCE TORCH_SDPA
  python scripts/check_backends.py --device cuda --workers 24 --minutes 9 --json kernel-grid.json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    registry = Registry()
    device = local_device(options.device, registry.distributions())
    if options.lines:
        work(options.only, device, options.lines)
        return 0
    every = tuple(claim for claim in claims(registry, device) if wanted(claim.name, options.only))
    sizes = options.head_sizes or head_sizes(every)
    covered = (options.dtypes, sizes, options.features, options.longest, options.kv_heads)
    jobs = tuple(jobs_of(every, device, *covered, fine=options.fine))
    print(f"{device.label}: {len(every)} claims, {len(jobs)} jobs", flush=True)
    only = ["--only", *options.only] if options.only else []
    command = [sys.executable, str(Path(__file__).resolve()), "--device", options.device, *only]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        deadline = started + 60 * options.minutes
        outcomes, unfinished = run_jobs(jobs, command, Path(folder), options.workers, _gpus(device), deadline)
    run = {
        "date": date.today().isoformat(),
        "device": device.label,
        **_versions(device),
        "seconds": round(time.monotonic() - started),
        **dict(zip(("dtypes", "head_sizes", "features", "longest", "kv_heads"), covered, strict=True)),
        "unfinished": unfinished,
    }
    found = summary(outcomes, {claim.name: claimed(claim) for claim in every})
    if options.json:
        packages = {claim.name: _packages(device, claim) for claim in every}
        _write(options.json, {name: {"run": run, "packages": packages[name], **found[name]} for name in found})
        if options.page:
            recorded = json.loads(options.json.read_text(encoding="utf-8"))["claims"]
            options.page.write_text(written(options.page.read_text(encoding="utf-8"), recorded), encoding="utf-8")
    return _say(found, unfinished)


def _write(path: Path, found: dict[str, Any]) -> None:
    """What the file says of other claims stays."""
    before = json.loads(path.read_text(encoding="utf-8"))["claims"] if path.exists() else {}
    claims_by_name = dict(sorted({**before, **found}.items()))
    path.write_text(json.dumps({"claims": claims_by_name}, indent=1) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", nargs="*", default=[], metavar="BACKEND[/VARIANT]", help="leave out all others")
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=DTYPES)
    parser.add_argument(
        "--head-sizes", nargs="*", type=int, default=[], metavar="N", help="default: all that are claimed"
    )
    parser.add_argument(
        "--features", nargs="*", default=list(FEATURES), choices=FEATURES, metavar="F", help="default: all"
    )
    parser.add_argument("--kv-heads", nargs="*", type=int, default=list(KV_HEADS), choices=KV_HEADS, help="of 4 heads")
    parser.add_argument("--fine", action="store_true", help="a job for each feature, for kernels compiled for each")
    parser.add_argument(
        "--longest", type=int, default=max(LENGTHS), metavar="ROWS", help="of the lengths, these at most"
    )
    parser.add_argument("--workers", type=int, default=4, help="processes at a time (default: 4)")
    parser.add_argument("--minutes", type=float, default=60, help="stop after these (default: 60)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="put the record there, for its claims")
    parser.add_argument("--page", type=Path, metavar="PAGE", help="put the table of that record between its marks")
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    return parser


def _gpus(device: DeviceFacts) -> int:
    if device.platform == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


def _versions(device: DeviceFacts) -> dict[str, Any]:
    import torch

    processor = torch.cuda.get_device_name() if device.platform != "cpu" else platform.machine()
    return {"processor": processor, "torch": torch.__version__}


def _packages(device: DeviceFacts, claim: Claim) -> dict[str, str]:
    """Those of the claim's variant, with their versions."""
    return {name: version for name in claim.variant.packages if (version := device.version(name))}


def claimed(claim: Claim) -> dict[str, Any]:
    """What the grid checks. It differentiates by Q, K and V; by masks and sinks the drawn calls of the tests do."""
    takes = asdict(claim.variant.takes)
    del takes["learned_gradient"]
    return {**takes, "head_sizes": str(claim.variant.takes.head_sizes)}


def _say(found: dict[str, Any], unfinished: list[str]) -> int:
    failed = 0
    for name, claim in found.items():
        failed += claim["failed"] + (not claim["passed"])
        print(f"{name}: {claim['passed']} passed, {claim['failed']} failed; largest errors {claim['largest_errors']}")
        if claim["waits_for_the_device"]:
            print(f"    waits for the device: {claim['waits_for_the_device']}")
        for kind, count in claim["kinds_of_faults"].items():
            print(f"    {count} x {kind}")
    if unfinished:
        print(f"not finished in time: {', '.join(unfinished)}")
    return 1 if failed or unfinished else 0


if __name__ == "__main__":
    sys.exit(main())
