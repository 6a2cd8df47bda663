"""Calls of layers outside a model's own forward: the ranks agree on the first call with each plan, and its later calls
keep to what was agreed on then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from backends.interface import AttentionMetadata
from configs.faults import FaultError
from parallel.agreement import CallFacts, RankDisagreementError, agree, features_text, streams_text
from parallel.calls import CallRules, records_gradient
from parallel.mesh import Mesh
from parallel.plan import ShardPlan
from parallel.transport.errors import ExchangeError
from parallel.transport.packing import QueryKeyValue

PLANS_KEPT = 256
"""Of those that were agreed on; who calls with an older one agrees again, on all ranks alike."""


@dataclass(frozen=True)
class _Tensors:
    """What all ranks have alike of a call, beside the rows that the plan gives each. device: its type."""

    batch: int
    dtype: torch.dtype
    device: str
    gradient: bool
    lse: bool

    @classmethod
    def of(cls, qkv: QueryKeyValue, metadata: AttentionMetadata, *, lse: bool) -> _Tensors:
        query = qkv[0]
        return cls(query.shape[0], query.dtype, query.device.type, records_gradient(*qkv, metadata), lse)

    def __str__(self) -> str:
        beside = " with gradients" * self.gradient + " with log-sum-exps" * self.lse
        return f"batch {self.batch} of {self.dtype} on {self.device}{beside}"


class Admissions:
    """Lets calls pass, or refuses them before their exchange. Plans are known as the objects that `Attention.plan_of`
    gives out: a new one is agreed on anew. count: of those that were agreed on.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.count = 0
        self._mesh = mesh
        self._agreed: dict[int, tuple[_Tensors, ShardPlan]] = {}  # the plan is kept, and so its id

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a copied layer makes its calls among those of the others

    def admit(
        self, rules: CallRules, qkv: QueryKeyValue, metadata: AttentionMetadata, plan: ShardPlan | None, *, lse: bool
    ) -> None:
        """The first call with a plan is one exchange over the control group; others, and those of a forward that was
        agreed on, are looked at on this rank alone.

        Raises as `CallRules.check`; ValueError for another batch, dtype or device than was agreed on, and for gradients
        or log-sum-exps that were not; and
        RankDisagreementError, on every rank, if ranks are about to make different calls, or some refuse theirs.
        """
        if rules.way.strategy == "local" or (plan is not None and plan.agreed):
            rules.check(*qkv, metadata, plan, lse=lse)
            return
        settled = None if plan is None else self._agreed.get(id(plan))
        if settled is None:
            self._agree(rules, qkv, metadata, plan, lse)
            return
        rules.check(*qkv, metadata, plan, lse=lse)
        given = _Tensors.of(qkv, metadata, lse=lse)
        if given != settled[0]:
            raise ValueError(
                f"{rules.name}: the call is of {given}, and the ranks agreed on {settled[0]} for its plan; make "
                "another with plan_of, on every rank"
            )

    def _agree(
        self, rules: CallRules, qkv: QueryKeyValue, metadata: AttentionMetadata, plan: ShardPlan | None, lse: bool
    ) -> None:
        fault: FaultError | TypeError | ValueError | None = None
        given: _Tensors | None = None
        try:
            rules.check(*qkv, metadata, plan, lse=lse)
            given = _Tensors.of(qkv, metadata, lse=lse)
        except (FaultError, TypeError, ValueError) as error:
            fault = error  # the others are told before any of them waits for this rank
        facts = CallFacts(
            number=self.count + 1,
            layer=f"{rules.name} ({rules.told})",
            plan="none" if plan is None else _plan_text(plan),
            batch=given.batch if given else 0,
            dtype=str(given.dtype).removeprefix("torch.") if given else "",
            device=given.device if given else "",
            carried=_carried_text(metadata, given) if given else "",
            fault=str(fault or ""),
        )
        try:
            agree(facts, self._mesh)
        except RankDisagreementError:
            if fault is None:
                raise
        except ExchangeError as error:
            error.layer = rules.name
            raise
        if fault is not None:
            raise fault
        if plan is None or given is None:
            return  # either is a fault
        self.count += 1
        if len(self._agreed) >= PLANS_KEPT:
            self._agreed.pop(next(iter(self._agreed)))
        self._agreed[id(plan)] = given, plan


def _plan_text(plan: ShardPlan) -> str:
    exchange = "" if plan.exchange == "same" else f" in {plan.exchange}"
    pieces = ", early and late pieces" if plan.zigzag else ""
    heads = f"{plan.num_heads}/{plan.heads.num_kv_heads} heads"
    return f"{streams_text(plan.streams)}; {heads} by {plan.strategy} {plan.grid}{exchange}{pieces}"


def _carried_text(metadata: AttentionMetadata, given: _Tensors) -> str:
    """What a call carries beside Q, K and V; of tensors, that they are there."""
    beside = ["gradients"] * given.gradient + ["log-sum-exps"] * given.lse
    values = {"window": metadata.window, "soft_cap": metadata.soft_cap, "documents": metadata.packed}
    beside += [f"{name} {value}" for name, value in values.items() if value is not None]
    return features_text(metadata.features) + "".join(f", with {name}" for name in beside)
