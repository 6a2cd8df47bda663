"""`explain` answers without Ray, torch and weights, and says what it assumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

from configs.faults import FaultError
from runtime.cli import cli
from runtime.model_folder import read_folder
from tests.conftest import CHECKOUT
from tests.runtime.command import raylysses
from tests.wan_folders import folder


def test_the_answer_names_role_backend_source_and_assumptions() -> None:
    outcome = raylysses("explain", "--device", "cuda:9.0", "--packages", "all", "attention.per_role.cross=TORCH_SDPA")

    assert outcome.code == 0, outcome.err
    assert "cuda:9.0 (assumed)" in outcome.out
    assert "all (assumed)" in outcome.out
    rows = {line.split()[0]: line for line in outcome.out.splitlines() if line.startswith(("self ", "cross "))}
    assert "FLASH_ATTN (fa3)" in rows["self"]
    assert "platform" in rows["self"]
    assert "TORCH_SDPA (torch)" in rows["cross"]
    assert "attention.per_role.cross [command line]" in rows["cross"]


@pytest.mark.parametrize(
    ("device", "packages", "expected", "rejected"),
    [
        ("cpu", "all", "TORCH_SDPA", []),
        ("cuda:9.0", "flash-attn-4=4.0.0b36", "FLASH_ATTN", []),
        ("cuda:9.0", "here", "CUDNN_ATTN", ["FLASH_ATTN"]),
        ("cuda:10.0", "all", "CUDNN_ATTN", ["TRTLLM_ATTN"]),
        ("cuda:7.5", "all", "TORCH_SDPA", ["FLASH_ATTN", "CUDNN_ATTN"]),
        ("rocm:gfx90a", "all", "TORCH_SDPA", ["FLASH_ATTN"]),
        ("xpu", "here", "TORCH_SDPA", ["FLASH_ATTN"]),
        ("npu", "here", "TORCH_SDPA", ["FLASH_ATTN"]),
        ("musa:3.1", "here", "TORCH_SDPA", ["FLASH_ATTN"]),
    ],
)
def test_the_platform_decides_for_hardware_that_is_not_here(
    device: str, packages: str, expected: str, rejected: list[str]
) -> None:
    outcome = raylysses("explain", "--json", "--device", device, "--packages", packages)
    report = json.loads(outcome.out)

    assert outcome.code == 0, outcome.err
    Draft202012Validator(json.loads((CHECKOUT / "docs" / "selection.schema.json").read_text())).validate(report)
    for entry in report["entries"]:
        assert entry["backend"] == expected
        assert entry["ranks"] is None
        assert entry["layers"] == 6
        assert [candidate["backend"] for candidate in entry["rejected"]] == rejected
        assert all(candidate["faults"] for candidate in entry["rejected"])


def test_every_other_backend_is_said_to_serve_too_or_why_not() -> None:
    plain = raylysses("explain", "--device", "cpu", "attention.default=REFERENCE").out
    report = json.loads(raylysses("explain", "--json", "--device", "cpu", "attention.default=REFERENCE").out)

    assert "self, cross: would serve too: FLEX_ATTENTION, TORCH_SDPA" in plain
    assert "self, cross: not FLASH_ATTN: it runs on cuda:" in plain
    named = [line.split(" not ")[1].split(":")[0] for line in plain.splitlines() if ": not " in line]
    assert named == sorted(named)
    for role in ("self", "cross"):
        backends = [other["backend"] for other in report["alternatives"] if other["role"] == role]
        assert backends == sorted(backends)
    others = {(other["role"], other["backend"]) for other in report["alternatives"]}
    assert {("self", "TORCH_SDPA"), ("cross", "CUDNN_ATTN")} <= others
    assert not {("self", "REFERENCE"), ("cross", "REFERENCE")} & others


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("attention.per_role.self.verison=3",), "did you mean attention.per_role.self.version?"),
        (("attention.per_role.self.bakend=TORCH_SDPA",), "did you mean attention.per_role.self.backend?"),
        (("attention.default=flash_attn",), "did you mean FLASH_ATTN? Or add attention.register.flash_attn="),
        (("attention.default=MINE",), ", or add attention.register.MINE=package.module.Class"),
        (("generate.frames=6",), "generate.frames=6: a video has 4n + 1 frames; use 5 or 9"),
        (("generate.image=/etc/hostname",), "generate.image=/etc/hostname: it is not a picture"),
        (("run.device=cuda",), "run.device=cuda: is not the platform of --device cpu; leave one of the two out"),
        (
            ("attention.default=TORCH_SDPA", "attention.per_role.self=REFERENCE", "attention.per_role.cross=REFERENCE"),
            "attention.default=TORCH_SDPA: no role of the model falls back to it",
        ),
    ],
)
def test_what_is_wrong_comes_with_the_way_out(settings: tuple[str, ...], message: str) -> None:
    outcome = raylysses("explain", "--device", "cpu", *settings)
    assert outcome.code == 2
    assert message in outcome.err


@pytest.mark.parametrize("packages", ["flash-attn=abc", "flash-attn=", "flash-attn-4=4.0.0b36,fa3-fwd=banana"])
def test_a_package_with_a_version_that_is_none_is_refused(packages: str) -> None:
    outcome = raylysses("explain", "--device", "cuda:9.0", "--packages", packages)
    assert outcome.code == 2
    assert "is no version; give one, such as" in outcome.err


@pytest.mark.parametrize(
    "option",
    [
        "attention.default={backend: FLASH_ATTN, quant: {dtype_qk: [fp8_e4m3]}}",
        "attention.default={backend: TRTLLM_ATTN, skip_softmax: {threshold: [1]}}",
        "attention.default={backend: TRTLLM_ATTN, skip_softmax: {threshold: []}}",
    ],
)
def test_a_list_where_a_backend_takes_one_value_is_refused(option: str) -> None:
    outcome = raylysses("explain", "--device", "cuda:10.0", "--packages", "all", option)
    assert outcome.code == 2
    assert ": takes " in outcome.err


def test_an_automatic_default_that_nobody_needs_is_no_fault() -> None:
    roles = ("attention.per_role.self=TORCH_SDPA", "attention.per_role.cross=TORCH_SDPA")
    assert raylysses("explain", "--device", "cpu", "attention.default=auto", *roles).code == 0


def test_options_are_shown_and_no_package_can_be_assumed() -> None:
    device = ("--device", "cuda:10.0")
    spec = "attention.default={backend: FLASHINFER_ATTN, quant: {dtype_vo: fp8_e4m3}}"
    shown = raylysses("explain", *device, "--packages", "all", spec).out
    assert "FLASHINFER_ATTN (cute-dsl, quant.dtype_vo=fp8_e4m3)" in shown
    assert "exactness" in shown
    assert "lossy-quantised" in shown
    assert "CUDNN_ATTN" in raylysses("explain", *device, "--packages", "none").out


def test_a_backend_in_the_working_directory_is_found_by_the_installed_command(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from raylysses import AttentionBackend, Variant\n\n\nclass Mine(AttentionBackend):\n"
        "    variants = (Variant('v', 'backends.kernels.reference.ReferenceImpl'),)\n\n"
        "    @staticmethod\n    def get_name():\n        return 'MINE'\n"
    )
    command = [str(Path(sys.executable).with_name("raylysses")), "explain", "--device", "cpu"]
    settings = ["attention.register.MINE=mine.Mine", "attention.per_role.self=MINE"]
    done = subprocess.run([*command, *settings], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "MINE (v)" in done.stdout


def test_a_choice_that_cannot_serve_is_an_error_beside_the_roles_that_can() -> None:
    outcome = raylysses("explain", "--device", "cpu", "attention.per_role.self=FLASH_ATTN")

    assert outcome.code == 2
    assert "attention.per_role.self=FLASH_ATTN: it runs on cuda:" in outcome.err
    assert "cross" in outcome.out


def test_image_keys_have_a_role_of_their_own(tmp_path: Path) -> None:
    path = folder("wan2.1-i2v", tmp_path)
    settings = [f"model.path={path}", "attention.per_role.cross=REFERENCE", "attention.per_role.self=auto"]
    report = json.loads(raylysses("explain", "--json", "--device", "cpu", *settings).out)
    by_role = {entry["role"]: entry for entry in report["entries"]}

    assert set(by_role) == {"self", "cross", "cross.image"}
    assert (by_role["cross.image"]["backend"], by_role["cross.image"]["source"]) == ("REFERENCE", "parent")


def test_only_the_json_files_of_a_folder_are_read(tmp_path: Path) -> None:
    path = folder("wan2.1-t2v", tmp_path)
    for file in path.rglob("*"):
        if file.is_file() and file.suffix != ".json":
            file.unlink()

    outcome = raylysses("explain", f"model.path={path}", "--prompt", "taken and not needed", "--device", "cpu")

    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "cuda"), "--device=cuda: is not a device"),
        (("--device", "tpu"), "use cpu, cuda:9.0 (Hopper), cuda:10.0 (Blackwell), rocm:gfx942, npu, xpu or musa:3.1"),
        (("--device", "rocm"), "for rocm with a gfx name"),
        (("--device", "npu:7"), "is not a device"),
        (("--packages", "flash-atn"), "no backend asks for that package"),
    ],
)
def test_options_that_mean_nothing_are_refused(arguments: tuple[str, ...], message: str) -> None:
    outcome = raylysses("explain", *arguments)

    assert outcome.code == 2
    assert message in outcome.err


@pytest.mark.parametrize("command", [(), ("generate",), ("explain",), ("backends",)])
def test_every_help_has_an_example(command: tuple[str, ...]) -> None:
    outcome = raylysses(*command, "--help")

    assert outcome.code == 0
    assert "Example" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("genrate",), "did you mean generate?"),
        (("generate", "--promt", "x"), "Did you mean '--prompt'?"),
        (("generate", "--steps", "4"), "write generate.steps=..."),
        (("generate", "--worldsize", "2"), "did you mean the setting parallel.world_size=...?"),
        (("explain", "--sed", "2"), "did you mean the setting run.seed=...?"),
        (("explain", "--device", "cpu", "run.device=gpu"), "did you mean cuda?"),
        (("explain", "--device", "cpu", "run.dtype=bf16"), "did you mean bfloat16?"),
        (("generate", "--prompt", "a", "red", "circle", "run.seed=1"), '--prompt "a red circle"'),
    ],
)
def test_a_misspelled_command_or_option_gets_the_right_one(arguments: tuple[str, ...], message: str) -> None:
    outcome = raylysses(*arguments)

    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.count("error: ") == 1


def _explained(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["explain", "--device", "cuda:9.0", "--packages", "all", *arguments])


@pytest.mark.parametrize(
    ("name", "roles", "heads"),
    [
        ("wan2.1-t2v-1.3b", {("transformer", "self", 30), ("transformer", "cross", 30)}, 12),
        ("wan2.1-t2v-14b", {("transformer", "self", 40), ("transformer", "cross", 40)}, 40),
        ("wan2.1-i2v-14b", {("transformer", role, 40) for role in ("self", "cross", "cross.image")}, 40),
        (
            "wan2.2-t2v-a14b",
            {(model, role, 40) for model in ("transformer", "transformer_2") for role in ("self", "cross")},
            40,
        ),
        ("wan2.2-ti2v-5b", {("transformer", "self", 30), ("transformer", "cross", 30)}, 24),
    ],
)
def test_a_preset_is_explained_as_published_without_a_folder(
    name: str, roles: set[tuple[str, str, int]], heads: int
) -> None:
    outcome = _explained("--json", f"model={name}")
    report = json.loads(outcome.stdout)

    assert outcome.exit_code == 0, outcome.output
    Draft202012Validator(json.loads((CHECKOUT / "docs" / "selection.schema.json").read_text())).validate(report)
    assert {(entry["model"], entry["role"], entry["layers"]) for entry in report["entries"]} == roles
    assert report["assumed"]["model"].startswith(f"{name} as published (no folder given")
    assert report["memory"]["weights"] > 2 * 10**9
    assert report["memory"]["attention"] > 0
    facts = read_folder(f"published:{name}", weights=False)
    assert {role.heads for role in next(iter(facts.models.values())).roles} == {heads}
    assert (facts.temporal, facts.spatial) == (4, 16 if name == "wan2.2-ti2v-5b" else 8)


def test_the_json_files_of_a_folder_win_over_published_sizes(tmp_path: Path) -> None:
    path = folder("wan2.1-t2v", tmp_path)
    report = json.loads(_explained("--json", "model=wan2.1-t2v-14b", f"model.path={path}").stdout)
    assert {entry["layers"] for entry in report["entries"]} == {2}
    assert report["assumed"]["model"] == str(path)


def test_the_memory_of_a_rank_is_an_estimate_that_names_what_it_leaves_out() -> None:
    output = _explained("model=wan2.1-t2v-14b", "parallel.world_size=8").stdout
    assert "memory:    each rank needs about 26.6 GiB for weights and 0.5 GiB for an attention call (" in output
    assert "not counted: text and image encoders, VAE, " in output


def test_published_sizes_need_every_other_setting_to_be_right() -> None:
    outcome = _explained("model=wan2.2-ti2v-5b", "generate.height=720")
    assert outcome.exit_code == 2
    assert "generate.height=720: it must be a multiple of 32; use 704 or 736" in outcome.output


def test_generate_asks_for_a_folder_of_a_preset_that_explain_knows() -> None:
    with pytest.raises(FaultError) as refused:
        CliRunner().invoke(cli, ["generate", "--prompt", "x", "model=wan2.1-t2v-14b"], catch_exceptions=False)
    assert "model.path: is not set, and preset wan2.1-t2v-14b does not set it" in str(refused.value)
    with pytest.raises(FaultError, match="sizes of a published model, without weights; give a local folder"):
        read_folder("published:wan2.1-t2v-14b")
    with pytest.raises(FaultError, match=r"did you mean published:wan2\.1-t2v-14b"):
        read_folder("published:wan2.1-t2v-14", weights=False)


def test_a_failing_nvidia_smi_is_asked_once_and_named(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\necho call >> "{tmp_path}/calls"\necho broken driver >&2\nexit 9\n')
    tool.chmod(0o755)
    outcome = raylysses("explain", environ={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"})

    assert outcome.code == 0, outcome.err
    assert "no GPU is used: nvidia-smi failed with exit code 9 (broken driver)" in outcome.out
    assert (tmp_path / "calls").read_text() == "call\n"
