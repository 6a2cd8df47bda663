"""Processes that do the jobs of the grid, one job after another.

A kernel can end its process or leave the device unusable, so a process that stops within a job is replaced by another
one, which goes on behind the call that it stopped at; that call counts as failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from backends.platforms.facts import DeviceFacts
from backends.registry import Registry
from kernel_grid.cases import claims
from kernel_grid.jobs import Job, wanted

Outcomes = list[dict[str, Any]]
LEFT_UNUSABLE = 3
"""How a worker ends behind a case that left the device unusable."""


@dataclass
class _Worker:
    """A process and the lines that it writes. last: the latest of them."""

    process: subprocess.Popen[str]
    file: Path
    job: Job | None = None
    read: int = 0
    last: dict[str, Any] = field(default_factory=dict)

    @property
    def log(self) -> str:
        """The end of what else it says."""
        return self.file.with_suffix(".log").read_text(errors="replace")[-2000:]

    def give(self, job: Job) -> None:
        self.job, self.last = job, {}
        with suppress(BrokenPipeError):  # it has ended: who polls it will see
            print(json.dumps(asdict(job)), file=self.process.stdin, flush=True)

    def news(self) -> Outcomes:
        """What it wrote since it was asked last: whole lines alone."""
        if not self.file.exists():
            return []
        with self.file.open("rb") as lines:
            lines.seek(self.read)
            text = lines.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.read += len(whole)
        entries = [json.loads(line) for line in whole.splitlines()]
        self.last = entries[-1] if entries else self.last
        return entries

    def rest(self) -> tuple[Job | None, Outcomes]:
        """Of a job that it ended within: what is behind the call that it was at last, and that call as an outcome with
        a fault. There is no rest if it did not come to a call.
        """
        job, last, code = self.job, self.last, self.process.returncode
        if job is None or "number" not in last:
            return None, []
        behind = replace(job, first=last["number"] + 1)
        if code == LEFT_UNUSABLE and "fault" in last:
            return behind, []
        fault = f"the process ended with {code}" + (" behind it" if "fault" in last else "")
        died = {"claim": last["claim"], "call": last["call"], "errors": {}, "fault": fault, "synchronises": False}
        return behind, [died]


def run_jobs(
    jobs: Sequence[Job], command: Sequence[str], folder: Path, workers: int, gpus: int, deadline: float
) -> tuple[Outcomes, list[str]]:
    """All outcomes, and the jobs that did not end: the time did not suffice, or they ended before their first call.
    command: starts a worker, see `work`; the file that its lines go to is added to it.
    """
    waiting = list(jobs)
    crew = [_start(command, folder / f"{number}.jsonl", number, gpus) for number in range(min(workers, len(jobs)))]
    gathered: Outcomes = []
    stuck: list[Job] = []
    started = time.monotonic()
    try:
        while (waiting or any(each.job for each in crew)) and time.monotonic() < deadline:
            for number, each in enumerate(crew):
                ended = each.process.poll() is not None  # before the last lines are read
                news = each.news()
                gathered += [entry for entry in news if "fault" in entry]
                if each.job and "done" in each.last:
                    _say(each.job, time.monotonic() - started, len(waiting))
                    each.job = None
                elif each.job and ended:
                    rest, died = each.rest()
                    gathered += died
                    if rest:
                        waiting.insert(0, rest)
                    else:
                        stuck.append(each.job)
                        print(f"{each.job.name} ended before its first call:\n{each.log}", flush=True)
                    crew[number] = _start(command, each.file.with_stem(f"{each.file.stem}_"), number, gpus)
                if waiting and not crew[number].job:
                    crew[number].give(waiting.pop(0))
            time.sleep(0.1)
    finally:
        for each in crew:
            each.process.kill()
            each.process.wait()
    for each in crew:
        gathered += [entry for entry in each.news() if "fault" in entry]
    return gathered, [job.name for job in (*stuck, *waiting, *(each.job for each in crew if each.job))]


def _say(job: Job, seconds: float, waiting: int) -> None:
    print(f"[{seconds:5.0f} s] {job.name} is done; {waiting} jobs wait", flush=True)


def _start(command: Sequence[str], file: Path, number: int, gpus: int) -> _Worker:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = str(number % gpus)
    with file.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--lines", str(file)], env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True
        )
    return _Worker(process, file)


def work(only: Sequence[str], device: DeviceFacts, file: Path) -> None:
    """A worker: does the jobs that its input has line by line, every call by every variant that claims it, and writes
    a JSON line before and after each of them and behind each job.
    """
    import torch

    from kernel_grid.measure import Exact, measure

    place = torch.device("cuda", 0) if device.platform != "cpu" else torch.device("cpu")
    every = [claim for claim in claims(Registry(), device) if wanted(claim.name, only)]
    with file.open("w", buffering=1) as out:
        for line in sys.stdin:
            job = Job.from_text(line)
            number = -1
            for call in job.calls():
                exact = None
                for claim in [claim for claim in every if claim.takes(call, device)]:
                    number += 1
                    if number < job.first:
                        continue
                    exact = exact or Exact(call, place)
                    out.write(json.dumps({"claim": claim.name, "call": asdict(call), "number": number}) + "\n")
                    outcome = measure(claim, exact, device)
                    out.write(json.dumps({**outcome.to_dict(), "number": number}) + "\n")
                    if outcome.fault and _unusable(outcome.fault):
                        os._exit(LEFT_UNUSABLE)  # whatever follows in this process would fail, too
            out.write(json.dumps({"done": job.name}) + "\n")
            if place.type == "cuda":
                torch.cuda.empty_cache()  # the device is shared with the others


def _unusable(fault: str) -> bool:
    return any(text in fault for text in ("CUDA error", "illegal memory access", "device-side assert"))
