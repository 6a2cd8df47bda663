"""What a run can be asked for: frozen dataclasses, plain values only.

Every field is consumed somewhere; a key that is not here is a fault. `None` means that the layer below decides (the
model folder, the cluster, the platform).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

AUTO = "auto"
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
OUTPUTS = ("video", "frames")


@dataclass(frozen=True)
class ModelConfig:
    """path: a local diffusers folder, or `built-in:NAME` for one that comes with Raylysses."""

    path: str


@dataclass(frozen=True)
class GenerateConfig:
    """What to make. Sizes are in pixels and frames; the model rounds nothing silently (see `runtime.check`)."""

    prompt: str
    negative_prompt: str
    steps: int
    guidance: float
    guidance_2: float | None
    flow_shift: float | None
    frames: int
    height: int
    width: int
    fps: int
    image: str | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """One choice of backend: its registered name, or `auto` for the platform's choice."""

    backend: str = AUTO


@dataclass(frozen=True)
class AttentionConfig:
    """Which backend serves which attention role.

    default: the choice for every role without an entry of its own; None leaves them to the platform.
    per_role: dotted role -> choice. A dotted role falls back to its parents, then to its category, then to `default`.
    register: new backend name -> dotted class path (command line and Python only).
    origins: dotted key (`attention.per_role.cross`) -> where it was set, for reports.
    """

    default: AttentionSpec | None = None
    per_role: Mapping[str, AttentionSpec] = field(default_factory=dict)
    register: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class ParallelConfig:
    """world_size: the number of ranks; None is `auto`: the largest usable number of free GPUs, or 2 on CPU."""

    world_size: int | None = None


@dataclass(frozen=True)
class ClusterConfig:
    """How the run meets Ray.

    address: `local` starts a cluster of this run's own (inside a Ray job: the job's); HOST:PORT joins one.
    start_timeout_s: how long the ranks' resources may take to become free, in seconds.
    stall_timeout_s: how long no rank may report anything before the run counts as stuck, in seconds.
    """

    address: str = "local"
    start_timeout_s: float = 120.0
    stall_timeout_s: float = 600.0


@dataclass(frozen=True)
class RunSettings:
    """dir: the run folder; None makes `runs/<time>`. outputs: what to write beside the reports (`OUTPUTS`)."""

    seed: int = 0
    dir: str | None = None
    dtype: str = AUTO
    device: str = AUTO
    outputs: tuple[str, ...] = OUTPUTS
    save_latents: bool = False


@dataclass(frozen=True)
class RunConfig:
    """A whole run, composed and checked for syntax, types and ranges."""

    model: ModelConfig
    generate: GenerateConfig
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    run: RunSettings = field(default_factory=RunSettings)
