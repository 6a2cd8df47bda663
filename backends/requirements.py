"""What one attention call asks of a backend, as plain values. No torch here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from numbers import Integral
from typing import Any, Literal, get_args

from configs.faults import Fault, FaultError, unknown_name_remedy

Kind = Literal["self", "cross", "joint"]
MaskKind = Literal["none", "key_padding", "full", "per_head", "block"]
"""key_padding: [B or 1, 1, 1, Sk]; full: [B or 1, 1, Sq, Sk]; per_head: [B or 1, H, Sq or 1, Sk]; block: a `BlockMask`
of torch's.
"""


SIZES = ("head_size", "value_head_size", "num_heads", "num_kv_heads")
SWITCHES = ("causal", "bias", "window", "soft_cap", "sinks", "packed", "lse", "gradient", "learned_gradient")


def kind_fault(kind: object) -> Fault | None:
    """Returns the fault of a value that is not a kind, with the nearest one, or None."""
    return _name_fault("kind", kind, get_args(Kind))


def size_fault(name: str, size: object) -> Fault | None:
    """Returns the fault of a value that is not a head size or a number of heads, or None. name: of the argument."""
    if isinstance(size, Integral) and not isinstance(size, bool) and int(size) >= 1:
        return None
    return Fault(name, repr(size), "it is a whole number of at least 1", "give one, such as 64")


def _name_fault(name: str, value: object, known: tuple[str, ...]) -> Fault | None:
    if isinstance(value, str) and value in known:
        return None
    rule = f"it is one of {', '.join(known)}"
    return Fault(name, repr(value), rule, unknown_name_remedy(str(value), known), known)


@dataclass(frozen=True)
class Features:
    """What a call carries beside Q, K and V (see `backends.interface.AttentionMetadata`).

    A layer is constructed with those that its calls will carry, so that an automatic choice takes them; a call that
    carries what the chosen backend does not take is refused.
    """

    mask: MaskKind = "none"
    bias: bool = False
    window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    packed: bool = False


NO_FEATURES = Features()


@dataclass(frozen=True)
class Requirements:
    """What a call asks, on the shapes that the backend will see (after the exchange).

    head_size: of Q and K, and of V unless value_head_size says otherwise. num_heads, num_kv_heads: per rank. dtype:
    `float32`, `bfloat16`, `float16`, `float64`. lse: the log-sum-exp of each row is wanted too. gradient: the call is
    differentiated, and with `lse` its log-sum-exp, too; learned_gradient: by its additive mask or sinks, as well. The
    rest is that of `Features`.

    Raises:
        FaultError: A value that no call has, such as a head size of 0; every such value is listed.
    """

    head_size: int
    num_heads: int
    num_kv_heads: int
    dtype: str
    kind: Kind
    causal: bool = False
    mask: MaskKind = "none"
    value_head_size: int | None = None
    bias: bool = False
    window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    packed: bool = False
    lse: bool = False
    gradient: bool = False
    learned_gradient: bool = False

    def __post_init__(self) -> None:
        found = [kind_fault(self.kind), _name_fault("mask", self.mask, get_args(MaskKind))]
        sizes = {name: getattr(self, name) for name in SIZES}
        found += [size_fault(name, size) for name, size in sizes.items() if (name, size) != ("value_head_size", None)]
        if not isinstance(self.dtype, str):
            found.append(Fault("dtype", repr(self.dtype), "it is the name of a dtype", "give one, such as bfloat16"))
        for name in SWITCHES:
            value = getattr(self, name)
            if not isinstance(value, bool):
                found.append(Fault(name, repr(value), "it is True or False", "give one of the two"))
        faults = [fault for fault in found if fault is not None]
        if faults:
            raise FaultError(faults)

    def carrying(self, features: Features, *, gradient: bool = False) -> Requirements:
        """The same layer's requirements for a call with these features."""
        return replace(
            self,
            mask=features.mask,
            bias=features.bias,
            window=features.window,
            soft_cap=features.soft_cap,
            sinks=features.sinks,
            packed=features.packed,
            gradient=gradient,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
