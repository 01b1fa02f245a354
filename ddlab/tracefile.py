"""The folder a trace is kept in: a line of JSON and a blob of arrays a round, so that a kill loses one round.

* `trace.jsonl`: a JSON object a line: the header, then the rounds with `offset` and `length` of their blobs;
* `rounds.bin`: the arrays of the rounds, one safetensors blob after the other.

A blob is written before its line. What a round means is `trace.py`'s business; nothing is pickled.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping
from io import RawIOBase
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors import numpy as safetensors

SCHEMA_VERSION = 1
LINES, ARRAYS = "trace.jsonl", "rounds.bin"

Record = dict[str, Any]
Arrays = dict[str, np.ndarray]

_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class FolderWriter:
    """Writes a header at once, then a round at a time. Raises FileExistsError on a foreign folder.

    Of a line, `record` is made plain (see `plain`); `ready`, the larger part where tokens are new, is so already.
    """

    def __init__(self, path: Path, header: Record, ready: Record) -> None:
        refuse_foreign(path)
        path.mkdir(parents=True, exist_ok=True)
        (path / LINES).unlink(missing_ok=True)  # first, so that no old line ever points into new arrays
        # unbuffered: what write() was given outlives the process, however it ends
        self._arrays = (path / ARRAYS).open("wb", buffering=0)
        self._lines = (path / LINES).open("wb", buffering=0)
        # bytes of both files after the header and after each round
        self._ends = [(self._put({"schema_version": SCHEMA_VERSION} | header, ready), 0)]

    @property
    def rounds(self) -> int:
        return len(self._ends) - 1

    def append(self, record: Record, ready: Record, blob: bytes) -> None:
        lines_end, offset = self._ends[-1]
        _write_all(self._arrays, blob)  # before the line that points to it
        written = self._put(record, ready | {"offset": offset, "length": len(blob)})
        self._ends.append((lines_end + written, offset + len(blob)))

    def truncate(self, rounds: int) -> None:
        """Keeps the first `rounds` rounds; lines go first, so that none is ever left without its arrays."""
        if not 0 <= rounds <= self.rounds:
            raise ValueError(f"cannot keep {rounds} of {self.rounds} written rounds")
        del self._ends[rounds + 1 :]
        for file, end in zip((self._lines, self._arrays), self._ends[-1], strict=True):
            file.truncate(end)
            file.seek(end)

    def close(self) -> None:
        self._lines.close()
        self._arrays.close()

    def __del__(
        self,
    ) -> None:  # a run that is watched has no last line: files are closed with whoever wrote them
        for name in ("_lines", "_arrays"):
            if hasattr(self, name):
                getattr(self, name).close()

    def _put(self, record: Record, ready: Record) -> int:
        line = _JSON.encode(plain(record) | ready).encode("utf-8") + b"\n"
        _write_all(self._lines, line)
        return len(line)


def _write_all(file: RawIOBase, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]  # an unbuffered write may take less than it was given


def read_folder(path: Path) -> tuple[Record, list[tuple[Record, Arrays]], int]:
    """Header, rounds, and how many rounds at the end were not wholly there.

    Raises FileNotFoundError where there is no trace, ValueError if it is newer, without version, or damaged.
    """
    if not (path / LINES).is_file():
        raise FileNotFoundError(f"no trace in {path}: expected a folder with {LINES} and {ARRAYS} in it")
    lines = (path / LINES).read_bytes().split(b"\n")
    blobs = (path / ARRAYS).read_bytes() if (path / ARRAYS).is_file() else b""
    if not lines[-1]:
        lines.pop()
    records, lost = [], 0
    for number, line in enumerate(lines):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except ValueError as error:  # also bytes that are no UTF-8
            if number == 0 or number < len(lines) - 1:
                raise ValueError(f"{path / LINES}, line {number + 1}, is damaged ({error})") from None
            lost = 1
            break
        if number == 0:
            _check_version(record, path)
        records.append(record)
    if not records:
        raise ValueError(f"{path / LINES} is empty: the run was stopped before its first line was written")

    rounds: list[tuple[Record, Arrays]] = []
    for record in records[1:]:
        offset, length = record.pop("offset", None), record.pop("length", None)
        if not isinstance(offset, int) or not isinstance(length, int) or offset < 0 or length < 0:
            raise ValueError(f"{path / LINES}: round {len(rounds)} does not say where its arrays lie")
        if offset + length > len(blobs):
            break
        try:
            arrays = safetensors.load(blobs[offset : offset + length])
        except SafetensorError as error:
            raise ValueError(f"{path / ARRAYS}: round {len(rounds)} is damaged ({error})") from None
        rounds.append((record, arrays))
    return records[0], rounds, lost + len(records) - 1 - len(rounds)


def _check_version(header: Record, path: Path) -> None:
    version = header.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(f"{path} has no schema_version: it is no ddlab trace, or its first line was edited")
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"{path} was written with trace schema {version}, this ddlab reads up to {SCHEMA_VERSION}: "
            "update ddlab to open it (pip install -U ddlab)"
        )


def refuse_foreign(path: Path) -> None:
    """Raises FileExistsError unless `path` is free, an empty folder, or an older trace (to be replaced)."""
    if not path.exists():
        return
    if not path.is_dir():
        raise FileExistsError(f"{path} is a file; a trace is a folder: choose another name")
    foreign = sorted({entry.name for entry in path.iterdir()} - {LINES, ARRAYS})
    if foreign:
        raise FileExistsError(f"{path} holds other files ({', '.join(foreign[:3])}): choose an empty folder")


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> bytes:
    """What `safetensors.save` makes of the narrowed arrays, byte for byte."""
    narrow = {name: _narrow(np.asarray(array)) for name, array in arrays.items()}
    head, order = _head(tuple((name, array.dtype, array.shape) for name, array in narrow.items()))
    return head + b"".join([narrow[name].astype(dtype, copy=False).tobytes() for name, dtype in order])


@functools.lru_cache(maxsize=64)
def _head(kinds: tuple[tuple[str, np.dtype, tuple[int, ...]], ...]) -> tuple[bytes, list[tuple[str, np.dtype]]]:
    """What stands before the arrays in a blob, and their order and types in it.

    Names, types and shapes alone decide on it, and rounds repeat theirs: half the work of `safetensors.save`.
    """
    blob = safetensors.save({name: np.zeros(shape, dtype) for name, dtype, shape in kinds})
    end = 8 + int.from_bytes(blob[:8], "little")
    places = {name: place["data_offsets"] for name, place in json.loads(blob[8:end]).items()}
    order = sorted(kinds, key=lambda kind: places[kind[0]])
    return blob[:end], [(name, dtype.newbyteorder("<")) for name, dtype, _ in order]


_INTEGERS = [(np.dtype(f"i{size}"), -(1 << 8 * size - 1), (1 << 8 * size - 1) - 1) for size in (1, 2, 4, 8)]


def _narrow(array: np.ndarray) -> np.ndarray:
    """Integers in the smallest type that holds them: most of a round is small integers."""
    if array.dtype.kind != "i" or array.size == 0:
        return np.ascontiguousarray(array)
    low, high = int(array.min()), int(array.max())
    return np.ascontiguousarray(array, next(d for d, lowest, most in _INTEGERS if lowest <= low and high <= most))


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: tuples and sets as lists, numpy scalars as numbers, others by name."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else str(float(value))  # JSON has no inf and no nan
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
