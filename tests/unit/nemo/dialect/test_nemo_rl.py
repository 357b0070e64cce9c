# SPDX-License-Identifier: Apache-2.0
"""NeMo RL's own files and the tutorials' command lines pass `--check`; what is wrong in them is always a message."""

import random
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from mrl import check
from mrl.config.errors import ConfigError, value_at
from mrl.config.files import packaged_configs
from mrl.config.known import nearest_key
from mrl.config.load import load_config
from mrl.config.rules.checks import find_problems
from mrl.config.schema.keys import KEYS
from mrl.nemo.dialect.translate import DIALECT_KEYS
from tests.sources import ROOT

NEMO_RL = ROOT / "tests/data/nemo_rl"
FILES = sorted(path.name for path in NEMO_RL.glob("*.yaml"))
COMMANDS = [
    line for line in (NEMO_RL / "tutorial_commands.txt").read_text().splitlines() if line and not line.startswith("#")
]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Refusals of `--check` of a command line, in an empty folder; empty if nothing."""
    monkeypatch.chdir(tmp_path)

    def refused(*words: str) -> str:
        code = check.main([*words, check.OPTION])
        said = capsys.readouterr().out.partition("Refused: ")[2].partition("\n")[2].partition("Not looked at:")[0]
        assert bool(said) == bool(code)
        return said

    return refused


@pytest.mark.parametrize("name", FILES)
def test_nemo_rl_s_files_pass(refused: Callable[..., str], name: str):
    assert refused(str(NEMO_RL / name)) == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_command_lines_of_the_tutorials_pass_on_nemo_rl_s_files(refused: Callable[..., str], command: str):
    assert refused(*(re.sub("examples/(configs|nemo_gym)", str(NEMO_RL), word) for word in shlex.split(command))) == ""


@pytest.mark.parametrize("command", [command for command in COMMANDS if "grpo" in command])
def test_command_lines_of_the_tutorials_pass_on_packaged_configs(refused: Callable[..., str], command: str):
    assert refused(*shlex.split(command)) == ""


@pytest.mark.parametrize("name", sorted(path.name for path in packaged_configs().glob("*.yaml")))
def test_packaged_configs_pass(refused: Callable[..., str], name: str):
    assert refused(name) == ""


def test_a_typo_in_any_section_is_answered_with_the_key():
    """The section itself if the typo is in its name; a name that is another key's, as `lr` for `llr`, may come out."""
    keys = sorted(key for key in [*KEYS, *DIALECT_KEYS] if len(key.rpartition(".")[2]) > 3)
    sections = {".".join(key.split(".")[:-1]): key for key in keys}
    assert len(sections) > 40
    for key in sections.values():
        typo = key[:-1] + "q" + key[-1]
        assert nearest_key(tuple(typo.split("."))) == key


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "distillation"])
def test_a_key_of_several_algorithms_is_answered_with_the_one_of_the_configs_own(algorithm: str):
    for name, meant in (("num_prompts_per_step", "num_prompts_per_step"), ("max_steps", "max_num_steps")):
        assert nearest_key((name,), algorithm) == f"{algorithm}.{meant}"


def test_invalid_configs_are_answered_with_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert num_refused(tmp_path, monkeypatch, (NEMO_RL / "tutorial_002.yaml").read_text(), num_configs=60) > 30


@pytest.mark.long("config")
@pytest.mark.parametrize("name", FILES)
def test_many_invalid_configs_are_answered_with_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    assert num_refused(tmp_path, monkeypatch, (NEMO_RL / name).read_text(), num_configs=500 // len(FILES) + 1) > 30


def num_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, *, num_configs: int) -> int:
    """Number of refused damaged versions of `text`; whatever is raised but ConfigError fails."""
    monkeypatch.chdir(folder)
    (folder / "grpo_math_1B.yaml").write_text((NEMO_RL / "grpo_math_1B.yaml").read_text())
    rng, found = random.Random(17), 0
    for index in range(num_configs):
        path = folder / "config.yaml"
        path.write_text(damaged(text, rng))
        try:
            found += bool(find_problems(load_config(path, [damaged_override(rng)] if index % 3 == 0 else [])))
        except ConfigError as error:
            found += 1
            assert all(str(problem).strip() for problem in error.problems)
    return found


VALUES = [
    *(
        "",
        "null",
        "true",
        "-1",
        "0",
        "1e400",
        "abc",
        "[1, 2]",
        "{a: 1}",
        "${nope}",
        "${.nope}",
        "${mul:1}",
        "${div:1,0}",
        "???",
        "'",
    ),
    *("&x", "2**64", "${"),
]


def damaged(text: str, rng: random.Random) -> str:
    lines = text.splitlines()
    for _ in range(rng.randint(1, 3)):
        index = rng.randrange(len(lines))
        line = lines[index]
        kind = rng.randrange(6)
        if kind == 0 and ":" in line:
            lines[index] = line.partition(":")[0] + ": " + rng.choice(VALUES)
        elif kind == 1 and line.strip():
            place = rng.randrange(len(line))
            lines[index] = line[:place] + rng.choice("abz_:[{#\"' 0") + line[place + 1 :]
        elif kind == 2:
            lines[index] = " " * rng.randint(0, 9) + line.strip()
        elif kind == 3:
            del lines[index]
            lines = lines or [""]
        elif kind == 4:
            lines.insert(index, lines[rng.randrange(len(lines))])
        else:
            lines.insert(
                index,
                " " * rng.choice([0, 2, 4])
                + rng.choice(["_override_: 1", "enabled: maybe", "defaults: nope.yaml", "? [a]: b", "- 1"]),
            )
    return "\n".join(lines) + "\n"


def damaged_override(rng: random.Random) -> str:
    key = rng.choice(sorted([*KEYS, *DIALECT_KEYS]))
    return rng.choice(["", "+", "++", "~"]) + key + rng.choice(["", "x", ".", ".y"]) + "=" + rng.choice(VALUES)


@pytest.mark.parametrize("backend", ["dtensor_cfg", "megatron_cfg"])
@pytest.mark.parametrize("value", ["[]", "{}", "[1, 2]", "{a: 1}", "null", "''", "-1", "1.5", "true", "x"])
def test_a_value_of_any_form_is_answered_with_messages(workplace: Path, value: str, backend: str):
    """For every key that the schema lacks, all at once."""
    keys = sorted(DIALECT_KEYS - {f"policy.{backend}.enabled"})
    leaves = [key for key in keys if not any(other.startswith(f"{key}.") for other in (*keys, *KEYS))]
    assert len(leaves) > 200
    with pytest.raises(ConfigError) as caught:
        load_config("grpo_tiny.yaml", [f"++{key}={value}" for key in leaves] + [f"++policy.{backend}.enabled=true"])
    assert all(problem.key in str(problem) for problem in caught.value.problems)


UNUSED = {
    *(
        f"grpo.reward_shaping.{name}"
        for name in ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length")
    ),
    *(f"cluster.master_port_range_{end}" for end in ("low", "high")),
    "logger.mlflow.tracking_uri",
}


CHAT = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"
# Environments that are Gym's in NeMo RL get their rollouts without a server.
SERVER = {
    "policy.generation.vllm_cfg.expose_http_server",
    *(f"{CHAT}.{name}" for name in ("enable_auto_tools", "tool_parser", "reasoning_parser")),
}
RECOMPUTED = {
    "policy.megatron_cfg.activation_checkpointing"
}  # costs time alone, and no GPU of 80 GB holds the run without


@pytest.mark.parametrize(
    ("name", "left_out"), [("grpo_nanov3", SERVER), ("grpo_math_1B", UNUSED), ("grpo_math_8B", UNUSED | RECOMPUTED)]
)
def test_packaged_configs_mean_what_nemo_rl_s_files_of_their_names_mean(name: str, left_out: set[str]):
    ours, theirs = load_config(packaged_configs() / f"{name}.yaml"), load_config(NEMO_RL / f"{name}.yaml")
    # Runs of several packaged files must not share a folder, nor logs or a name, which follow the folder.
    own = {"logger.log_dir", "logger.wandb.name", "logger.swanlab.name", "logger.mlflow.run_name"}
    assert {key for key in KEYS.keys() - left_out if value_at(ours, key) != value_at(theirs, key)} - own == {
        "checkpointing.checkpoint_dir"
    }


def test_the_older_form_of_a_file_means_what_the_present_one_means():
    older, present = load_config(NEMO_RL / "grpo_nanov3_branch.yaml"), load_config(NEMO_RL / "grpo_nanov3.yaml")
    # Said only by the present form; the older multiple of lengths is completed by `PolicyConfig.row_multiple`.
    news = {"policy.make_sequence_length_divisible_by", "policy.sequence_packing.microbatch_order"}
    news |= {f"cluster.master_port_range_{end}" for end in ("low", "high")}
    news |= {f"policy.generation.port_range_{end}" for end in ("low", "high")} | {f"{CHAT}.reasoning_parser"}
    assert {key for key in KEYS if value_at(older, key) != value_at(present, key)} - news == set()
    assert older.policy.row_multiple == present.policy.row_multiple
    assert older.data.default.env_name == "nemo_gym"
