# SPDX-License-Identifier: Apache-2.0
import pytest

from mrl.cluster.errors import ActorLost, ActorName
from mrl.cluster.scheduling import (
    EngineSlots,
    device_ids,
    elastic_slots,
    engine_slots,
    find_shared_node,
    find_uneven_engine,
    lost_engine,
    num_gateways,
    share_of_cores,
    slot_table,
    until_no_engine_dies,
)
from mrl.config.schema.algo import GrpoConfig
from mrl.config.schema.env import EnvConfig, OwnEnvConfig
from mrl.config.schema.generation import ColocatedConfig, EngineResourcesConfig, GenerationConfig, VllmConfig
from mrl.config.schema.policy import PolicyConfig
from mrl.config.schema.run import ClusterConfig, RunConfig
from tests.unit.stories import as_story


def run_config(
    cluster: ClusterConfig, *, tp: int, colocated: ColocatedConfig, num_cpu_engines: int = 1, pp: int = 1, ep: int = 1
) -> RunConfig:
    vllm_cfg = VllmConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp, expert_parallel_size=ep)
    generation = GenerationConfig(num_cpu_engines=num_cpu_engines, colocated=colocated, vllm_cfg=vllm_cfg)
    return RunConfig(policy=PolicyConfig(generation=generation), cluster=cluster)


def slots_of(config: RunConfig) -> list[tuple[int, ...]]:
    return [engine.slots for engine in engine_slots(config)]


def test_colocated_engines_spread_over_the_policys_slots():
    cpu = ClusterConfig(cpu_units_per_node=8)
    assert slots_of(run_config(cpu, tp=1, colocated=ColocatedConfig())) == [(0,)]
    assert slots_of(run_config(cpu, tp=1, colocated=ColocatedConfig(), num_cpu_engines=2)) == [(0,), (4,)]
    assert slots_of(run_config(cpu, tp=2, colocated=ColocatedConfig(), num_cpu_engines=3)) == [(0, 1), (2, 3), (4, 5)]
    gpu = ClusterConfig(num_nodes=2, gpus_per_node=4)
    assert slots_of(run_config(gpu, tp=4, colocated=ColocatedConfig())) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_dedicated_engines_follow_the_policys_slots():
    cpu = ClusterConfig(cpu_units_per_node=4)
    assert slots_of(run_config(cpu, tp=2, colocated=ColocatedConfig(enabled=False), num_cpu_engines=2)) == [
        (4, 5),
        (6, 7),
    ]
    one_node = ColocatedConfig(enabled=False, resources=EngineResourcesConfig(gpus_per_node=2))
    assert slots_of(run_config(ClusterConfig(gpus_per_node=8), tp=1, colocated=one_node)) == [(6,), (7,)]
    whole_nodes = ColocatedConfig(enabled=False, resources=EngineResourcesConfig(num_nodes=1))
    assert slots_of(run_config(ClusterConfig(num_nodes=2, gpus_per_node=4), tp=2, colocated=whole_nodes)) == [
        (4, 5),
        (6, 7),
    ]


def test_engines_that_come_and_go_have_places_of_their_own():
    apart, whole = ColocatedConfig(enabled=False), ColocatedConfig(False, EngineResourcesConfig(num_nodes=2))
    cpu = run_config(ClusterConfig(cpu_units_per_node=4), tp=2, colocated=apart, num_cpu_engines=2)
    gpu = run_config(ClusterConfig(num_nodes=3, gpus_per_node=4), tp=2, colocated=whole)
    assert elastic_slots(cpu) == elastic_slots(gpu) == []
    for config in (cpu, gpu):
        config.policy.generation.min_num_engines = 1
    assert elastic_slots(cpu) == [range(4, 6), range(6, 8)]
    # Two engines share a node, and each has its GPUs there.
    assert elastic_slots(gpu) == [range(4, 8), range(8, 12)]


def test_an_engine_has_slots_for_the_workers_of_all_stages():
    cpu = ClusterConfig(cpu_units_per_node=8)
    assert slots_of(run_config(cpu, tp=2, pp=2, colocated=ColocatedConfig(), num_cpu_engines=2)) == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
    ]
    gpu = run_config(ClusterConfig(num_nodes=2, gpus_per_node=4), tp=4, pp=2, colocated=ColocatedConfig())
    assert gpu.num_engines == 1 and gpu.nodes_of_engine == 2
    (engine,) = engine_slots(gpu)
    assert engine.parts({slot: slot // 4 for slot in range(8)}) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert run_config(cpu, tp=2, pp=3, colocated=ColocatedConfig(enabled=False)).num_dedicated_slots == 6


def test_an_engine_has_slots_for_the_workers_of_all_groups():
    gpu = run_config(ClusterConfig(num_nodes=4, gpus_per_node=4), tp=2, ep=8, colocated=ColocatedConfig())
    assert (gpu.num_engines, gpu.nodes_of_engine, gpu.policy.generation.vllm_cfg.num_groups) == (2, 2, 4)
    assert slots_of(gpu) == [tuple(range(8)), tuple(range(8, 16))]


def test_workers_run_on_the_devices_of_their_slots():
    gpu = run_config(ClusterConfig(num_nodes=2, gpus_per_node=4), tp=2, colocated=ColocatedConfig())
    assert [device_ids(engine.slots, 4) for engine in engine_slots(gpu)] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    cpu = run_config(ClusterConfig(cpu_units_per_node=4), tp=2, colocated=ColocatedConfig())
    assert [device_ids(engine.slots, 0) for engine in engine_slots(cpu)] == [()]


def test_engines_hold_whole_nodes_where_they_are_larger():
    gpu = run_config(ClusterConfig(num_nodes=4, gpus_per_node=4), tp=8, colocated=ColocatedConfig())
    engines, node_of = engine_slots(gpu), {slot: slot // 4 for slot in range(16)}
    assert [engine.parts(node_of) for engine in engines] == [
        [(0, 1, 2, 3), (4, 5, 6, 7)],
        [(8, 9, 10, 11), (12, 13, 14, 15)],
    ]
    assert [device_ids(part, 4) for part in engines[1].parts(node_of)] == [(0, 1, 2, 3), (0, 1, 2, 3)]
    assert find_uneven_engine(node_of, engines) is None


def test_an_engine_with_more_workers_on_one_node_is_found():
    engine = EngineSlots(0, (1, 2, 3))
    assert find_uneven_engine({1: 0, 2: 1, 3: 1}, [engine]) is engine
    assert find_uneven_engine({1: 0, 2: 1, 3: 2}, [engine]) is None


def test_the_table_has_a_line_for_every_slot():
    engines = engine_slots(
        run_config(ClusterConfig(cpu_units_per_node=2), tp=2, colocated=ColocatedConfig(enabled=False))
    )
    assert slot_table(["a1", "a1", "host-b", "host-b"], 2, engines) == [
        "slot  node    rank  engine.worker",
        "0     a1      0     -",
        "1     a1      1     -",
        "2     host-b  -     0.0",
        "3     host-b  -     0.1",
    ]


def test_the_table_names_the_ranks_of_models_with_nodes_of_their_own():
    own, engines = {"teacher:math": range(1, 3)}, [EngineSlots(0, (0,))]
    assert slot_table(["a", "b", "b"], 1, engines, own)[1:] == [
        "0     a     0     0.0",
        "1     b     -     -  teacher:math 0",
        "2     b     -     -  teacher:math 1",
    ]
    assert find_shared_node({0: 0, 1: 1, 2: 1}, own, 3) is None
    assert (
        find_shared_node({0: 0, 1: 0, 2: 1}, own, 3) == find_shared_node({0: 1, 1: 1, 2: 1}, own, 3) == "teacher:math"
    )


def test_slots_share_the_cores_of_their_own_node():
    node_of = dict.fromkeys(range(8), 0) | {8: 1, 9: 1}
    assert [share_of_cores(slot, node_of, {0: 224, 1: 3}) for slot in (0, 7, 8, 9)] == [28, 28, 1, 1]
    assert share_of_cores(0, node_of, {0: 4, 1: 3}) == 1


def lost(index: int) -> ActorLost:
    return ActorLost(ActorName("engine", index), "pull", "killed")


@as_story
async def test_every_engine_that_dies_is_restarted_and_takes_part_from_then_on():
    # Engine 1 is dead at first; 0 dies in the first attempt, 2 in the second and again while it starts.
    attempts: list[set[int]] = []
    restarts: list[int] = []
    deaths = [lost(0), lost(2)]

    async def attempt(restarted: set[int]) -> str:
        attempts.append(set(restarted))
        if deaths:
            raise deaths.pop(0)
        return "refitted"

    async def restart(index: int) -> None:
        restarts.append(index)
        if restarts.count(2) == 1 and index == 2:
            raise lost(2)

    assert await until_no_engine_dies(attempt, restart, died=1) == ("refitted", {0, 1, 2})
    assert restarts == [1, 0, 2, 2]
    assert attempts == [{1}, {0, 1}, {0, 1, 2}]


@pytest.mark.parametrize("actor", [ActorName("policy rank", 0), "reward actor"])
@as_story
async def test_the_death_of_another_actor_is_not_an_engines(actor: object):
    death = ActorLost(actor, "settle", "killed")

    async def attempt(_: object) -> None:
        raise death

    with pytest.raises(ActorLost, match=f"{actor} died during settle: killed"):
        await until_no_engine_dies(attempt, attempt)
    with pytest.raises(ActorLost):
        lost_engine(death)
    assert lost_engine(lost(3)) == 3


def test_a_gateway_for_each_node_and_for_many_agents():
    def count(*, nodes: int = 1, prompts: int = 8, **env: object) -> int:
        generation = GenerationConfig(num_cpu_engines=4, vllm_cfg=VllmConfig(expose_http_server=True))
        grpo = GrpoConfig(num_prompts_per_step=prompts, num_generations_per_prompt=16)
        policy, cluster = PolicyConfig(generation=generation), ClusterConfig(num_nodes=nodes, cpu_units_per_node=4)
        section = EnvConfig(own=OwnEnvConfig(agents=env.pop("agents", {}), num_workers=env.pop("workers", 1)), **env)  # pyright: ignore[reportArgumentType]
        return num_gateways(RunConfig(policy=policy, cluster=cluster, grpo=grpo, env=section))

    assert count() == 1
    assert count(nodes=2) == 2 and count(nodes=8) == 4  # one for each node, as far as there are engines
    far = {"far": "http://127.0.0.1:1/"}
    assert count(prompts=32, remote=far) == 1 and count(prompts=33, remote=far) == 2 and count(prompts=33) == 1
    own = {"one": "package.module:agent"}
    assert count(prompts=128, agents=own) == 1 and count(prompts=128, agents=own, workers=3) == 3
    assert num_gateways(RunConfig()) == 0
