"""The README says what is true: its commands exist, its table is the program's own, its Python runs."""

import re
import subprocess
import sys
from pathlib import Path

from headrank.architectures.table import readable
from headrank.cli import app

TOP = Path(__file__).parent.parent
README = (TOP / "README.md").read_text(encoding="utf-8")


def test_every_command_has_a_section_with_a_real_call() -> None:
    for command in app.registered_commands:
        assert f"### headrank {command.name}\n" in README
        assert re.search(rf"^    \$ headrank {command.name}\b", README, re.MULTILINE), command.name


def test_the_table_of_what_is_read_is_the_programs_own() -> None:
    for row, model_types in readable():
        assert f"| {row} | {', '.join(model_types)} |\n" in README, row
    assert len(re.findall(r"^\| \w+ \| [\w, :.-]+ \|$", README, re.MULTILINE)) == len(readable())


def test_files_and_figures_that_it_names_are_there() -> None:
    for name in re.findall(r"\]\((\.readme/[\w.-]+)\)", README) + re.findall(r"\b((?:scripts|configs)/[\w.-]+\.\w+)", README):
        assert (TOP / name).is_file(), name


def test_its_python_runs() -> None:
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        done = subprocess.run([sys.executable, "-c", code], cwd=TOP, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_its_shell_options_exist() -> None:
    help_of = {}
    for line in re.findall(r"^    \$? ?headrank (.+)$", README, re.MULTILINE):
        command = line.split()[0]
        if command not in help_of:
            help_of[command] = subprocess.run([sys.executable, "-m", "headrank", command, "--help"], capture_output=True, text=True, check=True).stdout
        for option in re.findall(r"(--[a-z-]+)", line.split(" && ")[0]):
            assert option in help_of[command], f"{command} has no {option}"
