# SPDX-License-Identifier: Apache-2.0
"""Office tools, after WorkBench (arXiv:2405.00823): e-mail, calendar, web site visits, tasks, customers, a directory.

Over several turns the model must bring the office into the state that the right calls lead to. The state is plain:
records in tables; a tool is a function of the state and its arguments. No state survives a turn: the grader replays the
whole conversation, so that any child can judge any turn. Runs in `mrl.envs.child`.
"""

from __future__ import annotations

import copy
import csv
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mrl.config.texts import safe_values
from mrl.envs.task import Environment, Outcome, RowFault, Score, Task, built_in, field_of
from mrl.envs.tool_calls import declared_tools, tool_calls

if TYPE_CHECKING:
    from mrl.config.schema.env import EnvConfig

Record = dict[str, object]
Tables = dict[str, list[Record]]
Tool = Callable[..., object]
"""Takes the office, and what `TOOLS` binds, by position, so that a model's arguments cannot replace them."""

NOW = "2023-11-30 00:00:00"
PAGE_SIZE = 5
TIME_CHARACTERS, DAY_CHARACTERS = 19, 10
"""Lengths of `2023-11-30 00:00:00` and of `2023-11-30`."""

FIELDS: Mapping[str, tuple[str, ...]] = {
    "emails": ("email_id", "inbox/outbox", "sender/recipient", "subject", "sent_datetime", "body"),
    "events": ("event_id", "event_name", "participant_email", "event_start", "duration"),
    "visits": (
        "visitor_id",
        "date_of_visit",
        "page_views",
        "session_duration_seconds",
        "traffic_source",
        "user_engaged",
    ),
    "tasks": ("task_id", "task_name", "assigned_to_email", "list_name", "due_date", "board"),
    "customers": (
        *("customer_id", "assigned_to_email", "customer_name", "customer_email", "customer_phone", "last_contact_date"),
        *("product_interest", "status", "notes", "follow_up_by"),
    ),
    "directory": ("email_address",),
    "plots": ("plot_id", "time_min", "time_max", "value_to_plot", "plot_type"),
}
"""Fields of each table; the first one identifies a record."""

CHANGED = ("emails", "events", "tasks", "customers", "plots")
CASED = ("status", "list_name", "board")
CHOICES: Mapping[str, tuple[str, ...]] = {
    "tasks.list_name": ("Backlog", "In Progress", "In Review", "Completed"),
    "tasks.board": ("Back end", "Front end", "Design"),
    "customers.status": ("Qualified", "Won", "Lost", "Lead", "Proposal"),
    "customers.product_interest": ("Software", "Hardware", "Services", "Consulting", "Training"),
    "plots.value_to_plot": (
        *("total_visits", "session_duration_seconds", "user_engaged"),
        *(f"visits_{source}" for source in ("direct", "referral", "search_engine", "social_media")),
    ),
    "plots.plot_type": ("bar", "line", "scatter", "histogram"),
}

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
"""Flag of a conversation with a call that cannot be read."""


class ToolError(Exception):
    """A tool's error, which it answers instead of a result; it leaves the state unchanged."""


@dataclass
class Office:
    """The state of one conversation."""

    tables: Tables

    @staticmethod
    def open(tables: Mapping[str, list[Record]]) -> Office:
        """An office with copies of these records; a ValueError names tables and fields that are not known."""
        unknown = [name for name in tables if name not in FIELDS]
        for name in tables.keys() & FIELDS.keys():
            unknown += [f"{name}.{key}" for row in tables[name] for key in row if key not in FIELDS[name]]
        if unknown:
            raise ValueError(
                f"tables of the office are {', '.join(FIELDS)}, with fields as in "
                f"mrl/nemo/gym/graders/workplace_assistant.py; not {unknown[:5]}"
            )
        return Office({name: copy.deepcopy(list(tables.get(name, []))) for name in FIELDS})

    def call(self, name: str, arguments: Mapping[str, object]) -> object:
        """The result of a tool; ToolError if there is no such tool or record, or an argument is missing or unknown."""
        tool = TOOLS.get(name)
        if tool is None:
            raise ToolError(f"there is no tool {name!r}")
        try:
            # JSON may escape characters that are replaced where a text has them.
            return tool(self, **{key: safe_values(value) for key, value in arguments.items() if value is not None})
        except TypeError as error:
            raise ToolError(f"{name}: {error}") from error

    def digest(self) -> object:
        """State for comparison: records in order, texts without case but for `CASED`; non-texts count as nothing."""
        state = list[list[object]]()
        for name in CHANGED:
            for row in self.tables[name]:
                values = (row.get(key) for key in FIELDS[name])
                texts = (value if isinstance(value, str) and value else None for value in values)
                state.append(
                    [
                        name,
                        *(
                            text if text is None or key in CASED else text.lower()
                            for key, text in zip(FIELDS[name], texts, strict=True)
                        ),
                    ]
                )
        return state

    def check(self, table: str, values: Mapping[str, object]) -> None:
        """A ToolError if a value is empty, or not one that this field takes."""
        for key, value in values.items():
            allowed = CHOICES.get(f"{table}.{key}", ())
            if table == "tasks" and key == "assigned_to_email":
                allowed = tuple({str(row.get(key)).lower() for row in self.tables[table]})
                value = str(value).lower()
            if not value or (allowed and value not in allowed):
                raise ToolError(
                    f"{key}={value!r:.100} is empty or none of "
                    f"{', '.join(map(str, allowed)) or 'the texts that it takes'}"
                )
            try:
                if key == "event_start":
                    datetime.fromisoformat(str(value))
                is_possible = key != "duration" or int(str(value)) > 0
            except ValueError as error:
                raise ToolError(f"{key}: {error}") from error
            if not is_possible or (key == "recipient" and not {"@", "."} <= {*str(value)}):
                raise ToolError(f"{key}={value!r:.100} is no number of minutes or no e-mail address")

    def find(self, table: str, named: Mapping[str, object]) -> Record:
        """The record whose id is the only argument; a ToolError if there is none, or other arguments."""
        key = FIELDS[table][0]
        if set(named) != {key}:
            raise ToolError(f"the arguments must have {key}, and nothing else that is not known; not {sorted(named)}")
        row = next((row for row in self.tables[table] if str(row.get(key)) == named[key]), None)
        if row is None:
            raise ToolError(f"no {key} {named[key]!r}")
        return row

    def add(self, table: str, **values: object) -> str:
        """Makes a record and gives back its id, one above the highest."""
        id_field = FIELDS[table][0]
        numbers = [int(str(row[id_field])) for row in self.tables[table] if str(row.get(id_field, "")).isdigit()]
        row: Record = {id_field: f"{max(numbers, default=0) + 1:08d}", **values}
        self.tables[table].append(row)
        return str(row[id_field])


def get(table: str, office: Office, /, field: str, **named: object) -> object:
    """One field of a record. The functions from here to `TOOLS` are the tools."""
    row = office.find(table, named)
    if field not in FIELDS[table]:
        raise ToolError(f"no field {field!r}; there are {', '.join(FIELDS[table])}")
    return {field: row.get(field, "")}


def update(table: str, office: Office, /, field: str, new_value: object, **named: object) -> object:
    row = office.find(table, named)
    if field not in FIELDS[table][1:]:
        raise ToolError(f"no field {field!r} that can be changed; there are {', '.join(FIELDS[table][1:])}")
    office.check(table, {field: new_value})
    row[field] = new_value
    return "updated"


def delete(table: str, office: Office, /, **named: object) -> object:
    office.tables[table].remove(office.find(table, named))
    return "deleted"


def create(
    table: str, needed: tuple[str, ...], optional: tuple[str, ...], office: Office, /, **named: object
) -> object:
    missing, unknown = [key for key in needed if key not in named], named.keys() - {*needed, *optional}
    if missing or unknown:
        raise ToolError(f"arguments missing: {missing}, not known: {sorted(unknown)}")
    # Gym lets a new customer have any status.
    office.check("" if table == "customers" else table, {key: named[key] for key in needed})
    return office.add(table, **named)


def find_address(office: Office, /, name: str = "") -> object:
    return [
        row["email_address"]
        for row in office.tables["directory"]
        if name.lower() in str(row.get("email_address", "")).lower()
    ]


def send_email(office: Office, /, recipient: str, subject: str, body: str) -> object:
    office.check("emails", {"recipient": recipient, "subject": subject, "body": body})
    message = {"sender/recipient": recipient, "subject": subject, "sent_datetime": NOW, "body": body}
    office.add("emails", **{"inbox/outbox": "outbox"}, **message)
    return "sent"


def forward_email(office: Office, /, email_id: str, recipient: str) -> object:
    row = office.find("emails", {"email_id": email_id})
    return send_email(office, recipient, f"FW: {row.get('subject', '')}", str(row.get("body", "")))


def reply_email(office: Office, /, email_id: str, body: str) -> object:
    row = office.find("emails", {"email_id": email_id})
    return send_email(office, str(row.get("sender/recipient", "")), f"RE: {row.get('subject', '')}", body)


def search_emails(office: Office, /, date_min: object = None, date_max: object = None, **query: object) -> object:
    """E-mails with all words of a query, newest first."""
    rows = [
        row for row in office.tables["emails"] if _between(row, "sent_datetime", date_min, date_max, DAY_CHARACTERS)
    ]
    rows.sort(key=lambda row: str(row.get("sent_datetime", "")), reverse=True)
    return _with_words(rows, ("subject", "body", "sender/recipient"), **query)


def search_events(office: Office, /, time_min: object = None, time_max: object = None, **query: object) -> object:
    """Events with all words of a query in name or participant, earliest first."""
    rows = [row for row in office.tables["events"] if _between(row, "event_start", time_min, time_max, TIME_CHARACTERS)]
    rows.sort(key=lambda row: str(row.get("event_start", "")))
    return _with_words(rows, ("event_name", "participant_email"), **query)


def search_tasks(office: Office, /, **named: object) -> object:
    return _search(office, "tasks", named, ())


def search_customers(office: Office, /, page: object = 1, page_size: object = PAGE_SIZE, **named: object) -> object:
    return _page(_search(office, "customers", named, ("last_contact_date", "follow_up_by")), page, page_size)


def visits_of(office: Office, /, visitor_id: str) -> object:
    rows = [row for row in office.tables["visits"] if str(row.get("visitor_id")) == str(visitor_id)]
    if not rows:
        raise ToolError(f"no visitor_id {visitor_id!r}")
    return rows


def count_visits(
    value: Callable[[Record], float], is_mean: bool, office: Office, /, time_min: object = None, time_max: object = None
) -> object:
    """The sum, or the mean, of a number of each visit, per day."""
    days: dict[str, list[float]] = {}
    for row in office.tables["visits"]:
        if _between(row, "date_of_visit", time_min, time_max, DAY_CHARACTERS):
            days.setdefault(str(row.get("date_of_visit", ""))[:DAY_CHARACTERS], []).append(value(row))
    return {day: sum(values) / (len(values) if is_mean else 1) for day, values in sorted(days.items())}


def count_sources(office: Office, /, traffic_source: str = "", **times: object) -> object:
    return count_visits(
        lambda row: float(traffic_source in ("", str(row.get("traffic_source")))), False, office, **times
    )


def _search(office: Office, table: str, named: Mapping[str, object], dates: tuple[str, ...]) -> list[Record]:
    texts = {key: value for key, value in named.items() if key in FIELDS[table][1:]}
    if unknown := named.keys() - texts.keys() - {f"{key}_{end}" for key in dates for end in ("min", "max")}:
        raise ToolError(f"arguments not known: {sorted(unknown)}")
    return [
        row
        for row in office.tables[table]
        if all(str(value).lower() in str(row.get(key, "")).lower() for key, value in texts.items())
        and all(_between(row, key, named.get(f"{key}_min"), named.get(f"{key}_max"), TIME_CHARACTERS) for key in dates)
    ]


def _page(rows: list[Record], page: object, page_size: object) -> list[Record]:
    try:
        first, size = int(str(page)), int(str(page_size))
    except ValueError as error:
        raise ToolError(f"page: {error}") from error
    if first < 1 or size < 1:
        raise ToolError("page and page_size count from 1")
    return rows[(first - 1) * size : first * size]


def _with_words(
    rows: list[Record], fields: tuple[str, ...], /, query: object = "", page: object = 1, page_size: object = PAGE_SIZE
) -> list[Record]:
    words = str(query).lower().split()
    texts = [" ".join(str(row.get(field, "")) for field in fields).lower() for row in rows]
    return _page(
        [row for row, text in zip(rows, texts, strict=True) if all(word in text for word in words)], page, page_size
    )


def _between(row: Record, field: str, low: object, high: object, length: int) -> bool:
    value = str(row.get(field, ""))[:length]
    return (low is None or value >= str(low)[:length]) and (high is None or value <= str(high)[:length])


_CRM, _PROJECTS = "customer_relationship_manager", "project_management"
_NEEDED_OF_CUSTOMERS = ("customer_name", "assigned_to_email", "status")
_OTHERS_OF_CUSTOMERS = tuple(key for key in FIELDS["customers"][1:] if key not in _NEEDED_OF_CUSTOMERS)

TOOLS: Mapping[str, Tool] = {
    "company_directory_find_email_address": find_address,
    "email_get_email_information_by_id": partial(get, "emails"),
    "email_search_emails": search_emails,
    "email_send_email": send_email,
    "email_delete_email": partial(delete, "emails"),
    "email_forward_email": forward_email,
    "email_reply_email": reply_email,
    "calendar_get_event_information_by_id": partial(get, "events"),
    "calendar_search_events": search_events,
    "calendar_create_event": partial(
        create, "events", ("event_name", "participant_email", "event_start", "duration"), ()
    ),
    "calendar_delete_event": partial(delete, "events"),
    "calendar_update_event": partial(update, "events"),
    "analytics_get_visitor_information_by_id": visits_of,
    "analytics_create_plot": partial(create, "plots", FIELDS["plots"][1:], ()),
    "analytics_total_visits_count": partial(count_visits, lambda row: 1.0, False),
    "analytics_engaged_users_count": partial(
        count_visits, lambda row: float(str(row.get("user_engaged")).lower() in ("true", "1")), False
    ),
    "analytics_traffic_source_count": count_sources,
    "analytics_get_average_session_duration": partial(
        count_visits, lambda row: float(str(row.get("session_duration_seconds") or 0)), True
    ),
    f"{_PROJECTS}_get_task_information_by_id": partial(get, "tasks"),
    f"{_PROJECTS}_search_tasks": search_tasks,
    f"{_PROJECTS}_create_task": partial(create, "tasks", FIELDS["tasks"][1:], ()),
    f"{_PROJECTS}_delete_task": partial(delete, "tasks"),
    f"{_PROJECTS}_update_task": partial(update, "tasks"),
    f"{_CRM}_search_customers": search_customers,
    f"{_CRM}_update_customer": partial(update, "customers"),
    f"{_CRM}_add_customer": partial(create, "customers", _NEEDED_OF_CUSTOMERS, _OTHERS_OF_CUSTOMERS),
    f"{_CRM}_delete_customer": partial(delete, "customers"),
}
"""Tools by the names that rows of the Nemotron-3-Nano blend declare."""


def environment(config: EnvConfig) -> Environment:
    """Declares `workplace_assistant`."""
    section = config.workplace_assistant
    path = None if section.tables_path is None else os.path.abspath(section.tables_path)
    return built_in(__name__, section, "ground_truth", "tables", "tools", tables_path=path)


def make(tables_path: str | None) -> Score:
    """The reward function; `tables_path` as env.workplace_assistant.tables_path, which is read here."""
    tables = {} if tables_path is None else load_tables(Path(tables_path))
    Office.open(tables)
    return partial(score, shared_tables=tables)


def load_tables(path: Path) -> Tables:
    """The tables of a JSON file, or of a folder of WorkBench's CSV files; one that is not there has no records."""
    if not path.is_dir():
        return json.loads(path.read_text(encoding="utf-8"))
    tables: Tables = {}
    for name, file in CSV_FILES.items():
        if (path / file).is_file():
            with (path / file).open(encoding="utf-8", newline="") as lines:
                tables[name] = [
                    dict(row) for row in csv.DictReader(lines, fieldnames=FIELDS[name] if name == "directory" else None)
                ]
    if not tables:
        raise ValueError(f"{path} has none of {', '.join(CSV_FILES.values())}")
    return tables


def score(task: Task, *, shared_tables: Mapping[str, list[Record]]) -> Outcome:
    """1 if the office is now in the state that the calls of `ground_truth` lead to, else 0.

    As long as the last turn calls tools, their results are the observation.
    """
    fields = task.fields
    truth: list[object] = field_of(fields, "ground_truth", list)
    try:
        tables = {**shared_tables, **cast(Mapping[str, list[Record]], fields.get("tables") or {})}
        right = Office.open(tables)
        for call in truth:
            if not isinstance(call, dict):
                raise RowFault(f"ground_truth: {call!r:.100} is no call")
            arguments = call.get("arguments")
            right.call(str(call.get("name")), json.loads(arguments) if isinstance(arguments, str) else arguments or {})
    except ToolError as error:
        raise RowFault(
            f"tables or ground_truth: ground_truth cannot be carried out: {error}; give the records it is about in "
            "the row's `tables` or in env.workplace_assistant.tables_path"
        ) from error
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise RowFault(f"tables or ground_truth: {error}") from error
    tools = declared_tools(fields)
    office, flags, results = Office.open(tables), set[str](), list[str]()
    for turn in task.replies:
        results = []
        for call in tool_calls(turn, tools, task.tool_parser):
            if call.error:
                flags.add(INVALID_CALL)
                result: object = {"error": call.error}
            else:
                try:
                    result = office.call(call.name, call.arguments)
                except ToolError as error:
                    result = {"error": str(error)}
            results.append(json.dumps(result, ensure_ascii=bool(call.error)))
    is_right = office.digest() == right.digest()
    return Outcome(
        float(is_right),
        extracted="the right state" if is_right else "another state",
        flags=tuple(flags),
        observation=tuple({"role": "tool", "content": result} for result in results),
    )
