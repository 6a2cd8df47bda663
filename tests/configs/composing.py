"""Composition for tests: what has to succeed, and what has to be refused with faults that say everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from configs.compose import compose
from configs.faults import Fault
from configs.schema import RunConfig

PROMPT = "generate.prompt=a cat"
BACKEND = "DIFFUSION_ATTENTION_BACKEND"


def composed(
    *arguments: str,
    file: Path | Sequence[Path] | None = None,
    environ: Mapping[str, str] = {},
    prompt: str | None = PROMPT,
) -> RunConfig:
    config, faults = compose((*([prompt] if prompt else []), *arguments), file=file, environ=environ)
    assert faults == ()
    assert config is not None
    return config


def refused(
    *arguments: str, file: Path | Sequence[Path] | None = None, environ: Mapping[str, str] = {}
) -> tuple[Fault, ...]:
    config, faults = compose((PROMPT, *arguments), file=file, environ=environ)
    assert config is None
    assert faults
    assert all(fault.key and fault.rule and fault.remedy for fault in faults)
    return faults
