"""The files of a prompt set: a shipped set's name, path, URI or glob in; every file's rows, one after another, out.

JSON lines (.jsonl, .jsonl.gz) and Parquet, on disk or wherever fsspec reaches (s3://). A file that cannot be read ends
the run with one line; a row that cannot be read is for its reader to reject.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from drafters.remote import first_line, open_filesystem, patiently
from pipelines.data import SHIPPED, shipped
from pipelines.prompt_rows import COLUMNS, FORMS, BadRowError, in_words

UTF8_BOM = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
GZIP_MARK, PARQUET_MARK = b"\x1f\x8b", b"PAR1"
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
BATCH_ROWS = 1024  # of Parquet, turned into Python objects at a time

Fields = dict[str, Any]


class PromptError(ValueError):
    """A prompt set that cannot be used at all; the message is one line with cause and mend."""


@dataclass(frozen=True)
class PromptFile:
    """One file, read whole."""

    name: str  # as messages and rejects name it
    label: str  # before the ids of rows that have none: its stem; "" if it is the set's only file
    data: bytes  # unpacked, without a byte order mark

    @property
    def is_parquet(self) -> bool:
        return _is_parquet(self.name)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def rows(self) -> Iterator[tuple[int, Fields | BadRowError]]:
        """(line, or row of Parquet, from 1; its fields or why it has none). Raises PromptError."""
        return _parquet_rows(self.name, self.data) if self.is_parquet else _json_rows(self.data)

    def place(self, number: int) -> str:
        """The id of a row that brings none."""
        return f"{self.label}-line-{number:06d}" if self.label else f"line-{number:06d}"


def find_prompts(spec: str) -> str:
    """The path, URI or glob of a prompt set that is given by a shipped set's name, or by one of these."""
    return str(shipped(spec)) if spec in SHIPPED else spec


def prompt_files(spec: str) -> Iterator[PromptFile]:
    """The files of a set, in the order of their names, one in memory at a time. Raises PromptError."""
    names = _names(spec)
    labels = _labels(names)
    for name in names:
        yield PromptFile(name if len(names) > 1 else _shown(spec, name), labels[name], _read(name, spec))


def set_sha256(files: list[tuple[str, str]]) -> str:
    """One checksum over the (label, sha256) of a set's files; that of the only file is its own."""
    if len(files) == 1:
        return files[0][1]
    return hashlib.sha256("".join(f"{sha256}  {label}\n" for label, sha256 in files).encode()).hexdigest()


# -- which files ------------------------------------------------------------------------------------------------------


def _names(spec: str) -> list[str]:
    """Paths or URIs, sorted. A name that exists is taken as it is, whatever characters it has."""
    path = find_prompts(spec)
    if not glob.has_magic(path):
        return [path]
    try:
        if "://" not in path:
            local = os.path.expanduser(path)
            found = [local] if os.path.exists(local) else glob.glob(local, recursive=True)
            names = [name for name in found if not os.path.isdir(name)]
            if found and not names:
                raise IsADirectoryError(path)
        else:
            fs, root = open_filesystem(path)
            if patiently(lambda: fs.exists(root)):
                return [path]
            entries = patiently(lambda: fs.glob(root, detail=True)).values()
            names = [fs.unstrip_protocol(entry["name"]) for entry in entries if entry["type"] != "directory"]
    except Exception as error:
        raise _unreadable(spec, error) from error
    if not names:
        raise PromptError(f"prompts {spec} match no file; check the pattern, or give a file")
    if len(names) > 1:
        for name in names:
            if not name.lower().endswith(SUFFIXES):
                raise PromptError(
                    f"prompts {spec} match {name}, which is none of {', '.join(SUFFIXES)}; give a narrower pattern"
                )
    return sorted(names)


def _shown(spec: str, name: str) -> str:
    """What a set's only file is called: as it was asked for, unless a pattern was."""
    return name if glob.has_magic(spec) else spec


def _labels(names: list[str]) -> dict[str, str]:
    """A short name for each file: its stem or, where several share one, its path below their common folder."""
    if len(names) == 1:
        return {names[0]: ""}
    stems = {name: _stem(name) for name in names}
    shared = {stem for stem, count in Counter(stems.values()).items() if count > 1}
    common = os.path.commonprefix(names).rfind("/") + 1  # noqa: RUF071 - characters are cut back to a folder here
    return {name: name[common:] if stem in shared else stem for name, stem in stems.items()}


def _stem(name: str) -> str:
    return re.sub(r"\.(jsonl|jsonl\.gz|parquet)$", "", PurePosixPath(name).name, flags=re.IGNORECASE)


def _is_parquet(name: str) -> bool:
    return name.lower().endswith(".parquet")


# -- what is in them --------------------------------------------------------------------------------------------------


def _read(name: str, spec: str) -> bytes:
    """The file's bytes, unpacked if its name ends in .gz."""
    shown = spec if spec in SHIPPED else name
    try:
        fs, path = open_filesystem(name)
        data = bytes(patiently(lambda: fs.cat_file(path)))
        if name.lower().endswith(".gz"):
            data = gzip.decompress(data)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise PromptError(f"prompts {shown}: the gzip data is damaged; write the file again") from None
    except Exception as error:  # every remote file system has its own kinds
        raise _unreadable(shown, error) from error
    if _is_parquet(name):
        return data
    for mark, what in ((GZIP_MARK, ".jsonl.gz"), (PARQUET_MARK, ".parquet")):
        if data.startswith(mark):
            raise PromptError(f"prompts {shown} hold no JSON lines, but what belongs into a {what} file; name it so")
    if data.startswith(UTF16_MARKS):
        raise PromptError(f"prompts {shown} are UTF-16; save the file as UTF-8")
    return data.removeprefix(UTF8_BOM)


def _unreadable(shown: str, error: Exception) -> PromptError:
    if isinstance(error, FileNotFoundError):
        names = ", ".join(SHIPPED)
        return PromptError(f"prompts {shown} do not exist; give a file, a URI, or a shipped set ({names})")
    if isinstance(error, IsADirectoryError):
        return PromptError(f"prompts {shown} is a folder; give a file, or a pattern: '{shown.rstrip('/')}/*.jsonl'")
    return PromptError(f"prompts {shown} cannot be read ({first_line(error)}); check the path and its permissions")


def _json_rows(data: bytes) -> Iterator[tuple[int, Fields | BadRowError]]:
    """The non-blank lines; a carriage return before the line feed is dropped."""
    for number, line in enumerate(data.split(b"\n"), start=1):
        if stripped := line.strip():
            try:
                yield number, _parse(stripped)
            except BadRowError as error:
                yield number, error


def _parse(line: bytes) -> Fields:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRowError("not UTF-8", f"not UTF-8 (byte {error.start} of the line)") from None
    except json.JSONDecodeError as error:
        raise BadRowError("not JSON", f"not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError):
        raise BadRowError("not JSON", "not JSON that can be read") from None
    if not isinstance(row, dict):
        raise BadRowError("not an object", f"the line is {in_words(row)}; give a JSON object")
    return row


def _parquet_rows(name: str, data: bytes) -> Iterator[tuple[int, Fields | BadRowError]]:
    number = 0
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        columns = [column for column in file.schema_arrow.names if column in COLUMNS]
        if not set(columns) & set(FORMS):
            has = ", ".join(file.schema_arrow.names[:5]) or "no columns"
            raise PromptError(f"prompts {name} have none of the columns {', '.join(FORMS)} (but {has}); add one")
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
            for fields in _rows_of(batch):
                number += 1
                yield number, fields
    except (pa.ArrowException, OSError) as error:
        raise PromptError(
            f"prompts {name}: the Parquet data is damaged ({first_line(error)[:120]}); write the file again"
        ) from error


def _rows_of(batch: pa.RecordBatch) -> list[Fields | BadRowError]:
    """The batch as Python objects. Arrow does not check the text that a file brings, so a row may fail."""
    try:
        return list(batch.to_pylist())
    except (ValueError, OverflowError) as error:
        if batch.num_rows > 1:
            return [fields for row in range(batch.num_rows) for fields in _rows_of(batch.slice(row, 1))]
        if isinstance(error, UnicodeDecodeError):
            return [BadRowError("not UTF-8", "a column's text is not UTF-8")]
        return [BadRowError("wrong type", "a column holds a value that is no text")]
