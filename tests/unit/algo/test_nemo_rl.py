# SPDX-License-Identifier: Apache-2.0
"""Losses, gradients, advantages, rewards and metrics against numbers of NeMo RL's own code.

nemo_rl.json has the inputs, the config of each case in its changes from the default, and what NeMo RL's functions made of them, with
float64 wherever these take it. B sequences, S tokens of the longest one, V vocabulary, K tokens that the teacher tells, T packed tokens.
Batches have equal rewards, rewards 1e-8 apart, masked rollouts, ratios at the clip's bound, log-ratios that overflow and the like.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.algo.advantages import train_sequences
from mrl.algo.critic import ValuedRow, finish_value_metrics, gae_of_rows, value_loss
from mrl.algo.distillation import distillation_loss, needs_vocabulary
from mrl.algo.losses import BatchSize, Tokens, policy_loss
from mrl.algo.rewards import has_signal, shaped_rewards
from mrl.algo.token_advantages import error_metrics, finish_error_metrics, kl_penalty, sequence_errors, teacher_gap, token_advantages
from mrl.config.schema.algo import GrpoConfig, LossConfig
from mrl.config.schema.ppo import GaeConfig, ValueLossConfig
from mrl.policy.distillation import student_scores, top_logits
from mrl.policy.logprobs import OutputColumns, TokenDistribution
from mrl.types import Flaw, Prompt, RolloutGroup, RolloutInfo, Verdict
from tests.sources import ROOT

DATA = json.loads(Path(__file__).with_name("nemo_rl.json").read_text())
PROMPT_LENGTH = 2
TOLERANCE = 1e-6
Batch = dict[str, Any]
Results = dict[str, Tensor | float]


def configured(config: Any, changes: Batch) -> Any:
    """The config with other values; those of a section are its changes."""
    inner = {name: configured(getattr(config, name), value) for name, value in changes.items() if is_dataclass(getattr(config, name))}
    return replace(config, **{**changes, **inner})


def tensors(batch: Batch, dtype: torch.dtype = torch.float64) -> Batch:
    """The batch with its lists of numbers as tensors, by the suffix of their names."""
    return {
        name: torch.tensor(value, dtype=dtype) if isinstance(value, list) and name != "lengths" and name != "groups" else value
        for name, value in batch.items()
    }


class Padded:
    """Inputs of a loss, [B, S]; position [b, s] is the token that the logprob is of."""

    def __init__(self, batch: Batch) -> None:
        self.of = tensors(batch)
        self.mask_BS: Tensor = self.of["token_mask_BS"] * self.of["sample_mask_B"][:, None]
        self.lengths: list[int] = batch["lengths"]
        self.cu_seqlens = torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def packed(self, values_BS: Tensor) -> Tensor:
        """[T]: sequence after sequence, without padding."""
        return torch.cat([values[:length] for values, length in zip(values_BS, self.lengths, strict=True)])


def with_metrics(results: Results, metrics: dict[str, Any]) -> Results:
    return results | {f"metric {name}": float(value) for name, value in metrics.items()}


def loss(case: Batch, batch: Batch) -> Results:
    """NeMo RL: `ClippedPGLossFn` over one microbatch."""
    config, padded = configured(LossConfig(), case["config"]), Padded(batch)
    logprobs_BS = padded.of["logprobs_BS"].clone().requires_grad_()
    mask_T = padded.packed(padded.mask_BS)
    positive_T = mask_T * padded.packed((padded.of["rewards_B"] > 0)[:, None].expand_as(padded.mask_BS))
    tokens = Tokens.of(
        padded.packed(logprobs_BS),
        generator_logprobs_T=padded.packed(padded.of["generator_BS"]),
        old_logprobs_T=None if config.force_on_policy_ratio else padded.packed(padded.of["old_BS"]),
        reference_logprobs_T=padded.packed(padded.of["reference_BS"]),
        advantages_T=padded.packed(padded.of["advantages_BS"]),
        loss_mask_T=mask_T,
        positive_mask_T=positive_T,
        cu_seqlens=padded.cu_seqlens,
    )
    num_sequences = float((padded.mask_BS.sum(dim=1) > 0).sum())
    found, metrics = policy_loss(tokens, config, BatchSize(float(mask_T.sum()), num_sequences, float(positive_T.sum())))
    (gradient,) = torch.autograd.grad(found, logprobs_BS)
    return with_metrics({"loss": found.detach(), "gradient": gradient}, metrics)


def errors(case: Batch, batch: Batch) -> Results:
    """NeMo RL: `compute_and_apply_seq_logprob_error_masking`, with the sample mask that it leaves."""
    padded, threshold = Padded(batch), case["threshold"]
    old_T, generator_T, mask_T = (padded.packed(values) for values in (padded.of["old_BS"], padded.of["generator_BS"], padded.mask_BS))
    errors_S = sequence_errors(old_T, generator_T, mask_T, padded.cu_seqlens)
    is_counted = ~errors_S.isnan()
    is_kept_S = ~(errors_S > threshold) if threshold is not None else torch.ones_like(is_counted)
    totals = error_metrics(errors_S[is_counted], is_kept_S[is_counted], padded.of["rewards_B"].round()[is_counted])
    metrics = finish_error_metrics({name: float(value) for name, value in totals.items()})
    return with_metrics({"mask": padded.of["sample_mask_B"] * is_kept_S}, metrics)


def gae(case: Batch, batch: Batch) -> Results:
    """NeMo RL: `GeneralizedAdvantageEstimator`, at the tokens that count."""
    padded, kl_T = Padded(batch), None
    mask_T = padded.packed(padded.mask_BS)
    if case["with_kl"]:
        config = LossConfig(use_kl_in_reward=True, reference_policy_kl_penalty=0.1)
        kl_T = kl_penalty(padded.packed(padded.of["old_BS"]), padded.packed(padded.of["reference_BS"]), mask_T, config)
    row = ValuedRow(padded.packed(padded.of["values_3BS"][0]), padded.of["rewards_B"], mask_T, padded.cu_seqlens, kl_T)
    (advantages_T,), (returns_T,) = gae_of_rows([row], configured(GaeConfig(), case["config"]), lambda total: total)
    return {"advantages": advantages_T[mask_T > 0], "returns": returns_T[mask_T > 0]}


def of_values(case: Batch, batch: Batch) -> Results:
    """NeMo RL: `MseValueLossFn`."""
    padded = Padded(batch)
    old_BS, values_BS, returns_BS = padded.of["values_3BS"]
    values_BS = values_BS.clone().requires_grad_()
    old_T, returns_T, mask_T = (padded.packed(part) for part in (old_BS, returns_BS, padded.mask_BS))
    config = configured(ValueLossConfig(), case["config"])
    found, sums = value_loss(padded.packed(values_BS), old_T, returns_T, mask_T, config, num_tokens=float(mask_T.sum()))
    (gradient,) = torch.autograd.grad(found, values_BS)
    metrics = finish_value_metrics({name: float(value) for name, value in sums.items()})
    return with_metrics({"loss": found.detach(), "gradient": gradient}, metrics)


def groups_of(batch: Batch) -> list[RolloutGroup]:
    """Groups of rollouts of two turns: what the model says, a token of the environment, what the model says, which may be nothing."""
    groups = []
    for number, rollouts in enumerate(batch["groups"]):
        infos, verdicts, name = [], [], str(number)
        for index, one in enumerate(rollouts):
            infos.append(
                RolloutInfo(
                    f"0/{name}/{index}", name, index, 1, prompt_length=PROMPT_LENGTH, length=sum(one["turns"]) + 1,
                    finish_reason=one["finish"], payload=None, num_observed=1, num_turns=2,
                )
            )  # fmt: skip
            flaws = tuple(Flaw(*flaw) for flaw in one["flaws"])
            verdicts.append(Verdict(one["reward"], one["status"] == "ok", one["status"], "", "", components=one["components"], flaws=flaws))
        groups.append(RolloutGroup(Prompt(name, (1, 2), "q", "a", "math"), tuple(infos), tuple(verdicts)))
    return groups


def advantages(case: Batch, batch: Batch) -> Results:
    """NeMo RL: the estimator of this name, then advantages of flawed turns, then bounds; metrics of flawed turns."""
    grpo, kl = configured(GrpoConfig(), case["config"]), configured(LossConfig(), case.get("loss", {}))
    is_taught = grpo.adv_estimator.name == "opd"
    sequences, metrics = train_sequences(groups_of(batch), grpo, compares_rollouts=not is_taught)
    of = tensors(batch)
    mask_BS = torch.zeros_like(of["logprobs_BS"])
    for row, sequence, (first, second) in zip(
        mask_BS, sequences, (one["turns"] for group in batch["groups"] for one in group), strict=True
    ):
        row[PROMPT_LENGTH : PROMPT_LENGTH + first] = row[PROMPT_LENGTH + first + 1 : PROMPT_LENGTH + first + 1 + second] = sequence.is_valid
    fixed_BS = torch.full_like(mask_BS, torch.nan)
    for row, sequence in zip(fixed_BS, sequences, strict=True):
        for span in sequence.fixed_advantages:
            row[PROMPT_LENGTH + span.start : PROMPT_LENGTH + span.stop] = span.advantage
    values_BS = torch.tensor([sequence.advantage for sequence in sequences], dtype=torch.float64)[:, None].expand_as(mask_BS)
    penalties = list(kl_penalty(of["logprobs_BS"], of["reference_BS"], mask_BS, kl)) if kl.use_kl_in_reward else None
    if is_taught:
        penalties = list(-teacher_gap(of["reference_BS"], of["logprobs_BS"], mask_BS))
    found = token_advantages(list(values_BS), list(fixed_BS), list(mask_BS), penalties, grpo, lambda total: total)
    return with_metrics(
        {"advantages": torch.stack(found).double()}, {name.removeprefix("train/"): value for name, value in metrics.items()}
    )


def rewards(case: Batch, batch: Batch) -> Results:
    """NeMo RL: `scale_rewards`, then `apply_reward_shaping`."""
    config = configured(GrpoConfig(), case["config"])
    return {"rewards": torch.tensor([reward for group in groups_of(batch) for reward in shaped_rewards(group, config)])}


def signal(case: Batch, batch: Batch) -> Results:
    """NeMo RL: groups whose standard deviation, that of the whole group, is not 0."""
    return {"groups kept": torch.tensor([has_signal(group, GrpoConfig()) for group in groups_of(batch)])}


def distillation(case: Batch, batch: Batch) -> Results:
    """NeMo RL: `DistillationLossFn`, after `get_distillation_topk_logprobs_from_logits`, in float32."""
    config, of = configured(LossConfig(), case["config"]), tensors(batch, torch.float32)
    student_BSV = of["student_BSV"].requires_grad_()
    mask_BS = (of["token_mask_BS"] * of["sample_mask_B"][:, None])[:, 1:]
    total, metrics, vocabulary = student_BSV.new_zeros(()), dict[str, float](), student_BSV.shape[2]

    def columns(logits_BSV: Tensor, temperature: float) -> OutputColumns:
        distribution = TokenDistribution(vocabulary, temperature)
        return OutputColumns(logits_BSV[:, :-1].flatten(0, 1), None, distribution, dist.group.WORLD, chunk_tokens=3)  # type: ignore[arg-type]  # set

    for part in torch.arange(len(student_BSV)).tensor_split(case.get("num_rows", 1)):
        if len(part) == 0:  # a batch of fewer sequences than rows
            continue
        scores_TK, tokens_TK = top_logits(columns(of["teacher_BSV"][part], of["teacher_temperature"]), of["k"])
        mask_T = mask_BS[part].flatten()
        # As rows have it: what stands where nothing was generated is 0.
        scores_TK, tokens_TK = scores_TK * mask_T[:, None], tokens_TK * (mask_T[:, None] > 0)
        student = student_scores(columns(student_BSV[part], of["temperature"]), tokens_TK, needs_vocabulary=needs_vocabulary(config))
        one, found = distillation_loss(student, scores_TK, mask_T / mask_BS.sum().clamp(min=1), config)
        total = total + one
        metrics = {name: metrics.get(name, 0.0) + float(value) for name, value in found.items()}
    (gradient,) = torch.autograd.grad(total, student_BSV)
    return with_metrics({"loss": total.detach(), "gradient": gradient}, metrics)


KINDS: dict[str, Callable[[Batch, Batch], Results]] = {
    "loss": loss,
    "errors": errors,
    "gae": gae,
    "value loss": of_values,
    "advantages": advantages,
    "rewards": rewards,
    "signal": signal,
    "distillation": distillation,
}


def difference(ours: Tensor | float, theirs: object) -> float:
    """The largest, absolute, or relative where theirs is above 1; equal infinities and NaN do not differ."""
    one, other = torch.as_tensor(ours).double(), torch.tensor(theirs, dtype=torch.float64)
    assert one.shape == other.shape
    is_equal = (one == other) | (one.isnan() & other.isnan())
    distance = ((one - other).abs() / other.abs().clamp(min=1.0)).nan_to_num(nan=math.inf)
    return float(torch.where(is_equal, 0.0, distance).amax()) if one.numel() else 0.0


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory):
    """A process group of this process alone, which the code of the vocabulary needs."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("case", DATA["cases"], ids=lambda case: case["name"])
def test_results_are_nemo_rl_s(case: Batch):
    worst = dict.fromkeys(case["runs"][0][1], 0.0)
    for key, theirs in case["runs"]:
        ours = KINDS[case["kind"]](case, DATA["batches"][key])
        worst = {name: max(worst[name], difference(ours[name], value)) for name, value in theirs.items()}
    differing = {name: value for name, value in worst.items() if value > case.get("tolerance", TOLERANCE)}
    assert bool(differing) == ("deviation" in case), differing


def test_deviations_are_documented():
    page = (ROOT / "docs" / "algorithms.md").read_text()
    assert [case["name"] for case in DATA["cases"] if "deviation" in case and case["deviation"] not in page] == []


def test_every_key_of_the_loss_is_compared():
    """Keys that only mrl has, or that only change advantages, are compared elsewhere."""
    compared = {name for case in DATA["cases"] if case["kind"] in ("loss", "distillation") for name in case["config"]}
    others = {"token_loss", "constant_length_normalizer", "max_log_ratio", "use_kl_in_reward"}
    assert {field.name for field in fields(LossConfig)} - compared == others
