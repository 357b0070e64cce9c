# SPDX-License-Identifier: Apache-2.0
import time
from pathlib import Path

from mrl import spans
from mrl.ops.view import timeline
from mrl.ops.view.timeline import chosen, list_windows, memory_by_phase, read_timelines
from tests.unit.ops.view.runs import event, write_all_spans, write_spans


def lanes_of(run: Path, step: int) -> dict[str, list[list]]:
    return {lane["name"]: lane["spans"] for lane in read_timelines([list_windows(run)[step]])[str(step)]["lanes"]}


def test_a_step_has_the_spans_of_all_processes_in_it(tmp_path: Path):
    write_all_spans(tmp_path, num_steps=3)
    found = lanes_of(tmp_path, 2)
    assert list(found) == ["driver", "policy rank 0", "policy rank 1", "engine 0", "rewards: math worker 0"]
    assert found["driver"] == [
        ["step", 0, 900_000, {"step": 2}],
        ["generation", 0, 500_000, {}],
        ["wait: train_step", 600_000, 300_000, {"calls": 2}],
    ]
    assert [span[:3] for span in found["engine 0"]] == [["generate", 0, 450_000]] and found["rewards: math worker 0"][
        0
    ][3] == {"rollouts": 8}
    assert list(lanes_of(tmp_path, 0)) == ["driver"], "the start has what came before the first step"


def test_what_the_writer_writes_is_read(tmp_path: Path):
    spans.record_in(tmp_path / f"logs/exp_001/actors/driver{spans.SUFFIX}")
    spans.add("wait: build", time.monotonic() - 1)
    begun = time.monotonic()
    with spans.span("generation"):
        pass
    spans.add("step", begun, step=7)
    spans.stop()
    assert [span[0] for span in lanes_of(tmp_path, 7)["driver"]] == ["step", "generation"]


def test_the_newest_step_of_a_running_run_has_nothing_of_the_one_that_follows(tmp_path: Path):
    steps = [
        event("step", 1, 2, step=1),
        event("logging", 3, 0.1),
        event("step", 3.2, 2, step=2),
        event("logging", 5.2, 0.1),
    ]
    write_spans(tmp_path, "driver", [*steps, event("generation", 5.4, 3)])
    windows = list_windows(tmp_path)
    assert [(window.begin, window.end) for window in windows.values()] == [
        (1_000_000, 3_200_000),
        (3_200_000, 5_300_000),
    ]


def test_a_step_that_ran_again_has_its_last_attempt(tmp_path: Path):
    write_all_spans(tmp_path, num_steps=4)
    write_spans(tmp_path, "driver", [event("step", 100, 2.0, step=3)], attempt=2)
    windows = list_windows(tmp_path)
    assert [(step, window.folder.parent.name) for step, window in windows.items()] == [
        (0, "exp_001"), (1, "exp_001"), (2, "exp_001"), (3, "exp_002"), (4, "exp_001")]  # fmt: skip
    assert windows[3].end - windows[3].begin == 2_000_000


def test_the_start_is_that_of_the_run_also_after_an_attempt_that_found_it_complete(tmp_path: Path):
    write_all_spans(tmp_path, num_steps=2)
    write_spans(tmp_path, "driver", [event("import", 100, 2.0)], attempt=2)
    assert list_windows(tmp_path)[0].folder.parent.name == "exp_001"
    write_spans(tmp_path, "policy-rank-0", [event("load", 101, 2.0)], attempt=2)
    assert list_windows(tmp_path)[0].folder.parent.name == "exp_002"


def test_a_long_file_is_read_where_the_step_is(tmp_path: Path):
    """The same spans as from a file that is read whole, though each step is a thousandth of it."""
    write_all_spans(tmp_path, num_steps=2_000)
    assert (tmp_path / "logs/exp_001/actors/policy-rank-0.trace.json").stat().st_size > 8 * timeline.AHEAD_BYTES
    for step in (1, 2, 777, 1_999, 2_000):
        found = lanes_of(tmp_path, step)
        assert [len(found[name]) for name in ("driver", "policy rank 1", "engine 0", "rewards: math worker 0")] == [
            3,
            1,
            1,
            1,
        ], step


def test_work_across_steps_is_in_each_of_them(tmp_path: Path):
    write_all_spans(tmp_path, num_steps=4)
    write_spans(tmp_path, "policy-rank-0", [event("write", 1.5, 2.0, "checkpoint writer")])
    assert [len(lanes_of(tmp_path, step).get("policy rank 0: checkpoint writer", [])) for step in (1, 2, 3, 4)] == [
        1,
        1,
        1,
        0,
    ]
    assert lanes_of(tmp_path, 2)["policy rank 0: checkpoint writer"][0][1:3] == [-500_000, 2_000_000]


def test_a_page_holds_the_start_the_first_the_slowest_and_the_newest_steps(tmp_path: Path):
    ends = [1.0, 1.9, 2.8, 5.0, 5.9, 6.8, 9.0, 9.9, 10.8, 11.7, 12.6]
    steps = [
        event("step", begin, end - begin, step=index + 1)
        for index, (begin, end) in enumerate(zip([0.5, *ends], ends, strict=False))
    ]
    write_spans(tmp_path, "driver", [event("wait: build", 0.1, 0.3), *steps])
    assert [window.step for window in chosen(list_windows(tmp_path))] == [0, 1, 4, 7, 9, 10, 11]


def test_lanes_and_spans_are_bounded_and_processes_in_order(tmp_path: Path):
    write_spans(tmp_path, "driver", [event("step", 1, 1, step=1)])
    for rank in range(40):
        write_spans(tmp_path, f"policy-rank-{rank}", [event("x", 1 + index / 1000, 0.0005) for index in range(500)])
    (found,) = read_timelines(list(list_windows(tmp_path).values())).values()
    assert [lane["name"] for lane in found["lanes"]] == [
        "driver",
        *(f"policy rank {rank}" for rank in range(timeline.MAX_LANES)),
    ]
    assert found["left_out"] == 8 and len(found["lanes"][1]["spans"]) == timeline.MAX_SPANS


def test_the_lanes_of_a_process_are_bounded_and_in_order(tmp_path: Path):
    write_spans(tmp_path, "driver", [event("step", 1, 1, step=1)])
    write_spans(
        tmp_path, "rewards", [event("score", 1.5, 0.1, f"math worker {index}") for index in reversed(range(40))]
    )
    (found,) = read_timelines(list(list_windows(tmp_path).values())).values()
    assert [lane["name"] for lane in found["lanes"]] == [
        "driver",
        *(f"rewards: math worker {i}" for i in range(timeline.MAX_LANES)),
    ]
    assert found["left_out"] == 8


def test_the_worst_rank_counts_in_each_phase(tmp_path: Path):
    write_all_spans(tmp_path, num_steps=2)
    measured = memory_by_phase(read_timelines(list(list_windows(tmp_path).values())))
    assert measured == {
        "train": {"host_bytes": 10**9, "gpu_peak_bytes": 10**9, "gpu_used_bytes": 4 * 10**9},
        "generate": {"engine_host_bytes": 3 * 10**9, "gpu_used_bytes": 10**9},
    }


def test_torn_and_absent_files_give_what_is_whole(tmp_path: Path):
    assert list_windows(tmp_path) == {}
    write_all_spans(tmp_path, num_steps=2)
    path = tmp_path / "logs/exp_001/actors/engine-0.trace.json"
    path.write_bytes(path.read_bytes()[:-9] + b'\n{"ts":1000000,"dur":900000,"ph":"X","name":},\n')
    assert "engine 0" not in lanes_of(tmp_path, 2) and len(lanes_of(tmp_path, 1)["engine 0"]) == 1
