"""Which strategy serves a role, and what its backend then sees. No torch here: the driver and `explain` use it too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from backends.requirements import NO_FEATURES, Features, Kind, Requirements
from backends.selection import RejectedStrategy, Selection
from backends.selector import Selector
from configs.faults import Fault, FaultError
from configs.schema import AUTO, ParallelConfig
from parallel.heads import split_heads
from parallel.models.facts import RoleFacts
from parallel.plan import ExchangeDtype, Grid, Strategy

ONE_RANK = Grid()
RINGS = ("ring", "ulysses_ring")


@dataclass(frozen=True)
class Way:
    """How the calls of a role go over the ranks. exchange: what carries Q, V and the output within a Ulysses group."""

    strategy: Strategy = "local"
    grid: Grid = ONE_RANK
    exchange: ExchangeDtype = "same"

    def __str__(self) -> str:
        return f"{self.strategy} {self.grid}" if self.grid.size > 1 else self.strategy


@dataclass(frozen=True)
class RoleCall:
    """What is known of a role's calls before there are any; heads of the whole layer. skip: on the rows at hand,
    whatever the mesh. lse, gradient, learned_gradient: whether they are asked for.
    """

    kind: Kind
    heads: int
    kv_heads: int
    head_size: int
    dtype: str
    causal: bool = False
    value_head_size: int | None = None
    features: Features = field(kw_only=True)
    lse: bool = False
    gradient: bool = False
    learned_gradient: bool = False
    skip: bool = False

    def required(self, way: Way) -> Requirements:
        """What one kernel call of the role asks for, with the heads of the busiest rank, so that all ranks ask alike.

        Between blocks of a ring the log-sum-exp weighs the parts, sinks are one part more, and a window is a mask; with
        gathered keys causality is one, too, since a kernel counts from its own first row.
        """
        mine = (self.heads, self.kv_heads)
        if way.grid.ulysses > 1:
            mine = split_heads(self.heads, self.kv_heads, way.grid.ulysses).largest
        value_size = None if self.value_head_size == self.head_size else self.value_head_size
        required = Requirements(self.head_size, *mine, self.dtype, self.kind, self.causal, value_head_size=value_size)
        required = required.carrying(self.features, gradient=self.gradient)
        required = replace(required, lse=self.lse, learned_gradient=self.learned_gradient)
        if way.grid.ring == 1:
            return required
        ring = way.strategy in RINGS
        by_row = required.window or (self.causal and not ring)
        return replace(
            required,
            causal=self.causal and ring,
            window=False,
            mask="full" if by_row and required.mask != "per_head" else required.mask,
            sinks=required.sinks and not ring,
            lse=required.lse or ring,
            learned_gradient=required.learned_gradient and (required.bias or not ring),
        )


@dataclass(frozen=True)
class Planned:
    """What a role gets. The selection has the strategies that were turned down, and why."""

    way: Way
    selection: Selection


def ways(call: RoleCall, world_size: int, config: ParallelConfig) -> Iterator[Way]:
    """The candidates in order, each with the exchange that is asked for. Raises FaultError for settings that do not fit
    the ranks or the role.

    Cross-attention keys are replicated: each rank's queries meet all of them without an exchange. `auto` takes Ulysses
    if the ranks divide the heads, then the largest Ulysses degree that does with a ring between its groups, then
    Ulysses with uneven shares of heads.
    """
    if world_size == 1:
        _asked_grid(1, config)
    if world_size == 1 or call.kind == "cross" or call.skip:
        yield Way("local", Grid())
        return
    exchange: ExchangeDtype = "fp8" if config.exchange_dtype == "fp8" else "same"
    for way in _sharded_ways(call, world_size, config):
        yield replace(way, exchange=exchange)


def _sharded_ways(call: RoleCall, world_size: int, config: ParallelConfig) -> Iterator[Way]:
    grid = _asked_grid(world_size, config)
    if config.strategy == "local":
        rule = f"{call.kind} attention reads the rows of all ranks, and each has its own alone"
        raise FaultError([Fault("parallel.strategy", "local", rule, "leave it on auto, or use one rank")])
    if grid is not None or config.strategy != AUTO:
        yield _asked_way(grid, world_size, config)
        return
    if call.heads % world_size:
        yield _mixed(call, world_size)
    yield Way("ulysses", Grid(world_size))


def _mixed(call: RoleCall, world_size: int) -> Way:
    """The largest proper Ulysses degree that divides the KV heads, else the heads; the ring has the rest."""
    degrees = [degree for degree in range(world_size - 1, 0, -1) if world_size % degree == 0]
    by_kv = next(degree for degree in degrees if call.kv_heads % degree == 0)
    degree = by_kv if by_kv > 1 else next(degree for degree in degrees if call.heads % degree == 0)
    return _way(Grid(degree, world_size // degree), gathers=False)


def _way(grid: Grid, *, gathers: bool) -> Way:
    if grid.ring == 1:
        return Way("ulysses", grid)
    if gathers:
        return Way("gather_kv" if grid.ulysses == 1 else "ulysses_gather_kv", grid)
    return Way("ring" if grid.ulysses == 1 else "ulysses_ring", grid)


def _asked_grid(world_size: int, config: ParallelConfig) -> Grid | None:
    """The grid of the degrees that are set; None if none is."""
    ulysses, ring = config.ulysses, config.ring
    if ulysses is None and ring is None:
        return None
    key, given = ("parallel.ulysses", ulysses) if ulysses is not None else ("parallel.ring", ring)
    product = (ulysses or 1) * (ring or 1)
    if world_size % product or (ulysses is not None and ring is not None and product != world_size):
        text = "x".join(str(degree) for degree in (ulysses, ring) if degree is not None)
        rule = f"degrees of {text} do not make up {world_size} ranks"
        remedy = "give degrees whose product is the number of ranks, or leave one on auto"
        raise FaultError([Fault(key, given, rule, remedy)])
    if ulysses is None:
        return Grid(world_size // (ring or 1), ring or 1)
    return Grid(ulysses, world_size // ulysses)


def _asked_way(grid: Grid | None, world_size: int, config: ParallelConfig) -> Way:
    strategy = config.strategy
    if strategy == "ulysses":
        if grid is not None and grid.ring > 1:
            rule = f"with degrees of {grid} the ring has {grid.ring} places"
            raise FaultError([Fault("parallel.strategy", strategy, rule, "leave the ring degree on auto, or use ring")])
        return Way("ulysses", Grid(world_size))
    if strategy in ("ring", "gather_kv"):
        between = grid or Grid(1, world_size)
        if between.ring == 1:
            rule = f"with degrees of {between} nothing is left between the groups"
            raise FaultError([Fault("parallel.strategy", strategy, rule, "lower parallel.ulysses, or use ulysses")])
        return _way(between, gathers=strategy == "gather_kv")
    return _way(grid or Grid(world_size), gathers=False)


def choose(
    call: RoleCall, world_size: int, config: ParallelConfig, select: Callable[[Requirements], Selection]
) -> Planned:
    """The first candidate that a backend serves; it carries those before it, and why they were turned down.

    select: the selector's answer to the role, which raises FaultError. An automatic strategy takes a ring only if that
    costs the role no better backend. Raises FaultError, with all reasons of a strategy that was asked for.
    """
    _raise_call_faults(call, world_size)
    *better, last = ways(call, world_size, config)
    settled = _settled((*better, last), call, select) if better else None
    if settled is not None:
        return settled
    rejected: list[RejectedStrategy] = []
    for way in better:
        try:
            _raise_way_faults(call, way)
            selection = select(call.required(way))
            _raise_loss(way, selection, call.required(last), select)
        except FaultError as error:
            rejected.append(RejectedStrategy(str(way), error.faults))
        else:
            return _planned(way, selection, rejected)
    _raise_way_faults(call, last)
    try:
        return _planned(last, select(call.required(last)), rejected)
    except FaultError as error:
        raise _refusal(last, error) from error


def _settled(
    candidates: tuple[Way, ...], call: RoleCall, select: Callable[[Requirements], Selection]
) -> Planned | None:
    """The candidate on whose backend the ranks have settled: it was every rank's before they did."""
    for way in candidates:
        try:
            selection = select(call.required(way))
        except FaultError:
            continue
        if selection.source == "agreed":
            return _planned(way, selection, [])
    return None


def _planned(way: Way, selection: Selection, rejected: list[RejectedStrategy]) -> Planned:
    """The selection with what the way adds to it; an exchange in fp8 makes an exact backend's answer lossy."""
    lossy = way.exchange == "fp8" and selection.exactness == "exact"
    told = replace(
        selection,
        degrees=(way.grid.ulysses, way.grid.ring),
        rejected_strategies=tuple(rejected),
        exchange_dtype=way.exchange,
        exactness="lossy-quantised" if lossy else selection.exactness,
    )
    return Planned(way, told)


def plan_role(role: RoleFacts, dtype: str, world_size: int, config: ParallelConfig, selector: Selector) -> Planned:
    """What a model's role gets. Raises FaultError as `choose` does."""
    return choose(
        RoleCall(role.kind, role.heads, role.kv_heads, role.head_size, dtype, features=NO_FEATURES),
        world_size,
        config,
        lambda required: selector.select(
            role.role, required, category=role.category, allow_trtllm_default=role.allow_trtllm_default
        ),
    )


def _raise_call_faults(call: RoleCall, world_size: int) -> None:
    sizes = {
        "num_heads": call.heads,
        "num_kv_heads": call.kv_heads,
        "head_size": call.head_size,
        "value_head_size": call.value_head_size,
    }
    wrong = {name: size for name, size in sizes.items() if size is not None and (type(size) is not int or size < 1)}
    if wrong:
        rule = "it is a whole number of at least 1"
        raise FaultError(Fault(name, repr(size), rule, "give the model's own") for name, size in wrong.items())
    alone = world_size == 1 or call.skip
    if call.heads % call.kv_heads:
        rule = f"{call.heads} query heads are no multiple of {call.kv_heads} KV heads"
        raise FaultError([Fault("num_kv_heads", call.kv_heads, rule, "give a number that divides the query heads")])
    if not alone and call.kind == "cross" and call.causal:
        rule = "causal cross-attention counts from the first query row, and a rank holds others"
        raise FaultError([Fault("causal", call.causal, rule, "use one rank")])


def _raise_way_faults(call: RoleCall, way: Way) -> None:
    """Raises FaultError for what a strategy cannot do with any backend."""
    if way.exchange == "fp8" and way.grid.ulysses == 1:
        rule = f"{way} moves keys and values alone, and keys are never quantised"
        remedy = "leave it on same, or give parallel.ulysses a degree above 1"
        raise FaultError([Fault("parallel.exchange_dtype", way.exchange, rule, remedy)])
    if call.features.mask == "block" and way.grid.ring > 1:
        rule = f"the blocks of a block_mask cannot be cut for {way}"
        raise FaultError([Fault("mask", "block", rule, "give a mask, or use parallel.strategy=ulysses")])


def _raise_loss(
    way: Way, selection: Selection, without: Requirements, select: Callable[[Requirements], Selection]
) -> None:
    """Raises FaultError for a ring that is not worth its backend: the role would get a better one without."""
    if way.strategy not in RINGS:
        return
    try:
        better = select(without).backend
    except FaultError:
        return
    if better != selection.backend:
        rule = (
            f"a ring needs the log-sum-exp of each row, for which the role would get {selection.backend} instead of "
            f"{better}"
        )
        remedy = f"set parallel.ulysses={way.grid.ulysses} parallel.strategy=ring to have it"
        raise FaultError([Fault("parallel.strategy", AUTO, rule, remedy)])


def _refusal(way: Way, error: FaultError) -> FaultError:
    """The backend's faults; those of a strategy that was asked for say so."""
    if way.grid.ring == 1:
        return FaultError(error.faults)
    remedy = "name another backend, such as REFERENCE, or leave parallel.strategy and the degrees on auto"
    return FaultError(replace(fault, rule=f"for {way}, {fault.rule}", remedy=remedy) for fault in error.faults)
