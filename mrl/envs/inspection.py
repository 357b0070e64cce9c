# SPDX-License-Identifier: Apache-2.0
"""Finds faults in a rollout's form, not its answer: unpaired think tags, unwanted tokens, no answer, broken calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mrl.config.schema.algo import RewardPenaltiesConfig
from mrl.config.schema.env import TOOL_PARSERS
from mrl.config.schema.run import RunConfig
from mrl.envs.task import DEFAULT_TOOL_PARSER
from mrl.envs.tool_calls import tool_calls
from mrl.types import Flaw, FlawKind, Rollout, Verdict

THINK_TAGS = ["<think>", "</think>"]
CALL_TAGS = ("<tool_call>", "</tool_call>")

Decode = Callable[[Sequence[int]], str]
"""The text of token ids, special tokens included."""


@dataclass(frozen=True)
class Rules:
    """The faults that a run looks for."""

    penalties: RewardPenaltiesConfig
    flaws: tuple[FlawKind, ...]
    open_tag: str
    close_tag: str
    special_texts: tuple[str, ...]
    """Texts of special tokens, which do not count as part of an answer."""
    call_patterns: tuple[str, ...] = ()
    """Texts outside of calls that are of broken ones."""
    tool_parser: str = DEFAULT_TOOL_PARSER
    """Format of calls."""


@dataclass(frozen=True)
class Remarks:
    """The faults of one rollout: why its reward is 0, and which turns are flawed."""

    penalties: tuple[str, ...] = ()
    flaws: tuple[Flaw, ...] = ()


def flaws_of(config: RunConfig) -> tuple[FlawKind, ...]:
    """Faults of turns that have an advantage of their own."""
    advantages: dict[FlawKind, float | None] = {
        "invalid_tool_call": config.rollouts.invalid_tool_call_advantage,
        "malformed_thinking": config.rollouts.malformed_thinking_advantage,
    }
    return tuple(kind for kind, advantage in advantages.items() if advantage is not None)


def looks_for_faults(config: RunConfig) -> bool:
    """True if a run looks at the form of its rollouts."""
    return bool(flaws_of(config)) or config.reward_penalties.is_enabled


def rules_of(config: RunConfig, decode: Decode, special_texts: Sequence[str]) -> Rules | None:
    """The rules of a run, or None. `special_texts` are the tokenizer's special tokens."""
    if not looks_for_faults(config):
        return None
    ids = config.reward_penalties.token_ids
    given = (None, None) if ids is None else (ids.think_open, ids.think_close)
    gym = config.env.nemo_gym
    tags = (gym.thinking_tags if config.env.should_use_nemo_gym else None) or THINK_TAGS
    patterns = (gym.invalid_tool_call_patterns if config.env.should_use_nemo_gym else None) or ()
    open_tag, close_tag = (
        tag if token_id is None else decode([token_id]) for token_id, tag in zip(given, tags, strict=True)
    )
    texts = tuple(text for text in special_texts if text not in (open_tag, close_tag))
    parser = config.policy.generation.vllm_cfg.http_server_serving_chat_kwargs.tool_parser
    parser = parser if parser in TOOL_PARSERS else DEFAULT_TOOL_PARSER
    return Rules(config.reward_penalties, flaws_of(config), open_tag, close_tag, texts, tuple(patterns), parser)


def inspect_all(rollouts: Sequence[Rollout], decode: Decode, rules: Rules) -> Remarks:
    """Penalties and flaws of a rollout of several sequences; the first has its last answer."""
    found = [inspect(rollout, decode, rules) for rollout in rollouts]
    further = [name for one in found[1:] for name in one.penalties if name != "empty_final_answer"]
    flaws = tuple(replace(flaw, sequence=place) for place, one in enumerate(found) for flaw in one.flaws)
    return Remarks(tuple(dict.fromkeys((*found[0].penalties, *further))), flaws)


def inspect(rollout: Rollout, decode: Decode, rules: Rules) -> Remarks:
    """The penalties and flaws of a rollout, by the rules."""
    asked = rules.penalties
    unwanted = set((asked.token_ids.unwanted if asked.token_ids else None) or ())
    is_unwanted = is_repeated = is_malformed = False
    flaws: dict[FlawKind, list[Flaw]] = {"invalid_tool_call": [], "malformed_thinking": []}
    ids, first, answer = [*rollout.request.token_ids, *rollout.token_ids.tolist()], len(rollout.request.token_ids), ""
    stops = [0, *(turn.stop for turn in rollout.untrained), *(first + turn.stop for turn in rollout.turns)]
    for turn in rollout.turns:
        before = decode(ids[max(stop for stop in stops if stop <= first + turn.start) : first + turn.start])
        generated = ids[first + turn.start : first + turn.stop]
        text = decode(generated)
        num_open = before.count(rules.open_tag) - before.count(rules.close_tag)
        thought, tag, answer = text.partition(rules.close_tag)
        if not tag:
            thought, answer = (text, "") if num_open > 0 else ("", text)
        for special in (rules.open_tag, *rules.special_texts):
            thought, answer = thought.replace(special, ""), answer.replace(special, "")
        thought, answer = thought.strip(), answer.strip()
        is_unwanted = is_unwanted or not unwanted.isdisjoint(generated)
        is_repeated = is_repeated or (thought != "" and thought == answer)
        # The model closes a thought that the prompt opened, once, closes no other, and opens none.
        if num_open not in (0, 1) or rules.open_tag in text or text.count(rules.close_tag) != num_open:
            is_malformed = True
            flaws["malformed_thinking"].append(Flaw("malformed_thinking", turn.start, turn.stop))
        if "invalid_tool_call" in rules.flaws and _has_broken_call(answer, rules):
            flaws["invalid_tool_call"].append(Flaw("invalid_tool_call", turn.start, turn.stop))
    found = {
        "duplicated_reasoning": asked.penalize_duplicated_reasoning and is_repeated,
        "empty_final_answer": asked.penalize_empty_final_answer and not answer,
        "unwanted_token": asked.penalize_unwanted_tokens and is_unwanted,
        "malformed_think_tag": asked.penalize_malformed_think_tag and is_malformed,
    }
    return Remarks(
        tuple(name for name, is_so in found.items() if is_so),
        tuple(flaw for kind in rules.flaws for flaw in flaws[kind]),
    )


def _has_broken_call(answer: str, rules: Rules) -> bool:
    if any(call.error for call in tool_calls(answer, parser=rules.tool_parser)):
        return True
    start, stop = CALL_TAGS
    *closed, outside = answer.split(stop)
    for part in closed:
        before, tag, _ = part.rpartition(start)
        outside += f"\n{before if tag else part + stop}"
    return any(pattern in outside for pattern in rules.call_patterns)


def amend(verdict: Verdict, remarks: Remarks) -> Verdict:
    """The verdict with its flaws; reward and its components are 0 if there is a penalty, which becomes a flag."""
    if remarks.penalties and verdict.has_reward:
        verdict = replace(verdict.adjusted(0.0), flags=(*verdict.flags, *remarks.penalties))
    return replace(verdict, flaws=remarks.flaws)
