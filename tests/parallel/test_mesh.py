"""Groups end with the process, whoever still holds the mesh."""

from __future__ import annotations

import atexit
import gc
import weakref
from typing import Any

import pytest
import torch

from parallel.mesh import Mesh
from parallel.plan import Grid

CPU = torch.device("cpu")


def test_a_mesh_lets_go_of_its_groups_when_python_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda *handler: handlers.append(handler))
    Mesh(0, 1, CPU)
    assert handlers == []  # nothing to let go of
    groups: list[Any] = [type("Group", (), {})() for _ in range(2)]
    gone = [weakref.ref(group) for group in groups]
    mesh = Mesh(0, 2, CPU, *groups)
    assert mesh.groups(Grid(2)).ulysses is groups[0]
    del groups
    ((handler, argument),) = handlers
    handler(argument)
    gc.collect()
    assert [group() for group in gone] == [None, None]
    assert (mesh.data, mesh.control) == (None, None)
    del mesh
    gc.collect()
    handler(argument)  # of a mesh that is gone there is nothing to do
