"""Data sets read through once: every row is checked, and stays in its file until it is asked for. What is wrong is refused or set aside."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, overload

from conversion.files.durable import write_atomic
from mrl.config.rules.data import train_datasets, validation_datasets
from mrl.config.texts import safe_text
from mrl.data.fields import Fields, RowError, json_object
from mrl.data.order import epoch_order
from mrl.data.records import Record, RecordFile

if TYPE_CHECKING:
    from mrl.config.schema.data import DataConfig, DatasetConfig

logger = logging.getLogger(__name__)

Example = TypeVar("Example")
MAX_ERRORS = 20
MAX_SHOWN = 5
# Rendering and tokenising a million conversations takes an hour, in which a run must not look as if it hung.
PROGRESS_PERIOD_S = 30.0


class NoEnvironment(RowError):
    """Nothing here can judge the row; `asked` is the agent or environment that it names."""

    def __init__(self, asked: str) -> None:
        self.asked = asked
        super().__init__(f"there is no environment for {asked}")


class TooLong(RowError):
    """The row has more tokens than a training step takes, and is left out rather than cut."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        super().__init__(f"{num_tokens} tokens are too many")


@dataclass(frozen=True)
class Reader(Generic[Example]):
    """How the rows of one data set become examples."""

    setting: str
    """The config key of the data set, for messages."""
    source: str
    """Where its files are, for messages."""
    files: list[Path]
    examine: Callable[[Fields], str | None]
    """Raises `RowError` if there is anything against the row with these fields. Returns the id that it gives itself, or None."""
    make: Callable[[Fields, str], Example]
    """The example that these fields, which passed `examine`, and this id are."""
    repeat: int = 1
    identity: Callable[[Fields], str] | None = None
    """What makes rows the same, of which only the first one is kept. None: all are kept."""


@dataclass(frozen=True)
class BadRow:
    """A row that was left out."""

    file: RecordFile
    record: Record
    """Without its line, which is read again if it is wanted."""
    length: int
    reason: str

    @property
    def text(self) -> str:
        """`file:line: reason`."""
        return f"{self.file.place(self.record.number)}: {self.reason}"


@dataclass
class Findings:
    """What came up while a data set was read."""

    setting: str
    num_rows: int = 0
    bad: list[BadRow] = field(default_factory=list)
    without_environment: Counter[str] = field(default_factory=Counter)
    """Rows by the agent or environment that they ask for."""
    too_long: dict[str, int] = field(default_factory=dict)
    """Tokens of rows that are too long, by place."""
    num_repeated: int = 0

    @property
    def num_without_environment(self) -> int:
        """Rows that nothing here can judge."""
        return sum(self.without_environment.values())


@dataclass(frozen=True)
class _Source(Generic[Example]):
    reader: Reader[Example]
    file: RecordFile
    stem: str
    """What rows that name themselves nowhere are called by; of all files of a run only this one has it."""
    own_ids: dict[int, str] = field(default_factory=dict)
    """Of the rows that name themselves, by line."""


class Rows(Sequence[Example]):
    """Examples that are made when they are asked for, from rows that stay in their files. Any thread may ask."""

    def __init__(self, sources: Sequence[_Source[Example]] = ()) -> None:
        self._sources = list(sources)
        # A million rows are no objects: 30 bytes each.
        self._source, self._number, self._length, self._copy = array("I"), array("I"), array("I"), array("H")
        self._offset, self._digest = array("Q"), array("Q")

    def __len__(self) -> int:
        return len(self._source)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        """One example, or some of them as `Rows`.

        Raises:
            RuntimeError: the file has changed since it was read.
        """
        if isinstance(index, slice):
            return self.select(range(len(self))[index])
        source, number = self._sources[self._source[index]], self._number[index]
        line = source.file.read(self._offset[index], self._length[index])
        if _digest(line) != self._digest[index]:
            raise RuntimeError(f"{source.file.place(number)} has changed since the run began; keep data files as they are while it runs")
        return source.reader.make(json_object(line), self.id_at(index))

    def id_at(self, index: int) -> str:
        """The id of one example; no row is read."""
        source, number, copy = self._sources[self._source[index]], self._number[index], self._copy[index]
        row_id = source.own_ids.get(number) or f"{source.stem}:{number}"
        return f"{row_id}/{copy}" if copy else row_id

    def ids(self) -> list[str]:
        """The ids of all examples, in order; no row is read."""
        return [self.id_at(index) for index in range(len(self))]

    def select(self, indices: Iterable[int]) -> Rows[Example]:
        """The examples at these places, in this order."""
        chosen, places = Rows(self._sources), list(indices)
        for mine, theirs in zip(chosen._columns(), self._columns(), strict=True):
            mine.extend([theirs[place] for place in places])
        return chosen

    def _columns(self) -> tuple[array[int], ...]:
        return (self._source, self._number, self._length, self._copy, self._offset, self._digest)

    def _add(self, source: int, record: Record, digest: int, copy: int) -> None:
        values = (source, record.number, len(record.line), copy, record.offset, digest)
        for column, value in zip(self._columns(), values, strict=True):
            column.append(value)


@dataclass
class Names:
    """What rows that are asked together are called."""

    stems: set[str] = field(default_factory=set)
    places: dict[str, str] = field(default_factory=dict)
    """Of the rows that name themselves, by id."""


def read_split(
    data: DataConfig, reader_of: Callable[[str, DatasetConfig], Reader[Example]]
) -> tuple[Rows[Example], Rows[Example], list[Findings]]:
    """Training rows, validation rows and what came up: every data set of `data`, read by `reader_of(key, data set)`.

    Validation rows that are held out of the training rows come first.

    Raises:
        ValueError: see `read_data`.
    """
    train_sets, names = list(train_datasets(data)), Names()
    parts, findings = read_data([reader_of(key, dataset) for key, dataset in train_sets], data, names)
    if not any(dataset.held_out for _, dataset in train_sets):
        names = Names()  # never asked together with training rows
    own, more = read_data([reader_of(key, dataset) for key, dataset in validation_datasets(data)], data, names)
    train, held_out = [], []
    for all_rows, (_, dataset) in zip(parts, train_sets, strict=True):
        rows = all_rows.select(draw(len(all_rows), dataset.max_samples, seed=dataset.seed))
        kept, held = hold_out(len(rows), dataset.held_out, seed=dataset.seed)
        train.append(rows.select(kept))
        held_out.append(rows.select(held))
    return joined(train), joined(held_out + own), findings + more


def read_data(readers: Sequence[Reader[Example]], data: DataConfig, names: Names) -> tuple[list[Rows[Example]], list[Findings]]:
    """The rows of each data set, with what came up on the way.

    Rows that name themselves nowhere are called `<file stem>:<line>`; one that takes a name that another has is a bad row. `names` is
    filled in.

    Raises:
        ValueError: a file cannot be read, there are bad rows and `data.on_bad_row` does not allow them, or rows without environment.
    """
    all_rows, all_findings = [], []
    for reader in readers:
        rows, findings = _read(reader, names)
        _judge(findings, reader, data)
        if not len(rows):
            raise ValueError(f"{reader.setting}.data_path={reader.source} has no rows" + (" that can be used" if findings.num_rows else ""))
        all_rows.append(rows)
        all_findings.append(findings)
    return all_rows, all_findings


def hold_out(num_rows: int, size: float, *, seed: int) -> tuple[list[int], list[int]]:
    """The rows that stay, and those held out: a share below 1, or a number of rows, drawn by `seed`; both in the order of the file.

    Raises:
        ValueError: no row would stay.
    """
    num_held = int(size) if size >= 1 else math.ceil(size * num_rows)
    if num_held >= num_rows:
        raise ValueError(f"split_validation_size={size:g} holds out all of the {num_rows} rows of a training set; lower it")
    order = epoch_order(num_rows, seed=seed, epoch=0)
    return sorted(order[num_held:].tolist()), sorted(order[:num_held].tolist())


def draw(num_rows: int, max_rows: int | None, *, seed: int) -> list[int]:
    """At most `max_rows` rows, drawn by `seed`, in the order of the file; None = all."""
    return sorted(epoch_order(num_rows, seed=seed, epoch=0)[:max_rows].tolist())


def joined(parts: Sequence[Rows[Example]]) -> Rows[Example]:
    """The rows of all parts, one part after the other."""
    every: Rows[Example] = Rows()
    for part in parts:
        first = len(every._sources)
        every._sources += part._sources
        for column, theirs in zip(every._columns(), part._columns(), strict=True):
            column.extend(array(theirs.typecode, (value + first for value in theirs)) if column is every._source else theirs)
    return every


def _read(reader: Reader[Example], names: Names) -> tuple[Rows[Example], Findings]:
    sources = []
    for path in reader.files:
        stem, number = Path(path.name.removesuffix(".gz")).stem, 1
        while (unique := stem if number == 1 else f"{stem}~{number}") in names.stems:
            number += 1
        names.stems.add(unique)
        sources.append(_Source(reader, RecordFile(path), unique))
    rows, findings, seen = Rows(sources), Findings(reader.setting), set[int]()
    for index, source in enumerate(sources):
        for record in _with_progress(source.file, reader.setting):
            findings.num_rows += 1
            digest = _digest(record.line)
            try:
                fields = json_object(record.line)
                row_id = reader.examine(fields)
                if reader.identity is not None and _is_repeated(reader.identity(fields), seen):
                    findings.num_repeated += 1
                    continue
                if row_id is not None:
                    _claim(row_id, source.file.place(record.number), names)
                    source.own_ids[record.number] = row_id
            except TooLong as error:
                findings.too_long[source.file.place(record.number)] = error.num_tokens
            except NoEnvironment as error:
                findings.without_environment[error.asked] += 1
            except RowError as error:
                findings.bad.append(BadRow(source.file, Record(record.number, record.offset, b""), len(record.line), str(error)))
            else:
                for copy in range(reader.repeat):
                    rows._add(index, record, digest, copy)
    return rows, findings


def _with_progress(file: RecordFile, setting: str) -> Iterator[Record]:
    """The records of a file; now and then it is said how far they have been read, and how long the rest will take."""
    started = told = time.monotonic()
    for count, record in enumerate(file.records(), 1):
        yield record
        now = time.monotonic()
        if now - told < PROGRESS_PERIOD_S:
            continue
        told, share = now, (record.offset + len(record.line)) / file.num_bytes
        left_s = (now - started) * (1 - share) / share
        logger.info("%s: %d rows of %s are read and checked (%.0f%%), about %.0f s left", setting, count, file.path, 100 * share, left_s)


def _is_repeated(identity: str, seen: set[int]) -> bool:
    digest = _digest(identity.encode("utf-8", "surrogatepass"))
    is_repeated = digest in seen
    seen.add(digest)
    return is_repeated


def _claim(row_id: str, place: str, names: Names) -> None:
    if not row_id.isprintable():
        raise RowError(f"id {row_id!r:.100} has characters that cannot be printed; choose another")
    stem, _, number = row_id.rpartition(":")
    if stem in names.stems and re.fullmatch(r"\d+", number):
        raise RowError(f"id {row_id!r} is what a row without id is called in that line; choose another")
    if (first := names.places.setdefault(row_id, place)) != place:
        raise RowError(f"id {row_id!r} was used in {first} already")


def _judge(findings: Findings, reader: Reader[Example], data: DataConfig) -> None:
    """Refuses a data set, or says what was left out of it."""
    name, num_rows = f"{reader.setting}.data_path={reader.source}", findings.num_rows
    if findings.bad and (data.on_bad_row == "refuse" or len(findings.bad) > data.max_bad_row_share * num_rows):
        shown = "\n".join(f"  {row.text}" for row in findings.bad[:MAX_ERRORS])
        more = f"\n  and {len(findings.bad) - MAX_ERRORS} more" if len(findings.bad) > MAX_ERRORS else ""
        way_out = "correct or remove them, or set data.on_bad_row=skip"
        if data.on_bad_row == "skip":
            way_out = f"more than data.max_bad_row_share={data.max_bad_row_share:g} of {num_rows}; correct or remove them, or raise that"
        raise ValueError(f"{name} has {len(findings.bad)} bad rows; {way_out}:\n{shown}{more}")
    if findings.without_environment:
        counts = ", ".join(f"{asked}: {count} rows" for asked, count in findings.without_environment.most_common())
        share = f"{findings.num_without_environment} of {num_rows} rows ({findings.num_without_environment / num_rows:.1%})"
        if not data.drop_rows_without_environment:
            raise ValueError(
                f"{name}: {share} ask for environments that are not there ({counts}); "
                f"name an environment in them, or set data.drop_rows_without_environment=true to train without them"
            )
        logger.warning("%s: %s are left out, for there is no environment for them (%s)", name, share, counts)
    if findings.bad:
        logger.warning("%s: %d of %d rows are bad and left out, the first: %s", name, len(findings.bad), num_rows, findings.bad[0].text)
    if findings.too_long:
        longest = ", ".join(f"{place} ({tokens} tokens)" for place, tokens in list(findings.too_long.items())[:MAX_SHOWN])
        if len(findings.too_long) == num_rows:
            raise ValueError(f"{name}: every row is too long: {longest}")
        logger.warning("%s: %d of %d rows are too long and left out: %s", name, len(findings.too_long), num_rows, longest)
    if findings.num_repeated:
        logger.info("%s: %d of %d rows repeat an earlier one and are left out", name, findings.num_repeated, num_rows)


def write_quarantine(findings: Sequence[Findings], folder: Path) -> None:
    """Writes what was left out into `folder`: `<data set>.jsonl` with place, reason and line of bad rows, `left_out.json` with all counts.

    Nothing left out, nothing written.
    """
    counts = {}
    for found in findings:
        if not (found.bad or found.without_environment or found.too_long or found.num_repeated):
            continue
        counts[found.setting] = {
            "rows": found.num_rows,
            "bad": len(found.bad),
            "repeated": found.num_repeated,
            "too_long": len(found.too_long),
            "without_environment": dict(found.without_environment),
        }
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{found.setting}.jsonl").open("w", encoding="utf-8") as file:
            for row in found.bad:
                line = row.file.read(row.record.offset, row.length).decode("utf-8", "replace")
                place = row.file.place(row.record.number)
                file.write(json.dumps({"place": place, "reason": safe_text(row.reason), "line": line}, ensure_ascii=False) + "\n")
    if counts:
        write_atomic(folder / "left_out.json", json.dumps(counts, indent=2))


def _digest(line: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(line, digest_size=8).digest(), "big")
