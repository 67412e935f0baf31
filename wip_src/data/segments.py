# %% [markdown]
# # Segments: documents that can be asked
#
# > Flat files that are mapped and never changed: sorted columns of hashes for the question, compressed texts for the proof.
#
# The index of known text (the next notebook) is made of these. What a library keeps in a database, "who has this band?", is here a binary search in a sorted, mapped file.

# %%
#| default_exp data.segments

# %%
#| export
from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from scalelab.core.config import UsageError
from scalelab.data.dedup import content_hash
from scalelab.data.sketch import Signer

# %%
#| hide
import tempfile
import matplotlib.pyplot as plt
from scalelab.core.plotting import style

style()
scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name)

# %% [markdown]
# ## A segment
# What is added at once becomes a segment, a folder of flat files that is never changed. Its columns are the bands, and two more that ask other questions of the same kind: the hash of the content (who says exactly this?) and of
# the id (is this document here already?). A column is stored sorted, with the rows beside it, so that a question is a binary search in a mapped file. Texts are compressed one by one, to be fetched one by one.

# %%
#| export
_MANY = 256  # texts of one segment, the earliest, that a band may propose to a question


def document_columns(docs: Sequence[dict], signer: Signer) -> np.ndarray:
    "Bands, content and id of each document, uint64 [n, bands + 2]."
    out = np.empty((len(docs), signer.bands + 2), np.uint64)
    out[:, : signer.bands] = signer.sign_batch([d["text"] for d in docs])
    out[:, -2] = [int.from_bytes(content_hash(d["text"])[:8], "little") | 1 for d in docs]
    out[:, -1] = [id_hash(d["id"]) for d in docs]
    return out


def id_hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass")) | 1


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


# %%
#| export
class Segment:
    "A folder of flat files: sorted columns with their rows, ids and compressed texts with their offsets."

    NAMES = ("hashes", "rows", "ids", "ids.at", "texts", "texts.at")

    def __init__(self, folder: Path, n: int, columns: int):
        self.folder, self.n = folder, n
        self.hashes = np.memmap(folder / "hashes", np.uint64, "r", shape=(columns, n))
        self.rows = np.memmap(folder / "rows", np.uint32, "r", shape=(columns, n))
        kinds = [k for k in ("ids", "texts") if (folder / k).stat().st_size]  # an empty file can't be mapped
        self._blobs = {k: np.memmap(folder / k, np.uint8, "r") for k in kinds}
        self._at = {k: np.memmap(folder / f"{k}.at", np.uint64, "r", shape=(n + 1,)) for k in ("ids", "texts")}

    def _blob(self, kind: str, row: int) -> bytes:
        a, b = self._at[kind][row : row + 2].tolist()
        return self._blobs[kind][a:b].tobytes() if a < b else b""

    def id(self, row: int) -> str:
        return self._blob("ids", row).decode("utf-8", "surrogatepass")

    def text(self, row: int) -> str:
        import zstandard

        return zstandard.ZstdDecompressor().decompress(self._blob("texts", row)).decode("utf-8", "surrogatepass")

    def meeting(self, column: int, values: np.ndarray, many: int = _MANY) -> tuple[np.ndarray, np.ndarray]:
        "(question, row) int64: rows whose hash in `column` is the question's value (0 has none), `many` each at most."
        asked = np.flatnonzero(values)
        asked = asked[np.argsort(values[asked], kind="stable")]  # neighbours in the file are asked one after the other
        first = np.searchsorted(self.hashes[column], values[asked], "left")
        count = np.minimum(np.searchsorted(self.hashes[column], values[asked], "right") - first, many)
        place = np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)
        return np.repeat(asked, count), self.rows[column][place].astype(np.int64)


# %%
#| export
def write_segment(folder: Path, docs: Sequence[dict], signer: Signer) -> None:
    "The files of a segment for `docs`, in an empty folder."
    import zstandard

    columns = document_columns(docs, signer)
    with open(folder / "hashes", "wb") as hashes, open(folder / "rows", "wb") as rows:
        for column in columns.T:
            order = np.argsort(column, kind="stable")
            column[order].tofile(hashes)
            order.astype(np.uint32).tofile(rows)
    pack = zstandard.ZstdCompressor(level=3).compress
    for kind, parts in (("ids", (d["id"] for d in docs)), ("texts", (d["text"] for d in docs))):
        at = np.zeros(len(docs) + 1, np.uint64)
        with open(folder / kind, "wb") as file:
            for k, part in enumerate(parts, 1):
                raw = part.encode("utf-8", "surrogatepass")
                file.write(pack(raw) if kind == "texts" else raw)
                at[k] = file.tell()
        at.tofile(folder / f"{kind}.at")


def merge_segments(folder: Path, parts: Sequence[Segment]) -> None:
    "The files of one segment that holds the documents of several, in order; a column is in memory at a time."
    base = np.cumsum([0, *(p.n for p in parts)])
    with open(folder / "hashes", "wb") as hashes, open(folder / "rows", "wb") as rows:
        for c in range(len(parts[0].hashes)):
            value = np.concatenate([p.hashes[c] for p in parts])
            row = np.concatenate([p.rows[c] + np.uint32(b) for p, b in zip(parts, base)])
            order = np.argsort(value, kind="stable")  # rows of the earlier segment stay before those of the later
            value[order].tofile(hashes)
            row[order].tofile(rows)
    for kind in ("ids", "texts"):
        at, total = [np.zeros(1, np.uint64)], 0
        with open(folder / kind, "wb") as file:
            for p in parts:
                with open(p.folder / kind, "rb") as source:
                    shutil.copyfileobj(source, file, 1 << 20)
                at.append(np.fromfile(p.folder / f"{kind}.at", np.uint64)[1:] + np.uint64(total))
                total = file.tell()
        np.concatenate(at).tofile(folder / f"{kind}.at")


# %%
signer = Signer()
old = [{"id": f"d{k}", "text": f"text number {k} of the old corpus, " * 3} for k in range(5)]
old.append({"id": "e", "text": ""})
for name, part in (("a", old[:4]), ("b", old[4:]), ("all", old)):
    (folder / name).mkdir()
    write_segment(folder / name, part, signer)
(folder / "merged").mkdir()
merge_segments(folder / "merged", [Segment(folder / "a", 4, 27), Segment(folder / "b", 2, 27)])
for name in Segment.NAMES:
    assert (folder / "merged" / name).read_bytes() == (folder / "all" / name).read_bytes(), f"{name} differs"
whole = Segment(folder / "all", 6, 27)
assert [whole.text(k) for k in range(6)] == [d["text"] for d in old] and whole.id(5) == "e"
question, row = whole.meeting(25, document_columns(old[::-1], signer)[:, 25])
assert sorted(zip(question.tolist(), row.tolist())) == [(k, 5 - k) for k in range(6)]

# %% [markdown]
# ## Whole or named
# The list of segments, kept elsewhere, holds every file's size and checksum. A file that is short, absent, or has one flipped bit is named.

# %%
#| export
def describe_segment(folder: Path, documents: int) -> dict:
    "The entry of a segment in index.json."
    files = {k: {"bytes": (folder / k).stat().st_size, "xxh3": _checksum(folder / k)} for k in Segment.NAMES}
    return {"name": folder.name, "documents": documents, "files": files}


def check_segment(folder: Path, entry: dict, verify: bool) -> None:
    "Every file of the entry is there, has its size and, if asked, its checksum."
    for name, known in entry["files"].items():
        path = folder / entry["name"] / name
        size = path.stat().st_size if path.exists() else -1
        if size != known["bytes"]:
            found = "missing" if size < 0 else f"{size} bytes"
            raise UsageError(f"{path}: {found}, expected {known['bytes']} bytes; restore it, or build the index again")
        if verify and _checksum(path) != known["xxh3"]:
            raise UsageError(f"{path}: checksum differs, the file was changed; restore it, or build the index again")


# %%
entry = describe_segment(folder / "merged", 6)
check_segment(folder, entry, verify=True)
for name in Segment.NAMES:
    path = folder / "merged" / name
    whole = path.read_bytes()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    for bad, word in ((flipped, "checksum differs"), (whole[:-1], "expected"), (None, "missing")):
        path.write_bytes(bad) if bad is not None else path.unlink()
        try:
            check_segment(folder, entry, verify=True)
            raise AssertionError(f"{name}: {word} passed")
        except UsageError as error:
            assert name in str(error) and word in str(error)
    path.write_bytes(whole)

# %% [markdown]
# ## What a document weighs
# Bytes by file, for documents of three lengths.

# %%
draw = np.random.default_rng(0)
fig, ax = plt.subplots(figsize=(5, 2.4))
left = np.zeros(3)
lengths = (100, 1000, 10_000)
made = []
for n in lengths:
    (folder / str(n)).mkdir()
    words = [" ".join(draw.choice(["whale", "sea", "ship", "the", "of", "a"], n // 4))[:n] for _ in range(50)]
    write_segment(folder / str(n), [{"id": f"document {k}", "text": t} for k, t in enumerate(words)], signer)
    made.append({k: (folder / str(n) / k).stat().st_size / 50 for k in Segment.NAMES})
for kind in ("hashes", "rows", "texts"):
    width = np.array([m[kind] for m in made])
    ax.barh([str(n) for n in lengths], width, left=left, label=kind)
    left += width
ax.set(xlabel="bytes a document", ylabel="characters")
ax.legend()
plt.show()
assert all(m["hashes"] == 8 * 27 and m["rows"] == 4 * 27 for m in made)
scratch.cleanup()

# %% [markdown]
# What to see: 324 bytes of hashes and rows, whatever the length, and the compressed text. A library that keeps 128 permutations in a dictionary needs two kilobytes, in memory.
#
# ## Verdict
# | question | verdict | measured |
# |---|---|---|
# | is a merged segment the one that would have been written at once? | holds | byte by byte |
# | is damage noticed? | holds | a flipped bit, a short and a missing file, in each of the six files |
