"""Options that take several values after one flag, and options that many commands share."""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand

NUMBER = re.compile(r"-?\d+")
FORMATS = ("png", "pdf", "svg")


@dataclass(frozen=True)
class Several:
    """An option that takes several values: which of the words behind its flag belong to it."""

    takes: Callable[[str], bool]


def _no_flag(word: str) -> bool:
    return not word.startswith("-")


SEVERAL = {
    "--scales": Several(_no_flag),
    "--layer": Several(lambda word: all(NUMBER.fullmatch(part) for part in word.split(","))),
    "--format": Several(lambda word: all(part in FORMATS for part in word.split(","))),
}
ALIASES = {"--layers": "--layer", "--scale": "--scales", "--formats": "--format"}


def spread(words: Sequence[str]) -> list[str]:
    """Gives each value its own flag: `--layer 0 18,35` and `--layers=0,18,35` become `--layer=0 --layer=18 --layer=35`.

    Words behind `--` are left alone. Raises typer.BadParameter, which is wrong usage, where a flag has no value.
    """
    out: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*out, word, *rest]
        name, equals, value = word.partition("=")
        name = ALIASES.get(name, name)
        if name not in SEVERAL:
            out.append(word)
            continue
        values = [value] if equals else []
        if not equals and rest and (_no_flag(rest[0]) or NUMBER.match(rest[0])):
            values.append(rest.pop(0))  # the first value whatever it is: the parser says what is wrong with it
            while rest and SEVERAL[name].takes(rest[0]):
                values.append(rest.pop(0))
        parts = [part for value in values for part in value.split(",") if part]
        if not parts:
            raise typer.BadParameter("needs a value", param_hint=word.partition("=")[0])
        out += [f"{name}={part}" for part in parts]
    return out


class SpreadCommand(TyperCommand):
    """A command whose options may take several values after one flag."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args))


def with_options(options: type, *, without: Sequence[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the fields of a dataclass as its options, after its own; it gets them as one object, its last argument.

    Fields named in `without` are no options of this command and keep their defaults.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = [p.replace(annotation=hints[p.name]) for p in inspect.signature(command).parameters.values()][:-1]
        shared_hints = get_type_hints(options, include_extras=True)
        shared = [
            inspect.Parameter(
                f.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=f.default if f.default is not MISSING else inspect.Parameter.empty,
                annotation=shared_hints[f.name],
            )
            for f in fields(options)
            if f.name not in without
        ]

        def wrapper(**values: Any) -> None:
            names = {f.name for f in fields(options)}
            chosen = options(**{name: value for name, value in values.items() if name in names})
            command(*[values[p.name] for p in own], chosen)

        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        wrapper.__signature__ = inspect.Signature(own + shared)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in own + shared}
        return wrapper

    return decorate
