# SPDX-License-Identifier: Apache-2.0
"""docs/cluster.md: scripts/ray.sub's variables and defaults; each example is launched, dry, and fits by its plan."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from mrl.ops import launch, plan
from mrl.plan.hardware import NODES
from tests.sources import ROOT

SCRIPT = (ROOT / "scripts" / "ray.sub").read_text()
PAGE = (ROOT / "docs" / "cluster.md").read_text()


def documented() -> dict[str, str | None]:
    """Variable -> default, where a row has one for each of its variables."""
    rows = PAGE.split("| variable | default | effect |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    found = {}
    for row in rows:
        names, default = (cell.strip() for cell in row.split("|")[1:3])
        variables, defaults = re.findall(r"`(\w+)`", names), default.split(", ")
        found |= dict(
            zip(variables, defaults if len(defaults) == len(variables) else [None] * len(variables), strict=True)
        )
    return found


def test_the_table_has_every_variable_that_the_script_reads_and_no_other():
    # What Slurm sets itself is no setting.
    read = {name for name in re.findall(r"\$\{([A-Z]\w*):-", SCRIPT) if not name.startswith("SLURM_")}
    assert set(documented()) == read


def test_the_table_has_the_defaults_of_the_script():
    defaults = dict(re.findall(r"\b([A-Z]\w*)=\$\{\1:-([^${}]*)\}", SCRIPT))
    assert len(defaults) > 20
    named = {"": {"none", "off", "that of the host's name"}}
    wrong = {
        name: (default, documented()[name])
        for name, default in defaults.items()
        if (documented()[name] or "").strip("`") not in named.get(default, {default})
    }
    assert wrong == {}


def examples() -> list[list[str]]:
    """The words of every command of the page that launches a run, or submits one with ray.sub."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [words for words in lines if "mrl.launch" in words or any("mrl.train" in word for word in words)]


def test_the_page_has_an_example_for_each_launcher():
    assert {word for words in examples() for word in words} >= {"k8s", "lepton", "sbatch"}


@pytest.mark.parametrize("words", examples(), ids=lambda words: " ".join(words)[:60])
def test_an_example_is_launched_and_fits(
    tmp_path: Path, llama_8b: Path, capsys: pytest.CaptureFixture[str], words: list[str]
):
    (tmp_path / "nano").mkdir()
    shutil.copy(ROOT / "scripts/bench/models/nemotron3_nano_30b_a3b.config.json", tmp_path / "nano/config.json")
    models = {"grpo_math_8B.yaml": llama_8b, "grpo_nanov3.yaml": tmp_path / "nano"}
    if "mrl.launch" not in words:
        # A command for sbatch: what it runs stands in COMMAND.
        (command,) = (word.partition("=")[2] for word in words if word.startswith("COMMAND="))
        asked = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--"))
        _, _, _, config, *overrides = shlex.split(command)
        assert {
            f"cluster.num_nodes={asked['nodes']}",
            f"cluster.gpus_per_node={asked['gres'].removeprefix('gpu:')}",
        } <= {*overrides}
        words = ["python", "-m", "mrl.launch", "slurm", config, *overrides, "--log-dir", str(tmp_path)]
    _, _, _, launcher, config, *rest = words
    overrides = [*(word for word in rest if re.match(r"[\w.]+=", word)), f"policy.model_name={models[config]}"]
    options = [word for word in rest if not re.match(r"[\w.]+=", word)]
    assert launch.main([launcher, config, *overrides, *options]) == 0, capsys.readouterr().out
    node = (
        NODES[options[options.index("--instance-type") + 1]] if "--instance-type" in options else NODES["p5.48xlarge"]
    )
    code = plan.main([config, *overrides, "--gpu", node.gpu, "--node-memory", str(node.memory_gib)])
    assert code == 0, capsys.readouterr().out
