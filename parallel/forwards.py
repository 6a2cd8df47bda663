"""The forwards of a model over a mesh: agreed on by all ranks before they start, they issue the plans of their calls
and know whose turn it is.

A plan that a rank makes or remembers alone is not enough: two ranks may each hold a valid one, of different forwards.
Nor is agreement alone: a rank that skips a layer would meet the exchange of another layer, of the same sizes, and mix
both up without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

import torch

from backends.interface import AttentionMetadata
from configs.faults import Fault, FaultError
from parallel.agreement import Carried, ForwardFacts, agree, features_text, streams_text
from parallel.argument_types import wrong_dimensions, wrong_types
from parallel.attention import NO_METADATA, Attention
from parallel.mesh import Mesh
from parallel.opaque import outside_graphs
from parallel.plan import Grid, ShardPlan, Strategy, Stream, plan_streams
from parallel.planner import Way
from parallel.transport.errors import ExchangeError


class Shape(NamedTuple):
    """What a layer's plan depends on beside the streams, and what its calls move. zigzag: as `ShardPlan` has it."""

    way: Way
    heads: int
    kv_heads: int
    head_size: int
    value_head_size: int
    zigzag: bool


Issued = tuple[Mapping[Shape, ShardPlan], ShardPlan | None]
"""The plans of a forward, and where its rows lie outside attention."""


class LayerOrderError(Exception):
    """A call out of turn, refused before its exchange. called: the layer, or None at the end of a forward; expected:
    the layer whose turn it was, or None if all had been called.
    """

    def __init__(self, model: str, called: str | None, expected: str | None) -> None:
        self.model, self.called, self.expected = model, called, expected
        super().__init__(model, called, expected)

    def __str__(self) -> str:
        what = "the forward ends" if self.called is None else f"{self.called} was called"
        turn = "every layer has had its turn" if self.expected is None else f"it is the turn of {self.expected}"
        return (
            f"{self.model}: {what}, and {turn}; every rank calls all layers in one order, as the exchange of one layer "
            "would meet that of another; do not skip, repeat or reorder layers on some ranks"
        )


class Forwards:
    """layers: of the model, in the order in which a forward calls them, each once. name: of the model in errors.

    A forward is `begin`, then for each layer a call with the plan that `plan_for` gives out, then `finish`; `end` after
    it, whatever happened. count: forwards that were begun. plans: of the layers that exchange something.

    Raises FaultError for layers that want the same rows at different places.
    """

    def __init__(self, name: str, layers: Sequence[Attention], mesh: Mesh) -> None:
        self.name, self.layers = name, tuple(layers)
        self.count = 0
        self.plans: Mapping[Shape, ShardPlan] = {}
        self._mesh = mesh
        self._sharded = {_shape(layer): layer for layer in layers if layer.strategy != "local"}
        self._selections = ", ".join(sorted({layer.rules.told for layer in layers}))
        self._carried: Mapping[str, Carried] = {}
        self._held: ShardPlan | None = None
        self._tensors = (0, torch.float32)
        self._done = 0
        self._again = False
        _raise_places(name, list(self._sharded.values()))

    @property
    def issued(self) -> Issued:
        """The plans of the forward under way, for `again`."""
        return self.plans, self._held

    def is_under_way(self, issued: Issued) -> bool:
        """Whether the forward of these plans is not over yet."""
        return self._held is not None and self._held is issued[1]

    @contextmanager
    def again(self, issued: Issued) -> Iterator[None]:
        """Calls of a forward that is over: a backward pass computes them again, in an order of its own."""
        before = self.plans, self._held, self._again
        (self.plans, self._held), self._again = issued, True
        try:
            yield
        finally:
            self.plans, self._held, self._again = before

    @property
    def plan(self) -> ShardPlan | None:
        """Where the rows of the forward under way lie outside attention; None outside one."""
        return self._held

    @property
    def sharded(self) -> Mapping[Shape, int]:
        """How many layers there are of each shape that exchange something."""
        return Counter(_shape(layer) for layer in self.layers if layer.strategy != "local")

    @outside_graphs
    def begin(
        self,
        *streams: Stream,
        batch: int,
        dtype: torch.dtype,
        beside: Sequence[Stream] = (),
        carried: Mapping[str, AttentionMetadata] | None = None,
        gradient: bool | None = None,
    ) -> None:
        """Agree on a forward over these streams, and make its plans.

        beside: streams that no layer exchanges, but all ranks must have alike, such as the text of cross-attention.
        carried: what the calls of a role carry. It is required for windows, soft caps and documents, whose values the
        ranks have to agree on, and where it differs from what the layers were constructed for. gradient: whether its
        layers will record some (default: whether torch does).
        Raises RankDisagreementError, on every rank, if ranks are about to run different forwards.
        """
        self.end()
        self.count += 1
        carried = carried or {}
        problems = {role: wrong_types(metadata) or wrong_dimensions(metadata) for role, metadata in carried.items()}
        for role, problem in problems.items():
            if problem is not None:
                raise ValueError(f"{self.name}: carried[{role!r}]: {problem}")
        self._carried = {role: Carried.of(metadata) for role, metadata in carried.items()}
        self._tensors = batch, dtype
        carrying = {(layer.rules.role, self._agreed_text(layer)) for layer in self.layers}
        facts = ForwardFacts(
            number=self.count,
            model=self.name,
            batch=batch,
            streams=streams_text((*streams, *beside)),
            carried=", ".join(f"{role} {text}" for role, text in sorted(carrying)),
            gradient=torch.is_grad_enabled() if gradient is None else gradient,
            dtype=str(dtype).removeprefix("torch."),
            selections=self._selections,
        )
        try:
            agree(facts, self._mesh)
        except ExchangeError as error:
            error.layer = self.name
            raise
        self.plans = {shape: layer.plan_among(*streams, agreed=True) for shape, layer in self._sharded.items()}
        # Where no layer exchanges anything, the rows still have to be somewhere.
        self._held = next(iter(self.plans.values()), None) or _rows_alone(
            streams, self.layers[0], self._mesh.world_size
        )

    def _agreed_text(self, layer: Attention) -> str:
        """What a layer's calls carry in this forward."""
        carried = self._carried.get(layer.rules.role)
        return features_text(layer.rules.call.features) if carried is None else str(carried)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            "a model whose sequence is shared cannot be copied, as its hooks belong to it alone: copy it before "
            "raylysses.sequence_parallel, or after the close() of what that returned"
        )

    @outside_graphs
    def plan_for(
        self, layer: Attention, metadata: AttentionMetadata | None = None, *, query: torch.Tensor | None = None
    ) -> ShardPlan:
        """The plan of a layer's call in the forward under way. Ask for it right before the call. query: of the call.

        Raises LayerOrderError if it is another layer's turn, ValueError if the call carries something that the ranks
        did not agree on, or is of another batch or dtype, and RuntimeError outside a forward.
        """
        if self._held is None:
            raise RuntimeError(f"{self.name}: {layer.name} was called outside the model's own forward")
        layer.announced = self._checked_carried(layer, NO_METADATA if metadata is None else metadata)
        if query is not None and self._mesh.world_size > 1:
            self._check_tensors(layer, query)
        if self._mesh.world_size > 1 and not self._again:
            self._take_turn(layer)
        return self.plans.get(_shape(layer), self._held)

    def _checked_carried(self, layer: Attention, metadata: AttentionMetadata) -> Carried:
        """What a call carries. Raises ValueError if the ranks did not agree on it."""
        problem = wrong_types(metadata) or wrong_dimensions(metadata)
        if problem is not None:
            raise ValueError(f"{layer.name}: {problem}")
        carried, agreed = Carried.of(metadata), self._carried.get(layer.rules.role)
        same = carried.features == layer.rules.call.features if agreed is None else carried == agreed
        if not same:
            raise ValueError(
                f"{layer.name}: the call carries {carried}; the ranks agreed on {self._agreed_text(layer)} for this "
                "forward"
            )
        if agreed is None and carried.has_values and self._mesh.world_size > 1:
            raise ValueError(
                f"{layer.name}: the call carries {carried}, and the ranks agreed on no values for this forward; give "
                f"carried={{{layer.rules.role!r}: metadata}} to begin"
            )
        return carried

    def _check_tensors(self, layer: Attention, query: torch.Tensor) -> None:
        """The dtype may be that of the layers, where inputs have another one: ranks have both alike."""
        batch, dtype = self._tensors
        dtypes = {dtype, getattr(torch, layer.rules.call.dtype)}
        if query.shape[0] != batch or query.dtype not in dtypes:
            raise ValueError(
                f"{layer.name}: the call is of batch {query.shape[0]} of {query.dtype}; the ranks agreed on batch "
                f"{batch} of {dtype} for this forward"
            )

    @outside_graphs
    def finish(self) -> None:
        """Call before the forward's last exchange. Raises LayerOrderError if a layer was not called."""
        if self._mesh.world_size > 1 and self._done < len(self.layers):
            raise LayerOrderError(self.name, None, self.layers[self._done].name)

    @outside_graphs
    def end(self) -> None:
        """Nothing of the forward is valid any more."""
        self.plans, self._held, self._done = {}, None, 0

    def _take_turn(self, layer: Attention) -> None:
        expected = self.layers[self._done] if self._done < len(self.layers) else None
        if layer is not expected:
            raise LayerOrderError(self.name, layer.name, None if expected is None else expected.name)
        self._done += 1


def _rows_alone(streams: Sequence[Stream], layer: Attention, ranks: int) -> ShardPlan:
    """Where rows lie if no layer exchanges anything."""
    call = layer.rules.call
    strategy: Strategy = "local" if ranks == 1 else "ulysses"
    return plan_streams(tuple(streams), call.heads, Grid(ranks), strategy, kv_heads=call.kv_heads)


def _shape(layer: Attention) -> Shape:
    call = layer.rules.call
    return Shape(layer.way, call.heads, call.kv_heads, call.head_size, layer.rules.value_head_size, layer.rules.zigzag)


def _raise_places(model: str, layers: Sequence[Attention]) -> None:
    """Raises FaultError if the plans of two layers give a rank other rows: outside attention it holds some rows only
    once.
    """
    places = {layer.way.grid if layer.rules.zigzag else None: layer for layer in layers}
    if len(places) < 2:
        return
    told = [
        f"{layer.name} ({layer.rules.role}) by {layer.way} wants "
        + ("one piece of them" if grid is None else "an early and a late piece")
        for grid, layer in places.items()
    ]
    rule = f"a rank holds its rows of {model} at one place, and {', '.join(told)}"
    remedy = "use parallel.strategy=ulysses or gather_kv, or make all of them causal, or none"
    raise FaultError([Fault("parallel.strategy", None, rule, remedy)])
