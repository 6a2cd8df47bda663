"""What an import loads: a faulty configuration is answered without torch, and the driver never touches CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "ray", "diffusers", "transformers")

FLOORS = """
import importlib, json, pkgutil, sys
import backends, configs
loaded = []
for package in (configs, backends):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.startswith("backends.kernels"):
            importlib.import_module(module.name)
            loaded.append(module.name)
assert "backends.declared.flash_attn" in loaded and "configs.compose" in loaded, loaded
"""


def loaded_by(code: str) -> set[str]:
    """Which of the heavy libraries a fresh process has loaded after running the code."""
    report = f"import json, sys; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    command = [sys.executable, "-c", f"{code}\n{report}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_configs_and_the_declarations_of_backends_load_nothing_heavy() -> None:
    assert loaded_by(FLOORS) == set()


@pytest.mark.parametrize(
    "module",
    [
        "parallel.plan",
        "parallel.planner",
        "parallel.models",
        "parallel.models.wan",
        "parallel.events",
        "runtime.cli",
        "runtime.explain",
        "raylysses",
    ],
)
def test_planning_and_explaining_load_neither_torch_nor_ray(module: str) -> None:
    assert loaded_by(f"import {module}") == set()


@pytest.mark.parametrize("module", ["runtime.session", "runtime.generate"])
def test_the_driver_loads_ray_and_no_torch(module: str) -> None:
    assert loaded_by(f"import {module}") == {"ray"}


def test_choosing_for_a_model_loads_neither_torch_nor_ray() -> None:
    code = """
from backends.platforms.facts import parse_device
from backends.registry import Registry
from backends.selector import Selector
from configs.schema import AttentionConfig, ParallelConfig
from parallel.models import describe
from parallel.planner import plan_role
config = {"_class_name": "WanTransformer3DModel", "num_attention_heads": 40, "attention_head_dim": 128,
          "num_layers": 40, "patch_size": [1, 2, 2], "added_kv_proj_dim": 5120}
selector = Selector(parse_device("cuda:9.0", {}, True), AttentionConfig(), Registry())
for role in describe(config).roles:
    assert plan_role(role, "bfloat16", 4, ParallelConfig(), selector).selection.backend == "FLASH_ATTN"
"""
    assert loaded_by(code) == set()
