# SPDX-License-Identifier: Apache-2.0
"""Rows `{"terms": [12, 30]}`: sums for the reward and the environment of these pages, in turn."""


def sums(row: dict[str, list[int]]) -> dict[str, object]:
    first, second = row["terms"]
    return {
        "question": f"{first}+{second}=",
        "answer": str(first + second),
        "env_name": "digits_and_sum" if first % 2 else "second_try",
        "second_try_reward": 0.5,
    }
