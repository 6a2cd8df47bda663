"""What a user sees while ranks work: a bar in a terminal, plain lines in a log; and the tables and errors around it."""

from __future__ import annotations

import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from configs.faults import Fault
from parallel.events import Event
from runtime.report import SelectionReport, note_lines, table_columns, table_rows
from runtime.step_meter import DONE, PhaseBegan, StepMeter, StepsDone

if TYPE_CHECKING:
    from rich.console import Console

STEP_LINES_EVERY_S = 5.0
PHASES = {
    "resolve": "choose the attention backends",
    "join": "join the group",
    "load": "load the model",
    "encode": "encode the prompt",
    "denoise": "denoise",
    "decode": "decode the frames",
    "sheet": "write the contact sheet",
    "video": "encode the video",
    "check": "compare the results with fp64",
    "time": "time the calls",
}


class Progress(ABC):
    """Shows a run's events.

    Args:
        world_size: How many ranks report.
        requests: How many requests the run has; several are numbered.
        noun: What a request is called.
        unit: What a step is called.
    """

    def __init__(self, world_size: int, *, requests: int = 1, noun: str = "request", unit: str = "step") -> None:
        self._meter = StepMeter(world_size, unit)
        self._requests, self._noun = requests, noun

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def expect(self, world_size: int) -> None:
        """Says how many ranks report, when that is known only after the construction."""
        self._meter.expect(world_size)

    def on_event(self, rank: int, event: Event) -> None:
        """Takes any event of a rank; phases and steps are shown."""
        for news in self._meter.on_event(rank, event):
            if isinstance(news, PhaseBegan):
                self._begin(news)
            else:
                self._show_steps(news)

    def begin(self, phase: str) -> None:
        """Shows a phase of the driver itself, such as `video`."""
        self._begin(PhaseBegan(phase, None))

    def _begin(self, phase: PhaseBegan) -> None:
        self._show_phase(phase, self._request_label(phase.request) + PHASES.get(phase.name, phase.name))

    def _request_label(self, request: int | None) -> str:
        return "" if request is None or self._requests == 1 else f"{self._noun} {request + 1}/{self._requests}: "

    @abstractmethod
    def message(self, text: str) -> None:
        """A line of text, above the bar if there is one."""

    @abstractmethod
    def close(self) -> None:
        """Nothing moves after this; it may be called twice."""

    @abstractmethod
    def _show_phase(self, phase: PhaseBegan, text: str) -> None: ...

    @abstractmethod
    def _show_steps(self, steps: StepsDone) -> None: ...


class PlainProgress(Progress):
    """Lines: one when a phase begins; for steps the first, the last, and at most one every 5 s between them."""

    def __init__(
        self,
        world_size: int,
        stream: TextIO,
        *,
        requests: int = 1,
        noun: str = "request",
        unit: str = "step",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(world_size, requests=requests, noun=noun, unit=unit)
        self._stream = stream
        self._clock = clock
        self._last_line: dict[int, float] = {}

    def message(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()

    def _show_phase(self, phase: PhaseBegan, text: str) -> None:
        self.message(text)

    def _show_steps(self, steps: StepsDone) -> None:
        now = self._clock()
        last = self._last_line.get(steps.request)
        if last is None or steps.step == steps.steps or now - last >= STEP_LINES_EVERY_S:
            self._last_line[steps.request] = now
            self.message(self._request_label(steps.request) + steps.text)


class RichProgress(Progress):
    """A bar that is redrawn in place, for a terminal."""

    def __init__(
        self,
        world_size: int,
        console: Console,
        *,
        requests: int = 1,
        noun: str = "request",
        unit: str = "step",
        clock: Callable[[], float] = time.monotonic,
        redirect_stderr: bool = False,
    ) -> None:
        from rich import progress
        from rich.table import Column

        super().__init__(world_size, requests=requests, noun=noun, unit=unit)
        self._bar = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=24),
            progress.TextColumn("{task.fields[detail]}", markup=False),
            # In a narrow terminal the bar shrinks, not the time.
            progress.TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=len("0:00:00"))),
            console=console,
            get_time=clock,
            # Standard output may be a file or a pipe whose reader wants exactly what was printed there.
            redirect_stdout=False,
            redirect_stderr=redirect_stderr,
        )
        self._bar.add_task("start", total=None, detail="")
        (self._task,) = self._bar.tasks

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # a bar that stays behind says how it ended
            self._show_phase(PhaseBegan(DONE, None), DONE)
        self.close()

    def message(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()

    def _show_phase(self, phase: PhaseBegan, text: str) -> None:
        self._draw(text, "", *((1, 1) if phase.name == DONE else (0, None)))

    def _show_steps(self, steps: StepsDone) -> None:
        self._draw(self._task.description, steps.text, steps.step, steps.steps)

    def _draw(self, description: str, detail: str, completed: int, total: int | None) -> None:
        """Draws the bar; without a total it pulses, since the time that a load or a decode takes is unknown."""
        # Rich's update() and reset() read total=None as "unchanged", and a task whose steps are complete stays frozen.
        self._task.total, self._task.completed, self._task.finished_time = total, completed, None
        self._bar.update(self._task.id, description=description, detail=detail, completed=completed, refresh=True)


def make_progress(
    world_size: int,
    stream: TextIO | None = None,
    *,
    requests: int = 1,
    noun: str = "request",
    unit: str = "step",
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """A bar if the stream (standard error by default) is a terminal, plain lines otherwise."""
    stream = sys.stderr if stream is None else stream
    if _is_terminal(stream):
        on_stderr = stream is sys.stderr  # then what others print there goes above the bar, not through it
        console = _console(stream)
        return RichProgress(
            world_size, console, requests=requests, noun=noun, unit=unit, clock=clock, redirect_stderr=on_stderr
        )
    return PlainProgress(world_size, stream, requests=requests, noun=noun, unit=unit, clock=clock)


def print_selection(report: SelectionReport, stream: TextIO) -> None:
    """The report as a table, in plain text if the stream is no terminal; what was passed over, and why, below it."""
    headings, rows = table_columns(report), table_rows(report)
    if not rows:
        return
    # Before anything has run there are no ranks and no kernels to show.
    shown = [place for place in range(len(headings)) if not rows or any(row[place] != "-" for row in rows)]
    headings = tuple(headings[place] for place in shown)
    rows = [tuple(row[place] for place in shown) for row in rows]
    notes = note_lines(report)
    if not _is_terminal(stream):
        stream.write("".join(f"{line}\n" for line in [*aligned([headings, *rows]), *notes]))
        stream.flush()
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading == "layers" else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = _console(stream)
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def print_faults(faults: Iterable[Fault], stream: TextIO) -> None:
    """`error: KEY=VALUE: rule; remedy`, one line a fault; the allowed values follow unless it names them."""
    console = _console(stream) if _is_terminal(stream) else None
    for fault in faults:
        text = " ".join(str(fault).splitlines())
        if fault.allowed and not all(_names(f"{fault.rule} {fault.remedy}", value) for value in fault.allowed):
            text += f" (allowed: {', '.join(fault.allowed)})"
        if console is None:
            stream.write(f"error: {text}\n")
        else:
            console.print("error:", style="bold red", end=" ")
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    stream.flush()


def _names(text: str, value: str) -> bool:
    """Whether the value stands in the text as a word of its own."""
    return re.search(rf"(?<![\w.-]){re.escape(value)}(?![\w-])", text) is not None


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as lines, their columns under each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(file=stream)
