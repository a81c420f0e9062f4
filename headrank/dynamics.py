"""Training dynamics: the steps of one run, and the effective rank against the tokens that were seen."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrank.errors import HeadrankError
from headrank.results import ModelResult
from headrank.selection import ModelRef


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: its steps in the order of the tokens seen."""

    label: str
    scale: str | None
    steps: tuple[ModelResult, ...]

    @property
    def tokens(self) -> list[int]:
        """Tokens seen at each step."""
        return [int(step.model.trained["tokens_seen"]) for step in self.steps]


def step_refs(ref: ModelRef) -> list[ModelRef]:
    """The checkpoints of a run: the folders in steps/, or in the folder itself. Raises HeadrankError where there are none."""
    folder = Path(ref.path)
    inner = folder / "steps" if (folder / "steps").is_dir() else folder
    found = sorted(path.parent for path in inner.glob("*/config.json"))
    if not found:
        raise HeadrankError(
            f"{folder}: no steps of a run; --steps takes a folder of checkpoints, or one with a folder steps/ in it\n"
            "Train with scripts/train.py --keep N to keep N steps"
        )
    return [ModelRef(label=f"{ref.label}, {path.name}", path=str(path), scale=ref.scale) for path in found]


def as_run(ref: ModelRef, steps: Sequence[ModelResult]) -> Run:
    """Joins the steps of a run. Raises HeadrankError where a step does not say how many tokens it has seen."""
    for step in steps:
        if "tokens_seen" not in step.model.trained:
            raise HeadrankError(f"{step.model.checkpoint}: its training.json does not say tokens_seen and a loss_curve, so it has no place on the axis")
    return Run(label=ref.label, scale=ref.scale, steps=tuple(sorted(steps, key=lambda step: step.model.trained["tokens_seen"])))


def run_document(run: Run) -> dict[str, Any]:
    """A run ready for JSON."""
    steps = []
    for step in run.steps:
        entry: dict[str, Any] = {
            **step.model.trained,
            "checkpoint": step.model.checkpoint,
            "fingerprint": step.model.fingerprint,
            "mean_effective_rank": step.mean("effective_rank"),
            "percent_of_heads": step.mean("percent_of_heads"),
            "percent_of_attainable": step.mean("percent_of_attainable"),
            "layers": [{"layer": layer.facts.index, "effective_rank": layer.effective_rank} for layer in step.layers],
        }
        if ends := step.mean_interval("effective_rank"):
            entry["interval"] = list(ends)
        if entry["mean_effective_rank"] is None:
            entry["reason"] = next((layer.reason for layer in step.layers if layer.reason), "no layer has an effective rank")
        steps.append(entry)
    return {"label": run.label, "scale": run.scale, "steps": steps}


def run_rows(runs: Sequence[Run]) -> list[tuple[str | int | float | None, ...]]:
    """Lines for a CSV file: a step each, below a line of names."""
    names = ("label", "scale", "tokens_seen", "validation_loss", "mean_effective_rank", "low", "high", "percent_of_heads", "percent_of_attainable")
    lines: list[tuple[str | int | float | None, ...]] = [names]
    for run in runs:
        for step, tokens in zip(run.steps, run.tokens, strict=True):
            low, high = step.mean_interval("effective_rank") or (None, None)
            percents = step.mean("percent_of_heads"), step.mean("percent_of_attainable")
            lines.append((run.label, run.scale, tokens, step.model.trained["validation_loss"], step.mean("effective_rank"), low, high, *percents))
    return lines


def steps_cells(runs: Sequence[Run]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Names of columns and cells for the terminal: a run each, its first, lowest and last mean effective rank."""
    table: list[Sequence[str]] = []
    for run in runs:
        means = [(mean, tokens) for step, tokens in zip(run.steps, run.tokens, strict=True) if (mean := step.mean("effective_rank")) is not None]
        shown = [means[0], min(means), means[-1]] if means else []
        table.append((run.label, str(len(run.steps)), *(f"{mean:.2f} ({tokens:,})" for mean, tokens in shown)) + ("-",) * (0 if means else 3))
    return ("Model", "Steps", "First (tokens)", "Lowest", "Last"), table
