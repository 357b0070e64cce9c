# SPDX-License-Identifier: Apache-2.0
"""Objects that the user names by a path are imported before anything starts, and an error names the signature."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import cast

import pytest

from mrl.config.load import load_config
from mrl.config.own import AGENT, ESTIMATOR, LOSS, PROCESSOR, Kind, bind, find
from mrl.config.rules.plausible import find_doubts
from mrl.data.prompts import idle_parts
from tests.sources import ROOT
from tests.unit.config.problems import problems_of
from tests.waiting import HANG_S

MODULE = """
from mrl.api import Sink

def swapped(groups, rewards): ...
def two(a, b): ...
def three(a, b, c): ...
def five(a, b, c, d, e): ...
def one(row): ...
async def goes(client, row): ...
async def alone(row): ...
def four(tokens, ratio_T, clipped_ratio_T, config): ...
def judges(gold, response, prompt): ...
def coloured(response, colour): ...
def ranks(rewards, group=None, scale=1.0): ...
def clips(tokens, clipped_ratio=0.2): ...
def plain(tokens, ratio_T):
    if tokens.advantages_T is None:
        return -ratio_T
    return -tokens.advantages_T * ratio_T
def both(tokens, ratio_T):
    def loss(ratio_T):
        return -tokens.advantages_T * ratio_T
    return loss(ratio_T), ratio_T > 2
async def asks(client, rows=()): ...
class NoArguments: ...
class NoClose:
    def __init__(self, config, run): ...
    def log(self, metrics, step): ...
    def log_host(self, metrics, seconds): ...
    def log_samples(self, samples, step): ...
class Good(Sink):
    def __init__(self, config, run): ...
class Swapped(Sink):
    def __init__(self, run, config): ...
    def log(self, step, metrics): ...
class Renamed(Sink):
    def __init__(self, config, run): ...
    def log(self, values, step): ...
number = 3
"""

FITTING = [
    "grpo.adv_estimator.name=things_of_mine:swapped",
    "grpo.adv_estimator.name=things_of_mine.swapped",
    "loss_fn.token_loss=things_of_mine:four",
    "loss_fn.token_loss=things_of_mine:both",
    "loss_fn.token_loss=mrl.algo.losses:clipped_surrogate",
    "data.default.processor=things_of_mine:one",
    "data.train.processor=things_of_mine.one",
    "logger.own=[things_of_mine:Good]",
    "++env.own.functions.mine=things_of_mine.judges",
]
WRONG = [
    (
        "grpo.adv_estimator.name=grop",
        "no such estimator; use one of grpo, gdpo, reinforce_plus_plus, opd, or package.module:name",
    ),
    (
        "grpo.adv_estimator.name=things_of_mine:one",
        "takes (row), and mrl has no row; write def one(rewards, groups) -> list[list[float]]",
    ),
    (
        "grpo.adv_estimator.name=no_such_module:f",
        "cannot be imported (ModuleNotFoundError: No module named 'no_such_module'); write",
    ),
    ("grpo.adv_estimator.name=things_of_mine:number", "is a int, not a function or class"),
    (
        "loss_fn.token_loss=things_of_mine:two",
        "write def two(tokens, ratio_T, clipped_ratio_T, config) -> tuple[Tensor, Tensor]",
    ),
    ("loss_fn.token_loss=things_of_mine:plain", "it returns one value, and a loss two tensors: each token's loss"),
    ("loss_fn.token_loss=things_of_mine:Good", "is a class; write def Good(tokens, ratio_T, clipped_ratio_T, config)"),
    (
        "data.default.processor=things_of_mine:five",
        "takes (a, b, c, d, e), and mrl has no a, b, c, d, e; write def five(row) -> dict",
    ),
    ("logger.own=[things_of_mine:one]", "is a function; write class one with __init__(self, config, run)"),
    ("logger.own=[things_of_mine:NoArguments]", "write class NoArguments with __init__(self, config, run)"),
    ("logger.own=[things_of_mine:NoClose]", "has no close(); write a method of that name, or inherit mrl.api.Sink"),
    (
        "++env.own.functions.mine=things_of_mine:three",
        (
            "takes (a, b, c), nothing of response, turns, solution_str; write def three(prompt, response, "
            "reference_answer) -> float, or with"
        ),
    ),
    ("++env.own.functions.mine=things_of_mine:no_such", "cannot be imported (AttributeError"),
    ("++env.own.functions.mine=things_of_mine:no_such", "things_of_mine.py has swapped, two, three, five, one, "),
    ("++env.own.functions.mine=things_of_mine.no_such", "things_of_mine.py has swapped, two, three, five, one, "),
    ("++env.own.functions.mine=things_of_yours:one", "start the run in the module's folder"),
]


@pytest.fixture
def things(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workplace / "things_of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(workplace))


@pytest.mark.parametrize("override", FITTING)
def test_what_fits_is_taken(things: None, override: str):
    assert problems_of(override) == []


@pytest.mark.parametrize(("override", "message"), WRONG)
def test_what_does_not_fit_is_refused_by_its_signature(things: None, override: str, message: str):
    (problem,) = problems_of(override)
    assert message in problem
    key, _, path = override.removeprefix("++").partition("=")
    assert problem.startswith(f"{key}={path.strip('[]')}: ")


TOLD = {
    "tokens": "T",
    "ratio_T": "r",
    "clipped_ratio_T": "c",
    "config": "f",
    "rewards": [1.0],
    "groups": ["g"],
    "row": {"a": 1},
}


@pytest.mark.parametrize(
    ("function", "kind", "expected"),
    [
        (
            lambda tokens, clipped_ratio_T, ratio_T, config: (tokens, clipped_ratio_T, ratio_T, config),
            LOSS,
            ("T", "c", "r", "f"),
        ),
        (
            lambda ratio_T, tokens, **rest: (ratio_T, tokens, *sorted(rest)),
            LOSS,
            ("r", "T", "clipped_ratio_T", "config"),
        ),
        (lambda config, tokens, ratio_T, /: (config, tokens, ratio_T), LOSS, ("f", "T", "r")),
        (lambda groups, rewards, weight=2: (groups, rewards, weight), ESTIMATOR, (["g"], [1.0], 2)),
        (lambda example: example, PROCESSOR, {"a": 1}),
        (lambda example, tokenizer: None, PROCESSOR, "and mrl has no example, tokenizer"),
        (lambda tokens, ratios, clipped, config: None, LOSS, "and mrl has no ratios, clipped"),
        (lambda *args: None, ESTIMATOR, "functools.wraps"),
        (lambda: None, PROCESSOR, "nothing of row"),
        (dict, PROCESSOR, "is a class"),
        (getattr, ESTIMATOR, "takes|has no signature"),
    ],
)
def test_every_hook_gets_values_by_name_or_is_refused(function: Callable[..., object], kind: Kind, expected: object):
    told = {name: TOLD[name] for name in kind.parameters}
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            bind(function, kind)
    else:
        assert bind(function, kind)(**told) == expected


def test_an_agent_gets_its_client_and_row_in_any_order():
    async def agent(row: object, client: object) -> object:
        return client, row

    hook = cast(Callable[..., Coroutine[None, None, object]], bind(agent, AGENT))
    assert asyncio.run(hook(client="c", row={"a": 1})) == ("c", {"a": 1})


def test_a_logger_is_called_by_keyword(things: None):
    assert problems_of("logger.own=[things_of_mine:Swapped]") == []
    (problem,) = problems_of("logger.own=[things_of_mine:Renamed]")
    assert "has no log(metrics, step)" in problem


def test_a_console_script_finds_modules_of_the_working_directory(tmp_path: Path):
    (tmp_path / "of_this_folder.py").write_text("def f(): ...")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "script.py").write_text(
        "from mrl.config.own import find; print(find('of_this_folder:f').__name__)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "bin/script.py"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert result.stdout == "f\n", result.stderr


@pytest.mark.parametrize(
    ("path", "file", "source"),
    [
        ("tokenize:f", "tokenize.py", "def f(): ..."),
        ("yaml:f", "yaml.py", "def f(): ..."),
        ("time:f", "time.py", "def f(): ..."),
        ("conversion.mine:f", "conversion/__init__.py", ""),
        ("of_mine_random:f", "random.py", "def f(): ..."),
    ],
)
def test_a_file_that_bears_another_modules_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, file: str, source: str
):
    """The config names the file, or names a function whose file imports it."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(source)
    (tmp_path / "of_mine_random.py").write_text("def f():\n    import random")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    name = Path(file).parts[0].removesuffix(".py")
    with pytest.raises(ValueError, match=f"needs {tmp_path / file}, and there is another module '{name}' .*: rename"):
        find(path)


@pytest.mark.parametrize(
    ("override", "parameter", "nearest"),
    [
        ("grpo.adv_estimator.name=things_of_mine:ranks", "group", "groups"),
        ("loss_fn.token_loss=things_of_mine:clips", "clipped_ratio", "clipped_ratio_T"),
        ("++env.own.agents.mine=things_of_mine:asks", "rows", "row"),
    ],
)
def test_a_parameter_that_keeps_its_default_is_doubted(things: None, override: str, parameter: str, nearest: str):
    """Hooks other than rewards, whose parameters may be columns of rows, as tests/unit/test_reward.py shows."""
    said = [doubt for doubt in find_doubts(load_config("grpo_tiny.yaml", [override])) if "things_of_mine" in doubt]
    text = f"{parameter} keeps its default, as it is no name of mrl's; the nearest of them is {nearest}"
    assert [text in doubt for doubt in said] == [True]


def test_a_function_that_no_row_asks_for_is_doubted(things: None):
    settings = ["++env.own.functions.mine=things_of_mine.judges", "++env.own.agents.other=things_of_mine:goes"]
    others = ["++env.remote.far=http://127.0.0.1:1/", "++env.verifiers.sums=python3"]
    config = load_config("grpo_tiny.yaml", settings + others)
    function, agent, remote, library = idle_parts(config, config.data.train_sets)
    assert function.startswith(
        "env.own.functions.mine=things_of_mine.judges: none of the first rows has the environment"
    )
    assert agent.endswith(" but math; data.default.env_name=other gives it all rows that name none")
    assert remote.startswith("env.remote.far=http") and library.endswith("data_path=verifiers:sums asks its rows")
    asked = load_config("grpo_tiny.yaml", [*settings[:1], "data.default.env_name=mine"])
    assert idle_parts(asked, asked.data.train_sets) == []


VLLM = "policy.generation.vllm_cfg"
CHAT = f"{VLLM}.http_server_serving_chat_kwargs"
SERVED = f"{VLLM}.expose_http_server=true"
TWO = "env.own.agents.mine=things_of_mine:two: is no async function; write async def two(client, row) -> float"
ALONE = (
    "env.own.agents.mine=things_of_mine:alone: takes (row), nothing of client; write async def alone(client, "
    "row) -> float"
)


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (["++env.own.agents.mine=things_of_mine:goes", "data.default.env_name=mine", SERVED], []),
        (["++env.remote.mine=https://host:1/run", "data.default.env_name=mine", SERVED], []),
        (["++env.own.agents.mine=things_of_mine:two", SERVED], [TWO]),
        (["++env.own.agents.mine=things_of_mine:alone", SERVED], [ALONE]),
        (["++env.own.agents.mine=goes", SERVED], ["env.own.agents.mine=goes: cannot be imported"]),
        (
            ["++env.own.agents.math=things_of_mine:goes", SERVED],
            ["env.own.agents.math=things_of_mine:goes: a built-in environment has"],
        ),
        (
            ["++env.remote.mine=http://host:99999/x", SERVED],
            ["env.remote.mine=http://host:99999/x: an agent's server has an address"],
        ),
        (["++env.remote.mine=https:///x", SERVED], ["env.remote.mine=https:///x: an agent's server has an address"]),
        (
            ["++env.remote.mine=host:1", SERVED],
            ["env.remote.mine=host:1: an agent's server has an address that begins with http"],
        ),
        (["++env.remote.mine=http://host:1"], []),
        (
            [f"{VLLM}.expose_http_server=false", "++env.remote.mine=http://host:1"],
            ["policy.generation.vllm_cfg.expose_http_server=false: env.remote names agents"],
        ),
        (
            [
                "++env.remote.mine=http://host:1",
                SERVED,
                "policy.router_replay.enabled=true",
                "policy.generation.colocated.enabled=false",
                "grpo.async_grpo.enabled=true",
                "grpo.malformed_thinking_advantage=-1",
                "reward_penalties.penalize_empty_final_answer=true",
            ],
            [],
        ),
        (
            [f"{CHAT}.tool_parser=pythonic", "grpo.invalid_tool_call_advantage=-1"],
            [f"grpo.invalid_tool_call_advantage=-1.0: nobody reads calls in the format of {CHAT}.tool_parser=pythonic"],
        ),
    ],
)
def test_agents(things: None, overrides: list[str], messages: list[str]):
    problems = problems_of(*overrides)
    assert len(problems) == len(messages), problems
    assert all(message in problem for message, problem in zip(messages, problems, strict=True)), problems


def test_an_address_is_told_where_it_belongs():
    with pytest.raises(ValueError, match=r"is an address; write package\.module:name, or env\.remote\.NAME=URL"):
        find("http://127.0.0.1:9/run")
