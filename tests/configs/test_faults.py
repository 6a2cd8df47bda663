"""Faults are readable, survive pickling, and near names are found."""

from __future__ import annotations

import copy
import pickle

import pytest

from configs.faults import Fault, FaultError, nearest, unknown_name_remedy

FAULT = Fault("attention.per_role.self", "FLASH", "head size 80 is not supported", "use TORCH_SDPA", ("A",), "my.yaml")


class PlacementError(FaultError):
    exit_code = 3


def test_a_fault_reads_value_rule_remedy_and_origin() -> None:
    assert str(FAULT) == "attention.per_role.self=FLASH: head size 80 is not supported; use TORCH_SDPA [my.yaml]"
    assert str(Fault("generate.prompt", None, "is not set", "add one")) == "generate.prompt: is not set; add one"


@pytest.mark.parametrize("kind", [FaultError, PlacementError])
@pytest.mark.parametrize("copier", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_an_error_survives_pickling_with_type_faults_and_attributes(kind, copier) -> None:  # type: ignore[no-untyped-def]
    error = kind(iter([FAULT, Fault("b", 1, "c", "d")]))
    error.rank = 3
    error.add_note("seen on node 1")
    again = copier(error)
    assert type(again) is kind
    assert again.faults == error.faults
    assert again.exit_code == kind.exit_code
    assert (again.rank, again.__notes__) == (3, ["seen on node 1"])
    assert str(again) == f"{FAULT}\nb=1: c; d"


def test_nearest_ignores_case_and_puts_the_best_first() -> None:
    known = ("TORCH_SDPA", "FLASH_ATTN", "FLASH_ATTN_3")
    assert nearest("flash_atn", known)[0] == "FLASH_ATTN"
    assert nearest("torch_sdpa", known) == ("TORCH_SDPA",)
    assert nearest("zzz", known) == ()


def test_the_remedy_for_an_unknown_name_suggests_or_lists() -> None:
    assert unknown_name_remedy("tiny-wn", ("tiny-wan", "other")) == "did you mean tiny-wan?"
    assert unknown_name_remedy("zzz", ("tiny-wan", "other")) == "use one of tiny-wan, other"
