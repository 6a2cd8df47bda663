"""A model with attention layers can be copied, as for averaged weights."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import raylysses
from backends.interface import AttentionMetadata
from tests.parallel.contract import layer_of, qkv
from tests.parallel.layers import context_of
from tests.parallel.library_ranks import inputs, model, start


@pytest.mark.parametrize("backend", ["REFERENCE", "TORCH_SDPA", "FLEX_ATTENTION"])
def test_a_copied_layer_computes_the_same_among_the_same_ranks(backend: str) -> None:
    layer = layer_of(context_of(backend=backend))
    before = layer(*qkv())
    copied = copy.deepcopy(layer)
    assert copied is not layer
    assert copied.context is layer.context
    assert torch.equal(copied(*qkv()), before)
    del layer
    compiled = torch.compile(copied, backend="eager")
    assert torch.equal(compiled(*qkv()), before)


def copied_model() -> list[str]:
    """What comes of copying a model whose sequence is shared, and then one whose is not any more."""
    transformer = model()
    told = []
    with raylysses.sequence_parallel(transformer):
        try:
            copy.deepcopy(transformer)
        except TypeError as error:
            told.append(str(error))
    copied = copy.deepcopy(transformer)
    with torch.no_grad():
        same = torch.equal(copied(**inputs())[0], transformer(**inputs())[0])
    return [*told, f"the same: {same}"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_is_copied_before_or_after_its_sequence_is_shared(world_size: int, tmp_path: Path) -> None:
    for told, after in start(copied_model, world_size, tmp_path):
        assert told.startswith("a model whose sequence is shared cannot be copied, as its hooks belong to it alone")
        assert after == "the same: True"


class Doubling(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(2.0))

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        return query * self.factor


def test_a_models_own_module_is_copied_with_its_layer() -> None:
    layer = layer_of(context_of(), custom_attention=Doubling(), skip_sequence_parallel=True)
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        next(copied.parameters()).fill_(3.0)
    query, key, value = qkv()
    assert torch.equal(layer(query, key, value), query * 2)
    assert torch.equal(copied(query, key, value), query * 3)
