"""A matplotlib figure as SVG that stands inside an HTML page: text stays text, colours follow the page, ids are its own."""

import html
import io
import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from headrank.output import METADATA, without_glyph_warnings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Matplotlib's colours -> custom properties of the page, which has a light and a dark value for each.
CYCLE = ("1f77b4", "ff7f0e", "2ca02c", "d62728", "9467bd", "8c564b", "e377c2", "7f7f7f", "bcbd22", "17becf")
COLORS = {f"#{color}": f"var(--c{i})" for i, color in enumerate(CYCLE)} | {
    "#000000": "currentColor",
    "#ffffff": "var(--paper)",
    "#b0b0b0": "var(--rule)",
    "#cccccc": "var(--rule)",
    "#808080": "var(--muted)",
    "#737373": "var(--muted)",
}
REFERENCE = re.compile(r"url\(#([^)]+)\)")
NUMBER = re.compile(r"-?\d+\.\d+")
WIDE = 700  # points; a figure of several panels side by side, which a phone scrolls


def inline_svg(figure: "Figure", prefix: str, *, alt: str) -> str:
    """The figure as one <svg> element for HTML. Equal figures give equal text. prefix begins its ids, so it must be unique in the page.

    alt: what it shows, in words, for those who do not see it.
    """
    from matplotlib import style

    buffer = io.BytesIO()
    with style.context(["default", {"svg.hashsalt": "headrank", "svg.fonttype": "none"}]), without_glyph_warnings():
        figure.savefig(buffer, format="svg", metadata=METADATA["svg"])
    root = ElementTree.fromstring(buffer.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            # The style sheet would style the whole page, which says the same for its figures alone.
            if _name(child) in ("metadata", "style"):
                parent.remove(child)
    used = {reference for element in root.iter() for reference in _references(element)}
    for element in root.iter():
        element.tag = _name(element)
        element.attrib = {name: value for key, value in element.attrib.items() for name, value in _attribute(key, value, prefix, used)}
    _, _, width, _ = root.attrib["viewBox"].split()
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": alt, "class": "wide" if float(width) > WIDE else "narrow"}
    root.tail = None
    return _text(root)


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _references(element: ElementTree.Element) -> list[str]:
    links = [value.removeprefix("#") for key, value in element.attrib.items() if key.endswith("href")]
    return links + [found for value in element.attrib.values() for found in REFERENCE.findall(value)]


def _attribute(key: str, value: str, prefix: str, used: set[str]) -> list[tuple[str, str]]:
    """What an attribute becomes; nothing for an id that nothing refers to."""
    name = key.rpartition("}")[2]
    if name == "id":
        return [("id", prefix + value)] if value in used else []
    if name == "href":
        return [("href", f"#{prefix}{value[1:]}")]
    if name == "style":
        value = re.sub(r"#[0-9a-f]{6}", lambda color: COLORS.get(color[0], color[0]), value)
        value = re.sub(r"font:([^;]*?)(\d+(?:\.\d+)?)px[^;]*", r"font-size:\2px", value)  # the page's typeface
        value = re.sub(r"font-family:[^;]*;?", "", value)
    elif name in ("d", "x", "y", "points") or (name == "transform" and "scale" not in value and "matrix" not in value):
        if value.startswith("rotate(-0 "):
            return []
        value = " ".join(NUMBER.sub(lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), value).split())
    value = REFERENCE.sub(rf"url(#{prefix}\1)", value)
    return [(name, value)]


def _text(element: ElementTree.Element) -> str:
    """HTML's spelling: every element is closed by a tag of its own, and no namespace is named."""
    attributes = "".join(f' {name}="{html.escape(value)}"' for name, value in element.attrib.items())
    inside = html.escape((element.text or "").strip(), quote=False) + "".join(_text(child) for child in element)
    if element.tag in ("g", "defs") and not (attributes and inside):  # a group that says nothing
        return inside if element.tag == "g" or not inside else f"<defs>{inside}</defs>"
    return f"<{element.tag}{attributes}>{inside}</{element.tag}>"
