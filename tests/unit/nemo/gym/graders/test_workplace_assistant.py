# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest

from mrl.envs.task import Outcome, Task
from mrl.envs.tool_calls import ToolCall, tool_calls
from mrl.nemo.gym.graders.workplace_assistant import TOOLS, Office, Record, Tables, ToolError, load_tables, make


def email(number: int, sender: str, subject: str, day: int) -> Record:
    sent = f"2023-11-{day:02d} 10:00:00"
    return {
        "email_id": f"{number:08d}",
        "inbox/outbox": "inbox",
        "sender/recipient": sender,
        "subject": subject,
        "sent_datetime": sent,
    }


def visit(number: int, seconds: int, is_engaged: bool, source: str) -> Record:
    visitor = {"visitor_id": str(number), "date_of_visit": "2023-10-01", "session_duration_seconds": seconds}
    return {**visitor, "user_engaged": is_engaged, "traffic_source": source}


TABLES: Tables = {
    "emails": [email(7, "ann@x.com", "Plan", 1), email(9, "bob@x.com", "Plan B", 3)],
    "customers": [
        {"customer_id": "00000001", "customer_name": "Cy", "status": "Lead", "follow_up_by": "2023-12-01"},
        {"customer_id": "00000002", "customer_name": "Di", "status": "Won", "follow_up_by": "2023-12-09"},
    ],
    "visits": [visit(1, 10, True, "direct"), visit(2, 30, False, "referral")],
    "directory": [{"email_address": "ann@x.com"}, {"email_address": "bob@x.com"}],
}
TRUTH = [
    {"name": "email_reply_email", "arguments": json.dumps({"email_id": "00000009", "body": "Yes"})},
    {
        "name": "customer_relationship_manager_update_customer",
        "arguments": json.dumps({"customer_id": "00000001", "field": "status", "new_value": "Won"}),
    },
]


def call(tool: str, /, **arguments: object) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={tool}>\n{body}</function>\n</tool_call>"


REPLY = call("email_reply_email", email_id="00000009", body="yes")
UPDATE = call("customer_relationship_manager_update_customer", customer_id="00000001", field="status", new_value="Won")


def judge(*turns: str, truth: object = TRUTH, tables: object = TABLES) -> Outcome:
    return make(None)(Task(turns, row=json.dumps({"ground_truth": truth, "tables": tables})))


def test_the_right_state_is_what_counts():
    assert judge(REPLY + UPDATE).reward == judge(UPDATE, REPLY, "Done.").reward == 1.0
    assert judge("<think>...</think>" + UPDATE, call("email_search_emails", query="plan b"), REPLY).reward == 1.0
    for turns in (
        [REPLY],
        [UPDATE],
        [REPLY, UPDATE, REPLY],
        ["Done."],
        [REPLY, UPDATE, call("email_delete_email", email_id="00000007")],
    ):
        assert judge(*turns).reward == 0.0


def test_results_are_observed_until_a_turn_calls_nothing():
    outcome = judge(
        call("email_search_emails", query="PLAN", date_min="2023-11-02")
        + call("company_directory_find_email_address", name="ann")
    )
    assert [message["role"] for message in outcome.observation] == ["tool", "tool"]
    emails, addresses = (json.loads(message["content"]) for message in outcome.observation)
    assert [email["email_id"] for email in emails] == ["00000009"] and addresses == ["ann@x.com"]
    assert judge(REPLY, "Done.").observation == ()


def test_new_records_are_found_and_their_order_counts():
    event = {"participant_email": "a", "event_start": "2023-12-01 09:00:00", "duration": "5"}
    one, two = (call("calendar_create_event", event_name=name, **event) for name in "ab")
    truth = [{"name": "calendar_create_event", "arguments": {"event_name": name, **event}} for name in "ab"]
    assert judge(one, two, truth=truth).reward == 1.0 > judge(two, one, truth=truth).reward
    search = judge(one, call("calendar_search_events", query="a"), truth=truth)
    assert json.loads(search.observation[0]["content"])[0]["event_id"] == "00000001"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (call("email_fly"), "there is no tool"),
        (call("email_delete_email", email_id="3"), "no email_id '3'"),
        (call("email_delete_email"), "must have email_id"),
        (call("email_send_email", recipient="a"), "missing"),
        (call("email_send_email", recipient="a", subject="b", body="c", colour="d"), "colour"),
        (call("calendar_create_event", event_name="a"), "missing"),
        (
            call("customer_relationship_manager_update_customer", customer_id="00000001", field="mood", new_value="a"),
            "no field 'mood'",
        ),
        (call("customer_relationship_manager_search_customers", mood="a"), "mood"),
        (call("email_search_emails", page="x"), "page"),
        ("<tool_call>{}</tool_call>", "not a call"),
        ("<tool_call><function=a>", "not a call"),
    ],
)
def test_a_call_that_fails_tells_the_model_and_changes_nothing(text: str, message: str):
    outcome = judge(text)
    assert message in json.loads(outcome.observation[0]["content"])["error"]
    assert judge(text, REPLY, UPDATE).reward == 1.0
    assert outcome.flags == (("invalid_tool_call",) if "not a call" in message else ())


@pytest.mark.parametrize("truth", [None, [7], [{"name": "email_delete_email", "arguments": '{"email_id": "4"}'}]])
def test_a_ground_truth_that_cannot_be_replayed_is_an_error(truth: object):
    with pytest.raises(ValueError, match="ground_truth"):
        judge("", truth=truth)


def test_numbers_of_a_web_site():
    office = Office.open(TABLES)
    assert office.call("analytics_total_visits_count", {"time_min": "2023-10-01"}) == {"2023-10-01": 2.0}
    assert office.call("analytics_engaged_users_count", {}) == {"2023-10-01": 1.0}
    assert office.call("analytics_traffic_source_count", {"traffic_source": "referral"}) == {"2023-10-01": 1.0}
    assert office.call("analytics_get_average_session_duration", {"time_max": "2023-10-01"}) == {"2023-10-01": 20.0}
    assert office.call("customer_relationship_manager_search_customers", {"follow_up_by_min": "2023-12-02"}) == [
        TABLES["customers"][1]
    ]
    with pytest.raises(ToolError):
        office.call("analytics_get_visitor_information_by_id", {"visitor_id": "9"})


def test_every_tool_of_the_blend_is_there():
    assert len(TOOLS) == 27


def test_calls_get_the_types_that_tools_declare():
    tools = [{"name": "f", "parameters": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}}]
    parameters = "<parameter=n>\n3\n</parameter>\n<parameter=s>\n3\nlines\n</parameter>"
    text = f"I call <tool_call>\n<function=f>\n{parameters}\n</function>\n</tool_call>"
    assert tool_calls(text, tools) == [ToolCall("f", {"n": 3, "s": "3\nlines"})]
    assert tool_calls(text, [{"type": "function", "function": tools[0]}]) == tool_calls(text, tools)
    assert tool_calls(text.replace("3", "x", 1), tools)[0].error == "argument n: 'x' is no integer"
    assert tool_calls("none") == []


def test_several_calls_of_a_turn():
    first = call("a", path="/x", lines="1\n2")
    assert tool_calls(f"{first}\n{call('b')}") == [ToolCall("a", {"path": "/x", "lines": "1\n2"}), ToolCall("b", {})]


def test_tables_of_a_folder_and_of_a_file(tmp_path: Path):
    (tmp_path / "emails.csv").write_text(
        'email_id,inbox/outbox,sender/recipient,subject,sent_datetime,body\n00000009,inbox,bob@x.com,"Plan, '
        'B",2023-11-03 10:00:00,"a\nb"\n'
    )
    (tmp_path / "email_addresses.csv").write_text("ann@x.com\nbob@x.com\n")
    tables = load_tables(tmp_path)
    assert tables["directory"] == [{"email_address": "ann@x.com"}, {"email_address": "bob@x.com"}]
    assert tables["emails"][0]["email_id"] == "00000009" and tables["emails"][0]["subject"] == "Plan, B"
    (tmp_path / "tables.json").write_text(json.dumps(tables))
    for path in (tmp_path, tmp_path / "tables.json"):
        judge_row = make(str(path))
        row = json.dumps({"ground_truth": TRUTH[:1]})
        assert judge_row(Task((REPLY,), row=row)).reward == 1.0
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="has none of emails.csv"):
        load_tables(tmp_path / "none")
