"""One implementation behind a backend's name: the chips and packages it needs, and the calls that it takes.

The same predicates serve explicit choice, automatic choice, `explain` and the feature tables, so they cannot disagree.
No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from packaging.version import Version

from backends.platforms.facts import ANY_VERSION, DeviceFacts, is_version
from backends.requirements import MaskKind, Requirements
from configs.faults import Fault

Exactness = Literal["exact", "lossy-quantised", "lossy-sparse"]
Compilation = Literal["traceable", "custom-op", "eager"]
"""How a kernel meets torch.compile: traced through, called as one opaque operator, or only outside of it."""
DTYPES = ("float64", "float32", "bfloat16", "float16")
EVERY_MASK: tuple[MaskKind, ...] = ("none", "key_padding", "full", "per_head")
"""As tensors."""
EVERYWHERE = ("cpu", "cuda", "rocm", "npu", "xpu", "musa")
USE_ANOTHER = "use TORCH_SDPA, or leave it on auto"
"""What a declaration can say, as it does not know who asks; a selector puts a backend that serves in its place."""


@dataclass(frozen=True)
class HeadSizes:
    """Multiples of `step` up to `limit`, and those listed in `also`; or only the listed ones, with a step of 0."""

    step: int = 1
    limit: int | None = None
    also: tuple[int, ...] = ()

    def __contains__(self, size: int) -> bool:
        in_range = self.step > 0 and size % self.step == 0 and (self.limit is None or size <= self.limit)
        return in_range or size in self.also

    def __str__(self) -> str:
        """`multiples of 8 up to 128, and 256`."""
        listed = ", ".join(map(str, self.also))
        if self.step == 0:
            return listed
        step = "any size" if self.step == 1 else f"multiples of {self.step}"
        limit = "" if self.limit is None else f" up to {self.limit}"
        return step + limit + (f", and {listed}" if listed else "")


@dataclass(frozen=True)
class Capabilities:
    """The calls that a variant takes; what is not declared is refused.

    grouped: fewer KV heads than query heads. value_head_size: V may have another head size than Q and K. lse_gradient:
    the log-sum-exp is differentiable as well. learned_gradient: the additive mask and the sinks get gradients, too. The
    rest is as in `Requirements`.
    """

    dtypes: tuple[str, ...] = DTYPES
    head_sizes: HeadSizes = HeadSizes()
    masks: tuple[MaskKind, ...] = ("none",)
    causal: bool = False
    grouped: bool = False
    value_head_size: bool = False
    bias: bool = False
    window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    packed: bool = False
    lse: bool = False
    gradient: bool = False
    lse_gradient: bool = False
    learned_gradient: bool = False

    def faults(self, required: Requirements) -> Iterator[Fault]:
        """Every reason why the call is not taken."""
        if required.head_size not in self.head_sizes:
            rule = f"head size {required.head_size} is not supported; it takes {self.head_sizes}"
            yield Fault("head_size", required.head_size, rule, USE_ANOTHER)
        other = required.value_head_size
        if other not in (None, required.head_size) and not self.value_head_size:
            rule = f"a head size of V ({other}) other than that of Q and K ({required.head_size}) is not supported"
            yield Fault("value_head_size", other, rule, USE_ANOTHER)
        if required.dtype not in self.dtypes:
            rule = f"dtype {required.dtype} is not supported; it takes {', '.join(self.dtypes)}"
            yield Fault("dtype", required.dtype, rule, f"set run.dtype, {USE_ANOTHER}", self.dtypes)
        if required.mask != "none" and required.mask not in self.masks:
            rule = f"a {required.mask} mask is not supported; it takes {' and '.join(self.masks)}"
            yield Fault("mask", required.mask, rule, USE_ANOTHER, self.masks)
        if required.num_kv_heads < 1 or required.num_heads % required.num_kv_heads:
            rule = f"{required.num_heads} query heads are no multiple of {required.num_kv_heads} KV heads"
            yield Fault("num_kv_heads", required.num_kv_heads, rule, "give a number that divides the query heads")
        elif required.num_heads != required.num_kv_heads and not self.grouped:
            rule = f"{required.num_kv_heads} KV heads for {required.num_heads} query heads are not supported"
            yield Fault("num_kv_heads", required.num_kv_heads, rule, USE_ANOTHER)
        for name, text in _SWITCHES.items():
            if getattr(required, name) and not getattr(self, name):
                yield Fault(name, True, f"{text} not supported", USE_ANOTHER)
        if required.lse and required.gradient and self.lse and self.gradient and not self.lse_gradient:
            yield Fault("lse", True, "differentiating the log-sum-exp is not supported", USE_ANOTHER)


EVERYTHING = Capabilities(
    masks=(*EVERY_MASK, "block"),
    causal=True,
    grouped=True,
    value_head_size=True,
    bias=True,
    window=True,
    soft_cap=True,
    sinks=True,
    packed=True,
    lse=True,
    gradient=True,
    lse_gradient=True,
    learned_gradient=True,
)
_SWITCHES = {
    "causal": "causal attention is",
    "bias": "an additive mask is",
    "window": "a window is",
    "soft_cap": "a soft cap of the scores is",
    "sinks": "attention sinks are",
    "packed": "packed sequences are",
    "lse": "returning the log-sum-exp is",
    "gradient": "differentiation is",
    "learned_gradient": "differentiation by an additive mask or sinks is",
}


@dataclass(frozen=True)
class Variant:
    """kernels: the dotted path of its `AttentionImpl`.

    chips: what it runs on, in the spelling of `DeviceFacts.label`; `cuda:9.0`, `cuda:10.x` (every minor), `cuda`
    (every chip of the platform), `rocm:gfx942`. distributions: names as `pip` knows them, any one of which is enough;
    empty when torch is all it needs. install: the line that installs it. at_least, below: (distribution, version) pairs
    that hold where the distribution is installed. version: what `AttentionSpec.version` asks for. run_on: the chips of
    those where its tests have passed on hardware.
    """

    name: str
    kernels: str
    chips: tuple[str, ...] = EVERYWHERE
    takes: Capabilities = Capabilities()
    distributions: tuple[str, ...] = ()
    install: str = ""
    at_least: tuple[tuple[str, str], ...] = ()
    below: tuple[tuple[str, str], ...] = ()
    version: int | None = None
    exactness: Exactness = "exact"
    compilation: Compilation = "custom-op"
    run_on: tuple[str, ...] = ()

    @property
    def packages(self) -> tuple[str, ...]:
        """Every distribution that the variant needs, or whose version it has a rule for."""
        bounded = (name for name, _ in (*self.at_least, *self.below))
        return tuple(dict.fromkeys((*self.distributions, *bounded)))

    def faults(self, required: Requirements, device: DeviceFacts) -> tuple[Fault, ...]:
        """Every reason why this variant cannot serve the call on the device; empty if it can."""
        chip = self.chip_fault(device)
        if chip is not None:  # its package may not even be for this device
            return (chip, *self.takes.faults(required))
        return (*self._package_faults(device), *self.takes.faults(required))

    def is_for(self, platform: str) -> bool:
        """Whether some of its chips are of a platform, such as `cuda`."""
        return any(chip.partition(":")[0] == platform for chip in self.chips)

    def chip_fault(self, device: DeviceFacts) -> Fault | None:
        """The fault of a device that the kernels are not built for."""
        return None if any(matches(chip, device) for chip in self.chips) else chip_fault((self,), device)

    def _package_faults(self, device: DeviceFacts) -> Iterator[Fault]:
        if self.distributions and not any(device.has(name) for name in self.distributions):
            rule = f"the package {' or '.join(self.distributions)} is not installed ({self.install})"
            yield Fault("packages", None, rule, f"install it, {USE_ANOTHER}", self.distributions)
        for name, least in self.at_least:
            version = device.version(name)
            if version is not None and not _is_at_least(version, least):
                rule = f"{name} {version} is too old; it needs {least} or newer"
                yield Fault("packages", f"{name} {version}", rule, self.install or f"pip install -U {name}")
        for name, limit in self.below:
            version = device.version(name)
            if version is not None and version != ANY_VERSION and _is_at_least(version, f"{limit}.dev0"):
                rule = f"{name} {version} is too new; it needs one below {limit}"
                yield Fault("packages", f"{name} {version}", rule, self.install)


def chip_fault(variants: Iterable[Variant], device: DeviceFacts) -> Fault:
    """The fault of a device that none of the variants runs on."""
    chips = tuple(dict.fromkeys(chip for variant in variants for chip in variant.chips))
    rule = f"it runs on {', '.join(chips)} only, and this is {device.label}"
    return Fault("device", device.label, rule, USE_ANOTHER, chips)


def matches(chip: str, device: DeviceFacts) -> bool:
    """Whether a pattern of `Variant.chips` fits a device."""
    if ":" not in chip:
        return chip == device.platform
    return device.label == chip or (chip.endswith(".x") and device.label.startswith(chip.removesuffix("x")))


def _is_at_least(version: str, bound: str) -> bool:
    """`any` (a version that was not stated) is as new as need be, and what is no version is not."""
    return version == ANY_VERSION or (is_version(version) and Version(version) >= Version(bound))
