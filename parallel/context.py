"""What an attention layer needs from its surroundings, handed over at construction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Self

from backends.calibration import Calibration, Uncalibrated
from backends.layer_facts import DenoisingTime, LayerFacts
from backends.platforms.facts import DeviceFacts
from backends.probe import import_faults
from backends.registry import Registry
from backends.selection import Agreement
from backends.selector import Selector
from configs.schema import AttentionConfig, ParallelConfig
from parallel.admission import Admissions
from parallel.events import Event
from parallel.kept import Kept
from parallel.mesh import Mesh
from parallel.transport.base import Transport


@dataclass(frozen=True)
class AttentionContext:
    """mesh and transport of this rank, the catalog and configuration to choose from, and where events go.

    dtype: of the activations, by name. emit: called on the rank's own thread with each event. agreement: what the
    ranks settled on for automatic roles. calibrations: of the checkpoint's models by name (`transformer`). denoising:
    the time that all layers share; whoever drives the steps tells it. parallel: the strategy and the degrees that are
    asked for.
    """

    mesh: Mesh
    transport: Transport
    registry: Registry
    config: AttentionConfig
    device: DeviceFacts
    dtype: str
    emit: Callable[[Event], None]
    agreement: Agreement | None = None
    calibrations: Mapping[str, Calibration | Uncalibrated] = field(default_factory=dict)
    denoising: DenoisingTime | None = None
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __deepcopy__(self, memo: object) -> Self:
        """The copy of a model, as of its averaged weights, is of the same rank."""
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release what the transport holds; its layers cannot exchange after it. It may be called twice."""
        self.transport.close()

    @cached_property
    def selector(self) -> Selector:
        """One for all layers, so that each role is resolved once."""
        return Selector(self.device, self.config, self.registry, self.agreement, import_faults)

    @cached_property
    def admissions(self) -> Admissions:
        """One for all layers, which may share plans."""
        return Admissions(self.mesh)

    @cached_property
    def kept(self) -> Kept:
        """One for all layers, which may need the same windows and indices."""
        return Kept()

    def layer_facts(self, model: str, name: str) -> LayerFacts:
        """What options may need to know of a layer."""
        unknown = Uncalibrated(f"the layer's context has calibrations of {', '.join(self.calibrations) or 'no model'}")
        return LayerFacts(model, name, self.calibrations.get(model, unknown), self.denoising)


_ambient: ContextVar[AttentionContext | None] = ContextVar("attention_context", default=None)


@contextmanager
def attention_context(context: AttentionContext) -> Iterator[None]:
    """Layers that are constructed inside take this context unless they are given one."""
    token = _ambient.set(context)
    try:
        yield
    finally:
        _ambient.reset(token)


def current_context() -> AttentionContext:
    """The context of the enclosing `attention_context`. Raises LookupError outside of one."""
    context = _ambient.get()
    if context is None:
        raise LookupError(
            "no attention context: pass context=..., or construct inside `with attention_context(context):`"
        )
    return context
