"""What a model may bring to a layer: its own implementation, in its phases, and its own attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from backends.interface import (
    AttentionImpl,
    AttentionMetadata,
    CallShape,
)
from backends.kernels.reference import ReferenceImpl
from backends.kernels.torch_sdpa import TorchSdpaImpl
from backends.registry import DiffusionAttentionBackendEnum
from configs.faults import FaultError
from configs.schema import AttentionConfig, AttentionSpec
from tests.exact import random_qkv
from tests.parallel.contract import HEADS, SIZE, layer_of, qkv
from tests.parallel.layers import collecting, context_of


class Doubling(TorchSdpaImpl):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * super().forward(*args, **kwargs)


def test_an_override_of_the_selected_backend_computes() -> None:
    plain, own = layer_of(), layer_of(impl_overrides={"TORCH_SDPA": Doubling})
    assert type(own.impl) is Doubling
    assert torch.equal(own(*qkv()), 2 * plain(*qkv()))
    assert own.selection == plain.selection


def test_an_override_of_another_backend_has_no_effect() -> None:
    layer = layer_of(context_of(backend="REFERENCE"), impl_overrides={"TORCH_SDPA": Doubling})
    assert type(layer.impl) is ReferenceImpl


def test_a_member_of_the_enum_names_the_backend_of_an_override() -> None:
    layer = layer_of(impl_overrides={DiffusionAttentionBackendEnum.TORCH_SDPA: Doubling})
    assert type(layer.impl) is Doubling


@pytest.mark.parametrize("key", ["TORCH_SPDA", "torch_sdpa", 3, None])
def test_an_override_that_no_backend_would_use_is_refused_with_the_nearest_name(key: Any) -> None:
    near = "did you mean TORCH_SDPA" if isinstance(key, str) else "use one of REFERENCE, TORCH_SDPA"
    with pytest.raises(FaultError, match=rf"impl_overrides.*no backend has that name; {near}"):
        layer_of(impl_overrides={key: Doubling})


def test_an_override_beside_a_models_own_module_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing would use impl_overrides"):
        layer_of(custom_attention=FirstKey(), skip_sequence_parallel=True, impl_overrides={"TORCH_SDPA": Doubling})


@pytest.mark.parametrize("own", [None, lambda: None, "Doubling", Doubling(softmax_scale=1.0, causal=False), dict])
@pytest.mark.parametrize("name", ["TORCH_SDPA", "REFERENCE"])
def test_an_override_is_a_class_whichever_backend_is_selected(name: str, own: Any) -> None:
    with pytest.raises(TypeError, match=rf"impl_overrides\['{name}'\] is .* must be a class"):
        layer_of(impl_overrides={name: own})


def test_overrides_are_a_mapping() -> None:
    with pytest.raises(TypeError, match=r"impl_overrides is .* it is a mapping"):
        layer_of(impl_overrides=[Doubling])


class Forgetful(ReferenceImpl):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return None

    def forward_with_lse(self, *args: Any, **kwargs: Any) -> Any:
        return None


class Unmade(ReferenceImpl):
    def __new__(cls, **options: Any) -> Any:
        return None


def test_an_implementation_that_returns_nothing_is_named() -> None:
    layer = layer_of(context_of(backend="REFERENCE"), impl_overrides={"REFERENCE": Forgetful}, lse=True)
    with pytest.raises(ValueError, match="REFERENCE returned None; a backend's forward returns a tensor"):
        layer(*qkv())
    with pytest.raises(TypeError, match=r"Forgetful returned None; forward_with_lse returns \(output, log-sum-exp\)"):
        layer.forward_with_lse(*qkv())


def test_a_class_that_constructs_nothing_is_named() -> None:
    with pytest.raises(TypeError, match="Unmade returned None"):
        layer_of(context_of(backend="REFERENCE"), impl_overrides={"REFERENCE": Unmade})


@pytest.mark.parametrize("own", [ReferenceImpl, AttentionImpl])
def test_an_override_has_to_specialise_the_selected_implementation(own: Any) -> None:
    with pytest.raises(TypeError, match=r"impl_overrides\['TORCH_SDPA'\] is .* a subclass of .*TorchSdpaImpl"):
        layer_of(impl_overrides={"TORCH_SDPA": own})


def test_an_override_bypasses_no_selection_error() -> None:
    with pytest.raises(FaultError, match="FLASH_ATTN"):
        layer_of(context_of(backend="FLASH_ATTN"), impl_overrides={"FLASH_ATTN": Doubling})


class PlanningImpl(ReferenceImpl):
    log: tuple[Any, ...] = ()

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        type(self).log += (("prepare", str(device), dtype),)

    def plan(self, shape: CallShape) -> str:
        type(self).log += (("plan", shape.query_length),)
        return f"plan of {shape.query_length}"

    def forward(self, query: Any, key: Any, value: Any, metadata: Any, plan: Any = None) -> torch.Tensor:
        type(self).log += (("forward", plan),)
        return super().forward(query, key, value, metadata)


def test_a_kernel_prepares_once_plans_once_for_a_shape_and_runs_each_call() -> None:
    PlanningImpl.log = ()
    layer = layer_of(context_of(backend="REFERENCE"), impl_overrides={"REFERENCE": PlanningImpl})
    short = random_qkv(2, 3, 3, HEADS, HEADS, SIZE, torch.float32)
    for tensors in (qkv(), qkv(), short, qkv()):
        layer(*tensors)
    assert PlanningImpl.log == (
        ("prepare", "cpu", torch.float32),
        *(("plan", 12), ("forward", "plan of 12"), ("forward", "plan of 12")),
        *(("plan", 3), ("forward", "plan of 3"), ("forward", "plan of 12")),
    )


class FirstKey(torch.nn.Module):
    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        return value[:, :1].expand_as(query)


def test_custom_attention_computes_and_is_reported_as_the_models_own() -> None:
    context, events = collecting()
    layer = layer_of(context, custom_attention=FirstKey(), skip_sequence_parallel=True)
    query, key, value = qkv()
    assert torch.equal(layer(query, key, value), value[:, :1].expand_as(query))
    (event,) = events
    assert (event.selection.backend, event.selection.source, event.strategy) == ("custom_attention", "model", "local")
    assert event.kernel == event.selection.class_path == f"{__name__}.FirstKey"


def test_custom_attention_has_to_own_its_communication() -> None:
    with pytest.raises(ValueError, match="skip_sequence_parallel=True"):
        layer_of(custom_attention=FirstKey())


def test_a_choice_for_a_role_that_computes_itself_is_refused() -> None:
    context = context_of()
    chosen = AttentionConfig(per_role={"own": AttentionSpec("TORCH_SDPA")})
    own = replace(context, config=chosen)
    with pytest.raises(FaultError, match=r"attention\.per_role\.own=TORCH_SDPA: own computes with the model's own"):
        layer_of(own, role="own", custom_attention=FirstKey(), skip_sequence_parallel=True)


@pytest.mark.parametrize(
    ("chosen", "key"),
    [
        (AttentionConfig(per_role={"self": AttentionSpec("TORCH_SDPA")}), "attention.per_role.self"),
        (AttentionConfig(default=AttentionSpec("TORCH_SDPA")), "attention.default"),
    ],
)
def test_a_choice_for_many_roles_that_one_does_not_use_is_told(chosen: AttentionConfig, key: str) -> None:
    own = replace(context_of(), config=chosen)
    layer = layer_of(own, role="own", custom_attention=FirstKey(), skip_sequence_parallel=True)
    told = layer.selection
    assert (told.requested, told.backend, told.source, told.key) == ("TORCH_SDPA", "custom_attention", "model", key)
    (rejected,) = told.rejected
    assert rejected.backend == "TORCH_SDPA"
    assert rejected.faults[0].rule == f"own computes with the model's own {__name__}.FirstKey"
    assert layer.execution_path().fallback is None
