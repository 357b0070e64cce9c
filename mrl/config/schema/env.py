"""Section `env`: who scores rollouts. See `mrl.config.schema.run`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mrl.config.fields import AboveZero, Workers


@dataclass
class WorkersConfig:
    """Children that score rollouts, of any environment."""

    num_workers: Workers = 2
    """Child processes that score rollouts. There are at least two, so that a text that takes its deadline does not hold up all others."""
    timeout_s: AboveZero = 2.0
    """Seconds for one rollout; then its child is killed and its reward is 0, unless the machine kept it from its work."""


@dataclass
class MathEnvConfig(WorkersConfig):
    math_verify_impl: Literal["hf_math_verify", "dapo_math_verify"] = "hf_math_verify"
    """How an answer is compared with the expected one: the last mathematical expression by value, or the text after the last `Answer:`."""
    strict: bool = False
    """Whether an answer must be a final value: where a number is expected, an integer, a decimal or a fraction in lowest terms; else no
    operation (sum, integral, factorial) that the expected answer lacks. Off, as in NeMo RL, `12+30` is as good as 42. Not with
    `dapo_math_verify`, which compares texts."""


@dataclass
class CodeEnvConfig(WorkersConfig):
    num_workers: Workers = 8
    """Child processes that score rollouts, one program at a time each; never more than the host has cores."""
    timeout_s: AboveZero = 60.0
    """Seconds for all tests of one rollout, after which its program has failed. A child that takes 10 s more is killed; if it does so
    twice, the reward is 0."""
    unit_test_timeout_s: AboveZero = 10.0
    """Seconds for one test, after which the program has failed."""
    allow_unconfined: bool = False
    """true: run the model's programs where the kernel cannot confine them too (Landlock, seccomp), and count them as
    `rollout/code/unconfined`: they may then read and change what the run's user may. false: the environment does not start there."""


@dataclass
class WorkplaceEnvConfig(WorkersConfig):
    timeout_s: AboveZero = 5.0
    """Seconds for one turn; then its child is killed and its reward is 0, unless the machine kept it from its work."""
    tables_path: str | None = None
    """The records that a conversation begins with: a folder with WorkBench's CSV files, which the rows of the Nemotron-3-Nano blend are
    about, or a JSON file `{"emails": [...], "events": [...], ...}`. A row's own `tables` go before it; null = none but those."""


@dataclass
class OwnEnvConfig(WorkersConfig):
    functions: dict[str, str] = field(default_factory=dict)
    """Reward functions of your own, `name: pkg.mod:fn`; rows choose one by `env_name: name`. Functions that installed packages offer in
    the entry point group `mrl.rewards` need no line here."""
    num_workers: Workers = 1
    """Child processes of each function."""
    timeout_s: AboveZero = 10.0
    """Seconds for one rollout; then its child is killed and the rollout is masked."""
    allow: list[Literal["network", "processes", "files"]] = field(default_factory=list)
    """What your functions may do once they are loaded: open sockets, start processes, write outside their temporary folder. Empty = none
    of it: they compute, read files and use threads."""


@dataclass
class NemoGymConfig:
    config_paths: list[str] = field(default_factory=list)
    """Servers of NeMo Gym, `resources_servers/<name>/...`: rows may use the environments that do what these do. Empty = all. Its
    `responses_api_models/...` are left out: rollouts come from the run's own engines."""


@dataclass
class EnvConfig:
    math: MathEnvConfig = field(default_factory=MathEnvConfig)
    mcqa: WorkersConfig = field(default_factory=WorkersConfig)
    code: CodeEnvConfig = field(default_factory=CodeEnvConfig)
    instruction_following: WorkersConfig = field(default_factory=WorkersConfig)
    structured_outputs: WorkersConfig = field(default_factory=WorkersConfig)
    workplace_assistant: WorkplaceEnvConfig = field(default_factory=WorkplaceEnvConfig)
    own: OwnEnvConfig = field(default_factory=OwnEnvConfig)
    should_use_nemo_gym: bool = False
    """Rows are NeMo Gym's and name their environment by `agent_ref`; it runs here, without a server."""
    nemo_gym: NemoGymConfig = field(default_factory=NemoGymConfig)
    should_mask_flagged_samples: bool = True
    """Keep rollouts that their environment flags with `mask_sample` out of the loss; their rewards count in the baseline of their group.
    false: train on them."""

    @property
    def gym_servers(self) -> tuple[str, ...]:
        """Resource servers of NeMo Gym that the config names; empty without NeMo Gym's rows."""
        parts = [path.split("/") for path in self.nemo_gym.config_paths] if self.should_use_nemo_gym else []
        return tuple(folders[1] for folders in parts if folders[0] == "resources_servers" and len(folders) > 1)


GYM_TURNS = 6
"""Turns that NeMo Gym's agent of the workplace assistant takes at most."""

BUILT_IN = ("math", "mcqa", "code", "instruction_following", "structured_outputs", "workplace_assistant")
"""Environments that come with mrl, each with its section."""
