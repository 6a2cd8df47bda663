"""Names and class paths of the backends. Names travel between processes, never classes."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Mapping

from backends.interface import AttentionBackend
from configs.faults import Fault, FaultError, unknown_name_remedy


class DiffusionAttentionBackendEnum(enum.Enum):
    """The backends that come with Raylysses: stable name -> dotted class path of the declaration."""

    REFERENCE = "backends.declared.reference.ReferenceBackend"
    TORCH_SDPA = "backends.declared.torch_sdpa.TorchSdpaBackend"
    CUDNN_ATTN = "backends.declared.cudnn_attn.CudnnAttnBackend"
    FLASH_ATTN = "backends.declared.flash_attn.FlashAttnBackend"


class Registry:
    """The backends of one run: the built-in ones and those registered for it.

    registered: new name -> dotted class path of an `AttentionBackend` that is importable in the driver and on every
    rank.
    """

    def __init__(self, registered: Mapping[str, str] | None = None) -> None:
        self._paths = {member.name: member.value for member in DiffusionAttentionBackendEnum} | dict(registered or {})
        self._classes: dict[str, type[AttentionBackend]] = {}

    def names(self) -> tuple[str, ...]:
        return tuple(self._paths)

    def class_path(self, name: str, key: str = "backend", origin: str = "") -> str:
        """The class path of a name. Raises FaultError, about `key`, if there is none."""
        if name not in self._paths:
            known = self.names()
            raise FaultError(
                [Fault(key, name, "no backend has that name", unknown_name_remedy(name, known), known, origin)]
            )
        return self._paths[name]

    def get_class(self, name: str, key: str = "backend", origin: str = "") -> type[AttentionBackend]:
        """The declaration of a name. Raises FaultError if it is unknown, cannot be imported, or is no
        AttentionBackend.
        """
        if name not in self._classes:
            self._classes[name] = _load(name, self.class_path(name, key, origin))
        return self._classes[name]

    def distributions(self) -> tuple[str, ...]:
        """Every package that some variant of some built-in or already loaded backend asks for."""
        backends = [self.get_class(name) for name in self.names()]
        found = [dist for backend in backends for variant in backend.variants for dist in variant.distributions]
        return tuple(dict.fromkeys(found))


def _load(name: str, path: str) -> type[AttentionBackend]:
    key = f"attention.register.{name}"
    module, _, attribute = path.rpartition(".")
    remedy = "give the dotted path of an importable class, such as my_package.my_module.MyBackend"
    if not module:
        raise FaultError([Fault(key, path, "is not the path of a class in a module", remedy)])
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except (Exception, SystemExit) as error:
        rule = f"cannot be imported: {type(error).__name__}: {error}"
        raise FaultError([Fault(key, path, rule, remedy)]) from error
    if found is None:
        raise FaultError([Fault(key, path, f"{module} has no {attribute}", "name a class that it has")])
    if not (isinstance(found, type) and issubclass(found, AttentionBackend)):
        remedy = "derive it from backends.interface.AttentionBackend"
        raise FaultError([Fault(key, path, "is not an AttentionBackend class", remedy)])
    if not getattr(found, "variants", ()):
        raise FaultError([Fault(key, path, "declares no variants", "give it `variants`, one for each kernel")])
    if found.get_name() != name:
        rule = f"its get_name() is {found.get_name()}, and a backend has one name everywhere"
        raise FaultError([Fault(key, path, rule, f"register it as attention.register.{found.get_name()}")])
    return found
