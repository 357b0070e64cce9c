# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch

from mrl.envs.own import make, outcome
from mrl.envs.task import Outcome, Task

TASK = Task(("first", "last"), "gold", "what?", '{"data_source": "gsm8k", "level": 3}')


def techpulse_reward(prompt, response, reference_answer):
    return float((prompt, response, reference_answer) == ("what?", "last", "gold"))


def compute_score(data_source, solution_str, ground_truth, extra_info={}):  # noqa: B006  (as verl's functions are)
    return {
        "score": 0.5,
        "acc": float((data_source, solution_str, ground_truth) == ("gsm8k", "last", "gold")),
        "level": extra_info["level"],
    }


def other_names(question, answer, gold):
    return float((question, answer, gold) == ("what?", "last", "gold"))


def by_name(turns, row, weight=2.0):
    return weight * len(turns) + row["level"]


def unknown(response, colour):
    return 0.0


@pytest.mark.parametrize(("name", "reward"), [("techpulse_reward", 1.0), ("compute_score", 0.5), ("other_names", 1.0), ("by_name", 7.0)])
def test_parameters_get_what_their_names_say(name: str, reward: float):
    assert make(f"{__name__}:{name}")(TASK).reward == reward


def test_entries_of_a_dict_beside_the_reward_are_components():
    assert make(f"{__name__}:compute_score")(TASK).components == {"acc": 1.0, "level": 3.0}


@pytest.mark.parametrize(("function", "message"), [("unknown", "colour"), ("no_such", "no_such"), ("TASK", "not a function")])
def test_a_function_that_cannot_be_called_is_refused(function: str, message: str):
    with pytest.raises(ValueError, match=message):
        make(f"{__name__}:{function}")


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (1, Outcome(1.0)),
        (np.float32(0.5), Outcome(0.5)),
        (True, Outcome(1.0)),
        (np.bool_(False), Outcome(0.0)),
        (torch.tensor(0.25), Outcome(0.25)),
        ({"score": np.bool_(True), "form": False}, Outcome(1.0, components={"form": 0.0})),
        ({"form": 1, "facts": 0.25}, Outcome(1.25, components={"form": 1.0, "facts": 0.25})),
        ({"reward": 2.0, "form": 1}, Outcome(2.0, components={"form": 1.0})),
        ({"reward": 2.0, "mask_sample": True, "extracted": 3}, Outcome(2.0, "3", flags=("mask_sample",))),
        ({"reward": 0, "observation": "more"}, Outcome(0.0, observation=({"role": "user", "content": "more"},))),
    ],
)
def test_returned_values(returned: object, expected: Outcome):
    assert outcome(returned) == expected


@pytest.mark.parametrize("returned", [None, "1", (1.0,), np.array(["a"]), {}, {"extracted": "a"}, {"reward": None}, {"form": "x"}])
def test_returned_values_that_are_no_reward(returned: object):
    with pytest.raises(TypeError):
        outcome(returned)


VERL_ROW = '{"data_source": "nq", "reward_model": {"ground_truth": {"target": ["Bob"]}}, "extra_info": {"index": 7, "level": 3}}'


def of_verl(solution_str, ground_truth, method="strict", extra_info=None):
    assert extra_info is not None
    return {
        "score": 1.0,
        "acc": ground_truth["target"] == ["Bob"] and method == "strict",
        "pred": "42",
        "index": extra_info["index"],
        "rest": [],
    }


def keywords(data_source, *, ground_truth, extra_info):
    return {"score": 1.0, "level": extra_info["level"], "is_gold": ground_truth == "gold"}


async def later(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


def test_verls_functions_get_verls_values_by_name():
    found = make(f"{__name__}:of_verl")(Task(("Bob",), "", row=VERL_ROW))
    assert found == Outcome(1.0, extracted="42", components={"acc": 1.0, "index": 7.0})
    assert make(f"{__name__}:keywords")(TASK).components == {"level": 3.0, "is_gold": 1.0}  # without extra_info of its own: the row


def test_an_async_reward_is_refused_before_it_judges():
    with pytest.raises(ValueError, match="async"):
        make(f"{__name__}:later")
