# %% [markdown]
# # Reading documents that were never meant to be read
#
# > Texts in, plain dicts out: every good document of a damaged file survives, and every bad line is named, counted and kept as evidence.
#
# Training data arrives as other people left it: cut downloads, byte order marks, a number where text should be, the same id twice. This chapter builds the reader that the
# whole house starts from. It has two duties: nothing good is lost because of what is bad beside it, and nothing bad passes in silence.
#
# The first article (A-1TB) claims that a terabyte of Chinese can be processed with memory that stays flat. Speed depends on the machine, flatness depends on us, so that is
# the part that we test here: peak memory against file size.

# %%
#| default_exp data.documents

# %%
#| export
from __future__ import annotations

import gzip
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard

from scalelab.core.config import UsageError, fsync_dir
from scalelab.data.bytestream import EXPAND_LIMIT, file_name, json_line
from scalelab.data.extract import Extract
from scalelab.data.facts import detect_language, make_document  # noqa: F401  (one door to documents)
from scalelab.data.files import (
    CODE_SUFFIXES,
    PROSE_SUFFIXES,
    Reject,
    Rejects,
    find_files,
    folder_domain,
    labels,
)  # noqa: F401
from scalelab.data.readers import read_rows
from scalelab.data.stdlib import stdlib_documents  # noqa: F401
from scalelab.data.tables import SourceFile

# %%
#| hide
import json
import random
import shutil
import sys
import tracemalloc

import matplotlib.pyplot as plt
import pyarrow as pa
import pyarrow.parquet as pq

from scalelab.core.plotting import style

style()
work = Path(tempfile.mkdtemp())  # every file of this chapter lives here
os.chdir(work)

# %% [markdown]
# ## What one bad byte costs
# Before we write anything: is a special reader needed at all? Everybody has a JSON loop, and pandas and pyarrow read JSON lines too. We take 1,000 good documents, damage *one
# line* in one of five usual ways, and count how many of the remaining 999 come back.

# %%
lines = [json.dumps({"id": f"d{i}", "text": f"第{i}行 plain text"}, ensure_ascii=False).encode() for i in range(1000)]
damage = {
    "byte order mark": (0, b"\xef\xbb\xbf" + lines[0]),
    "one invalid byte": (500, lines[500].replace(b"plain", b"pl\xffin")),
    "number as text": (500, b'{"id": "d500", "text": 7}'),
    "list, not object": (500, b'["d500", "text"]'),
    "cut line": (500, lines[500][:20]),
}
for name, (at, bad) in damage.items():
    Path(name + ".jsonl").write_bytes(b"\n".join(lines[:at] + [bad] + lines[at + 1:]) + b"\n")

# %%
def json_loop(path):
    "The loop everybody writes."
    kept = []
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                kept.append(json.loads(line)["text"])
    except (ValueError, TypeError):
        pass  # the error ends the loop: what was read before it is all there is
    return kept


def with_pandas(path):
    import pandas as pd
    try:
        return [text for text in pd.read_json(path, lines=True)["text"] if isinstance(text, str)]
    except (ValueError, AttributeError):
        return []


def with_pyarrow(path):
    import pyarrow as pa
    import pyarrow.json as pj
    try:
        return [text for text in pj.read_json(path)["text"].to_pylist() if isinstance(text, str)]
    except (pa.ArrowInvalid, UnicodeDecodeError, KeyError):
        return []

# %%
others = {"json loop": json_loop, "pandas": with_pandas, "pyarrow": with_pyarrow}
kept = {name: [len(read(kind + ".jsonl")) for kind in damage] for name, read in others.items()}
for name, counts in kept.items():
    print(f"{name:10}", dict(zip(damage, counts)))

# %% [markdown]
# A byte order mark or a stray byte is enough to lose half of a file or all of it. And the full 1,000 of the loop at "number as text" is no comfort: it handed on the number 7 as a text. So we write our own,
# and the rule is simple: cut bytes at `\n` and nowhere else, then decode and parse each line *alone*. The chapters before this one made the parts: `find_files`, a reader for each format, `make_document`. Here they become one reader.
#
# ## One id, one document
# Ids of other people collide: two files both count from zero, an export was appended twice. A `dict` keyed by id would overwrite in silence. We keep two 64-bit hashes a document, of its id and of its text, in an
# open-addressing table of 16 bytes a slot: 21 to 43 bytes a document, as it is between three and six eighths full. A dict of the same hashes takes more, printed below. This is the one thing that grows with the corpus, to at most 4.3 GB for a hundred million documents.

# %%
#| export
class _Seen:
    "Hashes of ids and texts met so far, in a table that doubles when it is three quarters full."

    def __init__(self, size: int = 1 << 12):
        self.table, self.n = np.zeros((size, 2), np.uint64), 0

    def _slot(self, key: int) -> int:
        mask, at = len(self.table) - 1, key & (len(self.table) - 1)
        while (found := int(self.table[at, 0])) and found != key:
            at = (at + 1) & mask
        return at

    def add(self, id: str, text: str) -> str:
        '"new"; "same" when this id came with this text before; "clash" when it came with another text.'
        key = xxhash.xxh3_64_intdigest(id.encode("utf-8", "surrogatepass")) or 1
        value = xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))
        at = self._slot(key)
        if self.table[at, 0]:
            return "same" if int(self.table[at, 1]) == value else "clash"
        self.table[at] = key, value
        self.n += 1
        if 4 * self.n > 3 * len(self.table):
            old, self.table = self.table, np.zeros((2 * len(self.table), 2), np.uint64)
            for row in old[old[:, 0] > 0]:
                self.table[self._slot(int(row[0]))] = row
        return "new"

# %%
seen = _Seen(4)
assert [seen.add(str(i), "t") for i in range(5000)] == ["new"] * 5000
assert [seen.add(str(i), "t") for i in range(5000)] == ["same"] * 5000
assert seen.add("7", "other") == "clash" and seen.n == 5000
pairs = {int(k): int(v) for k, v in seen.table if k}
as_dict = sys.getsizeof(pairs) + sum(sys.getsizeof(k) + sys.getsizeof(v) for k, v in pairs.items())
print(f"{seen.table.nbytes / seen.n:.0f} bytes a document at {seen.n:,}; as a dict {as_dict / seen.n:.0f}")
assert as_dict > 3 * seen.table.nbytes

# %%
#| export
def _settle_id(document: dict[str, Any], file: SourceFile, line: int | None, seen: _Seen) -> bool:
    "Make the id of a document unique; False when the same id came with the same text before."
    id, k = document["id"], 1
    while (state := seen.add(document["id"], document["text"])) == "clash":
        base = id if id.startswith(file.label) else f"{file.label}:{id}"
        document["id"], k = base if k == 1 and base != id else f"{base}~{k}", k + 1
    if state == "same":
        file.reject(line, "duplicate_document", document["text"], id)
        return False
    if document["id"] != id:
        file.note("duplicate_id", line, document["id"])
    return True

# %%
log, seen = Rejects(), _Seen()
file = SourceFile(Path("b.jsonl"), "b.jsonl", log)
for given, text in (("7", "one"), ("7", "two"), ("7", "one"), ("b.jsonl:7", "three")):
    document = {"id": given, "text": text}
    print(given, text, "->", _settle_id(document, file, 1, seen), document["id"])
assert log.counts == {"duplicate_document": 1} and log.notes["duplicate_id"] == 2

# %% [markdown]
# ## One file
# For those who share out files among workers and want to go on inside a file after a stop: `skip` is the row that was reached.

# %%
#| export
def _say_if_empty(file: SourceFile, kept: int) -> None:
    if not kept and not file.broken and not file.skip:
        why = ", ".join(f"{n} {reason}" for reason, n in file.refused.most_common(3))
        file.warn(f"no documents ({why or 'it is empty'})")


def read_file(
    path: str | Path,
    rejects: Rejects,
    skip: int = 0,
    *,
    label: str | None = None,
    folder: str | None = None,
    expand_limit: int = EXPAND_LIMIT,
    extract: Extract | None = Extract(),
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row, document) of one file or of the object behind an address; `row` never falls.

    The same file gives the same rows every time. skip: rows up to this number are passed over cheaply, and what was
    said of them or at the beginning of the file is not said again. Rows are lines (JSONL, CSV: the first of a row),
    rows of a table (Parquet), records (WARC), 1 for a text or HTML file. Several documents on one line share a
    number. label: begins the ids of documents that have none; folder: the domain of documents that name none;
    expand_limit: times that a compressed file may grow; extract: how HTML becomes text (None: not at all). Ids are
    not made unique. StorageError when a store does not answer.
    """
    file, kept = SourceFile(path, label or file_name(path), rejects, folder, skip, expand_limit, extract), 0
    for row, values in read_rows(file):
        if document := make_document(file, row, values):
            kept += 1
            yield row, document
    _say_if_empty(file, kept)

# %% [markdown]
# Whatever the format: starting after row `k` gives exactly the rows after `k`.

# %%
Path("r.jsonl").write_bytes(
    b"\n".join(lines[:400] + [b"{", b"[1]"] + lines[400:]) + b'\n{"text": "one"} {"text": "two"}\n'
)
Path("r.csv").write_text("text,id\n" + "".join(f'"row\n{i}",{i}\n' for i in range(30)) + "ragged\n" + "last,31\n")
pq.write_table(pa.table({"text": [f"row {i}" for i in range(1000)]}), "r.parquet", row_group_size=300)
Path("r.txt").write_text("one document")
for name in ("r.jsonl", "r.csv", "r.parquet", "r.txt"):
    whole_log = Rejects()
    whole = list(read_file(name, whole_log))
    for skip in {0, 1, 2, 299, 300, 301, 401, whole[-1][0] - 1, whole[-1][0]}:
        log = Rejects()
        assert list(read_file(name, log, skip)) == [(row, d) for row, d in whole if row > skip], (name, skip)
        assert [r.line for r in log.rows] == [r.line for r in whole_log.rows if r.line > skip] and not log.warnings
    print(name, len(whole), "documents, last row", whole[-1][0], dict(whole_log.counts))

# %% [markdown]
# ## All files

# %%
#| export
def read_documents(
    inputs: str | Path | Sequence[str | Path], rejects: Rejects | None = None, *, limit_bytes: int | None = None
) -> Iterator[dict[str, Any]]:
    """Stream documents (dicts with id, text, domain, lang, source and every column that was there) from files,
    folders, globs, addresses.

    Memory: one piece of a file, the longest line, page or text file, and 21 to 43 bytes a document for ids. Bad
    lines cost themselves only and go to `rejects`. A missing domain comes from the suffix or folder, a missing lang
    from `detect_language`; integer ids are qualified by file when several files are read, other ids when they come
    twice with different texts (a second copy with the same text is rejected). limit_bytes: stop before the text
    given out exceeds so many UTF-8 bytes. Raises UsageError for an input that isn't there.
    """
    rejects = Rejects() if rejects is None else rejects
    given = [inputs] if isinstance(inputs, (str, Path)) else list(inputs)
    paths = find_files(given, rejects)
    seen, left = _Seen(), math.inf if limit_bytes is None else limit_bytes
    for path, label in zip(paths, labels(paths)):
        file = SourceFile(path, label, rejects, folder_domain(path, given))
        kept = 0
        for line, row in read_rows(file):
            document = make_document(file, line, row, len(paths) > 1)
            if document is None or not _settle_id(document, file, line, seen):
                continue
            left -= len(document["text"].encode())
            if left < 0:
                file.warn(f"stopped at the limit of {limit_bytes:,} bytes of text")
                return
            kept += 1
            rejects.kept += 1
            yield document
        _say_if_empty(file, kept)

# %% [markdown]
# The damaged files from the beginning, once more. The only document that may be missing is the damaged one:

# %%
kept["this chapter"], report = [], []
for kind in damage:
    log = Rejects()
    kept["this chapter"].append(len(list(read_documents(kind + ".jsonl", log))))
    assert log.kept + log.total == 1000  # nothing in silence
    report.append(f"{kind:17} kept {log.kept}, refused {[(r.line, r.reason) for r in log.rows]}")
print(*report, sep="\n")
assert kept["this chapter"] == [1000, 999, 999, 999, 999]

# %%
fig, ax = plt.subplots(figsize=(6.6, 3))
for k, (name, counts) in enumerate(kept.items()):
    ax.barh(np.arange(5) + 0.2 * k, counts, height=0.18, label=name)
ax.set(yticks=np.arange(5) + 0.3, yticklabels=list(damage), xlabel="documents kept of 1,000, one line damaged")
ax.invert_yaxis()
ax.grid(False, axis="y")
ax.legend(loc="upper center", bbox_to_anchor=(0.5, 1.14), ncol=4)
plt.show()

# %% [markdown]
# Each group is one kind of damage; a full bar is a reader that lost nothing but the bad line. Of the others, none is full in every group.
#
# ### The rest of the zoo
# Every fault in the list below was once reported against a well-known library. First duplicate ids, duplicate keys and several objects in a line:

# %%
def read(text, name="x.jsonl"):
    "Write `text` to a file and read it: documents and the log."
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    log = Rejects()
    return list(read_documents(name, log)), log


docs, log = read("".join('{"id": "a", "text": "%s"}\n' % text for text in ("one", "two", "one", "three")))
assert [d["id"] for d in docs] == ["a", "x.jsonl:a", "x.jsonl:a~2"]
assert [(r.line, r.reason) for r in log.rows] == [(3, "duplicate_document")]
docs, log = read('{"id": "k", "text": "first", "text": "second"}')
assert docs[0]["text"] == "second" and log.notes == {"duplicate_keys": 1} and log.note_rows[0][1] == 1
docs, log = read('{"text": "p"}{"text": "q"} oops\n')
assert [d["text"] for d in docs] == ["p", "q"] and [(r.line, r.reason) for r in log.rows] == [(1, "invalid_json")]
assert [d["id"] for d in docs] == ["x.jsonl:1", "x.jsonl:1~1"]

# %% [markdown]
# Compressed files that are cut, mislabelled, or not what their name says:

# %%
body = b"\n".join(lines) + b"\n"
docs, log = read(gzip.compress(body)[:-3000], "cut.jsonl.gz")
assert 0 < len(docs) < 1000 and log.counts == {"truncated_stream": 1} and log.rows[0].line == len(docs) + 1
print(log.warnings[0])
docs, log = read(body, "plain.jsonl.gz")
assert len(docs) == 1000 and "not compressed" in log.warnings[0]
docs, log = read(zstandard.compress(body) + zstandard.compress(body.replace(b'"d', b'"e')), "two.jsonl.zst")
assert len(docs) == 2000 and not log.warnings

# %% [markdown]
# Tables. A ragged row names its line, and a missing column tells which ones are there:

# %%
docs, log = read('id,text\r\n1,"first\r\nsecond"\r\n2,NA\r\n3,0012\r\n4,\r\n5,a,b\r\n', "t.csv")
assert [d["text"] for d in docs] == ["first\nsecond", "NA", "0012"]
assert [(r.line, r.reason) for r in log.rows] == [(6, "empty_text"), (7, "ragged_row")]  # row 1 takes lines 2 and 3
docs, log = read("\ufeffid;text\n1;a;extra\n2\n3;fine\n", "s.csv")
assert [d["text"] for d in docs] == ["fine"] and [r.line for r in log.rows] == [2, 3]
_, log = read("id,content\n1,a\n", "c.csv")
print(log.warnings[0])
_, log = read(b"PAR1 and then nothing", "p.parquet")
print(log.warnings[0])
assert log.counts == {"truncated_stream": 1}

# %%
text = pa.array(["甲", "乙", None]).dictionary_encode()
pq.write_table(pa.table({"id": [1, 2, 3], "text": text, "score": [1.0, float("nan"), 2.0]}), "d.parquet")
log = Rejects()
docs = list(read_documents("d.parquet", log))
assert [(d["text"], d["score"]) for d in docs] == [("甲", 1.0), ("乙", None)] and log.counts == {"null_text": 1}
pq.write_table(pa.table({"id": ["1"], "content": ["x"]}), "w.parquet")
assert not list(read_documents("w.parquet", log)) and "columns present: id, content" in log.warnings[-1]

# %% [markdown]
# And a folder in which things have gone wrong in several ways at once. The good files are read, the others are named, each in one line:

# %%
for name, data in {
    "law/a.jsonl": b'{"id": 0, "text": "a0"}', "b.jsonl": b'{"id": 0, "text": "b0"}', "empty.jsonl": b"", "cut.parquet": b"PAR1",
    "gbk.txt": "天气".encode("gbk"), "code.py": b"x = 1\r\n", ".part.jsonl.tmp": b'{"id":',
}.items():
    Path("tree", name).parent.mkdir(parents=True, exist_ok=True)
    Path("tree", name).write_bytes(data)
log = Rejects()
for d in read_documents("tree", log):
    print({k: d[k] for k in ("id", "text", "domain", "lang")})
print(*log.warnings, sep="\n")
assert log.kept == 3 and log.counts == {"unknown_encoding": 1, "truncated_stream": 1}

# %% [markdown]
# ## Writing
# Products are written beside their final name and renamed when they are whole and on the disk. A consumer never sees half a file, and an interrupted run leaves the old one.

# %%
#| export
def write_documents(path: str | Path, documents: Iterable[dict[str, Any]]) -> int:
    """Write documents in the order given to a `.jsonl`, `.jsonl.gz` or `.jsonl.zst` file, whole or not at all;
    returns how many.

    The same documents give the same bytes. Raises UsageError for another suffix.
    """
    path = Path(path)
    if not path.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        raise UsageError(f"{path}: documents are written as .jsonl, .jsonl.gz or .jsonl.zst")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    count = 0
    try:
        with os.fdopen(handle, "wb") as raw:
            with _packer(raw, path.suffix) as out:
                for count, document in enumerate(documents, 1):
                    out.write(json_line(document))
            raw.flush()
            os.fsync(raw.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        fsync_dir(path.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return count


def _packer(raw, suffix: str):
    if suffix == ".zst":
        return zstandard.ZstdCompressor(level=3, write_checksum=True).stream_writer(raw, closefd=False)
    if suffix == ".gz":
        return gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0)
    return open(raw.fileno(), "wb", closefd=False)

# %%
mine = [{"id": "1", "text": "天\u2028气", "domain": "prose", "lang": "zh", "source": "me", "year": 2020, "own": {"k": [1]}}]
for name in ["w.jsonl", "w.jsonl.gz", "w.jsonl.zst"]:
    assert write_documents(name, mine) == 1 and list(read_documents(name)) == mine

def fails():
    yield mine[0]
    raise KeyError("upstream")

try:
    write_documents("w.jsonl.zst", fails())
except KeyError:
    pass
assert list(read_documents("w.jsonl.zst")) == mine and not list(Path(".").glob(".w*"))  # the old one stands, no leftover

# %% [markdown]
# ## Is memory flat?
# The claim to test is flat memory, so we watch the peak of Python's heap while files of half a megabyte to 4 MB are read, plain and compressed. For comparison the same with everything held in a list, as a loader does that returns a table.

# %%
def peak(read) -> float:
    "Peak of the Python heap in MB while `read` runs."
    tracemalloc.start()
    read()
    top = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return top

def make(megabytes, name):
    rng, left = random.Random(0), megabytes * 1e6
    def rows():
        nonlocal left
        for i in range(10**9):
            text = "".join(rng.choices("天地玄黄宇宙洪荒日月盈昃 abcdef", k=1000))
            left -= len(text.encode())
            yield {"id": f"r{i}", "text": text, "domain": "x", "lang": "zh"}
            if left <= 0:
                return
    write_documents(name, rows())

sizes, curves = [0.5, 1, 2, 4], {"held in a list": [], "streamed .jsonl": [], "streamed .jsonl.zst": []}
for mb in sizes:
    make(mb, "m.jsonl")
    Path("m.jsonl.zst").write_bytes(zstandard.compress(Path("m.jsonl").read_bytes()))
    curves["held in a list"].append(peak(lambda: list(read_documents("m.jsonl"))))
    curves["streamed .jsonl"].append(peak(lambda: sum(1 for _ in read_documents("m.jsonl"))))
    curves["streamed .jsonl.zst"].append(peak(lambda: sum(1 for _ in read_documents("m.jsonl.zst"))))
for name, ys in curves.items():
    print(f"{name:20}", [f"{y:.1f} MB" for y in ys])
assert curves["streamed .jsonl"][-1] < 2 * curves["streamed .jsonl"][0] + 1 and curves["streamed .jsonl.zst"][-1] < 4

# %%
fig, ax = plt.subplots(figsize=(5.5, 2.8))
for (name, ys), mark in zip(curves.items(), "so^"):
    ax.plot(sizes, np.round(ys, 1), marker=mark, label=name)
ax.set(
    xlabel="text in the file (MB)",
    ylabel="peak of the heap (MB)",
    xscale="log",
    yscale="log",
    xticks=sizes,
    xticklabels=sizes,
    yticks=[0.5, 1, 2, 4, 8],
    yticklabels=["0.5", "1", "2", "4", "8"],
)
ax.minorticks_off()
ax.legend()
plt.show()

# %% [markdown]
# The list grows with the file, the two streams do not: a few pieces of a quarter of a mebibyte and the longest line. What does grow, the table of ids, is too small to be seen here.

# %%
#| hide
os.chdir("/")
shutil.rmtree(work)

# %% [markdown]
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | A-1TB, the part about memory: it stays flat while text is read | holds, here for reading | peak heap equal within 0.2 MB from 0.5 to 4 MB of text here; as whole processes, 10 MB against 80 MB, within 8 MB (tests/test_bad_inputs.py); the table of ids costs 21 to 43 bytes a document |
# | one bad line costs one line (ours) | holds | 5 kinds of damage in 1,000 documents: 999 or 1,000 kept, the json loop, pandas and pyarrow each lose a whole file or half of one in some of them |
#
# What this does not cover: languages beyond Chinese, English and code are not told apart; a quote that is never closed in a CSV file takes the rows after it with it, in one reject; a line, a text file and a page have to fit into memory, a line
# about five times over while it is parsed (tests/test_extract.py); above 256 MiB a line is refused without being held, and a page above 10 MB too.
