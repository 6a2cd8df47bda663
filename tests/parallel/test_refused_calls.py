"""Every built-in backend, over the features, dtypes and gradients of calls: those that its declaration takes reach the
kernel, and all others are refused before it.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import parallel.context
from backends.kernels.flash_attn_hub import HubImpl
from backends.platforms.facts import DeviceFacts, parse_device
from backends.registry import Registry
from configs.faults import FaultError
from configs.schema import AttentionConfig, AttentionSpec, ParallelConfig
from kernel_grid.cases import DTYPES, FEATURES, Call
from kernel_grid.measure import metadata_of
from parallel.attention import Attention
from parallel.context import AttentionContext
from parallel.transport.torch_dist import TorchTransport
from tests.parallel.layers import CPU, ONE_RANK

HEADS, SIZE, ROWS = 4, 128, 9
LABELS = ("cuda:9.0", "cuda:10.0", "cuda:12.0")


class ReachedError(Exception):
    """The kernel was called."""


def device_of(name: str) -> DeviceFacts:
    """A chip that the backend has kernels for, with every package."""
    backend = Registry.built_in().get_class(name)
    devices = [parse_device(label, {}, all_packages=True) for label in LABELS]
    return next(d for d in devices if any(variant.chip_fault(d) is None for variant in backend.variants))


def layer_of(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch, *, causal: bool = False) -> Attention:
    monkeypatch.setattr(parallel.context, "import_faults", lambda backend, variant, options: ())
    monkeypatch.setattr(HubImpl, "prepare", lambda self, device, dtype: None)  # it would fetch the kernel
    config = AttentionConfig(default=AttentionSpec(name))
    context = AttentionContext(
        ONE_RANK,
        TorchTransport(ONE_RANK),
        Registry.built_in(),
        config,
        device_of(name),
        dtype,
        lambda event: None,
        parallel=ParallelConfig(),
    )
    layer = Attention(HEADS, SIZE, role="self", kind="self", causal=causal, context=context)
    assert layer.impl is not None

    def reached(*args: Any, **kwargs: Any) -> Any:
        raise ReachedError

    monkeypatch.setattr(type(layer.impl), "forward", reached)
    monkeypatch.setattr(type(layer.impl), "plan", lambda self, shape: None)
    return layer


@pytest.mark.parametrize("learning", ["nothing", "inputs", "masks and sinks"])
@pytest.mark.parametrize("name", Registry.built_in().names())
def test_what_is_claimed_reaches_the_kernel_and_nothing_else_does(
    name: str, learning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(name, "bfloat16", monkeypatch)
    variant, counted = layer.rules.variant, {True: 0, False: 0}
    for feature, dtype in itertools.product(FEATURES, DTYPES):
        call = Call(dtype, SIZE, HEADS, False, feature, ROWS, ROWS)
        metadata = metadata_of(call, CPU, getattr(torch, dtype))
        learned = [t for t in (metadata.bias, metadata.sinks) if t is not None and learning == "masks and sinks"]
        for tensor in learned:
            tensor.requires_grad_()
        inputs = learning == "inputs"
        qkv = [torch.zeros(2, ROWS, HEADS, SIZE, dtype=getattr(torch, dtype), requires_grad=inputs) for _ in "qkv"]
        asked = call.requirements.carrying(FEATURES[feature], gradient=inputs or bool(learned))
        asked = replace(asked, learned_gradient=bool(learned))
        taken = not list(variant.takes.faults(asked))
        counted[taken] += 1
        with pytest.raises(ReachedError if taken else FaultError):
            layer(qkv[0], qkv[1], qkv[2], metadata)
    assert counted[False] or name == "REFERENCE"
    assert counted[True] or (learning == "inputs" and not variant.takes.gradient)
