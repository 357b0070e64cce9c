# SPDX-License-Identifier: Apache-2.0
"""Lying model folders and data files: other places, FIFOs, endless shapes, bombs. Each soon ends in one clear error."""

from __future__ import annotations

import gzip
import json
import os
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file

from conversion.files.safetensors import SafetensorsFolder
from mrl.config.model import read_model
from mrl.config.schema.data import DatasetConfig
from mrl.data.chat import load_tokenizer
from mrl.data.files import find_data_files
from mrl.data.records import records
from mrl.ops.doctor.model_files import check_model, check_rows
from tests import models
from tests.waiting import HANG_S

NOT_AS_NAMED = pytest.mark.attack("a file is not what its name says")
BOMB = pytest.mark.attack("a file grows without end")
MEMORY_BYTES = 6 << 30


def weight_map(folder: Path, file: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))


def open_weights(folder: Path) -> None:
    with SafetensorsFolder(folder) as source:
        source.read_into("a", ((0, 2),), torch.empty(2))


@NOT_AS_NAMED
@pytest.mark.parametrize(
    "file",
    [
        "../outside.safetensors",
        "{outside}",
        "below/../../outside.safetensors",
        "below/../x",
        "a//b",
        "..",
        "",
        "a\\b",
        "a\0b",
    ],
)
def test_a_weight_map_does_not_leave_its_folder(tmp_path: Path, file: str):
    folder = tmp_path / "model"
    (folder / "below").mkdir(parents=True)
    save_file({"a": torch.ones(2)}, tmp_path / "outside.safetensors")
    weight_map(folder, file.format(outside=tmp_path / "outside.safetensors"))
    with pytest.raises(
        ValueError, match=r"model\.safetensors\.index\.json places a in .*no file of this folder; it is not read"
    ):
        open_weights(folder)


def test_links_of_a_snapshot_of_the_hub_are_followed(tmp_path: Path):
    blob, folder = tmp_path / "blobs/abc", tmp_path / "snapshots/1"
    blob.parent.mkdir()
    folder.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, blob)
    (folder / "model-1.safetensors").symlink_to(blob)
    weight_map(folder, "model-1.safetensors")
    open_weights(folder)


def as_rows(path: Path) -> object:
    return list(records(path))


def as_data_path(path: Path) -> object:
    return find_data_files(DatasetConfig(data_path=str(path), subset=None, split="train"), setting="data.train")


@NOT_AS_NAMED
@pytest.mark.parametrize("kind", ["FIFO", "device", "folder"])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", lambda path: read_model(path.parent)),
        ("model.safetensors", lambda path: SafetensorsFolder(path.parent)),
        ("model.safetensors.index.json", lambda path: SafetensorsFolder(path.parent)),
        ("tokenizer.json", lambda path: load_tokenizer(str(path.parent))),
        ("rows.jsonl", as_rows),
        ("rows.jsonl.gz", as_rows),
        ("rows.parquet", as_rows),
        ("rows.json", as_rows),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, name: str, read: Callable[[Path], object], kind: str):
    place(tmp_path / name, kind)
    with pytest.raises(ValueError, match=r"config\.json in this folder|tokenizer there|" + name.replace(".", r"\.")):
        read(tmp_path / name)


@NOT_AS_NAMED
@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_a_data_path_that_is_no_file_asks_no_network(tmp_path: Path, kind: str):
    place(tmp_path / "rows.jsonl", kind)
    with pytest.raises(ValueError, match=r"data\.train\.data_path=.*/rows\.jsonl: neither a file nor a folder"):
        as_data_path(tmp_path / "rows.jsonl")


@NOT_AS_NAMED
@pytest.mark.parametrize("kind", ["FIFO", "device", "folder"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "train-split.jsonl"])
def test_verify_says_what_is_no_file(tmp_path: Path, name: str, kind: str):
    models.save_model(tmp_path / "model", "llama")
    path = tmp_path / "model" / name
    path.unlink(missing_ok=True)
    place(path, kind)
    findings = [check_rows(path)] if name.endswith("jsonl") else check_model(path.parent)
    assert any(finding.status == "problem" and name in finding.found for finding in findings)


def place(path: Path, kind: str) -> None:
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")


@NOT_AS_NAMED
@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"a": {"dtype": "F32", "shape": [1] * 10**6, "data_offsets": [0, 4]}}, "1000000 dimensions"),
        ({"a": {"dtype": "F32", "shape": [10**18, 10**18], "data_offsets": [0, 4]}}, "does not fit its header"),
        ({"a": {"dtype": "F32", "shape": [10**4000], "data_offsets": [0, 4]}}, "does not fit its header"),
        ({"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, "no number"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, "does not fit its header"),
        ({"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}, "no number"),
        ({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, "damaged header"),
        ({"a": 7}, "damaged header"),
        ([1], "damaged header"),
    ],
    ids=range(9),
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: object, reason: str):
    write_safetensors(tmp_path / "model.safetensors", json.dumps(header).encode())
    with pytest.raises(ValueError, match=rf"(?s)model\.safetensors.*({reason})"):
        open_weights(tmp_path)


@NOT_AS_NAMED
@pytest.mark.parametrize("header", [b"[" * 100_000, b"\xff" * 64, b"{" * 64, b'{"a":' * 100_000], ids=range(4))
def test_a_header_that_is_no_json_is_refused(tmp_path: Path, header: bytes):
    write_safetensors(tmp_path / "model.safetensors", header)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        open_weights(tmp_path)


def write_safetensors(path: Path, header: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))


ABSURD = {
    "n_routed_experts": "nemotron_h",
    "num_hidden_layers": "llama",
    "hybrid_override_pattern": "nemotron_h",
    "num_local_experts": "mixtral",
    "num_experts": "qwen3_moe",
    "vocab_size": "llama",
    "hidden_size": "nemotron_h",
    "n_groups": "nemotron_h",
    "num_attention_heads": "qwen3",
}


@BOMB
@pytest.mark.parametrize("key", ABSURD)
def test_absurd_sizes_of_a_model_end_within_seconds(tmp_path: Path, key: str):
    models.save_model(tmp_path, ABSURD[key])
    config = json.loads((tmp_path / "config.json").read_text())
    config[key] = "M" * 10**7 if key == "hybrid_override_pattern" else 10**9
    if key == "hybrid_override_pattern":
        config["num_hidden_layers"] = 10**7
        config.pop("layers_block_type", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    limited(
        "from mrl.config.model import read_model; read_model(Path(sys.argv[1]))",
        tmp_path,
        rf"ok|config\.json: .*({key}|num_hidden_layers)",
    )


@NOT_AS_NAMED
@pytest.mark.parametrize(
    "content", [b"[" * 10**6, b'{"a":' * 10**5, b"\xff\xfe", b"7", b'{"model_type": 7}'], ids=range(5)
)
def test_a_config_that_is_none_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_model(tmp_path)


def rows_of(kind: str, folder: Path) -> Path:
    """A small data file that grows."""
    path = folder / kind
    text = "x" * (1 << 20)
    if kind == "blank.jsonl.gz":
        with gzip.open(path, "wb") as file:
            file.write(b"\n" * (32 << 20))
    elif kind == "one_line.jsonl.gz":
        with gzip.open(path, "wb", compresslevel=1) as file:
            for _ in range(72):
                file.write(text.encode())
    elif kind == "texts.parquet":
        column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 10**5, pyarrow.int32()), [text])
        pyarrow.parquet.write_table(pyarrow.table({"question": column}), path, dictionary_pagesize_limit=1 << 30)
    elif kind == "nested.parquet":
        rows = pyarrow.array([[{"role": "user", "content": text}]] * 100)
        pyarrow.parquet.write_table(pyarrow.table({"messages": rows}), path, dictionary_pagesize_limit=1 << 30)
    elif kind == "rows.parquet":
        batch = pyarrow.table({"a": pyarrow.array([1] * 10**6, pyarrow.int8())})
        with pyarrow.parquet.ParquetWriter(path, batch.schema) as writer:
            for _ in range(50):
                writer.write_table(batch, row_group_size=10**6)
    elif kind == "one_text.parquet":
        table = pyarrow.table({"a": pyarrow.array(["x" * (64 << 20)])})
        pyarrow.parquet.write_table(table, path, compression="zstd", use_dictionary=False, write_statistics=False)
    else:
        column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 10**5, pyarrow.int32()), [text])
        table = pyarrow.table({"question": column})
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    return path


@BOMB
@pytest.mark.parametrize(
    "kind",
    [
        "blank.jsonl.gz",
        "one_line.jsonl.gz",
        "texts.parquet",
        "nested.parquet",
        "rows.parquet",
        "one_text.parquet",
        "texts.arrow",
    ],
)
def test_rows_that_outgrow_their_file_are_refused(tmp_path: Path, kind: str):
    path = rows_of(kind, tmp_path)
    limited(
        "from mrl.data.records import records; list(records(Path(sys.argv[1])))",
        path,
        rf"{kind}.*(as no (table of )?rows do|lines are blank)",
    )


@NOT_AS_NAMED
@pytest.mark.parametrize("cut", [3, 12, 200, -1])
def test_a_gzip_file_that_is_cut_off_is_named(tmp_path: Path, cut: int):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(os.urandom(1000))[:cut])
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz cannot be read: it is cut off or no gzip file"):
        list(records(path))


@NOT_AS_NAMED
def test_a_json_array_that_is_nested_without_end_is_named(tmp_path: Path):
    (tmp_path / "rows.json").write_bytes(b"[" * 10**6)
    with pytest.raises(ValueError, match=r"rows\.json begins as a JSON array and is none"):
        list(records(tmp_path / "rows.json"))


@NOT_AS_NAMED
@pytest.mark.parametrize("name", ["../rows.arrow", "/etc/passwd"])
def test_a_saved_data_set_does_not_leave_its_folder(tmp_path: Path, name: str):
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(ValueError, match=r"state\.json .*outside of its folder"):
        as_data_path(tmp_path)


def limited(program: str, path: Path, message: str) -> None:
    """Runs `program` on `path`; it ends with a ValueError of this message, or prints ok, in little memory."""
    wrapped = (
        f"import sys\nfrom pathlib import Path\ntry:\n    {program}\n    print('ok')\nexcept ValueError as "
        "error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", wrapped, str(path)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES)),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    pytest.raises(ValueError, raise_, done.stdout).match(f"(?s){message}")


def raise_(message: str) -> None:
    raise ValueError(message)
