# SPDX-License-Identifier: Apache-2.0
"""The policy loss, its gradient and its metrics, ours and NeMo RL's, on random batches. For `scripts.bench.nemo_parity`.

B sequences, S tokens of the longest one, T tokens of a packed row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mrl.algo.losses import BatchSize, Tokens, policy_loss
from mrl.algo.token_advantages import error_metrics, finish_error_metrics, sequence_errors
from mrl.config.schema.algo import LossConfig, Truncation
from scripts.bench.nemo_code import NemoRl

PLAIN = LossConfig(reference_policy_kl_penalty=0.0)
SEQUENCES = replace(PLAIN, token_level_loss=False)
GSPO = replace(SEQUENCES, sequence_level_importance_ratios=True, ratio_clip_min=3e-3, ratio_clip_max=4e-3)
CORRECTED = replace(PLAIN, use_importance_sampling_correction=True)
CORRECTED_GSPO = replace(GSPO, use_importance_sampling_correction=True)
KL = LossConfig(reference_policy_kl_penalty=0.1)


def truncated(config: LossConfig, kind: Truncation, low: float | None, high: float) -> LossConfig:
    """With bounds of the correction weights."""
    return replace(
        config,
        truncated_importance_sampling_type=kind,
        truncated_importance_sampling_ratio_min=low,
        truncated_importance_sampling_ratio=high,
    )


LOSSES: dict[str, LossConfig] = {
    "GRPO clip": PLAIN,
    "GRPO clip, mean over sequences": SEQUENCES,
    "DAPO clip": replace(PLAIN, ratio_clip_max=0.28),
    "dual clip": replace(PLAIN, ratio_clip_c=3.0),
    "GSPO": GSPO,
    "CISPO": replace(PLAIN, use_cispo=True, ratio_clip_max=5.0),
    "REINFORCE (disable_ppo_ratio)": replace(PLAIN, disable_ppo_ratio=True),
    "REINFORCE, mean over sequences": replace(SEQUENCES, disable_ppo_ratio=True),
    "force_on_policy_ratio": replace(CORRECTED, force_on_policy_ratio=True),
    "force_on_policy_ratio, GSPO": replace(GSPO, force_on_policy_ratio=True),
    "importance sampling correction": CORRECTED,
    "correction of sequences": CORRECTED_GSPO,
    "TIS": truncated(CORRECTED, "tis", None, 2.0),
    "TIS, both bounds": truncated(CORRECTED, "tis", 0.5, 1.5),
    "TIS of sequences": truncated(CORRECTED_GSPO, "tis", None, 2.0),
    "IcePop": truncated(CORRECTED, "icepop", 0.5, 1.5),
    "IcePop of sequences": truncated(CORRECTED_GSPO, "icepop", 0.5, 1.5),
    "seq-mask-TIS": truncated(CORRECTED, "seq-mask-tis", 0.9, 1.1),
    "KL k1": replace(KL, reference_policy_kl_type="k1"),
    "KL k2": replace(KL, reference_policy_kl_type="k2"),
    "KL k3": KL,
    "KL k3, mean over sequences": replace(KL, token_level_loss=False),
    "KL k3, clamps that hold": replace(KL, kl_input_clamp_value=0.5, kl_output_clamp_value=0.05),
    "KL k1, no clamps": replace(KL, reference_policy_kl_type="k1", kl_input_clamp_value=None, kl_output_clamp_value=None),
    "KL k2, on-policy approximation": replace(KL, reference_policy_kl_type="k2", use_on_policy_kl_approximation=True),
    "KL k3, on-policy approximation": replace(KL, use_on_policy_kl_approximation=True),
    "positive NLL": replace(PLAIN, positive_example_nll_weight=0.3),
}
"""`loss_fn` of each case."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a loss, [B, S] but where it says otherwise; position [b, s] is the token that the logprob is of."""

    logprobs_BS: Tensor
    old_BS: Tensor
    generator_BS: Tensor
    reference_BS: Tensor
    advantages_BS: Tensor
    token_mask_BS: Tensor
    sample_mask_B: Tensor
    rewards_B: Tensor
    lengths: list[int]

    @property
    def mask_BS(self) -> Tensor:
        """The tokens that count."""
        return self.token_mask_BS * self.sample_mask_B[:, None]

    def packed(self, values_BS: Tensor) -> Tensor:
        """[T]: sequence after sequence, without padding."""
        return torch.cat([values[:length] for values, length in zip(values_BS, self.lengths, strict=True)])

    @property
    def cu_seqlens(self) -> Tensor:
        """Bounds of the packed sequences."""
        return torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def random_inputs(seed: int, *, drift: float = 0.3) -> Inputs:
    """float64 sequences of 1 to 9 tokens behind prompts of 0 to 2. By fives, a batch has one sequence, none that
    counts, or all ratios at 1.2."""
    draw = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64) * scale

    num_sequences = 1 if seed % 5 == 1 else int(torch.randint(2, 6, (), generator=draw))
    prompts = torch.randint(0, 3, (num_sequences,), generator=draw)
    lengths = prompts + torch.randint(1, 10, (num_sequences,), generator=draw)
    positions, shape = torch.arange(int(lengths.max())), (num_sequences, int(lengths.max()))
    token_mask = (positions >= prompts[:, None]) & (positions < lengths[:, None])
    sample_mask = torch.rand(num_sequences, generator=draw) > 0.25
    if seed % 5 == 2:
        sample_mask[:] = False
    old = -3 * torch.rand(shape, generator=draw, dtype=torch.float64) - 0.1
    new = old + (math.log(1.2) if seed % 5 == 3 else normal(0.3))
    zero = torch.rand(shape, generator=draw) < 0.1
    generator, reference, advantages = old + normal(drift), old + normal(0.5), normal(1.0).masked_fill(zero, 0.0)
    rewards = torch.rand(num_sequences, generator=draw, dtype=torch.float64) - 0.5
    masks = token_mask.double(), sample_mask.double()
    return Inputs(new, old, generator, reference, advantages, *masks, rewards, lengths.tolist())


Result = tuple[Tensor, Tensor, dict[str, float]]
"""Loss, its gradient by the logprobs [B, S], metrics."""


def our_loss(inputs: Inputs, config: LossConfig) -> Result:
    """Loss by `mrl.algo.losses.policy_loss` over one packed row."""
    logprobs = inputs.logprobs_BS.clone().requires_grad_()
    mask_T = inputs.packed(inputs.mask_BS)
    positive_T = mask_T * inputs.packed((inputs.rewards_B > 0)[:, None].expand_as(inputs.mask_BS))
    num_sequences = float((inputs.mask_BS.sum(dim=1) > 0).sum())
    tokens = Tokens.of(
        inputs.packed(logprobs),
        generator_logprobs_T=inputs.packed(inputs.generator_BS),
        old_logprobs_T=None if config.force_on_policy_ratio else inputs.packed(inputs.old_BS),
        reference_logprobs_T=inputs.packed(inputs.reference_BS),
        advantages_T=inputs.packed(inputs.advantages_BS),
        loss_mask_T=mask_T,
        positive_mask_T=positive_T,
        cu_seqlens=inputs.cu_seqlens,
    )
    size = BatchSize(float(mask_T.sum()), num_sequences, float(positive_T.sum()))
    loss, metrics = policy_loss(tokens, config, size)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient, {name: float(value) for name, value in metrics.items()}


def their_loss(nemo: NemoRl, inputs: Inputs, config: LossConfig) -> Result:
    """Loss by their `ClippedPGLossFn` over one microbatch. Their tensors have a first token, which nothing predicts."""
    logprobs = inputs.logprobs_BS.clone().requires_grad_()
    settings = {name: getattr(config, name) for name in nemo.losses.ClippedPGLossConfig.model_fields}
    loss_function = nemo.losses.ClippedPGLossFn(nemo.losses.ClippedPGLossConfig(**settings))
    tensors = {
        "generation_logprobs": inputs.generator_BS,
        "prev_logprobs": inputs.old_BS,
        "reference_policy_logprobs": inputs.reference_BS,
        "advantages": inputs.advantages_BS,
        "token_mask": inputs.token_mask_BS,
    }
    data = {name: torch.cat([torch.zeros_like(values[:, :1]), values], dim=1) for name, values in tensors.items()}
    batch = nemo.batches.BatchedDataDict(data | {"sample_mask": inputs.sample_mask_B, "rewards": inputs.rewards_B})
    loss, metrics = loss_function(logprobs, batch, inputs.sample_mask_B.sum(), inputs.mask_BS.sum())
    gradient = torch.zeros_like(logprobs)
    if loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient, metrics


def compare_losses(nemo: NemoRl, inputs: Inputs, config: LossConfig, *, but: tuple[str, ...] = ()) -> list[tuple[str, Tensor, Tensor]]:
    """Results of both, by name, ours first: loss, gradient, and metrics of the same names, but those whose names begin with `but`."""
    (loss, gradient, ours), (their, their_gradient, theirs) = our_loss(inputs, config), their_loss(nemo, inputs, config)
    names = [name for name in theirs if name in ours and name != "loss" and not name.startswith(but)]
    pairs = [(f"metric {name}", torch.tensor(ours[name]), torch.tensor(float(theirs[name]))) for name in names]
    return [("loss", loss, their), ("gradient", gradient, their_gradient), *pairs]


def compare_errors(nemo: NemoRl, seed: int, threshold: float | None) -> list[tuple[str, Tensor, Tensor]]:
    """Metrics of the sequences' errors, and which ones the threshold masks."""
    inputs = random_inputs(seed, drift=0.8)
    padded = {"token_mask": inputs.token_mask_BS, "prev_logprobs": inputs.old_BS, "generation_logprobs": inputs.generator_BS}
    data = {name: torch.cat([torch.zeros_like(values[:, :1]), values], dim=1) for name, values in padded.items()}
    rewards_B = inputs.rewards_B.round()
    data["sample_mask"] = inputs.sample_mask_B.clone()
    theirs = nemo.driver.compute_and_apply_seq_logprob_error_masking(data, rewards_B, threshold)
    theirs["num_masked_seqs_by_logprob_error"] = theirs.pop("num_masked_seqs")
    errors_S = sequence_errors(
        inputs.packed(inputs.old_BS), inputs.packed(inputs.generator_BS), inputs.packed(inputs.mask_BS), inputs.cu_seqlens
    )
    is_counted = ~errors_S.isnan()
    is_kept_S = ~(errors_S > threshold) if threshold is not None else torch.ones_like(is_counted)
    totals = error_metrics(errors_S[is_counted], is_kept_S[is_counted], rewards_B[is_counted])
    ours = finish_error_metrics({name: float(value) for name, value in totals.items()})
    pairs = [(f"metric {name}", torch.tensor(ours[name]), torch.tensor(float(value))) for name, value in theirs.items()]
    return [("mask", inputs.sample_mask_B * is_kept_S, data["sample_mask"]), *pairs]


def empty_inputs(seed: int) -> Inputs:
    """Batches whose first rollout counts, and has no token."""
    inputs = random_inputs(seed)
    token_mask_BS, sample_mask_B = inputs.token_mask_BS.clone(), inputs.sample_mask_B.clone()
    token_mask_BS[0], sample_mask_B[0] = 0.0, 1.0
    return replace(inputs, token_mask_BS=token_mask_BS, sample_mask_B=sample_mask_B)


def far_inputs(seed: int) -> Inputs:
    """Batches with log-ratios of old policy and generator between -1000 and 1000, where exp overflows beyond 709."""
    draw = torch.Generator().manual_seed(seed)
    inputs = random_inputs(5 * seed)
    shape = inputs.old_BS.shape
    is_far = torch.rand(shape, generator=draw) < 0.3
    jump = (2000 * torch.rand(shape, generator=draw, dtype=torch.float64) - 1000).masked_fill(~is_far, 0.0)
    return replace(inputs, generator_BS=inputs.old_BS - jump)


def far_policies(seed: int) -> Inputs:
    """Batches with log-ratios of the policy to the old one between -30 and 30."""
    draw = torch.Generator().manual_seed(seed)
    inputs = random_inputs(5 * seed)
    jump = 60 * torch.rand(inputs.old_BS.shape, generator=draw, dtype=torch.float64) - 30
    return replace(inputs, logprobs_BS=inputs.old_BS + jump)
