# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.reward MODULE:FUNCTION ROWS.jsonl [--replies FILE] [--config CONFIG] [a.b=c ...]`: runs your reward
function on rows.

It runs as in training: in a confined child with a deadline, with values by name. Without replies each row is judged
twice, by its own answer and by an empty text. What the function prints stands above the table; below it stand the
reasons why replies have no reward, each kind once with its count and its first traceback. In place of a reward function
may stand an agent, or the address of one: the replies, a list of texts for each row, answer its requests, which are
read and refused as in a run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mrl import barred
from mrl.config.load import load_config
from mrl.config.model import is_hub_id, way_to_prepare
from mrl.config.own import AGENT, REWARD, find_fitting, looks_like_agent, names_in, refuse_clash, wrong_annotations
from mrl.config.secrets import run_entry, start_logging
from mrl.config.texts import aligned, safe_text
from mrl.types import Prompt, Verdict

if TYPE_CHECKING:
    from mrl.config.schema.run import RunConfig
    from mrl.envs.task import Task

Judged = tuple[list[Verdict], list[float]]
"""Verdicts, and the seconds that each took."""

NAME = "reward"
MAX_ROWS = 100
MAX_CELL_CHARACTERS = 48
NEWS_S = 5.0
"""After this time without other news, a line says at which row the function works."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: every reply has a reward; 1: some have none; 2: function, rows or replies cannot be used."""
    parser = argparse.ArgumentParser(
        prog="mrl.reward", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = "as in env.own.functions or env.own.agents; or FILE.py:FUNCTION, or the URL of an agent"
    parser.add_argument("function", metavar="MODULE:FUNCTION", help=what)
    parser.add_argument(
        "rows", type=Path, metavar="ROWS.jsonl", help=f"rows as in training; the first {MAX_ROWS} are judged"
    )
    parser.add_argument(
        "--replies",
        type=Path,
        metavar="FILE",
        help="a reply for each row, line by line: texts, or in a .jsonl texts or {'response': text}",
    )
    parser.add_argument(
        "--config",
        default="grpo_tiny.yaml",
        metavar="CONFIG",
        help="the config of your run, whose keys of rows and of env hold here, too (default: %(default)s)",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="a.b=c", help="keys of the config: env.own.allow, data.default.input_key ..."
    )
    options = parser.parse_intermixed_args(arguments)
    start_logging(stream=sys.stderr)
    logging.getLogger().setLevel(logging.WARNING)
    try:
        if not (options.rows.exists() or is_hub_id(str(options.rows))):
            made = way_to_prepare(str(options.rows))
            raise ValueError(f"{options.rows}: no such file in {Path.cwd()}; {made or 'correct the path'}")
        path = _module_path(options.function)
        kind = _kind_of(path)
        data = [
            f"data.train.data_path={json.dumps(str(options.rows))}",
            "data.validation=null",
            f"data.default.env_name={NAME}",
        ]
        config = load_config(options.config, [*data, f"++env.{kind}={path}", *options.overrides])
        rows, num_rows, idle = _rows(config)
        named = _tasks(rows, options.replies)
        is_function = NAME in config.env.own.functions
        model = Path(config.policy.model_name)
        if not (is_function or is_hub_id(str(model)) or (model / "config.json").is_file()):
            made = way_to_prepare(str(model))
            raise ValueError(
                f"an agent is tried with the tokenizer of policy.model_name={model}, not in {Path.cwd()}; name "
                f"another folder, policy.model_name=FOLDER{f', or {made}' * bool(made)}"
            )
    except (ValueError, OSError) as error:
        parser.exit(2, f"mrl.reward: {barred(error) or error}\n")
    try:
        verdicts, seconds = asyncio.run(_judge(named, config) if is_function else _run_agent(named, config))
    except (RuntimeError, ValueError) as error:  # its traceback stands above
        parser.exit(2, f"mrl.reward: {error}\n")
    sys.stdout.flush()
    judged = [(name, task, verdict) for (name, task), verdict in zip(named, verdicts, strict=True)]
    slowest_s, slowest = max(zip(seconds, (row_id for row_id, _ in named), strict=True))
    median_s = statistics.median(seconds)
    pace = f"Seconds of a verdict: median {median_s:.2g}, longest {slowest_s:.2g} ({slowest}); {_limit(config)}"
    doubts = _doubts(judged, path) if options.replies is None and is_function else []
    print("\n".join([*_report(judged), pace, *doubts]))
    for line in idle:
        print(line.partition("=")[2])
    if options.replies is None and not any(row.expected_answer for _, row in rows):
        print(
            "Only empty replies were judged, as no row has an answer; data.train.output_key=COLUMN names the column of "
            "the answers, --replies FILE gives replies"
        )
    if len(rows) < num_rows:
        print(f"The first {len(rows)} of {num_rows:,} rows were judged")
    return 0 if all(verdict.has_reward for verdict in verdicts) else 1


def _kind_of(path: str) -> str:
    """The key below `env` of such a function, agent or address. ValueError: nothing of these fits."""
    if "://" in path:
        return f"remote.{NAME}"
    wrong = dict[str, ValueError]()
    for key, kind in (("agents", AGENT), ("functions", REWARD)):
        try:
            find_fitting(path, kind)
            return f"own.{key}.{NAME}"
        except ValueError as error:
            wrong[key] = error
    with suppress(ValueError):  # which says the same of both
        if not looks_like_agent(path):
            del wrong["agents"]
    raise ValueError(f"{path}: {next(iter(wrong.values()))}") from None


def _module_path(function: str) -> str:
    """The path by which a run names the function; the folder of a file is searched for modules from here on."""
    file, _, name = function.rpartition(":")
    if function.endswith(".py"):
        raise ValueError(f"{function}: it names no function; write {function}:FUNCTION{names_in(Path(function))}")
    if not file.endswith(".py"):
        return function
    if not Path(file).is_file():
        raise ValueError(f"{file}: there is no such file")
    folder = str(Path(file).resolve().parent)
    sys.path.append(folder)
    try:
        refuse_clash(Path(file).stem, folder)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return f"{Path(file).stem}:{name}"


def _rows(config: RunConfig) -> tuple[list[tuple[str, Prompt]], int, list[str]]:
    from mrl.data.columns import find_idle, find_lacking
    from mrl.data.prompts import prompt_reader
    from mrl.data.reading import Names, Spool, read_rows

    ((key, dataset),) = config.data.train_sets.items()
    reader = prompt_reader(key, dataset, config, None)
    # Whatever environment a row names, this function judges it here.
    own = replace(
        reader, parse=lambda fields: reader.parse({name: value for name, value in fields.items() if name != "env_name"})
    )
    if lacking := find_lacking([own], config.env.own.functions):
        raise ValueError("\n".join(f"{problem.value}: {problem.sentence}" for problem in lacking))
    idle = find_idle([own], config.env.own.functions)
    found, _ = read_rows(own, config.data, Names(), Spool(), lambda row_id, rendered: (row_id, rendered[1]))
    return [found[index] for index in range(min(len(found), MAX_ROWS))], len(found), idle


def _tasks(rows: Sequence[tuple[str, Prompt]], replies: Path | None) -> list[tuple[str, Task]]:
    """Tasks with the id of their row."""
    from mrl.envs.task import Task

    texts = (
        [((row.expected_answer,), ("",)) for _, row in rows]
        if replies is None
        else [(one,) for one in _replies(replies)]
    )
    if len(texts) < len(rows):
        raise ValueError(
            f"{replies} has {len(texts)} replies for {len(rows)} rows; give one for each row, in their order "
            f"(the first {MAX_ROWS} are judged)"
        )
    return [
        (row_id, Task(tuple(map(safe_text, turns)), row.expected_answer, row.text, row.row))
        for (row_id, row), own in zip(rows, texts, strict=False)
        for turns in dict.fromkeys(own)
    ]


def _replies(file: Path) -> list[tuple[str, ...]]:
    if not file.exists():
        raise ValueError(f"--replies {file}: no such file in {Path.cwd()}; correct the path")
    lines = file.read_text(encoding="utf-8").splitlines()
    if file.suffix != ".jsonl":
        return [(line,) for line in lines]
    found = []
    for number, line in enumerate(lines, 1):
        value = json.loads(line)
        said = value.get("response") if isinstance(value, dict) else value
        turns = said if isinstance(said, list) and said else [said]
        if not all(isinstance(text, str) for text in turns):
            raise ValueError(
                f"{file}:{number}: a reply is a text, a list of texts, one for each turn, or an object with one of "
                f"them under response; here it is {line:.80}"
            )
        found.append(tuple(turns))
    return found


async def _judge(named: Sequence[tuple[str, Task]], config: RunConfig) -> Judged:
    from mrl.envs.scorer import start_environment

    pool, begin = await start_environment(NAME, config.env, num_workers=1), time.monotonic()
    jobs = [pool.submit(task) for _, task in named]
    try:
        while missing := [place for place, job in enumerate(jobs) if not job.verdict.done()]:
            await asyncio.wait([jobs[place].verdict for place in missing], timeout=NEWS_S)
            begun = [named[place][0] for place in missing if jobs[place].begun_at and not jobs[place].verdict.done()]
            if begun and time.monotonic() > begin + NEWS_S:
                begin = time.monotonic()
                num_judged = sum(job.verdict.done() for job in jobs)
                print(
                    f"mrl.reward: {num_judged} of {len(jobs)} replies are judged, the function works at {begun[0]}; "
                    f"{_limit(config)}",
                    file=sys.stderr,
                )
        return list(await asyncio.gather(*(job.verdict for job in jobs))), [job.seconds for job in jobs]
    finally:
        pool.close()


async def _run_agent(named: Sequence[tuple[str, Task]], config: RunConfig) -> Judged:
    """Runs an agent on one row after the other; prints the first conversations."""
    from mrl.plan.memory import with_limits
    from mrl.rollout.environment import set_variables

    set_variables({"VLLM_LOGGING_LEVEL": "ERROR"})  # as it says what it misses of a device that nobody asks for
    with warnings.catch_warnings(action="ignore"):
        from mrl.rollout.trial import open_trial

    verdicts, seconds = list[Verdict](), list[float]()
    async with open_trial(NAME, with_limits(config, None)) as attempt:
        for row_id, task in named:
            begin = time.monotonic()
            trying = asyncio.ensure_future(
                attempt(Prompt(row_id, (), task.prompt, task.expected, NAME, task.row), task.turns)
            )
            while not (await asyncio.wait([trying], timeout=NEWS_S))[0]:
                done = f"{len(verdicts)} of {len(named)} rows are done"
                print(
                    f"mrl.reward: {done}, the agent works at {row_id}; {_limit(config)}",
                    file=sys.stderr,
                )
            verdicts.append(await trying)
            seconds.append(time.monotonic() - begin)
            if len(verdicts) == 1:
                for number, conversation in enumerate(verdicts[0].conversations, 1):
                    print(f"{row_id}, conversation {number}:")
                    print("\n".join(f"  {said['role']}: {_cell(said['content'])}" for said in conversation))
    return verdicts, seconds


def _limit(config: RunConfig) -> str:
    """The key that ends a verdict, or an agent's rollout."""
    if NAME in config.env.own.functions:
        return f"env.own.timeout_s={config.env.own.timeout_s:g} ends each"
    return f"env.agent_timeout_s={config.env.agent_timeout_s:g} ends each"


def _cell(text: str) -> str:
    text = safe_text(text).replace("\n", "\\n")
    return text if len(text) <= MAX_CELL_CHARACTERS else f"{text[: MAX_CELL_CHARACTERS - 1]}…"


def _doubts(judged: Sequence[tuple[str, Task, Verdict]], path: str) -> list[str]:
    """Signs that the function reads the answer in another way than rows have it; `judged` has no replies of others."""
    said = []
    for name, (value, wrong) in wrong_annotations(path).items():
        said.append(f"{path} says {name}: {wrong}, and gets {value} as a text; convert it, {wrong}({name})")
    rewards: dict[str, list[float]] = {}
    for row_id, task, verdict in judged:
        if task.expected and verdict.has_reward:
            rewards.setdefault(row_id, []).append(verdict.reward)
    pairs = [pair for pair in rewards.values() if len(pair) > 1]
    if pairs and all(own <= empty for own, empty in pairs):
        said.append(
            f"A row's own answer gets no more than an empty reply, in {len(pairs)} of {len(pairs)} rows: the function "
            "may read it in another form"
        )
    return said


def _report(judged: Sequence[tuple[str, Task, Verdict]]) -> list[str]:
    parts = sorted(
        {name for *_, verdict in judged for name in (*verdict.components, *verdict.metrics, *verdict.columns)}
    )
    first, last = ("row", "reply", "reward"), ("extracted", "verdict")
    table = [[*first, *(f"own {name}" if name in (*first, *last) else name for name in parts), *last]]
    for row_id, task, verdict in judged:
        values = {
            **verdict.columns,
            **{name: f"{value:g}" for name, value in {**verdict.components, **verdict.metrics}.items()},
        }
        reward = f"{verdict.reward:g}" if verdict.has_reward else "-"
        said = "mask_sample" if "mask_sample" in verdict.flags else verdict.status
        cells = [
            row_id,
            task.text or "(empty)",
            reward,
            *(values.get(name, "-") for name in parts),
            verdict.extracted or "-",
        ]
        table.append([*map(_cell, cells), said])
    rewards = [verdict.reward for *_, verdict in judged if verdict.has_reward]
    lines = [*aligned(table), ""]
    kinds: dict[str, list[tuple[str, Verdict]]] = {}
    for row_id, _, verdict in judged:
        if verdict.reason:
            kinds.setdefault(verdict.trace_kind, []).append((row_id, verdict))
    for alike in kinds.values():
        first, verdict = alike[0]
        lines.append(f"{len(alike)} of {len(judged)} replies, first of {first}: {verdict.reason}")
        lines += [verdict.trace, ""] if verdict.trace else [""]
    if rewards:
        lines.append(
            f"{len(rewards)} rewards from {min(rewards):g} to {max(rewards):g}, mean {sum(rewards) / len(rewards):g}"
        )
    if len(set(rewards)) == 1 and len(rewards) > 1:
        lines.append("All rewards are equal: a run would learn nothing from them")
    if len(rewards) < len(judged):
        lines.append(
            f"{len(judged) - len(rewards)} of {len(judged)} replies have no reward: in a run, their rollouts are masked"
        )
    return lines


if __name__ == "__main__":
    sys.exit(run_entry(main))
