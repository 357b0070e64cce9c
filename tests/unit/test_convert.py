# SPDX-License-Identifier: Apache-2.0
"""The convert entry, from folder to folder. tests/stack loads what it writes with Megatron, transformers and vLLM."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from conversion.convert import open_checkpoint
from conversion.families.registry import family
from conversion.files.manifest import read_manifest
from conversion.files.torch_dist import find_checkpoint
from conversion.tensors import read_whole
from mrl.check import find_target
from mrl.config.model import model_folder
from mrl.config.schema.run import CheckpointingConfig
from mrl.convert import _report, main, size_in_bytes
from mrl.store.checkpoints import CheckpointStore
from mrl.types import RunState
from tests.tiny import TINY_CONFIG as TINY


@pytest.fixture
def checkpoint(mcore_folder: Path, tmp_path: Path) -> Path:
    """A copy without a manifest, to change."""
    return Path(shutil.copytree(mcore_folder, tmp_path / "mcore", ignore=shutil.ignore_patterns("manifest.json")))


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random bfloat16 weights with a float32 router bias, and files of a tokenizer."""
    folder = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    shapes = family(TINY).canonical(TINY)
    tensors = {
        name: torch.randn(shape).to(torch.float32 if "correction_bias" in name else torch.bfloat16)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(TINY | {"torch_dtype": "bfloat16"}))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps({"file": name}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(scope="module")
def mcore_folder(hf_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mcore") / "out"
    assert main(["hf-to-mcore", "--hf", str(hf_folder), "--out", str(out)]) == 0
    return out


def as_step(mcore_folder: Path, step: Path) -> Path:
    """The checkpoint as a run stores it."""
    shutil.copytree(mcore_folder, step / "policy" / "weights", ignore=shutil.ignore_patterns("tokenizer"))
    shutil.copytree(mcore_folder / "tokenizer", step / "policy" / "tokenizer")
    return step


def test_a_run_folder_is_refused_with_its_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.yaml").write_text("algorithm: grpo\n")
    (tmp_path / "step_3").mkdir()
    for command in ("mcore-to-hf", "adapters"):
        assert main([command, "--mcore", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    said = f"--mcore {tmp_path} is a run folder; give one of its checkpoints: {tmp_path / 'step_3'}"
    assert capsys.readouterr().out.splitlines() == [said, said]


def test_a_checkpoint_of_nemo_rl_holds_its_config_and_is_no_run_folder(mcore_folder: Path, tmp_path: Path):
    step = as_step(mcore_folder, tmp_path / "step_9")
    (step / "config.yaml").write_text("grpo: {num_prompts_per_step: 4}\n")
    assert main(["mcore-to-hf", "--mcore", str(step), "--out", str(tmp_path / "out")]) == 0
    found = find_target(str(step), None)
    assert (found.config, found.checkpoint) == (str(step / "config.yaml"), step)


def test_options_of_nemo_rls_converters_have_a_way_out(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["--config", "step_9/config.yaml", "--megatron-ckpt-path", "a", "--hf-ckpt-path", "b"])
    assert ended.value.code == 2 and "write mcore-to-hf --mcore RUN/step_N --out OUT" in capsys.readouterr().err


@pytest.mark.parametrize("inside", ["", "policy/weights", "policy/weights/iter_0000000"])
def test_there_and_back_is_bit_identical(hf_folder: Path, mcore_folder: Path, tmp_path: Path, inside: str):
    step = as_step(mcore_folder, tmp_path / "step_3")
    out = tmp_path / "out"
    assert main(["mcore-to-hf", "--mcore", str(step / inside), "--out", str(out)]) == 0
    before, after = load_file(hf_folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name])
    assert json.loads((out / "config.json").read_text()) == json.loads((hf_folder / "config.json").read_text())
    described = json.loads((out / "manifest.json").read_text())["source"]
    assert described == {"format": "torch_dist", "folder": "step_3/policy/weights/iter_0000000"}
    companions = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}
    assert {path.name for path in out.iterdir()} == companions | {"config.json", "manifest.json", "model.safetensors"}
    assert (out / "tokenizer.json").read_text() == (hf_folder / "tokenizer.json").read_text()


def test_shards_are_bounded(mcore_folder: Path, hf_folder: Path, tmp_path: Path):
    out = tmp_path / "out"
    assert main(["mcore-to-hf", "--mcore", str(mcore_folder), "--out", str(out), "--max-shard-size", "0.2MB"]) == 0
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert all(sum(tensor.nbytes for tensor in load_file(shard).values()) <= 200_000 for shard in shards)
    weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map.keys() == load_file(hf_folder / "model.safetensors").keys()


def test_the_iteration_that_the_latest_file_names_is_taken(mcore_folder: Path, tmp_path: Path):
    checkpoint = Path(shutil.copytree(mcore_folder, tmp_path / "mcore"))
    shutil.copytree(checkpoint / "iter_0000000", checkpoint / "iter_0000007")
    assert find_checkpoint(checkpoint).iteration.name == "iter_0000000"
    (checkpoint / "latest_checkpointed_iteration.txt").unlink()
    assert find_checkpoint(checkpoint).iteration.name == "iter_0000007"


def refused(arguments: list[str], caplog: pytest.LogCaptureFixture) -> str:
    """The one message of a command that must end with exit code 2."""
    caplog.clear()
    with caplog.at_level(logging.INFO), pytest.MonkeyPatch.context() as patch:
        # The entry replaces the handlers of the root logger, among them the one that captures.
        patch.setattr("mrl.convert.logging.basicConfig", lambda **_: None)
        assert main(arguments) == 2
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    return record.getMessage()


def test_bad_input_gives_one_message_and_exit_code_2(hf_folder: Path, mcore_folder: Path, tmp_path: Path, caplog):
    out, empty = str(tmp_path / "out"), tmp_path / "empty"
    empty.mkdir()
    assert "is not a folder; name a step_N folder" in refused(
        ["mcore-to-hf", "--mcore", str(tmp_path / "none"), "--out", out], caplog
    )
    assert "no complete Megatron checkpoint there" in refused(
        ["mcore-to-hf", "--mcore", str(empty), "--out", out], caplog
    )
    assert "the checkpoint has no adapters" in refused(["adapters", "--mcore", str(mcore_folder), "--out", out], caplog)
    assert "has no config.json" in refused(["hf-to-mcore", "--hf", str(empty), "--out", out], caplog)
    assert "exists; remove it or choose another" in refused(
        ["hf-to-mcore", "--hf", str(hf_folder), "--out", str(empty)], caplog
    )
    sized = ["mcore-to-hf", "--mcore", str(mcore_folder), "--out", out, "--max-shard-size", "5"]
    assert "is not a positive number with one of the units MB, GB" in refused(sized, caplog)
    (empty / "config.json").write_text("{")
    assert "is not readable JSON" in refused(["hf-to-mcore", "--hf", str(empty), "--out", out], caplog)
    (empty / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert "model_type='bert' is not supported" in refused(["hf-to-mcore", "--hf", str(empty), "--out", out], caplog)
    (empty / "config.json").write_text(json.dumps(TINY))
    assert "no readable model.safetensors.index.json or model.safetensors" in refused(
        ["hf-to-mcore", "--hf", str(empty), "--out", out], caplog
    )
    nowhere = ["hf-to-mcore", "--hf", str(hf_folder), "--out", "/proc/none/out"]
    assert "No such file or directory: '/proc/none'" in refused(nowhere, caplog)
    assert not Path(out).exists()


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_left(checkpoint: Path, tmp_path: Path, caplog):
    arguments = ["mcore-to-hf", "--mcore", str(checkpoint), "--out", str(tmp_path / "out")]
    config = checkpoint / "iter_0000000" / "hf_config.json"
    config.write_text(json.dumps(TINY | {"vocab_size": 500}))
    assert "has 384 rows, less than vocab_size=500" in refused(arguments, caplog)
    config.write_text(json.dumps(TINY | {"n_routed_experts": 4}))
    assert "mlp.router.weight has shape (8, 64); by the model's config it must be (4, 64)" in refused(arguments, caplog)
    config.unlink()
    assert "has no hf_config.json" in refused(arguments, caplog)
    assert {path.name for path in tmp_path.iterdir()} == {"mcore"}


def test_sizes():
    assert size_in_bytes("5GB") == 5 * 10**9
    assert size_in_bytes("1.5 MiB") == 3 * 2**19
    for text in ("0GB", "-1GB", "5", "GB", "5 TB"):
        with pytest.raises(ValueError, match="--max-shard-size"):
            size_in_bytes(text)


def test_layout_flags_cut_files_and_change_no_content(hf_folder: Path, mcore_folder: Path, tmp_path: Path):
    out = tmp_path / "cut"
    assert main(["hf-to-mcore", "--hf", str(hf_folder), "--out", str(out), "--tp", "2", "--ep", "4"]) == 0
    assert len(list(out.glob("iter_0000000/*.distcp"))) == 4
    assert read_manifest(out).tensors == read_manifest(mcore_folder).tensors
    assert (
        main(["compare", str(out), str(mcore_folder)])
        == main(["compare", str(hf_folder), str(out)])
        == main(["verify", str(out)])
        == 0
    )


def test_uneven_stages_cut_files_and_change_no_content(
    hf_folder: Path, mcore_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # The model has 7 layers.
    command = ["hf-to-mcore", "--hf", str(hf_folder), "--pp", "2", "--out"]
    assert main([*command, str(tmp_path / "even")]) == 2
    assert "leaves 7 of 7 layers for 2 equal stages; set num_layers_in_first_pipeline_stage" in capsys.readouterr().out
    out = tmp_path / "uneven"
    assert main([*command, str(out), "--num-layers-in-first-pipeline-stage", "2"]) == 0
    assert len(list(out.glob("iter_0000000/*.distcp"))) == 2
    assert read_manifest(out).tensors == read_manifest(mcore_folder).tensors
    last = tmp_path / "last"
    assert main([*command, str(last), "--num-layers-in-last-pipeline-stage", "5"]) == 0
    assert [path.stat().st_size for path in sorted(last.glob("iter_0000000/*.distcp"))] == [
        path.stat().st_size for path in sorted(out.glob("iter_0000000/*.distcp"))
    ]


def test_exit_codes_of_compare_and_verify(
    hf_folder: Path, mcore_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    wide = tmp_path / "wide"
    assert main(["hf-to-mcore", "--hf", str(hf_folder), "--out", str(wide), "--dtype", "fp32"]) == 0
    capsys.readouterr()
    assert main(["compare", str(mcore_folder), str(wide)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "backbone.embeddings.weight: dtype bfloat16 and float32" in lines
    assert lines[-1] == "and 92 more: dtype bfloat16 and float32" and len(lines) == 4
    assert main(["compare", str(mcore_folder), str(tmp_path / "none")]) == main(["verify", str(hf_folder)]) == 2
    data = wide / "iter_0000000" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 3] ^= 16
    data.write_bytes(content)
    capsys.readouterr()
    assert main(["verify", str(wide)]) == 1
    assert capsys.readouterr().out == "iter_0000000/__0_0.distcp: its checksum differs, so the file is damaged\n"
    assert main(["compare", str(wide), str(wide)]) == 0


def test_a_run_s_checkpoint_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    store = CheckpointStore(tmp_path, CheckpointingConfig())
    pending = store.begin(RunState(step=3, metrics={"val/accuracy": 1.0}))
    (pending.weights / "data").write_bytes(b"whole")
    step = store.commit(pending, {}).folder
    assert main(["verify", str(step)]) == 0
    (step / "policy/weights/data").write_bytes(b"holes")
    assert main(["verify", str(step)]) == 1
    whole, damaged = capsys.readouterr().out.splitlines()
    assert whole.endswith("is what its manifest says: every file") and "policy/weights/data" in damaged


def test_equal_complaints_are_counted(caplog: pytest.LogCaptureFixture):
    lines = [f"layer.{index}: {index + 1} of 64 values differ, by at most {index}e-05" for index in range(36)]
    with caplog.at_level(logging.INFO):
        assert _report(["embedding: only in a", *lines], "equal") == 1
    shown = [record.getMessage() for record in caplog.records]
    assert shown == ["embedding: only in a", *lines[:3], "and 33 more: N of N values differ, by at most N"]


def test_a_model_of_the_local_hub_cache_is_found_by_its_id(
    hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    # As the hub library lays it out.
    repository = tmp_path / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(hf_folder, repository / "snapshots" / ("0" * 40))
    assert model_folder("some/model") == repository / "snapshots" / ("0" * 40)
    assert model_folder(str(hf_folder)) == hf_folder
    # Nothing answers at this address.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    message = refused(["hf-to-mcore", "--hf", "some/other", "--out", str(tmp_path / "out")], caplog)
    assert (
        "some/other is neither a folder nor complete in the local Hugging Face cache, and it cannot be downloaded"
        in message
    )
    # As after a use of the tokenizer alone.
    (repository / "snapshots" / ("0" * 40) / "model.safetensors").unlink()
    refused(["hf-to-mcore", "--hf", "some/model", "--out", str(tmp_path / "out")], caplog)
    assert "Downloading some/model from the Hugging Face Hub" in caplog.messages


@pytest.fixture
def metadata(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The metadata of the copy; what it makes run, would run in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    return checkpoint / "iter_0000000" / ".metadata"


def test_what_torch_wrote_is_read_like_what_we_write(mcore_folder: Path, hf_folder: Path, tmp_path: Path):
    """The same tensors saved by torch's writer, one as a parameter and one with its dimensions swapped in memory."""
    checkpoint = tmp_path / "mcore" / "iter_0000000"
    opened = open_checkpoint(mcore_folder)
    state: dict[str, torch.Tensor] = {key: read_whole(opened.folder, key) for key in opened.folder.keys}
    state["decoder.final_norm.weight"] = torch.nn.Parameter(state["decoder.final_norm.weight"])
    router = "decoder.layers.1.mlp.router.weight"
    state[router] = state[router].t().contiguous().t()
    dcp.save(state, checkpoint_id=checkpoint, no_dist=True)
    shutil.copyfile(mcore_folder / "iter_0000000" / "hf_config.json", checkpoint / "hf_config.json")
    assert main(["mcore-to-hf", "--mcore", str(checkpoint), "--out", str(tmp_path / "out")]) == 0
    assert main(["compare", str(tmp_path / "out"), str(hf_folder)]) == 0
