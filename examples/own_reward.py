# SPDX-License-Identifier: Apache-2.0
"""A reward of two components: the right sum, and how much of the answer is digits."""


def digits_and_sum(response: str, reference_answer: str) -> dict[str, float]:
    answer = response.strip()
    return {
        "right": float(answer == reference_answer),
        "digits": 0.5 * sum(character.isdecimal() for character in answer) / max(1, len(answer)),
    }
