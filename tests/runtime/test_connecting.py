"""Connecting to Ray under `uv run`, and where Ray's sockets cannot be named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT
from tests.runtime.command import environment, raylysses

pytestmark = pytest.mark.ray

PASS_ON = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
ASK_FOR_UPLOAD = """
import ray
from runtime import ray_api
ray_api.connect("local", 1)
print(dict(ray.get_runtime_context().runtime_env))
ray_api.disconnect()
"""


def under_uv(folder: Path, *arguments: str, limit_bytes: int = 4 << 20) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, below a process that looks like `uv run` to Ray.

    Args:
        folder: The working directory, which Ray would upload.
        arguments: Those of Python.
        limit_bytes: Ray's limit for an upload, which is 512 MiB without this.
    """
    (folder / "run").write_text(PASS_ON)
    (folder / "large.bin").write_bytes(os.urandom(limit_bytes + 1))
    return subprocess.run(
        ["uv", "run", sys.executable, *arguments],
        executable=sys.executable,
        cwd=folder,
        env=environment() | {"PYTHONPATH": str(CHECKOUT), "RAY_max_grpc_message_size": str(limit_bytes)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_uv_run_uploads_nothing_to_a_cluster_of_the_runs_own(tmp_path: Path) -> None:
    done = under_uv(tmp_path, "-c", ASK_FOR_UPLOAD)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{}"


def test_uv_run_in_a_large_folder_names_the_limit_the_folder_and_the_way_out(tmp_path: Path, ray_cluster: str) -> None:
    settings = (f"cluster.address={ray_cluster}", "parallel.world_size=1", f"run.dir={tmp_path / 'run_folder'}")
    done = under_uv(tmp_path, "-m", "runtime", "generate", "--prompt", "a cat", *settings)

    assert done.returncode == 3, done.stderr
    assert f"Failed to upload working_dir {tmp_path} to the Ray cluster: Package size" in done.stderr
    assert "exceeds the maximum size of" in done.stderr
    assert f"run `{sys.executable} -m raylysses` without `uv run`" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_temporary_folder_that_is_too_long_for_sockets_is_named(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    settings = ("parallel.world_size=1", f"run.dir={tmp_path / 'run'}")
    done = raylysses("generate", "--prompt", "a cat", *settings, environ={"TMPDIR": str(long)})

    assert done.code == 3, done.err
    assert "AF_UNIX path length cannot exceed 107 bytes" in done.err
    assert (
        f"set RAY_TMPDIR (or TMPDIR) to a short path, such as /tmp: Ray's sockets under {long} are too long" in done.err
    )
    assert "Traceback" not in done.err
