"""Damaged inputs: what is kept, what is refused and why, on which line, and that memory stays flat.

The damaged files that live beside the project are found through SCALELAB_SHARED (by default `../shared` of the repository); where they are
absent those tests skip. The ones in data_samples/bad are always there.
"""
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from scalelab.core.config import UsageError
from scalelab.data.documents import Rejects, find_files, read_documents, read_file, write_documents

ROOT = Path(__file__).resolve().parent.parent
BAD = Path(os.environ.get("SCALELAB_SHARED", ROOT.parent / "shared")) / "bad_inputs"
CONTROL = ["今天天气很好，适合出门散步。", "The quick brown fox jumps over the lazy dog.", "语言模型的训练数据需要清洗、去重与配比。"]

# file -> (documents kept, [(line, reason) refused], notes, piece of the only warning or None)
EXPECTED = {
    "00_control_good.jsonl": (3, [], {}, None),
    "01_null_text.jsonl": (3, [(4, "null_text"), (5, "empty_text"), (6, "blank_text"), (7, "missing_text")], {}, None),
    "02_null_first_then_string.jsonl": (151, [], {}, None),
    "04_bare_nan_inf.jsonl": (3, [(4, "text_not_a_string")], {"non_finite_number": 3}, None),
    "05_utf8_bom.jsonl": (3, [], {}, None),
    "06_crlf.jsonl": (3, [], {}, None),
    "07_cr_only.jsonl": (3, [], {"cr_line_ends": 1}, None),
    "09_invalid_utf8.jsonl": (2, [(2, "invalid_utf8")], {}, "not UTF-8: 1"),
    "11_utf16.jsonl": (3, [], {"decoded_utf_16": 1}, None),
    "12_lone_surrogate_escape.jsonl": (4, [], {"surrogate_replaced": 2}, None),
    "14_very_long_line.jsonl": (4, [], {}, None),
    "15_long_single_token.jsonl": (3, [], {}, None),
    "16_empty.jsonl": (0, [], {}, "no documents (it is empty)"),
    "17_only_newlines.jsonl": (0, [], {}, "no documents (it is empty)"),
    "18_blank_lines_between.jsonl": (3, [], {}, None),
    "19_no_final_newline.jsonl": (3, [], {}, None),
    "21_non_object_lines.jsonl": (3, [(n, "not_an_object") for n in range(1, 6)], {}, None),
    "23_concatenated_objects_one_line.jsonl": (3, [], {}, None),
    "26_numeric_text_and_ids.jsonl": (4, [(5, "text_not_a_string")], {}, None),
    "28_duplicate_ids.jsonl": (4, [(5, "duplicate_document")], {"duplicate_id": 1}, None),
    "29_duplicate_keys.jsonl": (4, [], {"duplicate_keys": 1}, None),
    "31_control_chars_raw.jsonl": (5, [], {"nul_removed": 1}, None),
    "32_truncated.jsonl.gz": (3, [*((n, "duplicate_document") for n in range(4, 140)), (140, "truncated_stream")], {}, "cut off"),
    "34_multi_member.jsonl.gz": (6, [], {}, None),
    "35_plain_text_named_gz.jsonl.gz": (3, [], {}, "named .gz but it is not compressed"),
    "38_multi_frame.jsonl.zst": (6, [], {}, None),
    "39_embedded_newline_quotes.csv": (6, [(9, "empty_text")], {}, None),
    "41_nul_and_eof.csv": (3, [], {"nul_removed": 1}, None),
    "42_ragged_bom_semicolon.csv": (0, [(2, "ragged_row"), (3, "ragged_row")], {"csv_delimiter_not_comma": 1}, "2 ragged_row"),
    "44_truncated.parquet": (0, [(None, "truncated_stream")], {}, "magic bytes not found in footer"),
    "45_zero_rows.parquet": (0, [], {}, "no documents"),
    "46_wrong_column.parquet": (0, [(None, "missing_text")], {}, "columns present: id, content"),
    "48_dictionary_text.parquet": (2, [], {}, None),
    "49_mixed_schema_dir": (10, [], {}, None),
}


def read(path):
    log = Rejects()
    return list(read_documents(path, log)), log


@pytest.fixture
def bad():
    if not BAD.is_dir():
        pytest.skip(f"no damaged files at {BAD} (set SCALELAB_SHARED)")
    return BAD


@pytest.mark.parametrize("name", EXPECTED)
def test_kept_refused_and_said(bad, name, tmp_path, expected=EXPECTED):
    kept, refused, notes, warning = expected[name]
    docs, log = read(bad / name)
    assert len(docs) == log.kept == kept
    assert [(row.line, row.reason) for row in log.rows] == refused and log.total == len(refused)
    assert log.notes == notes
    assert len(log.warnings) == (warning is not None), log.warnings  # one clear line, or none
    if warning:
        assert warning in log.warnings[0] and name in log.warnings[0]
    for doc in docs:
        assert isinstance(doc["id"], str) and doc["text"].strip() and not doc["text"].endswith("\r") and "\0" not in doc["text"]
        assert doc["text"] not in ("None", "nan", "NaN") and doc["domain"] and doc["lang"] and doc["source"]
        doc["text"].encode()
    assert len({doc["id"] for doc in docs}) == len(docs)
    assert write_documents(tmp_path / "again.jsonl.zst", docs) == kept
    assert list(read_documents(tmp_path / "again.jsonl.zst")) == docs


def test_every_file_of_the_folder_is_expected(bad):
    there = {path.name for path in bad.iterdir() if path.name != "README.md"}
    assert there == set(EXPECTED)


@pytest.mark.parametrize("name", ["00_control_good.jsonl", "05_utf8_bom.jsonl", "06_crlf.jsonl", "07_cr_only.jsonl", "11_utf16.jsonl",
                                  "18_blank_lines_between.jsonl", "19_no_final_newline.jsonl", "23_concatenated_objects_one_line.jsonl",
                                  "35_plain_text_named_gz.jsonl.gz"])
def test_same_documents_as_the_control(bad, name):
    docs, _ = read(bad / name)
    assert [doc["text"] for doc in docs] == CONTROL
    assert [(doc["id"], doc["domain"], doc["year"]) for doc in docs] == [("g0", "news", 2020), ("g1", "news", 2021), ("g2", "news", 2022)]
    assert [doc["lang"] for doc in docs] == ["zh", "en", "zh"]


def test_texts_survive_byte_for_byte(bad):
    docs, _ = read(bad / "26_numeric_text_and_ids.jsonl")
    assert [(doc["id"], doc["text"]) for doc in docs] == [
        ("0012", "00123"), ("72057594038135102", "1e5"), ("202101010000000003", "3.10"), ("9999999999999999", "2024-01-01")]
    docs, _ = read(bad / "39_embedded_newline_quotes.csv")
    assert [doc["text"] for doc in docs] == ["第一行\n第二行", '他说"好"', "NA", "NA", "null", "0012"]
    docs, _ = read(bad / "02_null_first_then_string.jsonl")
    assert docs[0]["note"] is None and docs[-1]["note"] == "有备注"
    docs, _ = read(bad / "04_bare_nan_inf.jsonl")
    assert [doc["score"] for doc in docs] == [None] * 3
    docs, _ = read(bad / "12_lone_surrogate_escape.jsonl")
    assert [doc["text"] for doc in docs] == ["ok", "bad \ufffd tail", "\ufffd lead", "pair 😀 good"]
    assert [doc.get("flags") for doc in docs] == [None, ["surrogate_replaced"], ["surrogate_replaced"], None]
    docs, _ = read(bad / "31_control_chars_raw.jsonl")
    assert docs[0]["text"].startswith("raw\ttab") and docs[1]["text"] == "nul  inside"
    docs, _ = read(bad / "29_duplicate_keys.jsonl")
    assert docs[0]["text"] == "second"
    docs, _ = read(bad / "28_duplicate_ids.jsonl")
    assert docs[3]["id"] == "28_duplicate_ids.jsonl:g0" and docs[3]["text"] != docs[0]["text"]


@pytest.mark.parametrize("name", [name for name in EXPECTED if not name.endswith("_dir")])
def test_a_file_is_taken_up_at_any_row(bad, name):
    """What comes after row k, refusals included, is the same as in one go, and what was said before is not said again."""
    log = Rejects()
    whole = list(read_file(bad / name, log))
    rows = sorted({row for row, _ in whole} | {reject.line or 0 for reject in log.rows})
    assert [row for row, _ in whole] == sorted(row for row, _ in whole)
    for k in [1, *rows[1 :: 1 + len(rows) // 9]]:
        again = Rejects()
        assert list(read_file(bad / name, again, skip=k)) == [(row, doc) for row, doc in whole if row > k]
        assert [r for r in again.rows if r.line] == [r for r in log.rows if r.line and r.line > k]
        assert again.kept == 0 and again.notes.total() <= log.notes.total()


def test_a_folder_of_mixed_schemas(bad):
    docs, log = read(bad / "49_mixed_schema_dir")
    assert Counter(doc["id"].split(":")[0] for doc in docs) == {"a.jsonl": 5, "b.jsonl": 5}
    assert docs[0]["tags"] == [] and docs[-1]["tags"] == [{"k": "v"}] and docs[-1]["extra"] == 1


def test_everything_at_once(bad):
    """One bad file never costs another: the folder gives what its files give one by one, apart from documents found twice."""
    docs, log = read(bad)
    assert log.kept + log.counts["duplicate_document"] == sum(
        kept + sum(reason == "duplicate_document" for _, reason in refused) for kept, refused, *_ in EXPECTED.values()) + 1  # its README
    named = [name for name, (*_, warning) in EXPECTED.items() if warning]
    assert all(any(name in line for line in log.warnings) for name in named)


def test_inputs_that_are_not_there(tmp_path):
    for wrong, said in [(tmp_path / "no.jsonl", "no such file"), (tmp_path, "no readable file"), (tmp_path / "*.jsonl", "no such|no readable")]:
        with pytest.raises(UsageError, match=said):
            find_files(wrong)
    (tmp_path / "table.json").write_text("{}")
    with pytest.raises(UsageError, match="unknown kind"):
        list(read_documents(tmp_path / "table.json"))


def test_an_unreadable_file_is_named_and_the_others_go_on(tmp_path):
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "gone")
    (tmp_path / "b.jsonl").write_text('{"text": "here"}')
    docs, log = read(tmp_path)
    assert [doc["text"] for doc in docs] == ["here"]
    assert log.counts == {"unreadable_file": 1} and "a.jsonl" in log.warnings[0]


PEAK = """
import sys
from scalelab.core.environment import peak_memory
from scalelab.data.documents import read_documents
n = sum(len(d["text"]) for d in read_documents(sys.argv[1]))
print(n, peak_memory())
"""


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_peak_memory_does_not_grow_with_the_file(tmp_path, suffix):
    """80 MB of text against 10 MB: the peak may differ by 8 MB at most (11% of the difference), ids included."""
    peaks = []
    for megabytes in (10, 80):
        path = tmp_path / f"{megabytes}{suffix}"
        rows = ({"id": f"r{i}", "text": f"{i} " + "天地玄黄 lorem ipsum " * 90, "domain": "prose", "lang": "zh"} for i in range(megabytes * 400))
        write_documents(path, rows)
        done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
        characters, peak = map(int, done.stdout.split())
        assert characters > megabytes * 400 * 1500
        peaks.append(peak / 1e6)
    assert peaks[1] - peaks[0] < 8, f"peak {peaks[0]:.0f} MB for 10 MB, {peaks[1]:.0f} MB for 80 MB"


# data_samples/bad: written for this project, always there
SAMPLES = ROOT / "data_samples" / "bad"
EXPECTED_SAMPLES = {
    "bare_nan.jsonl": (3, [(4, "text_not_a_string")], {"non_finite_number": 2}, None),
    "crlf.jsonl": (3, [], {}, None),
    "duplicate_keys.jsonl": (3, [], {"duplicate_keys": 1}, None),
    "empty.jsonl": (0, [], {}, "no documents (it is empty)"),
    "invalid_utf8.jsonl": (2, [(2, "invalid_utf8"), (3, "invalid_utf8")], {}, "not UTF-8: 2"),
    "lone_surrogate.jsonl": (4, [], {"surrogate_replaced": 2}, None),
    "multi_member.jsonl.gz": (5, [], {}, None),
    "non_object_lines.jsonl": (2, [*((n, "not_an_object") for n in range(2, 7)), (8, "text_not_a_string"), (9, "text_not_a_string")], {}, None),
    "not_gzip.jsonl.gz": (3, [], {}, "not compressed"),
    "null_text.jsonl": (3, [(2, "null_text"), (3, "empty_text"), (5, "blank_text"), (6, "missing_text")], {}, None),
    "ragged.csv": (2, [(4, "ragged_row"), (5, "ragged_row")], {}, None),
    "truncated.jsonl.gz": (115, [(116, "truncated_stream")], {}, "cut off"),
    "truncated.parquet": (0, [(None, "truncated_stream")], {}, "magic bytes not found in footer"),
    "utf8_bom.jsonl": (3, [], {}, None),
    "wrong_column.parquet": (0, [(None, "missing_text")], {}, "columns present: id, content"),
}


@pytest.mark.parametrize("name", EXPECTED_SAMPLES)
def test_broken_samples(name, tmp_path):
    test_kept_refused_and_said(SAMPLES, name, tmp_path, EXPECTED_SAMPLES)


def test_every_broken_sample_is_expected():
    assert {path.name for path in SAMPLES.iterdir() if path.name != "README.md"} == set(EXPECTED_SAMPLES)
    docs, _ = read(SAMPLES / "ragged.csv")
    assert "\n" in docs[0]["text"] and '"' in docs[0]["text"] and "," in docs[0]["text"]
