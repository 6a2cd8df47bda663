"""Wan 2.1 and 2.2 (diffusers' WanTransformer3DModel): video self-attention, text cross-attention, image
cross-attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from backends.calibration import read_calibration
from configs.faults import Fault, FaultError
from parallel.models.facts import ModelFacts, RoleFacts

if TYPE_CHECKING:
    from parallel.context import AttentionContext
    from parallel.models.sharding import ShardedModel

SELF = "self"
CROSS = "cross"
CROSS_IMAGE = "cross.image"


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """Roles, heads and patch of a WanTransformer3DModel from its config.json. Raises FaultError for fields that are
    missing.
    """
    try:
        heads, head_size = int(config["num_attention_heads"]), int(config["attention_head_dim"])
        layers = int(config["num_layers"])
        frames, rows, columns = (int(size) for size in config["patch_size"])
        axis_limit = int(config.get("rope_max_seq_len", 1024))
        if min(heads, head_size, layers, frames, rows, columns) < 1:
            raise ValueError("a size below 1")
        parameters = count_parameters(config)
    except (KeyError, TypeError, ValueError) as error:
        rule = f"the transformer's config.json cannot be read: {error!r}"
        raise FaultError([Fault("model.path", None, rule, "give a folder that diffusers saved")]) from error
    names = [(SELF, "self"), (CROSS, "cross")]
    if config.get("added_kv_proj_dim") is not None:  # image-to-video 2.1: keys of the first frame's CLIP embedding
        names.append((CROSS_IMAGE, "cross"))
    roles = tuple(
        # No call carries a mask or packed text: kernels that cannot take them serve it.
        RoleFacts(role, "self" if kind == "self" else "cross", kind, layers, heads, heads, head_size, True)
        for role, kind in names
    )
    calibration = read_calibration(config)
    return ModelFacts(roles, heads, (frames, rows, columns), axis_limit, calibration=calibration, parameters=parameters)


def count_parameters(config: Mapping[str, Any]) -> int:
    """Count the parameters of a WanTransformer3DModel.

    Args:
        config: its config.json; a field that is missing has diffusers' default.

    Raises:
        KeyError, TypeError, ValueError: for heads, layers or a patch that are missing, and sizes that are not numbers.
    """

    def size(name: str, default: int = 0) -> int:
        value = config.get(name)
        return default if value is None else int(value)

    def linear(inputs: int, outputs: int) -> int:
        return inputs * outputs + outputs

    width = int(config["num_attention_heads"]) * int(config["attention_head_dim"])
    patch = math.prod(int(length) for length in config["patch_size"])
    channels, feed_forward = size("in_channels", 16), size("ffn_dim", 13824)
    image, added = size("image_dim"), size("added_kv_proj_dim")

    attention = 4 * linear(width, width) + 2 * width  # Q, K, V, output; the norms of Q and K
    block = 2 * attention + linear(width, feed_forward) + linear(feed_forward, width) + 6 * width
    block += 2 * width if config.get("cross_attn_norm", True) else 0
    block += 2 * linear(added, width) + width if added else 0

    embedders = linear(channels * patch, width)
    embedders += linear(size("freq_dim", 256), width) + linear(width, width) + linear(width, 6 * width)
    embedders += linear(size("text_dim", 4096), width) + linear(width, width)
    if image:
        embedders += 2 * image + linear(image, image) + linear(image, width) + 2 * width
        embedders += size("pos_embed_seq_len") * image
    output = linear(width, size("out_channels", channels) * patch) + 2 * width
    return embedders + int(config["num_layers"]) * block + output


def wire(model: Any, context: AttentionContext, name: str) -> ShardedModel:
    """Put this runtime's attention into a loaded WanTransformer3DModel and shard its sequence over the mesh.

    The model keeps its own forward: it takes and returns whole latents on every rank, and each rank computes its
    rows. name: of the model in reports (`transformer`, `transformer_2`). Raises FaultError if no backend serves a role.
    """
    from parallel.attention import Attention
    from parallel.models.sharding import ShardedModel
    from parallel.models.wan_processor import WanAttentionProcessor

    facts = describe(model.config)
    sharded = ShardedModel(name, model, facts, context)

    def layer(role: RoleFacts, path: str) -> Attention:
        return Attention(
            role.heads,
            role.head_size,
            role=role.role,
            kind=role.kind,
            role_category=role.category,
            allow_trtllm_default=role.allow_trtllm_default,
            context=context,
            name=path,
            model=name,
        )

    by_role = {role.role: role for role in facts.roles}
    processors = {}
    for index in range(len(model.blocks)):
        self_path, cross_path = f"blocks.{index}.attn1", f"blocks.{index}.attn2"
        image = layer(by_role[CROSS_IMAGE], f"{cross_path}.image") if CROSS_IMAGE in by_role else None
        own, text = layer(by_role[SELF], self_path), layer(by_role[CROSS], cross_path)
        processors[f"{self_path}.processor"] = WanAttentionProcessor(own, sharded)
        processors[f"{cross_path}.processor"] = WanAttentionProcessor(text, sharded, image)
    # After all layers, so that a role that nothing serves leaves the model untouched.
    sharded.install(processors)
    return sharded
