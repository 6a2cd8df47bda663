"""One attention layer: what it refuses, what it reports, and where it takes its context from."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from backends.interface import AttentionBackend, AttentionMetadata, Capabilities, Variant
from configs.faults import FaultError
from configs.schema import ParallelConfig
from parallel.attention import Attention
from parallel.context import AttentionContext, attention_context, current_context
from parallel.mesh import Mesh
from parallel.plan import plan_sequence
from tests.exact import TOLERANCE, attention64, random_qkv, relative_error
from tests.parallel.layers import CPU, ONE_RANK, collecting, context_of

HEADS, HEAD_SIZE, LENGTH = 4, 16, 9
FIRST_OF_TWO = Mesh(0, 2, CPU)  # without groups: an exchange would fail
MASKLESS = {"MASKLESS": f"{__name__}.MasklessBackend"}


class MasklessBackend(AttentionBackend):
    variants = (Variant("maskless", "backends.kernels.torch_sdpa.TorchSdpaImpl", takes=Capabilities(masks=("none",))),)

    @staticmethod
    def get_name() -> str:
        return "MASKLESS"


@pytest.fixture(autouse=True)
def no_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    def collective(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective was started")

    monkeypatch.setattr(dist, "all_to_all_single", collective)


def layer_of(mesh: Mesh = ONE_RANK, kind: str = "self", **options: Any) -> Attention:
    context = options.pop("context", None) or context_of(mesh)
    return Attention(HEADS, HEAD_SIZE, role=kind, kind=kind, context=context, name="blocks.3.attn1", **options)  # type: ignore[arg-type]


def tensor(rows: int = LENGTH, heads: int = HEADS, size: int = HEAD_SIZE, batch: int = 2) -> torch.Tensor:
    return torch.zeros(batch, rows, heads, size)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query", [tensor(heads=3), tensor(size=8), tensor(heads=8)])
def test_a_query_of_other_heads_than_the_layers_is_refused(query: torch.Tensor) -> None:
    expected = f"blocks.3.attn1: query is {tuple(query.shape)}; the layer has 4 heads of 16"
    with pytest.raises(ValueError, match=re.escape(expected)):
        layer_of()(query, tensor(), tensor())


def test_a_query_of_other_dimensions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"query is of shape \(2, 9, 64\); give a tensor \[B, S, H, D\]"):
        layer_of()(tensor().flatten(2), tensor(), tensor())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (tensor(heads=2), tensor(heads=2)),
        (tensor(size=8), tensor()),
        (tensor(), tensor(size=8)),
        (tensor(batch=1), tensor()),
        (tensor(), tensor(rows=8)),
    ],
)
def test_keys_and_values_that_do_not_match_are_refused(key: torch.Tensor, value: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"key .* and value .* must both be \(2, 9, 4, 16\)"):
        layer_of()(tensor(), key, value)


def test_fewer_kv_heads_are_taken_if_the_layer_says_so() -> None:
    qkv = random_qkv(2, LENGTH, LENGTH, HEADS, 2, HEAD_SIZE, torch.float32)
    out = layer_of(num_kv_heads=2)(*qkv)
    assert relative_error(out, attention64(*qkv, scale=HEAD_SIZE**-0.5)) <= TOLERANCE[torch.float32]
    with pytest.raises(ValueError, match=r"must both be \(2, 9, 2, 16\)"):
        layer_of(num_kv_heads=2)(tensor(), tensor(), tensor())


@pytest.mark.parametrize("which", [0, 1, 2])
def test_inputs_that_require_gradients_are_refused_before_any_exchange(which: int) -> None:
    qkv = [tensor(5), tensor(5), tensor(5)]
    qkv[which].requires_grad_()
    context = context_of(FIRST_OF_TWO, backend="MASKLESS", register=MASKLESS)
    with pytest.raises(FaultError, match="MASKLESS: differentiation is not supported"):
        layer_of(context=context)(*qkv, plan=plan_sequence(LENGTH, HEADS, 2))


def test_inputs_that_require_gradients_are_refused_by_a_backend_without_a_backward_pass() -> None:
    qkv = [tensor().requires_grad_(), tensor(), tensor()]
    layer = layer_of(context=context_of(backend="MASKLESS", register=MASKLESS))
    with pytest.raises(FaultError, match="MASKLESS: differentiation is not supported"):
        layer(*qkv)
    with torch.no_grad():
        assert layer(*qkv).shape == qkv[0].shape


def test_a_sharded_sequence_without_a_plan_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a sharded sequence needs plan=\.\.\."):
        layer_of(FIRST_OF_TWO)(tensor(), tensor(), tensor())


@pytest.mark.parametrize(
    ("query_rows", "key_rows", "length", "heads", "said"),
    [
        (5, 5, 8, HEADS, "5 query rows at hand; the plan gives this rank 4"),
        (4, 5, 9, HEADS, "4 query rows at hand; the plan gives this rank 5"),
        (5, 4, 9, HEADS, "4 key rows at hand; the plan gives this rank 5"),
        (9, 9, 9, HEADS, "9 query rows at hand; the plan gives this rank 5"),
        (5, 5, 9, 8, "the layer has 4 heads and 4 KV heads, and the plan 8 and 8; make it with plan_of"),
    ],
)
def test_tensors_that_do_not_match_the_plan_are_refused(
    query_rows: int, key_rows: int, length: int, heads: int, said: str
) -> None:
    plan = plan_sequence(length, heads, 2)
    with pytest.raises(ValueError, match=said):
        layer_of(FIRST_OF_TWO)(tensor(query_rows), tensor(key_rows), tensor(key_rows), plan=plan)


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_plan_of_another_number_of_ranks_is_refused(world_size: int) -> None:
    plan = plan_sequence(LENGTH, HEADS, world_size)
    rows = len(plan.rows[0])
    with pytest.raises(ValueError, match=f"the plan is for {world_size} ranks, and the layer has 2"):
        layer_of(FIRST_OF_TWO)(tensor(rows), tensor(rows), tensor(rows), plan=plan)


def test_a_plan_without_this_rank_is_refused() -> None:
    plan = plan_sequence(LENGTH, HEADS, 1)
    with pytest.raises(ValueError, match="the plan is for 1 ranks"):
        layer_of(Mesh(1, 2, CPU))(tensor(), tensor(), tensor(), plan=plan)


@pytest.mark.parametrize("options", [{"kind": "self"}, {"kind": "cross"}])
def test_causal_attention_to_another_number_of_keys_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="causal attention of 9 queries to 7 keys is ambiguous"):
        layer_of(causal=True, **options)(tensor(), tensor(7), tensor(7))


def test_a_mask_on_a_backend_that_takes_none_is_refused() -> None:
    layer = layer_of(context=context_of(backend="MASKLESS", register=MASKLESS))
    mask = AttentionMetadata(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool))
    assert layer(tensor(), tensor(), tensor()).shape == (2, LENGTH, HEADS, HEAD_SIZE)
    with pytest.raises(FaultError, match="MASKLESS: a full mask is not supported; it takes none"):
        layer(tensor(), tensor(), tensor(), mask)


@pytest.mark.parametrize(
    "mask",
    [
        torch.zeros(1, 1, LENGTH, LENGTH),
        torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.int64),
        torch.ones(LENGTH, LENGTH, dtype=torch.bool),
        torch.ones(1, 1, 1, LENGTH, LENGTH, dtype=torch.bool),
    ],
)
def test_a_mask_of_another_form_is_refused(mask: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"a mask is torch\.bool, \[B or 1, 1 or H, Sq or 1, Sk\], not torch\."):
        layer_of()(tensor(), tensor(), tensor(), AttentionMetadata(mask))


@pytest.mark.parametrize("shape", [(3, 1, 9, 9), (1, 1, 8, 9), (1, 1, 9, 8), (1, 1, 9, 1), (1, 3, 9, 9)])
def test_a_mask_of_another_size_is_refused(shape: tuple[int, ...]) -> None:
    mask = AttentionMetadata(torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match="the call is of batch 2, with 4 heads, 9 query rows and 9 keys"):
        layer_of()(tensor(), tensor(), tensor(), mask)


def test_a_mask_of_a_ranks_own_rows_is_refused_before_any_exchange() -> None:
    plan = plan_sequence(LENGTH, HEADS, 2)
    mask = AttentionMetadata(torch.ones(1, 1, 5, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="with 4 heads, 9 query rows and 9 keys"):
        layer_of(FIRST_OF_TWO)(tensor(5), tensor(5), tensor(5), mask, plan=plan)


def test_a_plan_of_another_strategy_is_refused() -> None:
    layer = layer_of(context=context_of(FIRST_OF_TWO, backend="REFERENCE", parallel=ParallelConfig(strategy="ring")))
    with pytest.raises(ValueError, match="its calls go by ring 1x2, and the plan is for ulysses 2x1; make a plan with"):
        layer(tensor(5), tensor(5), tensor(5), plan=plan_sequence(LENGTH, HEADS, 2))


def test_a_backend_that_cannot_serve_is_refused_at_construction() -> None:
    with pytest.raises(FaultError, match=r"attention\.default=FLASH_ATTN"):
        layer_of(context=context_of(backend="FLASH_ATTN"))


# --- the call -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 0.7])
def test_the_scale_is_that_of_the_head_size_unless_given(scale: float | None) -> None:
    qkv = random_qkv(2, LENGTH, LENGTH, HEADS, HEADS, HEAD_SIZE, torch.float32)
    exact = attention64(*qkv, scale=0.25 if scale is None else scale)
    assert relative_error(layer_of(softmax_scale=scale)(*qkv), exact) <= TOLERANCE[torch.float32]


def test_one_rank_needs_no_plan_and_takes_one() -> None:
    qkv = random_qkv(2, LENGTH, LENGTH, HEADS, HEADS, HEAD_SIZE, torch.float32)
    layer = layer_of()
    assert layer.strategy == "local"
    assert torch.equal(layer(*qkv), layer(*qkv, plan=plan_sequence(LENGTH, HEADS, 1)))


def test_a_mask_reaches_the_kernel_on_one_rank() -> None:
    qkv = random_qkv(2, LENGTH, LENGTH, HEADS, HEADS, HEAD_SIZE, torch.float32)
    mask = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[0, :, 4] = False
    out = layer_of()(*qkv, AttentionMetadata(mask))
    assert relative_error(out, attention64(*qkv, scale=0.25, mask=mask)) <= TOLERANCE[torch.float32]
    assert not bool(out[0, 4].any())


# --- the report -----------------------------------------------------------------------------------------------------


def test_a_layer_reports_its_first_call_once() -> None:
    context, events = collecting(backend="REFERENCE")
    layer = Attention(
        HEADS, HEAD_SIZE, role="cross.image", kind="cross", context=context, name="blocks.0.attn2.image", model="dit"
    )
    assert events == []
    for _ in range(3):
        layer(tensor(), tensor(7), tensor(7))
    (event,) = events
    assert (event.model, event.layer, event.strategy) == ("dit", "blocks.0.attn2.image", "local")
    assert event.kernel == "backends.kernels.reference.plain_attention"
    assert event.query_rows == event.query == (2, LENGTH, HEADS, HEAD_SIZE)
    assert event.key == (2, 7, HEADS, HEAD_SIZE)
    assert event.selection == layer.selection
    assert (event.selection.role, event.selection.category, event.selection.backend) == (
        "cross.image",
        "cross",
        "REFERENCE",
    )


def test_a_call_that_is_refused_reports_nothing() -> None:
    context, events = collecting()
    layer = layer_of(context=context)
    with pytest.raises(ValueError, match="query is"):
        layer(tensor(heads=3), tensor(), tensor())
    assert events == []
    layer(tensor(), tensor(), tensor())
    assert len(events) == 1


def test_the_category_of_a_role_can_be_given() -> None:
    assert layer_of(role_category="audio").selection.category == "audio"
    assert layer_of().selection.category == "self"


# --- the context ----------------------------------------------------------------------------------------------------


def test_a_layer_takes_the_context_that_it_is_constructed_in() -> None:
    context = context_of()
    with attention_context(context):
        layer = Attention(HEADS, HEAD_SIZE, role="self", kind="self")
        assert current_context() is context
    assert layer.context is context
    assert layer(tensor(), tensor(), tensor()).shape == (2, LENGTH, HEADS, HEAD_SIZE)


def test_a_context_that_is_given_goes_before_the_one_around() -> None:
    around, given = context_of(), context_of()
    with attention_context(around):
        assert layer_of(context=given).context is given


def fail_inside(context: AttentionContext) -> None:
    with attention_context(context):
        assert current_context() is context
        raise RuntimeError("inside")


def test_contexts_nest_and_end_even_after_an_error() -> None:
    outer = context_of()
    with attention_context(outer):
        with pytest.raises(RuntimeError, match="inside"):
            fail_inside(context_of())
        assert current_context() is outer
    with pytest.raises(LookupError, match=r"pass context=\.\.\., or construct inside"):
        current_context()


def test_a_layer_without_a_context_is_refused() -> None:
    with pytest.raises(LookupError, match="no attention context"):
        Attention(HEADS, HEAD_SIZE, role="self", kind="self")
