"""Which rank is blamed: the cause, not what came first."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch.distributed as dist

from parallel.events import Phase
from runtime import supervisor as module
from runtime.errors import DisagreementError, RankError, RankPlace, StallError, TerminatedError
from runtime.ray_api import Died, Ended, Item, Raised, Yielded
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
    monkeypatch.setattr(module.time, "monotonic", lambda: clock["now"])

    def run(*streams: FakeStream, stall_timeout_s: float = 100) -> list[tuple[int, Any]]:
        seen: list[tuple[int, Any]] = []
        watch = Supervisor(PLACES[: len(streams)], lambda rank, event: seen.append((rank, event)), stall_timeout_s)
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


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        (Died("x"), "died"),
        (LOST, "disconnected"),
        (Raised(RuntimeError("[gloo] Connection reset by peer"), ""), "disconnected"),
        (Raised(ValueError("Connection closed by peer is in my text"), ""), "raised"),
        (Raised(RuntimeError("shape mismatch"), ""), "raised"),
        (Raised(MemoryError(), ""), "raised"),
    ],
)
def test_errors_are_classified(item: Raised | Died, kind: str) -> None:
    assert classify(item) == kind


def test_errors_survive_pickling() -> None:
    trouble = module.trouble(PLACES[0], "load", Died("x"))
    for error in (
        RankError(trouble, (trouble,)),
        StallError(3.0, ("a",)),
        DisagreementError(("a", "b")),
        TerminatedError(15),
    ):
        copy = pickle.loads(pickle.dumps(error))

        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert copy.exit_code == error.exit_code
