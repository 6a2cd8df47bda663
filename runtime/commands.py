"""How the command line reads what click alone would read otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource

from configs.faults import Fault, FaultError, nearest, shortened
from configs.flags import BACKEND, CONFIG, SHORT, split


class Commands(click.Group):
    """A group that answers a misspelled command with the nearest right one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and split(args[:1])[1]:
            commands = " or ".join(self.commands)
            raise click.UsageError(f"{args[0]}: stands before the command; write it after {commands}", ctx)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            close = nearest(name, self.commands)
            hint = f"did you mean {' or '.join(close)}?" if close else f"use one of {', '.join(self.commands)}"
            raise click.UsageError(f"command={name}: there is no such command; {hint}", ctx)
        return super().resolve_command(ctx, args)


WORDS = "raylysses.words"
"""Where a click context's `meta` has the whole command as words."""


class ConfiguredCommand(click.Command):
    """A command with settings. Attention options are taken out before click, which would read -ac as -a and -c."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[WORDS] = (*ctx.command_path.split(), *args)
        values_follow = [name for option in self.params if _takes_value(option) for name in option.opts]
        others, flags = split(args, values_follow)
        ctx.obj = [word for flag in flags for word in flag.words]
        return super().parse_args(ctx, others)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        with formatter.section("Attention options"):
            formatter.write_dl(
                [
                    (f"{BACKEND} NAME", "Short for attention.default=NAME."),
                    (f"{CONFIG}.PATH VALUE, {SHORT}.PATH VALUE", "The same as attention.PATH=VALUE."),
                    (f"{CONFIG} JSON, {SHORT} JSON", 'A mapping: {"default": "NAME", "per_role": {"cross": "NAME"}}.'),
                ]
            )


class SingleOption(click.Option):
    """An option that takes one value. Another value is a fault; click alone would keep the last one in silence."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        parser.add_option(obj=self, opts=self.opts, dest=self.name, action="append", nargs=self.nargs)

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        values = list(dict.fromkeys(opts.get(self.name or "") or ()))
        if len(values) > 1:
            option = max(self.opts, key=len)
            shown = " and as ".join(map(shortened, map(str, values)))
            raise FaultError([Fault(option, None, f"is given {_times(len(values))}, as {shown}", "keep one of them")])
        return super().consume_value(ctx, {**opts, self.name or "": values[0]} if values else opts)


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"


def _takes_value(option: click.Parameter) -> bool:
    return isinstance(option, click.Option) and not option.is_flag
