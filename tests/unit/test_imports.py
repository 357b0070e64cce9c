# SPDX-License-Identifier: Apache-2.0
"""Imports point down layers, each heavy library stays in its folder, planning stays light. Reads source and strings."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.sources import PRODUCT_FOLDERS, ROOT, module_name, python_files, tree_of
from tests.waiting import HANG_S

LAYERS = {
    "conversion": 0,
    "mrl.types": 0,
    "mrl.config": 0,
    "mrl.env": 0,
    "mrl.exit_codes": 0,
    "mrl.gpus": 0,
    "mrl.kernels": 0,
    "mrl.shortage": 0,
    "mrl.metrics": 0,
    "mrl.numa": 0,
    "mrl.phases": 0,
    "mrl.rooms": 0,
    "mrl.signals": 0,
    "mrl.spans": 0,
    "mrl.startup": 0,
    "mrl.data": 1,
    "mrl.envs": 1,
    "mrl.algo": 1,
    "mrl.refit": 1,
    "mrl.plan": 2,
    "mrl.policy": 2,
    "mrl.rollout": 2,
    "mrl.cluster": 3,
    "mrl.store": 3,
}
ENTRY_LAYER = 4
# What hangs on the program: it imports the program, which names it in one file alone.
ROOMS = ("mrl.nemo", "mrl.ops")
SEAM = "mrl.rooms"
# Within layer 0, settings are checked against the sizes in the conversion tables, and name the models of a rank.
ALLOWED_BESIDE = {
    ("mrl.config", "conversion"),
    ("mrl.config", "mrl.env"),
    ("mrl.config", "mrl.gpus"),
    ("mrl.config", "mrl.phases"),
    ("mrl.config", "mrl.rooms"),
    ("mrl.exit_codes", "mrl.signals"),
    ("mrl.gpus", "mrl.env"),
    ("mrl.kernels", "mrl.gpus"),
    ("mrl.startup", "mrl.env"),
    ("mrl.numa", "mrl.env"),
    ("mrl.signals", "conversion"),
}

HOMES = {"megatron": "mrl.policy", "vllm": "mrl.rollout", "ray": "mrl.cluster"}
# The files of conversion/ that touch bytes; all others are tables and need the standard library only.
BYTE_MODULES = {
    *(f"conversion.{name}" for name in "convert lora_export peft_check tensors".split()),
    *(
        f"conversion.files.{name}"
        for name in "checkpoint_metadata crc32 experts safetensors torch_dist torch_dist_writer".split()
    ),
}
# What a bare GPU machine has: enough to try the policy and the refit without the rest.
BARE_LIBRARIES = {"isal", "megatron", "numpy", "safetensors", "torch", "triton"}
HEAVY_LIBRARIES = {"megatron", "ray", "safetensors", "tokenizers", "torch", "transformers", "vllm"}

ENTRY_POINT_GROUPS = {"mrl.rewards", "mrl.families"}

# A final dot: the beginning of an f-string.
OURS = re.compile(r"(mrl|conversion)(\.\w+)+(:\w+|\.)?")
HEAVY = re.compile(r"(megatron|vllm|ray)(\.\w+)+")


def imported_names(source: str, module: str, *, at_module_level: bool = False) -> Iterator[str]:
    """Dotted names that `source` imports, by statement or by string.

    `at_module_level` leaves out functions, strings and TYPE_CHECKING blocks.
    """
    for node in _nodes(tree_of(source), skip_functions=at_module_level):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not at_module_level:
            if node.value in ENTRY_POINT_GROUPS:
                continue
            if OURS.fullmatch(node.value) or HEAVY.fullmatch(node.value):
                yield node.value.replace(":", ".").rstrip(".")
        elif (
            isinstance(node, ast.Call)
            and not at_module_level
            and ast.unparse(node.func).endswith(("import_module", "__import__"))
        ):
            yield from (
                arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            )


def _nodes(tree: ast.AST, *, skip_functions: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if skip_functions and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if skip_functions and isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from _nodes(child, skip_functions=skip_functions)


def part_of(name: str) -> str:
    """The row of `LAYERS` that a dotted name of ours belongs to; entries are rows of their own."""
    return "conversion" if name.split(".")[0] == "conversion" else ".".join(name.split(".")[:2])


def violations(source: str, module: str) -> list[str]:
    """Imports of `module` although the layers or a library's home forbid it."""
    found = []
    part = part_of(module)
    layer = LAYERS.get(part, ENTRY_LAYER)
    for name in imported_names(source, module):
        root = name.split(".")[0]
        if part_of(name) in ROOMS and part not in (SEAM, *ROOMS):
            found.append(f"{module} imports {name}; only {SEAM} names a room")
        if root in HOMES and part != HOMES[root]:
            found.append(f"{module} imports {name}; {root} is imported only in {HOMES[root]}")
        if root in ("mrl", "conversion") and part_of(name) not in (part, "mrl", *ROOMS) and layer != ENTRY_LAYER:
            if LAYERS.get(part_of(name), ENTRY_LAYER) >= layer and (part, part_of(name)) not in ALLOWED_BESIDE:
                found.append(f"{module} imports {name}; imports point down the layers")
        if (
            part == "conversion"
            and module not in BYTE_MODULES
            and root != "conversion"
            and root not in sys.stdlib_module_names
        ):
            found.append(f"{module} imports {name}; only {sorted(BYTE_MODULES)} may leave the standard library")
    return found


def test_imports_point_down_and_libraries_stay_home():
    files = python_files(tuple(folder for folder in PRODUCT_FOLDERS if folder != "scripts"))
    assert [found for path in files for found in violations(path.read_text(), module_name(path))] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mrl.algo.losses", "from mrl.policy import step"),
        ("mrl.algo.losses", "from ..policy import step"),
        ("mrl.policy.step", "def f():\n    from mrl.rollout.engine import Engine"),
        ("mrl.policy.step", "WORKER = 'mrl.rollout.worker.Worker'"),
        ("mrl.data.readers", "import importlib\nimportlib.import_module('ray')"),
        ("mrl.refit.pull", "import megatron.core"),
        ("mrl.cluster.group", "import vllm"),
        ("mrl.train", "import ray"),
        ("mrl.env", "import mrl.config.load"),
        ("mrl.store.ledger", "import mrl.cluster.session"),
        ("mrl.config.load", "import mrl.types"),
        ("conversion.boxes", "import mrl.types"),
        ("conversion.boxes", "import torch"),
        ("mrl.types", "import mrl.train"),
        ("mrl.train", "import mrl.ops.launch"),
        ("mrl.config.known", "from mrl.nemo.dialect.translate import migrate"),
        ("mrl.store.run_folder", "def f():\n    from mrl.ops.view import page"),
        ("mrl.launch", "MODULE = 'mrl.ops.launch'"),
        ("mrl.data.rows", "from mrl.nemo.gym.rows import gym_conversation"),
        ("mrl.envs.scorer", "def f(name):\n    return f'mrl.nemo.gym.graders.{name}:make'"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str):
    assert violations(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mrl.train", "import mrl.cluster.session\nimport mrl.store.ledger"),
        ("mrl.rollout.engine", "import vllm\nWORKER = 'mrl.rollout.worker.Worker'\nfrom mrl.refit.pull import Puller"),
        ("mrl.config.rules.checks", "from conversion.families import registry\nfrom mrl.env import ENV"),
        ("mrl.rooms", "MODULE = 'mrl.ops.launch'"),
        ("mrl.ops.launch", "import mrl.check\nimport mrl.ops.launchers.slurm"),
        ("mrl.nemo.gym.servers", "from mrl.rollout.agents import AgentTask\nfrom mrl.data.fields import REQUEST"),
        ("mrl.algo.losses", "from . import advantages\nMESSAGE = 'see mrl.policy.step for why'"),
    ],
)
def test_an_allowed_import_passes(module: str, source: str):
    assert violations(source, module) == []


def test_no_import_runs_in_a_circle():
    """Not even one inside a function, or for the type checker alone."""
    trees = {module_name(path): tree_of(path.read_text()) for path in python_files(("conversion", "mrl"))}
    graph: dict[str, set[str]] = {}
    for module, tree in trees.items():
        froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        # A name of a package is a module of it, or the package's own.
        graph[module] = {
            whole if (whole := f"{node.module}.{alias.name}") in trees else str(node.module)
            for node in froms
            for alias in node.names
        }
    assert len(graph["mrl.cluster.session"]) > 10
    graphlib.TopologicalSorter(graph).prepare()


def test_policy_and_refit_need_only_the_libraries_of_a_bare_gpu_machine():
    sources = {module_name(path): path.read_text() for path in python_files(("mrl", "conversion"))}
    pending = [name for name in sources if name.startswith(("mrl.policy", "mrl.refit"))]
    seen: set[str] = set()
    libraries: dict[str, str] = {}
    while pending:
        module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        for name in imported_names(sources[module], module, at_module_level=True):
            ours = next((candidate for candidate in (name, name.rpartition(".")[0]) if candidate in sources), None)
            if ours:
                pending.append(ours)
            elif name.split(".")[0] not in sys.stdlib_module_names:
                libraries[name.split(".")[0]] = module
    assert {library: module for library, module in libraries.items() if library not in BARE_LIBRARIES} == {}


def _planning_modules() -> list[str]:
    parts = [part for part, layer in LAYERS.items() if layer == 0]
    modules = [module_name(path) for path in python_files(("mrl", "conversion"))]
    return [name for name in modules if part_of(name) in parts and name not in BYTE_MODULES]


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (_planning_modules(), HEAVY_LIBRARIES),
        (["mrl.ops.plan"], HEAVY_LIBRARIES - {"safetensors", "tokenizers"}),
        (["mrl.cluster.rewards", "mrl.data.chat"], {"torch"}),
        (
            ["mrl.envs.child", "mrl.envs.math_value", "mrl.envs.own"],
            HEAVY_LIBRARIES | {"pydantic", "mrl.config.schema"},
        ),
        (["mrl.rollout.environment", "mrl.refit.inputs"], {"vllm"}),
    ],
    ids=["layer 0", "plan", "reward actors", "children that grade", "driver"],
)
def test_a_process_that_stays_light_loads_nothing_heavy(modules: list[str], heavy: set[str]):
    code = f"import sys, {', '.join(modules)}\nprint(*sorted({heavy} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr
