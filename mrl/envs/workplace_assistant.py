"""An office with tools: over several turns the model must bring it into the state that the right calls bring about.

Nothing is kept between two turns: each is judged by a replay of the whole conversation, so that any child can answer at any time.
Runs in `mrl.envs.child`.
"""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from mrl.envs.task import Outcome, RowFault, Score, Task, field_of, text_after_thinking
from mrl.envs.tool_calls import ToolCall, tool_calls
from mrl.envs.workplace_tools import FIELDS, Office, Record, Tables, ToolError

CSV_FILES: Mapping[str, str] = {
    "emails": "emails.csv",
    "events": "calendar_events.csv",
    "visits": "analytics_data.csv",
    "tasks": "project_tasks.csv",
    "customers": "customer_relationship_manager_data.csv",
    "directory": "email_addresses.csv",
}
"""WorkBench's files (github.com/olly-styles/WorkBench, data/processed and data/raw)."""

INVALID_CALL = "invalid_tool_call"
"""Flag of a conversation with a call that could not be read."""


def make(tables_path: str | None) -> Score:
    """The reward function; `tables_path` as env.workplace_assistant.tables_path.

    Raises:
        OSError, ValueError: the file cannot be read.
    """
    tables = {} if tables_path is None else load_tables(Path(tables_path))
    Office.open(tables)
    return functools.partial(score, shared_tables=tables)


def load_tables(path: Path) -> Tables:
    """The tables of a JSON file, or of a folder of WorkBench's CSV files; one that is not there has no records.

    Raises:
        OSError, ValueError: they cannot be read.
    """
    if not path.is_dir():
        return json.loads(path.read_text(encoding="utf-8"))
    tables: Tables = {}
    for name, file in CSV_FILES.items():
        if (path / file).is_file():
            with (path / file).open(encoding="utf-8", newline="") as lines:
                # The directory has no line of names.
                tables[name] = [dict(row) for row in csv.DictReader(lines, fieldnames=FIELDS[name] if name == "directory" else None)]
    if not tables:
        raise ValueError(f"{path} has none of {', '.join(CSV_FILES.values())}")
    return tables


def score(task: Task, *, shared_tables: Mapping[str, list[Record]]) -> Outcome:
    """1 if the office is now in the state that the calls of `ground_truth` lead to, else 0.

    As long as the last turn calls tools, their results are the observation.

    Raises:
        RowFault: the row has no ground truth, or it cannot be carried out: then no conversation could be right.
    """
    fields = task.fields
    truth = cast(list[object], field_of(fields, "ground_truth", list))
    try:
        tables = {**shared_tables, **cast(Mapping[str, list[Record]], fields.get("tables") or {})}
        right = _replay_truth(Office.open(tables), truth)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise RowFault(f"tables or ground_truth: {error}") from error
    parameters = fields.get("responses_create_params")
    tools = fields.get("tools") or (parameters.get("tools") if isinstance(parameters, dict) else None) or []
    office, flags = Office.open(tables), set()
    results: list[str] = []
    for turn in task.turns:
        calls = tool_calls(text_after_thinking(turn), cast(list[object], tools))
        results = [_result(office, call) for call in calls]
        if any(call.error for call in calls):
            flags.add(INVALID_CALL)
    is_right = office.digest() == right.digest()
    return Outcome(
        float(is_right),
        extracted="the right state" if is_right else "another state",
        flags=tuple(flags),
        observation=tuple({"role": "tool", "content": result} for result in results),
    )


def _replay_truth(office: Office, calls: list[object]) -> Office:
    for call in calls:
        if not isinstance(call, dict):
            raise RowFault(f"ground_truth: {call!r:.100} is no call")
        arguments = call.get("arguments")
        try:
            office.call(str(call.get("name")), json.loads(arguments) if isinstance(arguments, str) else arguments or {})
        except ToolError as error:
            raise RowFault(
                f"ground_truth cannot be carried out: {error}; give the records it is about in the row's `tables` "
                "or in env.workplace_assistant.tables_path"
            ) from error
    return office


def _result(office: Office, call: ToolCall) -> str:
    if call.error:
        return json.dumps({"error": call.error})
    try:
        return json.dumps(office.call(call.name, call.arguments), ensure_ascii=False)
    except ToolError as error:
        return json.dumps({"error": str(error)}, ensure_ascii=False)
