"""Registration by path, by decorator, within a scope and by an installed package; and what is no backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends import registrations
from backends.declarations import check
from backends.declared.torch_sdpa import TorchSdpaBackend
from backends.interface import AttentionBackend, Capabilities, Requirements, Validation, Variant
from backends.platforms.facts import DeviceFacts
from backends.registrations import register_diffusion_backend, registered
from backends.registry import DiffusionAttentionBackendEnum, Registry
from backends.selector import select
from configs.faults import FaultError
from configs.schema import AttentionConfig

HERE = __name__
CPU = DeviceFacts("cpu")
CALL = Requirements(head_size=64, num_heads=4, num_kv_heads=4, dtype="float32", kind="self")


class Mine(AttentionBackend):
    variants = (Variant("mine", "backends.kernels.reference.ReferenceImpl"),)

    @staticmethod
    def get_name() -> str:
        return "MINE"


class OtherMine(Mine):
    variants = (Variant("other", "backends.kernels.reference.ReferenceImpl"),)


class MySdpa(TorchSdpaBackend):
    variants = (Variant("mine", "backends.kernels.reference.ReferenceImpl"),)


class OddlyCalled(Mine):
    @classmethod
    def validate(cls, required: Requirements) -> Validation:  # type: ignore[override]
        return Validation(None)


class NotATuple(Mine):
    variants = Variant("mine", "backends.kernels.reference.ReferenceImpl")  # type: ignore[assignment]


class TextForATuple(Mine):
    variants = (Variant("mine", "a.B", distributions="flash-attn"),)  # type: ignore[arg-type]


def mine(**changes: Any) -> tuple[Variant, ...]:
    return (Variant("mine", "backends.kernels.reference.ReferenceImpl", **changes),)


class OddChip(Mine):
    variants = mine(chips=("cuda:9.0", "cud:9.0"))


class ChipWithoutMinor(Mine):
    variants = mine(chips=("cuda:9",))


class OddVersion(Mine):
    variants = mine(at_least=(("mine", "newest"),))


class ChipOfAPlatformWithoutAny(Mine):
    variants = mine(chips=("cpu:1.0",))


class OddRunOn(Mine):
    variants = mine(run_on=("CUDA:9.0",))


class OddDtype(Mine):
    variants = mine(takes=Capabilities(dtypes=("bfloat16", "bf16")))


class DtypeIsText(Mine):
    variants = mine(takes=Capabilities(dtypes="bfloat16"))  # type: ignore[arg-type]


class OddMask(Mine):
    variants = mine(takes=Capabilities(masks=("none", "key_paddng")))  # type: ignore[arg-type]


class NameIsText(Mine):
    get_name = "MINE"  # type: ignore[assignment]


class Nameless(Mine):
    @staticmethod
    def get_name() -> str:
        return str(1 / 0)


class ReturnsNone(Mine):
    @staticmethod
    def get_name() -> str:
        return None  # type: ignore[return-value]


class Outer:
    class Inner(Mine): ...


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    before = registrations._registrations
    yield
    registrations._registrations = before
    registrations._installed.cache_clear()


def test_a_path_gives_a_new_name_to_registries_that_exist() -> None:
    registry = Registry()
    register_diffusion_backend("MINE", f"{HERE}.Mine")
    assert registry.get_class("MINE") is Mine
    assert registry.names()[-1] == "MINE"
    assert registry.registrations() == {"MINE": f"{HERE}.Mine"}


def test_an_override_counts_from_the_next_selection_on_and_ends_with_its_scope() -> None:
    registry = Registry()
    built_in = registry.get_class("TORCH_SDPA")
    with register_diffusion_backend(DiffusionAttentionBackendEnum.TORCH_SDPA, f"{HERE}.MySdpa"):
        assert registry.get_class("TORCH_SDPA") is MySdpa
        assert select("self", CALL, CPU, AttentionConfig(), registry).variant == "mine"
        with register_diffusion_backend("MINE", f"{HERE}.Mine"):
            assert registry.get_class("MINE") is Mine
            with register_diffusion_backend("MINE", f"{HERE}.OtherMine"):
                assert registry.get_class("MINE") is OtherMine
            assert registry.get_class("MINE") is Mine
        assert "MINE" not in registry.names()
    assert registry.get_class("TORCH_SDPA") is built_in is TorchSdpaBackend
    assert select("self", CALL, CPU, AttentionConfig(), registry).variant == "torch"
    with pytest.raises(ZeroDivisionError), register_diffusion_backend("MINE", f"{HERE}.Mine"):
        raise ZeroDivisionError
    assert registered() == {}


def test_a_run_s_own_registration_wins() -> None:
    register_diffusion_backend("MINE", f"{HERE}.Mine")
    registry = Registry({"MINE": f"{HERE}.OtherMine"})
    assert registry.get_class("MINE") is OtherMine
    assert registry.registrations() == {"MINE": f"{HERE}.OtherMine"}


def test_a_decorated_class_is_registered_by_its_path() -> None:
    assert register_diffusion_backend("MINE")(Mine) is Mine
    assert registered() == {"MINE": f"{HERE}.Mine"}


def test_what_ranks_cannot_import_is_refused() -> None:
    with pytest.raises(FaultError, match="cannot be imported by ranks") as caught:

        @register_diffusion_backend("MINE")
        class Local(Mine):
            pass

    assert "define the class at the top of a module" in str(caught.value)
    with pytest.raises(FaultError, match="cannot be imported by ranks"):
        register_diffusion_backend("MINE")(Outer.Inner)
    with pytest.raises(TypeError, match=r"write @register_diffusion_backend\(NAME\)"):
        register_diffusion_backend(Mine)  # type: ignore[call-overload]
    assert registered() == {}


@pytest.mark.parametrize("name", ["auto", "AUTO", "", "my.backend", "1ST", "a\nb", "a b"])
def test_what_cannot_be_written_as_a_setting_is_no_name(name: str) -> None:
    with pytest.raises(FaultError, match="is not a name of a backend"):
        register_diffusion_backend(name, f"{HERE}.Mine")


def test_scopes_may_end_in_any_order_and_not_twice() -> None:
    first = register_diffusion_backend("MINE", f"{HERE}.Mine")
    second = register_diffusion_backend("MINE", f"{HERE}.OtherMine")
    with first:
        pass
    assert registered() == {"MINE": f"{HERE}.OtherMine"}
    with second:
        pass
    assert registered() == {}
    with pytest.raises(RuntimeError, match="has ended"), second:
        pass


def test_a_broken_backend_that_nobody_asked_for_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrations, "_installed", lambda: {"BROKEN": "no_such_package.Backend"})
    registry = Registry()
    assert "flash-attn-4" in registry.distributions()
    assert select("self", CALL, CPU, AttentionConfig(), registry).backend == "TORCH_SDPA"
    with pytest.raises(FaultError, match="cannot be imported"):
        registry.get_class("BROKEN")


def test_another_process_s_registry_knows_what_it_is_told_alone() -> None:
    with register_diffusion_backend("MINE", f"{HERE}.Mine"):
        sent = Registry().paths()
    with register_diffusion_backend("TORCH_SDPA", f"{HERE}.MySdpa"):
        registry = Registry.exactly(sent)
        assert registry.get_class("TORCH_SDPA") is TorchSdpaBackend
        assert registry.get_class("MINE") is Mine
        assert registry.registrations() == {"MINE": f"{HERE}.Mine"}


def test_a_reloaded_module_gives_its_new_class(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry({"MINE": f"{HERE}.Mine"})
    assert registry.get_class("MINE") is Mine
    monkeypatch.setitem(globals(), "Mine", OtherMine)
    assert registry.get_class("MINE") is OtherMine


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.Mine", "cannot be imported"),
        (f"{HERE}.CALL", "is not an AttentionBackend class"),
        (f"{HERE}.MySdpa", "its get_name() is TORCH_SDPA"),
        (f"{HERE}.OddlyCalled", "its validate takes (required"),
        (f"{HERE}.NotATuple", "its variants are not a tuple of Variant"),
        (f"{HERE}.TextForATuple", "distributions of its variant mine is 'flash-attn', not a tuple"),
        (f"{HERE}.OddChip", "'cud:9.0' in chips of its variant mine is no chip; did you mean the platform cuda?"),
        (f"{HERE}.ChipWithoutMinor", "'cuda:9' in chips of its variant mine is no chip; write cuda, cuda:9.0"),
        (f"{HERE}.OddVersion", "'newest' of mine in its variant mine is no version; write it as pip does"),
        (f"{HERE}.ChipOfAPlatformWithoutAny", "'cpu:1.0' in chips of its variant mine is no chip"),
        (f"{HERE}.OddRunOn", "'CUDA:9.0' in run_on of its variant mine is no chip; did you mean the platform cuda?"),
        (f"{HERE}.OddDtype", "'bf16' in dtypes of its variant mine is none of float64, float32, bfloat16, float16"),
        (f"{HERE}.DtypeIsText", "dtypes of its variant mine is 'bfloat16', not a tuple; write dtypes=(...,)"),
        (f"{HERE}.OddMask", "'key_paddng' in masks of its variant mine is none of none, key_padding, full, per_head"),
        (f"{HERE}.NameIsText", "its get_name is not a method"),
        (f"{HERE}.Nameless", "its get_name() raises ZeroDivisionError"),
        (f"{HERE}.ReturnsNone", "has no get_name() of its own"),
    ],
)
def test_what_is_no_backend_is_refused_at_registration(path: str, message: str) -> None:
    with pytest.raises(FaultError) as caught:
        register_diffusion_backend("MINE", path)
    assert message in str(caught.value)
    assert registered() == {}


@pytest.mark.parametrize(
    "chip", ["cpu", "cuda", "cuda:9.0", "cuda:10.x", "rocm", "rocm:gfx90a", "musa:3.1", "npu", "xpu"]
)
def test_every_spelling_of_a_device_is_a_chip(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mine, "variants", mine(chips=(chip,)))
    assert check("MINE", f"{HERE}.Mine", Mine) is Mine


def test_an_installed_package_brings_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "bringer-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bringer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[raylysses.backends]\nMINE = {HERE} : Mine [fast]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registrations._installed.cache_clear()
    registry = Registry()
    assert registry.get_class("MINE") is Mine
    with register_diffusion_backend("MINE", f"{HERE}.OtherMine"):
        assert registry.get_class("MINE") is OtherMine
    assert registry.get_class("MINE") is Mine
