# SPDX-License-Identifier: Apache-2.0
import json
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mrl.store.ledger import Ledger, replay
from mrl.store.marks import Mark
from tests.unit.store.conftest import Synced


def test_lineage_survives_a_restart(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.roll_back(0)
    for step in (1, 2, 3):
        ledger.take(step, [(0, f"a:{step}")])
        ledger.train(step, [(0, f"a:{step}")])
    ledger.take(4, [(0, "a:4")])
    again = Ledger(path)
    assert again.state.trained == {1: ((0, "a:1"),), 2: ((0, "a:2"),), 3: ((0, "a:3"),)}
    assert again.state.taken == {(0, "a:4"): 4}


def test_an_event_is_on_disk_when_the_call_returns(tmp_path: Path, synced: Synced):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    events: list[Callable[[], None]] = [
        lambda: ledger.take(1, [(0, "a")]),
        lambda: ledger.train(1, [(0, "a")]),
        lambda: ledger.take(2, [(0, "b")]),
        lambda: ledger.roll_back(1),
    ]
    for number, event in enumerate(events, start=1):
        event()
        assert len(synced.calls) == number
        assert synced.calls[-1] == (ledger.path, ledger.path.stat().st_size)


def test_rolled_back_steps_are_asked_again(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for step in (1, 2, 3):
        ledger.take(step, [(0, f"a:{step}")])
        ledger.train(step, [(0, f"a:{step}")])
    ledger.roll_back(1)
    ledger.take(2, [(0, "a:2")])
    ledger.train(2, [(0, "a:2")])
    events = [json.loads(line)["event"] for line in ledger.path.read_text().splitlines()]
    assert events == ["taken", "trained"] * 3 + ["rolled_back", "taken", "trained"]
    assert sorted(replay(ledger.path).trained) == [1, 2]


def test_a_half_written_line_never_happened(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.take(1, [(0, "a:1")])
    with ledger.path.open("a") as file:
        file.write('{"event": "trai')
    again = Ledger(ledger.path)
    assert again.state.trained == {} and again.state.taken
    again.train(1, [(0, "a:1")])
    assert list(replay(ledger.path).trained) == [1]


def test_prompts_may_be_taken_ahead_and_consumed_in_another_order(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.take(1, [(0, "a"), (0, "b"), (0, "c"), (0, "d")])
    ledger.train(1, [(0, "c")], dropped=[(0, "a")])
    ledger.take(2, [(0, "e")])
    ledger.train(2, [(0, "b"), (0, "e")])
    state = replay(ledger.path)
    assert state.trained == {1: ((0, "c"),), 2: ((0, "b"), (0, "e"))} and state.dropped == {1: ((0, "a"),)}
    assert state.consumed == {(0, name) for name in "abce"} and list(state.taken) == [(0, "d")]
    ledger.roll_back(1)
    assert ledger.state.consumed == {(0, "a"), (0, "c")} and ledger.state.taken == {}
    assert replay(ledger.path) == ledger.state
    ledger.take(2, [(0, "d"), (0, "b")])


def taken(step: int, *names: str) -> dict:
    return {"event": "taken", "step": step, "prompts": [[0, name] for name in names]}


def trained(step: int, *names: str) -> dict:
    return {"event": "trained", "step": step, "prompts": [[0, name] for name in names]}


@pytest.mark.parametrize(
    "events",
    [
        [trained(1, "a")],
        [taken(2, "a")],
        [taken(1, "a"), taken(1, "a")],
        [taken(1, "a"), trained(1, "b")],
        [taken(1, "a"), trained(1, "a"), trained(1)],
        [taken(1, "a", "b"), trained(1, "a"), trained(2, "a")],
        [taken(1, "a"), trained(1, "a"), taken(2, "a")],
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
    ledger.train(1, [(0, "a:1")])
    with pytest.raises(RuntimeError, match="trained step 1, .* step 5"):
        ledger.roll_back(5)


def flip(file: Path, seed: int) -> None:
    """One bit of its content."""
    content, rng = bytearray(file.read_bytes()), random.Random(seed)
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def write(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(change(file.read_bytes()))


@pytest.mark.parametrize(
    "lose",
    [
        *[partial(flip, seed=seed) for seed in range(30)],
        write(lambda content: content.replace(b"a:1", b"a:7")),
        write(lambda content: b"".join(content.splitlines(keepends=True)[:3])),
        write(lambda content: content[: len(content) // 2]),
        write(lambda content: content + b"[" * 100_000 + b"\n"),
        write(lambda content: content + b"7\n"),
        lambda file: (file.unlink(), file.mkdir()),
        lambda file: (file.unlink(), file.symlink_to("/proc/self/mem")),
        Path.unlink,
    ],
)
def test_what_is_damaged_or_lost_is_restored_from_the_copy_and_stays_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lose: Callable[[Path], object]
):
    path, copy = tmp_path / "ledger.jsonl", tmp_path / "copy.jsonl"
    ledger = Ledger(path)
    ledger.take(1, [(0, "a:1"), (0, "b:1")])
    ledger.train(1, [(0, "a:1")], dropped=[(0, "b:1")])
    ledger.take(2, [(0, "a:2")])
    ledger.train(2, [(0, "a:2")])
    mark = Mark("run", 2, "save")
    ledger.copy_to(copy, mark)
    ledger.save(mark)
    expected = replay(copy)
    assert expected == ledger.state
    ledger.take(3, [(0, "a:3")])
    lose(path)
    for attempt in (1, 2, 3):
        caplog.clear()
        again = Ledger(path)
        assert not again.find_obstacle(2, copy)
        again.roll_back(2, copy)
        assert (again.state, replay(path)) == (expected, expected)
        # A flip in what was only taken, or in the end of the last line, is gone with that.
        assert sum("; restored from " in line for line in caplog.messages) <= (attempt == 1)
        again.take(3, [(0, "a:3")])


def test_what_the_disk_has_no_room_for_is_written_later_and_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.take(1, [(0, "a")])
    whole, write = path.read_bytes(), os.write
    with monkeypatch.context() as patch:
        # The kernel writes what there is room for, and says how much that was.
        patch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:7]))
        ledger.train(1, [(0, "a")])
        ledger.take(2, [(0, "b")])
        with pytest.raises(OSError, match="No space left"):
            ledger.flush()
    assert path.read_bytes() == whole and list(ledger.state.trained) == [1]
    ledger.flush()
    assert replay(path) == ledger.state
