"""The commands suggest and try: from options to documents, CSV files and short tables."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from headrank import tables
from headrank.commands import Report, Terminal, choose_models, publish
from headrank.errors import HeadrankError
from headrank.measure import Settings
from headrank.selection import ModelRef
from headrank.store import Store, is_measurement

if TYPE_CHECKING:
    from headrank.cli import Deciding

Column = tuple[str, Callable[[dict[str, Any]], str]]
"""Title, and what a layer's entry has there."""
WIDEST_GROUPS = 24  # characters; wider ones get a table of their own, so that a line fits a terminal


def run_suggest(options: "Deciding", *, groups: int | None, budget: str, bytes_per_value: int, threshold: float) -> None:
    """Carries out suggest."""
    from headrank.suggest import Request, suggest

    request = Request(n_groups=groups, budget=budget, bytes_per_value=bytes_per_value, threshold=threshold, values=options.values.value)
    settings = _settings(options)

    def work(terminal: Terminal) -> Report:
        refs = _plain_models(options, terminal)
        models = [suggest(ref, request, settings, store=Store.default(), progress=terminal) for ref in refs]
        document = {"schema": tables.SCHEMA, "command": "suggest", "version": tables.program_version(), "source": settings.source, "models": models}
        return Report(
            document=document,
            texts={"csv": tables.csv_lines([SUGGEST_COLUMNS, *(row for model in models for row in suggest_rows(model))])},
            figure=None,
            show=lambda console: show_suggestions(models, console),
            faults=[f"{model['label']}: {entry['reason']}" for model in models for entry in model["layers"] if "reason" in entry],
        )

    publish("suggest", options, work, has_figure=False)


def run_try(options: "Deciding", *, groups: int | None, remove: int | None, threshold: float | None, n_random: int, output: Path | None) -> None:
    """Carries out try."""
    from headrank.trial import TrialRequest, try_out

    if groups is not None and threshold is not None:
        raise HeadrankError("--threshold belongs to --remove; with --groups every head finds a group")
    if remove is not None and options.values.value != "mean":
        raise HeadrankError("--values belongs to --groups; with --remove the values of a head that goes are joined with those of one that stays")
    request = TrialRequest(n_groups=groups, n_removed=remove, threshold=threshold, values=options.values.value, n_random=n_random)
    settings = _settings(options)

    def work(terminal: Terminal) -> Report:
        refs = _plain_models(options, terminal)
        if len(refs) != 1:
            raise HeadrankError(f"try takes one model, not {len(refs)}; give its path")
        name = f"{Path(refs[0].path).resolve().name}-{f'groups{groups}' if groups is not None else f'less{remove}'}"
        folder = output or options.out / name
        found = try_out(refs[0], request, settings, folder, force=options.force, store=Store.default(), progress=terminal)
        terminal.remark(f"Wrote {folder}")
        document = {"schema": tables.SCHEMA, "command": "try", "version": tables.program_version(), **found}
        return Report(
            document=document,
            texts={"csv": tables.csv_lines([TRY_COLUMNS, *try_rows(found)])},
            figure=None,
            show=lambda console: show_trial(found, console),
        )

    publish("try", options, work, has_figure=False)


def _settings(options: "Deciding") -> Settings:
    return Settings(
        source=options.source.value,
        text=tuple(options.text or ()),
        tokens=tuple(options.tokens or ()),
        seq_len=options.seq_len,
        n_sequences=options.sequences,
        seed=options.seed,
        batch_size=options.batch_size,
        device=options.device.value,
        dtype=options.dtype.value,
    )


def _plain_models(options: "Deciding", terminal: Terminal) -> list[ModelRef]:
    """The models that are named, or those of the families on disk that have plain heads."""
    from headrank.architectures import describe
    from headrank.checkpoints import open_checkpoint

    refs = choose_models(options, figure="effrank", largest_only=True, remark=terminal.remark)
    for ref in refs:
        if Path(ref.path).is_file() and is_measurement(Path(ref.path)):
            raise HeadrankError(f"{ref.path}: a measurement holds no weights, which decisions need; give the checkpoint")
    if options.models:
        return refs
    plain = [ref for ref in refs if describe(open_checkpoint(ref.path)).kind == "mha"]
    if not plain:
        raise HeadrankError(f"none of {', '.join(ref.label for ref in refs)} has plain heads (MHA); give a checkpoint by its path")
    return plain


# ---- suggest ------------------------------------------------------------------------------------------------------------

SUGGEST_COLUMNS = (
    "label", "scale", "group", "layer", "groups", "lost_keys", "lost_values", "consecutive_lost_keys", "consecutive_lost_values",
    "effective_rank_qk", "effective_rank_ov", "lrkv_rank", "mla_latent", "duplicates", "removable", "reason",
)  # fmt: skip


def suggest_rows(model: dict[str, Any]) -> Iterable[tables.Row]:
    """Rows of the CSV file, one a layer."""
    for entry in model["layers"]:
        plain, ranks = entry.get("consecutive", {}), entry.get("effective_rank", {})
        yield (
            model["label"], model["scale"], entry.get("group", ""), entry["layer"],
            group_text(entry["groups"]) if "groups" in entry else None, entry.get("lost_keys"), entry.get("lost_values"),
            plain.get("lost_keys"), plain.get("lost_values"), ranks.get("qk"), ranks.get("ov"), entry.get("lrkv_rank"), entry.get("mla_latent"),
            "|".join(" ".join(map(str, pair["heads"])) for pair in entry.get("duplicates", [])), entry.get("removable"), entry.get("reason"),
        )  # fmt: skip


def group_text(groups: Iterable[Iterable[int]]) -> str:
    """Groups in a line: 0 5|1 4|2 3."""
    return "|".join(" ".join(map(str, group)) for group in groups)


def show_suggestions(models: Iterable[dict[str, Any]], console: Console) -> None:
    """Prints what is suggested for each model: a line a layer, and what it comes to."""
    for model in models:
        cached = f", {model['kv_values_per_token']} numbers cached a token" if model["kv_values_per_token"] else ""
        console.print(f"{model['label']}: {model['n_kv_head']} key-value heads{cached}")
        groups, numbers = _group_columns(model), _number_columns(model)
        is_wide = any(len(cell(entry)) > WIDEST_GROUPS for _, cell in groups for entry in model["layers"])
        for columns in [groups, numbers] if is_wide else [[*groups, *numbers]]:
            shown = [("Layer", _layer_name), *columns]
            tables.print_cells([name for name, _ in shown], [tuple(cell(entry) for _, cell in shown) for entry in model["layers"]], console)
        for line in _lines(model):
            console.print(line)


def suggestion_cells(model: dict[str, Any]) -> tuple[list[str], list[list[str]], list[str]]:
    """What is suggested for a model as text: names of columns, a row a layer, and what it comes to, line by line."""
    columns = [("Layer", _layer_name), *_group_columns(model), *_number_columns(model)]
    rows = [[cell(entry) for _, cell in columns] for entry in model["layers"]]
    return [name for name, _ in columns], rows, _lines(model)


def _lines(model: dict[str, Any]) -> list[str]:
    return [*_join_lines(model["join"]), *_rank_lines(model["ranks"]), *_duplicate_lines(model["duplicates"])]


def _layer_name(entry: dict[str, Any]) -> str:
    return f"{entry['group']} {entry['layer']}" if "group" in entry else str(entry["layer"])


def _group_columns(model: dict[str, Any]) -> list[Column]:
    if model["join"]["n_groups"] is None:
        return []
    return [("Groups", lambda entry: group_text(entry["groups"]) if "groups" in entry else "-")]


def _number_columns(model: dict[str, Any]) -> list[Column]:
    columns: list[Column] = []
    if model["join"]["n_groups"] is not None:
        columns += [("Keys lost", partial(_beside_consecutive, name="lost_keys")), ("Values lost", partial(_beside_consecutive, name="lost_values"))]
    for title, name, choice in (("LRKV", "lrkv_rank", model["ranks"]["lrkv"]), ("MLA", "mla_latent", model["ranks"]["mla"])):
        if choice is not None and "reason" not in choice:
            columns.append((title, partial(_whole, name=name)))
    return [*columns, ("Most alike", _alike)]


def _beside_consecutive(entry: dict[str, Any], *, name: str) -> str:
    return f"{entry[name]:.3f} ({entry['consecutive'][name]:.3f})" if name in entry else "-"


def _whole(entry: dict[str, Any], *, name: str) -> str:
    return str(entry.get(name, "-"))


def _alike(entry: dict[str, Any]) -> str:
    best = entry.get("most_alike")
    return "-" if best is None else f"{min(best['similarity'].values()):.2f} ({', '.join(map(str, best['heads']))})"


def _join_lines(join: dict[str, Any]) -> Sequence[str]:
    if join["n_groups"] is None:
        return [f"Groups: none; {join['reason']}."]
    found = "the best of all" if join["is_best"] else "by linkage and exchanges"
    plain = join["consecutive"]
    lost = f"{_number(join['lost_keys'])} of the keys and {_number(join['lost_values'])} of the values are lost"
    against = "" if join["only_grouping"] else f" (consecutive ones: {_number(plain['lost_keys'])} and {_number(plain['lost_values'])})"
    cached = f"; {join['kv_values_per_token']} numbers cached a token" if join["kv_values_per_token"] else ""
    return [
        f"Groups: {join['n_groups']} ({join['kind'].upper()}), {found}{cached}; {lost}{against}.",
        f"Effective rank then: {_number(join['effective_rank']['qk'])} (qk), {_number(join['effective_rank']['ov'])} (ov). Keys aligned: {join['key_turns']}.",
    ]


def _rank_lines(ranks: dict[str, Any]) -> Sequence[str]:
    if "reason" in ranks:
        return [f"Ranks: none; {ranks['reason']}."]
    lines = [f"Budget: {ranks['budget_bytes_per_token']} bytes a token, {ranks['percent_of_plain']:.1f} % of plain heads."]
    for name, what, choice in (("LRKV", "rank", ranks["lrkv"]), ("MLA", "width", ranks["mla"])):
        if "reason" in choice:
            lines.append(f"{name}: none; {choice['reason']}.")
            continue
        same = f"one {what} for all layers, {choice['uniform_rank']}, loses {_number(choice['uniform_lost'])}"
        lines.append(f"{name}: {choice['bytes_per_token']} bytes, {_number(choice['lost'])} of keys and values lost; {same}.")
    return lines


def _duplicate_lines(duplicates: dict[str, Any]) -> Sequence[str]:
    n, least = duplicates["n_pairs"], duplicates["removable_in_every_layer"]
    lines = [f"Near-duplicates (at least {duplicates['threshold']} alike in both circuits): {n} pairs; {least} heads can go in every layer."]
    return lines if duplicates["saves_cache"] else [*lines, f"Note: {duplicates['reason']}."]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


# ---- try ----------------------------------------------------------------------------------------------------------------

TRY_COLUMNS = ("name", "label", "loss", "suggested_less_this", "low", "high")


def try_rows(found: dict[str, Any]) -> Iterable[tables.Row]:
    """Rows of the CSV file, one a model."""
    for arm in found["losses"]:
        apart = arm.get("suggested_less_this", {})
        yield (arm["name"], arm["label"], arm["loss"], apart.get("mean"), apart.get("low"), apart.get("high"))


def show_trial(found: dict[str, Any], console: Console) -> None:
    """Prints the losses and what they say."""
    cached, tokens, rank = found["kv_values_per_token"], found["tokens"], found["effective_rank"]
    what = _counted(found["n_groups"], "group") if "n_groups" in found else f"{_counted(found['n_removed'], 'head')} a layer removed"
    console.print(f"{found['label']}: {what}; {cached['before']} -> {cached['after']} numbers cached a token")
    cells = []
    for arm in found["losses"]:
        apart = arm.get("suggested_less_this")
        cells.append((arm["label"], f"{arm['loss']:.4f}", "" if apart is None else f"{apart['mean']:+.4f} ({apart['low']:+.4f} to {apart['high']:+.4f})"))
    tables.print_cells(("Model", "Nats a token", "Suggestion less this (95 %)"), cells, console)
    console.print(found["verdict"])
    console.print(f"Effective rank: {_pair(rank['measured'])}; predicted {_pair(rank['predicted'])}.")
    console.print(f"Loss on {tokens['n_tokens']} tokens of {tokens['source']} in sequences of {tokens['seq_len']}.")


def _counted(n: int, thing: str) -> str:
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


def _pair(ranks: dict[str, float | None]) -> str:
    return f"{_number(ranks['qk'])} (qk), {_number(ranks['ov'])} (ov)"
