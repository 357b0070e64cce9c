# SPDX-License-Identifier: Apache-2.0
"""Every place of the product where bytes or names could become code is listed here with its reason; a new one fails."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.sources import ROOT, tree_of

LOADERS = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "pickle._Unpickler", "marshal.loads", "shelve.open"),
    *(
        "torch.load",
        "numpy.load",
        "np.load",
        "yaml.load",
        "yaml.load_all",
        "yaml.unsafe_load",
        "yaml.full_load",
        "joblib.load",
    ),
    *(
        "eval",
        "exec",
        "compile",
        "__import__",
        "importlib.import_module",
        "import_module",
        "runpy.run_path",
        "runpy.run_module",
    ),
    "pkgutil.resolve_name",
    *(
        "dist_checkpointing.load",
        "dist_checkpointing.load_common_state_dict",
        "dcp.load",
        "FileSystemReader",
        "TorchDistLoadShardedStrategy",
    ),
    *(
        "AutoTokenizer.from_pretrained",
        "AutoConfig.from_pretrained",
        "AutoModelForCausalLM.from_pretrained",
        "get_class_from_dynamic_module",
    ),
    *("torch.hub.load", "cloudpickle.loads", "dill.loads", "spec_from_file_location"),
}
"""Functions that run code which a file, a pickle or a text names, or may be told to."""

REASONS = {
    ("conversion/files/checkpoint_metadata.py", "pickle.Unpickler"): "the restricted reader itself",
    (
        "conversion/files/torch_dist.py",
        "torch.load",
    ): "weights_only=True, of a chunk whose pickle the restricted reader refused",
    ("mrl/policy/checkpoint.py", "torch.load"): "weights_only=True, of common.pt",
    ("mrl/policy/cpu.py", "pkgutil.resolve_name"): "names that stand in the same file",
    (
        "mrl/rooms.py",
        "importlib.import_module",
    ): "modules of mrl.ops and mrl.nemo",
    ("mrl/policy/megatron_import.py", "importlib.import_module"): "names that stand in the same file",
    ("mrl/rollout/cpu.py", "pkgutil.resolve_name"): "names that stand in the same file",
    ("mrl/envs/child.py", "importlib.import_module"): "reward functions of mrl, named by its own declarations",
    ("mrl/inputs.py", "importlib.import_module"): "reward functions of mrl, named by its own declarations",
    ("mrl/config/own.py", "pkgutil.resolve_name"): "the user's functions and classes, which are trusted code",
    ("mrl/envs/sandbox.py", "importlib.import_module"): "the modules of the prelude, listed in the file",
    ("mrl/envs/sandbox.py", "runpy.run_path"): "the program under reward, in a child of its own",
    (
        "mrl/cluster/payload.py",
        "pickle.loads",
    ): "what another actor of the run has packed; Ray's own answers are pickles, too",
    (
        "mrl/data/reading.py",
        "pickle.loads",
    ): "rows that this process wrote into its own temporary file, which has no name",
    ("mrl/data/trial.py", "pickle.load"): "what a child of this process wrote into a temporary file, which has no name",
    ("mrl/nemo/dialect/tables.py", "yaml.load"): "a file of mrl's own, by a safe loader",
    ("mrl/config/passthrough.py", "yaml.load"): "a file of mrl's own, by a safe loader",
    ("mrl/config/files.py", "yaml.load"): "texts of others, by a safe loader, after check_yaml",
    (
        "conversion/peft_check.py",
        "AutoConfig.from_pretrained",
    ): "a config.json without auto_map, written by the same function",
    (
        "mrl/data/verifiers_child.py",
        "importlib.import_module",
    ): "the environment that the config names: the user's code, in a Python of its own",
    ("mrl/data/chat.py", "AutoTokenizer.from_pretrained"): "trust_remote_code=False",
}


def uses(source: str) -> set[str]:
    """Loaders a file calls, hands on or imports by name. Builtins count where called: keys may have their names."""
    tree = list(ast.walk(tree_of(source)))
    called = {ast.unparse(node.func) for node in tree if isinstance(node, ast.Call)}
    named = {ast.unparse(node) for node in tree if isinstance(node, ast.Attribute)}
    imported = {
        f"{node.module}.{alias.name}" for node in tree if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    return LOADERS & (called | named | imported)


def product_files() -> list[Path]:
    return [path for folder in ("mrl", "conversion") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_every_use_is_listed_with_its_reason():
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in product_files()
        for name in uses(path.read_text(encoding="utf-8"))
    }
    assert found == REASONS.keys()


@pytest.mark.parametrize("path", ["conversion/files/torch_dist.py", "mrl/policy/checkpoint.py"])
def test_torch_reads_weights_only(path: str):
    calls = [
        node for node in ast.walk(tree_of((ROOT / path).read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
    ]
    loads = [
        {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        for call in calls
        if ast.unparse(call.func) == "torch.load"
    ]
    assert loads and all(keywords.get("weights_only") == "True" for keywords in loads)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(b'')",
        "from pickle import loads",
        "import torch\nload = torch.load",
        "eval('1')",
        "import yaml\nyaml.load(x, y)",
    ],
)
def test_a_use_in_any_spelling_is_found(source: str):
    assert uses(source)
