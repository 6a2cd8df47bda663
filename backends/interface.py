"""What a backend is: its declaration, and the kernels behind it. No torch here but in type hints."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from backends.options import Blocks
from backends.platforms.facts import DeviceFacts
from backends.requirements import NO_FEATURES, Features, Kind, MaskKind, Requirements
from backends.variant import Capabilities, Exactness, HeadSizes, Variant, chip_fault
from configs.faults import Fault

if TYPE_CHECKING:
    import torch
    from torch.nn.attention.flex_attention import BlockMask

__all__ = [
    "AttentionBackend",
    "AttentionImpl",
    "AttentionMetadata",
    "Capabilities",
    "Features",
    "HeadSizes",
    "Kind",
    "PackedLengths",
    "Requirements",
    "Validation",
    "Variant",
]


@dataclass(frozen=True)
class PackedLengths:
    """Documents that share one batch row, by their numbers of rows in order; query i of one meets its own keys only.

    Plain numbers, so that nobody has to ask the device for them.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]


@dataclass(frozen=True)
class AttentionMetadata:
    """What a call carries beside Q, K and V, on the full sequence and all heads; immutable.

    mask: boolean [B or 1, 1 or H, Sq or 1, Sk], True where a query may look at a key. bias: the same shape in the
    query's dtype, added to the scaled and capped scores; minus infinity keeps a query from a key. block_mask: torch's,
    which says alone who looks at whom: no mask, causality, window or documents beside it. window: how many keys before
    and after its own position a query may look at, None for all. soft_cap: scores x become cap * tanh(x / cap).
    sinks: [H], a logit for each head that takes part in the softmax and has no value. packed: documents in a row.
    """

    mask: torch.Tensor | None = None
    window: tuple[int | None, int | None] | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    packed: PackedLengths | None = None
    bias: torch.Tensor | None = None
    block_mask: BlockMask | None = None

    @property
    def features(self) -> Features:
        return Features(
            mask=self._mask_kind,
            bias=self.bias is not None,
            window=self.window is not None,
            soft_cap=self.soft_cap is not None,
            sinks=self.sinks is not None,
            packed=self.packed is not None,
        )

    @property
    def _mask_kind(self) -> MaskKind:
        if self.block_mask is not None:
            return "block"
        if self.mask is None:
            return "none"
        if self.mask.shape[1] > 1:
            return "per_head"
        return "full" if self.mask.shape[2] > 1 else "key_padding"


@dataclass(frozen=True)
class CallShape:
    """The shapes of one call as the kernel gets them: what a plan may depend on. Lengths in rows, per batch row."""

    batch: int
    query_length: int
    key_length: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    features: Features = NO_FEATURES
    packed: PackedLengths | None = None


class AttentionImpl(ABC):
    """One layer's kernel on one device. Constructed on a rank, never in the driver.

    Three phases, after `load` has imported what it needs: `prepare` once, on the device; `plan` once for each shape;
    `forward` for each call. Tensors are [B, S, H, D]: query [B, Sq, H, D], key [B, Sk, Hkv, D], value [B, Sk, Hkv, Dv];
    the result is [B, Sq, H, Dv] in the query's dtype. Query head i reads KV head i // (H / Hkv). Rows that may look at
    nothing return zeros. There is at least one sample, one query and one key: the layer answers other calls itself.

    alignment: the layer copies query, key and value if need be, so that the elements of a row lie one after another and
    rows begin at multiples of so many bytes, as kernels load them. 1: the implementation takes any strides.
    """

    alignment: ClassVar[int] = 16

    def __init__(self, *, softmax_scale: float, causal: bool, options: Blocks = ()) -> None:
        self.softmax_scale = softmax_scale
        self.causal = causal
        self.options: Mapping[str, Any] = dict(options)

    @property
    @abstractmethod
    def kernel(self) -> str:
        """The dotted name of the callable that `forward` calls, for the report."""

    @classmethod
    def load(cls, options: Blocks = ()) -> None:
        """Import the kernel's package. Raises what the import raises, if it is missing or broken.

        options: those that are set, which may say what to import.
        """

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate what every call uses."""

    def plan(self, shape: CallShape) -> Any:
        """What depends on the shapes alone; the layer keeps it and hands it to every `forward` of that shape."""
        return None

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> torch.Tensor: ...

    def forward_with_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward`, and the natural logarithm of the sum of the exponentials of each row's logits: [B, H, Sq] in fp32,
        in fp64 for fp64 inputs.

        Logits are the scores, scaled and capped, of the keys that the row may look at, and the head's sink if there are
        sinks: whoever merges parts of the keys gives the sinks to one part alone. A row without logits has minus
        infinity, and zeros as output. Variants that declare `lse` have it; of others it raises TypeError.
        """
        raise TypeError(f"{self.kernel} returns no log-sum-exp: use a backend that declares lse, such as REFERENCE")


Probe = Callable[["type[AttentionBackend]", Variant, Blocks], Iterable[Fault]]
"""Whether a variant's package can be imported here, which a declaration cannot know (`backends.probe`)."""


@dataclass(frozen=True)
class Validation:
    """The outcome for one backend: the variant that serves, or None and every fault."""

    variant: Variant | None
    faults: tuple[Fault, ...] = ()


class AttentionBackend(ABC):
    """A named way to compute attention. Subclasses are torch-free declarations; their kernels live in modules of
    their own.

    variants: in the order in which they are tried. blocks: the option blocks that it takes, name -> frozen dataclass
    (`backends.options`). asks_permission: an automatic choice takes it only for layers that allow it, since only the
    model knows whether its calls meet the kernel's contract.
    """

    variants: ClassVar[tuple[Variant, ...]]
    blocks: ClassVar[Mapping[str, type]] = {}
    asks_permission: ClassVar[bool] = False

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """The registered name; it equals the enum name."""

    @classmethod
    def validate(
        cls,
        required: Requirements,
        device: DeviceFacts,
        *,
        version: int | None = None,
        blocks: Blocks = (),
        probe: Probe | None = None,
    ) -> Validation:
        """Find the first variant, in declared order, that serves the call with the options.

        Args:
            required: What the call asks.
            device: Where it runs.
            version: Take only variants of this version.
            blocks: The option blocks that are set.
            probe: Asked last of a variant that would serve.

        Returns:
            The variant, or every fault: those of all variants that are built for the device; on a device that none is
            built for, the device and what every variant refuses.
        """
        listed = [variant for variant in cls.variants if version in (None, variant.version)]
        if not listed:
            return Validation(None, (cls._version_fault(version),))
        built = [variant for variant in listed if variant.chip_fault(device) is None]
        if not built:
            return Validation(None, (chip_fault(listed, device), *cls._faults_of_all(listed, required, device, blocks)))
        refused = []
        for variant in built:  # another chip's variant has nothing to say
            faults = (*variant.faults(required, device), *cls.option_faults(variant, required, blocks))
            if not faults and probe is not None:
                faults = tuple(probe(cls, variant, blocks))
            if not faults:
                return Validation(variant)
            refused.append((variant, faults))
        return Validation(None, _merge_variant_faults(refused))

    @classmethod
    def _faults_of_all(
        cls, variants: list[Variant], required: Requirements, device: DeviceFacts, blocks: Blocks
    ) -> tuple[Fault, ...]:
        """What every variant refuses in the call, so that another device would not help.

        Only variants for the platform count, or else those for CUDA: that another vendor's kernels would take the call
        helps nobody who has no such device.
        """
        variants = [v for v in variants if v.is_for(device.platform)] or [v for v in variants if v.is_for("cuda")]
        refused = [
            (variant, (*variant.takes.faults(required), *cls.option_faults(variant, required, blocks)))
            for variant in variants
        ]
        common = set.intersection(*({fault.key for fault in faults} for _, faults in refused)) if refused else set()
        return _merge_variant_faults([(v, tuple(f for f in faults if f.key in common)) for v, faults in refused])

    @classmethod
    def validate_configuration(cls, required: Requirements, device: DeviceFacts) -> list[Fault]:
        """Every fault of the call on the device; empty means that it runs."""
        return list(cls.validate(required, device).faults)

    @classmethod
    def option_faults(cls, variant: Variant, required: Requirements, blocks: Blocks) -> Iterator[Fault]:
        """Why a variant does not serve the call with these options; for rules that need all three."""
        return iter(())

    @classmethod
    def exactness_of(cls, variant: Variant, blocks: Blocks) -> Exactness:
        """What the options do to the result."""
        return variant.exactness

    @classmethod
    def get_impl_cls(cls, variant: Variant) -> type[AttentionImpl]:
        """The kernel class of a variant. Imports torch and the kernel's package."""
        module, _, name = variant.kernels.rpartition(".")
        impl: type[AttentionImpl] = getattr(importlib.import_module(module), name)
        return impl

    @classmethod
    def _version_fault(cls, version: int | None) -> Fault:
        known = tuple(dict.fromkeys(str(variant.version) for variant in cls.variants if variant.version is not None))
        if not known:
            return Fault("version", version, f"{cls.get_name()} has no versions to choose from", "leave it out")
        rule = f"{cls.get_name()} has no version {version}; it has {', '.join(known)}"
        return Fault("version", version, rule, "use one of these, or leave it out", known)


def _merge_variant_faults(refused: list[tuple[Variant, tuple[Fault, ...]]]) -> tuple[Fault, ...]:
    """Each fault once, with the variants that have it, unless all do."""
    owners: dict[Fault, list[str]] = {}
    for variant, faults in refused:
        for fault in dict.fromkeys(faults):
            owners.setdefault(fault, []).append(variant.name)

    def named(fault: Fault, names: list[str]) -> Fault:
        if len(names) == len(refused):
            return fault
        return replace(fault, rule=f"variant{'s' * (len(names) > 1)} {', '.join(names)}: {fault.rule}")

    return tuple(named(fault, names) for fault, names in owners.items())
