"""One rank of a bench: it builds the cells of the grid, compares each with fp64, and times those that are right."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from backends.interface import AttentionMetadata
from backends.kernels.reference import plain_attention
from backends.registry import Registry
from configs.faults import FaultError
from parallel.attention import Attention
from parallel.context import AttentionContext
from parallel.events import Event, Phase, Step
from parallel.pieces import take
from parallel.plan import Stream
from parallel.rows import Rows, rows
from parallel.transport.guard import exchange
from runtime.bench.choice import choice_of
from runtime.bench.grid import ROLE, Case, Shape
from runtime.bench.results import Checked, Refused, Report, RoundDone
from runtime.bench.spec import BenchSpec
from runtime.setup import RankSpec
from runtime.worker import Member, in_thread

CHECKED_ROWS = 64
"""Of each rank, from its first to its last: fp64 attention of all rows would take longer than all else."""
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 5e-3}
LOSSY = 0.1
"""Relative L2 error of a backend that is declared lossy."""

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Emit = Callable[[Event | Report], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """A case that is ready to be called. held: the positions of its result's rows. qkv: of the whole sequence."""

    case: Case
    layer: Attention
    call: Callable[[], torch.Tensor]
    held: Rows
    qkv: Tensors


class BenchRank(Member):
    """The work of one rank of a bench."""

    def bench(self, spec: RankSpec, asked: BenchSpec) -> Iterator[Event | Report]:
        self.take_place(spec)
        yield from in_thread(lambda emit: self._bench(asked, emit), self.device)

    def _bench(self, asked: BenchSpec, emit: Emit) -> None:
        emit(Phase("join"))
        self.join()
        self._registry = Registry.exactly(self.spec.backends)
        self._facts = self.device_facts(self._registry)
        self._transport = self.open_transport()
        per_shape = len(asked.cases) // len(asked.shapes)
        with torch.no_grad():
            for index, shape in enumerate(asked.shapes):
                cases = asked.cases[index * per_shape : (index + 1) * per_shape]
                emit(Phase("check", index))
                cells = self._right_cells(cases, shape, asked.causal, emit)
                emit(Phase("time", index))
                self._time(index, cells, asked.rounds, emit)
                emit(Phase("done", index))

    def _right_cells(self, cases: tuple[Case, ...], shape: Shape, causal: bool, emit: Emit) -> list[Cell]:
        """The cells that every rank serves, and whose results are right on every rank."""
        qkv = self._draw(shape)
        exact = _Exact(causal)
        found = []
        for case in cases:
            reasons = self._refusal(case, causal)
            if reasons:
                emit(Refused(case.index, reasons))
                continue
            cell = self._kernel(case, qkv, causal) if case.is_baseline else self._sharded(case, qkv, causal)
            checked = self._check(cell, exact)
            emit(checked)
            if all(self._all(checked.error <= checked.tolerance)):
                found.append(cell)
        return found

    def _all(self, fact: T) -> list[T]:
        """A fact of every rank, by rank."""
        told = [fact] * self.mesh.world_size
        if self.mesh.control is not None:
            with exchange("the comparison of facts"):
                dist.all_gather_object(told, fact, group=self.mesh.control)
        return told

    def _draw(self, shape: Shape) -> Tensors:
        """Q, K and V of the whole sequence, the first rank's on all of them."""
        generator = torch.Generator(self.device).manual_seed(self.spec.config.run.seed)
        dtype = getattr(torch, self.spec.dtype)

        def drawn(heads: int) -> torch.Tensor:
            size = shape.batch, shape.length, heads, shape.head_size
            tensor = torch.randn(size, generator=generator, device=self.device, dtype=dtype)
            if self.mesh.data is not None:
                with exchange("the broadcast of the inputs"):
                    dist.broadcast(tensor, group=self.mesh.data, group_src=0)
            return tensor

        return drawn(shape.heads), drawn(shape.kv_heads), drawn(shape.kv_heads)

    def _context(self, case: Case) -> AttentionContext:
        return AttentionContext(
            mesh=self.mesh,
            transport=self._transport,
            registry=self._registry,
            config=case.attention,
            device=self._facts,
            dtype=self.spec.dtype,
            emit=lambda event: None,
            parallel=case.parallel,
        )

    def _refusal(self, case: Case, causal: bool) -> tuple[str, ...]:
        """Why a case cannot run, the same on every rank; asked before the layer is made, which forms groups."""
        told = self._all(self._choice(case, causal))
        refused = [(rank, reasons) for rank, (_, reasons) in enumerate(told) if reasons]
        if refused:
            rank, reasons = refused[0]
            where = "" if len(refused) == len(told) else f"on rank {rank}: "
            return tuple(f"{where}{reason}" for reason in reasons)
        if len({chosen for chosen, _ in told}) > 1:
            listed = ", ".join(f"rank {rank} chose {chosen}" for rank, (chosen, _) in enumerate(told))
            return (f"{listed}; name one backend, or give all nodes the same packages",)
        return ()

    def _choice(self, case: Case, causal: bool) -> tuple[str, tuple[str, ...]]:
        """What a case gets on this rank, or why it gets nothing."""
        try:
            planned = choice_of(case, causal, self.spec.dtype, self.mesh.world_size, self._context(case).selector)
        except FaultError as error:
            return "", tuple(str(fault) for fault in error.faults)
        chosen = planned.selection
        return f"{chosen.backend}/{chosen.variant} ({chosen.class_path}) by {planned.way}", ()

    def _layer(self, case: Case, causal: bool) -> Attention:
        shape = case.shape
        return Attention(
            shape.heads,
            shape.head_size,
            role=ROLE,
            kind="self",
            num_kv_heads=shape.kv_heads,
            causal=causal,
            skip_sequence_parallel=case.is_baseline,
            allow_trtllm_default=True,
            context=self._context(case),
            name=str(case),
            model="bench",
        )

    def _kernel(self, case: Case, whole: Tensors, causal: bool) -> Cell:
        """The bare kernel, on the first heads of the whole sequence."""
        layer, shape = self._layer(case, causal), case.shape
        counts = (shape.heads, shape.kv_heads, shape.kv_heads)
        query, key, value = (tensor[:, :, :count].contiguous() for tensor, count in zip(whole, counts, strict=True))
        none = AttentionMetadata()

        def call() -> torch.Tensor:
            return layer.kernel_call(query, key, value, none, causal=causal, lse=False).out

        return Cell(case, layer, call, rows(range(shape.length)), (query, key, value))

    def _sharded(self, case: Case, whole: Tensors, causal: bool) -> Cell:
        """The whole call, on this rank's rows."""
        layer = self._layer(case, causal)
        plan = layer.plan_of(Stream("sequence", case.shape.length))
        held = plan.shares[self.mesh.rank].query_rows
        query, key, value = (take(tensor, held).contiguous() for tensor in whole)
        return Cell(case, layer, lambda: layer(query, key, value, plan=plan), held, whole)

    def _check(self, cell: Cell, exact: _Exact) -> Checked:
        self._transport.take_traffic()
        began = time.perf_counter()
        out = cell.call()
        _synchronize(self.device)
        seconds = time.perf_counter() - began
        traffic, chosen = self._transport.take_traffic(), cell.layer.selection
        return Checked(
            case=cell.case.index,
            backend=chosen.backend,
            variant=chosen.variant,
            kernel=cell.layer.kernel,
            exactness=chosen.exactness,
            strategy=cell.layer.strategy,
            degrees=chosen.degrees,
            error=exact.error(out, cell),
            tolerance=TOLERANCE[self.spec.dtype] if chosen.exactness == "exact" else LOSSY,
            collectives=sum(traffic.calls.values()),
            bytes_sent=sum(traffic.bytes_sent.values()),
            first_s=seconds,
        )

    def _time(self, shape: int, cells: list[Cell], rounds: int, emit: Emit) -> None:
        """All cells take turns in every round, each round from another one on; all ranks begin a call together."""
        for cell in cells:
            cell.call()
        for number in range(rounds if cells else 0):
            began, first = time.perf_counter(), number % len(cells)
            taken = {}
            for cell in (*cells[first:], *cells[:first]):
                _synchronize(self.device)
                if self.mesh.control is not None:
                    with exchange("the barrier before a call"):
                        dist.barrier(group=self.mesh.control)
                taken[cell.case.index] = _milliseconds(cell.call, self.device)
            emit(RoundDone(shape, number, taken))
            emit(Step(shape, number + 1, rounds, time.perf_counter() - began))


class _Exact:
    """fp64 softmax attention of some rows of each result."""

    def __init__(self, causal: bool) -> None:
        self._causal = causal

    def error(self, out: torch.Tensor, cell: Cell) -> float:
        """Relative L2 of up to `CHECKED_ROWS` of the rows at hand; 0 where there are none."""
        query, key, value = cell.qkv
        expected = (query.shape[0], len(cell.held), query.shape[2], value.shape[3])
        if tuple(out.shape) != expected or not bool(torch.isfinite(out).all()):
            return math.inf
        if not len(cell.held):
            return 0.0
        at = torch.linspace(0, len(cell.held) - 1, min(CHECKED_ROWS, len(cell.held)), device=out.device).long()
        positions = torch.tensor(list(cell.held), device=out.device)[at]
        off = size = 0.0
        group = query.shape[2] // key.shape[2]
        for head in range(key.shape[2]):  # one at a time: fp64 scores and keys of all heads would fill a GPU
            mine = slice(head * group, (head + 1) * group)
            exact = plain_attention(
                query[:, positions, mine].double(),
                key[:, :, head : head + 1].double(),
                value[:, :, head : head + 1].double(),
                scale=query.shape[3] ** -0.5,
                mask=self._mask(positions, key.shape[1]),
            )
            off += float((out[:, at, mine].double() - exact).square().sum())
            size += float(exact.square().sum())
        return math.sqrt(off / max(size, 1e-300))

    def _mask(self, positions: torch.Tensor, keys: int) -> torch.Tensor | None:
        if not self._causal:
            return None
        return (torch.arange(keys, device=positions.device) <= positions[:, None])[None, None]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _milliseconds(call: Callable[[], torch.Tensor], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
