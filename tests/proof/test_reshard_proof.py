# SPDX-License-Identifier: Apache-2.0
"""Schedules of random models between random layouts: every element arrives exactly once, where a direct cut puts it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conversion.families.registry import FAMILIES
from tests.proof.cases import Case
from tests.schedules import drop_copies
from tests.sources import ROOT

NUM_CASES = 10_000
SHORT, CHUNK = 750, 250
"""Cases in every run, the rest in part "proof"; cases that a process takes at a time."""


def wrong_cases(seeds: range) -> list[str]:
    """Faults of the cases of these seeds."""
    wrong = []
    for seed in seeds:
        case = Case(random.Random(seed))
        try:
            faults = case.faults(case.reshard())
        except Exception as error:
            faults = [repr(error)]
        if faults:
            wrong.append(f"seed {seed}: {faults[:3]} in {case}")
    return wrong


@pytest.mark.parametrize(
    "cases", [range(SHORT), pytest.param(range(SHORT, NUM_CASES), marks=pytest.mark.long("proof"))], ids=str
)
def test_every_element_arrives_exactly_once(cases: range):
    chunks = [cases[start : start + CHUNK] for start in range(0, len(cases), CHUNK)]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        wrong = [line for lines in pool.map(wrong_cases, chunks) for line in lines]
    assert wrong == []


def test_the_cases_reach_every_family_and_every_kind_of_schedule():
    cases = [Case(random.Random(seed)) for seed in range(400)]
    assert {str(case.drawn.hf_config["model_type"]) for case in cases} == set(FAMILIES)
    schedules = [case.reshard() for case in cases]
    assert {link for schedule in schedules for link, num_bytes in schedule.link_bytes().items() if num_bytes} == {
        "gpu",
        "node",
        "network",
    }
    assert any(worker.num_turns > 1 for schedule in schedules for worker in schedule.workers.values())
    assert any(case.gpu_of[0] >= case.drawn.world_size for case in cases)
    assert {case.drawn.parallel.vpp for case in cases} == {1, 2}


# The generator's draws are hypothesis's own, so that a failure is shrunk to the smallest model and layout that shows
# it.
@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.randoms(use_true_random=False, note_method_calls=False))
def test_every_element_arrives_in_cases_that_shrink(choose: random.Random):
    case = Case(choose)
    assert case.faults(case.reshard()) == [], case


FINGERPRINTS = """
import random
from tests.proof.cases import Case
print([Case(random.Random(seed)).reshard().fingerprint() for seed in range(40)])
"""


def test_every_process_computes_the_same_schedule():
    # Participants compute it each for itself: nothing may follow from the order of a set of names, which differs
    # between processes.
    printed = [
        subprocess.run(
            [sys.executable, "-c", FINGERPRINTS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert len(printed[0]) > 40 * 64 and printed[0] == printed[1]


def test_a_fingerprint_tells_schedules_apart():
    schedule = Case(random.Random(3)).reshard()
    assert (
        schedule.fingerprint()
        == Case(random.Random(3)).reshard().fingerprint()
        == pickle.loads(pickle.dumps(schedule)).fingerprint()
    )
    found = schedule.classes[0]
    copies = [*found.own, *(copy for source in found.sources for message in source.messages for copy in message.copies)]
    for lost in copies[:3]:
        assert drop_copies(schedule, lambda copy, lost=lost: copy == lost).fingerprint() != schedule.fingerprint()
