# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from mrl.config.schema.algo import GrpoConfig, PenaltyTokenIdsConfig, RewardPenaltiesConfig
from mrl.config.schema.env import EnvConfig, NemoGymConfig
from mrl.config.schema.run import RunConfig
from mrl.envs.inspection import Remarks, Rules, amend, inspect, inspect_all, rules_of
from mrl.types import Flaw, Rollout, Turn, UntrainedTurn, Verdict
from tests.rollouts import request

# One token per character, and special ones for what models have single tokens for.
SPECIAL = {1000: "<think>", 1001: "</think>", 1002: "<|im_end|>"}
EVERYTHING = RewardPenaltiesConfig(True, True, True, True, PenaltyTokenIdsConfig(unwanted=[ord("@")]))
BOTH = GrpoConfig(invalid_tool_call_advantage=-5.0, malformed_thinking_advantage=-1.0)


def decode(token_ids: Sequence[int]) -> str:
    return "".join(SPECIAL.get(token, chr(token) if token < 1000 else "?") for token in token_ids)


def encode(text: str) -> list[int]:
    ids = []
    while text:
        token = next((token for token, name in SPECIAL.items() if text.startswith(name)), ord(text[0]))
        ids.append(token)
        text = text[len(decode([token])) :]
    return ids


def rollout(prompt: str, *texts: str) -> Rollout:
    """Alternating between what the model says and what the environment answers."""
    parts = [encode(text) for text in texts]
    bounds = np.cumsum([0, *map(len, parts)]).tolist()
    turns = [Turn(bounds[i], bounds[i + 1], 1) for i in range(0, len(parts), 2)]
    ids = np.array([token for part in parts for token in part], dtype=np.int32)
    logprobs = np.zeros(len(ids), dtype=np.float32)
    return Rollout(request(encode(prompt)), 1, ids, logprobs, "stop", None, tuple(turns[:-1]), turns[-1].start)


def rules(penalties: RewardPenaltiesConfig = EVERYTHING, grpo: GrpoConfig = BOTH) -> Rules:
    found = rules_of(RunConfig(grpo=grpo, reward_penalties=penalties), decode, list(SPECIAL.values()))
    assert found is not None
    return found


def penalties(prompt: str, *texts: str) -> tuple[str, ...]:
    return inspect(rollout(prompt, *texts), decode, rules()).penalties


THINKING, PLAIN = "2+2?<think>", "2+2?<think></think>"


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        (THINKING, "two and two</think> 4<|im_end|>", ()),
        (PLAIN, "4<|im_end|>", ()),
        ("2+2?", "4<|im_end|>", ()),
        (THINKING, "it is 4 </think>\nit is 4<|im_end|>", ("duplicated_reasoning",)),
        (THINKING, "hm</think>  <|im_end|>", ("empty_final_answer",)),
        (PLAIN, " <|im_end|>", ("empty_final_answer",)),
        # Cut off within the thought: there is no answer, and the thought is not closed.
        (THINKING, "hm, ", ("empty_final_answer", "malformed_think_tag")),
        (THINKING, "hm</think><tool_call><function=f></function></tool_call>", ()),
        (PLAIN, "4@", ("unwanted_token",)),
        (THINKING, "a</think>b</think>c", ("malformed_think_tag",)),
        (PLAIN, "a</think>b", ("malformed_think_tag",)),
        ("2+2?", "<think>a</think>b", ("malformed_think_tag",)),
    ],
)
def test_penalties_by_hand(prompt: str, text: str, expected: tuple[str, ...]):
    assert penalties(prompt, text) == expected


def test_tags_spelled_with_characters_count_too():
    said = rollout(THINKING, "a</think>b")
    spelled = replace(said, token_ids=np.array([*said.token_ids, *map(ord, "</think>")], dtype=np.int32))
    assert inspect(spelled, decode, rules()).penalties == ("malformed_think_tag",)


def test_every_turn_is_inspected_after_what_stands_before_it():
    calls = "a</think><tool_call><function=f></function></tool_call>"
    assert penalties(THINKING, calls, "result<think>", "b</think>4") == ()
    assert penalties(THINKING, calls, "result", "b</think>4") == ("malformed_think_tag",)
    # What the environment says is nobody's fault.
    assert penalties(THINKING, calls, "@</think><think><think>", "b</think>4") == ()
    assert penalties(THINKING, "@</think>call", "result<think>", "b</think>4") == ("unwanted_token",)


def test_flaws_span_the_turns_that_have_them():
    said = rollout(
        PLAIN,
        "<tool_call>f()</tool_call>",
        "no such call",
        "a</think>b",
        "hm",
        "<tool_call><function=f></function></tool_call>",
    )
    first, second, _ = said.turns
    found = inspect(said, decode, rules(RewardPenaltiesConfig()))
    assert found == Remarks(
        (), (Flaw("invalid_tool_call", first.start, first.stop), Flaw("malformed_thinking", second.start, second.stop))
    )
    only_calls = rules(RewardPenaltiesConfig(), GrpoConfig(invalid_tool_call_advantage=-5.0))
    assert [flaw.kind for flaw in inspect(said, decode, only_calls).flaws] == ["invalid_tool_call"]


def test_an_agents_rollout_is_faulty_in_all_its_sequences():
    """Its last answer is that of the first sequence; a retry that said nothing costs nothing."""
    last, retry = rollout(THINKING, "a</think>4"), rollout(THINKING, "a</think>")
    assert inspect_all([last, retry], decode, rules()) == Remarks()
    assert inspect_all([retry, last], decode, rules()).penalties == ("empty_final_answer",)
    found = inspect_all([last, rollout(PLAIN, "@ <tool_call>f()</tool_call>", "no", "</think>")], decode, rules())
    assert found.penalties == ("unwanted_token", "malformed_think_tag")
    flaws = [(flaw.kind, flaw.sequence, flaw.start) for flaw in found.flaws]
    assert flaws == [("invalid_tool_call", 1, 0), ("malformed_thinking", 1, len("@ <tool_call>f()</tool_call>no"))]


def test_turns_of_other_sequences_in_the_prompt_open_no_thoughts():
    broken = "<think><think>"
    again = rollout(f"{PLAIN}{broken}and?{THINKING}", "a</think>4")
    assert inspect(again, decode, rules()).penalties == ("malformed_think_tag",)
    start = len(encode(PLAIN))
    known = replace(again, untrained=(UntrainedTurn(start, start + len(encode(broken)), "elsewhere"),))
    assert inspect(known, decode, rules()).penalties == ()


def test_calls_are_read_in_the_format_of_the_engines_parser():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert [flaw.kind for flaw in inspect(rollout(PLAIN, call), decode, rules()).flaws] == ["invalid_tool_call"]
    hermes = replace(rules(), tool_parser="hermes")
    assert inspect(rollout(PLAIN, call), decode, hermes).flaws == ()
    config = RunConfig(grpo=BOTH)
    config.policy.generation.vllm_cfg.http_server_serving_chat_kwargs.tool_parser = "hermes"
    found = rules_of(config, decode, ())
    assert found is not None and found.tool_parser == "hermes"


def test_only_what_is_asked_for_is_penalised():
    for name in ("duplicated_reasoning", "empty_final_answer", "unwanted_tokens", "malformed_think_tag"):
        config = RewardPenaltiesConfig(
            **{f"penalize_{name}": True}, token_ids=PenaltyTokenIdsConfig(unwanted=[ord("@")])
        )
        found = {
            penalty
            for prompt, text in [(THINKING, "4@</think>4@"), (THINKING, "hm</think>"), (THINKING, "hm")]
            for penalty in inspect(rollout(prompt, text), decode, rules(config)).penalties
        }
        assert found == {name.removesuffix("s") if name == "unwanted_tokens" else name}


def test_tags_of_other_tokens():
    config = RewardPenaltiesConfig(
        penalize_malformed_think_tag=True, token_ids=PenaltyTokenIdsConfig(think_open=ord("{"), think_close=ord("}"))
    )
    assert inspect(rollout("2+2?{", "hm}4"), decode, rules(config)).penalties == ()
    assert inspect(rollout("2+2?{", "hm4"), decode, rules(config)).penalties == ("malformed_think_tag",)


def test_marks_and_patterns_of_nemo_gym():
    gym = NemoGymConfig(
        thinking_tags=["[THINK]", "[/THINK]"], invalid_tool_call_patterns=["<function_call>", "</tool_call>"]
    )
    run = RunConfig(grpo=BOTH, reward_penalties=EVERYTHING, env=EnvConfig(should_use_nemo_gym=True, nemo_gym=gym))
    call = "<tool_call><function=f></function></tool_call>"
    cases = {
        "[/THINK]fine": [],
        f"[/THINK]{call}": [],
        "</think>": ["malformed_thinking"],
        f"[/THINK]{call} </tool_call>": ["invalid_tool_call"],
        "[/THINK]<function_call>f()": ["invalid_tool_call"],
    }
    assert (found := rules_of(run, decode, [])) is not None
    for text, flaws in cases.items():
        assert [flaw.kind for flaw in inspect(rollout("2+2?[THINK]", text), decode, found).flaws] == flaws, text
    run.env.should_use_nemo_gym = False
    assert (other := rules_of(run, decode, [])) is not None and (other.open_tag, other.call_patterns) == ("<think>", ())


def test_without_rules_nothing_is_inspected():
    assert rules_of(RunConfig(), decode, []) is None


def test_a_penalty_is_a_reward_of_nothing_and_a_flag():
    verdict = Verdict(1.0, True, "ok", "4", "4", components={"a": 0.5, "b": 0.5}, flags=("x",))
    flaws = (Flaw("malformed_thinking", 0, 2),)
    amended = amend(verdict, Remarks(("empty_final_answer",), flaws))
    assert (amended.reward, amended.components, amended.flags) == (
        0.0,
        {"a": 0.0, "b": 0.0},
        ("x", "empty_final_answer"),
    )
    assert amended.flaws == flaws and amended.is_valid
    assert amend(verdict, Remarks()) == verdict
    flagged = amend(replace(verdict, is_valid=False, status="flagged"), Remarks(("empty_final_answer",)))
    assert (flagged.reward, flagged.is_valid) == (0.0, False)  # which the baseline of its group sees
    failed = Verdict(0.0, False, "timeout", "", "")
    assert amend(failed, Remarks(("empty_final_answer",))) == failed
