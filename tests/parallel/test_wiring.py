"""Wiring a model is all or nothing, and a wired model notices what would undo it without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from configs.faults import FaultError
from parallel.models import wan
from parallel.models.sharding import ShardedModel
from tests.exact import relative_error
from tests.parallel.layers import ONE_RANK, context_of
from tests.parallel.library_ranks import hook_count, model, output


def wire(transformer: Any) -> ShardedModel:
    return wan.wire(transformer, context_of(ONE_RANK, backend="REFERENCE"), "transformer")


def state(transformer: Any) -> tuple[Any, ...]:
    """What wiring changes."""
    processors = {name: id(each) for name, each in transformer.attn_processors.items()}
    return processors, hook_count(transformer), id(getattr(transformer, "_gradient_checkpointing_func", None))


class Interrupting:
    """Makes the n-th call of a method raise KeyboardInterrupt. left: calls until then."""

    def __init__(self, owner: type, name: str, number: int, patch: pytest.MonkeyPatch) -> None:
        self.left = number
        original = getattr(owner, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        patch.setattr(owner, name, method)


@pytest.mark.parametrize("method", ["register_forward_pre_hook", "register_forward_hook", "set_processor"])
def test_an_interrupt_at_any_step_leaves_the_model_as_it_was(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = model()
    owner = type(transformer.blocks[0].attn1) if method == "set_processor" else torch.nn.Module
    before = state(transformer)
    for number in range(1, 20):
        with monkeypatch.context() as patch:
            call = Interrupting(owner, method, number, patch)
            try:
                sharded = wire(transformer)
            except KeyboardInterrupt:
                assert call.left <= 0
                assert state(transformer) == before
                continue
        sharded.remove()
        break
    assert number > 2  # some steps were interrupted, and the wiring with more steps than there are was not
    assert state(transformer) == before


def test_a_model_without_a_plan_of_its_tensors_is_refused_and_untouched() -> None:
    transformer = model()
    transformer._cp_plan = None
    before = state(transformer)
    with pytest.raises(FaultError, match="model=WanTransformer3DModel: it has no _cp_plan"):
        wire(transformer)
    assert state(transformer) == before


def test_an_interrupted_forward_leaves_the_checkpointing_function_as_it_was_once_closed() -> None:
    transformer = model().train()
    transformer.enable_gradient_checkpointing()
    before = state(transformer)
    sharded = wire(transformer)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = transformer.blocks[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        output(transformer)
    handle.remove()
    output(transformer)  # the next forward wraps the model's own function, not the wrapper of the last one
    sharded.remove()
    assert state(transformer) == before


def test_processors_that_were_replaced_are_noticed_at_the_next_forward() -> None:
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    transformer = model()
    before = state(transformer)
    sharded = wire(transformer)
    transformer.blocks[1].attn2.set_processor(WanAttnProcessor())
    rule = "model=transformer: blocks.1.attn2.processor was replaced by a WanAttnProcessor while the sequence is shared"
    with pytest.raises(FaultError, match=rule):
        output(transformer)
    transformer.set_attn_processor(WanAttnProcessor())
    with pytest.raises(FaultError, match=r"blocks\.0\.attn1\.processor was replaced"):
        output(transformer)
    sharded.remove()
    assert state(transformer) == before


def test_choices_of_diffusers_that_nothing_would_use_are_refused_and_leave_no_trace() -> None:
    from diffusers import ContextParallelConfig

    transformer = model()
    expected = output(transformer)
    sharded = wire(transformer)
    with pytest.raises(FaultError, match=r"set_attention_backend=native: .*pass attention=\.\.\. to sequence_parallel"):
        transformer.set_attention_backend("native")
    with pytest.raises(FaultError, match=r"enable_parallelism: .*shared already; pass ulysses="):
        transformer.blocks[0].attn1.processor._parallel_config = ContextParallelConfig(ulysses_degree=2)
    transformer.reset_attention_backend()
    assert relative_error(output(transformer), expected) <= 1e-5
    sharded.remove()
    transformer.set_attention_backend("native")
    assert relative_error(output(transformer), expected) <= 1e-5


@pytest.mark.parametrize("fuse_first", [True, False])
def test_fused_projections_are_used_whenever_they_were_fused(fuse_first: bool) -> None:
    transformer = model()
    expected = output(transformer)
    if fuse_first:
        transformer.fuse_qkv_projections()
    sharded = wire(transformer)
    if not fuse_first:
        transformer.fuse_qkv_projections()
    for block in transformer.blocks:  # what is fused is what diffusers computes with
        block.attn1.to_qkv.weight.data.mul_(2)
    doubled = output(transformer)
    assert relative_error(doubled, expected) > 1e-3
    sharded.remove()
    assert relative_error(output(transformer), doubled) <= 1e-5


def test_autocast_that_the_layers_are_not_for_is_refused_on_one_rank_too() -> None:
    transformer = model()
    sharded = wire(transformer)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(FaultError, match="dtype=float32"):
        output(transformer)
    assert torch.isfinite(output(transformer)).all()
    sharded.remove()
