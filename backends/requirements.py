"""What one attention call asks of a backend, as plain values. No torch here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Kind = Literal["self", "cross", "joint"]
MaskKind = Literal["none", "key_padding", "full", "per_head", "block"]
"""key_padding: [B or 1, 1, 1, Sk]; full: [B or 1, 1, Sq, Sk]; per_head: [B or 1, H, Sq or 1, Sk]; block: a `BlockMask`
of torch's.
"""


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
