"""The public names of Raylysses, looked up when first used: importing this module imports nothing heavy."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

_HOMES = {
    "Attention": "parallel.attention",
    "AttentionBackend": "backends.interface",
    "AttentionConfig": "configs.schema",
    "AttentionContext": "parallel.context",
    "AttentionImpl": "backends.interface",
    "AttentionMetadata": "backends.interface",
    "Capabilities": "backends.variant",
    "AttentionSpec": "configs.schema",
    "DeviceFacts": "backends.platforms.facts",
    "DenoisingTime": "backends.layer_facts",
    "DiffusionAttentionBackendEnum": "backends.registry",
    "ExecutionPath": "backends.execution",
    "Fault": "configs.faults",
    "FaultError": "configs.faults",
    "Features": "backends.requirements",
    "Generation": "runtime.requests",
    "HeadSizes": "backends.variant",
    "Observer": "runtime.session",
    "PackedLengths": "backends.interface",
    "Registry": "backends.registry",
    "Request": "runtime.requests",
    "Requirements": "backends.requirements",
    "RunConfig": "configs.schema",
    "Session": "runtime.session",
    "Variant": "backends.variant",
    "SequenceParallel": "parallel.library",
    "ShardPlan": "parallel.plan",
    "Stream": "parallel.plan",
    "attention_context": "parallel.context",
    "attention_context_of": "parallel.library",
    "compose": "configs.compose",
    "get_attn_backend_for_role": "backends.selector",
    "get_diffusion_attn_backend_cls": "backends.selector",
    "register_diffusion_backend": "backends.registrations",
    "request_of": "runtime.requests",
    "sequence_parallel": "parallel.library",
    "take": "parallel.pieces",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _require_own_packages()
    return getattr(importlib.import_module(_HOMES[name]), name)


def _require_own_packages() -> None:
    """Raise ImportError, which names the folder, if a package of ours is another project's on the import path.

    The check stands here, not in `runtime`, because that package may be the other project's.
    """
    root = Path(__file__).resolve().parent
    for name in ("configs", "backends", "parallel", "runtime"):
        loaded = sys.modules.get(name)
        spec = importlib.util.find_spec(name) if loaded is None else getattr(loaded, "__spec__", None)
        origin = getattr(loaded, "__file__", None) if spec is None else spec.origin
        if origin is None or Path(origin).resolve() == root / name / "__init__.py":
            continue
        stranger = Path(origin).parent if Path(origin).name == "__init__.py" else Path(origin)
        raise ImportError(
            f"import={stranger}: it comes before the package {name!r} of Raylysses on the import path; "
            f"run from another directory, or rename {stranger.name}",
            name=name,
            path=str(stranger),
        )


def __dir__() -> list[str]:
    return __all__


if __name__ == "__main__":
    try:
        _require_own_packages()
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    from runtime.__main__ import main

    raise SystemExit(main())
