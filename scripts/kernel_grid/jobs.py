"""The grid in processes of their own, each with the calls of one dtype and head size.

A kernel can end its process or leave the device unusable, so a job that stops early is started again behind the call
that it stopped at, which counts as failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from backends.platforms.facts import DeviceFacts
from backends.registry import Registry
from kernel_grid.cases import KV_HEADS, Call, Claim, calls, claims

Outcomes = list[dict[str, Any]]
LEFT_UNUSABLE = 3
"""How a job ends behind a case that left the device unusable."""


@dataclass(frozen=True)
class Job:
    """The calls of a dtype, a head size and a number of KV heads, with these features and up to `longest` rows and
    keys, from call number `first` on.
    """

    dtype: str
    head_size: int
    kv_heads: int
    features: tuple[str, ...]
    longest: int
    first: int = 0

    @property
    def name(self) -> str:
        alone = f":{self.features[0]}" if len(self.features) == 1 else ""
        return f"{self.dtype}:{self.head_size}:{self.kv_heads}{alone}"

    def calls(self) -> Iterator[Call]:
        return calls(self.dtype, self.head_size, self.kv_heads, self.features, self.longest)

    @classmethod
    def from_text(cls, text: str) -> Job:
        """The reverse of `json.dumps(asdict(job))`."""
        values = json.loads(text)
        return cls(**{**values, "features": tuple(values["features"])})


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    lines: Path


def wanted(name: str, only: Sequence[str]) -> bool:
    """Whether a claim is among the chosen ones: `FLASH_ATTN`, `FLASH_ATTN/fa3`."""
    return not only or any(name == each or name.startswith((f"{each}/", f"{each} ")) for each in only)


def run_jobs(
    jobs: Sequence[Job], command: Sequence[str], folder: Path, workers: int, gpus: int, deadline: float
) -> tuple[Outcomes, list[str]]:
    """All outcomes, and the jobs that the time did not suffice for. command: runs a job that is added to it."""
    waiting, running = list(jobs), list[_Running]()
    gathered: Outcomes = []
    unfinished: list[str] = []
    started = time.monotonic()
    while waiting or running:
        if time.monotonic() > deadline:
            unfinished = [job.name for job in (*waiting, *(each.job for each in running))]
            for each in running:
                each.process.kill()
                each.process.wait()
                gathered += _read(each.lines)
            break
        while waiting and len(running) < workers:
            running.append(_start(waiting.pop(0), command, folder, len(running) % max(gpus, 1) if gpus else None))
        time.sleep(0.2)
        for each in [each for each in running if each.process.poll() is not None]:
            running.remove(each)
            outcomes = _read(each.lines)
            gathered += outcomes
            if each.process.returncode:
                waiting.insert(0, _behind(each, outcomes, gathered))
            else:
                seconds = time.monotonic() - started
                print(
                    f"[{seconds:5.0f} s] {each.job.name}: {len(outcomes)} calls; {len(waiting)} jobs wait", flush=True
                )
    return gathered, unfinished


def _start(job: Job, command: Sequence[str], folder: Path, gpu: int | None) -> _Running:
    lines = folder / f"{job.name.replace(':', '-')}-{job.first}.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    arguments = [*command, "--job", json.dumps(asdict(job)), "--lines", str(lines)]
    with lines.with_suffix(".log").open("wb") as log:
        return _Running(job, subprocess.Popen(arguments, env=environment, stdout=log, stderr=log), lines)


def _read(lines: Path) -> Outcomes:
    if not lines.exists():
        return []
    return [entry for line in lines.read_text().splitlines() if "fault" in (entry := json.loads(line))]


def _behind(each: _Running, outcomes: Outcomes, gathered: Outcomes) -> Job:
    """The rest of a job that stopped early; what it was at is an outcome with a fault."""
    begun = [json.loads(line) for line in each.lines.read_text().splitlines()] if each.lines.exists() else []
    begins = [entry for entry in begun if "begins" in entry]
    last = begins[-1] if begins else None
    if last is not None and each.process.returncode == LEFT_UNUSABLE:
        return replace(each.job, first=last["number"] + 1)
    if last is None or begun[-1] is not last:
        tail = each.lines.with_suffix(".log").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{each.job.name} ended with {each.process.returncode} before or after its calls:\n{tail}")
    fault = f"the process ended with {each.process.returncode}"
    gathered.append(
        {"claim": last["begins"], "call": last["call"], "errors": {}, "fault": fault, "synchronises": False}
    )
    return replace(each.job, first=last["number"] + 1)


def run_job(job: Job, only: Sequence[str], device: DeviceFacts, lines: Path) -> None:
    """In a process of its own: every call of the job by every variant that claims it, a JSON line before and after."""
    import torch

    from kernel_grid.measure import Exact, measure

    place = torch.device("cuda", 0) if device.platform != "cpu" else torch.device("cpu")
    every = [claim for claim in claims(Registry(), device) if wanted(claim.name, only)]
    number = -1
    with lines.open("w", buffering=1) as out:
        for call in job.calls():
            taking = [claim for claim in every if claim.takes(call, device)]
            exact = None
            for claim in taking:
                number += 1
                if number < job.first:
                    continue
                exact = exact or Exact(call, place)
                out.write(json.dumps({"begins": claim.name, "call": asdict(call), "number": number}) + "\n")
                outcome = measure(claim, exact, device)
                out.write(json.dumps(outcome.to_dict()) + "\n")
                if outcome.fault and _unusable(outcome.fault):
                    os._exit(LEFT_UNUSABLE)  # whatever follows in this process would fail, too


def _unusable(fault: str) -> bool:
    return any(text in fault for text in ("CUDA error", "illegal memory access", "device-side assert"))


def number_of_calls(job: Job, every: Sequence[Claim], device: DeviceFacts) -> int:
    """How many cases a job has."""
    return sum(claim.takes(call, device) for call in job.calls() for claim in every)


def jobs_of(
    every: Sequence[Claim],
    device: DeviceFacts,
    dtypes: Sequence[str],
    sizes: Sequence[int],
    features: Sequence[str],
    longest: int,
    kv_heads: Sequence[int] = KV_HEADS,
    *,
    fine: bool = False,
) -> Iterator[Job]:
    """The jobs that have a case, those with the most first. fine: one for each feature."""
    parts = [(feature,) for feature in features] if fine else [tuple(features)]
    jobs = [Job(*key, longest) for key in product(dtypes, sizes, kv_heads, parts)]
    counted = {job: number_of_calls(job, every, device) for job in jobs}
    return (job for job in sorted(jobs, key=lambda job: -counted[job]) if counted[job])
