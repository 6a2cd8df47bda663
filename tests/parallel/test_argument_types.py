"""Arguments of another type are refused with value, rule and way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backends.interface import AttentionMetadata, PackedLengths
from parallel.attention import Attention
from parallel.mesh import Mesh
from parallel.pieces import take
from parallel.plan import Grid, Stream, plan_sequence, plan_streams
from parallel.rows import rows
from parallel.transport.torch_dist import TorchTransport
from tests.parallel.layers import CPU, context_of

PAIR = "it is a pair of whole numbers or None, (keys before, keys after), or None"
LENGTHS = "it is a PackedLengths of two tuples of whole numbers, or None"


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        *(("window", value, PAIR) for value in (5, (1,), (1, 2, 3), (1.0, None), ("1", 1), (True, 1), [1, 1])),
        ("packed", ((4,), (4,)), LENGTHS),
        ("packed", PackedLengths([4], (4,)), LENGTHS),  # type: ignore[arg-type]
        ("packed", PackedLengths((4.0,), (4,)), LENGTHS),  # type: ignore[arg-type]
        ("packed", PackedLengths((4,), None), LENGTHS),  # type: ignore[arg-type]
        ("soft_cap", "30", "it is a finite number above 0, or None"),
        ("soft_cap", True, "it is a finite number above 0, or None"),
        ("mask", [[True]], "it is a tensor, or None"),
        ("sinks", 0.5, "it is a tensor, or None"),
    ],
)
def test_another_type_is_refused_before_anything_runs(name: str, value: Any, rule: str) -> None:
    layer = Attention(2, 16, role="self", kind="self", context=context_of(backend="REFERENCE"), name="blocks.0.attn1")
    q = torch.randn(1, 4, 2, 16)
    with pytest.raises(ValueError, match=r"blocks\.0\.attn1: ") as caught:
        layer(q, q, q, AttentionMetadata(**{name: value}))
    assert str(caught.value) == f"blocks.0.attn1: {name} is {value!r}; {rule}"


def test_what_is_no_metadata_is_refused() -> None:
    layer = Attention(2, 16, role="self", kind="self", context=context_of(backend="REFERENCE"))
    q = torch.randn(1, 4, 2, 16)
    with pytest.raises(ValueError, match=r"metadata is {'window': None}; it is an AttentionMetadata, or None"):
        layer(q, q, q, {"window": None})  # type: ignore[arg-type]


def layer_of() -> Attention:
    return Attention(2, 16, role="self", kind="self", context=context_of(backend="REFERENCE"), name="layer")


@pytest.mark.parametrize("plan", [16, "plan", (Stream("video", 4),), Stream("video", 4)])
@pytest.mark.parametrize("mesh", [Mesh(0, 1, CPU), Mesh(0, 2, CPU)])
def test_a_plan_of_another_type_is_refused(plan: Any, mesh: Mesh) -> None:
    layer = Attention(2, 16, role="self", kind="self", context=context_of(mesh, backend="REFERENCE"), name="layer")
    q = torch.randn(1, 4, 2, 16)
    with pytest.raises(ValueError, match=r"^layer: plan is .*; make it with the layer's plan_of, or pass None$"):
        layer(q, q, q, plan=plan)


@pytest.mark.parametrize("streams", [("video",), (101,), ([Stream("video", 4)],), (Stream("video", 4), None), ()])
def test_streams_of_another_type_are_refused(streams: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^layer: plan_of: .*; give a Stream for each run of tokens, such as Stream\("
    ):
        layer_of().plan_of(*streams)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"length": -1}, "length of stream video is -1; give a whole number of at least 0"),
        ({"length": "8"}, "length of stream video is '8'; give a whole number of at least 0"),
        ({"length": 8.0}, "length of stream video is 8.0; give"),
        ({"length": True}, "length of stream video is True; give"),
        ({"length": 8, "sharded": 1}, "sharded of stream video is 1; give True or False"),
        ({"length": 8, "queries": None}, "queries of stream video is None; give True or False"),
        ({"length": 8, "name": 3}, "the name of a stream is 3; give text, such as 'video'"),
    ],
)
def test_a_stream_of_something_else_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        Stream(**({"name": "video"} | given))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((torch.zeros(1, 8), range(3)), r"take: rows are range\(0, 3\); give rows of a plan, such as plan.query_rows"),
        ((torch.zeros(1, 8), [0, 1]), r"take: rows are \[0, 1\]; give rows of a plan"),
        (([0.0], rows(range(1))), r"take: tensor is \[0.0\]; give a tensor, such as \[B, S, H, D\]"),
        (
            (torch.zeros(1, 8), rows(range(4, 9))),
            r"take: row 8 of a tensor \(1, 8\), dimension 1; give the tensor of all",
        ),
        ((torch.zeros(8), rows(range(4))), "take: dim is 1; the tensor has 1 dimensions"),
        ((torch.zeros(8), rows(range(4)), "0"), "take: dim is '0'; the tensor has 1 dimensions"),
    ],
)
def test_take_refuses_something_else(arguments: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        take(*arguments)


@pytest.mark.parametrize(
    ("given", "plan", "stream", "said"),
    [
        (torch.zeros(1, 4, 3), 16, None, "plan is 16; give a plan of plan_of"),
        (torch.zeros(1, 4, 3), plan_sequence(8, 2, 3), None, "the plan is for 3 ranks; there are 2"),
        (None, plan_sequence(8, 2, 2), None, r"rows are None; give \[B, 4, ...\], this rank's rows of sequence"),
        (torch.zeros(4), plan_sequence(8, 2, 2), None, r"rows are \(4,\); give \[B, 4, ...\]"),
        (torch.zeros(1, 8, 3), plan_sequence(8, 2, 2), None, r"rows are \(1, 8, 3\); give \[B, 4, ...\]"),
        (
            torch.zeros(1, 4, 3),
            plan_sequence(8, 2, 2),
            "text",
            "stream is 'text'; the plan has sequence: give a name or",
        ),
        (
            torch.zeros(1, 4, 3),
            plan_sequence(8, 2, 2),
            1,
            "stream is 1; the plan has sequence: give a name or an index",
        ),
    ],
)
def test_gather_rows_refuses_something_else(given: Any, plan: Any, stream: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TorchTransport(Mesh(0, 2, CPU)).gather_rows(given, plan, stream)


def test_rows_of_streams_are_given_by_name_or_index() -> None:
    plan = plan_streams(
        (Stream("text", 3, sharded=False), Stream("video", 5), Stream("video", 4)), 2, Grid(2), "ulysses"
    )
    assert [list(plan.stream_rows("text", rank)) for rank in range(2)] == [[0, 1, 2]] * 2
    assert [list(plan.stream_rows(1, rank)) for rank in range(2)] == [[0, 1, 2], [3, 4]]
    assert list(plan.query_rows(1)) == list(plan.key_rows(1)) == [0, 1, 2, 6, 7, 10, 11]
    with pytest.raises(ValueError, match="several streams of the plan have this name: give its index"):
        plan.stream_rows("video", 0)
    for rank in (2, -1, "0"):
        with pytest.raises(ValueError, match="; the plan is for ranks 0 to 1"):
            plan.query_rows(rank)  # type: ignore[arg-type]
