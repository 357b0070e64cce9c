# SPDX-License-Identifier: Apache-2.0
"""Real NeMo Gym servers in real steps of the run: ids trained are ids sampled, rewards our graders' and the judge's.

`NEMO_GYM_RUN` names the `ng_run` of an environment with nemo-gym and what its servers need (as
scripts/bench/gym_rewards.py makes one).
"""

from __future__ import annotations

import json
import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
import yaml

from mrl.envs.endpoints import read_endpoints
from mrl.envs.task import Task
from mrl.nemo.gym.graders import mcqa
from mrl.store.summary import Clock
from mrl.types import RolloutGroup
from tests.drivers import do
from tests.faults.attempts import is_taken
from tests.faults.test_kill_points import assert_goes_on, attempt
from tests.long.calling_model import CALLS, CHAT, Steps, save_calling_model
from tests.stack.loop.conftest import LiveRun, live_run, write_inputs
from tests.stack.loop.test_agents import EPOCH, watch
from tests.waiting import HANG_S

NG_RUN = os.environ.get("NEMO_GYM_RUN", "")
pytestmark = [
    pytest.mark.long("gym"),
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not NG_RUN, reason="NEMO_GYM_RUN names no ng_run"),
]

JUDGED, COMPARED = "equivalence_llm_judge", "genrm_compare"
LABELS = ("[[A=B]]", "[[A!=B]]")
SERVERS = ("mcqa", "example_session_state_mgmt", "example_single_tool_call", JUDGED, COMPARED)
AGENTS = tuple(f"{server}_simple_agent" for server in SERVERS)
PATHS = [
    "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml",
    *(f"resources_servers/{name}/configs/{name}.yaml" for name in SERVERS[:4]),
]
# As in Gym's example rows: vLLM would force the arguments of strict tools.
TOOLS = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}, "strict": True}
    for name, _ in CALLS
]


class Judge(BaseHTTPRequestHandler):
    """The run's own model as a judge, which chooses between two verdicts; it compares a pair of answers by rule."""

    run_folder: ClassVar[Path]
    said: ClassVar[list[str]] = []
    """Answers of the model."""
    scores: ClassVar[list[int]] = []
    """Scores of compared answers, two for each pair."""
    on_request: ClassVar[list[Callable[[], object]]] = []
    """Calls that the next request makes, in the middle of a step."""
    verdicts: ClassVar[tuple[str, ...]] = LABELS
    """Texts to choose from; empty = any."""
    fails: ClassVar[bool] = False
    goes_on: ClassVar[threading.Event] = threading.Event()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        while self.on_request:
            self.on_request.pop()()
        self.goes_on.wait(HANG_S)
        status, said = (500, "no idea") if self.fails else (200, self.compare(asked) or self.judge(asked))
        message = {"role": "assistant", "content": said}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        head = {"id": "1", "object": "chat.completion", "created": 1, "model": "judge"}
        reply = json.dumps({**head, "choices": [choice]}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def compare(self, asked: dict) -> str:
        pair = [text for name, text in (asked.get("metadata") or {}).items() if name.startswith("response_")]
        if not pair:
            return ""
        scores = [1 + zlib.crc32(text.encode()) % 5 for text in pair]
        self.scores.extend(scores)
        return json.dumps({"score_1": scores[0], "score_2": scores[1], "ranking": 3.5})

    def judge(self, asked: dict) -> str:
        newest = max(self.run_folder.glob("logs/*/actors/endpoints.json"), key=lambda path: path.stat().st_mtime)
        found = read_endpoints(newest)
        # Those who watch engines look at logprobs.
        body = {"messages": asked["messages"], "max_tokens": 12, "seed": len(self.said), "logprobs": True}
        body |= {"structured_outputs": {"choice": self.verdicts}} if self.verdicts else {}
        headers = {"Authorization": f"Bearer {found.gateway_key}"}
        answer = httpx.post(f"{found.gateway_url}/chat/completions", json=body, headers=headers, timeout=HANG_S)
        self.said.append(answer.raise_for_status().json()["choices"][0]["message"]["content"] or "")
        return self.said[-1]

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def rows_of(number: int) -> Iterator[dict]:
    """A row for each agent, in the form of Gym's example rows, as short as a tiny model's context is."""

    def row(server: str, said: str, tools: list[dict], **fields: object) -> dict:
        request = {"input": [{"role": "user", "content": said}], "tools": tools, "parallel_tool_calls": number % 2 == 0}
        return {"responses_create_params": request, "agent_ref": {"name": f"{server}_simple_agent"}, **fields}

    yield row("mcqa", f"{number}? A or B, in a box.", [], options=[{"A": "one"}, {"B": "two"}], expected_answer="B")
    yield row("example_session_state_mgmt", f"count to {number}", TOOLS, expected_count=7, initial_count=3)
    yield row("example_single_tool_call", f"weather in {number}", TOOLS)
    yield row(JUDGED, f"capital of {number}?", [], question=f"capital of {number}?", expected_answer="Rome")
    yield row(COMPARED, f"tale of {number}", [])


def overrides(folder: Path, judge_url: str) -> list[str]:
    """Settings of a run on Gym's servers, all of them in the one environment of ng_run."""
    for place in (
        *(f"resources_servers/{name}" for name in SERVERS),
        "responses_api_agents/simple_agent",
        "responses_api_models/vllm_model",
    ):
        (folder / "venvs" / place).mkdir(parents=True)
        (folder / "venvs" / place / ".venv").symlink_to(Path(NG_RUN).parents[1])
    rows = folder / "gym.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for number in range(10, 20) for row in rows_of(number)))
    # Gym's own file would start a judge's engine beside it.
    compare = {
        "entrypoint": "app.py",
        "domain": "rlhf",
        "num_rollouts_per_prompt": 4,
        "genrm_responses_create_params": {"input": []},
    }
    compare |= {"genrm_model_server": {"type": "responses_api_models", "name": "judge_model"}}
    agent = {"entrypoint": "app.py", "resources_server": {"type": "resources_servers", "name": COMPARED}}
    agent |= {"model_server": {"type": "responses_api_models", "name": "policy_model"}}
    compared = {
        COMPARED: {"resources_servers": {COMPARED: compare}},
        AGENTS[4]: {"responses_api_agents": {"simple_agent": agent}},
    }
    (folder / "compared.yaml").write_text(yaml.safe_dump(compared))
    (folder / "judge.txt").write_text(
        "{question} {expected_answer}={generated_answer}?"
    )  # Gym's own is longer than the context
    steps = "{responses_api_agents: {simple_agent: {max_steps: 3}}}"
    judging = f"judge_model_server: {{name: judge_model}}, judge_prompt_template_fpath: {folder / 'judge.txt'}"
    address = f"entrypoint: app.py, base_url: {judge_url}/v1, api_key: none, model: judge"
    model = f"{{{address}, return_token_id_information: false, uses_reasoning_parser: false}}"
    return [
        f"policy.model_name={save_calling_model(folder / 'caller')}",
        *CHAT,
        f"data.train.data_path={rows}",
        f"data.validation.data_path={rows}",
        "data.shuffle=false",
        "data.default.processor=nemo_gym_data_processor",
        "data.default.env_name=nemo_gym",
        "env.should_use_nemo_gym=true",
        "env.nemo_gym.embedded=false",
        f"env.nemo_gym.command={NG_RUN}",
        f"env.nemo_gym.config_paths=[{','.join([*PATHS, str(folder / 'compared.yaml')])}]",
        "env.nemo_gym.skip_venv_if_present=true",
        f"env.nemo_gym.uv_venv_dir={folder / 'venvs'}",
        f"env.nemo_gym.judge_model={{responses_api_models: {{vllm_model: {model}}}}}",
        f"env.nemo_gym.{JUDGED}={{resources_servers: {{{JUDGED}: {{{judging}}}}}}}",
        *(f"env.nemo_gym.{server}_simple_agent={steps}" for server in SERVERS[1:3]),
        f"grpo.num_prompts_per_step={len(AGENTS)}",
        f"policy.train_global_batch_size={len(AGENTS) * 4}",
        "cluster.cpu_units_per_node=2",
        "policy.megatron_cfg.expert_model_parallel_size=1",
    ]


@contextmanager
def judge(run_folder: Path) -> Iterator[str]:
    Judge.run_folder = run_folder
    Judge.goes_on.set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    folder = tmp_path_factory.mktemp("gym")
    with pytest.MonkeyPatch.context() as patch, judge(folder / "run") as judge_url:
        patch.setenv("MRL_CACHE", str(folder / "cache"))
        patch.setenv("MRL_TEST_GYM", str(os.getpid()))
        for running in live_run(folder, *overrides(folder, judge_url)):
            running.on_engines(watch)
            yield running


@pytest.fixture
def steps(live: LiveRun, monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(live, monkeypatch)


def test_three_steps_train_what_was_sampled(live: LiveRun, steps: Steps):
    for _ in range(3):
        Judge.said.clear()
        Judge.scores.clear()
        metrics = steps.step(AGENTS)
        # Every answer that an engine gave came back by Gym's servers, and is trained once; those to the judge are not.
        trained, drawn = steps.trained(), steps.drawn()
        assert (
            trained <= drawn and trained.total() > 4 * len(AGENTS) and (drawn - trained).total() == len(Judge.said) == 4
        )
        for name in AGENTS:
            assert metrics[f"rollout/{name}/num_rollouts"] == 4, name
            assert not any(key.startswith(f"rollout/{name}/untrained") for key in metrics), name
        rewards = {group.prompt.env_name: [verdict.reward for verdict in group.verdicts] for group in steps.groups}
        (asked,) = [group for group in steps.groups if group.prompt.env_name == AGENTS[0]]
        grade = mcqa.make()
        assert rewards[AGENTS[0]] == [
            grade(Task((one.text,), "B", asked.prompt.text, asked.prompt.row)).reward for one in asked.verdicts
        ]
        assert set(Judge.said) <= set(LABELS)
        assert sorted(rewards[AGENTS[3]]) == sorted(float(said == LABELS[0]) for said in Judge.said)
        # Each of the group was compared with two others.
        assert sorted(2 * rewards[AGENTS[4]]) == sorted(Judge.scores)
        # Turns behind a call of a tool are trained in one sequence with it.
        assert (
            max(
                info.num_turns
                for group in steps.groups[1:3]
                for rollout in group.rollouts
                for info in rollout.sequences
            )
            > 1
        )
        for group in steps.groups[1:2]:
            called = [verdict.text.count(CALLS[0][0]) for verdict in group.verdicts]
            assert rewards[AGENTS[1]] == [float(count == 1) for count in called]
    assert live.state.weight_version > 1


def judged(live: LiveRun) -> RolloutGroup:
    """A group of which a model is the judge, outside of the steps."""
    supplier = live.run.supplier
    prompts = map(supplier.data.train.__getitem__, range(len(supplier.data.train)))
    asked = [(EPOCH, next(prompt for prompt in prompts if prompt.env_name == AGENTS[3]))]
    version = live.state.weight_version
    sampling = supplier.data.sampling
    (group,) = do(supplier.queue.sample(asked, sampling, num_generations=4, weight_version=version, clock=Clock()))
    return group


def test_what_a_judge_fails_at_is_no_wrong_answer(live: LiveRun, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Judge, "verdicts", ())  # nonsense is one: Gym takes it for "not equal"
    group, said = judged(live), Judge.said[-4:]
    assert [verdict.status for verdict in group.verdicts] == ["ok"] * 4 and not any(
        label in text for text in said for label in LABELS
    )
    assert list(group.rewards) == [0.0] * 4
    monkeypatch.setattr(Judge, "fails", True)
    verdicts = judged(live).verdicts
    assert {verdict.status for verdict in verdicts} == {"error"} and all(
        "judge_failed" in verdict.reason for verdict in verdicts
    )
    # One that does not answer, as one that cannot be reached, which Gym asks without end.
    Judge.goes_on.clear()
    gateways = live.run.supplier.session.collector.gateways
    assert gateways is not None
    gateways.apply(lambda actor: setattr(actor.runs.runner, "_timeout_s", 5.0), deadline_s=HANG_S)
    verdicts = judged(live).verdicts
    assert {verdict.status for verdict in verdicts} == {"timeout"} and all(
        "env.agent_timeout_s" in verdict.reason for verdict in verdicts
    )
    gateways.apply(lambda actor: setattr(actor.runs.runner, "_timeout_s", HANG_S), deadline_s=HANG_S)
    Judge.goes_on.set()


@dataclass(frozen=True)
class GymProcess:
    pid: int
    command: str
    ray_folder: Path


def gym_processes() -> list[GymProcess]:
    """Processes of NeMo Gym in the runs of this test."""
    found = list[GymProcess]()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # one that has ended meanwhile
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            folders = [variable.partition("=")[2] for variable in variables if variable.startswith("RAY_TMPDIR=")]
            if f"MRL_TEST_GYM={os.getpid()}" in variables and folders:
                found.append(GymProcess(int(entry.name), command, Path(folders[0])))
    return found


def end_head() -> None:
    (head,) = [process.pid for process in gym_processes() if f"{NG_RUN} +config_paths" in process.command]
    os.kill(head, signal.SIGKILL)


def test_an_engine_and_gyms_head_may_die_under_way(live: LiveRun, steps: Steps):
    engine = live.on_engines(lambda engine: os.getpid())[0]
    for victim in (lambda: os.kill(engine, signal.SIGKILL), end_head):
        Judge.on_request.append(victim)
        for _ in range(2):
            metrics = steps.step(AGENTS)
            assert not Judge.on_request and all(metrics[f"rollout/{name}/num_rollouts"] == 4 for name in AGENTS)
            assert steps.trained().total() > 4 * len(AGENTS)


def test_a_killed_driver_leaves_nothing_of_gym(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MRL_TEST_GYM", str(os.getpid()))
    folders = set[Path]()
    with judge(tmp_path / "run") as judge_url:
        inputs, run_folder = [*write_inputs(tmp_path), *overrides(tmp_path, judge_url)], tmp_path / "run"

        def look() -> None:
            folders.update(process.ray_folder for process in gym_processes())

        with attempt(run_folder, inputs, "killed") as current:
            current.wait_until(lambda: is_taken(run_folder, 2), "generation of step 2")
            look()
            Judge.on_request.append(current.process.kill)
            assert current.finish() == -signal.SIGKILL
            current.assert_nothing_survives()
        Judge.on_request.append(look)
        # One attempt that SIGTERM ends, and one to the last step.
        assert_goes_on(run_folder, inputs)
    assert len(folders) == 2 and not any(folder.exists() for folder in folders)
