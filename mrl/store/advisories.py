# SPDX-License-Identifier: Apache-2.0
"""Advisories on a run: one table of rules with their thresholds, for the page and for the console.

A rule measures the last rows of metrics, and applies where the number is beyond its limit. `stop` rules say that the
run is broken or learns nothing; `look` rules that something costs speed or quality.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mrl.store.run_files import Json, Row, setting

Level = Literal["stop", "look"]
Facts = Mapping[str, float]
"""Numbers of the config that rules compare with: `num_prompts`, `max_lag`, `oversample`, and 1 for each of `SWITCHES`
that is on.
"""
Measure = Callable[[Sequence[Row], Facts], float | None]

WINDOW = 100
NUM_STEPS_FLAT = 20
MIN_STEPS_HACKED, MIN_VALIDATIONS = 40, 3
"""Steps, and validations in either half of them, without which nothing is said of reward hacking."""
CLEAR_RISE, LIKELY_RISE = 3.0, 1.0
"""Standard errors by which a mean has surely, or more likely than not, moved."""
NUM_STEPS_WAITING = 20
SOLVED_REWARD = 0.95
SILENT_STEPS, SILENT_MIN_S = 10.0, 300.0
"""Limits of silence, in median steps and in seconds: a run that exceeds both hangs."""


@dataclass(frozen=True)
class Advice:
    """A rule that applies where `measure` is above `limit` (with `is_below`: below it)."""

    key: str
    level: Level
    what: str
    measure: Measure
    limit: float
    causes: str
    turn: str
    is_below: bool = False
    is_warned: bool = False
    """True where a warning in the log has said it before the step's end: the console does not say it again."""
    names: Callable[[Row], Sequence[str]] = lambda row: ()
    """Names of what the number is of, in the last row."""

    def value_if_held(self, rows: Sequence[Row], facts: Facts) -> float | None:
        """The measured number if the rule holds; None if it does not, or the rows lack the metric."""
        value = self.measure(rows, facts)
        if value is None:
            return None
        return value if (value < self.limit if self.is_below else value > self.limit) else None


@dataclass(frozen=True)
class Advisory:
    """A rule that applies at a step."""

    key: str
    level: Level
    step: int
    seen: str
    causes: str
    turn: str

    def line(self) -> str:
        return f"[{self.level.capitalize()}] step {self.step}: {self.seen}. Likely: {self.causes}. Try: {self.turn}"


def _values(rows: Sequence[Row], name: str, count: int) -> list[float]:
    return [value for row in rows[-count:] if (value := row.get(name)) is not None]


def _mean(name: str, *, steps: int = 1) -> Measure:
    """Mean over the last steps if all have the metric: a single bad step is no reason for advice."""

    def measure(rows: Sequence[Row], _: Facts) -> float | None:
        values = _values(rows, name, steps)
        return statistics.fmean(values) if len(values) == steps else None

    return measure


def _of_one_version(measure: Measure) -> Measure:
    """The measure, where a step's rollouts are drawn from the weights that they train."""
    return lambda rows, facts: None if facts.get("oversample", 1.0) > 1.0 else measure(rows, facts)


def _share_of_time(name: str, *, steps: int) -> Measure:
    """Share of the last steps' time that a part of them takes; a step without it counts 0."""

    def measure(rows: Sequence[Row], _: Facts) -> float | None:
        wholes = _values(rows, "time/total", steps)
        return sum(_values(rows, name, steps)) / sum(wholes) if len(wholes) == steps and sum(wholes) else None

    return measure


def _over(name: str, fact: str, *, steps: int) -> Measure:
    def measure(rows: Sequence[Row], facts: Facts) -> float | None:
        values = _values(rows, name, steps)
        return min(values) / facts[fact] if len(values) == steps and facts.get(fact) else None

    return measure


def _not_finite(rows: Sequence[Row], _: Facts) -> float | None:
    if rows:
        return float(sum(rows[-1].get(name, 0.0) is None for name in ("train/loss", "train/grad_norm", "train/reward")))
    return None


def _growth_of_generation(rows: Sequence[Row], _: Facts) -> float | None:
    values = _values(rows, "time/generation", 20)
    return sum(values[10:]) / sum(values[:10]) if len(values) == 20 and sum(values[:10]) else None


def _restarts(rows: Sequence[Row], _: Facts) -> float | None:
    values = _values(rows, "rollout/engine_restarts", 10)
    return values[-1] - values[0] if len(values) > 1 else None


def _reward_change(rows: Sequence[Row], _: Facts) -> float | None:
    """The reward's change between the halves of the last steps, in standard errors; None for a solved task."""
    values = _values(rows, "train/reward", NUM_STEPS_FLAT)
    if len(values) < NUM_STEPS_FLAT or statistics.fmean(values) > SOLVED_REWARD:
        return None
    old, new = values[: NUM_STEPS_FLAT // 2], values[NUM_STEPS_FLAT // 2 :]
    noise = ((statistics.variance(old) + statistics.variance(new)) / len(old)) ** 0.5
    moved = statistics.fmean(new) - statistics.fmean(old)
    return abs(moved) / noise if noise else (0.0 if moved == 0 else None)


def _halves(rows: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
    middle = len(rows) // 2
    return _values(rows[:middle], name, WINDOW), _values(rows[middle:], name, WINDOW)


def _rise(rows: Sequence[Row], name: str, fewest: int) -> float | None:
    """Rise of a metric from the older half of the rows to the newer one, in standard errors of both means."""
    old, new = _halves(rows, name)
    if min(len(old), len(new)) < fewest:
        return None
    moved = statistics.fmean(new) - statistics.fmean(old)
    noise = (statistics.variance(old) / len(old) + statistics.variance(new) / len(new)) ** 0.5
    return moved / noise if noise else math.copysign(math.inf, moved) if moved else 0.0


def _held_out_fall(rows: Sequence[Row], _: Facts) -> float | None:
    rise = _rise(rows, "val/accuracy", MIN_VALIDATIONS)
    return None if rise is None else -rise


def _times_as_long(rows: Sequence[Row], _: Facts) -> float | None:
    """Returns how many times as long the replies of one half are as those of the other, whichever is longer."""
    old, new = (statistics.fmean(values) if values else 0.0 for values in _halves(rows, "rollout/mean_length"))
    return max(old, new) / min(old, new) if min(old, new) > 0 else None


def _moved(name: str, *, only_up: bool = False) -> Measure:
    """Measures how far the mean of a share has moved, or risen, from the older half of the rows to the newer one."""

    def measure(rows: Sequence[Row], _: Facts) -> float | None:
        old, new = _halves(rows, name)
        if not (old and new):
            return None
        moved = statistics.fmean(new) - statistics.fmean(old)
        return moved if only_up else abs(moved)

    return measure


def _while_reward_rises(measure: Measure) -> Measure:
    """Measures only where the reward rises by more than `CLEAR_RISE`, and held-out rewards, if measured, do not.

    Where held-out rewards are measured, waits until either half has `MIN_VALIDATIONS` of them.
    """

    def guarded(rows: Sequence[Row], facts: Facts) -> float | None:
        rise = _rise(rows, "train/reward", MIN_STEPS_HACKED // 2)
        held_out = _rise(rows, "val/accuracy", MIN_VALIDATIONS)
        is_known = held_out is not None or not _values(rows, "val/accuracy", WINDOW)
        is_real = held_out is not None and held_out > LIKELY_RISE
        return measure(rows, facts) if rise is not None and rise > CLEAR_RISE and is_known and not is_real else None

    return guarded


def _masked_shares(row: Row) -> dict[str, float]:
    counts = {
        name.removesuffix("/num_rollouts"): count for name, count in row.items() if name.endswith("/num_rollouts")
    }
    return {env: (row.get(f"{env}/failed") or 0.0) / count for env, count in counts.items() if count}


def _worst_masked(rows: Sequence[Row], _: Facts) -> float | None:
    return max(_masked_shares(rows[-1] if rows else {}).values(), default=None)


def _mostly_masked(row: Row) -> list[str]:
    shares = _masked_shares(row)
    worst = [env for env, share in shares.items() if share == max(shares.values())]
    return [env.removeprefix("rollout/") for env in worst if env != "rollout"]  # which all are


def _altered(kind: str) -> Measure:
    """Measures the mean number of an agent's requests in a rollout that were altered so."""

    def measure(rows: Sequence[Row], _: Facts) -> float | None:
        row = rows[-1] if rows else {}
        # Of an environment: `rollout/dropped_agent_groups` is none of these.
        altered = [name for name in row if name.count("/") == 2 and f"/{kind}_" in name]
        return max((row[name] or 0.0 for name in altered), default=None)

    return measure


_HACKED = "the Rollouts tab, replies of the highest reward; loss_fn.reference_policy_kl_penalty up; the reward"
RULES = (
    Advice("not_finite", "stop", "numbers of this step that are not finite", _not_finite, 0.0,
         "the loss diverged", "policy.megatron_cfg.optimizer.lr down; policy.max_grad_norm down"),
    Advice("engines_die", "stop", "engine restarts in 10 steps", _restarts, 2.0,
         "an engine runs out of memory or crashes",
         "logs/exp_*/actors/engine-*.log; vllm_cfg.gpu_memory_utilization down"),
    Advice("no_signal", "stop", "groups with equal rewards, share of all, for 3 steps",
         _over("rollout/groups_without_signal", "num_prompts", steps=3), 0.99,
         "every prompt is solved or none is, or the reward is broken",
         "the Rollouts tab; other data; grpo.use_dynamic_sampling=true"),
    Advice("writes_lost", "stop", "writes lost", _mean("logger/lost"), 0.0,
         "the disk is full or not writable", "free space on the disk of checkpointing.checkpoint_dir"),
    Advice("kl", "look", "kl", _mean("train/kl_penalty"), 0.5,
         "the policy runs away from the reference",
         "loss_fn.reference_policy_kl_penalty up; policy.megatron_cfg.optimizer.lr down"),
    Advice("grad_norm", "look", "grad_norm, 3 steps,", _mean("train/grad_norm", steps=3), 10.0,
         "the learning rate is too high, or rewards are noisy",
         "policy.megatron_cfg.optimizer.lr down; policy.max_grad_norm"),
    Advice("reward_flat", "look", f"reward over {NUM_STEPS_FLAT} steps moved, in standard errors,", _reward_change, 0.5,
         "the task is too hard or too easy, or the learning rate too low",
         "the Rollouts tab; data; policy.megatron_cfg.optimizer.lr",
         is_below=True),
    Advice("hacked_held_out", "look", f"reward rises over {WINDOW} steps; held-out rewards fell, in standard errors,",
           _while_reward_rises(_held_out_fall), CLEAR_RISE,
           "the policy games the reward, or learns the prompts by heart", _HACKED),
    Advice("hacked_length", "look",
           "reward rises, held-out rewards are not seen to; replies are longer or shorter, times,",
           _while_reward_rises(_times_as_long), 1.5, "the reward pays for length", f"{_HACKED}; grpo.reward_shaping"),
    Advice("hacked_truncated", "look", "reward rises, held-out rewards are not seen to; truncated share rose by",
           _while_reward_rises(_moved("rollout/truncated_fraction", only_up=True)), 0.1, "the reward pays for length",
           f"{_HACKED}; grpo.overlong_filtering=true"),
    Advice("hacked_repetition", "look", "reward rises, held-out rewards are not seen to; repetitive share rose by",
           _while_reward_rises(_moved("rollout/repetitive_fraction", only_up=True)), 0.1,
           "the reward pays for repetitions", _HACKED),
    Advice("hacked_language", "look", "reward rises, held-out rewards are not seen to; share beyond ASCII moved by",
           _while_reward_rises(_moved("rollout/non_ascii_fraction")), 0.1, "replies change their language", _HACKED),
    Advice("generation_rises", "look", "generation seconds of 10 steps over those of the 10 before",
           _growth_of_generation, 1.3,
         "answers grow longer, or other work slows the engines",
         "policy.generation.max_new_tokens; grpo.reward_shaping.enabled=true; rollout/mean_length"),
    Advice("dlogp", "look", "mean |dlogp| of engine and trainer, 3 steps,",
           _of_one_version(_mean("train/mean_abs_dlogp", steps=3)), 0.05,
         "engine and trainer compute different logprobs",
         "python -m mrl.doctor CONFIG --refit; precision; policy.router_replay.enabled=true"),
    Advice("truncated", "look", "truncated share, 3 steps,", _mean("rollout/truncated_fraction", steps=3), 0.2,
         "answers do not end in time", "policy.generation.max_new_tokens up; grpo.overlong_filtering=true"),
    Advice("masked", "look", "masked share of the worst environment,", _worst_masked, 0.1,
         "its reward function or agent fails or times out",
         "the Rollouts tab, filter masked; logs/exp_*/actors/rewards*.log, of agents gateway*.log",
         names=_mostly_masked),
    Advice("dropped", "look", "requests of an agent with parts that the chat template does not write, a rollout,",
           _altered("dropped"), 0.0, "the model's template has no tools, or not the role",
         "rollout/*/dropped_* says which; a message that says it; "
         "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.chat_template", is_warned=True),
    Advice("overridden", "look", "requests of an agent with sampling parameters of its own, a rollout,",
           _altered("overridden"), 0.0, "the agent sets them, and the run's are used",
         "rollout/*/overridden_* says which; leave them out; policy.generation", is_warned=True),
    Advice("router", "look", "unused experts of the worst layer, 3 steps,",
           _mean("train/moe/unused_experts_worst", steps=3), 0.5,
         "the router collapses",
         "policy.megatron_cfg.moe_router_bias_update_rate; policy.megatron_cfg.optimizer.lr down"),
    Advice("idle", "look", "engine idle share, 5 steps,", _mean("rollout/engine_idle_fraction", steps=5), 0.5,
         "a few long rollouts hold all engines up, or rewards are slow",
         "grpo.async_grpo.enabled=true; fewer engines; time/reward"),
    Advice("reward_waits", "look", "share of 5 steps spent waiting for rewards",
         _share_of_time("time/reward", steps=5), 0.3,
         "some verdicts take long, or more wait than are judged at once",
         "python -m mrl.reward FUNCTION ROWS, which says whose; env.own.num_workers up; "
         "grpo.async_grpo.enabled=true"),
    Advice("lag", "look", "lag over its bound, 5 steps,", _over("train/max_trajectory_age", "max_lag", steps=5), 0.99,
         "engines are slower than the trainer", "more engines; grpo.async_grpo.max_trajectory_age_steps up"),
    Advice("refit_share", "look", "refit share of a step, 5 steps,", _share_of_time("time/refit", steps=5), 0.2,
         "the link between trainer and engines is slow",
         "the Weights tab; policy.refit_buffer_size_gb up; python -m mrl.doctor"),
    Advice("packing", "look", "packing efficiency, 5 steps,", _mean("train/packing_efficiency", steps=5), 0.5,
         "rows are far longer than sequences",
         "policy.sequence_packing.enabled=true; policy.sequence_packing.train_mb_tokens down", is_below=True),
    Advice("checkpoint_waits", "look", f"share of {NUM_STEPS_WAITING} steps spent waiting for checkpoints",
         _share_of_time("time/checkpoint", steps=NUM_STEPS_WAITING), 0.1,
         "the disk is slow or saves are frequent",
         "checkpointing.save_period up; policy.megatron_cfg.checkpoint.async_save=true"),
)  # fmt: skip
"""Liveness first, then hints; the page shows them in this order."""
SWITCHES = frozenset(part for rule in RULES for part in rule.turn.split("; ") if part.endswith("=true"))
"""Advice to switch something on, which a run that has it on is not given."""


def number(value: float) -> str:
    """A number as the page and the console show it."""
    return f"{value:.3g}"


def advisories(rows: Sequence[Row], facts: Facts) -> list[Advisory]:
    """The rules that apply after the last row, in the order of `RULES`."""
    trained = [row for row in rows if row.get("step")][-WINDOW:]
    found = []
    for rule in RULES:
        value = rule.value_if_held(trained, facts)
        if value is not None:
            what = " ".join(filter(None, [rule.what, ", ".join(rule.names(trained[-1]))]))
            seen = f"{what} = {number(value)} ({'below' if rule.is_below else 'above'} {number(rule.limit)})"
            turn = "; ".join(part for part in rule.turn.split("; ") if not facts.get(part))
            found.append(Advisory(rule.key, rule.level, int(trained[-1]["step"] or 0), seen, rule.causes, turn))
    return found


def silence(rows: Sequence[Row], *, silent_s: float) -> Advisory | None:
    """Advisory for a live run that has written no metrics for `silent_s`."""
    limit = max(SILENT_MIN_S, SILENT_STEPS * statistics.median(_values(rows, "time/total", WINDOW) or [0.0]))
    if silent_s <= limit:
        return None
    seen = f"no new metrics for {number(silent_s)} s (above {number(limit)} s)"
    step = int(rows[-1]["step"] or 0) if rows else 0
    return Advisory(
        "silent",
        "stop",
        step,
        seen,
        "a rank, an engine or a reward hangs, or a start takes long",
        "logs/exp_*/actors/*.log",
    )


WARNED = frozenset(rule.key for rule in RULES if rule.is_warned)


class Advisor:
    """Gives every advisory once, when its rule first applies, except those that a warning has said."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._rows: deque[Row] = deque(maxlen=WINDOW)
        self._said = set(WARNED)

    def new(self, row: Row) -> list[Advisory]:
        """Lists the advisories that hold with this step's row and did not hold before."""
        self._rows.append(row)
        found = [advisory for advisory in advisories(list(self._rows), self._facts) if advisory.key not in self._said]
        self._said.update(advisory.key for advisory in found)
        return found


def facts_of(config: Json) -> Facts:
    """Numbers of a config, given as nested dicts, that rules compare with."""
    found = {
        **{switch: setting(config, switch.removesuffix("=true")) for switch in SWITCHES},
        "num_prompts": setting(config, "grpo.num_prompts_per_step"),
        "oversample": setting(config, "grpo.oversample"),
    }
    if setting(config, "grpo.async_grpo.enabled"):
        found["max_lag"] = setting(config, "grpo.async_grpo.max_trajectory_age_steps")
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
