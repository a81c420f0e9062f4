"""A report's document -> one HTML page that opens from disk: text, tables, figures, and the document itself for the page's script."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from headrank.definitions import CIRCUITS

PARTS = Path(__file__).parent / "data" / "report"
SLOT = re.compile(r"<!--slot:([a-z]+)-->")
NONE = "–"  # an undefined value
Document = dict[str, Any]
Columns = dict[str, dict[str, Callable[[Document], str]]]  # group -> name -> the cell of one model in one circuit


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One figure of the page."""

    circuit: str
    title: str
    notes: str
    """What shades and dashes mean."""
    svg: str
    """As headrank.svg.inline_svg makes it."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What is suggested for one model, as text."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """A layer each."""
    lines: Sequence[str]
    """What it comes to."""


def report_page(document: Document, plots: Sequence[Plot], advice: Sequence[Advice] = ()) -> str:
    """The page. All its numbers are the document's; whatever a label or a path holds stays text."""
    script = (PARTS / "script.js").read_text(encoding="utf-8")
    slots: dict[str, str] = {
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_sha256(script)}'; img-src data:",
        "style": (PARTS / "style.css").read_text(encoding="utf-8"),
        "script": script,
        "document": embedded_json(document),
        "title": escape(f"Head diversity: {_models_named(document)}"),
        "lead": _lead(document),
        "faults": _faults(document),
        "summary": _summary(document),
        "plots": _plots(document, plots),
        "layers": _side_by_side(document),
        "decisions": _decisions(advice),
        "models": _models(document),
        "settings": _settings(document),
        "definitions": _definitions(document),
    }
    # One pass, so that a slot's name inside what is put in is left alone.
    return SLOT.sub(lambda slot: slots[slot[1]], (PARTS / "page.html").read_text(encoding="utf-8"))


def embedded_json(document: Document) -> str:
    """The document as JSON in which nothing can end the script element that holds it, or begin a comment or a tag."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _name(model: Document) -> str:
    return f"{model['label']} ({model['scale']})" if model["scale"] else str(model["label"])


def _models_named(document: Document) -> str:
    names = [_name(model) for model in document["models"]]
    if len(names) > 3:
        scales = {model["scale"] for model in document["models"]}
        of_family = f" of {scales.pop()}" if len(scales) == 1 and None not in scales else ""
        return f"{len(names)} models{of_family}"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _lead(document: Document) -> str:
    """What was measured, in a line."""
    tokens = document["tokens"]
    fed = f"{tokens['n_sequences']} × {tokens['seq_len']} tokens of {tokens['source']}" if tokens else "the weights alone"
    if tokens is None and document["source"] == "activations":
        fed = "tokens that differ by model"
    circuits = " and ".join(f"{circuit.upper()} ({CIRCUITS[circuit]})" for circuit in document["circuits"])
    return escape(f"{'Activations on' if document['source'] == 'activations' else 'From'} {fed}. Circuits: {circuits}.")


def _faults(document: Document) -> str:
    """Layers without numbers, or nothing."""
    lines = [
        f"<li>{escape(_name(model))}, {circuit.upper()}: {escape(layer['reason'])}</li>"
        for model in document["models"]
        for circuit, results in model["circuits"].items()
        for layer in results["layers"]
        if layer["similarity"] is None
    ]
    return f'<div class="faults" role="note"><p>Layers without numbers:</p><ul>{"".join(lines)}</ul></div>' if lines else ""


SUMMARY: Columns = {
    "Effective rank": {
        "mean": lambda of: _ranked(of["uncentered"]),
        "% of H": lambda of: number(of["uncentered"]["percent_of_heads"], 1),
        "null": lambda of: _null(of["uncentered"]),
    },
    "Effective rank, centred": {
        "mean": lambda of: _ranked(of["centered"]),
        "% of H": lambda of: number(of["centered"]["percent_of_heads"], 1),
        "% of max": lambda of: number(of["centered"]["percent_of_attainable"], 1),
        "null": lambda of: _null(of["centered"]),
    },
    "Similarity of pairs": {
        "mean": lambda of: number(of["mean_off_diagonal"], 3),
        "largest": lambda of: _largest(of["most_similar"]),
        "dead": lambda of: str(of["dead_heads"]),
    },
}
CACHE: dict[str, Callable[[Document], str]] = {
    "bytes": lambda model: f"{model['kv_bytes_per_token']:,}",
    "% of MHA": lambda model: number(model["kv_percent_of_mha"], 1),
}


def _summary(document: Document) -> str:
    """A row a model and circuit: means over layers."""
    shown = _summary_columns(document)
    groups = {name: tuple(columns) for name, columns in shown.items()} | {"KV cache a token": tuple(CACHE)}
    above = "".join(f'<th scope="colgroup" colspan="{len(columns)}" class="group">{name}</th>' for name, columns in groups.items())
    below = "".join(f'<th scope="col"{_first(place)}>{name}</th>' for columns in groups.values() for place, name in enumerate(columns))
    head = f'<tr><th scope="col" rowspan="2">Model</th><th scope="col" rowspan="2">Circuit</th>{above}</tr><tr>{below}</tr>'
    body = "".join(f"<tbody>{_summary_rows(model, shown)}</tbody>" for model in document["models"])
    return _scrolling("Means over layers", f'<table class="summary"><thead>{head}</thead>{body}</table>')


def _summary_columns(document: Document) -> Columns:
    """SUMMARY without the null where there is none."""
    has_null = any("null" in results["uncentered"] for model in document["models"] for results in model["circuits"].values())
    return {group: {name: cell for name, cell in columns.items() if has_null or name != "null"} for group, columns in SUMMARY.items()}


def _summary_rows(model: Document, shown: Columns) -> str:
    span = f' rowspan="{len(model["circuits"])}"'
    first = f'<th scope="rowgroup"{span}>{escape(_name(model))}</th>'
    last = "".join(f"<td{span}{_first(place)}>{cell(model)}</td>" for place, cell in enumerate(CACHE.values()))
    rows = []
    for circuit, results in model["circuits"].items():
        cells = "".join(f"<td{_first(place)}>{cell(results)}</td>" for columns in shown.values() for place, cell in enumerate(columns.values()))
        rows.append(f'<tr>{first}<th scope="row">{circuit.upper()}</th>{cells}{last}</tr>')
        first = last = ""  # they span the rows that follow
    return "".join(rows)


def _side_by_side(document: Document) -> str:
    """The circuits' tables of layers, beside each other where there is room for that many models."""
    tables = "".join(_layers(document, circuit) for circuit in document["circuits"])
    return f'<div class="side" style="--models: {len(document["models"])}">{tables}</div>'


def _layers(document: Document, circuit: str) -> str:
    """Effective rank a layer: a row a layer, two columns a model."""
    models = document["models"]
    names = "".join(f'<th scope="colgroup" colspan="2" class="group">{escape(_name(model))}</th>' for model in models)
    kinds = '<th scope="col" class="group">uncentred</th><th scope="col">centred</th>' * len(models)
    by_key = [{layer["key"]: layer for layer in model["circuits"][circuit]["layers"]} for model in models]
    rows = []
    for key in dict.fromkeys(key for layers in by_key for key in layers):
        cells = "".join(_rank_cells(layers.get(key)) for layers in by_key)
        rows.append(f'<tr><th scope="row">{escape(key)}</th>{cells}</tr>')
    means = "".join(
        f"<td{_class(group)}>{number(model['circuits'][circuit][kind]['mean_effective_rank'], 2)}</td>"
        for model in models
        for kind, group in (("uncentered", "group"), ("centered", ""))
    )
    head = f'<thead><tr><th scope="col" rowspan="2">Layer</th>{names}</tr><tr>{kinds}</tr></thead>'
    body = f'<tbody>{"".join(rows)}</tbody><tfoot><tr><th scope="row">Mean</th>{means}</tr></tfoot>'
    table = f'<table class="layers">{head}{body}</table>'
    title = f"{circuit.upper()}: {CIRCUITS[circuit]}"
    return f"<section><h3>{title}</h3>{_scrolling(f'Effective rank a layer, {circuit.upper()}', table)}</section>"


def _rank_cells(layer: Document | None) -> str:
    """A layer's two cells; a bar behind the number is as long as its share of the attainable."""
    if layer is None:
        return '<td class="group"></td><td></td>'
    cells = []
    for kind, group in (("uncentered", "group"), ("centered", "")):
        part = layer[kind]
        share = part["percent_of_attainable"]
        bar = "" if share is None else f' style="--share:{share:.1f}%"'
        why = f' title="{escape(part["reason"])}"' if "reason" in part else ""
        cells.append(f"<td{_class(f'bar {group}'.strip())}{bar}{why}>{number(part['effective_rank'], 2)}</td>")
    return "".join(cells)


def _plots(document: Document, plots: Sequence[Plot]) -> str:
    sections = []
    for circuit in document["circuits"]:
        shown = "".join(
            f'<figure class="plot"><figcaption><strong>{escape(plot.title)}</strong> {escape(plot.notes)}</figcaption>'
            f"{_scrolling(f'{plot.title}, {circuit.upper()}', plot.svg)}</figure>"
            for plot in plots
            if plot.circuit == circuit
        )
        sections.append(f'<section><h3>{circuit.upper()}: {CIRCUITS[circuit]}</h3><div class="plots">{shown}</div></section>')
    return "".join(sections)


def _decisions(advice: Sequence[Advice]) -> str:
    if not advice:
        return "<p>No suggestions were asked for, or no weights were at hand to make them from.</p>"
    return "".join(_advised(one) for one in advice)


def _advised(advice: Advice) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in advice.columns)
    rows = "".join(f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>' for row in advice.rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    lines = "".join(f"<li>{escape(line)}</li>" for line in advice.lines)
    return f"<section><h3>{escape(advice.name)}</h3><ul>{lines}</ul>{_scrolling(f'Suggestions for {advice.name}, a layer a row', table)}</section>"


GEOMETRY = {"layers": "n_layer", "heads": "n_head", "KV heads": "n_kv_head", "d_model": "d_model", "d_head": "d_head", "parameters": "n_parameters"}


def _models(document: Document) -> str:
    """What each model is, a row a model, and where it lies."""
    columns = ("Model", "kind", *GEOMETRY, "trained on", "loss")
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    rows = []
    for model in document["models"]:
        trained = model.get("trained", {})
        training = (f"{trained['tokens_seen']:,} tokens", f"{trained['validation_loss']:.3f}") if trained else (NONE, NONE)
        cells = (model["kind"].upper(), *(f"{model[name]:,}" for name in GEOMETRY.values()), *training)
        rows.append(f'<tr><th scope="row">{escape(_name(model))}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>')
    table = _scrolling("Models", f'<table class="models"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>')
    return f'{table}<div class="origins">{"".join(_origin_of(model) for model in document["models"])}</div>'


def _origin_of(model: Document) -> str:
    facts = [("Checkpoint", model["checkpoint"]), ("Fingerprint", model["fingerprint"]), ("Family", model["family"])]
    if model["measured"]:
        facts.append(("Measured with", ", ".join(f"{name} {_said(value)}" for name, value in model["measured"].items())))
    return f"<section><h4>{escape(_name(model))}</h4>{_list(facts)}</section>"


def _settings(document: Document) -> str:
    """Versions, settings and tokens, name by name."""
    facts: list[tuple[str, str]] = [("Source", document["source"]), ("Circuits", ", ".join(circuit.upper() for circuit in document["circuits"]))]
    if document["source"] == "weights":
        facts.append(("raw", _said(document["raw"])))
    facts += [(name, _said(value)) for name, value in document["settings"].items() if any(name not in model["measured"] for model in document["models"])]
    facts.append(("Similarities", f"rounded to {document['similarity_digits']} decimals in this page"))
    facts += _token_facts("Tokens", document["tokens"])
    for model in document["models"]:
        facts += _token_facts(f"Tokens of {_name(model)}", model.get("tokens"))
    facts.append(("Versions", ", ".join(f"{name} {number}" for name, number in document["versions"].items())))
    return _list(facts)


def _token_facts(name: str, tokens: Document | None) -> list[tuple[str, str]]:
    if not tokens:
        return []
    fed = f"{tokens['n_sequences']} × {tokens['seq_len']}, {tokens['n_tokens']:,} in all, of {tokens['source']}; seed {tokens['seed']}"
    return [(name, fed), (f"{name}, sha256", tokens["sha256"].removeprefix("sha256:"))]


def _definitions(document: Document) -> str:
    entries = []
    for definition in document["definitions"]:
        cited = ""
        if definition["source"]:
            name, address = definition["source"]
            cited = f' <cite><a href="{escape(address)}" rel="noreferrer">{escape(name)}</a></cite>' if address else f" <cite>{escape(name)}</cite>"
        entries.append(f"<dt>{escape(definition['term'])}</dt><dd>{escape(definition['text'])}{cited}</dd>")
    return f'<dl class="definitions">{"".join(entries)}</dl>'


def _list(facts: Iterable[tuple[str, str]]) -> str:
    return f'<dl class="facts">{"".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)}</dl>'


def _scrolling(name: str, content: str) -> str:
    """A box that scrolls by itself where the page is too narrow, by keys as well."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}">{content}</div>'


def _first(place: int) -> str:
    """Room before the first column of a group."""
    return _class("" if place else "group")


def _class(names: str) -> str:
    return f' class="{names}"' if names else ""


def _said(value: Any) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def number(value: float | None, digits: int) -> str:
    """A number as the page shows it: a real minus sign, and a dash where it is undefined."""
    return NONE if value is None else f"{value:.{digits}f}".replace("-", "−")


def _ranked(part: Document) -> str:
    interval = f" <small>[{number(part['interval'][0], 2)}, {number(part['interval'][1], 2)}]</small>" if "interval" in part else ""
    return number(part["mean_effective_rank"], 2) + interval


def _null(part: Document) -> str:
    return number(part["null"]["mean"], 2) if "null" in part else NONE


def _largest(pair: Document | None) -> str:
    if pair is None:
        return NONE
    first, second = pair["heads"]
    return f"{number(pair['similarity'], 3)} <small>layer {escape(str(pair['layer']))}: {first}, {second}</small>"
