"""Time what it costs ranks to agree on a forward: one small exchange over the control group, on one host over gloo.

No GPU and no model are needed; figures are in docs/agreement.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout need not be installed

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from parallel.agreement import ForwardFacts, agree
from parallel.mesh import Mesh

ROUNDS, CALLS, WARM = 7, 300, 50
EXAMPLE = "example: python scripts/bench_agreement.py --ranks 2,4 --json agreement-cost.json"


def facts_of(number: int) -> ForwardFacts:
    """As a forward of a video model has them."""
    served = "=FLASH_ATTN/fa3 (backends.declared.flash_attn.FlashAttnBackend), 40/40 heads of 128, by ulysses 4x1 same"
    return ForwardFacts(
        number=number,
        model="transformer",
        batch=1,
        streams="video 75600, text 512 on each",
        carried="cross nothing, self nothing",
        gradient=False,
        dtype="bfloat16",
        selections=f"cross{served}, self{served}",
    )


def measure(rank: int, ranks: int, port: int, medians: Any) -> None:
    """On each rank: the median of an agreement in microseconds, by round; the first rank puts them into `medians`."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    mesh = Mesh(rank, ranks, torch.device("cpu"), dist.group.WORLD, dist.new_group(backend="gloo"))
    for number in range(WARM):
        agree(facts_of(number), mesh)
    found = []
    for _ in range(ROUNDS):
        seconds = []
        for number in range(CALLS):
            began = time.perf_counter()
            agree(facts_of(number), mesh)
            seconds.append(time.perf_counter() - began)
        found.append(statistics.median(seconds) * 1e6)
    if rank == 0:
        medians.put(found)
    dist.destroy_process_group()


def cost_us(ranks: int) -> list[float]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    medians = context.SimpleQueue()
    workers = [context.Process(target=measure, args=(rank, ranks, store.port, medians)) for rank in range(ranks)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit(f"a rank of {ranks} failed; its traceback is above")
    return list(medians.get())


def facts_us() -> float:
    """The digests alone."""
    began = time.perf_counter()
    for number in range(2000):
        facts_of(number).numbers()
    return (time.perf_counter() - began) / 2000 * 1e6


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLE)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, with commas between (default: 2,4)")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"torch": torch.__version__, "facts_us": facts_us()}
    print(f"the facts of a forward as numbers: {result['facts_us']:.0f} us")
    for ranks in (int(part) for part in options.ranks.split(",")):
        medians = cost_us(ranks)
        result[f"agreement_us_{ranks}"] = medians
        spread = f"{min(medians):.0f} to {max(medians):.0f}"
        print(f"{ranks} ranks: {statistics.median(medians):.0f} us (medians of {ROUNDS} rounds: {spread})")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
