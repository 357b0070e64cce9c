# SPDX-License-Identifier: Apache-2.0
"""`--check` of values of a wrong kind, for every schema key: a refusal with code 2, or accepted; never a traceback."""

import re
from pathlib import Path

import pytest

from mrl import check
from mrl.check import Checked
from mrl.config.errors import Problem
from mrl.config.files import find_config, read_settings
from mrl.config.load import load_config
from mrl.config.migration import Migration
from mrl.config.schema.keys import KEYS, SCHEMA, SchemaNode
from mrl.config.schema.run import RunConfig
from mrl.config.values import Tree, config_of, faults_of
from mrl.inputs import Look
from tests.sources import ROOT

NANO = ROOT / "scripts/bench/models/nemotron3_nano_30b_a3b.config.json"
VALUES = ("some_text", "-1", "null", "[1, a]", "{a: 1}", "1e400", "nan", "123456789012345678901234567890", "''", "true")


@pytest.fixture
def overrides(workplace: Path) -> dict[str, list[str]]:
    """Overrides by config, with which it has no problem but Nano's missing weights and tokenizer."""
    folder = workplace / "nano"
    folder.mkdir()
    (folder / "config.json").write_text(NANO.read_text())
    rows = workplace / "prepared/tiny/data/train.jsonl"
    nano = [f"policy.model_name={folder}", f"data.train.data_path={rows}", f"data.validation.data_path={rows}"]
    return {"grpo_tiny.yaml": [], "grpo_nanov3.yaml": nano}


@pytest.mark.parametrize("config", ["grpo_tiny.yaml", "grpo_nanov3.yaml"])
@pytest.mark.parametrize("value", VALUES)
def test_all_keys_with_one_wrong_value_are_a_refusal(overrides: dict[str, list[str]], config: str, value: str):
    # Without the algorithm nothing else is read.
    words = [f"++{key}={value}" for key in KEYS if key != "algorithm"]
    assert check.main([config, *overrides[config], *words]) == 2
    assert check.main([config, *overrides[config], f"algorithm={value}"]) == 2


def values_of(section: object, node: SchemaNode, prefix: str = "") -> dict[str, object]:
    """The value of each key, and None for each section that is null."""
    found: dict[str, object] = {}
    for name, child in node.children.items():
        value = getattr(section, name)
        is_section = child.section is not None and value is not None
        found |= values_of(value, child, f"{prefix}{name}.") if is_section else {prefix + name: value}
    return found


@pytest.mark.parametrize(("config", "every"), [("grpo_tiny.yaml", 1), ("grpo_nanov3.yaml", 20)])
def test_a_check_goes_on_without_the_value_of_any_key(
    overrides: dict[str, list[str]], config: str, every: int, monkeypatch: pytest.MonkeyPatch
):
    # A look at rows starts processes, and is given up at the first unknown value.
    monkeypatch.setattr(check, "look_at_inputs", lambda *_, **__: Look())
    # Of the sections of other models, which the config lacks, one key stands for all.
    keys = [key for key in KEYS if key != "algorithm" and not re.match(r"value\.(?!model_name$)", key)]
    known = load_config(config, overrides[config])
    values, tree = values_of(known, SCHEMA), Tree(read_settings(find_config(config)), set())
    for key in keys[::every]:
        unknown = config_of(values, faults_of(tree, {key}))
        assert isinstance(unknown, RunConfig)
        unknown.facts, loaded = (
            known.facts,
            Checked(unknown, Migration(), [Problem("expression", key, None, "not known")]),
        )
        checked = check.examine_config(unknown, loaded)
        assert check.tell(checked) == 2 and any(problem.key == key for problem in checked.refused)
    for key in keys[:: 60 * every]:
        checked = check.examine(config, [*overrides[config], f"++{key}=${{nothing.here}}"])
        assert check.tell(checked) == 2 and any(problem.key == key for problem in checked.refused)


FOLDERS = ("policy.model_name", "policy.tokenizer.name", "checkpointing.checkpoint_dir", "logger.log_dir")
ODD = {
    "''": [*FOLDERS, "data.train.data_path", "data.default.env_name", "data.default.input_key"],
    "2147483648": ["cluster.num_nodes", "grpo.num_prompts_per_step", "policy.max_total_sequence_length"],
}


@pytest.mark.parametrize("value", ODD)
def test_odd_values_that_a_key_takes_end_in_a_report(overrides: dict[str, list[str]], value: str):
    for key in ODD[value]:
        assert check.main(["grpo_tiny.yaml", f"++{key}={value}"]) in (0, 2)
