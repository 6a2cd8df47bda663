"""The feature tables say what the predicates say, for every name and every device, and the page says the same."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backends.interface import AttentionBackend, Capabilities, HeadSizes, Requirements, Variant
from backends.platforms.facts import parse_device
from backends.platforms.policy import PLATFORMS
from backends.registry import DiffusionAttentionBackendEnum, Registry
from backends.selector import select
from configs.faults import FaultError
from configs.schema import AttentionConfig
from runtime.tables import DEVICES, Tables, describe_sizes, feature_rows, tables
from runtime.tables_text import BEGIN, END, drift, markdown, write_page, written
from tests.conftest import CHECKOUT
from tests.runtime.command import raylysses

PAGE = CHECKOUT / "docs" / "backends.md"
NAMES = [member.name for member in DiffusionAttentionBackendEnum]


class NarrowBackend(AttentionBackend):
    variants = (
        Variant(
            "narrow",
            "backends.kernels.reference.ReferenceImpl",
            chips=("cuda:8.x", "npu"),
            distributions=("narrow-kernels",),
            takes=Capabilities(
                dtypes=("float16",),
                head_sizes=HeadSizes(16, 80, (256,)),
                masks=("none", "full"),
                causal=True,
                window=True,
            ),
        ),
    )

    @staticmethod
    def get_name() -> str:
        return "NARROW"


@pytest.fixture(scope="module")
def built_in() -> Tables:
    return tables(Registry.built_in())


def test_the_page_is_what_the_backends_say() -> None:
    outcome = raylysses("backends", "--check", str(PAGE))
    assert outcome.code == 0, outcome.err


def test_every_name_has_its_rows_and_every_row_a_name(built_in: Tables) -> None:
    expected = {(name, v.name) for name in NAMES for v in Registry().get_class(name).variants}
    assert {(row.backend, row.variant) for row in built_in.features} == expected
    in_page = re.findall(r"^\| ([A-Z][A-Z0-9_]+) \| ([\w-]+) \|", PAGE.read_text(), flags=re.MULTILINE)
    assert set(in_page) == expected


def test_every_backend_has_a_guide_and_every_guide_a_backend() -> None:
    guides = {path.stem for path in (CHECKOUT / "docs" / "backends").glob("*.md")}
    assert guides == set(NAMES)
    for name in NAMES:
        text = (CHECKOUT / "docs" / "backends" / f"{name}.md").read_text()
        for heading in ("## Install", "## When to choose it", "## When it cannot serve", "## Quality"):
            assert heading in text, (name, heading)


def test_every_platform_and_generation_has_an_order(built_in: Tables) -> None:
    assert {device.partition(":")[0] for device in DEVICES} == set(PLATFORMS)
    assert [row.device for row in built_in.priorities] == list(DEVICES)
    for row in built_in.priorities:
        call = Requirements(128, 8, 8, "bfloat16", "self")
        device = parse_device(row.device, {}, all_packages=True)
        first = next(name for name in row.backends if name not in row.permitted)
        assert select("self", call, device, AttentionConfig(), Registry()).backend == first


def test_a_cell_is_what_the_predicate_answers() -> None:
    registry = Registry.exactly({**Registry.built_in().paths(), "NARROW": f"{__name__}.NarrowBackend"})
    row = next(row for row in tables(registry).features if row.backend == "NARROW")
    assert row.devices == ("cuda:8.0", "cuda:8.6", "cuda:8.9", "npu")
    assert (row.dtypes, row.masks, row.packages) == (("float16",), ("full",), ("narrow-kernels",))
    assert row.head_sizes == "multiples of 16 up to 80, and 256"
    assert (row.causal, row.window, row.soft_cap, row.grouped, row.run_on) == (True, True, False, False, ())


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (range(1, 1025), "any"),
        (range(1, 513), "any up to 512"),
        (range(8, 1025, 8), "multiples of 8"),
        (range(8, 257, 8), "multiples of 8 up to 256"),
        ([*range(8, 129, 8), 256], "multiples of 8 up to 128, and 256"),
        ([64, 96, 128, 192, 256], "64, 96, 128, 192, 256"),
        ([128], "128"),
    ],
)
def test_head_sizes_are_described_from_the_set_that_is_taken(sizes: list[int], words: str) -> None:
    assert describe_sizes(sizes) == words


def flipped(capabilities: Capabilities) -> Iterator[Capabilities]:
    for name in ("causal", "grouped", "value_head_size", "window", "soft_cap", "sinks", "packed", "lse", "gradient"):
        yield replace(capabilities, **{name: not getattr(capabilities, name)})
    yield replace(capabilities, dtypes=capabilities.dtypes[1:] or ("float32",))
    yield replace(capabilities, masks=("none",) if len(capabilities.masks) > 1 else ("none", "full"))
    yield replace(capabilities, head_sizes=HeadSizes(24, 48))


@pytest.mark.parametrize("name", NAMES)
def test_every_flipped_predicate_changes_the_page(name: str, built_in: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    page, backend = PAGE.read_text(), Registry().get_class(name)
    first, *others = backend.variants

    def with_first(variant: Variant) -> Tables:
        """The tables of all backends, of which only this one's have changed."""
        monkeypatch.setattr(backend, "variants", (variant, *others))
        rows = {(row.backend, row.variant): row for row in (*built_in.features, *feature_rows(backend))}
        return replace(built_in, features=tuple(rows.values()))

    assert with_first(first) == built_in
    for capabilities in flipped(first.takes):
        assert drift(page, with_first(replace(first, takes=capabilities)), PAGE), capabilities
    assert drift(page, with_first(replace(first, chips=("cuda:7.5",))), PAGE)


def test_drift_is_told_line_by_line_and_mended_by_writing(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text().replace("| REFERENCE | plain |", "| REFERENCE | fancy |"))
    outcome = raylysses("backends", "--check", str(page))
    assert outcome.code == 2
    assert "-| REFERENCE | fancy |" in outcome.err.replace("\n", " ") or "fancy" in outcome.err
    assert f"run raylysses backends --write {page}" in outcome.err
    assert raylysses("backends", "--write", str(page)).code == 0
    assert page.read_text() == PAGE.read_text()


@pytest.mark.parametrize("text", ["no marks", f"{END} {BEGIN}", f"{BEGIN} {BEGIN} {END}", BEGIN])
def test_a_page_without_a_place_for_the_tables_is_refused(text: str, built_in: Tables) -> None:
    with pytest.raises(FaultError, match="has no place for the tables"):
        written(text, built_in, Path("page.md"), "--write")


def test_a_page_that_is_not_there_is_refused() -> None:
    outcome = raylysses("backends", "--check", "nowhere.md")
    assert outcome.code == 2
    assert "--check=nowhere.md: it cannot be read" in outcome.err


@pytest.mark.parametrize("option", ["--check", "--write"])
def test_a_fault_of_a_page_names_its_option(option: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("no marks")
    for path, rule in ((tmp_path / "page.md", "has no place"), (tmp_path / "none.md", "it cannot be read")):
        outcome = raylysses("backends", option, str(path))
        assert outcome.code == 2
        assert f"error: {option}={path}: {rule}" in outcome.err


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FaultError, match=r"--write=.*: it cannot be written \(Is a directory\); give a file"):
        write_page(tmp_path, "text", "--write")


def test_json_stays_json_beside_a_check(built_in: Tables) -> None:
    outcome = raylysses("backends", "--json", "--check", str(PAGE))
    assert outcome.code == 0
    assert json.loads(outcome.out) == json.loads(json.dumps(built_in.to_dict()))
    assert f"{PAGE}: its tables are what the backends say" in outcome.err


def test_the_tables_are_printed_as_text_and_as_json(built_in: Tables) -> None:
    text = raylysses("backends").out
    assert all(name in text for name in NAMES)
    assert "Automatic order" in text
    assert json.loads(raylysses("backends", "--json").out) == json.loads(json.dumps(built_in.to_dict()))
    assert markdown(built_in) in PAGE.read_text()
