"""What several test files share: the program as a subprocess and in this process, and words for a tiny training."""
from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "data_samples"
PROGRAM = [sys.executable, "-c", "import sys; from scalelab.cli import main; sys.exit(main())"]
TRAINER = [sys.executable, "-m", "scalelab.trainer.loop"]
# One sleeping thread a process: threads that spin make a machine that runs several of these crawl.
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "200"}
TINY = {
    "model.d_model": 32, "model.n_layers": 2, "model.n_heads": 2, "model.n_kv_heads": 1, "model.d_ff": 64, "model.max_seq_len": 64, "data.seq_len": 64,
    "trainer.steps": 20, "trainer.global_batch": 4, "trainer.micro_batch": 2, "trainer.eval_every": 0, "trainer.eval_rows": 8, "trainer.checkpoint_every": 1000,
    "trainer.device": "cpu", "trainer.threads": 1, "optim.lr": 0.003, "schedule.warmup_steps": 4,
}


@dataclass
class Done:
    "How a command ended."

    code: int | str | None
    out: str
    err: str

    @property
    def json(self) -> dict:
        "The one JSON object on stdout."
        assert len(self.out.strip().splitlines()) == 1, f"not one line: {self.out!r}"
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value

    def ok(self) -> Done:
        assert self.code == 0, f"exit code {self.code}\n{self.out[-2000:]}\n{self.err[-3000:]}"
        return self

    def refused(self, *words: str, code: int = 2) -> str:
        "It ended with this code, said nothing on stdout and one line on stderr that holds these words; the line."
        assert self.code == code, f"exit code {self.code}\n{self.out[-2000:]}\n{self.err[-3000:]}"
        assert self.out == "", f"stdout: {self.out!r}"
        lines = self.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("scalelab"), f"not one line: {self.err!r}"
        missing = [w for w in words if w not in lines[0]]
        assert not missing, f"{missing} not in: {lines[0]}"
        return lines[0]


def environment(**extra: str) -> dict[str, str]:
    "This process's environment without what a launcher or a terminal may have put there."
    drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if k not in drop} | QUIET | {k: str(v) for k, v in extra.items()}


def run(command: list, timeout: float = 120, cwd: Path | None = None, **variables: str) -> Done:
    "A command of ours to its end."
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, errors="replace", timeout=timeout, cwd=cwd, env=environment(**variables), stdin=subprocess.DEVNULL)
    return Done(done.returncode, done.stdout, done.stderr)


def start(command: list, log: Path, **options) -> subprocess.Popen:
    "A command of ours in the background; what it prints goes to `log`."
    with open(log, "ab") as file:
        return subprocess.Popen([str(c) for c in command], stdout=file, stderr=file, env=environment(), stdin=subprocess.DEVNULL, **options)


def call_here(*words) -> Done:
    "`scalelab WORDS` in this process: the same function as the program's, without two seconds of imports."
    from scalelab.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(w) for w in words])
        except SystemExit as stop:
            code = stop.code or 0
    return Done(code, out.getvalue(), err.getvalue())


def options(keys: dict) -> list[str]:
    return [f"--{k}={v}" for k, v in keys.items()]


def lines(path: Path) -> tuple[list[dict], list[bytes]]:
    "Rows of a log and the lines that do not parse, read here with nothing but json."
    rows, torn = [], []
    for line in path.read_bytes().split(b"\n"):
        if line:
            try:
                rows.append(json.loads(line))
            except ValueError:
                torn.append(line)
    return rows, torn


def steps(run_dir: Path) -> dict[int, dict]:
    "Step lines by step; a later line of the same step replaces an earlier one."
    return {r["global_step"]: r for r in lines(run_dir / "metrics.jsonl")[0] if r["kind"] == "step"}


def events(run_dir: Path, name: str) -> list[dict]:
    return [e for e in lines(run_dir / "events.jsonl")[0] if e["event"] == name]


def last_checkpoint(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").glob("step-*"))


def tensors(checkpoint: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(checkpoint / "rank-00000.safetensors")


def assert_same_tensors(a: Path, b: Path) -> None:
    "Weights, optimizer and random states of two checkpoints are equal to the last bit."
    import torch

    x, y = tensors(a), tensors(b)
    assert x.keys() == y.keys() and len(x) > 10
    different = [k for k in x if x[k].dtype != y[k].dtype or not torch.equal(x[k], y[k])]
    assert not different, f"{len(different)} of {len(x)} tensors differ, first {different[0]}"


def wait_until(condition, child: subprocess.Popen | None = None, seconds: float = 60, pause: float = 0.005) -> bool:
    "True as soon as `condition()` holds; False when the child ended first; fails after `seconds`."
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        if child is not None and child.poll() is not None:
            return bool(condition())
        time.sleep(pause)
    pytest.fail(f"nothing happened within {seconds} s")


def require(what: str, present: bool) -> None:
    "Skip the test when `what` is absent; where skipping is forbidden (SCALELAB_REQUIRE_ALL=1) fail instead."
    if present:
        return
    if os.environ.get("SCALELAB_REQUIRE_ALL") == "1":
        pytest.fail(f"{what} is needed, and SCALELAB_REQUIRE_ALL=1 forbids skipping")
    pytest.skip(f"{what} is needed")
