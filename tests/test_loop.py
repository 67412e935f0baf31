"""The closed loop as one command on a small folder of texts: all stages, again, with a damaged product, and its page in a browser."""
from __future__ import annotations

import json
import re
import shutil
import sysconfig
from pathlib import Path

import pytest

import browser
from support import PROGRAM, SAMPLES, Done, events, last_checkpoint, lines, run

STAGES = ["read", "clean", "tokenize", "split, shard, stream", "train", "evaluate", "kill and resume", "diagnose", "compress", "export", "generate"]
# The loop plants its fault at 2/5 of the steps: with fewer than 60 that falls where a loss still falls too fast for one batch to stand out.
STEPS = 60
RECIPE = """\
model: {d_model: 64, n_layers: 2, n_heads: 2, n_kv_heads: 1, d_ff: 128, max_seq_len: 128}
data: {seq_len: 128}
trainer: {global_batch: 16, micro_batch: 4, eval_every: 30, eval_rows: 8, checkpoint_every: 10, device: cpu, census: true}
optim: {lr: 0.005}
schedule: {min_ratio: 0.1}
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> tuple[Path, list]:
    "The loop's folder and the words of its call, on some files of the standard library and of the samples."
    root = tmp_path_factory.mktemp("loop")
    texts = root / "texts"
    texts.mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in ("bisect", "heapq", "shlex", "textwrap", "sched", "queue", "fnmatch", "string", "stat", "copy", "colorsys", "calendar"):
        shutil.copy(library / f"{name}.py", texts)
    for name in ("en_prose", "zh_prose"):
        shutil.copy(SAMPLES / f"{name}.jsonl", texts)
    (texts / "bad.jsonl").write_text('{"id": "x", "text": null}\n{broken\n', encoding="utf-8")
    (root / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    out = root / "out"
    return out, ["loop", "--data", texts, "--run", out, "--steps", STEPS, "--vocab_size", 600, "--recipe", root / "recipe.yaml", "--limit_mb", 1]


def loop(words: list, *more) -> Done:
    return run([*PROGRAM, *words, *more], timeout=280)


@pytest.fixture(scope="module")
def first(job) -> Done:
    return loop(job[1], "--json")


def rows(result: dict) -> dict[str, dict]:
    return {r["name"]: r for r in result["stages"]}


def test_all_stages_hold(first, job, require):
    from importlib.util import find_spec

    result = first.ok().json
    assert [r["name"] for r in result["stages"]] == STAGES and result["ok"] is True
    for row in result["stages"]:
        assert row["ok"] is True or (row["name"] == "export" and find_spec("transformers") is None), row
        assert row["seconds"] >= 0 and len(row["summary"]) > 20
    assert 5e7 < result["peak_bytes"] < 8e9 and result["seconds"] < 280
    for name in STAGES:
        assert f"{name}: ok in " in first.err or name == "export", "progress goes to stderr"
    require("transformers (pip install 'scalelab[deploy]')", find_spec("transformers") is not None)
    assert "transformers loads it" in rows(result)["export"]["summary"]


def test_what_the_stages_show(first, job):
    found, out = {k: r["detail"] for k, r in rows(first.ok().json).items()}, job[0]
    assert found["read"]["documents"] > 80 and found["read"]["rejected"] == 2 and any("bad.jsonl" in k for k in found["read"])
    report = json.loads((out / "data" / "clean" / "report.json").read_text(encoding="utf-8"))
    assert all(s["in"] == s["out"] + sum(s["removed"].values()) for s in report["stages"])
    assert found["split, shard, stream"]["near-duplicates across the split"] == 0
    ranks = json.loads((out / "compare_ranks.json").read_text(encoding="utf-8"))["runs"]
    assert ranks["fp32"]["compared"] == 20 and 0 <= ranks["fp32"]["largest"] <= 1e-5 and ranks["fp32"]["same_batches"]
    assert ranks["fp64"]["compared"] == STEPS and 0 <= ranks["fp64"]["largest"] <= 1e-9
    bits = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    assert set(bits["domains"]) >= {"zh_prose", "en_prose", "code"} and bits["overall"]["model"] < bits["overall"]["unigram"]
    resume = json.loads((out / "resume.json").read_text(encoding="utf-8"))
    assert resume["bit_identical"] is True and 0 < resume["resumed_from_step"] <= resume["killed_at_step"] < STEPS and resume["tensors"] > 10
    told = json.loads((out / "findings.json").read_text(encoding="utf-8"))
    assert told["planted"] == {"kind": "bad_batch", "step": STEPS * 2 // 5} and told["found_as_planted"] is True
    proof = json.loads((out / "proof.json").read_text(encoding="utf-8"))
    assert proof["max_abs_logit_difference"] <= 1e-5 and proof["greedy_tokens_equal"] is True
    samples = json.loads((out / "samples.json").read_text(encoding="utf-8"))
    assert {s["language"] for s in samples} == {"zh", "en", "code"} and all(s["text"] and s["tokens_per_second"] > 0 and s["settings"] for s in samples)
    census = json.loads((out / "census.json").read_text(encoding="utf-8"))
    assert {"batch", "forward", "parameter"} <= {r["stage"] for r in census} and all(r["finite"] for r in census if r["min"] is not None)


def test_the_killed_run_was_killed(first, job):
    first.ok()
    out = job[0]
    assert len(events(out / "train-killed", "resume")) == 1 and not events(out / "train", "resume")
    assert {r["attempt"] for r in lines(out / "train-killed" / "metrics.jsonl")[0]} == {0, 1}


def test_the_other_commands_take_the_loops_folder(first, job, call):
    first.ok()
    assert call("evaluate", job[0], "--json").ok().json["bits_per_byte"] > 0
    assert call("generate", job[0], "--prompt", "def", "--max_new_tokens", 3, "--json").ok().json["tokens"] <= 3
    assert call("diagnose", job[0], "--json").code in (0, 1)


def page_of(out: Path) -> str:
    return (out / "report.html").read_text(encoding="utf-8")


def test_the_page_is_one_file(first, job):
    first.ok()
    page = page_of(job[0])
    assert not re.search(r"""(?:src|href|action)\s*=\s*["']?\s*(?:https?:)?//""", page) and not re.search(r"""url\(\s*["']?(?:https?:)?//|@import""", page)
    assert "<script src" not in page and "<link" not in page
    for name in STAGES:
        assert name in page
    for word in ("bits per byte", "grad", "loss", "<svg"):
        assert word.lower() in page.lower(), word


def test_the_page_in_a_browser(first, job, tmp_path):
    "Headless Chromium without any network shows every stage, curves, and asks for nothing."
    first.ok()
    browser.require_chromium()
    dom, hosts = browser.dump_dom_and_hosts(job[0] / "report.html")
    assert not hosts, f"the page asked for {hosts}"
    seen = re.sub(r"<(style|script)\b.*?</\1>", "", dom, flags=re.S)
    text = re.sub(r"<[^>]+>", " ", seen)
    for name in STAGES:
        assert name in text, f"stage {name} is not on the page"
    assert len(re.findall(r"<svg", seen)) >= 3 and len(re.findall(r"<(?:path|polyline)\b", seen)) >= 4
    assert "春天" in text, "the Chinese sample"
    import matplotlib.image as image

    picture = image.imread(browser.screenshot(job[0] / "report.html", tmp_path / "page.png"))
    assert picture[..., :3].std() > 0.05, "an empty page"


def test_again_goes_on(first, job):
    "The same call again trains nothing: the finished runs keep their logs, and nothing is tokenized anew."
    first.ok()
    out = job[0]
    products = ["train", "train-2ranks", "train-fp64", "train-fp64-2ranks", "train-killed", "train-fault"]
    logs = {p: (out / p / "metrics.jsonl").read_bytes() for p in products}
    weights = {p: last_checkpoint(out / p).stat().st_mtime_ns for p in products}
    shards = {p: p.stat().st_mtime_ns for p in (out / "data").rglob("*.bin")}
    result = loop(job[1], "--json").ok()
    assert [r["ok"] for r in result.json["stages"]] == [r["ok"] for r in first.json["stages"]]
    assert "going on" in result.err
    assert {p: last_checkpoint(out / p).stat().st_mtime_ns for p in products} == weights
    assert {p: p.stat().st_mtime_ns for p in (out / "data").rglob("*.bin")} == shards
    assert {p: (out / p / "metrics.jsonl").read_bytes() for p in products} == logs


def test_a_failing_stage_is_named(first, job):
    "A byte of a shard turns over between two calls: that stage fails by name, what needs it is not run, the exit code is 1."
    first.ok()
    out, words = job
    shard = out / "data" / "tokens" / "shards" / "train" / "00000.bin"
    good = shard.read_bytes()
    raw = bytearray(good)
    raw[777] ^= 1
    shard.write_bytes(bytes(raw))
    try:
        done, table = loop(words, "--json"), loop(words)
        page = page_of(out)
    finally:
        shard.write_bytes(good)
    assert done.code == 1
    result = rows(done.json)
    assert done.json["ok"] is False and result["split, shard, stream"]["ok"] is False and "00000.bin" in result["split, shard, stream"]["summary"]
    assert all(result[n]["ok"] is True for n in ("read", "clean", "tokenize"))
    assert all(result[n]["ok"] is None and "not run" in result[n]["summary"] for n in STAGES[4:])
    assert "split, shard, stream: FAILED" in done.err and "Traceback" not in done.err
    assert "FAIL" in page.upper() and "00000.bin" in page
    assert table.code == 1 and "FAIL" in table.out and "some stages failed" in table.out and "split, shard, stream" in table.out


def test_other_settings_start_anew(call, tmp_path):
    "An unusable corpus fails by name too, and a folder with a user's own files is not touched."
    texts, out = tmp_path / "texts", tmp_path / "out"
    texts.mkdir()
    (texts / "a.txt").write_text("One document is too few.", encoding="utf-8")
    done = call("loop", "--data", texts, "--run", out, "--steps", 20, "--vocab_size", 300)
    assert done.code == 1 and "FAIL" in done.out
    stages = {r["name"]: r["ok"] for r in json.loads((out / "stages.json").read_text(encoding="utf-8"))}
    assert stages["read"] is True and stages["generate"] is None and False in stages.values()
    (out / "train").mkdir()
    (out / "train" / "old").write_text("of other settings")
    call("loop", "--data", texts, "--run", out, "--steps", 21, "--vocab_size", 300)
    assert not (out / "train").exists(), "products of other settings are taken for this one's"
