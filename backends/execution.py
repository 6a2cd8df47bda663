"""After selection: which path a call takes, whether it was verified on hardware, and how it compiles.

It describes and changes nothing: selection and forward do not ask it, and it asks the same predicates as they do.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from backends.interface import Variant
from backends.platforms.facts import DeviceFacts
from backends.requirements import MaskKind, Requirements
from backends.variant import Compilation, matches
from configs.faults import Fault


class SupportStatus(enum.Enum):
    """UNVERIFIED: nothing speaks against it, and its tests have not passed on this kind of hardware."""

    SUPPORTED = "supported"
    UNSUPPORTED = "unsupported"
    UNVERIFIED = "unverified"


@dataclass(frozen=True)
class Support:
    """A status, and why; the reason is mandatory for what is not supported. Raises ValueError without it."""

    status: SupportStatus
    reason: str = ""

    def __post_init__(self) -> None:
        if self.status is SupportStatus.UNSUPPORTED and not self.reason:
            raise ValueError("unsupported without a reason: say which rule the call breaks")


@dataclass(frozen=True)
class Fallback:
    """What replaced a choice that cannot serve, as its spec allows (`on_unsupported: fallback`).

    trigger: the rules that the requested backend breaks. preserves: what the replacement keeps; it was validated with
    the same requirements, so that is all of them.
    """

    requested: str
    backend: str
    trigger: tuple[str, ...]
    preserves: tuple[str, ...] = ("masks", "causality", "packed boundaries", "dtype", "head layout")


@dataclass(frozen=True)
class ExecutionPath:
    """How one call of a layer runs.

    kernel: of the initialised implementation, not of what was asked for. strategy: of the exchange around it; `local`
    where it is inactive. compilation: of the whole call, exchange included.
    """

    backend: str
    variant: str
    kernel: str
    strategy: str
    platform: str
    mask: MaskKind
    packed: bool
    compilation: Compilation
    support: Support
    fallback: Fallback | None = None

    def support_for(self, *, fullgraph: bool) -> Support:
        """What a caller gets who wants one graph without breaks. The stored status stays as it is."""
        status = self.support.status
        if not fullgraph or status is SupportStatus.UNSUPPORTED:
            return self.support
        if self.compilation == "eager":
            return Support(SupportStatus.UNSUPPORTED, f"{self.name} runs outside of compiled graphs only")
        if status is SupportStatus.UNVERIFIED:
            rule = f"{self.name} has no verified full graph on {self.platform}"
            return Support(SupportStatus.UNSUPPORTED, rule)
        return self.support

    @property
    def name(self) -> str:
        """`TORCH_SDPA/torch, ulysses`."""
        return f"{self.backend}/{self.variant}, {self.strategy}"


def support_of(variant: Variant, required: Requirements, device: DeviceFacts) -> Support:
    """What the declaration says of a call on a device."""
    faults: tuple[Fault, ...] = variant.faults(required, device)
    if faults:
        return Support(SupportStatus.UNSUPPORTED, "; ".join(fault.rule for fault in faults))
    if any(matches(chip, device) for chip in variant.run_on):
        return Support(SupportStatus.SUPPORTED)
    return Support(SupportStatus.UNVERIFIED, f"not run on {device.label} hardware")


def compilation_of(variant: Variant, strategy: str) -> Compilation:
    """The exchange counts its traffic and talks to other ranks: a call with one is not traced."""
    return variant.compilation if strategy == "local" else "eager"
