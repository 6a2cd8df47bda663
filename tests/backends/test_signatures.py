"""What our kernels call, what the doubles take and what the vendors publish are the same."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from backends import kernels
from backends.declared.flash_attn import FlashQuant
from backends.declared.trtllm_attn import TrtllmQuant
from backends.interface import AttentionImpl, AttentionMetadata, CallShape, PackedLengths, Variant
from backends.kernels import flash_attn, flashinfer_attn
from backends.kernels.packages import FlashImpl
from backends.registry import Registry
from tests.backends import flash_doubles, hub_doubles, sage_doubles
from tests.backends.published import BOUND, DOUBLES, FILE, RECORDED, as_published, differences, releases
from tests.backends.vendor_doubles import RaggedWrapper, Trtllm, put
from tests.exact import random_qkv
from vendor_signatures.calls import Called, called, called_by, imports_of
from vendor_signatures.reader import Parameter
from vendor_signatures.record import Signature, dump, load

VARIANTS = [
    (name, variant)
    for name in Registry.built_in().names()
    for variant in Registry.built_in().get_class(name).variants
    if variant.distributions
]
every_variant = pytest.mark.parametrize(("name", "variant"), VARIANTS, ids=[f"{n}-{v.name}" for n, v in VARIANTS])
INSTALLABLE = [
    entry for entry in RECORDED if entry.read_from == "definition" and not entry.source.endswith(f"@{entry.version}")
]
NO_METADATA = AttentionMetadata()
ROWS = 64


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every vendor's package, as if it were installed."""
    monkeypatch.setattr(RaggedWrapper, "made", [], raising=False)
    trtllm = Trtllm()
    prefill = SimpleNamespace(
        BatchPrefillWithRaggedKVCacheWrapper=RaggedWrapper,
        trtllm_ragged_attention_deepseek=trtllm.trtllm_ragged_attention_deepseek,
        trtllm_sage_attention_quantize=trtllm.trtllm_sage_attention_quantize,
    )
    put(monkeypatch, flashinfer=SimpleNamespace(prefill=prefill), flashinfer__prefill=prefill)
    flashinfer_attn._WRAPPERS.clear()
    with ExitStack() as stack:
        for packages in (flash_doubles.packages, sage_doubles.packages, hub_doubles.package):
            stack.enter_context(packages(monkeypatch))
        yield
    flashinfer_attn._WRAPPERS.clear()


def impl_of(name: str, variant: Variant) -> type[AttentionImpl]:
    return Registry.built_in().get_class(name).get_impl_cls(variant)


def recorded_of(one: Called) -> set[str]:
    """The recorded callables behind a path: its own, or the methods of the class that is there."""
    return {
        entry.callable
        for entry in RECORDED
        if entry.distribution == one.origin and one.path in (entry.callable, entry.callable.rpartition(".")[0])
    }


# --- the record -------------------------------------------------------------------------------------------------------


def test_all_that_the_kernels_call_is_recorded_and_nothing_else() -> None:
    assert [one for one in called() if not recorded_of(one)] == []
    assert {entry.callable for entry in RECORDED} == {path for one in called() for path in recorded_of(one)}


def test_nothing_that_a_kernel_imports_by_path_is_overlooked() -> None:
    """Every path that stands in a module of ours is one of a variant's."""
    files = sorted(Path(str(kernels.__file__)).parent.glob("*.py"))
    found = {path for file in files for path in _paths(importlib.import_module(f"backends.kernels.{file.stem}"))}
    assert found
    assert found <= {one.path for one in called()}


def _paths(module: ModuleType) -> Iterator[str]:
    """What a module's calls of `imported` name by a text, or by one of its constants."""
    for call in imports_of(module):
        (argument,) = call.args
        if isinstance(argument, ast.Constant):
            yield argument.value
        elif isinstance(argument, ast.Name):
            yield getattr(module, argument.id)


def test_a_path_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "unreadable.py"
    file.write_text(
        "from backends.kernels.packages import FlashImpl, imported\n\n\n"
        "class Impl(FlashImpl):\n    def load(self):\n        imported('a.' + 'b')\n"
    )
    spec = importlib.util.spec_from_file_location("backends.kernels.unreadable", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "backends.kernels.unreadable", module)
    spec.loader.exec_module(module)
    with pytest.raises(ValueError, match=r"unreadable, line 6: imported\('a.' \+ 'b'\) of Impl is not a path that can"):
        list(called_by(module.Impl, ("a-package",)))


@every_variant
def test_every_package_has_a_recorded_release_of_the_least_version(name: str, variant: Variant) -> None:
    for distribution in variant.distributions:
        versions = {entry.version for entry in RECORDED if entry.distribution == distribution}
        assert versions
        least = [Version(version).release for package, version in variant.at_least if package == distribution]
        for release in least:
            assert any(Version(version).release[: len(release)] == release for version in versions)


@pytest.mark.parametrize("entry", RECORDED, ids=lambda entry: f"{entry.callable}-{entry.version}")
def test_an_entry_says_where_it_was_read(entry: Signature) -> None:
    assert len(entry.sha256) == 64
    assert entry.source.endswith((".whl", ".tar.gz", f"@{entry.version}"))
    assert entry.read_from == ("documentation" if entry.distribution == "torch-npu" else "definition")


def test_the_file_is_as_the_script_writes_it(tmp_path: Path) -> None:
    dump(tmp_path / "again.json", load(FILE))
    assert (tmp_path / "again.json").read_text() == FILE.read_text()


@pytest.mark.parametrize("entry", INSTALLABLE, ids=lambda entry: f"{entry.callable}-{entry.version}")
def test_an_installed_package_has_its_recorded_signature(entry: Signature) -> None:
    """Where one of the recorded versions is installed."""
    try:
        version = metadata.version(entry.distribution)
    except metadata.PackageNotFoundError:
        pytest.skip(f"needs {entry.distribution} {entry.version}")
    if version != entry.version:
        pytest.skip(f"needs {entry.distribution} {entry.version}, and {version} is installed")
    parts = entry.callable.split(".")
    owner = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], 1):
        owner = getattr(owner, part, None) or importlib.import_module(".".join(parts[: index + 1]))
    theirs = inspect.signature(owner).parameters.values()  # type: ignore[arg-type]
    assert [(p.name, p.kind.name) for p in theirs] == [(p.name, p.kind) for p in entry.parameters]


# --- the doubles ------------------------------------------------------------------------------------------------------


def test_every_recorded_callable_has_a_double_and_every_double_a_record() -> None:
    assert set(DOUBLES) == {entry.callable for entry in RECORDED}


@pytest.mark.parametrize("path", sorted(DOUBLES))
def test_a_double_has_the_newest_recorded_signature(path: str) -> None:
    assert list(differences(DOUBLES[path], releases(path)[-1])) == []


FA3 = releases("fa3_fwd_interface.flash_attn_func")[-1]


def drifted(index: int, part: Parameter | None) -> Signature:
    """FlashAttention 3's signature with one of its parameters changed, or without it."""
    parts = list(FA3.parameters)
    parts[index : index + 1] = [] if part is None else [part]
    return replace(FA3, parameters=tuple(parts))


@pytest.mark.parametrize(
    ("entry", "difference"),
    [
        (drifted(3, None), "are not"),
        (drifted(3, Parameter("scale", "POSITIONAL_OR_KEYWORD", "None")), "are not"),
        (drifted(3, Parameter("softmax_scale", "KEYWORD_ONLY", "None")), "softmax_scale is POSITIONAL_OR_KEYWORD, not"),
        (drifted(3, Parameter("softmax_scale", "POSITIONAL_OR_KEYWORD", None)), "softmax_scale has None for a default"),
        (drifted(4, Parameter("causal", "POSITIONAL_OR_KEYWORD", "True")), "causal is False by default, not True"),
        (drifted(4, Parameter("causal", "POSITIONAL_OR_KEYWORD", "0")), "causal is False by default, not 0"),
        (
            drifted(12, Parameter("num_splits", "POSITIONAL_OR_KEYWORD", "SPLITS")),
            "num_splits is 1 by default, not SPL",
        ),
    ],
    ids=str,
)
def test_a_double_that_drifts_is_noticed(entry: Signature, difference: str) -> None:
    (found,) = differences(DOUBLES[FA3.callable], entry)
    assert difference in found


def test_a_double_of_what_is_not_recorded_is_refused() -> None:
    with pytest.raises(KeyError, match=r"no signature of flash_attn\.no_such_func is recorded: run scripts/read_sig"):
        as_published("flash_attn.no_such_func")


# --- the calls --------------------------------------------------------------------------------------------------------


def features_of(variant: Variant) -> Iterator[AttentionMetadata]:
    """Calls with each feature that a variant takes."""
    takes = variant.takes
    yield NO_METADATA
    if takes.window:
        yield AttentionMetadata(window=(3, 2))
    if takes.soft_cap:
        yield AttentionMetadata(soft_cap=2.0)
    if takes.sinks:
        yield AttentionMetadata(sinks=torch.zeros(2))
    if takes.packed:
        yield AttentionMetadata(packed=PackedLengths((40, 24), (40, 24)))
    if "full" in takes.masks:
        yield AttentionMetadata(torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool).tril())


def options_of(name: str, variant: str) -> Iterator[tuple[tuple[str, Any], ...]]:
    yield ()
    if name == "FLASH_ATTN" and variant == "fa3":
        yield (("quant", FlashQuant("fp8_e4m3")),)
    if name == "TRTLLM_ATTN":
        yield (("quant", TrtllmQuant("int8")),)


@every_variant
def test_every_call_of_a_variant_fits_every_recorded_release(name: str, variant: Variant, stand_ins: None) -> None:
    impl_class = impl_of(name, variant)
    qkv = random_qkv(1, ROWS, ROWS, 2, 2, 128, torch.bfloat16)
    BOUND.clear()
    impl_class.load()
    for options in options_of(name, variant.name):
        for causal in (False, *([True] if variant.takes.causal and not options else [])):
            impl = impl_class(softmax_scale=128**-0.5, causal=causal, options=options)
            impl.prepare(qkv[0].device, qkv[0].dtype)
            for asked in features_of(variant):
                shape = CallShape(1, ROWS, ROWS, 2, 2, 128, asked.features, asked.packed)
                assert impl.forward(*qkv, asked, impl.plan(shape)).shape == qkv[0].shape
                if variant.takes.lse:
                    assert impl.forward_with_lse(*qkv, asked, impl.plan(shape))[1].shape == (1, 2, ROWS)
    wanted = {path for one in called_by(impl_class, variant.distributions) for path in recorded_of(one)}
    assert wanted == BOUND


def test_a_kernel_that_passes_an_unknown_argument_fails(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: Callable[..., dict[str, Any]] = FlashImpl.settings
    monkeypatch.setattr(FlashImpl, "settings", lambda self, asked: {**settings(self, asked), "gather_bwd": 1})
    qkv = random_qkv(1, 4, 4, 2, 2, 64, torch.bfloat16)
    impl = flash_attn.FlashAttn4Impl(softmax_scale=0.1, causal=False)
    with pytest.raises(
        TypeError, match=r"flash_attn\.cute\.flash_attn_func of flash-attn-4 4\.0\.0b36: .*'gather_bwd'"
    ):
        impl.forward(*qkv, NO_METADATA)


def test_a_kernel_that_needs_the_newest_release_fails(stand_ins: None) -> None:
    """The oldest release that is recorded does not have the parameter."""
    wrapper = RaggedWrapper(torch.empty(128 << 20, dtype=torch.uint8), "NHD", backend="fa2")
    with pytest.raises(TypeError, match=r"flashinfer-python 0\.6\.18: got an unexpected keyword argument 'lse_base'"):
        wrapper.run(*random_qkv(1, 4, 4, 2, 2, 64, torch.bfloat16), lse_base=2)
