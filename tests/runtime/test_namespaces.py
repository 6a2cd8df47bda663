"""Nodes with addresses of their own: a Ray node in each of two network namespaces, and one wire between them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT
from tests.runtime.command import environment
from tests.runtime.report_values import check_schema

pytestmark = pytest.mark.ray
PORT = 6379  # of the namespace's own


@dataclass(frozen=True)
class Space:
    """A network namespace and the address that others know it by."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30).stdout


def _empty(space: Space) -> None:
    """Kill what still runs in a namespace: Ray's processes that outlived their node."""
    for pid in ip("netns", "pids", space.name).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


@pytest.fixture
def spaces() -> Iterator[tuple[Space, Space]]:
    """Two namespaces on one wire; skipped where this user may not make them."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command (iproute2)")
    tag = f"rl{os.getpid() % 100000}"
    first, second = Space(f"{tag}a", "10.77.0.1"), Space(f"{tag}b", "10.77.0.2")
    with ExitStack() as stack:
        try:
            for space in (first, second):
                ip("netns", "add", space.name)
                stack.callback(ip, "netns", "del", space.name)
                stack.callback(_empty, space)
            ip("link", "add", f"{tag}0", "netns", first.name, "type", "veth", "peer", f"{tag}1", "netns", second.name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        for space, other, device in ((first, second, f"{tag}0"), (second, first, f"{tag}1")):
            ip("-n", space.name, "link", "set", "lo", "up")
            ip("-n", space.name, "address", "add", f"{space.address}/24", "dev", device)
            ip("-n", space.name, "link", "set", device, "up")
            # Ray asks the routing table which address is its own.
            ip("-n", space.name, "route", "add", "default", "via", other.address)
        yield first, second


@pytest.fixture
def head(spaces: tuple[Space, Space]) -> Iterator[str]:
    """HOST:PORT of a Ray cluster with one node of one CPU in each namespace."""
    first, second = spaces
    address = f"{first.address}:{PORT}"
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ns", ignore_cleanup_errors=True))  # short
        for space, words in (
            (first, ("--head", "--port", str(PORT), "--include-dashboard=false", "--temp-dir", folder)),
            (second, ("--address", address)),
        ):
            node = ("--block", "--num-cpus", "1", "--node-ip-address", space.address)
            process = subprocess.Popen(
                space.command(sys.executable, "-m", "ray.scripts.scripts", "start", *words, *node),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment(),
            )
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            _wait_for(process, "block forever")
        yield address


def _wait_for(process: subprocess.Popen[str], words: str) -> None:
    """Until the process has said so."""
    lines: list[str] = []
    timer = threading.Timer(120, process.kill)
    timer.start()
    for line in process.stdout or ():
        lines.append(line)
        if words in line:
            timer.cancel()
            return
    raise AssertionError("".join(lines))


def test_a_bench_runs_over_nodes_that_only_their_addresses_join(
    spaces: tuple[Space, Space], head: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = ["--shapes", "1x37x5x16", "--plans", "ulysses,ring", "--backends", "REFERENCE", "--rounds", "2"]
    settings = ["parallel.world_size=2", "run.device=cpu", f"cluster.address={head}", f"run.dir={folder}"]
    done = subprocess.run(
        spaces[0].command(sys.executable, "-m", "runtime", "bench", "attention", *words, *settings),
        capture_output=True,
        text=True,
        cwd=CHECKOUT,
        env=environment(),
        timeout=240,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    content = json.loads((folder / "bench.json").read_text())
    check_schema("bench", content)
    assert content["nodes"] == 2
    assert [rank["host"] for rank in content["ranks"]] == [space.address for space in spaces]
    assert [row["outcome"] for row in content["rows"]] == ["timed"] * 3
