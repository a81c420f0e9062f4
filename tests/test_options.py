from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from headrank.options import SpreadCommand, spread, with_options


@pytest.mark.parametrize(
    "words",
    [
        ["--scales", "128M", "2.5B"],
        ["--scales", "128M", "--scales", "2.5B"],
        ["--scales", "128M,2.5B"],
        ["--scales=128M,2.5B"],
        ["--scales=128M", "--scales=2.5B"],
        ["--scale", "128M", "2.5B"],
        ["--scales", "128M,", "2.5B"],
    ],
)
def test_all_ways_of_giving_scales_are_one(words: list[str]) -> None:
    assert spread(words) == ["--scales=128M", "--scales=2.5B"]


@pytest.mark.parametrize(
    "words",
    [
        ["--layer", "0", "18", "-1"],
        ["--layers", "0", "18", "-1"],
        ["--layer", "0,18,-1"],
        ["--layer=0,18,-1"],
        ["--layer", "0", "--layers", "18", "--layer=-1"],
        ["--layer", "0,18", "-1"],
    ],
)
def test_all_ways_of_giving_layers_are_one(words: list[str]) -> None:
    assert spread(words) == ["--layer=0", "--layer=18", "--layer=-1"]


def test_a_negative_layer_may_come_first() -> None:
    assert spread(["--layer", "-1", "-2"]) == ["--layer=-1", "--layer=-2"]


def test_models_may_follow_layers_and_formats() -> None:
    assert spread(["--layer", "0", "5", "Mine=runs/a", "b"]) == ["--layer=0", "--layer=5", "Mine=runs/a", "b"]
    assert spread(["--format", "png", "svg", "runs/a"]) == ["--format=png", "--format=svg", "runs/a"]


def test_flags_end_the_values() -> None:
    words = ["--scales", "128M", "2.5B", "--centered", "--layer", "3", "--seed", "7"]
    assert spread(words) == ["--scales=128M", "--scales=2.5B", "--centered", "--layer=3", "--seed", "7"]


def test_other_options_are_left_alone() -> None:
    words = ["A=x/y", "--source=weights", "--text", "a.txt", "-h"]
    assert spread(words) == words


def test_words_behind_two_dashes_are_left_alone() -> None:
    assert spread(["--layer", "3", "--", "--layer", "5"]) == ["--layer=3", "--", "--layer", "5"]


def test_the_first_word_is_a_value_whatever_it_is() -> None:
    assert spread(["--layer", "x", "3"]) == ["--layer=x", "--layer=3"]  # for the parser to refuse
    assert spread(["--layer", "-3x"]) == ["--layer=-3x"]


@pytest.mark.parametrize("words", [["--scales"], ["--scales", "--json"], ["--scales="], ["--scales", ","], ["--layers", "--seed", "7"]])
def test_a_flag_without_a_value_is_wrong_usage(words: list[str]) -> None:
    with pytest.raises(typer.BadParameter, match="needs a value"):
        spread(words)


def test_no_words_are_no_words() -> None:
    assert spread([]) == []


@dataclass(frozen=True, kw_only=True)
class Chosen:
    models: Annotated[list[str] | None, typer.Argument()] = None
    scales: Annotated[list[str] | None, typer.Option(help="Scales.")] = None
    layer: Annotated[list[int] | None, typer.Option(help="Layers.")] = None
    seed: Annotated[int, typer.Option(help="Seed.")] = 3


NOTHING = Chosen()


def application() -> typer.Typer:
    app = typer.Typer()

    @app.command(cls=SpreadCommand)
    @with_options(Chosen)
    def show(width: Annotated[int, typer.Option(help="Width.")] = 5, chosen: Chosen = NOTHING) -> None:
        """Shows what it was given."""
        typer.echo(f"{width} {chosen.models} {chosen.scales} {chosen.layer} {chosen.seed}")

    return app


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(application(), list(words))
    return result.exit_code, result.output


def test_a_command_gets_its_own_options_and_the_shared_ones_as_one_object() -> None:
    assert run() == (0, "5 None None None 3\n")
    assert run("--width", "7", "--scales", "a", "b", "--layer", "0", "-1", "--seed", "9") == (0, "7 None ['a', 'b'] [0, -1] 9\n")
    assert run("--layer", "0", "-1", "A=x", "y") == (0, "5 ['A=x', 'y'] None [0, -1] 3\n")


def test_help_shows_own_and_shared_options() -> None:
    code, text = run("--help")
    assert code == 0
    for part in ("Shows what it was given.", "--width", "--scales", "--layer", "--seed", "Seed."):
        assert part in text


@pytest.mark.parametrize("words", [["--layer", "x"], ["--layer"], ["--scales", "--seed", "3"], ["--nothing"]])
def test_wrong_usage_exits_with_2(words: list[str]) -> None:
    assert run(*words)[0] == 2
