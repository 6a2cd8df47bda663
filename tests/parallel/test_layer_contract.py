"""What a model may bring to a layer: its own implementation, its own attention, and what its calls carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from backends.execution import ExecutionPath, Fallback, Support, SupportStatus
from backends.interface import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    CallShape,
    Capabilities,
    Features,
    PackedLengths,
    Variant,
)
from backends.kernels.reference import ReferenceImpl
from backends.kernels.torch_sdpa import TorchSdpaImpl
from configs.faults import FaultError
from configs.schema import AttentionConfig, AttentionSpec
from parallel.attention import Attention
from parallel.mesh import Mesh
from parallel.plan import plan_sequence
from tests.exact import TOLERANCE, random_qkv, relative_error
from tests.parallel.layers import ONE_RANK, collecting, context_of, rows_of
from tests.ranks import Ranks

HEADS, SIZE, LENGTH = 4, 16, 12
GlooRanks = Callable[[int], Ranks]


def layer_of(context: Any = None, role: str = "self", **options: Any) -> Attention:
    return Attention(HEADS, SIZE, role=role, kind="self", context=context or context_of(), name="blocks.0", **options)


def qkv() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return random_qkv(2, LENGTH, LENGTH, HEADS, HEADS, SIZE, torch.float32)


# --- a model's own implementation -----------------------------------------------------------------------------------


class Doubling(TorchSdpaImpl):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * super().forward(*args, **kwargs)


def test_an_override_of_the_selected_backend_computes() -> None:
    plain, own = layer_of(), layer_of(impl_overrides={"TORCH_SDPA": Doubling})
    assert type(own.impl) is Doubling
    assert torch.equal(own(*qkv()), 2 * plain(*qkv()))
    assert own.selection == plain.selection


def test_an_override_of_another_backend_has_no_effect() -> None:
    layer = layer_of(context_of(backend="REFERENCE"), impl_overrides={"TORCH_SDPA": Doubling, "NOBODYS": Doubling})
    assert type(layer.impl) is ReferenceImpl


@pytest.mark.parametrize("own", [ReferenceImpl, AttentionImpl, Doubling(softmax_scale=1.0, causal=False), "Doubling"])
def test_an_override_has_to_specialise_the_selected_implementation(own: Any) -> None:
    with pytest.raises(TypeError, match=r"impl_overrides\['TORCH_SDPA'\] is .* a subclass of .*TorchSdpaImpl"):
        layer_of(impl_overrides={"TORCH_SDPA": own})


def test_an_override_bypasses_no_selection_error() -> None:
    with pytest.raises(FaultError, match="FLASH_ATTN"):
        layer_of(context_of(backend="FLASH_ATTN"), impl_overrides={"FLASH_ATTN": Doubling})


# --- a model's own attention ----------------------------------------------------------------------------------------


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
    own = type(context)(**{**_fields(context), "config": chosen})
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
    own = type(context_of())(**{**_fields(context_of()), "config": chosen})
    layer = layer_of(own, role="own", custom_attention=FirstKey(), skip_sequence_parallel=True)
    told = layer.selection
    assert (told.requested, told.backend, told.source, told.key) == ("TORCH_SDPA", "custom_attention", "model", key)
    (rejected,) = told.rejected
    assert rejected.backend == "TORCH_SDPA"
    assert rejected.faults[0].rule == f"own computes with the model's own {__name__}.FirstKey"
    assert layer.execution_path().fallback is None


def _fields(context: Any) -> dict[str, Any]:
    return {name: getattr(context, name) for name in type(context).__dataclass_fields__}


# --- permission -----------------------------------------------------------------------------------------------------


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


# --- what calls carry -----------------------------------------------------------------------------------------------


def drawn(*shape: int) -> torch.Tensor:
    """A mask that is the same in every process."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(4)) < 0.7


CARRIED = {
    "key_padding": AttentionMetadata(drawn(2, 1, 1, LENGTH)),
    "full": AttentionMetadata(drawn(1, 1, LENGTH, LENGTH)),
    "per_head": AttentionMetadata(drawn(1, HEADS, LENGTH, LENGTH)),
    "window": AttentionMetadata(window=(2, None)),
    "soft_cap": AttentionMetadata(soft_cap=3.0),
    "sinks": AttentionMetadata(sinks=torch.linspace(-1, 2, HEADS)),
    "packed": AttentionMetadata(packed=PackedLengths((5, 0, 7), (5, 0, 7))),
}


def exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, carried: AttentionMetadata) -> torch.Tensor:
    """Row by row in fp64, apart from the package's own reference."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    documents = carried.packed or PackedLengths((LENGTH,), (LENGTH,))
    document = [index for index, rows in enumerate(documents.query) for _ in range(rows)]
    for batch, row, head in ((b, r, h) for b in range(len(query)) for r in range(LENGTH) for h in range(HEADS)):
        scores = key[batch, :, head].double() @ query[batch, row, head].double() * SIZE**-0.5
        if carried.soft_cap:
            scores = carried.soft_cap * torch.tanh(scores / carried.soft_cap)
        seen = torch.tensor([document[row] == document[column] for column in range(LENGTH)])
        if carried.window is not None:
            before, after = carried.window
            low, high = (0 if before is None else row - before), (LENGTH if after is None else row + after)
            seen &= torch.tensor([low <= column <= high for column in range(LENGTH)])
        if carried.mask is not None:
            seen &= carried.mask.expand(len(query), HEADS, LENGTH, LENGTH)[batch, head, row]
        weights = torch.where(seen, scores.exp(), 0.0)
        total = weights.sum() + (0.0 if carried.sinks is None else float(carried.sinks[head].double().exp()))
        out[batch, row, head] = (weights / total.clamp_min(1e-300)) @ value[batch, :, head].double()
    return out


@pytest.mark.parametrize("name", CARRIED)
def test_the_reference_serves_everything_that_a_call_can_carry(name: str) -> None:
    out = layer_of(context_of(backend="REFERENCE"))(*qkv(), CARRIED[name])
    assert relative_error(out, exact(*qkv(), CARRIED[name])) <= TOLERANCE[torch.float32]


def on_rank(mesh: Mesh, name: str, backend: str) -> torch.Tensor:
    plan = plan_sequence(LENGTH, HEADS, mesh.world_size)
    query, key, value = (rows_of(tensor, plan, mesh.rank) for tensor in qkv())
    return layer_of(context_of(mesh, backend=backend))(query, key, value, CARRIED[name], plan=plan)


@pytest.mark.ray
@pytest.mark.parametrize("name", CARRIED)
def test_what_a_call_carries_reaches_the_right_heads_of_every_rank(gloo_ranks: GlooRanks, name: str) -> None:
    one = on_rank(ONE_RANK, name, "REFERENCE")
    two = torch.cat(gloo_ranks(2).run(on_rank, name, "REFERENCE"), dim=1)
    assert relative_error(two, one) <= 1e-6


@pytest.mark.parametrize("name", ["window", "soft_cap", "sinks", "packed"])
def test_what_a_backend_does_not_take_is_refused_and_not_dropped(name: str) -> None:
    with pytest.raises(FaultError, match=r"TORCH_SDPA: .* not supported; choose another backend for self"):
        layer_of()(*qkv(), CARRIED[name])


@pytest.mark.parametrize("backend", ["REFERENCE", "TORCH_SDPA"])
def test_v_may_have_another_head_size(backend: str) -> None:
    query, key, value = qkv()
    layer = layer_of(context_of(backend=backend), value_head_size=6)
    whole = layer_of(context_of(backend=backend))(query, key, value)
    assert relative_error(layer(query, key, value[..., :6]), whole[..., :6].double()) <= 1e-6
    with pytest.raises(ValueError, match=r"must be \(2, 12, 4, 16\) and \(2, 12, 4, 6\)"):
        layer(query, key, value)
    with pytest.raises(FaultError, match="cannot be exchanged in one packet"):
        layer_of(context_of(Mesh(0, 2, torch.device("cpu"))), value_head_size=6)


def test_an_automatic_choice_takes_what_the_calls_are_said_to_carry() -> None:
    assert layer_of(features=Features(soft_cap=True)).selection.backend == "REFERENCE"
    assert layer_of(features=Features(mask="per_head")).selection.backend == "TORCH_SDPA"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (AttentionMetadata(sinks=torch.zeros(3)), r"sinks are \(3,\); they are one for each of 4 heads"),
        (AttentionMetadata(soft_cap=0.0), "a finite number above 0"),
        (AttentionMetadata(soft_cap=float("nan")), "a finite number above 0"),
        (AttentionMetadata(window=(-1, 0)), "None or at least 0"),
        (AttentionMetadata(packed=PackedLengths((5,), (5,))), "the call has 12 and 12"),
        (AttentionMetadata(packed=PackedLengths((12,), (5, 7))), "the documents have"),
        (AttentionMetadata(packed=PackedLengths((13, -1), (13, -1))), "negative length"),
    ],
)
def test_what_makes_no_sense_is_refused(metadata: AttentionMetadata, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_of(context_of(backend="REFERENCE"))(*qkv(), metadata)


@pytest.mark.parametrize("backend", ["REFERENCE", "TORCH_SDPA"])
def test_rows_that_see_nothing_have_no_part_in_gradients(backend: str) -> None:
    tensors = [tensor.requires_grad_() for tensor in qkv()]
    mask = drawn(2, 1, LENGTH, LENGTH)
    mask[:, :, 3] = False
    layer_of(context_of(backend=backend))(*tensors, AttentionMetadata(mask)).sum().backward()
    assert all(tensor.grad is not None and bool(torch.isfinite(tensor.grad).all()) for tensor in tensors)
    assert not bool(tensors[0].grad[:, 3].any())  # type: ignore[index]


@pytest.mark.parametrize(
    "carried",
    [
        AttentionMetadata(window=(1, 1)),
        AttentionMetadata(drawn(1, 1, LENGTH, LENGTH)),
        AttentionMetadata(packed=PackedLengths((5, 7), (5, 7))),
    ],
)
def test_what_is_told_of_each_row_is_refused_where_a_rank_has_some_of_them(carried: AttentionMetadata) -> None:
    context = context_of(Mesh(1, 2, torch.device("cpu")), backend="REFERENCE")
    layer = Attention(HEADS, SIZE, role="cross", kind="cross", context=context)
    with pytest.raises(ValueError, match="this rank has 12 rows of it"):
        layer(*qkv(), carried)
    assert layer(*qkv(), AttentionMetadata(drawn(2, 1, 1, LENGTH))).shape == qkv()[0].shape


class SinksBackend(AttentionBackend):
    variants = (Variant("sinks", "backends.kernels.reference.ReferenceImpl", takes=Capabilities(sinks=True)),)

    @staticmethod
    def get_name() -> str:
        return "SINKS"


def test_sinks_that_are_learned_count_as_gradients() -> None:
    sinks = torch.nn.Parameter(torch.zeros(HEADS))
    plan = plan_sequence(2 * LENGTH, HEADS, 2)
    register = {"SINKS": f"{__name__}.SinksBackend"}
    layer = layer_of(context_of(Mesh(0, 2, torch.device("cpu")), backend="SINKS", register=register))
    with pytest.raises(FaultError, match="SINKS: differentiation is not supported"):
        layer(*qkv(), AttentionMetadata(sinks=sinks), plan=plan)


class Fp32Backend(AttentionBackend):
    variants = (Variant("fp32", "backends.kernels.reference.ReferenceImpl", takes=Capabilities(dtypes=("float32",))),)

    @staticmethod
    def get_name() -> str:
        return "FP32"


def test_a_call_in_another_dtype_than_the_backend_takes_is_refused() -> None:
    layer = layer_of(context_of(backend="FP32", register={"FP32": f"{__name__}.Fp32Backend"}))
    with pytest.raises(FaultError, match="dtype float64 is not supported; it takes float32"):
        layer(*(tensor.double() for tensor in qkv()))


def test_metadata_stays_as_it_was() -> None:
    carried = CARRIED["per_head"]
    with pytest.raises(AttributeError):
        carried.mask = None  # type: ignore[misc]
    first, second = (layer_of(context_of(backend="REFERENCE"))(*qkv(), carried) for _ in range(2))
    assert torch.equal(first, second)


# --- packages that are installed and broken -------------------------------------------------------------------------


class BrokenImpl(ReferenceImpl):
    @classmethod
    def load(cls) -> None:
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
        layer_of(type(context)(**{**_fields(context), "config": only}))


# --- phases ---------------------------------------------------------------------------------------------------------


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


# --- which path a call takes ----------------------------------------------------------------------------------------


class UntriedBackend(AttentionBackend):
    variants = (
        Variant("untried", "backends.kernels.torch_sdpa.TorchSdpaImpl", takes=Capabilities(), compilation="traceable"),
    )

    @staticmethod
    def get_name() -> str:
        return "UNTRIED"


def path_of(backend: str, mesh: Mesh = ONE_RANK, **options: Any) -> ExecutionPath:
    register = {"UNTRIED": f"{__name__}.UntriedBackend"}
    return layer_of(context_of(mesh, backend=backend, register=register), **options).execution_path()


def test_a_verified_path_says_so_and_compiles_as_one_graph() -> None:
    path = path_of("TORCH_SDPA")
    assert (path.backend, path.variant, path.strategy, path.platform) == ("TORCH_SDPA", "torch", "local", "cpu")
    assert (path.compilation, path.support.status) == ("traceable", SupportStatus.SUPPORTED)
    assert path.support_for(fullgraph=True) == path.support


def test_a_path_that_was_never_run_there_is_unverified_and_has_no_full_graph() -> None:
    path = path_of("UNTRIED")
    assert path.support == Support(SupportStatus.UNVERIFIED, "not run on cpu hardware")
    assert path.support_for(fullgraph=False) == path.support
    refused = path.support_for(fullgraph=True)
    assert refused.status is SupportStatus.UNSUPPORTED
    assert "no verified full graph on cpu" in refused.reason
    assert path.support.status is SupportStatus.UNVERIFIED


def test_an_exchange_is_outside_of_compiled_graphs() -> None:
    path = path_of("TORCH_SDPA", Mesh(0, 2, torch.device("cpu")))
    assert (path.strategy, path.compilation) == ("ulysses", "eager")
    assert "outside of compiled graphs" in path.support_for(fullgraph=True).reason


def test_an_unsupported_path_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="without a reason"):
        Support(SupportStatus.UNSUPPORTED)


def test_the_path_and_the_call_refuse_alike() -> None:
    layer = layer_of()
    with pytest.raises(FaultError) as of_path:
        layer.execution_path(Features(soft_cap=True))
    with pytest.raises(FaultError) as of_call:
        layer(*qkv(), CARRIED["soft_cap"])
    assert of_path.value.faults == of_call.value.faults
    assert layer.execution_path(Features(mask="full")).mask == "full"


def test_the_kernel_of_a_path_is_that_of_the_initialised_implementation() -> None:
    class Renamed(TorchSdpaImpl):
        @property
        def kernel(self) -> str:
            return "my.kernel"

    assert path_of("TORCH_SDPA", impl_overrides={"TORCH_SDPA": Renamed}).kernel == "my.kernel"


def test_a_fallback_that_the_configuration_allows_is_declared() -> None:
    context = context_of()
    config = AttentionConfig(default=AttentionSpec("FLASH_ATTN", on_unsupported="fallback"))
    layer = layer_of(type(context)(**{**_fields(context), "config": config}))
    selection = layer.selection
    assert (selection.requested, selection.backend, selection.source) == ("FLASH_ATTN", "TORCH_SDPA", "platform")
    assert selection.rejected[0].backend == "FLASH_ATTN"
    fallback = layer.execution_path().fallback
    assert isinstance(fallback, Fallback)
    assert (fallback.requested, fallback.backend) == ("FLASH_ATTN", "TORCH_SDPA")
    assert fallback.trigger == tuple(fault.rule for fault in selection.rejected[0].faults)
    assert "masks" in fallback.preserves


def test_a_local_call_compiles_without_breaks_and_gives_the_same() -> None:
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    layer = layer_of()
    eager = layer(*qkv())
    compiled = torch.compile(layer_of(), backend=count, fullgraph=True)  # one that has never run
    assert torch.equal(compiled(*qkv()), eager)
    assert torch.equal(compiled(*qkv()), eager)
    assert len(graphs) == 1
