# %% [markdown]
# # Texts for experiments
#
# > Training pools and held-out sets of a stated size, cut from a folder of corpora, the same for every arm and every seed.
#
# An experiment about data changes the data and nothing else, so all arms share one tokenizer and one held-out set, and a pool has a size in bytes that does not depend on what was done to it. Any folder of
# documents will do whose rows have a `mix_group` or a `domain`; the saved verdicts name the texts that they were measured on.

# %%
#| default_exp lab.pools

# %%
#| export
from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from scalelab.core.config import UsageError
from scalelab.data.dedup import find_duplicates
from scalelab.data.documents import read_documents
from scalelab.data.shards import Shards, ShardWriter
from scalelab.data.tokenizer import TextTokenizer, train_tokenizer

# %%
#| hide
import tempfile

# %% [markdown]
# ## Drawing documents
# Every document gets a place from a hash of its id; a pool is the first so many bytes in that order. No file order, no generator state: the same documents on every machine.

# %%
#| export
def place(doc: dict, salt: str = "") -> bytes:
    "Where a document stands in the order of draws: a hash of its id."
    return hashlib.sha256(f"{salt} {doc['id']}".encode("utf-8", "replace")).digest()


def size(docs: Iterable[dict]) -> int:
    "UTF-8 bytes of the texts."
    return sum(len(d["text"].encode("utf-8", "replace")) for d in docs)


def draw(docs: Sequence[dict], n_bytes: int, salt: str = "", longest: int = 40_000) -> list[dict]:
    "The first documents in the order of draws that fill `n_bytes`; none of more than `longest` characters, so that no single text makes a pool."
    out, total = [], 0
    for doc in sorted(docs, key=lambda d: place(d, salt)):
        if total >= n_bytes:
            break
        if 0 < len(doc["text"]) <= longest:
            out.append(doc)
            total += size([doc])
    return out


# %%
docs = [{"id": f"d{i}", "text": "x" * (10 + i % 7)} for i in range(400)]
first = draw(docs, 1000)
assert 1000 <= size(first) < 1020 and first == draw(docs[::-1], 1000) and first != draw(docs, 1000, "other")
assert first == draw(docs, 2000)[: len(first)]

# %% [markdown]
# ## One corpus, split once
# Documents of one group are split into training pool and held-out set after duplicates are gone, so that no arm can win by having seen the test.

# %%
#| export
class Corpus:
    """Groups of documents, a tokenizer and held-out shards.

    data: folder with `1_pretrain/*.jsonl.zst` or any documents; files that begin with NC_ (non-commercial) stay out. work: folder for what is made.
    train_mb, valid_kb: of each group. .train[group] and .valid[group] are lists of documents; .tokenizer was trained on the training side.
    Raises UsageError if a group is too small.
    """

    def __init__(self, data: Path, work: Path, train_mb: float = 1.5, valid_kb: float = 60, vocab_size: int = 4096):
        folder = Path(data) / "1_pretrain"
        files = sorted(p for p in (folder if folder.is_dir() else Path(data)).rglob("*") if p.is_file() and not p.name.startswith(("NC_", ".", "README")))
        groups: dict[str, list[dict]] = defaultdict(list)
        for doc in read_documents(files):
            groups[str(doc.get("mix_group") or doc.get("domain"))].append(doc)
        self.work, self.train, self.valid = Path(work), {}, {}
        self.work.mkdir(parents=True, exist_ok=True)
        for name, docs in sorted(groups.items()):
            drawn = draw(docs, int(train_mb * 1e6 + 2 * valid_kb * 1e3))
            drawn = [drawn[i] for i in find_duplicates(drawn).rows]
            drawn.sort(key=place)
            held = draw(drawn, int(valid_kb * 1e3), longest=12_000)
            ids = {d["id"] for d in held}
            self.valid[name], self.train[name] = held, [d for d in drawn if d["id"] not in ids]
            if size(self.train[name]) < valid_kb * 1e3:
                raise UsageError(f"{data}: group {name} holds {size(docs):,} bytes; an experiment needs at least {int(3 * valid_kb * 1e3):,}")
        self.tokenizer = self._tokenizer(vocab_size)

    def _tokenizer(self, vocab_size: int) -> TextTokenizer:
        path = self.work / f"tokenizer-{vocab_size}.json"
        if not path.exists():
            train_tokenizer((d["text"] for g in self.train.values() for d in g), vocab_size).save(path)
        return TextTokenizer.load(path)

    def shards(self, name: str, docs: Sequence[dict], domain: Callable[[dict], str] | str = "domain", tokenizer: TextTokenizer | None = None) -> Shards:
        "Documents as shards below the work folder; `domain` is a key of the document or a function of it."
        tokenizer = tokenizer or self.tokenizer
        key = domain if callable(domain) else lambda d: str(d.get(domain) or "unknown")
        rows = sorted(docs, key=lambda d: (key(d), place(d)))
        with ShardWriter(self.work / "shards" / name, tokenizer.hash, tokenizer.vocab_size, tokenizer.eot_id) as writer:
            for doc, ids in zip(rows, tokenizer.encode_batch([d["text"] for d in rows])):
                writer.add(ids, len(doc["text"].encode("utf-8", "replace")), key(doc))
        return Shards(self.work / "shards" / name, verify=False)

    def held_out(self, tokenizer: TextTokenizer | None = None) -> Shards:
        "Shards of all held-out documents, their group as domain."
        group = {d["id"]: g for g, docs in self.valid.items() for d in docs}
        name = "valid" if tokenizer is None else f"valid-{tokenizer.vocab_size}"
        return self.shards(name, [d for docs in self.valid.values() for d in docs], lambda d: group[d["id"]], tokenizer)

    def mixed(self, megabytes: float) -> list[dict]:
        "A training pool of that size with equal bytes of every group."
        return [d for docs in self.train.values() for d in draw(docs, int(megabytes * 1e6 / len(self.train)), "mixed")]


# %%
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "texts").mkdir()
    from scalelab.data.documents import stdlib_documents, write_documents

    write_documents(f"{folder}/texts/a.jsonl", list(stdlib_documents(600_000)))
    corpus = Corpus(Path(folder) / "texts", Path(folder) / "work", train_mb=0.15, valid_kb=20, vocab_size=400)
    held = corpus.held_out()
    print({g: (len(corpus.train[g]), len(corpus.valid[g])) for g in corpus.train}, held.domains)
    for group in corpus.train:
        assert not {d["id"] for d in corpus.train[group]} & {d["id"] for d in corpus.valid[group]}
        assert size(corpus.valid[group]) >= 20_000
    assert set(held.domains) == set(corpus.train) and held.n_tokens > 0
    mixed = corpus.shards("m", corpus.mixed(0.1))
    assert mixed.n_tokens == Shards(Path(folder) / "work" / "shards" / "m").n_tokens
