"""Cleaning as processes: kills of the run and of its workers, Ray, full disks, object stores, two runs at once, and what is on the disk afterwards."""
from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from s3servers import BUCKET, moto_server, rclone_server, variables  # noqa: F401 - fixtures
from support import SAMPLES, environment, run, start, wait_until

COMMAND = "import sys; from scalelab.core.arguments import run_main; from scalelab.data.{0} import {1}_command; sys.exit(run_main(lambda: {1}_command(sys.argv[1:])))"
CLEAN, TOKENIZE = ([sys.executable, "-c", COMMAND.format(*names)] for names in (("pipeline", "clean"), ("tokenize_stage", "tokenize")))  # the commands without their page
NOT_COMPARED = ("report.html", "cost.json")  # the page and the cost: what depends on the clock
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def sentences() -> list[str]:
    import re

    texts = [json.loads(line)["text"] for name in ("en_prose", "zh_prose", "legal") for line in (SAMPLES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    return sorted({s.strip() for text in texts for s in re.split(r"(?<=[.!?。！？])\s*", text) if 20 < len(s) < 200})


def make_corpus(folder: Path, documents: int, files: int = 4, seed: int = 0) -> Path:
    "Documents of shuffled sentences, with exact copies, near copies, junk and broken lines, ids that clash between the files."
    rng, pool, rows = random.Random(seed), sentences(), []
    for i in range(documents):
        text = " ".join(rng.sample(pool, rng.randint(5, 25)))
        if rows and rng.random() < 0.1:
            text = rng.choice(rows)["text"] + rng.choice(["", " ", " A last sentence was added."])
        rows.append({"id": str(i // files), "text": "!!! $$$ " * 30 if i % 50 == 7 else text, "domain": "web", "year": 2000 + i % 25, "note": i})
    folder.mkdir(parents=True)
    for k in range(files):
        lines = [json.dumps(row, ensure_ascii=False) for row in rows[k::files]]
        lines[len(lines) // 2 : len(lines) // 2] = ["{broken", '{"id": "x"}']
        (folder / f"{k}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def products(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file() and p.name not in NOT_COMPARED}


def read_zst(path: Path) -> list[dict]:
    import zstandard

    with zstandard.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


WORDS = ["--part_mb=0.1", "--file_mb=0.5"]


def clean_words(corpus: Path, out: Path, *more: str) -> list:
    return [*CLEAN, corpus, "--out", out, *WORDS, *more]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus") / "in", 1500)


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    run(clean_words(corpus, out, "--workers=1")).ok()
    return products(out)


def descendants(pid: int) -> dict[int, str]:
    "Processes below `pid` with their command lines."
    parents, found = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    edge = {pid}
    while edge:
        edge = {p for p, parent in parents.items() if parent in edge and p not in found}
        for p in edge:
            try:
                found[p] = (Path("/proc") / str(p) / "cmdline").read_text().replace("\0", " ")
            except OSError:
                found[p] = ""
    return found


# ---- what comes out


def test_the_account(corpus, undisturbed):
    report = json.loads(undisturbed["report.json"])
    assert report["stages"][0]["in"] == 1500 + 8 and report["stages"][0]["removed"] == {"invalid_json": 4, "missing_text": 4}
    assert [s["in"] for s in report["stages"][1:]] == [s["out"] for s in report["stages"][:-1]]
    assert all(s["in"] == s["out"] + sum(s["removed"].values()) for s in report["stages"])
    assert {"exact_duplicate", "near_duplicate"} <= set(report["stages"][-1]["removed"]) and report["stages"][1]["removed"]
    files = sorted(name for name in undisturbed if name.startswith("documents/"))
    assert len(files) > 2 and files == [f"documents/{k:05d}.jsonl.zst" for k in range(len(files))]


def test_every_document_is_kept_or_told(corpus, undisturbed, tmp_path):
    for name, raw in undisturbed.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(raw)
    kept = [row for p in sorted((tmp_path / "documents").iterdir()) for row in read_zst(p)]
    rejects = read_zst(tmp_path / "rejects.jsonl.zst")
    given = {(f"{k}.jsonl", n): json.loads(line) for k in range(4) for n, line in enumerate((corpus / f"{k}.jsonl").read_text(encoding="utf-8").splitlines(), 1) if line.startswith('{"id": "') and '"text"' in line}
    assert len({d["id"] for d in kept}) == len(kept) and len(kept) + len(rejects) == 1508
    told = {(Path(r["file"]).name, r["line"]) for r in rejects}
    left = [row for place, row in sorted(given.items()) if place not in told]
    assert [d["note"] for d in kept] == [row["note"] for row in left] and [d["text"] for d in kept] == [row["text"] for row in left], "the order of the input, nothing altered"
    names = {(f.split(":")[0] if ":" in (f := d["id"]) else "0.jsonl") for d in kept}
    assert names == {f"{k}.jsonl" for k in range(4)}, "ids that clash carry the name of their file"
    samples = Counter(row["reason"] for row in read_zst(tmp_path / "samples.jsonl.zst"))
    assert samples["kept"] == 200 and all(samples[r] == min(200, n) for r, n in Counter(r["reason"] for r in rejects if r["stage"] != "read").items())


def test_two_workers_make_the_same_bytes(corpus, undisturbed, tmp_path):
    run(clean_words(corpus, tmp_path / "out", "--workers=2")).ok()
    assert products(tmp_path / "out") == undisturbed


# ---- kills


def marks(out: Path) -> dict[str, int]:
    "When each finished part was made; a folder that is put away while we look is looked at again."
    for _ in range(50):
        try:
            return {str(p.relative_to(out)): p.stat().st_mtime_ns for p in (out / "work").rglob("*.part")} if (out / "work").exists() else {}
        except FileNotFoundError:
            time.sleep(0.02)
    raise AssertionError(f"{out / 'work'} changes all the time")


def test_killed_at_random_moments(corpus, undisturbed, tmp_path):
    "SIGKILL of the whole run, six times; what was committed is not made again, and the end has the undisturbed bytes."
    out, rng, seen = tmp_path / "out", random.Random(5), 0
    for k in range(6):
        child = start(clean_words(corpus, out, "--workers=2"), tmp_path / "log")
        goal = seen + 1 + rng.randrange(4)
        wait_until(lambda: len(marks(out)) >= goal or (out / "report.json").exists(), child)
        time.sleep(rng.random() * 0.1)
        workers = descendants(child.pid)
        child.kill()
        child.wait()
        assert wait_until(lambda: not [p for p in workers if Path(f"/proc/{p}/cmdline").exists() and Path(f"/proc/{p}/cmdline").read_text()]), "workers outlive their parent"
        if (out / "report.json").exists():
            break
        before = marks(out)
        assert len(before) >= seen
        seen = len(before)
        assert not (out / "documents").exists() or (out / "work" / "out" / "report.json").exists()
    assert k >= 2, "it was over before it could be killed often"
    before = marks(out)
    done = start(clean_words(corpus, out, "--workers=2"), tmp_path / "log")
    untouched = True
    while done.poll() is None:
        now = marks(out)
        untouched &= all(now[p] == t for p, t in before.items() if p in now)
        time.sleep(0.02)
    assert done.returncode == 0, (tmp_path / "log").read_text()
    assert untouched and products(out) == undisturbed and not (out / "work").exists()


def test_a_killed_worker_costs_a_retry(corpus, undisturbed, tmp_path):
    out = tmp_path / "out"
    child = start(clean_words(corpus, out, "--workers=2"), tmp_path / "log")
    assert wait_until(lambda: len(marks(out)) >= 2, child)
    below = descendants(child.pid)
    leaves = [p for p in below if not descendants(p) and "forkserver" in below[p] and "tracker" not in below[p]]
    assert leaves, below
    os.kill(leaves[0], signal.SIGKILL)
    assert child.wait(60) == 0, (tmp_path / "log").read_text()
    assert products(out) == undisturbed


def test_ctrl_c_stops_and_goes_on(corpus, undisturbed, tmp_path):
    out = tmp_path / "out"
    child = start(clean_words(corpus, out, "--workers=2"), tmp_path / "log", start_new_session=True)
    assert wait_until(lambda: len(marks(out)) >= 2, child)
    os.killpg(child.pid, signal.SIGINT)
    assert child.wait(30) == 130
    assert (tmp_path / "log").read_text().splitlines()[-1].startswith("scalelab: stopped by Ctrl-C") and "Traceback" not in (tmp_path / "log").read_text()
    run(clean_words(corpus, out, "--workers=2")).ok()
    assert products(out) == undisturbed


def test_two_at_once(corpus, tmp_path):
    out = tmp_path / "out"
    child = start(clean_words(corpus, out, "--workers=1"), tmp_path / "log")
    assert wait_until(lambda: (out / "work" / "lock").exists(), child)
    run(clean_words(corpus, out, "--workers=1")).refused("another run", str(out))
    assert child.wait(60) == 0, (tmp_path / "log").read_text()


def test_another_recipe_begins_anew(corpus, tmp_path):
    out = tmp_path / "out"
    child = start(clean_words(corpus, out, "--workers=1"), tmp_path / "log")
    assert wait_until(lambda: len(marks(out)) >= 2, child)
    child.kill()
    child.wait()
    done = run(clean_words(corpus, out, "--workers=1", "--keep=first")).ok()
    assert "another job" in done.err and json.loads((out / "report.json").read_text())["recipe"]["keep"] == "first"


# ---- Ray


@pytest.fixture()
def ray_here(require):
    require("ray", importlib.util.find_spec("ray") is not None)


def test_ray_makes_the_same_bytes_though_a_worker_is_killed(ray_here, corpus, undisturbed, tmp_path):
    out = tmp_path / "out"
    child = start(clean_words(corpus, out, "--workers=2", "--engine=ray"), tmp_path / "log")
    assert wait_until(lambda: len(marks(out)) >= 2, child, seconds=90)
    busy = [p for p, words in descendants(child.pid).items() if "ray::read_task" in words]
    if busy:  # it may be over already; then the bytes are compared all the same
        os.kill(busy[0], signal.SIGKILL)
    assert child.wait(120) == 0, (tmp_path / "log").read_text()[-2000:]
    assert products(out) == undisturbed


# ---- what belongs to others


def test_nothing_of_others_is_replaced(corpus, tmp_path):
    "An input inside of a product, other people's documents or work, the products of another command: refused, nothing touched."
    def everything() -> dict:
        return {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    for name in ("documents", "work"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        (tmp_path / "mine" / name / "notes.txt").write_text("years of work, told in a few words that make a document")
    before = everything()
    run([*CLEAN, tmp_path / "mine" / "documents", "--out", tmp_path / "mine", *WORDS]).refused("take the place of the input")
    run([*CLEAN, corpus, "--out", tmp_path / "mine", *WORDS]).refused("documents", "would replace")
    run([*TOKENIZE, corpus, "--out", tmp_path / "mine"]).refused("work", "would replace")
    run([*CLEAN, corpus, "--out", ""]).refused("names no folder")
    run([*CLEAN, corpus, "--out", "memory://out"]).refused("would be gone")
    assert everything() == before
    run(clean_words(corpus, tmp_path / "out")).ok()
    made = {p: b for p, b in everything().items() if "out" in p.parts}
    run([*TOKENIZE, tmp_path / "out" / "documents", "--out", tmp_path / "out"]).refused("would replace")
    (tmp_path / "none.yaml").write_text("stages: [{length: {min: 1000000}}]\n")
    assert run(clean_words(corpus, tmp_path / "out", "--recipe", tmp_path / "none.yaml")).code == 1
    assert {p: b for p, b in everything().items() if "out" in p.parts and "work" not in p.parts} == made, "a failed call leaves the products of the one before"
    run(clean_words(corpus, tmp_path / "out")).ok()


# ---- full disks

DISK = """
mount -t tmpfs -o size=$1 tmpfs "$2" || exit 90
head -c $3 /dev/zero > "$2/filler"
copy=$4; shift 4
"$@" > "$copy/full.out" 2> "$copy/full.err"; echo $? > "$copy/full.code"
find "$DISK" -name "*.tmp" > "$copy/left"
ls "$DISK/out/work/pass-0" > "$copy/parts" 2> /dev/null
rm "$DISK/filler"
"$@" > "$copy/again.out" 2> "$copy/again.err"; echo $? > "$copy/again.code"
cp -a "$DISK/out" "$copy/out"
"""


@pytest.mark.parametrize("filler", [4_900_000, 4_200_000], ids=["parts", "products"])
def test_a_disk_that_fills_up(filler, require, corpus, undisturbed, tmp_path):
    (tmp_path / "probe").mkdir()
    allowed = shutil.which("unshare") and subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path / "probe")], capture_output=True, timeout=20).returncode == 0
    require("a private mount namespace (unshare --user --mount)", bool(allowed))
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    copy.mkdir()
    words = [str(w) for w in clean_words(corpus, disk / "out", "--workers=2")]
    done = subprocess.run([*NAMESPACE, "bash", "-c", DISK, "bash", "6000000", str(disk), str(filler), str(copy), *words], env=environment(DISK=str(disk)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = (copy / "full.err").read_text()
    assert (copy / "full.code").read_text().strip() == "1" and said.startswith("scalelab: ") and len(said.splitlines()) == 1, said
    assert "No space left" in said and "again" in said and (copy / "left").read_text() == "", said
    assert (copy / "again.code").read_text().strip() == "0", (copy / "again.err").read_text()
    assert products(copy / "out") == undisturbed


# ---- object stores


@pytest.mark.parametrize("kind", ["moto_server", "rclone_server"])
def test_from_store_to_store_though_the_server_stops(kind, corpus, undisturbed, tmp_path, request):
    "Inputs and output are objects; in the middle the server is away for ten seconds: killed and started again, or, since moto's forgets everything when killed, frozen."
    from scalelab.data.storage import expand, get, put

    server = request.getfixturevalue(kind)
    base = f"s3://{BUCKET}/{tmp_path.name}"
    with variables(server) as wanted:
        for file in sorted(corpus.iterdir()):
            put(file, f"{base}/in/{file.name}")
        words = [*CLEAN, f"{base}/in", "--out", f"{base}/out", *WORDS, "--workers=2"]
        more = {k: v for k, v in wanted.items()} | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        with open(tmp_path / "log", "ab") as log:
            child = subprocess.Popen([str(w) for w in words], env=environment(**more), stdout=log, stderr=log)
        wait_until(lambda: any((tmp_path / "cache").rglob("*.part")), child)
        away, back = (server.kill, server.start) if server.name == "rclone" else (server.freeze, server.thaw)
        away()
        time.sleep(10)
        back()
        assert child.wait(120) == 0, (tmp_path / "log").read_text()[-2000:]
        got = tmp_path / "got"
        for remote in expand(f"{base}/out"):
            place = got / remote.url.split("/out/", 1)[1]
            place.parent.mkdir(parents=True, exist_ok=True)
            get(remote, place)
        mine = products(got)
        same = {name for name in undisturbed if name.startswith("documents/") or name == "card.md"}
        assert set(mine) == set(undisturbed) and all(mine[name] == undisturbed[name] for name in same)
        again = run(words, **more).ok()
        assert "documents" in again.out and not any((tmp_path / "cache").rglob("*.part")), "the same call again does nothing"


@pytest.mark.parametrize("kind", ["moto_server", "rclone_server"])
def test_a_truncated_object_costs_its_rest(kind, tmp_path, request):
    "An object that was cut off in the middle: what came before the cut is kept, the cut is told with its file and line, the other object is whole."
    import gzip

    from scalelab.data.storage import get, put

    server, base = request.getfixturevalue(kind), f"s3://{BUCKET}/{tmp_path.name}"
    rng = random.Random(3)
    rows = [{"id": f"{i:03}", "text": " ".join(f"word{rng.randrange(10**6)}" for _ in range(60))} for i in range(200)]
    packed = [gzip.compress("".join(json.dumps(r) + "\n" for r in part).encode()) for part in (rows[:100], rows[100:])]
    for name, content in (("cut", packed[0][: len(packed[0]) // 2]), ("whole", packed[1])):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(content)
    (tmp_path / "recipe.yaml").write_text("stages: [exact]\n")
    with variables(server) as wanted:
        for name in ("cut", "whole"):
            put(tmp_path / f"{name}.jsonl.gz", f"{base}/in/{name}.jsonl.gz")
        done = run([*CLEAN, f"{base}/in", "--out", f"{base}/out", "--recipe", tmp_path / "recipe.yaml", "--json"], **wanted, XDG_CACHE_HOME=str(tmp_path / "cache")).ok()
        get(f"{base}/out/rejects.jsonl.zst", tmp_path / "rejects.jsonl.zst")
    report = json.loads(done.out)
    assert 130 <= report["documents"] < 200 and report["stages"][0]["removed"] == {"truncated_stream": 1}, report["stages"]
    (told,) = read_zst(tmp_path / "rejects.jsonl.zst")
    assert told["file"].endswith("cut.jsonl.gz") and told["line"] == report["documents"] - 100 + 1, told


def test_wrong_keys_are_told_before_the_work(rclone_server, corpus, tmp_path):  # noqa: F811
    with variables(rclone_server, AWS_SECRET_ACCESS_KEY="wrong") as wanted:
        words = [*CLEAN, corpus, "--out", f"s3://{BUCKET}/x", *WORDS]
        line = run(words, **wanted, XDG_CACHE_HOME=str(tmp_path / "cache")).refused("s3://")
        assert "wrong" not in line.replace("wrong key", "") and not any((tmp_path / "cache").rglob("*.part"))


# ---- bad input


def test_a_million_empty_documents_in_small(call, tmp_path):
    with open(tmp_path / "a.jsonl", "w") as file:
        file.writelines(f'{{"id": {i}, "text": ""}}\n' for i in range(50_000))
        file.write(json.dumps({"id": "good", "text": "A document about a lighthouse, its keeper and the two boats that bring him bread on Fridays."}) + "\n")
    report = call("data", "clean", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--json").ok().json
    assert report["stages"][0] == {"name": "read", "in": 50_001, "out": 1, "removed": {"empty_text": 50_000}} and report["length_limits"]["prose"]["enough"] is False


def test_one_line_of_many_megabytes(call, tmp_path):
    rng, pool = random.Random(0), sentences()
    text = " ".join(" ".join(rng.sample(s.split(), len(s.split()))) for s in rng.choices(pool, k=150_000))
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": "long", "text": text}) + "\n" + json.dumps({"id": "short", "text": "A short one about the sea, a harbour and three ships that never came home."}) + "\n")
    report = call("data", "clean", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--json").ok().json
    assert report["documents"] == 2 and report["bytes"] > 8_000_000


@pytest.mark.parametrize("recipe, parts", [
    ("stages: [{ruls: {}}]", ["ruls", "rules"]), ("stages: [{near: {treshold: 0.9}}]", ["treshold", "threshold"]), ("stages: [{near: {threshold: 7}}]", ["threshold", "7"]),
    ("stages: rules", ["dash"]), ("stages: [near, near]", ["near"]), ("steps: []\nstages: []", ["steps"]),
], ids=lambda v: v if isinstance(v, str) else "")
def test_a_recipe_that_can_not_be_used(recipe, parts, corpus, tmp_path):
    from scalelab.core.config import UsageError
    from scalelab.data.pipeline import clean_command

    (tmp_path / "r.yaml").write_text(recipe)
    with pytest.raises(UsageError) as error:
        clean_command([str(corpus), "--out", str(tmp_path / "out"), "--recipe", str(tmp_path / "r.yaml")])
    assert all(p in str(error.value) for p in parts), error.value
    assert not (tmp_path / "out").exists()


def test_dry_run_writes_nothing(corpus, tmp_path, capsys):
    from scalelab.data.pipeline import clean_command

    assert clean_command([str(corpus), "--out", str(tmp_path / "out"), "--dry_run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0.8 < found["documents"] / 1500 < 1.2 and found["seconds"] > 0 and found["disk_bytes"] > 0 and not (tmp_path / "out").exists()


def test_tokenizing_is_killed_and_goes_on(corpus, undisturbed, tmp_path):
    documents = tmp_path / "documents"
    documents.mkdir()
    for name, raw in undisturbed.items():
        if name.startswith("documents/"):
            (tmp_path / name).write_bytes(raw)
    words = [*TOKENIZE, documents, "--vocab_size=1000", "--seq_len=64", "--part_mb=0.1"]
    whole, out = tmp_path / "whole", tmp_path / "out"
    run([*words, "--out", whole, "--workers=1"]).ok()
    for k in range(4):
        child = start([*words, "--out", out, "--workers=2"], tmp_path / "log")
        wait_until(lambda: len([*out.rglob("*.json")]) >= 4 * (k + 1), child)
        child.kill()
        child.wait()
    run([*words, "--out", out, "--workers=2"]).ok()
    for name in ("tokenizer.json", *(str(p.relative_to(whole)) for p in whole.rglob("*.bin")), "shards/train/index.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    assert not (out / "work").exists()
