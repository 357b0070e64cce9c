"""The tools of an office, after WorkBench (arXiv:2405.00823): e-mail, calendar, visits of a web site, tasks, customers, a directory.

The state is plain: records in tables. A tool is a function of the state and its arguments.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Record = dict[str, object]
Tables = dict[str, list[Record]]

NOW = "2023-11-30 00:00:00"
"""The time at which every conversation takes place."""
PAGE_SIZE = 5

FIELDS: Mapping[str, tuple[str, ...]] = {
    "emails": ("email_id", "inbox/outbox", "sender/recipient", "subject", "sent_datetime", "body"),
    "events": ("event_id", "event_name", "participant_email", "event_start", "duration"),
    "visits": ("visitor_id", "date_of_visit", "page_views", "session_duration_seconds", "traffic_source", "user_engaged"),
    "tasks": ("task_id", "task_name", "assigned_to_email", "list_name", "due_date", "board"),
    "customers": (
        *("customer_id", "assigned_to_email", "customer_name", "customer_email", "customer_phone", "last_contact_date"),
        *("product_interest", "status", "notes", "follow_up_by"),
    ),
    "directory": ("email_address",),
    "plots": ("plot_id", "time_min", "time_max", "value_to_plot", "plot_type"),
}
"""Fields of each table; the first one identifies a record."""


class ToolError(Exception):
    """What a tool answers instead of a result; the state is as before."""


@dataclass
class Office:
    """The state of one conversation."""

    tables: Tables
    created: set[int]
    """`id()` of records that the conversation made."""

    @staticmethod
    def open(tables: Mapping[str, list[Record]]) -> Office:
        """An office with copies of these records.

        Raises:
            ValueError: a table or a field is not known.
        """
        unknown = [name for name in tables if name not in FIELDS]
        for name in tables.keys() & FIELDS.keys():
            unknown += [f"{name}.{key}" for row in tables[name] for key in row if key not in FIELDS[name]]
        if unknown:
            raise ValueError(
                f"tables of the office are {', '.join(FIELDS)}, with fields as in mrl/envs/workplace_tools.py; not {unknown[:5]}"
            )
        return Office({name: copy.deepcopy(list(tables.get(name, []))) for name in FIELDS}, set())

    def call(self, name: str, arguments: Mapping[str, object]) -> object:
        """What the tool answers.

        Raises:
            ToolError: there is no such tool or record, or an argument is missing or not known.
        """
        tool = TOOLS.get(name)
        if tool is None:
            raise ToolError(f"there is no tool {name!r}")
        try:
            return tool(self, **{key: value for key, value in arguments.items() if value is not None})
        except TypeError as error:
            raise ToolError(f"{name}: {error}") from error

    def digest(self) -> object:
        """What counts of the state: all records without order or case; new ones without the id that they happened to get."""
        return {name: sorted(self._content(name, row) for row in rows) for name, rows in self.tables.items()}

    def _content(self, table: str, row: Record) -> list[str]:
        skipped = FIELDS[table][0] if id(row) in self.created else None
        return [f"{key}={row.get(key, '')}".casefold() for key in FIELDS[table] if key != skipped]

    def find(self, table: str, key: object) -> Record:
        """The record with this id."""
        id_field = FIELDS[table][0]
        row = next((row for row in self.tables[table] if str(row.get(id_field)) == str(key)), None)
        if row is None:
            raise ToolError(f"no {id_field} {key!r}")
        return row

    def add(self, table: str, **values: object) -> str:
        """Makes a record and gives back its id, one above the highest."""
        id_field = FIELDS[table][0]
        numbers = [int(str(row[id_field])) for row in self.tables[table] if str(row.get(id_field, "")).isdigit()]
        row: Record = {id_field: f"{max(numbers, default=0) + 1:08d}", **values}
        self.tables[table].append(row)
        self.created.add(id(row))
        return str(row[id_field])


def _page(rows: list[Record], page: object, page_size: object) -> list[Record]:
    try:
        first, size = int(str(page)), int(str(page_size))
    except ValueError as error:
        raise ToolError(f"page: {error}") from error
    if first < 1 or size < 1:
        raise ToolError("page and page_size count from 1")
    return rows[(first - 1) * size : first * size]


def _matches(row: Record, fields: tuple[str, ...], query: object) -> bool:
    text = " ".join(str(row.get(field, "")) for field in fields).lower()
    return all(word in text for word in str(query).lower().split())


def _between(row: Record, field: str, low: object, high: object, length: int = 19) -> bool:
    value = str(row.get(field, ""))[:length]
    return (low is None or value >= str(low)[:length]) and (high is None or value <= str(high)[:length])


def get(table: str, id_field: str) -> Callable[..., object]:
    """A tool that tells one field of a record."""

    def tool(office: Office, field: str, **named: object) -> object:
        row = office.find(table, _only(named, id_field))
        if field not in FIELDS[table]:
            raise ToolError(f"no field {field!r}; there are {', '.join(FIELDS[table])}")
        return {field: row.get(field, "")}

    return tool


def update(table: str, id_field: str) -> Callable[..., object]:
    """A tool that changes one field of a record."""

    def tool(office: Office, field: str, new_value: object, **named: object) -> object:
        row = office.find(table, _only(named, id_field))
        if field not in FIELDS[table][1:]:
            raise ToolError(f"no field {field!r} that can be changed; there are {', '.join(FIELDS[table][1:])}")
        row[field] = new_value
        return "updated"

    return tool


def delete(table: str, id_field: str) -> Callable[..., object]:
    """A tool that removes a record."""

    def tool(office: Office, **named: object) -> object:
        office.tables[table].remove(office.find(table, _only(named, id_field)))
        return "deleted"

    return tool


def create(table: str, needed: tuple[str, ...], optional: tuple[str, ...] = ()) -> Callable[..., object]:
    """A tool that makes a record of its arguments."""

    def tool(office: Office, **named: object) -> object:
        missing, unknown = [key for key in needed if key not in named], named.keys() - {*needed, *optional}
        if missing or unknown:
            raise ToolError(f"arguments missing: {missing}, not known: {sorted(unknown)}")
        return office.add(table, **named)

    return tool


def _only(named: Mapping[str, object], key: str) -> object:
    if set(named) != {key}:
        raise ToolError(f"the arguments must have {key}, and nothing else that is not known; not {sorted(named)}")
    return named[key]


def find_address(office: Office, name: str = "") -> object:
    """E-mail addresses that contain a name."""
    return [row["email_address"] for row in office.tables["directory"] if name.lower() in str(row.get("email_address", "")).lower()]


def search_emails(
    office: Office, query: str = "", date_min: object = None, date_max: object = None, page: object = 1, page_size: object = PAGE_SIZE
) -> object:
    """E-mails with all words of a query, newest first."""
    rows = [
        row
        for row in office.tables["emails"]
        if _matches(row, ("subject", "body", "sender/recipient"), query) and _between(row, "sent_datetime", date_min, date_max, 10)
    ]
    return _page(sorted(rows, key=lambda row: str(row.get("sent_datetime", "")), reverse=True), page, page_size)


def send_email(office: Office, recipient: str, subject: str, body: str) -> object:
    """Sends an e-mail."""
    message = {"sender/recipient": recipient, "subject": subject, "sent_datetime": NOW, "body": body}
    office.add("emails", **{"inbox/outbox": "outbox"}, **message)
    return "sent"


def forward_email(office: Office, email_id: str, recipient: str) -> object:
    """Sends an e-mail on."""
    row = office.find("emails", email_id)
    return send_email(office, recipient, f"FW: {row.get('subject', '')}", str(row.get("body", "")))


def reply_email(office: Office, email_id: str, body: str) -> object:
    """Answers an e-mail."""
    row = office.find("emails", email_id)
    return send_email(office, str(row.get("sender/recipient", "")), str(row.get("subject", "")), body)


def search_events(
    office: Office, query: str = "", time_min: object = None, time_max: object = None, page: object = 1, page_size: object = PAGE_SIZE
) -> object:
    """Events with all words of a query in name or participant."""
    rows = [
        row
        for row in office.tables["events"]
        if _matches(row, ("event_name", "participant_email"), query) and _between(row, "event_start", time_min, time_max)
    ]
    return _page(sorted(rows, key=lambda row: str(row.get("event_start", ""))), page, page_size)


def search_rows(
    office: Office, table: str, named: Mapping[str, object], ranges: Mapping[str, str], page: object, page_size: object
) -> list[Record]:
    """Records whose fields contain the given texts, and lie within the given `<field>_min` and `<field>_max`."""
    texts = {key: value for key, value in named.items() if key in FIELDS[table][1:]}
    bounds = {key: value for key, value in named.items() if key in ranges}
    if unknown := named.keys() - texts.keys() - bounds.keys():
        raise ToolError(f"arguments not known: {sorted(unknown)}")
    rows = [
        row
        for row in office.tables[table]
        if all(str(value).lower() in str(row.get(key, "")).lower() for key, value in texts.items())
        and all(_between(row, ranges[key], *((value, None) if key.endswith("_min") else (None, value))) for key, value in bounds.items())
    ]
    return _page(rows, page, page_size)


def search_tasks(office: Office, **named: object) -> object:
    """Tasks whose fields contain the given texts."""
    return search_rows(office, "tasks", named, {}, 1, max(1, len(office.tables["tasks"])))


def search_customers(office: Office, page: object = 1, page_size: object = PAGE_SIZE, **named: object) -> object:
    """Customers whose fields contain the given texts."""
    dates = ("last_contact_date", "follow_up_by")
    return search_rows(office, "customers", named, {f"{key}_{end}": key for key in dates for end in ("min", "max")}, page, page_size)


def visits_of(office: Office, visitor_id: str) -> object:
    """All visits of a visitor."""
    rows = [row for row in office.tables["visits"] if str(row.get("visitor_id")) == str(visitor_id)]
    if not rows:
        raise ToolError(f"no visitor_id {visitor_id!r}")
    return rows


def count_visits(
    office: Office, value: Callable[[Record], float], is_mean: bool, time_min: object = None, time_max: object = None
) -> object:
    """A number per day of a range of days."""
    days: dict[str, list[float]] = {}
    for row in office.tables["visits"]:
        if _between(row, "date_of_visit", time_min, time_max, 10):
            days.setdefault(str(row.get("date_of_visit", ""))[:10], []).append(value(row))
    return {day: sum(values) / (len(values) if is_mean else 1) for day, values in sorted(days.items())}


def count_sources(office: Office, traffic_source: str = "", **times: object) -> object:
    """Visits from a source per day."""
    return count_visits(office, lambda row: float(traffic_source in ("", str(row.get("traffic_source")))), False, **times)


def _is_engaged(row: Record) -> float:
    return float(str(row.get("user_engaged")).lower() in ("true", "1"))


def _duration(row: Record) -> float:
    return float(str(row.get("session_duration_seconds") or 0))


_CRM, _PROJECTS, _TASK_FIELDS = "customer_relationship_manager", "project_management", FIELDS["tasks"][1:]
_NEEDED_OF_CUSTOMERS = ("customer_name", "assigned_to_email", "status")

TOOLS: Mapping[str, Callable[..., object]] = {
    "company_directory_find_email_address": find_address,
    "email_get_email_information_by_id": get("emails", "email_id"),
    "email_search_emails": search_emails,
    "email_send_email": send_email,
    "email_delete_email": delete("emails", "email_id"),
    "email_forward_email": forward_email,
    "email_reply_email": reply_email,
    "calendar_get_event_information_by_id": get("events", "event_id"),
    "calendar_search_events": search_events,
    "calendar_create_event": create("events", ("event_name", "participant_email", "event_start", "duration")),
    "calendar_delete_event": delete("events", "event_id"),
    "calendar_update_event": update("events", "event_id"),
    "analytics_get_visitor_information_by_id": visits_of,
    "analytics_create_plot": create("plots", FIELDS["plots"][1:]),
    "analytics_total_visits_count": functools.partial(count_visits, value=lambda row: 1.0, is_mean=False),
    "analytics_engaged_users_count": functools.partial(count_visits, value=_is_engaged, is_mean=False),
    "analytics_traffic_source_count": count_sources,
    "analytics_get_average_session_duration": functools.partial(count_visits, value=_duration, is_mean=True),
    f"{_PROJECTS}_get_task_information_by_id": get("tasks", "task_id"),
    f"{_PROJECTS}_search_tasks": search_tasks,
    f"{_PROJECTS}_create_task": create("tasks", _TASK_FIELDS),
    f"{_PROJECTS}_delete_task": delete("tasks", "task_id"),
    f"{_PROJECTS}_update_task": update("tasks", "task_id"),
    f"{_CRM}_search_customers": search_customers,
    f"{_CRM}_update_customer": update("customers", "customer_id"),
    f"{_CRM}_add_customer": create(
        "customers", _NEEDED_OF_CUSTOMERS, tuple(key for key in FIELDS["customers"][1:] if key not in _NEEDED_OF_CUSTOMERS)
    ),
    f"{_CRM}_delete_customer": delete("customers", "customer_id"),
}
"""By the names that rows of the Nemotron-3-Nano blend declare."""
