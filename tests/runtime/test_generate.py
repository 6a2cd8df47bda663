"""The command, end to end: the same answer for any number of ranks, the work really shared, the files there."""

from __future__ import annotations

import json
import os
import shlex
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from jsonschema import Draft202012Validator
from PIL import Image
from safetensors.numpy import load_file

from parallel.plan import split
from tests.conftest import CHECKOUT
from tests.runtime.command import events, raylysses, selection, summary

pytestmark = pytest.mark.ray

TOKENS, HEADS, HEAD_SIZE, LAYERS, TEXT = 175, 4, 64, 6, 512
STEPS = 3
FORWARDS = 2 * STEPS  # with guidance
ODD_SIZE = ("generate.frames=17", "generate.height=112", "generate.width=80", f"generate.steps={STEPS}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, ray_cluster: str) -> dict[int, Path]:
    """Run folders of one request over 1, 2 and 3 ranks; 2 and 3 do not divide its 175 tokens, 3 not its 4 heads. The
    run over 2 has a cluster of its own.
    """
    root = tmp_path_factory.mktemp("runs")
    folders = {}
    for world_size in (1, 2, 3):
        folder = root / str(world_size)
        cluster, outputs = ("local", "[video,frames]") if world_size == 2 else (ray_cluster, "[]")
        place = (f"cluster.address={cluster}", f"run.outputs={outputs}")
        settings = (*ODD_SIZE, *place, f"parallel.world_size={world_size}", "run.save_latents=true", "run.seed=7")
        config = root / "my.yaml"
        config.write_text("attention:\n  per_role:\n    cross: TORCH_SDPA\n")
        done = raylysses("generate", "--prompt", "a cat", "--config", str(config), *settings, f"run.dir={folder}")
        assert done.code == 0, done.err
        folders[world_size] = folder
    return folders


def latents(folder: Path) -> np.ndarray:
    return load_file(folder / "latents.safetensors")["latents"].astype(np.float64)


@pytest.mark.parametrize("world_size", [2, 3])
def test_latents_do_not_depend_on_the_number_of_ranks(runs: dict[int, Path], world_size: int) -> None:
    alone, shared = latents(runs[1]), latents(runs[world_size])

    assert np.isfinite(alone).all()
    assert np.linalg.norm(shared - alone) <= 1e-5 * np.linalg.norm(alone)


@pytest.mark.parametrize(
    ("settings", "strategy", "degrees"),
    [
        (("parallel.world_size=3", "parallel.strategy=ring"), "ring", (1, 3)),
        (("parallel.ulysses=2", "parallel.ring=2"), "ulysses_ring", (2, 2)),
    ],
)
def test_latents_do_not_depend_on_the_strategy(
    runs: dict[int, Path],
    tmp_path: Path,
    ray_cluster: str,
    settings: tuple[str, ...],
    strategy: str,
    degrees: tuple[int, int],
) -> None:
    folder = tmp_path / "run"
    saved = (
        f"cluster.address={ray_cluster}",
        "run.save_latents=true",
        "run.outputs=[]",
        "run.seed=7",
        f"run.dir={folder}",
    )
    done = raylysses("generate", "--prompt", "a cat", *ODD_SIZE, *saved, *settings)
    assert done.code == 0, done.err
    alone, shared = latents(runs[1]), latents(folder)
    assert np.linalg.norm(shared - alone) <= 1e-5 * np.linalg.norm(alone)
    report = selection(folder)
    Draft202012Validator(schema("selection")).validate(report)
    (entry,) = [entry for entry in report["entries"] if entry["role"] == "self"]
    assert (entry["strategy"], entry["degrees"]) == (strategy, {"ulysses": degrees[0], "ring": degrees[1]})
    for traffic in summary(folder)["requests"][0]["traffic"].values():
        assert traffic["measured"] == traffic["planned"]


def test_a_strategy_that_no_backend_serves_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    asked = ("parallel.world_size=2", "parallel.strategy=ring", "attention.per_role.self=TORCH_SDPA")
    done = raylysses("generate", "--prompt", "a cat", *asked, f"run.dir={tmp_path / 'run'}")
    assert done.code == 2
    said = "attention.per_role.self=TORCH_SDPA: for ring 1x2, returning the log-sum-exp is not supported; name another"
    assert said in done.err
    assert "connecting" not in done.out + done.err


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_rank_holds_its_rows_and_computes_its_heads(runs: dict[int, Path], world_size: int) -> None:
    for rank, rows in enumerate(split(TOKENS, world_size)):
        ran = [event for event in events(runs[world_size], rank) if event["event"] == "attention_ran"]

        assert sorted(event["role"] for event in ran) == ["cross"] * LAYERS + ["self"] * LAYERS
        for event in ran:
            shapes = event["shapes"]
            assert shapes["query_rows"] == [1, len(rows), HEADS, HEAD_SIZE]
            if event["role"] == "self":
                heads = len(split(HEADS, world_size)[rank])
                assert shapes["query"] == shapes["key"] == [1, TOKENS, heads, HEAD_SIZE]
            else:
                assert shapes["query"] == [1, len(rows), HEADS, HEAD_SIZE]
                assert shapes["key"] == [1, TEXT, HEADS, HEAD_SIZE]


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_are_those_of_the_plan(runs: dict[int, Path], world_size: int) -> None:
    (request,) = summary(runs[world_size])["requests"]
    width = 4 * 16  # what the model's last projection gives for one token: a patch of 4 latents of 16 channels
    for rank, rows in enumerate(split(TOKENS, world_size)):
        mine, share = len(rows), len(split(HEADS, world_size)[rank])
        calls = LAYERS * FORWARDS
        expected = {
            "scatter_heads": {"calls": calls, "bytes_sent": calls * 3 * mine * (HEADS - share) * HEAD_SIZE * 4},
            "gather_heads": {"calls": calls, "bytes_sent": calls * (TOKENS - mine) * share * HEAD_SIZE * 4},
            "gather_rows": {"calls": FORWARDS, "bytes_sent": FORWARDS * mine * (world_size - 1) * width * 4},
        }
        traffic = request["traffic"][str(rank)]
        assert traffic["measured"] == traffic["planned"] == expected
        assert request["rows"][str(rank)] == {"transformer": mine}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_report_says_what_every_rank_ran_and_why(runs: dict[int, Path], world_size: int) -> None:
    report = selection(runs[world_size])
    by_role = {entry["role"]: entry for entry in report["entries"]}

    Draft202012Validator(schema("selection")).validate(report)
    assert report["agreed"]
    assert report["world_size"] == world_size
    assert set(by_role) == {"self", "cross"}
    for entry in by_role.values():
        assert entry["backend"] == "TORCH_SDPA"
        assert entry["kernel"] == "torch.nn.functional.scaled_dot_product_attention"
        assert entry["ranks"] == list(range(world_size))
        assert entry["layers"] == LAYERS
    assert (by_role["self"]["source"], by_role["self"]["requested"]) == ("platform", None)
    assert (by_role["cross"]["source"], by_role["cross"]["key"]) == ("role", "attention.per_role.cross")
    assert by_role["cross"]["origin"].endswith("my.yaml")
    assert by_role["self"]["strategy"] == ("local" if world_size == 1 else "ulysses")
    assert by_role["cross"]["strategy"] == "local"


def test_an_exchange_in_fp8_differs_little_and_says_that_it_is_lossy(
    runs: dict[int, Path], tmp_path: Path, ray_cluster: str
) -> None:
    folder = tmp_path / "fp8"
    exchange = ("parallel.world_size=2", "parallel.exchange_dtype=fp8")
    saved = ("run.save_latents=true", "run.outputs=[]", "run.seed=7", f"run.dir={folder}")
    place = (f"cluster.address={ray_cluster}", *exchange)
    done = raylysses("generate", "--prompt", "a cat", *ODD_SIZE, *saved, *place)

    assert done.code == 0, done.err
    assert "self: lossy: Q, V and the output go between ranks as fp8" in done.out
    rows = {line.split()[0]: line for line in done.out.splitlines() if line.startswith(("role ", "self ", "cross "))}
    assert ("exactness" in rows["role"], "lossy-quantised" in rows["self"], " exact " in rows["cross"]) == (True,) * 3
    alone, lossy = latents(runs[1]), latents(folder)
    assert 1e-4 < np.linalg.norm(lossy - alone) / np.linalg.norm(alone) < 0.1
    by_role = {entry["role"]: entry for entry in selection(folder)["entries"]}
    Draft202012Validator(schema("selection")).validate(selection(folder))
    assert (by_role["self"]["exchange_dtype"], by_role["self"]["exactness"]) == ("fp8", "lossy-quantised")
    assert (by_role["cross"]["exchange_dtype"], by_role["cross"]["exactness"]) == ("same", "exact")
    (request,) = summary(folder)["requests"]
    for rank, rows in enumerate(split(TOKENS, 2)):
        traffic, mine = request["traffic"][str(rank)], len(rows)
        calls, share = LAYERS * FORWARDS, HEADS // 2
        quantised = HEAD_SIZE + 4
        sent = traffic["measured"]
        assert sent == traffic["planned"]
        assert sent["scatter_heads"]["bytes_sent"] == calls * mine * share * (2 * quantised + HEAD_SIZE * 4)
        assert sent["gather_heads"]["bytes_sent"] == calls * (TOKENS - mine) * share * quantised


def test_a_run_is_repeated_by_its_configuration_and_the_command_above_it(tmp_path: Path, ray_cluster: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    place = f"cluster.address={ray_cluster}"
    registered = "attention.register.SLIGHTLY_WRONG=tests.runtime.test_bench.SlightlyWrongBackend"
    chosen = ("attention.default=SLIGHTLY_WRONG", "attention.per_role.cross=auto", "run.seed=7")
    size = ("generate.frames=5", "generate.height=32", "generate.width=48", "generate.steps=2")
    settings = (*size, registered, *chosen, "run.outputs=[]", "run.save_latents=true")
    asked = ("generate", "--prompt", "a cat\nin two lines", *settings, place, f"run.dir={first}")
    done = raylysses(*asked)
    assert done.code == 0, done.err

    text = (first / "config.yaml").read_text()
    content = yaml.safe_load(text)
    parallel = {"ulysses": 2, "ring": 1, "strategy": "ulysses", "exchange_dtype": "same", "transport": "torch"}
    assert content["parallel"] == {"world_size": 2, **parallel}
    assert (content["run"]["device"], content["run"]["dtype"], content["run"]["seed"]) == ("cpu", "float32", 7)
    per_role = {"self": "SLIGHTLY_WRONG", "cross": "TORCH_SDPA"}
    assert content["attention"] == {"agreement": "require", "default": None, "per_role": per_role}
    assert "dir" not in content["run"]
    assert "address" not in content["cluster"]

    comments = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    command = shlex.split(comments[1])
    assert command == ["raylysses", "generate", "--config", str(first / "config.yaml"), registered]
    assert comments[3].startswith("raylysses generate --prompt $'a cat\\x0ain two lines' generate.frames=5")
    for line in ("parallel.world_size: auto", "run.device: auto", "run.dtype: auto", f"run.dir: {first}"):
        assert line in comments
    assert {"attention.default: SLIGHTLY_WRONG", "attention.per_role.cross: auto"} <= set(comments)
    assert "attention.agreement" not in text.partition("model:")[0]

    done = raylysses(*command[1:], place, f"run.dir={second}")
    assert done.code == 0, done.err
    np.testing.assert_array_equal(latents(second), latents(first))
    assert selection(second)["entries"][0]["class_path"] == "tests.runtime.test_bench.SlightlyWrongBackend"
    assert yaml.safe_load((second / "config.yaml").read_text()) == content


def test_the_run_folder_is_whole(runs: dict[int, Path]) -> None:
    folder = runs[2]
    content = summary(folder)

    Draft202012Validator(schema("summary")).validate(content)
    assert content["status"] == "done"
    assert len(content["ranks"]) == 2
    assert datetime.fromisoformat(content["began"]).utcoffset() is not None
    assert "generate" in content["command"]
    assert f"run.dir={folder}" in content["command"]
    assert {rank["node"] for rank in content["ranks"]} == {content["host"]} == {os.uname().nodename}
    assert set(content["start_s"]) == {"connect", "place", "import", "load"}
    assert 0 < sum(content["start_s"].values()) < content["elapsed_s"]
    roles = {row["role"]: (row["strategy"], row["ulysses"], row["ring"]) for row in content["parallel"]}
    assert roles == {"self": ("ulysses", 2, 1), "cross": ("local", 1, 1)}
    (request,) = content["requests"]
    assert all(request["peak_memory_bytes"][rank] > 0 for rank in ("0", "1"))
    assert yaml.safe_load((folder / "config.yaml").read_text())["run"]["seed"] == 7
    assert (folder / "video.mp4").stat().st_size > 1000
    with Image.open(folder / "frames.png") as sheet:
        prompt, settings = sheet.info["Description"].splitlines()
    assert prompt == content["requests"][0]["prompt"]
    assert settings.startswith("seed 7, model built-in:tiny-wan, ")
    assert not (runs[1] / "video.mp4").exists()


def schema(name: str) -> Any:
    return json.loads((CHECKOUT / "docs" / f"{name}.schema.json").read_text())
