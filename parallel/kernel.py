"""What computes in an attention layer on one device: a backend's implementation, or the model's own module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

import torch

from backends.entries import resolve_entry
from backends.interface import AttentionBackend, AttentionImpl, AttentionMetadata, CallShape
from backends.registry import Registry
from backends.requirements import Requirements
from backends.selection import Rejected, Selection
from backends.variant import Compilation
from configs.faults import Fault, FaultError
from configs.fields import name_of
from configs.schema import AttentionConfig
from parallel.calls import records_gradient
from parallel.merge import wide
from parallel.opaque import Opaque, outside_graphs
from parallel.strategies.work import Result, over_nothing

CUSTOM = "custom_attention"
PLANS_KEPT = 32
"""By a layer, of the shapes that it met; of packed calls every set of lengths is one."""
_UNPLANNED = object()


class BackendKernel:
    """A backend's implementation, and its plans by shape. compilation: how a graph of torch.compile has its calls.

    make: the implementation for causal calls, and for others. A causal layer needs both where its keys come in blocks,
    of which the earlier ones are seen whole.
    """

    def __init__(self, make: Callable[[bool], AttentionImpl], causal: bool, compilation: Compilation) -> None:
        self._make = make
        self._impls = {causal: make(causal)}
        self._plans: dict[tuple[bool, CallShape], Any] = {}
        self.impl = self._impls[causal]
        self._compilation = compilation
        self._opaque = Opaque(partial(self._attend, causal)) if compilation == "custom-op" else None

    def __deepcopy__(self, memo: object) -> Self:
        return self  # it holds nothing that a model trains

    @property
    def name(self) -> str:
        """The dotted name of the callable that runs."""
        return self.impl.kernel

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        causal: bool,
        lse: bool,
    ) -> Result:
        if not query.numel() or not key.numel():  # implementations need not take those
            tied = [tensor for tensor in (key, value, metadata.sinks, metadata.bias) if tensor is not None]
            out, of_nothing = over_nothing(query, value.shape[3], metadata.sinks, *tied)
            return Result(out, of_nothing if lse else None)
        if self._compilation == "traceable" or not torch.compiler.is_compiling():
            return self._run(causal, query, key, value, metadata, lse)
        # The operator has neither a backward pass nor a log-sum-exp, and takes no block_mask.
        carried = not lse and metadata.block_mask is None and not records_gradient(query, key, value, metadata)
        if self._opaque is not None and carried:
            return Result(self._opaque(query, key, value, metadata), None)
        return self._run_outside(causal, query, key, value, metadata, lse)

    def _run(
        self,
        causal: bool,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        lse: bool,
    ) -> Result:
        if lse:
            impl = self._impl_of(causal)
            qkv = _loadable(impl, query, key, value)
            pair = impl.forward_with_lse(*qkv, metadata, *self._planned(impl, metadata, query, key))
            if not (isinstance(pair, tuple) and len(pair) == 2):
                rule = "forward_with_lse returns (output, log-sum-exp)"
                raise TypeError(f"{type(impl).__qualname__} returned {_kind(pair)}; {rule}")
            return Result(*pair)
        return Result(self._attend(causal, query, key, value, metadata), None)

    _run_outside = outside_graphs(_run)

    def _attend(
        self, causal: bool, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        impl = self._impl_of(causal)
        qkv = _loadable(impl, query, key, value)
        return impl.forward(*qkv, metadata, *self._planned(impl, metadata, query, key))

    def _impl_of(self, causal: bool) -> AttentionImpl:
        impl = self._impls.get(causal)
        return impl if impl is not None else self._impls.setdefault(causal, self._make(causal))

    def _planned(
        self, impl: AttentionImpl, metadata: AttentionMetadata, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[Any, ...]:
        """The plan, as the argument that it is; kernels that plan nothing need none."""
        planned = self._plan_of(impl, metadata, query, key)
        return () if planned is None else (planned,)

    def _plan_of(self, impl: AttentionImpl, metadata: AttentionMetadata, query: torch.Tensor, key: torch.Tensor) -> Any:
        if type(impl).plan is AttentionImpl.plan:
            return None  # also so that a compiler need not follow the shapes
        batch, rows, heads, size = query.shape
        keys, kv_heads = key.shape[1], key.shape[2]
        call = CallShape(batch, rows, keys, heads, kv_heads, size, metadata.features, metadata.packed)
        shape = (impl.causal, call)
        planned = self._plans.get(shape, _UNPLANNED)
        if planned is _UNPLANNED:
            while len(self._plans) >= PLANS_KEPT:
                self._plans.pop(next(iter(tuple(self._plans))), None)  # threads may call one layer
            planned = self._plans[shape] = impl.plan(call)
        return planned


def _loadable(
    impl: AttentionImpl, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    step = impl.alignment
    return aligned(query, step), aligned(key, step), aligned(value, step)


def aligned(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """The tensor, or a copy, if it does not begin, and each of its rows does not, at a multiple of `step` bytes from
    where its memory begins, or if the elements of a row are apart. A step of 1 takes any tensor.
    """
    if step == 1:
        return tensor
    size = tensor.element_size()
    *rows, element = tensor.stride()
    begins = _begins(tensor, step)
    if begins and element == 1 and not any(stride * size % step for stride in rows):
        return tensor
    if begins and tensor.is_contiguous():
        return tensor  # a copy would be the same
    return tensor.clone(memory_format=torch.contiguous_format)


def _begins(tensor: torch.Tensor, step: int) -> bool:
    """Whether the tensor begins at a multiple of so many bytes from where its memory begins. In a graph nothing tells:
    there, what is without gaps is taken to (as is what a graph computes and what models pass), and parts of more are
    not.
    """
    if torch.compiler.is_compiling():
        return tensor.is_contiguous() or tensor.transpose(1, 2).is_contiguous()
    return tensor.storage_offset() * tensor.element_size() % step == 0


class OwnKernel:
    """A model's module(query, key, value, metadata), which knows itself whether it is causal."""

    impl: AttentionImpl | None = None

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self._module = module
        self.name = name

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        causal: bool,
        lse: bool,
    ) -> Result:
        if lse:
            raise TypeError(f"{self.name} is the model's own attention, and returns no log-sum-exp")
        return Result(self._module(query, key, value, metadata), None)


def wrong_result(result: Result, query: torch.Tensor, value_size: int, lse: bool) -> str | None:
    """Returns what is wrong with a backend's output, as words that follow its name, or None."""
    if not isinstance(result.out, torch.Tensor):
        return f"returned {_kind(result.out)}; a backend's forward returns a tensor [B, S, H, Dv]"
    if lse:
        found, dtype = result.lse, wide(query.dtype)
        if not isinstance(found, torch.Tensor):
            return "returned no log-sum-exp; a backend that declares lse returns a tensor [B, H, Sq]"
        shape = (query.shape[0], query.shape[2], query.shape[1])
        if found.shape != shape or found.dtype != dtype:
            returned = f"a log-sum-exp of {found.dtype} {tuple(found.shape)}"
            return f"returned {returned}; a backend that declares lse returns {dtype} {shape}, which is [B, H, Sq]"
    out, expected = result.out, (*query.shape[:3], value_size)
    if out.shape != expected or out.dtype != query.dtype:
        return f"returned {out.dtype} {tuple(out.shape)}; a backend returns what its query is, {query.dtype} {expected}"
    return None


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def checked_overrides(overrides: Any, registry: Registry) -> dict[str, type[AttentionImpl]]:
    """Check a model's own implementations, whichever backend is selected.

    Args:
        overrides: What was passed as `impl_overrides`: backend name or Enum member -> class; None for no overrides.
        registry: The backends that can be selected.

    Returns:
        The classes by backend name.

    Raises:
        TypeError: It is not a mapping, or a value is not a subclass of AttentionImpl.
        FaultError: A key is not the name of a backend, so that nothing would use the class.
    """
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping):
        raise TypeError(f"impl_overrides is {overrides!r}; it is a mapping from backend names to classes")
    checked: dict[str, type[AttentionImpl]] = {}
    for key, own in overrides.items():
        name = name_of(key)
        registry.class_path(name, "impl_overrides")
        if not (isinstance(own, type) and issubclass(own, AttentionImpl)):
            rule = "it must be a class, a subclass of the implementation of that backend"
            raise TypeError(f"impl_overrides[{name!r}] is {own!r}; {rule}")
        if checked.setdefault(name, own) is not own:
            raise TypeError(f"impl_overrides has two classes for {name}: keep one")
    return checked


def overridden(
    selected: type[AttentionImpl], backend: type[AttentionBackend], overrides: Mapping[str, type[AttentionImpl]]
) -> type[AttentionImpl]:
    """Returns the model's own implementation for the selected backend, or `selected` if the model has none for it.

    Raises:
        TypeError: The model's implementation is not a subclass of the selected one.
    """
    own = overrides.get(backend.get_name(), selected)
    if not issubclass(own, selected):
        raise TypeError(
            f"impl_overrides[{backend.get_name()!r}] is {own!r}; it must be a subclass of "
            f"{selected.__module__}.{selected.__qualname__}, which was selected"
        )
    return own


def own_selection(
    role: str, category: str, required: Requirements, module: torch.nn.Module, config: AttentionConfig
) -> Selection:
    """The record of a layer that no backend serves. Raises FaultError if the configuration chose one for it."""
    entry = resolve_entry(role, category, config)
    path = f"{type(module).__module__}.{type(module).__qualname__}"
    if entry.explicit is not None and entry.source in ("role", "parent"):
        rule = f"{role} computes with the model's own {path}, and nothing would use a backend"
        raise FaultError([Fault(entry.key, entry.explicit.backend, rule, "leave it out", origin=entry.origin)])
    passed_over: tuple[Rejected, ...] = ()
    if entry.explicit is not None:  # a category or the default, which other roles may have too: it is told
        rule = f"{role} computes with the model's own {path}"
        fault = Fault(entry.key, entry.explicit.backend, rule, "set it for roles that use a backend")
        passed_over = (Rejected(entry.explicit.backend, (fault,)),)
    return Selection(
        role=role,
        kind=required.kind,
        category=category,
        requirements=required,
        requested=None if entry.explicit is None else entry.explicit.backend,
        backend=CUSTOM,
        variant="own",
        class_path=path,
        source="model",
        key=entry.key if passed_over else "",
        origin=entry.origin if passed_over else "",
        exactness="exact",
        rejected=passed_over,
    )
