from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import jsonschema
import pytest

from backends.requirements import Requirements
from backends.selection import RejectedStrategy, Selection
from configs.faults import Fault
from parallel.plan import Strategy
from runtime.report import (
    SelectionReport,
    compact_ranks,
    from_selections,
    merge,
    note_lines,
    table_columns,
    table_rows,
)
from tests.runtime.report_values import CROSS, FLASH, MISSING, ROOT, SELF, check_schema, ran

Row = tuple[str, Selection, Strategy, int]
ENTRY_FIELDS = {
    *("model", "role", "requirements", "kind", "category", "requested", "backend", "variant", "class_path", "kernel"),
    *("source", "key", "origin", "strategy", "degrees", "options", "exactness", "layers", "ranks", "rejected"),
    *("exchange_dtype", "rejected_strategies"),
}


def agreeing(world_size: int, layers: int = 3) -> list[Any]:
    return [(rank, ran(s, layer)) for rank in range(world_size) for layer in range(layers) for s in (SELF, CROSS)]


def the_disagreements(report: SelectionReport) -> dict[str, list[tuple[list[int], Any]]]:
    listed = report.to_dict()["disagreements"]
    return {item["field"]: [(side["ranks"], side["value"]) for side in item["values"]] for item in listed}


def test_ranks_that_ran_the_same_give_one_entry_for_each_role() -> None:
    report = merge(agreeing(4), 4)
    content = report.to_dict()
    check_schema("selection", content)
    assert report.agreed
    assert content["agreed"] is True
    assert [entry["role"] for entry in content["entries"]] == ["self", "cross"]
    entry = content["entries"][0]
    assert set(entry) == ENTRY_FIELDS
    assert (entry["layers"], entry["ranks"], entry["strategy"]) == (3, [0, 1, 2, 3], "ulysses")
    assert entry["requirements"]["num_heads"] == 2
    assert entry["rejected"] == [{"backend": "FLASH_ATTN", "faults": [MISSING.rule]}]


def test_the_report_does_not_depend_on_the_order_in_which_ranks_report() -> None:
    events = [(rank, ran(SELF, layer)) for layer in range(2) for rank in range(3)]
    shuffled = list(events)
    random.Random(0).shuffle(shuffled)
    assert merge(shuffled, 3) == merge(events, 3)


def test_a_rank_that_ran_another_backend_is_named_with_both_sides() -> None:
    report = merge([(rank, ran(FLASH if rank == 2 else SELF)) for rank in range(4)], 4)
    check_schema("selection", report.to_dict())
    assert not report.agreed
    found = the_disagreements(report)
    assert found["backend"] == [([0, 1, 3], "TORCH_SDPA"), ([2], "FLASH_ATTN")]
    assert found["variant"] == [([0, 1, 3], "torch"), ([2], "fa3")]
    assert set(found) == {"backend", "variant", "class_path"}
    assert [(entry.backend, entry.ranks) for entry in report.entries] == [
        ("TORCH_SDPA", (0, 1, 3)),
        ("FLASH_ATTN", (2,)),
    ]
    assert str(report.disagreements[0]) == "transformer/self, backend: ranks 0-1,3 TORCH_SDPA, rank 2 FLASH_ATTN"


@pytest.mark.parametrize(
    ("changes", "field"), [({"kernel": "other.kernel"}, "kernel"), ({"strategy": "local"}, "strategy")]
)
def test_another_kernel_or_strategy_is_a_disagreement(changes: dict[str, Any], field: str) -> None:
    report = merge([(0, ran()), (1, ran(**changes))], 2)
    assert list(the_disagreements(report)) == [field]


def test_a_rank_that_lacks_a_role_or_layers_is_a_disagreement() -> None:
    events = [item for item in agreeing(2) if item[0] == 0 or item[1].selection.role == "self"][:-1]
    report = merge(events, 2)
    check_schema("selection", report.to_dict())
    by_entry = {(item.entry, item.field): item for item in report.disagreements}
    assert set(by_entry) == {("transformer/self", "layers"), ("transformer/cross", "present")}
    present = by_entry["transformer/cross", "present"]
    assert [(side.ranks, side.value) for side in present.values] == [((0,), True), ((1,), False)]
    assert "rank 0 ran it, rank 1 did not run it" in str(present)
    assert [side.value for side in by_entry["transformer/self", "layers"].values] == [3, 2]


def test_ranks_that_swap_two_layers_disagree() -> None:
    events = [(0, ran(SELF, 0)), (0, ran(FLASH, 1)), (1, ran(FLASH, 0)), (1, ran(SELF, 1))]
    report = merge(events, 2)
    check_schema("selection", report.to_dict())
    assert the_disagreements(report)["backend"][0] == (
        [0],
        {"blocks.0.self": "TORCH_SDPA", "blocks.1.self": "FLASH_ATTN"},
    )


def test_layers_that_differ_alike_on_all_ranks_agree() -> None:
    report = merge([(rank, ran(s, layer)) for rank in range(2) for layer, s in enumerate((SELF, FLASH))], 2)
    assert report.agreed
    assert [entry.layers for entry in report.entries] == [1, 1]


def test_uneven_heads_are_no_disagreement() -> None:
    uneven = replace(SELF, requirements=Requirements(64, 1, 1, "float32", "self"))
    report = merge([(0, ran(SELF)), (1, ran(uneven))], 2)
    assert report.agreed
    assert [entry.ranks for entry in report.entries] == [(0,), (1,)]


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 reported a selection, and the world has ranks 0 to 1"):
        merge([(2, ran())], 2)


def test_explain_has_the_same_schema_without_ranks_and_kernels() -> None:
    rows: list[Row] = [("transformer", SELF, "ulysses", 30)]
    rows += [("transformer", CROSS, "local", layers) for layers in (20, 10)]
    report = from_selections(4, rows)
    content = report.to_dict()
    check_schema("selection", content)
    assert [(e["layers"], e["ranks"], e["kernel"]) for e in content["entries"]] == [(30, None, None), (30, None, None)]
    assert set(content["entries"][0]) == ENTRY_FIELDS
    assert content["agreed"] is True


def test_an_empty_report_is_valid() -> None:
    check_schema("selection", merge([], 2).to_dict())


def test_table_rows_name_the_model_only_if_there_are_several() -> None:
    report = merge(agreeing(4), 4)
    kernel = "torch.nn.functional.scaled_dot_product_attention"
    assert table_columns(report)[0] == "role"
    assert table_rows(report) == [
        ("self", "TORCH_SDPA (torch)", "platform", "ulysses", "3", "0-3", kernel),
        ("cross", "TORCH_SDPA (torch)", "role: attention.per_role.cross [command line]", "local", "3", "0-3", kernel),
    ]
    two = from_selections(4, [(model, SELF, "ulysses", 1) for model in ("transformer", "transformer_2")])
    assert table_columns(two)[0] == "model"
    assert [row[0] for row in table_rows(two)] == ["transformer", "transformer_2"]
    assert table_rows(two)[0][-2:] == ("-", "-")


def test_the_table_has_exactness_only_if_a_role_is_lossy() -> None:
    lossy = replace(CROSS, backend="SAGE_ATTN", exactness="lossy-quantised")
    sparse = replace(SELF, backend="TRTLLM_ATTN", exactness="lossy-sparse")

    def exactness(*selections: Selection) -> list[str]:
        report = from_selections(2, [("m", selection, "local", 1) for selection in selections])
        columns = table_columns(report)
        return [row[columns.index("exactness")] for row in table_rows(report)] if "exactness" in columns else []

    assert exactness(SELF, CROSS) == []
    assert exactness(SELF, lossy) == ["exact", "lossy-quantised"]
    assert exactness(sparse, lossy) == ["lossy-sparse", "lossy-quantised"]
    # Only one rank is lossy.
    report = merge([(0, ran(SELF)), (1, ran(replace(SELF, exactness="lossy-quantised")))], 2)
    place = table_columns(report).index("exactness")
    assert [row[place] for row in table_rows(report)] == ["exact", "lossy-quantised"]


def test_notes_say_once_why_a_backend_was_passed_over() -> None:
    both: list[Row] = [
        ("transformer", SELF, "ulysses", 1),
        ("transformer", replace(CROSS, rejected=SELF.rejected), "local", 1),
    ]
    assert note_lines(from_selections(2, both)) == [f"self, cross: not FLASH_ATTN: {MISSING.rule}"]


def test_strategies_that_were_turned_down_are_told_like_backends() -> None:
    fault = Fault("lse", True, "returning the log-sum-exp is not supported", "use REFERENCE")
    chosen = replace(
        SELF, rejected=(), degrees=(2, 3), rejected_strategies=(RejectedStrategy("ulysses_ring 3x2", (fault,)),)
    )
    report = from_selections(6, [("transformer", chosen, "ulysses_ring", 1)])
    content = report.to_dict()
    check_schema("selection", content)
    (entry,) = content["entries"]
    assert entry["degrees"] == {"ulysses": 2, "ring": 3}
    assert entry["rejected_strategies"] == [{"strategy": "ulysses_ring 3x2", "faults": [fault.rule]}]
    assert note_lines(report) == [f"self: not ulysses_ring 3x2: {fault.rule}"]
    assert table_rows(report)[0][3] == "ulysses_ring 2x3"


@pytest.mark.parametrize(
    ("ranks", "text"), [([0, 1, 2, 3], "0-3"), ([3, 0, 1], "0-1,3"), ([2], "2"), ([], ""), ([0, 2, 4], "0,2,4")]
)
def test_ranks_are_written_compactly(ranks: list[int], text: str) -> None:
    assert compact_ranks(ranks) == text


def described(node: Any, path: str) -> Iterator[str]:
    """The places of a schema that lack a description."""
    for name, schema in node.get("properties", {}).items():
        if "$ref" not in schema and not schema.get("description"):
            yield f"{path}.{name}"
    for name, child in node.items():
        children = child if isinstance(child, list) else [child]
        for each in children:
            if isinstance(each, dict) and name != "enum":
                yield from described(each, f"{path}.{name}")


@pytest.mark.parametrize("name", ["selection", "summary"])
def test_every_field_of_a_schema_is_described(name: str) -> None:
    schema = json.loads((ROOT / "docs" / f"{name}.schema.json").read_text(encoding="utf-8"))
    assert schema["$schema"].endswith("2020-12/schema")
    assert list(described(schema, name)) == []


def test_the_schema_knows_the_requirements_as_they_are() -> None:
    schema = json.loads((ROOT / "docs" / "selection.schema.json").read_text(encoding="utf-8"))
    known = schema["$defs"]["entry"]["properties"]["requirements"]["properties"]
    assert set(known) == {field.name for field in fields(Requirements)}


def test_the_schema_refuses_a_field_that_it_does_not_know() -> None:
    content = merge(agreeing(1), 1).to_dict()
    content["entries"][0]["speed"] = 1
    with pytest.raises(jsonschema.ValidationError):
        check_schema("selection", content)
