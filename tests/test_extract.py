"""Pages, archives, encodings and limits where a notebook is the wrong place: whole corpora, other people's broken archives, processes and their memory.

Labelled texts that live beside the project are found through SCALELAB_SHARED (by default `../shared` of the repository); where they are absent those
tests skip.
"""
from __future__ import annotations

import base64
import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import zstandard

from scalelab.core.config import UsageError
from scalelab.data.documents import Rejects, find_files, read_documents, read_file, write_documents
from scalelab.data.encodings import decode
from scalelab.data.extract import Extract, MainText, decode_page, html_text
from scalelab.data.repair import repair_rates
from support import ROOT, environment

SHARED = Path(os.environ.get("SCALELAB_SHARED", ROOT.parent / "shared"))
DIRTY = SHARED / "corpora" / "2_dirty_web"


@pytest.fixture(scope="module")
def dirty():
    "`dirty(name)` reads a file of the dirty corpus."
    pytest.importorskip("trafilatura")
    if not DIRTY.is_dir():
        pytest.skip(f"no dirty corpus at {DIRTY} (set SCALELAB_SHARED)")

    def rows(name: str) -> list[dict]:
        with zstandard.open(DIRTY / f"{name}.jsonl.zst", "rt", encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    return rows


def read(path, **options) -> tuple[list[dict], Rejects]:
    log = Rejects()
    return list(read_documents(path, log, **options)), log


# ---- encodings

def test_files_in_ten_encodings(dirty):
    "At least 95% of the files are decoded to the last character, and none to something else."
    found = Counter()
    for row in dirty("mixed_encodings"):
        got = decode(base64.b64decode(row["raw_b64"]))
        found[row["encoding"], "unknown" if got is None else "exact" if got.text == row["text"] else "wrong"] += 1
    exact = sum(n for (_, outcome), n in found.items() if outcome == "exact")
    assert exact >= 0.95 * found.total() and not any(outcome == "wrong" for _, outcome in found), found


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv"])
def test_the_same_through_files(dirty, tmp_path, suffix):
    "The encoding of a file is found whatever kind of file it is."
    rows = [row for row in dirty("mixed_encodings") if row["encoding"] not in ("latin-1", "cp1252")]  # most of those are ASCII
    for i, row in enumerate(rows):
        text = row["text"].replace("\r\n", "\n").replace("\r", "\n")
        whole = {".txt": text, ".jsonl": json.dumps({"text": text}, ensure_ascii=False) + "\n",
                 ".csv": 'text\n"' + text.replace('"', '""') + '"\n'}[suffix]
        (tmp_path / f"{i}{suffix}").write_bytes(whole.encode(row["encoding"], "strict"))
    docs, log = read(tmp_path)
    want = {row["text"].replace("\r\n", "\n").replace("\r", "\n") for row in rows}
    assert len({d["text"] for d in docs} & want) >= 0.95 * len(want), log.counts
    assert log.counts.keys() <= {"unknown_encoding", "duplicate_document", "invalid_utf8"}


def test_mojibake_is_repaired_or_flagged(dirty):
    rows = [row | {"group": str(row["fixable"])} for row in dirty("mojibake")]
    rates = repair_rates(rows, "group")
    damaged = {g: sum(r[k] for k in ("exact", "flagged", "silent")) for g, r in rates.items()}
    width = sum(row["kind"].endswith("fullwidth") and row["text"] != row["clean"] for row in rows)  # an option, off by default
    assert rates["True"]["exact"] >= 0.95 * (damaged["True"] - width)
    assert rates["False"]["silent"] == 0
    clean = repair_rates([{"text": row["clean"], "group": "clean"} for row in rows], "group")["clean"]
    assert clean["false"] == 0 and clean["suspected"] <= 0.01 * clean["n"]


# ---- pages

def test_real_pages(dirty):
    "Every fourth page gives main text that holds no markup; those in EUC-KR are decoded exactly."
    pages = dirty("html_pages")
    for page in pages[::4]:
        found = html_text(page["text"])
        assert isinstance(found, MainText) and found.text, page["id"]
        assert not re.search(r"</?(div|span|script|td)\b", found.text) or "code" in page["text"].lower(), page["id"]
        assert len(found.text) < len(page["text"])
    foreign = [page for page in pages if page.get("raw_b64")]
    assert len(foreign) >= 5
    for page in foreign:
        got = decode_page(base64.b64decode(page["raw_b64"]))
        assert got and got.text.replace("\ufffd", "") == page["text"].replace("\ufffd", ""), (page["id"], page["declared_charset"])


def test_the_stage_and_the_reader_agree(dirty, tmp_path):
    page = next(p for p in dirty("html_pages") if p["lang"] == "zh")
    (tmp_path / "a.html").write_text(page["text"], encoding="utf-8")
    write_documents(tmp_path / "b.jsonl", [{"id": "b", "text": page["text"]}])
    (from_html,), _ = read(tmp_path / "a.html")
    (raw,), _ = read(tmp_path / "b.jsonl")
    assert raw["text"] == page["text"] and Extract().apply(raw).document["text"] == from_html["text"] and from_html["domain"] == "web"


def test_extraction_outside_of_the_main_thread():
    "No alarm can be set there; the text comes all the same."
    got = []
    thread = threading.Thread(target=lambda: got.append(html_text("<html><body><p>" + "Some words in a thread. " * 20)))
    thread.start()
    thread.join()
    assert isinstance(got[0], MainText)


PAGE = """
import hashlib, sys
from scalelab.data.extract import html_text
print(hashlib.sha256(html_text(open(sys.argv[1], encoding="utf-8").read()).text.encode()).hexdigest())
"""


def test_extraction_is_the_same_in_every_process(dirty, tmp_path):
    (tmp_path / "a.html").write_text(dirty("html_pages")[7]["text"], encoding="utf-8")
    said = {subprocess.run([sys.executable, "-c", PAGE, tmp_path / "a.html"], capture_output=True, text=True, check=True,
                           env=environment(PYTHONHASHSEED=seed)).stdout for seed in (0, 1)}
    assert len(said) == 1


# ---- archives: file -> (rows that are pages, (row, reason) refused)
ARCHIVES = {
    "bad.arc": ([], [(2, "bad_record"), (3, "empty_text"), (4, "bad_record")]),
    "example-bad-non-chunked.warc.gz": ([3], []),
    "example-bad.warc.gz.bad": ([2], []),
    "example-digest.warc": ([], []),
    "example-iana.org-chunked.warc": ([2], []),
    "example-resource.warc.gz": ([3], []),
    "example-space-in-target-uri.warc.gz": ([], []),
    "example-space-in-url.arc": ([], [(2, "truncated_record")]),
    "example-trunc.warc": ([3], [(4, "bad_record")]),
    "example-wget-bad-target-uri.warc.gz": ([3], []),
    "example-wrong-chunks.warc.gz": ([], [(1, "truncated_record"), (2, "bad_record")]),
    "example.arc": ([2], []),
    "example.arc.gz": ([2], []),
    "example.warc": ([3], []),
    "example.warc.gz": ([3], []),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives_of_others(dirty, tmp_path, name):
    path = tmp_path / name.removesuffix(".bad")
    shutil.copy(DIRTY / "warc" / name, path)
    rows, refused = ARCHIVES[name]
    log = Rejects()
    got = list(read_file(path, log))
    assert [row for row, _ in got] == rows and [(r.line, r.reason) for r in log.rows] == refused
    assert all("at byte " in r.snippet or r.reason == "empty_text" for r in log.rows)
    for _, doc in got:
        words = "DNS Root" if "iana" in name else "domain"
        assert words in doc["text"] and "<p>" not in doc["text"] and doc["url"].startswith("http") and doc["date"][:2] == "20" and doc["title"]
    for skip in range(7):
        again = Rejects()
        assert list(read_file(path, again, skip)) == [(row, doc) for row, doc in got if row > skip]
        assert [r.line for r in again.rows] == [r.line for r in log.rows if r.line > skip]


def test_every_archive_is_expected(dirty):
    assert {path.name for path in (DIRTY / "warc").iterdir()} == set(ARCHIVES)


# ---- addresses

@pytest.fixture
def store():
    "A folder in memory that is reached by address; `store(name, bytes)` puts a file there."
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield lambda name, data: fs.pipe(f"/in/{name}", data)
    fs.store.clear()


def test_files_behind_an_address(store):
    import pyarrow as pa
    import pyarrow.parquet as pq

    line = lambda i: json.dumps({"id": i, "text": f"text {i} 天气"}, ensure_ascii=False).encode() + b"\n"  # noqa: E731
    store("law/a.jsonl.gz", gzip.compress(b"".join(map(line, range(3)))))
    store("law/b.jsonl", line(0) + b"{broken\n")
    store("c.txt", "数据清洗的第一步是看，先读一百条，再写规则。".encode("gbk"))
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": ["p1", "p2"]}), buffer)
    store("d.parquet", buffer.getvalue())
    store("notes.json", b"{}")
    store(".hidden.jsonl", line(9))
    log = Rejects()
    paths = find_files("memory://in", log)
    assert [p.rsplit("/in/")[1] for p in paths] == ["c.txt", "d.parquet", "law/a.jsonl.gz", "law/b.jsonl"] and "1 .json" in log.warnings[0]
    docs, log = read("memory://in")
    assert len(docs) == 7 and Counter(d["domain"] for d in docs) == {"law": 4, "prose": 3} and log.counts == {"invalid_json": 1}
    assert log.rows[0].file == "memory://in/law/b.jsonl" and log.rows[0].line == 2
    assert {d["text"] for d in docs} >= {"p2", "text 2 天气", "数据清洗的第一步是看，先读一百条，再写规则。"}
    assert [d["text"] for d in read("memory://in/law/*.gz")[0]] == [f"text {i} 天气" for i in range(3)]
    assert [row for row, _ in read_file("memory://in/d.parquet", Rejects(), skip=1)] == [2]
    for wrong, said in [("memory://nowhere", "no such object"), ("memory://in/notes.json", "unknown kind")]:
        with pytest.raises(UsageError, match=said):
            find_files(wrong)


# ---- limits

def test_an_archive_that_expands_a_thousandfold_is_stopped(tmp_path):
    (tmp_path / "good.jsonl").write_text('{"text": "good"}')
    with gzip.open(tmp_path / "bomb.jsonl.gz", "wb", 9) as out:
        for _ in range(100):
            out.write(b'{"text": "first"}\n' + bytes(1_000_000))
    (tmp_path / "bomb.txt.zst").write_bytes(zstandard.ZstdCompressor(19).compress(bytes(100_000_000)))
    (tmp_path / "zip.jsonl").write_bytes(b"PK\x03\x04" + bytes(100))
    docs, log = read(tmp_path)
    assert log.counts["expands_too_much"] == 2 and log.counts["unsupported_archive"] == 1 and docs[-1]["text"] == "good"
    assert any("zip archive" in line and "unpack it" in line for line in log.warnings)


@pytest.mark.parametrize("levels", [90, 400, 900, 100_000])
def test_deep_nesting_is_refused_and_what_is_kept_can_be_written(tmp_path, levels):
    line = '{"text": "deep", "more": ' + "[" * levels + "]" * levels + "}\n"
    (tmp_path / "a.jsonl").write_text(line + '{"text": "after"}\n')
    docs, log = read(tmp_path / "a.jsonl")
    assert [d["text"] for d in docs][-1] == "after" and len(docs) + log.total == 2 and (len(docs) == 2) == (levels == 90)
    assert write_documents(tmp_path / "out.jsonl", docs) == len(docs)


HIGH_WATER = """
import re, resource, sys
from scalelab.data.documents import Rejects, read_documents
with Rejects("rejects.jsonl.zst") as log:
    characters = sum(len(d["text"]) for d in read_documents(sys.argv[1], log))
try:  # what getrusage says begins with the size of the parent
    peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1000
except OSError:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
print(characters, log.total, len(log.rows), peak)
"""


def reading(path: Path) -> tuple[int, int, int, float]:
    "Characters, refusals, refusals held in memory and peak MB of a process that reads a file."
    done = subprocess.run([sys.executable, "-c", HIGH_WATER, path], capture_output=True, text=True, check=True, cwd=path.parent, env=environment())
    a, b, c, peak = done.stdout.split()
    return int(a), int(b), int(c), float(peak)


def fill(path: Path, megabytes: int) -> None:
    "A file with so many MB of distinct text."
    words = [f"{a}{b}" for a in "天地玄黄宇宙洪荒日月盈昃辰宿列张" for b in ("", " lorem", " ipsum", "的", "了")]
    text = "".join(words[(i * i + i // 7) % len(words)] for i in range(1000))
    rows = ({"text": f"{i} {text[i % 500:]}{i}"} for i in range(megabytes * 1_000_000 // len(text.encode()) * 3 // 2))
    if path.suffix == ".csv":
        with open(path, "w", encoding="utf-8") as out:
            out.write("text\n")
            out.writelines(row["text"] + "\n" for row in rows)
    else:
        write_documents(path, rows)


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.zst", "x.csv"])
def test_memory_does_not_depend_on_the_size_of_the_file(tmp_path, name):
    "60 MB against 15 MB: the peak grows by 4 MB at most, ids included."
    peaks = []
    for megabytes in (15, 60):
        fill(tmp_path / name, megabytes)
        characters, refused, _, peak = reading(tmp_path / name)
        assert characters > megabytes * 300_000 and refused == 0
        peaks.append(peak)
    assert peaks[1] - peaks[0] < 4, peaks


def test_a_document_in_one_long_line(tmp_path):
    "40 MB in one line are read, at the cost of five times the line at most."
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "天地玄黄 lorem " * 2_100_000}, ensure_ascii=False) + '\n{"text": "after"}\n', encoding="utf-8")
    size = (tmp_path / "a.jsonl").stat().st_size / 1e6
    characters, refused, _, peak = reading(tmp_path / "a.jsonl")
    assert characters == 2_100_000 * 11 + 5 and refused == 0 and peak < 60 + 5 * size


def test_very_many_empty_documents(tmp_path):
    "They are counted and written down one by one; a thousand of them are held."
    (tmp_path / "a.jsonl").write_text("".join('{"id": "%d", "text": ""}\n' % i for i in range(200_000)))
    characters, refused, held, peak = reading(tmp_path / "a.jsonl")
    assert (characters, refused, held) == (0, 200_000, 1000) and peak < 60
    with zstandard.open(tmp_path / "rejects.jsonl.zst", "rt") as lines:
        assert sum(1 for _ in lines) == 200_000
