"""Names and class paths: what is registered, what can be added, and how a name or a path that is wrong is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from backends.declared.torch_sdpa import TorchSdpaBackend
from backends.interface import AttentionBackend, AttentionImpl, Variant
from backends.registry import DiffusionAttentionBackendEnum, Registry
from configs.faults import Fault, FaultError

HERE = __name__


class MyBackend(AttentionBackend):
    variants = (Variant("mine", "backends.kernels.reference.ReferenceImpl", distributions=("my-kernels",)),)

    @staticmethod
    def get_name() -> str:
        return "MY_BACKEND"


class EmptyBackend(AttentionBackend):
    variants = ()

    @staticmethod
    def get_name() -> str:
        return "EMPTY"


class NotABackend:
    variants = MyBackend.variants


def refused(name: str, path: str) -> Fault:
    with pytest.raises(FaultError) as caught:
        Registry({name: path}).get_class(name)
    (fault,) = caught.value.faults
    assert (fault.key, fault.value) == (f"attention.register.{name}", path)
    assert fault.remedy
    return fault


@pytest.mark.parametrize("member", DiffusionAttentionBackendEnum)
def test_a_built_in_backend_has_one_name_everywhere(member: DiffusionAttentionBackendEnum) -> None:
    backend = Registry().get_class(member.name)
    assert backend.get_name() == member.name
    assert f"{backend.__module__}.{backend.__qualname__}" == member.value == Registry().class_path(member.name)
    assert len({variant.name for variant in backend.variants}) == len(backend.variants) > 0


def test_the_names_are_the_built_in_ones_and_then_the_registered() -> None:
    built_in = tuple(member.name for member in DiffusionAttentionBackendEnum)
    assert (
        Registry().names()
        == built_in
        == (
            *("REFERENCE", "TORCH_SDPA", "CUDNN_ATTN", "FLASH_ATTN", "FLASH_ATTN_HUB", "FLASH_ATTN_3_HUB"),
            *("FLASHINFER_ATTN", "TRTLLM_ATTN", "SAGE_ATTN", "SAGE_ATTN_3", "FLEX_ATTENTION"),
        )
    )
    assert Registry({"MY_BACKEND": f"{HERE}.MyBackend"}).names() == (*built_in, "MY_BACKEND")


def test_every_variant_names_a_kernel_class_that_can_be_imported() -> None:
    for name in Registry().names():
        backend = Registry().get_class(name)
        for variant in backend.variants:
            impl = backend.get_impl_cls(variant)
            assert issubclass(impl, AttentionImpl)
            assert isinstance(impl(softmax_scale=64**-0.5, causal=False).kernel, str)


def test_a_class_path_gives_a_new_name() -> None:
    registry = Registry({"MY_BACKEND": f"{HERE}.MyBackend"})
    assert registry.class_path("MY_BACKEND") == f"{HERE}.MyBackend"
    found = registry.get_class("MY_BACKEND")
    assert (found.__qualname__, found.get_name()) == ("MyBackend", "MY_BACKEND")
    assert registry.get_class("MY_BACKEND") is found
    assert "MY_BACKEND" not in Registry().names()


def test_the_packages_of_all_backends_are_known_once_each() -> None:
    found = Registry().distributions()
    assert len(set(found)) == len(found)
    assert {"fa3-fwd", "flash-attn-4", "flashinfer-python", "nvidia-cudnn-cu13"} <= set(found)
    extended = Registry({"MY_BACKEND": f"{HERE}.MyBackend"})
    assert extended.distributions() == (*found, "my-kernels")


@pytest.mark.parametrize(
    ("name", "meant"), [("TORCH_SPDA", "TORCH_SDPA"), ("torch_sdpa", "TORCH_SDPA"), ("FLASH_ATN", "FLASH_ATTN")]
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(FaultError) as caught:
        Registry().get_class(name, "attention.default", "command line")
    (fault,) = caught.value.faults
    assert (fault.key, fault.value, fault.origin) == ("attention.default", name, "command line")
    assert fault.remedy.startswith(f"did you mean {meant}")
    assert fault.allowed == Registry().names()


def test_an_unknown_name_that_is_near_nothing_gets_the_whole_list() -> None:
    with pytest.raises(FaultError, match="use one of REFERENCE, TORCH_SDPA, CUDNN_ATTN, FLASH_ATTN"):
        Registry().class_path("zzz")


def test_a_registered_name_is_among_the_nearest() -> None:
    with pytest.raises(FaultError, match="did you mean MY_BACKEND"):
        Registry({"MY_BACKEND": f"{HERE}.MyBackend"}).get_class("MY_BACKENDS")


@pytest.mark.parametrize("path", ["no_such_package.Backend", "backends.no_such_module.Backend", "..Backend"])
def test_a_path_that_cannot_be_imported_is_refused(path: str) -> None:
    assert refused("NEW", path).rule.startswith("cannot be imported: ")


def test_a_module_that_does_not_parse_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_backend_module.py").write_text("class Backend(\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert refused("NEW", "broken_backend_module.Backend").rule.startswith("cannot be imported: ")
    assert "broken_backend_module" not in sys.modules


def test_a_path_to_a_name_that_the_module_lacks_is_refused() -> None:
    assert refused("NEW", f"{HERE}.Missing").rule == f"{HERE} has no Missing"


@pytest.mark.parametrize("attribute", ["NotABackend", "refused", "HERE"])
def test_a_path_to_something_else_is_refused(attribute: str) -> None:
    assert refused("NEW", f"{HERE}.{attribute}").rule == "is not an AttentionBackend class"


@pytest.mark.parametrize("path", ["", "MyBackend", ".MyBackend"])
def test_a_path_without_a_module_is_refused(path: str) -> None:
    assert refused("NEW", path).rule == "is not the path of a class in a module"


@pytest.mark.parametrize("statement", ["raise ValueError('no luck')", "raise SystemExit('no luck')", "None.no_luck"])
def test_whatever_a_module_raises_at_import_is_a_fault(
    statement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unlucky.py").write_text(statement)
    monkeypatch.syspath_prepend(str(tmp_path))

    fault = refused("NEW", "unlucky.MyBackend")

    assert fault.rule.startswith("cannot be imported: ")
    assert "no_luck" in fault.rule.replace(" ", "_")


def test_a_backend_under_another_name_than_its_own_is_refused() -> None:
    fault = refused("NEW", f"{HERE}.MyBackend")
    assert "its get_name() is MY_BACKEND" in fault.rule
    assert fault.remedy == "register it as attention.register.MY_BACKEND"


def test_a_backend_without_variants_is_refused() -> None:
    assert refused("EMPTY", f"{HERE}.EmptyBackend").rule == "declares no variants"


def test_a_built_in_name_can_be_given_another_class() -> None:
    path = "backends.declared.reference.ReferenceBackend"
    assert Registry({"TORCH_SDPA": path}).class_path("TORCH_SDPA") == path
    assert Registry().get_class("TORCH_SDPA") is TorchSdpaBackend
    assert "get_name" in refused("TORCH_SDPA", path).rule
