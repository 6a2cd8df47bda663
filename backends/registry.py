"""Names and class paths of the backends. Names travel between processes, never classes."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Mapping

from backends.declarations import load
from backends.interface import AttentionBackend
from backends.registrations import generation, registered
from configs.faults import Fault, FaultError, unknown_name_remedy


class DiffusionAttentionBackendEnum(enum.Enum):
    """The backends that come with Raylysses: stable name -> dotted class path of the declaration."""

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


_BUILT_IN = {member.name: member.value for member in DiffusionAttentionBackendEnum}


class Registry:
    """The backends of one run. A name is looked up in what the run registers, then in what this process has
    registered (`backends.registrations`), then among the built-in ones.

    given: name -> dotted class path of an `AttentionBackend` that is importable in the driver and on every rank.
    """

    def __init__(self, given: Mapping[str, str] | None = None) -> None:
        self._given = dict(given or {})
        self._fixed: dict[str, str] | None = None

    @classmethod
    def exactly(cls, paths: Mapping[str, str]) -> Registry:
        """A registry of these names alone, whatever this process registers: another one's `paths`."""
        registry = cls()
        registry._fixed = dict(paths)
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

    def class_path(self, name: str, key: str = "backend", origin: str = "") -> str:
        """The class path of a name. Raises FaultError, about `key`, if there is none."""
        paths = self.paths()
        if name not in paths:
            known = tuple(paths)
            raise FaultError(
                [Fault(key, name, "no backend has that name", unknown_name_remedy(name, known), known, origin)]
            )
        return paths[name]

    def get_class(self, name: str, key: str = "backend", origin: str = "") -> type[AttentionBackend]:
        """The declaration of a name, as its module has it now. Raises FaultError if it is unknown, cannot be imported,
        or is no AttentionBackend.
        """
        return load(name, self.class_path(name, key, origin))

    def distributions(self) -> tuple[str, ...]:
        """Every package that some variant of some backend asks for, or whose version it minds. A backend that cannot
        be loaded asks for none: it is refused when it is chosen.
        """
        found: list[str] = []
        for name in self.names():
            with contextlib.suppress(FaultError):
                for variant in self.get_class(name).variants:
                    found += [*variant.distributions, *(distribution for distribution, _ in variant.at_least)]
        return tuple(dict.fromkeys(found))
