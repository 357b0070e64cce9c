# SPDX-License-Identifier: Apache-2.0
"""Agents as functions in processes and as servers in another language, in front of an engine that answers by rule."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import shutil
import socket
import subprocess
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mrl.config.own import AGENT, find_fitting
from mrl.rollout import agents as agents_module
from mrl.rollout import http_gate
from mrl.rollout import remote as remote_module
from mrl.rollout.agents import AgentResult, AgentRunner, AgentTask, FunctionAgent, judged
from mrl.rollout.remote import AgentUnreached, RemoteAgent
from mrl.types import Prompt
from tests.unit.rollout.gateways import SAMPLING, FakeEngine, Running
from tests.waiting import HANG_S, SOON_S

PATH = "tests.unit.rollout.trial_agents:echo"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    running = Running()
    running.use(FakeEngine())
    yield running
    running.stop()


@pytest.fixture(scope="module")
def runner(running: Running) -> Iterator[AgentRunner]:
    async def make() -> AgentRunner:
        runner = AgentRunner(running.gateway, url=running.url, timeout_s=HANG_S, masks_flagged=True)
        runner.agents["echo"] = [agent := FunctionAgent(PATH)]
        await agent.start()
        return runner

    yield (runner := running.run(make()))

    async def end() -> None:
        for agent in (agent for agents in runner.agents.values() for agent in agents):
            if isinstance(agent, FunctionAgent):
                agent.end()
            remote = agent._remote if isinstance(agent, FunctionAgent) else agent
            if remote._client is not None:
                await remote._client.close()

    running.run(end())


def task(does: str, index: int = 0, *, env_name: str = "echo", **row: object) -> AgentTask:
    prompt = Prompt(does, (1, 2), "12+30=", "42", env_name, json.dumps({"does": does} | row))
    return AgentTask(prompt, index, 0, seed=5, sampling=SAMPLING, weight_version=3)


def run(running: Running, runner: AgentRunner, *tasks: AgentTask) -> list[AgentResult]:
    async def all_of_them() -> list[AgentResult]:
        return await asyncio.gather(*map(runner.run, tasks))

    return running.run(all_of_them())


def test_a_function_gives_a_reward_and_sequences(running: Running, runner: AgentRunner):
    (ran,) = run(running, runner, task("answer"))
    verdict, (rollout,) = ran.verdict, ran.rollouts
    assert (verdict.reward, verdict.components, verdict.status) == (0.75, {"right": 0.5, "short": 0.25}, "ok")
    assert rollout.request.token_ids == (*b"12+30=", 2) and rollout.token_ids.tolist()[1:] == [800, 2]
    assert rollout.generator_logprobs.tolist() == [-0.25, -0.5, -0.75] and rollout.weight_version == 3
    assert (rollout.request.request_id, ran.engines) == ("0/answer/0", (0,))
    assert verdict.metrics == {"sequences": 1, "lost_attempts": 0} and verdict.text.startswith("answer ")


def test_texts_beside_a_reward_are_columns_of_the_samples(running: Running, runner: AgentRunner):
    (ran,) = run(running, runner, task("columns"))
    verdict = ran.verdict
    assert (verdict.reward, verdict.components) == (1.0, {"tries": 2.0})
    assert (verdict.columns, verdict.extracted) == ({"plan": "add \N{REPLACEMENT CHARACTER}"}, "42")
    # A server of the user's: texts beside the reward, or gathered.
    for reply in ({"reward": 1, "plan": "add"}, {"reward": 1, "columns": {"plan": "add"}}):
        assert judged(reply, masks_flagged=True).columns == {"plan": "add"}
    assert "columns=3, which is no object" in judged({"reward": 1, "columns": 3}, masks_flagged=True).reason


def test_what_is_no_reward_masks_the_rollout_with_its_reason(running: Running, runner: AgentRunner):
    raised, text, masked = run(running, runner, task("raise"), task("text"), task("mask"))
    assert raised.verdict.status == "error"
    assert re.fullmatch(r"KeyError: 'nothing there' \(.*/trial_agents.py:21\)", raised.verdict.reason)
    assert re.fullmatch(
        r"Traceback:\n  File \".*/trial_agents.py\", line 21, in echo\n    raise KeyError\(\"nothing there\"\)\n"
        r"KeyError: 'nothing there'",
        raised.verdict.trace,
    )
    (grouped,) = run(running, runner, task("raise in a group"))
    assert grouped.verdict.reason.startswith("KeyError: 'deep' (") and "in _fail" in grouped.verdict.trace
    assert "not a number" in text.verdict.reason
    assert (masked.verdict.status, masked.verdict.reward, masked.verdict.has_reward) == ("flagged", 1.0, True)
    assert [len(ran.rollouts) for ran in (raised, text, masked)] == [1, 1, 1]


def test_each_failure_is_told_and_costs_one_rollout(
    running: Running, runner: AgentRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(agents_module, "RETRY_S", 0.01)
    reasons = {
        "nan": "components.extra=nan, which is no finite number",
        "surrogate": "ValueError: half \N{REPLACEMENT CHARACTER}",
        "leave": "SystemExit: 3",
        "cancel": "CancelledError: ",
        "own timeout": "TimeoutError: ",
        "two rewards": "two rewards, reward=1.0 and score=0.0",
    }
    for does, reason in reasons.items():
        (ran,) = run(running, runner, task(does))
        assert (ran.verdict.status, ran.verdict.metrics["lost_attempts"]) == (
            "error",
            0,
        ) and reason in ran.verdict.reason, does
    # An agent that closes its client leaves the connections of the others alone.
    for does in ("close", "answer"):
        (ran,) = run(running, runner, task(does))
        assert ran.verdict.reward == 0.75
    (ran,) = run(running, runner, task("leave from a task", marker=str(tmp_path / "left")))
    # The process that ends may still take the second attempt.
    assert ran.verdict.reward == 0.75 and ran.verdict.metrics["lost_attempts"] >= 1


def test_a_process_that_dies_takes_no_rollout_along(
    running: Running, runner: AgentRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(agents_module, "RETRY_S", 0.01)
    found = run(
        running, runner, task("die", marker=str(tmp_path / "died")), *(task("answer", index) for index in range(1, 6))
    )
    assert [ran.verdict.reward for ran in found] == [0.75] * 6
    assert found[0].verdict.metrics["lost_attempts"] == 1 and all(len(ran.rollouts) == 1 for ran in found)
    assert running.call(lambda: running.gateway._sessions) == {}


def test_deadlines(running: Running, runner: AgentRunner, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "_timeout_s", 1.0)
    monkeypatch.setattr(remote_module, "GRACE_S", 1.0)
    (slept,) = run(running, runner, task("sleep"))
    assert (slept.verdict.status, len(slept.rollouts)) == ("timeout", 1)
    # Not even the deadline ends it, so its process is.
    (hung,) = run(running, runner, task("hang"))
    assert hung.verdict.status == "timeout"
    monkeypatch.setattr(runner, "_timeout_s", HANG_S)
    (ran,) = run(running, runner, task("answer"))
    assert ran.verdict.is_valid


def test_an_agent_that_blocks_costs_no_other_rollout(
    running: Running, runner: AgentRunner, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(agents_module, "RETRY_S", 0.01)
    monkeypatch.setattr(runner, "_timeout_s", 8.0)
    monkeypatch.setattr(remote_module, "GRACE_S", 1.0)
    hung, *others = run(running, runner, task("hang"), *(task("patient", index) for index in range(1, 9)))
    assert hung.verdict.status == "timeout"
    assert [ran.verdict.reward for ran in others] == [0.75] * 8
    (place,) = running.call(runner.blocked)
    assert "trial_agents.py:" in place and "in echo: time.sleep(1000)" in place


def test_others_are_asked_again_though_they_learn_late_that_the_blocked_process_has_ended(
    running: Running, runner: AgentRunner, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(agents_module, "RETRY_S", 0.01)
    monkeypatch.setattr(runner, "_timeout_s", 8.0)
    monkeypatch.setattr(remote_module, "GRACE_S", 1.0)
    (agent,) = runner.agents["echo"]
    assert isinstance(agent, FunctionAgent)
    blocked, asked = agent._process, agent._remote.ask

    async def ask(task: remote_module.Json) -> remote_module.Json:
        try:
            return await asked(task)
        except TimeoutError:
            while "patient" in str(task["row"]) and agent._process is blocked:
                await asyncio.sleep(0.01)
            raise

    monkeypatch.setattr(agent._remote, "ask", ask)
    hung, patient = run(running, runner, task("hang"), task("patient", 1))
    assert (hung.verdict.status, patient.verdict.reward) == ("timeout", 0.75)
    assert patient.verdict.metrics["lost_attempts"] == 1


def test_a_function_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"write async def no_agent\(client, row\) -> float"):
        find_fitting("tests.unit.rollout.trial_agents:no_agent", AGENT)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ({}, "reward=None"),
        ({"reward": float("nan")}, "reward=nan"),
        ({"reward": 1, "components": {"a": "b"}}, "components.a='b'"),
        ({"reward": 1, "metrics": [1]}, "no object of numbers"),
        ({"reward": 10**400}, "no finite number"),
        ({"reward": 1e39}, "no finite number"),  # of which no advantage is, either
        ({"reward": 1, "mask": "yes"}, "mask='yes', which is neither true nor false"),
        ({"error": "lost"}, "lost"),
        ({"error": ""}, "an empty error"),
    ],
)
def test_answers_that_are_none(reply: dict, reason: str):
    verdict = judged(reply, masks_flagged=True)
    assert not verdict.is_valid and not verdict.has_reward and reason in verdict.reason


def test_an_answer_may_say_that_there_was_no_error():
    verdict = judged({"reward": 1, "error": None, "mask": None, "metrics": {"half \ud800": 2}}, masks_flagged=True)
    assert verdict.is_valid and verdict.metrics == {"half \N{REPLACEMENT CHARACTER}": 2}


@pytest.mark.parametrize(
    ("status", "headers", "text", "reason"),
    [
        (
            302,
            {"Location": "/elsewhere"},
            "",
            "answers 302, a redirection to /elsewhere: name that address in the config",
        ),
        (308, {"Location": "http://other/"}, "", "answers 308, a redirection to http://other/"),
        (404, {}, "not here", "answers 404: not here"),
        (204, {}, "", "answers 204"),
        (200, {}, "<html>hello", "answers what is no JSON: Expecting value: line 1 column 1 (char 0): <html>hello"),
        (200, {}, "[1]", "answers a list, not an object"),
    ],
)
def test_a_server_that_gives_no_verdict_is_quoted(
    running: Running, runner: AgentRunner, status: int, headers: dict[str, str], text: str, reason: str
):
    paths = list[str]()

    async def answer(request: Request) -> Response:
        paths.append(request.url.path)
        return Response(text, status_code=status, headers=headers)

    listener = socket.create_server(("127.0.0.1", 0))
    server = http_gate.make_server(
        Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])]),
        has_key=lambda *_: True,
        max_body=10**7,
    )
    threading.Thread(target=server.run, args=([listener],), daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/run"
    running.call(lambda: runner.agents.update({url: [RemoteAgent(url)]}))
    (ran,) = run(running, runner, task("any", env_name=url))
    assert ran.verdict.status == "error" and reason in ran.verdict.reason and paths == ["/run"]
    server.should_exit = True


PERL = r"""
use strict; use IO::Socket::INET; use HTTP::Tiny; use JSON::PP;
my $server = IO::Socket::INET->new(LocalAddr => '127.0.0.1', Listen => 9, ReuseAddr => 1) or die;
print $server->sockport, "\n"; $| = 1; STDOUT->flush;
while (my $client = $server->accept) {
    my ($length, $body) = (0, '');
    while ((my $line = <$client>) =~ /\S/) { $length = $1 if $line =~ /^content-length: (\d+)/i }
    read($client, $body, $length);
    my $task = decode_json($body);
    my %asked = (model => $task->{model}, messages => [{role => 'user', content => $task->{row}{prompt}}]);
    my %headers = (Authorization => "Bearer $task->{api_key}", 'Content-Type' => 'application/json');
    my $answer = HTTP::Tiny->new->post("$task->{base_url}/chat/completions",
        {content => encode_json(\%asked), headers => \%headers});
    my $said = decode_json($answer->{content})->{choices}[0]{message}{content};
    my $reply = encode_json({reward => $said =~ /answer/ ? 1 : 0, metrics => {length => length $said}});
    print $client "HTTP/1.1 200 OK\r\nContent-Length: " . length($reply) . "\r\nConnection: close\r\n\r\n$reply";
    close $client;
}
"""


def test_a_server_in_another_language(running: Running, runner: AgentRunner, monkeypatch: pytest.MonkeyPatch):
    perl = shutil.which("perl")
    assert perl is not None, "Git needs it, too"
    process = subprocess.Popen([perl, "-e", PERL], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        running.call(lambda: runner.agents.update({"perl": [RemoteAgent(f"http://127.0.0.1:{port}/run")]}))
        found = run(running, runner, *(task("any", index, env_name="perl") for index in range(3)))
    finally:
        process.kill()
        process.wait()
    assert [ran.verdict.reward for ran in found] == [1.0] * 3 and all(
        ran.verdict.metrics["length"] > 0 for ran in found
    )
    # A server that is gone is waited for until the deadline.
    monkeypatch.setattr(agents_module, "RETRY_S", 0.01)
    monkeypatch.setattr(runner, "_timeout_s", SOON_S)
    (lost,) = run(running, runner, task("any", env_name="perl"))
    assert (
        lost.verdict.status == "timeout"
        and "no agent within" in lost.verdict.reason
        and lost.rollouts[0].finish_reason == "abort"
    )


@pytest.mark.parametrize("status", [408, 429, 503])
def test_a_server_without_room_is_asked_until_it_has_some(
    running: Running, runner: AgentRunner, monkeypatch: pytest.MonkeyPatch, status: int
):
    monkeypatch.setattr(agents_module, "RETRY_S", 0.01)
    num_asked = 0

    async def answer(_: Request) -> Response:
        nonlocal num_asked
        num_asked += 1
        return Response(
            "full" if num_asked < 9 else '{"error": "at last"}', status_code=status if num_asked < 9 else 200
        )

    listener = socket.create_server(("127.0.0.1", 0))
    server = http_gate.make_server(
        Starlette(routes=[Route("/run", answer, methods=["POST"])]), has_key=lambda *_: True, max_body=10**7
    )
    threading.Thread(target=server.run, args=([listener],), daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/run"
    running.call(lambda: runner.agents.update({url: [RemoteAgent(url)]}))
    (ran,) = run(running, runner, task("any", env_name=url))
    assert num_asked == 9 and ran.verdict.reason == "at last" and ran.verdict.metrics["lost_attempts"] == 0
    server.should_exit = True


def test_rollouts_that_wait_for_an_agent_are_counted_by_its_name(
    running: Running, runner: AgentRunner, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(agents_module, "RETRY_S", 1e6)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/run"
    listener.close()
    running.call(lambda: runner.agents.update({"absent": [RemoteAgent(url)]}))

    async def wait() -> dict[str, tuple[int, str]]:
        monkeypatch.setattr(runner, "_timeout_s", 1e7)
        asked = [asyncio.ensure_future(runner.run(task("any", index, env_name="absent"))) for index in range(7)]
        async with asyncio.timeout(HANG_S):
            while runner.waiting().get("agent absent", (0, ""))[0] < 7:
                await asyncio.sleep(0.01)
        found = runner.waiting()
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        return found

    ((name, (count, reason)),) = running.run(wait()).items()
    assert (name, count) == ("agent absent", 7) and url in reason and "Cannot connect" in reason
    assert running.call(runner.waiting) == {}


def test_a_server_that_comes_back_gets_the_rollouts_that_wait_at_once(
    running: Running, runner: AgentRunner, monkeypatch: pytest.MonkeyPatch
):
    pauses = iter([1e6, 1e6, 1e6])
    monkeypatch.setattr(agents_module.random, "uniform", lambda *_: next(pauses, 0.01))  # of the fourth alone
    monkeypatch.setattr(runner, "_timeout_s", 1e7)

    async def answer(_: Request) -> Response:
        return Response('{"reward": 1.0}')

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    app = Starlette(routes=[Route("/run", answer, methods=["POST"])])
    server = http_gate.make_server(app, has_key=lambda *_: True, max_body=10**7)
    running.call(lambda: runner.agents.update({"back": [RemoteAgent(f"http://127.0.0.1:{port}/run")]}))

    async def wait() -> dict[str, tuple[int, str]]:
        asked = [asyncio.ensure_future(runner.run(task("any", index, env_name="back"))) for index in range(4)]
        async with asyncio.timeout(HANG_S):
            while runner.waiting().get("agent back", (0, ""))[0] < 4:
                await asyncio.sleep(0.01)
            listener = socket.create_server(("127.0.0.1", port))
            threading.Thread(target=server.run, args=([listener],), daemon=True).start()
            await asyncio.gather(*asked)
        return runner.waiting()

    assert running.run(wait()) == {}
    server.should_exit = True


def test_a_fault_of_tls_is_told_as_such(running: Running):
    """The run's own server speaks none."""

    async def ask() -> None:
        agent = RemoteAgent(running.url.replace("http:", "https:"))
        try:
            await agent.post({}, deadline_s=HANG_S)
        finally:
            assert agent._client is not None
            await agent._client.close()

    with pytest.raises(AgentUnreached, match="SSL"):
        running.run(ask())


GZIPPED = gzip.compress(b'{"reward": 0.5}')


@pytest.mark.parametrize(
    ("encoding", "body", "answer"),
    [
        ("identity", b'{"reward": 0.5}', {"reward": 0.5}),
        ("gzip", GZIPPED, {"reward": 0.5}),
        ("deflate", zlib.compress(b'{"reward": 0.5}'), {"reward": 0.5}),
        ("gzip", gzip.compress(b" " * 2**20 + b"{}"), "over 100,000 bytes once unpacked"),
        ("identity", b" " * 2**17 + b"{}", "over 100,000 bytes"),
        ("gzip", GZIPPED[:-4], "ends early"),
        ("gzip", b"{}", "is no gzip"),
        ("br", b"{}", "Content-Encoding 'br'"),
        ("zstd", b"\x28\xb5\x2f\xfd", "Content-Encoding 'zstd'"),
        ("gzip, gzip", gzip.compress(GZIPPED), "Content-Encoding 'gzip, gzip'"),
        ("deflate", zlib.compress(b" " * 2**20 + b"{}"), "over 100,000 bytes once unpacked"),
        ("", b'{"reward": 0.5}', {"reward": 0.5}),
    ],
)
def test_answers_of_servers_have_a_bound(
    running: Running, monkeypatch: pytest.MonkeyPatch, encoding: str, body: bytes, answer: object
):
    read = remote_module.read_answer
    monkeypatch.setattr(remote_module, "read_answer", lambda response: read(response, 100_000))

    async def respond(_: Request) -> Response:
        return Response(body, headers={"Content-Encoding": encoding})

    listener = socket.create_server(("127.0.0.1", 0))
    server = http_gate.make_server(
        Starlette(routes=[Route("/", respond, methods=["POST"])]), has_key=lambda *_: True, max_body=10**7
    )
    threading.Thread(target=server.run, args=([listener],), daemon=True).start()

    async def ask() -> object:
        agent = RemoteAgent(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        try:
            return await agent.ask({"deadline_s": HANG_S})
        finally:
            assert agent._client is not None
            await agent._client.close()

    found = running.run(ask())
    server.should_exit = True
    assert (
        found == answer if isinstance(answer, dict) else isinstance(found, dict) and str(answer) in str(found["error"])
    )


def test_a_function_that_cannot_be_loaded_ends_the_run(running: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote_module, "MAX_FAILED_STARTS", 1)

    async def start() -> AgentRunner:
        own = AgentRunner(running.gateway, url=running.url, timeout_s=HANG_S, masks_flagged=True)
        own.agents["echo"] = [agent := FunctionAgent("tests.unit.rollout.no_such:agent")]
        await agent.start()
        return own

    with pytest.raises(RuntimeError, match="has ended 1 times in a row"):
        running.run(start())
