# SPDX-License-Identifier: Apache-2.0
import functools
import inspect

import numpy as np
import pytest
import torch

from mrl.envs.own import Log, make, outcome, values_of
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


def by_name(turns, row, weight=2.0):
    return weight * len(turns) + row["level"]


def unknown(colour, shade):
    return 0.0


@pytest.mark.parametrize(("name", "reward"), [("techpulse_reward", 1.0), ("compute_score", 0.5), ("by_name", 7.0)])
def test_parameters_get_what_their_names_say(name: str, reward: float):
    assert make(f"{__name__}:{name}")(TASK).reward == reward


def test_entries_of_a_dict_beside_the_reward_are_components():
    assert make(f"{__name__}:compute_score")(TASK).components == {"acc": 1.0, "level": 3.0}


@pytest.mark.parametrize(
    ("function", "message"), [("unknown", "colour"), ("no_such", "no_such"), ("TASK", "not a function")]
)
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


@pytest.mark.parametrize(
    "returned", [None, "1", (1.0,), np.array(["a"]), {}, {"extracted": "a"}, {"reward": None}, {"form": "x"}]
)
def test_returned_values_that_are_no_reward(returned: object):
    with pytest.raises(TypeError):
        outcome(returned)


VERL_ROW = (
    '{"data_source": "nq", "reward_model": {"ground_truth": {"target": ["Bob"]}}, "extra_info": {"index": '
    '7, "level": 3}}'
)


def of_verl(solution_str, ground_truth, method="strict", extra_info=None):
    assert extra_info is not None
    return {
        "score": 1.0,
        "acc": ground_truth["target"] == ["Bob"] and method == "strict",
        "pred": "42",
        "index": extra_info["index"],
        "rest": [],
    }


def keywords(data_source, solution_str, *, ground_truth, extra_info):
    return {"score": 1.0, "level": extra_info["level"], "is_gold": ground_truth == "gold"}


async def later(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


def test_verls_functions_get_verls_values_by_name():
    found = make(f"{__name__}:of_verl")(Task(("Bob",), "", row=VERL_ROW))
    assert found == Outcome(1.0, extracted="42", components={"acc": 1.0, "index": 7.0})
    assert make(f"{__name__}:keywords")(TASK).components == {
        "level": 3.0,
        "is_gold": 1.0,
    }  # without extra_info of its own: the row


def test_an_async_reward_is_refused_before_it_judges():
    with pytest.raises(ValueError, match="async"):
        make(f"{__name__}:later")


def nothing_of_the_model(question, answer, gold): ...


def any_order(gold, completion, question):
    return float((gold, completion, question) == ("gold", "last", "what?"))


def positional_only(row, response, prompt="", /):
    return float((row["level"], response, prompt) == (3, "last", "what?"))


def of_trl(completions, solution, level, prompts=None, missing=None, **kwargs):
    """TRL's form: each value is a list, the row's columns too."""
    names = kwargs["data_source"], kwargs["answer"], kwargs["turns"]
    return [
        float(
            (completions, solution, level, prompts, missing, *names)
            == (["last"], ["gold"], [3], ["what?"], None, *EXPECTED)
        )
    ]


EXPECTED = ["gsm8k"], ["gold"], [["first", "last"]]


def of_verifiers(completion, answer, level=0, weight=2.0, target=100):
    """A row's column takes a default's place; one's own default stays where only a synonym speaks for another value."""
    return float((completion, answer, level, weight, target) == ("last", "gold", 3, 2.0, 100))


def logs(completions, log_extra=None, log_metric=None):
    assert log_extra is not None and log_metric is not None
    log_extra("found", ["4"])
    log_metric("length", 4.0)
    return [1.0]


class Judges:
    def __init__(self, right: str = "last"):
        self.right = right

    def __call__(self, reference_answer, response):
        return float((reference_answer, response) == ("gold", self.right))

    def method(self, reference_answer, response):
        return self(reference_answer, response)


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def blind(function):
    return lambda *args, **kwargs: function(*args, **kwargs)


def fixed(response, prompt, reference_answer):
    return float((response, prompt, reference_answer) == ("last", "mine", "gold"))


instance, method = Judges(), Judges().method
wrapped, unnamed = decorated(any_order), blind(any_order)
partial = functools.partial(fixed, prompt="mine")
anonymous = lambda gold, response: float((gold, response) == ("gold", "last"))  # noqa: E731


@pytest.mark.parametrize(
    "name",
    [
        "any_order",
        "positional_only",
        "of_trl",
        "of_verifiers",
        "logs",
        "instance",
        "method",
        "wrapped",
        "partial",
        "anonymous",
    ],
)
def test_every_callable_gets_values_by_the_names_of_its_parameters(name: str):
    assert make(f"{__name__}:{name}")(TASK).reward == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing_of_the_model", "nothing of response, turns"),
        ("unnamed", "functools.wraps"),
        ("Judges", "is a class"),
        ("Task", "is a class"),
    ],
)
def test_a_callable_whose_parameters_say_nothing_is_refused(name: str, message: str):
    with pytest.raises(ValueError, match=message):
        make(f"{__name__}:{name}")


def test_a_c_function_gets_values_if_it_names_them():
    with pytest.raises(ValueError, match="no signature that Python can read|nothing of response"):
        make("builtins:max")
    with pytest.raises(ValueError, match="nothing of response"):
        make("builtins:len")


def test_a_row_s_column_is_meant_where_the_row_has_one_beside_the_answer():
    task = Task(("last",), "42", "what?", '{"solution": "long text", "prediction": "no"}')

    def reward(solution, prediction, answer): ...

    values = values_of(task, Log())
    assert {name: values[name] for name in inspect.signature(reward).parameters} == {
        "solution": "long text", "prediction": "last", "answer": "42",
    }  # fmt: skip


def test_what_a_reward_logs_goes_beside_its_reward():
    found = make(f"{__name__}:logs")(TASK)
    assert (found.columns, found.metrics, found.components) == ({"found": "4"}, {"length": 4.0}, {})
    assert outcome({"reward": 1, "why": "short", "pred": "4"}) == Outcome(1.0, "4", columns={"why": "short"})
