"""`raylysses bench attention`: what it is asked for, what its figures are made of, and whole runs over gloo ranks."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from matplotlib.patches import Rectangle

from backends.interface import AttentionBackend, AttentionMetadata, Variant
from backends.kernels.torch_sdpa import TorchSdpaImpl
from backends.platforms.facts import DeviceFacts
from backends.registry import Registry
from configs.compose import compose
from configs.faults import FaultError
from configs.schema import AttentionConfig, ParallelConfig, RunConfig
from parallel.events import Event, Phase
from runtime.bench.attention import Experiment, bench_attention
from runtime.bench.grid import Shape, cases_of, parse_backends, parse_plans, parse_shapes, unused_settings
from runtime.bench.plot import BASELINE_LABEL, figure_of
from runtime.bench.record import Facts
from runtime.bench.results import Checked, Refused, Report, Results, RoundDone, Row
from runtime.bench.spec import BenchSpec
from runtime.bench.table import lines_of
from runtime.bench.worker import BenchRank
from runtime.errors import RankError, RankPlace, WrongResultError
from runtime.setup import RankSpec
from runtime.step_meter import DONE
from tests.runtime.command import raylysses
from tests.runtime.report_values import check_schema

SMALL = Shape(1, 37, 5, 16, 5)


class SlightlyWrongImpl(TorchSdpaImpl):
    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        return super().forward(query, key, value, metadata) * 1.001


class SlightlyWrongBackend(AttentionBackend):
    variants = (Variant("wrong", f"{__name__}.SlightlyWrongImpl"),)

    @staticmethod
    def get_name() -> str:
        return "SLIGHTLY_WRONG"


class SwappedPathRank(BenchRank):
    """The last rank knows another class by the name of a built-in backend."""

    def bench(self, spec: RankSpec, asked: BenchSpec) -> Iterator[Event | Report]:
        if spec.rank == spec.world_size - 1:
            path = "tests.runtime.doubles.RenamedReferenceBackend"
            spec = replace(spec, backends={**spec.backends, "REFERENCE": path})
        yield from super().bench(spec, asked)


class OneShapeRank(BenchRank):
    """Ends with an error after the first shape."""

    def bench(self, spec: RankSpec, asked: BenchSpec) -> Iterator[Event | Report]:
        for event in super().bench(spec, asked):
            yield event
            if isinstance(event, Phase) and event.name == DONE and event.request == 0:
                raise RuntimeError("no room for the second shape")


def repeated(folder: Path) -> list[str]:
    """The words of the command in the comment of config.yaml."""
    _, comment, *_ = (folder / "config.yaml").read_text().splitlines()
    return shlex.split(comment.removeprefix("# "))


# --- what is asked for ----------------------------------------------------------------------------------------------


def test_shapes_and_plans_are_read() -> None:
    assert parse_shapes("1x4608x24x128, 2x37x6x16x2") == (Shape(1, 4608, 24, 128, 24), Shape(2, 37, 6, 16, 2))
    assert parse_plans("auto,2x3,2x2:gather_kv") == {
        "auto": ParallelConfig(),
        "2x3": ParallelConfig(ulysses=2, ring=3),
        "2x2:gather_kv": ParallelConfig(ulysses=2, ring=2, strategy="gather_kv"),
    }


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--shapes", "1x2x3"), "--shapes=1x2x3: is no shape"),
        (("--shapes", "1x8x6x16x4"), "--shapes=1x8x6x16x4: 6 query heads are no multiple of 4 KV heads"),
        (("--shapes", ","), "--shapes=,: names nothing"),
        (
            ("--plans", "ulises"),
            "--plans=ulises: is no plan: a strategy, or degrees of Ulysses x ring; did you mean",
        ),
        (
            ("--plans", "2x2:local"),
            "--plans=2x2:local: degrees go with ring or gather_kv, which moves keys between the Ulysses groups; "
            "write 2x2 or 2x2:gather_kv",
        ),
        (("--backends", "TORCH_SPDA"), "--backends=TORCH_SPDA: no backend has that name; did you mean TORCH_SDPA?"),
        (("--backends", "REFERENCE", "attention.default=TORCH_SDPA"), "attention.default: nothing would use it"),
        (("parallel.strategy=ring",), "parallel.strategy=ring: the plans are given with --plans"),
        (("generate.steps=2",), "generate.steps=2: a bench makes no video"),
        (
            ("attention.per_role.cross=TORCH_SDPA",),
            "attention.per_role.cross: a bench has the role self alone, and nothing would use it; leave it out",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused_before_anything_starts(words: tuple[str, ...], told: str) -> None:
    outcome = raylysses("bench", "attention", *words)

    assert outcome.code == 2
    assert outcome.err.startswith(f"error: {told}")


def test_faults_of_shapes_plans_and_settings_are_told_together() -> None:
    outcome = raylysses(
        "bench", "attention", "--shapes", "1x2x3", "--plans", "rink", "generate.steps=2", "parallel.world_sice=2"
    )
    assert outcome.code == 2
    for told in ("--shapes=1x2x3", "--plans=rink", "generate.steps=2", "parallel.world_sice"):
        assert told in outcome.err


def test_without_names_the_settings_say_which_backend() -> None:
    registry = Registry()
    assert parse_backends(None, AttentionConfig(), registry).keys() == {"auto"}
    assert parse_backends(None, AttentionConfig(per_role={"self": "REFERENCE"}), registry).keys() == {"REFERENCE"}
    named = parse_backends("auto,REFERENCE", AttentionConfig(), registry)
    assert [None if each.default is None else each.default.backend for each in named.values()] == [None, "REFERENCE"]
    assert unused_settings(["run.seed=1", "cluster.address=h:1", "parallel.world_size=2"]) == []


def test_the_help_has_an_example() -> None:
    outcome = raylysses("bench", "attention", "--help")
    assert "raylysses bench attention --shapes 1x4608x24x128" in outcome.out


# --- figures --------------------------------------------------------------------------------------------------------

CHECKED = Checked(0, "B", "v", "my.kernel", "exact", "ulysses", (2, 1), 1e-7, 1e-5, 2, 100, 0.5)


def results(*, exactness: str = "exact") -> Results:
    """A baseline (case 0) and a cell (case 1) of two ranks."""
    cases = cases_of([SMALL], {"ulysses": ParallelConfig()}, {"B": AttentionConfig()}, 2)
    assert [case.plan for case in cases] == ["kernel", "ulysses"]
    assert cases[0].shape == replace(SMALL, heads=3, kv_heads=3)
    found = Results(cases, (SMALL,), 2)
    for _ in range(2):
        found.add(replace(CHECKED, case=0, exactness=exactness))
    return found


def test_a_figure_is_the_median_of_the_slowest_rank_and_the_baseline_is_scaled_to_its_heads() -> None:
    found = results()
    found.add(replace(CHECKED, case=1, error=3e-6, bytes_sent=70, first_s=0.1))
    found.add(replace(CHECKED, case=1, error=2e-6, bytes_sent=90, first_s=0.7))
    for number, (first, second) in enumerate([(4.0, 8.0), (6.0, 2.0), (7.0, 7.5)]):
        found.add(RoundDone(0, number, {0: 3.0, 1: first}))
        found.add(RoundDone(0, number, {0: 2.0, 1: second}))
    found.add(RoundDone(0, 3, {0: 99.0, 1: 99.0}))  # of one rank only: the run ended there

    baseline, cell = found.rows()

    assert (cell.outcome, cell.milliseconds, cell.low, cell.high, cell.rounds) == ("timed", 7.5, 6.75, 7.75, 3)
    assert baseline.milliseconds == 3.0
    assert cell.baseline_ms == pytest.approx(3.0 * 2.5 / 3)
    assert cell.efficiency == pytest.approx(2.5 / 7.5)
    assert cell.checked is not None
    assert (cell.checked.error, cell.checked.bytes_sent, cell.checked.first_s) == (3e-6, 90, 0.7)


def test_a_lossy_kernel_is_no_baseline() -> None:
    found = results(exactness="lossy-quantised")
    for case in (0, 1):
        found.add(replace(CHECKED, case=case))
        for _ in range(2):
            found.add(RoundDone(0, 0, {case: 1.0}))
    assert [row.efficiency for row in found.rows()] == [None, None]


def test_the_table_has_exactness_only_if_a_cell_is_lossy() -> None:
    found = results()
    assert "exactness" not in lines_of(found.rows())[0]
    assert [line.split()[-1] for line in lines_of(results(exactness="lossy-quantised").rows())] == [
        "exactness",
        "lossy-quantised",
        "-",
    ]


def test_one_wrong_rank_makes_a_cell_wrong_and_one_refusal_refused() -> None:
    found = results()
    found.add(replace(CHECKED, case=1))
    found.add(replace(CHECKED, case=1, error=float("inf")))
    (_, cell) = found.rows()
    assert cell.outcome == "wrong"
    assert "off by inf, over 1e-05" in cell.why
    assert cell.to_dict()["error"] is None

    found.add(Refused(1, ("too small", "too old")))
    (_, cell) = found.rows()
    assert (cell.outcome, cell.why) == ("refused", "too small; too old")
    assert lines_of(found.rows())[-1] == "refused: too small; too old  [1x37x5x16 ulysses B]"


def test_the_picture_says_what_its_bars_and_numbers_are_and_has_refused_cells() -> None:
    plans = {"ulysses": ParallelConfig(), "ring": ParallelConfig()}
    cases = cases_of([SMALL], plans, {"A": AttentionConfig(), "B": AttentionConfig()}, 2)
    reason = "returning the log-sum-exp is not supported, " + "and more " * 40
    rows = []
    for case in cases:
        if case.plan == "ring":
            rows.append(Row(case, "refused", reason) if case.backend == "A" else Row(case))
            continue
        checked = replace(CHECKED, case=case.index, backend=case.backend)
        rows.append(Row(case, "timed", "", checked, 8.0, 7.0, 9.0, 3, 2.0, 0.25))
    places = tuple(RankPlace(rank, "node", "host", "name", 1) for rank in range(2))
    device = DeviceFacts("cuda", (9, 0), name="NVIDIA H200")

    figure = figure_of(rows, Facts(device, "bfloat16", places, 3, True, 0))

    title = figure.get_suptitle()
    for fact in ("causal", "bfloat16", "2 ranks on 1 node", "NVIDIA H200", "3 rounds", "efficiency = "):
        assert fact in title
    (axis,) = figure.axes
    assert axis.get_title(loc="left").startswith("1x37x5x16 ")
    assert axis.get_xlabel().startswith("milliseconds per call")
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels == ["ulysses, A", "ulysses, B", "ring, A", "ring, B"]
    first, second, refused, pending = (text.get_text().strip() for text in axis.texts)
    assert first == second == "8 ms, efficiency 25%"
    assert refused.startswith("refused: returning the log-sum-exp is not supported")
    assert len(refused) <= 120
    assert pending == "pending"
    bars = {patch.get_y() + patch.get_height() / 2: patch for patch in axis.patches if isinstance(patch, Rectangle)}
    colours = [bars[place].get_facecolor() for place in (0, 1)]
    assert colours[0] != colours[1]
    assert [bool(bars[place].get_hatch()) for place in range(4)] == [False, False, True, True]
    (legend,) = figure.legends
    entries = {text.get_text(): handle for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)}
    assert list(entries) == ["A", "B", "quartiles", BASELINE_LABEL, "not timed"]
    assert [entries[backend].get_facecolor() for backend in "AB"] == colours


# --- whole runs -----------------------------------------------------------------------------------------------------


def composed(folder: Path, world_size: int, *settings: str) -> RunConfig:
    words = ["generate.prompt='-'", f"parallel.world_size={world_size}", "run.device=cpu", f"run.dir={folder}"]
    config, faults = compose([*words, *settings], environ={})
    assert config is not None, faults
    return config


def recorded(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "bench.json").read_text())
    check_schema("bench", content)
    return content


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_wrong_result_is_named_and_not_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes, plans = parse_shapes("1x37x5x16,2x2x6x16"), parse_plans("auto,ring,2x2")
    config = composed(tmp_path / "run", 3, f"attention.register.SLIGHTLY_WRONG={__name__}.SlightlyWrongBackend")

    with pytest.raises(WrongResultError, match=r"1x37x5x16 auto SLIGHTLY_WRONG: its result is off by 0\.001"):
        bench_attention(config, Experiment(shapes, plans, "REFERENCE,SLIGHTLY_WRONG", 2, False))

    content = recorded(tmp_path / "run")
    assert (content["status"], content["error"]["type"]) == ("failed", "WrongResultError")
    assert (content["world_size"], content["nodes"], content["dtype"]) == (3, 1, "float32")
    outcomes = {
        (row["shape"]["length"], row["plan"], row["asked_backend"]): (row["outcome"], row["strategy"])
        for row in content["rows"]
    }
    for length in (37, 2):  # three ranks have no equal shares of rows or heads; of two rows one rank has none
        assert outcomes[length, "kernel", "REFERENCE"] == ("timed", "local")
        assert outcomes[length, "ring", "REFERENCE"] == ("timed", "ring")
        assert outcomes[length, "2x2", "REFERENCE"] == ("refused", None)
        assert outcomes[length, "auto", "SLIGHTLY_WRONG"][0] == "wrong"
        assert outcomes[length, "ring", "SLIGHTLY_WRONG"][0] == "refused"
    for row in content["rows"]:
        timed = row["outcome"] == "timed"
        assert (row["milliseconds"] is not None) == timed
        assert row["why"] or timed
        if timed:
            assert row["error"] <= row["tolerance"] == 1e-5
            assert row["efficiency"] > 0
            assert (row["bytes_sent"] > 0) == (row["plan"] != "kernel")
    table = capsys.readouterr().out
    assert "degrees of 2x2 do not make up 3 ranks" in table
    assert (tmp_path / "run" / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_bench_that_breaks_off_shows_what_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = Experiment(parse_shapes("1x6x6x16,1x7x6x16"), parse_plans("ulysses"), "REFERENCE", 1, False)
    with pytest.raises(RankError, match="the second shape"):
        bench_attention(composed(tmp_path / "run", 2), asked, worker=f"{__name__}.OneShapeRank")

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {(line[0], line[1]): line for line in lines if line[0].startswith("1x")}
    assert rows["1x6x6x16", "ulysses"][3:5] == ["(plain)", "ulysses"]
    assert "pending" in rows["1x7x6x16", "ulysses"]
    assert recorded(tmp_path / "run")["status"] == "failed"


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_bench_exchanges_in_fp8_if_the_settings_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = composed(tmp_path / "run", 2, "parallel.exchange_dtype=fp8")
    bench_attention(config, Experiment((SMALL,), parse_plans("ulysses,ring"), "REFERENCE", 1, False))

    kernel, ulysses, ring = recorded(tmp_path / "run")["rows"]
    assert (kernel["exactness"], ulysses["exactness"]) == ("exact", "lossy-quantised")
    assert 1e-3 < ulysses["error"] < 0.1
    assert (ring["outcome"], "parallel.exchange_dtype=fp8" in ring["why"]) == ("refused", True)
    headings, *cells = capsys.readouterr().out.splitlines()[:4]
    assert headings.split()[-1] == "exactness"
    assert [cell.split()[-1] for cell in cells] == ["exact", "lossy-quantised", "-"]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_causal_attention_in_bfloat16_is_compared_with_its_own_rows(tmp_path: Path) -> None:
    config = composed(tmp_path / "run", 2, "run.dtype=bfloat16")
    folder = bench_attention(
        config, Experiment(parse_shapes("1x150x4x16x2"), parse_plans("ulysses,ring,gather_kv"), "REFERENCE", 1, True)
    )

    content = recorded(folder)
    assert content["status"] == "done"
    assert (content["causal"], content["dtype"]) == (True, "bfloat16")
    words = [
        "--shapes",
        "1x150x4x16x2",
        "--plans",
        "ulysses,ring,gather_kv",
        "--backends",
        "REFERENCE",
        "--rounds",
        "1",
    ]
    file = ["--config", str(folder / "config.yaml")]
    assert repeated(folder) == ["raylysses", "bench", "attention", *words, "--causal", *file]
    settings, faults = compose(["generate.prompt=x"], file=folder / "config.yaml")
    assert settings is not None, faults
    assert (settings.run.dtype, settings.parallel.world_size) == ("bfloat16", 2)
    assert (settings.run.device, settings.parallel.transport) == ("cpu", "torch")
    assert (settings.run.dir, settings.cluster.address) == (None, "local")
    assert "prompt" not in (folder / "config.yaml").read_text()
    assert [row["outcome"] for row in content["rows"]] == ["timed"] * 4
    assert all(1e-5 < row["error"] <= row["tolerance"] == 5e-3 for row in content["rows"])


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_grid_of_which_nothing_is_served_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FaultError, match="nothing of the grid is served") as caught:
        bench_attention(composed(tmp_path / "run", 2), Experiment((SMALL,), parse_plans("3x1,local"), None, 1, False))
    assert [fault.key for fault in caught.value.faults] == ["parallel.ulysses", "parallel.strategy", "bench"]
    assert not (tmp_path / "run").exists()  # no rank was started for it


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_what_ranks_choose_differently_is_refused_on_all_of_them(tmp_path: Path) -> None:
    asked = Experiment((SMALL,), parse_plans("ulysses,ring"), "REFERENCE", 1, False)
    with pytest.raises(FaultError, match="nothing of the grid is served"):
        bench_attention(composed(tmp_path / "run", 2), asked, worker=f"{__name__}.SwappedPathRank")

    rows = recorded(tmp_path / "run")["rows"]
    assert {row["outcome"] for row in rows} == {"refused"}
    *others, ring = [row["why"] for row in rows]
    for why in others:
        assert "rank 0 chose REFERENCE/plain" in why
        assert "rank 1 chose REFERENCE/renamed" in why
    assert ring.startswith("on rank 1: attention.default=REFERENCE: for ring 1x2, returning the log-sum-exp is not")


def test_the_schema_refuses_what_it_does_not_know() -> None:
    with pytest.raises(jsonschema.ValidationError):
        check_schema("bench", {"version": 1})
