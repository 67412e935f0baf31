# %% [markdown]
# # Reading what may break
#
# > Objects as pieces of bytes that survive broken connections, are held against the size and version told at the start, and are written whole or not at all.
#
# A download of hours will break; the question is what happens then. Starting over may never end, going on at the wrong place corrupts silently, and taking the end of the stream for the end of the object loses the rest.
#
# The sources do not discuss it. Our own claim: whatever the connection does, the reader gets exactly the bytes of one version of the object, or an error that says how far it came.

# %%
#| default_exp data.objects

# %%
#| export
from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from scalelab.core.config import UsageError, fsync_dir
from scalelab.data.stores import (
    Patience, Remote, StorageError, filesystem, length_of, mask, passing, persist, scheme_of, stat, version_of,
)

# %%
#| hide
import random
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import matplotlib.pyplot as plt

from scalelab.core.plotting import style

style()

# %% [markdown]
# ## An answer that has begun
# A request may say `Range: bytes=500-`. The answer is a part with status 206 and a header `Content-Range: bytes 500-999/1000`, or, from servers that do not know ranges, the whole with status 200. There is a third kind: `rclone serve s3` sends the *part* with status
# **200** and a Content-Range. A reader that trusts the status throws away 500 bytes of a part that it took for the whole. So the header decides where the answer begins, and what lies before our place is skipped.
#
# The size comes from the same header. Pieces are read by coroutines in the client's own thread; what came before a break is handed over first, and the break is raised by the next call.

# %%
#| export
READ_BYTES = 1 << 20  # asked of a stream at once


@dataclass
class Body:
    "An answer that has begun: offset of its first byte, size and version of the whole, how to read on and to close."

    begins: int
    size: int | None
    version: str
    read: Callable[[], bytes]
    close: Callable[[], object]


async def _take(read: Callable[[int], Any], n: int) -> bytes:
    "Up to `n` bytes; fewer when the stream ends or breaks, so that nothing that came is lost."
    parts: list[bytes] = []
    left = n
    try:
        while left and (part := await read(left)):
            parts.append(part)
            left -= len(part)
    except Exception:  # whatever broke the stream, its next read raises it again
        if not parts:
            raise
    return b"".join(parts)


# %%
#| export
async def _ask(fs: Any, url: str, start: int) -> tuple[int, dict, Any, Any, bytes]:
    "Begin a GET at `start`: status, headers, read, close, first piece."
    ask = {"Range": f"bytes={start}-"} if start else {}
    if scheme_of(url) == "s3":
        bucket, key, _ = fs.split_path(url)
        reply = await fs._call_s3("get_object", Bucket=bucket, Key=key, **ask)
        about = reply["ResponseMetadata"]
        status, headers, body = about["HTTPStatusCode"], about["HTTPHeaders"], reply["Body"]
        read, close = body.read, body.close
    else:
        session = await fs.set_session()
        reply = await session.get(url, headers={"Accept-Encoding": "identity", **ask})
        reply.raise_for_status()
        status, headers, read, close = reply.status, reply.headers, reply.content.read, reply.close
    first = b""
    # at once, and as much as a connection may bring before it breaks: bytes that nobody waits for then are lost
    with contextlib.suppress(Exception):  # raised again by the next read
        first = await _take(read, READ_BYTES)
    return status, {k.lower(): v for k, v in headers.items()}, read, close, first


# %%
#| export
def span_of(status: int, headers: dict[str, str], url: str) -> tuple[int, int | None]:
    "Offset of the first byte of an answer, and the size of the whole object (None: not told)."
    span = headers.get("content-range")
    if span is None and status != 206:
        return 0, length_of(headers)
    match = re.match(r"bytes (\d+)-\d*/(\d+|\*)$", span or "")
    if not match:
        raise StorageError(f"{mask(url)}: a partial answer without a readable Content-Range ({span!r})")
    return int(match[1]), None if match[2] == "*" else int(match[2])


def open_body(url: str, start: int) -> Body:
    "Begin to read an object at `start`; a server that does not know ranges begins at 0, and `begins` says so."
    from fsspec.asyn import sync

    fs = filesystem(url)
    if scheme_of(url) not in ("s3", "http"):
        facts, file = fs.info(url), fs.open(url, "rb")
        file.seek(start)
        return Body(start, facts["size"], version_of(facts), lambda: file.read(READ_BYTES), file.close)
    status, headers, read, close, first = sync(fs.loop, _ask, fs, url, start)
    begins, size = span_of(status, headers, url)
    waiting = [first] if first else []

    def more() -> bytes:
        return waiting.pop() if waiting else sync(fs.loop, _take, read, READ_BYTES)

    return Body(begins, size, version_of(headers), more, lambda: fs.loop.call_soon_threadsafe(close))


# %%
part = {"content-range": "bytes 500-999/1000", "content-length": "500"}
assert span_of(206, part, "s3://b/k") == span_of(200, part, "s3://b/k") == (500, 1000)
assert span_of(200, {"content-length": "1000"}, "s3://b/k") == (0, 1000) and span_of(200, {}, "s3://b/k") == (0, None)
assert span_of(206, {"content-range": "bytes 5-9/*"}, "s3://b/k") == (5, None)
for lacking in ({}, {"content-range": "lines 1-2/3"}):
    try:
        span_of(206, lacking, "s3://b/k")
        raise AssertionError("a part of unknown place passed")
    except StorageError as error:
        print(error)
store = fsspec.filesystem("memory")
store.pipe_file("/shop/x", b"0123456789")
body = open_body("memory://shop/x", 4)
assert (body.begins, body.size, body.read(), body.read()) == (4, 10, b"456789", b"")


# %% [markdown]
# ## Reading on
# Each attempt starts at the offset reached. Before its first byte is taken it is compared with the object that we began with; an object that was replaced in between would be stitched together from two.
#
# Some objects are simply shorter than their server says. Their connection "breaks" at the same byte every time, and patience alone would wait out its budget, since the server is alive. So answers in a row that bring nothing new are counted, too.

# %%
#| export
def _check_same(remote: Remote, body: Body, at: int) -> None:
    where = mask(remote.url)
    if remote.version and body.version and remote.version != body.version:
        raise StorageError(f"{where}: replaced while it was read (version {remote.version} became {body.version}, "
                           f"{at} bytes read); start again")
    if None not in (remote.size, body.size) and remote.size != body.size:
        raise StorageError(f"{where}: {remote.size} bytes expected, the server now offers {body.size} ({at} read): "
                           "truncated or replaced")
    if body.begins > at:
        raise StorageError(f"{where}: asked for the bytes from {at} on, got those from {body.begins} on")


class _Reader:
    "The bytes of one object in order over as many attempts as it takes; `at` is the offset reached."

    EMPTY_ANSWERS = 5  # in a row: the object is shorter than its server says

    def __init__(self, remote: Remote, start: int, budget: float):
        self.remote, self.at = remote, start
        self.patience, self.empty = Patience(remote.url, budget), 0

    def attempt(self) -> Iterator[bytes]:
        "One answer: bytes from `at` on, until the stream ends or breaks."
        body = open_body(self.remote.url, self.at)
        try:
            self.empty += 1
            _check_same(self.remote, body, self.at)
            skip = self.at - body.begins
            while data := body.read():
                self.patience.alive()
                skip, data = max(0, skip - len(data)), data[skip:] if skip else data
                if data:
                    self.empty = 0
                    self.at += len(data)
                    yield data
        finally:
            body.close()

    def broke(self, error: BaseException) -> None:
        "Wait before the next attempt, or raise."
        if self.empty >= self.EMPTY_ANSWERS and passing(error):
            raise StorageError(f"{mask(self.remote.url)}: got {self.at} bytes, expected {self.remote.size}: {self.empty} "
                               "answers in a row brought nothing more; the object is cut short") from error
        self.patience.failed(error)


# %%
#| export
def read_pieces(url: str | Remote, start: int = 0, piece: int = 1 << 20, budget: float = 120.0) -> Iterator[bytes]:
    """The bytes of an object from `start` on, in pieces of at most `piece` bytes.

    A broken connection is taken up at the offset reached, as long as no `budget` seconds pass without a byte.
    StorageError when the object is shorter or longer than told at the beginning or was replaced, when access is refused
    or the budget spent. A Remote (from `expand`) says what to expect; an address is looked up first. An unknown size
    can't be checked.
    """
    remote = url if isinstance(url, Remote) else stat(url, budget)
    if remote.size is not None and start > remote.size:
        raise StorageError(f"{mask(remote.url)}: can't start at byte {start}, it has {remote.size}")
    reader = _Reader(remote, start, budget)
    while remote.size is None or reader.at < remote.size:
        try:
            for data in reader.attempt():
                if remote.size is not None and reader.at > remote.size:
                    raise StorageError(f"{mask(remote.url)}: {reader.at} bytes came, {remote.size} expected")
                yield from (data[i : i + piece] for i in range(0, len(data), piece))
            if remote.size is None:
                return
            if reader.at < remote.size:
                raise ConnectionError("the stream ended early")
        except Exception as error:  # every store has its own family of errors; `broke` tells them apart
            reader.broke(error)


# %%
data = random.Random(0).randbytes(100_000)
store.pipe_file("/shop/x", data)
for start, piece in ((0, 1 << 20), (0, 7_777), (99_999, 10), (100_000, 10)):
    pieces = list(read_pieces("memory://shop/x", start, piece))
    assert b"".join(pieces) == data[start:] and all(0 < len(p) <= piece for p in pieces)
seen = stat("memory://shop/x")
store.pipe_file("/shop/x", data + b"more")
for target, start in ((seen, 0), ("memory://shop/x", 100_005)):
    try:
        list(read_pieces(target, start))
        raise AssertionError("passed")
    except StorageError as error:
        print(str(error).replace(seen.version, "OLD").replace(stat("memory://shop/x").version, "NEW"))


# %% [markdown]
# ## A server with every fault
# The real test is a real connection. This server, in a thread of this process, serves one object and misbehaves as its path asks: it hangs up after a number of bytes, ignores ranges, sends a part with status 200, is busy for a while,
# promises more than it has, or swaps the object.

# %%
class Faulty(BaseHTTPRequestHandler):
    "Serves `data`; the path's words say how: /drop=30000,range=none"

    asked, sent = Counter(), Counter()

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        how = dict(word.partition("=")[::2] for word in self.path.strip("/").split(","))
        head, again = self.command == "HEAD", self.asked[self.path]
        if not head:
            self.asked[self.path] += 1
        if "busy" in how and not head and again < int(how["busy"]) or "status" in how:
            return self.send_error(int(how.get("status", 503)))
        start = 0 if how.get("range") == "none" else int((self.headers.get("Range") or "bytes=0-")[6:-1])
        said = int(how.get("says", len(data))) - int("less" in how and not head)
        self.send_response(206 if start and how.get("range") != "200" else 200)
        self.send_header("ETag", f'"v{again if "swap" in how else 0}"')
        if "sizeless" not in how:
            self.send_header("Content-Length", str(said - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{said - 1}/{said}")
        self.end_headers()
        if not head:
            drop = int(how.get("drop", len(data))) * (again + 1 if "grow" in how else 1)
            part = data[start : start + drop]
            self.sent[self.path] += len(part)
            self.wfile.write(part)

    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Faulty)
threading.Thread(target=server.serve_forever, daemon=True).start()
address = f"http://127.0.0.1:{server.server_port}"

# %% [markdown]
# What is expected: an object that can be had is had, identical, and every byte is sent once if the server knows ranges. What can't be had ends in an error that says how far it came.

# %%
def trial(fault):
    "What a reader gets from `/fault`: identical, WRONG, or the error."
    try:
        got = b"".join(read_pieces(f"{address}/{fault}", budget=5))
        return "identical" if got == data else f"WRONG: {len(got)} bytes"
    except StorageError as error:
        return str(error).removeprefix(address)

can = ["none", "sizeless", "drop=30000", "drop=1000", "drop=30000,range=200", "busy=3"]
cannot = ["drop=30000,range=none", "drop=60000,says=150000", "less", "drop=60000,swap", "status=403", "status=404"]
print(f"{'fault':24}{'answers':>7}{'sent':>8}   result")
for fault in can + cannot:
    result = trial(fault)
    assert (result == "identical") == (fault in can), result
    print(f"{fault:24}{Faulty.asked['/' + fault]:7}{Faulty.sent['/' + fault]:8}   {result}")
assert Faulty.asked["/status=403"] <= 1, "knocking again with a wrong key may lock the account"

# %% [markdown]
# A server that ignores ranges *and* hangs up at the same place can't be read by anyone, and that is said within seconds. If it hangs up later each time, as one that recovers does, it can be read, at a price: bytes that are known already are sent
# and skipped again. Let the connection break every $k$ bytes, or, for whole answers, after $k$, $2k$, $3k$.

# %%
breaks = [1, 2, 4, 8, 16]
fig, ax = plt.subplots(figsize=(5, 2.6))
for words, label in (("", "range requests"), (",grow,range=none", "whole answers, known bytes skipped")):
    faults = [f"drop={len(data) // (n + 1) + 1}{words}" for n in breaks]
    assert all(trial(fault) == "identical" for fault in faults)
    ratio = [Faulty.sent["/" + fault] / len(data) for fault in faults]
    ax.plot(breaks, ratio, "o-", label=label)
    print(f"{label}: {ratio[0]:.1f} to {ratio[-1]:.1f} times the object's bytes")
    assert (max(ratio) == 1) == (not words)
ax.set(xlabel="breaks of the connection", ylabel="bytes sent / bytes of the object", ylim=(0, None))
ax.legend()
plt.show()

# %% [markdown]
# Flat at 1 with ranges. Without them the cost grows in proportion to the breaks, and the data are still right.
#
# ## Writing
# Object stores show an upload only when it is complete, so a killed upload leaves nothing (or an unfinished multipart upload, which the store's own rules should sweep up). A disk shows a file while it
# grows: there we write beside the place and rename.

# %%
#| export
@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    "A file to write that becomes `path`, durably, when the block ends without an error; else nothing changes."
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    fsync_dir(path.parent)


def get(url: str | Remote, path: str | Path, budget: float = 120.0) -> None:
    "Copy an object to a file on this machine: the whole object or none."
    with replacing(Path(path)) as file:
        for data in read_pieces(url, budget=budget):
            file.write(data)


# %%
#| export
PART_BYTES = 1 << 25  # of a multipart upload


def put(path: str | Path, url: str, budget: float = 120.0) -> Remote:
    """Copy a file to an address, the whole object or none, and say what the store has then.

    UsageError for http(s), which is read only; StorageError as for reading, and when the store ends up with another
    size.
    """
    scheme, size = scheme_of(url), Path(path).stat().st_size
    if scheme == "http":
        raise UsageError(f"{mask(url)}: http(s) addresses can only be read; write to s3:// or to a path")
    fs = filesystem(url)
    if scheme == "file":
        with replacing(Path(fs._strip_protocol(url))) as file, open(path, "rb") as source:
            shutil.copyfileobj(source, file, 1 << 20)
    elif scheme == "memory":
        fs.pipe_file(url, Path(path).read_bytes())  # its put_file shows the object while it grows
    else:
        # four parts at a time bound the memory; a store takes at most 10,000 of them
        parts = {"chunksize": max(PART_BYTES, -(-size // 10_000)), "max_concurrency": 4} if scheme == "s3" else {}
        persist(url, budget, lambda: fs.put_file(str(path), url, **parts))
    there = stat(url, budget)
    if there.size != size:
        raise StorageError(f"{mask(url)}: {size} bytes were written, the store has {there.size}; "
                           "did the file change meanwhile?")
    return there


# %%
#| export
def get_text(url: str | Remote, budget: float = 120.0) -> str:
    "A small UTF-8 object as text."
    raw, address = b"".join(read_pieces(url, budget=budget)), url if isinstance(url, str) else url.url
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StorageError(f"{mask(address)}: not UTF-8 at byte {error.start}") from None


def put_text(text: str, url: str, budget: float = 120.0) -> Remote:
    "Write a small text as a UTF-8 object, whole or not at all."
    with tempfile.NamedTemporaryFile() as file:
        file.write(text.encode("utf-8"))
        file.flush()
        return put(file.name, url, budget)


# %%
with tempfile.TemporaryDirectory() as folder:
    here, there = Path(folder, "here"), Path(folder, "deep", "there")
    for url in ("memory://shop/new", f"file://{there}"):
        here.write_bytes(data)
        assert put(here, url).size == len(data)
        get(url, here.with_name("back"))
        assert here.with_name("back").read_bytes() == data
        assert put_text("语料\n", url).size == 7 and get_text(url) == "语料\n"
    files = sorted(p.name for p in Path(folder).rglob("*") if p.is_file())
    assert files == ["back", "here", "there"], "no temporary file stays"
    try:
        with replacing(there) as file:
            file.write(b"half")
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert there.read_text() == "语料\n" and len(list(there.parent.iterdir())) == 1
    store.pipe_file("/shop/latin", "café".encode("latin-1"))
    for fails in (lambda: put(here, f"{address}/x"), lambda: get_text("memory://shop/latin"),
                  lambda: get(f"{address}/status=404", there)):
        try:
            fails()
            raise AssertionError("passed")
        except UsageError as error:
            print(str(error).replace(address, "http://host"))
    assert there.read_text() == "语料\n", "a failed copy leaves the old file"
server.shutdown()

# %% [markdown]
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | a broken connection costs time, never bytes | holds | hang-ups, busy servers, parts with status 200: identical; with ranges every byte is sent once |
# | a server that knows no ranges is read all the same | holds in part | identical as long as each answer reaches further than the last; the bytes sent grow with every break |
# | a short or replaced object is never taken for a whole one | holds, where the server tells a size | error with the bytes got and expected; an answer without any size can't be checked |
#
# Against real S3 servers, stopped in mid-read: `tests/test_storage.py`. Not covered: a wrong byte that a server sends under the right size and version; for that a checksum must be known beforehand, as the cache of the next chapter and the shards' index do.
