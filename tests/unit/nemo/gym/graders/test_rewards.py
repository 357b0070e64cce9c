# SPDX-License-Identifier: Apache-2.0
"""Rewards of NeMo Gym's verifiers (nemo-gym 0.5.0, verifiable-instructions f46a5ac), by `scripts.bench.gym_rewards`."""

import json
from pathlib import Path

import pytest

from mrl.nemo.gym.graders.sentences import ruled_sentences, sentences, tokens
from scripts.bench.gym_rewards import Answer, answers, reward

TABLES = {
    "emails": [
        {
            "email_id": f"000000{number}",
            "inbox/outbox": "inbox",
            "sender/recipient": "ann@x.com",
            "subject": f"Plan {number}",
            "body": "b",
        }
        for number in (57, 58)
    ],
    "events": [{"event_id": "00000013", "event_name": "sync up", "duration": "90"}],
    "tasks": [
        {
            "task_id": "00000001",
            "assigned_to_email": "carlos.rodriguez@atlas.com",
            "list_name": "Completed",
            "board": "Design",
        }
    ],
    "customers": [{"customer_id": "00000001", "customer_name": "Al", "status": "Lead", "product_interest": "Software"}],
}
"""The records of the office that the calls are about, without the hundreds of others that Gym has."""

REASONS = {
    "language": ("language:response_language", "change_case:english_"),
    "a property called properties": ('"properties\\": {\\"properties',),
    "no schema": ("nonsense",),
    "standard output is read, not sys.stdout": ("import os\\nos.write", "open(0)"),
}
"""Reasons why a reward may differ, and marks of such an answer, as docs/environments.md lists them."""


def reason(answer: Answer) -> str:
    said = f"{answer.row} {answer.reply!r}"
    return next((name for name, parts in REASONS.items() if any(part in said for part in parts)), "")


@pytest.mark.parametrize("server", ["instruction_following", "mcqa", "structured_outputs"])
def test_rewards_are_gym_s(server: str):
    mine = [answer for answer in answers() if answer.server == server]
    differ = [answer for answer in mine if reward(answer) != answer.gym]
    assert len(mine) > 100 and [answer for answer in differ if not reason(answer)] == []
    # Languages of a few words are a guess on both sides.
    assert len(differ) < len(mine) / 20


def test_offices_end_in_gym_s_state(tmp_path: Path):
    (tmp_path / "tables.json").write_text(json.dumps(TABLES))
    mine = [answer for answer in answers() if answer.server == "workplace_assistant"]
    assert len(mine) > 70
    assert [answer for answer in mine if reward(answer, str(tmp_path / "tables.json")) != answer.gym] == []


@pytest.mark.parametrize(
    ("text", "by_rules", "by_punkt"),
    [
        ("Dr. Lee met Mr. Smith at 5.30. He left!", 2, 2),
        ("Wait... what? See x.com, e.g. here.", 3, 3),
        ('"Is it so?" she said. (Yes.)\nNo', 4, 4),
        ("U.S. law. I know. Acme Inc. It grew.", 4, 4),
        ("", 0, 0),
    ],
)
def test_sentences(text: str, by_rules: int, by_punkt: int):
    """Counts of Gym's two splitters, with NLTK 3.10."""
    assert (len(ruled_sentences(text)), len(sentences(text))) == (by_rules, by_punkt)


def test_words():
    """Words as NLTK 3.10's `word_tokenize` cuts them."""
    text = "Dr. No said \"it's C#\" -- ok... I cannot, 'tis 1,000 at 10:30 (so)."
    said = "Dr. No said `` it 's C # '' -- ok ... I can not , ' tis 1,000 at 10:30 ( so ) .".split()
    assert tokens(text) == said
