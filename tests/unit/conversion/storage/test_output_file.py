"""Files written front to back: checksums, and going on where a killed attempt stopped."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import zlib
from pathlib import Path

import pytest
import torch

from conversion.storage import output_file
from conversion.storage.file_boxes import byte_view
from conversion.storage.manifest import FileRecord
from conversion.storage.output_file import OutputFile, combine_crc32, write_tensor


def test_checksums_of_parts_make_the_checksum_of_the_whole():
    random.seed(0)
    for size, cut in ((10, 3), (1000, 1), (70_001, 65_536), (5, 0), (5, 5)):
        data = random.randbytes(size)
        assert combine_crc32(zlib.crc32(data[:cut]), zlib.crc32(data[cut:]), size - cut) == zlib.crc32(data)


def write_items(path: Path, items: list[bytes], *, stop_after: int | None = None) -> tuple[FileRecord | None, int]:
    """Writes the items that are missing; the record of the file, and how many items were there."""
    with OutputFile(path) as out:
        found = out.num_items
        for index, item in enumerate(items[found:], found):
            if index == stop_after:
                # As an error does: what is in flight is written.
                return None, found
            out.append(item)
            if index % 2:
                out.end_section()
            out.end_item()
        return out.close(), found


def items_of(num_items: int) -> list[bytes]:
    random.seed(1)
    return [random.randbytes(random.randrange(1, 300_000)) for _ in range(num_items)]


def expected(data: bytes) -> FileRecord:
    return FileRecord(len(data), hashlib.sha256(data).hexdigest(), zlib.crc32(data))


def test_a_file_is_what_was_appended_and_so_are_its_checksums(tmp_path: Path):
    items = [*items_of(20), random.randbytes(11_000_000), b"end"]
    record, found = write_items(tmp_path / "file", items)
    assert (tmp_path / "file").read_bytes() == b"".join(items)
    assert (record, found) == (expected(b"".join(items)), 0)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks after every megabyte."""
    monkeypatch.setattr(output_file, "_MARK_BYTES", 1_000_000)


@pytest.mark.parametrize("stop_after", [1, 17, 40, 60])
def test_an_attempt_that_stopped_is_continued(tmp_path: Path, often: None, stop_after: int):
    items, path = items_of(60), tmp_path / "file"
    write_items(path, items, stop_after=stop_after)
    record, found = write_items(path, items)
    assert record == expected(b"".join(items)) and path.read_bytes() == b"".join(items)
    # At most a mark's distance, here seven items on average, is written again.
    assert (found > stop_after - 20 or stop_after < 20) and found <= stop_after
    assert write_items(path, items) == (record, 60)


@pytest.mark.parametrize("stop_after", [20, 40, 60])
def test_an_attempt_that_was_killed_is_continued(tmp_path: Path, often: None, stop_after: int):
    items, path = items_of(60), tmp_path / "file"
    pid = os.fork()
    if not pid:
        with OutputFile(path) as out:
            for item in items[:stop_after]:
                out.append(item)
                out.end_item()
            # Nothing that is in flight is waited for.
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    record, found = write_items(path, items)
    assert record == expected(b"".join(items)) and path.read_bytes() == b"".join(items)
    assert found <= stop_after


def test_what_does_not_match_the_journal_is_written_again(tmp_path: Path, often: None):
    items, path = items_of(60), tmp_path / "file"
    record, _ = write_items(path, items)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    again, found = write_items(path, items)
    assert again == record and path.read_bytes() == b"".join(items)
    assert 20 < found < 40


@pytest.mark.parametrize("journal", ["", "not a line\n", '{"items": 5, "bytes": 99999999999, "sha256": "00"}\n', '{"items": 5, "byt'])
def test_a_journal_that_is_damaged_or_promises_too_much_is_not_believed(tmp_path: Path, journal: str):
    items, path = items_of(5), tmp_path / "file"
    path.write_bytes(b"remains of something else" * 1000)
    (tmp_path / "file.journal").write_text(journal)
    assert write_items(path, items) == (expected(b"".join(items)), 0)
    assert path.read_bytes() == b"".join(items)


def test_tensors_are_written_where_bytes_are_not_aligned(tmp_path: Path):
    tensor, tap = torch.randn(3, 1_000_001), hashlib.sha256()
    with OutputFile(tmp_path / "file") as out:
        out.append(b"odd")

        def fill(box, target):
            target.copy_(tensor[tuple(slice(start, stop) for start, stop in box)])

        assert sum(write_tensor(out, tensor.shape, tensor.dtype, fill, tap)) == tensor.nbytes
        record = out.close()
    assert (tmp_path / "file").read_bytes() == b"odd" + bytes(byte_view(tensor))
    assert record == expected(b"odd" + bytes(byte_view(tensor)))
    assert tap.hexdigest() == hashlib.sha256(byte_view(tensor)).hexdigest()


def test_an_error_in_the_background_ends_the_writing(tmp_path: Path):
    with pytest.raises(OSError), OutputFile(tmp_path / "file") as out:
        os.close(out._file)
        out._file = os.open("/dev/full", os.O_WRONLY)
        for _ in range(10):
            out.append(bytes(4_000_000))
        out.close()


def test_a_failure_to_sync_that_is_told_once_ends_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As Linux does: the next call succeeds, although pages are lost."""
    failures = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]

    def fdatasync(file: int) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(output_file.os, "fdatasync", fdatasync)
    monkeypatch.setattr(output_file, "_set_direct", lambda file, is_direct: False)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)), OutputFile(tmp_path / "file") as out:
        for _ in range(10):
            out.append(bytes(4_000_000))
            out.settle()
        out.close()
    assert not failures
