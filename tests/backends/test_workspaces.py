"""What kernels share: kept for the keys of late, in threads too; scratch memory by device and stream."""

from __future__ import annotations

import random
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from backends.kernels import workspaces
from backends.kernels.workspaces import Recent, Workspace, place_of


def test_the_keys_that_were_asked_for_last_stay() -> None:
    kept: Recent[int, object] = Recent(2)
    first, second = kept.get(1, object), kept.get(2, object)
    assert kept.get(1, object) is first
    kept.get(3, object)  # in the place of 2
    assert kept.get(1, object) is first
    assert kept.get(2, object) is not second
    assert len(kept) == 2
    kept.drop(2)
    kept.drop(7)
    assert len(kept) == 1


def test_threads_may_share_it() -> None:
    kept: Recent[int, int] = Recent(4)
    faults: list[str] = []

    def work(seed: int) -> None:
        drawn = random.Random(seed)
        for _ in range(3000):
            key = drawn.randrange(6)
            try:
                if kept.get(key, lambda: key) != key:  # noqa: B023  # called at once
                    faults.append(f"another value for {key}")
            except (KeyError, RuntimeError) as error:
                faults.append(repr(error))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert faults == []
    assert len(kept) == 4


def test_a_workspace_is_of_zeros_and_shared_by_the_kernels_of_a_place() -> None:
    workspace = Workspace(64)
    buffer = workspace.on(torch.device("cpu"))
    assert buffer.dtype == torch.uint8
    assert buffer.tolist() == [0] * 64
    assert workspace.on(torch.device("cpu")) is buffer
    workspace.clear()
    assert workspace.on(torch.device("cpu")) is not buffer


def test_streams_of_a_device_have_workspaces_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    current = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    device, other = torch.device("cuda", 0), torch.device("cuda", 1)
    assert (place_of(device), place_of(other)) == ((device, 7), (other, 7))
    monkeypatch.setattr(workspaces.torch, "zeros", lambda size, dtype, device: object())
    workspace = Workspace(64)
    first = workspace.on(device)
    assert workspace.on(other) is not first
    current.cuda_stream = 8
    assert workspace.on(device) is not first
    current.cuda_stream = 7
    assert workspace.on(device) is first


def test_workspaces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    current = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(workspaces.torch, "zeros", lambda size, dtype, device: object())
    workspace = Workspace(64, limit=2)
    for current.cuda_stream in range(5):
        workspace.on(torch.device("cuda", 0))
    assert len(workspace._buffers) == 2
