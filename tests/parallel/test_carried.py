"""What calls carry: it is obeyed by every rank, or refused, and never dropped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from backends.interface import (
    AttentionBackend,
    AttentionMetadata,
    Capabilities,
    Features,
    PackedLengths,
    Variant,
)
from configs.faults import FaultError
from parallel.attention import Attention
from parallel.mesh import Mesh
from parallel.plan import plan_sequence
from tests.exact import TOLERANCE, relative_error
from tests.parallel.contract import CARRIED, HEADS, LENGTH, SIZE, drawn, layer_of, qkv
from tests.parallel.layers import ONE_RANK, context_of, rows_of
from tests.ranks import Ranks

GlooRanks = Callable[[int], Ranks]


def exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, carried: AttentionMetadata) -> torch.Tensor:
    """Row by row in fp64, apart from the package's own reference."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    documents = carried.packed or PackedLengths((LENGTH,), (LENGTH,))
    document = [index for index, rows in enumerate(documents.query) for _ in range(rows)]
    for batch, row, head in ((b, r, h) for b in range(len(query)) for r in range(LENGTH) for h in range(HEADS)):
        scores = key[batch, :, head].double() @ query[batch, row, head].double() * SIZE**-0.5
        if carried.soft_cap:
            scores = carried.soft_cap * torch.tanh(scores / carried.soft_cap)
        seen = torch.tensor([document[row] == document[column] for column in range(LENGTH)])
        if carried.window is not None:
            before, after = carried.window
            low, high = (0 if before is None else row - before), (LENGTH if after is None else row + after)
            seen &= torch.tensor([low <= column <= high for column in range(LENGTH)])
        if carried.mask is not None:
            seen &= carried.mask.expand(len(query), HEADS, LENGTH, LENGTH)[batch, head, row]
        weights = torch.where(seen, scores.exp(), 0.0)
        total = weights.sum() + (0.0 if carried.sinks is None else float(carried.sinks[head].double().exp()))
        out[batch, row, head] = (weights / total.clamp_min(1e-300)) @ value[batch, :, head].double()
    return out


@pytest.mark.parametrize("name", CARRIED)
def test_the_reference_serves_everything_that_a_call_can_carry(name: str) -> None:
    out = layer_of(context_of(backend="REFERENCE"))(*qkv(), CARRIED[name])
    assert relative_error(out, exact(*qkv(), CARRIED[name])) <= TOLERANCE[torch.float32]


def on_rank(mesh: Mesh, name: str, backend: str) -> torch.Tensor:
    plan = plan_sequence(LENGTH, HEADS, mesh.world_size)
    query, key, value = (rows_of(tensor, plan, mesh.rank) for tensor in qkv())
    return layer_of(context_of(mesh, backend=backend))(query, key, value, CARRIED[name], plan=plan)


@pytest.mark.ray
@pytest.mark.parametrize("name", CARRIED)
def test_what_a_call_carries_reaches_the_right_heads_of_every_rank(gloo_ranks: GlooRanks, name: str) -> None:
    one = on_rank(ONE_RANK, name, "REFERENCE")
    two = torch.cat(gloo_ranks(2).run(on_rank, name, "REFERENCE"), dim=1)
    assert relative_error(two, one) <= 1e-6


@pytest.mark.parametrize("name", ["window", "soft_cap", "sinks", "packed"])
def test_what_a_backend_does_not_take_is_refused_and_not_dropped(name: str) -> None:
    with pytest.raises(FaultError, match=r"TORCH_SDPA: .* not supported; choose another backend for self"):
        layer_of()(*qkv(), CARRIED[name])


@pytest.mark.parametrize("backend", ["REFERENCE", "TORCH_SDPA"])
def test_v_may_have_another_head_size(backend: str) -> None:
    query, key, value = qkv()
    layer = layer_of(context_of(backend=backend), value_head_size=6)
    whole = layer_of(context_of(backend=backend))(query, key, value)
    assert relative_error(layer(query, key, value[..., :6]), whole[..., :6].double()) <= 1e-6
    with pytest.raises(ValueError, match=r"must be \(2, 12, 4, 16\) and \(2, 12, 4, 6\)"):
        layer(query, key, value)


def test_an_automatic_choice_takes_what_the_calls_are_said_to_carry() -> None:
    assert layer_of(features=Features(soft_cap=True)).selection.backend == "REFERENCE"
    assert layer_of(features=Features(mask="per_head")).selection.backend == "TORCH_SDPA"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (AttentionMetadata(sinks=torch.zeros(3)), r"sinks are \(3,\); they are one for each of 4 heads"),
        (AttentionMetadata(soft_cap=0.0), "a finite number above 0"),
        (AttentionMetadata(soft_cap=float("nan")), "a finite number above 0"),
        (AttentionMetadata(window=(-1, 0)), "None or at least 0"),
        (AttentionMetadata(packed=PackedLengths((5,), (5,))), "the call has 12 and 12"),
        (AttentionMetadata(packed=PackedLengths((12,), (5, 7))), "the documents have"),
        (AttentionMetadata(packed=PackedLengths((13, -1), (13, -1))), "negative length"),
    ],
)
def test_what_makes_no_sense_is_refused(metadata: AttentionMetadata, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_of(context_of(backend="REFERENCE"))(*qkv(), metadata)


@pytest.mark.parametrize("backend", ["REFERENCE", "TORCH_SDPA"])
def test_rows_that_see_nothing_have_no_part_in_gradients(backend: str) -> None:
    tensors = [tensor.requires_grad_() for tensor in qkv()]
    mask = drawn(2, 1, LENGTH, LENGTH)
    mask[:, :, 3] = False
    layer_of(context_of(backend=backend))(*tensors, AttentionMetadata(mask)).sum().backward()
    assert all(tensor.grad is not None and bool(torch.isfinite(tensor.grad).all()) for tensor in tensors)
    assert not bool(tensors[0].grad[:, 3].any())  # type: ignore[index]


@pytest.mark.parametrize(
    "carried",
    [
        AttentionMetadata(window=(1, 1)),
        AttentionMetadata(drawn(1, 1, LENGTH, LENGTH)),
        AttentionMetadata(packed=PackedLengths((5, 7), (5, 7))),
    ],
)
def test_what_is_told_of_each_row_is_refused_where_a_rank_has_some_of_them(carried: AttentionMetadata) -> None:
    context = context_of(Mesh(1, 2, torch.device("cpu")), backend="REFERENCE")
    layer = Attention(HEADS, SIZE, role="cross", kind="cross", context=context)
    with pytest.raises(ValueError, match="covers all query rows, and this rank holds some of them; "):
        layer(*qkv(), carried)
    assert layer(*qkv(), AttentionMetadata(drawn(2, 1, 1, LENGTH))).shape == qkv()[0].shape


class SinksBackend(AttentionBackend):
    variants = (Variant("sinks", "backends.kernels.reference.ReferenceImpl", takes=Capabilities(sinks=True)),)

    @staticmethod
    def get_name() -> str:
        return "SINKS"


def test_sinks_that_are_learned_count_as_gradients() -> None:
    sinks = torch.nn.Parameter(torch.zeros(HEADS))
    plan = plan_sequence(2 * LENGTH, HEADS, 2)
    register = {"SINKS": f"{__name__}.SinksBackend"}
    layer = layer_of(context_of(Mesh(0, 2, torch.device("cpu")), backend="SINKS", register=register))
    with pytest.raises(FaultError, match="SINKS: differentiation is not supported"):
        layer(*qkv(), AttentionMetadata(sinks=sinks), plan=plan)


class Fp32Backend(AttentionBackend):
    variants = (Variant("fp32", "backends.kernels.reference.ReferenceImpl", takes=Capabilities(dtypes=("float32",))),)

    @staticmethod
    def get_name() -> str:
        return "FP32"


def test_a_call_in_another_dtype_than_the_backend_takes_is_refused() -> None:
    layer = layer_of(context_of(backend="FP32", register={"FP32": f"{__name__}.Fp32Backend"}))
    with pytest.raises(FaultError, match="dtype float64 is not supported; it takes float32"):
        layer(*(tensor.double() for tensor in qkv()))


def test_metadata_stays_as_it_was() -> None:
    carried = CARRIED["per_head"]
    with pytest.raises(AttributeError):
        carried.mask = None  # type: ignore[misc]
    first, second = (layer_of(context_of(backend="REFERENCE"))(*qkv(), carried) for _ in range(2))
    assert torch.equal(first, second)
