import hashlib
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrank.errors import HeadrankError
from headrank.tokens import Sequences, TokenStream, calibration_text, cut_sequences, load_tokenizer, read_token_files


def read(*, text: tuple[Path, ...] = (), tokens: tuple[Path, ...] = (), tokenizer: Path | None = None, vocab_size: int | None = 256) -> TokenStream:
    return read_token_files(text=text, tokens=tokens, tokenizer=tokenizer, vocab_size=vocab_size)


def refusal(folder: Path, **options: object) -> str:
    with pytest.raises(HeadrankError) as caught:
        read(**options)  # type: ignore[arg-type]
    return str(caught.value).replace(f"{folder}/", "")


def npy(path: Path, array: np.ndarray) -> Path:
    np.save(path, array)
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Words a to e, with special tokens around a text, cut to three tokens and padded to eleven, as some published files ask for."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = Tokenizer(models.WordLevel({"?": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4, "c": 5, "d": 6, "e": 7}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    words.enable_truncation(max_length=3)
    words.enable_padding(length=11)
    words.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_text_is_bytes_where_the_vocabulary_is_256(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Grüße".encode())
    stream = read(text=(tmp_path / "a.txt",))
    assert stream.ids.tolist() == [71, 114, 195, 188, 195, 159, 101]
    assert stream.name == "a.txt"
    assert stream.sha256 == hashlib.sha256(b"".join(bytes([i, 0, 0, 0]) for i in stream.ids.tolist())).hexdigest()


def test_files_follow_each_other_in_the_order_given(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc")
    (tmp_path / "b.txt").write_bytes(b"de")
    stream = read(text=(tmp_path / "b.txt", tmp_path / "a.txt"))
    assert bytes(stream.ids.astype(np.uint8)) == b"deabc"
    assert stream.name == "b.txt, a.txt"


def test_a_tokenizer_reads_all_of_the_text_without_special_tokens_and_padding(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("a b c d e f a b\n\n\nc")
    assert read(text=(tmp_path / "a.txt",), tokenizer=tokenizer, vocab_size=8).ids.tolist() == [3, 4, 5, 6, 7, 0, 3, 4, 5]


@pytest.mark.parametrize("dtype", ["<i4", ">i4", "<u2", "<i8", "<u8", "u1"])
def test_token_ids_of_any_whole_type_are_read(tmp_path: Path, dtype: str) -> None:
    stream = read(tokens=(npy(tmp_path / "ids.npy", np.array([[1, 2], [3, 200]], dtype=dtype)),))
    assert stream.ids.tolist() == [1, 2, 3, 200]
    assert stream.sha256 == hashlib.sha256(np.array([1, 2, 3, 200], dtype="<u4").tobytes()).hexdigest()


def test_token_ids_of_several_types_stay_whole_numbers(tmp_path: Path) -> None:
    """numpy makes floats of unsigned and signed 64-bit numbers together."""
    parts = [npy(tmp_path / f"{dtype}.npy", np.array([5, 7], dtype=dtype)) for dtype in ("u8", "i8", "u1")]
    stream = read(tokens=tuple(parts))
    assert stream.ids.dtype.kind == "i"
    assert stream.ids.tolist() == [5, 7] * 3


def test_bin_files_hold_unsigned_16_bit_ids(tmp_path: Path) -> None:
    (tmp_path / "ids.bin").write_bytes(bytes([1, 0, 0, 1, 255, 255]))
    assert read(tokens=(tmp_path / "ids.bin",), vocab_size=65536).ids.tolist() == [1, 256, 65535]


def test_the_same_ids_have_the_same_fingerprint_whatever_file_they_come_from(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc")
    (tmp_path / "a.bin").write_bytes(b"a\0b\0c\0")
    fingerprints = {read(text=(tmp_path / "a.txt",)).sha256, read(tokens=(tmp_path / "a.bin",)).sha256}
    fingerprints.add(read(tokens=(npy(tmp_path / "a.npy", np.array([97, 98, 99])),)).sha256)
    assert len(fingerprints) == 1


def test_bad_input_is_refused_by_file(tmp_path: Path, tokenizer: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(b"abc")
    empty = tmp_path / "empty.txt"
    empty.touch()
    odd = tmp_path / "odd.bin"
    odd.write_bytes(b"abc")
    latin = tmp_path / "latin.txt"
    latin.write_bytes("Grüße".encode("latin-1"))
    assert refusal(tmp_path) == "give either --text or --tokens"
    assert refusal(tmp_path, text=(text,), tokens=(text,)) == "give either --text or --tokens"
    assert refusal(tmp_path, text=(tmp_path / "absent.txt",)) == "absent.txt: cannot be read: No such file or directory"
    assert refusal(tmp_path, text=(tmp_path,)) == f"{tmp_path}: cannot be read: Is a directory"
    assert refusal(tmp_path, text=(text, empty)) == "empty.txt: empty; give a file with text or token ids in it"
    assert refusal(tmp_path, tokens=(odd,)) == "odd.bin: 3 bytes are not 16-bit numbers; a .bin file holds unsigned 16-bit token ids"
    assert refusal(tmp_path, tokens=(tmp_path / "absent.npy",)) == "absent.npy: cannot be read: No such file or directory"
    assert (
        refusal(tmp_path, text=(text,), vocab_size=50304)
        == "a.txt: a vocabulary of 50304 needs a tokenizer to read text; give --tokenizer, or token ids with --tokens"
    )
    assert (
        refusal(tmp_path, text=(text,), vocab_size=None)
        == "a.txt: an unknown vocabulary needs a tokenizer to read text; give --tokenizer, or token ids with --tokens"
    )
    assert (
        refusal(tmp_path, text=(latin,), tokenizer=tokenizer, vocab_size=8)
        == "latin.txt: not UTF-8 text (byte 2); give text in UTF-8, or token ids with --tokens"
    )
    assert refusal(tmp_path, text=(empty,), tokenizer=tokenizer, vocab_size=8) == "empty.txt: empty; give a file with text or token ids in it"


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.array([3, 256]), "ids.npy: holds token id 256, but the vocabulary has 256"),
        (np.array([3, -1, 999]), "ids.npy: holds token id -1, but the vocabulary has 256"),
        (np.array([2**64 - 1], dtype=np.uint64), "ids.npy: holds token id 18446744073709551615, but the vocabulary has 256"),
        (np.array([1.0, 2.0]), "ids.npy: holds float64, not whole numbers; give token ids"),
        (np.array([True, False]), "ids.npy: holds bool, not whole numbers; give token ids"),
        (np.array([1, 2], dtype="m8[s]"), "ids.npy: holds timedelta64[s], not whole numbers; give token ids"),
        (np.zeros(0, dtype=np.int32), "ids.npy: empty; give a file with text or token ids in it"),
    ],
)
def test_arrays_that_are_no_token_ids_are_refused(tmp_path: Path, array: np.ndarray, text: str) -> None:
    assert refusal(tmp_path, tokens=(npy(tmp_path / "ids.npy", array),)) == text


def test_an_unknown_vocabulary_still_has_an_end(tmp_path: Path) -> None:
    ids = npy(tmp_path / "ids.npy", np.array([5, 2**31]))
    assert refusal(tmp_path, tokens=(ids,), vocab_size=None) == "ids.npy: holds token id 2147483648, but the vocabulary has 2147483648"
    assert read(tokens=(npy(ids, np.array([5, 99999])),), vocab_size=None).ids.tolist() == [5, 99999]


def test_files_that_are_no_arrays_are_refused_and_no_pickle_is_loaded(tmp_path: Path) -> None:
    text = "x.npy: not token ids; give a .npy file of whole numbers, or .bin of unsigned 16-bit ones"
    path = tmp_path / "x.npy"
    np.savez(tmp_path / "x.npz", a=np.arange(3))
    whole = npy(path, np.arange(99)).read_bytes()
    for content in (b"", b"hello", whole[:-8], whole[:50], (tmp_path / "x.npz").read_bytes()):
        path.write_bytes(content)
        assert refusal(tmp_path, tokens=(path,)) == text
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert refusal(tmp_path, tokens=(path,)) == text


def test_mutated_token_files_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    whole = npy(path, np.arange(50, dtype=np.int32)).read_bytes()
    generator = random.Random(0)
    outcomes = set()
    for _ in range(200):
        content = bytearray(whole)
        for _ in range(generator.choice((1, 1, 2, 5))):
            content[generator.randrange(128)] = generator.randrange(256)
        path.write_bytes(content)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # numpy's remarks on old headers
                read(tokens=(path,), vocab_size=None)
            outcomes.add("read")
        except HeadrankError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


class Panic(BaseException):
    """Like what Rust code ends with in Python: no Exception."""


@pytest.mark.parametrize("error", [Exception("WordLevel error"), Panic("range end index 7 out of range")])
def test_a_tokenizer_that_fails_is_refused_however_it_fails(error: BaseException, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tokenizers

    class Broken:
        @staticmethod
        def from_file(path: str) -> "Broken":
            if path == "broken":
                raise error
            return Broken()

        def no_truncation(self) -> None:
            return

        no_padding = no_truncation

        def encode(self, text: str, *, add_special_tokens: bool) -> None:
            raise error

    monkeypatch.setattr(tokenizers, "Tokenizer", Broken)
    (tmp_path / "a.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    Path("broken").touch()
    for path, text in ((Path("broken"), f"broken: not a tokenizer.json: {error}"), (tokenizer, f"{tokenizer}: this tokenizer fails on the text: {error}")):
        with pytest.raises(HeadrankError) as caught:
            read_token_files(text=(Path("a.txt"),), tokens=(), tokenizer=path, vocab_size=99)
        assert str(caught.value) == text


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(HeadrankError, match=r"tokenizer\.json: not a tokenizer\.json: "):
        load_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(HeadrankError, match=r"absent\.json: cannot be read: No such file or directory$"):
        load_tokenizer(tmp_path / "absent.json")


# ---- sequences


def stream_of(n: int) -> TokenStream:
    return TokenStream(ids=np.arange(n), name="numbers", sha256="")


@given(st.integers(2, 13), st.integers(1, 20), st.integers(0, 2**32), st.integers(13, 200))
def test_sequences_are_different_windows_of_the_stream(seq_len: int, n_sequences: int, seed: int, n: int) -> None:
    sequences = cut_sequences(stream_of(n), seq_len=seq_len, n_sequences=n_sequences, seed=seed)
    assert sequences.ids.shape == (min(n_sequences, n // seq_len), seq_len)
    assert sequences.lengths.tolist() == [seq_len] * len(sequences.ids)
    assert sequences.n_tokens == sequences.ids.size
    starts = sequences.ids[:, 0]
    assert len(set(starts.tolist())) == len(starts)
    assert not (starts % seq_len).any()
    assert (np.diff(sequences.ids, axis=1) == 1).all()


def test_a_seed_chooses_the_sequences() -> None:
    chosen = [cut_sequences(stream_of(5000), seq_len=10, n_sequences=7, seed=seed).ids for seed in (3, 3, 4)]
    np.testing.assert_array_equal(chosen[0], chosen[1])
    assert (chosen[0] != chosen[2]).any()


def test_fewer_sequences_are_the_first_of_more() -> None:
    few, many = (cut_sequences(stream_of(5000), seq_len=10, n_sequences=n, seed=0).ids for n in (3, 11))
    np.testing.assert_array_equal(few, many[:3])


def test_a_stream_shorter_than_one_sequence_is_refused() -> None:
    with pytest.raises(HeadrankError) as caught:
        cut_sequences(stream_of(12), seq_len=13, n_sequences=5, seed=0)
    assert str(caught.value) == "numbers: 12 tokens are fewer than one sequence of 13; give more text, or a smaller --seq-len"
    assert len(cut_sequences(stream_of(13), seq_len=13, n_sequences=5, seed=0).ids) == 1


def test_the_fingerprint_of_sequences_sees_ids_order_and_lengths() -> None:
    ids, lengths = np.arange(12).reshape(3, 4), np.array([4, 4, 2])
    fingerprints = [
        Sequences(ids=ids, lengths=lengths, source="a").sha256,
        Sequences(ids=ids[::-1], lengths=lengths, source="a").sha256,
        Sequences(ids=ids, lengths=np.array([4, 4, 3]), source="a").sha256,
        Sequences(ids=ids + 1, lengths=lengths, source="a").sha256,
    ]
    assert len(set(fingerprints)) == 4
    assert Sequences(ids=ids.astype(np.uint16), lengths=lengths, source="b").sha256 == fingerprints[0]


def test_the_calibration_text_is_varied_and_long_enough() -> None:
    text = calibration_text().read_text(encoding="utf-8")
    assert len(text.encode()) >= 32_000
    assert len(cut_sequences(read(text=(calibration_text(),)), seq_len=128, n_sequences=64, seed=0).ids) == 64
