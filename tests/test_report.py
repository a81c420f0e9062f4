"""The report: its document against the other commands', its page as text, and the page in a real browser."""

import base64
import hashlib
import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.figure import Figure
from typer.testing import CliRunner

from headrank import commands, report_command
from headrank.cli import app
from headrank.definitions import CIRCUITS, definitions
from headrank.page import PARTS, embedded_json, number, report_page
from headrank.report import DIGITS, CircuitResults, report_document
from headrank.results import ModelResult
from headrank.svg import inline_svg
from tests.sample_results import TOKENS, model, results
from tests.test_cli import write_model

HOSTILE = "</script><b>&\"'$x$<!--"
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
SIZE = 6  # decimals that a similarity keeps


@dataclass
class Element:
    """An element of a page."""

    tag: str
    attributes: dict[str, str | None]
    parent: "Element | None" = None
    children: list["Element"] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def all(self, tag: str) -> list["Element"]:
        """Its descendants of that name, in their order."""
        return [found for child in self.children for found in ([child] if child.tag == tag else []) + child.all(tag)]

    @property
    def text(self) -> str:
        return "".join(self.texts) + "".join(child.text for child in self.children)


class Tree(HTMLParser):
    """A page as a tree; a tag that is closed by another, or never, is an error."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.root = self.here = Element("", {})
        self.feed(page)
        self.close()
        if self.here is not self.root:
            raise ValueError(f"<{self.here.tag}> is not closed")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if len(dict(attrs)) < len(attrs):
            raise ValueError(f"<{tag}> has an attribute twice")
        element = Element(tag, dict(attrs), self.here)
        self.here.children.append(element)
        if tag not in VOID:
            self.here = element

    def handle_endtag(self, tag: str) -> None:
        if tag != self.here.tag or self.here.parent is None:
            raise ValueError(f"</{tag}> closes <{self.here.tag}>")
        self.here = self.here.parent

    def handle_data(self, data: str) -> None:
        self.here.texts.append(data)


def tables_of(root: Element, name: str) -> list[Element]:
    """The tables of one class."""
    return [table for table in root.all("table") if table.attributes.get("class") == name]


def carried(page: str) -> dict[str, Any]:
    """The document that a page carries."""
    (script,) = [one for one in Tree(page).root.all("script") if one.attributes.get("type") == "application/json"]
    return json.loads(script.text)


def sample_document(models: Callable[[bool, int], list[ModelResult]], circuits: Sequence[str] = ("qk", "ov"), source: str = "activations") -> dict[str, Any]:
    """The document of models made of random Gram matrices. models(is_centered, seed)."""
    made = {}
    for seed, circuit in enumerate(circuits):
        plain, centered = (
            results("effrank", models(is_centered, 17 * seed), source=source, circuit=circuit, is_centered=is_centered) for is_centered in (False, True)
        )
        made[circuit] = CircuitResults(plain=plain, centered=centered)
    return report_document(made, measured=[{"device": "cpu"}] * len(models(False, 0)))


def spoilt_models(is_centered: bool, seed: int) -> list[ModelResult]:
    """Three layers of five heads: in the first head 3 is dead, the second has no numbers."""
    kind = {"layers": range(3), "n_layer": 3, "n_head": 5, "is_centered": is_centered}
    return [model(HOSTILE, seed=seed, dead={0: [3]}, faults={1: "c_q.weight of head 2 is not finite"}, **kind), model("MLA", seed=seed + 1, **kind)]


@dataclass(frozen=True)
class Written:
    """What the command wrote, and where its models lie."""

    page: Path
    document: dict[str, Any]
    stdout: str
    models: tuple[str, str]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    """The report of two tiny models, one of them with a path that is markup."""
    folder = tmp_path_factory.mktemp("report")
    mha = write_model(folder / "<" / "script><b>", kind="mha")
    gqa = write_model(folder / "gqa", kind="gqa", n_kv_head=2)
    models = (f'<b>&"={mha}', f"GQA={gqa}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRANK_CACHE", str(folder / "cache"))
        done = CliRunner().invoke(app, ["report", *models, "--sequences", "9", "--json", "--out", str(folder / "out")])
        assert done.exit_code == 0, done.stderr
        yield Written(page=folder / "out" / "report.html", document=json.loads((folder / "out" / "report.json").read_text()), stdout=done.stdout, models=models)


def test_the_page_carries_the_document_that_is_written_and_printed(written: Written) -> None:
    assert carried(written.page.read_text()) == written.document
    assert json.loads(written.stdout) == written.document


def test_the_document_has_the_numbers_of_the_other_commands(written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "draw", lambda results: Figure())
    common = [*written.models, "--sequences", "9", "--json", "--out", str(tmp_path)]
    for circuit in ("qk", "ov"):
        for kind, flags in (("uncentered", []), ("centered", ["--centered"])):
            other = json.loads(CliRunner().invoke(app, ["effrank", *common, "--circuit", circuit, *flags]).stdout)
            for mine, theirs in zip(written.document["models"], other["models"], strict=True):
                assert mine["circuits"][circuit][kind]["mean_effective_rank"] == theirs["mean_effective_rank"]
                assert mine["circuits"][circuit][kind]["interval"] == theirs["interval"]
                for layer, same in zip(mine["circuits"][circuit]["layers"], theirs["layers"], strict=True):
                    assert layer[kind]["effective_rank"] == same["effective_rank"]
                    assert layer[kind]["interval"] == same["intervals"]["effective_rank"]
                    assert layer["most_similar"] == same["most_similar"]
        heatmap = json.loads(CliRunner().invoke(app, ["heatmap", *common, "--circuit", circuit, "--layer", "0,1,2"]).stdout)
        for mine, theirs in zip(written.document["models"], heatmap["models"], strict=True):
            for layer, same in zip(mine["circuits"][circuit]["layers"], theirs["layers"], strict=True):
                np.testing.assert_allclose(layer["similarity"], same["similarity"], rtol=0, atol=0.5000001 * 10**-SIZE)
    assert written.document["similarity_digits"] == DIGITS == SIZE


def test_the_tables_show_the_document(written: Written) -> None:
    root = Tree(written.page.read_text()).root
    bodies = tables_of(root, "summary")[0].all("tbody")
    assert len(bodies) == 2
    for entry, body in zip(written.document["models"], bodies, strict=True):
        for (circuit, of), row in zip(entry["circuits"].items(), body.all("tr"), strict=True):
            cells = [cell.text for cell in row.all("td")]
            assert circuit.upper() in [cell.text for cell in row.all("th")]
            low, high = of["uncentered"]["interval"]
            assert cells[0] == f"{of['uncentered']['mean_effective_rank']:.2f} [{low:.2f}, {high:.2f}]"
            assert cells[1] == f"{of['uncentered']['percent_of_heads']:.1f}"
            assert cells[2] == f"{of['uncentered']['null']['mean']:.2f}"
            assert cells[5] == f"{of['centered']['percent_of_attainable']:.1f}"
            assert cells[7] == number(of["mean_off_diagonal"], 3)
    for circuit, table in zip(("qk", "ov"), tables_of(root, "layers"), strict=True):
        of_models = [entry["circuits"][circuit]["layers"] for entry in written.document["models"]]
        expected = [[f"{layers[i][kind]['effective_rank']:.2f}" for layers in of_models for kind in ("uncentered", "centered")] for i in range(3)]
        assert [[cell.text for cell in row.all("td")] for row in table.all("tbody")[0].all("tr")] == expected


def test_the_page_says_where_its_numbers_come_from(written: Written) -> None:
    text = Tree(written.page.read_text()).root.text
    for entry in written.document["models"]:
        assert entry["fingerprint"] in text
        assert entry["checkpoint"] in text
    assert written.document["tokens"]["sha256"].removeprefix("sha256:") in text
    assert written.document["versions"]["numpy"] in text
    assert all(definition["text"] in text for definition in written.document["definitions"])
    assert "device cpu" in text


def test_the_page_is_well_formed_and_all_its_references_lead_somewhere(written: Written) -> None:
    page = written.page.read_text()
    root = Tree(page).root
    elements = [root]
    for element in elements:
        elements += element.children
    ids = Counter(element.attributes["id"] for element in elements if "id" in element.attributes)
    assert set(ids.values()) == {1}
    pointed = {value[1:] for e in elements for value in [e.attributes.get("href") or ""] if value.startswith("#")}
    pointed |= {name for e in elements for key in ("for", "aria-labelledby", "aria-describedby") for name in (e.attributes.get(key) or "").split()}
    pointed |= {name for e in elements for value in e.attributes.values() for name in re.findall(r"url\(#([^)]*)\)", value or "")}
    assert pointed - set(ids) == set()
    assert len(pointed) > 20
    levels = [int(e.tag[1]) for e in _in_order(root) if re.fullmatch(r"h\d", e.tag)]
    assert levels[0] == 1
    assert all(below <= above + 1 for above, below in pairwise(levels))
    assert {tag: len(root.all(tag)) for tag in ("h1", "main", "nav", "header", "footer")} == dict.fromkeys(("h1", "main", "nav", "header", "footer"), 1)
    assert all("aria-label" in svg.attributes for svg in root.all("svg") if svg.attributes.get("role") == "img" and "viewBox".lower() in svg.attributes)


def _in_order(element: Element) -> Iterator[Element]:
    yield element
    for child in element.children:
        yield from _in_order(child)


def test_nothing_on_the_page_is_fetched(written: Written) -> None:
    page = written.page.read_text()
    root = Tree(page).root
    everything = list(_in_order(root))
    assert not [e for e in everything if {"src", "srcset", "data", "poster", "action", "background"} & set(e.attributes)]
    assert [e.attributes["href"] for e in root.all("link")] == ["data:,"]
    addresses = [e.attributes["href"] or "" for e in everything if "href" in e.attributes and e.tag not in ("a", "link")]
    assert all(address.startswith("#") for address in addresses)
    assert not re.search(r"@import|url\((?!#)", page)
    policy = next(e.attributes["content"] or "" for e in root.all("meta") if e.attributes.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")
    (script,) = [one for one in root.all("script") if "type" not in one.attributes]
    assert f"script-src 'sha256-{base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()}'" in policy
    assert not re.search(r"fetch\(|XMLHttpRequest|WebSocket|import\(|innerHTML|eval\(", script.text)


def test_no_label_or_path_becomes_markup(written: Written) -> None:
    hostile = report_page(sample_document(spoilt_models), [])
    for page, label in ((hostile, HOSTILE), (written.page.read_text(), '<b>&"')):
        root = Tree(page).root
        assert len(root.all("script")) == 2
        assert root.all("b") == []
        assert carried(page)["models"][0]["label"] == label
        assert label in root.all("h1")[0].text
        assert any(label == head.text for head in root.all("th"))
    assert "</script><b>" in written.document["models"][0]["checkpoint"]


def test_text_that_looks_like_a_slot_of_the_template_stays_text() -> None:
    page = report_page(sample_document(lambda is_centered, seed: [model("<!--slot:script-->", layers=[0], is_centered=is_centered)]), [])
    assert Tree(page).root.all("h1")[0].text == "Head diversity: <!--slot:script-->"


def test_embedded_json_holds_no_character_that_html_reads_and_no_nan() -> None:
    document = {"label": HOSTILE + "\u2028]]>", "value": 0.1}
    assert not set(embedded_json(document)) & set("<>&\u2028")
    assert json.loads(embedded_json(document)) == document
    with pytest.raises(ValueError, match="JSON compliant"):
        embedded_json({"value": float("nan")})


def test_layers_without_numbers_are_listed_and_shown_as_dashes() -> None:
    document = sample_document(spoilt_models)
    layer = document["models"][0]["circuits"]["qk"]["layers"][1]
    assert layer["similarity"] is None
    assert layer["uncentered"]["eigenvalues"] is None
    assert "not finite" in layer["reason"]
    root = Tree(report_page(document, [])).root
    notice = next(e for e in root.all("div") if e.attributes.get("class") == "faults")
    assert [e.text for e in notice.all("li")] == [f"{HOSTILE}, {circuit}: c_q.weight of head 2 is not finite" for circuit in ("QK", "OV")]
    row = tables_of(root, "layers")[0].all("tbody")[0].all("tr")[1]
    assert [cell.text for cell in row.all("td")][:2] == ["–", "–"]
    assert not re.search(r"\b(nan|none|null)\b", row.text + tables_of(root, "summary")[0].all("tbody")[0].text, re.IGNORECASE)


def test_one_head_has_a_rank_and_no_centred_one() -> None:
    document = sample_document(lambda is_centered, seed: [model("a", layers=[0, 1], n_head=1, is_centered=is_centered)])
    layer = document["models"][0]["circuits"]["ov"]["layers"][1]
    assert layer["uncentered"]["effective_rank"] == 1
    assert layer["centered"]["effective_rank"] is None
    assert layer["centered"]["reason"] == "one head: the centred matrix is zero"
    assert layer["reason"] == "one head: there are no pairs"
    assert "Head diversity: a" in report_page(document, [])


@pytest.mark.parametrize(
    ("labels", "scale", "title"),
    [
        (["a"], None, "a"),
        (["a", "b"], "nano", "a (nano) and b (nano)"),
        (["a", "b", "c"], None, "a, b and c"),
        (["a", "b", "c", "d"], "128M", "4 models of 128M"),
        (["a", "b", "c", "d"], None, "4 models"),
    ],
)
def test_the_title_names_the_models_while_they_are_few(labels: list[str], scale: str | None, title: str) -> None:
    document = sample_document(lambda is_centered, seed: [model(label, layers=[0], scale=scale, is_centered=is_centered) for label in labels])
    assert Tree(report_page(document, [])).root.all("h1")[0].text == f"Head diversity: {title}"


def test_tokens_that_differ_by_model_are_told_of_each() -> None:
    def models(is_centered: bool, seed: int) -> list[ModelResult]:
        fed = [{**TOKENS, "n_sequences": n, "sha256": f"sha256:{n}"} for n in (41, 43)]
        return [model(name, layers=[0], is_centered=is_centered, tokens=tokens) for name, tokens in zip("ab", fed, strict=True)]

    text = Tree(report_page(sample_document(models), [])).root.text
    assert "tokens that differ by model" in text
    assert "Tokens of a" in text
    assert "43 × 127" in text


def test_a_measurement_file_stands_for_its_model(written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_command, "_plots", lambda given: [])
    file = tmp_path / "gqa.safetensors"
    assert CliRunner().invoke(app, ["measure", written.models[1], "--sequences", "9", "-o", str(file)]).exit_code == 0
    done = CliRunner().invoke(app, ["report", f"GQA={file}", "--json", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.stderr
    direct = written.document["models"][1]
    assert direct["suggestions"]["ranks"]
    assert json.loads(done.stdout)["models"] == [{name: value for name, value in direct.items() if name != "suggestions"}]  # which need weights


def test_suggestions_stand_on_the_page_as_in_the_document(written: Written) -> None:
    root = Tree(written.page.read_text(encoding="utf-8")).root
    section = next(one for one in root.all("section") if one.attributes.get("id") == "decisions")
    rows = [row for table in section.all("table") for row in table.all("tbody")[0].all("tr")]
    entries = [entry for model in written.document["models"] for entry in model["suggestions"]["layers"]]
    assert len(rows) == len(entries) > 0
    for row, entry in zip(rows, entries, strict=True):
        assert row.all("th")[0].text == str(entry["layer"])
        if "groups" in entry:
            assert "|".join(" ".join(map(str, group)) for group in entry["groups"]) in row.text


def test_stacks_have_rows_of_their_own() -> None:
    def models(is_centered: bool, seed: int) -> list[ModelResult]:
        return [model(name, layers=[0, 1], n_head=3, is_centered=is_centered, group=group) for name, group in (("T5", "encoder"), ("GPT", ""))]

    document = sample_document(models)
    rows = tables_of(Tree(report_page(document, [])).root, "layers")[0].all("tbody")[0].all("tr")
    assert [row.all("th")[0].text for row in rows] == ["encoder.0", "encoder.1", "0", "1"]
    assert [cell.text == "" for cell in rows[0].all("td")] == [False, False, True, True]


@pytest.mark.parametrize(
    ("words", "circuits"), [((), ["qk", "ov"]), (("--circuit", "ov"), ["ov"]), (("--rope-offset", "3"), ["qk"]), (("--measure", "values"), ["values"])]
)
def test_the_circuits_are_those_that_the_measure_has(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], circuits: list[str]
) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(report_command, "_plots", lambda given: drawn.extend(given) or [])
    done = CliRunner().invoke(app, ["report", written.models[1], "--source", "weights", *words, "--json", "--no-null", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.stderr
    expected = ["ov"] if circuits == ["values"] else circuits
    document = json.loads(done.stdout)
    assert document["circuits"] == drawn == list(document["models"][0]["circuits"]) == expected
    terms = [definition["term"] for definition in document["definitions"]]
    assert "Null" not in terms
    assert "[low, high]" not in terms  # weights have no sequences
    columns = [head.text for head in Tree((tmp_path / "report.html").read_text()).root.all("thead")[0].all("th")]
    assert "null" not in columns


def test_equal_runs_write_equal_bytes(written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_command, "_plots", lambda given: [])
    for out in ("a", "b"):
        assert CliRunner().invoke(app, ["report", *written.models, "--sequences", "9", "--out", str(tmp_path / out)]).exit_code == 0
    for name in ("report.html", "report.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("source", ["weights", "activations"])
def test_every_circuit_is_defined_from_every_source(source: str) -> None:
    texts = [definitions(source=source, measure="operator", circuits=[circuit], has_intervals=True, has_null=True)[0].text for circuit in CIRCUITS]
    assert len(set(texts)) == 2
    assert "--measure cka" in definitions(source=source, measure="cka", circuits=["ov"], has_intervals=False, has_null=False)[0].text


def a_figure(label: str = "line") -> Figure:
    figure = Figure(figsize=(4, 3))
    ax = figure.add_subplot()
    ax.plot([1, 2, 3], [1, 3, 2], marker="o", label=label)
    ax.fill_between([1, 2, 3], [0, 2, 1], [2, 4, 3], alpha=0.2)
    ax.legend()
    return figure


def test_a_figure_inside_the_page_keeps_its_text_and_takes_the_colours_of_the_page() -> None:
    svg = inline_svg(a_figure(HOSTILE.replace("$", "")), "one-", alt='a "line"')
    root = Tree(svg).root.children[0]
    assert (root.tag, root.attributes["role"], root.attributes["aria-label"]) == ("svg", "img", 'a "line"')
    assert HOSTILE.replace("$", "") in [text.text for text in root.all("text")]
    assert not re.search(r"#(000000|ffffff|1f77b4)", svg)
    assert "stroke: var(--c0)" in svg
    assert not re.search(r"http|<style|<metadata|font-family|DejaVu", svg)


def test_figures_on_one_page_share_no_id() -> None:
    one, two, again = (inline_svg(a_figure(), prefix, alt="") for prefix in ("one-", "two-", "one-"))
    assert one == again
    ids = [set(re.findall(r' id="([^"]+)"', svg)) for svg in (one, two)]
    assert ids[0]
    assert not ids[0] & ids[1]
    assert set(re.findall(r"[(\"]#([^\")]+)", one)) <= ids[0]


def test_the_colours_are_those_of_the_heatmap_figure() -> None:
    stops = re.search(r"STOPS = \[([^\]]*)\]", (PARTS / "script.js").read_text())
    assert stops is not None
    shown = [[int(stop[at : at + 2], 16) / 255 for at in (1, 3, 5)] for stop in re.findall(r"#[0-9a-f]{6}", stops[1])]
    np.testing.assert_allclose(shown, colormaps["RdYlBu_r"](np.linspace(0, 1, len(shown)))[:, :3], atol=2 / 255)


# In a real browser

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-prefers-reduced-motion",
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if not CHROMIUM or not DRIVER:
        pytest.skip("needs chromium and chromedriver")
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in (*FLAGS, "--window-size=1280,900", f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        yield driver
        driver.quit()


class Shown:
    """A page in the browser."""

    def __init__(self, driver: Any, path: Path) -> None:
        self.driver = driver
        driver.get_log("browser")
        driver.get_log("performance")
        driver.get(path.as_uri())

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return self.find(selector).text

    def run(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def focused(self) -> str:
        return str(self.run("return document.activeElement.id || document.activeElement.value || document.activeElement.textContent"))

    def press(self, *keys: str) -> None:
        """Keys for what has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)


@pytest.fixture
def shown(chromium: Any, written: Written) -> Shown:
    return Shown(chromium, written.page)


def pair_shown(page: Shown) -> tuple[float, list[int]]:
    """The value and the two heads and the layer that the page tells."""
    return float(page.text("#value").replace("−", "-")), [int(found) for found in re.findall(r"\d+", page.text("#pair"))[:3]]


def check_layer(page: Shown, layer: dict[str, Any]) -> None:
    """That what is shown of a layer and its current cell is what the document says."""
    value, (i, j, key) = pair_shown(page)
    assert str(key) == layer["key"] == page.text("#layer-name")
    assert value == pytest.approx(layer["similarity"][i][j], abs=5.01e-4)
    for name, digits in (("effective_rank", 2), ("percent_of_heads", 1), ("percent_of_attainable", 1), ("n_components", 0)):
        cells = page.run("return [...document.querySelectorAll(`[data-of=${arguments[0]}] td`)].map((cell) => cell.textContent)", name)
        assert cells == [f"{layer[kind][name]:.{digits}f}" for kind in ("uncentered", "centered")]
    ends = page.run("return document.querySelector('[data-of=interval] td').textContent")
    assert ends == " – ".join(f"{end:.2f}" for end in layer["uncentered"]["interval"])
    assert page.text("#mean") == number(layer["mean_off_diagonal"], 3)


@pytest.mark.browser
def test_the_page_opens_without_an_error_and_asks_for_nothing(chromium: Any, written: Written) -> None:
    page = Shown(chromium, written.page)
    page.find("#layer").send_keys("\ue014")
    messages = [json.loads(entry["message"])["message"] for entry in chromium.get_log("performance")]
    asked = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    of_page = [request["request"]["url"] for request in asked if request["documentURL"] == written.page.as_uri()]  # others are the browser's own
    assert [url for url in of_page if not url.startswith("data:")] == [written.page.as_uri()]
    assert chromium.get_log("browser") == []
    assert page.run("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.browser
def test_a_label_is_no_element_in_a_browser_either(shown: Shown) -> None:
    assert shown.text("h1") == 'Head diversity: <b>&" and GQA'
    assert shown.run("return document.querySelectorAll('b').length - document.querySelectorAll('.frame b').length") == 0
    assert [option.text for option in shown.find("#model").find_elements("css selector", "option")] == ['<b>&"', "GQA"]


@pytest.mark.browser
def test_the_slider_shows_each_layer_as_the_document_has_it(shown: Shown, written: Written) -> None:
    for m in range(2):
        shown.run("const s = document.getElementById('model'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))", m)
        for circuit in ("qk", "ov"):
            shown.find(f"#circuits input[value={circuit}]").click()
            layers = written.document["models"][m]["circuits"][circuit]["layers"]
            shown.find("#layer").send_keys("\ue011")  # Home
            for place, layer in enumerate(layers):
                shown.find("#layer").send_keys(*(["\ue014"] if place else []))  # →
                check_layer(shown, layer)
                assert circuit.upper() in shown.text("#state")
                assert "activations" in shown.text("#state")
                frame = shown.run("return document.querySelector('.frame.now').dataset.model + document.querySelector('.frame.now').dataset.layer")
                assert frame == f"{m}{place}"


@pytest.mark.browser
def test_keys_alone_reach_the_controls_and_move_the_cell(shown: Shown, written: Written) -> None:
    shown.run("document.activeElement.blur()")
    shown.find("#model").send_keys("")
    shown.run("document.getElementById('model').focus()")
    reached = [shown.focused()]
    for _ in range(4):
        shown.press("\ue004")  # Tab
        reached.append(shown.focused())
    layers = written.document["models"][0]["circuits"]["qk"]["layers"]
    first, second = layers[1]["most_similar"]["heads"]
    assert reached[:4] == ["model", "qk", "layer", "heatmap"]
    assert reached[4] == "most"
    assert pair_shown(shown)[1] == [first, second, 1]
    shown.run("document.getElementById('heatmap').focus()")
    shown.press("\ue011", "\ue013", "\ue013", "\ue013", "\ue013")  # Home, ↑
    assert shown.text("#pair").startswith("Head 0 of layer 1 with itself")
    shown.press("\ue014", "\ue014", "\ue015")  # →, →, ↓
    assert pair_shown(shown)[1] == [1, 2, 1]
    check_layer(shown, layers[1])
    shown.press("\ue010")  # End
    assert pair_shown(shown)[1] == [1, 3, 1]
    shown.press("\ue00f")  # Page Down
    assert pair_shown(shown)[1] == [1, 3, 2]
    check_layer(shown, layers[2])
    shown.press("\ue00f")
    assert pair_shown(shown)[1] == [1, 3, 2]  # there is no further layer
    shown.press("\ue00e", "\ue00e", "\ue00e")  # Page Up
    check_layer(shown, layers[0])


@pytest.mark.browser
def test_the_pointer_and_the_small_pictures_choose_too(shown: Shown, written: Written) -> None:
    from selenium.webdriver import ActionChains

    heatmap = shown.find("#heatmap svg")
    shown.run("arguments[0].scrollIntoView({block: 'center'})", heatmap)
    width, cell = heatmap.rect["width"], (heatmap.rect["width"] - 28) / 4
    ActionChains(shown.driver).move_to_element_with_offset(heatmap, int(28 + 3.5 * cell - width / 2), int(0.5 * cell - width / 2)).perform()
    value, heads = pair_shown(shown)
    assert heads == [0, 3, 1]
    assert value == pytest.approx(written.document["models"][0]["circuits"]["qk"]["layers"][1]["similarity"][0][3], abs=5.01e-4)
    frame = shown.find(".frame[data-model='1'][data-layer='2']")
    shown.run("arguments[0].scrollIntoView({block: 'center'})", frame)
    frame.click()
    assert shown.text("#state").startswith("GQA, layer 2.")
    shown.find("#most").click()
    layer = written.document["models"][1]["circuits"]["qk"]["layers"][2]
    assert pair_shown(shown)[1] == [*layer["most_similar"]["heads"], 2]
    check_layer(shown, layer)


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_and_a_phone_does_not_scroll_sideways(chromium: Any, written: Written, scheme: str) -> None:
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True})
    try:
        page = Shown(chromium, written.page)
        assert page.run("return [document.documentElement.scrollWidth, document.body.scrollWidth]") == [390, 390]
        assert page.run("return [...document.querySelectorAll('.scroll')].every((box) => box.tabIndex === (box.scrollWidth > box.clientWidth ? 0 : -1))")
        colors = page.run(
            "return ['p', '.lead', '.note', 'a', 'small', 'thead th', 'dt', '#pair', 'figcaption', '#most', '.plot svg text'].map((selector) => {"
            "const style = getComputedStyle(document.querySelector(selector)); return selector.includes('svg') ? style.fill : style.color})"
        )
        ground = page.run("return ['--paper', '--ground'].map((name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim())")
        papers = [[int(color[at : at + 2], 16) for at in (1, 3, 5)] for color in ground]
        assert (sum(papers[0]) > 600) == (scheme == "light")
        for color in colors:
            ink = [int(part) for part in re.findall(r"\d+", color)[:3]]
            assert min(contrast(ink, paper) for paper in papers) >= 4.5, color
    finally:
        chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def contrast(one: list[int], other: list[int]) -> float:
    """WCAG's contrast ratio of two colours."""
    parts = np.array([one, other]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    low, high = sorted(linear @ [0.2126, 0.7152, 0.0722])
    return float((high + 0.05) / (low + 0.05))


@pytest.mark.browser
def test_dead_heads_and_layers_without_numbers_are_said(chromium: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(report_page(sample_document(spoilt_models), []))
    page = Shown(chromium, path)
    assert page.text("#value") == "–"  # the middle layer is the one without numbers
    assert "c_q.weight of head 2 is not finite" in page.run("return document.querySelector('#heatmap').textContent").replace("\n", " ")
    assert not page.find("#most").is_enabled()
    page.find("#layer").send_keys("\ue011")
    assert page.text("#dead") == "3"
    assert page.run("return document.querySelector('.hatch').getAttribute('d').split('M').length") == 1 + 2 * 5 - 1
    page.run("document.getElementById('heatmap').focus()")
    page.press("\ue011", *["\ue015"] * 5, "\ue013")  # Home, to the last row, one up: head 3
    assert page.text("#pair") == "Heads 3 and 0 of layer 0: 3 is dead."
    assert page.text("#value") == "0.000"
    assert chromium.get_log("browser") == []


@pytest.mark.browser
def test_print_leaves_the_controls_out(shown: Shown) -> None:
    shown.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert not shown.find(".controls").is_displayed()
        assert not shown.find("nav").is_displayed()
        assert shown.find("#state").is_displayed()
        printed = base64.b64decode(shown.driver.execute_cdp_cmd("Page.printToPDF", {})["data"])
        assert printed.startswith(b"%PDF")
    finally:
        shown.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
