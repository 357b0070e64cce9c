# SPDX-License-Identifier: Apache-2.0
"""Section `env`: scoring of rollouts. See `mrl.config.schema.run`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mrl.config.fields import AboveZero, Count, Finite, Port, Positive, Workers


@dataclass
class WorkersConfig:
    """An environment and the children that score its rollouts. Its name is that of its key and module."""

    server = ""
    """NeMo Gym's resource server that does the same; "" = that of the environment's name. No key."""
    needs_answer = False
    """True if every row must have an answer to compare with. No key."""
    num_workers: Workers | None = None
    """Child processes that score rollouts, of all nodes together; null = the cores of each node, shared by the run's
    environments.

    A node has at least two, so that a text that takes its deadline does not hold up all others, and at most one for
    each core.
    """
    timeout_s: AboveZero = 2.0
    """Seconds for one rollout; then its child is killed and its reward is 0, unless the machine kept it from
    its work.
    """


@dataclass
class MathEnvConfig(WorkersConfig):
    server, needs_answer = "math_with_judge", True
    math_verify_impl: Literal["hf_math_verify", "dapo_math_verify"] = "hf_math_verify"
    """Comparison of an answer with the expected one: the last mathematical expression by value, or the text after the
    last `Answer:`.
    """
    strict: bool = False
    """Answers must be final values: `12+30` is no longer as good as 42. Not with `dapo_math_verify`, which compares
    texts.
    """


@dataclass
class McqaEnvConfig(WorkersConfig):
    needs_answer = True


@dataclass
class CodeEnvConfig(WorkersConfig):
    server = "code_gen"
    timeout_s: AboveZero = 60.0
    """Seconds for all tests of a rollout; then its program has failed. A child that takes 10 s more is killed; twice
    gives reward 0.
    """
    unit_test_timeout_s: AboveZero = 10.0
    """Seconds for one test, after which the program has failed."""
    allow_unconfined: bool = False
    """Run programs also where the kernel cannot confine them (Landlock, seccomp): they may do what the run's user may.
    false: refuse.
    """


@dataclass
class WorkplaceEnvConfig(WorkersConfig):
    timeout_s: AboveZero = 5.0
    """Seconds for one turn; then its child is killed and its reward is 0, unless the machine kept it from its work."""
    tables_path: str | None = None
    """First records of a conversation: a folder of WorkBench's CSV files, or a JSON file of tables. A row's own
    `tables` win.
    """


@dataclass
class OwnEnvConfig(WorkersConfig):
    functions: dict[str, str] = field(default_factory=dict)
    """Your reward functions, `name: package.module:name` (docs/extend/reward.md); rows choose by `env_name`.

    Entry points of group `mrl.rewards` need no line here.
    """
    agents: dict[str, str] = field(default_factory=dict)
    """Your agents, `name: package.module:name` of an `async def` (docs/extend/your_agent.md); rows choose by
    `env_name`.

    `num_workers` is the number of processes of each agent, where many rollouts run at once.
    """
    num_workers: Workers | None = 1
    """Child processes of each function, of all nodes together, at least one per node. They may be more than the cores:
    many functions wait.

    null = the cores of each node, shared by the run's environments.
    """
    timeout_s: AboveZero = 10.0
    """Seconds for one rollout; then its child is killed and the rollout is masked."""
    allow: list[Literal["network", "processes", "files"]] = field(default_factory=list)
    """Permissions of your functions once loaded: open sockets, start processes, write files. Empty = compute, read
    files, use threads.
    """


FROM_VERIFIERS = "verifiers:"
"""Begins a `data_path` that names an environment of `env.verifiers`, whose data set is read."""


@dataclass
class EffortConfig:
    """Rewards of rows whose last question has `low_string`, `r` becoming `r + r * max(l, 0) + low_penalty * min(l, 0)`.

    `l` is the smaller of 1 and `low_weight * (1 - tokens of the last answer / low_ub)`.
    """

    low_weight: Finite = 0.0
    """Weight of an answer's length; 0 and below = rewards stay as they are."""
    low_penalty: Finite = 1.0
    """Weight of the punishment for an answer of more than `low_ub` tokens."""
    low_ub: Positive = 64000
    """Tokens of an answer that is neither short nor long."""
    low_string: str = ""
    """Text in a question that asks for a short answer; empty = rewards stay as they are."""


@dataclass
class GymHeadConfig:
    host: str = ""
    """Host of NeMo Gym's head server that somebody else starts; empty = none does."""
    port: Port = 11000
    """Its port."""


@dataclass
class NemoGymConfig:
    config_paths: list[str] = field(default_factory=list)
    """Servers of NeMo Gym, `resources_servers/<name>/...`, whose environments rows may use; empty = all. `command`
    starts them.
    """
    command: str | None = None
    """Program that starts NeMo Gym's servers, such as `/venvs/gym/bin/ng_run`, for rows that mrl has no grader for;
    null = none.
    """
    head_server: GymHeadConfig = field(default_factory=GymHeadConfig)
    """Address of servers that run already, in place of `command`."""
    policy_base_url: str | None = None
    """Address at which servers that run already ask for the model, `http://HOST:PORT/gym/v1`: the gateway listens
    there.
    """
    policy_api_key: str | None = None
    """Key with which they do."""
    embedded: bool = True
    """Grade rows here where mrl has a grader for them. false: NeMo Gym's servers grade all."""
    start_s: AboveZero = 1800.0
    """Seconds in which the servers of `command` must be up, the making of their environments included, or `head_server`
    answer.
    """
    servers: dict[str, Any] = field(default_factory=dict)
    """NeMo Gym's own config, which `command` gets. Its keys may stand at `env.nemo_gym` itself, as in NeMo
    RL's files.
    """
    effort_levels: EffortConfig = field(default_factory=EffortConfig)
    invalid_tool_call_patterns: list[str] | None = None
    """Texts in an answer, outside of calls that can be read, that make it an invalid call; null = only what begins as a
    call does.
    """
    thinking_tags: list[str] | None = None
    """Marks around thoughts, an opening and a closing one; null = `<think>` and `</think>`."""

    @property
    def has_servers(self) -> bool:
        """True if rows may go to NeMo Gym's servers."""
        return bool(self.command or self.head_server.host)

    @property
    def judged(self) -> frozenset[str]:
        """Servers that mrl has graders for, and that the config sets to use an LLM judge."""
        found: set[str] = set()
        for instance in self.servers.values():
            for name, options in (
                (instance.get("resources_servers") or {}) if isinstance(instance, dict) else {}
            ).items():
                if isinstance(options, dict) and options.get("should_use_judge") is True:
                    found.add(name)
        return frozenset(found)


@dataclass
class PlacementConfig:
    num_nodes: Count = 0
    """Nodes on which rewards are computed, besides `cluster.num_nodes`: nodes without GPUs and slots that have joined
    the run's Ray cluster (docs/cluster.md). 0 = on each node of slots.
    """


@dataclass
class EnvConfig:
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    math: MathEnvConfig = field(default_factory=MathEnvConfig)
    mcqa: McqaEnvConfig = field(default_factory=McqaEnvConfig)
    code: CodeEnvConfig = field(default_factory=CodeEnvConfig)
    instruction_following: WorkersConfig = field(default_factory=WorkersConfig)
    structured_outputs: WorkersConfig = field(default_factory=WorkersConfig)
    workplace_assistant: WorkplaceEnvConfig = field(default_factory=WorkplaceEnvConfig)
    own: OwnEnvConfig = field(default_factory=OwnEnvConfig)
    remote: dict[str, str] = field(default_factory=dict)
    """Agents on servers of yours, `name: URL` (docs/extend/your_agent.md); rows choose by `env_name`."""
    verifiers: dict[str, str] = field(default_factory=dict)
    """Environments of the library verifiers, `name: Python in which it and verifiers are installed`
    (docs/environments.md).

    `data_path: verifiers:NAME` reads the rows of one.
    """
    verifiers_args: dict[str, Any] = field(default_factory=dict)
    """Name of one of them -> arguments of its `load_environment`, or keys of its taskset's config, by name."""
    agent_timeout_s: AboveZero = 1800.0
    """Seconds for one rollout of an agent, those in which its engine trains or waits included; then it is masked."""
    should_use_nemo_gym: bool = False
    """Rows are NeMo Gym's and name their environment by `agent_ref`; it runs here, or on a server of `env.nemo_gym`."""
    nemo_gym: NemoGymConfig = field(default_factory=NemoGymConfig)
    should_mask_flagged_samples: bool = True
    """Keep rollouts flagged with `mask_sample` out of the loss; their rewards count in the group's baseline. false:
    train on them.
    """

    @property
    def agents(self) -> dict[str, str]:
        """Path, URL or Python of every agent, by name."""
        return {**self.own.agents, **self.remote, **self.verifiers}

    @property
    def has_agents(self) -> bool:
        """True if rollouts may be an agent's: a function's, a URL's or NeMo Gym's."""
        return bool(self.agents) or self.has_gym_servers

    @property
    def has_gym_servers(self) -> bool:
        return self.should_use_nemo_gym and self.nemo_gym.has_servers

    def embeds(self, server: str) -> bool:
        """Tells if rows of a server of NeMo Gym are graded here."""
        return server in SERVERS and self.nemo_gym.embedded and server not in self.nemo_gym.judged

    @property
    def gym_servers(self) -> tuple[str, ...]:
        """Servers of NeMo Gym that the config names, resources and agents; empty without NeMo Gym's rows."""
        parts = [path.split("/") for path in self.nemo_gym.config_paths] if self.should_use_nemo_gym else []
        kinds = ("resources_servers", "responses_api_agents")
        return tuple(dict.fromkeys(folders[1] for folders in parts if folders[0] in kinds and len(folders) > 1))


GYM_PATH = "/gym/v1"
"""Path of the gateway at which NeMo Gym's servers ask for the model."""
GYM_TURNS = 6
"""Turns that NeMo Gym's agent of the workplace assistant takes at most."""

_BUILT_IN = {
    name: section for name, section in vars(EnvConfig()).items() if isinstance(section, WorkersConfig) and name != "own"
}
BUILT_IN = tuple(_BUILT_IN)
"""Environments that come with mrl, each with its section."""
NEED_ANSWER = tuple(name for name, section in _BUILT_IN.items() if section.needs_answer)
SERVERS = {section.server or name: name for name, section in _BUILT_IN.items()}
"""NeMo Gym's resource servers, and the environments that do what they do. Rows name the agent
`<server>_simple_agent`.
"""

TOOL_PARSERS = (
    "qwen3_coder",
    "qwen3_xml",
    "hermes",
    "qwen3_json",
    "nemotron_json",
    "llama3_json",
    "llama4_json",
    "mistral",
)
"""vLLM's names of the formats of tool calls that environments read."""
CALLS_TOOLS = "workplace_assistant"
"""The environment of which every row is about tool calls."""
REASONING_PARSERS = (
    *(
        "deepseek_r1",
        "deepseek_v3",
        "glm45",
        "glm47",
        "holo2",
        "mimo",
        "minimax_m2",
        "nano_v3",
        "nemotron_v3",
        "olmo3",
        "qwen3",
    ),
    *("step3", "step3p5"),
)
"""Parsers of thoughts between `<think>` and `</think>`, which environments leave out in the same way."""
