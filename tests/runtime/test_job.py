"""`ray job submit` from a checkout that is not installed, on a cluster started with `ray start --head`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT
from tests.runtime.command import environment, family, gone_within, raylysses

pytestmark = pytest.mark.ray

RAY = str(Path(sys.executable).with_name("ray"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def head() -> Iterator[tuple[str, str]]:
    """A head node with two CPUs; the addresses of its jobs server and of the cluster."""
    jobs, port = free_port(), free_port()
    # The entrypoint's `python` is looked up on the path of whoever starts Ray.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [RAY, "start", "--head", "--block", "--num-cpus=2", f"--port={port}", f"--dashboard-port={jobs}"]
    # The agent that starts jobs has a fixed port by default, and the other tests' cluster has one too.
    command.append(f"--dashboard-agent-listen-port={free_port()}")
    process = subprocess.Popen(
        [*command, "--disable-usage-stats"],
        env=environment() | {"PATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for_jobs(f"http://127.0.0.1:{jobs}")
        yield f"http://127.0.0.1:{jobs}", f"127.0.0.1:{port}"
    finally:
        members = family(process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
        assert gone_within(members, 15)


def wait_for_jobs(jobs: str) -> None:
    """Until a trivial job is accepted: the server answers before the agent that starts jobs does."""
    body = json.dumps({"entrypoint": "true"}).encode()
    request = urllib.request.Request(f"{jobs}/api/jobs/", body, {"Content-Type": "application/json"})
    deadline = time.monotonic() + 90
    while True:
        try:
            urllib.request.urlopen(request, timeout=10).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def submit(jobs: str, checkout: Path, name: str, *arguments: str) -> tuple[str, int | None, str]:
    """Submit, wait for the end; status, the driver's exit code, and what was printed."""
    entrypoint = ["python", "-m", "runtime", "generate", *arguments]
    done = subprocess.run(
        [RAY, "job", "submit", "--submission-id", name, "--working-dir", ".", "--", *entrypoint],
        cwd=checkout,
        env=environment() | {"RAY_API_SERVER_ADDRESS": jobs},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    with urllib.request.urlopen(f"{jobs}/api/jobs/{name}", timeout=10) as answer:
        details = json.load(answer)
    return details["status"], details["driver_exit_code"], done.stdout + done.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources that nothing has installed."""
    target = tmp_path_factory.mktemp("copy") / "checkout"
    for name in ("configs", "backends", "parallel", "runtime"):
        shutil.copytree(CHECKOUT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def test_a_job_ends_as_its_run_does(head: tuple[str, str], checkout: Path, tmp_path: Path) -> None:
    jobs, _ = head
    size = ("generate.steps=2", "generate.frames=5", "generate.height=64", "generate.width=64")
    prompt = ("--prompt", "a red circle, moving right; $HOME")

    good = submit(jobs, checkout, "good", *prompt, "parallel.world_size=2", *size, f"run.dir={tmp_path}/good")
    refused = submit(jobs, checkout, "refused", *prompt, "generate.guidance_2=3.0", *size)
    crowded = submit(jobs, checkout, "crowded", *prompt, "parallel.world_size=4", *size, f"run.dir={tmp_path}/full")

    assert good[:2] == ("SUCCEEDED", 0), good[2]
    assert (tmp_path / "good" / "video.mp4").exists()
    content = json.loads((tmp_path / "good" / "summary.json").read_text())
    assert content["requests"][0]["prompt"] == "a red circle, moving right; $HOME"
    assert refused[:2] == ("FAILED", 2), refused[2]
    assert "generate.guidance_2=3.0: the model has one stage" in refused[2]
    assert crowded[:2] == ("FAILED", 3), crowded[2]
    assert "parallel.world_size=4: the cluster has room for 2 ranks" in crowded[2]


def test_more_ranks_than_the_cluster_has_are_refused_soon(head: tuple[str, str], tmp_path: Path) -> None:
    outcome = raylysses(
        "generate",
        "--prompt",
        "a cat",
        "parallel.world_size=4",
        f"cluster.address={head[1]}",
        f"run.dir={tmp_path}/run",
    )

    assert outcome.code == 3, outcome.err
    assert "parallel.world_size=4: the cluster has room for 2 ranks of one CPU each" in outcome.err
    assert "use at most 2" in outcome.err
    assert outcome.seconds < 20


def test_a_cluster_that_is_not_there_is_named(tmp_path: Path) -> None:
    outcome = raylysses(
        "generate", "--prompt", "a cat", f"cluster.address=127.0.0.1:{free_port()}", f"run.dir={tmp_path}/run"
    )

    assert outcome.code == 3, outcome.err
    assert "no Ray cluster answers there" in outcome.err
    assert outcome.seconds < 20
    assert outcome.err.count("error: ") == 1


def test_a_server_that_is_not_ray_is_told_apart() -> None:
    from runtime.ray_api import answers_as_ray

    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        began = time.monotonic()

        assert not answers_as_ray(f"127.0.0.1:{server.server_port}", timeout_s=1.0)
        assert time.monotonic() - began < 10
        server.shutdown()
