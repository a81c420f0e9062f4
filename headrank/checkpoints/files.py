"""Files of a checkpoint are untrusted: nothing is read outside the folder that was given, and what is not a checkpoint is named."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from headrank.errors import HeadrankError

JSON_LIMIT = 256 << 20


def inside(folder: Path, name: str) -> Path:
    """The file of that name in the folder. Raises HeadrankError where the name or a link leads out of it.

    A snapshot in huggingface_hub's cache is links into the blobs beside it: those are followed.
    """
    try:
        is_name = 0 < len(os.fsencode(name)) < 256 and "\x00" not in name
    except ValueError:  # half of a surrogate pair
        is_name = False
    if not is_name or os.path.isabs(name) or ".." in Path(name).parts:
        raise HeadrankError(f"{folder}: names the file {name[:100]!r}, which is no file of that folder; not read")
    path = folder / name
    top = folder.resolve()
    homes = [top, top.parent.parent / "blobs"] if top.parent.name == "snapshots" else [top]
    if not any(path.resolve().is_relative_to(home) for home in homes):
        raise HeadrankError(f"{path}: a link that leads out of the folder; copy the file there if it belongs to the checkpoint")
    return path


def regular_size(path: Path) -> int:
    """Size in bytes of an ordinary file that is not empty. Raises HeadrankError on anything else, and on stand-ins for a download."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise HeadrankError(f"{path}: not a regular file")
        with path.open("rb") as stream:
            start = stream.read(200)
    except FileNotFoundError:
        raise HeadrankError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise HeadrankError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not status.st_size:
        raise HeadrankError(f"{path}: the file is empty")
    if start.startswith(b"version https://git-lfs"):
        raise HeadrankError(f"{path}: a Git LFS pointer, not the file itself; fetch it with `git lfs pull`")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise HeadrankError(f"{path}: an HTML page, not a checkpoint; the download went wrong, fetch it again")
    return status.st_size


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises HeadrankError on anything else."""
    size = regular_size(path)
    if size > JSON_LIMIT:
        raise HeadrankError(f"{path}: {size} bytes of JSON; more than any checkpoint needs")
    try:
        text = path.read_bytes()
    except OSError as error:
        raise HeadrankError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_json(text, str(path))


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object. Raises HeadrankError, beginning with where, on anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HeadrankError(f"{where}: not JSON: {_short(error)}") from None
    if not isinstance(value, dict):
        raise HeadrankError(f"{where}: a JSON object is needed, found a {type(value).__name__}")
    return value


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
