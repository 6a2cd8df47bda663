"""The memory estimate of a rank, and the parameter counts behind it."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest

from configs.sources import PUBLISHED_PREFIX
from parallel.plan import Grid, Strategy, Stream, plan_streams
from runtime.memory import MemoryEstimate, attention_bytes, weight_bytes
from runtime.model_folder import folder_of, read_folder
from tests.wan_folders import SPECS, folder

TENSOR = 8 * 4 * 16 * 2
"""Bytes of 8 rows of 4 heads of 16 numbers in bfloat16."""


def _elements(transformer: Path) -> int:
    """The elements of all tensors in a component's safetensors files."""
    count = 0
    for file in transformer.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
        count += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return count


def test_the_weights_of_the_built_in_model_are_counted_exactly() -> None:
    path = "built-in:tiny-wan"
    models = read_folder(path, weights=False).models.values()
    elements = _elements(folder_of(path) / "transformer")
    assert weight_bytes(models, "float32") == 4 * elements
    assert weight_bytes(models, "bfloat16") == 2 * elements


@pytest.mark.parametrize("name", SPECS)
def test_the_parameters_of_every_wan_pipeline_are_counted_exactly(name: str, tmp_path: Path) -> None:
    path = folder(name, tmp_path)
    for component, facts in read_folder(str(path), weights=False).models.items():
        assert facts.parameters == _elements(path / component)


@pytest.mark.parametrize(
    ("name", "parameters"),
    # as diffusers' WanTransformer3DModel has them on the meta device
    [
        ("wan2.1-t2v-1.3b", [1_418_996_800]),
        ("wan2.1-t2v-14b", [14_288_491_584]),
        ("wan2.1-i2v-14b", [16_394_878_784]),
        ("wan2.2-t2v-a14b", [14_288_491_584, 14_288_491_584]),
        ("wan2.2-ti2v-5b", [4_999_787_712]),
    ],
)
def test_a_published_model_has_its_number_of_parameters(name: str, parameters: list[int]) -> None:
    models = read_folder(PUBLISHED_PREFIX + name, weights=False).models.values()
    assert [facts.parameters for facts in models] == parameters


@pytest.mark.parametrize(
    ("grid", "strategy", "tensors"),
    [
        (Grid(), "local", 4 * 2),  # Q, K, V and output of all 16 rows
        (Grid(2), "ulysses", 4 + 2 * 3 + 2 * 1),  # own rows, Q, K and V sent and received, output sent and received
        (Grid(1, 2), "ring", 4 + 2 * 2),  # own rows, two blocks of keys and values
        (Grid(1, 2), "gather_kv", 4 + 2 * 2),  # own rows, the keys and values of both places
    ],
)
def test_an_attention_call_counts_own_rows_and_exchange_buffers(grid: Grid, strategy: Strategy, tensors: int) -> None:
    plan = plan_streams((Stream("video", 16),), 4, grid, strategy)
    assert attention_bytes(plan, head_size=16, element_size=2) == tensors * TENSOR


def test_the_busiest_rank_decides() -> None:
    fewer, uneven, more = (
        attention_bytes(plan_streams((Stream("video", rows),), 4, Grid(2), "ulysses"), 16, 2) for rows in (16, 17, 18)
    )
    assert fewer < uneven <= more


def test_an_estimate_is_shown_in_readable_units() -> None:
    text = str(MemoryEstimate(weights=26 * 2**30, attention=3 * 2**20))
    assert text == "each rank needs about 26.0 GiB for weights and 3.0 MiB for an attention call (estimate)"
