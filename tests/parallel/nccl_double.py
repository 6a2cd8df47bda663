"""A stand-in for `nccl.core` 0.6 on CPU: sends and receives go over torch's default group when their group ends.

Its signatures are those of the wheel (`nccl_signatures.json`); it is strict where NCCL is silent: about the stream, the
contiguity of buffers and calls before the communicator is ready.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version

STREAM = 1234
SUCCESS, IN_PROGRESS = 0, 7


@dataclass(frozen=True)
class LibraryInfo:
    version: Version
    cuda_variant: Version | None
    path: Path | None


@dataclass(frozen=True)
class VersionInfo:
    nccl4py: Version
    nccl_bindings: Version
    libnccl: LibraryInfo | None


class UniqueId:
    def __init__(self, _internal: Any = None) -> None:
        self._internal = _internal

    def __bytes__(self) -> bytes:
        return bytes(self._internal)

    @staticmethod
    def from_bytes(b: bytes | bytearray | memoryview) -> UniqueId:
        return UniqueId(bytes(b))


@dataclass(kw_only=True)
class NCCLConfig:
    blocking: bool | None = None
    comm_name: str | None = None


@dataclass
class NcclDouble:
    """The module. states: what the communicator answers to the next questions after its state; success after these.

    raises: what the next `send` raises. pending: operations of the group under way.
    """

    version: str = "2.28.9"
    library: bool = True
    states: list[int] = field(default_factory=list)
    raises: Exception | None = None
    pending: list[Any] | None = None
    made: list[Communicator] = field(default_factory=list)
    UniqueId: Any = UniqueId
    NCCLConfig: Any = NCCLConfig

    def Communicator(self, ptr: int | None = None) -> Communicator:  # noqa: N802
        self.made.append(Communicator(self, ptr))
        return self.made[-1]

    def get_unique_id(self, empty: bool = False) -> UniqueId:
        return UniqueId(b"\x07" * 128)

    def get_version(self) -> VersionInfo:
        library = LibraryInfo(Version(self.version), Version("13.0"), Path("/lib/libnccl.so.2"))
        return VersionInfo(Version("0.6.0"), Version("2.30.7"), library if self.library else None)

    def get_error_string(self, nccl_result: Any) -> str:
        return f"result {int(nccl_result)}"

    @contextmanager
    def group(self) -> Iterator[None]:
        assert self.pending is None, "a group within a group"
        self.pending = []
        try:
            yield
        finally:
            operations, self.pending = self.pending, None
            works = dist.batch_isend_irecv(operations) if operations else ()
            for work in works:
                work.wait()


class Communicator:
    def __init__(self, module: NcclDouble, ptr: int | None = None) -> None:
        self.module = module
        self.ready = False
        self.aborted = False

    def initialize(self, nranks: int, rank: int, unique_id: Any, config: Any = None) -> None:
        assert isinstance(unique_id, UniqueId)
        assert bytes(unique_id) == b"\x07" * 128
        assert (nranks, rank) == (dist.get_world_size(), dist.get_rank())
        assert config.blocking is False
        self.ready = True

    def send(self, sendbuf: Any, peer: int, *, stream: Any = None) -> None:
        if self.module.raises is not None:
            raise self.module.raises
        self._queue(dist.isend, sendbuf, peer, stream)

    def recv(self, recvbuf: Any, peer: int, *, stream: Any = None) -> None:
        self._queue(dist.irecv, recvbuf, peer, stream)

    def get_async_error(self) -> int:
        assert self.ready
        return self.module.states.pop(0) if self.module.states else SUCCESS

    def get_last_error(self) -> str:
        return "the last error"

    def abort(self) -> None:
        self.aborted = True

    def _queue(self, operation: Any, buffer: torch.Tensor, peer: int, stream: Any) -> None:
        assert self.ready
        assert not self.aborted
        assert self.module.pending is not None, "outside a group"
        assert stream == STREAM
        assert buffer.is_contiguous()
        assert buffer.numel()
        assert peer != dist.get_rank(), "what stays at home is copied"
        self.module.pending.append(dist.P2POp(operation, buffer, peer=peer))
