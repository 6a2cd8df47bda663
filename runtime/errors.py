"""What can go wrong once a run has started; exit codes as in the documentation. All of it survives pickling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from configs.faults import FaultError

BRIEF = 300
"""Characters of a consequence; its whole text is in the run folder."""


class PlacementError(FaultError):
    """The ranks' resources are not there, or do not become free in time."""

    exit_code = 3


class StorageError(FaultError):
    """The run folder could not be written to while the run went on: a full disk, or a folder that is gone."""

    exit_code = 3


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs. gpu: the physical id, or empty on CPU. ordinal: its index among the process's visible
    devices.
    """

    rank: int
    node_id: str
    host: str
    hostname: str
    pid: int
    gpu: str = ""
    ordinal: int = 0

    def __str__(self) -> str:
        gpu = f", GPU {self.gpu}" if self.gpu else ""
        return f"rank {self.rank} on {self.hostname} ({self.host}{gpu}, pid {self.pid})"


@dataclass(frozen=True)
class RankTrouble:
    """What became of one rank.

    Attributes:
        kind: `died`, `raised`, or `disconnected` (an exchange with other ranks failed).
        phase: What the rank was doing.
        message: The cause, in one sentence.
        traceback: The whole report: the traceback of an exception, or what Ray says of a dead process.
    """

    place: RankPlace
    kind: str
    phase: str
    message: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.place} {self.kind} in phase {self.phase}: {self.message}"

    @property
    def in_brief(self) -> str:
        """One line for a rank that failed because another one did."""
        if self.kind == "disconnected":
            return f"{self.place} lost its connection to other ranks in phase {self.phase}"
        line = (str(self).splitlines() or [""])[0]
        return line if len(line) <= BRIEF else f"{line[:BRIEF]}..."


_WAYS_OUT = {
    "selections": "give all nodes the same packages, or name one backend for the role",
    "latents": "give all nodes the same packages and model files, and report it if they have them",
}


class RankError(Exception):
    """A rank died or raised. trouble: the root cause; consequences: what that did to other ranks."""

    exit_code = 4

    def __init__(self, trouble: RankTrouble, consequences: tuple[RankTrouble, ...] = ()) -> None:
        self.trouble = trouble
        self.consequences = consequences
        super().__init__(trouble, consequences)

    def __str__(self) -> str:
        rest = "".join(f"\n  then {trouble.in_brief}" for trouble in self.consequences)
        return f"{self.trouble}; the other ranks were stopped{rest}"


class DisagreementError(Exception):
    """Ranks that must share something and differ in it.

    Args:
        lines: A line for each difference; it names both sides.
        subject: What differs: the ranks' `selections`, or their `latents`.
    """

    exit_code = 4

    def __init__(self, lines: tuple[str, ...], subject: Literal["selections", "latents"] = "selections") -> None:
        self.lines = lines
        self.subject = subject
        super().__init__(lines, subject)

    def __str__(self) -> str:
        listed = "\n  ".join(self.lines)
        return f"the ranks' {self.subject} differ; {_WAYS_OUT[self.subject]}:\n  {listed}"


class WrongResultError(Exception):
    """Results that are further from the exact ones than their dtype allows; a line for each."""

    exit_code = 4

    def __init__(self, lines: tuple[str, ...]) -> None:
        self.lines = lines
        super().__init__(lines)

    def __str__(self) -> str:
        listed = "\n  ".join(self.lines)
        return f"wrong results, which were not timed; name another backend or plan, and report it:\n  {listed}"


class StallError(Exception):
    """Ranks reported nothing for too long.

    Attributes:
        timeout_s: The limit, in seconds.
        last: What each rank was doing, a line each.
        stuck: The ranks that hold up the others; empty if all ranks wait for each other.
        stacks: The last Python stack of each rank that could send one, by rank.
    """

    exit_code = 5

    def __init__(
        self,
        timeout_s: float,
        last: tuple[str, ...],
        stuck: tuple[int, ...] = (),
        stacks: Mapping[int, str] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.last = last
        self.stuck = stuck
        self.stacks = dict(stacks or {})
        super().__init__(timeout_s, last, stuck, self.stacks)

    def __str__(self) -> str:
        listed = "\n  ".join(self.last)
        ranks = ", ".join(map(str, self.stuck))
        if len(self.stuck) == 1:
            who = f"rank {ranks} is stuck: it reported nothing for so long, and the others wait for it"
        elif self.stuck:
            who = f"ranks {ranks} are stuck: they reported nothing for so long"
        else:
            who = "no rank reported anything for so long, and all of them wait for each other"
        return (
            f"cluster.stall_timeout_s={self.timeout_s:g}: {who}; raise it if a load or a step takes longer here. "
            f"Last seen:\n  {listed}"
        )


class TerminatedError(Exception):
    """A signal asked the run to stop."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(signum)

    @property
    def exit_code(self) -> int:
        return 128 + self.signum

    def __str__(self) -> str:
        return f"stopped by signal {self.signum}"
