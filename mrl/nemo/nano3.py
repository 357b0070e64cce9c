# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.prepare nano3`: Nemotron-3-Nano RL blend as training files, placeholders filled, last rows held out.

Placeholders are rows of nvidia/Nemotron-3-Nano-RL-Training-Blend whose question only its publisher may distribute. This
file fills them in like the data set's own script create_nanov3_jsonl.py.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from conversion.files.durable import sync_file, write_atomic
from conversion.texts import listed
from mrl.config.rules.data import route_of
from mrl.config.schema.env import EnvConfig
from mrl.data.fields import REQUEST, Fields, RowError, json_object, text_of
from mrl.data.files import SUFFIXES
from mrl.data.records import TABLES, records
from mrl.nemo.gym.rows import gym_conversation

logger = logging.getLogger(__name__)

TRAIN_FILE, VALIDATION_FILE, RECIPE_FILE = "train-split.jsonl", "val-split.jsonl", "recipe.json"
MAX_ERRORS = 20
PLACEHOLDER = "_hf_placeholder"
Problem = tuple[str, str]

DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem."
)
DAPO_BEHIND = 'Remember to put your answer on its own line after "Answer:".'


@dataclass(frozen=True)
class Origin:
    """A data set that placeholders stand for."""

    hub_id: str
    mark: str
    stem: str


ORIGINS: Mapping[str, Origin] = {
    "nano_v3_sft_profiled_dapo17k": Origin("BytedTsinghua-SIA/DAPO-Math-17k", "dapo-math-17k", ""),
    "nano_v3_sft_profiled_skywork_no_omni": Origin("Skywork/Skywork-OR1-RL-Data", "skywork", "math"),
}
"""Values by the `dataset` of the placeholders."""


@dataclass
class Survey:
    """Results of a first pass over the blend: rows by agent, and the rows it wants of origins, by name in `ORIGINS`."""

    num_rows: int = 0
    agents: Counter[str] = field(default_factory=Counter)
    wanted: dict[str, set[int]] = field(default_factory=lambda: {name: set() for name in ORIGINS})


def prepare_nano3(sources: Sequence[Path], out: Path, *, num_validation: int) -> None:
    """Writes `train-split.jsonl` and, from last rows, `val-split.jsonl` to `out`. A second call continues a killed one.

    ValueError: the blend or a data set is not in `sources`, rows are wrong, or `out` was made of something else.
    """
    started = time.monotonic()
    found = [path for source in sources for path in sorted(source.rglob("train.jsonl")) if _names_agent(path)]
    if len(found) != 1:
        number = "several" if found else "no"
        raise ValueError(
            f"--source {' '.join(map(str, sources))}: {number} train.jsonl of "
            f"nvidia/Nemotron-3-Nano-RL-Training-Blend; give one folder into which that data set was downloaded"
        )
    (blend,) = found
    files = {name: find_origin(origin, sources) for name, origin in ORIGINS.items()}
    recipe = {"kind": "nano3", "blend": _identity(blend), "num_validation": num_validation}
    _claim(out, recipe | {"origins": {name: [_identity(path) for path in paths] for name, paths in files.items()}})
    survey = survey_blend(blend)
    if survey.num_rows <= num_validation:
        raise ValueError(
            f"{blend} has {survey.num_rows} rows; --validation-rows {num_validation} would leave none to train on"
        )
    problems = {name: read_problems(name, wanted, files[name]) for name, wanted in survey.wanted.items() if wanted}
    num_train = survey.num_rows - num_validation
    for name, first, stop in ((TRAIN_FILE, 0, num_train), (VALIDATION_FILE, num_train, survey.num_rows)):
        write_rows(blend, problems, out / name, first, stop)
    logger.info("Rows to train on: %d, for validation: %d", num_train, num_validation)
    for agent, count in survey.agents.most_common():
        environment = (
            route_of(agent, EnvConfig()) or "no environment (data.drop_rows_without_environment leaves them out)"
        )
        logger.info(
            "  %6d rows (%4.1f %%) of %s: %s", count, 100 * count / survey.num_rows, agent or "no agent", environment
        )
    for name, wanted in survey.wanted.items():
        logger.info("  %6d problems of %s filled in", len(wanted), ORIGINS[name].hub_id)
    logger.info("%s and %s are in %s, after %.0f s", TRAIN_FILE, VALIDATION_FILE, out, time.monotonic() - started)


def survey_blend(blend: Path) -> Survey:
    """Checks every row, counts rows and agents, and collects the rows that placeholders stand for."""
    survey, errors = Survey(), []
    for record in records(blend):
        survey.num_rows += 1
        try:
            fields = json_object(record.line)
            agent = fields.get("agent_ref")
            survey.agents[str(agent.get("name") or "") if isinstance(agent, dict) else ""] += 1
            if fields.get(PLACEHOLDER) is None:
                gym_conversation({key: value for key, value in fields.items() if key != PLACEHOLDER})
            else:
                name, row, _ = _placeholder(fields)
                survey.wanted[name].add(row)
        except RowError as error:
            errors.append(f"  {blend}:{record.number}: {error}")
    if errors:
        raise ValueError(
            f"bad rows in {blend}: {len(errors)}; download it again:\n" + listed(errors, MAX_ERRORS, between="\n")
        )
    return survey


def read_problems(name: str, wanted: set[int], files: Sequence[Path]) -> dict[int, Problem]:
    """The rows `wanted` of the data set that placeholders of `dataset=name` stand for, from its files."""
    origin = ORIGINS[name]
    if not files:
        raise ValueError(
            f"the blend has placeholders of {origin.hub_id} ({len(wanted)}), and no --source has its files; "
            f"download it (hf download {origin.hub_id} --repo-type dataset --local-dir DIR) and add --source DIR"
        )
    problems: dict[int, Problem] = {}
    num_rows = 0
    for path in files:
        first = num_rows
        if path.suffix in TABLES:
            from mrl.data.tables import table_rows

            rows: Iterator[Fields | bytes] = (row for row, _ in table_rows(path))
        else:
            rows = (record.line for record in records(path))
        for row in rows:
            if num_rows in wanted:
                try:
                    problems[num_rows] = problem_of(json_object(row) if isinstance(row, bytes) else row)
                except RowError as error:
                    place = f"{path}:{num_rows - first + 1}"
                    raise ValueError(
                        f"{place}: {error}; this is not {origin.hub_id} as the blend was made of it"
                    ) from error
            num_rows += 1
    if missing := sorted(wanted - problems.keys()):
        raise ValueError(
            f"{origin.hub_id} in {files[0].parent} ends at row {num_rows - 1}; the blend asks for row "
            f"{missing[-1]}: download it again"
        )
    return problems


def find_origin(origin: Origin, sources: Sequence[Path]) -> list[Path]:
    """Files of a data set, in order. If several formats hold the same rows, the files of one."""
    for suffix in SUFFIXES:
        found = [
            path
            for source in sources
            for path in sorted(source.absolute().rglob(f"*{suffix}"))
            if origin.mark in str(path).lower() and path.name.startswith(origin.stem) and not _names_agent(path)
        ]
        if found:
            return found
    return []


def problem_of(fields: Fields) -> Problem:
    """The question and the answer of a row of DAPO-Math-17k or Skywork-OR1."""
    prompt, reward_model = fields.get("prompt"), fields.get("reward_model")
    message = prompt[0] if isinstance(prompt, list) and prompt else None
    if (
        not isinstance(message, dict)
        or not isinstance(message.get("content"), str)
        or not isinstance(reward_model, dict)
    ):
        raise RowError("a row must have prompt[0].content and reward_model.ground_truth")
    answer = text_of(reward_model, ("ground_truth",)).strip()
    if answer.startswith("[") and answer.endswith("]"):
        try:
            answers = json.loads(answer)
        except ValueError as error:
            raise RowError(f"reward_model.ground_truth={answer} is not JSON: {error}") from error
        answer = str(answers[0]) if answers else ""
    return message["content"], answer


def filled_in(fields: Fields, problems: Mapping[str, Mapping[int, Problem]]) -> Fields:
    """The row of a placeholder with its question and answer; any other row as it is."""
    if fields.get(PLACEHOLDER) is None:
        return {key: value for key, value in fields.items() if key != PLACEHOLDER}
    name, row, template = _placeholder(fields)
    question, answer = problems[name][row]
    asked = question
    if ORIGINS[name].stem:
        asked = str(template["template"]).replace("{question}", question)
    else:
        start, stop = question.find(DAPO_BEFORE), question.rfind(DAPO_BEHIND)
        if start < 0 or stop < start:
            raise RowError("the problem is not worded as in DAPO-Math-17k; download that data set again")
        bare = question[start + len(DAPO_BEFORE) : stop]
        prefix = template.get("prefix")
        question = asked = f"{prefix}{bare}".removesuffix("\n\n") if prefix else f"{bare}{template['suffix']}"
    request = fields.get(REQUEST)
    kept = {key: value for key, value in fields.items() if key != PLACEHOLDER}
    return kept | {
        REQUEST: (request if isinstance(request, dict) else {}) | {"input": [{"role": "user", "content": asked}]},
        "question": question,
        "expected_answer": answer,
    }


def _placeholder(fields: Fields) -> tuple[str, int, Fields]:
    name, placeholder = fields.get("dataset"), fields.get(PLACEHOLDER)
    if name not in ORIGINS:
        raise RowError(f"a placeholder of dataset={name}, which is not known; known are {', '.join(ORIGINS)}")
    row = placeholder.get("row") if isinstance(placeholder, dict) else None
    template = placeholder.get("question_template") if isinstance(placeholder, dict) else None
    keys = ("template",) if ORIGINS[str(name)].stem else ("prefix", "suffix")
    if (
        not isinstance(row, int)
        or row < 0
        or not isinstance(template, dict)
        or not any(template.get(key) for key in keys)
    ):
        raise RowError(f"{PLACEHOLDER} must have row and question_template.{' or .'.join(keys)}")
    return str(name), row, template


def write_rows(blend: Path, problems: Mapping[str, Mapping[int, Problem]], path: Path, first: int, stop: int) -> None:
    """Writes rows `first` to `stop` of the blend, filled in. Keeps a finished file, and continues an unfinished one."""
    if path.exists():
        return
    aside = path.with_name(f".{path.name}.part")
    with aside.open("a+b") as written:
        try:
            fcntl.flock(written, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{written.name} is being written by another process; wait until it ends") from error
        if num_done := _keep_whole_lines(written):
            logger.info("%s: %d of %d rows are there already", path.name, num_done, stop - first)
        for index, record in enumerate(records(blend)):
            if index >= stop:
                break
            if index < first + num_done:
                continue
            try:
                row = filled_in(json_object(record.line), problems)
            except RowError as error:
                raise ValueError(f"{blend}:{record.number}: {error}") from error
            written.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
    sync_file(aside)
    aside.rename(path)
    sync_file(path.parent)


def _keep_whole_lines(file: IO[bytes]) -> int:
    """Cuts off a file's unfinished last line, and returns its number of lines."""
    num_lines = end = position = 0
    file.seek(0)
    while block := file.read(1 << 20):
        num_lines += block.count(b"\n")
        if b"\n" in block:
            end = position + block.rindex(b"\n") + 1
        position += len(block)
    file.truncate(end)
    return num_lines


def _names_agent(path: Path) -> bool:
    if path.suffix != ".jsonl":
        return False
    with path.open("rb") as file:
        return b'"agent_ref"' in file.readline()


def _identity(path: Path) -> dict[str, object]:
    status = path.stat()
    return {"path": str(path.absolute()), "bytes": status.st_size, "modified_ns": status.st_mtime_ns}


def _claim(out: Path, recipe: Mapping[str, object]) -> None:
    path = out / RECIPE_FILE
    if path.exists():
        if json.loads(path.read_text(encoding="utf-8")) != recipe:
            raise ValueError(
                f"--out {out} was made of another blend, or with another --validation-rows; remove it or choose "
                "another --out"
            )
        return
    if out.exists() and any(os.scandir(out)):
        raise ValueError(f"--out {out} is not empty; choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(recipe, indent=2))
