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
_PHASES = {
    "join": "join the group",
    "load": "load the model",
    "agree": "agree on the attention backends",
    "encode": "encode the prompt",
    "denoise": "denoise",
    "decode": "decode the frames",
    "check": "compare the results with fp64",
    "time": "time the calls",
}


class Progress(ABC):
    """Shows a run's events. world_size: how many ranks report; requests: how many are made (numbered if several).
    noun: what a request is called.
    """

    def __init__(self, world_size: int, *, requests: int = 1, noun: str = "request") -> None:
        self._meter = StepMeter(world_size)
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
                self._show_phase(news, self._request_label(news.request) + _PHASES.get(news.name, news.name))
            else:
                self._show_steps(news)

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(world_size, requests=requests, noun=noun)
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
        clock: Callable[[], float] = time.monotonic,
        redirect_stderr: bool = False,
    ) -> None:
        from rich import progress

        super().__init__(world_size, requests=requests, noun=noun)
        self._bar = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=24),
            progress.TextColumn("{task.fields[detail]}", markup=False),
            progress.TimeElapsedColumn(),
            console=console,
            get_time=clock,
            # Standard output may be a file or a pipe whose reader wants exactly what was printed there.
            redirect_stdout=False,
            redirect_stderr=redirect_stderr,
        )
        self._task = self._bar.add_task("start", total=None, detail="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # a bar that stays behind says how it ended
            self._bar.update(self._task, description=DONE, detail="", total=1, completed=1)
        self.close()

    def message(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()

    def _show_phase(self, phase: PhaseBegan, text: str) -> None:
        # Without a total the bar pulses: how long a load or a decode takes is not known.
        if phase.name == DONE:
            self._bar.update(self._task, description=text, detail="", total=1, completed=1, refresh=True)
        else:
            self._bar.update(self._task, description=text, detail="", total=None, completed=0, refresh=True)

    def _show_steps(self, steps: StepsDone) -> None:
        self._bar.update(self._task, detail=steps.text, total=steps.steps, completed=steps.step, refresh=True)


def make_progress(
    world_size: int,
    stream: TextIO | None = None,
    *,
    requests: int = 1,
    noun: str = "request",
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """A bar if the stream (standard error by default) is a terminal, plain lines otherwise."""
    stream = sys.stderr if stream is None else stream
    if _is_terminal(stream):
        on_stderr = stream is sys.stderr  # then what others print there goes above the bar, not through it
        console = _console(stream)
        return RichProgress(world_size, console, requests=requests, noun=noun, clock=clock, redirect_stderr=on_stderr)
    return PlainProgress(world_size, stream, requests=requests, noun=noun, clock=clock)


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
