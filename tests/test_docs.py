"""What the guides say is true: their scripts run, and their links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from configs.compose import known_keys
from tests.conftest import CHECKOUT
from tests.runtime.command import environment

DOCS = CHECKOUT / "docs"
GUIDES = ("library.md", "bench.md")
TRANSFORMER = CHECKOUT / "runtime" / "models" / "tiny-wan" / "transformer"


def blocks(guide: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / guide).read_text(), re.DOTALL)


def test_the_python_of_the_settings_runs() -> None:
    sources = blocks("settings.md", "python")
    assert len(sources) == 2
    for source in sources:
        exec(compile(source, "settings.md", "exec"), {})


def torchrun(script: str, *arguments: str, folder: Path) -> str:
    """A script of a guide on two ranks; what it printed."""
    (source,) = [block for block in blocks("library.md", "python") if block.startswith(f"# {script}\n")]
    (folder / script).write_text(source)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(folder / script), *arguments],
        capture_output=True,
        text=True,
        cwd=CHECKOUT,
        env=environment() | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_runs_under_torchrun(tmp_path: Path) -> None:
    told = torchrun("example.py", str(TRANSFORMER), folder=tmp_path)

    assert re.search(r"^self: TORCH_SDPA/torch, ulysses 2x1, \d+ layers$", told, re.MULTILINE)
    assert re.search(r"^cross: TORCH_SDPA/torch, local, \d+ layers$", told, re.MULTILINE)
    for rank in range(2):
        (difference,) = re.findall(rf"rank {rank}: relative difference (\S+), the same answer", told)
        assert float(difference) <= 1e-5


def test_layers_run_under_torchrun(tmp_path: Path) -> None:
    told = torchrun("layers.py", folder=tmp_path)

    # Two ranks write to one pipe, where a line and its end are not always together.
    assert sorted(re.findall(r"rank \d has \d+ of \d+ rows", told)) == [
        "rank 0 has 51 of 101 rows",
        "rank 1 has 50 of 101 rows",
    ]


def test_a_masked_layer_runs_under_torchrun(tmp_path: Path) -> None:
    assert torchrun("masked.py", folder=tmp_path).count("TORCH_SDPA (2, 25, 4, 32)") == 2


def test_a_joint_block_trains_under_torchrun_as_in_one_process(tmp_path: Path) -> None:
    told = torchrun("joint.py", folder=tmp_path)

    losses = re.findall(r"rank \d, step (\d): loss (\d\.\d+), in one process (\d\.\d+)", told)
    assert sorted(step for step, *_ in losses) == ["0", "0", "1", "1", "2", "2"]
    for _, shared, single in losses:
        assert float(shared) == pytest.approx(float(single), abs=2e-6)
    by_step = {step: float(shared) for step, shared, _ in losses}
    assert by_step["0"] > by_step["1"] > by_step["2"]


@pytest.mark.parametrize("guide", GUIDES)
def test_links_lead_somewhere(guide: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", (DOCS / guide).read_text()):
        assert (DOCS / target.partition("#")[0]).exists(), target


def test_the_commands_of_the_bench_are_taken() -> None:
    from runtime.bench.grid import parse_plans, parse_shapes, unused_settings
    from runtime.cli import bench_attention_command

    text = "\n".join(blocks("bench.md", "bash")).replace("\\\n", " ")
    commands = [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]
    benches = [words[3:] for words in commands if words[:3] == ["raylysses", "bench", "attention"]]
    assert benches
    for words in benches:
        given = bench_attention_command.make_context("bench", list(words)).params
        assert parse_shapes(given["shapes"])
        assert parse_plans(given["plans"])
        assert unused_settings(given["overrides"]) == []
        assert {setting.partition("=")[0] for setting in given["overrides"]} <= set(known_keys())


def test_every_column_of_the_table_is_explained() -> None:
    from runtime.bench.table import HEADINGS

    guide = (DOCS / "bench.md").read_text()
    for heading in HEADINGS:
        assert f"| `{heading}` |" in guide
