"""`scalelab data find`: as a program, next to broken files, and when its index is killed in mid-build."""
from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import support

BUILD = "import sys; from scalelab.data.text_index import build_index; build_index([sys.argv[1]], sys.argv[2])"


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": f"d{i}", "text": t}, ensure_ascii=False) + "\n" for i, t in enumerate(texts)), encoding="utf-8")
    return path


@pytest.fixture
def corpus(tmp_path) -> Path:
    return write(tmp_path / "docs.jsonl", ["北冥有鱼，其名为鲲。\n鲲之大，不知其几千里也。", "a fish\r\nand a bird"])


def test_with_and_without_index(call, corpus, tmp_path):
    plain = call("data", "find", "鲲", "--in", corpus, "--json").ok().json
    assert plain["count"] == 2 and [o["offset"] for o in plain["shown"]] == [8, 11] and plain["shown"][1]["line"] == 2
    for words in (["--in", corpus], []):
        indexed = call("data", "find", "鲲", *words, "--index", tmp_path / "index", "--json").ok().json
        assert indexed["shown"] == plain["shown"] and indexed["count"] == 2
    assert "0 occurrences" in call("data", "find", "FISH", "--in", corpus).ok().out
    assert call("data", "find", "fish\r\nand", "--in", corpus, "--json").ok().json["count"] == 1


def test_refusals(call, corpus, tmp_path):
    call("data", "find", "", "--in", corpus).refused("TEXT is empty")
    call("data", "find", "x").refused("--in", "--index")
    call("data", "find", "x", "--in", tmp_path / "absent.jsonl").refused("absent.jsonl")
    call("data", "find", "x", "--in", corpus, "--index", tmp_path).refused("no index and would be replaced")
    call("data", "find", "x", "--index", tmp_path / "none").refused("no index yet")
    call("data", "find", "x", "--in", corpus, "--first", "-1").refused("--first")


def test_bad_lines_cost_themselves(call, tmp_path):
    file = tmp_path / "docs.jsonl"
    file.write_bytes(b'{"id": "a", "text": "whale"}\n{"id": "b", "te\n\xff\xfe\n{"id": "c", "text": "whale"}\n')
    assert call("data", "find", "whale", "--in", file, "--json").ok().json["count"] == 2


def test_index_is_renewed(call, corpus, tmp_path):
    index = tmp_path / "index"
    assert call("data", "find", "bird", "--in", corpus, "--index", index, "--json").ok().json["count"] == 1
    write(corpus, ["bird bird bird"])
    done = call("data", "find", "bird", "--index", index, "--json").ok()
    assert done.json["count"] == 3 and "built again" in done.err
    corpus.unlink()
    done = call("data", "find", "bird", "--index", index, "--json").ok()
    assert done.json["count"] == 3 and "out of date" in done.err


def test_killed_build_leaves_the_old_index(call, corpus, tmp_path):
    index, large = tmp_path / "index", tmp_path / "large.jsonl"
    call("data", "find", "bird", "--in", corpus, "--index", index).ok()
    write(large, [f"{i} " + "the same words again and again " * 2000 for i in range(200)])
    for delay in range(3):
        child = support.start([sys.executable, "-c", BUILD, large, index], tmp_path / "log")
        begun = support.wait_until(lambda: any(p.name.startswith(".index.") and any(p.iterdir()) for p in tmp_path.iterdir()), child, pause=0.002 * (delay + 1))
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        assert begun, "the build ended before it could be killed"
        assert call("data", "find", "bird", "--index", index, "--json").ok().json["count"] == 1
        for left in tmp_path.glob(".index.*"):
            for file in left.iterdir():
                file.unlink()
            left.rmdir()
    support.run([sys.executable, "-c", BUILD, large, index]).ok()
    assert call("data", "find", "199 the", "--index", index, "--json").ok().json["count"] == 1


def test_two_builders_at_once(corpus, tmp_path):
    index = tmp_path / "index"
    children = [support.start([sys.executable, "-c", BUILD, corpus, index], tmp_path / f"log{i}") for i in range(2)]
    codes = [c.wait(60) for c in children]
    assert 0 in codes and (index / "index.json").is_file(), (tmp_path / "log0").read_text() + (tmp_path / "log1").read_text()
    assert not list(tmp_path.glob(".index.*.tmp"))
