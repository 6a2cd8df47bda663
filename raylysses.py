"""The public names of Raylysses, looked up when first used: importing this module imports nothing heavy."""

from __future__ import annotations

import importlib
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
    "register_diffusion_backend": "backends.registrations",
    "request_of": "runtime.requests",
    "sequence_parallel": "parallel.library",
    "take": "parallel.pieces",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__


if __name__ == "__main__":
    from runtime.__main__ import main

    raise SystemExit(main())
