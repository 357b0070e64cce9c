import json
from pathlib import Path

import pytest

from mrl.store.ledger import Ledger, replay


def test_lineage_survives_a_restart(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.roll_back(0)
    for step in (1, 2, 3):
        ledger.take(step, [(0, f"a:{step}")])
        ledger.train(step)
    ledger.take(4, [(0, "a:4")])
    again = Ledger(path)
    assert again.state.trained == {1: ((0, "a:1"),), 2: ((0, "a:2"),), 3: ((0, "a:3"),)}
    assert again.state.taken == (4, ((0, "a:4"),))


def test_rolled_back_steps_are_asked_again(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for step in (1, 2, 3):
        ledger.take(step, [(0, f"a:{step}")])
        ledger.train(step)
    ledger.roll_back(1)
    ledger.take(2, [(0, "a:2")])
    ledger.train(2)
    events = [json.loads(line)["event"] for line in ledger.path.read_text().splitlines()]
    assert events == ["taken", "trained"] * 3 + ["rolled_back", "taken", "trained"]
    assert sorted(replay(ledger.path).trained) == [1, 2]


def test_a_half_written_line_never_happened(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.take(1, [(0, "a:1")])
    with ledger.path.open("a") as file:
        file.write('{"event": "trai')
    again = Ledger(ledger.path)
    assert again.state.trained == {} and again.state.taken is not None
    again.train(1)
    assert list(replay(ledger.path).trained) == [1]


@pytest.mark.parametrize(
    "events",
    [
        [{"event": "trained", "step": 1}],
        [{"event": "taken", "step": 2, "prompts": []}],
        [{"event": "taken", "step": 1, "prompts": []}, {"event": "taken", "step": 1, "prompts": []}],
        [{"event": "taken", "step": 1, "prompts": []}, {"event": "trained", "step": 1}, {"event": "trained", "step": 1}],
        [{"event": "lost"}],
        [{"step": 1}],
    ],
)
def test_gaps_and_duplicates_are_refused_by_line(tmp_path: Path, events: list[dict]):
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    with pytest.raises(ValueError, match=rf"ledger\.jsonl:{len(events)}: "):
        replay(path)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.take(1, [(0, "a:1")])
    ledger.train(1)
    with pytest.raises(RuntimeError, match="1 trained steps, .* step 5"):
        ledger.roll_back(5)
