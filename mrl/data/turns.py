# SPDX-License-Identifier: Apache-2.0
"""Conversations of several turns, in token ids. Generated tokens are never retokenised: later turns are appended."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from mrl.config.conversations import Heard, Said
from mrl.config.texts import MAX_TEXT_CHARACTERS, safe_text
from mrl.data.fields import RowError
from mrl.data.rendering import OLDER_ROLES, Conversation, lost_part, renamed, write
from mrl.types import Rollout, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Ending = Literal["over", "out of context"]
"""Reason for the end of a rollout: nobody says more, or it would not fit. The latter truncates the rollout."""
MARKUP = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<TOOLCALL>", "</TOOLCALL>", "[TOOL_CALLS]", "[ARGS]"),
)
"""Tokens that environments read, although some tokenizers call them special."""
_ANSWER = "the-answer-stands-here"
"""Stands for the model's words in a rendered template; no template contains it."""


class TurnFormat:
    """Reads and writes the turns of a rollout, with a tokenizer and its chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_kwargs: Mapping[str, object] | None,
        end_ids: Collection[int] = (),
    ) -> None:
        """`template_kwargs` are those of the prompts, policy.tokenizer.chat_template_kwargs; `end_ids` end a turn."""
        self.tokenizer = tokenizer
        self._template_kwargs = template_kwargs
        self._end_ids = frozenset(end_ids)
        self._has_warned = False

    def texts(self, rollout: Rollout) -> tuple[str, ...]:
        """The text of each turn of the model, without special tokens but with `MARKUP`, as `safe_text`."""
        turns = [rollout.token_ids[turn.start : turn.stop].tolist() for turn in rollout.turns]
        hidden = special_ids(self.tokenizer)
        kept = [[token_id for token_id in ids if token_id not in hidden] for ids in turns]
        texts = self.tokenizer.batch_decode(kept, skip_special_tokens=False)
        return tuple(safe_text(text, MAX_TEXT_CHARACTERS // len(texts)) for text in texts)

    def conversations(self, rollout: Rollout) -> tuple[tuple[Said, ...], ...]:
        """The one conversation of a rollout, for readers: prompt and environment with the chat template's tokens.

        The model's turns are as in `texts`.
        """
        messages, stop = [{"role": "prompt", "content": self.tokenizer.decode(list(rollout.request.token_ids))}], 0
        for turn, text in zip(rollout.turns, self.texts(rollout), strict=True):
            if turn.start > stop:
                observed = cast(str, self.tokenizer.decode(rollout.token_ids[stop : turn.start].tolist()))
                messages.append({"role": "environment", "content": observed.strip("\n")})
            messages.append({"role": "assistant", "content": text})
            stop = turn.stop
        heard = Heard()
        heard.note(messages)
        return heard.shown()

    def next_turn(
        self, rollout: Rollout, verdict: Verdict, *, max_turns: int, max_model_len: int, template_kwargs: str = ""
    ) -> Rollout | Ending:
        """The rollout for the next turn, if the environment answers and turns and context are left; else why not.

        `template_kwargs` are the prompt's own.
        """
        if not verdict.observation or not verdict.is_valid or rollout.finish_reason != "stop":
            return "over"
        following = self.go_on(rollout, verdict.observation, template_kwargs)
        if len(rollout.request.token_ids) + len(following.token_ids) >= max_model_len:
            return "out of context"
        return following if len(rollout.turns) < max_turns else "over"

    def go_on(self, rollout: Rollout, observation: Sequence[Mapping[str, str]], template_kwargs: str = "") -> Rollout:
        """The rollout, then the environment's messages, then the beginning of the assistant's next turn."""
        tail = np.array(self.tail_ids(int(rollout.token_ids[-1]), observation, template_kwargs), dtype=np.int32)
        return replace(
            rollout,
            token_ids=np.concatenate([rollout.token_ids, tail]),
            generator_logprobs=np.concatenate([rollout.generator_logprobs, np.zeros(len(tail), dtype=np.float32)]),
            tail_length=len(tail),
        )

    def tail_ids(
        self, last_token_id: int, observation: Sequence[Mapping[str, str]], template_kwargs: str = ""
    ) -> list[int]:
        """Ids between the model's last token and its next turn: the rest of its message, observation, head of the next.

        The chat template writes them behind an assistant's message. A mark of the end at their beginning is left out if
        the model has written that one or another already.
        """
        ids: list[int] = self.tokenizer(self._tail(observation, template_kwargs), add_special_tokens=False)["input_ids"]
        has_ended = ids[:1] == [last_token_id] or {last_token_id, *ids[:1]} <= self._end_ids
        return ids[1:] if has_ended else ids

    def _tail(self, observation: Sequence[Mapping[str, str]], template_kwargs: str) -> str:
        answers = Conversation([dict(message) for message in observation])
        values = {**(self._template_kwargs or {}), **json.loads(template_kwargs or "{}")}
        reason = ""
        for roles in ({}, OLDER_ROLES, OLDER_ROLES | {"tool": "user", "function": "user"}):
            messages = [
                {"role": "user", "content": ""},
                {"role": "assistant", "content": _ANSWER},
                *renamed(answers.messages, roles),
            ]
            try:
                text = write(Conversation(messages), self.tokenizer, values, add_generation_prompt=True)
            except RowError as error:
                reason = reason or str(error)
                continue
            tail = text.rpartition(_ANSWER)[2]
            if (lost := lost_part(answers, tail)) is None:
                if "tool" in roles and not self._has_warned:
                    logger.warning(
                        "The chat template ignores tools: results of tools are written as the user's messages"
                    )
                    self._has_warned = True
                return tail
            reason = reason or f"it leaves {lost} out"
        raise ValueError(f"the chat template of {self.tokenizer.name_or_path} does not take the observation: {reason}")


@lru_cache(maxsize=8)
def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of special tokens, `MARKUP` aside."""
    added = tokenizer.added_tokens_decoder
    return frozenset(token_id for token_id, token in added.items() if token.special and token.content not in MARKUP)


def appended(earlier: Rollout, drawn: Rollout) -> Rollout:
    """The rollout whose last turn is `drawn`."""
    routes = None
    if drawn.routes is not None and earlier.routes is not None:
        # Each token keeps the experts that it was drawn with; the engine may have computed the earlier ones again.
        routes = np.concatenate([earlier.routes, drawn.routes[len(earlier.routes) :]])
    is_same_version = earlier.weight_version == drawn.weight_version
    return replace(
        drawn,
        token_ids=np.concatenate([earlier.token_ids, drawn.token_ids]),
        generator_logprobs=np.concatenate([earlier.generator_logprobs, drawn.generator_logprobs]),
        routes=routes,
        earlier_turns=earlier.turns,
        last_turn_start=len(earlier.token_ids),
        num_weight_versions=earlier.num_weight_versions + drawn.num_weight_versions - is_same_version,
        proposals=earlier.proposals.plus(drawn.proposals),
    )


def continued(begun: Rollout, drawn: Rollout) -> Rollout:
    """The rollout whose last turn, unfinished in `begun`, goes on with `drawn`. Its routes are those of `drawn`."""
    newest = min(turn.weight_version for turn in begun.turns) + begun.num_weight_versions - 1
    return replace(
        appended(begun, drawn),
        weight_version=begun.weight_version,
        routes=drawn.routes,
        earlier_turns=begun.earlier_turns,
        last_turn_start=begun.last_turn_start,
        num_weight_versions=begun.num_weight_versions + drawn.num_weight_versions - (newest >= drawn.weight_version),
    )
