"""Which calls have to be refused: a statement of its own about the backends and the strategies."""

from __future__ import annotations

from tests.parallel.suite.drawn import Drawn


def refusal(case: Drawn, device_type: str) -> str | None:
    """Why nothing takes the call on devices of the type; None for one that has to run."""
    alone = case.world_size == 1 or case.kind == "cross"
    sees_a_part = case.kind == "cross" and case.world_size > 1
    ring, gather = (False, False) if alone else _between_groups(case)
    if (case.causal or case.window) and (case.queries != case.keys or sees_a_part):
        return "positions of queries and keys have no common origin"
    if case.mask == "block":
        if case.backend != "FLEX_ATTENTION":
            return "a block mask is FLEX_ATTENTION's"
        if ring or gather or sees_a_part:
            return "a block mask has all rows"
    if case.backend == "TORCH_SDPA":
        return _refused_by_sdpa(case, ring, gather)
    if case.backend == "FLEX_ATTENTION":
        return _refused_by_flex(case, ring, device_type)
    return None


def _between_groups(case: Drawn) -> tuple[bool, bool]:
    """Whether a ring or gathered keys are asked for; what is automatic comes without where no backend serves it."""
    if case.strategy == "gather_kv":
        return False, True
    return case.strategy == "ring" or (case.ring or 1) > 1, False


def _refused_by_sdpa(case: Drawn, ring: bool, gather: bool) -> str | None:
    if ring or case.lse:
        return "TORCH_SDPA has no log-sum-exp"
    if case.window and not gather:  # of gathered keys, a window is a mask
        return "TORCH_SDPA has no window"
    if case.soft_cap or case.sinks or case.documents:
        return "TORCH_SDPA has no soft cap, sinks and documents"
    return None


def _refused_by_flex(case: Drawn, ring: bool, device_type: str) -> str | None:
    if case.gradient and device_type == "cpu":
        return "FLEX_ATTENTION has no backward on a CPU"
    if case.bias != "none":
        return "FLEX_ATTENTION has no additive mask"
    if case.sinks and not ring:  # in a ring they are one part more of the merge
        return "FLEX_ATTENTION has no sinks"
    return None
