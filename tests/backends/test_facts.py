"""What is known of a device: read from nvidia-smi, from the installed packages, or assumed from text."""

from __future__ import annotations

import importlib.metadata
import os
import pickle
import re
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest

from backends.platforms.facts import (
    DeviceFacts,
    GpuQuery,
    LocalNode,
    installed,
    local_device,
    local_gpus,
    parse_device,
    parse_gpus,
    query_gpus,
)
from configs.faults import FaultError

H200 = ("NVIDIA H200", (9, 0), 143771 << 20)
B200 = ("NVIDIA B200", (10, 0), 183359 << 20)
Answer = Callable[[str], Path]


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Puts a shell script by that name first on PATH; it writes its arguments beside itself."""

    def put(body: str) -> Path:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f'#!/bin/sh\necho "$@" > "{tmp_path}/arguments"\n{body}\n', encoding="utf-8")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return tmp_path / "arguments"

    return put


@pytest.mark.parametrize(
    ("answer", "rows"),
    [
        ("", ()),
        ("NVIDIA H200, 9.0, 143771\n", (H200,)),
        ("NVIDIA H200, 9.0, 143771\nNVIDIA B200, 10.0, 183359\n", (H200, B200)),
        ("NVIDIA H200, 9.0, 143771\r\n\r\n", (H200,)),
        ("Tesla K80, [N/A], 11441\nNVIDIA H200, 9.0, 143771\n", (H200,)),
        ("NVIDIA H200, 9.0, [N/A]\nNVIDIA B200, 10.0, 183359\n", (B200,)),
        ("[N/A], [N/A], [N/A]\n", ()),
        ("NVIDIA H200, 9, 143771\n", ()),
        ("NVIDIA H200, 9.0.1, 143771\n", ()),
        ("NVIDIA H200\n", ()),
        ("NVIDIA H200, 9.0\n", ()),
        ("No devices were found\n", ()),
    ],
)
def test_the_rows_that_can_be_read_are_read(answer: str, rows: tuple[object, ...]) -> None:
    assert parse_gpus(answer) == rows


def test_the_gpus_of_a_node_are_asked_of_nvidia_smi(nvidia_smi: Answer) -> None:
    arguments = nvidia_smi('echo "NVIDIA H200, 9.0, 143771"; echo "NVIDIA B200, 10.0, 183359"')
    assert local_gpus() == (H200, B200)
    asked = arguments.read_text(encoding="utf-8").split()
    assert asked == ["--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"]


@pytest.mark.parametrize("body", ["exit 9", 'echo "NVIDIA H200, 9.0, 143771"; exit 1', "echo No devices were found"])
def test_a_driver_that_fails_has_no_gpus(nvidia_smi: Answer, body: str) -> None:
    nvidia_smi(body)
    assert local_gpus() == ()


def test_a_driver_that_hangs_has_no_gpus(nvidia_smi: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi('echo "NVIDIA H200, 9.0, 143771"')

    def hang(command: list[str], *, timeout: float, **options: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert local_gpus() == ()


def test_a_tool_that_cannot_be_started_has_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("not a program", encoding="utf-8")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert local_gpus() == ()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("echo broken driver >&2; exit 9", "nvidia-smi failed with exit code 9 (broken driver)"),
        ("exec sleep 30", "nvidia-smi did not answer within 0.2 s"),
        ("echo No devices were found", "nvidia-smi listed no usable GPU (No devices were found)"),
        ("true", ""),
    ],
)
def test_why_nvidia_smi_gave_no_gpus_is_said(nvidia_smi: Answer, body: str, problem: str) -> None:
    nvidia_smi(body)
    assert query_gpus(0.2 if "sleep" in body else 30) == GpuQuery(problem=problem)


@pytest.mark.parametrize("body", ["exit 9", 'echo "NVIDIA H200, 9.0, 143771"'])
def test_a_node_is_asked_for_its_gpus_once(nvidia_smi: Answer, body: str) -> None:
    arguments = nvidia_smi(f'echo call >> "$(dirname "$0")/calls"; {body}')
    node = LocalNode()
    assert node.notice == ""
    for _ in range(3):
        if node.gpus:
            assert local_device("cuda", [], node).capability == (9, 0)
        else:
            with pytest.raises(FaultError, match="nvidia-smi failed with exit code 9"):
                local_device("cuda", [], node)
    assert ("exit code 9" in node.notice) == (body == "exit 9")
    assert (arguments.parent / "calls").read_text(encoding="utf-8") == "call\n"


def test_a_node_without_the_tool_has_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert local_gpus() == ()


def test_the_facts_of_a_gpu_node_are_those_of_its_first_gpu(nvidia_smi: Answer) -> None:
    nvidia_smi('echo "NVIDIA B200, 10.0, 183359"; echo "NVIDIA H200, 9.0, 143771"')
    facts = local_device("cuda", ["pytest", "no-such-package"])
    name, capability, memory = B200
    assert (facts.platform, facts.name, facts.capability, facts.memory_bytes) == ("cuda", name, capability, memory)
    assert dict(facts.packages) == {"pytest": importlib.metadata.version("pytest")}
    assert not facts.all_packages


def test_cuda_on_a_node_without_gpus_is_refused(nvidia_smi: Answer) -> None:
    nvidia_smi("exit 9")
    with pytest.raises(FaultError) as caught:
        local_device("cuda", [])
    (fault,) = caught.value.faults
    assert (fault.key, fault.value, fault.remedy) == ("run.device", "cuda", "use run.device=cpu")


def test_the_facts_of_a_cpu_ask_no_driver(nvidia_smi: Answer) -> None:
    arguments = nvidia_smi('echo "NVIDIA B200, 10.0, 183359"')
    facts = local_device("cpu", ["pytest"])
    assert (facts.platform, facts.capability, facts.label) == ("cpu", None, "cpu")
    assert not arguments.exists()


def test_installed_packages_have_their_versions_and_others_are_left_out() -> None:
    assert installed(["no-such-package", "hypothesis"]) == {"hypothesis": importlib.metadata.version("hypothesis")}


@pytest.mark.parametrize(
    ("text", "platform", "capability"),
    [("cpu", "cpu", None), ("cuda:9.0", "cuda", (9, 0)), ("cuda:12.1", "cuda", (12, 1))],
)
def test_a_device_can_be_assumed(text: str, platform: str, capability: tuple[int, int] | None) -> None:
    facts = parse_device(text, {"fa3-fwd": "0.0.3"}, False)
    assert (facts.platform, facts.capability, facts.label) == (platform, capability, text)
    assert facts.has("fa3-fwd")
    assert facts.version("fa3-fwd") == "0.0.3"
    assert not facts.has("flash-attn-4")
    assert facts.version("flash-attn-4") is None
    assert parse_device(text, {}, True).has("flash-attn-4")


@pytest.mark.parametrize(
    "text",
    [
        *("", "cuda", "cuda:", "cuda:9", "cuda:9.", "cuda:.0", "cuda:9.0.1", "cuda:-9.0", "cuda:x.y", "cpu:9.0", "tpu"),
        *("cuda:0", "cuda:1", "cuda:77", "rocm:gfx", "rocm:gfx9", "rocm:gfx94x"),
    ],
)
def test_what_is_not_a_device_is_refused(text: str) -> None:
    with pytest.raises(FaultError) as caught:
        parse_device(text, {}, False)
    (fault,) = caught.value.faults
    assert (fault.key, fault.value) == ("--device", text)
    meant = re.fullmatch(r"did you mean (.*)\?", fault.remedy)
    if meant is None:
        assert "cuda:9.0" in fault.remedy
    else:
        assert meant[1] != text
        assert parse_device(meant[1], {}, False).label == meant[1]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        *(("cuda:9", "cuda:9.0"), ("cuda", "cuda:9.0"), ("cud:8.6", "cuda:8.6"), ("CUDA:10.0", "cuda:10.0")),
        *(("h100", "cuda:9.0"), ("B200", "cuda:10.0"), ("gpu", "cuda:9.0"), ("mi300x", "rocm:gfx942")),
        *(
            ("rocm", "rocm:gfx942"),
            ("cuda:90", "cuda:9.0"),
            ("rcom:gfx950", "rocm:gfx950"),
            ("musa", "musa:3.1"),
            ("npu:1", "npu"),
        ),
    ],
)
def test_what_was_probably_meant_is_said(text: str, meant: str) -> None:
    with pytest.raises(FaultError, match=re.escape(f"did you mean {meant}?")):
        parse_device(text, {}, False)


def test_facts_survive_pickling() -> None:
    facts = DeviceFacts("cuda", (9, 0), "NVIDIA H200", 143771 << 20, MappingProxyType({"fa3-fwd": "0.0.3"}), True)
    back = pickle.loads(pickle.dumps(facts))
    assert back == facts
    assert pickle.loads(pickle.dumps(DeviceFacts("cpu"))) == DeviceFacts("cpu")


def test_facts_have_no_packages_unless_told() -> None:
    assert not DeviceFacts("cpu").has("torch")
    assert DeviceFacts("cuda").label == "cuda"
