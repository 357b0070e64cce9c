# SPDX-License-Identifier: Apache-2.0
"""Environments of verifiers are refused by name before a start, and their data sets become rows.

The library is too much for these tests, and has requirements that vLLM's exclude: here a module of its name makes
environments as the real one does. tests/long/test_verifiers_long.py trains on the real one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mrl.config.errors import ConfigError
from mrl.config.load import load_config
from mrl.config.schema.env import EnvConfig
from mrl.data.verifiers import find_rows
from mrl.inputs import look_at_data
from tests.unit.config.problems import problems_of

LIBRARY = """
import importlib

def load_environment(name, **arguments):
    return importlib.import_module(name).load_environment(**arguments)
"""
ENVIRONMENT = """
class Environment:
    def __init__(self, examples):
        self.examples = examples
        self.eval_dataset = examples[:1] or None

    def get_dataset(self):
        print("loads its data set")
        return self.examples

    def get_eval_dataset(self):
        return self.eval_dataset or self.examples

def load_environment(number: int, split: str = "all"):
    asked = [{"role": "user", "content": "one"}]
    return Environment([{"prompt": asked, "answer": str(n), "info": {"n": n}, "example_id": n} for n in range(number)])
"""
ANY_ARGUMENTS = "def load_environment(**arguments):\n    raise RuntimeError(f'no {arguments}')\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's folder, with the library and two environments."""
    monkeypatch.chdir(tmp_path)
    for name, text in {"verifiers": LIBRARY, "twos": ENVIRONMENT, "any_kind": ANY_ARGUMENTS, "broken": "1 / 0"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def refusal_of(name: str, *, python: str = sys.executable, **arguments: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        find_rows(
            f"verifiers:{name}", EnvConfig(verifiers={name: python}, verifiers_args={name: arguments}), split="train"
        )
    return caught.value


def refusal(name: str, *, python: str = sys.executable, **arguments: object) -> str:
    return str(refusal_of(name, python=python, **arguments))


def test_a_data_set_becomes_rows(folder: Path):
    section = EnvConfig(verifiers={"twos": sys.executable}, verifiers_args={"twos": {"number": 3}})
    rows = [json.loads(line) for line in find_rows("verifiers:twos", section, split="train").read_text().splitlines()]
    asked = [{"role": "user", "content": "one"}]
    assert rows[2] == {
        "prompt": asked,
        "conversation": asked,
        "answer": "2",
        "example": {"answer": "2", "info": {"n": 2}, "example_id": 2},
        "env_name": "twos",
    }
    held_out = find_rows("verifiers:twos", section, split="validation")
    assert len(rows) == 3 and len(held_out.read_text().splitlines()) == 1 and held_out.stem == "twos"


def test_a_data_set_is_not_validated_on_itself(folder: Path):
    section = EnvConfig(verifiers={"twos": sys.executable}, verifiers_args={"twos": {"number": 0}})
    with pytest.raises(ConfigError, match="twos has no data set to validate with; set data.validation=null"):
        find_rows("verifiers:twos", section, split="validation")


def test_arguments_are_compared_with_the_signature(folder: Path):
    assert "load_environment of twos has no argument numbr; write number, use one of number, split" in refusal(
        "twos", numbr=3
    )
    assert "load_environment of twos needs number; give it under env.verifiers_args" in refusal("twos", split="x")
    (fault,) = (caught := refusal_of("any_kind", what=1)).problems
    assert "any_kind.py:2: RuntimeError: no {'what': 1}" in str(caught) and fault.kind == "refused"


def test_what_is_not_installed_is_named(folder: Path, tmp_path: Path):
    assert "has no environment wordle: there is no module wordle" in (said := refusal("wordle"))
    assert f"{sys.executable} -m pip install wordle" in said
    assert "broken cannot be imported: ZeroDivisionError" in refusal("broken")
    assert "no such program on this machine" in refusal("twos", python="/no/such/python")
    (folder / "verifiers.py").unlink()
    said = refusal("another")
    assert f"{sys.executable} has no verifiers; python3 -m venv DIR && DIR/bin/pip install 'verifiers>=" in said
    assert "verifiers==0.4.0 uv for a taskset" in said


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["++env.verifiers.sums=python3", "data.train.data_path=verifiers:sums"], []),
        (["data.train.data_path=verifiers:sums"], ["data.train.data_path=verifiers:sums: env.verifiers has no"]),
        (
            ["++env.verifiers.sums=python3", "data.train.data_path=verifiers:sum"],
            ["data.train.data_path=verifiers:sum: env.verifiers has no environment sum; use verifiers:sums"],
        ),
        (["++env.verifiers_args.sums.n=1"], ["env.verifiers_args.sums={'n': 1}: env.verifiers has no"]),
        (["++env.verifiers.math=python3"], ["env.verifiers.math=python3: a built-in environment has that name"]),
    ],
)
def test_names_fit_together(workplace: Path, overrides: list[str], expected: list[str]):
    problems = problems_of(*overrides)
    assert len(problems) == len(expected)
    for problem, begin in zip(problems, expected, strict=True):
        assert problem.startswith(begin)


def test_a_source_that_no_section_names_is_not_looked_at(workplace: Path):
    config = load_config("grpo_tiny.yaml", ["++env.verifiers.sums=python3", "data.train.data_path=verifiers:sums"])
    config.env.verifiers.clear()
    look = look_at_data(config, is_strict=False)
    assert "data.train: the rows of verifiers:sums" in look.unseen and not look.problems
