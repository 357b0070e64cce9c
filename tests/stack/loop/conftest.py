# SPDX-License-Identifier: Apache-2.0
"""A run for this folder's tests: Ray, four ranks (TP2 x DP2 x EP2), two engines, rewards. Ends before other folders."""

from __future__ import annotations

import json
import random
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.config.schema.run import RunConfig
from mrl.envs.task import Task
from mrl.loop.rollouts import RolloutSupplier, prepare
from mrl.loop.run import Budget, Run
from mrl.recipes import tokenizer
from mrl.store.run_folder import RunFolder
from mrl.types import RunState, Verdict
from tests import models
from tests.drivers import do, opened
from tests.unit.envs.pools import Childless
from tests.waiting import HANG_S

DEADLINE_S = HANG_S


def write_inputs(folder: Path, *, num_rows: int = 64) -> list[str]:
    """A random tiny model with a byte tokenizer, and rows to train on; returns overrides that point a config there."""
    model = models.save_nemotron_h(folder / "model")
    tokenizer.save(model, model_max_length=1280)
    generation = {"eos_token_id": 258, "pad_token_id": 256, "bos_token_id": 257}
    (model / "generation_config.json").write_text(json.dumps(generation))
    rng = random.Random(0)
    for name in ("train", "validation"):
        pairs = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(num_rows)]
        rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"policy.model_name={model}",
        f"data.train.data_path={folder / 'train.jsonl'}",
        f"data.validation.data_path={folder / 'validation.jsonl'}",
        f"checkpointing.checkpoint_dir={folder / 'run'}",
    ]


SMALL = [
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_val_samples=8",
    "grpo.val_period=0",
    "grpo.val_at_end=false",
    "grpo.max_num_steps=100",
    "policy.generation.max_new_tokens=8",
    # A warmup begins with a step of learning rate 0.
    "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
]


# What libraries and processes get under their own names.
PASSED_ON = [
    "policy.generation.vllm_kwargs={mamba_ssm_cache_dtype: float32, scheduling_policy: priority}",
    "policy.generation.vllm_cfg.env_vars={PASSED_ON: to an engine, PASSED_ON_TOKEN: planted-secret}",
    "policy.megatron_cfg.env_vars={PASSED_ON: to a rank, PASSED_ON_TOKEN: planted-secret}",
    "policy.megatron_cfg.model_overrides={clone_scatter_output_in_embedding: false}",
    "policy.megatron_cfg.attention_backend=flash",
    "policy.megatron_cfg.use_gloo_process_groups=true",
]


@dataclass
class LiveRun:
    """A run between two steps; tests leave it so that the next step works."""

    run: Run[RolloutSupplier]
    state: RunState
    config: RunConfig

    def on_ranks(self, function, *arguments: object) -> list:
        return self.run.supplier.session.policies.apply(function, *arguments, deadline_s=DEADLINE_S)

    def on_engines(self, function, *arguments: object) -> list:
        return self.run.supplier.session.engines.apply(function, *arguments, deadline_s=DEADLINE_S)


class CoinToss(Childless):
    """An environment whose reward follows from the text, not the answer: a random model gets a gradient from it."""

    async def judge(self, task: Task) -> Verdict:
        return toss(task.text)


def toss(text: str) -> Verdict:
    """Verdict of a coin on a text."""
    return Verdict(float(zlib.crc32(text.encode()) % 2), True, "ok", "", text)


def toss_coins(actor) -> None:
    actor.scorer.environments["math"] = CoinToss()


@pytest.fixture(scope="package")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    folder = tmp_path_factory.mktemp("live")
    with pytest.MonkeyPatch.context() as patch:
        # Other tests have used the same model, and the cache keeps the files as their ranks read them.
        patch.setenv("MRL_CACHE", str(folder / "cache"))
        yield from live_run(folder)


def live_run(folder: Path, *further: str) -> Iterator[LiveRun]:
    """The run, with further overrides."""
    overrides = [
        *write_inputs(folder),
        *SMALL,
        "policy.generation.num_cpu_engines=2",
        "policy.generation.stop_strings=[never said]",  # engines look for stop strings; requests of tests bring theirs
        "loss_fn.reference_policy_kl_penalty=0.01",
        "policy.refit_buffer_size_gb=0.0002",  # several rounds
        "policy.not_finite_steps=skip",
        "checkpointing.save_period=1000",  # tests save, and count on nobody else doing so
        *PASSED_ON,
        *further,
    ]
    config = load_config("grpo_tiny.yaml", overrides)
    training = prepare(config)
    run_folder = RunFolder(training.config)
    run_folder.open()
    with run_folder:
        checkpoint = run_folder.newest_checkpoint()
        with opened(training.open(run_folder, Budget(None, started=time.monotonic()))) as run:
            run.supplier.session.rewards.apply(toss_coins)
            yield LiveRun(run, do(run.resume(checkpoint)), config)
