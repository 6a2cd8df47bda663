"""Signs of life of a rank whose work reports nothing, and which rank they show to be stuck. No torch here."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath

BEAT_S = 2.0
"""Seconds between two beats of a rank that reports nothing else."""

# Files whose innermost frame is a call that waits for other ranks.
_COLLECTIVES = ("torch", "distributed")
_TRANSPORT = ("parallel", "transport")


@dataclass(frozen=True)
class Beat:
    """A sign of life, sent while the rank's work reports nothing.

    Attributes:
        waits: Whether the work waits for other ranks in a collective.
        stack: The work's Python stack as text, innermost frame last.
        at: The innermost frame, as `function (file:line)`.
    """

    waits: bool
    stack: str
    at: str


def beat_of(thread_id: int) -> Beat:
    """The beat of a thread of this process, as `threading.get_ident` names it."""
    frame = sys._current_frames().get(thread_id)
    frames = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
    if not frames:
        return Beat(False, "", "unknown")
    last = frames[-1]
    parts = PurePath(last.filename).parts
    pairs = set(pairwise(parts))
    waits = _COLLECTIVES in pairs or _TRANSPORT in pairs
    return Beat(waits, "".join(frames.format()), f"{last.name} ({'/'.join(parts[-3:])}:{last.lineno})")


def stuck_ranks(overdue: Sequence[int], beats: Mapping[int, tuple[Beat, float]], recent_s: float) -> list[int]:
    """Which ranks hold up the others.

    Args:
        overdue: The ranks whose work has made no progress for too long.
        beats: The last beat of each rank and its age in seconds; a rank that never sent one is absent.
        recent_s: The age up to which a beat shows what the rank does now.

    Returns:
        The overdue ranks that do not wait for others. First come those without a recent beat: their process is
        stopped, or a thread of it holds the interpreter's lock. Empty if all of them wait.
    """
    mute = [rank for rank in overdue if rank not in beats or beats[rank][1] > recent_s]
    return mute + [rank for rank in overdue if rank not in mute and not beats[rank][0].waits]
