"""The values that replace `auto` in a run's config.yaml."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from backends.registry import Registry
from backends.selection import Selection
from configs.compose import compose, to_mapping
from configs.schema import AttentionSpec, RunConfig
from parallel.plan import Strategy
from runtime.bench.choice import settle_choice
from runtime.bench.grid import Case, Shape, parse_backends
from runtime.bench.results import Checked, Row
from runtime.report import SelectionEntry, from_selections
from runtime.settled import asked_lines, file_mapping, settle_ranks, settle_roles
from tests.runtime.report_values import CROSS, SELF

ROLES = {"self": "self", "cross": "cross"}
REGISTRY = Registry.built_in()


def composed(*arguments: str) -> RunConfig:
    config, faults = compose(["generate.prompt=x", *arguments], environ={})
    assert config is not None, faults
    return config


def entries(*ran: tuple[Selection, Strategy]) -> tuple[SelectionEntry, ...]:
    return from_selections(4, [("transformer", selection, strategy, 2) for selection, strategy in ran]).entries


def flash(selection: Selection, variant: str) -> Selection:
    return replace(selection, backend="FLASH_ATTN", variant=variant, source="platform")


def test_what_the_ranks_got_replaces_auto_and_paths_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settled = settle_ranks(composed("model.path=wan", "generate.image=a.png"), "cuda", 4, "bfloat16")
    assert (settled.parallel.world_size, settled.parallel.transport) == (4, "torch")
    assert (settled.run.device, settled.run.dtype) == ("cuda", "bfloat16")
    assert (settled.model.path, settled.generate.image) == (str(tmp_path / "wan"), str(tmp_path / "a.png"))
    assert settle_ranks(composed(), "cpu", 2, "float32").model.path == "built-in:tiny-wan"


def test_each_role_gets_the_backend_and_the_version_that_ran() -> None:
    config = composed("attention.default=FLASH_ATTN", "attention.default.on_unsupported=fallback")
    ran = entries((replace(flash(SELF, "fa3"), source="default"), "ulysses"), (CROSS, "local"))
    variants = {variant.name: variant.version for variant in REGISTRY.get_class("FLASH_ATTN").variants}
    name = next(name for name, version in variants.items() if version == 3)
    ran = (replace(ran[0], variant=name), replace(ran[1], backend="TORCH_SDPA", variant="torch", source="platform"))
    settled = settle_roles(config, ROLES, ran, REGISTRY).attention
    assert settled.default is None
    assert settled.per_role == {"self": AttentionSpec("FLASH_ATTN", version=3), "cross": AttentionSpec("TORCH_SDPA")}


def test_a_role_that_has_not_run_or_differs_over_layers_keeps_its_choice() -> None:
    config = composed("attention.per_role.cross=REFERENCE")
    sdpa = replace(SELF, backend="TORCH_SDPA", variant="torch", source="platform")
    reference = replace(SELF, backend="REFERENCE", variant="plain", source="platform")
    settled = settle_roles(config, ROLES, entries((sdpa, "ulysses"), (reference, "ulysses")), REGISTRY)
    assert settled.attention.per_role == {"self": AttentionSpec("auto"), "cross": AttentionSpec("REFERENCE")}
    assert settle_roles(config, ROLES, (), REGISTRY) == config


@pytest.mark.parametrize(
    ("strategy", "degrees", "setting"),
    [
        ("ulysses", (4, 1), "ulysses"),
        ("ring", (1, 4), "ring"),
        ("ulysses_ring", (2, 2), "ring"),
        ("gather_kv", (1, 4), "gather_kv"),
        ("ulysses_gather_kv", (2, 2), "gather_kv"),
    ],
)
def test_the_strategy_and_its_degrees_are_those_of_the_calls_between_ranks(
    strategy: Strategy, degrees: tuple[int, int], setting: str
) -> None:
    ran = entries((replace(SELF, degrees=degrees), strategy), (replace(CROSS, degrees=(1, 1)), "local"))
    parallel = settle_roles(composed(), {}, ran, REGISTRY).parallel
    assert (parallel.strategy, parallel.ulysses, parallel.ring) == (setting, *degrees)
    differing = entries((replace(SELF, degrees=(4, 1)), "ulysses"), (replace(CROSS, degrees=(1, 4)), "ring"))
    assert settle_roles(composed(), {}, differing, REGISTRY).parallel == composed().parallel


def test_the_run_folder_and_the_cluster_are_left_out_and_listed() -> None:
    asked = composed("run.dir=old", "cluster.address=1.2.3.4:5", "cluster.stall_timeout_s=9")
    written = file_mapping(settle_ranks(asked, "cpu", 2, "float32"))
    assert "dir" not in written["run"]
    assert written["cluster"] == {"start_timeout_s": 120.0, "stall_timeout_s": 9.0}
    assert asked_lines(to_mapping(asked), written) == [
        "parallel.world_size: auto",
        "parallel.transport: auto",
        "cluster.address: 1.2.3.4:5",
        "run.dir: old",
        "run.dtype: auto",
        "run.device: auto",
    ]
    assert asked_lines(to_mapping(composed()), file_mapping(composed())) == []


def test_a_bench_settles_on_the_backend_that_every_cell_ran() -> None:
    attention = composed("attention.default=auto").attention
    case = Case(0, Shape(1, 8, 2, 16, 2), "auto", "auto", attention, composed().parallel)
    checked = Checked(0, "TORCH_SDPA", "torch", "k", "exact", "ulysses", (2, 1), 0.0, 1e-5, 2, 9, 0.1)
    ran, other = Row(case, "timed", "", checked), Row(case, "timed", "", replace(checked, backend="REFERENCE"))
    settled = settle_choice(attention, [ran, Row(case, "refused", "no")], REGISTRY)
    assert (settled.default, settled.per_role) == (None, {"self": AttentionSpec("TORCH_SDPA")})
    assert parse_backends(None, settled, REGISTRY) == {"TORCH_SDPA": settled}
    for rows in ([ran, other], [ran, Row(case)], []):
        assert settle_choice(attention, rows, REGISTRY) == attention
