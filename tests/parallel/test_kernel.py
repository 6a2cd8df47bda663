"""What a layer hands to its kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backends.interface import AttentionMetadata
from backends.kernels import torch_sdpa
from backends.kernels.reference import ReferenceImpl
from parallel.kernel import aligned
from tests.exact import random_qkv
from tests.parallel.layers import context_of, layer_with, same_bits
from tests.parallel.suite.drawn import laid_out

LAYOUTS = ("contiguous", "heads_first", "batch_last", "sliced", "strided")


def is_aligned(tensor: torch.Tensor, step: int) -> bool:
    places = (tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:-1]))
    return tensor.stride(-1) == 1 and not any(place % step for place in places)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_begin_where_a_kernel_can_load_them(layout: Any) -> None:
    whole = torch.arange(2 * 5 * 3 * 16, dtype=torch.bfloat16).reshape(2, 5, 3, 16)
    _, view = laid_out(whole, layout)
    ready = aligned(view, 16)
    assert same_bits(ready, whole)
    assert is_aligned(ready, 16)
    assert (ready is view) == is_aligned(view, 16)
    assert aligned(view, 1) is view


def test_what_begins_between_is_copied_and_what_no_copy_mends_is_not() -> None:
    memory = torch.zeros(1 + 2 * 3 * 16, dtype=torch.bfloat16)
    late = memory[1:].view(1, 2, 3, 16)
    assert late.is_contiguous()
    assert aligned(late, 16).data_ptr() % 16 == 0
    odd = torch.zeros(1, 2, 3, 5)
    assert aligned(odd, 16) is odd


@pytest.mark.parametrize("layout", [*LAYOUTS, "parts of rows", "some heads of more"])
def test_in_a_graph_rows_begin_where_a_kernel_can_load_them(layout: Any) -> None:
    whole = torch.arange(2 * 5 * 3 * 16, dtype=torch.bfloat16).reshape(2, 5, 3, 16)
    if layout == "parts of rows":
        view = torch.zeros(2, 5, 3, 32, dtype=torch.bfloat16)[..., 4:20].copy_(whole)
    elif layout == "some heads of more":
        view = torch.zeros(2, 5, 4 * 16, dtype=torch.bfloat16)[..., 4:52].unflatten(-1, (3, 16)).copy_(whole)
    else:
        _, view = laid_out(whole, layout)
    traced = torch.compile(lambda tensor: aligned(tensor, 16), fullgraph=True, backend="eager")
    assert is_aligned(traced(view), 16)
    assert same_bits(traced(view), whole)


def test_torchs_kernel_gets_rows_that_it_can_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of others, cuDNN, which torch takes on Hopper, reads what lies beside them."""
    seen: list[torch.Tensor] = []
    real = torch_sdpa.scaled_dot_product_attention

    def watched(*qkv: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.extend(tensor.transpose(1, 2) for tensor in qkv)
        return real(*qkv, **options)

    monkeypatch.setattr(torch_sdpa, "scaled_dot_product_attention", watched)
    views = [laid_out(tensor, "sliced")[1] for tensor in random_qkv(2, 7, 7, 3, 3, 16, torch.float32)]
    layer_with(context_of(backend="TORCH_SDPA"), 3, 16)(*views)
    assert all(is_aligned(tensor, 16) for tensor in seen)
    assert len(seen) == 3


@pytest.mark.parametrize(("batch", "rows", "keys"), [(2, 0, 5), (2, 5, 0), (0, 5, 5), (2, 0, 0)])
def test_no_kernel_gets_a_call_without_rows(batch: int, rows: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They need not take one, and some do not; sinks are there nevertheless, and all that is learned has a gradient."""

    def refuses(*_: Any) -> Any:
        raise RuntimeError("no available kernel")

    monkeypatch.setattr(ReferenceImpl, "forward_with_lse", refuses)
    layer = layer_with(context_of(backend="REFERENCE"), 4, 8, kind="cross", value_head_size=6, lse=True)
    query, key = torch.randn(batch, rows, 4, 8), torch.randn(batch, keys, 4, 8)
    learned = [tensor.requires_grad_() for tensor in (query, key, torch.randn(batch, keys, 4, 6), torch.randn(4))]
    out, lse = layer.forward_with_lse(*learned[:3], AttentionMetadata(sinks=learned[3]))
    assert out.shape == (batch, rows, 4, 6)
    assert torch.equal(lse, learned[3].detach()[None, :, None].expand(batch, 4, rows))
    gradients = torch.autograd.grad(out.sum() + lse.sum(), learned)
    assert torch.equal(gradients[3], torch.full((4,), float(batch * rows)))
    assert not any(gradient.any() for gradient in gradients[:3])
    with torch.no_grad():
        _, lse = layer.forward_with_lse(*learned[:3], AttentionMetadata(sinks=learned[3]))
        kept = learned[3].clone()
        lse.add_(7)  # it is the caller's
        assert torch.equal(learned[3], kept)


class OwnModule(torch.nn.Module):
    """Has rows of its own to add, whatever it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: Any) -> torch.Tensor:
        self.calls += 1
        return query + self.weight


def test_a_models_own_module_gets_every_call() -> None:
    """It may have peers that wait for it."""
    module = OwnModule()
    layer = layer_with(context_of(), 3, 8, custom_attention=module, skip_sequence_parallel=True)
    nothing = torch.zeros(1, 0, 3, 8)
    assert layer(nothing, nothing, nothing).requires_grad
    assert torch.equal(layer(torch.zeros(1, 2, 3, 8), nothing, nothing), torch.ones(1, 2, 3, 8))
    assert module.calls == 2


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("step", [1, 16])
def test_a_kernel_gets_what_its_alignment_says(step: int, lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_with(context_of(backend="REFERENCE"), 3, 16)
    seen: list[torch.Tensor] = []
    name = "forward_with_lse" if lse else "forward"
    real = getattr(ReferenceImpl, name)

    def watched(self: ReferenceImpl, query: Any, key: Any, value: Any, *rest: Any) -> Any:
        seen.extend((query, key, value))
        return real(self, query, key, value, *rest)

    monkeypatch.setattr(ReferenceImpl, name, watched)
    monkeypatch.setattr(ReferenceImpl, "alignment", step)
    views = [laid_out(tensor, "sliced")[1] for tensor in random_qkv(2, 7, 7, 3, 3, 16, torch.float32)]
    (layer.forward_with_lse if lse else layer)(*views)
    assert [is_aligned(tensor, 16) for tensor in seen] == [step == 16] * 3
