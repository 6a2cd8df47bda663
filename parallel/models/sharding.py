"""Sequence sharding of a diffusers transformer, read off its `_cp_plan`.

diffusers says there which inputs a context-parallel run splits and where it gathers; its own splitter wants lengths
that the ranks divide. The hooks here take the same places and any length.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from backends.selection import Selection
from configs.faults import Fault, FaultError
from parallel.attention import Attention
from parallel.context import AttentionContext
from parallel.events import Traffic
from parallel.forwards import Forwards
from parallel.models.autocast import autocast_dtype
from parallel.models.facts import ModelFacts
from parallel.opaque import outside_graphs
from parallel.pieces import take
from parallel.plan import ShardPlan, Strategy, Stream
from parallel.traffic import call_traffic

Args = tuple[Any, ...]
Checkpoint = Callable[..., Any]
Kwargs = dict[str, Any]


class Processor(Protocol):
    """An attention processor of a wired model."""

    @property
    def layers(self) -> tuple[Attention, ...]:
        """Its layers, in the order in which it calls them."""


class ShardedModel:
    """A transformer whose forward runs on this rank's rows of the sequence.

    forwards: agrees on each, and issues its plans. image_tokens: how many image keys stand before the text keys.
    rows: how many rows this rank had in the last forward.
    """

    def __init__(self, name: str, model: torch.nn.Module, facts: ModelFacts, context: AttentionContext) -> None:
        self.name = name
        self.model = model
        self.facts = facts
        self.context = context
        self.image_tokens = 0
        self.rows = 0
        self.forwards: Forwards  # once the layers are in place
        self.forwards_of_request = 0
        self._planned_calls: Counter[str] = Counter()
        self._planned_bytes: Counter[str] = Counter()
        self._own_processors = {_uncompiled(name): each for name, each in model.attn_processors.items()}  # type: ignore[operator, union-attr]
        self._hooks: list[RemovableHandle] = []
        self._checkpoint: Checkpoint | None = None
        self._begun_in_graph = False
        self._processors: Mapping[str, Processor] = {}
        self._wired: list[tuple[str, Any, Processor]] = []

    def install(self, processors: Mapping[str, Processor]) -> None:
        """Put the attention processors in, and register the hooks; if anything fails, the model stays as it was.

        Args:
            processors: One for each name of the model's `attn_processors`, in the order of a forward's calls.

        Raises:
            FaultError: For a model without a `_cp_plan`, and for layers that want the same rows at different places.
        """
        plan = getattr(self.model, "_cp_plan", None)
        if not plan:
            rule = "it has no _cp_plan, where diffusers says which tensors a sequence is split into"
            remedy = "use the class of the diffusers that Raylysses asks for, without changes"
            raise FaultError([Fault("model", type(self.model).__name__, rule, remedy)])
        self._processors = dict(processors)
        with ExitStack() as undo:
            undo.callback(self.remove)
            modules = {_uncompiled(name): module for name, module in self.model.named_modules()}
            self._wired = [
                (name, modules[name.removesuffix(".processor")], processor) for name, processor in processors.items()
            ]
            set_processors(self.model, processors)
            self.forwards = Forwards(self.name, self.attention_layers(), self.context.mesh)
            self._register_hooks(plan)
            undo.pop_all()

    def _register_hooks(self, plan: Mapping[str, Any]) -> None:
        hooks = self._hooks
        hooks.append(self.model.register_forward_pre_hook(self._begin, with_kwargs=True))
        hooks.append(self.model.register_forward_hook(self._end, always_call=True))
        embedder = getattr(self.model, "condition_embedder", None)
        if embedder is not None:
            hooks.append(embedder.register_forward_hook(self._note_image_tokens))
        for path, entry in plan.items():
            module: Any = self.model.get_submodule(path)
            module = getattr(module, "_orig_mod", module)  # of what torch.compile returned
            if hasattr(entry, "gather_dim"):
                hooks.append(module.register_forward_hook(self._gather_hook(entry)))
                continue
            inputs = {key: spec for key, spec in entry.items() if not spec.split_output}
            outputs = {key: spec for key, spec in entry.items() if spec.split_output}
            if inputs:
                # Of the model's own inputs (timesteps of each token) a rank without rows keeps one: the library cannot
                # reshape none, and one broadcasts over no rows.
                least = 0 if path else 1
                shard_inputs = self._input_hook(module, inputs, least)
                hooks.append(module.register_forward_pre_hook(shard_inputs, with_kwargs=True))
            if outputs:
                hooks.append(module.register_forward_hook(self._output_hook(outputs)))

    def remove(self) -> None:
        """Give the model back as it was: its own attention processors, and no hooks. It may be called twice."""
        while self._hooks:
            self._hooks.pop().remove()
        self._restore_checkpoint()
        if self._wired:
            self._wired = []
            set_processors(self.model, self._own_processors)
            if getattr(self.model, "_parallel_config", None) is not None:
                self.model._parallel_config = None  # type: ignore[assignment]  # what a refused enable_parallelism() left

    def take_planned(self) -> tuple[Traffic, int]:
        """The collectives that the plans of all forwards since the last call foresaw, and the number of those
        forwards.
        """
        traffic = Traffic(dict(self._planned_calls), dict(self._planned_bytes))
        forwards, self.forwards_of_request = self.forwards_of_request, 0
        self._planned_calls.clear()
        self._planned_bytes.clear()
        return traffic, forwards

    def selections(self) -> tuple[tuple[str, Selection, Strategy, int], ...]:
        """(model, selection, strategy, layers) of every role, as resolved on this rank."""
        counted = Counter((layer.selection, layer.strategy) for layer in self.attention_layers())
        return tuple((self.name, selection, strategy, layers) for (selection, strategy), layers in counted.items())

    def attention_layers(self) -> list[Attention]:
        """The layers, in the order of a forward's calls."""
        return [layer for each in self._processors.values() for layer in each.layers]

    def _check_wiring(self) -> None:
        """Raises FaultError if an attention processor was replaced since the model was wired."""
        for name, module, processor in self._wired:
            if module.processor is not processor:
                rule = f"{name} was replaced by a {type(module.processor).__name__} while the sequence is shared"
                remedy = "call close(), change the processors, and call sequence_parallel again"
                raise FaultError([Fault("model", self.name, rule, remedy)])

    def _check_dtype(self, dtype: torch.dtype) -> None:
        """Raises FaultError if autocast gives the layers another dtype than the one they were chosen for."""
        chosen = self.context.dtype
        if str(dtype) != f"torch.{chosen}":
            rule = f"the layers are for {chosen}, and torch.autocast gives them {dtype}"
            remedy = f"pass dtype={dtype} to sequence_parallel, or call it under the same torch.autocast"
            raise FaultError([Fault("dtype", chosen, rule, remedy)])

    def plan_for(self, layer: Attention, query: torch.Tensor) -> ShardPlan | None:
        """The plan of a layer's call, as `Forwards.plan_for` issues it; None on one rank, where calls need none.

        Args:
            layer: The layer, right before its call.
            query: Of the call, [B, S, H, D].

        Raises:
            LayerOrderError: If it is another layer's turn.
            ValueError: If the call differs from what the ranks agreed on.
            RuntimeError: Outside the model's forward.
        """
        return None if self.context.mesh.world_size == 1 else self.forwards.plan_for(layer, query=query)

    def _begin(self, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> None:
        if self.context.mesh.world_size == 1 and torch.compiler.is_compiling():
            self._begun_in_graph = True  # nothing to agree on, and counters would compile the forward anew
        else:
            self._begin_outside(module, args, kwargs)

    def _is_in_graph(self) -> bool:
        """Whether a forward on one rank is part of a graph, or this part of it is; then nothing is sharded or checked.

        Parts that a graph cannot hold, such as checkpointed blocks, run without it.
        """
        return self.context.mesh.world_size == 1 and (torch.compiler.is_compiling() or self._begun_in_graph)

    @outside_graphs
    def _begin_outside(self, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> None:
        self._begun_in_graph = False
        self._restore_checkpoint()
        self._check_wiring()
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
        latent: torch.Tensor = bound.arguments["hidden_states"]
        batch = latent.shape[0]
        frames, rows, columns = latent.shape[-3:]
        length = self.facts.tokens((frames, rows, columns))
        mesh = self.context.mesh
        autocast = autocast_dtype(latent.device.type)
        dtype = latent.dtype if autocast is None or latent.dtype == torch.float64 else autocast
        self.forwards_of_request += 1
        learning = latent.requires_grad or any(parameter.requires_grad for parameter in self.model.parameters())
        self.forwards.begin(
            Stream("video", length),
            batch=batch,
            dtype=dtype,
            beside=_encoder_streams(bound.arguments),
            gradient=torch.is_grad_enabled() and learning,
        )
        if autocast is not None:  # after the ranks agreed on it, so that all of them refuse it
            self._check_dtype(dtype)
        plan = self._current_plan()
        self.rows = len(plan.rows[mesh.rank])
        if mesh.world_size > 1:
            self._count_planned(plan, batch, dtype.itemsize)
        if torch.is_grad_enabled() and getattr(self.model, "gradient_checkpointing", False):
            self._checkpoint = self.model._gradient_checkpointing_func  # type: ignore[assignment]
            self.model._gradient_checkpointing_func = self._with_plans(self._checkpoint)  # type: ignore[arg-type, assignment]

    def _with_plans(self, checkpoint: Checkpoint) -> Checkpoint:
        """A block that is computed again in the backward pass takes the plans of its forward, which is over by then."""
        issued = self.forwards.issued

        def run(block: Callable[..., Any], *args: Any) -> Any:
            def planned(*given: Any) -> Any:
                if self.forwards.is_under_way(issued):
                    return block(*given)
                with self.forwards.again(issued):
                    return block(*given)

            return checkpoint(planned, *args)

        return run

    def _count_planned(self, plan: ShardPlan, batch: int, element_size: int) -> None:
        rank = self.context.mesh.rank
        for shape, count in self.forwards.sharded.items():
            of_call = call_traffic(
                self.forwards.plans[shape],
                rank,
                batch=batch,
                head_size=shape.head_size,
                value_head_size=shape.value_head_size,
                element_size=element_size,
            )
            for verb, calls in of_call.calls.items():
                self._planned_calls[verb] += count * calls
                self._planned_bytes[verb] += count * of_call.bytes_sent[verb]
        width = self.model.proj_out.out_features  # type: ignore[union-attr]
        self._planned_calls["gather_rows"] += 1
        self._planned_bytes["gather_rows"] += plan.sent_rows(rank) * batch * int(width) * element_size  # type: ignore[arg-type]

    def _end(self, module: torch.nn.Module, args: Args, output: Any) -> None:
        if self._is_in_graph():
            self._begun_in_graph = False
        else:
            self._end_outside()

    @outside_graphs
    def _end_outside(self) -> None:
        self.forwards.end()
        self._restore_checkpoint()

    def _restore_checkpoint(self) -> None:
        # torch runs _end after exceptions, but not after a KeyboardInterrupt.
        if self._checkpoint is not None:
            self.model._gradient_checkpointing_func = self._checkpoint  # type: ignore[assignment]
            self._checkpoint = None

    def _note_image_tokens(self, module: torch.nn.Module, args: Args, output: tuple[Any, ...]) -> None:
        image = output[3]
        self.image_tokens = 0 if image is None else int(image.shape[1])

    def _input_hook(
        self, module: torch.nn.Module, specs: Mapping[str, Any], least: int
    ) -> Callable[..., tuple[Args, Kwargs]]:
        positions = {name: index for index, name in enumerate(inspect.signature(module.forward).parameters)}

        @outside_graphs
        def shard(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
            positional = list(args)
            for name, spec in specs.items():
                if name in kwargs:
                    kwargs = {**kwargs, name: self._shard(kwargs[name], spec, least)}
                elif positions[name] < len(positional):
                    positional[positions[name]] = self._shard(positional[positions[name]], spec, least)
            return tuple(positional), kwargs

        def shard_inputs(_: torch.nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
            return (args, kwargs) if self._is_in_graph() else shard(args, kwargs)

        return shard_inputs

    def _output_hook(self, specs: Mapping[int, Any]) -> Callable[..., Any]:
        @outside_graphs
        def shard(output: Any) -> Any:
            if isinstance(output, torch.Tensor):
                return self._shard(output, specs[0])
            return tuple(self._shard(item, specs[i]) if i in specs else item for i, item in enumerate(output))

        def shard_outputs(_: torch.nn.Module, args: Args, output: Any) -> Any:
            return output if self._is_in_graph() else shard(output)

        return shard_outputs

    def _gather_hook(self, spec: Any) -> Callable[..., Any]:
        @outside_graphs
        def gather(output: torch.Tensor) -> torch.Tensor:
            self.forwards.finish()
            return self.context.transport.gather_rows(output, self._current_plan())

        def gather_output(_: torch.nn.Module, args: Args, output: torch.Tensor) -> torch.Tensor:
            return output if self.context.mesh.world_size == 1 else gather(output)

        if spec.gather_dim != 1 or spec.expected_dims != 3:
            raise ValueError(f"{self.name}: an output that is gathered is [B, S, C]; the model's plan says {spec}")
        return gather_output

    def _shard(self, tensor: Any, spec: Any, least: int = 0) -> Any:
        """This rank's rows of a tensor, or `least` rows if it has fewer. A tensor with another number of dimensions has
        no sequence and stays as it is.
        """
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != spec.expected_dims:
            return tensor
        plan = self._current_plan()
        if tensor.shape[spec.split_dim] != plan.length:
            raise ValueError(f"{self.name}: a tensor {tuple(tensor.shape)} is to be split into {plan.length} rows")
        held = plan.rows[self.context.mesh.rank]
        if len(held) < least:
            return tensor.narrow(spec.split_dim, plan.length - least, least)
        return take(tensor, held, dim=spec.split_dim)

    def _current_plan(self) -> ShardPlan:
        plan = self.forwards.plan
        if plan is None:
            raise RuntimeError(f"{self.name}: its blocks were called outside the model's own forward")
        return plan


def set_processors(model: Any, processors: Mapping[str, Any]) -> None:
    """Set attention processors by the names that they have where no part of the model is compiled.

    Args:
        model: A diffusers transformer; its blocks may be results of `torch.compile`.
        processors: By the path of the processor, such as `blocks.0.attn1.processor`.
    """
    names = {_uncompiled(name): name for name in model.attn_processors}
    model.set_attn_processor({names[name]: each for name, each in processors.items()})


def _uncompiled(name: str) -> str:
    """torch.compile wraps a block in a module, which has the block under this name."""
    return name.replace("_orig_mod.", "")


def _encoder_streams(arguments: Mapping[str, Any]) -> list[Stream]:
    """What cross-attention reads; every rank has all of it."""
    names = {"text": "encoder_hidden_states", "image": "encoder_hidden_states_image"}
    given = {short: arguments.get(name) for short, name in names.items()}
    return [Stream(short, int(t.shape[1]), sharded=False) for short, t in given.items() if isinstance(t, torch.Tensor)]
