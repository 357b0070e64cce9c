# SPDX-License-Identifier: Apache-2.0
"""Records NeMo RL's answers to random batches: tests/data/nemo_rl/answers.json, for tests/unit/algo/test_nemo_rl.py.

Usage: python -m scripts.record_nemo_rl CHECKOUT

B sequences, S tokens of the longest one, V vocabulary. Run it when a case is new, or for another version of NeMo RL.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import random
import runpy
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from datetime import timedelta
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.config.schema.algo import GrpoConfig, LossConfig
from mrl.config.schema.ppo import GaeConfig, ValueLossConfig
from scripts.bench.nemo_recipes import commit_of
from tests.unit.algo.nemo_rl_cases import ANSWERS, CASES, PROMPT, Batch

NUM_BATCHES, VOCABULARY = 6, 11
Answers = dict[str, Tensor | float]
KL_SETTINGS = ("use_kl_in_reward", "reference_policy_kl_penalty", "reference_policy_kl_type")
# What their algorithms import and never use here: types of configs, loggers, a tokenizer patch, layouts of other
# backends.
STUBBED = (
    "nemo_rl.models.policy",
    "nemo_rl.utils.logger",
    "nemo_rl.utils.fastokens",
    "nemo_rl.models.dtensor.parallelize",
)
# Functions of the driver, whose file imports ray actors and every engine: taken from its text one by one.
DRIVER = (
    "scale_rewards",
    "_apply_message_level_advantage_penalties",
    "_clip_grpo_advantages",
    "compute_and_apply_seq_logprob_error_masking",
)


class _Stub(ModuleType):
    """Has every name that is asked of it."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Stubs(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(STUBBED) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """A stub has no code."""


def load(checkout: Path) -> dict[str, ModuleType | SimpleNamespace]:
    """Their modules by name; `driver` has the functions of `DRIVER` alone."""
    sys.meta_path.insert(0, _Stubs())
    sys.path.insert(0, str(checkout))
    algorithms = dict(
        utils="utils", advantages="advantage_estimator", losses="loss.loss_functions", rewards="reward_functions"
    )
    found = {name: import_module(f"nemo_rl.algorithms.{module}") for name, module in algorithms.items()}
    found |= {name: import_module(f"nemo_rl.distributed.{name}") for name in ("batched_data_dict", "model_utils")}
    tree = ast.parse((checkout / "nemo_rl/algorithms/grpo.py").read_text(encoding="utf-8"))
    wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in DRIVER]
    future = ast.parse("from __future__ import annotations\nimport torch\nfrom typing import cast").body
    names: dict[str, object] = {"get_gdpo_reward_component_keys": found["utils"].get_gdpo_reward_component_keys}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "grpo.py")
        path.write_text(ast.unparse(ast.Module([*future, *wanted], [])), encoding="utf-8")
        names = runpy.run_path(str(path), names)
    return found | {"driver": SimpleNamespace(**{name: names[name] for name in DRIVER})}


# Batches. Numbers have four digits, which keeps the file small; rewards have all of theirs.


def normal(draw: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    """Normal float64 numbers."""
    return torch.randn(shape, generator=draw, dtype=torch.float64) * scale


def token_batch(kind: str, seed: int) -> Batch:
    """Sequences of 1 to 9 tokens behind prompts of 0 to 2; [b, s] is the token that a logprob is of. By fives, a batch
    has one sequence, none that counts, or all ratios at 1.2."""
    # Of these, batches of the ordinary sort alone.
    seed = 5 * seed if kind.startswith("far") else seed
    draw = torch.Generator().manual_seed(seed)
    num_sequences = 1 if seed % 5 == 1 else int(torch.randint(2, 6, (), generator=draw))
    prompts = torch.randint(0, 3, (num_sequences,), generator=draw)
    lengths = prompts + torch.randint(1, 10, (num_sequences,), generator=draw)
    shape = (num_sequences, int(lengths.max()))
    positions = torch.arange(shape[1])
    token_mask = (positions >= prompts[:, None]) & (positions < lengths[:, None])
    sample_mask = (torch.rand(num_sequences, generator=draw) > 0.25) & (seed % 5 != 2)
    old = -3 * torch.rand(shape, generator=draw, dtype=torch.float64) - 0.1
    new = old + (math.log(1.2) if seed % 5 == 3 else normal(draw, *shape, scale=0.3))
    generator, reference = (
        old + normal(draw, *shape, scale=0.8 if kind == "drifting" else 0.3),
        old + normal(draw, *shape, scale=0.5),
    )
    advantages = normal(draw, *shape).masked_fill(torch.rand(shape, generator=draw) < 0.1, 0.0)
    rewards, values = torch.rand(num_sequences, generator=draw, dtype=torch.float64) - 0.5, normal(draw, 3, *shape)
    token_mask, sample_mask = token_mask.double(), sample_mask.double()
    if kind == "empty":
        # The first rollout counts, and has no token.
        token_mask[0], sample_mask[0] = 0.0, 1.0
    if kind == "far":
        # exp overflows beyond 709.
        is_far = torch.rand(shape, generator=draw) < 0.3
        generator = old - (2000 * torch.rand(shape, generator=draw, dtype=torch.float64) - 1000).masked_fill(
            ~is_far, 0.0
        )
    if kind == "far policy":
        new = old + 60 * torch.rand(shape, generator=draw, dtype=torch.float64) - 30
    found = dict(
        logprobs=new,
        old=old,
        generator=generator,
        reference=reference,
        advantages=advantages,
        rewards=rewards,
        values=values,
    )
    return {name: value.round(decimals=4) for name, value in found.items()} | dict(
        token_mask=token_mask, sample_mask=sample_mask, lengths=lengths
    )


REWARDS: tuple[Callable[[random.Random, int], list[float]], ...] = (
    lambda draw, size: [float(draw.random() < 0.5) for _ in range(size)],
    lambda draw, size: [float(i == 0) for i in range(size)],
    lambda draw, size: [0.1] * size,
    lambda draw, size: [draw.uniform(-2, 2) for _ in range(size)],
    lambda draw, size: [draw.choice([0.0, 1e-8]) for _ in range(size)],
    lambda draw, size: [draw.randrange(9) / 8 for _ in range(size)],
    # One differs from all the others, which are no binary fraction.
    lambda draw, size: [draw.uniform(-1, 0)] + [draw.uniform(0.1, 0.9)] * (size - 1),
)


def rollout_batch(kind: str, seed: int) -> Batch:
    """One to three groups of 2, 3, 4, 8 or 16 rollouts of two turns, the second of which may be empty, with a token of
    the environment between them. A fifth is flagged and cut off, and has flaws; [b, turn, kind] tells the flaws."""
    draw, names, rewards, second = random.Random(seed), [], [], []
    for name in range(draw.randint(1, 3)):
        size = draw.choice([2, 3, 4, 8, 16])
        families = (REWARDS[-1:] * 2) if kind == "spike" else draw.choices(REWARDS[:-1], k=2)
        names += [name] * size
        first_part, second_part = (family(draw, size) for family in families)
        rewards, second = rewards + first_part, second + second_part
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.stack(
        [
            torch.randint(1, 5, (len(names),), generator=generator),
            torch.randint(0, 4, (len(names),), generator=generator),
        ]
    )
    flagged, cut_off = torch.rand(2, len(names), generator=generator) < 0.2
    length = PROMPT + int(lengths.sum(dim=0).max()) + 1
    logprobs = normal(generator, len(names), length) - 3
    reference = logprobs + normal(generator, len(names), length, scale=0.5)
    tensors = dict(prompts=torch.tensor(names), lengths=lengths.T, flagged=flagged, cut_off=cut_off)
    tensors |= dict(logprobs=logprobs.round(decimals=4), reference=reference.round(decimals=4))
    # Rewards are float32 in NeMo RL.
    parts = torch.tensor([rewards, second], dtype=torch.float32).double()
    return tensors | dict(flaws=torch.rand(len(names), 2, 2, generator=generator) < 0.2, rewards=parts[0], parts=parts)


def logit_batch(kind: str, seed: int) -> Batch:
    """Sequences of up to 7 tokens with several turns. By fives, a batch has one sequence, none that counts, or a
    student that is its teacher."""
    draw = torch.Generator().manual_seed(seed)
    num_sequences = 1 if seed % 5 == 1 else int(torch.randint(2, 5, (), generator=draw))
    lengths = torch.randint(2, 8, (num_sequences,), generator=draw)
    positions = torch.arange(int(lengths.max()))
    generated = (
        (torch.rand(num_sequences, len(positions), generator=draw) < 0.6)
        & (positions < lengths[:, None])
        & (positions > 0)
    )
    sample_mask = (torch.rand(num_sequences, generator=draw) > 0.25) & (seed % 5 != 2)
    student, teacher = normal(draw, 2, num_sequences, len(positions), VOCABULARY, scale=2.0).round(decimals=4)
    temperatures = [1.0, 1.0] if seed % 2 else [0.7, 1.3]
    if seed % 5 == 3:
        teacher, temperatures = student, [1.0, 1.0]
    k = {"one": 1, "all": VOCABULARY}.get(kind, (1, 8, 4, 6)[seed % 4])
    tensors = dict(student=student, teacher=teacher, token_mask=generated.double(), sample_mask=sample_mask.double())
    return tensors | dict(k=torch.tensor(k), temperatures=torch.tensor(temperatures, dtype=torch.float64))


# Answers.


def settings_of(config: object, keys: object) -> dict[str, object]:
    """Settings of ours that theirs have too."""
    assert isinstance(keys, dict | tuple)
    return {name: getattr(config, name) for name in keys}


def behind_a_first_token(values: Tensor) -> Tensor:
    """Their tensors have a first token, which nothing predicts."""
    return torch.cat([torch.zeros_like(values[:, :1]), values], dim=1)


def loss_of(
    nemo: dict, function: Callable[..., tuple], inputs: Tensor, data: Mapping[str, Tensor], tokens: Tensor
) -> Answers:
    """Loss, gradient by the inputs, and metrics. `tokens` is 1 at tokens that count, if their sequence does."""
    sequences = data["sample_mask"]
    counts = sequences.sum(), (tokens * sequences[:, None]).sum()
    loss, metrics = function(inputs, nemo["batched_data_dict"].BatchedDataDict(data), *counts)
    gradient = torch.autograd.grad(loss, inputs)[0] if loss.requires_grad else torch.zeros_like(inputs)
    return {"loss": loss.detach(), "gradient": gradient} | {
        name: float(value) for name, value in metrics.items() if name != "loss"
    }


def policy_loss(nemo: dict, batch: Batch, config: LossConfig) -> Answers:
    """Answer of `ClippedPGLossFn` over one microbatch."""
    kind = nemo["losses"].ClippedPGLossConfig
    function = nemo["losses"].ClippedPGLossFn(kind(**settings_of(config, kind.model_fields)))
    theirs = dict(
        generation_logprobs="generator",
        prev_logprobs="old",
        reference_policy_logprobs="reference",
        advantages="advantages",
    )
    data = {name: behind_a_first_token(batch[ours]) for name, ours in (theirs | {"token_mask": "token_mask"}).items()}
    data |= {"sample_mask": batch["sample_mask"], "rewards": batch["rewards"]}
    return loss_of(nemo, function, batch["logprobs"].clone().requires_grad_(), data, batch["token_mask"])


def errors(nemo: dict, batch: Batch, config: GrpoConfig) -> Answers:
    """Metrics of the sequences' errors, and the samples that the threshold leaves."""
    data = dict(token_mask="token_mask", prev_logprobs="old", generation_logprobs="generator")
    tensors = {name: behind_a_first_token(batch[ours]) for name, ours in data.items()} | {
        "sample_mask": batch["sample_mask"].clone()
    }
    function, threshold = nemo["driver"].compute_and_apply_seq_logprob_error_masking, config.seq_logprob_error_threshold
    metrics = function(tensors, batch["rewards"].round(), threshold)
    metrics["num_masked_seqs_by_logprob_error"] = metrics.pop("num_masked_seqs")
    return {"mask": tensors["sample_mask"]} | {name: float(value) for name, value in metrics.items()}


def gae(nemo: dict, batch: Batch, config: GaeConfig, loss: LossConfig) -> Answers:
    """Advantages and returns of PPO."""
    settings = SimpleNamespace(**settings_of(loss, KL_SETTINGS))
    function = nemo["advantages"].GeneralizedAdvantageEstimator(dataclasses.asdict(config), settings)
    mask = batch["token_mask"] * batch["sample_mask"][:, None]
    given = dict(reference_logprobs=batch["reference"], logprobs=batch["old"])
    found = function.compute_advantage(None, batch["rewards"], mask, batch["values"][0], **given)
    return {name: value * (mask > 0) for name, value in zip(("advantages", "returns"), found, strict=True)}


def value_loss(nemo: dict, batch: Batch, config: ValueLossConfig) -> Answers:
    """The critic's loss."""
    old, new, returns = batch["values"]
    data = {"returns": returns, "values": old, "token_mask": batch["token_mask"], "sample_mask": batch["sample_mask"]}
    function = nemo["losses"].MseValueLossFn(
        nemo["losses"].MseValueLossConfig(scale=config.scale, cliprange=config.cliprange)
    )
    return loss_of(nemo, function, new.clone().requires_grad_(), data, batch["token_mask"])


def distillation(nemo: dict, batch: Batch, config: LossConfig, is_parallel: bool) -> Answers:
    """Answer of `DistillationLossFn` over a microbatch in float32. `is_parallel`: their code for a split vocabulary."""
    student = batch["student"].float().requires_grad_()
    temperature, teacher_temperature = batch["temperatures"].tolist()
    teacher = torch.topk(batch["teacher"].float() / teacher_temperature, int(batch["k"]), dim=-1)
    names = ("kl_type", "mixed_kl_weight", "zero_outside_topk")
    function = nemo["losses"].DistillationLossFn(nemo["losses"].DistillationLossConfig(**settings_of(config, names)))
    scores = nemo["model_utils"].get_distillation_topk_logprobs_from_logits(
        student_logits=student / temperature,
        teacher_topk_logits=teacher.values,
        teacher_topk_indices=teacher.indices,
        zero_outside_topk=config.zero_outside_topk,
        calculate_entropy=config.zero_outside_topk and config.kl_type != "forward",
        **(dict(vocab_parallel_rank=0, vocab_parallel_group=dist.group.WORLD) if is_parallel else {}),
    )
    mask = batch["token_mask"].float()
    data = {"input_ids": torch.zeros_like(mask), "token_mask": mask, "sample_mask": batch["sample_mask"].float()}
    return loss_of(nemo, lambda _, *rest: function(*scores, *rest), student, data, mask[:, 1:])


def advantages(nemo: dict, batch: Batch, grpo: GrpoConfig, loss: LossConfig) -> Answers:
    """Advantages as their driver computes them: estimator, fixed advantages, bounds. What does not count is 0."""
    mask, messages = torch.zeros_like(batch["logprobs"]), []
    for row, (first, second), flaws in zip(mask, batch["lengths"].tolist(), batch["flaws"].tolist(), strict=True):
        log: list[dict[str, object]] = [{"role": "user", "token_ids": torch.zeros(PROMPT)}]
        for start, length, (is_invalid_call, is_malformed) in ((0, first, flaws[0]), (first + 1, second, flaws[1])):
            row[PROMPT + start : PROMPT + start + length] = 1
            said = dict(token_ids=torch.zeros(length), generation_logprobs=torch.zeros(length))
            marks = dict(is_invalid_tool_call=is_invalid_call, has_malformed_thinking=is_malformed)
            log += [{"role": "assistant", **said, **marks}, {"role": "environment", "token_ids": torch.zeros(1)}]
        messages.append(log)
    is_kept = ~batch["flagged"] & ~(batch["cut_off"] & grpo.overlong_filtering)
    mask *= is_kept[:, None]
    kinds = dict(grpo="GRPO", gdpo="GDPO", reinforce_plus_plus="ReinforcePlusPlus", opd="OPD")
    estimator = getattr(nemo["advantages"], f"{kinds[grpo.adv_estimator.name]}AdvantageEstimator")
    kind, dtype = nemo["advantages"].AdvEstimatorConfig, torch.get_default_dtype()
    own = kind(**settings_of(grpo.adv_estimator, kind.model_fields))
    found = estimator(own, nemo["losses"].ClippedPGLossConfig(**settings_of(loss, KL_SETTINGS))).compute_advantage(
        prompt_ids=batch["prompts"][:, None],
        rewards=(batch["parts"].sum(dim=0) if grpo.adv_estimator.name == "gdpo" else batch["rewards"]).to(dtype),
        mask=mask,
        repeated_batch={f"reward/part{i}": part.to(dtype) for i, part in enumerate(batch["parts"])},
        logprobs_policy=batch["logprobs"],
        logprobs_reference=batch["reference"],
        # Of the estimators only on-policy distillation reads these.
        teacher_logprobs=batch["reference"],
        prev_logprobs=batch["logprobs"],
    )
    data = {"advantages": found}
    penalties = grpo.invalid_tool_call_advantage, grpo.malformed_thinking_advantage
    metrics = nemo["driver"]._apply_message_level_advantage_penalties(data, messages, *penalties)
    # Their REINFORCE++ of a batch that is masked as a whole is NaN, which the loss multiplies by 0.
    found = torch.where(mask > 0, nemo["driver"]._clip_grpo_advantages(data["advantages"], grpo), 0.0)
    return {"advantages": found} | {name: float(value) for name, value in metrics.items()}


def rewards(nemo: dict, batch: Batch, grpo: GrpoConfig) -> Answers:
    """Rewards after scaling and shaping, and groups that dynamic sampling keeps, by the deviation of a whole group."""
    lengths = batch["lengths"].sum(dim=1)
    data = {"total_reward": batch["rewards"].clone(), "truncated": batch["cut_off"], "response_token_lengths": lengths}
    shaped = nemo["rewards"].apply_reward_shaping(
        nemo["driver"].scale_rewards(data, grpo.reward_scaling), grpo.reward_shaping
    )
    kept = []
    for name in batch["prompts"].unique():
        group = batch["rewards"][batch["prompts"] == name]
        function, ones = nemo["utils"].calculate_baseline_and_std_per_prompt, torch.ones_like(group)
        _, std = function(torch.zeros(len(group), 1), group, ones, leave_one_out_baseline=False)
        kept.append(float((std != 0).any()))
    return {"rewards": shaped["total_reward"], "kept": torch.tensor(kept)}


def recorded(value: object) -> object:
    """Ten digits of each number, lists of lists."""
    if isinstance(value, Tensor):
        return recorded(value.tolist())
    if isinstance(value, list):
        return [recorded(part) for part in value]
    return float(f"{value:.10g}") if isinstance(value, float) else value


def main() -> int:
    """Entry point."""
    (checkout,) = map(Path, sys.argv[1:])
    if not (checkout / "nemo_rl/algorithms/grpo.py").exists():
        raise ValueError(f"{checkout} has no nemo_rl/algorithms/grpo.py; give the folder of a NeMo RL checkout")
    with redirect_stdout(StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nemo = load(checkout)
    dist.init_process_group(
        "gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    batches, answers = dict[str, list[Batch]](), dict[str, list]()
    for case in CASES:
        maker, kind = case.batch.split(":")
        made = batches.setdefault(case.batch, [globals()[maker](kind, seed) for seed in range(NUM_BATCHES)])
        torch.set_default_dtype(torch.float32 if kind == "spike" or case.answer == "distillation" else torch.float64)
        with redirect_stdout(StringIO()):
            found = [globals()[case.answer](nemo, batch, *case.configs) for batch in made]
        answers[case.name] = [
            {name: recorded(value) for name, value in answer.items() if not (case.but and name.startswith(case.but))}
            for answer in found
        ]
    kept = {
        kind: [{name: recorded(value) for name, value in batch.items()} for batch in made]
        for kind, made in batches.items()
    }
    lines = [
        json.dumps(name) + ": " + json.dumps(part, separators=(",", ":")) for name, part in (kept | answers).items()
    ]
    ANSWERS.write_text("{\n" + ",\n".join([f'"nemo_rl": "{commit_of(checkout)}"', *lines]) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
