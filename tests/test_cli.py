"""The command line's contract: exit codes, what goes to stdout and stderr, one JSON object, help, refusals that write nothing, and each command's products."""
from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support import PROGRAM, SAMPLES, environment, lines, run, steps, wait_until

COMMANDS = ("loop", "data clean", "data tokenize", "data inspect", "train", "evaluate", "diagnose", "compress quantize", "export", "generate", "report", "bench")


def read_zst(path: Path) -> list[dict]:
    import zstandard

    with open(path, "rb") as file:
        return [json.loads(line) for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True), "utf-8")]


def truth() -> dict:
    return json.loads((SAMPLES / "truth.json").read_text(encoding="utf-8"))


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    "Size and time of every file under a folder; the page is drawn anew at each call, which is no work."
    return {str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "report.html"}


# ---- the program itself


def test_the_list_of_commands(cli):
    done = cli("--help").ok()
    assert done.err == "" and cli().ok().out == done.out
    for name in COMMANDS:
        assert re.search(rf"^  {name} +\S", done.out, re.M), name


def test_the_installed_program_is_this_one():
    from importlib.metadata import entry_points

    found = [e for e in entry_points(group="console_scripts") if e.name == "scalelab"]
    assert found and found[0].value == "scalelab.cli:main"


@pytest.mark.parametrize("words, parts", [
    (["trian"], ["trian", "did you mean 'train'"]), (["data", "clena"], ["clena", "data clean"]), (["data"], ["clean", "tokenize", "inspect"]),
    (["compress", "quantise", "x"], ["compress quantize"]), (["plan", "a", "b"], ["not built yet"]), (["--json"], ["--json"]),
], ids=lambda v: " ".join(v))
def test_an_unknown_command(words, parts, call):
    call(*words).refused(*parts)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_word_with_meaning_and_default(name, call):
    done = call(*name.split(), "--help").ok()
    assert done.err == "" and f"usage: scalelab {name}" in done.out
    head, *_ = done.out.split("\n\n", 1)
    groups = {"--model", "--data", "--trainer", "--optim", "--schedule", "--parallel", "--quality"} if "CONFIG" in head else set()
    for key in sorted(set(re.findall(r"--[a-z0-9_.]+", head)) - {"--help"} - groups):
        entry = re.search(rf"^  {re.escape(key)}\b(?!\.)([^\n]*\n(?:   .*\n|$)*)", done.out, re.M)
        assert entry, f"{key} has no entry"
        text = " ".join(re.sub(r"^ (?:[A-Z0-9_|]+|\{\S*\}|\[.*?\])(?: \[[A-Z_ .]+\])?(?=\s)", "", entry[1]).split())
        assert len(re.sub(r"\((?:required|type|default)[^)]*\)", "", text).split()) >= 1, f"{key}: no meaning in {entry[0]!r}"
        assert "default: " in text or "required" in text, f"{key}: no default in {entry[0]!r}"


def fields_of(cls, prefix: str = ""):
    for f in dataclasses.fields(cls):
        value = f.default if f.default is not dataclasses.MISSING else f.default_factory()
        if dataclasses.is_dataclass(value):
            yield from fields_of(type(value), f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", value


@pytest.mark.parametrize("name", ["train", "data clean", "data tokenize", "loop"])
def test_help_shows_every_field_of_the_configuration(name, call):
    from scalelab.cli import LoopWords
    from scalelab.data.pipeline import CleanConfig, TokenizeConfig
    from scalelab.trainer.settings import TrainConfig

    cls = {"train": TrainConfig, "data clean": CleanConfig, "data tokenize": TokenizeConfig, "loop": LoopWords}[name]
    text = " ".join(call(*name.split(), "--help").ok().out.split())
    found = list(fields_of(cls))
    assert len(found) > 4
    silent = []
    for key, default in found:
        entry = re.search(rf" --{re.escape(key)} [^ ]+ (.*?)\(type: [^()]*(?:\([^()]*\))?[^()]*?, default: ([^)]*)\)", text)
        assert entry, f"--{key}: no entry with a type and a default"
        silent += [] if entry[1].strip() else [key]
        if isinstance(default, (int, str)) and not isinstance(default, bool) and "model." not in key:
            assert entry[2].strip() == str(default).strip(), f"--{key}"
    assert not silent, f"no meaning is shown for {silent}"


# ---- calls that can't be used


BAD_TRAIN = {
    "--trainer.stepz=5": ["trainer.stepz", "did you mean 'trainer.steps'"], "--optim.learning_rate=1": ["optim.learning_rate"], "--seq_len=5": ["seq_len"],
    "--trainer.steps=abc": ["trainer.steps", "int", "abc"], "--trainer.steps=2.5": ["trainer.steps", "2.5"], "--trainer.steps=-1": ["trainer.steps", "-1"], "--trainer.steps=": ["trainer.steps"],
    "--optim.lr=nan": ["optim.lr"], "--optim.lr=-1": ["optim.lr", "-1"], "--optim.beta1=1.5": ["optim.beta1", "1.5"], "--precision=fp61": ["precision", "fp61", "fp64"],
    "--schedule.kind=cosin": ["schedule.kind", "cosine"], "--schedule.warmup_steps=30": ["schedule.warmup_steps", "30", "20"], "--schedule.min_ratio=2": ["schedule.min_ratio", "2"],
    "--model.n_heads=3": ["model.n_heads", "32", "nearest valid: 4"], "--model.n_kv_heads=4": ["model.n_kv_heads", "nearest valid: 2"], "--model.dropout=1.5": ["model.dropout", "1.5"],
    "--model.vocab_size=300": ["model.vocab_size", "300", "600"], "--trainer.micro_batch=3": ["trainer.micro_batch", "3", "nearest valid"], "--trainer.ranks=4": ["trainer.ranks", "4", "torchrun"],
    "--data.seq_len=65": ["data.seq_len", "65", "64"], "--data.seq_len=0": ["data.seq_len", "0"], "--trainer=5": ["trainer", "group"], "--inject=bad_batsh@3": ["bad_batsh", "did you mean 'bad_batch'"],
    "--inject=kill@0": ["kill@0"], "--data.train=/no/such": ["/no/such", "data tokenize"], "--data.tokenizer=/no/such": ["data.tokenizer", "/no/such"], "--init_from=/no/such": ["/no/such"],
    "--resume=/no/such": ["/no/such"], "--config=no_such": ["no_such", "gpu24"], "stray": ["stray"], "--trainer.threads=100000": ["trainer.threads", "100000"],
}


@pytest.mark.parametrize("word", BAD_TRAIN)
def test_train_refuses(word, call, cli, train_words, tmp_path):
    words = [*train_words(tmp_path / "run"), word]
    done = cli("train", *words) if "threads" in word else call("train", *words)  # threads may take the process down
    done.refused(*BAD_TRAIN[word])
    assert os.listdir(tmp_path) == [], f"something was written: {[str(p.relative_to(tmp_path)) for p in tmp_path.rglob('*')]}"


BAD_FILES = {
    "unknown key": ("trainer:\n  stepz: 5\n", ["c.yaml", "trainer.stepz", "trainer.steps"]), "unknown group": ("trianer:\n  steps: 5\n", ["c.yaml", "trianer"]),
    "wrong type": ("trainer:\n  steps: many\n", ["c.yaml", "trainer.steps", "many"]), "not YAML": ("trainer: [1, 2\n", ["c.yaml"]), "a list": ("- 1\n- 2\n", ["c.yaml"]),
    "not text": (b"\xff\xfe\x00\x81", ["c.yaml"]), "a tag": ("trainer: !!python/object/apply:os.system ['touch /tmp/never']\n", ["c.yaml"]), "key twice": ("trainer:\n  steps: 5\n  steps: 6\n", ["c.yaml", "steps"]),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_train_refuses_a_file(kind, call, train_words, tmp_path):
    content, parts = BAD_FILES[kind]
    file = tmp_path / "c.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    words = [w for w in train_words(tmp_path / "run") if "trainer.steps" not in w]
    call("train", "--config", file, *words).refused(*parts)
    assert not (tmp_path / "run").exists()


BAD_DATA = {
    "clean: missing input": (["data", "clean", "/no/such"], ["/no/such"]), "clean: no document": (["data", "clean", "EMPTY"], ["empty.txt"]), "clean: empty folder": (["data", "clean", "FOLDER"], ["folder"]),
    "clean: unknown key": (["data", "clean", "DOCS", "--qualty.off=x"], ["qualty.off", "quality.off"]), "clean: threshold": (["data", "clean", "DOCS", "--near_threshold=2"], ["near_threshold", "2"]),
    "clean: keep": (["data", "clean", "DOCS", "--keep=longst"], ["keep", "longest"]), "clean: limit": (["data", "clean", "DOCS", "--limit_bytes=-5"], ["limit_bytes", "-5"]),
    "clean: workers": (["data", "clean", "DOCS", "--workers=-3"], ["workers", "-3"]), "clean: engine": (["data", "clean", "DOCS", "--engine=rey"], ["engine", "ray"]),
    "clean: recipe": (["data", "clean", "DOCS", "--recipe=/no/such"], ["/no/such"]), "review: no product": (["data", "review", "FOLDER"], ["rejects.jsonl.zst"]),
    "tokenize: missing input": (["data", "tokenize", "/no/such"], ["/no/such"]), "tokenize: one document": (["data", "tokenize", "ONE"], ["one.txt", "1 document"]),
    "tokenize: vocabulary": (["data", "tokenize", "DOCS", "--vocab_size=10"], ["vocab_size", "10", "257"]), "tokenize: fraction": (["data", "tokenize", "DOCS", "--valid_fraction=0.9"], ["valid_fraction", "0.9"]),
    "tokenize: row": (["data", "tokenize", "DOCS", "--seq_len=1"], ["seq_len", "1"]), "tokenize: packing": (["data", "tokenize", "DOCS", "--packing=best"], ["packing", "best_fit"]),
    "tokenize: shard": (["data", "tokenize", "DOCS", "--shard_tokens=0"], ["shard_tokens", "0"]), "tokenize: tokenizer": (["data", "tokenize", "DOCS", "--tokenizer=ONE"], ["one.txt", "tokenizer"]),
    "tokenize: no tokenizer": (["data", "tokenize", "DOCS", "--tokenizer=/no/such"], ["/no/such"]),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_data_refuses(case, call, cleaned, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "one.txt").write_text("A single text of a few words that stands alone.")
    (tmp_path / "folder").mkdir()
    names = {"EMPTY": tmp_path / "empty.txt", "ONE": tmp_path / "one.txt", "FOLDER": tmp_path / "folder", "DOCS": cleaned[0] / "documents"}
    words, parts = BAD_DATA[case]
    words = [re.sub("|".join(names), lambda m: str(names[m[0]]), w) for w in words]
    call(*words, "--out", tmp_path / "out").refused(*parts)
    assert not (tmp_path / "out").exists(), f"something was written: {sorted(os.listdir(tmp_path / 'out'))}"


BAD_MODEL = {
    "evaluate: none": (["evaluate"], ["model"]), "evaluate: missing": (["evaluate", "/no/such"], ["/no/such"]), "evaluate: step": (["evaluate", "RUN", "--at=7"], ["7", "30, 40"]),
    "evaluate: data": (["evaluate", "RUN", "--data", "/no/such"], ["/no/such"]), "evaluate: empty data": (["evaluate", "RUN", "--data", "EMPTY"], ["empty.txt"]),
    "diagnose: missing": (["diagnose", "/no/such"], ["/no/such"]), "diagnose: no run": (["diagnose", "FOLDER"], ["metrics.jsonl"]), "report: missing": (["report", "/no/such"], ["/no/such"]), "report: no run": (["report", "FOLDER"], ["metrics.jsonl"]),
    "quantize: missing": (["compress", "quantize", "/no/such", "--out", "OUT"], ["/no/such"]), "quantize: out": (["compress", "quantize", "RUN"], ["out"]),
    "export: missing": (["export", "/no/such", "--out", "OUT"], ["/no/such"]), "export: format": (["export", "RUN", "--format=gguf", "--out", "OUT"], ["gguf", "hf"]), "export: key": (["export", "RUN", "--fromat=hf", "--out", "OUT"], ["fromat", "format"]),
    "generate: missing": (["generate", "/no/such"], ["/no/such"]), "generate: none": (["generate", "RUN", "--max_new_tokens=0"], ["max_new_tokens", "0"]), "generate: temperature": (["generate", "RUN", "--temperature=-1"], ["temperature", "-1"]),
    "generate: top_p": (["generate", "RUN", "--top_p=7"], ["top_p", "7"]), "generate: type": (["generate", "RUN", "--top_k=x"], ["top_k", "int"]), "inspect: missing": (["data", "inspect", "/no/such"], ["/no/such"]),
    "bench: unknown": (["bench", "data-steam"], ["data-steam", "data-stream"]), "loop: steps": (["loop", "--steps=1", "--run", "OUT"], ["steps", "1"]), "loop: data": (["loop", "--data", "/no/such", "--run", "OUT"], ["/no/such"]),
    "loop: recipe": (["loop", "--recipe=lop", "--run", "OUT"], ["lop", "loop"]), "loop: foreign folder": (["loop", "--run", "FULL"], ["full", "new folder"]), "loop: vocabulary": (["loop", "--vocab_size=100", "--run", "OUT"], ["vocab_size", "257"]),
}


@pytest.mark.parametrize("case", BAD_MODEL)
def test_model_commands_refuse(case, call, healthy, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    names = {"EMPTY": tmp_path / "empty.txt", "FOLDER": tmp_path / "folder", "FULL": tmp_path / "full", "RUN": healthy, "OUT": tmp_path / "out"}
    before = listing(tmp_path)
    words, parts = BAD_MODEL[case]
    call(*(names.get(w, w) for w in words)).refused(*parts)
    assert listing(tmp_path) == before and not (tmp_path / "out").exists()


def test_refusals_are_the_same_in_a_process_of_their_own(cli, train_words, tmp_path):
    cli("train", *train_words(tmp_path / "run"), "--trainer.stepz=5").refused("trainer.stepz", "trainer.steps")
    done = cli("train", *train_words(tmp_path / "run"), "--trainer.stepz=5", "--debug")
    assert done.code == 2 and "Traceback" in done.err and done.err.splitlines()[-1].startswith("scalelab: ")


def test_a_reader_that_goes_away():
    "`scalelab ... | head -1`: no traceback."
    done = subprocess.run(["bash", "-c", f"{PROGRAM[0]} -c '{PROGRAM[2]}' train --help | head -1"], capture_output=True, text=True, env=environment(), timeout=60)
    assert done.stderr == "" and done.stdout.startswith("usage: scalelab train")


# ---- data


def test_clean_accounts_for_every_document(cleaned):
    folder, done = cleaned
    report = done.ok().json
    assert report == json.loads((folder / "report.json").read_text(encoding="utf-8"))
    stages, total = report["stages"], sum(len([x for x in f.read_text(encoding="utf-8").split("\n") if x]) for f in SAMPLES.glob("*.jsonl"))
    assert stages[0]["name"] == "read" and stages[0]["in"] == total == 185
    for stage in stages:
        assert stage["in"] == stage["out"] + sum(stage["removed"].values())
    assert [s["in"] for s in stages[1:]] == [s["out"] for s in stages[:-1]]
    kept = [d for f in sorted((folder / "documents").glob("*.jsonl.zst")) for d in read_zst(f)]
    assert len(kept) == stages[-1]["out"] == report["documents"]
    rejects = read_zst(folder / "rejects.jsonl.zst")
    assert len(rejects) == sum(sum(s["removed"].values()) for s in stages) > 10
    for row in rejects:
        assert set(row) == {"file", "line", "id", "stage", "reason", "snippet"} and row["stage"] in {s["name"] for s in stages} and row["reason"] in next(s["removed"] for s in stages if s["name"] == row["stage"])
    by_reason: dict[str, int] = {}
    for row in rejects:
        by_reason[row["reason"]] = by_reason.get(row["reason"], 0) + 1
    assert by_reason == {k: v for s in stages for k, v in s["removed"].items()}
    ids = {d["id"] for d in kept}
    assert len(ids) == len(kept) and not ids & {r["id"] for r in rejects}
    assert "year" in {k for d in kept for k in d} and all(d["licence"] == "Apache-2.0" for d in kept), "columns of the input were lost"


def test_clean_finds_what_was_planted(cleaned):
    folder, done = cleaned
    done.ok()
    kept = {d["id"]: d for f in (folder / "documents").glob("*.jsonl.zst") for d in read_zst(f)}
    told = truth()
    for junk in told["junk"]:
        assert junk["id"] not in kept or kept[junk["id"]]["text"] == junk.get("clean"), junk["kind"]
    for pair in told["exact_duplicates"] + told["near_duplicates"]:
        assert (pair["id"] in kept) + (pair["of"] in kept) == 1, pair
    for good in told["good_but_suspicious"] + told["over_long"] + [h["id"] for h in told["hard_negatives"]] + [h["of"] for h in told["hard_negatives"]]:
        assert good in kept, good


def test_clean_writes_its_page(cleaned):
    folder, done = cleaned
    page = (done.ok() and folder / "report.html").read_text(encoding="utf-8")
    for word in ("quality", "dedup", "near_duplicate", "185"):
        assert word in page
    assert not re.search(r"""(?:src|href)\s*=\s*["']?https?:""", page)


def test_clean_again_does_nothing(cleaned, call):
    folder, done = cleaned
    before = listing(folder)
    again = call("data", "clean", *sorted(SAMPLES.glob("*.jsonl")), "--out", folder, "--json").ok()
    assert listing(folder) == before and again.json == done.json


def test_clean_notices_other_input_and_other_rules(call, tmp_path):
    shutil.copy(SAMPLES / "en_prose.jsonl", tmp_path / "a.jsonl")
    first = call("data", "clean", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--json").ok().json
    with open(tmp_path / "a.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"id": "new", "text": "A further document about a lighthouse, its keeper and the two boats that bring him bread on Fridays. He reads everything twice."}) + "\n{broken\n")
    second = call("data", "clean", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--json").ok()
    assert second.json["documents"] == first["documents"] + 1 and second.json["stages"][0]["in"] == first["stages"][0]["in"] + 2
    row = next(r for r in read_zst(tmp_path / "out" / "rejects.jsonl.zst") if r["stage"] == "read")
    assert row["file"].endswith("a.jsonl") and row["line"] == (tmp_path / "a.jsonl").read_text(encoding="utf-8").count("\n")
    recipe = tmp_path / "rules.yaml"
    recipe.write_text("near_threshold: 0.0\nkeep: first\n")
    third = call("data", "clean", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--recipe", recipe, "--json").ok().json
    assert third["recipe"]["keep"] == "first" and third["recipe"]["near_threshold"] == 0


def test_tokenize(tokenized, cleaned, call):
    import numpy as np
    from tokenizers import Tokenizer

    folder, done = tokenized
    report = done.ok().json
    assert report["leaks"] == [] and 257 <= report["vocab_size"] <= 600
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))  # the HF format, read by HF's own reader
    assert tokenizer.get_vocab_size() == report["vocab_size"]
    docs = [d for f in (cleaned[0] / "documents").glob("*.zst") for d in read_zst(f)]
    seen = []
    for split in ("train", "valid"):
        index = json.loads((folder / "shards" / split / "index.json").read_text())
        n = sum(report["tokens"][split].values())
        rows = np.dtype([("offset", "<u8"), ("bytes", "<u4"), ("domain", "<u2"), ("source", "<u2")])
        for file in sorted((folder / "shards" / split).glob("?????.bin")):
            ids = np.fromfile(file, "<u2")
            table = np.fromfile(file.with_name(file.stem + ".docs.bin"), rows)
            ends = [*table["offset"][1:].tolist(), len(ids) - 1]
            for begin, end, size in zip(table["offset"].tolist(), ends, table["bytes"].tolist()):
                assert ids[begin] == ids[end] == tokenizer.token_to_id("<|endoftext|>")
                text = tokenizer.decode(ids[begin + 1 : end].tolist(), skip_special_tokens=False)
                assert len(text.encode()) == size
                seen.append(text)
                n -= end - begin - 1
        assert n == 0 and index["tokenizer_hash"] == report["tokenizer_hash"]
    assert sorted(seen) == sorted(d["text"] for d in docs), "what was cleaned is what was written, text by text"
    before = listing(folder)
    again = call("data", "tokenize", cleaned[0] / "documents", "--out", folder, "--vocab_size", 600, "--seq_len", 64, "--valid_fraction", 0.1, "--json").ok()
    assert listing(folder) == before and again.json == report, "the second call wrote again"


def test_tokenize_with_a_given_tokenizer(tokenized, cleaned, call, tmp_path):
    report = call("data", "tokenize", cleaned[0] / "documents", "--out", tmp_path / "t", "--tokenizer", tokenized[0] / "tokenizer.json", "--json").ok().json
    assert report["tokenizer_hash"] == tokenized[1].json["tokenizer_hash"]
    assert (tmp_path / "t" / "tokenizer.json").read_bytes() == (tokenized[0] / "tokenizer.json").read_bytes()


def test_inspect(call, tokenized, shards, tmp_path):
    result = call("data", "inspect", *sorted(SAMPLES.glob("*.jsonl")), "--json", "--html", tmp_path / "p.html").ok().json
    assert result["total"]["documents"] == 185 and set(result["domains"]) == {"zh_prose", "en_prose", "code", "dialogue", "legal"}
    assert "zh_prose" in (tmp_path / "p.html").read_text(encoding="utf-8")
    bad = call("data", "inspect", SAMPLES / "bad", "--json").ok()
    assert sum(bad.json["rejected"].values()) > 3 and "rejected" in bad.err
    result = call("data", "inspect", shards / "train", shards / "valid", "--json").ok().json
    for split in ("train", "valid"):
        totals = result["shards"][str(shards / split)]["totals"]
        assert {d: t["tokens"] for d, t in totals.items()} == tokenized[1].json["tokens"][split]
    text = call("data", "inspect", shards / "train").ok().out
    assert all(d in text for d in ("code", "legal", "zh_prose"))


# ---- train, evaluate, diagnose


def test_train_speaks_on_the_right_stream(cli, train_words, tmp_path):
    done = cli("train", *train_words(tmp_path / "run", trainer__steps=6), "--json").ok()
    assert done.json == {"global_step": 6, "consumed_tokens": done.json["consumed_tokens"], "run": str(tmp_path / "run")}
    assert done.json["consumed_tokens"] == steps(tmp_path / "run")[6]["consumed_tokens"]
    assert done.err == "", "a quick run that went well has nothing to say on stderr"
    assert {"config.yaml", "environment.json", "metrics.jsonl", "events.jsonl", "checkpoints"} <= set(os.listdir(tmp_path / "run"))
    assert "Traceback" not in done.err and oct((tmp_path / "run" / "metrics.jsonl").stat().st_mode)[-3:] == "644"


def test_dotted_words_win_over_the_file(call, tmp_path):
    import yaml

    out = call("train", "--config", "loop", "--optim.lr", "0.5", "--trainer.steps=7", "--print_config").ok().out
    config = yaml.safe_load(out)
    assert config["optim"]["lr"] == 0.5 and config["trainer"]["steps"] == 7 and config["model"]["n_layers"] == 3


@pytest.mark.parametrize("keys", [{"schedule__min_ratio": 0.0}, {"schedule__kind": "wsd", "schedule__min_ratio": 0.0}, {"optim__lr": 0.0}], ids=str)
def test_a_rate_of_zero_is_a_step_that_does_not_move(keys, call, train_words, tmp_path):
    "The last step of a schedule that ends at 0, and a rate that is 0 throughout."
    call("train", *train_words(tmp_path / "run", trainer__steps=8, **keys)).ok()
    last = steps(tmp_path / "run")[8]
    assert last["lr"] < 1e-12 and last["update_norm"] < 1e-9


def test_init_from_an_export(call, healthy, train_words, tmp_path):
    "A new run that begins with exported weights begins where they ended."
    call("export", healthy, "--at=latest", "--out", tmp_path / "hf").ok()
    call("train", *train_words(tmp_path / "new", trainer__steps=2, optim__lr=1e-9, schedule__warmup_steps=1), f"--init_from={tmp_path / 'hf'}").ok()
    fresh = train_words(tmp_path / "fresh", trainer__steps=2, optim__lr=1e-9, schedule__warmup_steps=1)
    call("train", *fresh).ok()
    a, b = steps(tmp_path / "new"), steps(tmp_path / "fresh")
    assert a[1]["batch_hash"] == b[1]["batch_hash"] and a[1]["loss"] < b[1]["loss"] - 0.1


def test_evaluate(call, cli, healthy, shards, tmp_path):
    result = cli("evaluate", healthy, "--at", "latest", "--json").ok().json
    whole = [r for r in lines(healthy / "metrics.jsonl")[0] if r["kind"] == "eval"][-1]
    assert result["bits_per_byte"] == pytest.approx(whole["bits_per_byte"], rel=1e-6), "the same as at the end of the training"
    assert set(result["bits_per_byte_by_domain"]) == {"code", "dialogue", "en_prose", "legal", "zh_prose"}
    first = call("evaluate", healthy, "--at", "30", "--json").ok().json["bits_per_byte"]
    assert first > result["bits_per_byte"]
    assert call("evaluate", healthy / "checkpoints" / "step-00000040", "--json").ok().json == result
    text = tmp_path / "t.txt"
    text.write_text("The lighthouse keeper reads everything twice. " * 40)
    own = call("evaluate", healthy, "--data", text, SAMPLES / "code.jsonl", "--json").ok().json
    assert own["bits_per_byte"] > 0 and "code" in own["bits_per_byte_by_domain"] and len(own["bits_per_byte_by_domain"]) == 2
    table = call("evaluate", healthy).ok().out
    assert "bits per byte" in table and "zh_prose" in table


def test_diagnose_a_healthy_run(call, healthy):
    done = call("diagnose", healthy, "--json").ok()
    assert done.json["findings"] == []
    assert "nothing found" in call("diagnose", healthy).ok().out


@pytest.fixture(scope="module")
def faulty(call, train_words, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("faulty") / "run"
    call("train", *train_words(out, trainer__steps=60, trainer__global_batch=8, trainer__micro_batch=4, optim__lr=0.01, inject="bad_batch@45")).ok()
    return out


def test_diagnose_names_the_bad_batch(call, cli, faulty, tmp_path):
    done = cli("diagnose", faulty, "--json")
    assert done.code == 1 and done.err == ""
    found = done.json["findings"]
    assert found and found[0]["kind"] == "bad_batch" and found[0]["step"] == 45
    assert set(found[0]) >= {"kind", "step", "confidence", "evidence", "advice"} and 0 < found[0]["confidence"] <= 1
    assert steps(faulty)[45]["batch_hash"] in json.dumps(found[0]["evidence"])
    assert len([f for f in found if f["kind"] == "bad_batch"]) == 1
    text = call("diagnose", faulty)
    assert text.code == 1 and "step 45" in text.out and "advice" in text.out
    # without the run's own confession, and without its weights: the numbers alone tell
    blind = tmp_path / "blind"
    blind.mkdir()
    for name in ("metrics.jsonl", "environment.json"):
        shutil.copy(faulty / name, blind)
    (blind / "events.jsonl").write_text("".join(line for line in (faulty / "events.jsonl").read_text().splitlines(True) if '"inject"' not in line))
    again = call("diagnose", blind, "--json")
    assert again.code == 1 and (again.json["findings"][0]["kind"], again.json["findings"][0]["step"]) == ("bad_batch", 45)


@pytest.mark.parametrize("fault, kind, step", [("nan_gradient@12", "non_finite|skipped", 12), ("lr_spike@30", "loss_spike|divergence", 31), ("repeat_batch@30", "repeated_batches", 30), ("slow_data@30", "data_stall", 30)])
def test_diagnose_names_other_faults(fault, kind, step, call, train_words, tmp_path):
    call("train", *train_words(tmp_path / "run", trainer__steps=40, optim__lr=0.01, inject=fault)).ok()
    done = call("diagnose", tmp_path / "run", "--json")
    assert done.code == 1
    assert any(re.search(kind, f["kind"]) and f["step"] == step for f in done.json["findings"]), done.json["findings"]


# ---- compress, export, generate, report, bench


def test_quantize(call, cli, healthy, tmp_path):
    out = tmp_path / "int8"
    done = cli("compress", "quantize", healthy, "--out", out, "--json").ok()
    result = done.json
    assert result["kl"] >= 0 and 0 < result["top1_agreement"] <= 1 and isinstance(result["paid"], bool) and result["reason"]
    assert set(result["speed"]) >= {"scoring", "decoding"}
    sizes = [sum(f.stat().st_size for f in folder.glob("*.safetensors")) for folder in (out, tmp_path)]
    assert 0 < sizes[0] < (healthy / "checkpoints" / "step-00000040" / "rank-00000.safetensors").stat().st_size
    before, after = (call("evaluate", m, "--json", "--data", SAMPLES / "en_prose.jsonl").ok().json["bits_per_byte"] for m in (healthy, out))
    assert before != after and abs(before - after) < 0.02 * before
    assert call("generate", out, "--prompt", "The", "--max_new_tokens", 4, "--json").ok().json["tokens"] <= 4
    call("compress", "quantize", out, "--out", tmp_path / "twice").refused("quantised already")
    call("export", out, "--out", tmp_path / "hf").refused("int8")
    assert not (tmp_path / "hf").exists() and not (tmp_path / "twice").exists()


def test_export_is_proven(cli, healthy, tmp_path, require):
    from importlib.util import find_spec

    out = tmp_path / "hf"
    proof = cli("export", healthy, "--out", out, "--json").ok().json
    assert proof == json.loads((out / "proof.json").read_text(encoding="utf-8"))
    assert proof["ok"] is True and proof["max_abs_logit_difference"] <= 1e-5 and proof["greedy_tokens_equal"] is True
    assert {"config.json", "tokenizer.json", "proof.json"} <= set(os.listdir(out)) and list(out.glob("*.safetensors"))
    assert not [p for p in out.iterdir() if p.suffix in (".bin", ".pt", ".pkl")]
    require("transformers (pip install 'scalelab[deploy]')", find_spec("transformers") is not None)
    assert proof["reader"] == "transformers" and proof["token_ids_equal"] is True


def test_the_export_in_a_reader_that_is_not_ours(healthy, call, tmp_path, require):
    "transformers opens the folder by itself and gives our logits for a text of three languages."
    from importlib.util import find_spec

    require("transformers (pip install 'scalelab[deploy]')", find_spec("transformers") is not None)
    call("export", healthy, "--at=latest", "--out", tmp_path / "hf").ok()
    code = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from scalelab.trainer.checkpoint import quiet_model
folder, checkpoint = sys.argv[1:]
assert "scalelab.model.hf" not in sys.modules
theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
ids = AutoTokenizer.from_pretrained(folder, local_files_only=True)("def f(x):  # 春天的时候 the boats", return_tensors="pt")["input_ids"]
with quiet_model(checkpoint) as ours, torch.no_grad():
    a, b = ours.logits(ours.hidden(ids)), theirs(ids).logits
assert ids.shape[1] > 10
print(float((a - b).abs().max()), float(a.abs().max()), bool((a.argmax(-1) == b.argmax(-1)).all()))
"""
    done = run([sys.executable, "-c", code, tmp_path / "hf", healthy / "checkpoints" / "step-00000040"], HF_HUB_OFFLINE="1").ok()
    difference, size, same = done.out.split()
    assert float(difference) <= 1e-5 and float(size) > 0.1 and same == "True"


def test_generate(call, cli, healthy, tmp_path):
    words = ["--prompt", "The first", "--max_new_tokens", "12", "--json"]
    greedy = [f("generate", healthy, "--temperature=0", *words).ok().json["text"] for f in (cli, call, call)]
    assert len(set(greedy)) == 1, "greedy twice is the same, in whatever process"
    assert call("generate", healthy, "--temperature=0", "--seed=5", *words).ok().json["text"] == greedy[0]
    drawn = {call("generate", healthy, f"--seed={s}", "--temperature=1.5", *words).ok().json["text"] for s in (1, 1, 2, 3)}
    assert len(drawn) == 3, "a seed is a text"
    done = call("generate", healthy, *words).ok()
    assert set(done.json) == {"prompt", "text", "settings", "tokens", "tokens_per_second"} and done.json["tokens"] <= 12 and done.json["tokens_per_second"] > 0
    assert "temperature" in done.err, "the settings are told"
    assert call("generate", healthy, "--prompt", "春天", "--max_new_tokens", 3).ok().out.startswith("春天")
    assert call("generate", healthy, "--prompt", "<|endoftext|>", "--max_new_tokens", 3).ok().out.startswith("<|endoftext|>")
    long = call("generate", healthy, "--prompt", "bread " * 200, "--max_new_tokens", 100, "--json").ok().json
    assert long["tokens"] > 0, "longer than the context"
    call("export", healthy, "--out", tmp_path / "hf").ok()
    assert call("generate", tmp_path / "hf", "--temperature=0", *words).ok().json["text"] == greedy[0], "the export writes the same text"


def test_report(call, healthy, faulty):
    page = Path(call("report", healthy, "--json").ok().json["report"])
    assert page == healthy / "report.html"
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>") and "<svg" in text
    assert not re.search(r"""(?:src|href|url\()\s*=?\s*["']?(?:https?:)?//""", text), "it asks for something from a network"
    assert "bad_batch" not in text
    call("report", faulty).ok()
    assert "bad_batch" in (faulty / "report.html").read_text(encoding="utf-8")


def test_bench_lists_and_runs(call, cli, tmp_path):
    listed = call("bench", "--json").ok().json["benches"]
    assert listed and all({"name", "needs"} <= set(b) for b in listed)
    done = cli("bench", "trainer-checkpoint", "--quick", "--json", "--out", tmp_path / "b.json")
    assert done.code in (0, 1)
    rows = done.json["rows"]
    assert rows and all({"what", "value", "unit", "peers", "target", "holds"} <= set(r) for r in rows)
    assert done.code == (0 if all(r["holds"] for r in rows) else 1)
    assert json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))["rows"] == rows


def test_a_stopped_command_says_how_to_go_on(cleaned, tmp_path):
    "Ctrl-C in the middle of `data clean`: exit code 130, one line, no half report, and the same call again finishes."
    big = tmp_path / "big.jsonl"
    rows = [json.loads(line) for line in (SAMPLES / "en_prose.jsonl").read_text(encoding="utf-8").splitlines()]
    with open(big, "w", encoding="utf-8") as file:
        for i in range(300):
            for r in rows:
                words = r["text"].split()
                file.write(json.dumps({"id": f"{r['id']}-{i}", "text": " ".join(words[(i * 7) % len(words):] + words[: (i * 7) % len(words)]) + f" {i}"}) + "\n")
    command = [*PROGRAM, "data", "clean", str(big), "--out", str(tmp_path / "out"), "--workers", "1"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    assert wait_until(lambda: (tmp_path / "out").exists(), child)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130 and out == "" and err.splitlines()[-1].startswith("scalelab: stopped") and "Traceback" not in err
    assert not (tmp_path / "out" / "report.json").exists()
