"""The command line: a thin function a command: parse, call, print."""

import errno
import io
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from headrank.errors import HeadrankError
from headrank.options import SpreadCommand, with_options
from headrank.processes import Stopped, Team, company, only_the_first_speaks

app = typer.Typer(
    help="Measures how diverse the attention heads of a transformer are.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class Source(StrEnum):
    activations = "activations"
    weights = "weights"


class Circuit(StrEnum):
    qk = "qk"
    ov = "ov"


class Measure(StrEnum):
    operator = "operator"
    cka = "cka"
    projection_kernel = "projection-kernel"
    keys = "keys"
    values = "values"


class MlaPart(StrEnum):
    both = "both"
    nope = "nope"
    rope = "rope"


class Part(StrEnum):
    text = "text"
    vision = "vision"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Values(StrEnum):
    mean = "mean"
    fit = "fit"


class Format(StrEnum):
    png = "png"
    pdf = "pdf"
    svg = "svg"


MEASURE_HELP = (
    "How heads are compared. operator: as maps. cka: what they write on tokens, by linear CKA. projection-kernel: the subspaces of their "
    "weights, queries' times keys' (qk) or values' times outputs' (ov). keys, values: these alone, by the inner products that their weights "
    "give, or on tokens by linear CKA."
)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The options that all measuring commands have."""

    models: Annotated[list[str] | None, typer.Argument(metavar="[[LABEL=]PATH]...", help="Checkpoints: folders, files or hub ids.")] = None
    scales: Annotated[list[str] | None, typer.Option(help="Families to show, e.g. --scales 128M 2.5B.")] = None
    layer: Annotated[list[int] | None, typer.Option(help="Layers, e.g. --layer 0 18 -1; negative ones count from the end.")] = None
    checkpoints: Annotated[Path | None, typer.Option(help="Where families live [env: HEADRANK_CHECKPOINTS; default: checkpoints].")] = None
    config: Annotated[list[Path] | None, typer.Option(help="TOML file of a family of your own, or config.json of a file that has none.")] = None
    layout: Annotated[Path | None, typer.Option(help="TOML file that describes an architecture that is not in the table.")] = None
    adapter: Annotated[Path | None, typer.Option(help="LoRA adapter to add to the weights.")] = None
    step: Annotated[int | None, typer.Option(min=0, help="Which of a nanochat folder's models [default: the last].")] = None
    part: Annotated[Part, typer.Option(help="Part of a multimodal model.")] = Part.text
    source: Annotated[Source, typer.Option(help="Measure what heads do on text, or their weights alone.")] = Source.activations
    circuit: Annotated[Circuit | None, typer.Option(help="qk: where heads look; ov: what they write [default: qk where the measure has it].")] = None
    measure: Annotated[Measure, typer.Option(help=MEASURE_HELP)] = Measure.operator
    centered: Annotated[bool, typer.Option("--centered", help="Analyse the centred similarity matrix.")] = False
    raw: Annotated[bool, typer.Option("--raw", help="Weights: leave gains and biases out.")] = False
    mla_part: Annotated[MlaPart, typer.Option(help="Weights of MLA: both parts of the keys, or one.")] = MlaPart.both
    rope_offset: Annotated[int, typer.Option(min=0, help="Weights, qk: the form between a query and the key so many tokens before it.")] = 0
    rope_mean: Annotated[int | None, typer.Option(min=1, help="Weights, qk: the mean of the inner products over the offsets 0 to N - 1.")] = None
    center: Annotated[bool, typer.Option("--center/--no-center", help="Outputs: take their mean over tokens away.")] = True
    text: Annotated[list[Path] | None, typer.Option(help="Text file to feed; the bundled text by default.")] = None
    tokens: Annotated[list[Path] | None, typer.Option(help="Token ids to feed: .npy, or .bin of 16-bit numbers.")] = None
    seq_len: Annotated[int | None, typer.Option(min=2, help="Tokens a sequence [default: the model's context, at most 512].")] = None
    sequences: Annotated[int, typer.Option(min=1, help="Sequences to feed, at most.")] = 64
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of sequences.")] = 0
    skip_first: Annotated[int, typer.Option(min=0, help="Leave out the first tokens of each sequence (attention sinks).")] = 0
    batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences a batch [default: as many as fit].")] = None
    device: Annotated[Device, typer.Option(help="Where it is computed; auto takes CUDA where it is there.")] = Device.auto
    dtype: Annotated[Dtype, typer.Option(help="Numbers of the forward pass; auto: bfloat16 on CUDA, else float32.")] = Dtype.auto
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("headrank-out")
    format: Annotated[list[Format] | None, typer.Option(help="Figure formats: png, pdf, svg [default: png].")] = None
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no remarks.")] = False
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that headrank did not write.")] = False


@dataclass(frozen=True, kw_only=True)
class Deciding:
    """The options of the commands that decide and try."""

    models: Annotated[list[str] | None, typer.Argument(metavar="[[LABEL=]PATH]...", help="Checkpoints: folders, files or hub ids.")] = None
    scales: Annotated[list[str] | None, typer.Option(help="Families whose plain heads (MHA) to take, e.g. --scales 128M.")] = None
    checkpoints: Annotated[Path | None, typer.Option(help="Where families live [env: HEADRANK_CHECKPOINTS; default: checkpoints].")] = None
    config: Annotated[list[Path] | None, typer.Option(help="TOML file of a family of your own.")] = None
    values: Annotated[Values, typer.Option(help="Values of a group: their mean, or the best that can be shared, output projections refitted.")] = Values.mean
    source: Annotated[Source, typer.Option(help="Compare heads by their weights, or by what they do on text.")] = Source.weights
    text: Annotated[list[Path] | None, typer.Option(help="Text file to feed; the bundled text by default.")] = None
    tokens: Annotated[list[Path] | None, typer.Option(help="Token ids to feed: .npy, or .bin of 16-bit numbers.")] = None
    seq_len: Annotated[int | None, typer.Option(min=2, help="Tokens a sequence [default: the model's context, at most 512].")] = None
    sequences: Annotated[int, typer.Option(min=1, help="Sequences to feed, at most.")] = 128
    seed: Annotated[int, typer.Option(min=0, help="Seed of every random choice.")] = 0
    batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences a batch [default: as many as fit].")] = None
    device: Annotated[Device, typer.Option(help="Where the forward pass runs.")] = Device.auto
    dtype: Annotated[Dtype, typer.Option(help="Numbers of the forward pass; auto: float32 for losses.")] = Dtype.auto
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("headrank-out")
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no remarks.")] = False
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that headrank did not write.")] = False


FED = ("text", "tokens", "seq_len", "sequences", "seed", "skip_first", "batch_size", "device", "dtype")  # options of what is fed
NOT_LRKV = (*FED, "source", "circuit", "measure", "centered", "raw", "mla_part", "rope_offset", "rope_mean", "center")


@app.command("heatmap", cls=SpreadCommand, epilog="Example: headrank heatmap --layer 18")
@with_options(Shared)
def heatmap(options: Shared) -> None:
    """Similarity matrix of the heads of one layer, a panel a model."""
    _report("heatmap", options)


@app.command("spectra", cls=SpreadCommand, epilog="Example: headrank spectra --layer 0 18 35")
@with_options(Shared)
def spectra(options: Shared) -> None:
    """Eigenvalues of the similarity matrix of an early, a middle and a late layer."""
    _report("spectra", options)


@app.command("variance", cls=SpreadCommand, epilog="Example: headrank variance --centered")
@with_options(Shared)
def variance(options: Shared) -> None:
    """Cumulative variance explained by the eigenvalues of an early, a middle and a late layer."""
    _report("variance", options)


@app.command("effrank", cls=SpreadCommand, epilog="Example: headrank effrank --scales 128M 2.5B")
@with_options(Shared)
def effrank(
    compare: Annotated[bool, typer.Option("--compare", help="Uncentred and centred side by side.")] = False,
    null: Annotated[bool, typer.Option("--null", help="Show what random heads of the same geometry have.")] = False,
    relative: Annotated[bool, typer.Option("--relative", help="Depth from 0 to 1, rank as a fraction of the heads.")] = False,
    steps: Annotated[bool, typer.Option("--steps", help="Models are runs: rank against training tokens.")] = False,
    options: Shared = Shared(),
) -> None:
    """Effective rank of the heads against layer, a panel a scale."""
    with _exit_codes():
        from headrank import commands

        if compare + relative + steps > 1 or (steps and null):
            raise HeadrankError("--compare, --relative and --steps are figures of their own, and --steps has no null; give one of them")
        if compare:
            commands.run_compare(options, null=null)
        elif steps:
            commands.run_steps(options)
        else:
            commands.run("effrank", options, null=null, is_relative=relative)


@app.command("table", cls=SpreadCommand, epilog="Example: headrank table --source weights")
@with_options(Shared)
def table(
    null: Annotated[bool, typer.Option("--null/--no-null", help="Compare with random heads of the same geometry.")] = True,
    options: Shared = Shared(),
) -> None:
    """A row a model: effective rank uncentred and centred, similarity, dead heads, KV cache, parameters."""
    with _exit_codes():
        from headrank.commands import run_table

        run_table(options, null=null)


@app.command("measure", cls=SpreadCommand, epilog="Example: headrank measure checkpoints/128M/mha -o mha.safetensors")
@with_options(Shared)
def measure(
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")],
    null: Annotated[bool, typer.Option("--null/--no-null", help="Also what random heads of the same geometry have.")] = True,
    options: Shared = Shared(),
) -> None:
    """Writes one model's measurement to a small file that every command takes in the model's place."""
    with _exit_codes():
        from headrank.commands import run_measure

        run_measure(options, output=output, null=null)


@app.command("inspect", epilog="Example: headrank inspect checkpoints/128M/mha --explain")
def inspect(
    model: Annotated[str, typer.Argument(metavar="PATH", help="Checkpoint: folder, file or hub id.")],
    explain: Annotated[bool, typer.Option("--explain", help="Show tensor, slice and head for every layer.")] = False,
    config: Annotated[Path | None, typer.Option(help="config.json of a file that has none.")] = None,
    layout: Annotated[Path | None, typer.Option(help="TOML file that describes an architecture that is not in the table.")] = None,
    adapter: Annotated[Path | None, typer.Option(help="LoRA adapter to add to the weights.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Which of a nanochat folder's models [default: the last].")] = None,
    part: Annotated[Part, typer.Option(help="Part of a multimodal model.")] = Part.text,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """What a checkpoint is, from its headers alone."""
    with _exit_codes():
        from headrank.commands import run_inspect
        from headrank.measure import Reading

        run_inspect(model, Reading(config=config, layout=layout, adapter=adapter, step=step, part=part.value), explain=explain, as_json=json)


@app.command("suggest", cls=SpreadCommand, epilog="Example: headrank suggest --groups 3 --budget 50%")
@with_options(Deciding)
def suggest(
    groups: Annotated[int | None, typer.Option(min=1, help="Key-value heads to keep [default: the most that divide those there are].")] = None,
    budget: Annotated[str, typer.Option(help="Cache for one token, all layers: bytes, or percent of what plain heads take.")] = "50%",
    bytes_per_value: Annotated[int, typer.Option(min=1, help="Bytes of a number in the cache.")] = 2,
    threshold: Annotated[float, typer.Option(min=-1, max=1, help="Least similarity of near-duplicates.")] = 0.9,
    options: Deciding = Deciding(),
) -> None:
    """Which heads to join into groups, which ranks to choose for LRKV or MLA, which heads are near-duplicates."""
    with _exit_codes():
        from headrank.decisions import run_suggest

        run_suggest(options, groups=groups, budget=budget, bytes_per_value=bytes_per_value, threshold=threshold)


@app.command("try", cls=SpreadCommand, epilog="Example: headrank try --groups 3")
@with_options(Deciding)
def try_(
    groups: Annotated[int | None, typer.Option(min=1, help="Join the heads into so many groups.")] = None,
    remove: Annotated[int | None, typer.Option(min=1, help="Remove so many heads from every layer.")] = None,
    threshold: Annotated[float | None, typer.Option(min=-1, max=1, help="With --remove: refuse where heads are less alike.")] = None,
    random: Annotated[int, typer.Option(min=0, help="Random choices to compare with.")] = 5,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder of the new checkpoint [default: in --out].")] = None,
    options: Deciding = Deciding(),
) -> None:
    """Joins or removes heads of one of headrank's own checkpoints, and measures what that costs on text."""
    with _exit_codes():
        from headrank.decisions import run_try

        run_try(options, groups=groups, remove=remove, threshold=threshold, n_random=random, output=output)


@app.command("agree", cls=SpreadCommand, epilog="Example: headrank agree --circuit ov")
@with_options(Shared, without=("source", "centered"))
def agree(options: Shared) -> None:
    """Do weights and activations order the pairs of heads alike? Rank correlation against layer, with an interval over sequences."""
    with _exit_codes():
        from headrank.agreement_command import run_agree

        run_agree(options)


@app.command("lrkv", cls=SpreadCommand, epilog="Example: headrank lrkv --scales 128M")
@with_options(Shared, without=NOT_LRKV)
def lrkv(options: Shared) -> None:
    """Shared and residual parts of LRKV's keys and values: norms beside MHA's, angles, distance from the best of their rank."""
    with _exit_codes():
        from headrank.anatomy_command import run_lrkv

        run_lrkv(options)


@app.command("report", cls=SpreadCommand, epilog="Example: headrank report --scales 128M")
@with_options(Shared, without=("layer", "centered", "format"))
def report(
    null: Annotated[bool, typer.Option("--null/--no-null", help="Compare with random heads of the same geometry.")] = True,
    decide: Annotated[bool, typer.Option("--suggest/--no-suggest", help="Say what the weights suggest; slow for billions of parameters.")] = True,
    options: Shared = Shared(),
) -> None:
    """One HTML page that opens from disk: all layers, both circuits, figures, tables, and where the numbers come from."""
    with _exit_codes():
        from headrank.report_command import run_report

        run_report(options, null=null, decide=decide)


@app.command("selfcheck", cls=SpreadCommand, epilog="Example: headrank selfcheck checkpoints/128M/mha")
def selfcheck(
    model: Annotated[str, typer.Argument(metavar="PATH", help="Checkpoint: folder, file or hub id.")],
    layer: Annotated[list[int] | None, typer.Option(help="Layers to check [default: an early, a middle and a late one].")] = None,
    source: Annotated[Source | None, typer.Option(help="Check the weights or the activations alone.")] = None,
    config: Annotated[Path | None, typer.Option(help="config.json of a file that has none.")] = None,
    layout: Annotated[Path | None, typer.Option(help="TOML file that describes an architecture that is not in the table.")] = None,
    adapter: Annotated[Path | None, typer.Option(help="LoRA adapter to add to the weights.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Which of a nanochat folder's models [default: the last].")] = None,
    part: Annotated[Part, typer.Option(help="Part of a multimodal model.")] = Part.text,
    text: Annotated[list[Path] | None, typer.Option(help="Text file to feed; the bundled text by default.")] = None,
    tokens: Annotated[list[Path] | None, typer.Option(help="Token ids to feed: .npy, or .bin of 16-bit numbers.")] = None,
    device: Annotated[Device, typer.Option(help="Where the forward pass runs.")] = Device.auto,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every random choice.")] = 0,
) -> None:
    """Do the numbers come out of this checkpoint as they should? Invariances on its real heads, and written-out attention on a few tokens."""
    with _exit_codes():
        from headrank.measure import Reading
        from headrank.selfcheck_command import run_selfcheck

        reading = Reading(config=config, layout=layout, adapter=adapter, step=step, part=part.value)
        chosen = source and source.value
        run_selfcheck(model, reading, layers=layer or (), source=chosen, text=text or (), tokens=tokens or (), device=device.value, seed=seed)


def _report(command: str, options: Shared) -> None:
    with _exit_codes():
        from headrank.commands import run

        run(command, options)


@contextmanager
def _exit_codes() -> Iterator[None]:
    """1 for what the user can mend, 130 for an interrupt, 0 where the reader of our output has gone (| head).

    Of the processes that torchrun started the first alone comes to what stands within; the others serve it here, and exit.
    """
    try:
        with company(_do_share):
            yield
            sys.stdout.flush()
    except HeadrankError as error:
        print(f"Error: {_printable(str(error))}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        raise SystemExit(130) from None
    except Stopped:
        print("Error: told to stop, as torchrun does when another process was lost", file=sys.stderr)
        raise SystemExit(128 + signal.SIGTERM) from None
    except BrokenPipeError:
        _drop_stdout()
        raise SystemExit(0) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_stdout()
        print(f"Error: the output cannot be written: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from None


def _do_share(task: Any, team: Team) -> None:
    from headrank.measure import do_share

    do_share(task, team)


def _drop_stdout() -> None:
    """Python writes what is left in its buffer when it ends; nobody takes that any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _printable(text: str) -> str:
    """Names in a checkpoint may hold what moves the cursor or changes colours: shown, not sent to the terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode() for letter in text)


def _fit_surroundings() -> None:
    """Takes away what surrounds a program and must not matter to this one."""
    for handle, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us; another file would get its number
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_RDWR), handle)
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (as long as the process)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a letter that it cannot show is no reason to stop
    os.environ.pop("MPLBACKEND", None)  # figures are drawn without one, and an unknown one stops the import
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it remarks on folders that it cannot write, and does without


def main() -> None:
    """Runs the command line and exits; wrong usage exits with 2."""
    _fit_surroundings()
    with only_the_first_speaks():
        app(prog_name="headrank")


if __name__ == "__main__":
    main()
