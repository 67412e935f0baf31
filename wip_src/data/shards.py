# %% [markdown]
# # Shards: reading, near and far
#
# > Memory maps of token files, opened without trusting them, from a local folder or from an object store through a cache on the local disk.
#
# The last chapter wrote shards; this one opens them. A terabyte is opened as quickly as a kilobyte if we trust it, and by default we don't. The files may lie on three tiers: an object store that
# holds everything, a local disk that holds what was used lately, and memory, into which the operating system maps what is read now.
#
# **The claim we test** (A-stream): the first article keeps its text in memory-mapped chunks of its own. What does opening and checking them cost?

# %%
#| default_exp data.shards

# %%
#| export
from __future__ import annotations

import bisect
import functools
import json
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from scalelab.core.config import UsageError, human_bytes, human_count
from scalelab.data.shard_files import DOC_ROW, FORMAT, VERSION, ShardWriter, check_file, index_checksum

# %%
#| hide
import contextlib
import shutil
import tempfile
import time

import matplotlib.pyplot as plt

from scalelab.core.plotting import style
from scalelab.data.storage import Cache

style()
room = Path(tempfile.mkdtemp(prefix="shards-"))

@contextlib.contextmanager
def refused(*words):
    "The block must raise UsageError, and the message must hold all `words`."
    try:
        yield
    except UsageError as e:
        missing = [w for w in words if w not in str(e)]
        assert not missing, f"{missing} not in: {e}"
    else:
        raise AssertionError("nothing was raised")

# %% [markdown]
# A corpus to read: seven little texts whose tokens are their UTF-8 bytes, `EOT` is 256, and a limit of 100 tokens a shard makes several files of it.

# %%
texts = [("code", "def f(x):\n    return x + 1\n"), ("code", "print('hello')\n"), ("code", "import numpy as np\n"),
         ("prose", "The shard remembers what the batch forgets."), ("prose", "A short one."),
         ("古文", "學而時習之，不亦說乎。"), ("古文", "溫故而知新。")]

def write(name, documents, **options):
    "Write documents of (ids, domain) into room/name, with byte ids unless told otherwise."
    given = {"tokenizer_hash": "hash-of-bytes", "vocab_size": 257, "eot_id": 256} | options
    with ShardWriter(room / name, **given) as w:
        for ids, domain in documents:
            w.add(ids, len(ids), domain, source=f"{domain}.txt")

write("tiny", [(np.frombuffer(text.encode(), np.uint8), domain) for domain, text in texts], shard_tokens=100)
print(sorted(p.name for p in (room / "tiny").iterdir()))

# %% [markdown]
# ## The index first
# It is checked before anything it says is believed. A folder that is not ours, or from a newer version, is told apart from a damaged one.

# %%
#| export
def parse_index(text: str | bytes, where: str) -> dict:
    "The checked content of an index.json; UsageError naming what is wrong with the file `where` and what to do."
    try:
        index = json.loads(text)
    except ValueError as e:
        raise UsageError(f"{where}: not readable as JSON ({e}): copy it again, or tokenize again") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        found = index.get("format") if isinstance(index, dict) else type(index).__name__
        raise UsageError(f"{where}: not an index of scalelab shards (format {found!r}, expected {FORMAT!r})")
    if index.get("version") != VERSION:
        raise UsageError(f"{where}: format version {index.get('version')}, this scalelab reads version "
            f"{VERSION}: upgrade scalelab, or tokenize again")
    if index.get("checksum") != index_checksum(index):
        raise UsageError(f"{where}: damaged, its content does not match its own checksum: copy it again, or "
            "tokenize again")
    return index


def load_index(directory: str | Path) -> dict:
    "The checked index.json of a split, which is a local folder or a URL."
    from scalelab.data.storage import get_text, is_url

    if is_url(str(directory)):
        where = f"{str(directory).rstrip('/')}/index.json"
        return parse_index(get_text(where), where)
    path = Path(directory) / "index.json"
    if not path.exists():
        splits = [p.parent.name for p in sorted(Path(directory).glob("*/index.json"))]
        hint = f"it holds the splits {splits}, give one" if splits else "make them with `scalelab data tokenize`"
        raise UsageError(f"{directory}: no shards here (no index.json): {hint}")
    return parse_index(path.read_bytes(), str(path))

# %%
assert load_index(room / "tiny")["n_documents"] == len(texts)
with refused("no shards here", "['tiny']"):
    load_index(room)
with refused("scalelab data tokenize"):
    load_index(room / "nowhere")
good = (room / "tiny/index.json").read_text(encoding="utf-8")
for old, new, words in [('"code"', '"coda"', ["damaged"]), ('"version": 1', '"version": 2', ["version 2", "upgrade"]),
                        ("scalelab-shards", "mds", ["'mds'"]), ("}", "", ["JSON"]), (good, "[1]", ["not an index"])]:
    assert old in good
    with refused("there/index.json", *words):
        parse_index(good.replace(old, new), "there/index.json")

# %% [markdown]
# ## Files that come when they are called
# Locally every file is opened at once. From an object store that would mean to copy a corpus before the first step, so there a file is fetched when it is first read. What is mapped is kept, up to the size limit of the
# cache: a file that the cache has deleted still fills the disk as long as somebody maps it.

# %%
#| export
class LazyFiles(Sequence):
    """Arrays, opened by `open_file(i)` when they are first asked for; the least recently used are dropped beyond
    `limit` bytes."""

    def __init__(self, n: int, open_file: Callable[[int], np.ndarray], limit: int):
        self._n, self._open_file, self._limit = n, open_file, limit
        self._arrays, self._lock = OrderedDict(), threading.Lock()

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: int) -> np.ndarray:
        with self._lock:
            if i in self._arrays:
                self._arrays.move_to_end(i)
                return self._arrays[i]
        if not 0 <= i < self._n:
            raise IndexError(i)
        array = self._open_file(i)  # may take minutes: other files stay readable
        with self._lock:
            self._arrays[i] = array
            while len(self._arrays) > 1 and sum(a.nbytes for a in self._arrays.values()) > self._limit:
                self._arrays.popitem(last=False)
        return array

# %%
opened = []
def make(i):
    opened.append(i)
    return np.full(10, i, np.uint8)

files = LazyFiles(5, make, limit=25)
assert len(files) == 5 and files[3][0] == 3 and files[1][0] == 1 and files[3][0] == 3 and opened == [3, 1]
assert files[4][0] == 4 and files[3][0] == 3 and opened == [3, 1, 4]  # room for two: 1 was the least recently used
assert files[1][0] == 1 and opened == [3, 1, 4, 1]
assert [a[0] for a in files] == [0, 1, 2, 3, 4]

# %% [markdown]
# Where a split's files come from is the only difference between near and far:

# %%
#| export
def _open_map(path: Path, dtype: np.dtype) -> np.ndarray:
    # as a plain array: slicing np.memmap itself costs several times more per window
    return np.memmap(path, dtype, mode="r").view(np.ndarray)


def _open_split(directory: str | Path, index: dict, verify: bool, cache) -> tuple[Sequence, Sequence]:
    "(token arrays, document tables) of a split: opened and checked now in a folder, when they are read from a URL."
    dtype = np.dtype(index["dtype"]).newbyteorder("<")
    names = [list(shard["files"].items()) for shard in index["shards"]]
    if cache is None:
        for shard in names:
            for name, entry in shard:
                check_file(Path(directory) / name, entry, index["block_bytes"], verify)
        kinds = enumerate((dtype, DOC_ROW))
        return tuple([_open_map(Path(directory) / shard[k][0], kind) for shard in names] for k, kind in kinds)

    def fetch(i: int, k: int) -> np.ndarray:
        name, entry = names[i][k]
        with cache.use(f"{str(directory).rstrip('/')}/{name}", entry["xxh3"]) as path:  # compares every byte
            return _open_map(path, (dtype, DOC_ROW)[k])  # a map outlives the cache's copy

    return tuple(LazyFiles(len(names), functools.partial(fetch, k=k), cache.limit_bytes) for k in (0, 1))

# %%
tokens, tables = _open_split(room / "tiny", load_index(room / "tiny"), True, None)
assert len(tokens) == len(tables) == 3 and tokens[0][0] == 256 and tables[0].dtype == DOC_ROW
assert sum(map(len, tables)) == len(texts)

# %% [markdown]
# With files and index checked, what is left is bookkeeping: shards are numbered through, so a token has a *global* position, and a document a global number.

# %%
#| export
class _Split:
    "What index.json says about a split, and its files."

    def __init__(self, directory: str | Path, verify: bool = True, cache=None):
        from scalelab.data.storage import is_url

        self.is_remote = is_url(str(directory))
        if self.is_remote and cache is None:
            raise UsageError(f"{directory}: shards in an object store are read through a cache on a local disk: "
                "give cache=Cache(folder, limit_bytes)")
        self.directory, self.cache = directory if self.is_remote else Path(directory), cache if self.is_remote else None
        self.index, self.verify = load_index(directory), verify
        self.tokens, self._tables = _open_split(directory, self.index, verify, self.cache)
        self.dtype = np.dtype(self.index["dtype"]).newbyteorder("<")
        self.token_start = np.cumsum([0] + [s["n_tokens"] for s in self.index["shards"]])
        self.doc_start = np.cumsum([0] + [s["n_documents"] for s in self.index["shards"]])
        self.n_docs, self.n_tokens = int(self.doc_start[-1]), int(self.token_start[-1])
        self.domains: list[str] = self.index["domains"]
        self.sources: list[str] = self.index["sources"]
        self.licences: list[str] = self.index["licences"]
        self.totals: dict[str, dict[str, int]] = self.index["totals"]
        self.vocab_size, self.eot_id = self.index["vocab_size"], self.index["eot_id"]
        self.tokenizer_hash, self.checksum = self.index["tokenizer_hash"], self.index["checksum"]

    def fetch_all(self) -> bool:
        """Fetch what is not there yet, tables of documents first; False if a file could not be had (its first
        reader is told why)."""
        try:
            for files in (self._tables, self.tokens):
                for i in range(len(files)):
                    files[i]
        except UsageError:
            return False
        return True

    def check_tokenizer(self, tokenizer_hash: str) -> None:
        "Raise UsageError unless these shards were made with the tokenizer of this hash."
        if tokenizer_hash != self.tokenizer_hash:
            raise UsageError(f"{self.directory}: made with tokenizer {self.tokenizer_hash}, the one given is "
                f"{tokenizer_hash}: the same ids would mean other text; tokenize again with this tokenizer, "
                "or use the tokenizer.json that lies with the shards")

    def __repr__(self) -> str:
        size = f"{self.n_docs} documents, {human_count(self.n_tokens)} tokens, {len(self.tokens)} files"
        return f"Shards({size} of {self.dtype.name}, domains {self.domains})"

# %%
split = _Split(room / "tiny")
print(split)
assert split.token_start.tolist() == [0, *np.cumsum([len(t) for t in split.tokens])] and split.n_docs == 7
split.check_tokenizer("hash-of-bytes")
with refused("hash-of-bytes", "another-hash", "tokenize again"):
    split.check_tokenizer("another-hash")
with refused("memory://bucket/train", "give cache=Cache"):
    _Split("memory://bucket/train")

# %% [markdown]
# And what a reader asks of it: documents, and windows of tokens. A batch asks for several windows of one length, and for that there is a quick way: in a single file they are rows of one strided view.

# %%
#| export
class Shards(_Split):
    """Read-only view of one split written by ShardWriter: memory maps, nothing is copied until a window is.

    directory: the split's folder, or its URL; then `cache` (scalelab.data.storage.Cache) holds the files and
    checks them as they come. verify: compare the checksums of a folder's files now (at the speed of the disk, or
    of memory when it is cached); sizes are always compared. Raises UsageError if a file is missing, truncated,
    damaged, or of a foreign version.

    tokens: 1-D arrays, one a shard, ids including the EOTs. token_start: [n_shards + 1] global position of each shard's
    first token. docs: DOC_ROW array of all documents, `offset` counted from the split's first token. lengths: [n_docs]
    tokens of each document, without EOT.
    """

    @functools.cached_property
    def docs(self) -> np.ndarray:
        if len(self._tables) == 1:
            return self._tables[0]
        docs = np.concatenate(list(self._tables))
        docs["offset"] += np.repeat(self.token_start[:-1], np.diff(self.doc_start)).astype(np.uint64)
        return docs

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        # the next EOT follows the last token: that of the next document, or the one which closes the shard
        ends = zip(self._tables, self.index["shards"])
        return np.concatenate([np.diff(t["offset"].astype(np.int64), append=s["n_tokens"] - 1) - 1 for t, s in ends])

    def document(self, i: int) -> np.ndarray:
        "Tokens of document `i` (0 <= i < n_docs) without EOT: a view of the file."
        if not 0 <= i < self.n_docs:
            raise IndexError(f"document {i}: there are {self.n_docs}")
        return self.window(int(self.docs["offset"][i]) + 1, int(self.lengths[i]))

    def window(self, start: int, length: int) -> np.ndarray:
        "`length` tokens from global position `start`, a view; a window never reaches over a shard's end."
        shard = bisect.bisect_right(self._begins, start) - 1
        local = start - self._begins[shard]
        return self.tokens[shard][local : local + length]

    @functools.cached_property
    def _begins(self) -> list[int]:
        return self.token_start.tolist()  # bisect on a list is quicker than a search in an array for one value

# %% [markdown]
# What went in comes out, across all shard borders. A view is a view: nobody can write through it.

# %%
tiny = Shards(room / "tiny")
for i, (domain, text) in enumerate(texts):
    assert bytes(tiny.document(i).astype(np.uint8)).decode() == text
    assert tiny.domains[tiny.docs["domain"][i]] == domain and tiny.docs["bytes"][i] == len(text.encode())
assert tiny.lengths.tolist() == [len(t.encode()) for _, t in texts]
assert all(tiny.window(int(o), 1)[0] == 256 for o in tiny.docs["offset"])
assert tiny.totals["prose"] == {"documents": 2, "tokens": 55, "bytes": 55}
assert tiny.n_tokens == tiny.lengths.sum() + tiny.n_docs + len(tiny.tokens)
try:
    tiny.document(0)[0] = 1
except ValueError as e:
    assert "read-only" in str(e)
else:
    raise AssertionError("a shard was written through a view")

# %%
#| export
class WindowReader:
    "Copies of many windows of one length: read(starts) -> [n, length], in the width of the shards."

    def __init__(self, shards: Shards, length: int):
        self.shards, self.length, self._view = shards, length, None
        if len(shards.tokens) == 1 and not shards.is_remote and len(shards.tokens[0]) >= length:
            self._view = np.lib.stride_tricks.sliding_window_view(shards.tokens[0], length)

    def read(self, starts: np.ndarray) -> np.ndarray:
        "Tokens from each global position [n, length]; IndexError for a window that reaches over a shard's end."
        if self._view is not None:
            return self._view[starts]
        out = np.empty((len(starts), self.length), self.shards.dtype)
        for row, start in zip(out, starts.tolist()):
            window = self.shards.window(start, self.length)
            if len(window) < self.length:
                raise IndexError(f"window of {self.length} tokens at {start} reaches over the end of a shard")
            row[:] = window
        return out

# %%
write("one", [(np.arange(40) % 9, "web")] * 5)
for shards, starts in ((tiny, [0, 3, 91]), (Shards(room / "one"), [150, 0, 7])):
    got = WindowReader(shards, 8).read(np.array(starts))
    assert got.dtype == shards.dtype and (got == [shards.window(s, 8) for s in starts]).all()
    try:
        WindowReader(shards, 8).read(shards.token_start[1:2] - 7)
        raise AssertionError("a window beyond the end was read")
    except IndexError:
        pass

# %% [markdown]
# The width follows the vocabulary, and a random corpus of a 128K vocabulary survives the way there and back. The edge is sharp: 65,536 ids still fit into 16 bits.

# %%
rng = np.random.default_rng(0)
for vocab in (65_536, 65_537, 128_000):
    wide = [(rng.integers(0, vocab - 1, size=n), "web") for n in rng.integers(1, 200, size=100)]
    wide[0][0][0] = vocab - 2
    write("wide", wide, vocab_size=vocab, eot_id=vocab - 1, shard_tokens=5_000)
    shards = Shards(room / "wide")
    assert shards.dtype == ("uint16" if vocab == 65_536 else "uint32") and max(map(len, shards.tokens)) <= 5_000
    assert all((shards.document(i) == ids).all() for i, (ids, _) in enumerate(wide))
write("tens", [(np.arange(9), "web")] * 20, shard_tokens=100)  # ten long with their EOT, and one more EOT
assert [len(t) for t in Shards(room / "tens").tokens] == [91, 91, 21]

# %% [markdown]
# ## Faults on the disk
# One flipped bit, a file cut short, one that vanished, and a table with a wrong entry. All but the first are seen without reading a byte of text.

# %%
path, table = room / "one/00000.bin", room / "one/00000.docs.bin"
def damaged(file, content, *words, verify=True):
    "With `content` in place of the file's, opening must be refused."
    before = file.read_bytes()
    file.write_bytes(content) if content is not None else file.unlink()
    with refused(file.name, *words):
        Shards(room / "one", verify=verify)
    file.write_bytes(before)

data = bytearray(path.read_bytes())
data[100] ^= 4
damaged(path, data, "damaged", "bytes 0 to 411")
damaged(path, data[:-2], "truncated", "410 bytes where index.json says 412", verify=False)
damaged(path, bytes(data) + b"..", "too long", verify=False)
damaged(path, None, "missing", verify=False)
damaged(table, bytes(80), "damaged")
assert Shards(room / "one").n_docs == 5

# %% [markdown]
# ## Three tiers
# The same folder in an object store (here one in memory; `s3://` is the same to the library underneath). Files travel into the cache when they are read, are compared with their checksum on arrival, and are mapped from there. Which
# files a run needs next is known only to the order of samples, and that order is random over the whole split: a cache smaller than the split would fetch whole files for single rows. So that is said at the start.

# %%
#| export
def open_shards(directory: str | Path, cache_dir: str | Path | None = None, limit_bytes: int = 2**38,
                verify: bool = True, ahead: bool = True) -> Shards:
    """A split from a folder or a URL: for a URL through a cache in `cache_dir` of at most `limit_bytes`.

    ahead: fetch all files in order in the background, while the first ones are used already.
    Warns if the split is larger than the cache. Raises UsageError if a URL comes without a cache folder.
    """
    from scalelab.data.storage import Cache, is_url

    if not is_url(str(directory)):
        return Shards(directory, verify)
    if cache_dir is None:
        raise UsageError(f"{directory}: give a folder on a local disk for the files of this URL")
    shards = Shards(directory, verify, Cache(cache_dir, limit_bytes))
    size = sum(f["bytes"] for s in shards.index["shards"] for f in s["files"].values())
    if size > limit_bytes:
        warnings.warn(f"{directory} has {human_bytes(size)}, the cache {human_bytes(limit_bytes)}: rows come in random "
            "order, so files will be fetched again and again; give the cache more room", stacklevel=2)
    elif ahead:
        threading.Thread(target=shards.fetch_all, daemon=True).start()
    return shards

# %%
import fsspec

bucket = fsspec.filesystem("memory")
bucket.put(str(room / "tiny") + "/", "/bucket/train", recursive=True)
cache = Cache(room / "cache", 10**6)
far = Shards("memory://bucket/train", cache=cache)
assert cache.counts["misses"] == 0  # nothing was fetched yet but the index
assert (far.document(6) == tiny.document(6)).all() and far.lengths.tolist() == tiny.lengths.tolist()
for starts in (np.array([0, 3, 91]), np.array([5])):
    assert (WindowReader(far, 8).read(starts) == WindowReader(tiny, 8).read(starts)).all()
with refused("memory://bucket/train", "local disk"):
    open_shards("memory://bucket/train")
with refused("nowhere"):
    Shards("memory://bucket/nowhere", cache=cache)
assert far.fetch_all() and cache.counts["misses"] == 6
assert open_shards("memory://bucket/train", room / "cache").document(0)[0] == texts[0][1].encode()[0]

# %% [markdown]
# A damaged object is refused on arrival, and a cache that is too small still gives the right tokens, slowly:

# %%
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    narrow = open_shards("memory://bucket/train", room / "narrow", limit_bytes=260)
assert "give the cache more room" in str(caught[0].message)
assert all((narrow.document(i) == tiny.document(i)).all() for i in (6, 0, 3, 6, 0))
content = bytearray(bucket.cat("/bucket/train/00001.bin"))
content[20] ^= 1
bucket.pipe("/bucket/train/00001.bin", bytes(content))
broken = Shards("memory://bucket/train", cache=Cache(room / "fresh", 10**6))
with refused("00001.bin"):
    broken.tokens[1]
assert not broken.fetch_all() and broken.tokens[2][0] == 256

# %% [markdown]
# ## What does verifying cost?
# Clocks differ from machine to machine, so we compare on the same bytes, in the same process: reading every token once to add it up, against comparing every checksum.

# %%
def fastest(f, repeats=7):
    "Shortest of some runs, in CPU seconds."
    seconds = []
    for _ in range(repeats):
        start = time.process_time(); f(); seconds.append(time.process_time() - start)
    return min(seconds)

body = np.array_split(rng.integers(0, 50_000, size=4_000_000), 2_000)
write("large", ((part, "web") for part in body), vocab_size=50_257, eot_id=50_256)
opened = Shards(room / "large", verify=False)
trusting, verifying = (fastest(lambda: Shards(room / "large", verify=v)) for v in (False, True))
adding = fastest(lambda: opened.tokens[0].sum(dtype=np.int64))
assert verifying - trusting < 3 * adding and trusting < verifying
print("verifying costs less than three passes of adding up the tokens")

# %%
#| hide
shutil.rmtree(room)

# %% [markdown]
# Training on a token costs far more than adding it up, so the default stays on. `verify=False` is for a corpus that was verified where it lies.
#
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | A-stream: own memory-mapped chunks | holds, as to the files | opening costs nothing that grows with the text but the check of its bytes, less than three passes of adding them up; the same code reads from an object store through a local disk. Random offsets, memory and speed are subjects of the next chapters |
#
# What this chapter does not cover: fetching single blocks of a file, and an order of samples that is kind to a cache smaller than the split.
