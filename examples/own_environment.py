# SPDX-License-Identifier: Apache-2.0
"""An environment of two turns: it says whether the first sum was too low or high, and the model may correct itself."""

from typing import Any


def second_try(turns: list[str], reference_answer: str, row: dict[str, Any]) -> dict[str, object]:
    said, expected = turns[-1].strip(), int(reference_answer)
    if said.isdecimal() and int(said) == expected:
        return {"reward": 1.0 if len(turns) == 1 else row.get("second_try_reward", 0.5)}
    hint = "too low" if said.isdecimal() and int(said) < expected else "too high" if said.isdecimal() else "no number"
    # An observation continues the conversation, up to grpo.max_rollout_turns; then the reward of the last turn counts.
    return {"reward": 0.0, "observation": f"{hint}, again: "}
