"""Imports point one way: a module knows those of its own floor and of the floors below, never what stands above it."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import headrank

ROOT = Path(headrank.__file__).parent
FLOORS = [
    "errors diversity processes gram memory accumulators moments intervals alignment grouping ranks measures definitions",
    "config checkpoints architectures output options placement resume svg",
    "factors kernels rotary tokens model store selection null merging regroup anatomy",
    "forward huggingface hf_loading hf_placement eager selfcheck results dynamics summary tables figures inspection agreement report page",
    "measure",
    "commands suggest trial",
    "decisions",
    "cli",
    "__main__",
]
FLOOR = {module: floor for floor, modules in enumerate(FLOORS) for module in modules.split()}
LIKE = {"_command": "decisions", "_figure": "figures", "_tables": "tables"}  # ending -> the module on whose floor such ones stand


def room(module: str) -> str:
    """The part of a module's name that has a floor: 'model.decoder' is in 'model'."""
    return module.partition(".")[0]


def floor_of(room: str) -> int | None:
    return next((FLOOR[like] for ending, like in LIKE.items() if room.endswith(ending)), FLOOR.get(room))


def modules() -> dict[str, ast.Module]:
    """Name without 'headrank.' -> syntax tree."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if name != "__init__":
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


MODULES = modules()


def imported(tree: ast.Module, *, at_top_only: bool = False) -> Iterator[str]:
    """Full names of what a module imports, inside functions too; what only the type checker sees is left out."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if at_top_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (f"{node.module}.{name.name}" for name in node.names)
        waiting.extend(ast.iter_child_nodes(node))


def own(names: Iterator[str]) -> set[str]:
    """Of the imported names, the rooms of ours."""
    return {room(name.removeprefix("headrank.")) for name in names if name.startswith("headrank.")}


@pytest.mark.parametrize("module", sorted({room(module) for module in MODULES}))
def test_every_module_stands_on_a_floor(module: str) -> None:
    assert floor_of(module) is not None, f"give {module} a floor in {Path(__file__).name}: the lowest on which all that it imports is known"


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_from_a_floor_above(module: str) -> None:
    floor = floor_of(room(module)) or 0
    above = {name for name in own(imported(MODULES[module])) if (floor_of(name) or 0) > floor}
    assert not above


def test_no_two_rooms_need_each_other_to_be_imported() -> None:
    needs: dict[str, set[str]] = {}
    for module, tree in MODULES.items():
        needs.setdefault(room(module), set()).update(own(imported(tree, at_top_only=True)) - {room(module)})
    while free := [name for name, others in needs.items() if not others & needs.keys()]:
        for name in free:
            del needs[name]
    assert not needs


def test_the_test_of_floors_sees_imports_inside_functions_and_names_of_packages() -> None:
    tree = ast.parse(
        "from headrank import tables\nfrom headrank.model.decoder import Decoder\nif TYPE_CHECKING:\n    from headrank.cli import Shared\n"
        "def f():\n    import headrank.store\n    from headrank.measure import measure\n"
    )
    assert own(imported(tree)) == {"tables", "model", "store", "measure"}
    assert own(imported(tree, at_top_only=True)) == {"tables", "model"}


HEAVY = ("torch", "matplotlib", "transformers", "tokenizers", "huggingface_hub", "gguf", "accelerate", "scipy")
LIGHT = "diversity intervals measures config output options store selection results dynamics summary tables measure commands cli"


@pytest.mark.parametrize("names", [["cli"], LIGHT.split()], ids=["the command line", "all that stored measurements need"])
def test_no_heavy_package_is_imported(names: list[str]) -> None:
    """headrank --help answers in a fraction of a second, and so do commands whose numbers are in the store."""
    code = f"import sys, importlib\nfor name in {names}: importlib.import_module('headrank.' + name)\nprint(*({set(HEAVY)} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


@pytest.mark.skipif(not sys.platform.startswith("linux") or torch.cuda.is_available(), reason="where there may be a GPU, torch is asked for it")
@pytest.mark.parametrize("source", ["weights", "activations"])
def test_a_measurement_that_is_in_the_store_is_found_without_torch(source: str, tmp_path: Path) -> None:
    model = ROOT / "data" / "nano" / "gqa"
    lines = (
        "import sys",
        "from headrank.measure import Settings, measure",
        "from headrank.selection import ModelRef",
        "from headrank.store import Store",
        f"settings = Settings(source={source!r}, n_sequences=2, null=True)",
        f"measure(ModelRef(path={str(model)!r}, label='', scale=None), settings, store=Store.default())",
        f"print(*({set(HEAVY)} & set(sys.modules)))",
    )
    code = "\n".join(lines)
    environment = {**os.environ, "HEADRANK_CACHE": str(tmp_path)}
    first, second = (subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment).stdout.split() for _ in range(2))
    assert "torch" in first
    assert second == []


@pytest.mark.parametrize("module", ["gram", "accumulators", "moments", "model.attention", "model.decoder"])
def test_mathematics_knows_no_files(module: str) -> None:
    assert not {"pathlib", "os", "json", "io", "safetensors"} & {name.partition(".")[0] for name in imported(MODULES[module])}


def test_eigenvalues_know_neither_tensors_nor_files() -> None:
    assert {name.partition(".")[0] for name in imported(MODULES["diversity"])} == {"numpy"}
