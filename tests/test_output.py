"""The output folder. The child processes here write results that say in each of their files which version they are."""

import errno
import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from headrank.errors import HeadrankError
from headrank.output import OutputFolder, figure_bytes, replace_atomically
from tests.saved_versions import SUFFIXES, save, version


def visible(folder: Path) -> dict[str, bytes]:
    """Everything in the folder but the manifest and what is hidden."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "manifest.json" and not path.name.startswith(".")}


def is_vouched_for(folder: Path) -> bool:
    """Whether the folder holds just the files of the manifest, with the hashes that stand there."""
    results = json.loads((folder / "manifest.json").read_text())["results"]
    named = {name: digest for files in results.values() for name, digest in files.items()}
    return named == {name: f"sha256:{hashlib.sha256(content).hexdigest()}" for name, content in visible(folder).items()}


def whole_version(folder: Path, numbers: range) -> int:
    """The version whose files the folder holds, all of them and nothing else."""
    files = visible(folder)
    (number,) = [n for n in numbers if files == {f"effrank.{suffix}": content for suffix, content in version(n).items()}]
    return number


def run_child(script: str, *arguments: object) -> subprocess.Popen[bytes]:
    head = "import sys; from pathlib import Path; from headrank.output import OutputFolder; from tests.saved_versions import save, version\n"
    return subprocess.Popen([sys.executable, "-c", head + script, *map(str, arguments)], stdout=subprocess.PIPE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "a folder [1] ü" / "out"


def test_a_result_is_its_files_and_a_manifest_with_their_hashes(folder: Path) -> None:
    paths = save(folder, version(1))
    assert paths == [folder / f"effrank.{suffix}" for suffix in SUFFIXES]
    assert visible(folder) == {path.name: version(1)[path.suffix[1:]] for path in paths}
    assert is_vouched_for(folder)
    assert [path.name for path in (folder / ".headrank").iterdir()] == ["lock"]


def test_a_result_of_ours_is_replaced_and_another_stays(folder: Path) -> None:
    save(folder, version(1), stem="heatmap")
    save(folder, version(2))
    save(folder, version(3))
    assert visible(folder) == {f"heatmap.{s}": c for s, c in version(1).items()} | {f"effrank.{s}": c for s, c in version(3).items()}
    assert is_vouched_for(folder)


def test_files_that_the_new_result_lacks_do_not_stay_beside_it(folder: Path) -> None:
    save(folder, version(1, (*SUFFIXES, "pdf")))
    save(folder, version(2))
    assert whole_version(folder, range(3)) == 2
    assert is_vouched_for(folder)


def test_a_file_that_was_changed_is_kept_when_the_new_result_lacks_it(folder: Path) -> None:
    save(folder, version(1, (*SUFFIXES, "pdf")))
    (folder / "effrank.pdf").write_text("annotated")
    save(folder, version(2))
    assert (folder / "effrank.pdf").read_text() == "annotated"


def test_the_same_results_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    for place in (folder, tmp_path / "other"):
        save(place, version(2))
        save(place, version(1), stem="heatmap")
    assert (folder / "manifest.json").read_bytes() == (tmp_path / "other" / "manifest.json").read_bytes()


@pytest.mark.parametrize("changed", ["foreign", "edited"])
def test_a_file_that_is_not_ours_is_not_overwritten_without_force(folder: Path, changed: str) -> None:
    folder.mkdir(parents=True)
    if changed == "edited":
        save(folder, version(1))
    (folder / "effrank.csv").write_text("mine")
    before = visible(folder)
    for act in (lambda: OutputFolder(folder).prepare("effrank", SUFFIXES), lambda: OutputFolder(folder).save("effrank", version(2))):
        with pytest.raises(HeadrankError) as caught:
            act()
        assert str(caught.value) == (
            f"{folder}/effrank.csv: not written by headrank, or changed since\nMove it, choose another folder with --out DIR, or pass --force to replace it"
        )
        assert visible(folder) == before
    save(folder, version(2), force=True)
    assert whole_version(folder, range(3)) == 2
    assert is_vouched_for(folder)


def test_a_link_is_replaced_under_force_and_what_it_leads_to_is_kept(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(parents=True)
    (tmp_path / "paper.csv").write_text("mine")
    (folder / "effrank.csv").symlink_to(tmp_path / "paper.csv")
    save(folder, version(1), force=True)
    assert (tmp_path / "paper.csv").read_text() == "mine"
    assert whole_version(folder, range(2)) == 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"program": "headrank", "schema": 1, "results": [3]}', '{"program": "other", "schema": 1, "results": {}}', "\udcff"]
)
def test_a_manifest_that_is_not_ours_is_not_overwritten_without_force(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(HeadrankError, match=r"manifest\.json: not a manifest of headrank; move it"):
        OutputFolder(folder).prepare("effrank", SUFFIXES)
    save(folder, version(1), force=True)
    assert is_vouched_for(folder)


def test_a_folder_in_the_way_is_refused_even_under_force(folder: Path) -> None:
    (folder / "effrank.png").mkdir(parents=True)
    with pytest.raises(HeadrankError, match=r"effrank\.png: a folder is in the way of a result; move it"):
        OutputFolder(folder, force=True).prepare("effrank", SUFFIXES)


@pytest.mark.parametrize("make", [lambda path: path.write_text("a file"), lambda path: path.symlink_to("nowhere")])
@pytest.mark.parametrize("below", [".", "deeper/still"])
def test_what_is_not_a_folder_is_refused_before_computing(tmp_path: Path, make: Callable[[Path], None], below: str) -> None:
    make(tmp_path / "out")
    with pytest.raises(
        HeadrankError, match=rf"^{tmp_path}/out: not a folder, so results cannot be written to {tmp_path / 'out' / below}; choose another with --out DIR$"
    ):
        OutputFolder(tmp_path / "out" / below).prepare("effrank", SUFFIXES)


def test_preparing_leaves_nothing_behind(tmp_path: Path) -> None:
    OutputFolder(tmp_path / "deep" / "out").prepare("effrank", SUFFIXES)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "notes.txt").write_text("mine")
    OutputFolder(tmp_path).prepare("effrank", SUFFIXES)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write")
def test_a_folder_that_cannot_be_written_is_refused_before_computing() -> None:
    with pytest.raises(HeadrankError, match=r"^/proc/self/out: cannot be written: .*; choose another folder with --out DIR$"):
        OutputFolder(Path("/proc/self/out")).prepare("effrank", SUFFIXES)


def test_a_folder_that_vanished_meanwhile_is_made_again(folder: Path) -> None:
    output = OutputFolder(folder)
    output.prepare("effrank", SUFFIXES)
    output.save("effrank", version(1))
    folder.rename(folder.with_name("elsewhere"))
    output.save("effrank", version(2))
    assert whole_version(folder, range(3)) == 2


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file can grow beyond 50 000 bytes, so that writing fails midway as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_an_error_and_the_old_result_stays(folder: Path, request: pytest.FixtureRequest) -> None:
    save(folder, version(1))
    request.getfixturevalue("small_disk")
    with pytest.raises(HeadrankError, match=rf"{os.strerror(errno.EFBIG)}; choose another folder"):
        save(folder, version(2))
    assert whole_version(folder, range(3)) == 1
    assert is_vouched_for(folder)
    assert [path.name for path in (folder / ".headrank").iterdir()] == ["lock"]


# Kills itself at the n-th step that changes a file system, for every n until saving gets to its end: every state that
# a kill can leave behind. Audit events precede the step that they announce. A fork a step, since a start takes long.
EVERY_INSTANT = """
import os
folder = Path(sys.argv[1])
STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
n = 0
while True:
    n += 1
    here = folder / str(n)
    save(here, version(1, ("png", "csv", "json", "pdf")))
    child = os.fork()
    if child == 0:
        left = n
        def step(event, arguments):
            global left
            left -= event in STEPS and (event != "open" or isinstance(arguments[1], str) and arguments[1] != "r" or bool((arguments[2] or 0) & 3))
            if left == 0:
                os._exit(9)
        sys.addaudithook(step)
        OutputFolder(here).save("effrank", version(2))
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        break
    print(n, flush=True)
"""


def test_killed_at_any_step_the_folder_holds_the_old_or_the_new_whole_result(tmp_path: Path) -> None:
    child = run_child(EVERY_INSTANT, tmp_path)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    steps = list(map(int, output.split()))
    old = {f"effrank.{suffix}": content for suffix, content in version(1, ("csv", "json", "pdf", "png")).items()}
    new = {f"effrank.{suffix}": content for suffix, content in version(2, ("csv", "json", "png")).items()}
    found = []
    for step in steps:
        here = tmp_path / str(step)
        if is_vouched_for(here):  # what a reader sees before any next run
            assert visible(here) in (old, new)
        else:
            assert (here / ".headrank" / "commit").exists()
        OutputFolder(here).prepare("effrank", ())
        assert is_vouched_for(here)
        assert visible(here) in (old, new)
        found.append(visible(here) == new)
        assert [path.name for path in (here / ".headrank").iterdir()] == ["lock"]
        OutputFolder(here).save("effrank", version(3))
        assert whole_version(here, range(4)) == 3
    assert found == sorted(found)
    assert {False, True} <= set(found)
    assert len(steps) > 10


REPEATED = """
number = int(sys.argv[2])
while True:
    number += 1
    save(Path(sys.argv[1]), version(number))
    print(number, flush=True)
"""


def test_killed_at_random_instants_no_result_is_lost_or_mixed(folder: Path) -> None:
    dice = random.Random(7)
    save(folder, version(0))
    done, kills = 0, 0
    while kills < 30:
        child = run_child(REPEATED, folder, done)
        assert child.stdout is not None
        first = int(child.stdout.readline())
        time.sleep(dice.uniform(0, 0.03))
        child.send_signal(signal.SIGKILL)
        done = int((child.stdout.read().split() or [first])[-1])
        child.wait()
        child.stdout.close()
        kills += 1
        OutputFolder(folder).prepare("effrank", SUFFIXES)
        assert is_vouched_for(folder)
        done = whole_version(folder, range(done, done + 2))  # the last that was reported, or the one under way
    assert done >= kills


TIMES = 20

CONTENDER = """
for number in range(int(sys.argv[3])):
    OutputFolder(Path(sys.argv[1])).prepare(sys.argv[2], version(number))
    OutputFolder(Path(sys.argv[1])).save(sys.argv[2], version(number))
"""


def test_two_processes_on_one_folder_do_not_mix_their_results(folder: Path) -> None:
    children = [run_child(CONTENDER, folder, stem, TIMES) for stem in ("effrank", "effrank", "heatmap")]
    for child in children:
        child.communicate(timeout=60)
        assert child.returncode == 0
    assert visible(folder) == {f"{stem}.{suffix}": content for stem in ("effrank", "heatmap") for suffix, content in version(TIMES - 1).items()}
    assert is_vouched_for(folder)


def test_an_interrupt_between_two_moves_leaves_the_new_result(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(folder, version(1))
    replace, calls = Path.replace, []

    def interrupted(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        OutputFolder(folder).save("effrank", version(2))
    assert whole_version(folder, range(3)) == 2
    assert is_vouched_for(folder)


def test_a_file_system_without_locks_still_gets_whole_results(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    save(folder, version(1))
    assert is_vouched_for(folder)


def figure() -> Figure:
    drawn = Figure(figsize=(3, 2))
    drawn.add_subplot().plot([1, 2, 5], label="a")
    drawn.axes[0].fill_between([0, 1], [1, 2], hatch="//")
    return drawn


@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_equal_figures_are_equal_files_in_any_process_at_any_time(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "from headrank.output import figure_bytes; from tests.test_output import figure; sys.stdout.buffer.write(figure_bytes(figure(), sys.argv[1]))"
    other, _ = run_child(script, suffix).communicate(timeout=60)
    monkeypatch.setattr(time, "time", lambda: 1e9)
    ours = figure_bytes(figure(), suffix)
    assert ours == other
    for word in (b"Matplotlib v", b"matplotlib.org", b"CreationDate", b"Software", b"<dc:date>"):
        assert word not in ours


def test_a_png_has_print_quality() -> None:
    png = figure_bytes(figure(), "png")
    assert int.from_bytes(png[16:20], "big") == 600
    assert b"pHYs" in png


def test_an_unknown_figure_format_is_refused_by_name() -> None:
    with pytest.raises(HeadrankError, match=r"^no figure format 'jpg'; there are png, pdf, svg$"):
        figure_bytes(figure(), "jpg")


def test_a_replaced_file_is_the_old_or_the_new_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replace_atomically(path) as temporary:
        temporary.write_text("old")

    def write_half(temporary: Path) -> None:
        temporary.write_text("half of the new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), replace_atomically(path) as temporary:
        write_half(temporary)
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("file", "old")]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
