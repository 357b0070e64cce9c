# SPDX-License-Identifier: Apache-2.0
"""A rule wrong on both sides alike: no checksum can see it, vLLM's own loader does, before a token is sampled."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conversion.boxes import Slot
from conversion.families import registry
from conversion.families.common import Flavour, MegatronCoords, MegatronParallel
from conversion.reshard import ScheduleError
from mrl.cluster.engines import EngineGroup
from mrl.cluster.errors import ActorName
from mrl.cluster.policies import PolicyGroup
from mrl.cluster.refit import Refitter, build_schedule, refit_inputs
from mrl.cluster.runtime import Placement
from mrl.cluster.scheduling import EngineSlots
from mrl.config.load import load_config
from mrl.config.schema.run import RunConfig
from mrl.policy.weights import Arena
from mrl.refit import RefitError
from mrl.refit.checksum import checksum
from mrl.refit.exchange import Exchange, GpuHandles
from mrl.refit.group import GroupAddress
from mrl.refit.inputs import Part, RefitInputs
from tests import models
from tests.drivers import do
from tests.reading import read_layout
from tests.rollouts import StartEngine, random_requests, run
from tests.wrong_rule import ATTENTION_LAYER, WRONG_FAMILY

if TYPE_CHECKING:
    from mrl.rollout.engine import Engine


@pytest.fixture
def swap_query_and_key(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setitem(registry.FAMILIES, "nemotron_h", WRONG_FAMILY)


class OneRank:
    """The policy's part of a refit on one rank, which has read the folder by the table of this moment."""

    def __init__(self, folder: Path, precision: str = "float32") -> None:
        hf_config = json.loads((folder / "config.json").read_text())
        self._precision = precision
        layout = registry.family(hf_config).megatron_layout(hf_config, *self.layout_arguments())
        self._arena = Arena(read_layout(folder, layout), name="test-arena")

    def layout_arguments(self) -> tuple[MegatronParallel, MegatronCoords, str, Flavour]:
        return MegatronParallel(), MegatronCoords(), self._precision, "local"

    def prepare_refit(self, inputs: RefitInputs, address: GroupAddress) -> GpuHandles:
        self._exchange = Exchange(inputs.schedule(), 0, self._arena.tensors(), self._arena.handle(), group=None)
        return self._exchange.handles()

    def refit(self, attempt: int, readers: Collection[int], timeout_s: float, part: Part) -> None:
        self._exchange.run(attempt, readers, timeout_s=timeout_s)


class Here:
    """Calls that the groups of actors make, on an object of this process."""

    num_engines = world_size = 1
    serving, is_elastic = [0], False  # noqa: RUF012
    master = ("nowhere", 0)

    def __init__(self, target: object) -> None:
        self._target = target

    def call(
        self, verb: Callable, *arguments: object, deadline_s: float | None = None, only: object = None
    ) -> dict[int, object]:
        return {0: getattr(self._target, verb.__name__)(*arguments)}

    def start(self, verb: Callable, arguments: dict[int, tuple[object, ...]]) -> dict[ActorName, object]:
        """The answers, at once."""
        return {
            ActorName(type(self._target).__name__, index): getattr(self._target, verb.__name__)(*mine)
            for index, mine in arguments.items()
        }

    def call_each(
        self, verb: Callable, arguments: dict[int, tuple[object, ...]], *, deadline_s: float | None = None
    ) -> dict[int, object]:
        return self.call(verb, *arguments[0])

    async def wait_for_enough(self) -> None: ...

    def take_in(self) -> list[int]:
        return []

    def held(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.fixture(autouse=True)
def wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of this process answer at once; of one round, the policy's part waits for no reader."""
    monkeypatch.setattr("mrl.cluster.refit.wait_all", lambda pending, **_: pending)


def refit_between(folder: Path, engine: Engine, precision: str = "float32") -> Refitter:
    """The run's own refit, between one rank and one engine of this process."""
    engine.enter("load")
    return Refitter(*one_slot(folder, precision), engines_of(engine))


def engines_of(engine: object) -> EngineGroup:
    """The group of one engine."""
    return cast(EngineGroup, Here(engine))


def one_slot(folder: Path, precision: str = "float32") -> tuple[RunConfig, Placement, PolicyGroup]:
    config = load_config("grpo_tiny.yaml", [f"policy.model_name={folder}", f"policy.precision={precision}"])
    placement = SimpleNamespace(engines=(EngineSlots(0, (0,)),), node_of={0: 0})
    return config, cast(Placement, placement), cast(PolicyGroup, Here(OneRank(folder, precision)))


@pytest.fixture(scope="module")
def multi_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with as many key heads as query heads: exchanged, they have each other's shapes."""
    return models.save_nemotron_h(
        tmp_path_factory.mktemp("multi_head"), num_key_value_heads=models.TINY_NEMOTRON_H["num_attention_heads"]
    )


def test_refit_zero_passes_with_the_right_rule(start_engine: StartEngine, multi_head: Path) -> None:
    engine = start_engine(multi_head)
    do(refit_between(multi_head, engine).zero())
    assert engine.weight_version == 1
    assert run(engine, random_requests(2))


def test_a_wrong_but_consistent_rule_is_caught_before_sampling(
    start_engine: StartEngine, multi_head: Path, swap_query_and_key: Callable[[], None]
) -> None:
    engine = start_engine(multi_head)
    swap_query_and_key()
    refit = refit_between(multi_head, engine)
    slot = f"model.layers.{ATTENTION_LAYER}.mixer.qkv_proj.weight"
    with pytest.raises(RefitError, match=rf"changed 1 of \d+ tensors of the engine.* {slot}$"):
        do(refit.zero())
    engine.add(random_requests(1))
    with pytest.raises(RuntimeError, match="must not sample"):
        engine.step()
    # Checksums agree with it: only refit zero stands between this rule and a run.
    assert do(refit.run()).verified_bytes > 0


def test_with_grouped_queries_the_schedule_refuses_it(
    checkpoint: Callable[[int], Path], swap_query_and_key: Callable[[], None]
) -> None:
    engines = engines_of(SimpleNamespace(tensor_dtypes=lambda part: [()]))
    config, placement, policies = one_slot(checkpoint(0))
    inputs = refit_inputs(config, placement, policies, engines)
    build_schedule(config, inputs)
    swap_query_and_key()
    with pytest.raises(ScheduleError, match="qkv_proj.weight"):
        build_schedule(config, inputs)


def test_refit_zero_names_what_the_trainer_alone_rounds(
    start_engine: StartEngine, multi_head: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Published bfloat16 nemotron_h files have some float32 tensors: vLLM keeps Mamba's A and the router so, rounds D.

    Megatron's Float16Module rounds A_log, and its optimizers keep no float32 parameter of a bfloat16 model.
    transformers decides: it rounds the same tensors to the same values, and engines compute with these.
    """
    folder, wide = (
        Path(shutil.copytree(multi_head, tmp_path / "wide")),
        ("A_log", "mixer.D", "gate.weight", "e_score_correction_bias"),
    )
    tensors = {
        name: tensor if name.endswith(wide) else tensor.bfloat16()
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    engine = start_engine(folder, precision="bfloat16")
    with caplog.at_level("INFO", logger="mrl.cluster.refit"):
        do(refit_between(folder, engine, "bfloat16").zero())
    (said,) = [record.getMessage() for record in caplog.records if "wider dtype" in record.getMessage()]
    assert "mixer.A" in said and "mixer.D" not in said and "e_score_correction_bias" not in said
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    (held,) = engine.live_digest()
    for layer in (
        index for index, letter in enumerate(str(models.TINY_NEMOTRON_H["hybrid_override_pattern"])) if letter == "M"
    ):
        mixer = f"model.layers.{layer}.mixer."
        decay, skip = loaded[f"{mixer}A_log"], loaded[f"{mixer}D"]
        assert decay.dtype == skip.dtype == torch.bfloat16 and not torch.equal(
            decay.float(), tensors[f"backbone.layers.{layer}.mixer.A_log"]
        )
        assert held[Slot(f"{mixer}A")] == checksum(-torch.exp(decay.float())) and held[Slot(f"{mixer}D")] == checksum(
            skip
        )
    assert run(engine, random_requests(1))
