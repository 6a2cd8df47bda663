"""Calls of layers outside a model's own forward: the ranks agree on the first call with each plan, and every later call
with it has to match that agreement.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch

from backends.interface import AttentionMetadata
from configs.faults import FaultError
from parallel.agreement import CallFacts, Carried, RankDisagreementError, agree, streams_text
from parallel.calls import CallRules, records_gradient
from parallel.mesh import Mesh
from parallel.plan import ShardPlan
from parallel.transport.errors import ExchangeError
from parallel.transport.packing import QueryKeyValue

PLANS_KEPT = 256
"""Of those that were agreed on; who calls with an older one agrees again, on all ranks alike."""


@dataclass(frozen=True)
class _Agreed:
    """What all ranks have alike of a call, beside the rows that the plan gives each.

    layer: `CallRules.told` of the layer. device: type of the device. gradient, lse: whether the call records gradients
    and returns log-sum-exps, since the exchanges differ. carried: what it carries beside Q, K and V.
    """

    layer: str
    batch: int
    dtype: torch.dtype
    device: str
    gradient: bool
    lse: bool
    carried: Carried

    @classmethod
    def of(cls, rules: CallRules, qkv: QueryKeyValue, metadata: AttentionMetadata, *, lse: bool) -> _Agreed:
        query = qkv[0]
        return cls(
            layer=rules.told,
            batch=query.shape[0],
            dtype=query.dtype,
            device=query.device.type,
            gradient=records_gradient(*qkv, metadata),
            lse=lse,
            carried=Carried.of(metadata),
        )

    @property
    def tensors(self) -> str:
        beside = " with gradients" * self.gradient + " with log-sum-exps" * self.lse
        return f"batch {self.batch} of {self.dtype} on {self.device}{beside}"

    @property
    def beside(self) -> str:
        """What the call carries and asks for beside Q, K and V."""
        return str(self.carried) + ", with gradients" * self.gradient + ", with log-sum-exps" * self.lse

    def difference(self, agreed: _Agreed) -> str:
        """Returns the first difference of this call from the agreement on its plan, and the way out."""
        if self.layer != agreed.layer:
            return (
                f"the ranks agreed on its plan for a layer that is {agreed.layer}; this one is {self.layer}; make a "
                "plan with the plan_of of this layer, on every rank"
            )
        if self.carried != agreed.carried:
            return (
                f"the call carries {self.carried}, and the ranks agreed on {agreed.carried} for its plan; make another "
                "with plan_of, on every rank"
            )
        difference = f"the call is of {self.tensors}, and the ranks agreed on {agreed.tensors} for its plan; "
        if replace(self, gradient=agreed.gradient) != agreed:
            return difference + "make another with plan_of, on every rank"
        return (
            difference + "use one plan with gradients and another without, and torch.utils.checkpoint with "
            "use_reentrant=False"
        )


class Admissions:
    """Lets calls pass, or refuses them before their exchange. Plans are known as the objects that `Attention.plan_of`
    gives out: a new one is agreed on anew. count: of those that were agreed on.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.count = 0
        self._mesh = mesh
        self._agreed: dict[int, tuple[_Agreed, ShardPlan]] = {}  # the plan is kept, and so its id

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a copied layer makes its calls among those of the others

    def admit(
        self,
        rules: CallRules,
        qkv: QueryKeyValue,
        metadata: AttentionMetadata,
        plan: ShardPlan | None,
        *,
        lse: bool,
        announced: Carried | None = None,
    ) -> None:
        """Agree on the first call with a plan, by one exchange over the control group; compare later ones with that
        agreement, on this rank alone.

        Calls of local layers and of a forward that was agreed on need no agreement of their own.

        Args:
            rules: Of the layer.
            qkv: Query, key and value.
            metadata: What the call carries beside them.
            plan: Of the call, or None.
            lse: Whether the call returns the log-sum-exp.
            announced: What `Forwards.plan_for` checked for this call; None outside a forward.

        Raises:
            ValueError, FaultError: As `CallRules.check`, and for a call that differs from the agreement on its plan or
                from what was announced.
            RankDisagreementError: On every rank, if ranks are about to make different calls, or some refuse theirs.
        """
        if rules.way.strategy == "local":
            rules.check(*qkv, metadata, plan, lse=lse)
            return
        if isinstance(plan, ShardPlan) and plan.agreed:
            rules.check(*qkv, metadata, plan, lse=lse)
            if announced is not None:
                _check_announced(rules, Carried.of(metadata), announced, lse=lse)
            return
        settled = None if plan is None else self._agreed.get(id(plan))
        if settled is None:
            self._agree(rules, qkv, metadata, plan, lse)
            return
        rules.check(*qkv, metadata, plan, lse=lse)
        call = _Agreed.of(rules, qkv, metadata, lse=lse)
        if call != settled[0]:
            raise ValueError(f"{rules.name}: {call.difference(settled[0])}")

    def _agree(
        self, rules: CallRules, qkv: QueryKeyValue, metadata: AttentionMetadata, plan: ShardPlan | None, lse: bool
    ) -> None:
        fault: FaultError | TypeError | ValueError | None = None
        call: _Agreed | None = None
        try:
            rules.check(*qkv, metadata, plan, lse=lse)
            call = _Agreed.of(rules, qkv, metadata, lse=lse)
        except (FaultError, TypeError, ValueError) as error:
            fault = error  # the other ranks raise too, instead of waiting for this one
        facts = CallFacts(
            number=self.count + 1,
            layer=f"{rules.name} ({rules.told})",
            plan=_plan_text(plan) if isinstance(plan, ShardPlan) else "none",
            batch=call.batch if call else 0,
            dtype=str(call.dtype).removeprefix("torch.") if call else "",
            device=call.device if call else "",
            carried=call.beside if call else "",
            fault=str(fault or ""),
        )
        try:
            agree(facts, self._mesh)
        except RankDisagreementError:
            if fault is None:
                raise
        except ExchangeError as error:
            if fault is not None:
                raise fault from error  # the other ranks may be in the exchange that this rank refuses
            error.layer = rules.name
            raise
        if fault is not None:
            raise fault
        if plan is None or call is None:
            return  # either is a fault
        self.count += 1
        if len(self._agreed) >= PLANS_KEPT:
            self._agreed.pop(next(iter(self._agreed)))
        self._agreed[id(plan)] = call, plan


def _check_announced(rules: CallRules, carried: Carried, announced: Carried, *, lse: bool) -> None:
    """Raises ValueError for a call of an agreed forward whose exchange or answer would differ from the agreement."""
    if carried != announced:
        raise ValueError(
            f"{rules.name}: the call carries {carried}, and plan_for was given {announced}; give both the same metadata"
        )
    if lse != rules.call.lse:
        raise ValueError(
            f"{rules.name}: the call {'returns' if lse else 'does not return'} log-sum-exps, and the layer was "
            f"constructed with lse={rules.call.lse}; ranks of a forward call it as it was constructed"
        )


def _plan_text(plan: ShardPlan) -> str:
    exchange = "" if plan.exchange == "same" else f" in {plan.exchange}"
    pieces = ", early and late pieces" if plan.zigzag else ""
    heads = f"{plan.num_heads}/{plan.heads.num_kv_heads} heads"
    return f"{streams_text(plan.streams)}; {heads} by {plan.strategy} {plan.grid}{exchange}{pieces}"
