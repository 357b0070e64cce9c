# SPDX-License-Identifier: Apache-2.0
"""Reads a run's data sets once: checks every row, keeps good ones in a temporary file, refuses or sets aside others."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import pickle
import re
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar, overload

from conversion.files.durable import write_atomic
from mrl.config.errors import ConfigError
from mrl.config.own import PROCESSOR, find_fitting
from mrl.config.schema.data import PROCESSORS
from mrl.config.texts import counted, safe_text
from mrl.data.fields import EndlessRow, Fields, RowError, as_json, json_object
from mrl.data.order import epoch_order
from mrl.data.overlap import Identities, hash_of, told_of_shared
from mrl.data.records import Record, records

if TYPE_CHECKING:
    from mrl.config.schema.data import DataConfig, DatasetConfig

logger = logging.getLogger(__name__)

Value = TypeVar("Value")
Example = TypeVar("Example")
MAX_ERRORS = 20
MAX_SHOWN = 5
# Rendering and tokenising a million conversations takes an hour, in which a run must not look as if it hung.
PROGRESS_PERIOD_S = 30.0


class NoEnvironment(RowError):
    """No environment of the run can judge the row; `asked` is the agent or environment that the row names."""

    def __init__(self, asked: str) -> None:
        self.asked = asked
        super().__init__(f"there is no environment for {asked}")


class TooLong(RowError):
    """The row has more tokens than a training step takes; it is left out rather than cut."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        super().__init__(f"{num_tokens} tokens are too many")


@dataclass(frozen=True)
class Parsed(Generic[Value]):
    """A good row, checked and rendered, and the id it gives itself."""

    value: Value
    row_id: str | None
    identity: str | None = None
    """Text that is equal for rows that ask and teach the same, whatever their file, format and place."""
    unshown: tuple[str, ...] = ()
    """Keys that a reply seems to need, and that the model never sees."""


@dataclass(frozen=True)
class Reader(Generic[Value]):
    """Reader of one data set; config key and place are for messages. `parse` raises RowError if a row is unusable."""

    setting: str
    source: str
    files: list[Path]
    parse: Callable[[Fields], Parsed[Value]]
    repeat: int = 1
    hint: Callable[[Fields], str] = lambda fields: ""
    """Ends the message about a row that `parse` refuses."""
    drops_repeats: bool = False
    """Keeps only the first of rows of one identity."""


def with_processor(processor: str, parse: Callable[[Fields], Parsed[Value]]) -> Callable[[Fields], Parsed[Value]]:
    """Wraps `parse` so that the user's processor converts each row first; NeMo RL's names change nothing."""
    if processor in PROCESSORS:
        return parse
    function = find_fitting(processor, PROCESSOR)

    def parse_processed(fields: Fields) -> Parsed[Value]:
        try:
            made = function(row=fields)
        except Exception as error:  # the user's code
            raise RowError(f"processor {processor} failed with {type(error).__name__}: {error}") from error
        try:
            row = as_json(made, f"processor {processor}'s row")
        except RecursionError as error:
            raise RowError(f"processor {processor}'s row is nested too deeply, or holds itself") from error
        if not isinstance(row, dict):
            raise RowError(f"processor {processor} returned a {type(row).__name__}, not a dict")
        return parse(row)

    return parse_processed


class Spool(Generic[Value]):
    """Values in a temporary file, which disappears with this process. Any thread may read. TMPDIR chooses the disk."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()
        self._end = 0
        self.identities = Identities()

    def add(self, value: Value) -> int:
        """Appends a value, and returns its position. Raises ValueError if the disk is full."""
        data, position = pickle.dumps(value, protocol=5), self._end
        try:
            self._end += os.write(self._file.fileno(), len(data).to_bytes(8, "little") + data)
            if self._end < position + 8 + len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise ValueError(
                f"no room for the rows in {tempfile.gettempdir()} ({error.strerror}); set TMPDIR to a folder with "
                "room for twice the data"
            ) from error
        return position

    def read(self, position: int) -> Value:
        """The value at a position that `add` returned."""
        length = int.from_bytes(os.pread(self._file.fileno(), 8, position), "little")
        return pickle.loads(os.pread(self._file.fileno(), length, position + 8))


class Rows(Sequence[Example]):
    """Examples that are loaded when someone asks for them. Any thread may ask."""

    def __init__(
        self,
        load: Callable[[str, int], Example],
        ids: Iterable[str] = (),
        positions: Iterable[int] = (),
        sizes: Sequence[int] = (),
    ) -> None:
        self._load, self._ids, self._positions = load, list(ids), array("Q", positions)
        self.sizes = tuple(sizes) or (len(self._ids),)
        """Number of rows of each data set, in their order."""

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        if isinstance(index, slice):
            return self.select(range(len(self))[index])
        return self._load(self._ids[index], self._positions[index])

    def id_at(self, index: int) -> str:
        """The id of one example, which is not loaded."""
        return self._ids[index]

    def select(self, indices: Iterable[int]) -> Rows[Example]:
        """The examples at these indices, in this order."""
        chosen = list(indices)
        return Rows(self._load, (self._ids[index] for index in chosen), (self._positions[index] for index in chosen))


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used: `file:line`, why, and where its line stands in `LeftOut.lines`."""

    place: str
    reason: str
    position: int


@dataclass
class LeftOut:
    """The rows of a data set that are left out, and why."""

    setting: str
    num_rows: int = 0
    """All rows, those that are kept included."""
    bad: list[BadRow] = field(default_factory=list)
    without_environment: Counter[str] = field(default_factory=Counter)
    too_long: dict[str, int] = field(default_factory=dict)
    """Tokens of rows that are too long, by place."""
    num_repeated: int = 0
    unshown: Counter[str] = field(default_factory=Counter)
    """Rows that are kept, by each key that a reply seems to need, and that the model never sees."""
    lines: Spool[bytes] = field(default_factory=Spool)
    digest: str = ""
    """sha256 of the rows that are kept, as the files have them, in their order."""


@dataclass
class Names:
    """Ids of rows used together, with their places: the row's own `id`, else `<stem of the file>:<line>`."""

    stems: set[str] = field(default_factory=set)
    places: dict[str, str] = field(default_factory=dict)

    def stem_of(self, path: Path) -> str:
        """The stem of a file, with a number if an earlier file has the same."""
        stem, number = Path(path.name.removesuffix(".gz")).stem, 1
        while (unique := stem if number == 1 else f"{stem}~{number}") in self.stems:
            number += 1
        self.stems.add(unique)
        return unique

    def claim(self, row_id: str, place: str) -> None:
        """Notes the id that a row gives itself. Raises RowError if it is taken, or cannot be printed."""
        if not row_id.isprintable():
            raise RowError(f"id {row_id!r:.100} has characters that cannot be printed; choose another")
        stem, _, number = row_id.rpartition(":")
        if stem in self.stems and re.fullmatch(r"\d+", number):
            raise RowError(f"id {row_id!r} is what a row without id is called in that line; choose another")
        if (first := self.places.setdefault(row_id, place)) != place:
            raise RowError(f"id {row_id!r} was used in {first} already")


def read_split(
    data: DataConfig, reader_of: Callable[[str, DatasetConfig], Reader[Value]], finish: Callable[[str, Value], Example]
) -> tuple[Rows[Example], Rows[Example], list[LeftOut]]:
    """Training rows, validation rows, and the skipped rows of each data set of `data`.

    `reader_of(key, data set)` tells how to read a data set; `finish(id, value)` makes an example on demand. Validation
    rows held out of the training rows come first.
    """
    names, spool, problems = Names(), Spool[Value](), list[str]()

    def read_all(sets: Mapping[str, DatasetConfig]) -> list[tuple[Rows[Example], LeftOut]]:
        found = []
        for key, dataset in sets.items():
            try:
                found.append(read_rows(reader_of(key, dataset), data, names, spool, finish))
            except ValueError as error:
                problems.append(str(error))
        return found

    read = read_all(data.train_sets)
    if not any(dataset.held_out for dataset in data.train_sets.values()):
        names = Names()  # validation rows are never asked together with training rows
    validation = read_all(data.validation_sets)
    if problems:
        raise ConfigError(problems)
    train, held_out = [], []
    for (all_rows, _), dataset in zip(read, data.train_sets.values(), strict=True):
        rows = all_rows.select(draw(len(all_rows), dataset.max_samples, seed=dataset.seed))
        kept, held = hold_out(len(rows), dataset.held_out, seed=dataset.seed)
        train.append(rows.select(kept))
        held_out.append(rows.select(held))
    kept, held = joined(train), joined([*held_out, *(rows for rows, _ in validation)])
    num_shared, spool.identities = spool.identities.num_shared(held._positions, kept._positions), Identities()
    if said := told_of_shared(num_shared, len(held)):
        logger.warning("%s", said)
    return kept, held, [left_out for _, left_out in read + validation]


def identities_of(reader: Reader[Value], read: Callable[[Path], Iterable[Record]] = records) -> Iterator[int]:
    """Hashes of the identities of a data set's good rows, of which `read` yields the records."""
    for path in reader.files:
        for record in read(path):
            with suppress(RowError):
                if not record.fault and (parsed := reader.parse(json_object(record.line))).identity is not None:
                    yield hash_of(parsed.identity)


def read_rows(
    reader: Reader[Value], data: DataConfig, names: Names, spool: Spool[Value], finish: Callable[[str, Value], Example]
) -> tuple[Rows[Example], LeftOut]:
    """The rows of one data set, and its skipped rows. Fills `names` and `spool`."""
    ids, positions, left_out = sort_out(reader, names, spool)
    refused, said = complaints(left_out, name := f"{reader.setting}.data_path={reader.source}", data)
    if refused:
        raise ConfigError(refused)
    for line in said:
        logger.warning("%s", line)
    if left_out.num_repeated:
        logger.info(
            "%s: %d of %d rows repeat an earlier one and are left out", name, left_out.num_repeated, left_out.num_rows
        )
    if not ids:
        raise ValueError(f"{name} has no rows" + (" that can be used" if left_out.num_rows else ""))
    return Rows(lambda row_id, position: finish(row_id, spool.read(position)), ids, positions), left_out


def sort_out(
    reader: Reader[Value],
    names: Names,
    spool: Spool[Value],
    read: Callable[[Path, str], Iterable[Record]] | None = None,
) -> tuple[list[str], array[int], LeftOut]:
    """Sorts the rows of a data set into good ones (ids, places in `spool`) and bad ones. `read` yields rows of a file.

    A row without an id is called `<file stem>:<line>`; one that takes another row's name is a bad row.
    """
    ids = list[str]()
    positions = array("Q")
    left_out = LeftOut(reader.setting)
    seen = set[int]()
    kept = hashlib.sha256()
    for path in reader.files:
        stem = names.stem_of(path)
        for record in (read or _with_progress)(path, reader.setting):
            left_out.num_rows += 1
            place = f"{path}:{record.number}" if record.number else f"{path}, {record.share:.1%} of it in"
            fields = Fields()
            try:
                if record.fault:
                    raise RowError(record.fault)
                parsed = reader.parse(fields := json_object(record.line))
                digest = None if parsed.identity is None else hash_of(parsed.identity)
                if reader.drops_repeats and digest is not None:
                    if digest in seen:
                        left_out.num_repeated += 1
                        continue
                    seen.add(digest)
                if parsed.row_id is not None:
                    names.claim(parsed.row_id, place)
            except TooLong as error:
                left_out.too_long[place] = error.num_tokens
            except NoEnvironment as error:
                left_out.without_environment[error.asked] += 1
            except EndlessRow as error:
                raise ValueError(f"{reader.setting}.data_path={reader.source}: {place}: {error}") from error
            except RowError as error:
                # A key of data.default would change the other data sets, too.
                reason = f"{error}{reader.hint(fields)}".replace("data.default.", f"{reader.setting}.")
                left_out.bad.append(BadRow(place, reason, left_out.lines.add(record.line)))
            else:
                kept.update(record.line)
                left_out.unshown.update(parsed.unshown)
                row_id, position = parsed.row_id or f"{stem}:{record.number}", spool.add(parsed.value)
                if digest is not None:
                    spool.identities.add(position, digest)
                for copy in range(reader.repeat):
                    ids.append(f"{row_id}/{copy}" if copy else row_id)
                    positions.append(position)
    left_out.digest = kept.hexdigest()
    return ids, positions, left_out


def hold_out(num_rows: int, size: float, *, seed: int) -> tuple[list[int], list[int]]:
    """Indices of rows that stay, and of those held out: a share below 1 or a number, drawn by `seed`; both rising."""
    num_held = int(size) if size >= 1 else math.ceil(size * num_rows)
    if num_held >= num_rows:
        raise ValueError(f"split_validation_size={size:g} holds out all rows ({num_rows}) of a training set; lower it")
    order = epoch_order(num_rows, seed=seed, epoch=0)
    return sorted(order[num_held:].tolist()), sorted(order[:num_held].tolist())


def draw(num_rows: int, max_rows: int | None, *, seed: int) -> list[int]:
    """Indices of at most `max_rows` rows, drawn by `seed`, in rising order; None = all."""
    return sorted(epoch_order(num_rows, seed=seed, epoch=0)[:max_rows].tolist())


def joined(parts: Sequence[Rows[Example]]) -> Rows[Example]:
    """The rows of all parts, which have the same `load`: one part after the other."""
    if not parts:
        return Rows(_no_row)
    ids = (row_id for part in parts for row_id in part._ids)
    positions = (position for part in parts for position in part._positions)
    return Rows(parts[0]._load, ids, positions, [len(part) for part in parts])


def _no_row(row_id: str, position: int) -> NoReturn:
    raise IndexError(f"there is no row {row_id}")


def _with_progress(path: Path, setting: str) -> Iterator[Record]:
    started = told = time.monotonic()
    for count, record in enumerate(records(path), 1):
        yield record
        now = time.monotonic()
        if now - told < PROGRESS_PERIOD_S:
            continue
        told, left_s = now, (now - started) * (1 - record.share) / record.share
        logger.info(
            "%s: %d rows of %s are read and checked (%.0f%%), about %.0f s left",
            setting,
            count,
            path,
            100 * record.share,
            left_s,
        )


def _by_reason(bad: Sequence[BadRow]) -> Iterator[str]:
    places: dict[str, list[str]] = {}
    for row in bad:
        places.setdefault(row.reason, []).append(row.place)
    for reason, (first, *others) in list(places.items())[:MAX_ERRORS]:
        file = first.rpartition(":")[0] + ":"
        shown = ", ".join(place.removeprefix(file) for place in others[: MAX_ERRORS - 1])
        more = f" and {counted(len(others) - MAX_ERRORS + 1, 'more row')}" if len(others) >= MAX_ERRORS else ""
        yield f"  {first}: {reason}" + (f"; also {shown}{more}" if others else "")
    if len(places) > MAX_ERRORS:
        yield f"  and {counted(len(places) - MAX_ERRORS, 'other reason')}"


def _share(share: float) -> str:
    return f" data.max_bad_row_share={math.ceil(share * 100) / 100:g}"


def complaints(left_out: LeftOut, name: str, data: DataConfig, *, is_whole: bool = True) -> tuple[list[str], list[str]]:
    """Reasons to refuse a data set, and warnings about the rows that are left out. `name` is its key and place.

    Without `is_whole`, `left_out` is of some of its rows, and rules about shares of all rows refuse nothing.
    """
    num_rows, bad, refused, said = left_out.num_rows, left_out.bad, list[str](), list[str]()
    rows = "rows" if is_whole else "rows that were looked at"
    if bad and (data.on_bad_row == "refuse" or (is_whole and len(bad) > data.max_bad_row_share * num_rows)):
        shown = "\n".join(_by_reason(bad))
        share = _share(len(bad) / num_rows) if is_whole and len(bad) > data.max_bad_row_share * num_rows else ""
        way_out = f"correct or remove them, or set data.on_bad_row=skip{share}"
        if len(bad) == num_rows > 1:
            way_out = "correct them, or name other rows there, as none will do"
        if data.on_bad_row == "skip":
            way_out = (
                f"more than data.max_bad_row_share={data.max_bad_row_share:g} of {num_rows}; correct or "
                "remove them, or raise that"
            )
        of = "" if is_whole else f" among {num_rows} {rows}"
        refused.append(f"{name} has {counted(len(bad), 'bad row')}{of}; {way_out}:\n{shown}")
    elif bad:
        said.append(
            f"{name}: {len(bad)} of {num_rows} {rows} are bad and left out, the first: {bad[0].place}: {bad[0].reason}"
        )
    if left_out.without_environment:
        counts = ", ".join(
            f"{asked}: {counted(count, 'row')}" for asked, count in left_out.without_environment.most_common()
        )
        num_lost = left_out.without_environment.total()
        share = f"{num_lost} of {num_rows} {rows} ({num_lost / num_rows:.1%})"
        if data.drop_rows_without_environment:
            said.append(f"{name}: {share} are left out, for there is no environment for them ({counts})")
        else:
            refused.append(
                f"{name}: {share} ask for environments that are not there ({counts}); "
                "name an environment in them, let NeMo Gym's servers do those with an agent_ref "
                f"(env.nemo_gym.command), or set data.drop_rows_without_environment=true to train without them"
            )
    if left_out.too_long:
        longest = ", ".join(
            f"{place} ({tokens} tokens)" for place, tokens in list(left_out.too_long.items())[:MAX_SHOWN]
        )
        if len(left_out.too_long) == num_rows and is_whole:
            refused.append(f"{name}: every row is too long: {longest}")
        else:
            said.append(f"{name}: {len(left_out.too_long)} of {num_rows} {rows} are too long and left out: {longest}")
    for key, count in left_out.unshown.items():
        said.append(
            f"{name}: {count} of {num_rows} {rows} have {key}, which their text does not repeat, and the model "
            "never sees it; if a reply needs it, write it into the text (a function of yours as "
            "data.default.processor), or remove these rows"
        )
    return refused, said


def write_quarantine(data_sets: Sequence[LeftOut], folder: Path) -> None:
    """Writes skipped rows into `folder`, if any."""
    counts = {}
    for left_out in data_sets:
        if not (left_out.bad or left_out.without_environment or left_out.too_long or left_out.num_repeated):
            continue
        counts[left_out.setting] = {
            "rows": left_out.num_rows,
            "bad": len(left_out.bad),
            "repeated": left_out.num_repeated,
            "too_long": len(left_out.too_long),
            "without_environment": dict(left_out.without_environment),
        }
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{left_out.setting}.jsonl").open("w", encoding="utf-8") as file:
            for row in left_out.bad:
                line = left_out.lines.read(row.position).decode("utf-8", "replace")
                file.write(
                    json.dumps({"place": row.place, "reason": safe_text(row.reason), "line": line}, ensure_ascii=False)
                    + "\n"
                )
    if counts:
        write_atomic(folder / "left_out.json", json.dumps(counts, indent=2))
