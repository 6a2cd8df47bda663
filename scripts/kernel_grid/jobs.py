"""The grid in jobs, each with the calls of one dtype, head size and number of KV heads. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from backends.platforms.facts import DeviceFacts
from kernel_grid.cases import KV_HEADS, Call, Claim, calls


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


def wanted(name: str, only: Sequence[str]) -> bool:
    """Whether a claim is among the chosen ones: `FLASH_ATTN`, `FLASH_ATTN/fa3`."""
    return not only or any(name == each or name.startswith((f"{each}/", f"{each} ")) for each in only)


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
