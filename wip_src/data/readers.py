# %% [markdown]
# # One reader for each kind of file
#
# > JSON lines, CSV, Parquet, text, HTML and web archives as numbered rows; a file can be taken up again at any row.
#
# Six formats, one contract: a generator of numbered rows, each a dict with a text in it, that says what it refused and goes on. Numbers make it possible to stop in the middle of a file and to go on there tomorrow.
#
# Our own claims, tested here: starting after row k gives exactly the rows after k, in every format, and a damaged file gives all that stands before the damage.

# %%
#| default_exp data.readers

# %%
#| export
from __future__ import annotations

import bisect
import codecs
import csv
import functools
import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scalelab.data import storage
from scalelab.data.bytestream import (
    EXPAND_LIMIT,
    MAX_LINE,
    SURROGATE,
    BrokenFile,
    as_utf8,
    file_name,
    parse_objects,
    raw_pieces,
    read_pieces,
    split_lines,
)
from scalelab.data.encodings import Decoded, decode
from scalelab.data.extract import Extract, decode_page
from scalelab.data.files import Reject, Rejects, kind_of
from scalelab.data.warc import Page, read_warc

# %%
#| hide
import gzip
import json
import os
import shutil

import matplotlib.pyplot as plt
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from scalelab.core.plotting import style

style()
work = Path(tempfile.mkdtemp())  # every file of this chapter lives here
os.chdir(work)

# %% [markdown]
# ## A file that is being read
# A small object carries what every reader needs: the path for messages, the short label for ids, and where complaints go. What was said on an earlier reading of the same file is not said again.


# %%
#| export
@dataclass
class SourceFile:
    "A file being read: its label (shortest unique name) and where its rejects, notes and warnings go."
    path: str | Path
    label: str
    rejects: Rejects
    folder: str | None = None  # the first folder below the input folder: a domain when the rows name none
    skip: int = 0  # rows up to this number were read before: they are passed over, and nothing is said of them again
    expand_limit: int = EXPAND_LIMIT
    extract: Extract | None = field(default_factory=Extract)  # None: pages are given as HTML
    refused: Counter = field(default_factory=Counter)
    broken: bool = False

    @functools.cached_property
    def name(self) -> str:
        "The path for messages; secrets of an address are masked."
        return storage.mask(str(self.path))

    @functools.cached_property
    def suffix(self) -> str:
        "Of the file's name, without .gz or .zst."
        return kind_of(self.path)[1]

    def reject(self, line: int | None, reason: str, snippet: Any = "", id: str | None = None) -> None:
        "Count a refusal and keep its evidence."
        if line and line <= self.skip:
            return
        self.refused[reason] += 1
        text = snippet.decode("utf-8", "replace") if isinstance(snippet, bytes) else str(snippet)
        self.rejects.add(Reject(self.name, line, id, "read", reason, text[:160].encode("utf-8", "replace").decode()))

    def note(self, what: str, line: int | None = None, id: str | None = None) -> None:
        "Count something mended, in a row or (at the beginning) in the whole file."
        if (line or 0) > self.skip or not self.skip:
            self.rejects.note(self.name, line, id, what)

    def lines(self) -> Iterator[tuple[int, bytes | None]]:
        "Numbered lines in UTF-8."
        return split_lines(as_utf8(read_pieces(self.path, self.remark, self.expand_limit), self.note), self.note)

    def warn(self, message: str) -> None:
        "Say one line about the whole file."
        self.rejects.warnings.append(f"{self.name}: {message}")

    def remark(self, message: str) -> None:
        "Say one line at the beginning of the file, unless it was said before."
        if not self.skip:
            self.warn(message)

# %%
log = Rejects()
file = SourceFile(Path("a.jsonl"), "a.jsonl", log)
file.reject(3, "invalid_utf8", b"\xff" * 999)
file.note("bom")
file.warn("breaks off")
assert log.rows[0].file == "a.jsonl" and len(log.rows[0].snippet) == 160 and file.refused == {"invalid_utf8": 1}
assert log.notes == {"bom": 1} and log.warnings == ["a.jsonl: breaks off"]

# %% [markdown]
# ## Lines
# **JSON lines.** Each line costs itself only. Objects that stood before the damage on the same line are kept.

# %%
#| export
def _read_jsonl(file: SourceFile) -> Iterator[tuple[int, dict[str, Any]]]:
    "Numbered JSON objects of a JSONL file."
    for number, raw in file.lines():
        if number <= file.skip:
            continue
        if raw is None:
            file.reject(number, "line_too_long")
            continue
        if raw.startswith(codecs.BOM_UTF8):  # files with marks, joined by cat
            raw = raw[3:]
        if not raw or raw.isspace():
            continue
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            file.reject(number, "invalid_utf8", raw)
            continue
        raw = raw[:400]  # enough for a snippet: a long line is not held twice
        try:
            for value in parse_objects(text):
                if isinstance(value, dict):
                    yield number, value
                else:
                    file.reject(number, "not_an_object", raw)
        except ValueError:
            file.reject(number, "invalid_json", raw)

# %% [markdown]
# **CSV.** Everything is text in a CSV file and stays text: `0012` keeps its zeros, `NA` is a word. A row with too many or too few fields is refused with its line number. When the header has no column `text`
# but would have one if cut at `;` or a tab, that was the separator.

# %%
#| export
def _csv_delimiter(header: str, file: SourceFile) -> str:
    "The separator that gives the header a column `text`; raises BrokenFile when none does."
    for delimiter in ",;\t|":
        if "text" in next(csv.reader([header], delimiter=delimiter), []):
            if delimiter != "," and file.suffix != ".tsv":
                file.note("csv_delimiter_not_comma", 1)
            return delimiter
    raise BrokenFile("missing_text", f"no column `text`; columns present: {', '.join(next(csv.reader([header]), []))}")


def _csv_lines(file: SourceFile) -> Iterator[str]:
    "Physical lines as text; a byte that is not UTF-8 becomes a surrogate, by which the row is found later."
    for number, raw in file.lines():
        if raw is None:
            file.reject(number, "line_too_long")
        yield (raw or b"").decode("utf-8", "surrogateescape").removesuffix("\r") + "\n"

# %%
#| export
def _read_csv(file: SourceFile) -> Iterator[tuple[int, dict[str, Any]]]:
    "Numbered rows of a CSV file as dicts of text."
    lines = _csv_lines(file)
    header = next(lines, "")
    if not header.strip():
        return
    csv.field_size_limit(MAX_LINE)  # the module's limit of 128 KiB is less than a long document
    try:
        delimiter = _csv_delimiter(header.strip("\n"), file)
        rows = csv.reader(itertools.chain([header], lines), delimiter=delimiter, strict=True)
        columns = next(rows)
    except csv.Error as error:  # random bytes that are called .csv
        raise BrokenFile("invalid_csv", f"the first line is no CSV header ({error})") from None
    while True:
        start = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            file.reject(start, "invalid_csv", error)
            continue
        if not row or start <= file.skip:
            continue
        if len(row) != len(columns):
            file.reject(start, "ragged_row", f"{len(row)} fields, {len(columns)} expected: {delimiter.join(row)}")
        elif SURROGATE.search("".join(row)):
            file.reject(start, "invalid_utf8", delimiter.join(row))
        else:
            yield start, dict(zip(columns, row))

# %%
def rows(reader, name: str, data: bytes | str, skip: int = 0, **options) -> tuple[list, Rejects]:
    "Write a file and read it with one reader: the rows, and what was refused."
    Path(name).write_bytes(data.encode() if isinstance(data, str) else data)
    log = Rejects()
    return list(reader(SourceFile(name, name, log, skip=skip, **options))), log


got, log = rows(_read_jsonl, "a.jsonl", '{"a": 1}\n[2]\n{"b": \n\n{"c": 3} {"d": 4}\n')
assert got == [(1, {"a": 1}), (5, {"c": 3}), (5, {"d": 4})] and [(r.line, r.reason) for r in log.rows] == [
    (2, "not_an_object"),
    (3, "invalid_json"),
]
got, log = rows(_read_csv, "a.csv", 'id;text\n1;"two\nlines"\n2\n3;last\n')
assert (
    got == [(2, {"id": "1", "text": "two\nlines"}), (5, {"id": "3", "text": "last"})]
    and [r.line for r in log.rows] == [4]
    and log.notes["csv_delimiter_not_comma"]
)
got, log = rows(_read_csv, "gbk.csv", "id,text\n1,今天天气很好，我们去看看。\n2,这里的人都不知道。\n".encode("gbk"))
assert got[0] == (2, {"id": "1", "text": "今天天气很好，我们去看看。"}) and log.notes == {"decoded_gb18030": 1}

# %% [markdown]
# ## Tables
# **Parquet** comes in row groups, of which pyarrow gives us 256 rows at a time; groups that were read before are not opened. Behind an address the file is first copied to a temporary one, because its index stands at the end.

# %%
#| export
def _read_parquet(file: SourceFile) -> Iterator[tuple[int, dict[str, Any]]]:
    "Numbered rows of a Parquet file; an object behind an address is copied first, because its index stands at the end."
    if not storage.is_url(file.path):
        yield from _parquet_rows(file, Path(file.path))
        return
    with tempfile.TemporaryDirectory() as folder:
        storage.get(file.path, Path(folder, "copy.parquet"))
        yield from _parquet_rows(file, Path(folder, "copy.parquet"))


def _parquet_rows(file: SourceFile, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    "Numbered rows, a few row-group slices in memory at a time; row groups that were read before are not opened."
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        with open(path, "rb") as raw:  # a file that begins right and has no footer was cut off
            reason = "truncated_stream" if raw.read(4) == b"PAR1" else "corrupt_parquet"
        raise BrokenFile(
            reason, f"not a readable Parquet file ({str(error).split(': ')[-1].split('. ')[0]})"
        ) from None
    schema = table.schema_arrow
    if "text" not in schema.names:
        raise BrokenFile("missing_text", f"no column `text`; columns present: {', '.join(schema.names)}")
    ends = list(itertools.accumulate(table.metadata.row_group(g).num_rows for g in range(table.num_row_groups)))
    first = bisect.bisect_right(ends, file.skip)
    number = ends[first - 1] if first else 0
    try:
        for batch in (
            table.iter_batches(batch_size=256, row_groups=range(first, len(ends))) if first < len(ends) else ()
        ):
            if number + len(batch) <= file.skip:
                number += len(batch)
                continue
            try:
                rows = batch.to_pylist()
            except UnicodeDecodeError:  # Arrow does not check that a string is UTF-8: find the rows that are not
                rows = [_parquet_row(batch.slice(i, 1)) for i in range(len(batch))]
            for row in rows:
                number += 1
                if row is None:
                    file.reject(number, "invalid_utf8")
                elif number > file.skip:
                    yield number, row
    except (pa.ArrowException, OSError) as error:
        broken = BrokenFile("corrupt_parquet", f"damaged after row {number} ({error})")
        broken.line = number + 1
        raise broken from None


def _parquet_row(batch) -> dict[str, Any] | None:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError:
        return None

# %%
pq.write_table(pa.table({"text": [f"row {i}" for i in range(1000)]}), "a.parquet", row_group_size=300)
for skip in (0, 1, 299, 300, 650, 999, 1000):
    got = list(_read_parquet(SourceFile(Path("a.parquet"), "a", Rejects(), skip=skip)))
    assert got == [(i + 1, {"text": f"row {i}"}) for i in range(skip, 1000)], skip

# %% [markdown]
# ## Whole files
# Text and source files are one document each, and the only kind that has to fit into memory. Its encoding is decided by all of its bytes.

# %%
#| export
def _whole(file: SourceFile, limit: int) -> bytes:
    "All bytes of a file, decompressed."
    parts, size = [], 0
    for piece in read_pieces(file.path, file.remark, file.expand_limit):
        parts.append(piece)
        size += len(piece)
        if size > limit:
            raise BrokenFile(
                "file_too_large", f"larger than {limit:,} bytes, which is no document: split it or make it JSONL"
            )
    return b"".join(parts)


def _text_of(file: SourceFile, row: int, found: Decoded | None) -> dict[str, Any] | None:
    "The text as the beginning of a row, notes on its encoding made; None, and refused, when the encoding is unknown."
    if found is None:
        file.reject(
            row,
            "unknown_encoding",
            "the bytes fit no encoding clearly; convert them to UTF-8 (iconv -f ... -t UTF-8)",
        )
        return None
    if found.encoding.name != "utf-8":
        file.note(f"decoded_{found.encoding.name.replace('-', '_')}", row)
    if not found.damaged:
        return {"text": found.text}
    file.note("bad_bytes_replaced", row)
    return {"text": found.text, "flags": ["bad_bytes_replaced"]}


def _read_text(file: SourceFile) -> Iterator[tuple[int, dict[str, Any]]]:
    "A text or source file as one document, which is row 1, line ends as line feeds."
    if not file.skip and (raw := _whole(file, MAX_LINE)):
        if values := _text_of(file, 1, decode(raw)):
            yield 1, values | {"id": file.label, "text": values["text"].replace("\r\n", "\n").replace("\r", "\n")}

# %%
zh = "数据清洗的第一步是看，先读一百条，再写规则。"
assert (
    rows(_read_text, "a.txt", "one\r\ntwo")[0] == [(1, {"text": "one\ntwo", "id": "a.txt"})]
    and rows(_read_text, "a.txt", "x", skip=1)[0] == []
)
got, log = rows(_read_text, "b.txt", zh.encode("gbk"))
assert got[0][1]["text"] == zh and log.notes == {"decoded_gb18030": 1}
got, log = rows(_read_text, "c.txt", (zh * 40).encode().replace("第".encode(), b"\xff", 1))
assert got[0][1]["flags"] == ["bad_bytes_replaced"] and got[0][1]["text"].count("\ufffd") == 1
assert rows(_read_text, "d.txt", "天气".encode("gbk"))[1].counts == {"unknown_encoding": 1}

# %% [markdown]
# ## Pages
# HTML files and web archives give main text, by the stage of the chapter before. A row of an archive is a record: its address, the date of the crawl and the record's id are kept, and a refusal tells the offset.

# %%
#| export
def _page(
    file: SourceFile, row: int, found: Decoded | None, html: bool, facts: dict[str, Any]
) -> Iterator[tuple[int, dict[str, Any]]]:
    "A page's main text as a row, or nothing and a refusal."
    values = _text_of(file, row, found)
    if values is None:
        return
    values |= {k: v for k, v in facts.items() if v}
    if html and file.extract:
        outcome = file.extract.page(values)
        if outcome.document is None:
            file.reject(row, outcome.reason, f"{facts.get('url', '')} {outcome.note}".strip())
            return
        values = outcome.document
    yield row, values


def _read_html(file: SourceFile) -> Iterator[tuple[int, dict[str, Any]]]:
    "An HTML file as one document, which is row 1."
    if not file.skip and (raw := _whole(file, file.extract.max_bytes if file.extract else MAX_LINE)):
        yield from _page(file, 1, decode_page(raw), True, {"id": file.label})


def _read_warc(file: SourceFile) -> Iterator[tuple[int, dict[str, Any]]]:
    "The pages of a WARC or ARC file; a row is a record."
    zstd = file_name(file.path).lower().endswith(".zst")
    pieces = read_pieces(file.path, file.remark, file.expand_limit) if zstd else raw_pieces(file.path)
    limit = file.extract.max_bytes if file.extract else MAX_LINE
    for record in read_warc(pieces, file.skip, limit, file.expand_limit):
        row = record.number
        if isinstance(record, Page):
            date = (
                record.date if "-" in record.date else "-".join((record.date[:4], record.date[4:6], record.date[6:8]))
            )
            facts = {"id": record.record_id.strip("<>"), "url": record.url, "date": date.strip("-")}
            found = decode_page(record.body, record.charset) if record.html else decode(record.body, record.charset)
            yield from _page(file, row, found, record.html, facts) if row > file.skip else ()
        elif record.in_order:
            file.note(record.reason, row)
        else:
            file.reject(row, record.reason, f"at byte {record.offset}: {record.detail}")

# %%
body = (
    "<html><head><title>雨</title></head><body><p>"
    + "雨下了一整天，我们在屋里看书，谁也没有出去。" * 3
    + "</p></body></html>"
)
got, log = rows(_read_html, "a.html", body)
assert got == [(1, {"text": "雨下了一整天，我们在屋里看书，谁也没有出去。" * 3, "id": "a.html", "title": "雨"})]
assert rows(_read_html, "a.html", body, extract=None)[0][0][1]["text"] == body and rows(
    _read_html, "e.html", "<html></html>"
)[1].counts == {"no_main_text": 1}


def record(number: int, raw: bytes, status: int = 200) -> bytes:
    http = f"HTTP/1.1 {status} OK\r\nContent-Type: text/html; charset=gbk\r\n\r\n".encode() + raw
    return (
        (
            f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://a/{number}\r\n"
            f"WARC-Date: 2020-02-03T04:05:06Z\r\nWARC-Record-ID: <urn:{number}>\r\n"
            f"Content-Length: {len(http)}\r\n\r\n"
        ).encode()
        + http
        + b"\r\n\r\n"
    )


members = [gzip.compress(record(i, body.encode("gbk"), 404 if i == 2 else 200)) for i in range(1, 6)]
archive = b"".join(members[:3]) + members[3][:-30] + members[4]
got, log = rows(_read_warc, "a.warc.gz", archive)
assert [(row, v["id"], v["url"], v["title"], v["date"][:4]) for row, v in got] == [
    (i, f"urn:{i}", f"http://a/{i}", "雨", "2020") for i in (1, 3, 5)
]
print(dict(log.notes), [(r.line, r.reason, r.snippet) for r in log.rows])
got, log = rows(_read_warc, "a.warc.gz", archive, skip=3)
assert [row for row, _ in got] == [5] and [r.line for r in log.rows] == [4] and "http_error" not in log.notes

# %% [markdown]
# ## One door
# A file that breaks ends with one row in the list of refusals and one line of warning, and never with an exception. A store that does not answer is no broken file: that error goes to the caller, who may try again later.

# %%
#| export
_READERS = {
    "jsonl": _read_jsonl,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "text": _read_text,
    "html": _read_html,
    "warc": _read_warc,
}


def read_rows(file: SourceFile) -> Iterator[tuple[int, dict[str, Any]]]:
    "The rows of one file; a file that breaks ends with a reject row and a warning instead of an exception."
    try:
        yield from _READERS[kind_of(file.path)[0]](file)
    except BrokenFile as error:
        file.broken = True
        file.reject(error.line, error.reason, error)
        file.warn(
            f"{error}; " + (f"what stands before line {error.line} is kept" if error.line else "the file is left out")
        )
    except OSError as error:
        file.broken = True
        file.reject(None, "unreadable_file", error.strerror)
        file.warn(f"can't be read ({error.strerror}); the file is left out")
    else:
        if not file.skip and (n := file.refused["invalid_utf8"]):
            file.warn(f"lines that are not UTF-8: {n}; no other encoding fits enough of them")

# %% [markdown]
# The same five rows in every format, read whole and from every row on, and then cut after every tenth of their bytes:

# %%
texts = [f"{i} {zh}" for i in range(5)]
formats = {
    "r.jsonl": "".join(json.dumps({"text": t}) + "\n" for t in texts).encode(),
    "r.csv": ("text\n" + "\n".join(texts) + "\n").encode(),
    "r.jsonl.gz": gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in texts).encode()),
    "r.jsonl.zst": zstandard.compress("".join(json.dumps({"text": t}) + "\n" for t in texts).encode()),
    "r.warc": b"".join(
        record(i, f"<html><body><p>{t * 3}</p></body></html>".encode("gbk")) for i, t in enumerate(texts)
    ),
}
pq.write_table(pa.table({"text": texts}), "r.parquet", row_group_size=2)
formats["r.parquet"] = Path("r.parquet").read_bytes()
parts, back = [k / 10 for k in range(1, 11)], {}
for name, data in formats.items():
    whole, _ = rows(read_rows, name, data)
    assert len(whole) == 5
    for row, _ in whole:
        assert rows(read_rows, name, data, skip=row)[0] == [(r, v) for r, v in whole if r > row], name
    back[name] = []
    for part in parts:
        got, log = rows(read_rows, name, data[: round(part * len(data))])
        whole_rows = (
            got[:-1] if name == "r.csv" and got != whole[: len(got)] else got
        )  # the last line of a cut CSV file looks like any other
        assert whole_rows == whole[: len(whole_rows)], (name, part)
        assert (
            part == 1
            or log.total
            or log.warnings
            or data[: round(part * len(data))].endswith(b"\n")
            or name == "r.csv"
        ), (name, part)
        back[name].append(len(whole_rows))

# %%
fig, ax = plt.subplots(figsize=(5.5, 2.8))
for k, (name, counts) in enumerate(back.items()):
    ax.plot(parts, [n + 0.04 * k for n in counts], marker=".", label=name)
ax.set(xlabel="part of the file's bytes that arrived", ylabel="rows that come back, of 5")
ax.legend()
plt.show()

# %% [markdown]
# Uncompressed files give back what arrived. Five short rows are one block of gzip or zstd, and a Parquet file without its end is nothing at all. Two losses can't be told: JSON lines that were cut exactly at the end of a line, and CSV that was cut anywhere, because its last line looks
# like any other. That is a reason to keep text compressed: then every cut is seen.

# %%
#| hide
os.chdir("/")
shutil.rmtree(work)

# %% [markdown]
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | starting after row k gives the rows after k (ours) | holds | six files in five formats, every row |
# | a damaged file gives what stands before the damage (ours) | holds in part | cut after every tenth of the bytes: a prefix of the rows, and a refusal or warning wherever the cut can be seen; Parquet without its footer can't be read |
#
# What this does not cover: Parquet files behind an address are copied to the disk first.
