from __future__ import annotations

import platform
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

from configs.faults import Fault, FaultError
from parallel.events import RequestRan, Step, Traffic
from runtime.errors import RankError, RankPlace, RankTrouble
from runtime.report import SelectionReport, merge
from runtime.summary import Driver, Failure, RequestRecord, failure_of, summary, versions
from tests.runtime.report_values import CROSS, SELF, check_schema, ran

PLACES = (RankPlace(1, "n1", "10.0.0.2", "beta", 12, "3"), RankPlace(0, "n0", "10.0.0.1", "alpha", 11))
BEGAN = datetime(2026, 3, 1, 12, 30, 5, 999, timezone(timedelta(hours=1)))
NOTHING_RAN = SelectionReport(2, (), ())
SENT = Traffic({"scatter_heads": 4}, {"scatter_heads": 1024})


def request_ran(**seconds: float) -> RequestRan:
    return RequestRan(0, SENT, SENT, {"transformer": 16}, seconds, {"transformer": 5}, 2048)


def record(ran: dict[int, RequestRan], steps: dict[int, list[float]]) -> RequestRecord:
    events = {
        rank: tuple(Step(0, number, 3, taken) for number, taken in enumerate(seconds, start=1))
        for rank, seconds in steps.items()
    }
    return RequestRecord(0, "a fox", 7, 3, ran, events)


def built(**changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "status": "done",
        "driver": Driver(BEGAN, ["raylysses", "generate", "--prompt", "a fox"], "head"),
        "world_size": 2,
        "device": "cpu",
        "device_notice": "",
        "ranks": PLACES,
        "gpu_names": {},
        "selection": NOTHING_RAN,
        "start_s": {},
        "requests": [],
        "elapsed_s": 3.5,
        "versions": versions(),
    }
    content = summary(**{**arguments, **changes})
    check_schema("summary", content)
    return content


def test_times_are_those_of_the_slowest_rank_with_the_first_step_apart() -> None:
    ran = {0: request_ran(denoise=2.0, decode=1.0), 1: request_ran(denoise=3.0)}
    content = built(requests=[record(ran, {0: [9.0, 0.5, 0.4], 1: [8.0, 0.6, 0.2]})])
    request = content["requests"][0]
    assert (request["first_step_s"], request["median_step_s"], request["steps_done"]) == (9.0, 0.5, 3)
    assert request["seconds"] == {"denoise": 3.0, "decode": 1.0}
    assert request["rows"] == {"0": {"transformer": 5}, "1": {"transformer": 5}}
    assert request["forwards"] == {"transformer": 16}
    assert request["traffic"]["1"]["planned"] == {"scatter_heads": {"calls": 4, "bytes_sent": 1024}}
    assert request["peak_memory_bytes"] == {"0": 2048, "1": 2048}


def test_a_request_that_never_finished_says_how_far_it_came() -> None:
    content = built(
        status="failed",
        error=Failure("StallError", "no rank reported"),
        requests=[record({}, {0: [1.0, 0.5], 1: [1.5]}), RequestRecord(1, "never begun", 7, 3)],
    )
    first, second = content["requests"]
    assert (first["steps_done"], first["first_step_s"], first["median_step_s"]) == (1, 1.5, None)
    assert (second["steps_done"], second["first_step_s"], second["traffic"]) == (0, None, {})
    assert content["error"]["rank"] is None


def test_ranks_are_listed_in_order_with_their_gpu() -> None:
    assert built(gpu_names={0: "", 1: "NVIDIA H200"})["ranks"] == [
        {"rank": 0, "node": "alpha", "address": "10.0.0.1", "pid": 11, "gpu": None, "gpu_name": None},
        {"rank": 1, "node": "beta", "address": "10.0.0.2", "pid": 12, "gpu": "3", "gpu_name": "NVIDIA H200"},
    ]


def test_the_driver_is_named_with_its_command_and_when_it_began() -> None:
    content = built()
    assert content["began"] == "2026-03-01T12:30:05+01:00"
    assert content["command"] == ["raylysses", "generate", "--prompt", "a fox"]
    assert content["host"] == "head"


def test_the_reason_for_a_run_without_gpus_is_kept() -> None:
    assert built()["device_notice"] is None
    notice = "no GPU is used: nvidia-smi failed with exit code 9; repair the driver, or set run.device=cpu"
    assert built(device_notice=notice)["device_notice"] == notice


def test_finished_phases_of_the_start_have_their_seconds() -> None:
    assert built(start_s={"connect": 1.5, "place": 0.5})["start_s"] == {"connect": 1.5, "place": 0.5}


def test_each_role_has_its_strategy_and_degrees_once() -> None:
    ring = replace(SELF, degrees=(1, 2))
    events = [ran(ring), ran(ring, layer=1), ran(CROSS)]
    assert built(selection=merge([(rank, event) for rank in (0, 1) for event in events], 2))["parallel"] == [
        {"model": "transformer", "role": "self", "strategy": "ulysses", "ulysses": 1, "ring": 2},
        {"model": "transformer", "role": "cross", "strategy": "local", "ulysses": 1, "ring": 1},
    ]


def test_a_rank_failure_names_the_rank_its_node_and_its_phase() -> None:
    error = RankError(RankTrouble(PLACES[0], "died", "denoise", "killed by signal 9"))
    failure = failure_of(error)
    assert (failure.type, failure.rank, failure.node, failure.phase) == ("RankError", 1, "beta", "denoise")
    assert "signal 9" in failure.message
    built(status="failed", error=failure)


def test_another_failure_names_no_rank() -> None:
    failure = failure_of(FaultError([Fault("run.seed", -1, "is negative", "use 0 or more")]))
    assert failure == Failure("FaultError", "run.seed=-1: is negative; use 0 or more")
    built(status="interrupted", error=failure)


def test_a_run_that_failed_before_it_had_ranks_has_a_summary() -> None:
    built(status="failed", error=Failure("PlacementError", "too few GPUs"), world_size=0, ranks=[], device="")


def test_versions_are_those_that_importlib_metadata_sees() -> None:
    found = versions()
    assert found["python"] == platform.python_version()
    assert set(found) == {"python", "raylysses", "torch", "diffusers", "ray"}
