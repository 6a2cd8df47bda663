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
from dataclasses import asdict

import torch

from backends.interface import AttentionMetadata
from backends.requirements import NO_FEATURES, Features
from parallel.agreement import ForwardFacts, agree
from parallel.attention import Attention
from parallel.mesh import Mesh
from parallel.plan import Grid, ShardPlan, Strategy, Stream, plan_streams
from parallel.planner import Way

Issued = tuple[Mapping[Way, ShardPlan], ShardPlan | None]
"""The plans of a forward, and where its rows lie if no layer exchanges anything."""


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
    it, whatever happened. count: forwards that were begun.
    """

    def __init__(self, name: str, layers: Sequence[Attention], mesh: Mesh) -> None:
        self.name, self.layers = name, tuple(layers)
        self.count = 0
        self.plans: Mapping[Way, ShardPlan] = {}
        self._mesh = mesh
        self._selections = ", ".join(sorted({_told(layer) for layer in layers}))
        self._constructed = {layer.rules.role: layer.rules.call.features for layer in layers}
        self._carried: Mapping[str, Features] = self._constructed
        self._alone: ShardPlan | None = None
        self._done = 0
        self._again = False

    @property
    def issued(self) -> Issued:
        """The plans of the forward under way, for `again`."""
        return self.plans, self._alone

    def is_under_way(self, issued: Issued) -> bool:
        """Whether the forward of these plans is not over yet."""
        return self._alone is not None and self._alone is issued[1]

    @contextmanager
    def again(self, issued: Issued) -> Iterator[None]:
        """Calls of a forward that is over: a backward pass computes them again, in an order of its own."""
        before = self.plans, self._alone, self._again
        (self.plans, self._alone), self._again = issued, True
        try:
            yield
        finally:
            self.plans, self._alone, self._again = before

    @property
    def plan(self) -> ShardPlan | None:
        """Where the rows of the forward under way lie outside attention; None outside one."""
        return next(iter(self.plans.values()), self._alone)

    @property
    def sharded_layers(self) -> Mapping[Way, tuple[Attention, int]]:
        """A layer, and how many there are, of each way that exchanges something."""
        exchanging = [layer for layer in self.layers if layer.strategy != "local"]
        counts = Counter(layer.way for layer in exchanging)
        return {layer.way: (layer, counts[layer.way]) for layer in exchanging}

    def begin(
        self,
        *streams: Stream,
        batch: int,
        dtype: torch.dtype,
        beside: Sequence[Stream] = (),
        carried: Mapping[str, Features] | None = None,
    ) -> None:
        """Agree on a forward over these streams, and make its plans.

        beside: streams that no layer exchanges, but all ranks must have alike, such as the text of cross-attention.
        carried: what the calls of a role carry, where that is not what its layers were constructed for.
        Raises RankDisagreementError, on every rank, if ranks are about to run different forwards.
        """
        self.end()
        self.count += 1
        self._carried = {**self._constructed, **(carried or {})}
        agree(
            ForwardFacts(
                number=self.count,
                model=self.name,
                batch=batch,
                streams=", ".join(map(_stream_text, (*streams, *beside))),
                carried=", ".join(f"{role} {_features_text(each)}" for role, each in sorted(self._carried.items())),
                gradient=torch.is_grad_enabled(),
                dtype=str(dtype).removeprefix("torch."),
                selections=self._selections,
            ),
            self._mesh,
        )
        self.plans = {way: layer.plan_of(*streams) for way, (layer, _) in self.sharded_layers.items()}
        # Where no layer exchanges anything, the rows still have to be somewhere.
        self._alone = _rows_alone(streams, self.layers[0], self._mesh.world_size)

    def plan_for(self, layer: Attention, metadata: AttentionMetadata | None = None) -> ShardPlan:
        """The plan of a layer's call in the forward under way. Ask for it right before the call.

        Raises LayerOrderError if it is another layer's turn, ValueError if the call carries something else than was
        agreed, and RuntimeError outside a forward.
        """
        if self._alone is None:
            raise RuntimeError(f"{self.name}: {layer.name} was called outside the model's own forward")
        agreed, given = self._carried[layer.rules.role], NO_FEATURES if metadata is None else metadata.features
        if given != agreed:
            raise ValueError(
                f"{layer.name}: the call carries {_features_text(given)}; the ranks agreed on {_features_text(agreed)} "
                "for this forward"
            )
        if self._mesh.world_size > 1 and not self._again and not torch.compiler.is_compiling():
            self._take_turn(layer)  # what is compiled keeps its order
        return self.plans.get(layer.way, self._alone)

    def finish(self) -> None:
        """Call before the forward's last exchange. Raises LayerOrderError if a layer was not called."""
        if self._mesh.world_size > 1 and self._done < len(self.layers) and not torch.compiler.is_compiling():
            raise LayerOrderError(self.name, None, self.layers[self._done].name)

    def end(self) -> None:
        """Nothing of the forward is valid any more."""
        self.plans, self._alone, self._done = {}, None, 0

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


def _told(layer: Attention) -> str:
    """What all ranks must have alike of a layer."""
    selection, call = layer.selection, layer.rules.call
    heads = f"{call.heads}/{call.kv_heads} heads of {call.head_size}"
    way = f"{layer.way} {layer.way.exchange}"
    return f"{selection.role}={selection.backend}/{selection.variant} ({selection.class_path}), {heads}, by {way}"


def _stream_text(stream: Stream) -> str:
    return f"{stream.name} {stream.length}" if stream.sharded else f"{stream.name} {stream.length} on each"


def _features_text(features: Features) -> str:
    found = [name for name, value in asdict(features).items() if value is True]
    if features.mask != "none":
        found.insert(0, f"{features.mask} mask")
    return " and ".join(found) or "nothing"
