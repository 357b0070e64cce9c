"""`--check` says what a config means here, without a process, a GPU or a network."""

import subprocess
import sys
from pathlib import Path

import pytest

from mrl import check
from mrl.train import main
from tests.sources import ROOT

NEMO_RL = ROOT / "tests/data/nemo_rl"


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Exit code and output of `--check` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def said(*words: str) -> tuple[int, str]:
        code = check.main([*words, check.OPTION])
        return code, capsys.readouterr().out

    return said


def test_a_laptop_is_told_what_it_lacks_for_a_cluster_s_config(said):
    code, output = said(str(NEMO_RL / "grpo_nanov3.yaml"), "cluster.num_nodes=1", "cluster.gpus_per_node=1")
    assert code == 2
    assert (
        "cluster.num_nodes=1 x cluster.gpus_per_node=1: 1 GPUs, and the layout needs a multiple of 16: tensor 2 x pipeline 2 x "
        "context 4 = 16, expert 8 x expert tensor 1 x pipeline 2 = 16; raise cluster.num_nodes or cluster.gpus_per_node"
    ) in output
    assert "policy.generation.vllm_cfg.tensor_parallel_size=4: does not divide the 1 worker units of a node" in output
    provided = output.partition("To be provided")[2].partition("Refused")[0]
    assert "policy.model_name=/path/to/hf_checkpoint" in provided and "/path/to/train.jsonl" in provided


def test_what_is_missing_on_this_machine_refuses_nothing(said):
    code, output = said("grpo_tiny.yaml")
    assert code == 0
    assert "To be provided: 4" in output and "Refused: 0" in output
    assert "start deadline 300 s: 300 s for processes; the time to read the weights of prepared/tiny/model is added" in output


def test_an_id_of_the_hub_is_not_asked_for(said):
    code, output = said("grpo_tiny.yaml", "policy.model_name=no-such/model")
    assert code == 0
    assert "policy.model_name=no-such/model: not in the local Hugging Face cache; it is downloaded at the start" in output


def test_the_report_says_what_became_of_each_key(said):
    code, output = said(str(NEMO_RL / "grpo_math_8B.yaml"), "data.train_jsonl_fpath=rows.jsonl", "swanlab_enabled=false")
    assert "data.train_jsonl_fpath=rows.jsonl (command line) -> data.train.data_path" in output
    assert "policy.dtensor_cfg.tensor_parallel_size=1 (grpo_math_1B.yaml:147) -> policy.megatron_cfg.tensor_model_parallel_size=1" in output
    assert "policy.generation_batch_size=32 (grpo_math_8B.yaml:18): NeMo RL reads it nowhere" in output


def test_a_file_that_is_not_there_is_one_message(said):
    assert said("nope.yaml")[0] == 2


def test_the_entry_checks_in_process_too(capsys: pytest.CaptureFixture[str]):
    assert main(["grpo_tiny.yaml", "grpo.sed=1", check.OPTION]) == 2
    assert "grpo.sed=1 (command line): no such key; the nearest is grpo.seed" in capsys.readouterr().out


def test_a_check_imports_nothing_heavy():
    script = "import sys, runpy; sys.argv = ['train', 'grpo_tiny.yaml', '--check']\n"
    script += "try:\n    runpy.run_module('mrl.train', run_name='__main__')\nexcept SystemExit:\n    pass\n"
    script += "print(sorted({'torch', 'ray', 'vllm', 'megatron', 'transformers'} & sys.modules.keys()))"
    finished = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert finished.stdout.splitlines()[-1] == "[]"
