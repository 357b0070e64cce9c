# SPDX-License-Identifier: Apache-2.0
"""Kept rollouts: whole groups that a checkpoint has not trained on, so that the next attempt need not resample them.

A cache by prompt: which prompts are trained is for the ledger alone to say. A thread writes, at most one file a second.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mrl
from conversion.files.durable import WRITE_TIMEOUT_S, make_folder, remove_file
from conversion.files.limits import within
from mrl.config.own import code_digest
from mrl.config.schema.run import RunConfig
from mrl.data.recorded import read_record, write_record
from mrl.env import kill_point
from mrl.store.identity import Identity
from mrl.store.ledger import LedgerState
from mrl.store.ownership import FolderLost
from mrl.types import Prompt, PromptKey, Rollout, RolloutInfo, RunState, Verdict

logger = logging.getLogger(__name__)

KEPT = "rollouts"
"""Folder in the run folder."""
FILE = re.compile(r"kept_(\d+)\.mrl")
INTERVAL_S = 1.0
FLUSH_S, END_S = 60.0, 10.0
SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens", "stop_token_ids", "stop_strings", "vllm_kwargs")
ENGINE = ("precision", "kv_cache_dtype", "max_model_len", "http_server_serving_chat_kwargs")
JUDGING = (
    "num_generations_per_prompt",
    "max_rollout_turns",
    "seed",
    "invalid_tool_call_advantage",
    "malformed_thinking_advantage",
)
IRRELEVANT = {"num_workers", "policy_base_url", "policy_api_key"}


@dataclass(frozen=True)
class KeptGroup:
    """All rollouts of a prompt with their verdicts, before rewards are shaped."""

    prompt: Prompt
    epoch: int
    step: int
    """The finished steps of the weights that sampled its oldest token."""
    infos: tuple[RolloutInfo, ...]
    """Its rollouts, by index, without payload."""
    rollouts: tuple[Rollout, ...]
    """The payloads of all sequences of `infos`, in order."""
    verdicts: tuple[Verdict, ...]

    @property
    def key(self) -> PromptKey:
        return self.epoch, self.prompt.prompt_id


@dataclass(frozen=True)
class KeptFile:
    """Contents of one file."""

    conditions: dict[str, str]
    """Digests of everything besides the weights that rollouts and verdicts depend on, by key."""
    groups: tuple[KeptGroup, ...]


@dataclass(frozen=True)
class WholeGroup:
    """A group whose rollouts are all sampled and judged."""

    key: PromptKey
    prompt: Prompt
    weight_version: int
    """Version of the weights that sampled its oldest token."""
    infos: Sequence[RolloutInfo]
    verdicts: Sequence[Verdict]


class KeptRollouts:
    """Writes groups that a checkpoint may need, and hands out those an earlier attempt wrote. `start` comes first."""

    def __init__(
        self,
        folder: Path,
        conditions: dict[str, str],
        *,
        lag: int,
        limit_bytes: float,
        saves: Callable[[int], bool],
        pull: Callable[[Sequence[RolloutInfo]], list[Rollout]],
        check_owner: Callable[[], None],
    ) -> None:
        """`saves`: whether a checkpoint follows a step. `pull` fetches payloads in a thread; RuntimeError: one lost."""
        self._folder, self._conditions, self._lag, self._limit = folder, conditions, lag, limit_bytes
        self._saves, self._pull, self._check_owner = saves, pull, check_owner
        self._changed = threading.Condition()
        """Held for whatever is below."""
        self._steps: dict[int, int] = {}
        """Finished steps by weight version."""
        self._checkpoint = 0
        self._whole: dict[PromptKey, tuple[WholeGroup, int]] = {}
        """Not written, with the step of its weights."""
        self._consumed: dict[PromptKey, int] = {}
        """Step that has consumed a group of `_files`, or of `_whole`."""
        self._files: dict[Path, dict[PromptKey, int]] = {}
        """Steps of the weights of the groups in each file."""
        self._sizes: dict[Path, int] = {}
        self._usable: dict[PromptKey, KeptGroup] = {}
        self._num_unjudged: Callable[[int], int] = lambda weight_version: 0
        self._is_over, self._is_awaited, self._has_failed, self._is_said = False, False, False, False
        self._last_number, self._written_at = 0, 0.0
        self._thread = threading.Thread(target=self._run, name="kept rollouts", daemon=True)

    def start(self, step: int, weight_version: int, consumed: Collection[PromptKey]) -> None:
        """Reads what past attempts wrote, once `step`'s weights are loaded as `weight_version`; names the useless."""
        self._checkpoint, self._steps = step, {weight_version: step}
        within(WRITE_TIMEOUT_S, f"mkdir of {self._folder}", make_folder, self._folder)
        reasons = Counter[str]()
        _remove(self._folder.glob(".kept_*"))  # of a write that was killed
        for path in sorted(self._folder.glob("kept_*.mrl")):
            if match := FILE.fullmatch(path.name):
                self._last_number = max(self._last_number, int(match[1]))
                self._read(path, step, consumed, reasons)
        if self._usable or reasons:
            told = "".join(f"; {count} not: {reason}" for reason, count in reasons.items())
            logger.info("Prompts whose kept rollouts are used again: %d%s", len(self._usable), told)
        self._thread.start()

    def _read(self, path: Path, step: int, consumed: Collection[PromptKey], reasons: Counter[str]) -> None:
        try:
            file = read_record(path, KeptFile)
        except TimeoutError:
            raise
        except (OSError, ValueError) as error:
            logger.warning("%s; the prompts of its rollouts are asked again", error)
            _remove([path])
            return
        changed = sorted(
            key for key in file.conditions | self._conditions if file.conditions.get(key) != self._conditions.get(key)
        )
        found: dict[PromptKey, int] = {}
        for group in file.groups:
            if changed:
                reasons[f"sampled or judged with other {', '.join(changed)}"] += 1
            elif group.step > step:
                reasons[f"from weights after step {step}, which are rolled back"] += 1
            elif step - group.step > self._lag:
                reasons[f"older than grpo.async_grpo.max_trajectory_age_steps allows at step {step}"] += 1
            elif group.key not in consumed:
                found[group.key] = group.step
                if group.key not in self._usable or self._usable[group.key].step <= group.step:
                    self._usable[group.key] = group
        lasting = tuple(group for group in file.groups if group.step <= step)
        if found and len(lasting) < len(file.groups):
            # A later attempt, which has made those steps anew, would take the rest for its own.
            try:
                write_record(path, KeptFile(file.conditions, lasting))
            except OSError as error:
                logger.warning(
                    "%s: rollouts of no use cannot be taken out, so all of its rollouts are dropped: %s", path, error
                )
                found.clear()
        if found:
            self._files[path], self._sizes[path] = found, path.stat().st_size
        else:
            _remove([path])

    def take(self, epoch: int, prompt: Prompt) -> KeptGroup | None:
        """The group of a prompt, if an earlier attempt has kept it."""
        group = self._usable.pop((epoch, prompt.prompt_id), None)
        if group is not None and group.prompt != prompt:
            logger.warning(
                "The text of prompt %s has changed since its rollouts were kept; it is asked again", prompt.prompt_id
            )
            return None
        return group

    def version_of(self, group: KeptGroup) -> int:
        """Weight version of a group of an earlier attempt, as this one counts."""
        version, step = min(self._steps.items())
        return version - (step - group.step)

    def note(self, group: WholeGroup) -> None:
        """Notes a complete group. Any thread may call it; it never waits."""
        with self._changed:
            if (step := self._steps.get(group.weight_version)) is not None and not self._has_failed:
                self._consumed.pop(group.key, None)
                self._whole[group.key] = group, step
            if self._is_awaited:  # the thread looks by itself now and then
                self._changed.notify_all()

    def note_trained(self, step: int, consumed: Iterable[PromptKey]) -> None:
        """Notes that a step has consumed these groups."""
        with self._changed:
            on_disk = {key for keys in self._files.values() for key in keys}
            for key in consumed:
                if key in self._whole and not self._is_wanted(self._whole[key][1]):
                    del self._whole[key]
                if key in self._whole or key in on_disk:
                    self._consumed[key] = step

    def prepare(self, step: int, *, ends: bool) -> None:
        """Writes, before a checkpoint of `step`, the groups that a run resumed there needs; waits a while for verdicts.

        Unless the run `ends` there, waits for none of the step's own weights: they are written meanwhile, and can be
        sampled again.
        """
        last = step if ends else step - 1

        def is_written() -> bool:
            is_due = any(self._whole[group.key][1] <= last for group in self._due())
            return self._has_failed or not (is_due or self._num_unjudged(version))

        with self._changed:
            self._checkpoint, self._is_awaited = step, True
            version = max((version for version, at in self._steps.items() if at <= last), default=-1)
            self._changed.notify_all()
            is_done = self._changed.wait_for(is_written, FLUSH_S)
            self._is_awaited = False
            if not is_done:
                logger.info(
                    "Not all rollouts of step %d are kept: they had no verdict, or were not written, within %g s",
                    step,
                    FLUSH_S,
                )

    def published(self, step: int) -> None:
        """Removes, once the checkpoint of `step` is published, groups that no later attempt needs."""
        with self._changed:
            self._is_said = False
            useless = [
                path
                for path, groups in self._files.items()
                if not any(self._is_needed(key, s, step) for key, s in groups.items())
            ]
            for path in useless:
                del self._files[path]
                del self._sizes[path]
            self._whole = {key: held for key, held in self._whole.items() if self._is_needed(key, held[1], step)}
            on_disk = {key for keys in self._files.values() for key in keys}
            self._consumed = {key: at for key, at in self._consumed.items() if key in on_disk or key in self._whole}
        _remove(useless)

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(END_S)

    def follow(self, state: RunState, ledger: LedgerState) -> None:
        """Notes that engines hold `state`'s weights, which the ledger trained. The first call begins the attempt."""
        if not self._steps:
            self.start(state.step, state.weight_version, ledger.consumed)
            return
        self.note_trained(state.step, (*ledger.trained.get(state.step, ()), *ledger.dropped.get(state.step, ())))
        with self._changed:
            self._steps.setdefault(state.weight_version, state.step)

    def watch(self, num_unjudged: Callable[[int], int]) -> None:
        """`num_unjudged` counts sampled groups without all verdicts, of weights up to a version."""
        self._num_unjudged = num_unjudged

    def _is_needed(self, key: PromptKey, step: int, checkpoint: int) -> bool:
        """Tells whether a run may use a group that resumes at this checkpoint, or at a later one."""
        return step + self._lag >= checkpoint and self._consumed.get(key, checkpoint + 1) > checkpoint

    def _is_wanted(self, step: int) -> bool:
        """Tells whether a run may resume where groups from the weights of `step` are of use."""
        return any(at == self._checkpoint or self._saves(at) for at in range(step, step + self._lag + 1))

    def _due(self) -> list[WholeGroup]:
        if self._has_failed:
            return []
        return [
            group
            for key, (group, step) in self._whole.items()
            if self._is_wanted(step) and self._consumed.get(key, self._checkpoint + 1) > self._checkpoint
        ]

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or bool(self._due()), timeout=INTERVAL_S)
                rest_s = self._written_at + INTERVAL_S - time.monotonic()
                if rest_s > 0:
                    self._changed.wait_for(lambda: self._is_over, timeout=rest_s)
                if self._is_over:
                    return
                due = self._due()
            if due:
                has_failed = True
                try:
                    self._write(due)
                    has_failed = False
                except (FolderLost, TimeoutError) as error:
                    logger.warning(
                        "%s: rollouts are not kept any more, and a resumed run samples them again: %s",
                        self._folder,
                        error,
                    )
                except (OSError, RuntimeError) as error:  # there may be room later; an engine that has died comes back
                    has_failed = False
                    if not (self._is_over or self._is_said):
                        logger.warning(
                            "%s: some rollouts are not kept, and a resumed run samples them again: %s",
                            self._folder,
                            error,
                        )
                    self._is_said = True
                finally:
                    with self._changed:
                        self._has_failed = has_failed
                        kept = () if has_failed else self._whole.items()
                        self._whole = {key: held for key, held in kept if not any(held[0] is group for group in due)}
                        self._changed.notify_all()

    def _write(self, due: Sequence[WholeGroup]) -> None:
        """Writes groups. OSError, RuntimeError, FolderLost: they cannot be written."""
        self._written_at = time.monotonic()
        path = self._folder / f"kept_{self._last_number + 1:06d}.mrl"
        self._check_owner()
        pulled = self._pull([sequence for group in due for info in group.infos for sequence in info.sequences])
        if sum(self._sizes.values()) + sum(map(num_bytes, pulled)) > self._limit:
            raise OSError(f"the folder may hold checkpointing.keep_rollouts_gb={self._limit / 1e9:g}, and is full")
        payloads = iter(pulled)
        groups = [self._kept(group, [next(payloads) for info in group.infos for _ in info.sequences]) for group in due]
        kill_point("kept")
        size = write_record(path, KeptFile(self._conditions, tuple(groups)))
        kill_point("kept")
        self._last_number += 1
        with self._changed:
            self._files[path], self._sizes[path] = {group.key: group.step for group in groups}, size

    def _kept(self, group: WholeGroup, rollouts: Sequence[Rollout]) -> KeptGroup:
        bare = tuple(
            dataclasses.replace(rollout, request=dataclasses.replace(rollout.request, earlier=None))
            for rollout in rollouts
        )
        infos = tuple(with_payloads(info, [None] * len(info.sequences)) for info in group.infos)
        step = self._steps[group.weight_version]
        return KeptGroup(group.prompt, group.key[0], step, infos, bare, tuple(group.verdicts))


def drop_kept(folder: Path) -> None:
    """Removes kept groups of earlier attempts: after an attempt that keeps none, their weights would be unknown."""
    _remove(folder.glob("*kept_*.mrl*"))


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            remove_file(path)
        except TimeoutError:
            raise
        except OSError as error:
            logger.warning("%s is of no use any more, and cannot be removed: %s", path, error)


def num_bytes(rollout: Rollout) -> int:
    """Bytes of a rollout's arrays."""
    return sum(
        array.nbytes for array in (rollout.token_ids, rollout.generator_logprobs, rollout.routes) if array is not None
    )


def with_payloads(info: RolloutInfo, payloads: Sequence[object]) -> RolloutInfo:
    """The rollout with a payload for each of its sequences."""
    further = tuple(
        dataclasses.replace(one, payload=payload) for one, payload in zip(info.further, payloads[1:], strict=True)
    )
    return dataclasses.replace(info, payload=payloads[0], further=further)


def conditions_of(config: RunConfig, identity: Identity) -> dict[str, str]:
    """Digests, by key, of everything but weights and prompts that rollouts and verdicts depend on."""
    generation, grpo = config.policy.generation, config.rollouts
    values: dict[str, object] = {"mrl": mrl.__version__}
    values |= {f"policy.generation.{name}": getattr(generation, name) for name in SAMPLING}
    values |= {f"policy.generation.vllm_cfg.{name}": getattr(generation.vllm_cfg, name) for name in ENGINE}
    values |= {f"grpo.{name}": getattr(grpo, name) for name in JUDGING}
    values |= {f"env.{field.name}": getattr(config.env, field.name) for field in dataclasses.fields(config.env)}
    values |= {"reward_penalties": config.reward_penalties, "policy.router_replay": config.policy.router_replay}
    values |= {name: identity[name] for name in ("model", "tokenizer") if name in identity}
    own = config.env.own
    values |= {f"code of {path}": code_digest(path) for path in (*own.functions.values(), *own.agents.values())}
    return {
        key: hashlib.sha256(json.dumps(_as_json(value), sort_keys=True).encode()).hexdigest()[:16]
        for key, value in values.items()
    }


def _as_json(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _as_json(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.name not in IRRELEVANT
        }
    if isinstance(value, Mapping):
        return {str(name): _as_json(item) for name, item in value.items() if name not in IRRELEVANT}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return value if isinstance(value, str | int | float | bool | None) else str(value)
