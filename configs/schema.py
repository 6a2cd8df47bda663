"""What a run can be asked for: frozen dataclasses, plain values only.

Every field is consumed somewhere; a key that is not here is a fault. `None` means that the layer below decides (the
model folder, the cluster, the platform).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any, Self

from configs.faults import Fault, FaultError, unknown_name_remedy
from configs.frozen import FrozenMapping

AUTO = "auto"
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
OUTPUTS = ("video", "frames")
IMAGE_FITS = ("crop", "pad", "stretch")
AGREEMENTS = ("require", "negotiate")
ON_UNSUPPORTED = ("error", "fallback")
STRATEGIES = (AUTO, "local", "ulysses", "ring", "gather_kv")
EXCHANGE_DTYPES = ("same", "fp8")
TRANSPORTS = (AUTO, "torch", "nccl")
BLOCKS = ("quant", "skip_softmax", "options")
"""The option blocks of a choice; `options` is for what one backend alone has, and for backends of others."""


class NamedFields:
    """Answers a field that a dataclass does not have with the nearest one that it has."""

    def __new__(cls, *values: Any, **named: Any) -> Self:
        known = tuple(cls.__dict__.get("__dataclass_fields__", ()))
        faults = [
            Fault(f"{cls.__name__}.{name}", None, "no such field", unknown_name_remedy(name, known))
            for name in named
            if name not in known
        ]
        if faults:
            raise FaultError(faults)
        return super().__new__(cls)


@dataclass(frozen=True)
class ModelConfig(NamedFields):
    """path: a local diffusers folder, or `built-in:NAME` for one that comes with Raylysses."""

    path: str


@dataclass(frozen=True)
class GenerateConfig(NamedFields):
    """What to make. Sizes are in pixels and frames; the model rounds nothing silently (see `runtime.check`).

    image_fit: how a first frame of other proportions meets the video's, out of `IMAGE_FITS`; None is `crop`.
    """

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
    image_fit: str | None = None


@dataclass(frozen=True)
class AttentionSpec(NamedFields):
    """One choice of backend, and its options.

    backend: its registered name, or `auto` for the platform's choice. Also a member of an Enum, for its name.
    version: of the backend's package, where it has several; no other one serves then.
    on_unsupported: what happens where this choice cannot serve: `error` refuses it, `fallback` leaves it to the
        platform.
    quant, skip_softmax, options: field -> a scalar or a list of scalars; the backend says which. Also a dataclass
        instance, whose None fields count as not set.

    Values are copied as plain data that nothing can change: blocks are immutable mappings, and lists tuples.

    Raises:
        FaultError: a value that is not plain data, or a field that does not exist.
    """

    backend: str = AUTO
    version: int | None = None
    on_unsupported: str = "error"
    quant: Mapping[str, Any] | None = None
    skip_softmax: Mapping[str, Any] | None = None
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        from configs.specs import spec_fields  # it imports this module

        for name, value in spec_fields(self).items():
            object.__setattr__(self, name, value)

    @property
    def blocks(self) -> dict[str, Mapping[str, Any]]:
        """The option blocks that are set, by name."""
        return {name: block for name in BLOCKS if (block := getattr(self, name)) is not None}


@dataclass(frozen=True)
class AttentionConfig(NamedFields):
    """Which backend serves which attention role.

    default: the choice for every role without an entry of its own; None leaves them to the platform.
    per_role: dotted role -> choice. A dotted role falls back to its parents, then to its category, then to `default`.
    register: new backend name -> dotted class path (command line and Python only).
    agreement: what happens where ranks differ in what they can run for an automatic role: `require` refuses it,
        `negotiate` settles on a backend that every one of them can run.
    origins: dotted key (`attention.per_role.cross`, `attention.default.version`) -> where it was set, for reports.
    may_be_unused: keys of choices that no role needs to use: a higher layer has replaced them role by role, or another
        value points at them. Any other choice that nothing uses is a fault.
    backend: short for `default`; only to construct with.

    A choice may be given as an `AttentionSpec`, a name, a member of an Enum, or a mapping (`{"backend": "X", "quant":
    {...}}`), and roles as nested mappings; OmegaConf's containers count as mappings and lists. All become dotted roles
    and specs in immutable copies.

    Raises:
        FaultError: every value that is not a choice, and every field that does not exist.
    """

    default: AttentionSpec | None = None
    per_role: Mapping[str, AttentionSpec] = field(default_factory=FrozenMapping)
    register: Mapping[str, str] = field(default_factory=FrozenMapping)
    origins: Mapping[str, str] = field(default_factory=FrozenMapping, compare=False)
    agreement: str = "require"
    may_be_unused: frozenset[str] = field(default_factory=frozenset, compare=False)
    backend: InitVar[Any] = field(default=None, kw_only=True)

    def __post_init__(self, backend: Any) -> None:
        from configs.specs import config_fields  # it imports this module

        for name, value in config_fields(self, backend).items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class ParallelConfig(NamedFields):
    """world_size: the number of ranks; None is `auto`: the largest usable number of free GPUs, or 2 on CPU.

    ulysses, ring: degrees whose product is the world size; None is `auto`. strategy: how keys that lie on several ranks
    are met, out of `STRATEGIES`. exchange_dtype: what carries Q, V and the output within a Ulysses group.
    transport: what moves tensors between ranks, out of `TRANSPORTS`.
    """

    world_size: int | None = None
    ulysses: int | None = None
    ring: int | None = None
    strategy: str = AUTO
    exchange_dtype: str = EXCHANGE_DTYPES[0]
    transport: str = AUTO


@dataclass(frozen=True)
class ClusterConfig(NamedFields):
    """How the run meets Ray.

    address: `local` starts a cluster of this run's own (inside a Ray job: the job's); HOST:PORT joins one.
    start_timeout_s: how long the ranks' resources may take to become free, in seconds.
    stall_timeout_s: how many seconds a rank may report nothing without waiting for others, or all ranks together.
    """

    address: str = "local"
    start_timeout_s: float = 120.0
    stall_timeout_s: float = 600.0


@dataclass(frozen=True)
class RunSettings(NamedFields):
    """dir: the run folder; None makes `runs/<time>`. outputs: what to write beside the reports (`OUTPUTS`)."""

    seed: int = 0
    dir: str | None = None
    dtype: str = AUTO
    device: str = AUTO
    outputs: tuple[str, ...] = OUTPUTS
    save_latents: bool = False


@dataclass(frozen=True)
class RunConfig(NamedFields):
    """A whole run, composed and checked for syntax, types and ranges."""

    model: ModelConfig
    generate: GenerateConfig
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    run: RunSettings = field(default_factory=RunSettings)
