#!/usr/bin/env python3
"""Does the answer stay the same over GPUs? Generates through the real command and compares latents; needs CUDA devices.

The yardstick is a run on one GPU in fp32 with TORCH_SDPA. In 16 bits, with FLASH_ATTN for self-attention, the error
of P ranks against it may be at most 1.5 times that of one rank. Everything measured is written as JSON.

Example: python scripts/check_gpu.py --ranks 1 2 4 --steps 30 --out gpu-check.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 1.5


def generate(folder: Path, world_size: int, settings: list[str]) -> dict[str, Any]:
    """One run; its latents (float64), its selections and its times."""
    import numpy as np
    from safetensors.numpy import load_file

    command = [sys.executable, "-m", "runtime", "generate", "--prompt", "a red circle moving right", *settings]
    fixed = ["run.device=cuda", "run.save_latents=true", "run.outputs=[]", f"parallel.world_size={world_size}"]
    began = time.monotonic()
    subprocess.run([*command, *fixed, f"run.dir={folder}"], cwd=ROOT, check=True)
    summary = json.loads((folder / "summary.json").read_text())
    report = json.loads((folder / "selection.json").read_text())
    return {
        "latents": load_file(folder / "latents.safetensors")["latents"].astype(np.float64),
        "selection": {entry["role"]: {k: entry[k] for k in SHOWN} for entry in report["entries"]},
        "request": summary["requests"][0],
        "versions": summary["versions"],
        "device": summary["device"],
        "elapsed_s": time.monotonic() - began,
    }


SHOWN = ("backend", "variant", "kernel", "strategy", "source", "layers", "ranks")


def error(run: dict[str, Any], yardstick: dict[str, Any]) -> float:
    import numpy as np

    reference = yardstick["latents"]
    return float(np.linalg.norm(run["latents"] - reference) / np.linalg.norm(reference))


def check(ranks: list[int], dtype: str, backend: str, settings: list[str], root: Path) -> dict[str, Any]:
    fp32 = ["run.dtype=float32", "attention.default=TORCH_SDPA"]
    low = [f"run.dtype={dtype}", f"attention.per_role.self={backend}"]
    yardstick = generate(root / "fp32", 1, [*settings, *fp32])
    result: dict[str, Any] = {
        "device": yardstick["device"],
        "versions": yardstick["versions"],
        "dtype": dtype,
        "runs": [],
    }
    sharded = generate(root / "fp32-shared", max(ranks), [*settings, *fp32])
    result["fp32_error"] = {"ranks": max(ranks), "error": error(sharded, yardstick)}
    alone: float | None = None
    for world_size in ranks:
        run = generate(root / f"{dtype}-{world_size}", world_size, [*settings, *low])
        measured = error(run, yardstick)
        alone = measured if alone is None else alone
        request = run["request"]
        result["runs"].append(
            {
                "ranks": world_size,
                "error": measured,
                "ratio_to_first": measured / alone,
                "holds": measured <= LIMIT * alone,
                "selection": run["selection"],
                "rows": request["rows"],
                "traffic_as_planned": all(t["planned"] == t["measured"] for t in request["traffic"].values()),
                "median_step_s": request["median_step_s"],
                "elapsed_s": run["elapsed_s"],
            }
        )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks; the first is the measure"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--backend", default="FLASH_ATTN", help="for self-attention")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, help="where to write the JSON; standard output if left out")
    parser.add_argument("settings", nargs="*", help="further settings, such as generate.height=256")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        settings = [*options.settings, f"generate.steps={options.steps}"]
        result = check(options.ranks, options.dtype, options.backend, settings, Path(scratch))
    text = json.dumps(result, indent=2)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text + "\n")
    return 0 if all(run["holds"] and run["traffic_as_planned"] for run in result["runs"]) else 1


if __name__ == "__main__":
    sys.exit(main())
