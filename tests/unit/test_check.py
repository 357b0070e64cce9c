# SPDX-License-Identifier: Apache-2.0
"""`--check` says what a config means here, without a process, a GPU or a network."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mrl import check, evaluate
from mrl.config.load import load_config, resolved_yaml
from mrl.config.model import with_cached_folders
from mrl.loop.main import main
from mrl.train import train
from tests.sources import ROOT
from tests.unit.conftest import write_weights
from tests.waiting import HANG_S

NEMO_RL = ROOT / "tests/data/nemo_rl"


def lines_of(output: str, title: str) -> list[str]:
    """The lines of the group whose title begins like this."""
    _, found, rest = output.partition(f"\n{title}")
    assert found, output
    return [line.strip() for line in itertools.takewhile(lambda line: line.startswith("  "), rest.splitlines()[1:])]


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
        "cluster.num_nodes=1: the only slot (cluster.num_nodes=1 x cluster.gpus_per_node=1) is no multiple of "
        "tensor 2 x pipeline 2 x context 4 = 16, nor of expert 8 x expert tensor 1 x pipeline 2 = 16; change one "
        "of these sizes, cluster.num_nodes or"
    ) in output
    assert (
        "cluster.gpus_per_node=1: nodes hold whole engines or engines whole nodes, and "
        "policy.generation.vllm_cfg.tensor_parallel"
    ) in output
    provided = output.partition("To be provided")[2].partition("Refused")[0]
    assert "policy.model_name=/path/to/hf_checkpoint" in provided and "/path/to/train.jsonl" in provided


def test_what_is_missing_on_this_machine_refuses_nothing_unless_strict(said):
    assert said("grpo_tiny.yaml", check.STRICT)[0] == 2
    code, output = said("grpo_tiny.yaml")
    assert code == 0
    assert "To be provided: 3" in output and "Refused: 0" in output
    assert (
        "start deadline 300 s: 300 s for processes; the time to read the weights of prepared/tiny/model is added"
        in output
    )
    assert "train deadline 600 s: " in output and "checkpoint deadline 600 s: " in output


def test_a_machine_that_has_all_passes_the_strict_check(said, workplace: Path):
    assert said("grpo_tiny.yaml", check.STRICT)[0] == 0
    (workplace / "prepared/tiny/data/train.jsonl").unlink()
    assert said("grpo_tiny.yaml")[0] == 0
    code, output = said("grpo_tiny.yaml", check.STRICT)
    assert code == 2 and lines_of(output, "To be provided: 1")[0].startswith(
        "data.train.data_path=prepared/tiny/data/train.jsonl: no such"
    )


SETS = "data.train.datasets=[{data_path: prepared/tiny/data/train.jsonl}]"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["grpo_tiny.yaml", "grpo={num_prompts_per_step: 99, max_num_epochs: 1}"],
            "grpo.num_prompts_per_step=99: more than all rows (64 times grpo.max_num_epochs=1)",
        ),
        (
            ["ppo_tiny.yaml", "ppo={num_prompts_per_step: 99, max_num_epochs: 1}"],
            "ppo.num_prompts_per_step=99: more than all rows (64 times ppo.max_num_epochs=1)",
        ),
        (
            ["distillation_tiny.yaml", "distillation={num_prompts_per_step: 65, max_num_epochs: 1}", SETS],
            "distillation.num_prompts_per_step=65: more than all rows (64 times distillation.max_num_epochs=1)",
        ),
        (
            [
                "sft_tiny.yaml",
                "policy.train_global_batch_size=100",
                "data.train.split_validation_size=0.5",
                "sft.max_num_epochs=3",
            ],
            "policy.train_global_batch_size=100: more than all rows (32 times sft.max_num_epochs=3)",
        ),
    ],
)
def test_fewer_rows_than_a_step_takes_are_refused(said, workplace: Path, words: list[str], problem: str):
    code, output = said(*words)
    assert code == 2 and problem in output
    path = workplace / "prepared/tiny/data/train.jsonl"
    path.write_text(path.read_text() * 4)
    assert "more than all rows" not in said(*words)[1]


def test_a_strict_start_is_no_option():
    with pytest.raises(SystemExit):
        main(train, ["grpo_tiny.yaml", check.STRICT])


def test_where_the_run_starts_and_what_changed_since_the_last_attempt(said, workplace: Path):
    assert "run folder    results/grpo_tiny: starts at step 0\n" in said("grpo_tiny.yaml")[1]
    run = workplace / "results/grpo_tiny"
    for step, is_complete in ((20, True), (160, True), (180, False)):
        (run / f"step_{step}").mkdir(parents=True)
        if is_complete:
            (run / f"step_{step}/COMPLETE").write_text("0" * 64)
    (run / "config.yaml").write_text(resolved_yaml(with_cached_folders(load_config("grpo_tiny.yaml"))))
    output = said("grpo_tiny.yaml")[1]
    assert (
        "run folder    results/grpo_tiny: has 160 of 160 steps, and a start makes no more\n" in output
        and "Changed" not in output
    )
    output = said("grpo_tiny.yaml", "grpo.max_num_steps=200")[1]
    assert "resumes at step 160 of 200\n" in output
    assert lines_of(output, "Changed since the last attempt: 1") == ["grpo.max_num_steps=160 -> 200 (command line)"]
    # The critic's size follows, and there is no critic.
    changed = lines_of(
        said("grpo_tiny.yaml", "policy.train_global_batch_size=256")[1], "Changed since the last attempt: 1"
    )
    assert changed == ["policy.train_global_batch_size=512 -> 256 (command line)"]
    # Their markers are of no manifests.
    (refused,) = lines_of(output, "Refused: 1")
    assert "none of its checkpoints is whole" in refused and "step_160: " in refused and "step_180" not in refused


def test_what_the_engine_s_kernels_cannot_do_is_refused(said, workplace: Path):
    path = workplace / "prepared/tiny/model/config.json"
    path.write_text(path.read_text().replace('"head_dim": 32', '"head_dim": 16'))
    write_weights(path.parent, json.loads(path.read_text()))
    code, output = said("grpo_tiny.yaml")
    (refused,) = lines_of(output, "Refused: 1")
    assert code == 2 and refused.startswith(
        "policy.model_name=prepared/tiny/model: the model's head_dim is 16, and vLLM's attention on"
    )
    assert said("grpo_tiny.yaml", "cluster.gpus_per_node=4", "policy.generation.vllm_cfg.enforce_eager=false")[0] == 0
    assert said("sft_tiny.yaml")[0] == 0  # no engines
    path.write_text(path.read_text().replace("MEM*EME", "MEM-EME"))
    write_weights(path.parent, json.loads(path.read_text()))
    assert said("grpo_tiny.yaml")[0] == 0  # no attention


def test_an_id_of_the_hub_is_not_asked_for(said):
    code, output = said("grpo_tiny.yaml", "policy.model_name=no-such/model")
    assert code == 0
    assert (
        "policy.model_name=no-such/model: not in the local Hugging Face cache; it is downloaded at the start" in output
    )


def test_an_unknown_model_does_not_pass(said):
    code, output = said("grpo_tiny.yaml", "policy.model_name=no-such/model")
    unchecked = lines_of(output, "Not checked: 1")
    assert code == 0 and unchecked[0].startswith("policy.model_name=no-such/model: ")
    assert "; cannot be checked without its config.json: layout of the model, what is trained" in unchecked[0]
    assert "Refused: 0, as far as it could be checked" in output


def test_a_known_model_is_checked_to_the_end(said, workplace: Path):
    code, output = said("grpo_tiny.yaml")
    assert code == 0 and "Not checked: 0\nRefused: 0\n" in output
    # 0.0004 billion says nothing.
    assert " billion parameters" not in output and re.search(r"float32: \d{3},\d{3} parameters, 7 layers", output)


def test_everything_is_said_in_one_pass(said, workplace: Path):
    """An unknown key, a value of the wrong type, one out of range, and layouts that fit neither cluster nor model."""
    config = workplace / "config.yaml"
    config.write_text(
        "defaults: grpo_tiny.yaml\ngrpo: {sed: 1, val_at_end: maybe, max_num_steps: 0}\n"
        "policy: {megatron_cfg: {tensor_model_parallel_size: 4}}\ncluster: {cpu_units_per_node: 6}\n"
    )
    code, output = said("config.yaml")
    refused = lines_of(output, "Refused: 4")
    starts = [
        "grpo.sed=1 (config.yaml:2): no such key",
        "grpo.val_at_end=maybe (config.yaml:2): must be true",
        "grpo.max_num_steps=0 (config.yaml:2): out",
    ]
    size = "policy.megatron_cfg.tensor_model_parallel_size=4"
    starts += [
        (
            f"{size}: the 6 slots (cluster.num_nodes=1 x cluster.cpu_units_per_node=6) are no multiple of tensor 4 x "
            "pipeline 1"
        )
    ]
    assert code == 2 and all(any(line.startswith(start) for line in refused) for start in starts), output
    assert ". Also: does not divide the model's 2 Mamba groups; use 1 or 2" in output


def test_rules_without_their_values_are_said_not_guessed(said, workplace: Path):
    """The layout is right or wrong by a number that cannot be read; its default would fit no cluster of this size."""
    code, output = said(
        "grpo_tiny.yaml", "policy.megatron_cfg.tensor_model_parallel_size=two", "policy.generation.max_new_tokens=99999"
    )
    (unchecked,) = lines_of(output, "Not checked: 1")
    assert unchecked.startswith("policy.megatron_cfg.tensor_model_parallel_size: without its value not checked: ")
    assert "parallel layout" in unchecked and "layout of the model" in unchecked and "lengths" not in unchecked
    refused = lines_of(output, "Refused: 2, as far as it could be checked")
    assert code == 2 and refused[0].startswith("policy.megatron_cfg.tensor_model_parallel_size=two (command line): ")
    assert refused[1].startswith("policy.generation.max_new_tokens=99999: must be at most")
    assert "trainer       policy.megatron_cfg.tensor_model_parallel_size is not known" in output


def test_what_follows_a_value_that_cannot_be_read_is_not_known_either(said, workplace: Path):
    """The global batch is num_prompts_per_step x num_generations_per_prompt."""
    code, output = said("grpo_tiny.yaml", "grpo.num_prompts_per_step=many")
    assert code == 2 and "Refused: 1," in output
    assert "grpo.num_prompts_per_step: without its value not checked: batches" in output


def test_an_algorithm_that_is_missing_is_one_line(said):
    overrides = [
        "+teachers.max_num_steps=3",
        "+value.model_name=x",
        "+teacher.megatron_cfg.enabled=true",
        "loss_fn.kl_type=mixed",
    ]
    code, output = said(str(NEMO_RL / "grpo_math_1B.yaml"), *overrides)
    (refused,) = lines_of(output, "Refused: 1")
    assert code == 2 and refused.startswith("teachers (command line): mrl has no ")
    assert len(output.splitlines()) < 6


def test_an_unknown_section_is_one_line(said):
    code, output = said("grpo_tiny.yaml", "+pupil={model_name: x, precision: float32, tokenizer: {name: y}}")
    (refused,) = lines_of(output, "Refused: 1")
    assert code == 2 and refused.startswith("pupil (command line): no such section, with 3 keys")


EVALUATION = """
eval: {metric: pass@k, num_tests_per_prompt: 2, k_value: 4}
generation:
  model_name: prepared/tiny/model
  vllm_cfg: {max_model_len: 512, enforce_eager: true}
  temprature: 0.5
tokenizer: {name: "${generation.model_name}"}
data: {dataset_name: prepared/tiny/data/validation.jsonl, processor: math_hf_data_processor}
env: {math: {num_workers: 0}}
"""


def test_evaluations_are_checked_too(capsys: pytest.CaptureFixture[str], workplace: Path):
    (workplace / "eval.yaml").write_text(EVALUATION)
    assert (
        evaluate.main(["eval.yaml", check.OPTION, "grpo.num_prompts_per_step=7", "policy.train_global_batch_size=5"])
        == 2
    )
    refused = lines_of(capsys.readouterr().out, "Refused: 3")
    assert refused[0].startswith("generation.temprature=0.5 (eval.yaml:6): no such key")
    assert refused[1].startswith("env.math.num_workers=0 (eval.yaml:9): out of range") and refused[2].startswith(
        "eval.k_value=4: "
    )
    assert (
        evaluate.main(["eval.yaml", check.OPTION, "~generation.temprature", "eval.k_value=2", "env.math.num_workers=2"])
        == 0
    )
    assert "Refused: 0\n" in capsys.readouterr().out


def test_an_evaluation_is_told_of_what_it_asks_alone(capsys: pytest.CaptureFixture[str], workplace: Path):
    text = EVALUATION.replace("  temprature: 0.5\n", "").replace("num_workers: 0", "num_workers: 2")
    text = text.replace("{max_model_len", "{precision: bfloat16, max_model_len")
    (workplace / "eval.yaml").write_text(text)
    words = ["eval.yaml", check.OPTION, "eval.k_value=1", "data.dataset_name=math1000"]
    assert evaluate.main(words) == 2
    output = capsys.readouterr().out
    (refused,) = lines_of(output, "Refused: 1")
    assert refused.startswith(
        "data.validation.dataset_name=math1000 (command line, from data.dataset_name): no such data set is known; "
        "use one of AIME2024, "
    )
    assert ", math, math500, " in refused and "Preference" not in refused and "tulu3" not in refused
    assert ", without a trainer, " in output and "trainer's slots" not in output
    assert "data.train" not in output and "the rows of ," not in output
    assert "prepared/tiny/model, bfloat16: " in output and "packed into rows" not in output
    assert evaluate.main([*words[:-1], "data.dataset_name=https://example.org/rows.csv"]) == 2
    assert "mrl reads no rows from an address; download the file" in capsys.readouterr().out
    # As in NeMo RL, `--config` may name the evaluation itself.
    assert evaluate.main(["--config", *words[:-1], "data.dataset_name=math"]) == 2
    assert "mrl knows the keys of dataset_name=math, and no place of its rows" in capsys.readouterr().out


def test_a_model_s_evaluation_is_checked_as_a_config_asks_it(capsys: pytest.CaptureFixture[str], workplace: Path):
    (workplace / "prepared/tiny/model").rename(workplace / "other")
    (workplace / "lr=1").symlink_to("other")  # as sweeps name folders
    assert evaluate.main(["lr=1", "--config", "grpo_tiny.yaml", check.OPTION]) == 0
    assert f"model         {workplace / 'other'}" in capsys.readouterr().out
    assert evaluate.main(["other", check.OPTION]) == 2
    assert "name with --config" in capsys.readouterr().out
    assert evaluate.main(["grpo_tiny.yaml", check.OPTION, "policy.model_name=other", "data.validation=null"]) == 2
    assert "data.validation=null: there is nothing to ask" in capsys.readouterr().out


def test_a_run_without_held_out_rows_has_no_validation(said):
    _, output = said("grpo_tiny.yaml", "data.validation=null", "checkpointing.metric_name=null")
    assert "no validation, as no rows are held out" in output and "validation every" not in output


def test_keys_of_one_section_with_one_reason_are_one_line(said, workplace: Path):
    section = "data_plane: {enabled: false, impl: transfer_queue, storage_capacity: 5, backend: simple}\n"
    (workplace / "own.yaml").write_text(f"defaults: {NEMO_RL / 'grpo_math_1B.yaml'}\n{section}")
    _, output = said("own.yaml")
    (line,) = (line for line in output.splitlines() if line.strip().startswith("data_plane"))
    assert (
        line.startswith("  data_plane: ")
        and " keys (" in line
        and "backend" in line
        and "): rollouts stay where they were made" in line
    )


def test_the_report_says_what_became_of_each_key(said):
    code, output = said(
        str(NEMO_RL / "grpo_math_8B.yaml"), "data.train_jsonl_fpath=rows.jsonl", "swanlab_enabled=false"
    )
    assert "data.train_jsonl_fpath=rows.jsonl (command line) -> data.train.data_path" in output
    assert (
        "policy.dtensor_cfg.tensor_parallel_size=1 (grpo_math_1B.yaml:147) -> "
        "policy.megatron_cfg.tensor_model_parallel_size=1"
    ) in output
    assert "policy.generation_batch_size=32 (grpo_math_8B.yaml:18): NeMo RL reads it nowhere" in output


def test_a_file_that_is_not_there_is_one_message(said):
    assert said("nope.yaml")[0] == 2


def test_yaml_is_refused_by_line_and_column(said, tmp_path: Path):
    (tmp_path / "bad.yaml").write_text("grpo:\n  seed: 1\n num_steps: 2\n")
    code, output = said("bad.yaml")
    assert code == 2 and f"{tmp_path / 'bad.yaml'}:3:2: not readable as a config (" in output


def test_values_that_look_right_are_refused_with_the_reason(said, tmp_path: Path):
    for end in ("\n", "\r", "\r\n", "\u2028"):
        (tmp_path / "tab.yaml").write_bytes(f"grpo:{end}\tseed: 1\n".encode())
        assert f"{tmp_path / 'tab.yaml'}:2:1: not readable as a config (a tab, and YAML" in said("tab.yaml")[1]
    (tmp_path / "home.yaml").write_text("defaults: grpo_tiny.yaml\ncheckpointing: {checkpoint_dir: ~/run}\n")
    assert "nothing expands ~ here; write the whole path, or ${oc.env:HOME}/run" in said("home.yaml")[1]
    text = said("grpo_tiny.yaml", "policy.generation.repetition_penalty=1.1")[1]
    assert "no such key; rollouts are drawn by temperature, top_p and top_k alone" in text


def test_what_an_algorithm_does_stands_in_its_lines(said):
    keys = ["use_dynamic_sampling=true", "reward_scaling.enabled=true", "reward_scaling.target_min=-1"]
    loss = ["sequence_level_importance_ratios=true", "token_level_loss=false", "ratio_clip_c=3"]
    text = said("grpo_tiny.yaml", *(f"grpo.{key}" for key in keys), *(f"loss_fn.{key}" for key in loss))[1]
    assert "rewards 0 to 1 become -1 to 1; only groups whose rewards differ, of up to 10 batches" in text
    assert "PPO, ratio of the sequence (GSPO) clipped at 1 - 0.2 and 1 + 0.2, dual clip 3; mean of rollouts" in text


def test_a_misspelt_file_has_a_nearest_one(said, tmp_path: Path):
    assert "; the nearest is grpo_tiny.yaml" in said("grpo_tinny.yaml")[1]
    (tmp_path / "mine.yaml").write_text("defaults: [grpo_tiny]\n")
    output = said("mine.yaml")[1]
    assert f"{tmp_path / 'mine.yaml'}: defaults: config grpo_tiny: no such file" in output
    assert "the nearest is grpo_tiny.yaml" in output


def test_hydras_word_for_the_file_itself_may_come_last(said, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("defaults: [grpo_tiny.yaml, _self_]\ngrpo:\n  max_num_steps: 3\n")
    assert "at most 3, and" in said("mine.yaml")[1]
    (tmp_path / "mine.yaml").write_text("defaults: [_self_, grpo_tiny.yaml]\n")
    code, output = said("mine.yaml")
    assert code == 2 and "_self_ comes last, as a file's own keys always win" in output


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        (["grpo_tiny.yaml", "-m", "grpo.seed=1,2"], "-m: an option of Hydra's; start one run for each value"),
        (["--config-name=grpo_tiny"], "write --config FILE.yaml"),
        (["examples/run_grpo.py", "--config", "grpo_tiny.yaml"], "a script of NeMo RL, in whose place this command is"),
    ],
)
def test_words_of_other_commands_have_a_way_out(
    said, capsys: pytest.CaptureFixture[str], words: list[str], way_out: str
):
    with pytest.raises(SystemExit) as ended:
        said(*words)
    assert ended.value.code == 2 and way_out in capsys.readouterr().err


def test_the_entry_checks_in_process_too(capsys: pytest.CaptureFixture[str]):
    assert main(train, ["grpo_tiny.yaml", "grpo.sed=1", check.OPTION]) == 2
    assert "grpo.sed=1 (command line): no such key; the nearest is grpo.seed" in capsys.readouterr().out


@pytest.mark.parametrize("entry", ["train", "evaluate"])
def test_a_check_imports_nothing_heavy(entry: str, tmp_path: Path):
    """Imports of a check: transformers reads a tokenizer at hand; nothing else is worth seconds on a login node."""
    script = f"import sys, runpy; sys.argv = ['{entry}', 'grpo_tiny.yaml', '--check']\n"
    script += f"try:\n    runpy.run_module('mrl.{entry}', run_name='__main__')\nexcept SystemExit:\n    pass\n"
    script += "print(sorted({'torch', 'ray', 'vllm', 'megatron', 'transformers'} & sys.modules.keys()))"
    shell = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    finished = subprocess.run(
        command, cwd=tmp_path, env=shell, capture_output=True, text=True, timeout=HANG_S, check=True
    )
    assert finished.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_has_enough_is_no_error(workplace: Path):
    command = [sys.executable, "-m", "mrl.train", "grpo_tiny.yaml", "--check"]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=workplace, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(b"Config: ")
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (0, b"")


DTENSOR = ("policy.dtensor_cfg.enabled=true", "policy.megatron_cfg.enabled=false")


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        # Another name, a switch that is off, a section that is not read, and a wish about speed.
        (("grpo.num_val_generations_per_prompt=1", "policy.draft.enabled=false", "data.num_workers=4"), []),
        (("env.should_log_nemo_gym_responses=true", "data.num_workers=4"), ["env.should_log_nemo_gym_responses=true"]),
        # PyTorch's AdamW decays every parameter by the weight that it is given; Megatron gives vectors the multiple 0
        # of it.
        (
            (*DTENSOR, "policy.optimizer.name=torch.optim.AdamW", "policy.optimizer.kwargs.weight_decay=0.1"),
            ["policy.dtensor_cfg.enabled=true", "policy.optimizer.kwargs.weight_decay=0.1"],
        ),
        (
            (*DTENSOR, "policy.optimizer.name=torch.optim.AdamW"),
            ["policy.dtensor_cfg.enabled=true", "policy.optimizer.name=torch.optim.AdamW"],
        ),
        ((*DTENSOR, "policy.optimizer.kwargs.weight_decay=0.0"), ["policy.dtensor_cfg.enabled=true"]),
        (("async_rl.sampler.name=in_order",), []),
        (("async_rl.sampler.name=windowed",), ["async_rl.sampler.name=windowed"]),
        (("async_rl.sampler.name=windowed", "async_rl.sampler.sample_freshest_first=true"), []),
    ],
)
def test_a_block_has_what_nemo_rl_does_otherwise_alone(said, overrides: tuple[str, ...], keys: list[str]):
    _, output = said("grpo_tiny.yaml", *(f"++{word}" for word in overrides))
    block = lines_of(output, f"Behaves differently from NeMo RL: {len(keys)}")
    assert [line.partition(" (command line): ")[0] for line in block] == keys


def test_a_config_without_a_word_of_nemo_rls_is_not_compared_with_it(said):
    assert "NeMo RL" not in said("grpo_tiny.yaml")[1]


def test_what_is_refused_comes_last_by_the_key_that_was_written(said):
    words = ("++policy.dtensor_cfg.enabled=true", "++policy.dtensor_cfg.tensor_parallel_size=3")
    code, output = said("grpo_tiny.yaml", *words)
    *_, title, line = output.rstrip().splitlines()
    assert code == 2 and title.startswith("Refused: 1")
    key = "policy.megatron_cfg.tensor_model_parallel_size=3"
    assert line.startswith(f"  {key} (command line, from policy.dtensor_cfg.tensor_parallel_size): the 4 slots ")
    assert said("grpo_tiny.yaml")[1].rstrip().splitlines()[-1].startswith("Refused: 0")


def test_an_override_without_effect_is_a_warning_of_its_own(said):
    _, output = said(str(NEMO_RL / "grpo_math_8B.yaml"), "policy.generation_batch_size=8")
    assert any(
        line.startswith("policy.generation_batch_size=8 (command line): ") and line.endswith("; it has no effect")
        for line in lines_of(output, "Warnings: ")
    )
    assert output.count("policy.generation_batch_size=8 ") == 1


def test_the_last_line_names_models_that_nobody_looked_at(said, workplace: Path):
    _, output = said("grpo_tiny.yaml", f"policy.model_name={workplace}/nowhere")
    last = lines_of(output, "Not looked at:")[-1]
    assert last.startswith("the model: no config.json of policy.model_name=") and "nowhere is here" in last
    _, output = said("grpo_tiny.yaml")
    assert "the model: " not in output
