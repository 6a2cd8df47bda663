"""How much memory a rank needs for weights and for one attention call, before anything is loaded. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from parallel.models.facts import ModelFacts
from parallel.plan import ShardPlan, Stream, plan_streams
from runtime.check import RoleSelection
from runtime.model_folder import FolderFacts
from runtime.requests import Request

ELEMENT_SIZES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
NOT_COUNTED = "text and image encoders, VAE, feed-forward activations, workspaces of kernels and NCCL"
GIB = 2**30


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the busiest rank.

    weights: parameters of all transformers, each rank holding all of them.
    attention: Q, K, V and output of the largest self-attention call, with its send and receive buffers.
    """

    weights: int
    attention: int

    def __str__(self) -> str:
        weights, attention = _shown(self.weights), _shown(self.attention)
        return f"each rank needs about {weights} for weights and {attention} for an attention call (estimate)"


def estimate_memory(
    folder: FolderFacts, selected: Iterable[RoleSelection], request: Request, dtype: str
) -> MemoryEstimate | None:
    """Estimate a rank's memory; None if the number of parameters is unknown.

    Args:
        folder: the models.
        selected: what the models' roles get; only self-attention moves rows between ranks.
        request: its frames, height and width set the sequence length.
        dtype: of weights and activations.
    """
    weights = weight_bytes(folder.models.values(), dtype)
    if weights is None:
        return None
    latent = (
        (request.frames - 1) // folder.temporal + 1,
        request.height // folder.spatial,
        request.width // folder.spatial,
    )
    roles = {(name, role.role): role for name, facts in folder.models.items() for role in facts.roles}
    calls = [0]
    for entry in selected:
        role = roles[entry.model, entry.selection.role]
        if role.kind == "self":
            video = Stream("video", folder.models[entry.model].tokens(latent))
            plan = plan_streams((video,), role.heads, entry.way.grid, entry.way.strategy, kv_heads=role.kv_heads)
            calls.append(attention_bytes(plan, role.head_size, ELEMENT_SIZES[dtype]))
    return MemoryEstimate(weights, max(calls))


def weight_bytes(models: Iterable[ModelFacts], dtype: str) -> int | None:
    """The bytes of all models' parameters in `dtype`; None if one of their numbers is unknown."""
    total = 0
    for facts in models:
        if facts.parameters is None:
            return None
        total += facts.parameters * ELEMENT_SIZES[dtype]
    return total


def attention_bytes(plan: ShardPlan, head_size: int, element_size: int) -> int:
    """The bytes of one attention call at batch 1 on the rank that needs most.

    Counts the rank's own rows of Q, K, V and output, the buffers of both all-to-alls of a Ulysses group, and the keys
    and values that come from other ring places: two blocks under a ring, those of all places if they are gathered.
    """
    return max(_row_head_pairs(plan, rank) for rank in range(plan.world_size)) * head_size * element_size


def _row_head_pairs(plan: ShardPlan, rank: int) -> int:
    share, place = plan.shares[rank], plan.grid.place(rank)[1]
    pairs = 2 * (len(share.query_rows) * plan.num_heads + len(share.key_rows) * plan.heads.num_kv_heads)
    if plan.grid.ulysses > 1:
        for counts in (plan.scatter_heads(rank), plan.gather_heads(rank)):
            pairs += sum(counts.sends) + sum(counts.receives)
    if plan.grid.ring > 1:
        blocks = [len(plan.shares[other].keys) for other in plan.grid.ring_group(rank)]
        rows = sum(blocks) if plan.strategy in ("gather_kv", "ulysses_gather_kv") else 2 * max(blocks)
        pairs += 2 * rows * len(plan.heads.kv[place])
    return pairs


def _shown(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
