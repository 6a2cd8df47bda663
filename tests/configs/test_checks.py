"""The checks of single values, and that a refusal's example would be taken."""

from __future__ import annotations

import math
from typing import Any

import pytest

from configs.checks import Check, Refusal, choice, optional, real, subset, switch, text, whole


@pytest.mark.parametrize(
    ("check", "value", "stored"),
    [
        (whole(1), 3, 3),
        (whole(1, 4), 4, 4),
        (real(0, 1), 1, 1.0),
        (real(-math.inf), -3, -3.0),
        (text(), 10, "010"),
        (text(empty=True), "", ""),
        (switch, True, True),
        (choice(("a",)), "a", "a"),
        (subset(("a", "b")), ["b"], ("b",)),
        (optional(whole(1)), None, None),
        (optional(whole(1)), 1, 1),
    ],
)
def test_a_value_is_stored_in_its_type(check: Check, value: Any, stored: Any) -> None:
    checked = check(value, "010")
    assert (checked, type(checked)) == (stored, type(stored))


@pytest.mark.parametrize(
    ("check", "value", "rule"),
    [
        (whole(1), True, "takes a whole number of at least 1"),
        (whole(1, 4), 5, "takes a whole number from 1 to 4"),
        (real(0, 1), 2, "takes a finite number of at least 0 and at most 1"),
        (real(0, above=True), 0, "takes a finite number above 0"),
        (real(0), 10**400, "takes a finite number"),
        (real(0), math.nan, "takes a finite number"),
        (text(), None, "takes text"),
        (text(), " ", "is empty"),
        (text(), "???", "still to be set"),
        (switch, 1, "takes true or false"),
        (choice(("a",)), "b", "takes a"),
        (choice(("a", "b", "c")), None, "takes a, b or c"),
        (subset(("a", "b")), "a", "takes a list of a and b"),
        (subset(("a", "b")), ["a", "a"], "twice"),
        (optional(whole(1)), 0, "takes a whole number"),
    ],
)
def test_any_other_value_is_refused_with_the_way_out(check: Check, value: Any, rule: str) -> None:
    refusal = check(value, str(value))
    assert isinstance(refusal, Refusal)
    assert rule in refusal.rule
    assert refusal.remedy


@pytest.mark.parametrize("check", [whole(1), whole(1, 4), whole(20), whole(9, 9)])
def test_the_example_of_a_whole_number_is_one_that_is_taken(check: Check) -> None:
    example = int(check(None, "").remedy.rpartition(" ")[2])
    assert check(example, "") == example


@pytest.mark.parametrize("check", [real(0), real(0, 1), real(0, 1, above=True), real(3, above=True), real(-5, 0)])
def test_the_example_of_a_number_is_one_that_is_taken(check: Check) -> None:
    example = float(check(None, "").remedy.rpartition(" ")[2])
    assert check(example, "") == example
