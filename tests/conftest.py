"""Fixtures: the program, and one small set of shards that the whole session trains on."""
from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest  # noqa: E402  (threads are counted when numpy and torch are imported)

import support  # noqa: E402


@pytest.fixture(scope="session")
def cli():
    "`cli(*words)` runs the program as a user would, in a process of its own."
    return lambda *words, **options: support.run([*support.PROGRAM, *words], **options)


@pytest.fixture(scope="session")
def call():
    "`call(*words)` runs the program inside this process."
    return support.call_here


@pytest.fixture(scope="session")
def require():
    return support.require


@pytest.fixture(scope="session")
def work(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="session")
def cleaned(cli, work) -> tuple[Path, support.Done]:
    "`data clean` of the samples: its folder and how it ended."
    out = work / "clean"
    return out, cli("data", "clean", *sorted(support.SAMPLES.glob("*.jsonl")), "--out", out, "--json")


@pytest.fixture(scope="session")
def tokenized(cli, cleaned, work) -> tuple[Path, support.Done]:
    "`data tokenize` of the cleaned samples: its folder and how it ended."
    out = work / "tokens"
    return out, cli("data", "tokenize", cleaned[0] / "documents", "--out", out, "--vocab_size", 600, "--seq_len", 64, "--valid_fraction", 0.1, "--json")


@pytest.fixture(scope="session")
def shards(tokenized) -> Path:
    "The folder that holds train/ and valid/."
    return tokenized[0] / "shards"


@pytest.fixture(scope="session")
def train_words(shards):
    "`train_words(run, **keys)`: the words of a tiny training; `trainer__steps=5` sets trainer.steps."
    def words(run_dir: Path, **keys) -> list[str]:
        given = {k.replace("__", "."): v for k, v in keys.items()}
        return support.options({"run": run_dir, "data.train": shards / "train"} | support.TINY | given)

    return words


@pytest.fixture(scope="session")
def healthy(call, train_words, shards, work) -> Path:
    "A finished run of 40 steps with evaluations and checkpoints."
    out = work / "healthy"
    call("train", *train_words(out, trainer__steps=40, trainer__eval_every=10, trainer__checkpoint_every=10, trainer__rank_every=10, trainer__census="true", data__valid=shards / "valid")).ok()
    return out
