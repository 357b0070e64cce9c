# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from mrl.data.files import find_data_files
from tests.unit.data.test_rows import dataset


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}\n")
    return folder


def found(folder: Path, name: str | None = None, **keys: str) -> list[str]:
    files = find_data_files(dataset(name, **(keys | {"data_path": str(folder)})), setting="data.train")
    return [path.relative_to(folder).as_posix() for path in files]


OPEN_MATH = (
    "data/train-00000-of-00002.parquet",
    "data/train-00001-of-00002.parquet",
    "data/train_1M-00000-of-00001.parquet",
)


@pytest.mark.parametrize(
    ("names", "keys", "expected"),
    [
        (OPEN_MATH, {}, OPEN_MATH[:2]),
        (OPEN_MATH, {"split": "train_1M"}, OPEN_MATH[2:]),
        (OPEN_MATH, {"name": "OpenMathInstruct-2"}, OPEN_MATH[2:]),
        (("main/train-0-of-1.parquet", "socratic/train-0-of-1.parquet"), {"name": "gsm8k"},
         ["main/train-0-of-1.parquet"]),
        (("main/train.parquet", "socratic/train.parquet"), {"name": "gsm8k", "subset": "socratic"},
         ["socratic/train.parquet"]),
        (("train.jsonl", "test.jsonl"), {"name": "gsm8k", "split": "test"}, ["test.jsonl"]),
        (("data/dapo-math-17k.parquet", "README.json"), {"name": "DAPOMath17K"}, ["data/dapo-math-17k.parquet"]),
        (("deepscaler.json", "dataset_infos.json"), {"name": "DeepScaler"}, ["deepscaler.json"]),
        (("plain_text/train-00000-of-00001.parquet", "plain_text/validation-00000-of-00001.parquet"),
         {"name": "squad", "split": "validation"}, ["plain_text/validation-00000-of-00001.parquet"]),
        (("preference/train.jsonl.gz", "edit/train.jsonl.gz"), {"name": "HelpSteer3"}, ["preference/train.jsonl.gz"]),
        (("train/a.jsonl", "train/b.jsonl", "test/a.jsonl"), {}, ["train/a.jsonl", "train/b.jsonl"]),
        (("train.jsonl", "train.parquet", ".cache/train.parquet"), {}, ["train.parquet"]),
        (("aime2025-I.jsonl", "aime2025-II.jsonl"), {"name": "AIME2025"}, ["aime2025-I.jsonl", "aime2025-II.jsonl"]),
    ],
)  # fmt: skip
def test_files_of_a_snapshot(tmp_path: Path, names: tuple[str, ...], keys: dict[str, str], expected: list[str]):
    assert found(make(tmp_path, *names), **keys) == list(expected)


CONFIGS = ("en/train-0.parquet", "fr/train-0.parquet", "fr/dev-0.parquet", "all.jsonl", "x/train.jsonl")


def header(folder: Path, text: str, name: str = "README.md") -> Path:
    (folder / name).write_text(f"---\n{text}\n---\n# Rows\n" if name == "README.md" else text)
    return folder


def of(name: str, files: str, more: str = "") -> str:
    return f"{{config_name: {name}, data_files: {files}{more}}}"


TRAIN = "[{split: train, path: %s}]"


@pytest.mark.parametrize(
    ("configs", "keys", "expected"),
    [
        ([of("en", TRAIN % "en/train-*")], {}, ["en/train-0.parquet"]),
        ([of("en", TRAIN % "en/train-*"), of("fr", TRAIN % "fr/train-*", ", default: true")], {},
         ["fr/train-0.parquet"]),
        ([of("default", "all.jsonl"), of("fr", TRAIN % "fr/train-*")], {}, ["all.jsonl"]),
        ([of("en", TRAIN % "en/train-*"), of("fr", TRAIN % "fr/train-*")], {"subset": "fr"}, ["fr/train-0.parquet"]),
        ([of("fr", "[{split: train, path: fr/train-*}, {split: test, path: [fr/dev-*, en/*]}]")], {"split": "test"},
         ["fr/dev-0.parquet", "en/train-0.parquet"]),
        (["{config_name: fr, data_dir: fr}"], {"split": "validation"}, ["fr/dev-0.parquet"]),
        ([of("en", TRAIN % '"**/train-*"')], {}, ["en/train-0.parquet", "fr/train-0.parquet"]),
        ([of("en", TRAIN % "en/train-*")], {"subset": "x"}, ["x/train.jsonl"]),
        ([of("a", TRAIN % "en/*"), of("b", TRAIN % "fr/*")], {},
         "names several configs, and none as default; .* one of a, b"),
        ([of("a", TRAIN % "en/*")], {"subset": "b"},
         "data.train.subset=b: .*README.md has no such config; use one of a"),
        ([of("a", TRAIN % "en/*")], {"split": "test"}, r"README.md has no files .* of split test; .*it has train"),
        ([of("a", TRAIN % "../*")], {}, r"config a in .*README.md leads out of the folder .\.\./\*"),
        ([of("a", TRAIN % '"https://x/y.parquet"')], {}, "leads out of the folder"),
        (["{data_files: all.jsonl}"], {}, "the header of .*README.md is not one that `datasets` reads"),
    ],
)  # fmt: skip
def test_a_header_says_what_is_read_as_datasets_reads_it(
    tmp_path: Path, configs: list[str], keys: dict[str, str], expected: list[str] | str
):
    folder = make(tmp_path / "rows", *(name for name in CONFIGS if not name.endswith("parquet")))
    for name in (name for name in CONFIGS if name.endswith("parquet")):
        (folder / name).parent.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), folder / name)
    header(folder, "configs: [" + ", ".join(configs) + "]")
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            found(folder, **keys)
        return
    assert found(folder, **keys) == expected
    if keys.get("subset") != "x":  # a folder that is no config
        builder = datasets.load_dataset_builder(str(folder), keys.get("subset"), cache_dir=str(tmp_path / "cache"))
        theirs = builder.config.data_files[keys.get("split", "train")]
        assert [Path(path).relative_to(folder).as_posix() for path in theirs] == expected


@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 10**5,
        "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{f'*a{n - 1},' * 9}]}}\n" for n in range(1, 15)),
    ],
    ids=["nested", "aliases"],
)
def test_a_header_that_takes_for_ever_to_read_is_refused(tmp_path: Path, name: str, text: str):
    folder = header(make(tmp_path, "train.jsonl"), text, name)
    for _ in range(2):
        with pytest.raises(ValueError, match="is not one that `datasets` reads .(nested more than|more than 200,000)"):
            found(folder)


def test_a_header_of_its_own_file_counts_too(tmp_path: Path):
    folder = header(make(tmp_path, *CONFIGS), "configs: [" + of("en", TRAIN % "en/train-*") + "]", ".huggingface.yaml")
    assert found(folder) == ["en/train-0.parquet"]
    assert found(header(make(tmp_path / "other", "train.jsonl"), "license: mit")) == ["train.jsonl"]


def test_what_save_to_disk_wrote(tmp_path: Path):
    for split in ("train", "test"):
        make(tmp_path / split, "data-00000-of-00001.arrow", "dataset_info.json")
        (tmp_path / split / "state.json").write_text(
            json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})
        )
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert found(tmp_path, split="test") == ["test/data-00000-of-00001.arrow"]
    assert found(tmp_path / "train") == ["data-00000-of-00001.arrow"]
    with pytest.raises(
        ValueError,
        match=r"has no files of split valid; set data.train.split, .*\(there are dataset_dict.json, test, train\)",
    ):
        found(tmp_path, split="valid")


def cached(cache: Path, hub_id: str, *names: str) -> Path:
    """A data set as the hub library keeps it."""
    repository = cache / f"datasets--{hub_id.replace('/', '--')}"
    snapshot = make(repository / "snapshots" / ("0" * 40), *names)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return snapshot


def test_data_sets_of_the_hub_come_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    gsm8k = cached(tmp_path, "openai/gsm8k", "main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet")
    assert find_data_files(dataset("gsm8k", data_path=None), setting="data.train") == [
        gsm8k / "main/train-00000-of-00001.parquet"
    ]
    mine = cached(tmp_path, "me/rows", "train.jsonl")
    assert find_data_files(dataset(data_path="me/rows"), setting="data.train") == [mine / "train.jsonl"]
    headed = cached(tmp_path, "me/configs", "en/train.jsonl", "fr/train.jsonl")
    header(headed, "configs: [" + ", ".join(of(name, TRAIN % f"{name}/*") for name in ("en", "fr")) + "]")
    assert find_data_files(dataset(data_path="me/configs", subset="fr"), setting="data.train") == [
        headed / "fr/train.jsonl"
    ]
    with pytest.raises(
        ValueError, match="data.train: the data set me/nothing is neither in the local .* nor to be downloaded"
    ):
        find_data_files(dataset(data_path="me/nothing"), setting="data.train")


@pytest.mark.parametrize(
    ("names", "keys", "reason"),
    [
        (("test.jsonl",), {}, r"no files of split train; set data.train.split, .* \(there are test.jsonl\)"),
        (("train.jsonl",), {"split": "dev"}, "no files of split dev"),
        (("a/train.jsonl",), {"subset": "b"}, "data.train.subset=b: no such folder in .*; use one of a"),
        ((), {}, r"\(there are none\)"),
    ],
)
def test_folders_without_the_rows_asked_for(tmp_path: Path, names: tuple[str, ...], keys: dict[str, str], reason: str):
    with pytest.raises(ValueError, match=reason):
        found(make(tmp_path, *names), **keys)


def test_a_file_of_an_unknown_kind_is_refused(tmp_path: Path):
    make(tmp_path, "rows.csv")
    with pytest.raises(
        ValueError, match="data.train.data_path=.*rows.csv: a file of an unknown kind; use one of .parquet"
    ):
        find_data_files(dataset(data_path=str(tmp_path / "rows.csv")), setting="data.train")
