# %% [markdown]
# # From bytes on disk to lines and objects
#
# > Damaged files read piece by piece: compression, encodings, line ends and JSON, each with its traps, so that a bad line costs one line.
#
# Below the reader of documents lies a smaller question: how do bytes on a disk become lines, and lines become objects, when the file was cut off, packed twice, saved by the wrong editor or joined from several? Every step here is a generator over pieces of bytes, so that only
# a piece and the longest line are ever in memory.
#
# The sources say nothing about broken files; they assume that data arrives whole. Our own claim, tested here: one bad place costs one line.

# %%
#| default_exp data.bytestream

# %%
#| export
from __future__ import annotations

import codecs
import functools
import itertools
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zstandard

from scalelab.data import encodings, storage

# %%
#| hide
import gzip
import io
import os
import random
import shutil
import tempfile

import matplotlib.pyplot as plt
import numpy as np

from scalelab.core.plotting import style

style()
work = Path(tempfile.mkdtemp())  # every file of this chapter lives here
os.chdir(work)

# %% [markdown]
# ## Decompress
# Names lie: a proxy unpacks a download and leaves `.gz` in its name. The first four bytes do not lie, so they decide. Gzip files may have several members and
# zstd files several frames (that is what `cat a.gz b.gz` makes), and a file that ends inside one was cut off. Python's zstd stream reader ends without an error there,
# so we drive the decompressor ourselves and ask it at the end: were you done? And a small archive may unpack to more than any disk holds, by accident or by malice. What expands more than
# a thousandfold (once it is beyond 64 MiB) is stopped there: text that was compressed by a factor of 1,000 says one thing a thousand times.

# %%
#| export
EXPAND_LIMIT = 1000  # times a compressed file may grow, beyond its first EXPAND_FLOOR bytes
EXPAND_FLOOR = 1 << 26
MAX_LINE = (
    1 << 28
)  # bytes of one line or one text file, 256 MiB: more is no document, and would break the promise of flat memory


class BrokenFile(Exception):
    """The rest of a file can't be read; what came before it can.

    reason: a short name that can be counted; line: the line that was being read, None when the whole file is meant.
    """

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason
        self.line: int | None = None

# %%
#| export
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_ARCHIVES = {
    b"PK\x03\x04": "a zip archive",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"7z\xbc\xaf": "a 7z archive",
    b"Rar!": "a rar archive",
}


def file_name(path: str | Path) -> str:
    "The last part of a path or an address, without the query of an address."
    text = str(path)
    return re.split("[?#]", text)[0].rstrip("/").rsplit("/", 1)[-1] if storage.is_url(text) else Path(text).name


def raw_pieces(path: str | Path) -> Iterator[bytes]:
    "The bytes of a file or of an object behind an address, as they are."
    if storage.is_url(str(path)):
        yield from storage.read_pieces(str(path), piece=1 << 18)
    else:
        with open(path, "rb") as file:
            yield from iter(lambda: file.read(1 << 18), b"")


def read_pieces(path: str | Path, warn: Callable[[str], None], expand_limit: int = EXPAND_LIMIT) -> Iterator[bytes]:
    """Decompressed bytes of a file or object in pieces.

    Raises BrokenFile after the last good piece when the stream is cut or damaged, or grows more than `expand_limit`
    times.
    """
    pieces = raw_pieces(path)
    head = next(pieces, b"")
    packed = next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)
    if kind := next((name for magic, name in _ARCHIVES.items() if head.startswith(magic)), None):
        raise BrokenFile("unsupported_archive", f"it is {kind}: unpack it first")
    suffix = Path(file_name(path)).suffix
    if head and packed != {".gz": "gzip", ".zst": "zstd"}.get(suffix.lower()):
        warn(f"named {suffix} but it is {packed or 'not compressed'}: read as what it is")
    whole = itertools.chain([head] if head else [], pieces)
    yield from _unpack(whole, packed, expand_limit) if packed else whole

# %%
#| export
def _unpack(pieces: Iterator[bytes], packed: str, expand_limit: int) -> Iterator[bytes]:
    "All members of a gzip file, all frames of a zstd file."
    fresh = (
        functools.partial(zlib.decompressobj, 31)
        if packed == "gzip"
        else zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
    )
    step = 1 << 14 if packed == "gzip" else 1 << 11  # each may unpack to 16 MB of nothing, or 64 MB with zstd
    box, inside, came, made = fresh(), False, 0, 0
    for piece in (p[i : i + step] for p in pieces for i in range(0, len(p), step)):
        came += len(piece)
        while piece:
            if not inside and packed == "gzip" and not (piece := piece.lstrip(b"\0")):
                break  # zero padding after the last member is allowed
            inside = True
            try:
                out = box.decompress(piece)
            except (zlib.error, zstandard.ZstdError) as error:
                raise BrokenFile("corrupt_stream", f"damaged {packed} stream ({error})") from None
            made += len(out)
            if made > max(EXPAND_FLOOR, expand_limit * came):
                raise BrokenFile(
                    "expands_too_much", f"{came:,} bytes of {packed} became more than {expand_limit:,} times as many"
                )
            if out:
                yield out
            piece = b""
            if box.eof:
                piece, box, inside = box.unused_data, fresh(), False
    if inside:
        raise BrokenFile("truncated_stream", f"the {packed} stream ends before its end: the file was cut off")

# %% [markdown]
# A stream cut anywhere gives a prefix and an error, and no two-member file loses its second half. The last check is the trap that we avoid: the usual reader says nothing.

# %%
plain = b"".join(b"line %d\n" % i for i in range(20_000))
for pack in (gzip.compress, zstandard.ZstdCompressor().compress):
    whole = pack(plain[:50_000]) + pack(plain[50_000:])
    Path("two.gz").write_bytes(whole)
    assert b"".join(read_pieces(Path("two.gz"), lambda m: None)) == plain
    for cut in (len(whole) - 1, len(whole) // 2, 30):
        Path("cut.gz").write_bytes(whole[:cut])
        got, seen = b"", None
        try:
            for piece in read_pieces(Path("cut.gz"), lambda m: None):
                got += piece
        except BrokenFile as error:
            seen = error.reason
        assert seen == "truncated_stream" and plain.startswith(got)
silent = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(zstandard.compress(plain)[:-20])).read()
print(f"the usual zstd reader on a cut file: {len(silent):,} of {len(plain):,} bytes, and no error")

# %% [markdown]
# A bomb is stopped early: of 300 MB of one letter nothing beyond the floor is unpacked. A zip archive is no stream of text at all.

# %%
bombs = {
    "gz": gzip.compress(bytes(300_000_000), 9),
    "zst": zstandard.ZstdCompressor(19).compress(bytes(300_000_000)),
    "gz.gz": b"PK\x03\x04...",
}
for name, bomb in bombs.items():
    Path(f"bomb.{name}").write_bytes(bomb)
    got = 0
    try:
        for piece in read_pieces(Path(f"bomb.{name}"), lambda m: None):
            got += len(piece)
    except BrokenFile as error:
        print(f"{error.reason}: {error}; {got >> 20} MiB read")
    else:
        raise AssertionError(f"bomb.{name} was unpacked")
    assert got <= 64 << 20

# %% [markdown]
# How much of a cut file is still there? We cut the same 20,000 lines after every twentieth of the compressed bytes and count the lines that come back.

# %%
def lines_back(packed: bytes, part: float) -> float:
    "Share of the 20,000 lines that a file cut after `part` of its bytes still gives."
    Path("cut.gz").write_bytes(packed[: int(part * len(packed))])
    got = 0
    try:
        for piece in read_pieces(Path("cut.gz"), lambda m: None):
            got += piece.count(b"\n")
    except BrokenFile:
        pass
    return got / 20_000

rng = random.Random(0)
plain = b"".join(b"line %d %d\n" % (i, rng.getrandbits(200)) for i in range(20_000))
parts = np.linspace(0.05, 1, 20)
fig, ax = plt.subplots(figsize=(5, 2.6))
for name, packed, mark in [("gzip", gzip.compress(plain), "o"), ("zstd", zstandard.compress(plain), "s")]:
    back = [lines_back(packed, part) for part in parts]
    ax.plot(parts, back, marker=mark, label=name)
    assert back[-1] == 1 and back == sorted(back)
ax.set(xlabel="part of the compressed bytes that arrived", ylabel="lines that come back")
ax.legend()
plt.show()

# %% [markdown]
# Gzip gives back almost exactly the part that arrived. Zstd works in blocks of 128 KiB of text, so that its curve is a staircase: up to one block is lost on top. Both are worth reading, and both have to say that they were cut.
#
# ## Find the encoding
# The chapter before this one decides what the beginning of a file is in; here the rest of the stream follows that decision. One thing is different in a file of lines: a few damaged lines among good ones are no evidence for another encoding, so that where half of the lines beyond ASCII are
# valid UTF-8, the file is UTF-8 and the others are bad lines. What can't be decoded stays recognisable: it comes out as bytes that are not UTF-8, so that its line, and no other, is refused later.

# %%
#| export
SURROGATE = re.compile("[\ud800-\udfff]")
_HEAD = 1 << 16  # bytes by which a file's encoding is decided
codecs.register_error(
    "scalelab.damage", lambda error: ("\udcff", error.end)
)  # half a pair: no UTF-8 can be made of it


def _encoding(head: bytes, whole: bool) -> encodings.Encoding:
    "The encoding of a file of lines by its beginning; UTF-8 when nothing clear speaks against it."
    found = encodings.detect(head, whole=whole)
    if found is None or found.why in ("characters", "statistics"):
        lines = [line for line in head.split(b"\n") if not line.isascii()]
        valid = sum(encodings.decodes(line, "utf-8") is not None for line in lines)
        if found is None and valid == 0:  # damaged lines in another encoding: the others vote
            votes = Counter(filter(None, (encodings.by_characters(line) for line in lines[:50])))
            name, n = votes.most_common(1)[0] if votes else ("", 0)
            found = encodings.Encoding(name, "characters") if 2 <= n > 0.6 * len(lines[:50]) else None
        elif 2 * valid >= len(lines):
            found = None
    return found or encodings.Encoding("utf-8", "valid")

# %%
#| export
def _peek(pieces: Iterator[bytes], enough: Callable[[bytes], bool]) -> tuple[bytes, Iterator[bytes]]:
    "The beginning of a stream, and the rest of it; a break in the beginning is raised by the rest."
    head, broken = bytearray(), []
    try:
        for piece in pieces:
            head += piece
            if enough(head):
                break
    except BrokenFile as error:
        broken.append(error)

    def rest() -> Iterator[bytes]:
        if broken:
            raise broken[0]
        yield from pieces

    return bytes(head), rest()


def as_utf8(pieces: Iterator[bytes], note: Callable[[str], None]) -> Iterator[bytes]:
    "The stream in UTF-8 without a byte order mark; places that can't be decoded are not valid UTF-8."
    head, rest = _peek(pieces, lambda head: len(head) >= _HEAD)
    encoding = _encoding(head, whole=len(head) < _HEAD)
    if encoding.name == "utf-8":
        yield head[encoding.mark :]
        yield from rest
        return
    note(f"decoded_{encoding.name.replace('-', '_')}")
    decoder = codecs.getincrementaldecoder(encoding.name)("scalelab.damage")
    for piece in itertools.chain([head], rest):
        yield decoder.decode(piece).encode("utf-8", "surrogatepass")
    yield decoder.decode(b"", True).encode("utf-8", "surrogatepass")

# %%
line = '{"text": "天气很好，我们到山上去看看。"}\n'
for encoding in ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "gb18030", "hz"]:
    raw, said = line.encode(encoding), []
    assert b"".join(as_utf8(iter([raw[:1], raw[1:9], raw[9:]]), said.append)).decode() == line, encoding
    print(encoding, said)
damaged = (line * 3).encode("gb18030").replace("很".encode("gb18030"), b"\xff", 1)
assert [
    encodings.decodes(x, "utf-8") is not None for x in b"".join(as_utf8(iter([damaged]), said.append)).splitlines()
] == [False, True, True]
mixed = (line * 2).encode() + line.encode("gb18030")  # two good lines and a foreign one: left as it is
assert b"".join(as_utf8(iter([mixed]), said.append)) == mixed

# %% [markdown]
# ## Cut
# Python's own line reading also breaks at `\r`, `str.splitlines` at eight more characters, U+2028 among them, which JSON allows inside a string. Bytes are cut at `\n` only. One old
# exception: a file without any `\n` in its first mebibyte but with `\r` has the line ends of a classic Mac. A line above `MAX_LINE` comes out as None, without having been held.

# %%
#| export
def split_lines(pieces: Iterator[bytes], note: Callable[[str], None]) -> Iterator[tuple[int, bytes | None]]:
    "Numbered lines without their line end, cut at line feeds only; None stands for a line longer than MAX_LINE."
    head, rest = _peek(iter(pieces), lambda head: b"\n" in head or len(head) > 1 << 20)
    sep = b"\r" if b"\n" not in head and b"\r" in head.rstrip(b"\r") else b"\n"
    if sep == b"\r":
        note("cr_line_ends")
    number, parts, size = 0, [], 0
    try:
        for piece in itertools.chain([head], rest):
            first, *rest = piece.split(sep)
            size += len(first)
            parts.append(first) if size <= MAX_LINE else parts.clear()
            for following in rest:
                number += 1
                whole = [b"".join(parts) if size <= MAX_LINE else None]
                parts, size = [following], len(following)
                yield number, whole.pop()  # nothing here holds a long line while it is parsed
    except BrokenFile as error:
        error.line = number + 1  # the line that was being read is not whole
        raise
    if size:
        yield number + 1, b"".join(parts) if size <= MAX_LINE else None

# %%
assert list(split_lines(iter([b"a\nb", b"c\n\r\n", b"d"]), None)) == [(1, b"a"), (2, b"bc"), (3, b"\r"), (4, b"d")]
assert [n for n, _ in split_lines(iter(["a\u2028b\x85\x0b\n".encode()]), None)] == [
    1
]  # one line, whatever str.splitlines thinks
seen = []
assert list(split_lines(iter([b"a\rb\r"]), seen.append)) == [(1, b"a"), (2, b"b")] and seen == ["cr_line_ends"]

# %% [markdown]
# ## From a line to an object
# `json.loads` is too strict in one way and too lax in three. It refuses a raw tab inside a string, which people write. It lets `NaN` through as a number, keeps the last of two
# equal keys without a word, and stops at the end of the first object although a second may follow on the same line. The parser below yields every object of a line and a list of notes.

# %%
#| export
MAX_DEPTH = 100  # levels of lists and objects: more would end some later program in a RecursionError
NOT_FINITE = object()  # stands where JSON had NaN, Infinity or a number too large for a float


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        made["\0duplicate"] = True  # no JSON key of ours can be this: taken off again by parse_objects
    return made


def _float(text: str) -> Any:
    return number if math.isfinite(number := float(text)) else NOT_FINITE


_DECODER = json.JSONDecoder(
    object_pairs_hook=_pairs, parse_constant=lambda _: NOT_FINITE, parse_float=_float, strict=False
)

# %%
#| export
def tidy(value: Any, notes: set[str], depth: int = MAX_DEPTH) -> Any:
    "Non-finite numbers to None, marks of duplicate keys off, nested ones too; ValueError below `depth` levels."
    if depth < 0:
        raise ValueError("nested too deeply")
    if value is NOT_FINITE or isinstance(value, float) and not math.isfinite(value):
        notes.add("non_finite_number")
        return None
    if isinstance(value, dict):
        if value.pop("\0duplicate", None):
            notes.add("duplicate_keys")
        return {key: tidy(v, notes, depth - 1) for key, v in value.items()}
    if isinstance(value, list):
        return [tidy(v, notes, depth - 1) for v in value]
    return value


def parse_objects(text: str) -> Iterator[Any]:
    "Every JSON value on a line; raises ValueError at the first place that is none."
    at, end = 0, len(text)
    while True:
        while at < end and text[at] in " \t\r\n\ufeff":
            at += 1
        if at == end:
            return
        try:
            value, at = _DECODER.raw_decode(text, at)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        yield value

# %%
assert list(parse_objects('{"a": 1}{"a": 2} ')) == [{"a": 1}, {"a": 2}]
assert list(parse_objects('{"a": "raw\ttab"}')) == [{"a": "raw\ttab"}]
notes = set()
assert tidy(next(parse_objects('{"a": NaN, "b": [1e999, {"c": 1, "c": 2}]}')), notes) == {
    "a": None,
    "b": [None, {"c": 2}],
}
assert notes == {"non_finite_number", "duplicate_keys"}
try:
    tidy(next(parse_objects('{"a": ' + "[" * 200 + "]" * 200 + "}")), notes)
except ValueError as error:
    print(error)
else:
    raise AssertionError("accepted")
for bad in [
    '{"a": 1} tail',
    "[" * 100_000,
    '{"a": ' + "9" * 5000 + "}",
]:  # the last: Python refuses integers of 5,000 digits
    try:
        list(parse_objects(bad))
    except ValueError as error:
        print(f"{bad[:12]:14} {str(error)[:40]}")
    else:
        raise AssertionError("accepted")

# %% [markdown]
# The way back is one line of JSON for one dict, strict in what it writes: no NaN, and UTF-8 even for half an emoji.

# %%
#| export
def json_line(row: dict[str, Any]) -> bytes:
    "One dict as a line of UTF-8 JSON; a lone surrogate is written as its escape, dates and decimals as text."
    text = json.dumps(row, ensure_ascii=False, allow_nan=False, default=str) + "\n"
    try:
        return text.encode()
    except UnicodeEncodeError:
        return (json.dumps(row, allow_nan=False, default=str) + "\n").encode()

# %%
assert json_line({"text": "天"}) == '{"text": "天"}\n'.encode()
assert json.loads(json_line({"text": "\ud83d"})) == {"text": "\ud83d"}  # would raise in a plain .encode()
try:
    json_line({"score": math.nan})
except ValueError:
    pass
else:
    raise AssertionError("NaN was written")

# %% [markdown]
# The four steps together, on a UTF-16 file of two gzip members with an object that the second member cuts in half:

# %%
text = '{"id": 1, "text": "天"}\n{"id": 2}{"id": 3}\n{"id": 4, "te'
raw = text.encode("utf-16")
Path("all.jsonl.gz").write_bytes(gzip.compress(raw[:40]) + gzip.compress(raw[40:]))
said, got = [], []
for number, line in split_lines(as_utf8(read_pieces(Path("all.jsonl.gz"), said.append), said.append), said.append):
    try:
        got += [(number, value) for value in parse_objects(line.decode())]
    except ValueError as error:
        said.append(f"line {number}: {error}")
print(*got, *said, sep="\n")
assert [value["id"] for _, value in got] == [1, 2, 3] and said[0] == "decoded_utf_16" and len(said) == 2

# %%
#| hide
os.chdir("/")
shutil.rmtree(work)

# %% [markdown]
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | a cut .zst ends without an error in the usual stream reader (ours) | holds | 131,072 of 208,890 bytes and no error; here it is `truncated_stream` and every whole line is kept |
# | one bad place costs one line (ours) | holds for lines and objects | cut streams, two members, seven encodings, three kinds of line ends, raw tabs, NaN, equal keys, several objects in a line |
#
# | an archive that expands a thousandfold is stopped (ours) | holds | at 64 MiB and 1,000:1, both formats; at most 64 MB are unpacked at once |
#
# What this does not cover: bzip2, xz and archives (zip, tar) are not opened; the encoding of a file is decided by its first 64 KiB.
