"""Names and class paths of the backends. Names travel between processes, never classes."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from backends.interface import AttentionBackend
from backends.registrations import load, registered
from configs.faults import Fault, FaultError, unknown_name_remedy


class DiffusionAttentionBackendEnum(enum.Enum):
    """The backends that come with Raylysses: stable name -> dotted class path of the declaration."""

    REFERENCE = "backends.declared.reference.ReferenceBackend"
    TORCH_SDPA = "backends.declared.torch_sdpa.TorchSdpaBackend"
    CUDNN_ATTN = "backends.declared.cudnn_attn.CudnnAttnBackend"
    FLASH_ATTN = "backends.declared.flash_attn.FlashAttnBackend"


class Registry:
    """The backends of one run. A name is looked up in what the run registers, then in what this process has
    registered (`backends.registrations`), then among the built-in ones.

    given: name -> dotted class path of an `AttentionBackend` that is importable in the driver and on every rank.
    """

    def __init__(self, given: Mapping[str, str] | None = None) -> None:
        self._given = dict(given or {})
        self._classes: dict[tuple[str, str], type[AttentionBackend]] = {}

    def registrations(self) -> dict[str, str]:
        """Name -> class path of all that is not built in, for a registry in another process."""
        return {**registered(), **self._given}

    def _paths(self) -> dict[str, str]:
        return {member.name: member.value for member in DiffusionAttentionBackendEnum} | self.registrations()

    def names(self) -> tuple[str, ...]:
        return tuple(self._paths())

    def class_path(self, name: str, key: str = "backend", origin: str = "") -> str:
        """The class path of a name. Raises FaultError, about `key`, if there is none."""
        paths = self._paths()
        if name not in paths:
            known = tuple(paths)
            raise FaultError(
                [Fault(key, name, "no backend has that name", unknown_name_remedy(name, known), known, origin)]
            )
        return paths[name]

    def get_class(self, name: str, key: str = "backend", origin: str = "") -> type[AttentionBackend]:
        """The declaration of a name. Raises FaultError if it is unknown, cannot be imported, or is no
        AttentionBackend.
        """
        path = self.class_path(name, key, origin)
        if (name, path) not in self._classes:
            self._classes[name, path] = load(name, path)
        return self._classes[name, path]

    def distributions(self) -> tuple[str, ...]:
        """Every package that some variant of some backend asks for."""
        backends = [self.get_class(name) for name in self.names()]
        found = [dist for backend in backends for variant in backend.variants for dist in variant.distributions]
        return tuple(dict.fromkeys(found))
