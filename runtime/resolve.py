"""What one rank's roles get on its own facts, before a model is loaded."""

from __future__ import annotations

from backends.platforms.facts import DeviceFacts
from backends.probe import import_faults
from backends.registry import Registry
from backends.selection import Candidates, RoleKey
from backends.selector import Selector
from parallel.planner import plan_role
from runtime.model_folder import read_folder
from runtime.setup import RankSpec, Row, Wired


def resolved_roles(spec: RankSpec, device: DeviceFacts, registry: Registry) -> Wired:
    """The selections of the model folder's roles, and the candidates of those on which ranks may settle. Raises
    FaultError for a role that nothing serves here.
    """
    config = spec.config.attention
    selector = Selector(device, config, registry, probe=import_faults)
    rows: list[Row] = []
    candidates: dict[RoleKey, Candidates] = {}
    for model, facts in read_folder(spec.config.model.path, weights=False).models.items():
        for role in facts.roles:
            planned = plan_role(role, spec.dtype, spec.world_size, spec.config.parallel, selector)
            rows.append((model, planned.selection, planned.way.strategy, role.layers))
            required, allowed = planned.selection.requirements, role.allow_trtllm_default
            found = selector.candidates(role.role, required, category=role.category, allow_trtllm_default=allowed)
            if found is not None:
                candidates[role.role, required] = found
    return Wired(tuple(rows), device, candidates)
