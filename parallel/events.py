"""What ranks tell the driver, as plain frozen values. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from backends.selection import Selection
from parallel.plan import Strategy

Shape = tuple[int, ...]


@dataclass(frozen=True)
class AttentionRan:
    """A layer's first call, reported after it returned.

    kernel: the callable that ran. Shapes are [B, S, H, D]: query_rows as the transformer block had it, query and key
    as the kernel got them.
    """

    model: str
    layer: str
    selection: Selection
    strategy: Strategy
    kernel: str
    query_rows: Shape
    query: Shape
    key: Shape


@dataclass(frozen=True)
class Phase:
    """A phase that a rank has entered: resolve, join, load, encode, denoise, decode; check, time, done of a bench."""

    name: str
    request: int | None = None


@dataclass(frozen=True)
class Step:
    """A denoising step that a rank has finished; step counts from 1."""

    request: int
    step: int
    steps: int
    seconds: float


@dataclass(frozen=True)
class PromptCut:
    """A prompt that is longer than what the text encoder reads.

    Attributes:
        request: The request's number, from 0.
        name: `prompt` or `negative_prompt`.
        tokens: How many tokens the text has, with the one that ends it.
        limit: How many the text encoder reads.
        left_out: The text that it does not read.
    """

    request: int
    name: str
    tokens: int
    limit: int
    left_out: str

    @property
    def text(self) -> str:
        """What happened, as a line."""
        start = self.left_out if len(self.left_out) <= 60 else f"{self.left_out[:60]}..."
        return (
            f"generate.{self.name}: {self.tokens} tokens, and the text encoder reads {self.limit}: "
            f"the last {self.tokens - self.limit} are left out, from {start!r}"
        )


@dataclass(frozen=True)
class Traffic:
    """Collective calls and bytes that left one rank, by verb: scatter_heads, gather_heads, rotate_keys (a step of a
    ring), gather_keys, gather_rows; those of a backward pass end in `_backward`.
    """

    calls: Mapping[str, int] = field(default_factory=dict)
    bytes_sent: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, dict[str, int]]:
        return {verb: {"calls": self.calls[verb], "bytes_sent": self.bytes_sent[verb]} for verb in self.calls}


def sum_traffic(parts: Iterable[Traffic]) -> Traffic:
    """The traffic of several models together."""
    calls: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for part in parts:
        calls.update(part.calls)
        sent.update(part.bytes_sent)
    return Traffic(dict(calls), dict(sent))


@dataclass(frozen=True)
class RequestRan:
    """A request that a rank has finished. planned: from the shard plans; measured: counted by the transport.

    seconds: by phase. forwards: by model name. peak_memory_bytes: of the device; on CPU of the process. latents: sums
    over equal pieces of this rank's latents, which all ranks have to share.
    """

    request: int
    planned: Traffic
    measured: Traffic
    forwards: Mapping[str, int]
    seconds: Mapping[str, float]
    rows: Mapping[str, int]
    peak_memory_bytes: int = 0
    latents: tuple[float, ...] = ()


@dataclass(frozen=True)
class Artefact:
    """A result of a request on its way to the driver: `latents` (float array), or `frames` (uint8 [F, H, W, 3])."""

    request: int
    name: str
    array: Any


Event = AttentionRan | Phase | Step | PromptCut | RequestRan | Artefact
