# SPDX-License-Identifier: Apache-2.0
"""Losses, gradients, metrics, rewards and advantages are NeMo RL's on batches that scripts/record_nemo_rl.py recorded.

T tokens of a packed row, [b, s] a token of a sequence; other letters as in the script.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.algo import critic, losses, token_advantages
from mrl.algo.advantages import train_sequences
from mrl.algo.distillation import distillation_loss, needs_vocabulary
from mrl.algo.rewards import has_signal, shaped_rewards
from mrl.config.schema.algo import GrpoConfig, LossConfig
from mrl.config.schema.ppo import GaeConfig, ValueLossConfig
from mrl.policy.distillation import student_scores, top_logits
from mrl.policy.logprobs import OutputColumns, TokenDistribution
from mrl.types import Flaw, FlawKind, Prompt, RolloutGroup, RolloutInfo, Verdict
from tests.sources import ROOT
from tests.unit.algo.nemo_rl_cases import ANSWERS, CASES, PROMPT, Batch, Case

TOLERANCE = 1e-6
Answers = dict[str, Tensor | float]
FLAWS: tuple[FlawKind, FlawKind] = ("invalid_tool_call", "malformed_thinking")
THEIRS_ALONE = {"num_unmasked_tokens", "num_valid_samples"}
"""Metrics that mrl does not have."""


@cache
def recorded() -> dict[str, list[dict[str, Tensor]]]:
    """Batches by kind, and NeMo RL's answers to them by case; a float64 tensor for each list and number."""
    read = json.loads(ANSWERS.read_text())
    del read["nemo_rl"]
    return {name: list(map(_tensors, part)) for name, part in read.items()}


def _tensors(numbers: dict) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}


def packed(batch: Batch, values_BS: Tensor) -> Tensor:
    """[T]: sequence after sequence, without padding."""
    return torch.cat([values[: int(length)] for values, length in zip(values_BS, batch["lengths"], strict=True)])


def bounds(batch: Batch) -> Tensor:
    return torch.cat([torch.zeros(1), batch["lengths"].cumsum(0)]).int()


def mask_of(batch: Batch) -> Tensor:
    return batch["token_mask"] * batch["sample_mask"][:, None]


def with_gradient(loss: Tensor, inputs: Tensor, metrics: dict) -> Answers:
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, inputs)[0]} | metrics


def policy_loss(batch: Batch, config: LossConfig) -> Answers:
    logprobs, mask_T = batch["logprobs"].clone().requires_grad_(), packed(batch, mask_of(batch))
    positive_T = mask_T * packed(batch, (batch["rewards"] > 0)[:, None].expand_as(batch["old"]))
    tokens = losses.Tokens.of(
        packed(batch, logprobs),
        generator_logprobs_T=packed(batch, batch["generator"]),
        old_logprobs_T=None if config.force_on_policy_ratio else packed(batch, batch["old"]),
        reference_logprobs_T=packed(batch, batch["reference"]),
        advantages_T=packed(batch, batch["advantages"]),
        loss_mask_T=mask_T,
        positive_mask_T=positive_T,
        cu_seqlens=bounds(batch),
    )
    num_sequences = float((mask_of(batch).sum(dim=1) > 0).sum())
    loss, metrics = losses.policy_loss(
        tokens, config, losses.BatchSize(float(mask_T.sum()), num_sequences, float(positive_T.sum()))
    )
    return with_gradient(loss, logprobs, metrics)


def errors(batch: Batch, config: GrpoConfig) -> Answers:
    old_T, generator_T, mask_T = (
        packed(batch, values) for values in (batch["old"], batch["generator"], mask_of(batch))
    )
    errors_S = token_advantages.sequence_errors(old_T, generator_T, mask_T, bounds(batch))
    is_counted, threshold = ~errors_S.isnan(), config.seq_logprob_error_threshold
    is_kept_S = ~(errors_S > threshold) if threshold is not None else torch.ones_like(is_counted)
    totals = token_advantages.error_metrics(
        errors_S[is_counted], is_kept_S[is_counted], batch["rewards"].round()[is_counted]
    )
    metrics = token_advantages.finish_error_metrics({name: float(value) for name, value in totals.items()})
    return {"mask": batch["sample_mask"] * is_kept_S} | metrics


def gae(batch: Batch, config: GaeConfig, loss: LossConfig) -> Answers:
    old_T, reference_T, values_T, mask_T = (
        packed(batch, values) for values in (batch["old"], batch["reference"], batch["values"][0], mask_of(batch))
    )
    kl_T = token_advantages.kl_penalty(old_T, reference_T, mask_T, loss) if loss.use_kl_in_reward else None
    row = critic.ValuedRow(values_T, batch["rewards"], mask_T, bounds(batch), kl_T)
    found = {}
    for name, (values_T,) in zip(
        ("advantages", "returns"), critic.gae_of_rows([row], config, lambda total: total), strict=True
    ):
        found[name] = torch.zeros_like(batch["old"])
        for values, part in zip(
            found[name], (values_T * (mask_T > 0)).split(batch["lengths"].int().tolist()), strict=True
        ):
            values[: len(part)] = part
    return found


def value_loss(batch: Batch, config: ValueLossConfig) -> Answers:
    values = batch["values"].clone().requires_grad_()
    old_T, new_T, returns_T, mask_T = (packed(batch, part) for part in (*values, mask_of(batch)))
    loss, sums = critic.value_loss(
        new_T, old_T.detach(), returns_T.detach(), mask_T, config, num_tokens=float(mask_of(batch).sum())
    )
    found = with_gradient(
        loss, values, critic.finish_value_metrics({name: float(value) for name, value in sums.items()})
    )
    return found | {"gradient": torch.as_tensor(found["gradient"])[1]}


def distillation(batch: Batch, config: LossConfig, is_parallel: bool) -> Answers:
    """Losses of two rows, which add up; `is_parallel` tells of NeMo RL's way."""
    student, mask_BS = batch["student"].float().requires_grad_(), mask_of(batch)[:, 1:].float()
    temperature, teacher_temperature = batch["temperatures"].tolist()
    total, metrics = student.new_zeros(()), dict[str, float]()

    def columns(logits_BSV: Tensor, temperature: float) -> OutputColumns:
        assert dist.group.WORLD is not None
        distribution = TokenDistribution(logits_BSV.shape[-1], temperature)
        return OutputColumns(logits_BSV[:, :-1].flatten(0, 1), None, distribution, dist.group.WORLD, 3)

    for part in filter(len, torch.arange(len(student)).tensor_split(2)):
        scores_TK, tokens_TK = top_logits(columns(batch["teacher"].float()[part], teacher_temperature), int(batch["k"]))
        mask_T = mask_BS[part].flatten()
        # As rows have it: what stands where nothing was generated is 0.
        scores_TK, tokens_TK = scores_TK * mask_T[:, None], tokens_TK * (mask_T[:, None] > 0)
        needs = needs_vocabulary(config)
        scores = student_scores(columns(student[part], temperature), tokens_TK, needs_vocabulary=needs)
        loss, found = distillation_loss(scores, scores_TK, mask_T / mask_BS.sum().clamp(min=1), config)
        total = total + loss
        metrics = {name: metrics.get(name, 0.0) + float(value) for name, value in found.items()}
    return with_gradient(total, student, metrics)


def groups_of(batch: Batch, *, has_components: bool) -> Iterator[RolloutGroup]:
    """Groups of a batch, a verdict for each rollout."""
    for name in batch["prompts"].unique():
        infos, verdicts = [], []
        for index in (batch["prompts"] == name).nonzero().flatten().tolist():
            first, second = batch["lengths"][index].int().tolist()
            spans = ((0, first), (first + 1, first + 1 + second))
            flaws = [Flaw(FLAWS[kind], *spans[turn]) for turn, kind in batch["flaws"][index].nonzero().tolist()]
            parts = {f"part{i}": float(part[index]) for i, part in enumerate(batch["parts"])} if has_components else {}
            reward = sum(parts.values()) if has_components else float(batch["rewards"][index])
            is_flagged, reason = bool(batch["flagged"][index]), "length" if batch["cut_off"][index] else "stop"
            status = "flagged" if is_flagged else "ok"
            verdicts.append(Verdict(reward, not is_flagged, status, "", "", components=parts, flaws=tuple(flaws)))
            info = RolloutInfo(f"0/{index}", str(name), index, 1, PROMPT, first + 1 + second, reason, None)
            infos.append(replace(info, num_observed=1, num_turns=2))
        yield RolloutGroup(Prompt(str(name), (1, 2), "q", "a", "math"), tuple(infos), tuple(verdicts))


def advantages(batch: Batch, grpo: GrpoConfig, loss: LossConfig) -> Answers:
    is_taught = grpo.adv_estimator.name == "opd"
    groups = list(groups_of(batch, has_components=grpo.adv_estimator.name == "gdpo"))
    sequences, metrics = train_sequences(groups, grpo, compares_rollouts=not is_taught)
    mask_BS = torch.zeros_like(batch["logprobs"])
    fixed_BS = torch.full_like(mask_BS, torch.nan)
    for mask, fixed, sequence, (first, second) in zip(
        mask_BS, fixed_BS, sequences, batch["lengths"].int().tolist(), strict=True
    ):
        mask[PROMPT : PROMPT + first] = mask[PROMPT + first + 1 : PROMPT + first + 1 + second] = float(
            sequence.is_valid
        )
        for span in sequence.fixed_advantages:
            fixed[PROMPT + span.start : PROMPT + span.stop] = span.advantage
    values_BS = torch.tensor([sequence.advantage for sequence in sequences]).double()[:, None].expand_as(mask_BS)
    penalties = None
    if loss.use_kl_in_reward:
        penalties = list(token_advantages.kl_penalty(batch["logprobs"], batch["reference"], mask_BS, loss))
    if is_taught:
        penalties = list(-token_advantages.teacher_gap(batch["reference"], batch["logprobs"], mask_BS))
    found = token_advantages.token_advantages(
        list(values_BS), list(fixed_BS), list(mask_BS), penalties, grpo, lambda total: total
    )
    return {"advantages": torch.stack(found)} | {name.removeprefix("train/"): value for name, value in metrics.items()}


def rewards(batch: Batch, grpo: GrpoConfig) -> Answers:
    groups = list(groups_of(batch, has_components=False))
    shaped = [reward for group in groups for reward in shaped_rewards(group, grpo)]
    return {
        "rewards": torch.tensor(shaped).double(),
        "kept": torch.tensor([float(has_signal(group, GrpoConfig())) for group in groups]),
    }


OURS = {
    function.__name__: function
    for function in (policy_loss, errors, gae, value_loss, advantages, rewards, distillation)
}


def difference(ours: Tensor | float, theirs: Tensor) -> float:
    """The largest, absolute, or relative where theirs is above 1; equal infinities and NaN do not differ."""
    ours = torch.as_tensor(ours).double()
    assert ours.shape == theirs.shape
    is_equal = (ours == theirs) | (ours.isnan() & theirs.isnan())
    distance = ((ours - theirs).abs() / theirs.abs().clamp(min=1.0)).nan_to_num(nan=torch.inf)
    return float(torch.where(is_equal, 0.0, distance).amax())


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/store", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_answers_are_those_of_nemo_rl(case: Case):
    is_distillation = case.answer == "distillation"
    # Outside the top k a reverse KL is 100 times what is left of a sum of probabilities, in float32.
    is_rounded = is_distillation and case.configs[0].zero_outside_topk and case.configs[0].kl_type != "forward"
    largest: dict[str, float] = {}
    for batch, theirs in zip(recorded()[case.batch], recorded()[case.name], strict=True):
        ours = OURS[case.answer](batch, *case.configs)
        for name in theirs.keys() - THEIRS_ALONE:
            largest[name] = max(largest.get(name, 0.0), difference(ours[name], theirs[name]))
    wrong = {name: value for name, value in largest.items() if value > (2e-5 if is_rounded else TOLERANCE)}
    assert bool(wrong) == bool(case.deviation), wrong
    assert (case.deviation or "") in (ROOT / "docs" / "algorithms.md").read_text()
