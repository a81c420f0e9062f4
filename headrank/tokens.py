"""Text or token files -> token ids -> seeded batches."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrank.errors import HeadrankError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE_VOCABULARY = 256
MOST_IDS = 1 << 31  # larger ones are no token ids of any model


@dataclass(frozen=True, kw_only=True)
class TokenStream:
    """One run of token ids."""

    ids: NDArray[np.integer]
    """[n], in the order of the files."""
    name: str
    """The files' names."""
    sha256: str
    """Of the ids as 32-bit little-endian numbers."""


def read_token_files(*, text: Sequence[Path], tokens: Sequence[Path], tokenizer: Path | None, vocab_size: int | None) -> TokenStream:
    """Reads text files through a tokenizer, or as bytes where the vocabulary is 256, or token ids from .npy or .bin files.

    Text gets no special tokens: it is cut into windows, which begin and end anywhere. vocab_size is None where it is not known.
    Raises HeadrankError where nothing or both are given, a file cannot be read, is empty, or holds an id outside the vocabulary.
    """
    if bool(text) == bool(tokens):
        raise HeadrankError("give either --text or --tokens")
    paths = list(text or tokens)
    if tokens:
        parts = [_token_ids(path) for path in paths]
    elif tokenizer is not None:
        loaded = load_tokenizer(tokenizer)
        parts = [np.asarray(encoded(loaded, _text(path), path=tokenizer, special=False), dtype=np.int32) for path in paths]
    elif vocab_size == BYTE_VOCABULARY:
        parts = [np.frombuffer(_bytes(path), dtype=np.uint8) for path in paths]
    else:
        what = "an unknown vocabulary" if vocab_size is None else f"a vocabulary of {vocab_size}"
        raise HeadrankError(f"{paths[0]}: {what} needs a tokenizer to read text; give --tokenizer, or token ids with --tokens")
    return token_stream(paths, parts, vocab_size=vocab_size)


def token_stream(paths: Sequence[Path], parts: Sequence[NDArray[np.integer]], *, vocab_size: int | None) -> TokenStream:
    """Joins the token ids of files. Raises HeadrankError where a file has none, or one outside the vocabulary, where that is known."""
    for path, part in zip(paths, parts, strict=True):
        if not len(part):
            raise HeadrankError(f"{path}: empty; give a file with text or token ids in it")
        low, high, end = int(part.min()), int(part.max()), vocab_size or MOST_IDS
        if low < 0 or high >= end:
            raise HeadrankError(f"{path}: holds token id {low if low < 0 else high}, but the vocabulary has {end}")
    alike = len({part.dtype for part in parts}) == 1
    ids = parts[0] if len(parts) == 1 else np.concatenate(parts, dtype=None if alike else np.int32)  # left alone, some pairs of types give floats
    return TokenStream(ids=ids, name=", ".join(path.name for path in paths), sha256=_sha256(ids))


def read_texts(paths: Sequence[Path]) -> list[str]:
    """Texts of UTF-8 files. Raises HeadrankError where one cannot be read."""
    return [_text(path) for path in paths]


def _sha256(ids: NDArray[np.integer]) -> str:
    digest = hashlib.sha256()
    for start in range(0, len(ids), 1 << 20):  # a copy of a large file would not fit beside it
        digest.update(ids[start : start + (1 << 20)].astype("<u4").tobytes())
    return digest.hexdigest()


def load_tokenizer(path: Path) -> "Tokenizer":
    """A tokenizer from a tokenizer.json. Raises HeadrankError where it is none, or where the package `tokenizers` is missing."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise HeadrankError(f"{path}: reading it needs the package tokenizers: pip install 'headrank[hf]'") from None
    _bytes(path)
    with _refusing(f"{path}: not a tokenizer.json"):
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()  # some files ask for 128 tokens and no more
        tokenizer.no_padding()
    return tokenizer


def encoded(tokenizer: "Tokenizer", text: str, *, path: Path, special: bool) -> list[int]:
    """Token ids of a text; special: with the special tokens around it. Raises HeadrankError, naming the tokenizer's file, where it fails on the text."""
    with _refusing(f"{path}: this tokenizer fails on the text"):
        return list(tokenizer.encode(text, add_special_tokens=special).ids)


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Errors of the package `tokenizers` become ours: it raises bare Exception, and what its Rust code ends with is not even that."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise HeadrankError(f"{what}: {error}") from None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise HeadrankError(f"{path}: cannot be read: {error.strerror}") from None


def _text(path: Path) -> str:
    try:
        return _bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise HeadrankError(f"{path}: not UTF-8 text (byte {error.start}); give text in UTF-8, or token ids with --tokens") from None


def _token_ids(path: Path) -> NDArray[np.integer]:
    if path.suffix == ".bin":
        data = _bytes(path)
        if len(data) % 2:
            raise HeadrankError(f"{path}: {len(data)} bytes are not 16-bit numbers; a .bin file holds unsigned 16-bit token ids")
        return np.frombuffer(data, dtype="<u2")
    try:
        ids = np.lib.format.open_memmap(path, mode="r")  # neither archives nor pickles
    except OSError as error:
        raise HeadrankError(f"{path}: cannot be read: {error.strerror}") from None
    except Exception:  # numpy raises many kinds on a malformed header
        raise HeadrankError(f"{path}: not token ids; give a .npy file of whole numbers, or .bin of unsigned 16-bit ones") from None
    if ids.dtype.kind not in "iu":
        raise HeadrankError(f"{path}: holds {ids.dtype}, not whole numbers; give token ids")
    return np.asarray(ids).reshape(-1)


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """What is fed to a model: sequences of token ids, padded on the right to one length."""

    ids: NDArray[np.integer]
    """[N, T]."""
    lengths: NDArray[np.int64]
    """[N]: how many of the T ids are tokens; the rest is padding."""
    source: str
    """Names of the files that they come from."""

    @property
    def n_tokens(self) -> int:
        """Tokens, padding not counted."""
        return int(self.lengths.sum())

    @property
    def sha256(self) -> str:
        """Of the ids and lengths."""
        digest = hashlib.sha256(self.ids.astype("<u4").tobytes())
        digest.update(self.lengths.astype("<u4").tobytes())
        return digest.hexdigest()


def cut_sequences(stream: TokenStream, *, seq_len: int, n_sequences: int, seed: int, before: Sequence[int] = (), after: Sequence[int] = ()) -> Sequences:
    """Cuts the stream into windows and takes n_sequences of them in seeded random order, or all where there are fewer.

    before, after: special tokens that stand around every window; seq_len counts them. The tail that does not fill a window is left
    out. Raises HeadrankError where the stream is shorter than one window.
    """
    length = seq_len - len(before) - len(after)
    if length < 1:
        raise HeadrankError(f"--seq-len {seq_len} leaves no room beside the tokenizer's {len(before) + len(after)} special tokens")
    n_windows = len(stream.ids) // length
    if not n_windows:
        raise HeadrankError(f"{stream.name}: {len(stream.ids)} tokens are fewer than one sequence of {length}; give more text, or a smaller --seq-len")
    chosen = np.random.default_rng(seed).permutation(n_windows)[:n_sequences]
    ids: NDArray[np.integer] = stream.ids[: n_windows * length].reshape(n_windows, length)[chosen]
    if before or after:
        frame = [np.tile(np.asarray(part, dtype=ids.dtype), (len(ids), 1)) for part in (before, after)]
        ids = np.concatenate([frame[0], ids, frame[1]], axis=1)
    return Sequences(ids=ids, lengths=np.full(len(ids), seq_len, dtype=np.int64), source=stream.name)


def calibration_text() -> Path:
    """The text that comes with headrank: prose, dialogue, lists, code and numbers."""
    return Path(__file__).parent / "data" / "calibration.txt"
