# SPDX-License-Identifier: Apache-2.0
"""A run that trains on agents: what ranks train on is, token by token, what engines have sampled."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import numpy as np
import pytest

from mrl.cluster import scheduling
from mrl.cluster.payload import pull
from mrl.envs.endpoints import read_endpoints
from mrl.loop.run import Step
from mrl.store.summary import Clock
from mrl.types import Batch, Prompt, Rollout, RolloutGroup, RunState
from tests.drivers import do, train_step
from tests.stack.loop.conftest import LiveRun, live_run
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.long("async")

AGENTS = ("busy", "failing", "lonely", "silent")
EPOCH = -7
Drawn = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""Prompt, answer and its logprobs."""


class Server(BaseHTTPRequestHandler):
    """A remote agent that knows nothing of mrl: one question, a reward by the length of the answer."""

    rows: list[dict] = []

    def do_POST(self) -> None:
        task = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.rows.append(task["row"])
        body = {
            "model": task["model"],
            "messages": [{"role": "user", "content": task["row"]["prompt"]}],
            "max_tokens": 6,
        }
        headers = {"Authorization": f"Bearer {task['api_key']}"}
        answer = httpx.post(
            f"{task['base_url']}/chat/completions", json=body, headers=headers, timeout=task["deadline_s"]
        ).json()
        length = answer["usage"]["completion_tokens"]
        reply = json.dumps(
            {"components": {"length": length, "one": 1}, "metrics": {"luck": 0.25}, "mask": length == 1}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    folder = tmp_path_factory.mktemp("agents")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MRL_CACHE", str(folder / "cache"))
        patch.setenv("TRIAL_FOLDER", str(folder))
        patch.setattr(scheduling, "ROLLOUTS_PER_GATEWAY", 4)  # two gateways for the 8 rollouts of a step
        yield from live_run(
            folder,
            "policy.generation.vllm_cfg.expose_http_server=true",
            "policy.generation.vllm_cfg.http_server_share=1.0",
            *(f"++env.own.agents.{name}=tests.stack.loop.trial_agents:{name}" for name in AGENTS),
            f"++env.remote.far=http://127.0.0.1:{server.server_port}/",
            "data.default.env_name=busy",
            "grpo.num_prompts_per_step=2",
            # Fewer processes than the other tests of this folder have.
            "cluster.cpu_units_per_node=2",
            "policy.megatron_cfg.expert_model_parallel_size=1",
        )
    server.shutdown()


def watch(engine) -> None:
    """Notes every answer of the engine to a caller, where its steps give it out."""
    engine.drawn = []
    answer = engine.callers.answer

    def noted(output, **counts) -> bool:
        for one in output.outputs:
            logprobs = [step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)]
            engine.drawn.append((tuple(output.prompt_token_ids), tuple(one.token_ids), tuple(logprobs)))
        return answer(output, **counts)

    engine.callers.answer = noted


def take_drawn(engine) -> list[Drawn]:
    drawn, engine.drawn = engine.drawn, []
    return drawn


@pytest.fixture(scope="module")
def watched(live: LiveRun) -> LiveRun:
    live.on_engines(watch)
    return live


def sampled(live: LiveRun, env_name: str, num_prompts: int = 2) -> list[RolloutGroup]:
    supplier = live.run.supplier
    prompts = [dataclasses.replace(supplier.data.train[index], env_name=env_name) for index in range(num_prompts)]
    asked: list[tuple[int, Prompt]] = [(EPOCH, prompt) for prompt in prompts]
    version = live.state.weight_version
    sampling = supplier.data.sampling
    return do(supplier.queue.sample(asked, sampling, num_generations=4, weight_version=version, clock=Clock()))


def turns(rollouts: list[Rollout]) -> list[Drawn]:
    """Beginning, text and logprobs of the trained turns of sequences."""
    found = []
    for rollout in rollouts:
        whole = [*rollout.request.token_ids, *rollout.token_ids.tolist()]
        first = len(rollout.request.token_ids)
        for turn in rollout.turns:
            start, stop = first + turn.start, first + turn.stop
            logprobs = tuple(rollout.generator_logprobs[turn.start : turn.stop].tolist())
            found.append((tuple(whole[:start]), tuple(whole[start:stop]), logprobs))
    return found


def rounded(drawn: list[Drawn]) -> Counter[Drawn]:
    return Counter(
        (prompt, ids, tuple(np.array(logprobs, dtype=np.float32).tolist())) for prompt, ids, logprobs in drawn
    )


def test_ids_trained_are_ids_sampled_once_each(watched: LiveRun):
    groups = sampled(watched, "busy")
    drawn = rounded([one for engine in watched.on_engines(take_drawn) for one in engine])
    infos = [info for group in groups for rollout in group.rollouts for info in rollout.sequences]
    rollouts = pull(infos, timeout_s=HANG_S)
    trained = rounded(turns(rollouts))
    # Five answers a rollout, of which the last one was forced.
    assert drawn.total() == 8 * 5 and trained.total() == 8 * 4
    assert trained <= drawn
    for group in groups:
        for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True):
            assert verdict.is_valid and len(rollout.sequences) == 3 and rollout.num_turns == 4
            assert verdict.metrics["sequences"] == 3 and verdict.metrics["overridden_temperature"] == 1
            assert verdict.metrics["untrained_tokens_forced"] > 0
            # The forced answer is a third try at the second turn.
            talks = [[said["content"] for said in conversation] for conversation in verdict.conversations]
            assert [len(talk) for talk in talks] == [4, 4, 2, 4] and talks[2][0] == f"sub {group.prompt.text}"
            assert talks[0][:3] == talks[1][:3] == talks[3][:3] and talks[0][::2] == [group.prompt.text, "and?"]
    # The same again: a rollout is a function of its row, its place and the weights.
    again = [info for group in sampled(watched, "busy") for rollout in group.rollouts for info in rollout.sequences]
    assert rounded(turns(pull(again, timeout_s=HANG_S))) == trained


def test_a_step_trains_all_sequences_with_one_advantage_each_rollout(watched: LiveRun, monkeypatch: pytest.MonkeyPatch):
    taken, take = list[list[Batch]](), watched.run.supplier.take

    async def noted(state: RunState, step: Step) -> list[Batch]:
        taken.append(await take(state, step))
        return taken[-1]

    monkeypatch.setattr(watched.run.supplier, "take", noted)
    train_step(watched.run, watched.state)
    ((batch,),) = taken
    by_rollout: dict[str, set[float]] = {}
    for sequence in batch.sequences:
        by_rollout.setdefault(sequence.rollout.request_id, set()).add(sequence.advantage)
    assert len(batch.sequences) == 24 and len(by_rollout) == 8 and all(len(found) == 1 for found in by_rollout.values())
    metrics = watched.state.metrics
    assert metrics["train/token_mult_prob_error"] <= 1.001
    assert metrics["rollout/busy/sequences"] == 3 and metrics["rollout/dropped_agent_groups"] == 0
    assert metrics["rollout/busy/reward_components_are_counted"] == 1
    assert "rollout/engine_idle_fraction" not in metrics  # engines work for agents over HTTP, which is not counted


def test_agents_that_fail_cost_their_own_rollout(watched: LiveRun, caplog: pytest.LogCaptureFixture):
    verdicts = [verdict for group in sampled(watched, "failing") for verdict in group.verdicts]
    assert {verdict.status for verdict in verdicts} == {"ok", "error"}
    (reason,) = {verdict.reason for verdict in verdicts if not verdict.is_valid}
    assert re.fullmatch(r"RuntimeError: no idea \(.*/trial_agents.py:\d+\)", reason)
    log = next((watched.run.folder.path / "logs").glob("exp_*/actors/gateway-1.log"))
    # It comes from the local disk.
    wait_until(lambda: "(failing) is not trained: RuntimeError: no idea" in log.read_text(), "line in the log")
    # The driver shows each kind once, with the lines of the user's file.
    assert caplog.text.count('    raise RuntimeError("no idea")') == 1
    assert "is not trained, as its agent raised. Traceback:" in caplog.text and "/gateway" in caplog.text
    # All that ran in the process that died have begun again, and none is counted twice.
    assert sum(verdict.metrics["lost_attempts"] for verdict in verdicts) >= 1
    for env_name, reason in (("lonely", "RuntimeError: never"), ("silent", "sampled nothing")):
        (group,) = sampled(watched, env_name, num_prompts=1)
        assert all(not verdict.is_valid and reason in verdict.reason for verdict in group.verdicts)


def test_an_agent_at_a_url(watched: LiveRun):
    groups = sampled(watched, "far")
    assert len(Server.rows) >= 8 and {"prompt", "expected_answer"} <= Server.rows[0].keys()
    for group in groups:
        for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True):
            assert verdict.reward == rollout.num_generated + 1 == verdict.components["length"] + 1
            assert (
                verdict.status == ("flagged" if rollout.num_generated == 1 else "ok")
                and verdict.metrics["luck"] == 0.25
            )


def test_the_gateway_and_an_engine_may_die(watched: LiveRun):
    session = watched.run.supplier.session
    gateways = session.collector.gateways
    assert gateways is not None and len(gateways.handles) == 2
    urls, published = gateways.urls, read_endpoints(session.engines.log_folder / "endpoints.json")
    assert published.gateway_url == f"{urls[0]}/v1" and len(set(urls)) == 2
    headers = {"Authorization": f"Bearer {published.gateway_key}"}
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert (
        httpx.post(f"{published.gateway_url}/chat/completions", json=asked, headers=headers, timeout=HANG_S).status_code
        == 200
    )
    before = rounded(
        turns(pull([i for g in sampled(watched, "busy") for r in g.rollouts for i in r.sequences], timeout_s=HANG_S))
    )
    pids = (
        gateways.apply(lambda actor: os.getpid(), deadline_s=HANG_S),
        session.engines.apply(lambda engine: os.getpid(), deadline_s=HANG_S),
    )
    os.kill(pids[1][0], signal.SIGKILL)
    after_engine = sampled(watched, "busy")
    os.kill(pids[0][0], signal.SIGKILL)
    after_gateway = sampled(watched, "busy")
    assert gateways.urls == urls and gateways.book.num_restarts == 1
    # A URL's rollouts are with both gateways, and one that dies leaves the other's alone.
    before_far = len(Server.rows)
    os.kill(pids[0][1], signal.SIGKILL)
    assert all(verdict.status in ("ok", "flagged") for group in sampled(watched, "far") for verdict in group.verdicts)
    assert gateways.urls == urls and gateways.book.num_restarts == 2 and len(Server.rows) > before_far
    for groups in (after_engine, after_gateway):
        infos = [info for group in groups for rollout in group.rollouts for info in rollout.sequences]
        assert rounded(turns(pull(infos, timeout_s=HANG_S))) == before
