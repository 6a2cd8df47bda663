"""The grid that checks the backends: it finds what is wrong, and says what it covered. On CPU."""

from __future__ import annotations

import itertools
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.interface import HeadSizes
from backends.kernels import reference
from backends.kernels.reference import ReferenceImpl
from backends.platforms.facts import DeviceFacts, parse_device
from backends.registry import Registry
from check_backends import claimed, main
from kernel_grid.cases import FEATURES, KV_HEADS, LENGTHS, SAMPLED, Call, Claim, calls, claims, head_sizes
from kernel_grid.crew import run_jobs
from kernel_grid.jobs import Job
from kernel_grid.measure import Exact, measure
from kernel_grid.page import written
from kernel_grid.record import summary

CHECKOUT = Path(__file__).resolve().parents[2]
CPU = DeviceFacts("cpu")
HERE = torch.device("cpu")
PLAIN = Call("float32", 8, 2, False, "plain", 7, 7)


def claim_of(name: str, device: DeviceFacts = CPU) -> Claim:
    return next(claim for claim in claims(Registry.built_in(), device) if claim.name == name)


# --- which calls there are --------------------------------------------------------------------------------------------


def test_every_kind_of_call_that_is_spoken_of_is_there() -> None:
    every = list(calls("bfloat16", 64, 2, list(FEATURES)))
    assert {(call.rows, call.keys) for call in every if call.feature == "plain"} >= {(n, n) for n in LENGTHS}
    assert LENGTHS == (1, 7, 129, 4097)
    masks = {FEATURES[call.feature].mask for call in every}
    assert masks == {"none", "key_padding", "full", "per_head", "block"}
    for name in ("bias", "window", "soft_cap", "sinks", "packed"):
        assert any(getattr(FEATURES[call.feature], name) for call in every)
    assert {call.causal for call in every} == {False, True}
    assert all(call.rows == call.keys for call in every if call.causal or FEATURES[call.feature].window)


def test_every_head_size_that_is_listed_is_tried_and_some_of_those_without_a_limit() -> None:
    device = parse_device("cuda:9.0", {}, all_packages=True)
    every = tuple(claims(Registry.built_in(), device))
    sizes = head_sizes(every)
    assert set(range(8, 257, 8)) | set(SAMPLED) == set(sizes)
    reference_claim = claim_of("REFERENCE/plain", device)
    assert not reference_claim.takes(replace(PLAIN, head_size=72), device)
    assert claim_of("CUDNN_ATTN/cudnn", device).takes(Call("bfloat16", 72, 2, True, "full", 7, 7), device)


def test_options_are_claims_of_their_own() -> None:
    device = parse_device("cuda:9.0", {}, all_packages=True)
    names = {claim.name: claim for claim in claims(Registry.built_in(), device)}
    assert names["FLASH_ATTN/fa3 quant.dtype_qk=fp8_e4m3"].lossy
    assert not names["FLASH_ATTN/fa3"].lossy
    assert "FLASH_ATTN/fa4 quant.dtype_qk=fp8_e4m3" not in names  # refused
    assert not any(name.startswith("FLASH_ATTN/fa4-blackwell") for name in names)


# --- what is found ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", [name for name in FEATURES if name != "block"])
@pytest.mark.parametrize("name", ["REFERENCE/plain", "TORCH_SDPA/torch", "FLEX_ATTENTION/plain"])
def test_the_backends_of_a_cpu_pass(name: str, feature: str) -> None:
    call = Call("float64", 8, 2, False, feature, 7, 7)
    if claim_of(name).takes(call, CPU):
        outcome = measure(claim_of(name), Exact(call, HERE), CPU)
        assert outcome.fault is None
        assert ("gradient" in outcome.errors) == claim_of(name).variant.takes.gradient


def wrong(kind: str, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == "two heads swapped":
        return out[:, :, [1, 0, 2, 3]], lse
    if kind == "not a number":
        return out.masked_fill(torch.arange(out.shape[1])[:, None, None] == 0, float("nan")), lse
    if kind == "a wrong layout":
        return out, lse.transpose(1, 2).contiguous()
    if kind == "another base":
        return out, lse / 0.6931
    if kind == "a gradient that is halved":
        return out.detach() / 2 + out / 2, lse
    return out.masked_fill(out == 0, 1e-3), lse  # blind rows


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("two heads swapped", "output"),
        ("not a number", "output"),
        ("a wrong layout", "lse"),
        ("another base", "lse"),
        ("a gradient that is halved", "gradient"),
        ("blind rows", "output"),
    ],
)
def test_a_kernel_that_is_wrong_fails(kind: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call("float64", 8, 2, False, "full", 4, 4)  # as many rows as heads: a wrong layout has the right shape
    exact = Exact(call, HERE)
    whole = reference.plain_attention_with_lse

    def forward(self: ReferenceImpl, query: Any, key: Any, value: Any, metadata: Any, plan: Any = None) -> Any:
        return wrong(kind, *whole(query, key, value, **self._settings(query, key, metadata)))

    monkeypatch.setattr(ReferenceImpl, "forward_with_lse", forward)
    monkeypatch.setattr(ReferenceImpl, "forward", lambda *args: forward(*args)[0])
    outcome = measure(claim_of("REFERENCE/plain"), exact, CPU)
    assert outcome.fault is not None
    assert f"{what} is off by" in outcome.fault


def test_what_a_kernel_raises_is_a_fault_and_what_its_plan_raises_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = Exact(PLAIN, HERE)

    def no(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("not these lengths")

    with monkeypatch.context() as patch:
        patch.setattr(ReferenceImpl, "forward", no)
        assert measure(claim_of("REFERENCE/plain"), exact, CPU).fault == "ValueError: not these lengths"
    monkeypatch.setattr(ReferenceImpl, "plan", no)
    outcome = measure(claim_of("REFERENCE/plain"), exact, CPU)
    assert (outcome.fault, outcome.refused) == (None, "not these lengths")


def test_a_summary_counts_by_claim() -> None:
    claim = claim_of("REFERENCE/plain")
    good = measure(claim, Exact(PLAIN, HERE), CPU).to_dict()
    found = summary([good, {**good, "fault": "wrong"}, {**good, "refused": "no"}], {claim.name: {}, "OTHER": {}})
    counted = found[claim.name]
    assert (counted["passed"], counted["failed"], counted["refused_by_its_plan"]) == (1, 1, 1)
    assert counted["faults"][0]["fault"] == "wrong"
    assert set(counted["largest_errors"]["float32"]) == {"output", "lse", "gradient", "lse_gradient"}
    assert found["OTHER"]["passed"] == 0


# --- the command ------------------------------------------------------------------------------------------------------


SMALL = ("--device", "cpu", "--only", "REFERENCE", "--dtypes", "float32", "--head-sizes", "8", "--kv-heads", "2")


def test_the_command_writes_a_record_and_keeps_what_it_says_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "grid.json"
    file.write_text(json.dumps({"claims": {"OTHER": {"passed": 1}}}))
    assert main([*SMALL, "--longest", "7", "--features", "plain", "--workers", "1", "--json", str(file)]) == 0
    found = json.loads(file.read_text())["claims"]
    assert found["OTHER"] == {"passed": 1}
    entry = found["REFERENCE/plain"]
    assert (entry["passed"], entry["failed"], entry["run"]["unfinished"]) == (4, 0, [])
    assert entry["takes"]["head_sizes"] == str(HeadSizes())
    assert "REFERENCE/plain: 4 passed, 0 failed" in capsys.readouterr().out


def test_time_that_does_not_suffice_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--minutes", "0"]) == 1
    assert "not finished in time: float32:8:2" in capsys.readouterr().out


WORKER = """
import json, os, sys
lines = open(sys.argv[-1], "w", buffering=1)
for line in sys.stdin:
    job = json.loads(line)
    if job["dtype"] == "float64":
        sys.exit("no such thing")
    for number in range(job["first"], 3):
        call = {"rows": number + 1}
        lines.write(json.dumps({"claim": "A", "call": call, "number": number}) + "\\n")
        if number == 1 and job["head_size"] == 8:
            os.kill(os.getpid(), 9)
        lines.write(json.dumps({"claim": "A", "call": call, "fault": None, "number": number}) + "\\n")
        if number == 1 and job["head_size"] == 16:
            os.kill(os.getpid(), 9)
    lines.write(json.dumps({"done": "it"}) + "\\n")
"""


def outcomes_of(tmp_path: Path, *jobs: Job, workers: int = 1) -> tuple[list[tuple[int, str | None]], list[str]]:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    found, unfinished = run_jobs(
        jobs, [sys.executable, str(script)], tmp_path, workers, 0, deadline=time.monotonic() + 60
    )
    return [(entry["call"]["rows"], entry["fault"]) for entry in found], unfinished


def test_a_process_that_dies_is_a_fault_of_its_call_and_the_rest_goes_on(tmp_path: Path) -> None:
    dying = Job("float32", 8, 2, ("plain",), 7)
    found, unfinished = outcomes_of(tmp_path, dying, replace(dying, head_size=32))
    assert found == [(1, None), (2, "the process ended with -9"), (3, None), (1, None), (2, None), (3, None)]
    assert unfinished == []
    found, _ = outcomes_of(tmp_path, replace(dying, head_size=16))
    assert found == [(1, None), (2, None), (2, "the process ended with -9 behind it"), (3, None)]


def test_a_job_that_cannot_begin_is_unfinished_and_hinders_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Job("float32", 32, 2, ("plain",), 7)
    found, unfinished = outcomes_of(tmp_path, replace(good, dtype="float64"), good, workers=2)
    assert sorted(found) == [(1, None), (2, None), (3, None)]
    assert unfinished == ["float64:32:2:plain"]
    assert "no such thing" in capsys.readouterr().out


# --- what was recorded ------------------------------------------------------------------------------------------------

RECORD = CHECKOUT / "docs" / "measured" / "kernel-grid.json"
RECORDED: dict[str, Any] = json.loads(RECORD.read_text())["claims"]
HOPPER_CHIP = parse_device("cuda:9.0", {}, all_packages=True)
HOPPER = {claim.name: claim for claim in claims(Registry.built_in(), HOPPER_CHIP)}


def claimed_calls(claim: Claim, device: DeviceFacts) -> int:
    """How many calls the whole grid has for it."""
    keys = itertools.product(claim.variant.takes.dtypes, head_sizes((claim,)), KV_HEADS)
    return sum(claim.takes(call, device) for key in keys for call in calls(*key, list(FEATURES)))


def test_every_variant_that_was_run_on_hardware_is_in_the_record() -> None:
    assert set(RECORDED) == {name for name, claim in HOPPER.items() if "cuda:9.0" in claim.variant.run_on}


@pytest.mark.parametrize("name", RECORDED)
def test_a_variant_claims_what_its_record_found(name: str) -> None:
    """All of it, call by call: a claim that grows has to be run again."""
    entry, claim = RECORDED[name], HOPPER[name]
    assert entry["takes"] == json.loads(json.dumps(claimed(claim)))
    assert entry["run"]["unfinished"] == []
    assert entry["failed"] == 0
    assert entry["passed"] + entry["refused_by_its_plan"] == claimed_calls(claim, HOPPER_CHIP)


def test_the_page_has_the_table_of_the_record() -> None:
    page = (CHECKOUT / "docs" / "backends.md").read_text()
    assert page == written(page, RECORDED)
    with pytest.raises(ValueError, match="the page has no place for the table"):
        written("nothing", RECORDED)
