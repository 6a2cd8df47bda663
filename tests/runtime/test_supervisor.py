"""Which rank is blamed: the cause, not what came first."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import ray
import torch.distributed as dist

from parallel.events import Phase
from parallel.transport.errors import ExchangeError, ExchangeSizeError
from runtime import supervisor as module
from runtime.errors import DisagreementError, RankError, RankPlace, StallError, TerminatedError
from runtime.ray_api import Died, Ended, Item, Raised, Yielded, trouble_of
from runtime.stuck import Beat, beat_of
from runtime.supervisor import Supervisor, classify

PLACES = tuple(RankPlace(rank, "n", "10.0.0.1", "host", 100 + rank) for rank in range(3))
LOST = Raised(dist.DistBackendError("Connection closed by peer [127.0.0.1]:4242"), "")


class FakeStream:
    """Items with the tick at which each becomes ready."""

    def __init__(self, *items: tuple[int, Item]) -> None:
        self.items = list(items)

    def take(self) -> Item:
        return self.items.pop(0)[1]


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Drive fake streams on a fake clock of one second a look."""
    clock = {"now": 0}

    def ready(streams: list[FakeStream], timeout_s: float) -> list[FakeStream]:
        clock["now"] += 1
        due = [stream for stream in streams if stream.items and stream.items[0][0] <= clock["now"]]
        return due[:1]

    monkeypatch.setattr(module, "ready", ready)
    monkeypatch.setattr(module, "process_state", lambda node_id, pid: "stopped")
    monkeypatch.setattr(module.time, "monotonic", lambda: clock["now"])

    def run(
        *streams: FakeStream, stall_timeout_s: float = 100, places: tuple[RankPlace, ...] = PLACES
    ) -> list[tuple[int, Any]]:
        seen: list[tuple[int, Any]] = []
        watch = Supervisor(places[: len(streams)], lambda rank, event: seen.append((rank, event)), stall_timeout_s)
        watch.drive(streams)  # type: ignore[arg-type]
        return seen

    return run


def test_all_events_are_passed_on_in_order(drive: Any) -> None:
    seen = drive(
        FakeStream((1, Yielded("a")), (2, Yielded("b")), (3, Ended())), FakeStream((1, Yielded("c")), (2, Ended()))
    )

    assert [event for rank, event in seen if rank == 0] == ["a", "b"]
    assert (1, "c") in seen


def test_a_death_is_the_cause_even_if_a_peer_complained_first(drive: Any) -> None:
    with pytest.raises(RankError) as caught:
        drive(FakeStream((1, LOST)), FakeStream((2, Died("worker died"))), FakeStream((900, Ended())))

    assert (caught.value.trouble.place.rank, caught.value.trouble.kind) == (1, "died")
    assert [trouble.place.rank for trouble in caught.value.consequences] == [0]


def test_a_ranks_own_error_comes_before_what_a_lost_peer_says(drive: Any) -> None:
    own = Raised(ValueError("bad shape"), "Traceback ...")
    with pytest.raises(RankError, match="ValueError: bad shape") as caught:
        drive(FakeStream((1, LOST)), FakeStream((2, own)), FakeStream((900, Ended())))

    assert caught.value.trouble.place.rank == 1
    assert caught.value.trouble.traceback == "Traceback ..."
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_phase_is_the_one_that_the_rank_was_in(drive: Any) -> None:
    with pytest.raises(RankError) as caught:
        drive(FakeStream((1, Yielded(Phase("load"))), (2, Died("gone"))))

    assert caught.value.trouble.phase == "load"


def test_silence_is_a_stall_that_says_what_each_rank_did(drive: Any) -> None:
    with pytest.raises(StallError) as caught:
        drive(FakeStream((1, Yielded(Phase("decode"))), (500, Ended())), FakeStream((500, Ended())), stall_timeout_s=10)

    assert "decode" in caught.value.last[0]
    assert "start" in caught.value.last[1]


WAITS = Beat(True, "", "all_to_all_single (torch/distributed/distributed_c10d.py:1)")
WORKS = Beat(False, "the stack of rank 1", "trouble (tests/doubles.py:47)")


def test_a_rank_that_sleeps_or_spins_is_named_with_its_stack_as_the_stuck_one(drive: Any) -> None:
    beats = range(2, 40, 2)
    with pytest.raises(StallError, match="rank 1 is stuck") as caught:
        drive(
            FakeStream(*((tick, Yielded(WAITS)) for tick in beats)),
            FakeStream(*((tick, Yielded(WORKS)) for tick in beats)),
            stall_timeout_s=10,
        )

    assert caught.value.stuck == (1,)
    assert "waits for other ranks in all_to_all_single" in caught.value.last[0]
    assert "busy in trouble (tests/doubles.py:47)" in caught.value.last[1]
    assert caught.value.stacks[1] == "the stack of rank 1"


def test_a_stopped_process_is_named_while_the_others_wait_for_it(drive: Any) -> None:
    with pytest.raises(StallError, match="rank 1 is stuck") as caught:
        drive(FakeStream(*((tick, Yielded(WAITS)) for tick in range(2, 40, 2))), FakeStream(), stall_timeout_s=10)

    assert "its process is stopped (SIGSTOP); kill -CONT 101" in caught.value.last[1]


def test_one_stuck_rank_ends_the_run_while_another_still_reports(drive: Any) -> None:
    with pytest.raises(StallError, match="rank 1 is stuck"):
        drive(FakeStream(*((tick, Yielded("event")) for tick in range(1, 90))), FakeStream(), stall_timeout_s=10)


def test_a_rank_that_waits_long_for_one_that_reports_is_not_stuck(drive: Any) -> None:
    reports = [(tick, Yielded("event")) for tick in range(1, 80, 5)]
    waits = [(tick, Yielded(WAITS)) for tick in range(2, 80, 5)]

    seen = drive(FakeStream(*reports, (79, Ended())), FakeStream(*waits, (79, Ended())), stall_timeout_s=10)

    assert len(seen) == len(reports)


def test_the_beat_of_a_thread_shows_where_it_is() -> None:
    beat = beat_of(threading.get_ident())

    assert not beat.waits
    assert beat.at.startswith("beat_of (")
    assert "test_supervisor.py" in beat.stack


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        (Died("x"), "died"),
        (LOST, "disconnected"),
        (Raised(ExchangeError("gather_heads", "any text"), ""), "disconnected"),
        (Raised(dist.DistStoreError("any text"), ""), "disconnected"),
        (Raised(ExchangeSizeError("gather_heads", "Connection reset by peer"), ""), "raised"),
        (Raised(OSError("Read error on /dev/sdb: Connection reset by peer"), ""), "raised"),
        (Raised(RuntimeError("[gloo] Connection reset by peer"), ""), "raised"),
        (Raised(ValueError("Connection closed by peer is in my text"), ""), "raised"),
        (Raised(RuntimeError("shape mismatch"), ""), "raised"),
        (Raised(MemoryError(), ""), "raised"),
    ],
)
def test_errors_are_classified_by_type_and_never_by_their_text(item: Raised | Died, kind: str) -> None:
    assert classify(item) == kind


ON_TWO_NODES = (RankPlace(0, "a", "10.0.0.1", "left", 100), RankPlace(1, "b", "10.0.0.2", "right", 101))


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_lost_node_is_named_instead_of_its_process(is_alive: bool, drive: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "is_alive", lambda node_id: is_alive)
    report = "The actor died unexpectedly.\nhealth check failed due to missing too many heartbeats."
    with pytest.raises(RankError) as caught:
        drive(FakeStream((1, LOST)), FakeStream((12, Died(report))), places=ON_TWO_NODES)

    text = str(caught.value)
    node = "its node right (10.0.0.2) is lost (health check failed due to missing too many heartbeats); look at"
    assert (node in text) is not is_alive
    assert ("its process is gone" in text) is is_alive
    assert text.endswith("then rank 0 on left (10.0.0.1, pid 100) lost its connection to other ranks in phase start")
    assert caught.value.trouble.traceback == report


def test_a_rank_that_ray_killed_for_memory_is_named_with_its_nodes_figures_and_a_way_out() -> None:
    report = (
        "Task was killed due to the node running low on memory.\n"
        "Memory on the node (IP: 10.0.0.2) where the task was running was 23.12GB / 24.00GB (0.96), which exceeds 0.95."
    )
    error = ray.exceptions.OutOfMemoryError(report)
    text = str(module.trouble(ON_TWO_NODES[1], "load", trouble_of(error)))

    assert text.startswith("rank 1 on right (10.0.0.2, pid 101) died in phase load: Ray killed its process because")
    assert "23.12GB / 24.00GB" in text
    assert "use fewer ranks on that node" in text


def test_of_rays_report_the_message_has_the_reason_once() -> None:
    report = (
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
        "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) ..."
    )
    trouble = module.trouble(PLACES[0], "load", Died(report))

    assert trouble.message == (
        "its process is gone (Worker unexpectedly exits with a connection error code 2. End of file)"
    )
    assert trouble.traceback == report


def test_errors_survive_pickling() -> None:
    trouble = module.trouble(PLACES[0], "load", Died("x"))
    for error in (
        RankError(trouble, (trouble,)),
        StallError(3.0, ("a",), (1,), {1: "stack"}),
        DisagreementError(("a", "b")),
        TerminatedError(15),
    ):
        copy = pickle.loads(pickle.dumps(error))

        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert copy.exit_code == error.exit_code
