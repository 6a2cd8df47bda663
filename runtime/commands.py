"""How the command line reads what click alone would read otherwise."""

from __future__ import annotations

import click

from configs.faults import nearest
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


class ConfiguredCommand(click.Command):
    """A command with settings. Attention options are taken out before click, which would read -ac as -a and -c."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
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


def _takes_value(option: click.Parameter) -> bool:
    return isinstance(option, click.Option) and not option.is_flag
