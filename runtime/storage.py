"""The run folder of a run that goes on, and the folder that replaces it once it cannot be written to."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from configs.faults import Fault
from runtime.errors import StorageError
from runtime.run_folder import RunFolder

REMEDY = "free disk space, or name another folder"


class Storage:
    """Writes to a run folder; if that fails, goes on in a temporary one, so that a long run is not lost.

    Args:
        begin: Writes what every run folder starts with, a replacement included.
        tell: Called with a line when the folder is replaced.

    Attributes:
        folder: The folder that is written to; None before `create`.
        fault: What is wrong with the first folder; None if nothing is.
    """

    def __init__(self, begin: Callable[[RunFolder], object], tell: Callable[[str], None]) -> None:
        self.folder: RunFolder | None = None
        self.fault: Fault | None = None
        self._begin = begin
        self._tell = tell

    def create(self, path: Path | None, now: datetime) -> None:
        """Make the run folder (see `RunFolder.create`) and write what it starts with."""
        self.folder = RunFolder.create(path, now)
        self.store(self._begin)

    def store(self, write: Callable[[RunFolder], object]) -> None:
        """Write to the run folder, or to its replacement if that fails; nothing before `create`.

        Raises:
            StorageError: The replacement cannot be written to either.
        """
        if self.folder is None:
            return
        try:
            write(self.folder)
        except OSError as error:
            if self.fault is not None:
                raise StorageError([self.fault]) from error
            self._replace(self.folder, error)
            self.store(write)

    def raise_if_replaced(self) -> None:
        """Raise StorageError if the run folder had to be replaced."""
        if self.fault is not None:
            raise StorageError([self.fault])

    def close(self) -> None:
        """Close the files of the folder; every line was flushed when it was written."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                self.folder.close()

    def _replace(self, lost: RunFolder, error: OSError) -> None:
        rule = f"it could not be written to during the run ({error.strerror or error})"
        self.fault = Fault("run.dir", str(lost.path), rule, REMEDY)
        try:
            path = Path(tempfile.mkdtemp(prefix=f"raylysses-{lost.path.name}-"))
        except OSError as second:
            raise StorageError([self.fault]) from second
        self.close()
        self.folder = RunFolder(path)
        self.fault = Fault("run.dir", str(lost.path), f"{rule}; what the run made since then is in {path}", REMEDY)
        self._tell(str(self.fault))
        self.store(self._begin)
