"""The output folder: names, overwriting, whole results or none.

A result is several files (figure, CSV, JSON) that belong together, and no system call renames several files at once.
So a new result is made whole in `.headrank/new`, and one rename, to `.headrank/commit`, decides that it takes the old one's place.
What follows that rename can be repeated after any interruption: files that only the old result had are removed, the new ones are moved
to their names, and manifest.json, which names the files of every result with their hashes, moves last. Killed before the deciding
rename, the folder holds the old result; killed after it, the new one, which the next run puts in its place first thing. Between the
first move and the last, some ten microseconds apart, a reader sees files that manifest.json does not vouch for.
"""

import errno
import hashlib
import io
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrank.errors import HeadrankError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MANIFEST = "manifest.json"
SCHEMA = 1
DPI = 200
# None takes an entry out: versions and dates would make equal figures differ.
METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
    "svg": {"Creator": None, "Date": None},
}
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Gives a temporary path in the same folder; on success it is renamed to `path`, otherwise removed. Readers see the old file or the new one."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def figure_bytes(figure: "Figure", suffix: str) -> bytes:
    """A figure as a png (200 dots an inch), pdf or svg file: equal figures give equal bytes. Raises HeadrankError for another format."""
    if suffix not in METADATA:
        raise HeadrankError(f"no figure format {suffix!r}; there are {', '.join(METADATA)}")
    from matplotlib import style

    buffer = io.BytesIO()
    with style.context(["default", {"svg.hashsalt": "headrank"}]), without_glyph_warnings():  # whatever a user's matplotlibrc says
        figure.savefig(buffer, format=suffix, dpi=DPI, metadata=METADATA[suffix])
    return buffer.getvalue()


@contextmanager
def without_glyph_warnings() -> Iterator[None]:
    """A label in a script that the font lacks is drawn as boxes, which one sees; matplotlib warns of each letter as well."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


class OutputFolder:
    """A folder of results. A result is the files of one stem: effrank.json, effrank.csv, effrank.png."""

    def __init__(self, folder: Path, *, force: bool = False) -> None:
        """force: replace files that are not ours, too."""
        self.folder, self.force = folder, force
        self._hidden = folder / ".headrank"
        self._new = self._hidden / "new"
        self._commit = self._hidden / "commit"

    def prepare(self, stem: str, suffixes: Iterable[str]) -> None:
        """Finds out, before anything is computed, whether save() will be able to write these files; leaves nothing behind.

        Raises HeadrankError where the folder is none or cannot be written, or where a file of such a name is not ours.
        """
        with self._errors():
            nearest = next(path for path in (self.folder, *self.folder.parents) if os.path.lexists(path))
            for path in (nearest, self._hidden) if os.path.lexists(self._hidden) else (nearest,):
                if not path.is_dir():
                    raise HeadrankError(f"{path}: not a folder, so results cannot be written to {self.folder}; choose another with --out DIR")
                with tempfile.TemporaryDirectory(prefix=".headrank-", dir=path) as probe:
                    (Path(probe) / "probe").write_bytes(bytes(4096))
            with self._locked() if self._hidden.is_dir() else nullcontext():
                self._take_place()
                self._refuse_foreign(stem, [f"{stem}.{suffix}" for suffix in suffixes], self._results())

    def save(self, stem: str, files: Mapping[str, bytes]) -> list[Path]:
        """Replaces the result of this stem by files {suffix: content}, all of them or none. Returns their paths.

        Raises HeadrankError, with the old result in place, where that cannot be done.
        """
        named = {f"{stem}.{suffix}": content for suffix, content in files.items()}
        with self._errors():
            self._hidden.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._take_place()
                results = self._results()
                self._refuse_foreign(stem, list(named), results)
                results[stem] = {name: _sha256(content) for name, content in sorted(named.items())}
                manifest = {"program": "headrank", "schema": SCHEMA, "results": dict(sorted(results.items()))}
                self._make_new({**named, MANIFEST: (json.dumps(manifest, indent=2) + "\n").encode()})
                self._new.rename(self._commit)
                _sync(self._hidden)
                try:
                    self._take_place()
                except BaseException:  # Ctrl-C between two moves: finish them, then stop
                    self._take_place()
                    raise
        return [self.folder / name for name in named]

    def _make_new(self, files: Mapping[str, bytes]) -> None:
        """Writes the files to the folder of the new result, and to the disk."""
        try:
            self._new.mkdir()
            for name, content in files.items():
                with (self._new / name).open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            _sync(self._new)
        except BaseException:
            shutil.rmtree(self._new, ignore_errors=True)
            raise

    def _take_place(self) -> None:
        """Puts what has been decided for into place, and clears what has not. Does nothing the second time. Needs the lock."""
        shutil.rmtree(self._new, ignore_errors=True)
        if not self._commit.exists():
            return
        manifest = self._commit / MANIFEST
        if manifest.exists():
            # All reading is done first, so that the moves follow each other within microseconds. For the same reason
            # the old files are held open: a file system takes milliseconds to free a file that a move replaces.
            decided = _read_manifest(manifest) or {}
            replaced = _read_manifest(self.folder / MANIFEST) or {}
            dropped = [self.folder / name for stem, files in replaced.items() for name in files.keys() - decided.get(stem, {}) if self._is_ours(name, files)]
            moves = [(path, self.folder / path.name) for path in self._commit.iterdir() if path != manifest] + [(manifest, self.folder / MANIFEST)]
            with ExitStack() as held:
                for path in (*dropped, *(target for _, target in moves)):
                    if path.is_file():
                        held.enter_context(path.open("rb"))
                for path in dropped:
                    path.unlink()
                for path, target in moves:
                    path.replace(target)
            _sync(self.folder)
        self._commit.rmdir()

    def _results(self) -> dict[str, dict[str, str]]:
        """{stem: {file name: sha256}} from the manifest; none where there is no manifest."""
        path = self.folder / MANIFEST
        results = _read_manifest(path) if os.path.lexists(path) else {}
        if results is None and not self.force:
            raise HeadrankError(f"{path}: not a manifest of headrank; move it, choose another folder with --out DIR, or pass --force to replace it")
        return results or {}

    def _refuse_foreign(self, stem: str, names: Iterable[str], results: Mapping[str, Mapping[str, str]]) -> None:
        for name in names:
            path = self.folder / name
            if path.is_dir():
                raise HeadrankError(f"{path}: a folder is in the way of a result; move it, or choose another folder with --out DIR")
            if os.path.lexists(path) and not self.force and not self._is_ours(name, results.get(stem, {})):
                raise HeadrankError(
                    f"{path}: not written by headrank, or changed since\nMove it, choose another folder with --out DIR, or pass --force to replace it"
                )

    def _is_ours(self, name: str, files: Mapping[str, str]) -> bool:
        path = self.folder / name
        return name in files and path.is_file() and _sha256(path.read_bytes()) == files[name]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time; the others wait. The kernel frees the lock of a process that is killed."""
        import fcntl

        with (self._hidden / "lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in NO_LOCKS:  # some network file systems have none: whole results still, for one process at a time
                    raise
            yield

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise HeadrankError(f"{self.folder}: cannot be written: {error.strerror or error}; choose another folder with --out DIR") from None


def _read_manifest(path: Path) -> dict[str, dict[str, str]] | None:
    """{stem: {file name: sha256}}; None where the file is not a manifest of ours."""
    try:
        manifest: Any = json.loads(path.read_bytes())
        if manifest["program"] != "headrank" or manifest["schema"] != SCHEMA:
            return None
        return {stem: {Path(name).name: str(digest) for name, digest in files.items()} for stem, files in manifest["results"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _sync(folder: Path) -> None:
    """Brings renames in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
