# SPDX-License-Identifier: Apache-2.0
"""NeMo RL's own code, from a checkout, beside ours. For `scripts.bench.nemo_parity`."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

# What their algorithms import and never use here: types of configs, loggers, a tokenizer patch, layouts of other backends.
STUBBED = ("nemo_rl.models.policy", "nemo_rl.utils.logger", "nemo_rl.utils.fastokens", "nemo_rl.models.dtensor.parallelize")
# Functions of the driver, whose file imports ray actors and every engine: taken from its text one by one.
DRIVER_FUNCTIONS = (
    "scale_rewards",
    "_apply_message_level_advantage_penalties",
    "_clip_grpo_advantages",
    "compute_and_apply_seq_logprob_error_masking",
)


class _Stub(ModuleType):
    """Has every name that is asked of it."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Stubs(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(STUBBED) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """A stub has no code."""


@dataclass(frozen=True)
class NemoRl:
    """Their modules."""

    commit: str
    utils: ModuleType
    advantages: ModuleType
    losses: ModuleType
    rewards: ModuleType
    driver: ModuleType
    """`DRIVER_FUNCTIONS` alone."""
    batches: ModuleType


def load(checkout: Path) -> NemoRl:
    """Their code, imported from a checkout.

    Raises:
        ValueError: the folder is no checkout.
    """
    if not (checkout / "nemo_rl" / "algorithms" / "grpo.py").exists():
        raise ValueError(f"{checkout} has no nemo_rl/algorithms/grpo.py; give the folder of a NeMo RL checkout")
    sys.meta_path.insert(0, _Stubs())
    sys.path.insert(0, str(checkout))
    names = ("utils", "advantage_estimator", "loss.loss_functions", "reward_functions")
    with redirect_stdout(StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        utils, advantages, losses, rewards = (import_module(f"nemo_rl.algorithms.{name}") for name in names)
        batches = import_module("nemo_rl.distributed.batched_data_dict")
    driver = _functions(checkout / "nemo_rl" / "algorithms" / "grpo.py", utils)
    return NemoRl(_commit(checkout), utils, advantages, losses, rewards, driver, batches)


def _functions(path: Path, utils: ModuleType) -> ModuleType:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in DRIVER_FUNCTIONS]
    missing = set(DRIVER_FUNCTIONS) - {node.name for node in wanted}
    if missing:
        raise ValueError(f"{path} has no {', '.join(sorted(missing))}: this is another version of NeMo RL than the comparison knows")
    future = ast.parse("from __future__ import annotations\nimport torch\nfrom typing import cast").body
    with TemporaryDirectory() as folder:
        text = Path(folder) / "nemo_rl_driver.py"
        text.write_text(ast.unparse(ast.Module([*future, *wanted], [])), encoding="utf-8")
        spec = spec_from_file_location(text.stem, text)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    vars(module)["get_gdpo_reward_component_keys"] = utils.get_gdpo_reward_component_keys
    return module


def _commit(checkout: Path) -> str:
    answer = subprocess.run(["git", "-C", str(checkout), "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, timeout=60)
    return answer.stdout.strip() or "unknown"
