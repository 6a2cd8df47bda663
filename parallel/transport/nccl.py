"""The transport over NCCL itself, through nccl4py (`nccl.core` 0.6): sends and receives of the plan's sizes, in one
group, on torch's current stream. Run on H200 (nccl4py 0.6.0, NCCL 2.28.9): the same bits as torch's transport.

One communicator serves all groups, since a send names its peer. It does not block: what is under way is asked for, so
that a rank whose peers are gone raises within the mesh's timeout. After a failure the communicator is aborted.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from configs.faults import Fault, FaultError
from parallel.mesh import Mesh
from parallel.plan import ExchangeCounts
from parallel.transport.base import Peers, Rotation, Transport
from parallel.transport.errors import ExchangeError
from parallel.transport.guard import exchange

SUCCESS, IN_PROGRESS = 0, 7
"""Of `ncclResult_t`."""
POLL_S = 5e-5
DEFAULT_TIMEOUT_S = 600.0

Message = tuple[torch.Tensor, int]
"""A flat tensor, and the rank that it goes to or comes from."""


class NcclFailureError(ExchangeError):
    """What NCCL could not do, after which its communicator was aborted."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"nccl: {what} failed", reason, "see the other ranks' errors, or use parallel.transport=torch")
        self.what = what
        self.args = (what, reason)


def load_nccl(torch_version: tuple[int, ...]) -> Any:
    """nccl4py, if it works with the NCCL library that torch has. Raises FaultError for one that is not there or is of
    another version: two libraries in one process do not know of each other's work.
    """
    try:
        nccl = importlib.import_module("nccl.core")
    except ImportError as error:
        raise _fault(f"nccl4py cannot be imported ({error})") from error
    library = nccl.get_version().libnccl
    if library is None:
        raise _fault("nccl4py finds no libnccl")
    if tuple(library.version.release) != tuple(torch_version):
        torchs = ".".join(map(str, torch_version))
        raise _fault(f"nccl4py works with NCCL {library.version} at {library.path}, and torch with {torchs}")
    return nccl


def _fault(rule: str) -> FaultError:
    remedy = "install nccl4py beside the nvidia-nccl package of torch, or use parallel.transport=torch"
    return FaultError([Fault("parallel.transport", "nccl", rule, remedy)])


class NcclTransport(Transport):
    """Carries exchanges over a communicator of its own; every rank of the mesh has to construct it.

    nccl: the module `nccl.core`. stream: the handle of the stream to work on, asked for at each exchange.
    Raises NcclFailureError, and aborts, if the ranks do not come together.
    """

    def __init__(self, mesh: Mesh, nccl: Any, stream: Callable[[], int] | None = None) -> None:
        super().__init__(mesh)
        self._nccl = nccl
        self._stream = stream or (lambda: int(torch.cuda.current_stream(mesh.device).cuda_stream))
        self._timeout_s = DEFAULT_TIMEOUT_S if mesh.timeout is None else mesh.timeout.total_seconds()
        self._closed = False
        self._communicator = nccl.Communicator()
        config = nccl.NCCLConfig(blocking=False, comm_name="raylysses")
        with self._aborting():
            self._communicator.initialize(mesh.world_size, mesh.rank, self._unique_id(), config)
            self._settle("joining the ranks")

    def close(self) -> None:
        """Abort the communicator, once this rank's own work is done or the mesh's timeout is over."""
        if self._closed:
            return
        try:
            if self.mesh.device.type == "cuda":
                self._wait_for_device()
        finally:
            self._abort()

    def _wait_for_device(self) -> None:
        """Other ranks need what this one still sends. Its own wait must end if they are gone."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self.mesh.device))
        deadline = time.monotonic() + self._timeout_s
        while not done.query() and time.monotonic() < deadline:  # type: ignore[no-untyped-call]
            time.sleep(POLL_S)

    def _abort(self) -> None:
        self._closed = True
        self._communicator.abort()

    def _unique_id(self) -> Any:
        """The first rank's, by the control group."""
        control = self.mesh.control
        first = dist.get_global_rank(control, 0)  # type: ignore[arg-type]
        box = [bytes(self._nccl.get_unique_id()) if self.mesh.rank == 0 else None]
        with exchange("joining the ranks"):
            dist.broadcast_object_list(box, src=first, group=control)
        return self._nccl.UniqueId.from_bytes(box[0])

    def _all_to_all(self, received: torch.Tensor, send: torch.Tensor, counts: ExchangeCounts, peers: Peers) -> None:
        outgoing, incoming = torch.split(send, list(counts.sends)), torch.split(received, list(counts.receives))
        incoming[peers.place].copy_(outgoing[peers.place])
        others = [(place, rank) for place, rank in enumerate(peers.ranks) if place != peers.place]
        self._move(
            [(outgoing[place], rank) for place, rank in others], [(incoming[place], rank) for place, rank in others]
        )

    def _to_all(self, received: torch.Tensor, message: torch.Tensor, counts: ExchangeCounts, peers: Peers) -> None:
        parts = torch.split(received, list(counts.receives))
        parts[peers.place].copy_(message)
        others = [(place, rank) for place, rank in enumerate(peers.ranks) if place != peers.place]
        self._move([(message, rank) for _, rank in others], [(parts[place], rank) for place, rank in others])

    def _pass_on(self, received: torch.Tensor, message: torch.Tensor, peers: Peers) -> Rotation:
        ring = len(peers.ranks)
        following, previous = peers.ranks[(peers.place + 1) % ring], peers.ranks[(peers.place - 1) % ring]
        self._move([(message, following)], [(received, previous)])
        return Rotation(received)  # whatever is launched later on the stream comes after it

    def _move(self, outgoing: list[Message], incoming: list[Message]) -> None:
        """All of it as one operation; empty messages stay at home, on both sides."""
        stream = self._stream()
        with self._aborting():
            with self._nccl.group():
                for tensor, peer in outgoing:
                    if tensor.numel():
                        self._communicator.send(tensor, peer, stream=stream)
                for tensor, peer in incoming:
                    if tensor.numel():
                        self._communicator.recv(tensor, peer, stream=stream)
            self._settle("an exchange")

    def _settle(self, what: str) -> None:
        """Until what was asked for is on the stream: before that nothing else may be launched there."""
        deadline = time.monotonic() + self._timeout_s
        while (state := int(self._communicator.get_async_error())) == IN_PROGRESS:
            if time.monotonic() > deadline:
                raise NcclFailureError(what, f"other ranks did not take part within {self._timeout_s:g} s")
            time.sleep(POLL_S)
        if state != SUCCESS:
            told = f"{self._nccl.get_error_string(state)} ({self._communicator.get_last_error()})"
            raise NcclFailureError(what, told)

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        """Abort if the block raises: nothing is known of what is under way then."""
        with ExitStack() as undo:
            undo.callback(self._abort)
            yield
            undo.pop_all()
