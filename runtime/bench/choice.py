"""What a cell of a bench gets: asked by the driver before it starts ranks, and by each rank of its own facts. No torch
here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from backends.entries import resolve_entry
from backends.platforms.facts import DeviceFacts
from backends.registry import Registry
from backends.requirements import NO_FEATURES
from backends.selector import Selector
from configs.faults import Fault, FaultError
from configs.schema import AttentionConfig, AttentionSpec
from parallel.planner import Planned, RoleCall, choose
from runtime.bench.grid import ROLE, Case
from runtime.bench.results import Row
from runtime.settled import pinned

NOTHING = Fault("bench", None, "nothing of the grid is served", "give other --plans, --backends or --shapes")


def choice_of(case: Case, causal: bool, dtype: str, world_size: int, selector: Selector) -> Planned:
    """Backend and plan. Raises FaultError for a case that gets none."""
    shape = case.shape
    call = RoleCall(
        kind="self",
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        dtype=dtype,
        causal=causal,
        features=NO_FEATURES,
        skip=case.is_baseline,
    )
    return choose(
        call,
        world_size,
        case.parallel,
        lambda required: selector.select(ROLE, required, allow_trtllm_default=True),
    )


def refuse_if_nothing_is_served(
    cases: Iterable[Case], causal: bool, dtype: str, world_size: int, device: DeviceFacts, registry: Registry
) -> None:
    """Raises FaultError with every reason if no plan of any shape gets a backend on the driver's facts."""
    faults: list[Fault] = []
    for case in cases:
        if case.is_baseline:
            continue
        try:
            choice_of(case, causal, dtype, world_size, Selector(device, case.attention, registry))
        except FaultError as error:
            faults += error.faults
        else:
            return
    raise FaultError([*dict.fromkeys(faults), NOTHING])


def settle_choice(attention: AttentionConfig, rows: Iterable[Row], registry: Registry) -> AttentionConfig:
    """Replace the choice for the bench's role by the backend and version that every cell ran.

    Args:
        attention: The choice as composed.
        rows: The cells, baselines included.
        registry: The backends of the bench.

    Returns:
        The choice that gives this backend or is refused; the same choice if cells differ or have not run yet.
    """
    rows = tuple(rows)
    ran = {(row.checked.backend, row.checked.variant) for row in rows if row.checked is not None}
    if len(ran) != 1 or any(row.outcome == "pending" and row.checked is None for row in rows):
        return attention
    backend, variant = ran.pop()
    explicit = resolve_entry(ROLE, ROLE, attention).explicit
    spec = explicit if explicit is not None and explicit.backend == backend else AttentionSpec(backend)
    return replace(attention, default=None, per_role={ROLE: pinned(spec, variant, registry)})
