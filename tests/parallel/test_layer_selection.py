"""What a layer takes by itself: backends that ask for permission, and packages that are installed and broken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backends.interface import (
    AttentionBackend,
    Variant,
)
from backends.kernels.reference import ReferenceImpl
from backends.options import Blocks
from configs.faults import FaultError
from configs.schema import AttentionConfig, AttentionSpec
from parallel.attention import Attention
from tests.parallel.contract import layer_of
from tests.parallel.layers import context_of


class ShyBackend(AttentionBackend):
    variants = (Variant("shy", "backends.kernels.reference.ReferenceImpl"),)
    asks_permission = True

    @staticmethod
    def get_name() -> str:
        return "TORCH_SDPA"


SHY = {"TORCH_SDPA": f"{__name__}.ShyBackend"}


def test_a_backend_that_asks_for_permission_is_automatic_only_with_it() -> None:
    without = layer_of(context_of(register=SHY)).selection
    assert (without.backend, without.rejected[0].backend) == ("REFERENCE", "TORCH_SDPA")
    assert "only for layers that allow it" in without.rejected[0].faults[0].rule
    allowed = layer_of(context_of(register=SHY), allow_trtllm_default=True).selection
    assert (allowed.backend, allowed.variant, allowed.source) == ("TORCH_SDPA", "shy", "platform")
    explicit = layer_of(context_of(register=SHY, backend="TORCH_SDPA")).selection
    assert (explicit.variant, explicit.source) == ("shy", "default")


class BrokenImpl(ReferenceImpl):
    @classmethod
    def load(cls, options: Blocks = ()) -> None:
        raise OSError("libbroken.so: cannot open shared object file")


class BrokenBackend(AttentionBackend):
    variants = (
        Variant("broken", f"{__name__}.BrokenImpl", version=1),
        Variant("whole", "backends.kernels.reference.ReferenceImpl", version=2),
    )

    @staticmethod
    def get_name() -> str:
        return "TORCH_SDPA"


def test_a_kernel_that_cannot_be_imported_is_passed_over_and_an_explicit_one_refused() -> None:
    broken = {"TORCH_SDPA": f"{__name__}.BrokenBackend"}
    assert layer_of(context_of(register=broken)).selection.variant == "whole"
    only = AttentionConfig(default=AttentionSpec("TORCH_SDPA", version=1))
    context = context_of(register=broken)
    with pytest.raises(FaultError, match=r"cannot be imported here \(OSError: libbroken\.so: .*; use REFERENCE"):
        layer_of(replace(context, config=only))


@pytest.mark.parametrize("scale", [0.0, -0.25, float("nan"), float("inf"), True, "x"])
def test_a_scale_that_kernels_cannot_compute_with_is_refused(scale: Any) -> None:
    with pytest.raises(ValueError, match=r"softmax_scale is .*; it is a finite number above 0, or None"):
        layer_of(context_of(), softmax_scale=scale)


def test_a_kind_that_there_is_not_gets_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="kind is 'selfish'; it is one of self, cross, joint; did you mean self"):
        Attention(4, 16, role="self", kind="selfish", context=context_of())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="features is None; it is a Features"):
        layer_of(context_of(), features=None)
