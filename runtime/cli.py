"""The command line: `raylysses generate`, `raylysses explain`, `raylysses backends` and `raylysses bench`."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from configs.compose import compose, known_keys
from configs.faults import Fault, FaultError, nearest
from configs.flags import BACKEND, CONFIG, split
from configs.overrides import quote
from configs.schema import RunConfig
from runtime.commands import WORDS, Commands, ConfiguredCommand, SingleOption

Read = TypeVar("Read")


def _configuration_options(command: Any) -> Any:
    command = click.pass_obj(command)
    command = click.argument("overrides", nargs=-1, type=click.UNPROCESSED)(command)
    return click.option(
        "--config",
        "files",
        type=click.Path(path_type=Path),
        multiple=True,
        help="A YAML file of settings; several merge in order, the later ones on top.",
    )(command)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="raylysses")
def cli() -> None:
    """Sequence-parallel attention over Ray ranks, for video diffusion transformers.

    Example: raylysses generate --prompt "a red circle moving right" parallel.world_size=2
    """


@cli.command("generate", cls=ConfiguredCommand)
@click.option("--prompt", cls=SingleOption, help="What to make; the same as generate.prompt=...")
@_configuration_options
def generate_command(flags: list[str], prompt: str | None, files: tuple[Path, ...], overrides: tuple[str, ...]) -> None:
    """Generate a video, and a run folder that says what every rank selected.

    OVERRIDES are settings such as parallel.world_size=2 or attention.per_role.cross=TORCH_SDPA. They win over --config,
    and a later --config wins over an earlier one.

    \b
    Example:
      raylysses generate --prompt "a red circle moving right" \\
          parallel.world_size=2 attention.per_role.cross=TORCH_SDPA run.seed=7 --config my.yaml
    """
    from runtime.generate import generate

    arguments = [*([] if prompt is None else [f"generate.prompt={quote(prompt)}"]), *overrides, *flags]
    folder = generate(_compose(arguments, files, prompt), click.get_current_context().meta[WORDS])
    click.echo(f"\nThe run is in {folder}")
    click.echo(f"  {'  '.join(sorted(path.name for path in folder.iterdir()))}")


@cli.command("explain", cls=ConfiguredCommand)
@click.option(
    "--device",
    cls=SingleOption,
    default="here",
    help="here, or a device: cpu, cuda:9.0, rocm:gfx942, npu, xpu, musa:3.1.",
    show_default=True,
)
@click.option(
    "--packages", cls=SingleOption, default="here", help="here, all, none, or NAME=VERSION,...", show_default=True
)
@click.option(
    "--prompt", cls=SingleOption, help="Not needed; taken so that a `generate` line can be asked about as it is."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/selection.schema.json).")
@_configuration_options
def explain_command(
    flags: list[str],
    device: str,
    packages: str,
    prompt: str | None,
    as_json: bool,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
) -> None:
    """Say which backend each attention role would get, and why the others were passed over.

    Needs no GPU, no weights and no cluster: --device and --packages state a machine that is not here.

    \b
    Example:
      raylysses explain attention.per_role.self=FLASH_ATTN --device cuda:9.0 --packages all
      raylysses explain model=wan2.1-t2v-14b parallel.world_size=8 --device cuda:9.0 --packages all
    """
    from runtime.explain import explain
    from runtime.memory import NOT_COUNTED
    from runtime.progress import print_faults, print_selection

    config = _compose_without_prompt([*overrides, *flags], files, prompt, published=True)
    answer = explain(config, device, packages)
    if as_json:
        click.echo(json.dumps(answer.to_dict(), indent=2))
    else:
        for name, text in answer.assumed.items():
            click.echo(f"{name + ':':<10} {text}")
        if answer.memory is not None:
            click.echo(f"{'memory:':<10} {answer.memory}\n{'':<10} not counted: {NOT_COUNTED}")
        click.echo()
        print_selection(answer.report, sys.stdout)
        click.echo("".join(f"{line}\n" for line in answer.alternative_lines()), nl=False)
    if answer.faults:
        if not as_json:
            print_faults(answer.faults, sys.stderr)
        raise SystemExit(FaultError.exit_code)


@cli.command("backends")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--check",
    "page",
    cls=SingleOption,
    type=click.Path(path_type=Path),
    help="Compare with the tables in a Markdown FILE.",
)
@click.option(
    "--write", "target", cls=SingleOption, type=click.Path(path_type=Path), help="Put the tables into a Markdown FILE."
)
def backends_command(as_json: bool, page: Path | None, target: Path | None) -> None:
    """Say what every attention backend takes, and the automatic order on every device.

    The answers come from the same predicates as a selection. --check and --write leave out what is registered here.

    \b
    Example:
      raylysses backends
      raylysses backends --check docs/backends.md
    """
    from backends.registry import Registry
    from runtime.tables import tables
    from runtime.tables_text import drift, read_page, text, write_page, written

    if target is not None:
        fresh = written(read_page(target, "--write"), tables(Registry.built_in()), target, "--write")
        write_page(target, fresh, "--write")
    if as_json:
        click.echo(json.dumps(tables(Registry()).to_dict(), indent=2))
    if page is not None:
        lines = drift(read_page(page, "--check"), tables(Registry.built_in()), page)
        if lines:
            rule = "its tables are not what the backends say:\n" + "\n".join(lines)
            raise FaultError([Fault("--check", page, rule, f"run raylysses backends --write {page}")])
        click.echo(f"{page}: its tables are what the backends say", err=as_json)
    if not (as_json or target or page):
        click.echo(text(tables(Registry())))


@cli.group("bench", cls=Commands)
def bench_group() -> None:
    """Time parts of a run on the ranks that a configuration gives."""


@bench_group.command("attention", cls=ConfiguredCommand)
@click.option(
    "--shapes",
    cls=SingleOption,
    default="1x4608x24x128",
    show_default=True,
    help="BxSxHxD or BxSxHxDxHkv, with commas.",
)
@click.option(
    "--plans",
    cls=SingleOption,
    default="auto",
    show_default=True,
    help="auto, ulysses, ring, gather_kv, 2x2, 2x2:gather_kv.",
)
@click.option("--backends", cls=SingleOption, help="NAME,...; without it, what attention.* says of the role self.")
@click.option(
    "--rounds", cls=SingleOption, default=9, show_default=True, type=click.IntRange(1), help="Timed calls of each cell."
)
@click.option("--causal", is_flag=True, help="Causal attention.")
@_configuration_options
def bench_attention_command(
    flags: list[str],
    shapes: str,
    plans: str,
    backends: str | None,
    rounds: int,
    causal: bool,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
) -> None:
    """Check and time attention over ranks: a grid of shapes, plans and backends.

    OVERRIDES are settings such as cluster.address=HOST:PORT, parallel.world_size=4, run.device=cpu run.dtype=float16.
    Every result is compared with fp64 softmax attention first; one that is wrong is not timed, and the exit code is 4.
    The figures are in the run folder: bench.json (docs/bench.schema.json) and bench.png.

    \b
    Example:
      raylysses bench attention --shapes 1x4608x24x128,1x32760x40x128 \\
          --plans auto,ulysses,ring,2x2 --backends TORCH_SDPA,FLASH_ATTN parallel.world_size=4
    """
    from runtime.bench.attention import Experiment, bench_attention
    from runtime.bench.grid import parse_plans, parse_shapes, unused_settings

    faults = unused_settings(overrides)
    of_shapes = _or_faults(lambda: parse_shapes(shapes), faults)
    of_plans = _or_faults(lambda: parse_plans(plans), faults)
    composed = _or_faults(lambda: _compose_without_prompt([*overrides, *flags], files, None), faults)
    if faults or of_shapes is None or of_plans is None or composed is None:
        raise FaultError(faults)
    asked = Experiment(of_shapes, of_plans, backends, rounds, causal)
    folder = bench_attention(composed, asked, command=click.get_current_context().meta[WORDS])
    click.echo(f"\nThe figures are in {folder}")


def _or_faults(read: Callable[[], Read], faults: list[Fault]) -> Read | None:
    """What is read, or None; then its faults join the others, to be told together."""
    try:
        return read()
    except FaultError as error:
        faults.extend(error.faults)
        return None


def _compose_without_prompt(
    arguments: Sequence[str], files: Sequence[Path], prompt: str | None, *, published: bool = False
) -> RunConfig:
    """Compose without requiring a prompt; with `published`, without requiring a model folder either."""
    config, faults = _composed(arguments, files, prompt, published=published)
    if config is None and {fault.key for fault in faults} == {"generate.prompt"}:
        return _compose(["generate.prompt='-'", *arguments], files, prompt, published=published)
    if config is None:
        raise FaultError(fault for fault in faults if fault.key != "generate.prompt" or fault.value is not None)
    return config


def _compose(
    arguments: Sequence[str], files: Sequence[Path], prompt: str | None, *, published: bool = False
) -> RunConfig:
    config, faults = _composed(arguments, files, prompt, published=published)
    if config is None:
        raise FaultError(faults)
    return config


def _composed(
    arguments: Sequence[str], files: Sequence[Path], prompt: str | None, *, published: bool = False
) -> tuple[RunConfig | None, tuple[Fault, ...]]:
    """Compose; bare words behind a prompt are the rest of one that lacks its quotes."""
    words, flags = split(arguments)
    stray = [] if prompt is None else [word for word in words if "=" not in word and not word.startswith("~")]
    if not stray:
        return compose(arguments, file=files, published=published)
    kept = [word for word in words if word not in stray]
    words_kept = [*kept, *(word for flag in flags for word in flag.words)]
    _, faults = compose(words_kept, file=files, published=published)
    rule = f"is followed by {' '.join(stray)}, which belongs to nothing"
    remedy = f'put the whole prompt in quotes: --prompt "{" ".join((prompt or "", *stray))}"'
    return None, (Fault("--prompt", prompt, rule, remedy), *faults)


def _option_message(error: click.NoSuchOption) -> str:
    """Users of other tools look for an option where ours is a setting."""
    name = error.option_name.lstrip("-").replace("-", "_")
    if name in ("m", "multirun"):
        return f"{error.option_name}: sweeps are not available yet; leave it out, and give each setting one value"
    settings = [key for key in known_keys() if key.rpartition(".")[2] == name]
    if settings:
        return f"{error.option_name}: is a setting here, not an option; write {' or '.join(settings)}=..."
    close = nearest(error.option_name.partition(".")[0], (BACKEND, CONFIG))
    if close:
        return f"{error.option_name}: no such option; did you mean {' or '.join(close)}?"
    leaves = {key.rpartition(".")[2]: key for key in reversed(known_keys())}
    similar = () if error.possibilities else nearest(name, leaves, count=1)
    if similar:
        return f"{error.option_name}: no such option; did you mean the setting {leaves[similar[0]]}=...?"
    return error.format_message()


def run(arguments: Sequence[str]) -> int:
    """Run a command; returns its exit code. Only our own bugs leave a traceback."""
    from runtime.errors import DisagreementError, RankError, StallError, TerminatedError, WrongResultError
    from runtime.progress import print_faults
    from runtime.signals import SignalInterrupt, signal_message

    try:
        cli.main(list(arguments), prog_name="raylysses", standalone_mode=False)
    except FaultError as error:
        print_faults(error.faults, sys.stderr)
        return error.exit_code
    except click.NoSuchOption as error:
        print(f"error: {_option_message(error)}", file=sys.stderr)
        return FaultError.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return FaultError.exit_code
    except click.UsageError as error:
        fault_text = error.format_message()
        print(f"error: {fault_text}", file=sys.stderr)
        print(f"Try: {error.ctx.command_path if error.ctx else 'raylysses'} --help", file=sys.stderr)
        return FaultError.exit_code
    except (RankError, DisagreementError, StallError, WrongResultError) as error:
        print("\n  ".join((f"error: {error}", *getattr(error, "__notes__", ()))), file=sys.stderr)
        return error.exit_code
    except TerminatedError as error:
        print(f"error: {signal_message(error.signum)}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort) as error:
        # click turns every KeyboardInterrupt into an Abort with that cause.
        interrupt = error.__cause__ if isinstance(error, click.Abort) else error
        signum = interrupt.signum if isinstance(interrupt, SignalInterrupt) else signal.SIGINT
        print(f"error: {signal_message(signum)}", file=sys.stderr)
        return 128 + signum
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0
