"""One call by one variant: how far its results are from fp64 softmax attention, and what it does not do as claimed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

from backends.interface import AttentionImpl, AttentionMetadata, CallShape, PackedLengths
from backends.kernels.masking import whole_mask
from backends.kernels.reference import plain_attention_with_lse
from backends.platforms.facts import DeviceFacts
from kernel_grid.cases import HEADS, Call, Claim

TOLERANCE = {"bfloat16": 5e-3, "float16": 5e-3, "float32": 1e-5, "float64": 1e-12}
"""Relative L2 error of the output; of gradients three times that, as they go through three roundings more."""
LSE_TOLERANCE = {"bfloat16": 5e-3, "float16": 5e-3, "float32": 1e-5, "float64": 1e-12}
"""Absolute, of the largest: an error of e is one of e in the weight of what is merged by it."""
LOSSY, LOSSY_LSE = 0.1, 0.2
"""Relative L2 error of an output, and absolute one of a log-sum-exp, that is declared lossy."""
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """errors: by what was compared (output, lse, gradient, lse_gradient); each is at most its tolerance if the case
    passes. fault: why it does not. refused: why the kernel's own plan takes no call of these lengths. synchronises:
    the call waits for the device.
    """

    claim: str
    call: Call
    errors: dict[str, float]
    fault: str | None = None
    refused: str | None = None
    synchronises: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Exact:
    """The tensors of a call, and the exact results with their gradients. lowered: so much all scores are, by the first
    element of queries and keys; the gradient of the queries' is then a difference of large numbers, and not compared.
    """

    def __init__(self, call: Call, device: torch.device, lowered: float = 0.0) -> None:
        self.call, self.lowered = call, lowered
        generator = torch.Generator(device).manual_seed(0)
        dtype = getattr(torch, call.dtype)

        def draw(count: int, heads: int, size: int = call.head_size) -> torch.Tensor:
            return torch.randn(call.batch, count, heads, size, device=device, generator=generator).to(dtype)

        self.qkv: Tensors = draw(call.rows, HEADS), draw(call.keys, call.kv_heads), draw(call.keys, call.kv_heads)
        if lowered:
            self.qkv[0][..., 0], self.qkv[1][..., 0] = 1.0, -lowered * call.head_size**0.5
        self.metadata = metadata_of(call, device, dtype)
        self.upstream = draw(call.rows, HEADS)
        self.lse_upstream = draw(call.rows, HEADS, 1)[..., 0].transpose(1, 2).double()
        inputs = tuple(tensor.to(torch.float64, copy=True).requires_grad_() for tensor in self.qkv)
        query, key, value = inputs
        out, lse = plain_attention_with_lse(
            query,
            key,
            value,
            scale=call.head_size**-0.5,
            mask=_seen(call, self.qkv, self.metadata),
            bias=self.metadata.bias,
            soft_cap=self.metadata.soft_cap,
            sinks=self.metadata.sinks,
        )
        seen = torch.where(torch.isinf(lse), 0.0, lse)
        self.gradients = torch.autograd.grad(
            out, inputs, self.upstream.double(), retain_graph=True, materialize_grads=True
        )
        both = (out * self.upstream.double()).sum() + (seen * self.lse_upstream).sum()
        self.lse_gradients = torch.autograd.grad(both, inputs, materialize_grads=True)
        self.out, self.lse = out.detach(), lse.detach()


def _seen(call: Call, qkv: Tensors, metadata: AttentionMetadata) -> torch.Tensor | None:
    if metadata.block_mask is None:
        return whole_mask(qkv[0], qkv[1], metadata, causal=call.causal)
    rows, keys = (torch.arange(n, device=qkv[0].device) for n in (call.rows, call.keys))
    return _diagonal(None, None, rows[:, None], keys)[None, None]


def _diagonal(batch: Any, head: Any, row: Any, key: Any) -> torch.Tensor:
    """A band around a diagonal; every seventh row sees nothing."""
    seen: torch.Tensor = ((row - key) % 256 < 200) & (row % 7 != 3)
    return seen


def metadata_of(call: Call, device: torch.device, dtype: torch.dtype) -> AttentionMetadata:
    """What a call with its feature carries. Of masks for each query the first one sees nothing."""
    generator = torch.Generator(device).manual_seed(1)
    rows, keys = call.rows, call.keys

    def mask(heads: int, queries: int) -> torch.Tensor:
        drawn = torch.rand(call.batch, heads, queries, keys, device=device, generator=generator) < 0.7
        drawn[..., 0] = True
        if queries > 1:
            drawn[:, :, 0] = False
        return drawn

    def bias() -> torch.Tensor:
        drawn = torch.randn(call.batch, HEADS, rows, keys, device=device, generator=generator).to(dtype)
        return drawn.masked_fill(~mask(HEADS, rows), float("-inf"))

    kind = call.feature.removeprefix("packed_")
    packed = _documents(call) if call.feature.startswith("packed") else None
    if kind in ("key_padding", "full", "per_head", "bias_and_mask"):
        shapes = {"full": (1, rows), "per_head": (HEADS, rows)}
        added = bias() if kind == "bias_and_mask" else None
        return AttentionMetadata(mask(*shapes.get(kind, (1, 1))), packed=packed, bias=added)
    if kind == "block":
        blocks = create_block_mask(_diagonal, None, None, rows, keys, device=device)
        return AttentionMetadata(block_mask=blocks)
    made = {
        "bias": lambda: AttentionMetadata(bias=bias()),
        "window": lambda: AttentionMetadata(window=(5, 3)),
        "window_before": lambda: AttentionMetadata(window=(100, None)),
        "soft_cap": lambda: AttentionMetadata(soft_cap=2.0),
        "sinks": lambda: AttentionMetadata(sinks=torch.linspace(-1, 2, HEADS, device=device)),
    }
    return made[kind]() if kind in made else AttentionMetadata(packed=packed)


def _documents(call: Call) -> PackedLengths:
    """Three, one of them empty; of unequal lengths one has queries and no keys."""
    rows, keys = call.rows // 3, call.keys // 3
    if call.rows == call.keys:
        return PackedLengths((rows, 0, call.rows - rows), (keys, 0, call.keys - keys))
    return PackedLengths((rows, 0, call.rows - rows), (keys, call.keys - keys, 0))


def measure(claim: Claim, exact: Exact, device: DeviceFacts) -> Outcome:
    """Runs a call that the claim takes. What the kernel raises is a fault of the case, and so is a wrong result; what
    its plan raises, before anything runs, is a refusal.
    """
    call, metadata, errors = exact.call, exact.metadata, dict[str, float]()
    synchronises = False
    try:
        impl = _impl(claim, exact)
        shape = (call.batch, call.rows, call.keys, HEADS, call.kv_heads, call.head_size)
        try:
            plan = impl.plan(CallShape(*shape, metadata.features, metadata.packed))
        except ValueError as error:
            return Outcome(claim.name, call, errors, refused=str(error)[:300])
        synchronises = _compare(claim, exact, device, impl, plan, errors)
    except (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError, ImportError, OSError) as error:
        text = f"{type(error).__name__}: {str(error).strip()[:300]}"
        return Outcome(claim.name, call, errors, text, synchronises=synchronises)
    return Outcome(claim.name, call, errors, _fault(claim, call, errors), synchronises=synchronises)


def _impl(claim: Claim, exact: Exact) -> AttentionImpl:
    call = exact.call
    blocks = {name: schema() for name, schema in claim.backend.blocks.items()} | dict(claim.blocks)
    made = claim.backend.get_impl_cls(claim.variant)(
        softmax_scale=call.head_size**-0.5, causal=call.causal, options=tuple(blocks.items())
    )
    made.load()
    made.prepare(exact.qkv[0].device, exact.qkv[0].dtype)
    return made


def _compare(
    claim: Claim, exact: Exact, device: DeviceFacts, impl: AttentionImpl, plan: Any, errors: dict[str, float]
) -> bool:
    """Fills in the errors; whether the forward synchronises once it is warm."""
    call, metadata = exact.call, exact.metadata
    with torch.no_grad():
        errors["output"] = _error(impl.forward(*exact.qkv, metadata, plan), exact.out)
        synchronises = _synchronises(lambda: impl.forward(*exact.qkv, metadata, plan))
        if claim.takes(call, device, lse=True):
            out, lse = impl.forward_with_lse(*exact.qkv, metadata, plan)
            errors["output"] = max(errors["output"], _error(out, exact.out))
            errors["lse"] = _lse_error(lse, exact.lse)
    if claim.takes(call, device, gradient=True):
        inputs = tuple(tensor.clone().requires_grad_() for tensor in exact.qkv)
        out = impl.forward(inputs[0], inputs[1], inputs[2], metadata, plan)
        found = torch.autograd.grad(out, inputs, exact.upstream, materialize_grads=True)
        errors["gradient"] = _gradient_error(found, exact.gradients, exact)
    if claim.takes(call, device, gradient=True, lse=True):
        inputs = tuple(tensor.clone().requires_grad_() for tensor in exact.qkv)
        out, lse = impl.forward_with_lse(inputs[0], inputs[1], inputs[2], metadata, plan)
        seen = torch.where(torch.isinf(lse), 0.0, lse)
        both = (out.double() * exact.upstream.double()).sum() + (seen.double() * exact.lse_upstream).sum()
        found = torch.autograd.grad(both, inputs, materialize_grads=True)
        errors["lse_gradient"] = _gradient_error(found, exact.lse_gradients, exact)
    return synchronises


def _synchronises(run: Any) -> bool:
    if not torch.cuda.is_available():
        return False
    with _sync_is_an_error():
        try:
            run()
        except RuntimeError as error:
            if "synchroniz" in str(error):
                return True
            raise
    return False


@contextmanager
def _sync_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative L2 error; infinite for other shapes, for what is no number, and for rows that should be zeros."""
    if result.shape != exact.shape or not bool(torch.isfinite(result).all()):
        return math.inf
    if bool((result[(exact == 0).all(dim=-1)] != 0).any()):
        return math.inf
    return float((result.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def _lse_error(lse: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference; infinite if another row is minus infinity, or the layout is another."""
    wide = torch.float64 if lse.dtype == torch.float64 else torch.float32
    blind = torch.isinf(exact)
    if lse.shape != exact.shape or lse.dtype != wide or not torch.equal(lse == -math.inf, blind):
        return math.inf
    return float((lse.double() - exact).masked_fill(blind, 0).abs().amax())


def _gradient_error(found: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor, ...], exact: Exact) -> float:
    """The largest relative error of the three. Of a single key the gradients of Q and K are zero but for rounding, so
    that they are measured by the gradient that came in.
    """
    worst = 0.0
    for place, (result, right) in enumerate(zip(found, gradients, strict=True)):
        if result.shape != right.shape or not bool(torch.isfinite(result).all()):
            return math.inf
        if exact.lowered and place == 0:
            result, right = result[..., 1:], right[..., 1:]
        scale = right.norm() + (exact.upstream.double().norm() if exact.call.keys == 1 else 0.0)
        worst = max(worst, float((result.double() - right).norm() / scale.clamp_min(1e-30)))
    return worst


def _fault(claim: Claim, call: Call, errors: dict[str, float]) -> str | None:
    output = LOSSY if claim.lossy else TOLERANCE[call.dtype]
    lse = LOSSY_LSE if claim.lossy else LSE_TOLERANCE[call.dtype]
    allowed = {"output": output, "lse": lse, "gradient": 3 * output, "lse_gradient": 3 * output}
    over = [
        f"{name} is off by {error:.3g}, over {allowed[name]:g}"
        for name, error in errors.items()
        if not error <= allowed[name]
    ]
    return "; ".join(over) or None
