"""Wan's transformers, wired: the library's own answer for any number of ranks, and every rank on its own rows."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.faults import FaultError
from configs.schema import ParallelConfig
from parallel.agreement import RankDisagreementError
from parallel.events import AttentionRan, Traffic
from parallel.mesh import Mesh
from parallel.models import describe, family_of, wan
from parallel.models.sharding import ShardedModel
from parallel.plan import plan_sequence
from tests.exact import relative_error
from tests.parallel.layers import ONE_RANK, collecting, context_of
from tests.ranks import Ranks
from tests.wan_folders import SPECS
from wan_folder import TINY_WAN, WanFolderSpec, build

GlooRanks = Callable[[int], Ranks]
Latent = tuple[int, int, int]
Inputs = dict[str, Any]

ALL_SPECS: Mapping[str, WanFolderSpec] = {**SPECS, "tiny-wan": TINY_WAN}
# (folder, transformer, whether every token has a timestep of its own)
MODELS = {
    "tiny-wan": ("tiny-wan", "transformer", False),
    "2.1-t2v": ("wan2.1-t2v", "transformer", False),
    "2.1-i2v": ("wan2.1-i2v", "transformer", False),
    "2.2-a14b-high": ("wan2.2-t2v-a14b", "transformer", False),
    "2.2-a14b-low": ("wan2.2-t2v-a14b", "transformer_2", False),
    "2.2-5b": ("wan2.2-ti2v-5b", "transformer", True),
}
IMAGE_TOKENS, TEXT_TOKENS = 17, 512  # the library splits the image keys off at 512 text tokens
TOKENS_175: Latent = (7, 10, 10)  # with patches of 1 x 2 x 2: 7 x 5 x 5 tokens
TOKENS_45: Latent = (5, 6, 6)
TOKENS_1: Latent = (1, 2, 2)  # one token: all ranks but one have no rows
TOKENS_36: Latent = (4, 6, 6)

every_model = pytest.mark.parametrize("name", MODELS)


def tokens(latent: Latent) -> int:
    return latent[0] * latent[1] * latent[2] // 4


@pytest.fixture(scope="session")
def transformers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`transformers(name)`: the folder of one of `MODELS`, built at the first call."""
    root = tmp_path_factory.mktemp("wan")

    def get(name: str) -> Path:
        folder, component, _ = MODELS[name]
        if not (root / folder).is_dir():
            build(root / folder, spec=ALL_SPECS[folder])
        return root / folder / component

    return get


@functools.lru_cache(maxsize=1)  # one model at a time is in the memory of a rank
def config_and_weights(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    from safetensors.torch import load_file

    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return config, load_file(path / "diffusion_pytorch_model.safetensors")


def load(path: Path) -> Any:
    """A new, unwired transformer."""
    from diffusers import WanTransformer3DModel

    config, weights = config_and_weights(path)
    model = WanTransformer3DModel.from_config(config)
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False)


def inputs_of(config: Mapping[str, Any], latent: Latent, per_token: bool, batch: int = 1) -> Inputs:
    """What the pipelines pass to `forward`; the same on every rank."""
    generator = torch.Generator().manual_seed(11)
    inputs: Inputs = {
        "hidden_states": torch.randn(batch, config["in_channels"], *latent, generator=generator),
        "encoder_hidden_states": torch.randn(batch, TEXT_TOKENS, config["text_dim"], generator=generator),
    }
    shape = (batch, tokens(latent)) if per_token else (batch,)
    inputs["timestep"] = torch.rand(shape, generator=generator) * 1000
    if config["image_dim"] is not None:
        image = torch.randn(batch, IMAGE_TOKENS, config["image_dim"], generator=generator)
        inputs["encoder_hidden_states_image"] = image
    return inputs


def wired(
    mesh: Mesh, path: Path, parallel: ParallelConfig | None = None
) -> tuple[Any, ShardedModel, list[AttentionRan]]:
    model = load(path)
    context, events = collecting(mesh, parallel=parallel)
    return model, wan.wire(model, context, path.name), events


def stock_output(path: Path, name: str, latent: Latent, batch: int = 1) -> torch.Tensor:
    model = load(path)
    out: torch.Tensor = model(**inputs_of(model.config, latent, MODELS[name][2], batch), return_dict=False)[0]
    return out


def sharded_run(
    mesh: Mesh, path: Path, latent: Latent, per_token: bool, batch: int, parallel: ParallelConfig | None = None
) -> dict[str, Any]:
    """Two forwards of a wired transformer, and all that it tells."""
    model, sharded, events = wired(mesh, path, parallel)
    embedded: list[int] = []
    model.condition_embedder.register_forward_pre_hook(lambda _, args: embedded.append(args[0].numel()))
    inputs = inputs_of(model.config, latent, per_token, batch)
    outs = [model(**inputs, return_dict=False)[0] for _ in range(2)]
    planned, forwards = sharded.take_planned()
    return {
        "out": outs[0],
        "again": torch.equal(outs[0], outs[1]),
        "rows": sharded.rows,
        "events": events,
        "timesteps": embedded[0],
        "image_tokens": sharded.image_tokens,
        "planned": planned,
        "measured": sharded.context.transport.take_traffic(),
        "forwards": (forwards, sharded.forwards.count),
        "plan": sharded.forwards.plan,
    }


# --- the same answer ------------------------------------------------------------------------------------------------


@every_model
def test_a_wired_model_on_one_rank_gives_the_librarys_own_answer(
    transformers: Callable[[str], Path], name: str
) -> None:
    path = transformers(name)
    got = sharded_run(ONE_RANK, path, TOKENS_45, MODELS[name][2], 2)
    assert relative_error(got["out"], stock_output(path, name, TOKENS_45, 2)) <= 1e-6
    assert got["planned"] == got["measured"] == Traffic()
    assert got["rows"] == 45


@pytest.mark.ray
@every_model
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("latent", "batch"), [(TOKENS_175, 1), (TOKENS_45, 2), (TOKENS_1, 1)], ids=str)
def test_a_wired_model_on_many_ranks_gives_the_librarys_own_answer(
    transformers: Callable[[str], Path],
    gloo_ranks: GlooRanks,
    name: str,
    world_size: int,
    latent: Latent,
    batch: int,
) -> None:
    path, per_token = transformers(name), MODELS[name][2]
    stock = stock_output(path, name, latent, batch)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    heads, size = config["num_attention_heads"], config["attention_head_dim"]
    plan = plan_sequence(tokens(latent), heads, world_size)
    for rank, got in enumerate(gloo_ranks(world_size).run(sharded_run, path, latent, per_token, batch)):
        assert relative_error(got["out"], stock) <= 1e-5
        assert got["again"]
        rows = len(plan.rows[rank])
        assert got["rows"] == rows
        assert got["plan"] is None
        assert got["forwards"] == (2, 2)
        assert got["timesteps"] == (batch * max(rows, 1) if per_token else batch)
        assert got["image_tokens"] == (IMAGE_TOKENS if config["image_dim"] is not None else 0)
        assert got["planned"] == got["measured"]
        layers = config["num_layers"]
        assert got["measured"].calls == {"scatter_heads": 2 * layers, "gather_heads": 2 * layers, "gather_rows": 2}
        pairs = got["measured"].bytes_sent["scatter_heads"] + got["measured"].bytes_sent["gather_heads"]
        assert pairs == 2 * layers * plan.sent_pairs(rank) * batch * size * 4
        assert len(got["events"]) == layers * len(describe(config).roles)
        for event in got["events"]:
            keys = {"cross": TEXT_TOKENS, "cross.image": IMAGE_TOKENS}.get(event.selection.role)
            assert event.query_rows == (batch, rows, heads, size)
            if keys is None:
                assert event.query == event.key == (batch, tokens(latent), heads // world_size, size)
            else:
                assert event.query == event.query_rows
                assert event.key == (batch, keys, heads, size)


STRATEGIES = {
    "auto": ParallelConfig(),
    "ulysses": ParallelConfig(strategy="ulysses"),
    "ring": ParallelConfig(strategy="ring"),
    "gather_kv": ParallelConfig(strategy="gather_kv"),
    "ulysses x ring": ParallelConfig(ulysses=2),
    "ulysses x gather_kv": ParallelConfig(ulysses=2, strategy="gather_kv"),
}


def run_each(mesh: Mesh, path: Path, latent: Latent) -> dict[str, dict[str, Any]]:
    """A forward under each strategy that these ranks can have."""
    ran = {}
    for name, parallel in STRATEGIES.items():
        if parallel.ulysses is not None and (mesh.world_size % parallel.ulysses or mesh.world_size == parallel.ulysses):
            continue
        model, sharded, events = wired(mesh, path, parallel)
        out = model(**inputs_of(model.config, latent, False), return_dict=False)[0]
        planned, measured = sharded.take_planned()[0], sharded.context.transport.take_traffic()
        (strategy,) = {event.strategy for event in events if event.selection.role == "self"}
        ran[name] = {"out": out, "counted": planned == measured, "rows": sharded.rows, "strategy": strategy}
    return ran


@pytest.mark.ray
@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 8])
def test_every_strategy_gives_the_librarys_own_answer(
    transformers: Callable[[str], Path], gloo_ranks: GlooRanks, world_size: int
) -> None:
    path = transformers("tiny-wan")
    stock = stock_output(path, "tiny-wan", TOKENS_175)
    results = gloo_ranks(world_size).run(run_each, path, TOKENS_175)
    assert len(results[0]) == (6 if world_size in (4, 6, 8) else 4)
    for name in results[0]:
        for ran in results:
            assert relative_error(ran[name]["out"], stock) <= 1e-5, name
            assert ran[name]["counted"], name
            assert ran[name]["strategy"].startswith(name.replace(" x ", "_") if name != "auto" else "ulysses")
        assert sum(ran[name]["rows"] for ran in results) == tokens(TOKENS_175)


def run_without_exchange(mesh: Mesh, path: Path) -> torch.Tensor:
    """Heads and rows stay where they are; only the rows of the output are gathered, as they should be."""
    model, sharded, _ = wired(mesh, path)
    transport = sharded.context.transport
    real = transport._exchange

    def keep(verb: str, send: torch.Tensor, counts: Any, group: Any) -> torch.Tensor:
        return real(verb, send, counts, group) if verb == "gather_rows" else send

    transport._exchange = keep  # type: ignore[method-assign]
    out: torch.Tensor = model(**inputs_of(model.config, TOKENS_36, False), return_dict=False)[0]
    return out


@pytest.mark.ray
@pytest.mark.parametrize("world_size", [2, 4])
def test_without_the_exchange_the_answer_is_another(
    transformers: Callable[[str], Path], gloo_ranks: GlooRanks, world_size: int
) -> None:
    path = transformers("tiny-wan")
    stock = stock_output(path, "tiny-wan", TOKENS_36)
    for out in gloo_ranks(world_size).run(run_without_exchange, path):
        assert 1e-3 < relative_error(out, stock) < 10


# --- what is wired --------------------------------------------------------------------------------------------------


@every_model
def test_roles_and_layers_are_those_of_the_description(transformers: Callable[[str], Path], name: str) -> None:
    path = transformers(name)
    model, sharded, events = wired(ONE_RANK, path)
    facts = describe(json.loads((path / "config.json").read_text(encoding="utf-8")))
    assert facts == wan.describe(model.config) == sharded.facts
    selected = {selection.role: (model_, layers) for model_, selection, _, layers in sharded.selections()}
    assert selected == {role.role: (path.name, role.layers) for role in facts.roles}
    expected = ["self", "cross", "cross.image"] if name == "2.1-i2v" else ["self", "cross"]
    assert [role.role for role in facts.roles] == expected
    for role in facts.roles:
        assert (role.category, role.kind) == (("self", "self") if role.role == "self" else ("cross", "cross"))
        assert (role.layers, role.heads, role.kv_heads) == (len(model.blocks), facts.heads, facts.heads)
    model(**inputs_of(model.config, TOKENS_1, MODELS[name][2]))
    paths = {"self": "attn1", "cross": "attn2", "cross.image": "attn2.image"}
    blocks = range(len(model.blocks))
    assert {event.layer for event in events} == {
        f"blocks.{i}.{paths[role.role]}" for i in blocks for role in facts.roles
    }


@pytest.mark.parametrize(
    ("latent", "patch", "count"), [((21, 60, 104), (1, 2, 2), 32760), ((7, 10, 10), (1, 2, 2), 175)]
)
def test_the_tokens_of_a_latent_are_its_patches(latent: Latent, patch: Latent, count: int) -> None:
    config = {"num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 2, "patch_size": list(patch)}
    assert wan.describe(config).tokens(latent) == count


@pytest.mark.parametrize(
    "change", [{"num_layers": None}, {"patch_size": [1, 2]}, {"attention_head_dim": "wide"}, {"patch_size": 2}]
)
def test_a_config_that_cannot_be_read_is_refused(change: dict[str, Any]) -> None:
    config = {"num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 2, "patch_size": [1, 2, 2]} | change
    with pytest.raises(FaultError, match=r"config\.json cannot be read"):
        wan.describe(config)
    del config["num_attention_heads"]
    with pytest.raises(FaultError, match="num_attention_heads"):
        wan.describe(config)


def test_a_transformer_of_another_class_is_refused_with_the_nearest() -> None:
    assert family_of({"_class_name": "WanTransformer3DModel"}) is wan
    with pytest.raises(FaultError, match="did you mean WanTransformer3DModel"):
        describe({"_class_name": "WanTransformer2DModel"})
    with pytest.raises(FaultError, match=r"model\.path=None"):
        describe({})


def test_a_backend_that_cannot_serve_is_refused_when_the_model_is_wired(transformers: Callable[[str], Path]) -> None:
    with pytest.raises(FaultError, match=r"attention\.default=CUDNN_ATTN"):
        wan.wire(load(transformers("2.1-t2v")), context_of(backend="CUDNN_ATTN"), "transformer")


# --- the places of the library's own plan -----------------------------------------------------------------------------


def test_blocks_called_outside_the_models_forward_raise(transformers: Callable[[str], Path]) -> None:
    model, sharded, _ = wired(ONE_RANK, transformers("tiny-wan"))
    width = model.config["num_attention_heads"] * model.config["attention_head_dim"]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="transformer: its blocks were called outside the model's own forward"):
            model.blocks[0](torch.zeros(1, 45, width), None, None, None)
        model(**inputs_of(model.config, TOKENS_45, False))
        assert sharded.forwards.plan is None


def test_a_forward_that_fails_leaves_no_plan_behind(transformers: Callable[[str], Path]) -> None:
    model, sharded, _ = wired(ONE_RANK, transformers("tiny-wan"))
    inputs = inputs_of(model.config, TOKENS_45, False)
    with pytest.raises(RuntimeError, match="shapes"):
        model(**{**inputs, "encoder_hidden_states": torch.zeros(1, 5, 3)})
    assert sharded.forwards.plan is None
    assert model(**inputs, return_dict=False)[0].shape[2:] == TOKENS_45


def test_timesteps_of_another_number_of_tokens_are_refused(transformers: Callable[[str], Path]) -> None:
    model, _, _ = wired(ONE_RANK, transformers("2.2-5b"))
    inputs = inputs_of(model.config, TOKENS_45, True)
    with pytest.raises(ValueError, match=r"a tensor \(1, 44\) is to be split into 45 rows"):
        model(**{**inputs, "timestep": inputs["timestep"][:, :44]})


def test_positional_inputs_are_sharded_like_named_ones(transformers: Callable[[str], Path]) -> None:
    path = transformers("2.2-5b")
    model, _, _ = wired(ONE_RANK, path)
    inputs = inputs_of(model.config, TOKENS_45, True)
    named = model(**inputs, return_dict=False)[0]
    by_position = [inputs["hidden_states"], inputs["timestep"], inputs["encoder_hidden_states"]]
    assert torch.equal(model(*by_position, return_dict=False)[0], named)
    with pytest.raises(ValueError, match="is to be split into 45 rows"):
        model(by_position[0], by_position[1][:, :44], by_position[2])


def test_an_attention_mask_is_refused(transformers: Callable[[str], Path]) -> None:
    model, _, _ = wired(ONE_RANK, transformers("tiny-wan"))
    attention = model.blocks[1].attn1
    width = model.config["num_attention_heads"] * model.config["attention_head_dim"]
    with pytest.raises(ValueError, match=r"blocks\.1\.attn1: Wan passes no attention mask"):
        attention(torch.zeros(1, 45, width), None, torch.ones(1, 45, dtype=torch.bool), None)


# --- agreement --------------------------------------------------------------------------------------------------------


def forward_of(mesh: Mesh, path: Path, latent: Latent, batch: int, backend: str) -> str:
    model = load(path)
    wan.wire(model, context_of(mesh, backend=backend), path.name)
    model(**inputs_of(model.config, latent, False, batch))
    return "ran"


@pytest.mark.ray
@pytest.mark.parametrize(
    ("other", "field"),
    [
        (
            (TOKENS_36, 1, "TORCH_SDPA"),
            "streams: rank 0 has video 45, text 512 on each, rank 1 has video 36, text 512 on each",
        ),
        ((TOKENS_45, 2, "TORCH_SDPA"), "batch: rank 0 has 1, rank 1 has 2"),
        ((TOKENS_45, 1, "REFERENCE"), "selections: rank 0 has "),
    ],
)
def test_ranks_with_different_forwards_all_raise_before_any_of_them_runs(
    transformers: Callable[[str], Path], gloo_ranks: GlooRanks, other: tuple[Latent, int, str], field: str
) -> None:
    path = transformers("tiny-wan")
    usual = (TOKENS_45, 1, "TORCH_SDPA")
    ranks = gloo_ranks(2)
    for outcome in ranks.outcomes(forward_of, [(path, *usual), (path, *other)]):
        assert isinstance(outcome, RankDisagreementError)
        assert field in str(outcome)
    assert ranks.run(forward_of, path, *usual) == ["ran", "ran"]
