"""Schedules of random models between random layouts: every element arrives exactly once, where a direct cut puts it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
from concurrent.futures import ProcessPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conversion.families.registry import FAMILIES
from tests.proof.cases import Case

NUM_CASES = 10_000
CHUNK = 250


def wrong_cases(seeds: range) -> list[str]:
    """What is wrong with the cases of these seeds."""
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


@pytest.mark.timeout(590)
def test_every_element_arrives_exactly_once():
    chunks = [range(start, start + CHUNK) for start in range(0, NUM_CASES, CHUNK)]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        wrong = [line for lines in pool.map(wrong_cases, chunks) for line in lines]
    assert wrong == []


def test_the_cases_reach_every_family_and_every_kind_of_schedule():
    cases = [Case(random.Random(seed)) for seed in range(400)]
    assert {str(case.drawn.hf_config["model_type"]) for case in cases} == set(FAMILIES)
    schedules = [case.reshard() for case in cases]
    assert {link for schedule in schedules for link, num_bytes in schedule.link_bytes().items() if num_bytes} == {"unit", "node", "network"}
    assert any(assignment.timetable.stride > 1 for schedule in schedules for assignment in schedule.assignments.values())
    assert any(case.unit_of[0] >= case.drawn.world_size for case in cases)
    assert {case.drawn.parallel.vpp for case in cases} == {1, 2}


# The generator's draws are hypothesis's own, so that a failure is shrunk to the smallest model and layout that shows it.
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.randoms(use_true_random=False, note_method_calls=False))
def test_every_element_arrives_in_cases_that_shrink(choose: random.Random):
    case = Case(choose)
    assert case.faults(case.reshard()) == [], case


def test_the_same_layouts_give_the_same_schedule():
    schedules = [Case(random.Random(3)).reshard() for _ in range(2)]
    assert schedules[0] == schedules[1]


def test_parts_survive_pickling():
    for seed in range(5):
        schedule = Case(random.Random(seed)).reshard()
        for part in (schedule.rank_part(0), schedule.worker_part(0)):
            assert pickle.loads(pickle.dumps(part)) == part
