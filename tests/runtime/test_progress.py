from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from configs.faults import Fault
from parallel.events import Event, Phase, Step
from runtime.progress import PHASES, PlainProgress, RichProgress, make_progress, print_faults, print_selection
from runtime.report import from_selections, merge
from runtime.step_meter import DONE, duration
from tests.runtime.report_values import CROSS, FLASH, MISSING, ROOT, SELF, ran


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain(world_size: int = 2, requests: int = 1) -> tuple[PlainProgress, io.StringIO, Clock]:
    stream, clock = io.StringIO(), Clock()
    return PlainProgress(world_size, stream, requests=requests, clock=clock), stream, clock


def both(progress: PlainProgress | RichProgress, event: Event) -> None:
    for rank in range(2):
        progress.on_event(rank, event)


def test_a_phase_is_a_line_when_the_first_rank_enters_it() -> None:
    progress, stream, _ = plain()
    both(progress, Phase("load"))
    both(progress, Phase("denoise", 0))
    progress.on_event(1, Phase("done", 0))
    progress.on_event(0, Phase("decode", 0))
    assert stream.getvalue().splitlines() == ["load the model", "denoise", "decode the frames"]
    progress.on_event(0, Phase("done", 0))
    assert stream.getvalue().splitlines()[-1] == "done"


def test_a_step_counts_when_the_slowest_rank_has_reported_it() -> None:
    progress, stream, _ = plain()
    progress.on_event(0, Step(0, 1, 2, 0.1))
    progress.on_event(0, Step(0, 2, 2, 0.1))
    assert stream.getvalue() == ""
    progress.on_event(1, Step(0, 1, 2, 0.42))
    assert stream.getvalue() == "step 1/2, 0.42 s/step, about 1 s left\n"
    progress.on_event(1, Step(0, 2, 2, 0.3))
    assert stream.getvalue().splitlines()[1:] == ["step 2/2, 0.30 s/step"]


def test_steps_are_a_line_at_first_and_last_and_at_most_every_five_seconds() -> None:
    progress, stream, clock = plain()
    for number in range(1, 11):
        clock.now += 2.0
        both(progress, Step(0, number, 10, 20.0 if number == 1 else 2.0))
    steps = [line.split(",")[0] for line in stream.getvalue().splitlines()]
    assert steps == ["step 1/10", "step 4/10", "step 7/10", "step 10/10"]
    assert stream.getvalue().splitlines()[1] == "step 4/10, 2.00 s/step, about 12 s left"


def test_several_requests_are_numbered() -> None:
    progress, stream, _ = plain(requests=3)
    progress.on_event(0, Phase("load"))
    both(progress, Phase("denoise", 1))
    both(progress, Step(1, 1, 1, 0.5))
    progress.message("half way")
    assert stream.getvalue().splitlines() == [
        "load the model",
        "request 2/3: denoise",
        "request 2/3: step 1/1, 0.50 s/step",
        "half way",
    ]


def test_a_run_that_resumes_counts_from_where_it_was() -> None:
    progress, stream, _ = plain()
    both(progress, Step(0, 5, 8, 9.0))
    both(progress, Step(0, 6, 8, 1.0))
    both(progress, Step(0, 8, 8, 1.0))
    assert stream.getvalue().splitlines() == ["step 5/8, 9.00 s/step, about 27 s left", "step 8/8, 1.00 s/step"]


def test_the_number_of_ranks_may_be_known_later() -> None:
    progress, stream, _ = plain(world_size=1)
    progress.expect(2)
    progress.on_event(0, Step(0, 1, 1, 0.5))
    assert stream.getvalue() == ""
    progress.on_event(1, Step(0, 1, 1, 0.5))
    assert stream.getvalue() == "step 1/1, 0.50 s/step\n"


def test_a_later_request_begins_when_the_last_rank_enters_it() -> None:
    stream = io.StringIO()
    progress = PlainProgress(2, stream, requests=2, noun="shape", unit="round")
    both(progress, Phase("check", 0))
    both(progress, Phase("time", 0))
    both(progress, Step(0, 1, 1, 0.5))
    progress.on_event(0, Phase("done", 0))
    progress.on_event(0, Phase("check", 1))
    progress.on_event(0, Phase("time", 1))
    assert stream.getvalue().splitlines()[-1] == "shape 1/2: round 1/1, 0.50 s/round"
    progress.on_event(1, Phase("done", 0))
    assert stream.getvalue().splitlines()[-1] == "shape 1/2: done"
    progress.on_event(1, Phase("check", 1))
    assert stream.getvalue().splitlines()[-2:] == [
        "shape 2/2: compare the results with fp64",
        "shape 2/2: time the calls",
    ]


def test_every_phase_has_words() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "runtime").rglob("*.py")]
    calls = re.findall(r"(?:\bPhase|\.enter|\.begin|\.on_phase)\(([^()\n]*)", "\n".join(sources))
    names = {name for call in calls for name in re.findall(r'"(\w+)"', call)}
    assert names == {*PHASES, DONE}


def test_other_events_are_not_shown() -> None:
    progress, stream, _ = plain()
    progress.on_event(0, ran())
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar() -> None:
    stream = io.StringIO()
    console = Console(force_terminal=True, file=stream, width=100)
    with RichProgress(2, console) as progress:
        for rank in range(2):
            progress.on_event(rank, Phase("denoise", 0))
        for number in (1, 2, 3):
            for rank in range(2):
                progress.on_event(rank, Step(0, number, 8, 0.42))
        progress.message("[not markup] said between")
    shown = stream.getvalue()
    assert "[not markup] said between" in shown
    assert "step 3/8, 0.42 s/step, about 2 s left" in shown
    assert "denoise" in shown
    progress.close()


def bar_after(*events: Event) -> tuple[str, str]:
    """The bar's last two drawings, one a second after the other, when both ranks have reported the events."""
    stream, clock = io.StringIO(), Clock()
    console = Console(force_terminal=True, color_system=None, file=stream, width=80)
    progress = RichProgress(2, console, requests=2, noun="shape", unit="round", clock=clock)
    progress._bar.live.auto_refresh = False
    with progress:
        for event in events:
            clock.now += 1
            both(progress, event)
        drawings = []
        for _ in range(2):
            clock.now += 1
            stream.truncate(stream.seek(0))
            progress._bar.refresh()
            drawings.append(stream.getvalue())
    return drawings[0], drawings[1]


ROUNDS = (Step(0, 1, 2, 1.0), Step(0, 2, 2, 1.0))


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ((Phase("denoise", 0), *ROUNDS, Phase("decode", 0)), "shape 1/2: decode the frames"),
        ((Phase("time", 0), *ROUNDS, Phase("done", 0), Phase("check", 1)), "shape 2/2: compare the results with fp64"),
        ((Phase("time", 0), Step(0, 1, 1, 1.0), Phase("done", 0), Phase("time", 1), Step(1, 1, 3, 1.0)), "round 1/3"),
    ],
    ids=["decode after steps", "check after a shape", "steps after a shape"],
)
def test_the_bar_moves_in_a_phase_that_follows_finished_steps(events: tuple[Event, ...], text: str) -> None:
    first, second = bar_after(*events)
    assert text in first
    seconds = len(events)
    assert f"0:00:{seconds + 1:02d}" in first
    assert f"0:00:{seconds + 2:02d}" in second
    assert first.replace(f":{seconds + 1:02d}", f":{seconds + 2:02d}") != second  # the spinner turns


def test_the_bar_pulses_until_a_phase_has_steps() -> None:
    console = Console(force_terminal=True, file=io.StringIO(), width=100)
    with RichProgress(1, console) as progress:
        assert isinstance(progress, RichProgress)
        for event, total in ((Phase("denoise", 0), None), (Step(0, 2, 2, 1.0), 2), (Phase("decode", 0), None)):
            progress.on_event(0, event)
            assert progress._task.total == total
            assert progress._task.finished == (total is not None)
        progress.begin("video")
        assert (progress._task.description, progress._task.total) == ("encode the video", None)
    assert progress._task.finished


def test_the_stream_decides_between_a_bar_and_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_progress(1, Terminal()), RichProgress)
    assert isinstance(make_progress(1, io.StringIO()), PlainProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_progress(1, Terminal()), PlainProgress)
    with make_progress(1) as progress:
        progress.on_event(0, Phase("load"))
    assert capsys.readouterr().err == "load the model\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_selection_in_a_log_is_aligned_text() -> None:
    stream = io.StringIO()
    print_selection(from_selections(2, [("m", SELF, "ulysses", 30), ("m", CROSS, "local", 30)]), stream)
    assert stream.getvalue().splitlines() == [
        "role   backend             source                                         strategy  layers",
        "self   TORCH_SDPA (torch)  platform                                       ulysses   30",
        "cross  TORCH_SDPA (torch)  role: attention.per_role.cross [command line]  local     30",
        f"self: not FLASH_ATTN: {MISSING.rule}",
    ]


def test_a_selection_in_a_terminal_is_a_table_and_names_who_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    print_selection(merge([(0, ran(SELF)), (1, ran(FLASH))], 2), stream)
    shown = stream.getvalue()
    assert "\x1b[" in shown
    for text in (
        "FLASH_ATTN (fa3)",
        "ranks",
        "scaled_dot_product_attention",
        "backend: rank 0 TORCH_SDPA, rank 1 FLASH",
    ):
        assert text in shown


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["log", "terminal"])
def test_a_lossy_role_says_so_in_the_printed_table(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    lossy = replace(CROSS, exactness="lossy-quantised")
    print_selection(from_selections(2, [("m", SELF, "ulysses", 30), ("m", lossy, "local", 30)]), stream)
    lines = [line for line in stream.getvalue().splitlines() if "TORCH_SDPA" in line or "exactness" in line]
    assert ["exactness" in lines[0], " exact " in lines[1], "lossy-quantised" in lines[2]] == [True] * 3


def test_an_empty_selection_prints_nothing() -> None:
    stream = io.StringIO()
    print_selection(merge([], 1), stream)
    assert stream.getvalue() == ""


def test_the_last_step_is_told_before_the_decoding_that_another_rank_has_begun() -> None:
    stream = io.StringIO()
    progress = PlainProgress(2, stream)
    for rank in (0, 1):
        progress.on_event(rank, Step(0, 1, 2, 0.1))
    progress.on_event(0, Step(0, 2, 2, 0.1))
    progress.on_event(0, Phase("decode", 0))
    progress.on_event(1, Step(0, 2, 2, 0.1))
    assert [line.split(",")[0] for line in stream.getvalue().splitlines()] == [
        "step 1/2",
        "step 2/2",
        "decode the frames",
    ]


DEVICE = Fault("run.device", "tpu", "is not a device", "use cpu or cuda", ("cpu", "cuda"), "command line")


def test_a_fault_is_one_line_that_names_allowed_values_once() -> None:
    stream = io.StringIO()
    hidden = replace(DEVICE, remedy="use another", rule="is not\na device", origin="")
    print_faults([DEVICE, hidden, replace(DEVICE, allowed=("cp", "cuda"))], stream)
    assert stream.getvalue().splitlines() == [
        "error: run.device=tpu: is not a device; use cpu or cuda [command line]",
        "error: run.device=tpu: is not a device; use another (allowed: cpu, cuda)",
        "error: run.device=tpu: is not a device; use cpu or cuda [command line] (allowed: cp, cuda)",
    ]


def test_a_fault_in_a_terminal_is_not_wrapped_and_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    print_faults([replace(DEVICE, remedy="use [bold]cpu[/bold] or cuda " + "x" * 200)], stream)
    assert stream.getvalue().count("\n") == 1
    assert "[bold]cpu[/bold]" in stream.getvalue()
    assert "error:" in stream.getvalue()
