"""Storage against real S3 servers on loopback: moto's and rclone's, stopped, killed and restarted in mid-read, and one of our own that lies."""
from __future__ import annotations

import gzip
import hashlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from s3servers import BUCKET, SECRET, Server, have, moto_server, rclone_server, variables  # noqa: F401  (fixtures)
from scalelab.core.config import UsageError
from scalelab.data import objects, storage
from scalelab.data.documents import Rejects, read_documents
from scalelab.data.storage import Cache, Remote, StorageError, expand, get, get_text, put, put_text, read_pieces, stat
from support import environment, require, wait_until

BIG = random.Random(0).randbytes(20_000_000)
ROOT = f"s3://{BUCKET}"


@pytest.fixture(params=["moto", "rclone"])
def s3(request) -> Server:
    "A server, and an environment that leads to it."
    server = request.getfixturevalue(f"{request.param}_server")
    with variables(server):
        yield server


@pytest.fixture
def rclone(rclone_server) -> Server:  # noqa: F811
    with variables(rclone_server):
        yield rclone_server


@pytest.fixture(scope="module")
def big_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("big") / "big.bin"
    path.write_bytes(BIG)
    return path


@pytest.fixture
def big(s3, big_file) -> str:
    "The address of 20 MB in the store."
    put(big_file, f"{ROOT}/big.bin")
    return f"{ROOT}/big.bin"


def read(url, **options) -> bytes:
    return b"".join(read_pieces(url, **options))


def refusal(work) -> str:
    "The one-line message of the UsageError that `work` ends in; no secret in it."
    with pytest.raises(UsageError) as caught:
        work()
    text = str(caught.value)
    assert "\n" not in text and SECRET not in text, text
    return text


def test_lists(s3):
    keys = ["d/1.jsonl", "d/2.jsonl", "d/deep/3.jsonl", "d/four.txt", "d/[5].txt", "d/数据 6.txt", "d/.hidden", "d/7.jsonl.tmp"]
    put_remotes = {key: put_text(key * 3, f"{ROOT}/{key}") for key in keys}

    def names(pattern: str) -> list[str]:
        return [r.url.removeprefix(f"{ROOT}/") for r in expand(f"{ROOT}/{pattern}")]

    shown = sorted(keys[:-2])
    assert names("d") == names("d/") == shown
    assert names("d/*.jsonl") == shown[:2] and names("d/**/*.jsonl") == [k for k in shown if k.endswith(".jsonl")]
    assert names("d/deep") == names("*/deep/*") == ["d/deep/3.jsonl"]
    assert names("d/[5].txt") == ["d/[5].txt"] and names("d/[12].jsonl") == shown[:2] and names("d/?.jsonl") == shown[:2]
    for remote in expand(f"{ROOT}/d"):  # listed, written and asked one by one: the same size and version
        key = remote.url.removeprefix(f"{ROOT}/")
        assert remote == put_remotes[key] == stat(remote.url) and remote.size == len(key.encode()) * 3
        assert remote.version == hashlib.md5((key * 3).encode()).hexdigest() and get_text(remote) == key * 3


def test_reads_and_writes(s3, big, big_file, tmp_path):
    assert read(big) == BIG
    for start in (1, 1 << 20, 12_345_678, len(BIG) - 1, len(BIG)):
        assert read(big, start=start) == BIG[start:], f"from {start} on"
    assert all(len(p) <= 1000 for p in read_pieces(big, start=len(BIG) - 5_500, piece=1000))
    get(big, tmp_path / "back.bin")
    assert (tmp_path / "back.bin").read_bytes() == BIG
    put_text("", f"{ROOT}/empty")
    assert read(f"{ROOT}/empty") == b"" and stat(f"{ROOT}/empty").size == 0
    for missing in (f"{ROOT}/none", "s3://no-such-bucket/x", f"{ROOT}/none/*.jsonl", "s3://no-such-bucket/*"):
        assert missing in refusal(lambda: expand(missing))
    assert "s3://no-such-bucket/x" in refusal(lambda: put(big_file, "s3://no-such-bucket/x"))


def test_upload_in_parts(s3, big_file, monkeypatch):
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)
    assert put(big_file, f"{ROOT}/parts.bin").size == len(BIG) and read(f"{ROOT}/parts.bin") == BIG


@pytest.mark.parametrize("wrong", [{"AWS_SECRET_ACCESS_KEY": "not-the-secret"}, {"AWS_ACCESS_KEY_ID": "nobody"}], ids=["secret", "key"])
def test_wrong_keys_are_one_line_and_one_try(rclone, wrong, big_file, caplog):
    put_text("there", f"{ROOT}/there")
    with variables(rclone, **wrong):
        began = time.monotonic()
        for work in (lambda: expand(f"{ROOT}/the*"), lambda: get_text(f"{ROOT}/there"), lambda: list(read_pieces(Remote(f"{ROOT}/there", 5))),
                     lambda: put(big_file, f"{ROOT}/new")):
            text = refusal(work)
            assert ROOT in text and all(name in text for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", rclone.endpoint))
            assert "not-the-secret" not in text + caplog.text
        assert time.monotonic() - began < 20, "a budget of 120 s must not be spent on wrong keys"
    assert get_text(f"{ROOT}/there") == "there" and "no such object" in refusal(lambda: stat(f"{ROOT}/new"))
    with variables(rclone):
        os.environ.pop("AWS_ACCESS_KEY_ID"), os.environ.pop("AWS_SECRET_ACCESS_KEY")
        assert "no keys" in refusal(lambda: get_text(f"{ROOT}/there"))


def during(url: str, between, **options) -> bytes:
    "The bytes of an object, with `between()` called after the first piece."
    pieces = read_pieces(url, **options)
    got = [next(pieces)]
    between()
    return b"".join(got + list(pieces))


def later(seconds: float, work) -> threading.Timer:
    timer = threading.Timer(seconds, work)
    timer.start()
    return timer


def test_server_frozen_in_mid_read(s3, big):
    def between():
        s3.freeze()
        later(1.5, s3.thaw)

    began = time.monotonic()
    assert during(big, between) == BIG
    assert time.monotonic() - began > 1.4, "the read was over before the server was stopped: it tested nothing"


def test_server_killed_and_restarted(rclone, big_file, tmp_path, caplog):
    put(big_file, f"{ROOT}/big.bin")

    def between():
        rclone.kill()
        later(2.5, rclone.start)

    began = time.monotonic()
    assert during(f"{ROOT}/big.bin", between) == BIG
    assert time.monotonic() - began > 2.4 and "trying again" in caplog.text and SECRET not in caplog.text
    rclone.kill()  # the same with everything else that asks
    timers = [later(0.7, rclone.start)]
    assert expand(f"{ROOT}/big*")[0].size == len(BIG)
    rclone.kill()
    timers.append(later(0.7, rclone.start))
    assert put_text("written while it was away", f"{ROOT}/away").size == 25
    for timer in timers:
        timer.join()


def test_budget_ends_the_wait(rclone):
    rclone.kill()
    try:
        began = time.monotonic()
        for work in (lambda: expand(f"{ROOT}/x", budget=0.5), lambda: list(read_pieces(Remote(f"{ROOT}/x", 5), budget=0.5))):
            text = refusal(work)
            assert "no answer for 0.5 s" in text and rclone.endpoint in text
        assert time.monotonic() - began < 10
    finally:
        rclone.start()


def test_replaced_in_mid_read(rclone, big_file):
    put(big_file, f"{ROOT}/big.bin")

    def between():
        rclone.kill()
        (rclone.folder / BUCKET / "big.bin").write_bytes(BIG[::-1])
        rclone.start()

    assert "replaced" in refusal(lambda: during(f"{ROOT}/big.bin", between))
    old = Remote(f"{ROOT}/big.bin", len(BIG), hashlib.md5(BIG).hexdigest())
    assert "replaced" in refusal(lambda: read(old)), "replaced between the list and the read"


def test_truncated_archive_is_refused_later(s3, tmp_path):
    lines = [json.dumps({"id": str(i), "text": f"{i} {random.Random(i).random()}"}) for i in range(3000)]
    whole = gzip.compress("\n".join(lines).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    put(tmp_path / "cut.jsonl.gz", f"{ROOT}/cut.jsonl.gz")
    get(f"{ROOT}/cut.jsonl.gz", tmp_path / "came" / "cut.jsonl.gz")  # as an object it is whole
    rejects = Rejects()
    kept = list(read_documents(tmp_path / "came" / "cut.jsonl.gz", rejects))
    assert 500 < len(kept) < 2900 and kept[0]["text"].startswith("0 ") and [r.reason for r in rejects.rows] == ["truncated_stream"]


class Liar(BaseHTTPRequestHandler):
    "An S3 of one object whose key says what is wrong with it: `drop=N` hang up, `says=N` claims a size, `norange`, `busy=N` answers of 503."

    data = BIG[:500_000]
    asked: Counter = Counter()

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        how = dict(word.partition("=")[::2] for word in unquote(self.path.split("?")[0]).rsplit("/", 1)[-1].split(","))
        self.asked[self.path, self.command] += 1
        if self.command == "GET" and self.asked[self.path, "GET"] <= int(how.get("busy", 0)):
            return self.send_error(503)
        said, start = int(how.get("says", len(self.data))), 0
        if "norange" not in how and (span := self.headers.get("Range")):
            start = int(span.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", '"v"')
        self.send_header("Content-Length", str(said - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{said - 1}/{said}")
        self.end_headers()
        if self.command == "GET":
            grow = self.asked[self.path, "GET"] if "grow" in how else 1
            self.wfile.write(self.data[start : start + grow * int(how.get("drop", len(self.data)))])

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def liar():
    require("s3fs", have("s3fs"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pretend = Server(Path())
    pretend.variables["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{server.server_port}"
    with variables(pretend):
        yield server
    server.shutdown()


@pytest.mark.parametrize("how", ["plain", "drop=200000", "drop=7000", "drop=150000,norange,grow", "busy=3"])
def test_unreliable_store_is_read_right(liar, how):
    assert read(f"{ROOT}/{how}") == Liar.data
    assert read(f"{ROOT}/{how}", start=123_456) == Liar.data[123_456:]


@pytest.mark.parametrize("how", ["says=700000", "drop=300000,norange"])
def test_lying_store_is_caught(liar, how, tmp_path):
    text = refusal(lambda: get(f"{ROOT}/{how}", tmp_path / "x"))
    assert f"{ROOT}/{how}" in text and ("500000" in text and "700000" in text or "300000" in text and "500000" in text)
    assert not list(tmp_path.iterdir()), "half an object was left"
    assert str(len(Liar.data)) in refusal(lambda: read(Remote(f"{ROOT}/plain", 600_000))), "another size than the list told"


def test_password_is_never_shown(liar, caplog):
    secret = "pass-of-ann"
    address = f"http://ann:{secret}@127.0.0.1:{liar.server_port}/plain"
    assert read(address) == Liar.data
    gone = Server(Path())  # a free port: nobody listens
    for work in (lambda: read(f"http://ann:{secret}@127.0.0.1:{gone.port}/x", budget=3.2), lambda: read(f"{address},says=700000")):
        with pytest.raises(StorageError) as caught:
            work()
        assert secret not in str(caught.value) + caplog.text + repr(stat(address)) and "***@127.0.0.1" in str(caught.value)
    assert "trying again" in caplog.text


def digest_of(url: str) -> str:
    return hashlib.md5(read(url)).hexdigest()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes(rclone, big_file, method):
    "The parent has used its client when the workers start; each makes one of its own."
    urls = [put_text(str(i) * 1000, f"{ROOT}/w/{i}").url for i in range(4)]
    assert digest_of(urls[0])
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map_async(digest_of, urls).get(timeout=30) == [hashlib.md5((str(i) * 1000).encode()).hexdigest() for i in range(4)]


CACHE_PROGRAM = """
import sys
from scalelab.data.storage import Cache
cache = Cache(sys.argv[1], 30_000_000)
for url in sys.argv[2:]:
    cache.fetch(url)
print(cache.counts["misses"])
"""


def test_cache_over_s3(rclone, big_file, tmp_path):
    url, folder = put(big_file, f"{ROOT}/big.bin").url, tmp_path / "cache"
    program = [sys.executable, "-c", CACHE_PROGRAM, str(folder), url]
    child = subprocess.Popen(program, env=environment(), stderr=subprocess.DEVNULL)
    assert wait_until(lambda: any(p.stat().st_size for p in folder.glob(".*.part")), child, 20, 0.001), "it was over before it could be killed"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert [p.stat().st_size for p in folder.glob(".*.part")] == [len(BIG)] and not list(folder.glob("*.bin"))
    both = [subprocess.Popen(program, env=environment(), stdout=subprocess.PIPE, text=True) for _ in range(2)]
    misses = [int(p.communicate(timeout=30)[0]) for p in both]
    assert sum(misses) <= 1 and [p.returncode for p in both] == [0, 0], "two processes, one download"
    cache = Cache(folder, 30_000_000)
    assert cache.fetch(url).read_bytes() == BIG and cache.counts["hits"] == 1
    put_text("x" * 15_000_000, f"{ROOT}/second.bin")
    assert cache.fetch(f"{ROOT}/second.bin").stat().st_size == 15_000_000 and cache.counts["evicted"] == 1
    assert sorted(p.suffix for p in folder.iterdir() if not p.name.startswith(".")) == [".bin"] and not list(folder.glob(".*.part"))


def test_cache_second_reader_waits(tmp_path, monkeypatch):
    "Who asks for an object that somebody is fetching waits for that copy; a part without an owner is taken over."
    put_text("x" * 5_000, "memory://cache-test/x")
    begun, go_on = threading.Event(), threading.Event()

    def slow(remote, **options):
        begun.set()
        assert go_on.wait(20)
        yield from read_pieces(remote, **options)

    monkeypatch.setattr(storage, "read_pieces", slow)
    caches, got = [Cache(tmp_path, 20_000) for _ in range(2)], []
    threads = [threading.Thread(target=lambda c=c: got.append(c.fetch("memory://cache-test/x").read_text())) for c in caches]
    threads[0].start()
    assert begun.wait(20)
    threads[1].start()
    threads[1].join(0.3)
    assert threads[1].is_alive() and not got, "the second reader did not wait"
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert got == ["x" * 5_000] * 2 and [c.counts["misses"] for c in caches] == [1, 0] and not list(tmp_path.glob(".*.part"))
