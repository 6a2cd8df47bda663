"""What a backend declares, what a call requires, and the predicates that compare the two. No torch here.

The same predicates serve explicit choice, automatic choice and `explain`, so they cannot disagree.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from backends.platforms.facts import DeviceFacts
from configs.faults import Fault

if TYPE_CHECKING:
    import torch

Kind = Literal["self", "cross", "joint"]
Exactness = Literal["exact", "lossy-quantised", "lossy-sparse"]
USE_ANOTHER = "use TORCH_SDPA, or leave it on auto"


@dataclass(frozen=True)
class Requirements:
    """What one attention call asks of a backend, on the shapes that the backend will see (after the exchange).

    head_size: of Q, K and V. num_heads, num_kv_heads: per rank. dtype: `float32`, `bfloat16`, `float16`, `float64`.
    mask: `boolean` for a call that carries a mask (see `AttentionMetadata`).
    """

    head_size: int
    num_heads: int
    num_kv_heads: int
    dtype: str
    kind: Kind
    causal: bool = False
    mask: Literal["none", "boolean"] = "none"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class AttentionMetadata:
    """What a call carries beside Q, K and V; immutable.

    mask: a boolean tensor [B or 1, 1, Sq or 1, Sk] on the full sequence, True where a query may look at a key.
    """

    mask: torch.Tensor | None = None


@dataclass(frozen=True)
class Variant:
    """One implementation behind a backend's name: its kernel class, its package and the calls that it takes.

    kernels: the dotted path of its `AttentionImpl`. distributions: names as `pip` knows them, any one of which is
    enough; empty when torch is all it needs. install: the line that installs it. capabilities: CUDA compute
    capabilities (major, minor; a minor of None stands for all), None for any. head_size_step: head sizes are
    multiples of it.
    """

    name: str
    kernels: str
    platforms: tuple[str, ...] = ("cpu", "cuda")
    capabilities: tuple[tuple[int, int | None], ...] | None = None
    distributions: tuple[str, ...] = ()
    install: str = ""
    head_size_step: int = 1
    head_size_limit: int | None = None
    head_sizes_above: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16", "float16")
    masks: tuple[str, ...] = ("none", "boolean")

    def faults(self, required: Requirements, device: DeviceFacts) -> tuple[Fault, ...]:
        """Every reason why this variant cannot serve the call on the device; empty if it can."""
        chip = self.chip_fault(device)
        if chip is not None:
            return (chip,)
        return (*self._package_faults(device), *self._call_faults(required))

    def chip_fault(self, device: DeviceFacts) -> Fault | None:
        """The fault of a device that the kernels are not built for."""
        if device.platform not in self.platforms:
            rule = f"it runs on {' and '.join(self.platforms)} devices only, and this is {device.label}"
            return Fault("device", device.label, rule, USE_ANOTHER, self.platforms)
        if self.capabilities is not None and not self._built_for(device.capability):
            chips = tuple(f"{major}.{'x' if minor is None else minor}" for major, minor in self.capabilities)
            rule = f"it runs on compute capability {', '.join(chips)}, and this is {device.label}"
            return Fault("device", device.label, rule, USE_ANOTHER, chips)
        return None

    def _package_faults(self, device: DeviceFacts) -> list[Fault]:
        if not self.distributions or any(device.has(name) for name in self.distributions):
            return []
        rule = f"the package {' or '.join(self.distributions)} is not installed ({self.install})"
        return [Fault("packages", None, rule, f"install it, {USE_ANOTHER}", self.distributions)]

    def _built_for(self, capability: tuple[int, int] | None) -> bool:
        listed = self.capabilities or ()
        return capability is not None and any(
            major == capability[0] and minor in (None, capability[1]) for major, minor in listed
        )

    def _call_faults(self, required: Requirements) -> list[Fault]:
        found = []
        if not self._takes_head_size(required.head_size):
            rule = f"head size {required.head_size} is not supported; it takes {self.head_size_rule}"
            found.append(Fault("head_size", required.head_size, rule, USE_ANOTHER))
        if required.dtype not in self.dtypes:
            rule = f"dtype {required.dtype} is not supported; it takes {', '.join(self.dtypes)}"
            found.append(Fault("dtype", required.dtype, rule, f"set run.dtype, {USE_ANOTHER}", self.dtypes))
        if required.mask not in self.masks:
            found.append(Fault("mask", required.mask, f"a {required.mask} mask is not supported", USE_ANOTHER))
        return found

    def _takes_head_size(self, size: int) -> bool:
        limit = self.head_size_limit
        in_range = size % self.head_size_step == 0 and (limit is None or size <= limit)
        return in_range or size in self.head_sizes_above

    @property
    def head_size_rule(self) -> str:
        """`multiples of 8 up to 128, and 256`."""
        step = "any size" if self.head_size_step == 1 else f"multiples of {self.head_size_step}"
        limit = "" if self.head_size_limit is None else f" up to {self.head_size_limit}"
        above = f", and {', '.join(map(str, self.head_sizes_above))}" if self.head_sizes_above else ""
        return step + limit + above


@dataclass(frozen=True)
class Validation:
    """The outcome for one backend: the variant that serves, or None and every fault."""

    variant: Variant | None
    faults: tuple[Fault, ...] = ()


class AttentionImpl(ABC):
    """One layer's kernel on one device. Constructed on a rank, never in the driver.

    Tensors are [B, S, H, D]: query [B, Sq, H, D], key and value [B, Sk, Hkv, D]; the result is [B, Sq, H, D] in the
    query's dtype. Query head i reads KV head i // (H / Hkv). Rows that may look at nothing return zeros.
    """

    def __init__(self, *, softmax_scale: float, causal: bool) -> None:
        self.softmax_scale = softmax_scale
        self.causal = causal

    @property
    @abstractmethod
    def kernel(self) -> str:
        """The dotted name of the callable that `forward` calls, for the report."""

    @abstractmethod
    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor: ...


class AttentionBackend(ABC):
    """A named way to compute attention. Subclasses are torch-free declarations; their kernels live in modules of
    their own.
    """

    variants: ClassVar[tuple[Variant, ...]]
    exactness: ClassVar[Exactness] = "exact"

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """The registered name; it equals the enum name."""

    @classmethod
    def validate(cls, required: Requirements, device: DeviceFacts) -> Validation:
        """The first variant, in declared order, that serves the call; if none does, the faults of all of them."""
        built = [variant for variant in cls.variants if variant.chip_fault(device) is None]
        refused = []
        for variant in built or cls.variants:  # another chip's variant has nothing to say where one fits the chip
            faults = variant.faults(required, device)
            if not faults:
                return Validation(variant)
            refused.append((variant, faults))
        return Validation(None, _merge_variant_faults(refused))

    @classmethod
    def validate_configuration(cls, required: Requirements, device: DeviceFacts) -> list[Fault]:
        """Every fault of the call on the device; empty means that it runs."""
        return list(cls.validate(required, device).faults)

    @classmethod
    def get_impl_cls(cls, variant: Variant) -> type[AttentionImpl]:
        """The kernel class of a variant. Imports torch and the kernel's package."""
        module, _, name = variant.kernels.rpartition(".")
        impl: type[AttentionImpl] = getattr(importlib.import_module(module), name)
        return impl


def _merge_variant_faults(refused: list[tuple[Variant, tuple[Fault, ...]]]) -> tuple[Fault, ...]:
    """What all variants share is said once; what is one variant's own names the variant."""
    merged: list[Fault] = []
    for variant, faults in refused:
        for fault in faults:
            shared = all(fault in others for _, others in refused)
            rule = fault.rule if shared else f"variant {variant.name}: {fault.rule}"
            named = Fault(fault.key, fault.value, rule, fault.remedy, fault.allowed)
            if named not in merged:
                merged.append(named)
    return tuple(merged)


Source = Literal["role", "parent", "category", "default", "platform"]


@dataclass(frozen=True)
class Rejected:
    """A backend that was considered before the chosen one, and why it does not serve."""

    backend: str
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class Selection:
    """Which backend serves a role, who asked for it, and what was turned down on the way.

    requested: the backend named by the configuration; None when the platform chose. source: which entry decided. key,
    origin: the configuration key that decided and where it was set; empty when nothing was set.
    """

    role: str
    kind: Kind
    category: str
    requirements: Requirements
    requested: str | None
    backend: str
    variant: str
    class_path: str
    source: Source
    key: str
    origin: str
    exactness: Exactness
    rejected: tuple[Rejected, ...] = ()
