# SPDX-License-Identifier: Apache-2.0
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mrl
from mrl.env import HF_TOKEN, VARIABLES, cache_root, job_age_s, secret_values
from tests.sources import ROOT
from tests.waiting import HANG_S


def test_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "")
    assert HF_TOKEN.read() is None
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    assert HF_TOKEN.read() == "hf_canary"


def test_secrets_are_found_by_table_and_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    monkeypatch.setenv("MY_DATABASE_PASSWORD", "canary-two")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false-canary")
    assert {"hf_canary", "canary-two"} <= secret_values()
    assert "false-canary" not in secret_values()


def test_every_variable_has_a_manual_and_one_entry():
    assert all(variable.manual for variable in VARIABLES)
    assert len({variable.name for variable in VARIABLES}) == len(VARIABLES)


@pytest.mark.parametrize(
    ("hf_home", "mrl_cache", "expected"),
    [
        ("", "", "/home/somebody/.cache/huggingface/mrl"),
        ("/scratch/hf", "", "/scratch/hf/mrl"),
        ("/scratch/hf", "/shared/models", "/shared/models"),
        ("/scratch/hf", "~/models", "/home/somebody/models"),
        ("/scratch/hf", "off", None),
    ],
)
def test_where_converted_models_lie(
    monkeypatch: pytest.MonkeyPatch, hf_home: str, mrl_cache: str, expected: str | None
):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("HF_HOME", hf_home)
    monkeypatch.setenv("MRL_CACHE", mrl_cache)
    assert cache_root() == (None if expected is None else Path(expected))


def test_a_relative_cache_folder_is_the_same_for_processes_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MRL_CACHE", "models")
    assert cache_root() == tmp_path / "models"


@pytest.mark.parametrize(("age_s", "expected"), [(None, 0.0), (100, 100.0), (-100, 0.0)])
def test_the_age_of_the_job(monkeypatch: pytest.MonkeyPatch, age_s: int | None, expected: float):
    monkeypatch.setenv("SLURM_JOB_START_TIME", "" if age_s is None else str(int(time.time()) - age_s))
    assert expected <= job_age_s() <= (expected + 5 if expected else 0)


@pytest.mark.parametrize("chosen", [None, "own value"])
def test_usage_statistics_are_off_unless_the_shell_says_otherwise(chosen: str | None):
    bare = {name: value for name, value in os.environ.items() if name not in mrl.NO_USAGE_STATISTICS}
    given = {} if chosen is None else dict.fromkeys(mrl.NO_USAGE_STATISTICS, chosen)
    code = "import json, os, mrl; print(json.dumps({name: os.environ[name] for name in mrl.NO_USAGE_STATISTICS}))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=bare | given, capture_output=True, text=True, timeout=HANG_S
    )
    assert json.loads(done.stdout) == (given or mrl.NO_USAGE_STATISTICS)


def test_scripts_that_start_ray_by_its_own_command_switch_its_statistics_off():
    texts = [path.read_text() for path in (ROOT / "scripts").iterdir() if path.is_file()]
    starting = [text for text in texts if "ray start" in text]
    assert len(starting) == 2
    assert all(re.search(r"^export .*RAY_USAGE_STATS_ENABLED=0", text, re.MULTILINE) for text in starting)
