# SPDX-License-Identifier: Apache-2.0
import io
import logging
import re
import time

import pytest

from conversion.progress import counter
from mrl.config.load import load_config
from mrl.metrics import shown_components
from mrl.store.console import bar_progress, outlook, rollout_progress, step_header, step_lines

# Tutorial 002's block, whose lines users grep.
BLOCK = """\
========================= Step 1/100 =========================
[Generate] 32 prompts x 16 generations = 512 responses (23.4s)
[Reward]   mean=0.31, std=0.46, min=0.0, max=1.0
[Train]    loss=0.042, kl=0.003, grad_norm=1.23
[Time]     total=45.2s (gen=23.4s, reward=1.2s, train=18.6s)"""
METRICS = {
    "time/generation": 23.4,
    "time/reward": 1.2,
    "time/train": 18.6,
    "time/total": 45.2,
    "train/reward": 0.31,
    "train/reward_std": 0.46,
    "train/reward_min": 0.0,
    "train/reward_max": 1.0,
    "train/loss": 0.042,
    "train/kl_penalty": 0.003,
    "train/grad_norm": 1.23,
    "train/mean_abs_dlogp": 1.5e-7,
    "train/token_mult_prob_error": 1.0000002,
    "refit/seconds": 0.25,
    "refit/verified_bytes": 1234567.0,
}


def test_the_step_block_is_the_tutorials_character_for_character():
    lines = step_lines(METRICS, num_prompts=32, num_generations=16)
    assert "\n".join([step_header(1, 100), *lines[:4]]) == BLOCK
    assert lines[4].startswith("[Mrl] ") and "verified=1,234,567 bytes" in lines[4]


def test_small_losses_are_no_zero():
    small = {**METRICS, "train/loss": -1.07e-05, "train/kl_penalty": 0.0}
    line = step_lines(small, num_prompts=32, num_generations=16)[2]
    assert line == "[Train]    loss=-1.07e-05, kl=0.000, grad_norm=1.23"


def test_lines_leave_out_a_kl_that_nobody_computes_and_have_the_components_of_rewards():
    parts = {"rollout/near/reward_std": 0.1, "rollout/near/reward_near": 0.334, "rollout/near/reward_length": -0.01}
    lines = step_lines({**METRICS, **parts}, num_prompts=32, num_generations=16, has_kl=False)
    assert lines[1] == "[Reward]   mean=0.31, std=0.46, min=0.0, max=1.0 (near 0.33, length -0.01)"
    assert lines[2] == "[Train]    loss=0.042, grad_norm=1.23"
    assert shown_components(parts | {"val/near/reward_near": 0.5}, "val") == " (near 0.50)"
    many = {f"rollout/near/reward_{name}": 0.0 for name in "abcde"}
    apart = {f"rollout/{name}/reward_near": 0.5 for name in "ab"}  # of two environments
    for unsaid in (many, apart):
        assert step_lines({**METRICS, **unsaid}, num_prompts=32, num_generations=16)[1].endswith("max=1.0")


def test_a_mean_reward_says_over_how_many_rollouts_it_is_where_some_were_not_judged():
    def line(num_judged: int, **rewards: float) -> str:
        counts = {"rollout/num_rollouts": 64.0, "rollout/num_judged": float(num_judged)}
        kept = {name: value for name, value in METRICS.items() if not name.startswith("train/reward")}
        return step_lines({**kept, **counts, **rewards}, num_prompts=4, num_generations=16)[1]

    assert line(7, **{"train/reward": 1.0}) == "[Reward]   mean=1.00, over 7 of 64 judged"
    assert line(64, **{"train/reward": 1.0}) == "[Reward]   mean=1.00"
    assert line(0) == "[Reward]   no rollout has a reward"


def test_rollouts_that_a_step_does_not_train_are_counted():
    (line, *_) = step_lines({**METRICS, "rollout/num_rollouts": 768.0}, num_prompts=32, num_generations=16)
    assert line.startswith("[Generate] 32 prompts x 16 generations = 512 responses of 768 (")


def test_two_digit_steps_keep_the_width():
    assert step_header(10, 100) == "========================= Step 10/100 ========================"


def test_a_saved_step_shows_the_checkpoint_time():
    times = step_lines({**METRICS, "time/checkpoint": 8.0}, num_prompts=32, num_generations=16)[3]
    assert times == "[Time]     total=45.2s (gen=23.4s, reward=1.2s, train=18.6s, ckpt=8.0s)"


def test_a_log_has_one_line_of_rollouts_that_came_soon(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    with rollout_progress(3) as progress:
        progress.update(1)
        progress.update(2)
    (line,) = caplog.messages
    assert line.startswith("Collecting rollouts: 100%|") and "| 3/3 [" in line


def test_a_bar_shows_bytes_and_the_rate_of_what_is_done_now():
    terminal = io.StringIO()
    add = counter(bar_progress("there", terminal), 8 * 10**9)
    add(6 * 10**9, is_kept=True)
    time.sleep(0.1)
    add(2 * 10**9)
    last = terminal.getvalue().rpartition("\r")[2]
    assert last.startswith("there: 100%") and "8.00G/8.00G" in last
    # 2 GB in 0.1 s; with the 6 GB kept it would be 80 GB/s.
    (rate,) = re.findall(r"([\d.]+)GB/s", last)
    assert 1 < float(rate) <= 20


def test_what_was_hidden_is_told_beside_what_was_waited_for():
    metrics = {**METRICS, "time/reward_hidden": 3.0, "time/checkpoint_hidden": 8.04}
    lines = step_lines(metrics, num_prompts=32, num_generations=16)
    assert lines[3] == step_lines(METRICS, num_prompts=32, num_generations=16)[3]
    assert lines[4].endswith("verified=1,234,567 bytes, hidden: reward=3.0s, ckpt=8.0s")


def test_the_first_lines_say_what_comes_and_how_long_it_takes_once_that_was_measured():
    config = load_config("grpo_tiny.yaml")
    fresh = outlook(config, first_step=1, last_step=160, start_s=None, step_s=None)
    assert fresh == (
        "Next: start 4 policy ranks and 1 engine, then 160 steps, 1 to 160; validation every 20; a checkpoint every 20"
    )
    resumed = outlook(config, first_step=11, last_step=160, start_s=41.4, step_s=2.2)
    assert resumed.startswith(
        "Next: start 4 policy ranks and 1 engine (41 s the last time), then 150 steps, 11 to 160 (about 2.2 s "
        "each, 0:05:30 in all);"
    )
    alone = outlook(load_config("sft_tiny.yaml"), first_step=1, last_step=3, start_s=None, step_s=None)
    assert "engine" not in alone and "then 3 steps, 1 to 3" in alone
    assert "then step 3;" in outlook(config, first_step=3, last_step=3, start_s=None, step_s=None)
    done = outlook(config, first_step=4, last_step=3, start_s=None, step_s=2.0)
    assert "then no step, as step 3 of 3 is done;" in done and "about" not in done
