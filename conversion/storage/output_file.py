"""A file that is written once, front to back: hashed and written in the background, and continued where a dead attempt left it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from isal import isal_zlib
from torch import Tensor

from conversion.boxes import Box, lengths, volume
from conversion.storage.file_boxes import BLOCK_BYTES, blocks, read_exactly
from conversion.storage.files import IO_TIMEOUT_S
from conversion.storage.manifest import JOURNAL_SUFFIX, FileRecord

# Two blocks are filled while two others are hashed and written.
_NUM_BUFFERS = 4
# What an interruption costs at most, besides the last item.
_MARK_BYTES = 64 << 20
_GROWTH_BYTES = 1 << 30
_PAGE_BYTES = 4096


class Hash(Protocol):
    """What hashlib's objects do."""

    def update(self, data: memoryview, /) -> None:
        """Takes more bytes."""
        ...


def write_tensor(
    out: OutputFile, shape: Sequence[int], dtype: torch.dtype, fill: Callable[[Box, Tensor], None], tap: Hash | None = None
) -> Iterator[int]:
    """Appends a tensor, of which `fill` writes one box after the other where it is told; yields the bytes of each box."""
    for box in blocks(shape, BLOCK_BYTES // dtype.itemsize):
        num_bytes = volume(box) * dtype.itemsize
        space = out.space(num_bytes)
        if space.storage_offset() % dtype.itemsize:
            block = torch.empty(lengths(box), dtype=dtype)
            fill(box, block)
            space.copy_(block.reshape(-1).view(torch.uint8))
        else:
            fill(box, space.view(dtype).view(lengths(box)))
        out.commit(num_bytes, tap)
        yield num_bytes


@dataclass
class _Buffer:
    data: Tensor
    used: int
    carried: int
    """Bytes at the start that the buffer before has hashed: those of a page that it did not fill."""
    pending: list[Future[None]]


class OutputFile:
    """Writes items, one after the other, to a new file or to the end of what a dead attempt wrote of it.

    Beside the file lies a journal: after how many items and bytes the content had which sha256. What does not match it is written again.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file and checks what is there. `num_items` items are complete; the caller writes those that follow."""
        self._path, self._journal = path, path.with_name(path.name + JOURNAL_SUFFIX)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._sha256, self._crc32 = hashlib.sha256(), 0
        self.num_items, self._position = self._continue()
        self._marked = self._position
        # Memory of mmap begins at a page.
        pages = [mmap.mmap(-1, 2 * BLOCK_BYTES + _PAGE_BYTES) for _ in range(_NUM_BUFFERS)]
        self._buffers = [_Buffer(torch.frombuffer(memory, dtype=torch.uint8), 0, 0, []) for memory in pages]
        self._current = self._section = self._section_bytes = 0
        self._flushed = self._position - self._position % _PAGE_BYTES
        first = self._buffers[0]
        first.used = first.carried = self._position - self._flushed
        read_exactly(self._file, path, self._flushed, first.data.numpy().data[: first.used])
        self._size = self._position
        self._is_direct = _set_direct(self._file, True)
        self._taps: list[tuple[Hash, int, int]] = []
        self._is_closed = False
        self._marks: list[Future[None]] = []
        self._hasher, self._writer, self._tapper, self._syncer = (ThreadPoolExecutor(1) for _ in range(4))
        # Left alone, the page cache keeps what is written for half a minute, and the last fsync has all of it to do.
        self._syncing: Future[None] = self._syncer.submit(lambda: None)

    @property
    def position(self) -> int:
        """Bytes so far."""
        return self._position

    def space(self, num_bytes: int) -> Tensor:
        """A uint8 tensor of `num_bytes` (at most BLOCK_BYTES) that lies where the file goes on. `commit` makes it part of the file."""
        assert num_bytes <= BLOCK_BYTES
        buffer = self._buffers[self._current]
        if buffer.used + num_bytes > buffer.data.numel():
            self._flush()
            buffer = self._buffers[self._current]
        return buffer.data[buffer.used : buffer.used + num_bytes]

    def commit(self, num_bytes: int, tap: Hash | None = None) -> None:
        """Appends the first bytes of what `space` gave. A `tap` is updated with them in the background, until the next `settle`."""
        buffer = self._buffers[self._current]
        self._section = isal_zlib.crc32(buffer.data.numpy().data[buffer.used : buffer.used + num_bytes], self._section)
        self._section_bytes += num_bytes
        if tap is not None:
            self._taps.append((tap, buffer.used, buffer.used + num_bytes))
        buffer.used += num_bytes
        self._position += num_bytes

    def append(self, data: bytes | memoryview) -> None:
        """Appends bytes."""
        for start in range(0, len(data), BLOCK_BYTES):
            part = data[start : start + BLOCK_BYTES]
            self.space(len(part)).numpy()[:] = memoryview(part)
            self.commit(len(part))

    def end_section(self) -> int:
        """CRC-32 of what was appended since the last call."""
        crc32, self._section, num_bytes, self._section_bytes = self._section, 0, self._section_bytes, 0
        self._crc32 = combine_crc32(self._crc32, crc32, num_bytes)
        return crc32

    def end_item(self) -> None:
        """Counts an item. A later attempt need not write it again, once enough has been written since the last mark."""
        self.num_items += 1
        if self._position - self._marked >= _MARK_BYTES:
            self._mark()

    def settle(self) -> None:
        """Returns when all bytes are hashed, in taps too, and written."""
        self._flush()
        for buffer in self._buffers:
            _wait(buffer)

    def close(self) -> FileRecord:
        """Makes the file durable; its checksums."""
        self.end_section()
        self._mark()
        self.settle()
        for mark in [*self._marks, self._syncing]:
            mark.result(IO_TIMEOUT_S)
        self._shut()
        os.ftruncate(self._file, self._position)
        os.fsync(self._file)
        os.close(self._file)
        self._is_closed = True
        return FileRecord(self._position, self._sha256.hexdigest(), self._crc32)

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Unless it was closed, stops writing. What the journal lists remains for a later attempt."""
        if not self._is_closed:
            self._shut()
            os.close(self._file)

    def _shut(self) -> None:
        for lane in (self._hasher, self._tapper, self._writer, self._syncer):
            lane.shutdown()

    def _flush(self) -> None:
        """Hands the filled part of the current buffer to the background, and waits for the next buffer."""
        buffer = self._buffers[self._current]
        block, position = buffer.data.numpy().data, self._flushed
        taps, self._taps = self._taps, []
        # Whole pages are written. What follows the last byte in them is overwritten by the next buffer, or cut off in the end.
        num_pages = -(-buffer.used // _PAGE_BYTES)
        buffer.pending = [
            self._hasher.submit(self._sha256.update, block[buffer.carried : buffer.used]),
            self._writer.submit(self._write, block[: num_pages * _PAGE_BYTES], position),
            *(self._tapper.submit(tap.update, block[start:stop]) for tap, start, stop in taps),
        ]
        self._current = (self._current + 1) % _NUM_BUFFERS
        following, rest = self._buffers[self._current], buffer.used % _PAGE_BYTES
        _wait(following)
        following.data[:rest] = buffer.data[buffer.used - rest : buffer.used]
        following.used = following.carried = rest
        self._flushed += buffer.used - rest

    def _write(self, block: memoryview, position: int) -> None:
        while position + len(block) > self._size:
            # Writing inside of a file is faster than making it longer each time.
            self._size += _GROWTH_BYTES
            os.ftruncate(self._file, self._size)
        done = 0
        while done < len(block):
            try:
                done += os.pwrite(self._file, block[done:], position + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._is_direct = _set_direct(self._file, False)
        if not self._is_direct and self._syncing.done():
            # The system tells of pages that it could not write only once.
            self._syncing.result(IO_TIMEOUT_S)
            self._syncing = self._syncer.submit(os.fdatasync, self._file)

    def _mark(self) -> None:
        self._flush()
        self._marked = self._position
        num_items, num_bytes = self.num_items, self._position
        digest = self._hasher.submit(lambda: self._sha256.copy().hexdigest())

        def write() -> None:
            with self._journal.open("a", encoding="utf-8") as journal:
                journal.write(_Mark(num_items, num_bytes, digest.result(IO_TIMEOUT_S)).line())

        self._marks.append(self._writer.submit(write))

    def _continue(self) -> tuple[int, int]:
        """Number of items and bytes that an earlier attempt wrote well; leaves hashes as they were there."""
        marks = _read_journal(self._journal)
        items = position = 0
        sha256, crc32 = self._sha256.copy(), 0
        buffer = bytearray(BLOCK_BYTES)
        for mark in marks:
            at = position
            while at < mark.num_bytes and (num_bytes := os.preadv(self._file, [memoryview(buffer)[: mark.num_bytes - at]], at)):
                block = memoryview(buffer)[:num_bytes]
                sha256.update(block)
                crc32 = isal_zlib.crc32(block, crc32)
                at += num_bytes
            if sha256.hexdigest() != mark.sha256:
                break
            items, position = mark.num_items, mark.num_bytes
            self._sha256, self._crc32 = sha256.copy(), crc32
        with self._journal.open("w", encoding="utf-8") as journal:
            journal.writelines(mark.line() for mark in marks if mark.num_bytes <= position)
        return items, position


def combine_crc32(first: int, second: int, num_bytes: int) -> int:
    """CRC-32 of two byte strings in a row, from the CRC-32 of each and the length of the second (zlib's crc32_combine)."""
    return _multiply(_power(num_bytes), first) ^ second


# Bits stand for powers of x in reverse: the highest bit is 1.
_ONE, _X, _POLYNOMIAL = 1 << 31, 1 << 30, 0xEDB88320


def _multiply(a: int, b: int) -> int:
    """Product of two polynomials over GF(2), modulo that of CRC-32."""
    product, bit = 0, _ONE
    while bit:
        if a & bit:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return product


@lru_cache(maxsize=4096)
def _power(num_bytes: int) -> int:
    """x to the power of the number of bits."""
    result, square, exponent = _ONE, _X, 8 * num_bytes
    while exponent:
        if exponent & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        exponent >>= 1
    return result


@dataclass(frozen=True)
class _Mark:
    num_items: int
    num_bytes: int
    sha256: str

    def line(self) -> str:
        return json.dumps({"items": self.num_items, "bytes": self.num_bytes, "sha256": self.sha256}) + "\n"


def _read_journal(path: Path) -> list[_Mark]:
    """The marks of a journal, up to a line that is cut off."""
    marks: list[_Mark] = []
    try:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            content = json.loads(line)
            marks.append(_Mark(int(content["items"]), int(content["bytes"]), str(content["sha256"])))
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError):
        # The attempt died while it wrote this line.
        return marks
    return marks


def _set_direct(file: int, is_direct: bool) -> bool:
    """Whether writes go past the page cache: they cost no copy, and fsync finds little to do. Not every file system can."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if is_direct else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return is_direct


def _wait(buffer: _Buffer) -> None:
    """Returns when the background has done with a buffer; raises what it raised."""
    for future in buffer.pending:
        future.result(IO_TIMEOUT_S)
    buffer.pending = []
