# %% [markdown]
# # From clean texts to shards
#
# > Split so that no near-duplicate crosses, train a tokenizer on a bounded sample, encode on all cores, write shards in an order that depends on the seed alone: in memory that does not grow with the text.
#
# The first article warns that duplicates between training and validation make every score too good, and pads away 30% of its memory. So whole clusters of near-duplicates are held out, rows are packed, and both are measured
# on what was written. The work is done in parts like a clean: killed, it goes on.

# %%
#| default_exp data.tokenize_stage

# %%
#| export
from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scalelab.core.arguments import parse_config
from scalelab.core.config import UsageError, atomic_write, did_you_mean, progress
from scalelab.core.console import JSON, answer, inputs_flag, table
from scalelab.data.documents import Rejects
from scalelab.data.engine import Engine, watching
from scalelab.data.holdout import CHECKED, CLUSTER_SIGNER, Probes, rough_bits, split_valid, valid_precision
from scalelab.data.index import cluster_labels
from scalelab.data.job import at_work, code_hash, fingerprint, tasks_of
from scalelab.data.parts import Part, Plan, Source, marked
from scalelab.data.passes import Corpus, not_inside, read_task, sources_of
from scalelab.data.pipeline import finished, is_url, place_of, publish, published
from scalelab.data.shards import Shards, ShardWriter
from scalelab.data.sketch import jaccard, shingles
from scalelab.data.stream import build_plan
from scalelab.data.tokenizer import TextTokenizer, train_tokenizer, valid_text

# %%
#| hide
import contextlib
import glob
import hashlib
import io
import tempfile
import warnings

import matplotlib.pyplot as plt

from scalelab.core.plotting import COLORS, style
from scalelab.data.documents import write_documents
from scalelab.data.passes import Task
from scalelab.data.pipeline import CleanConfig, clean
from scalelab.data.products import read_rows

SAMPLES = sorted(glob.glob("../../data_samples/*.jsonl"))
ROOM = tempfile.TemporaryDirectory()
HERE = Path(ROOM.name)
clean(SAMPLES, HERE / "clean", CleanConfig(workers=1))

# %% [markdown]
# ## Settings

# %%
#| export
@dataclass
class TokenizeConfig:
    """How documents become shards.

    Args:
        vocab_size: of the tokenizer that is trained; ignored when one is given
        valid_fraction: share of each domain's bytes that is held out
        seq_len: a packing plan for rows of this many tokens is written
        packing: concat or best_fit, see the stream chapter
        seed: of the split, of the order of documents and of the tokenizer's sample
        shard_tokens: a new shard file begins here
        sample_bytes: text that the tokenizer is trained on, drawn from the training side
        workers: processes; 0 means one for each core
        part_mb: text after which a part is finished, from which a killed run goes on
    """

    vocab_size: int = 4096
    valid_fraction: float = 0.05
    seq_len: int = 256
    packing: str = "concat"
    seed: int = 0
    shard_tokens: int = 2**26
    sample_bytes: int = 32_000_000
    workers: int = 0
    part_mb: float = 8.0

    def check(self, trained: bool) -> None:
        "UsageError naming the key of an impossible value; trained: the tokenizer is to be trained."
        if not 0 < self.valid_fraction < 0.5:
            raise UsageError(f"valid_fraction: {self.valid_fraction} is outside (0, 0.5); 0.05 is usual")
        lows = {"seq_len": 2, "shard_tokens": 1, "seed": 0, "sample_bytes": 1, "workers": 0,
            "part_mb": 0.01} | ({"vocab_size": 257} if trained else {})
        for key, low in lows.items():
            if not getattr(self, key) >= low:
                raise UsageError(f"{key}: {getattr(self, key)} must be at least {low}")
        if self.packing not in ("concat", "best_fit"):
            raise UsageError(
                f"packing: {self.packing!r} is not one of concat, "
                f"best_fit{did_you_mean(self.packing, ('concat', 'best_fit'))}")

    def facts(self) -> dict[str, Any]:
        "What of it decides the bytes of the result."
        return {k: v for k, v in asdict(self).items() if k != "workers"}


# %%
TokenizeConfig(vocab_size=10).check(False)
for wrong in ({"valid_fraction": 0.9}, {"vocab_size": 10}, {"packing": "best"}, {"seq_len": 1}):
    try:
        TokenizeConfig(**wrong).check(True)
    except UsageError as error:
        assert str(error).startswith(next(iter(wrong)))
    else:
        raise AssertionError(wrong)

# %% [markdown]
# ## Encoding a part
# Every document is encoded, decoded again and compared. The ids of a part go to one file; a table beside it says how many belong to each document.

# %%
#| export
CODED = np.dtype([("tokens", "<u4"), ("bytes", "<u4"), ("bits", "<f4")])


@dataclass
class EncodeTask:
    "A part to encode. valid: packed bits; probes: of the held-out side."

    folder: str
    name: str
    out: str
    tokenizer: str
    valid: bytes
    probes: Probes


@functools.lru_cache(maxsize=2)
def _tokenizer(path: str) -> TextTokenizer:
    return TextTokenizer.load(path)


# %%
#| export
def encode_part(task: EncodeTask) -> str:
    "Encode a part unless it is there; its name. UsageError when the tokenizer alters a text."
    place = Path(task.out, task.name)
    if place.with_suffix(".json").exists():
        return task.name
    part, bpe, suspects = Part(task.folder, task.name), _tokenizer(task.tokenizer), []
    valid = np.unpackbits(np.frombuffer(task.valid, np.uint8), count=part.n).astype(bool)
    coded, ids = np.zeros(part.n, CODED), []
    lines = part.lines()
    for start in range(0, part.n, 256):
        docs = [json.loads(line) for _, line in (next(lines) for _ in range(min(256, part.n - start)))]
        for k, (doc, codes) in enumerate(zip(docs, bpe.encode_batch([d["text"] for d in docs])), start):
            raw = valid_text(doc["text"]).encode()
            if bpe.decode_bytes(codes) != raw:
                raise UsageError(
                    f"document {doc['id']}: decode(encode(text)) differs from the text: this tokenizer alters text; "
                    "use one without a normaliser")
            coded[k] = len(codes), len(raw), rough_bits(raw) if valid[k] else 0
            ids.append(np.asarray(codes, "<u4").astype("<u2" if bpe.vocab_size <= 2**16 else "<u4"))
            if not valid[k]:
                suspects += [[k, i] for i in task.probes.alike(doc["text"])]
    atomic_write(place.with_suffix(".ids"), b"".join(i.tobytes() for i in ids))
    atomic_write(place.with_suffix(".coded"), coded.tobytes())
    atomic_write(place.with_suffix(".json"), json.dumps({"suspects": suspects}))
    return task.name


# %% [markdown]
# ## Writing a split
# Documents stand grouped by domain and shuffled inside it, by a hash of seed and id. They are fetched from the encoded parts one by one, so only their places are in memory.

# %%
#| export
@dataclass
class Encoded:
    "The encoded parts of a corpus: for each document its tokens, bytes, rough bits, and where its ids lie."

    corpus: Corpus
    folder: Path
    width: int

    def __post_init__(self):
        tables = [np.fromfile(self.folder / f"{p.name}.coded", CODED) for p in self.corpus.parts]
        self.table = np.concatenate(tables)
        self.at = np.concatenate([np.cumsum(t["tokens"], dtype=np.int64) - t["tokens"] for t in tables])
        self._file = functools.lru_cache(maxsize=128)(
            lambda p: open(self.folder / f"{self.corpus.parts[p].name}.ids", "rb", buffering=0))

    def ids(self, i: int) -> np.ndarray:
        "Token ids of document i."
        file = self._file(self.corpus.place(i)[0])
        return np.frombuffer(os.pread(file.fileno(), int(self.table["tokens"][i]) * self.width,
            int(self.at[i]) * self.width), f"<u{self.width}")

    def suspects(self) -> Iterator[tuple[int, int]]:
        "(training document, number of the probed held-out document) of all pairs that may be alike."
        for part, start in zip(self.corpus.parts, self.corpus.starts.tolist()):
            for k, probe in json.loads((self.folder / f"{part.name}.json").read_text())["suspects"]:
                yield start + k, probe


def write_split(folder: Path, encoded: Encoded, mask: np.ndarray, bpe: TextTokenizer,
        config: TokenizeConfig) -> tuple[dict[str, int], dict[str, int]]:
    "Write the documents of `mask` as one split; tokens and bytes by domain."
    corpus, where = encoded.corpus, np.flatnonzero(mask)
    (domain, domains), (source, sources), (licence, licences) = (corpus.named(c)
        for c in ("domain", "source", "licence"))
    rank = np.argsort(np.argsort(np.array(domains, dtype=object), kind="stable"))
    order = where[np.lexsort((corpus.words("keys", 1)[where], rank[domain[where]]))]
    many, tokens, size = len(sources) >= 4096, Counter(), Counter()
    with ShardWriter(folder, bpe.hash, bpe.vocab_size, bpe.eot_id, config.shard_tokens) as writer:
        for i in progress(order.tolist(), desc=f"write {folder.name}", unit="doc"):
            ids, raw, name = encoded.ids(i), int(encoded.table["bytes"][i]), domains[domain[i]] or "unknown"
            writer.add(ids, raw, name, "many" if many else sources[source[i]], licences[licence[i]])
            tokens[name] += len(ids)
            size[name] += raw
    return dict(tokens), dict(size)


# %%
docs = [*read_rows(HERE / "clean" / "documents" / "00000.jsonl.zst")]
write_documents(HERE / "some.jsonl", docs[:40])
for name in ("read", "encoded"):
    (HERE / name).mkdir()
read_task(Task("t", sources_of([HERE / "some.jsonl"], Rejects()), Plan(str(HERE / "read"), keys=("0 ", "0 order "))))
small, bpe = Corpus(HERE / "read"), train_tokenizer([d["text"] for d in docs], 600)
bpe.save(HERE / "some.tokenizer.json")
held = np.arange(40) % 8 == 0
encode_part(EncodeTask(str(HERE / "read"), small.parts[0].name, str(HERE / "encoded"),
    str(HERE / "some.tokenizer.json"), np.packbits(held).tobytes(), Probes.of([docs[0]["text"]])))
encoded = Encoded(small, HERE / "encoded", 2)
assert [bpe.decode(encoded.ids(i)) for i in range(40)] == [d["text"] for d in docs[:40]]
assert (encoded.table["bits"] > 0).tolist() == held.tolist()
tokens, sizes = write_split(HERE / "split", encoded, ~held, bpe, TokenizeConfig())
assert sum(sizes.values()) == sum(len(d["text"].encode()) for d, h in zip(docs, held) if not h)
assert sum(tokens.values()) == Shards(HERE / "split").n_tokens - 35 - 1

# %% [markdown]
# ## Tokenize
# The order of work: read and sign, find clusters, split, train, encode, write. Each step leaves its result on the disk, so that a run which was killed takes up the step that it was in; the clusters of a large corpus take
# hours to find and are not looked for twice. What is written at the end is written in one go per split and appears whole. Nothing but the sample for the tokenizer is ever held as text.

# %%
#| export
@dataclass
class _Run:
    "A tokenizing run."

    out: Path
    config: TokenizeConfig
    engine: Engine
    sources: list[Source]
    bpe: TextTokenizer | None
    mark: str
    warnings: list[str]

    def read(self) -> Corpus:
        "Read and sign the documents."
        folder = self.out / "work" / "read"
        folder.mkdir(exist_ok=True)
        plan = Plan(str(folder), [], CLUSTER_SIGNER, (f"{self.config.seed} ", f"{self.config.seed} order "),
            self.config.seed, int(self.config.part_mb * 2**20))
        with watching(lambda: len(marked(folder)) * plan.part_bytes, sum(s.guess for s in self.sources), "read"):
            self.engine.run(read_task,
                sorted(tasks_of(self.sources, plan), key=lambda t: -sum(s.size for s in t.sources)),
                lambda t: t.sources[0].name)
        return Corpus(folder)

    def split(self, corpus: Corpus) -> np.ndarray:
        "Who is held out; kept on disk, because finding clusters takes long."
        file = self.out / "work" / "valid.npy"
        if not file.exists():
            clusters = cluster_labels(lambda b: corpus.words("bands", b), corpus.n, corpus.fetch,
                CLUSTER_SIGNER.threshold, CLUSTER_SIGNER)
            valid = split_valid(corpus.named("domain")[0], corpus.column("bytes"), clusters, corpus.words("keys", 0),
                self.config.valid_fraction)
            np.save(file.with_name(".valid.tmp.npy"), valid)
            os.replace(file.with_name(".valid.tmp.npy"), file)
        return np.load(file)

    def tokenizer(self, corpus: Corpus, train: np.ndarray) -> TextTokenizer:
        "The given tokenizer, or one trained on the documents of smallest hash up to `sample_bytes`; written to `out`."
        path = self.out / "work" / "tokenizer.json"
        if not path.exists():
            (self.bpe or train_tokenizer(_sample(corpus, train, self.config.sample_bytes),
                self.config.vocab_size)).save(path)
        return TextTokenizer.load(path)


# %%
#| export
def _encoded(run: _Run, corpus: Corpus, valid: np.ndarray, bpe: TextTokenizer, probes: Probes) -> Encoded:
    "Encode all parts of a run."
    folder = run.out / "work" / "encoded"
    folder.mkdir(exist_ok=True)
    path = str(run.out / "work" / "tokenizer.json")
    tasks = [EncodeTask(str(corpus.folder), p.name, str(folder), path, np.packbits(v).tobytes(), probes)
        for p, v in zip(corpus.parts, corpus.split(valid))]
    with watching(lambda: len(marked(folder)), len(tasks), "encode", unit="part"):
        run.engine.run(encode_part, tasks, lambda task: task.name)
    return Encoded(corpus, folder, 2 if bpe.vocab_size <= 2**16 else 4)


# %%
#| export
def _sample(corpus: Corpus, train: np.ndarray, most: int) -> Iterator[str]:
    "Texts of the training side, those of smallest hash up to `most` bytes, in the order of the corpus."
    where = np.flatnonzero(train)
    by = where[np.argsort(corpus.words("keys", 1)[where], kind="stable")]
    size = corpus.column("bytes")[by].astype(np.int64)
    wanted = np.zeros(corpus.n, bool)
    wanted[by[(np.cumsum(size) - size) < most]] = True
    for part, mask in zip(corpus.parts, corpus.split(wanted)):
        for _, line in part.lines(mask):
            yield json.loads(line)["text"]


def _leaks(encoded: Encoded, checked: np.ndarray, threshold: float = 0.8) -> list[tuple[str, str, float]]:
    "Pairs across the split (held-out id, training id, Jaccard) among the suspects."
    corpus, found = encoded.corpus, []
    for i, probe in encoded.suspects():
        j = int(checked[probe])
        if (alike := jaccard(shingles(corpus.fetch(i)), shingles(corpus.fetch(j)))) >= threshold:
            found.append((corpus.id(j), corpus.id(i), alike))
    return sorted(found)


# %%
#| export
def tokenize(
    inputs: Sequence[str | Path], out: str | Path, config: TokenizeConfig | None = None,
    tokenizer: str | Path | None = None, *, engine: Engine | None = None,
) -> dict[str, Any]:
    """Documents into `out/tokenizer.json` and `out/shards/{train,valid}`; the report, also in `out/report.json`.

    tokenizer: an existing tokenizer.json; otherwise one is trained on the training split. The same call again does
    nothing; after a kill it goes on.
    Raises UsageError for missing input, too few documents to hold any out, or a tokenizer that alters text.
    """
    config, rejects, place = config or TokenizeConfig(), Rejects(keep=0), place_of(out, "tokenize")
    config.check(tokenizer is None)
    sources = sources_of(inputs, rejects)
    if not is_url(out):
        not_inside(place, inputs)
    bpe = TextTokenizer.load(tokenizer) if tokenizer else None
    mark = fingerprint(sources, [config.facts(), bpe.hash if bpe else None])
    if found := published(str(out), mark) if is_url(out) else finished(place / "report.json", mark):
        return found
    with engine or Engine(workers=config.workers) as runner, at_work(place, f"{mark} {code_hash()}"):
        report = _tokenize(_Run(place, config, runner, sources, bpe, mark, list(rejects.warnings)))
    if is_url(out):
        publish(place, str(out))
    return report


# %%
#| export
def _tokenize(run: _Run) -> dict[str, Any]:
    import shutil

    (run.out / "report.json").unlink(missing_ok=True)
    corpus, names = run.read(), ", ".join(s.name for s in run.sources[:3])
    warned = [*run.warnings, *(w for p in corpus.parts for w in p.mark["warnings"])]
    if corpus.n < 4:
        raise UsageError(
            f"{names}: {corpus.n} documents, at least 4 are needed to hold some "
            f"out{'; ' + warned[0] if warned else ''}")
    valid = run.split(corpus)
    if not valid.any():
        raise UsageError(
            f"{names}: nothing could be held out of {corpus.n} documents (they are one cluster of near-duplicates); "
            "add other text")
    bpe, held = run.tokenizer(corpus, ~valid), np.flatnonzero(valid)
    checked = np.sort(held[np.argsort(corpus.words("keys", 1)[held], kind="stable")[:CHECKED]])
    encoded = _encoded(run, corpus, valid, bpe, Probes.of([corpus.fetch(int(i)) for i in checked]))
    bpe.save(run.out / "tokenizer.json")
    splits = {name: write_split(run.out / "shards" / name, encoded, mask, bpe, run.config)
        for name, mask in (("train", ~valid), ("valid", valid))}
    rejected = sum((Counter(p.mark["read"]) for p in corpus.parts), Counter())
    rejected.pop("in", None)
    report = _report(run, bpe, splits, encoded, valid) | {"leaks": _leaks(encoded, checked),
        "rejects": dict(sorted(rejected.items())), "warnings": list(dict.fromkeys(warned))}
    atomic_write(run.out / "report.json", json.dumps(report, ensure_ascii=False, indent=1))
    shutil.rmtree(run.out / "work", ignore_errors=True)
    return json.loads(json.dumps(report))


# %%
#| export
def _report(run: _Run, bpe: TextTokenizer, splits: dict, encoded: Encoded, valid: np.ndarray) -> dict[str, Any]:
    config, shards = run.config, Shards(run.out / "shards" / "train", verify=False)
    waste = {mode: build_plan(shards, config.seq_len, mode).waste() for mode in ("pad", "concat", "best_fit")}
    build_plan(shards, config.seq_len, config.packing).save(shards.directory)
    tokens, sizes = ({split: counts[k] for split, counts in splits.items()} for k in (0, 1))
    size = Counter(sizes["train"])
    size.update(sizes["valid"])
    codes, names = encoded.corpus.named("domain")
    width = {name or "unknown": valid_precision(encoded.table["bits"][here], encoded.table["bytes"][here])
        for k, name in enumerate(names) for here in [valid & (codes == k)]}
    return {
        "fingerprint": run.mark, "vocab_size": bpe.vocab_size, "tokenizer_hash": bpe.hash, "tokens": tokens,
        "bytes": sizes, "documents": {"train": int((~valid).sum()), "valid": int(valid.sum())},
        "bytes_per_token": {d: size[d] / max(1, sum(t.get(d, 0) for t in tokens.values())) for d in sorted(size)},
        "valid_half_width": {d: w if np.isfinite(w := width[d]) else None for d in sorted(size)}, "round_trip": True,
        "seq_len": config.seq_len,
        "waste": {"padding": waste["pad"]["padding"], "packing": waste[config.packing]["padding"], "by_mode": waste},
        "recipe": config.facts()}


# %%
report = tokenize([HERE / "clean" / "documents"], HERE / "tokens",
    TokenizeConfig(vocab_size=1024, seq_len=128, workers=1))
print("tokens:", report["tokens"])
print("bytes per token:", {k: round(v, 2) for k, v in report["bytes_per_token"].items()})
print("padding:", {k: f"{v['padding']:.1%}" for k, v in report["waste"]["by_mode"].items()})
assert report["leaks"] == [] and report["vocab_size"] == 1024
assert sorted(os.listdir(HERE / "tokens")) == ["report.json", "shards", "tokenizer.json"]
docs = [*read_rows(HERE / "clean" / "documents" / "00000.jsonl.zst")]
train, held = (Shards(HERE / "tokens" / "shards" / s) for s in ("train", "valid"))
bpe = TextTokenizer.load(HERE / "tokens" / "tokenizer.json")
train.check_tokenizer(bpe.hash)
assert sorted(bpe.decode(s.document(i)) for s in (train, held) for i in range(s.n_docs)) == sorted(d["text"]
    for d in docs) and set(held.domains) == set(train.domains)

# %% [markdown]
# The order is that of the rule as it is stated: domains by name, inside a domain by hash.

# %%
of_text = {d["text"]: d for d in docs}
order = [of_text[bpe.decode(train.document(i))] for i in range(train.n_docs)]
assert order == sorted(order, key=lambda d: (d["domain"], hashlib.sha256(f"0 order {d['id']}".encode()).digest()))

# %% [markdown]
# Small parts, and the same bytes again; the same call does nothing.

# %%
def files(name):
    return {str(p.relative_to(HERE / name)): p.read_bytes() for p in sorted((HERE / name / "shards").rglob("*.bin"))}


tokenize([HERE / "clean" / "documents"], HERE / "small", TokenizeConfig(vocab_size=1024, seq_len=128, workers=1,
    part_mb=0.01))
assert files("small") == files("tokens") and (HERE / "small" / "tokenizer.json").read_bytes() == bpe.raw
assert tokenize([HERE / "clean" / "documents"], HERE / "tokens", TokenizeConfig(vocab_size=1024, seq_len=128)) == report

# %%
style()
fig, axes = plt.subplots(1, 2, figsize=(6.4, 2.2))
axes[0].bar(list(report["bytes_per_token"]), list(report["bytes_per_token"].values()), color=COLORS[0])
axes[0].set(ylabel="bytes per token")
axes[0].tick_params(axis="x", rotation=40)
axes[1].bar(list(report["waste"]["by_mode"]), [v["padding"] for v in report["waste"]["by_mode"].values()],
    color=COLORS[1])
axes[1].set(ylabel="padding, share of all slots")
plt.show()

# %% [markdown]
# What to see: with a small vocabulary a Chinese character (three bytes) takes about as many tokens as a short English word. A row that holds one document only wastes slots at its end; packing brings that to 1% and less.
#
# ## What must not pass
# A tokenizer that alters text, here by a normaliser that turns full-width punctuation into ASCII, is refused by the round trip; and a near copy of a held-out document that somebody put into the training side is found.

# %%
altered = json.loads(bpe.raw) | {"normalizer": {"type": "NFKC"}}
(HERE / "nfkc.json").write_text(json.dumps(altered), encoding="utf-8")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says so when it is loaded, too
    try:
        tokenize([HERE / "clean" / "documents"], HERE / "nfkc", TokenizeConfig(seq_len=128, workers=1),
            HERE / "nfkc.json")
    except UsageError as error:
        assert "differs from the text" in str(error) and not (HERE / "nfkc").exists()
    else:
        raise AssertionError("a tokenizer that alters text was accepted")

# %%
original_split = split_valid
leaked = next(d for d in docs if len(d["text"]) > 400)
twin = leaked | {"id": "planted-leak", "text": leaked["text"].replace("。", "！", 1).replace(".", "!", 1) + "\n"}
write_documents(HERE / "twin.jsonl", [*docs, twin])
split_valid = lambda *args: np.array([d["id"] == leaked["id"] or k % 9 == 0
    for k, d in enumerate([*docs, twin])]) & (np.arange(len(docs) + 1)
    < len(docs))  # noqa: E731 - a split that is broken
found = tokenize([HERE / "twin.jsonl"], HERE / "leaky", TokenizeConfig(vocab_size=512, workers=1))["leaks"]
split_valid = original_split
print(found)
assert [f[1] for f in found] == ["planted-leak"]
assert tokenize([HERE / "twin.jsonl"], HERE / "sound", TokenizeConfig(vocab_size=512, workers=1))["leaks"] == []

# %% [markdown]
# ## The command

# %%
#| export
def tokenize_command(argv: list[str], page: Callable[[str], Path] | None = None) -> int:
    """scalelab data tokenize INPUT... --out DIR

    page: draws the page of a folder; left out for an address. Exit code 1 when a near-duplicate crosses the split.
    """
    import sys

    flags = inputs_flag("cleaned documents: files, folders, globs or addresses") | JSON | {
        "--out": {"type": str, "required": True,
        "help": "folder or address for tokenizer.json and shards/{train,valid}"},
        "--tokenizer": {"type": str, "default": None, "help": "existing tokenizer.json instead of training one"},
        "--engine": {"type": str, "default": "local", "help": "local (processes of this machine) or ray"},
        "--ray_address": {"type": str, "default": "", "help": "of a Ray cluster; empty starts one on this machine"}}
    config, given = parse_config(TokenizeConfig, argv, "scalelab data tokenize",
        "Split by near-duplicate cluster, train a tokenizer on the training side, write shards.", flags)
    config.check(given["tokenizer"] is None)
    report = tokenize(given["inputs"], given["out"], config, given["tokenizer"],
        engine=Engine(given["engine"], config.workers, given["ray_address"]))
    if page and not is_url(given["out"]):
        page(given["out"])
    for warning in report["warnings"]:
        print(f"scalelab: {warning}", file=sys.stderr)
    rows = [{"domain": d, "train tokens": report["tokens"]["train"].get(d, 0),
        "valid tokens": report["tokens"]["valid"].get(d, 0), "bytes per token": report["bytes_per_token"][d]}
        for d in report["bytes_per_token"]]
    answer(report, given["json"],
        [table(rows),
        f"{given['out']}: vocabulary {report['vocab_size']:,}, padding {report['waste']['packing']:.2%} of the "
        f"slots, {len(report['leaks'])} near-duplicates across the split"])
    return 1 if report["leaks"] else 0


# %%
with contextlib.redirect_stdout(io.StringIO()) as shown:
    assert tokenize_command([str(HERE / "clean" / "documents"), "--out", str(HERE / "tokens"), "--vocab_size=1024",
        "--seq_len=128"]) == 0
    assert tokenize_command([str(HERE / "twin.jsonl"), "--out", str(HERE / "leaky"), "--vocab_size=512"]) == 1
assert "0 near-duplicates across the split" in shown.getvalue()
ROOM.cleanup()

# %% [markdown]
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | A-pad: packing avoids 30% and more of memory lost to padding | holds in part: it depends on the lengths | in this notebook: with a document a row a few per cent are padding at 128 tokens a row, about one per cent and less when packed |
# | A-q995: truncate at each domain's 99.5% length quantile | not done: nothing is truncated, long documents are cut into rows by the packing | the over-long sample keeps all of its text |
#
# Not covered: clusters are found and splits are written by one process; documents are fetched singly from the encoded parts, which suits a flash disk and not a turning one.
