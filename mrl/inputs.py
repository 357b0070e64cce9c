# SPDX-License-Identifier: Apache-2.0
"""Checks the rows of a run before it starts: reads, renders and judges some or all of them as the run will."""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mrl.config.errors import ConfigError, Problem, told
from mrl.config.model import is_hub_id
from mrl.config.rules.data import NEMO_GYM, environment_names, is_agent
from mrl.config.schema.data import DatasetConfig
from mrl.config.schema.env import BUILT_IN, FROM_VERIFIERS
from mrl.config.schema.run import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mrl.data.prompts import Rendered
    from mrl.data.reading import LeftOut, Reader, Rows, Spool
    from mrl.data.records import Record
    from mrl.envs.task import Score, Task
    from mrl.types import Prompt

# Processor seconds. A look at a few rows takes a second, unless a row, its template or its judge never ends.
CPU_S = 30
MAX_JUDGED_ROWS = 64
MAX_FILES = 4
MAX_WHOLE_BYTES = 16 << 20
"""Limit of the rows of all data sets together that are read whole, to compare them."""
MAX_COMPARED_BYTES = 128 << 20
"""Limit of rows that are compared with those of an earlier attempt in a few seconds."""
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
REPLIES = {"math": "\\boxed{{{answer}}}", "mcqa": "Answer: {answer}\n\\boxed{{{answer}}}", "dapo": "Answer: {answer}"}


@dataclass
class Look:
    """The complaints about the data of a run."""

    problems: list[Problem] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    """Parts of the data that nobody looked at."""
    rows: tuple[Rows, list[LeftOut]] | None = None
    """The training rows, and those left out, if all were read."""

    def add(self, other: Look) -> None:
        """Adds the complaints of another look."""
        self.problems += other.problems
        self.doubts += other.doubts
        self.unseen += other.unseen


def look_at_inputs(config: RunConfig, *, is_strict: bool, to_evaluate: bool) -> Look:
    """Complaints about tokenizer, chat template, rows and run folder as far as they are here; `is_strict` reads all."""
    look = look_at_data(config, is_strict=is_strict)
    if not to_evaluate:
        from mrl.store.loggers.group import check_loggers

        try:
            check_loggers(config.logger)
        except ValueError as error:
            look.problems.append(told(error, "loggers", "to be provided"))
    if to_evaluate or not os.path.isdir(config.checkpointing.checkpoint_dir):
        return look
    from mrl.store.resuming import look_at_folder

    folder = look_at_folder(config, data_identities(config, look), is_strict=is_strict)
    look.add(Look(folder.problems, folder.doubts, folder.unseen))
    return look


def look_at_data(config: RunConfig, *, is_strict: bool) -> Look:
    """The complaints about tokenizer, chat template and rows, as far as they are here; `is_strict` reads every row."""
    from mrl.data.files import is_here
    from mrl.data.trial import Overrun, within_limits

    look, here = Look(), dict[str, DatasetConfig]()
    missing = _look_at_verifiers(config, look)
    tokenizer = tokenizer_of(config, look)
    for key, dataset in config.data.sets.items():
        lacks = [
            path
            for path in (dataset.prompt_file, dataset.system_prompt_file, dataset.teacher_prompt_file)
            if path is not None and not os.path.isfile(path)
        ]
        if not dataset.source:
            continue  # which a rule says
        if not is_here(dataset, setting=key):
            look.unseen.append(f"{key}: the rows of {dataset.source}, which is not on this machine")
            if is_hub_id(dataset.source):
                rule = f"the data set {dataset.source} is not in the local Hugging Face cache"
                look.problems.append(Problem("data/cache", key, None, rule, "a start downloads it", "to be provided"))
        elif dataset.source in missing:
            look.unseen.append(f"{key}: the rows of {dataset.source}")
        elif lacks:
            look.unseen.append(f"{key}: the rows of {dataset.source}, without {lacks[0]}")
        else:
            here[key] = dataset
    is_loaded = is_strict and tokenizer is not None and len(here) == len(config.data.sets)
    if is_loaded:
        _read_all(config, look)
    try:
        look.add(within_limits(lambda: _look_at_sets(here, config, tokenizer, only_judge=is_loaded), cpu_s=CPU_S))
    except Overrun:
        look.unseen.append(
            f"rows of {', '.join(here)}: {CPU_S} s of a processor or 2 GiB of memory were not enough for a few of them"
        )
        return look
    if not is_loaded:
        # Apart: where a user's processor is slow, the look at a few rows stands.
        with suppress(ValueError, Overrun):
            look.doubts += within_limits(lambda: _look_for_shared(here, config), cpu_s=CPU_S)
    return look


def _look_at_verifiers(config: RunConfig, look: Look) -> set[str]:
    """Adds what environments of verifiers lack on this machine; returns the sources that have no rows for that."""
    from mrl.data.files import split_of
    from mrl.data.verifiers import find_rows

    sets = config.data.sets.items()
    asked = {(dataset.source, split_of(dataset, key)) for key, dataset in sets}
    missing = {
        source
        for source, _ in asked
        if source.startswith(FROM_VERIFIERS) and source.removeprefix(FROM_VERIFIERS) not in config.env.verifiers
    }  # which a rule says
    for name in config.env.verifiers:
        source = FROM_VERIFIERS + name
        for split in sorted({split for one, split in asked if one == source}) or ["train"]:
            try:
                find_rows(source, config.env, split=split)
            except ConfigError as error:
                look.problems += [problem for problem in error.problems if problem not in look.problems]
                missing.add(source)
    return missing


def tokenizer_of(config: RunConfig, look: Look) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a run with a chat template that ends; None if there is none here, which `look` says."""
    name, key = config.policy.tokenizer.name, "policy.tokenizer.name"
    what = "the chat template, and how many tokens rows have"
    if not os.path.isdir(name):
        look.unseen.append(f"{what}: the tokenizer {name} is not on this machine")
        return None
    if not any(os.path.isfile(Path(name) / file) for file in TOKENIZERS):
        rule, way_out = "no tokenizer in this folder", "put it there, or give the folder of the model's"
        look.problems.append(Problem("tokenizer/files", key, name, rule, way_out, "to be provided"))
        return None
    from mrl.data.chat import load_tokenizer, served_template, use_chat_template
    from mrl.data.prompts import sampling_params
    from mrl.data.trial import try_template

    try:
        tokenizer = load_tokenizer(name)
        use_chat_template(tokenizer, config.policy.tokenizer)
        try_template(tokenizer, config.policy.tokenizer.chat_template_kwargs)
        if config.has_engines:
            sampling_params(config.policy, tokenizer)
            served = config.policy.generation.vllm_cfg.http_server_serving_chat_kwargs.chat_template
            served_template(served, config.policy.tokenizer)
    except ImportError as error:
        rule, way_out = "its chat template", f"this machine lacks a library: {error}"
        look.problems.append(Problem("tokenizer/template", key, name, rule, way_out, "not checked"))
        return None
    except ValueError as error:
        look.problems.append(told(error, "tokenizer"))
        return None
    return tokenizer


def data_identities(config: RunConfig, look: Look) -> list[Callable[[], dict[str, str] | None]]:
    """Checksums that identify the data of a run: a quick one, then the exact one. None: too large, or not all here."""
    from mrl.data.fields import REQUEST, optional_text
    from mrl.data.files import find_data_files, is_here
    from mrl.data.reading import Parsed, Reader, read_split
    from mrl.store.identity import data_of

    def reader_of(key: str, dataset: DatasetConfig) -> Reader[None]:
        # Rows are taken for good ones; where some are not, the exact way decides.
        def parse(fields: dict[str, object]) -> Parsed[None]:
            return Parsed(None, None if config.has_engines and REQUEST in fields else optional_text(fields, "id"))

        return Reader(
            key, dataset.source, find_data_files(dataset, setting=key, section=config.env), parse, dataset.repeat
        )

    def fast() -> dict[str, str] | None:
        sets = config.data.train_sets
        if any(problem.kind == "refused" for problem in look.problems):
            return None  # bad rows would be refused again
        if not all(is_here(dataset, setting=key) for key, dataset in sets.items()):
            return None
        files = [
            path for key, dataset in sets.items() for path in find_data_files(dataset, setting=key, section=config.env)
        ]
        if sum(path.stat().st_size for path in files) > MAX_COMPARED_BYTES:
            return None
        train, _, left_out = read_split(replace(config.data, validation=None), reader_of, lambda row_id, value: row_id)
        return data_of(config, train, left_out)

    def exact() -> dict[str, str] | None:
        if look.rows is None and not look.problems:
            _read_all(config, look)
        return None if look.rows is None else data_of(config, *look.rows)

    return [exact] if look.rows is not None else [fast, exact]


def _read_all(config: RunConfig, look: Look) -> None:
    from mrl.data.order import num_steps_of
    from mrl.data.prompts import load_prompts
    from mrl.data.supervised import load_examples

    try:
        data = load_prompts(config) if config.has_engines else load_examples(config)
        num_steps_of(config, len(data.train))
        look.rows = data.train, data.left_out
    except ConfigError as error:
        look.problems += error.problems
    except ValueError as error:
        look.problems.append(told(error, "data"))


def _look_at_sets(
    here: Mapping[str, DatasetConfig], config: RunConfig, tokenizer: PreTrainedTokenizerBase | None, *, only_judge: bool
) -> Look:
    from mrl.data.prompts import idle_parts, lacking_columns

    look = Look()
    if config.has_engines:
        with suppress(ValueError):  # of rows that cannot be read, which the look at them says
            look.problems += lacking_columns(config, here)
            look.doubts += idle_parts(config, here)
    if look.problems:
        return look
    for key, dataset in here.items():
        look.add(_look_at_rows(key, dataset, config, tokenizer, only_judge=only_judge))
    return look


def _look_for_shared(here: Mapping[str, DatasetConfig], config: RunConfig) -> list[str]:
    """Warns of validation rows that are training rows, too: among all rows, or of large files among some."""
    from mrl.data.excerpts import excerpt
    from mrl.data.overlap import told_of_shared
    from mrl.data.prompts import prompt_reader
    from mrl.data.reading import identities_of
    from mrl.data.records import records
    from mrl.data.supervised import example_reader

    reader_of = prompt_reader if config.has_engines else example_reader
    trained, held, is_whole, left = set[int](), list[int](), True, MAX_WHOLE_BYTES

    def all_records(path: Path) -> Iterator[Record]:
        nonlocal left, is_whole
        for record in records(path):
            if (left := left - len(record.line)) < 0:  # of a compressed file
                is_whole = False
                return
            yield record

    for key, dataset in here.items():
        reader: Reader = reader_of(key, dataset, config, None)
        is_small = sum(path.stat().st_size for path in reader.files) <= left
        is_whole &= is_small
        found = identities_of(
            replace(reader, files=reader.files if is_small else _spread(reader.files)),
            all_records if is_small else lambda path: excerpt(path).records,
        )
        trained.update(found) if key in config.data.train_sets else held.extend(found)
    rows = "validation rows" if is_whole else "validation rows that were looked at"
    said = told_of_shared(sum(one in trained for one in held), len(held), rows)
    return [said] if said else []


def _look_at_rows(
    key: str, dataset: DatasetConfig, config: RunConfig, tokenizer: PreTrainedTokenizerBase | None, *, only_judge: bool
) -> Look:
    """Complaints about first, last and some other rows of a data set; with `only_judge`, only those about answers."""
    from mrl.data.excerpts import Excerpt, excerpt
    from mrl.data.prompts import prompt_reader
    from mrl.data.reading import Names, Spool, complaints, sort_out
    from mrl.data.supervised import example_reader

    look, excerpts, spool = Look(), dict[Path, Excerpt](), Spool()
    name = f"{key}.data_path={dataset.source}"

    def read(path: Path, setting: str) -> Iterable[Record]:
        excerpts[path] = excerpt(path)
        return excerpts[path].records

    try:
        reader: Reader = (prompt_reader if config.has_engines else example_reader)(key, dataset, config, tokenizer)
        chosen = _spread(reader.files)
        ids, positions, left_out = sort_out(replace(reader, files=chosen), Names(), spool, read)
    except ValueError as error:
        return Look([] if only_judge else [told(error, "data")])
    logging.disable(logging.CRITICAL)  # math-verify warns of what the run's pool takes care of
    judged = _judge(name, config, dict(zip(positions, ids, strict=True)), spool) if config.has_engines else look
    logging.disable(logging.NOTSET)
    if only_judge:
        return judged
    is_whole = len(chosen) == len(reader.files) and all(found.is_whole for found in excerpts.values())
    is_told, default = False, config.data.default.env_name
    if default not in (*environment_names(config.env), NEMO_GYM):  # of which a rule complains, once
        is_told = left_out.without_environment.pop(default or "", 0) > 0
    refused, said = complaints(left_out, name, config.data, is_whole=is_whole)
    look.problems, look.doubts = [told(text, "data/rows") for text in refused], said
    if is_whole and not ids and not refused and not is_told:
        text = f"{name} has no rows" + (" that can be used" if left_out.num_rows else "")
        look.problems.append(told(text, "data/rows"))
    if config.has_engines:
        look.add(judged)
    if not is_whole:
        of = f" of {len(chosen)} of its {len(reader.files)} files" if len(chosen) < len(reader.files) else ""
        seen = f"only {left_out.num_rows:,} were read, the first, the last and random ones{of}"
        look.unseen.append(f"{key}: the other rows of {dataset.source}: {seen}")
    look.unseen += [
        f"{key}: the end of {path}, of which only the beginning was read"
        for path, found in excerpts.items()
        if found.is_cut
    ]
    return look


def _spread(files: Sequence[Path]) -> list[Path]:
    last = len(files) - 1
    return [files[index] for index in sorted({round(last * part / (MAX_FILES - 1)) for part in range(MAX_FILES)})]


def _judge(name: str, config: RunConfig, ids: dict[int, str], spool: Spool[Rendered]) -> Look:
    """The rows whose expected answer no reply can match, by their environments: training masks their rollouts."""
    from mrl.envs.scorer import parsers_of
    from mrl.envs.task import Task

    look, scores, faults = Look(), dict[str, "Score | None"](), list[str]()
    for position, row_id in list(ids.items())[:MAX_JUDGED_ROWS]:
        _, row = spool.read(position)
        if is_agent(row.env_name, config.env):
            _look_at_agents_row(name, row, config, look)
            continue
        if row.env_name not in BUILT_IN:
            path = config.env.own.functions.get(row.env_name)
            trial = f"; `python -m mrl.reward {path} ROWS` tries it" if path else ""
            look.unseen.append(f"{name}: what the environment {row.env_name} makes of replies{trial}")
            continue
        if row.env_name not in scores:
            scores[row.env_name] = _score(row.env_name, config, look)
        if (score := scores[row.env_name]) is not None:
            form = (
                "dapo"
                if row.env_name == "math" and config.env.math.math_verify_impl != "hf_math_verify"
                else row.env_name
            )
            answer = row.expected_answer
            _, tool_parser = parsers_of(config, row.env_name, row.row, row.template_kwargs)
            reply = REPLIES.get(form, "x").format(answer=answer)
            task = Task((reply,), answer, row.text, row.row, tool_parser=tool_parser)
            if reason := _fault(score, task, has_reply=form in REPLIES):
                faults.append(f"{row_id}: {reason}")
    look.unseen, look.problems = list(dict.fromkeys(look.unseen)), list(dict.fromkeys(look.problems))
    if faults:
        num_judged = min(len(ids), MAX_JUDGED_ROWS)
        look.doubts.append(
            f"{name}: no reply can be right in {len(faults)} of {num_judged} rows that were judged, and they teach "
            f"nothing; correct or remove them. The first: {faults[0]}"
        )
    return look


def _look_at_agents_row(name: str, row: Prompt, config: RunConfig, look: Look) -> None:
    if row.env_name in config.env.agents:  # which asks for what it likes
        place = config.env.own.agents.get(row.env_name) or config.env.remote.get(row.env_name)
        trial = f"; `python -m mrl.reward {place} ROWS` tries it without a model" if place else ""
        look.unseen.append(f"{name}: rows of {row.env_name}, which your agent does{trial}")
        return
    look.unseen.append(f"{name}: rows of {row.env_name}, which NeMo Gym's servers do, if one of them has that agent")
    from mrl.data.fields import REQUEST

    request = json.loads(row.row).get(REQUEST)
    generation = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"
    has_parser = config.policy.generation.vllm_cfg.http_server_serving_chat_kwargs.enable_auto_tools
    chooses = isinstance(request, dict) and request.get("tools") and request.get("tool_choice") in (None, "auto")
    if chooses and not has_parser:
        rule = f"rows of {row.env_name} have tools, and engines refuse requests with tools"
        way_out = f"leave {generation}.enable_auto_tools out, or set it to true"
        look.problems.append(told(f"{name}: {rule}; {way_out}", "data/tools"))


def _score(env_name: str, config: RunConfig, look: Look) -> Score | None:
    from mrl.envs.scorer import ENVIRONMENTS

    declared = ENVIRONMENTS[env_name](config.env)
    module, _, factory = declared.factory.partition(":")
    try:
        return cast("Score", getattr(importlib.import_module(module), factory)(**declared.options))
    except (ImportError, OSError, RuntimeError) as error:
        look.unseen.append(f"expected answers of env.{env_name}: {error}")
    except ValueError as error:
        look.problems.append(told(f"env.{env_name}: {error}", "environments"))
    return None


def _fault(score: Score, task: Task, *, has_reply: bool) -> str:
    """The reason why no reply can be right; "" if the tried one is. With `has_reply`, the task holds the expected
    answer.
    """
    from mrl.envs.task import RowFault

    try:
        outcome = score(task)
    except RowFault as error:
        return str(error)
    except Exception:  # of a text that is no reply
        return ""
    if has_reply and outcome.reward == 0:
        return f"not even its own answer {task.expected!r:.100} is judged as right"
    return ""
