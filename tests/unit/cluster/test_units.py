from mrl.cluster.units import engine_units, find_engine_across_nodes, share_of_cores, unit_table
from mrl.config.schema.generation import ColocatedConfig, EngineResourcesConfig, GenerationConfig, VllmConfig
from mrl.config.schema.policy import PolicyConfig
from mrl.config.schema.run import ClusterConfig, RunConfig


def run_config(cluster: ClusterConfig, *, tp: int, colocated: ColocatedConfig, num_cpu_engines: int = 1) -> RunConfig:
    generation = GenerationConfig(num_cpu_engines=num_cpu_engines, colocated=colocated, vllm_cfg=VllmConfig(tensor_parallel_size=tp))
    return RunConfig(policy=PolicyConfig(generation=generation), cluster=cluster)


def units_of(config: RunConfig) -> list[tuple[int, ...]]:
    return [engine.units for engine in engine_units(config)]


def test_colocated_engines_spread_over_the_policys_units():
    cpu = ClusterConfig(cpu_units_per_node=8)
    assert units_of(run_config(cpu, tp=1, colocated=ColocatedConfig())) == [(0,)]
    assert units_of(run_config(cpu, tp=1, colocated=ColocatedConfig(), num_cpu_engines=2)) == [(0,), (4,)]
    assert units_of(run_config(cpu, tp=2, colocated=ColocatedConfig(), num_cpu_engines=3)) == [(0, 1), (2, 3), (4, 5)]
    gpu = ClusterConfig(num_nodes=2, gpus_per_node=4)
    assert units_of(run_config(gpu, tp=4, colocated=ColocatedConfig())) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_dedicated_engines_follow_the_policys_units():
    cpu = ClusterConfig(cpu_units_per_node=4)
    assert units_of(run_config(cpu, tp=2, colocated=ColocatedConfig(enabled=False), num_cpu_engines=2)) == [(4, 5), (6, 7)]
    one_node = ColocatedConfig(enabled=False, resources=EngineResourcesConfig(gpus_per_node=2))
    assert units_of(run_config(ClusterConfig(gpus_per_node=8), tp=1, colocated=one_node)) == [(6,), (7,)]
    whole_nodes = ColocatedConfig(enabled=False, resources=EngineResourcesConfig(num_nodes=1))
    assert units_of(run_config(ClusterConfig(num_nodes=2, gpus_per_node=4), tp=2, colocated=whole_nodes)) == [(4, 5), (6, 7)]


def test_workers_run_on_the_devices_of_their_units():
    gpu = run_config(ClusterConfig(num_nodes=2, gpus_per_node=4), tp=2, colocated=ColocatedConfig())
    assert [engine.device_ids(4) for engine in engine_units(gpu)] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    cpu = run_config(ClusterConfig(cpu_units_per_node=4), tp=2, colocated=ColocatedConfig())
    assert [engine.device_ids(0) for engine in engine_units(cpu)] == [()]


def test_an_engine_across_nodes_is_found():
    (engine,) = engine_units(run_config(ClusterConfig(cpu_units_per_node=2), tp=2, colocated=ColocatedConfig(enabled=False)))
    assert engine.units == (2, 3)
    assert find_engine_across_nodes({0: 0, 1: 0, 2: 1, 3: 1}, [engine]) is None
    assert find_engine_across_nodes({0: 0, 1: 0, 2: 0, 3: 1}, [engine]) is engine


def test_the_table_has_a_line_for_every_unit():
    engines = engine_units(run_config(ClusterConfig(cpu_units_per_node=2), tp=2, colocated=ColocatedConfig(enabled=False)))
    assert unit_table(["a1", "a1", "host-b", "host-b"], 2, engines) == [
        "unit  node    rank  engine.worker",
        "0     a1      0     -",
        "1     a1      1     -",
        "2     host-b  -     0.0",
        "3     host-b  -     0.1",
    ]


def test_units_share_the_cores_of_their_own_node():
    node_of = dict.fromkeys(range(8), 0) | {8: 1, 9: 1}
    assert [share_of_cores(unit, node_of, {0: 224, 1: 3}) for unit in (0, 7, 8, 9)] == [28, 28, 1, 1]
    assert share_of_cores(0, node_of, {0: 4, 1: 3}) == 1
