"""What a cell of a bench gets: asked by the driver before it starts ranks, and by each rank of its own facts. No torch
here.
"""

from __future__ import annotations

from collections.abc import Iterable

from backends.platforms.facts import DeviceFacts
from backends.registry import Registry
from backends.requirements import NO_FEATURES
from backends.selector import Selector
from configs.faults import Fault, FaultError
from parallel.planner import Planned, RoleCall, choose
from runtime.bench.grid import ROLE, Case

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
