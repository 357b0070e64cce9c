# SPDX-License-Identifier: Apache-2.0
"""The command line of `python -m mrl.doctor` and its exit codes, on this host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.ops.doctor import command as doctor
from mrl.ops.doctor import probe


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """Exit code, and the findings by check."""
    code = doctor.main([*arguments, "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["is_ok"] == (code == 0)
    by_check: dict[str, list[dict[str, str]]] = {}
    for finding in printed["findings"]:
        by_check.setdefault(finding["check"], []).append(finding)
    return code, by_check


def test_a_fake_apex_is_a_problem_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "apex").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    (line,) = [number for number, line in enumerate(lines) if line.startswith("apex ")]
    assert f"problem  {tmp_path / 'apex'} is not NVIDIA's Apex" in lines[line]
    assert "-> pip uninstall apex" in lines[line + 1]


def test_what_a_run_needs_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    # Imports of all libraries are tried in the stack suite.
    monkeypatch.setattr(probe, "IMPORTED", ("json",))
    code, findings = said(capsys, "grpo_tiny.yaml", f"policy.model_name={tmp_path}", "data.train.data_path=gone.jsonl")
    assert code == 1
    missing = [finding["found"] for finding in findings["to be provided"]]
    assert any(text.startswith(f"policy.model_name={tmp_path}: no readable config.json") for text in missing)
    assert any(text.startswith("data.train.data_path=gone.jsonl: no such file") for text in missing)
    assert findings["imports"][0]["found"] == "json"


def test_each_part_is_said_before_it_begins(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    said = []
    monkeypatch.setattr(doctor, "_this_host", lambda *_: said.append(capsys.readouterr().out) or [])
    monkeypatch.setattr("mrl.ops.doctor.run_inputs.check_inputs", lambda _: said.append(capsys.readouterr().out) or [])
    assert doctor.main(["grpo_tiny.yaml"]) == 0
    assert (
        said[0].splitlines()[-1] == "Looking at the models, data and disks of the run ..." and "the config" in said[0]
    )
    assert said[1] == "Looking at the libraries, GPUs, memory and network of this host ...\n"
    assert doctor.main(["--json"]) == 0 and json.loads(capsys.readouterr().out)["is_ok"]


@pytest.mark.parametrize(
    "arguments", [["no_such.yaml"], ["grpo_tiny.yaml", "grpo.num_steps=1"], ["grpo_tiny.yaml", "cluster.num_nodes=0"]]
)
def test_a_wrong_config_is_the_input_at_fault(arguments: list[str]):
    assert doctor.main(arguments) == 2


@pytest.mark.parametrize("arguments", [["--refit"], ["grpo_tiny.yaml", "--refit", "--json"]])
def test_a_wrong_command_line_is_the_input_at_fault(arguments: list[str]):
    with pytest.raises(SystemExit) as ended:
        doctor.main(arguments)
    assert ended.value.code == 2
