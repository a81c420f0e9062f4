"""The command line wherever it is started: without a screen, a home, a terminal, or anyone who reads."""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from safetensors.torch import save_file

from headrank.cli import _printable
from headrank.config import ModelConfig
from headrank.model import new_decoder
from headrank.store import Store, write_measurement
from tests.test_store import measurement

BARE = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
PROGRAM = [sys.executable, "-m", "headrank"]
NOWHERE = "/proc/self/nothing"  # where nobody can make a folder
EFFRANK = "effrank m.safetensors --circuit ov"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a measurement, from which commands read without torch."""
    write_measurement(measurement(0, 2), tmp_path / "m.safetensors")
    return tmp_path


def shell(line: str, *, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a line of bash in which $headrank is the program."""
    surroundings = {**BARE, "headrank": " ".join(PROGRAM), **environment}
    return subprocess.run(["bash", "-c", line], cwd=cwd, env=surroundings, capture_output=True, text=True, timeout=120, check=False)


def assert_whole(folder: Path) -> None:
    """The result is in the output folder, with all of its files."""
    out = folder / "headrank-out"
    assert json.loads((out / "effrank.json").read_text())["command"] == "effrank"
    assert (out / "effrank.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "surroundings",
    [
        {"MPLBACKEND": "TkAgg"},
        {"MPLBACKEND": "nonsense"},
        {"HOME": "/dev/null/home"},
        {"HOME": "", "XDG_CACHE_HOME": "", "MPLCONFIGDIR": ""},
        {"HOME": NOWHERE, "MPLCONFIGDIR": NOWHERE, "HEADRANK_CACHE": NOWHERE, "XDG_CACHE_HOME": NOWHERE, "XDG_CONFIG_HOME": NOWHERE},
        {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "LANG": "", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"TERM": "dumb", "COLUMNS": "40"},
        {"NO_COLOR": "1", "TERM": "unknown"},
        {"FORCE_COLOR": "1", "COLUMNS": "1"},
        {"PYTHONWARNINGS": "error"},
        {"TMPDIR": NOWHERE},
    ],
    ids=str,
)
def test_surroundings_do_not_matter(surroundings: dict[str, str], folder: Path) -> None:
    done = shell(f"$headrank {EFFRANK} --quiet", cwd=folder, **surroundings)
    assert (done.returncode, done.stderr) == (0, "")
    assert "m" in done.stdout
    assert_whole(folder)


def test_figures_and_documents_are_the_same_bytes_in_any_surroundings(folder: Path) -> None:
    done = shell(
        f"$headrank {EFFRANK} --out a; LC_ALL=C PYTHONIOENCODING=ascii COLUMNS=40 TZ=Asia/Tokyo PYTHONHASHSEED=5 MPLBACKEND=svg HOME=/dev/null/home "
        f"$headrank {EFFRANK} --out b",
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    for suffix in ("json", "csv", "png"):
        assert (folder / "a" / f"effrank.{suffix}").read_bytes() == (folder / "b" / f"effrank.{suffix}").read_bytes()


def test_names_of_all_kinds_go_through_where_only_ascii_can_be_printed(folder: Path) -> None:
    place = folder / "a folder [red]with[b] ü 語"
    place.mkdir()
    for name in ("x y.safetensors", "[b]ü*.safetensors", "-dash.safetensors", "語.safetensors"):
        write_measurement(measurement(0, 2), place / name)
    write_measurement(measurement(0, 2), Path(os.fsdecode(os.fsencode(place) + b"/bytes\xff.safetensors")))  # a name that is no text
    line = "$headrank effrank --circuit ov --format png,svg 'x y.safetensors' '[b]ü*.safetensors' '$a_b$=語.safetensors' ./bytes* -- -dash.safetensors"
    for more in ("", " --json"):
        done = shell(line.replace(" -- ", f"{more} -- "), cwd=place, LC_ALL="C", PYTHONIOENCODING="ascii")
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()
    labels = [model["label"] for model in json.loads((place / "headrank-out" / "effrank.json").read_text())["models"]]
    assert labels == ["x y", "[b]ü*", "$a_b$", "bytes\ufffd", "-dash"]
    assert "bytes\ufffd" in (place / "headrank-out" / "effrank.csv").read_text(encoding="utf-8")


@pytest.mark.parametrize("more", ["", " --json"], ids=["table", "json"])
def test_a_reader_that_leaves_at_once_is_no_error(more: str, folder: Path) -> None:
    done = shell(f"$headrank {EFFRANK}{more} | true; echo ${{PIPESTATUS[0]}}", cwd=folder)
    assert done.stdout == "0\n"
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    assert_whole(folder)


@pytest.mark.parametrize("more", ["", " --json"], ids=["table", "json"])
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-", ">&- 2>&-"])
def test_closed_streams_are_no_error(closed: str, more: str, folder: Path) -> None:
    done = shell(f"$headrank {EFFRANK}{more} {closed}; echo $? > code", cwd=folder)
    assert (folder / "code").read_text() == "0\n", done.stderr
    assert "Traceback" not in done.stderr
    assert_whole(folder)


def test_an_error_is_not_printed_where_results_go_when_stderr_is_closed(folder: Path) -> None:
    done = shell("$headrank effrank nowhere --source weights 2>&-; echo $?", cwd=folder)
    assert done.stdout == "1\n"


@pytest.mark.parametrize("more", ["", " --json"], ids=["table", "json"])
def test_a_full_disk_behind_stdout_is_an_error_in_one_line_and_the_files_are_whole(more: str, folder: Path) -> None:
    done = shell(f"$headrank {EFFRANK}{more} --quiet > /dev/full", cwd=folder)
    assert (done.returncode, done.stderr) == (1, "Error: the output cannot be written: No space left on device\n")
    assert_whole(folder)


def test_no_terminal_at_all_and_no_input(folder: Path) -> None:
    done = shell(f"setsid $headrank {EFFRANK} < /dev/null 2> err; cat err", cwd=folder)
    assert done.returncode == 0
    assert (folder / "err").read_text().startswith("Wrote headrank-out/effrank.png")  # and no bar
    assert_whole(folder)


def on_terminal(words: list[str], *, cwd: Path, columns: int) -> tuple[int, str]:
    """Exit code, and what a terminal of that width gets."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    surroundings = {**BARE, "TERM": "xterm-256color", "HEADRANK_CACHE": str(cwd / "cache")}
    process = subprocess.Popen([*PROGRAM, *words], cwd=cwd, env=surroundings, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    shown, end = b"", time.monotonic() + 120
    while (time.monotonic() < end and select.select([ours], [], [], 1)[0]) or process.poll() is None:
        try:
            shown += os.read(ours, 65536) if select.select([ours], [], [], 0)[0] else b""
        except OSError:  # the other side is closed
            break
    os.close(ours)
    return process.wait(timeout=60), shown.decode()


def test_a_terminal_of_40_columns_gets_a_bar_and_a_table_that_fit(tmp_path: Path) -> None:
    config = ModelConfig(kind="gqa", n_kv_head=2, n_layer=3, n_head=6, d_head=10, d_model=13, d_mlp=17, vocab_size=256, context=32)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(config.to_json())
    save_file({name: p.detach() for name, p in new_decoder(config, seed=5).named_parameters()}, model / "model.safetensors")
    code, shown = on_terminal(["effrank", "model", "--sequences", "3"], cwd=tmp_path, columns=40)
    assert code == 0, shown
    assert "━" in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    lines = [line for part in plain.split("\n") for line in part.split("\r") if not line.startswith("Wrote")]  # paths are not broken
    assert max(map(len, lines)) <= 40
    assert any(line.split()[:1] == ["model"] for line in lines)
    assert_whole(tmp_path)


def test_names_in_a_file_cannot_steer_the_terminal(tmp_path: Path) -> None:
    assert _printable("a\x1b[31mb\nc\x07\u202eü") == "a\\x1b[31mb\nc\\x07\\u202eü"
    folder = tmp_path / "m"
    folder.mkdir()
    save_file({}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "\x1b]0;title\x07"}))
    done = shell("$headrank effrank m --source weights", cwd=tmp_path)
    assert done.returncode == 1
    assert "\\x1b]0;title\\x07" in done.stderr
    assert "\x1b" not in done.stderr


def test_where_there_is_no_home_nothing_is_kept_and_no_folder_of_that_name_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("HEADRANK_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user that the system does not know
    store = Store.default()
    assert store.find("0" * 32) is None
    assert store.keep("0" * 32, measurement(0)) == "measurements are not kept: there is no home folder; name one with HEADRANK_CACHE"
    assert not list(tmp_path.iterdir())
