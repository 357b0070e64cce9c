# SPDX-License-Identifier: Apache-2.0
"""Plans of the packaged configs on real sizes, refusals, and imports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from conversion.boxes import volume
from conversion.families.common import MegatronParallel
from conversion.families.registry import family
from mrl.config.load import load_config
from mrl.config.model import with_value
from mrl.config.schema.run import RunConfig
from mrl.loop.preflight import check_start
from mrl.ops.plan import main
from mrl.ops.view.run_data import run_data
from mrl.plan.facts import PlanModel, read_model, state_rules
from mrl.plan.hardware import GIB, GPUS, nearest
from mrl.plan.memory import (
    PAGE_CACHE,
    ROLLOUTS,
    ROUNDING,
    engine_memory,
    host_memory,
    rank_memory,
    stage_states,
    work_of,
)
from mrl.plan.plan import as_data, find_host_misfit, make_plan, prediction, problems_of, search_layouts
from mrl.plan.search import worst_rank
from mrl.plan.times import EXPERT_PRODUCTS, exchange_seconds, forward_operations, train_seconds
from mrl.store.run_folder import RunFolder
from tests.reading import read_page
from tests.sources import ROOT
from tests.unit.plan.conftest import MODELS

H100 = GPUS["h100-80g"]
LENGTH = 1024
ONE_NODE = [
    "cluster.num_nodes=1",
    "policy.megatron_cfg.tensor_model_parallel_size=1",
    "policy.megatron_cfg.sequence_parallel=false",
]
ONE_NODE += ["policy.megatron_cfg.pipeline_model_parallel_size=1", "policy.megatron_cfg.context_parallel_size=1"]


def misfit(config: RunConfig) -> str | None:
    """Describes what does not fit, without the refit's schedule and the times of a plan."""
    return worst_rank(config, read_model(config), H100)[1]


def hf_config(name: str) -> dict[str, object]:
    return json.loads((ROOT / f"scripts/bench/models/{MODELS[name]}.config.json").read_text())


_GROUPS = json.loads((ROOT / "scripts/bench/models/hub.json").read_text())
HUB = {name: group["config"] for group in _GROUPS for name in group["ids"]}


@pytest.mark.parametrize(
    ("model", "billions", "active", "counted"),
    [
        # arXiv:2508.06471, table 1, counts neither embedding nor output as active; Qwen counts both.
        ("zai-org/GLM-4.5-Air", 106, 12, 0),
        ("zai-org/GLM-4.6", 355, 32, 0),
        ("Qwen/Qwen1.5-MoE-A2.7B", 14.3, 2.7, 2),
        ("Qwen/Qwen2-57B-A14B", 57.4, 14, 2),
        # arXiv:2508.10925, table 1, counts the output alone.
        ("openai/gpt-oss-20b", 20.91, 3.61, 1),
        ("openai/gpt-oss-120b", 116.83, 5.13, 1),
        # README_WEIGHTS.md of DeepSeek V3 counts the output alone.
        ("deepseek-ai/DeepSeek-V3", 671, 36.6, 1),
        # arXiv:2502.16982, table 4, counts neither, nor in the total of 15.29.
        ("moonshotai/Moonlight-16B-A3B-Instruct", 15.29 + 0.67, 2.24, 0),
    ],
)
def test_a_token_meets_the_published_number_of_active_parameters(
    model: str, billions: float, active: float, counted: int
):
    """The times of a plan follow from them: two operations for each in a forward pass, without the embedding."""
    found = PlanModel(HUB[model])
    matrix = found.shape.hidden * found.shape.vocabulary
    assert found.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert (forward_operations(found.cost(), 1, 0) / 2 + (counted - 1) * matrix) / 1e9 == pytest.approx(
        active, rel=0.025
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2, 8, 1), (2, 4, 4, 2), (4, 2, 16, 1)])
def test_elements_of_every_stage_are_those_of_the_conversion_tables(name: str, sizes: tuple[int, int, int, int]):
    config, (tp, pp, ep, etp) = hf_config(name), sizes
    parallel = MegatronParallel(tp=tp, pp=pp, ep=ep, etp=etp)
    ranks = tp * pp * ep * etp
    model = PlanModel(config)
    for stage in range(pp):
        place = parallel.coords_of(stage * ranks // pp, ranks)
        layout = family(config).megatron_layout(config, parallel, place, "bfloat16", "te")
        found = model.elements.stage(parallel, stage)
        assert sum(found._replace(ends=0)) == sum(
            volume(tuple((0, size) for size in slot.shape)) for slot in layout.values()
        )


def test_mtp_layers_that_learn_take_what_others_take(folders: dict[str, str], tmp_path: Path):
    config = hf_config("nano") | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    keys = ("num_layers=2", "use_repeated_layer=true", "detach_heads=false", "loss_scaling_factor=0.3")
    model = f"policy.model_name={tmp_path}"
    left, learning = (
        load_config("grpo_nanov3.yaml", [model, *given])
        for given in ([], [f"policy.megatron_cfg.mtp_{key}" for key in keys])
    )
    last, sizes = left.policy.megatron_cfg.pipeline_model_parallel_size - 1, read_model(left)
    assert last > 0
    parallel = left.policy.megatron_cfg.parallel
    elements = [sizes.elements.stage(parallel, last, trains_mtp=trains) for trains in (False, True)]
    assert sum(elements[0]) == sum(elements[1]) and elements[0].frozen > 0 == elements[1].frozen
    of_left, of_learning = (work_of(config, sizes, last) for config in (left, learning))
    assert of_left.states.weights == of_learning.states.weights
    # The file reduces gradients in bfloat16. Of the embedding's copy a rank has them in float32, beside the copy.
    assert of_learning.states.gradients - of_left.states.gradients == 2 * elements[0].frozen
    embedding = 131072 * 2688 / left.policy.megatron_cfg.tensor_model_parallel_size
    assert of_learning.train["activations"] - of_left.train["activations"] > 6 * embedding
    assert (of_learning.persistent, of_learning.forward) == (of_left.persistent, of_left.forward)
    first_left, first = (work_of(config, sizes, 0) for config in (left, learning))
    assert first == first_left


def test_an_engine_of_qwen3_holds_what_vllm_reports(folders: dict[str, str]):
    # vllm-project/vllm issue 17469: 14.2474 GiB at TP4, with the tables of rotary positions.
    config = load_config("grpo_qwen3_30ba3b.yaml", [folders["qwen"]])
    assert engine_memory(config, read_model(config), H100).weights / GIB == pytest.approx(14.2474, rel=0.002)


def test_optimizer_state_is_spread_over_ranks_that_hold_the_same(folders: dict[str, str]):
    # 256 ranks in 2 stages: of the 128 of one, 64 hold the same half of dense layers (tp 2), and 16 the same experts
    # (ep 8).
    rules = state_rules(load_config("grpo_nanov3.yaml", [folders["nano"]]))
    assert (rules.dense_shards, rules.expert_shards) == (64, 16)


def test_the_packaged_runs_fit(folders: dict[str, str]):
    for config, name, gpus in (("grpo_nanov3.yaml", "nano", 256), ("grpo_qwen3_30ba3b.yaml", "qwen", 64)):
        plan = make_plan(load_config(config, [folders[name]]), H100)
        assert plan.misfit is None and plan.config.num_slots == gpus
        assert plan.worst.peak_phase == "generate" and plan.worst.peak < 0.95 * H100.memory
        assert plan.times.total.high <= 1.6 * plan.times.total.low
        json.dumps(as_data(plan))


def test_nano_on_eight_gpus_needs_offload(folders: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path):
    code = main(["grpo_nanov3.yaml", folders["nano"], *ONE_NODE, "--html", str(tmp_path / "plan.html")])
    printed = capsys.readouterr().out
    assert code == 2
    assert "optimizer 44.1" in printed and "phase train does not fit" in printed
    assert "policy.megatron_cfg.optimizer.optimizer_offload_fraction=1.0" in printed
    offload = [
        "policy.megatron_cfg.optimizer.optimizer_cpu_offload=true",
        "policy.megatron_cfg.optimizer.optimizer_offload_fraction=1",
    ]
    config = load_config("grpo_nanov3.yaml", [folders["nano"], *ONE_NODE, *offload])
    assert misfit(config) is None
    model, host = read_model(config), 8 * 3.95e9 * (8 + 8 * 1.4427 + 4)
    # Moments, and pinned copies of main parameters and gradients, each tensor rounded up to a power of two; and while
    # others use the GPU, its own main parameters.
    held = host_memory(config, model, stage_states(config, model, 0))
    assert held["optimizer off the GPUs"] + held[ROUNDING] == pytest.approx(host, rel=0.02)
    # A host that lacks only what rounding takes on average is not refused.
    surely = sum(size for name, size in held.items() if name not in (PAGE_CACHE, ROLLOUTS, ROUNDING))
    assert find_host_misfit(held, surely + 1) is None and find_host_misfit(held, surely - 1)
    page = (tmp_path / "plan.html").read_text()
    assert "src=" not in page and "href=" not in page
    (data,) = read_page(page)["runs"]
    assert data["memory"]["train"]["optimizer"] / GIB == pytest.approx(44.1, abs=0.05) and len(data["layouts"]) > 3


def test_a_layout_that_does_not_divide_is_refused_with_layouts_that_do(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    assert main(["grpo_nanov3.yaml", folders["nano"], "policy.megatron_cfg.pipeline_model_parallel_size=3"]) == 2
    printed = capsys.readouterr().out
    assert "pipeline_model_parallel_size=3" in printed and "Nearest layouts that fit:\n  tp=" in printed


def test_a_search_ranks_layouts_and_says_why_others_are_none(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    assert main(["grpo_qwen3_30ba3b.yaml", folders["qwen"], "--search", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    totals = [found["seconds"]["high"] for found in data["layouts"]]
    assert len(totals) > 20 and totals[0] <= 1.05 * min(totals)
    # None that nobody would run, and no two that only cut stages into other chunks.
    assert all(found["memory"] < 0.92 * H100.memory for found in data["layouts"])
    assert all(found["values"]["ep"] >= 4 and found["values"]["cp"] == 1 for found in data["layouts"])
    shown = [[found["values"][name] for name in ("tp", "pp", "cp", "ep", "etp")] for found in data["layouts"][:10]]
    assert all(shown.count(sizes) == 1 for sizes in shown)
    assert {
        "more than 32 experts on a rank",
        "context-parallel ranks share rows of fewer than 4,096 tokens each",
    } <= data["refused"].keys()


@pytest.mark.parametrize(
    "words",
    [
        ["cluster.gpus_per_node=2", "policy.megatron_cfg.optimizer.use_precision_aware_optimizer=false"],
        ["policy.megatron_cfg.activation_checkpointing=true", "policy.megatron_cfg.recompute_modules=[mlp]"],
        ["grpo.num_prompts_per_step=1", "policy.train_global_batch_size=4"],
    ],
    ids=["optimizer", "recomputation", "batch"],
)
def test_a_search_names_no_layout_that_the_config_refuses(llama_8b: Path, words: list[str]):
    words = [f"policy.model_name={llama_8b}", "cluster.num_nodes=1", *words]
    found = search_layouts(load_config("grpo_math_8B.yaml", words), H100, None)
    refused = {
        line for one in found.best for line in problems_of(load_config("grpo_math_8B.yaml", [*words, *one.overrides]))
    }
    assert not refused, refused
    assert found.best or any("optimizer_cpu_offload" in reason for reason in found.refused)


def test_a_search_keeps_the_configured_layout_whatever_others_run(folders: dict[str, str]):
    sizes = [
        "tensor_model_parallel_size=4",
        "pipeline_model_parallel_size=1",
        "context_parallel_size=2",
        "expert_model_parallel_size=2",
    ]
    config = load_config(
        "grpo_qwen3_30ba3b.yaml",
        [folders["qwen"], "cluster.num_nodes=1", *(f"policy.megatron_cfg.{size}" for size in sizes)],
    )
    found = search_layouts(config, GPUS["b200-192g"], None)
    assert [one.values["ep"] for one in found.best if one.values["ep"] == 2 and one.values["cp"] == 2] == [2]


def test_every_phase_that_does_not_fit_is_named(folders: dict[str, str]):
    config = load_config(
        "grpo_nanov3.yaml", [folders["nano"], *ONE_NODE, "policy.generation.vllm_cfg.gpu_memory_utilization=0.95"]
    )
    assert misfit(config) == "phase train does not fit", "an engine takes what the policy's weights leave"
    peak = sum(worst_rank(config, read_model(config), H100)[0].phases["generate"].values())
    assert 0.99 * H100.memory < peak < H100.memory
    config = load_config(
        "grpo_nanov3.yaml", [folders["nano"], *ONE_NODE, "policy.generation.vllm_cfg.gpu_memory_utilization=0.1"]
    )
    assert misfit(config) == "the engine's share of the GPU leaves no cache for one sequence; phase train does not fit"


def test_context_parallel_ranks_of_several_nodes_exchange_over_the_network(folders: dict[str, str]):
    def exchange(name: str, cp: int, slots: int = 8) -> float:
        words = ["grpo_nanov3.yaml", folders[name], f"policy.megatron_cfg.context_parallel_size={cp}", *ONE_TP]
        config = load_config(
            words[0], [*words[1:], f"cluster.gpus_per_node={slots}", f"cluster.num_nodes={64 // slots}"]
        )
        return exchange_seconds(config, read_model(config), H100, tokens=1e6)

    ONE_TP = [*ONE_NODE[1:4], "policy.megatron_cfg.expert_model_parallel_size=1"]
    mine = 2 * 1e6 / 64
    keys, mamba = mine * 3 * 2 * 2 * 128 * 6, 2 * mine * (10304 + 4096) * 23
    assert exchange("nano", 1) == 0
    assert exchange("nano", 4) == pytest.approx((keys * 3 + mamba * 3 / 4) / H100.link)
    # Of the other half of a group of 16, tokens come over the network; a ring is as slow as its slowest link.
    assert exchange("nano", 16) == pytest.approx(
        mamba * 15 / 16 / 2 / H100.link + (keys * 15 + mamba * 15 / 16 / 2) / H100.network
    )


def test_a_start_is_refused_by_a_clear_margin_only(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    tight = load_config("grpo_nanov3.yaml", [folders["nano"], *ONE_NODE, "policy.megatron_cfg.context_parallel_size=4"])
    assert misfit(tight) and "phase train needs most, about 80 GiB" in prediction(tight, H100)
    over = load_config("grpo_nanov3.yaml", [folders["nano"], *ONE_NODE])
    with pytest.raises(
        ValueError, match=r"phase train needs at least 81\.3 GiB .* optimizer 44\.1, .* 8% high at most"
    ):
        prediction(over, H100)
    said = prediction(over, None)
    assert (
        "this host has none" in said
        and "phase train needs most" in said
        and "gpu_memory_utilization=0.5 of a GPU" in said
    )
    monkeypatch.setattr("mrl.loop.preflight.find_problems", lambda config, *, to_evaluate: [])
    monkeypatch.setattr("mrl.loop.preflight.with_local_folders", lambda config: config)
    monkeypatch.setattr("mrl.loop.preflight.local_gpu", lambda: H100)
    monkeypatch.setattr("mrl.loop.preflight.check_environment", lambda config: None)
    with pytest.raises(ValueError, match="it fits with: policy.megatron_cfg.optimizer.optimizer_offload_fraction=1.0 "):
        check_start(over)


@pytest.mark.parametrize(
    ("name", "mebibytes", "expected"),
    [
        # As NVML gives them; an H100 has as much memory as an A100 of 80 GB.
        ("NVIDIA H100 80GB HBM3", 81559, "h100-80g"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", 40960, "a100-40g"),
        ("NVIDIA H200", 143771, "h200-141g"),
        ("NVIDIA GB200", 189471, "gb200"),
        ("NVIDIA GeForce RTX 5090", 32607, "rtx5090-32g"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx4090-24g"),
        ("NVIDIA L40S", 46068, "a100-40g"),
    ],
)
def test_a_gpu_is_told_by_its_name_and_then_its_memory(name: str, mebibytes: int, expected: str):
    assert nearest(name, mebibytes * 2**20).name == expected


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sizes of Qwen2.5-1.5B."""
    sizes = dict(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2
    )
    folder = tmp_path_factory.mktemp("small")
    config = dict(
        model_type="qwen2",
        vocab_size=151936,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    )
    (folder / "config.json").write_text(json.dumps(config | sizes | {"hidden_act": "silu", "rope_theta": 1e6}))
    return f"policy.model_name={folder}"


# As in NeMo RL's ppo_math_1B.yaml.
FOUR_LONG = ["cluster.gpus_per_node=1", "policy.precision=bfloat16", "policy.max_total_sequence_length=16384"]
FOUR_LONG += [
    "policy.train_micro_batch_size=4",
    "policy.logprob_batch_size=4",
    "policy.megatron_cfg.tensor_model_parallel_size=1",
]
FOUR_LONG += ["policy.megatron_cfg.expert_model_parallel_size=1", "policy.megatron_cfg.sequence_parallel=false"]


@pytest.mark.parametrize("filling", ["", "sequence_packing", "dynamic_batching"])
def test_rows_that_get_too_long_are_refused_only_if_they_surely_come(small: str, filling: str):
    tokens = [f"policy.{filling}.{kind}_mb_tokens=65536" for kind in ("train", "logprob") if filling]
    switches = [
        f"policy.{name}.enabled={str(name == filling).lower()}" for name in ("sequence_packing", "dynamic_batching")
    ]
    config = load_config("grpo_tiny.yaml", [small, *FOUR_LONG, *switches, *tokens])
    assert misfit(config) == "phase train does not fit"
    if filling:
        with pytest.raises(ValueError, match="^policy.megatron_cfg: phase train needs at least") as error:
            prediction(config, H100)
        said, key = str(error.value), f"policy.{filling}.train_mb_tokens"
    else:
        said, key = prediction(config, H100), "policy.train_micro_batch_size"
    rule = (
        rf"rows of up to about ([\d,]+) tokens fit, the longest do not \(train\): lower {key}( if sequences get "
        r"that long)?$"
    )
    found = re.search(rule, said)
    assert found and bool(found[2]) == (not filling)
    longest = int(found[1].replace(",", ""))
    assert 16384 <= longest < 65536
    for length, fits in ((longest, True), (longest + 512, False)):
        key = f"policy.{filling}.train_mb_tokens" if filling else "policy.max_total_sequence_length"
        of_one = with_value(with_value(config, "policy.train_micro_batch_size", 1), "policy.logprob_batch_size", 1)
        assert (misfit(with_value(of_one, key, length)) is None) == fits
    # Where the GPU is not known, nothing is too long.
    assert "this host has none" in prediction(config, None)
    # Not even one sequence of full length fits.
    with pytest.raises(ValueError, match="phase train needs at least"):
        prediction(config, GPUS["a100-40g"])


def test_a_run_on_gpus_keeps_its_prediction_for_the_page(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    words = [folders["qwen"], f"checkpointing.checkpoint_dir={tmp_path}/run", f"logger.log_dir={tmp_path}/run/logs"]
    config = load_config("grpo_qwen3_30ba3b.yaml", words)
    plan = {
        phase: sum(parts.values()) for phase, parts in worst_rank(config, read_model(config), H100)[0].phases.items()
    }
    for gpu, phases in ((H100, set(plan)), (None, set(plan) - {"generate"})):
        monkeypatch.setattr("mrl.store.about.local_gpu", lambda gpu=gpu: gpu)
        folder = RunFolder(config)
        folder.open()
        with folder:
            folder.note_attempt()
            kept = json.loads((tmp_path / "run/about.json").read_text())["plan"]
        # One pipeline stage: the fullest rank of each phase is that of the plan.
        assert kept == pytest.approx({phase: plan[phase] for phase in phases})
    rows = run_data(tmp_path / "run")["memory"]
    assert isinstance(rows, list)
    shown = {row["phase"]: row["predicted_bytes"] for row in rows}
    assert shown == kept


def test_rows_of_pairs_and_float32_take_twice_as_much(folders: dict[str, str]):
    words = [folders["qwen"], "cluster.gpus_per_node=8", "policy.megatron_cfg.expert_model_parallel_size=8"]

    def activations(name: str, *more: str) -> float:
        config = load_config(name, [*words, *more])
        return rank_memory(config, read_model(config), 0, None).phases["train"]["activations"]

    plain = activations("sft_tiny.yaml", "policy.precision=bfloat16")
    assert activations("sft_tiny.yaml", "policy.precision=float32") == pytest.approx(2 * plain)
    assert activations(
        "dpo_tiny.yaml", "policy.precision=bfloat16", f"policy.max_total_sequence_length={LENGTH}"
    ) == pytest.approx(
        2 * activations("sft_tiny.yaml", "policy.precision=bfloat16", f"policy.max_total_sequence_length={LENGTH}")
    )


def test_bad_words_end_with_two(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(["grpo_nanov3.yaml", f"policy.model_name={tmp_path}"]) == 2
    assert "no readable config.json" in capsys.readouterr().out
    assert main(["grpo_tiny.yaml"]) == 2
    assert "cluster.gpus_per_node=0" in capsys.readouterr().out


# Published train steps (docs/plan.md): on real data, and with an even load of all experts.
@pytest.mark.parametrize(
    ("name", "tokens_per_s", "imbalance"),
    [("qwen", 8_655, 1.3), ("qwen", 13_011, 1.0), ("nano", 8192 / 0.657, 1.0), ("nano", 16_789, 1.0)],
)
def test_published_train_steps_lie_inside_the_range(name: str, tokens_per_s: float, imbalance: float):
    model = PlanModel(hf_config(name))
    length = 8192 if tokens_per_s == 8192 / 0.657 else 4096
    found = train_seconds(
        model.shape, model.cost(), H100, tokens=tokens_per_s, length=length, gpus=1, passes=3, imbalance=imbalance
    )
    assert found.low <= 1.0 <= found.high <= 1.6 * found.low
    even = train_seconds(
        model.shape, model.cost(), H100, tokens=tokens_per_s, length=length, gpus=1, passes=3, imbalance=1.0
    )
    assert even.high == pytest.approx(
        3 * forward_operations(model.cost(), tokens_per_s, length) / H100.peak / EXPERT_PRODUCTS[1]
    )


ONE_OFF = [
    "grpo.async_grpo.enabled=true",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.num_nodes=2",
]


# NeMo RL v0.7: GRPO of Qwen3-30B-A3B on 32 H100, 2,048 rollouts of 3,292 tokens on average; beside dedicated engines, a
# step behind.
@pytest.mark.parametrize(("words", "step_s"), [([], 171), (ONE_OFF, 141)], ids=["on-policy", "one-off"])
def test_the_published_steps_of_nemo_rl_lie_inside_the_range(folders: dict[str, str], words: list[str], step_s: float):
    config = load_config("grpo_qwen3_30ba3b.yaml", [folders["qwen"], "cluster.num_nodes=4", *words])
    total = make_plan(config, H100, mean_tokens=3292).times.total
    assert total.low <= step_s <= total.high <= 1.6 * total.low
