# SPDX-License-Identifier: Apache-2.0
"""`mrl.doctor CONFIG --refit`: checks that trainer and engines of a config hold and compute the same model.

Run it after every upgrade of vLLM, Megatron-Core or torch, before a run. It trains nothing and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from conversion.boxes import Slot
from mrl.cluster.agreement import compared_precision, long_prompt, requests, sample, trainer_logprobs
from mrl.cluster.environment import engine_variables, policy_variables
from mrl.cluster.policies import PolicyGroup
from mrl.cluster.refit import RefitReport
from mrl.cluster.runtime import placed_slots
from mrl.cluster.session import start_models
from mrl.cluster.tasks import started_tasks
from mrl.cluster.verbs import EngineVerbs, PolicyVerbs
from mrl.config.load import load_config
from mrl.config.model import with_value
from mrl.config.schema.run import RunConfig
from mrl.config.texts import aligned
from mrl.data.prompts import PromptData, load_prompts
from mrl.loop.preflight import check_start
from mrl.plan.hardware import local_gpu
from mrl.plan.memory import describe_limits
from mrl.signals import LISTENER
from mrl.types import Rollout

if TYPE_CHECKING:
    from mrl.policy.policy import PolicyRank

logger = logging.getLogger(__name__)

NUM_PROMPTS = 32
# Long enough to show any difference; a config's own limit may be 49,152.
MAX_NEW_TOKENS = 128
# Limits of a token's error, and of the share of tokens beyond them: rounding alone may flip router choices, of far
# fewer tokens. GPUs need true float32 products (`FULL_FLOAT32` of mrl.env): with TF32 96 to 97 % of the tests' logprobs
# are beyond the limits.
FP32_TOLERANCE, FP32_RELATIVE, MAX_OFF_SHARE = 1e-5, 1e-6, 0.01
# FP8: what its rounding adds on average (`MAX_MEAN_ERROR`) on top of bfloat16.
MAX_MULT_PROB_ERROR = {"float32": 1.001, "bfloat16": 1.10, "fp8": 1.28}
MAX_REPLAYED_ERROR = {"float32": 1.001, "bfloat16": 1.02, "fp8": 1.18}

# The doctor writes no checkpoint and keeps no reference, so it asks for neither disk nor memory for them.
SETTINGS = ("checkpointing.enabled=false",)
NO_KL = "loss_fn.reference_policy_kl_penalty"


@dataclass(frozen=True)
class Check:
    """A check with its proof and its remedy."""

    name: str
    proves: str
    if_it_fails: str


START = Check(
    "start",
    (
        "the conversion tables know every tensor of trainer and engines; the refit schedule writes every element of "
        "every engine once"
    ),
    "a library names, shapes or cuts the tensors in the message otherwise than conversion/families/ says; correct "
    "the rule there. If a process died instead, its log says why",
)
ZERO = Check(
    "refit zero",
    (
        "a refit of unchanged weights leaves every byte of the engines as vLLM's own loader, which knows nothing of "
        "our tables, wrote it"
    ),
    "this vLLM lays out the tensors in the message otherwise than vllm rules of conversion/families/ say; correct "
    "them. Checksums cannot see this, so do not train",
)
REFIT = Check(
    "refit",
    (
        "all weights were changed on the trainer, and each byte that the engines read has the trainer's checksum, or "
        "is padding and zero"
    ),
    (
        "bytes were lost between trainer and engine: the message names tensor, box and ranks. If it repeats, suspect "
        "mrl/refit or the memory"
    ),
)
CHANGED = Check(
    "new weights",
    "every tensor of every engine differs from before: what the refit wrote is what the engine holds",
    "the tensors in the message kept their old values, although every weight was changed: nothing refreshes them",
)
LOGPROBS = Check(
    "logprobs",
    "trainer and engine compute the same model: tokens sampled by the engine have the same log-probability in both",
    "the weights are equal, so the computations differ. Of a family of your own, the trainer lacks an argument "
    "(docs/extend/family.md). In float32, if the line `start` says TF32, find out which "
    "library or env_vars ask for it. Otherwise look for what the upgrade changed in kernels, norms, rotary "
    "embedding or routing; tests/stack/policy/test_layouts.py and tests/stack/rollout/test_parity.py tell which "
    "side has moved",
)


@dataclass(frozen=True)
class RefitOutcome:
    """The outcome of one check: a line of the table."""

    check: Check
    is_ok: bool
    numbers: str
    subject: str = ""
    """The engine, for a check that has a line for each."""


class Failed(Exception):
    """A check failed and its outcome is recorded; later checks would be meaningless."""


async def examine(config: RunConfig, data: PromptData, log_folder: Path) -> list[RefitOutcome]:
    """Runs the checks in order, up to the first that fails, and returns their outcomes."""
    outcomes: list[RefitOutcome] = []
    precision = compared_precision(config)

    def numbers_of(report: RefitReport) -> str:
        return (
            f"{report.verified_bytes:,} bytes verified, {report.padding_bytes:,} bytes of padding, "
            f"{report.seconds:.3f} s with verification, {report.verified_bytes / report.seconds / 1e9:.3f} GB/s"
        )

    async with AsyncExitStack() as processes:
        processes.enter_context(suppress(Failed))
        with stage(outcomes, START):
            placement = processes.enter_context(placed_slots(config))
            tasks = await processes.enter_async_context(started_tasks())
            models, engines, refit = await start_models(
                config, placement, pad_token_id=data.pad_token_id, log_folder=log_folder, tasks=tasks
            )
            policies = models["policy"]
            kind = "dedicated" if placement.num_dedicated_slots else "colocated"
            numbers = (
                f"{policies.world_size} policy ranks, {engines.num_engines} {kind} engines, "
                f"{describe_limits(config, local_gpu())}"
            )
            if precision == "float32":
                numbers += f"; products of float32: {float32_products(policies, config)}"
            outcomes.append(RefitOutcome(START, True, numbers))
        with stage(outcomes, ZERO):
            outcomes.append(RefitOutcome(ZERO, True, numbers_of(await refit.zero())))
        with stage(outcomes, REFIT):
            before = engines.call(EngineVerbs.live_digest)
            policies.call(PolicyVerbs.perturb, config.rollouts.seed)
            outcomes.append(RefitOutcome(REFIT, True, numbers_of(await refit.run())))
        with stage(outcomes, CHANGED):
            outcomes.append(RefitOutcome(CHANGED, True, changed_tensors(before, engines.call(EngineVerbs.live_digest))))
        with stage(outcomes, LOGPROBS):
            prompts = data.train[:NUM_PROMPTS]
            asked = requests(config, [*prompts, long_prompt(config, data.train, MAX_NEW_TOKENS)], MAX_NEW_TOKENS)
            sampled = engines.apply(sample, asked, deadline_s=config.deadlines.generate_s)
            engines.book.hold(True)
            engines.enter("logprob", deadline_s=policies.deadline_s)
            policies.call(PolicyVerbs.enter, "logprob")
            parts = {"": slice(len(prompts)), f", after {len(asked[-1].token_ids):,} tokens": slice(len(prompts), None)}
            for index, rollouts in enumerate(sampled):
                ways = [("", MAX_MULT_PROB_ERROR, [dataclasses.replace(rollout, routes=None) for rollout in rollouts])]
                if config.policy.router_replay.enabled:
                    ways.insert(0, (", replayed", MAX_REPLAYED_ERROR, rollouts))
                for way, bounds, given in ways:
                    logprobs = trainer_logprobs(policies, given, config)
                    for after, part in parts.items():
                        subject = f"engine {index}{after}{way}"
                        outcomes.append(compare(given[part], logprobs[part], precision, bounds, subject=subject))
    return outcomes


@contextmanager
def stage(outcomes: list[RefitOutcome], check: Check) -> Iterator[None]:
    """Logs the name of a check; an error inside becomes its outcome, and ends the examination as `Failed`."""
    logger.info("Checking %s ...", check.name)
    try:
        yield
    except (RuntimeError, ValueError) as error:
        outcomes.append(RefitOutcome(check, False, str(error)))
        raise Failed from error


def changed_tensors(
    before: Mapping[int, Sequence[Mapping[Slot, int]]], after: Mapping[int, Sequence[Mapping[Slot, int]]]
) -> str:
    """Counts tensors of the engines' workers; RuntimeError: some have the same checksum as before, and are named."""
    workers = [pair for index, digests in after.items() for pair in zip(before[index], digests, strict=True)]
    kept = sorted({str(slot) for old, new in workers for slot in new if new[slot] == old[slot]})
    if kept:
        raise RuntimeError(f"tensors of the engines that did not change: {', '.join(kept)}")
    return f"{sum(len(new) for _, new in workers)} tensors, all changed"


def compare(
    rollouts: Sequence[Rollout],
    logprobs: Sequence[np.ndarray],
    precision: str,
    bounds: Mapping[str, float],
    *,
    subject: str,
) -> RefitOutcome:
    """Compares the trainer's logprobs with the generator's over all tokens; `bounds` limits the error, by precision."""
    trainer_T = torch.from_numpy(np.concatenate(list(logprobs)))
    generator_T = torch.from_numpy(np.concatenate([rollout.generator_logprobs for rollout in rollouts]))
    # At the bound of top-k or top-p rounding decides; training masks the tokens that it rules out.
    is_drawable_T = ~torch.isneginf(trainer_T)
    error_T = (trainer_T - generator_T).abs()
    mult_prob_error = float(error_T[is_drawable_T].exp().mean())
    # Written as the condition that must hold, so that NaN fails it.
    is_ok = mult_prob_error <= bounds[precision]
    numbers = (
        f"{len(error_T):,} tokens, max |dlogp| {error_T.max():.2e}, mean {error_T.mean():.2e}, "
        f"token_mult_prob_error {mult_prob_error:.6f}"
    )
    if num_outside := int((~is_drawable_T).sum()):
        is_ok = is_ok and num_outside <= MAX_OFF_SHARE * len(error_T)
        numbers += f", {num_outside} tokens ruled out by the trainer's top-k or top-p"
    if precision == "float32":
        off = 1 - float((error_T <= FP32_TOLERANCE + FP32_RELATIVE * generator_T.abs()).float().mean())
        is_ok = is_ok and off <= MAX_OFF_SHARE
        numbers += f", {off:.2%} of tokens off by more than rounding"
    return RefitOutcome(LOGPROBS, is_ok, numbers, subject)


def float32_products(policies: PolicyGroup, config: RunConfig) -> str:
    """Describes how a float32 run multiplies, by library: float32 (Triton: tf32x3) or TF32, beyond float32's bounds."""
    measured = policies.apply(_float32_products)
    found = {library: " and ".join(sorted({rank[library] for rank in measured})) for library in measured[0]}
    if config.cluster.gpus_per_node:
        policy, engine = config.policy.megatron_cfg.env_vars or {}, config.policy.generation.vllm_cfg.env_vars or {}
        variables = (policy_variables(config, policy), engine_variables(config, engine))
        found["Triton"] = " and ".join(sorted({chosen.get("TRITON_F32_DEFAULT", "TF32") for chosen in variables}))
    return ", ".join(f"{library} {precision}" for library, precision in found.items())


def _float32_products(policy: PolicyRank) -> dict[str, str]:
    from mrl.policy.fusions import float32_products

    return float32_products()


def table(outcomes: Sequence[RefitOutcome]) -> list[str]:
    """The outcomes as aligned lines, then the proof of each check, and the remedy for the failed one."""
    rows = [("check", "result", "numbers")]
    rows += [(f"{f.check.name} {f.subject}".strip(), "ok" if f.is_ok else "FAILED", f.numbers) for f in outcomes]
    checks = list(dict.fromkeys(outcome.check for outcome in outcomes))
    failed = list(dict.fromkeys(outcome.check for outcome in outcomes if not outcome.is_ok))
    lines = [
        *aligned(rows),
        "",
        "What each line proves when it is ok:",
        *(f"  {check.name}: {check.proves}." for check in checks),
    ]
    lines += [f"What to do about {check.name}: {check.if_it_fails}." for check in failed]
    return lines


def run_refit(name: str, overrides: Sequence[str], secrets: set[str]) -> int:
    """Examines a config and logs the table. Exit code 0: no check failed; 1: one did. ValueError: wrong input."""
    config = load_config(name, [*overrides, *SETTINGS], secrets=secrets)
    config = check_start(with_value(config, NO_KL, 0.0) if config.keeps_reference else config)
    data = load_prompts(config)
    log_folder = Path(tempfile.mkdtemp(prefix="mrl-doctor-"))
    logger.info("Logs of the processes: %s (kept if a check fails)", log_folder)
    LISTENER.listen()  # asyncio would only cancel what waits for a thread
    try:
        outcomes = asyncio.run(examine(config, data, log_folder))
    finally:
        LISTENER.let_go()
    logger.info("\n%s", "\n".join(table(outcomes)))
    if not all(outcome.is_ok for outcome in outcomes):
        return 1
    shutil.rmtree(log_folder)
    return 0
