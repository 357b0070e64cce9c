# SPDX-License-Identifier: Apache-2.0
"""Public parts of a loop, and refusals of `mrl.api` before anything starts; tests/stack shows what it trains."""

from __future__ import annotations

import ast
import asyncio
import re
import shutil
import signal
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mrl import api
from mrl.api import check_sequences
from mrl.exit_codes import DONE
from mrl.loop.rollouts import RolloutSupplier
from mrl.loop.run import Run, Step
from mrl.signals import ENDED_EARLY, LISTENER
from mrl.types import RunState, TrainSequence
from tests.sources import ROOT
from tests.unit.algo.groups import group
from tests.unit.stories import as_story


def test_the_built_in_loop_is_made_of_public_parts_that_the_page_explains():
    tree, page = ast.parse((ROOT / "mrl" / "train.py").read_text()), (ROOT / "docs" / "extend" / "loop.md").read_text()
    parts = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    used = [name for name in parts if name.startswith("loop.")]
    assert used == ["loop.take_batches", "loop.policy.update", "loop.refit.run"]
    assert [name for name in used if f"`{name}(" not in page] == []
    of_run = {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("run.")
    }
    assert of_run == {"run.is_over"}, "the rest is behind the public parts"


KINDS = {"group": api.RolloutGroup, "prompt": api.Prompt, "rollout": api.RolloutInfo, "verdict": api.Verdict}


@pytest.mark.parametrize("name", KINDS)
def test_the_page_has_every_field_of_what_a_loop_gets(name: str):
    (_, table) = (ROOT / "docs" / "extend" / "loop.md").read_text().split("| Field | What it is |\n|---|---|\n")
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith(f"| `{name}.")]
    shown = [field for row in rows for field in re.findall(r"`\w*\.(\w+)`", row)]
    kind = KINDS[name]
    properties = [key for key, value in vars(kind).items() if isinstance(value, property)]
    assert sorted(shown) == sorted([*(field.name for field in fields(kind) if field.init), *properties])


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "rm"])
@as_story
async def test_an_algorithm_without_rollouts_is_refused_by_name(algorithm: str, tmp_path: Path):
    run_folder = tmp_path / "run"
    refusal = rf"^algorithm={algorithm}: .*run `python -m mrl\.train {algorithm}_tiny\.yaml`, or choose"
    with pytest.raises(ValueError, match=refusal):
        async with api.start(f"{algorithm}_tiny.yaml", [f"checkpointing.checkpoint_dir={run_folder}"]):
            raise AssertionError("it has started")
    assert not run_folder.exists()


@as_story
async def test_a_refused_start_gives_signals_back(workplace: Path):
    shutil.rmtree("prepared/tiny/model")
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="policy.model_name=prepared/tiny/model"):
        async with api.start("grpo_tiny.yaml"):
            raise AssertionError("it has started")
    assert not LISTENER.is_listening and signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("kind", "overrides"), [("text", "grpo.seed=1"), ("dict", {"grpo.seed": 1})])
def test_overrides_in_another_form_are_refused(kind: str, overrides: Any):
    async def start() -> None:
        async with api.start("grpo_tiny.yaml", overrides):
            raise AssertionError("it has started")

    with pytest.raises(ValueError, match=rf"overrides is a {kind}; write a list: \['grpo.seed=1'\]"):
        asyncio.run(start())


def test_sequences_that_cannot_be_trained_are_refused():
    rollout = group([1.0]).rollouts[0]
    good = TrainSequence(rollout, 0.5, True, 1.0)
    check_sequences([good])
    with pytest.raises(ValueError, match=r"sequence 1 \(of .*\) has advantage nan"):
        check_sequences([good, replace(good, advantage=float("nan"))])
    with pytest.raises(ValueError, match=r"advantage \[0.1\]; give one number for the whole rollout"):
        check_sequences([replace(good, advantage=cast(Any, [0.1]))])
    with pytest.raises(ValueError, match=r"entry 0 is a RolloutGroup; loop.rollouts.sequences\(groups\) makes them"):
        check_sequences([group([1.0])])  # pyright: ignore[reportArgumentType]


def test_calls_of_a_loop_come_one_after_the_other():
    loop = api.Loop(cast(Any, None), RunState())
    with (
        loop.alone("policy.train"),
        pytest.raises(RuntimeError, match="engines.sample while policy.train is under way"),
    ):
        with loop.alone("engines.sample"):
            raise AssertionError("it went on")
    with loop.alone("engines.sample"):
        pass


@pytest.mark.parametrize(
    ("step", "is_over", "is_asked", "code", "said"),
    [
        (9, True, False, DONE, "The run is complete"),
        (4, True, False, DONE, "The run is complete"),  # validated well enough
        (4, True, True, ENDED_EARLY, "Ended before the last step"),
        (4, False, False, ENDED_EARLY, "The loop was left after step 4 of 9; the same command goes on"),
    ],
)
def test_a_loop_left_before_its_last_step_is_not_complete(
    step: int, is_over: bool, is_asked: bool, code: int, said: str
):
    budget, saver = SimpleNamespace(is_over=is_asked), SimpleNamespace(lacks=lambda state: state.step == 4)
    run = Run(
        cast(Any, None), cast(Any, None), cast(Any, None), cast(Any, saver), cast(Any, budget), 9, is_over=is_over
    )
    found = api.ending(cast(Any, run), RunState(step=step))
    assert found[0] == code and found[1].startswith(said)
    assert ("would have kept it" in found[1]) == (not is_over)


@as_story
async def test_what_packing_refuses_leaves_the_engines_as_they_are():
    held, groups = [], [group([1.0])]
    stranger = TrainSequence(group([1.0], name="other").rollouts[0], 0.5, True, 1.0)

    async def on_ranks(*_: object) -> dict[str, float]:
        held.append(True)
        return {}

    def pack(*_: object) -> None:
        raise ValueError("a row is too short")

    for teachers in ({}, {"teacher": "t"}):
        supplier = SimpleNamespace(config=SimpleNamespace(teachers=teachers), pack=pack)
        supplier.check_groups = lambda *given, one=supplier: RolloutSupplier.check_groups(cast(Any, one), *given)
        parts = SimpleNamespace(session=SimpleNamespace(on_ranks=on_ranks), supplier=supplier)
        loop = api.Loop(cast(Any, parts), RunState())
        loop.step = Step.after(RunState())
        loop.step.groups = groups
        seen = SimpleNamespace(run=parts, supplier=supplier, alone=loop.alone, step_under_way=loop.step_under_way)
        with pytest.raises(ValueError, match="too short" if not teachers else "of none of the step's groups"):
            await api.Policy(cast(Any, seen)).train([stranger])
    assert not held
