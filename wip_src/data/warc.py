# %% [markdown]
# # Web archives, and what is left of them
#
# > WARC and ARC files record by record: the pages come out, other records are counted, and a damaged record costs itself only.
#
# Crawls come as WARC files: thousands of HTTP answers in a row, each often compressed by itself. `warcio` knows the headers of both formats, old and new; this chapter wraps it in what a
# crawl of terabytes needs: files that were cut off, gzip members with a flipped bit, bodies that are not what their headers say, and a body that unpacks to gigabytes.
#
# The sources say nothing about web archives. Our own claim, tested here: of a file with one damaged record, every other page is read.

# %%
#| default_exp data.warc

# %%
#| export
from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scalelab.core.config import UsageError
from scalelab.data.bytestream import EXPAND_FLOOR, EXPAND_LIMIT, BrokenFile

# %%
#| hide
import gzip

import matplotlib.pyplot as plt
import numpy as np

from scalelab.core.plotting import style

style()

# %% [markdown]
# ## Bytes with a place
# A damaged record must be told by its offset, and after it we want to go on at the next one. So the bytes are read through a small buffer that knows where it stands and can look for a mark.

# %%
#| export
class ByteReader:
    "Pieces of bytes as a file that can be peeked into; `at` is the offset of the next byte, `history` how far one can go back."

    def __init__(self, pieces: Iterator[bytes], history: int = 0):
        self._pieces, self._history = pieces, history
        self._buffer, self._next, self._gone = bytearray(), 0, 0

    @property
    def at(self) -> int:
        return self._gone + self._next

    def _fill(self, n: int) -> bool:
        "Hold at least n bytes from here on; False when there are not so many."
        while len(self._buffer) - self._next < n and (piece := next(self._pieces, b"")):
            if (drop := self._next - self._history) > len(self._buffer) // 2:
                del self._buffer[:drop]
                self._gone, self._next = self._gone + drop, self._next - drop
            self._buffer += piece
        return len(self._buffer) - self._next >= n

    def peek(self, n: int) -> bytes:
        "The next n bytes, fewer at the end."
        self._fill(n)
        return bytes(self._buffer[self._next : self._next + n])

    def read(self, n: int) -> bytes:
        "The next n bytes, fewer at the end, and move behind them."
        parts = []
        while n > 0 and (part := self.peek(min(n, 1 << 16))):
            parts.append(part)
            self._next += len(part)
            n -= len(part)
        return b"".join(parts)

    def readline(self, limit: int = 1 << 16) -> bytes:
        "Up to the next line feed, but at most `limit` bytes or 64 KiB: a header is never longer."
        head = self.peek(min(limit, 1 << 16))
        return self.read(head.find(b"\n") + 1 or len(head))

    def back_to(self, offset: int) -> None:
        "Return to an offset, or to the first one that is still held behind it."
        self._next = max(0, offset - self._gone)

# %%
#| export
def find(reader: ByteReader, mark: bytes) -> bool:
    "Move to the next place of `mark`; False, and at the end, when there is none."
    while head := reader.peek(1 << 16):
        hit = head.find(mark)
        reader.read(hit if hit >= 0 else max(1, len(head) - len(mark) + 1))
        if hit >= 0:
            return True
    return False

# %%
reader = ByteReader(iter([b"one\ntw", b"o\n", b"WARC/1.0 x"]), history=100)
assert reader.readline() == b"one\n" and reader.at == 4 and reader.peek(3) == b"two" and reader.readline(2) == b"tw"
assert find(reader, b"WARC") and reader.at == 8 and reader.read(99) == b"WARC/1.0 x" and not find(reader, b"WARC")
reader.back_to(4)
assert reader.readline() == b"two\n"
data = np.random.default_rng(0).integers(97, 100, 300_000, np.uint8).tobytes().replace(b"abcab", b"bbbbb")
data = data[:70_000] + b"abcab" + data[70_000:]
for size in (7, 1000, 1 << 16):
    reader = ByteReader(iter([data[i : i + size] for i in range(0, len(data), size)]))
    assert find(reader, b"abcab") and reader.at == data.find(b"abcab")
    assert b"".join(iter(lambda: reader.read(37), b"")) == data[data.find(b"abcab") :]

# %% [markdown]
# ## One member at a time
# In a `.warc.gz` every record should be a gzip member of its own, and then a damaged one ends where the next begins. Files in which one member holds all records (somebody ran `gzip` over it) are refused by the library; here they are
# read like uncompressed ones. A member that expands more than a thousandfold is stopped, as in the chapter on bytes.

# %%
#| export
_GZIP = b"\x1f\x8b\x08"
_HISTORY = 1 << 22  # bytes: so far a damaged member may lead the decoder into the next ones


def _member(raw: ByteReader, expand_limit: int) -> Iterator[bytes]:
    "The content of the gzip member that begins here; afterwards `raw` stands behind it."
    box, came, made = zlib.decompressobj(31), 0, 0
    while not box.eof:
        if not (piece := raw.read(1 << 14)):
            raise BrokenFile("truncated_record", "the file ends inside a gzip member: it was cut off")
        came += len(piece)
        while piece and not box.eof:
            try:
                out = box.decompress(piece, 1 << 18)
            except zlib.error as error:
                raise BrokenFile("corrupt_record", f"damaged gzip member ({error})") from None
            piece, made = box.unconsumed_tail, made + len(out)
            if made > max(EXPAND_FLOOR, expand_limit * came):
                raise BrokenFile("expands_too_much", f"a gzip member grew more than {expand_limit:,} times")
            if out:
                yield out
    raw.back_to(raw.at - len(box.unused_data))

# %%
two = gzip.compress(b"first " * 9000) + gzip.compress(b"second")
raw = ByteReader(iter([two[:50], two[50:]]))
assert b"".join(_member(raw, 1000)) == b"first " * 9000 and raw.peek(3) == _GZIP
assert b"".join(_member(raw, 1000)) == b"second" and not raw.peek(1)

# %% [markdown]
# ## Pages
# Of all records we want the answers with HTML or plain text: responses with status 200, resources saved under a web address, and the plain-text conversions of WET files. Requests, images and error pages are passed over and counted.

# %%
#| export
@dataclass
class Page:
    """One archived page. number: of its record in the file, from 1; offset: where the record (or its gzip member)
    begins in the file.

    body: bytes without transfer and content encoding; charset: as declared by the server, "" if it wasn't.
    """

    number: int
    offset: int
    url: str
    date: str
    record_id: str
    html: bool
    charset: str
    body: bytes


@dataclass
class Problem:
    "A record that is no page. reason: `not_a_page` and `http_error` are in order, others are damage; detail: one line."

    number: int
    offset: int
    reason: str
    detail: str = ""

    @property
    def in_order(self) -> bool:
        "Nothing is wrong with the record, it is of another kind."
        return self.reason in ("not_a_page", "http_error")

# %% [markdown]
# A body is seldom what was sent: it may be chunked and compressed. Some archives keep such headers although the body was unpacked before it was stored. Then the decoder fails or gives nothing, and the body as it stands is the page, if it is text.

# %%
#| export
def _header(headers: Any, name: str) -> str:
    return (headers.get_header(name) or "").strip() if headers else ""


def _body(record: Any, stored: bytes, max_bytes: int) -> bytes | str:
    "The page's bytes, or the reason why there are none."
    coding = _header(record.http_headers, "content-encoding").lower()
    chunked = _header(record.http_headers, "transfer-encoding").lower() == "chunked"
    plain = b"\0" not in stored[:1000] and not stored.startswith(_GZIP)
    if not chunked and coding in ("", "identity"):
        return stored
    record.raw_stream = io.BytesIO(stored)
    try:
        stream, body = record.content_stream(), bytearray()
        while part := stream.read(1 << 16):
            body += part
            if len(body) > max_bytes:
                return "page_too_large"
    except (OSError, ValueError, zlib.error):  # warcio raises what its decoders raise
        body = b""
    if (
        chunked and stored.startswith(body[:20]) and re.match(rb"[0-9a-fA-F]{1,8}\r?\n", body)
    ):  # wrong sizes, and warcio left them in
        return "bad_transfer_encoding"
    if body and (coding in ("", "identity") or bytes(body) != stored):
        return bytes(body)
    return stored if plain and stored else "bad_content_encoding"

# %% [markdown]
# ## Record by record
# `_parse` reads one record's headers with warcio, which raises five kinds of errors on damaged ones; all of them mean the same here.

# %%
#| export
def _loader() -> Any:
    try:
        from warcio.recordloader import ArcWarcRecordLoader
    except ImportError:
        raise UsageError('web archives need warcio: pip install "scalelab[data]"') from None
    return ArcWarcRecordLoader(verify_http=False, arc2warc=False)


def _parse(loader: Any, stream: ByteReader) -> Any:
    "A record whose headers are read; BrokenFile when they make no sense."
    from warcio.exceptions import ArchiveLoadFailed
    from warcio.statusandheaders import StatusAndHeadersParserException

    head = stream.peek(60)
    try:
        record = loader.parse_record_stream(stream)
    except (ArchiveLoadFailed, StatusAndHeadersParserException, EOFError, ValueError, AttributeError) as error:
        raise BrokenFile("bad_record", f"{type(error).__name__} at {head!r}") from None
    length = _header(record.rec_headers, "length" if record.format == "arc" else "Content-Length")
    if not length.isdigit() and record.rec_type != "arc_header":
        raise BrokenFile("bad_record", f"length {length!r} is no number of bytes")
    return record

# %%
#| export
def _judge(record: Any, number: int, offset: int, max_bytes: int) -> Page | Problem:
    "The page in a record, or why there is none."
    arc, headers = record.format == "arc", record.rec_headers
    url = _header(headers, "uri" if arc else "WARC-Target-URI")
    http = record.http_headers
    kind = _header(http, "content-type") or (
        _header(headers, "content-type") if arc or record.rec_type != "response" else ""
    )
    mime = kind.split(";")[0].strip().lower()
    wanted = record.rec_type == "response" or (
        record.rec_type in ("resource", "conversion") and url.startswith(("http://", "https://"))
    )
    if not wanted or mime not in ("text/html", "application/xhtml+xml", "text/plain"):
        return Problem(number, offset, "not_a_page", f"{record.rec_type} {mime}")
    if http and http.get_statuscode() != "200":
        return Problem(number, offset, "http_error", f"{http.get_statuscode()} {url}")
    if (left := getattr(record.raw_stream, "limit", 0)) > max_bytes:
        return Problem(number, offset, "page_too_large", f"{left:,} bytes: {url}")
    stored = record.raw_stream.read(left)
    if len(stored) < left:
        return Problem(number, offset, "truncated_record", f"{len(stored):,} of {left:,} bytes: {url}")
    body = _body(record, stored, max_bytes)
    if isinstance(body, str):
        return Problem(number, offset, body, url)
    charset = re.search(r"charset=[\"']?([\w:.-]+)", kind, re.I)
    date = _header(headers, "archive-date" if arc else "WARC-Date")
    return Page(
        number,
        offset,
        url,
        date,
        _header(headers, "WARC-Record-ID"),
        mime != "text/plain",
        charset[1] if charset else "",
        body,
    )

# %%
#| export
_ARC_HEADER = re.compile(rb"https?://\S.* [\d.]+ \d{8,14} \S+ \d+\r?\n")


def _next_header(stream: ByteReader) -> bool:
    "Move to the next line that begins a record; False at the end."
    while find(stream, b"\n"):
        stream.read(1)
        head = stream.peek(8)
        if head.startswith(b"WARC/1.") or (head.startswith(b"http") and _ARC_HEADER.match(stream.peek(2000))):
            return True
    return False

# %%
reader = ByteReader(iter([b"http://a b\nhttp://a/b 1.2.3.4 20200101000000 text/html 7\n1234567\nWARC/1.1\r\n"]))
assert (
    _next_header(reader)
    and reader.at == 11
    and _next_header(reader)
    and reader.peek(8) == b"WARC/1.1"
    and not _next_header(reader)
)

# %%
#| export
def _records(
    stream: ByteReader, place: int | None, number: int, skip: int, max_bytes: int
) -> Iterator[Page | Problem]:
    "The records of a gzip member (which begins at `place`) or of a whole uncompressed file (place None)."
    loader, result = _loader(), None
    while True:
        while stream.peek(1) in (b"\r", b"\n"):
            stream.readline()
        more = stream.peek(1)
        if result:  # not before: at the end of a gzip member stands the sum that proves it
            yield result
            result = None
        if not more:
            return
        number, offset = number + 1, stream.at if place is None else place
        try:
            record = _parse(loader, stream)
            result = (
                _judge(record, number, offset, max_bytes) if number > skip else Problem(number, offset, "not_a_page")
            )
            while record.raw_stream.read(1 << 16):  # what nobody wanted
                pass
        except BrokenFile as error:
            if error.reason != "bad_record":
                raise
            yield Problem(number, offset, error.reason, str(error))
            if not _next_header(stream):
                return

# %%
#| export
def read_warc(
    pieces: Iterator[bytes], skip: int = 0, max_bytes: int = 10_000_000, expand_limit: int = EXPAND_LIMIT
) -> Iterator[Page | Problem]:
    """The records of a WARC or ARC file, uncompressed or gzip, in order; each is a Page or a Problem.

    skip: records up to this number are passed over (given as `not_a_page`). max_bytes: of a page; larger ones are
    never held. Memory: one page. A damaged gzip member costs itself, a damaged record of an uncompressed file what
    stands before the next header.
    """
    raw, number, expected = ByteReader(pieces, _HISTORY), 0, 0
    if raw.peek(11).startswith((b"WARC/", b"filedesc://")):
        try:
            for result in _records(raw, None, 0, skip, max_bytes):
                number = result.number
                yield result
        except BrokenFile as error:  # of what lies below: another compression
            yield Problem(number + 1, raw.at, error.reason, str(error))
        return
    while raw.peek(1):
        found, offset = find(raw, _GZIP), raw.at
        if offset > expected >= 0:  # the mark of a member is damaged, or this is no archive
            number += 1
            yield Problem(number, expected, "corrupt_record", f"{offset - expected:,} bytes that are no gzip member")
        if not found:
            return
        expected = -1
        try:
            for result in _records(ByteReader(_member(raw, expand_limit)), offset, number, skip, max_bytes):
                number = result.number
                yield result
            expected = raw.at
        except BrokenFile as error:
            number += 1
            yield Problem(number, offset, error.reason, str(error))
            raw.back_to(offset + 1)  # damaged data may have led the decoder far into the next members

# %% [markdown]
# We build a small archive by hand: five records, four of them pages, in GBK, chunked, compressed and plain.

# %%
def record(kind: str, url: str, http: bytes, body: bytes) -> bytes:
    head = (f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\nWARC-Date: 2020-02-03T04:05:06Z\r\n"
            f"WARC-Record-ID: <urn:{url}>\r\nContent-Length: {len(http + body)}\r\n\r\n")
    return head.encode() + http + body + b"\r\n\r\n"


def answer(*headers: str, status: int = 200) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} OK", *headers, "", ""]).encode()


HTML, GZIP, CHUNKED = "Content-Type: text/html", "Content-Encoding: gzip", "Transfer-Encoding: chunked"
gbk = "<html><title>天气</title><body>今天天气很好。</body></html>".encode("gbk")
body = b"<html><body>" + b"<p>A page about nothing.</p>" * 20
parts = [record("request", "http://a/", b"GET / HTTP/1.1\r\n\r\n", b"")] + [
    record("response", f"http://a/{i}", head, content)
    for i, (head, content) in enumerate([
        (answer(HTML + "; charset=gb2312"), gbk),
        (answer(HTML, CHUNKED), b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)),
        (answer(HTML, GZIP), gzip.compress(body)),
        (answer(HTML, GZIP), body),  # it lies
        (answer(HTML, status=404), body),
        (answer("Content-Type: image/png"), b"\x89PNG"),
    ])]
layouts = {"plain": b"".join(parts), "members": b"".join(map(gzip.compress, parts)), "one member": gzip.compress(b"".join(parts))}

# %%
def read(data: bytes, **options) -> list:
    return list(read_warc(iter([data[i : i + 999] for i in range(0, len(data), 999)]), **options))

for name, data in layouts.items():
    found = read(data)
    assert [r.number for r in found] == list(range(1, 8)), name
    assert [r.reason for r in found if isinstance(r, Problem)] == ["not_a_page", "http_error", "not_a_page"]
    pages = [r for r in found if isinstance(r, Page)]
    assert [p.body for p in pages] == [gbk, body, body, body] and pages[0].charset == "gb2312" and pages[0].date[:4] == "2020"
    assert [r.number for r in read(data, skip=3) if isinstance(r, Page)] == [4, 5]
    print(f"{name:11}", [(r.number, r.offset) for r in found])

# %% [markdown]
# Now damage: a cut file, a flipped bit in one member, a wrong length, a page that is too large, and one that expands without end.

# %%
def told(data: bytes, **options) -> tuple[int, list]:
    "How many pages, and what is wrong with other records."
    found = read(data, **options)
    return sum(isinstance(r, Page) for r in found), [(r.number, r.reason) for r in found if isinstance(r, Problem) and not r.in_order]

flipped = bytearray(layouts["members"])
flipped[len(gzip.compress(parts[0])) + len(gzip.compress(parts[1])) + 150] ^= 255
length = len(answer(HTML + "; charset=gb2312") + gbk)
bomb = record("response", "http://a/b", answer("Content-Type: text/plain"), bytes(100_000_000))
results = {
    "cut": told(layouts["members"][:700]), "cut plain": told(layouts["plain"][:1500]), "flipped bit": told(bytes(flipped)),
    "wrong length": told(layouts["plain"].replace(b"Length: %d" % length, b"Length: 20", 1)), "no archive": told(b"hello\n" * 9),
    "limit 500": told(layouts["members"], max_bytes=500), "expands": told(gzip.compress(bomb) + gzip.compress(parts[1])),
}
for name, (kept, problems) in results.items():
    print(f"{name:13} {kept} pages, {problems}")
assert results["cut"] == (2, [(4, "truncated_record")]) and results["flipped bit"] == (3, [(3, "corrupt_record")])
assert results["expands"] == (1, [(1, "expands_too_much")]) and results["no archive"] == (0, [(1, "corrupt_record")])
assert results["wrong length"][0] == 3

# %% [markdown]
# ## Flip every byte
# One byte of the archive of members is inverted, at every place in turn. A page is lost when its own member is hit; how many others are?

# %%
whole = layouts["members"]
lost = []
for at in range(0, len(whole), 5):
    bad = bytearray(whole)
    bad[at] ^= 255
    lost.append(4 - told(bytes(bad))[0])
fig, ax = plt.subplots(figsize=(5.5, 2.4))
ax.plot(np.arange(0, len(whole), 5), lost, drawstyle="steps-post")
ax.set(xlabel="inverted byte (offset)", ylabel="pages lost", yticks=[0, 1, 2])
plt.show()
print(f"at most {max(lost)} page lost, in {sum(n > 0 for n in lost) / len(lost):.0%} of the places")
assert max(lost) <= 1

# %% [markdown]
# Each plateau is the member of one page; nowhere does an inverted byte cost a second page.
#
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | one damaged record costs one record (ours) | holds for archives with a member a record | a byte inverted at every fifth place of an archive of four pages: never more than one page lost |
# | memory is one page (ours) | holds | a page above the limit is passed over in pieces of 64 KiB, a member that grows a thousandfold is stopped |
#
# What this does not cover: records that were split into segments, revisits (the page stands elsewhere), and digests are not verified.
