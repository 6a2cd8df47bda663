"""The calls of the grid, and which variants claim them. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any

from backends.declared.flash_attn import FlashQuant
from backends.declared.flashinfer_attn import FlashinferQuant
from backends.interface import AttentionBackend, Features, Requirements, Variant
from backends.options import Blocks
from backends.platforms.facts import DeviceFacts
from backends.registry import Registry

HEADS = 4
KV_HEADS = (4, 2, 1)
DTYPES = ("bfloat16", "float16", "float32", "float64")
LENGTHS = (1, 7, 129, 4097)
UNEQUAL = ((7, 129), (129, 4097), (4097, 129))
SAMPLED = (1, 8, 33, 64, 80, 128, 256)
"""Of head sizes that a variant takes without a limit."""
FEATURES: Mapping[str, Features] = MappingProxyType(
    {
        "plain": Features(),
        "key_padding": Features(mask="key_padding"),
        "full": Features(mask="full"),
        "per_head": Features(mask="per_head"),
        "block": Features(mask="block"),
        "bias": Features(bias=True),
        "bias_and_mask": Features(mask="key_padding", bias=True),
        "window": Features(window=True),
        "window_before": Features(window=True),
        "soft_cap": Features(soft_cap=True),
        "sinks": Features(sinks=True),
        "packed": Features(packed=True),
        "packed_key_padding": Features(mask="key_padding", packed=True),
        "packed_full": Features(mask="full", packed=True),
        "packed_per_head": Features(mask="per_head", packed=True),
    }
)
OPTIONS: Mapping[str, Mapping[str, Blocks]] = MappingProxyType(
    {
        "FLASH_ATTN": {"quant.dtype_qk=fp8_e4m3": (("quant", FlashQuant("fp8_e4m3")),)},
        "FLASHINFER_ATTN": {
            f"quant.dtype_qk={d},quant.dtype_vo={d}": (("quant", FlashinferQuant(d, d)),)
            for d in ("float16", "bfloat16")
        },
    }
)
"""Options that are tried beside none, by backend."""


@dataclass(frozen=True)
class Call:
    """One call, apart from who serves it. feature: of `FEATURES`. Lengths in rows and keys of a sample."""

    dtype: str
    head_size: int
    kv_heads: int
    causal: bool
    feature: str
    rows: int
    keys: int

    @property
    def requirements(self) -> Requirements:
        plain = Requirements(self.head_size, HEADS, self.kv_heads, self.dtype, "cross", self.causal)
        return plain.carrying(FEATURES[self.feature])

    @property
    def batch(self) -> int:
        return 1 if max(self.rows, self.keys) > 1000 else 2


@dataclass(frozen=True)
class Claim:
    """A variant with options. text: the options as they are set, or nothing."""

    backend: type[AttentionBackend]
    variant: Variant
    text: str
    blocks: Blocks

    @property
    def name(self) -> str:
        return f"{self.backend.get_name()}/{self.variant.name}" + (f" {self.text}" if self.text else "")

    @property
    def lossy(self) -> bool:
        return self.backend.exactness_of(self.variant, self.blocks) != "exact"

    @property
    def unlimited(self) -> bool:
        sizes = self.variant.takes.head_sizes
        return sizes.step > 0 and sizes.limit is None

    @property
    def listed_sizes(self) -> tuple[int, ...]:
        sizes = self.variant.takes.head_sizes
        return tuple(size for size in range(1, max((*sizes.also, sizes.limit or 0)) + 1) if size in sizes)

    def takes(self, call: Call, device: DeviceFacts, **asked: Any) -> bool:
        """Whether the grid has the call for it."""
        if self.unlimited and call.head_size not in SAMPLED:
            return False
        required = replace(call.requirements, **asked)
        faults = (
            *self.variant.faults(required, device),
            *self.backend.option_faults(self.variant, required, self.blocks),
        )
        return not faults


def claims(registry: Registry, device: DeviceFacts) -> Iterator[Claim]:
    """Every variant that the device and its packages can run, with and without options."""
    for name in registry.names():
        backend = registry.get_class(name)
        for variant in backend.variants:
            bare = Claim(backend, variant, "", ())
            if not any(bare.takes(call, device) for call in _plain_calls()):
                continue
            yield bare
            for text, blocks in OPTIONS.get(name, {}).items():
                claim = Claim(backend, variant, text, blocks)
                if any(claim.takes(call, device) for call in _plain_calls()):
                    yield claim


def head_sizes(claimed: tuple[Claim, ...]) -> tuple[int, ...]:
    """Every size that some variant lists or limits, and `SAMPLED`, for those that take any."""
    listed = (size for claim in claimed if not claim.unlimited for size in claim.listed_sizes)
    return tuple(sorted({*listed, *SAMPLED}))


def calls(
    dtype: str, head_size: int, kv_heads: int, features: Sequence[str], longest: int = max(LENGTHS)
) -> Iterator[Call]:
    """Every call of a dtype, a head size and a number of KV heads, with these features and of no more rows and keys
    than `longest`. Causality and windows are of as many queries as keys.
    """
    equal = [(length, length) for length in LENGTHS]
    for causal, feature in product((False, True), features):
        positions = causal or FEATURES[feature].window
        if feature == "block" and causal:
            continue  # a block mask says alone who looks at whom
        for rows, keys in equal if positions else (*equal, *UNEQUAL):
            if max(rows, keys) <= longest:
                yield Call(dtype, head_size, kv_heads, causal, feature, rows, keys)


def _plain_calls() -> Iterator[Call]:
    sizes = sorted({*SAMPLED, 96, 192})
    return (Call(dtype, size, HEADS, False, "plain", 129, 129) for dtype, size in product(DTYPES, sizes))
