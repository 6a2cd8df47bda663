"""Ray workers that need not import their libraries: a process that has imported them is forked for each.

A rank takes 5 s to import torch, diffusers and transformers, and a run of the tests starts some two hundred of them.
Nothing of this project is imported before the fork, so a rank finds and checks its own sources as everywhere else.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

FORKS = Path(__file__).with_name("forks.py")
SCRIPT = """#!/bin/sh
case "$*" in
*/default_worker.py*) exec '{python}' -SE '{forks}' ask '{socket}' "$@" ;;
*) exec '{python}' "$@" ;;
esac
"""


@contextlib.contextmanager
def warm_python() -> Iterator[str]:
    """A path for `sys.executable` while a Ray is started, which then forks its workers. New ones only inside."""
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        socket, python = Path(folder, "socket"), Path(folder, "python")
        python.write_text(SCRIPT.format(python=sys.executable, forks=FORKS, socket=socket))
        python.chmod(0o700)
        # As many threads as Ray lets a worker of one CPU have, which it tells before the libraries are imported.
        environ = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        server = subprocess.Popen(
            [sys.executable, FORKS, "serve", socket],
            env=environ,
            stdin=subprocess.PIPE,  # it ends with us
            start_new_session=True,
        )
        try:
            yield str(python)
        finally:
            server.communicate(timeout=30)
