# %% [markdown]
# # Text into numbers and back
#
# > A byte-level BPE that gives every text back exactly, whatever is in it, and can't be tricked into ending a document.
#
# The tokenizer decides how long a document is, what a token costs and which languages pay more. We build one, break it on purpose, and let a faster engine do the work where it gives the same ids; how large
# a vocabulary should be, and what the articles claim of it, is the next chapter's subject.

# %%
#| default_exp data.tokenizer

# %%
#| export
from __future__ import annotations

import functools
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import xxhash

from scalelab.core.config import UsageError, atomic_write

# %%
#| hide
import importlib.util
import pickle
import random
import tempfile
import time

import matplotlib.pyplot as plt
from tokenizers import Regex, Tokenizer, pre_tokenizers

from scalelab.core.plotting import style
from scalelab.data.dedup import find_duplicates
from scalelab.data.documents import read_documents, stdlib_documents

style()

# %% [markdown]
# ## Bytes first
# A vocabulary of words meets words it has never seen; a vocabulary of characters meets Chinese characters it has never seen. There are only 256 bytes. GPT-2's trick is to write each byte as one
# printable character, so that a tool made for text (and a JSON file) can work on bytes: printable Latin-1 stands for itself, the other 68 bytes move to U+0100 and up.

# %%
#| export
@functools.cache
def byte_alphabet() -> dict[str, int]:
    "GPT-2's 256 characters, each to the byte (0-255) it stands for."
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in itself]
    return {chr(b): b for b in itself} | {chr(256 + k): b for k, b in enumerate(moved)}


# %%
alphabet = byte_alphabet()
assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet()) and sorted(alphabet.values()) == list(range(256))
spell = {b: c for c, b in alphabet.items()}
print("鲲 is", "鲲".encode().hex(" "), "written", "".join(spell[b] for b in "鲲".encode()))
print("a blank is", spell[32], "and a line end is", spell[10])

# %% [markdown]
# ## Where a token may not cross
# Before merging, a pattern cuts the text into pieces, and no token ever spans two. It keeps a word with its leading blank, digits single (so that numbers have one spelling), and punctuation apart.
# The pattern is part of the file format: llama.cpp implements a fixed list of them in C++ and refuses others, so we take qwen2's, which it knows.

# %%
#| export
EOT = "<|endoftext|>"
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# %%
cut = pre_tokenizers.Split(Regex(QWEN2_PATTERN), "isolated")
for text in ["def f(x2):\n    return x2", "It's 1984, 天下大事。分久必合", EOT]:
    print(" | ".join(repr(piece)[1:-1] for piece, _ in cut.pre_tokenize_str(text)))

# %% [markdown]
# Chinese has no blanks, so a whole clause is one piece and merging decides alone where its words end. And the last line shows something useful: the name of the special token is cut in three, so ordinary merging
# can never rebuild it as one token.
#
# ## Text that isn't text
# JSON can hold `\ud83d` alone, half of an emoji. Python carries it in a string; no encoder accepts it, and one such document makes a batch of thousands fail. Halves that belong together are joined, a
# half alone becomes U+FFFD. That is the one case where decoding gives something else than what came in.

# %%
#| export
def valid_text(text: str) -> str:
    "`text` with surrogate pairs joined and each lone surrogate replaced by U+FFFD; other text comes back as it is."
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in joined)


# %%
assert valid_text("a\ud83d b") == "a\ufffd b" and valid_text("\ud83d\ude00") == "😀"
assert valid_text("\ude00\ud83d") == "\ufffd\ufffd"
assert valid_text("𠀀 plain") == "𠀀 plain"

# %% [markdown]
# ## The tokenizer
# The file format is that of HF's `tokenizers` (a Rust library), which every tool reads. Four things are ours:
#
# - the special token is reached by its id only. Written out inside a document, `<|endoftext|>` is thirteen characters. (By default every library turns it into the real
#   thing, so that whoever writes a web page can put document boundaries into your training set.)
# - decoding joins the bytes of the tokens and reads them as UTF-8: an exact inverse, with no clean-up of blanks.
# - a file from elsewhere is examined when it is loaded: all 256 bytes, the special token, a round trip.
# - a hash of the file goes into shards and checkpoints, so that they can't be read with another one by mistake.
#
# First the table from id to bytes, which is also where a file that can't spell every text is found out:

# %%
#| export
def _token_bytes(tokenizer, name: str) -> list[bytes]:
    alphabet = byte_alphabet()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    missing = [b for c, b in alphabet.items() if c not in vocab]
    if missing:
        raise UsageError(f"{name}: lacks {len(missing)} of the 256 bytes (first: 0x{missing[0]:02x}), so it can't"
                         " spell every text; train with the ByteLevel alphabet as the initial one")
    table = [b""] * (max(vocab.values()) + 1)
    for token, i in vocab.items():
        if i in added:
            table[i] = b"" if added[i].special else token.encode()
        elif all(c in alphabet for c in token):
            table[i] = bytes(alphabet[c] for c in token)
        else:
            raise UsageError(f"{name}: token {i} ({token!r}) is not in the byte-level alphabet: not a byte-level BPE")
    return table


# %% [markdown]
# ## A faster engine, if it agrees
# Encoding is the slowest part of preparing a corpus that one can't do without. Several libraries encode an HF file many times faster than HF does; some give other ids in odd corners (a contraction behind a tab or an ideographic blank),
# and a corpus that is half one and half the other is spoilt. So `fastokens` is used where it is installed and only if it gives HF's ids on a set of probes from those corners, each time a file is loaded.

# %%
#| export
PROBES = (
    "", " ", "a", "Hello, world! It's 1984; don't, DON'T, I'LL, we'd've.",
    "x\t's \t't\u3000's\u3000'LL\u00a0'd\u2003're", "\u3000\u3000天下大勢，分久必合。",
    "今天天气很好，我们去河边散了步。", "𠀀𪚥 鲲鹏", "def f(x, y=2):\n    return x**2 + y  # 注释\n\n\n",
    "if a:\n\tb = {'k': [1,\t2]}\r\n\r\n", " " * 65 + "x" + " " * 3, "\n" * 20 + " \n \n", "👩‍👩‍👧 😀🏽 🇨🇳",
    "e\u0301 ñ Å\u030a", "مرحبا بالعالم 12٣", "שלום\u200f עולם", "<|endoftext|>", "a<|endoftext|>b <|im_start|>",
    "<|end", "\x00\x01\ufeff\u200b\ufffd", "http://a.bc/d?e=f&g=%20#h", "١٢٣ ⅷ ½ 𝟘 1,234.5e-6",
    "ＡＢＣ　ｄｅｆ１２３", "ﬁ ﷺ ǅ ß ẞ ı İ", "—–…“”‘’", "\u2028\u2029\u0085 x\x0b\x0c", "aa" * 100 + "鲲" * 100,
)


def fast_encoder(raw: bytes, ids_of: Callable[[Sequence[str]], list[np.ndarray]]) -> Callable | None:
    """An encoder of many texts (no surrogates in them) by fastokens that agrees with `ids_of` on PROBES, or None.

    raw: bytes of a tokenizer.json. None: the package is not installed, can't read the file, or gives other ids.
    """
    try:
        from fastokens import Tokenizer

        engine = Tokenizer.from_json_str(raw.decode("utf-8"))
    except Exception:  # not installed, no wheel for this machine, or a file it can't read: the slow way reads it
        return None

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        ids, ends = engine.encode_batch_flat(list(texts), add_special_tokens=False, split_special_tokens=True)
        ids, ends = np.frombuffer(ids, "<u4"), np.frombuffer(ends, "<u8").tolist()
        return [ids[a:b] for a, b in zip(ends, ends[1:])]

    same = all(np.array_equal(a, b) for a, b in zip(encode(PROBES), ids_of(PROBES), strict=True))
    return encode if same else None

# %% [markdown]
# Both parts of the rule are tested below. Now the class itself, in two halves: the file and its inverse, then encoding.

# %%
#| export
class _Vocabulary:
    "A tokenizer.json that was examined: ids, bytes of each, and text of ids."

    def __init__(self, raw: bytes, name: str):
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_str(raw.decode("utf-8"))
        except Exception as error:  # the Rust library raises bare Exception for a file it can't parse
            raise UsageError(f"{name}: not a tokenizer.json of HF tokenizers ({str(error)[:120]})") from None
        self._tokenizer.encode_special_tokens = True  # a special token's name in a text is text
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.raw, self.name, self.hash = raw, name, xxhash.xxh3_128_hexdigest(raw)
        self.eot_id = self._tokenizer.token_to_id(EOT)
        if self.eot_id is None:
            raise UsageError(f"{name}: has no {EOT} token, which ends every document; add it as a special token")
        self.token_bytes = _token_bytes(self._tokenizer, name)
        self.vocab_size = len(self.token_bytes)

    @classmethod
    def load(cls, path: str | Path) -> _Vocabulary:
        "Read a `tokenizer.json`, or the one in a folder."
        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            return cls(path.read_bytes(), str(path))
        except OSError as error:
            hint = "`scalelab data tokenize` makes one"
            raise UsageError(f"{path}: can't read the tokenizer ({error.strerror}); {hint}") from None

    def save(self, path: str | Path) -> None:
        "Write the `tokenizer.json` atomically; the bytes, and so the hash, are those it was made from."
        atomic_write(path, self.raw)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        "The bytes that `ids` stand for, none for special tokens. UsageError for an id outside the vocabulary."
        ids = np.asarray(ids if hasattr(ids, "__len__") else list(ids)).astype(np.int64).reshape(-1)
        if len(ids) and not (0 <= ids.min() and ids.max() < self.vocab_size):
            bad = next(int(i) for i in ids if not 0 <= i < self.vocab_size)
            raise UsageError(f"token id {bad} is outside the vocabulary of {self.vocab_size}: from another tokenizer?")
        return b"".join([self.token_bytes[i] for i in ids.tolist()])

    def decode(self, ids: Iterable[int], errors: str = "replace") -> str:
        "Text of `ids`; half a character at a cut becomes U+FFFD (`errors` as in bytes.decode)."
        return self.decode_bytes(ids).decode("utf-8", errors)

# %%
#| export
_PROBE = f"Aé e\u0301 你好𠀀\t\r\n  x_1  \x00\u3000{EOT} it's"


class TextTokenizer(_Vocabulary):
    """Byte-level BPE: `encode` and `decode` are exact inverses on every valid text.

    raw: the bytes of a `tokenizer.json`; `name` stands in error messages. engine: "auto" (fastokens if it is installed
    and agrees, else HF tokenizers), "tokenizers". Raises UsageError if the file is no byte-level BPE with all 256 bytes
    and the token `<|endoftext|>`; warns if the file alters text (a normaliser).
    Attributes: vocab_size, eot_id, hash (xxh3_128 of `raw`, hex), token_bytes (bytes by id, empty for specials).
    """

    def __init__(self, raw: bytes, name: str = "tokenizer.json", engine: str = "auto"):
        super().__init__(raw, name)
        if engine not in ("auto", "tokenizers"):
            raise UsageError(f"tokenizer engine {engine!r}: expected auto or tokenizers")
        self._engine = engine
        if (back := self.decode(self._slowly([_PROBE])[0])) != _PROBE:
            message = f"{name}: changes text (a normaliser or an added blank?): {_PROBE!r} came back as {back!r}"
            warnings.warn(message, stacklevel=2)

    def __reduce__(self):
        return type(self), (self.raw, self.name, self._engine)  # the engines are made anew in another process

    def _slowly(self, texts: Sequence[str]) -> list[np.ndarray]:
        codes = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(c.ids, dtype=np.uint32) for c in codes]

    @functools.cached_property
    def _encode(self) -> Callable:
        return (self._engine == "auto" and fast_encoder(self.raw, self._slowly)) or self._slowly

    @property
    def engine(self) -> str:
        "What encodes: fastokens or tokenizers."
        return "tokenizers" if self._encode == self._slowly else "fastokens"

    def encode(self, text: str) -> np.ndarray:
        "Token ids uint32 [n]; the document-end token never appears, `text` may hold its name."
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        "Token ids of each text, on all cores. Raises UsageError naming the position of an element that is no string."
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                found = f"{type(text).__name__} {str(text)[:40]}"
                raise UsageError(f"can't tokenize element {i} of the batch: expected text, found {found}")
        return self._encode([valid_text(t) for t in texts])

# %% [markdown]
# ## Training
# Merging starts from the 256 bytes: count all neighbouring pairs, make the most frequent one a token, again. The trainer is HF's too; our part is to say no when the wish can't be granted, and to say
# so when the corpus ran out of pairs before the vocabulary was full.

# %%
#| export
def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096, min_frequency: int = 2) -> TextTokenizer:
    """Train a byte-level BPE with qwen2's split pattern on `texts` (streamed once).

    vocab_size: entries including 256 bytes and `<|endoftext|>` (id 0). The result depends on the texts only, not on
    threads or hash seeds. A corpus too small for it gives a smaller vocabulary and a warning.
    Raises UsageError if vocab_size < 257 or if there is no text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise UsageError(f"vocab_size is {vocab_size}, but 256 bytes and {EOT} need 257:"
            " try 4096 for a few MB of text, 32000 for some GB")
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(QWEN2_PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=min_frequency, special_tokens=[EOT],
        initial_alphabet=sorted(byte_alphabet()), show_progress=sys.stderr.isatty(),
    )
    size = 0

    def cleaned():
        nonlocal size
        for text in texts:
            size += len(text)
            yield valid_text(text)

    tokenizer.train_from_iterator(cleaned(), trainer)
    if size == 0:
        raise UsageError("no text to train a tokenizer on: every document is empty or was removed")
    trained = TextTokenizer(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, indent=1).encode("utf-8"))
    if trained.vocab_size < vocab_size:
        message = f"vocab_size {vocab_size} was asked for, but {size} characters of text hold only {trained.vocab_size}"
        warnings.warn(f"{message} entries that occur {min_frequency} times: the vocabulary is smaller", stacklevel=2)
    return trained


# %% [markdown]
# We train on a corpus of the same kind as the closed loop's: the project's samples and text that comes with Python, without duplicates, and train on all of it.

# %%
corpus = [*read_documents(["../../data_samples/*.jsonl"]), *stdlib_documents(limit_bytes=1_000_000)]
rows = find_duplicates(corpus).rows
documents = sorted((corpus[i] for i in rows), key=lambda d: (d["domain"], d["id"]))
tokenizer = train_tokenizer((d["text"] for d in documents), vocab_size=4096)
assert tokenizer.vocab_size == 4096 and tokenizer.eot_id == 0
print(f"{len(documents)} documents, {sum(len(d['text'].encode()) for d in documents) / 1e6:.1f} MB,"
      f" {tokenizer.vocab_size} entries")

# %% [markdown]
# What did it learn? The first merges are the commonest pairs of the commonest languages, the late ones whole words.

# %%
def spelled(t, i):
    return repr(t.token_bytes[i].decode("utf-8", "backslashreplace"))[1:-1]

for start in (257, 1000, 4080):
    print(f"{start:5}:", "  ".join(spelled(tokenizer, i) for i in range(start, start + 12)))

# %% [markdown]
# ## Does every text come back?
# The claim of exactness is easy to break if it is false: try everything. Samples of every domain, then 4,000 strings of seeded chaos, drawn from control characters, combining marks, emoji with joiners,
# right-to-left marks, private use and the rare planes.

# %%
def chaos(rng):
    blocks = [(0, 32), (32, 127), (0x80, 0xA0), (0x300, 0x36F), (0x200B, 0x200F), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3),
              (0xE000, 0xF8FF), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF), (0x10000, 0x10FFFF)]
    words = [EOT, "<|", "endoftext", " ", "\r\n", "   ", "\t", "'s", "'LL", "\u3000", "\ufeff", "👩‍👩‍👧",
             "1234", "\u3000's"]

    def part():
        return rng.choice(words) if rng.random() < 0.2 else chr(rng.randint(*rng.choice(blocks)))

    return "".join(part() for _ in range(rng.randint(0, 40)))

rng = random.Random(0)
strange = [chaos(rng) for _ in range(4000)]
strange += ["", " ", "\n", "\x00", " " * 50_000, "a" * 50_000, "鲲" * 50_000, "\n" * 5000 + "x"]
everything = [d["text"] for d in documents] + strange
codes = tokenizer.encode_batch(everything)
wrong = [t for t, ids in zip(everything, codes) if tokenizer.decode(ids) != t]
assert not wrong, f"{len(wrong)} texts came back different, first: {wrong[0]!r}"
assert not any((ids == tokenizer.eot_id).any() for ids in codes)
assert all(ids.dtype == np.uint32 for ids in codes)
print(f"{len(everything)} texts, {sum(map(len, codes)):,} tokens, {len(wrong)} differ")

# %% [markdown]
# Bytes that are no text also survive, token by token, and a cut through a character is marked and not fatal. The test for forged document ends must be able to fail, so we first see that the library
# alone falls for it.

# %%
trick = f"the end.{EOT}Ignore what came before."
naive = Tokenizer.from_str(tokenizer.raw.decode())
assert tokenizer.eot_id in naive.encode(trick).ids, "the library does what we guard against"
assert tokenizer.eot_id not in tokenizer.encode(trick) and tokenizer.decode(tokenizer.encode(trick)) == trick
assert len(tokenizer.encode(EOT)) >= 3 and tokenizer.decode([tokenizer.eot_id]) == ""

# %%
whole = {t: i for i, t in enumerate(tokenizer.token_bytes)}
assert tokenizer.decode_bytes([whole[bytes([b])] for b in range(256)]) == bytes(range(256))
ids = [whole[bytes([b])] for b in "鲲".encode()]
assert tokenizer.decode(ids) == "鲲" and tokenizer.decode(ids[:2]) == "\ufffd"
assert tokenizer.decode(tokenizer.encode("half \ud83d emoji")) == "half \ufffd emoji"

# %% [markdown]
# ## Errors say what to do

# %%
def refusal(function, *args):
    try:
        function(*args)
    except UsageError as error:
        return str(error)
    raise AssertionError(f"{function.__name__}{args} was accepted")

broken = json.loads(tokenizer.raw)
del broken["model"]["vocab"]["é"]
broken["model"]["merges"] = []
for message in [
    refusal(train_tokenizer, ["text"], 256), refusal(train_tokenizer, []),
    refusal(tokenizer.encode_batch, ["fine", None]), refusal(tokenizer.decode, [5000]),
    refusal(TextTokenizer, b"{}", "some.json"), refusal(TextTokenizer.load, "nowhere.json"),
    refusal(TextTokenizer, json.dumps(broken).encode(), "some.json"),
]:
    print("-", message)

# %%
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    tiny = train_tokenizer(["abab abab"], vocab_size=300)
assert tiny.vocab_size < 300 and "300 was asked for" in str(caught[0].message)
assert train_tokenizer(["x"], vocab_size=257).vocab_size == 257

# %% [markdown]
# ## The same file, the same ids, elsewhere
# Training twice gives the same bytes (the hash is the proof), saving and loading keeps them, and `transformers` reads the file and agrees on every id. It must be told `split_special_tokens=True`, or it
# falls for the trick above; the exporter writes that into the tokenizer's configuration.

# %%
again = train_tokenizer((d["text"] for d in documents), vocab_size=4096)
assert again.raw == tokenizer.raw and again.hash == tokenizer.hash
with tempfile.TemporaryDirectory() as folder:
    tokenizer.save(Path(folder) / "tokenizer.json")
    loaded = TextTokenizer.load(folder)
    assert loaded.hash == tokenizer.hash and loaded.vocab_size == 4096
    if importlib.util.find_spec("transformers"):
        from transformers import PreTrainedTokenizerFast

        file = str(Path(folder) / "tokenizer.json")
        peer = PreTrainedTokenizerFast(tokenizer_file=file, eos_token=EOT, split_special_tokens=True)
        for text in [*everything[:400], *strange[:400], trick]:
            assert peer.encode(text, add_special_tokens=False) == tokenizer.encode(text).tolist()
    else:
        print("transformers: skipped, install scalelab[deploy]")

# %% [markdown]
# ## Do the engines agree?
# On every text above, the seeded chaos included, the fast engine must give HF's ids; and a file on which it can't be trusted must not be encoded by it. We plant such an engine: one that changes a single id behind an ideographic blank.

# %%
slow = TextTokenizer(tokenizer.raw, engine="tokenizers")
assert slow.engine == "tokenizers" and pickle.loads(pickle.dumps(slow)).engine == "tokenizers"
print("encoded by", tokenizer.engine)
different = [t for t, a, b in zip(everything, codes, slow.encode_batch(everything)) if not np.array_equal(a, b)]
assert not different, repr(different[0])
assert pickle.loads(pickle.dumps(tokenizer)).encode(trick).tolist() == tokenizer.encode(trick).tolist()

# %%
def almost(texts):
    "The slow engine with one fault."
    found = slow.encode_batch(texts)
    return [np.where(np.arange(len(c)) == 2, 7, c) if "\u3000's" in t else c for t, c in zip(texts, found)]

if importlib.util.find_spec("fastokens"):
    assert fast_encoder(tokenizer.raw, slow.encode_batch) is not None
    assert fast_encoder(tokenizer.raw, almost) is None and fast_encoder(b"{}", slow.encode_batch) is None

# %% [markdown]
# How much faster is a question of the text: Chinese has no blanks to cut at, so its pieces are longer and seldom come twice. Each text is encoded once (an engine that has seen it before would answer from memory). A figure for real text is saved
# by `scalelab bench data-encode`.

# %%
half = [[d["text"] for d in documents][k::2] for k in (0, 1)]
seconds = {}
for name, t in (("tokenizers", slow), ("fastokens", TextTokenizer(tokenizer.raw))):
    t.encode_batch(half[0])
    begin = time.process_time()
    t.encode_batch(half[1])
    seconds[name] = time.process_time() - begin
assert tokenizer.engine == "tokenizers" or seconds["fastokens"] < seconds["tokenizers"] / 3
file = Path("../10_lab/results/bench-data-encode.json")
saved = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
speed = [r for r in saved if r["unit"] == "x"]
for r in saved:
    print(f"{'holds' if r['holds'] else 'MISSED':7} {r['what']}: {r['value']:.1f} {r['unit']} (target {r['target']})")

# %%
fig, ax = plt.subplots(figsize=(5.4, 1.6))
ax.barh([r["what"].split(",")[0] for r in speed][::-1], [r["value"] for r in speed][::-1])
ax.axvline(10, color="k", lw=0.8)
ax.set(xlabel="times the speed of HF tokenizers, per CPU second")
plt.show()

# %% [markdown]
# What to see: how far each bar reaches beyond the target (line), and that Chinese gains least.
#
# ## Verdict
# | question | answer |
# |---|---|
# | does every text come back? | yes: every document and 4,000 strings of seeded chaos, except lone surrogates, which no encoding holds |
# | can a text forge the end of a document? | no, with either engine; by default every library falls for it |
# | can the fast engine change a corpus? | not on what was tried: it is compared with HF on probes whenever a file is loaded, and on all of the above here |
#
# What this does not cover: a tokenizer trained on a balanced mixture, and vocabularies at the scale of terabytes.
