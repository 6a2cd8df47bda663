"""FLASH_ATTN_HUB and FLASH_ATTN_3_HUB over a stand-in of `kernels`, against softmax in fp64; and what is said when the
Hub has no kernel for this node.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from backends.declared.flash_attn_hub import HubOptions
from backends.interface import AttentionMetadata, Requirements
from backends.kernels.flash_attn_hub import HubFlashAttn2Impl, HubFlashAttn3Impl, HubImpl
from backends.platforms.facts import DeviceFacts, parse_device
from backends.platforms.policy import PLATFORMS, priority
from backends.probe import import_faults
from backends.registry import Registry
from backends.selector import Selector
from configs.faults import FaultError
from configs.schema import AttentionConfig, AttentionSpec
from tests.backends.hub_doubles import CALLS, COMMIT, Hub, package, unconnected
from tests.backends.vendor_doubles import put
from tests.exact import attention64, random_qkv, relative_error

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("FLASH_ATTN_HUB", "FLASH_ATTN_3_HUB")
KERNELS = {
    HubFlashAttn2Impl: ("kernels-community/flash-attn2", 2),
    HubFlashAttn3Impl: ("kernels-community/flash-attn3", 1),
}
SCALE = 0.3
CLOSE = 5e-3
NO_METADATA = AttentionMetadata()
every_kernel = pytest.mark.parametrize("kernel", KERNELS)
every_name = pytest.mark.parametrize("name", NAMES)
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    import_faults.cache_clear()
    with package(monkeypatch) as double:
        yield double
    import_faults.cache_clear()


def made(kernel: type[HubImpl], *, causal: bool = False) -> HubImpl:
    """As a layer makes it."""
    kernel.load()
    impl = kernel(softmax_scale=SCALE, causal=causal)
    impl.prepare(torch.device("cpu"), torch.bfloat16)
    return impl


def hopper(packages: dict[str, str] | None = None) -> DeviceFacts:
    return parse_device("cuda:9.0", {"kernels": "0.17.2"} if packages is None else packages, all_packages=False)


def call(**asked: bool) -> Requirements:
    return Requirements(128, 4, 4, "bfloat16", "self", **asked)  # type: ignore[arg-type]


# --- the kernels ------------------------------------------------------------------------------------------------------


@every_kernel
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 37, 37, 4, 4, 64), (3, 19, 19, 6, 2, 64), (2, 23, 23, 4, 1, 128)], ids=str)
def test_attention_equals_softmax_in_fp64(
    kernel: type[HubImpl], shape: tuple[int, int, int, int, int, int], dtype: torch.dtype, causal: bool
) -> None:
    qkv = random_qkv(*shape, dtype)
    out = made(kernel, causal=causal).forward(*qkv, NO_METADATA)
    assert out.dtype == dtype
    assert relative_error(out, attention64(*qkv, scale=SCALE, causal=causal)) <= CLOSE
    assert all(CALLS[0][name] is tensor for name, tensor in zip("qkv", qkv, strict=True))


@every_kernel
@pytest.mark.parametrize("rows", [5, 9])
def test_the_log_sum_exp_is_natural_and_minus_infinity_without_keys(kernel: type[HubImpl], rows: int) -> None:
    qkv = random_qkv(2, rows, 5, 4, 2, 64, torch.bfloat16)
    out, lse = made(kernel, causal=True).forward_with_lse(*qkv, NO_METADATA)
    assert torch.equal(out, made(kernel, causal=True).forward(*qkv, NO_METADATA))
    q, k = qkv[0].double(), qkv[1].double().repeat_interleave(2, dim=2)
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * SCALE
    seen = torch.arange(5)[None, :] <= torch.arange(rows)[:, None] - (rows - 5)
    exact = torch.logsumexp(scores.masked_fill(~seen, float("-inf")), dim=-1)
    blind = exact == float("-inf")
    assert (lse.dtype, lse.shape) == (torch.float32, (2, 4, rows))
    assert torch.equal(lse == float("-inf"), blind)
    assert bool(blind.any()) == (rows > 5)
    assert relative_error(lse.masked_fill(blind, 0), exact.masked_fill(blind, 0)) <= 1e-5


@every_kernel
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_reach_all_three(kernel: type[HubImpl], causal: bool) -> None:
    qkv = tuple(x.float().requires_grad_() for x in random_qkv(2, 13, 13, 4, 2, 64, torch.bfloat16))
    exact = tuple(x.detach().double().requires_grad_() for x in qkv)
    weights = torch.linspace(-1, 1, 2 * 13 * 4 * 64).view(2, 13, 4, 64)
    (made(kernel, causal=causal).forward(*qkv, NO_METADATA) * weights).sum().backward()
    (attention64(*exact, scale=SCALE, causal=causal) * weights).sum().backward()
    for ours, theirs in zip(qkv, exact, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert relative_error(ours.grad, theirs.grad) <= 1e-5


# --- where they come from ---------------------------------------------------------------------------------------------


@every_kernel
def test_a_kernel_is_asked_for_once_by_its_repository_and_version(kernel: type[HubImpl], hub: Hub) -> None:
    for _ in range(3):
        made(kernel).forward(*random_qkv(1, 3, 3, 2, 2, 64, torch.bfloat16), NO_METADATA)
    assert hub.asked == [KERNELS[kernel]]


@every_kernel
def test_the_report_names_the_commit_that_ran(kernel: type[HubImpl], hub: Hub) -> None:
    repository, version = KERNELS[kernel]
    assert kernel(softmax_scale=1.0, causal=False).kernel == f"{repository}@v{version}.flash_attn_func"
    assert made(kernel).kernel == f"{repository}@{COMMIT}.flash_attn_func"


@every_kernel
def test_a_local_folder_that_stands_for_the_kernel_is_reported_as_one(kernel: type[HubImpl], hub: Hub) -> None:
    hub.folder = "/home/me/my-kernel/build"
    assert made(kernel).kernel == f"{KERNELS[kernel][0]}@local.flash_attn_func"


PINNED = (("options", HubOptions(COMMIT)),)


@every_kernel
def test_a_pinned_commit_is_the_only_one_that_is_asked_for(kernel: type[HubImpl], hub: Hub) -> None:
    kernel.load(PINNED)
    impl = kernel(softmax_scale=SCALE, causal=False, options=PINNED)
    impl.prepare(torch.device("cpu"), torch.bfloat16)
    qkv = random_qkv(1, 3, 3, 2, 2, 64, torch.bfloat16)
    assert relative_error(impl.forward(*qkv, NO_METADATA), attention64(*qkv, scale=SCALE)) <= CLOSE
    assert impl.kernel == f"{KERNELS[kernel][0]}@{COMMIT}.flash_attn_func"
    assert hub.asked == [(KERNELS[kernel][0], COMMIT)]


@every_name
@pytest.mark.parametrize("on_unsupported", ["error", "fallback"])
def test_a_node_that_has_another_kernel_than_the_pinned_one_does_not_serve(
    name: str, on_unsupported: Literal["error", "fallback"], hub: Hub
) -> None:
    hub.folder = "/home/me/my-kernel/build"
    spec = AttentionSpec(name, on_unsupported=on_unsupported, options={"revision": COMMIT})
    config = AttentionConfig(per_role={"self": spec})
    selector = Selector(hopper(), config, Registry(), probe=import_faults)
    if on_unsupported == "fallback":
        assert selector.select("self", call()).backend == "CUDNN_ATTN"
        return
    with pytest.raises(FaultError) as caught:
        selector.select("self", call())
    (fault,) = pickle.loads(pickle.dumps(caught.value)).faults
    assert (fault.key, fault.value) == ("attention.per_role.self.options.revision", COMMIT)
    assert fault.rule.endswith("is local on this node")


@every_name
@pytest.mark.parametrize("revision", ["v2", "main", COMMIT[:12], COMMIT.upper() + "A", 2, True])
def test_only_a_whole_commit_is_a_pin(name: str, revision: Any) -> None:
    config = AttentionConfig(per_role={"self": AttentionSpec(name, options={"revision": revision})})
    with pytest.raises(FaultError, match=r"attention\.per_role\.self\.options\.revision=.*: takes"):
        Selector(hopper(), config, Registry()).select("self", call())


@every_kernel
def test_a_missing_package_is_an_import_error(kernel: type[HubImpl], monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, kernels=None)
    with pytest.raises(ImportError):
        kernel.load()


NO_BUILD = "install a torch that it is built for, or, if this node is offline, fill its cache before"
NO_NETWORK = "let this node reach huggingface.co, or fill its cache before"
FAILURES = [
    (FileNotFoundError("Cannot find a build variant for this system in X (revision: v2):\n\nmore"), NO_BUILD),
    (RuntimeError("Kernel 'flash-attn2' variant 'x' does not support the current device"), NO_BUILD),
    (ImportError("libcudart.so.12: cannot open shared object file"), NO_BUILD),
    (ValueError("Kernel repository 'X' could not verify publisher trust status."), NO_NETWORK),
    (ConnectionError("offline"), NO_NETWORK),
    (unconnected(), NO_NETWORK),
]


@every_name
@pytest.mark.parametrize(("error", "way"), FAILURES, ids=lambda value: type(value).__name__)
def test_a_kernel_that_cannot_be_had_is_refused_with_the_reason_and_the_way_out(
    name: str, error: Exception, way: str, hub: Hub
) -> None:
    hub.fails = error
    spec = AttentionSpec(name)
    config = AttentionConfig(per_role={"self": spec}, origins={"attention.per_role.self": "command line"})
    selector = Selector(hopper(), config, Registry(), probe=import_faults)
    with pytest.raises(FaultError) as caught:
        selector.select("self", call())
    (fault,) = pickle.loads(pickle.dumps(caught.value)).faults
    repository = {"FLASH_ATTN_HUB": "flash-attn2, version 2", "FLASH_ATTN_3_HUB": "flash-attn3, version 1"}[name]
    assert (fault.key, fault.value, fault.origin) == ("attention.per_role.self", name, "command line")
    said = str(error).splitlines()[0].rstrip(".:")
    assert fault.rule == (
        f"kernels-community/{repository}, cannot be had from the Hugging Face Hub here ({type(error).__name__}: {said})"
    )
    assert fault.remedy == f"{way}, or use FLASH_ATTN or TORCH_SDPA"


@every_name
def test_a_fallback_takes_the_platforms_choice_instead(name: str, hub: Hub) -> None:
    hub.fails = ConnectionError("offline")
    config = AttentionConfig(per_role={"self": AttentionSpec(name, on_unsupported="fallback")})
    found = Selector(hopper(), config, Registry(), probe=import_faults).select("self", call())
    assert (found.requested, found.backend, found.source) == (name, "CUDNN_ATTN", "platform")
    assert found.rejected[0].backend == name


@every_name
def test_the_kernel_is_asked_for_last_and_on_a_rank_only(name: str, hub: Hub) -> None:
    config = AttentionConfig(default=AttentionSpec(name))
    assert Selector(hopper(), config, Registry()).select("self", call()).backend == name  # as the driver does
    for required, device in (
        (call(window=True), hopper()),
        (call(), hopper({})),
        (call(), parse_device("cpu", {}, True)),
    ):
        with pytest.raises(FaultError):
            Selector(device, config, Registry(), probe=import_faults).select("self", required)
    assert hub.asked == []
    assert Selector(hopper(), config, Registry(), probe=import_faults).select("self", call()).backend == name
    assert len(hub.asked) == 1


def test_explaining_does_not_even_import_the_package(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text("raise SystemExit('kernels was imported')")
    command = [sys.executable, "-m", "raylysses", "explain", "attention.default=FLASH_ATTN_HUB"]
    done = subprocess.run(
        [*command, "--device", "cuda:9.0", "--packages", "all"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "FLASH_ATTN_HUB (flash-attn2)" in done.stdout


# --- what is claimed --------------------------------------------------------------------------------------------------


@every_name
def test_it_is_in_no_automatic_order(name: str) -> None:
    devices = [parse_device(f"cuda:{chip}", {}, all_packages=True) for chip in ("8.0", "9.0", "10.0", "12.0")]
    devices += [DeviceFacts(platform) for platform in PLATFORMS if platform != "cuda"]
    assert all(name not in priority(device) for device in devices)


@every_name
def test_it_claims_no_hardware_and_no_loss(name: str) -> None:
    (variant,) = Registry.built_in().get_class(name).variants
    assert (variant.run_on, variant.exactness) == ((), "exact")
