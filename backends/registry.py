"""Names and class paths of the backends. Names travel between processes, never classes."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Mapping
from typing import Any

from backends.declarations import load
from backends.interface import AttentionBackend
from backends.registrations import end_registrations, generation, registered
from configs.faults import Fault, FaultError, nearest, unknown_name_remedy
from configs.fields import name_of


class UnknownBackendError(FaultError, KeyError):
    """No backend has the name. A KeyError, too, as any Enum raises for a member that it does not have."""


class _Members(enum.EnumMeta):
    """`DiffusionAttentionBackendEnum[NAME]` names the nearest member for a name that none has."""

    def __getitem__(cls, name: Any) -> Any:
        member = cls.__members__.get(name_of(name))
        if member is None:
            raise UnknownBackendError([_unknown_name(cls.__name__, name, tuple(cls.__members__))])
        return member


class DiffusionAttentionBackendEnum(enum.Enum, metaclass=_Members):
    """The backends that come with Raylysses: stable name -> dotted class path of the declaration.

    A member stands for its name wherever a backend's name is taken. Its value never changes:
    `register_diffusion_backend` gives the name another class, and `get_path` and `get_class` follow it.
    """

    REFERENCE = "backends.declared.reference.ReferenceBackend"
    TORCH_SDPA = "backends.declared.torch_sdpa.TorchSdpaBackend"
    CUDNN_ATTN = "backends.declared.cudnn_attn.CudnnAttnBackend"
    FLASH_ATTN = "backends.declared.flash_attn.FlashAttnBackend"
    FLASH_ATTN_HUB = "backends.declared.flash_attn_hub.FlashAttnHubBackend"
    FLASH_ATTN_3_HUB = "backends.declared.flash_attn_hub.FlashAttn3HubBackend"
    FLASHINFER_ATTN = "backends.declared.flashinfer_attn.FlashinferAttnBackend"
    TRTLLM_ATTN = "backends.declared.trtllm_attn.TrtllmAttnBackend"
    SAGE_ATTN = "backends.declared.sage_attn.SageAttnBackend"
    SAGE_ATTN_3 = "backends.declared.sage_attn_3.SageAttn3Backend"
    FLEX_ATTENTION = "backends.declared.flex_attention.FlexAttentionBackend"

    def get_path(self, include_classname: bool = True) -> str:
        """The class path that the name has in this process now.

        Args:
            include_classname: Whether the path ends in the class, or is that of its module.

        Returns:
            The path that Python code or an installed package registered last, else the member's value.
        """
        path = registered().get(self.name, self.value)
        return path if include_classname else path.rpartition(".")[0]

    def get_class(self) -> type[AttentionBackend]:
        """The declaration at `get_path()`.

        Returns:
            The class, as its module has it now.

        Raises:
            FaultError: The class cannot be imported, or is not a declaration of this name.
        """
        return load(self.name, self.get_path())

    def is_overridden(self) -> bool:
        """Whether Python code or an installed package has registered another class path for the name."""
        return self.get_path() != self.value

    def clear_override(self) -> None:
        """End every registration that Python code made for the name, from the next selection on.

        The entry point of an installed package is not ended: uninstall the package instead.
        """
        end_registrations(self.name)

    @classmethod
    def _missing_(cls, value: object) -> Any:
        rule = f"{value!r} is not the class path of a built-in backend"
        close = nearest(str(name_of(value)), cls.__members__, count=1)
        names = close or tuple(cls.__members__)
        raise ValueError(f"{rule}; look members up by name, as in {cls.__name__}[{names[0]!r}]")


def _unknown_name(key: str, name: Any, known: tuple[str, ...], origin: str = "") -> Fault:
    return Fault(key, name, "no backend has that name", unknown_name_remedy(str(name), known), known, origin)


_BUILT_IN = {member.name: member.value for member in DiffusionAttentionBackendEnum}


class Registry:
    """The backends of one run. A name is looked up in what the run registers, then in what this process has
    registered (`backends.registrations`), then among the built-in ones.

    given: name -> dotted class path of an `AttentionBackend` that is importable in the driver and on every rank.
    Names are text or members of an Enum here and in every method.
    """

    def __init__(self, given: Mapping[Any, str] | None = None) -> None:
        self._given = {name_of(name): path for name, path in (given or {}).items()}
        self._fixed: dict[str, str] | None = None

    @classmethod
    def exactly(cls, paths: Mapping[Any, str]) -> Registry:
        """A registry of these names alone, whatever this process registers: another one's `paths`."""
        registry = cls()
        registry._fixed = {name_of(name): path for name, path in paths.items()}
        return registry

    @classmethod
    def built_in(cls) -> Registry:
        """A registry of the backends that come with Raylysses, and no others."""
        return cls.exactly(_BUILT_IN)

    def paths(self) -> dict[str, str]:
        """Name -> class path, the built-in ones first."""
        if self._fixed is not None:
            return dict(self._fixed)
        return {**_BUILT_IN, **registered(), **self._given}

    def registrations(self) -> dict[str, str]:
        """Name -> class path of all that is not built in, or no longer."""
        return {name: path for name, path in self.paths().items() if _BUILT_IN.get(name) != path}

    @property
    def generation(self) -> object:
        """Another object whenever this registry's answers may have changed."""
        return self if self._fixed is not None else generation()

    def names(self) -> tuple[str, ...]:
        return tuple(self.paths())

    def owners(self, block: str) -> tuple[str, ...]:
        """The backends that take an option block. One that cannot be loaded takes none."""
        found = []
        for name in self.names():
            with contextlib.suppress(FaultError):
                if block in self.get_class(name).blocks:
                    found.append(name)
        return tuple(found)

    def class_path(self, name: str | enum.Enum, key: str = "backend", origin: str = "") -> str:
        """The class path of a name. Raises FaultError, about `key`, if there is none."""
        paths, name = self.paths(), name_of(name)
        path = paths.get(name) if isinstance(name, str) else None
        if path is None:
            raise UnknownBackendError([_unknown_name(key, name, tuple(paths), origin)])
        return path

    def get_class(self, name: str | enum.Enum, key: str = "backend", origin: str = "") -> type[AttentionBackend]:
        """The declaration of a name, as its module has it now. Raises FaultError if it is unknown, cannot be imported,
        or is no AttentionBackend.
        """
        return load(name_of(name), self.class_path(name, key, origin))

    def distributions(self) -> tuple[str, ...]:
        """Every package that some variant of some backend names (`Variant.packages`). A backend that cannot be loaded
        names none: it is refused when it is chosen.
        """
        found: list[str] = []
        for name in self.names():
            with contextlib.suppress(FaultError):
                for variant in self.get_class(name).variants:
                    found += variant.packages
        return tuple(dict.fromkeys(found))
