"""Training as processes: two ranks, kills, signals, full disks, damaged and hostile checkpoints, and what the logs say afterwards."""
from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support import PROGRAM, TINY, TRAINER, assert_same_tensors, environment, events, last_checkpoint, lines, options, run, start, steps, tensors, wait_until

STEPS = 60


def torchrun(words: list[str], ranks: int = 2) -> list[str]:
    "The words under torchrun, which takes --run for its own --run-path: there it is --run_dir."
    words = [w.replace("--run=", "--run_dir=", 1) for w in words]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "scalelab.trainer.loop", *words]


@pytest.fixture(scope="module")
def undisturbed(call, train_words, shards, tmp_path_factory) -> Path:
    "60 steps in one go, without a checkpoint on the way: what every disturbed run must end like."
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    call("train", *train_words(out, trainer__steps=STEPS, trainer__eval_every=20, data__valid=shards / "valid")).ok()
    return out


@pytest.fixture()
def long_words(train_words, shards, tmp_path):
    "Words of the same training into a folder of the test's own, with a checkpoint after every step."
    def words(**keys) -> tuple[Path, list[str]]:
        out = tmp_path / "run"
        return out, train_words(out, trainer__steps=STEPS, trainer__eval_every=20, data__valid=shards / "valid", **({"trainer__checkpoint_every": 1} | keys))

    return words


def step_now(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return max((r["global_step"] for r in lines(path)[0]), default=0) if path.exists() else 0


def assert_ends_like(run_dir: Path, undisturbed: Path) -> None:
    "Same weights, optimizer, random states, losses and batches."
    assert_same_tensors(last_checkpoint(run_dir), last_checkpoint(undisturbed))
    a, b = steps(run_dir), steps(undisturbed)
    assert sorted(a) == sorted(b) == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm", "batch_hash", "consumed_tokens", "lr"):
        assert [a[s][key] for s in a] == [b[s][key] for s in a], key


# ---- ranks


@pytest.fixture(scope="module")
def pairs(call, train_words, tmp_path_factory) -> dict[tuple[str, int], Path]:
    "The same training on one and on two ranks, in single and in double precision."
    root = tmp_path_factory.mktemp("pairs")
    made = {(precision, ranks): root / f"{precision}-{ranks}" for precision in ("fp32", "fp64") for ranks in (1, 2)}
    words = {k: train_words(out, trainer__steps=30, precision=k[0], trainer__micro_batch=1, trainer__rank_every=10, trainer__checkpoint_every=15) for k, out in made.items()}
    with ThreadPoolExecutor(2) as pool:
        doubles = list(pool.map(lambda k: run(torchrun(words[k])), [k for k in made if k[1] == 2]))
    for done in [*doubles, *(call("train", *words[k]) for k in made if k[1] == 1)]:
        done.ok()
    return made


@pytest.mark.parametrize("precision, compared, tolerance", [("fp32", 20, 1e-5), ("fp64", 30, 1e-9)])
def test_two_ranks_train_like_one(pairs, precision, compared, tolerance):
    one, two = steps(pairs[precision, 1]), steps(pairs[precision, 2])
    assert sorted(one) == sorted(two) == list(range(1, 31))
    assert [one[s]["batch_hash"] for s in one] == [two[s]["batch_hash"] for s in one]
    assert len({r["batch_hash"] for r in one.values()}) == 30, "every step has data of its own"
    worst = max(abs(one[s]["loss"] - two[s]["loss"]) for s in range(1, compared + 1))
    assert worst <= tolerance, f"{worst:.1e}"
    assert one[30]["loss"] < one[1]["loss"] - 0.1, "and it learns"
    for key in ("valid_tokens", "consumed_samples", "consumed_tokens", "lr"):
        assert [one[s][key] for s in one] == [two[s][key] for s in one], key
    assert all(abs(one[s]["grad_norm"] - two[s]["grad_norm"]) < 1e-4 * one[s]["grad_norm"] for s in one)


def test_every_rank_leaves_its_checksum(pairs):
    rows = [r for r in lines(pairs["fp32", 2] / "metrics.jsonl")[0] if r["kind"] == "rank"]
    assert [(r["global_step"], r["rank"]) for r in rows] == [(s, rank) for s in (10, 20, 30) for rank in (0, 1)]
    for step in (10, 20, 30):
        assert len({r["param_checksum"] for r in rows if r["global_step"] == step}) == 1
    assert len({r["param_checksum"] for r in rows}) == 3


def test_two_ranks_write_one_log_and_both_random_states(pairs):
    run_dir = pairs["fp32", 2]
    assert len([r for r in lines(run_dir / "metrics.jsonl")[0] if r["kind"] == "step"]) == 30
    names = {p.name for p in last_checkpoint(run_dir).iterdir()}
    assert {"rank-00000.safetensors", "rank-00001.safetensors", "manifest.json", "model.json", "tokenizer.json"} <= names
    assert json.loads((run_dir / "environment.json").read_text())["world_size"] == 2


def test_resume_on_fewer_ranks(pairs, call, train_words, tmp_path):
    "Two ranks stop at step 15, one goes on: same samples, losses equal to 1e-9 in double precision."
    out = tmp_path / "run"
    shutil.copytree(pairs["fp64", 2], out, symlinks=True)
    shutil.rmtree(out / "checkpoints" / "step-00000030")
    (out / "checkpoints" / "latest").unlink()
    (out / "checkpoints" / "latest").symlink_to("step-00000015")
    words = train_words(out, trainer__steps=30, precision="fp64", trainer__micro_batch=1, trainer__rank_every=10, trainer__checkpoint_every=15)
    call("train", *words).ok()
    resumed = events(out, "resume")
    assert len(resumed) == 1 and resumed[0]["global_step"] == 15 and resumed[0]["world_size"] == 1 and resumed[0]["attempt"] == 1
    now, then = steps(out), steps(pairs["fp64", 1])
    assert [r["attempt"] for s, r in sorted(now.items())] == [0] * 15 + [1] * 15
    assert [now[s]["batch_hash"] for s in now] == [then[s]["batch_hash"] for s in now]
    assert max(abs(now[s]["loss"] - then[s]["loss"]) for s in now) <= 1e-9


def test_the_ranks_agree_on_an_unusable_call(train_words, tmp_path):
    "An impossible value under torchrun: no rank hangs, each says one line and no traceback, nothing is written."
    done = run(torchrun(train_words(tmp_path / "run", trainer__global_batch=3, trainer__micro_batch=1)))
    assert done.code != 0
    said = [line for line in done.err.splitlines() if line.startswith("scalelab: ")]
    assert said and all("trainer.global_batch: 3" in line and "2 or 4" in line for line in said)
    assert not (tmp_path / "run").exists()


# ---- kills and signals


@pytest.fixture()
def chain(train_words, shards, tmp_path):
    "`chain(name, seed)`: a run killed three times at moments of its own, the first and the third time inside a checkpoint's writing if it can be caught."
    def kill_thrice(name: str, seed: int) -> tuple[Path, list[str], int]:
        run_dir, log, dice, inside = tmp_path / name, tmp_path / f"{name}.log", random.Random(seed), 0
        words = train_words(run_dir, trainer__steps=STEPS, trainer__eval_every=20, data__valid=shards / "valid", trainer__checkpoint_every=1, trainer__keep_last=3)
        folder = run_dir / "checkpoints"
        for kill in range(3):
            goal = step_now(run_dir) + dice.randint(1, 5)
            child = start([*TRAINER, *words], log)
            assert wait_until(lambda: step_now(run_dir) >= goal, child), log.read_text()[-2000:]
            if kill != 1:
                assert wait_until(lambda: folder.exists() and any(p.startswith(".step-") for p in os.listdir(folder)), child, pause=0), "it ended before it could be killed"
            child.send_signal(signal.SIGKILL)
            assert child.wait(30) == -signal.SIGKILL, "it ended before it was killed"
            inside += folder.exists() and any(p.name.startswith(".step-") for p in folder.iterdir())
            for log_name in ("metrics.jsonl", "events.jsonl"):
                raw = (run_dir / log_name).read_bytes().split(b"\n")
                torn = [i for i, line in enumerate(raw) if line and not parses(line)]
                assert len(torn) <= kill + 1 and (not torn or kill or torn == [len(raw) - 1]), f"{log_name}: lines {torn} of {len(raw)}"
        return run_dir, words, inside

    return kill_thrice


def test_killed_again_and_again_ends_bit_identical(undisturbed, chain, call):
    "Two runs, three SIGKILLs each, most of them while a checkpoint is being written: both logs stay readable, the end is the same to the last bit."
    with ThreadPoolExecutor(2) as pool:
        killed = list(pool.map(chain, ("a", "b"), (7, 8)))
    assert sum(inside for _, _, inside in killed) >= 1, "no kill hit the writing of a checkpoint"
    for run_dir, words, _ in killed:
        assert step_now(run_dir) < STEPS
        call("train", *words).ok()
        assert len(events(run_dir, "resume")) + len(events(run_dir, "start")) == 4 and len(events(run_dir, "resume")) >= 2
        assert not [p for p in (run_dir / "checkpoints").iterdir() if p.name.startswith(".")], "leftovers of killed writers"
        assert_ends_like(run_dir, undisturbed)


def parses(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def test_a_kill_loses_no_finished_step(undisturbed, long_words, call):
    "The planted kill of rank 0 at step 33: all 32 steps before it are in the log, and the run goes on from the last checkpoint."
    run_dir, words = long_words(trainer__checkpoint_every=25)
    done = run([*TRAINER, *words, "--inject=kill@33"])
    assert done.code == -signal.SIGKILL
    assert sorted(steps(run_dir)) == list(range(1, 33)) and not lines(run_dir / "metrics.jsonl")[1]
    call("train", *words).ok()
    assert events(run_dir, "resume")[0]["global_step"] == 25
    assert_ends_like(run_dir, undisturbed)


def test_a_torn_line_is_passed_over(undisturbed, long_words, call):
    "A log whose last line was torn: every reader goes on, and the resumed run starts a line of its own."
    run_dir, words = long_words(trainer__checkpoint_every=20, trainer__stop_at=40)
    call("train", *words).ok()
    for name in ("metrics.jsonl", "events.jsonl"):
        raw = (run_dir / name).read_bytes()
        (run_dir / name).write_bytes(raw + b'{"schema": 1, "kind": "step", "loss": 5.12')
    for command in ("diagnose", "report"):
        assert call(command, run_dir).code in (0, 1)
    call("train", *[w for w in words if "stop_at" not in w]).ok()
    for name in ("metrics.jsonl", "events.jsonl"):
        assert len(lines(run_dir / name)[1]) == 1
    assert_ends_like(run_dir, undisturbed)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, None)], ids=["ctrl-c", "sigterm"])
def test_a_signal_saves_the_state(number, code, undisturbed, long_words, call):
    run_dir, words = long_words(trainer__checkpoint_every=1000)
    log = run_dir.parent / "log"
    child = start([*PROGRAM, "train", *words], log)
    assert wait_until(lambda: step_now(run_dir) >= 3, child), log.read_text()
    child.send_signal(signal.SIGSTOP)  # held still, so that a slow machine can't finish the run before the signal
    try:
        if number == signal.SIGINT:  # meanwhile a second process on the same run is refused, and changes nothing
            call("train", *words).refused(str(run_dir), "another process")
        child.send_signal(number)
    finally:
        child.send_signal(signal.SIGCONT)
    child.wait(60)
    text = log.read_text().splitlines()
    assert child.returncode == code or (code is None and child.returncode in (130, 143)), log.read_text()
    assert len(text) == 1 and text[0].startswith("scalelab: ") and "again" in text[0]
    stopped = step_now(run_dir)
    assert 3 <= stopped < STEPS, "it was done before the signal came"
    assert last_checkpoint(run_dir).name == f"step-{stopped:08d}"
    assert [e["after"] for e in events(run_dir, "state")][-1] == "stopped"
    call("train", *words).ok()
    assert events(run_dir, "resume")[0]["global_step"] == stopped
    assert_ends_like(run_dir, undisturbed)


def test_ctrl_c_on_two_ranks_saves_the_state(call, train_words, tmp_path):
    "As a terminal does it: the signal goes to the launcher and to every rank at once."
    out = tmp_path / "run"
    words = train_words(out, trainer__steps=2000, trainer__micro_batch=1)
    child = start(torchrun(words), tmp_path / "log", start_new_session=True)
    try:
        assert wait_until(lambda: step_now(out) >= 3, child, 90), (tmp_path / "log").read_text()[-2000:]
        os.killpg(child.pid, signal.SIGINT)
        child.wait(60)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode != 0
    stopped = step_now(out)
    assert stopped < 2000 and last_checkpoint(out).name == f"step-{stopped:08d}", (tmp_path / "log").read_text()[-3000:]
    call("train", *words, f"--trainer.stop_at={stopped + 2}").ok()
    assert events(out, "resume")[0]["global_step"] == stopped and step_now(out) == stopped + 2


# ---- full disk

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]

DISK = """
set -u
mount -t tmpfs -o size=$1 tmpfs "$2" || exit 90
head -c $3 /dev/zero > "$2/filler"
shift 3
out=$1; shift
"$@" > "$out/full.out" 2> "$out/full.err"; echo $? > "$out/full.code"
cp -a "$OLDPWD_RUN" "$out/after_full"
rm "$FILLER"
"$@" > "$out/again.out" 2> "$out/again.err"; echo $? > "$out/again.code"
cp -a "$OLDPWD_RUN" "$out/after_again"
"""


def on_small_disk(tmp_path: Path, size: int, filler: int, words) -> Path:
    "Train twice on a tmpfs of `size` bytes in a mount namespace of its own: with `filler` bytes taken, and with them freed."
    disk, out = tmp_path / "disk", tmp_path / "out"
    disk.mkdir()
    out.mkdir()
    env = environment(OLDPWD_RUN=str(disk / "run"), FILLER=str(disk / "filler"))
    done = subprocess.run([*NAMESPACE, "bash", "-c", DISK, "bash", str(size), str(disk), str(filler), str(out), *TRAINER, *words(disk / "run")], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture()
def small_disk(require, tmp_path):
    (tmp_path / "probe").mkdir()
    allowed = shutil.which("unshare") and subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path / "probe")], capture_output=True, timeout=20).returncode == 0
    require("a private mount namespace (unshare --user --mount)", bool(allowed))
    return lambda size, filler, words: on_small_disk(tmp_path, size, filler, words)


def test_a_disk_that_fills_up_with_checkpoints(small_disk, train_words, call, undisturbed):
    out = small_disk(8_000_000, 4_000_000, lambda run_dir: train_words(run_dir, trainer__steps=12, trainer__checkpoint_every=2, trainer__keep_last=0))
    code, said = (out / "full.code").read_text().strip(), (out / "full.err").read_text()
    assert code == "1" and len(said.splitlines()) == 1 and said.startswith("scalelab: "), said
    assert "No space left" in said and "step-" in said and "again" in said, said
    left = sorted((out / "after_full" / "checkpoints").glob("step-*"))
    assert left, "the disk was full before the first checkpoint: this test shows nothing"
    from scalelab.trainer.checkpoint import verify

    assert [verify(p) for p in left] == [""] * len(left), "what was finished is still good"
    assert not [p for p in (out / "after_full" / "checkpoints").iterdir() if p.name.startswith(".")], "half a checkpoint takes the space that is missing"
    assert not lines(out / "after_full" / "metrics.jsonl")[1]
    assert (out / "again.code").read_text().strip() == "0", (out / "again.err").read_text()
    assert events(out / "after_again", "resume")[0]["global_step"] == int(left[-1].name[5:])
    assert sorted(steps(out / "after_again")) == list(range(1, 13))


def test_a_disk_that_fills_up_with_log_lines(small_disk, train_words):
    "No room for a line of the log: one clear line, exit code 1, no torn line left behind, and it goes on when there is room."
    out = small_disk(2_000_000, 1_940_000, lambda run_dir: train_words(run_dir, trainer__steps=200, trainer__stop_at=150))
    said = (out / "full.err").read_text()
    assert (out / "full.code").read_text().strip() == "1" and len(said.splitlines()) == 1, said
    assert "metrics.jsonl" in said and "space" in said and "again" in said, said
    rows, torn = lines(out / "after_full" / "metrics.jsonl")
    assert len(rows) > 10 and not torn
    assert (out / "again.code").read_text().strip() == "0", (out / "again.err").read_text()
    assert sorted(steps(out / "after_again")) == list(range(1, 151))


# ---- missing, foreign, damaged and hostile checkpoints


@pytest.fixture()
def two_checkpoints(call, train_words, tmp_path) -> tuple[Path, list[str]]:
    "A run stopped at step 16 of 20 with checkpoints of steps 8 and 16, and the words that go on with it."
    words = train_words(tmp_path / "run", trainer__checkpoint_every=8)
    call("train", *words, "--trainer.stop_at=16").ok()
    return tmp_path / "run", words


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(bytes(raw))


def damage_tensor(c: Path) -> None:
    flip(c / "rank-00000.safetensors", -1001)


def damage_header(c: Path) -> None:
    flip(c / "rank-00000.safetensors", 40)


def damage_length(c: Path) -> None:
    raw = (c / "rank-00000.safetensors").read_bytes()
    (c / "rank-00000.safetensors").write_bytes(raw[:-10])


def damage_manifest(c: Path) -> None:
    (c / "manifest.json").write_bytes((c / "manifest.json").read_bytes()[:-50])


def damage_number(c: Path) -> None:
    "One digit of the manifest: still good JSON, but it says that other data was consumed."
    text = (c / "manifest.json").read_text()
    assert '"consumed_samples": 64' in text
    (c / "manifest.json").write_text(text.replace('"consumed_samples": 64', '"consumed_samples": 65'))


def damage_tokenizer(c: Path) -> None:
    flip(c / "tokenizer.json", 5000)


def lose_file(c: Path) -> None:
    (c / "rank-00000.safetensors").unlink()


@pytest.mark.parametrize("damage", [damage_tensor, damage_header, damage_length, damage_manifest, damage_number, damage_tokenizer, lose_file], ids=lambda f: f.__name__)
def test_a_damaged_checkpoint_is_left_for_the_one_before(damage, two_checkpoints, call, healthy):
    run_dir, words = two_checkpoints
    newest = run_dir / "checkpoints" / "step-00000016"
    damage(newest)
    call("train", *words).ok()
    assert events(run_dir, "resume")[0]["global_step"] == 8, "it went on from the damaged one"
    told = events(run_dir, "damaged")
    assert len(told) == 1 and "step-00000016" in told[0]["reason"]
    assert sorted(steps(run_dir)) == list(range(1, 21))
    again = {s: r["loss"] for s, r in steps(run_dir).items()}
    first = {r["global_step"]: r["loss"] for r in lines(run_dir / "metrics.jsonl")[0] if r["kind"] == "step" and r["attempt"] == 0}
    assert all(again[s] == first[s] for s in first), "steps 9 to 16 went differently the second time"


def test_nothing_good_is_left(two_checkpoints, call):
    run_dir, words = two_checkpoints
    for c in (run_dir / "checkpoints").glob("step-*"):
        damage_tensor(c)
    before = (run_dir / "metrics.jsonl").read_bytes()
    call("train", *words).refused("none of the 2 checkpoints", "step-00000016")
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    for command in (["evaluate"], ["export", "--out", run_dir.parent / "x"], ["generate", "--prompt", "a"]):
        call(command[0], run_dir, *command[1:]).refused("step-00000016", "damaged")
    assert not (run_dir.parent / "x").exists()


def test_missing_and_foreign_checkpoints(two_checkpoints, healthy, train_words, call, tmp_path, tokenized):
    run_dir, words = two_checkpoints
    call("train", *words, f"--resume={tmp_path / 'nowhere'}").refused("nowhere", "no such")
    (tmp_path / "empty").mkdir()
    call("train", *words, f"--resume={tmp_path / 'empty'}").refused("empty", "no checkpoint")
    call("train", *words, "--resume=never").refused(str(run_dir), "holds a run")
    checkpoint = run_dir / "checkpoints" / "step-00000016"
    other = train_words(tmp_path / "other", model__d_model=64)
    line = call("train", *other, f"--resume={checkpoint}").refused("step-00000016")
    assert "32" in line and "64" in line
    text = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(text | {"format": 99}))
    call("train", *words, f"--resume={checkpoint}").refused("format 99")
    call("train", *words, "--optim.lr=0.1").refused("optim.lr 0.003 -> 0.1")
    assert sorted(steps(run_dir)) == list(range(1, 17)), "a refused call went on training"


def test_other_shards_than_the_run_began_with(two_checkpoints, call, cleaned, tmp_path):
    run_dir, words = two_checkpoints
    call("data", "tokenize", cleaned[0] / "documents", "--out", tmp_path / "t", "--vocab_size", 600, "--seq_len", 64, "--seed", 5, "--valid_fraction", 0.2).ok()
    call("train", *words, f"--data.train={tmp_path / 't' / 'shards' / 'train'}").refused("other shards")


class Bomb:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_a_pickle_in_a_checkpoint_is_never_opened(two_checkpoints, call, tmp_path, healthy):
    run_dir, words = two_checkpoints
    marker = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(marker))
    pickle.loads(bomb)
    assert marker.exists(), "the bomb does not work: this test shows nothing"
    marker.unlink()
    names = (".metadata", "__0_0.distcp", "model.pt", "optimizer.pt", "pytorch_model.bin", "rng_state.pth", "training_args.bin", "scheduler.pt", "rank-00000.pt", "model.pkl")
    checkpoint, only = run_dir / "checkpoints" / "step-00000016", tmp_path / "only"
    only.mkdir()
    for folder in (checkpoint, only):
        for name in names:
            (folder / name).write_bytes(bomb)
    call("train", *words).ok()
    assert events(run_dir, "resume")[0]["global_step"] == 16
    for place in (checkpoint, run_dir):
        call("evaluate", place, "--data", Path(__file__)).ok()
        call("generate", place, "--prompt", "a", "--max_new_tokens", 2).ok()
        call("export", place, "--out", tmp_path / "hf").ok()
    for command in (["evaluate", only], ["generate", only], ["export", only, "--out", tmp_path / "x"], ["compress", "quantize", only, "--out", tmp_path / "x"], ["train", *words, f"--resume={only}"]):
        call(*command).refused("only")
    shutil.copy(tmp_path / "hf" / "config.json", only)  # now it looks like a HF folder whose weights are a pickle
    call("generate", only).refused("only", "pickle")
    call("train", *words[1:], f"--run={tmp_path / 'new'}", f"--init_from={only}").refused("only", "pickle")
    (checkpoint / "rank-00000.safetensors").write_bytes(bomb)
    call("evaluate", checkpoint).refused("step-00000016")
    assert not marker.exists(), "code from a checkpoint was executed"
    assert not (tmp_path / "x").exists()


# ---- data and places that can't be used


def test_a_tokenizer_that_is_not_the_shards(call, train_words, cleaned, tmp_path):
    call("data", "tokenize", cleaned[0] / "documents", "--out", tmp_path / "other", "--vocab_size", 500, "--seq_len", 64).ok()
    call("train", *train_words(tmp_path / "run", data__tokenizer=tmp_path / "other" / "tokenizer.json")).refused("tokenizer", "tokenize again")
    call("train", *train_words(tmp_path / "run", data__valid=tmp_path / "other" / "shards" / "valid")).refused("tokenizer")
    assert not (tmp_path / "run").exists(), f"nothing was started, and yet there is {os.listdir(tmp_path / 'run')}"


def test_a_damaged_shard_is_named(call, train_words, shards, tmp_path):
    shutil.copytree(shards, tmp_path / "shards")
    flip(tmp_path / "shards" / "train" / "00000.bin", 1234)
    call("train", *train_words(tmp_path / "run", data__train=tmp_path / "shards" / "train")).refused("00000.bin")
    assert not (tmp_path / "run").exists()


def test_a_corpus_smaller_than_one_batch(call, train_words, tmp_path):
    folder = tmp_path / "few"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.txt").write_text(f"Text number {i} speaks of {['rain', 'bread', 'stone', 'boats', 'paper', 'music', 'roads', 'sleep'][i]}. " * 2)
    call("data", "tokenize", folder, "--out", tmp_path / "t", "--vocab_size", 300, "--seq_len", 64).ok()
    line = call("train", *train_words(tmp_path / "run", data__train=tmp_path / "t" / "shards" / "train", trainer__global_batch=512)).refused("512", "rows", "global_batch")
    assert str(tmp_path / "t" / "shards" / "train") in line
    assert not (tmp_path / "run").exists()


def test_a_busy_port(train_words, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = run([*TRAINER, *train_words(tmp_path / "run")], RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    done.refused(str(port), "MASTER_PORT")
    assert not (tmp_path / "run").exists()


def test_half_a_launcher_is_named(train_words, tmp_path):
    run([*TRAINER, *train_words(tmp_path / "run")], RANK="0", WORLD_SIZE="2").refused("MASTER_ADDR", "MASTER_PORT")


def test_a_run_that_can_not_be_written(call, train_words, tmp_path):
    (tmp_path / "file").write_text("x")
    call("train", *train_words(tmp_path / "file")).refused(str(tmp_path / "file"))
    call("train", *train_words(tmp_path / "file" / "run")).refused(str(tmp_path / "file"))


def test_gradients_that_stay_broken_end_the_run(call, train_words, tmp_path):
    words = train_words(tmp_path / "run", trainer__checkpoint_every=5, trainer__max_skips=3)
    done = call("train", *words, "--inject=nan_gradient@8,nan_gradient@12,nan_gradient@13,nan_gradient@14")
    done.refused("step 14", "3 steps in a row", "diagnose", code=1)
    rows = steps(tmp_path / "run")
    assert [s for s, r in rows.items() if r["skipped"]] == [8, 12, 13, 14]
    assert rows[8]["grad_norm"] == "NaN" and rows[8]["update_norm"] == 0 and rows[7]["param_norm"] == rows[8]["param_norm"]
    assert len(events(tmp_path / "run", "skip")) == 4 and [e["after"] for e in events(tmp_path / "run", "state")][-1] == "failed"
    assert last_checkpoint(tmp_path / "run").name == "step-00000010"


# ---- what a run leaves behind


def test_step_lines_hold_what_was_promised(healthy):
    rows, torn = lines(healthy / "metrics.jsonl")
    assert not torn
    step = [r for r in rows if r["kind"] == "step"]
    assert [r["global_step"] for r in step] == list(range(1, 41))
    numbers = ("loss", "lr", "grad_norm", "param_norm", "update_norm", "valid_tokens", "consumed_samples", "consumed_tokens", "longest_sequence", "step_seconds", "data_seconds", "memory_bytes")
    for r in step:
        assert r["schema"] == 1 and r["attempt"] == 0 and r["skipped"] is False
        assert all(isinstance(r[k], (int, float)) and r[k] > 0 for k in numbers), {k: r[k] for k in numbers}
        assert len(r["batch_hash"]) == 16 and int(r["batch_hash"], 16) >= 0
        assert r["data_seconds"] < r["step_seconds"]
        assert 1 <= r["longest_sequence"] <= 64 and r["valid_tokens"] <= 4 * 64
        assert set(r["loss_by_domain"]) <= {"code", "dialogue", "en_prose", "legal", "zh_prose"}
    assert [r["consumed_samples"] for r in step] == [4 * s for s in range(1, 41)]
    assert step[-1]["consumed_tokens"] == sum(r["valid_tokens"] for r in step)
    assert [round(r["lr"] / 0.003, 6) for r in step[:4]] == [0.25, 0.5, 0.75, 1.0]
    evals = [r for r in rows if r["kind"] == "eval"]
    assert [r["global_step"] for r in evals] == [10, 20, 30, 40, 40] and all(r["bits_per_byte"] > 0 for r in evals)
    assert evals[-1]["bits_per_byte"] < evals[0]["bits_per_byte"]
    assert {r["kind"] for r in rows} == {"step", "eval", "rank"}


def test_the_environment_is_recorded(healthy, tokenized, shards):
    record = json.loads((healthy / "environment.json").read_text())
    import torch

    assert record["versions"]["torch"] == torch.__version__.split("+")[0] or record["versions"]["torch"] == torch.__version__
    assert {"python", "numpy", "scalelab"} <= set(record["versions"])
    assert record["hardware"]["cores"] >= 1 and record["hardware"]["memory_bytes"] > 1e8 and record["hardware"]["cpu"]
    assert {"commit", "dirty", "diff"} <= set(record["git"])
    assert record["tokenizer_hash"] == tokenized[1].json["tokenizer_hash"]
    assert record["data"]["train"] and record["data"]["valid"] and record["data"]["train"] != record["data"]["valid"]
    if (Path(__file__).parent.parent / ".git").exists():
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
        assert len(record["git"]["commit"]) == len(head) == 40


def test_the_configuration_is_resolved(healthy, call):
    import yaml

    config = yaml.safe_load((healthy / "config.yaml").read_text())
    assert config["model"]["vocab_size"] == 600, "0 means the tokenizer's; what is written is what was used"
    assert config["trainer"]["steps"] == 40 and config["optim"]["lr"] == 0.003
    again = yaml.safe_load(call("train", "--config", healthy / "config.yaml", "--print_config").ok().out)
    assert {k: again[k] for k in config} == config


def test_a_checkpoint_stands_alone(healthy, tmp_path):
    "Copied elsewhere, without the run: sizes and checksums in the manifest are those of the files, model and tokenizer come along."
    import xxhash

    copy = tmp_path / "c"
    shutil.copytree(healthy / "checkpoints" / "step-00000040", copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    entry = manifest["files"]["rank-00000.safetensors"]
    assert entry["bytes"] == (copy / "rank-00000.safetensors").stat().st_size
    stored = tensors(copy)
    assert set(stored) == set(entry["tensors"])
    name = next(k for k in stored if k.startswith("model/") and stored[k].ndim == 2)
    assert entry["tensors"][name]["xxh3"] == xxhash.xxh3_64(stored[name].numpy().tobytes()).hexdigest()
    assert manifest["state"]["global_step"] == 40 and manifest["state"]["consumed_samples"] == 160 and manifest["config"]["optim"]["lr"] == 0.003
    assert run([*PROGRAM, "generate", copy, "--prompt", "a", "--max_new_tokens", 3, "--json"], cwd=tmp_path).ok().json["tokens"] <= 3


def test_a_finished_run_does_nothing_more(healthy, call, shards):
    before = {p.name: p.read_bytes() for p in healthy.iterdir() if p.name in ("metrics.jsonl",)}
    call("train", *options({"run": healthy, "data.train": shards / "train", "data.valid": shards / "valid"} | TINY | {
        "trainer.steps": 40, "trainer.eval_every": 10, "trainer.checkpoint_every": 10, "trainer.rank_every": 10, "trainer.census": "true"})).ok()
    assert {p.name: p.read_bytes() for p in healthy.iterdir() if p.name in before} == before
    assert sorted(p.name for p in (healthy / "checkpoints").iterdir() if not p.is_symlink()) == ["step-00000030", "step-00000040"] or (healthy / "checkpoints" / "best").exists()
