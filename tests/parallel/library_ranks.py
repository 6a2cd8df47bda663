"""What the tests of the library run on the ranks of a default group, whoever has started them. Free of Ray."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import raylysses

TINY: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 5,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 12,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
}
LATENT = (3, 6, 10)  # 3 x 3 x 5 = 45 tokens: neither 2 nor 3 ranks have equal shares of rows and of 5 heads


def start(function: Callable[..., Any], world_size: int, folder: Path, *arguments: Any) -> list[Any]:
    """`function(*arguments)` on each of so many processes of one gloo group; the results by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_enter, (world_size, port, folder, function, arguments), nprocs=world_size)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _enter(
    rank: int, world_size: int, port: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    torch.save(function(*arguments), folder / f"{rank}.pt")
    dist.destroy_process_group()


def model() -> Any:
    """A small Wan with the same weights in every process."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(5)
    made = WanTransformer3DModel(**TINY).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made


def inputs(latent: tuple[int, int, int] = LATENT) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    return {
        "hidden_states": torch.randn(2, TINY["in_channels"], *latent, generator=generator),
        "encoder_hidden_states": torch.randn(2, 9, TINY["text_dim"], generator=generator),
        "timestep": torch.tensor([100.0, 700.0]),
    }


def output(of: Any) -> torch.Tensor:
    out: torch.Tensor = of(**inputs(), return_dict=False)[0]
    return out


def gradients(of: Any) -> dict[str, torch.Tensor]:
    """Of every parameter, of a loss over the whole output."""
    of.zero_grad()
    output(of).square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in of.named_parameters() if parameter.grad is not None}


def averaged(of: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for gradient in of.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return of


def everything(options: dict[str, Any]) -> dict[str, Any]:
    """A model's output before, while and after its sequence is shared, and what the handle tells."""
    transformer = model()
    hooks, processors = hook_count(transformer), dict(transformer.attn_processors)
    found: dict[str, Any] = {}
    with torch.no_grad():
        found["before"] = output(transformer)
        with raylysses.sequence_parallel(transformer, **options) as shared:
            found["shared"] = output(transformer)
            found["moved"] = shared.traffic()
            found["then"] = shared.traffic()
            found["served"] = [str(each) for each in shared.selections()]
            found["place"] = (shared.rank, shared.world_size)
        found["after"] = output(transformer)
    found["hooks"] = (hooks, hook_count(transformer))
    found["processors"] = all(transformer.attn_processors[name] is each for name, each in processors.items())
    return found


def hook_count(of: torch.nn.Module) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in of.modules())


def trained(options: dict[str, Any]) -> dict[str, Any]:
    """Gradients of an unwired model, of one on all ranks, and of one that computes its blocks again."""
    transformer = model()
    found: dict[str, Any] = {"whole": gradients(transformer)}
    with raylysses.sequence_parallel(transformer, **options):
        found["shared"] = averaged(gradients(transformer))
        transformer.enable_gradient_checkpointing()
        transformer.train()
        found["recomputed"] = averaged(gradients(transformer))
    return found


def on_meshes() -> dict[str, Any]:
    """The same model over every kind of mesh that 4 ranks can have."""
    from torch.distributed.device_mesh import init_device_mesh

    transformer, found = model(), {}
    pairs = dist.new_group([0, 1]), dist.new_group([2, 3])
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    apart = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("ring",))
    meshes = {"square": square, "part": apart["sp"], "line": line, "group": pairs[dist.get_rank() // 2]}
    with torch.no_grad():
        for name, mesh in meshes.items():
            with raylysses.sequence_parallel(transformer, mesh, attention="REFERENCE") as shared:
                own = output(transformer)
                ways = {str(each.way) for each in shared.selections() if each.selection.role == "self"}
                found[name] = (own, ways, shared.world_size)
        found["whole"] = output(transformer)
    return found


def refusals() -> list[list[str]]:
    """What the caller is told, for each thing that cannot be."""
    from torch.distributed.device_mesh import init_device_mesh

    transformer = model()
    odd = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp"))
    first = dist.new_group([0])
    calls: list[Callable[[], Any]] = [
        lambda: raylysses.sequence_parallel(torch.nn.Linear(2, 2)),
        lambda: raylysses.sequence_parallel(transformer, odd),
        lambda: raylysses.sequence_parallel(transformer, attention=["run.seed=3"]),
        lambda: raylysses.sequence_parallel(transformer, attention="attention.per_role.slef=REFERENCE"),
        lambda: raylysses.sequence_parallel(transformer, attention={"defualt": "REFERENCE"}),
        lambda: raylysses.sequence_parallel(transformer, attention="FLASH_ATTN"),
        lambda: raylysses.sequence_parallel(transformer, ulysses=3),
        lambda: raylysses.sequence_parallel(transformer, control=first),
        lambda: raylysses.attention_context_of(first, dtype=torch.float32, device="cuda"),
    ]
    found = [_told(call) for call in calls]
    with raylysses.sequence_parallel(transformer):
        found.append(_told(lambda: raylysses.sequence_parallel(transformer)))
    wrong: list[dict[str, Any]] = [
        {"model": 3},
        {"mesh": 3},
        {"timeout": 5},
        {"on_event": 3},
        {"name": ""},
        {"denoising": 0.5},
        {"dtype": "bfloat16"},
        {"control": 4},
    ]
    found += [_told(functools.partial(raylysses.sequence_parallel, **{"model": transformer} | each)) for each in wrong]
    found.append(_told(lambda: raylysses.attention_context_of(dtype=torch.float32, device="nowhere")))
    settings: list[dict[str, Any]] = [{"exchange_dtype": "fp9"}, {"transport": "ncl"}, {"transport": "nccl"}]
    found += [_told(functools.partial(raylysses.sequence_parallel, transformer, **each)) for each in settings]
    return found


def cycles(kind: str) -> list[tuple[int, int]]:
    """The descriptors and threads of this process after each of some wirings of 4 ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    transformer = model()
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    rings = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    options: dict[str, dict[str, Any]] = {
        "whole": {},
        "ring x ulysses": {"ulysses": 2, "attention": "REFERENCE"},
        "part": {"mesh": square["sp"]},
        "square mesh": {"mesh": rings, "attention": "REFERENCE"},
        "context": {"dtype": torch.float32, "ulysses": 2, "attention": "REFERENCE"},
    }
    process, counts = psutil.Process(), []
    with torch.no_grad():
        for _ in range(7):
            if kind == "context":
                with raylysses.attention_context_of(**options[kind]) as context:
                    layer = raylysses.Attention(4, 8, role="self", kind="self", context=context)
                    plan = layer.plan_of(raylysses.Stream("tokens", 8))
                    rows = torch.ones(1, 2, 4, 8)
                    layer(rows, rows, rows, plan=plan)
            else:
                with raylysses.sequence_parallel(transformer, **options[kind]):
                    output(transformer)
            dist.barrier()
            counts.append((process.num_fds(), process.num_threads()))
    return counts[3:]


def failed_wirings() -> dict[str, Any]:
    """Two wirings that fail after groups were formed, and one that does not."""
    from parallel.models.sharding import ShardedModel

    transformer = model()
    hooks, processors = hook_count(transformer), dict(transformer.attn_processors)
    found: dict[str, Any] = {"errors": [], "untouched": []}
    register = ShardedModel._register_hooks
    with torch.no_grad():
        found["before"] = output(transformer)
        for error in (AttributeError, KeyboardInterrupt):

            def fail(sharded: ShardedModel, plan: Any, error: type[BaseException] = error) -> None:
                register(sharded, plan)
                raise error

            with patch.object(ShardedModel, "_register_hooks", fail):
                try:
                    raylysses.sequence_parallel(transformer)
                except (AttributeError, KeyboardInterrupt) as raised:
                    found["errors"].append(type(raised).__name__)
            own = all(transformer.attn_processors[name] is each for name, each in processors.items())
            found["untouched"].append(own and hook_count(transformer) == hooks)
        with raylysses.sequence_parallel(transformer):
            found["shared"] = output(transformer)
    return found


def under_autocast(strategy: str) -> dict[str, Any]:
    """A model's outputs and gradients under autocast: plain, on one rank, and on all of them."""
    transformer, found = model(), {}
    autocast = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    options: dict[str, Any] = {"attention": "REFERENCE", "strategy": strategy}

    def cast_gradients() -> dict[str, torch.Tensor]:
        with autocast():
            return gradients(transformer)

    with torch.no_grad():
        found["exact"] = output(transformer)
        with autocast():
            found["plain"] = output(transformer).float()
            with raylysses.sequence_parallel(transformer, **options):
                found["inferred"] = output(transformer).float()
            with raylysses.sequence_parallel(transformer, alone, attention="REFERENCE"):
                found["alone"] = output(transformer).float()
        with raylysses.sequence_parallel(transformer, **options, dtype=torch.bfloat16) as shared, autocast():
            found["given"] = output(transformer).float()
            moved = shared.traffic()
            found["planned"], found["measured"] = moved.planned, moved.measured
        with raylysses.sequence_parallel(transformer, **options), autocast():
            found["refused"] = "".join(_told(lambda: output(transformer)))
    found["exact gradients"], found["plain gradients"] = gradients(transformer), cast_gradients()
    with raylysses.sequence_parallel(transformer, **options, dtype=torch.bfloat16):
        found["gradients"] = averaged(cast_gradients())
    dist.destroy_process_group(alone)
    return found


def exchanged_in_fp8() -> dict[str, Any]:
    """A model whose exchanges within a Ulysses group are in fp8."""
    transformer, found = model(), {}
    with torch.no_grad():
        found["whole"] = output(transformer)
        options: dict[str, Any] = {"strategy": "ulysses", "exchange_dtype": "fp8", "transport": "torch"}
        with raylysses.sequence_parallel(transformer, **options) as shared:
            found["fp8"] = output(transformer)
            found["config"] = (shared.context.parallel.exchange_dtype, shared.context.parallel.transport)
    return found


def _told(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except raylysses.FaultError as error:
        return [str(fault) for fault in error.faults]
    return []


def by_hand() -> dict[str, Any]:
    """An attention layer of a model of one's own: 7 rows, 3 query heads, one KV head."""
    context = raylysses.attention_context_of(dtype=torch.float64, attention={"default": "REFERENCE"}, strategy="ring")
    with raylysses.attention_context(context):
        layer = raylysses.Attention(3, 8, role="self", kind="self", num_kv_heads=1)
    plan = layer.plan_of(raylysses.Stream("tokens", 7))
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, 7, heads, 8, generator=generator).double() for heads in (3, 1, 1))
    mine = plan.rows[context.mesh.rank]
    out = layer(*(raylysses.take(tensor, mine) for tensor in (query, key, value)), plan=plan)
    whole = context.transport.gather_rows(out.flatten(2), plan).unflatten(2, (3, 8))
    return {"qkv": (query, key, value), "out": whole, "strategy": layer.strategy}
