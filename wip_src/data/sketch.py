# %% [markdown]
# # Texts as sets, sets as sketches
#
# > A text is the set of its five-character runs, a set is 128 numbers, and the numbers say whom to compare.
#
# Finding near-duplicates among a million documents by comparing all pairs is $5 \cdot 10^{11}$ comparisons. This notebook makes texts comparable (exactly) and findable (cheaply): the sets, their Jaccard
# similarity, and a sketch whose bands meet when two sets are alike. The first article says that MinHash LSH finds near-duplicates (A-dup); here stands how well, by the true similarity of the pair.

# %%
#| default_exp data.sketch

# %%
#| export
from __future__ import annotations

import functools
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from scalelab.core.config import UsageError

# %%
#| hide
import pickle, random
import matplotlib.pyplot as plt
from datasketch import MinHash, MinHashLSH
from scalelab.core.plotting import style

style()

# %% [markdown]
# ## The set of a text
# A text becomes the *set* of its runs of five characters (5-grams, or shingles), white space left out, after Unicode composition (NFC: `é` is one code point or two, and a reader sees no difference).
# Two texts are as alike as their sets overlap:
#
# $$J(A, B) = \frac{|A \cap B|}{|A \cup B|}$$
#
# Strings in Python sets are slow, so a shingle is a 64-bit number, a polynomial in its five code points, computed for all positions of many texts at once: the texts are laid end to end with a
# gap of four pads between them, so that no shingle spans two texts, and a text shorter than five is padded instead of lost.

# %%
#| export
_SHINGLE = 5  # characters in a shingle
_PAD = 0x110000  # one above the last code point: no text holds it
_A, _B = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)  # odd, bits well spread
_EMPTY = np.uint64(0xFFFFFFFFFFFFFFFF)


def bare(text: str) -> str:
    "The text in NFC and without white space: what shingles are taken from."
    return "".join((text if text.isascii() else unicodedata.normalize("NFC", text)).split())


def _windows(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """(counts int64 [len(texts)], hashes uint64 [counts.sum()]): the shingles of bare texts in order of place.

    Repeated shingles repeat; an empty text has none; one of fewer than five characters has one.
    """
    length = np.fromiter(map(len, texts), np.int64, len(texts))
    pads = "\0" * (_SHINGLE - 1)
    code = np.frombuffer((pads.join(texts) + pads).encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    ends = np.cumsum(length + _SHINGLE - 1)
    code[(ends[:, None] - np.arange(1, _SHINGLE)).ravel()] = _PAD
    pair = code[:-1] << np.uint64(32)
    pair |= code[1:]  # two code points, without loss
    pair *= _A
    pair ^= pair >> np.uint64(29)
    value = pair[:-3] * _B
    value += pair[2:-1]
    value *= _A
    value += code[4:]
    value *= _B
    value ^= value >> np.uint64(31)
    value *= _A
    counts = np.maximum(length - _SHINGLE + 1, np.minimum(length, 1))
    first = ends - length - _SHINGLE + 1 + counts  # of the windows that reach into the gap: eight at most
    real = np.ones(len(code), bool)
    real[np.minimum(first[:, None] + np.arange(2 * _SHINGLE - 2), ends[:, None] - 1).ravel()] = False
    return counts, value[real[: len(value)]]


# %%
#| export
def shingles(text: str) -> np.ndarray:
    """Sorted distinct hashes (uint64) of the character 5-grams of `text`, after NFC and without white space.

    A text shorter than five is one shingle; an empty one has none. Temporary memory is bounded whatever the length.
    """
    plain = bare(text)
    pieces = [plain[i : i + _PIECE + _SHINGLE - 1] for i in range(0, max(len(plain) - _SHINGLE + 1, 1), _PIECE)]
    found = [distinct(_windows([p])[1]) for p in pieces]
    return found[0] if len(found) == 1 else distinct(np.concatenate(found))


_PIECE = 1 << 18  # characters hashed at once


def distinct(value: np.ndarray) -> np.ndarray:
    "What np.unique gives, at a third of its cost for long arrays; `value` is sorted in place."
    value.sort()
    fresh = np.ones(len(value), bool)
    np.not_equal(value[1:], value[:-1], out=fresh[1:])
    return value[fresh]


def shingle_sets(texts: Sequence[str]) -> list[np.ndarray]:
    "`shingles` of each text; for many short texts several times faster than one by one."
    short = [i for i, t in enumerate(texts) if len(t) < _PIECE]
    out = [np.empty(0, np.uint64)] * len(texts)
    if short:
        counts, value = _windows([bare(texts[i]) for i in short])
        for i, part in zip(short, np.split(value, np.cumsum(counts)[:-1])):
            out[i] = distinct(part)
    for i in set(range(len(texts))).difference(short):
        out[i] = shingles(texts[i])
    return out


# %% [markdown]
# The reference is the definition with strings in sets. If two different 5-grams ever got one number, or one reached across a gap, the counts would differ.

# %%
def reference_set(text, n=5):
    plain = "".join(text.split())
    return {plain[i : i + n] for i in range(max(1, len(plain) - n + 1))} - {""}

rng = random.Random(0)
letters = "".join(chr(0x4E00 + k) for k in range(400)) + "abcdefghij" * 20  # half of the draws Chinese, half not
long_text = "".join(rng.choices(letters, k=600_000))
several = [long_text, "", "ab", "abcde", "天地玄黄宇宙洪荒", "a" * 50_000, "\ud800 lone"]
several += ["abcdef\0\0\0\0", "x", "𝒳𝒴𝒵 beyond the BMP"]
assert [len(shingles(t)) for t in several] == [len(reference_set(t)) for t in several]
assert all((s == shingles(t)).all() for s, t in zip(shingle_sets(several), several)), "neighbours mattered"
assert shingle_sets([]) == []
assert set(shingles("ab").tolist()).isdisjoint(shingles("abcdefgh\0\0\0").tolist()), "padding is no character"

# %%
#| export
def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    "Exact |A and B| / |A or B| of two sorted arrays without repetition; two empty sets are equal (1.0)."
    if len(a) == 0 and len(b) == 0:
        return 1.0
    both = np.concatenate([a, b])
    both.sort(kind="stable")  # merges two sorted runs in one pass
    common = int(np.count_nonzero(both[1:] == both[:-1]))
    return common / (len(a) + len(b) - common)


# %%
story = "北冥有鱼，其名为鲲。鲲之大，不知其几千里也；化而为鸟，其名为鹏。鹏之背，不知其几千里也；怒而飞，其翼若垂天之云。"
for other in (story.replace("垂天", "遮天"), story.replace("其", "它"), story[: len(story) // 2]):
    a, b = reference_set(story), reference_set(other)
    assert jaccard(shingles(story), shingles(other)) == len(a & b) / len(a | b)
    print(f"J = {jaccard(shingles(story), shingles(other)):.2f}   {other[:42]}")
assert jaccard(shingles(""), shingles("")) == 1.0 and jaccard(shingles("abcdef"), shingles("uvwxyz")) == 0.0

# %% [markdown]
# One changed character breaks five shingles, so $J$ falls fast: six scattered characters changed out of fifty already make another text. A threshold of 0.8 is strict about what it calls the same.
#
# ## The S-curve
# MinHash (Broder, 1997) stands on one fact: order all shingles of the world at random; the chance that two sets have the same smallest element is exactly $J$. With 128 orders a set is 128 numbers,
# and the share of equal numbers estimates $J$, give or take $\sqrt{J(1-J)/128}$: 3.5 points at $J = 0.8$, too coarse to decide by, good enough to find whom to compare.
#
# To find without comparing, cut the 128 numbers into $b$ bands of $r$. Two documents meet when a whole band agrees:
#
# $$P(J) = 1 - (1 - J^r)^b$$
#
# Few long bands miss true pairs; many short ones produce candidates that we then reject. Rejecting costs a comparison and missing costs a duplicate, so recall decides: of all
# settings that find a pair *at* the threshold with the recall asked for, take the longest bands.

# %%
#| export
def collision_probability(j: float | np.ndarray, bands: int, rows: int) -> float | np.ndarray:
    "Probability that two sets of Jaccard similarity `j` agree in at least one of `bands` bands of `rows` values."
    return 1 - (1 - np.asarray(j, dtype=float) ** rows) ** bands


def lsh_bands(threshold: float = 0.8, recall: float = 0.999, num_perm: int = 128) -> tuple[int, int]:
    """(bands, rows) with the longest bands that still find a pair at `threshold` with probability `recall`.

    Raises UsageError when the threshold is outside (0, 1] or no setting of `num_perm` values reaches the recall.
    """
    if not 0 < threshold <= 1:
        raise UsageError(f"dedup threshold must be in (0, 1], got {threshold}: 0.8 is usual, 1 removes equal sets only")
    for rows in range(num_perm // 2, 0, -1):
        if collision_probability(threshold, num_perm // rows, rows) >= recall:
            return num_perm // rows, rows
    raise UsageError(f"{num_perm} permutations can't reach recall {recall} at threshold {threshold}: lower the recall")


# %%
assert lsh_bands(0.8) == (25, 5) and collision_probability(0.8, 25, 5) > 0.9999
assert collision_probability(0.8, 21, 6) < 0.999  # one row more would miss the recall asked for
for bad in (0, 1.5):
    try:
        raise AssertionError(f"threshold {bad} was accepted: {lsh_bands(bad)}")
    except UsageError as error:
        assert "(0, 1]" in str(error)

# %% [markdown]
# ## One pass instead of 128
# Filling 128 numbers costs 128 multiplications for every shingle; that is where MinHash spends its time. One permutation is enough when the shingles are dealt into 128 bins by their hash and every bin keeps its smallest
# (Li, Owen and Zhang, 2012): one multiplication each. A long text fills all bins. A short one leaves some empty, and two empty bins must not count as agreement.
#
# The known repairs borrow from a neighbouring bin, which makes short texts' estimates noisier. Fast similarity sketching (Dahlgaard, Knudsen and Thorup, 2017) deals again instead: round after round with a new hash, and
# only the empty bins take something. A bin's value is the smallest (round, hash), so agreement keeps its meaning: the smallest over the union lies in both sets, with chance $J$. After eight rounds
# what is still empty (texts of a few dozen characters) gets its own permutation, as plain MinHash does. A text of one shingle then costs 128 hashes, a long one a single hash for each shingle.

# %%
#| export
_ROUNDS = 8  # of dealing; after them the empty bins, if any, get a permutation each


def _stir(value: np.ndarray, salt: int | np.ndarray) -> np.ndarray:
    "A bijection of uint64 for every salt; the upper bits of the result depend on all bits of the argument."
    value = value ^ salt
    value *= _A
    value ^= value >> np.uint64(32)
    value *= _B
    return value


def _deal(bins: np.ndarray, row: np.ndarray, value: np.ndarray, salt: np.uint64, turn: int) -> None:
    "One round: every value goes to a bin of its text's row; bins that are empty take their smallest. In place."
    value = _stir(value, salt)
    place = ((value >> np.uint64(32)) * np.uint64(bins.shape[1]) >> np.uint64(32)).view(np.int64)
    place += row * bins.shape[1]
    value >>= np.uint64(4)
    value |= np.uint64(turn << 60)  # a later round never beats an earlier one
    np.minimum.at(bins.reshape(-1), place, value)


def _fill_rest(bins: np.ndarray, start: np.ndarray, counts: np.ndarray, value: np.ndarray, salts: np.ndarray) -> None:
    "Every bin that is still empty takes the smallest of its text's values under the bin's own permutation. In place."
    doc, k = np.nonzero(bins == _EMPTY)
    doc, k = doc[counts[doc] > 0], k[counts[doc] > 0]
    size = counts[doc]
    begin = np.cumsum(size) - size
    flat = np.arange(size.sum()) + np.repeat(start[doc] - begin, size)
    if len(flat):
        least = np.minimum.reduceat(_stir(value[flat], np.repeat(salts[k], size)) >> np.uint64(4), begin)
        bins[doc, k] = least | np.uint64(_ROUNDS << 60)


# %% [markdown]
# A text of repetitions is the trap here: a hundred thousand characters, two distinct shingles. After the first round such a text is reduced to its distinct shingles, which are then few. A long text is dealt in
# pieces whose bins are merged by their minimum; the round in the upper bits makes that exact.

# %%
#| export
def _bins(texts: Sequence[str], num_perm: int, seed: int) -> np.ndarray:
    "Bin values uint64 [len(texts), num_perm] of bare texts; all ones for a text without a shingle."
    # no two seeds share a salt
    salts = _stir(np.arange(1, _ROUNDS + num_perm + 1, dtype=np.uint64), np.uint64(seed << 16))
    bins = np.full((len(texts), num_perm), _EMPTY)
    counts, value = _windows(texts)
    _deal(bins, np.repeat(np.arange(len(texts)), counts), value, salts[0], 0)
    open_rows = np.flatnonzero((bins == _EMPTY).any(1) & (counts > 0))
    if len(open_rows) == 0:
        return bins
    start = np.cumsum(counts) - counts
    sets = [value[s : s + n] for s, n in zip(start[open_rows].tolist(), counts[open_rows].tolist())]
    sets = [distinct(s) if len(s) > 8 * num_perm else s for s in sets]  # so many and yet a bin empty: repetitions
    counts, value, rest = np.array([len(s) for s in sets]), np.concatenate(sets), bins[open_rows]
    row = np.repeat(np.arange(len(sets)), counts)
    for turn in range(1, _ROUNDS):
        live = (rest == _EMPTY).any(1)[row]
        if not live.any():
            break
        fresh = np.full_like(rest, _EMPTY)
        _deal(fresh, row[live], value[live], salts[turn], turn)
        np.minimum(rest, fresh, out=rest)
    _fill_rest(rest, np.cumsum(counts) - counts, counts, value, salts[_ROUNDS:])
    bins[open_rows] = rest
    return bins


# %%
#| export
def _blocks(texts: Sequence[str], num_perm: int, seed: int) -> Iterator[np.ndarray]:
    "Sketch values of consecutive runs of texts, each run about as large as a processor's cache."
    run, size = [], 0
    for text in map(bare, texts):
        if run and (size + len(text) > 100_000 or len(run) == 4096):
            yield _low_half(run, num_perm, seed)
            run, size = [], 0
        run.append(text)
        size += len(text)
    if run:
        yield _low_half(run, num_perm, seed)


def _low_half(run: list[str], num_perm: int, seed: int) -> np.ndarray:
    "Lower halves of the bin values of bare texts: the smallest of many is small, its lower bits are those that differ."
    if len(run) > 1 or len(run[0]) <= _PIECE:
        return _bins(run, num_perm, seed).astype(np.uint32)
    starts = range(0, len(run[0]) - _SHINGLE + 1, _PIECE)  # a long text: pieces that overlap by four characters
    pieces = (run[0][i : i + _PIECE + _SHINGLE - 1] for i in starts)
    return functools.reduce(np.minimum, (_bins([p], num_perm, seed) for p in pieces)).astype(np.uint32)


# %%
at_once = _bins([bare(long_text)], 128, 1).astype(np.uint32)
assert len(long_text) > 2 * _PIECE and (_low_half([bare(long_text)], 128, 1) == at_once).all(), "pieces: the same"
assert [len(b) for b in _blocks(["x" * 60_000] * 3 + ["y"] * 5000, 4, 1)] == [1, 1, 4096, 905]

# %% [markdown]
# Is each bin a fair coin with chance $J$? Pairs with planted $J$, from sets of 6 shingles to sets of 3,000; the error of the estimate in units of what 128 independent permutations would have. datasketch's own MinHash stands beside it.

# %%
def edited(text, places):
    "`text` with as many characters replaced."
    new = list(text)
    for p in rng.sample(range(len(text)), places):
        new[p] = chr(0x3041 + rng.randrange(80))
    return "".join(new)

def errors(length, places, pairs):
    "(standardised errors of our estimates, and of datasketch's) over pairs of texts with that many edits."
    ours, theirs = [], []
    for k in range(pairs):
        a = "".join(rng.choices(letters, k=length))
        b = edited(a, places)
        j = jaccard(shingles(a), shingles(b))
        x, y = _bins([a, b], 128, k)
        peers = [MinHash(128, seed=k + 1, hashfunc=int) for _ in "ab"]
        for peer, text in zip(peers, (a, b)):
            peer.update_batch((shingles(text) >> np.uint64(32)).tolist())
        ours.append(((x == y).mean() - j) / (j * (1 - j) / 128) ** 0.5)
        theirs.append((peers[0].jaccard(peers[1]) - j) / (j * (1 - j) / 128) ** 0.5)
    return np.array(ours), np.array(theirs)

for length, places in ((10, 1), (60, 2), (300, 8), (3000, 60)):
    ours, theirs = errors(length, places, 150)
    print(f"{length:5} characters: mean error {ours.mean():+.2f}, spread ours {ours.std():.2f},"
          f" datasketch {theirs.std():.2f}")
    assert abs(ours.mean()) < 0.35 and ours.std() < 1.25

# %% [markdown]
# Both estimators are centred. On long texts ours is as precise as independent permutations, on short ones more so: bins draw from a text without putting back. Nothing is paid for the single pass.
#
# ## The signer
# What the index stores is the hash of every band. `Signer` is a value: it pickles, and the same text has the same bands in every process and every batch.

# %%
#| export
def _hash_bands(bins: np.ndarray, bands: int, rows: int) -> np.ndarray:
    "A hash of each run of `rows` sketch values, uint64 [n, bands]; zero only where there is no shingle."
    parts = bins[:, : bands * rows].reshape(len(bins), bands, rows)
    value = np.zeros((len(bins), bands), np.uint64)
    for r in range(rows):
        value = _stir(value + parts[:, :, r], np.uint64(r))
    value ^= value >> np.uint64(32)
    value[value == 0] = 1
    value[(bins == np.uint32(0xFFFFFFFF)).all(1)] = 0
    return value


# %%
some = np.array([[1, 2, 3, 4], [2, 1, 3, 4], [0xFFFFFFFF] * 4], np.uint32)
hashed = _hash_bands(some, 2, 2)
assert hashed[0, 0] != hashed[1, 0] and hashed[0, 1] == hashed[1, 1] != 0 and not hashed[2].any()

# %%
#| export
@dataclass(frozen=True)
class Signer:
    """Band hashes of texts for near-duplicate search at Jaccard `threshold`, found with probability `recall` at it.

    num_perm: bins of the sketch; more find and reject more sharply, and cost memory. seed: chooses the hash.
    Raises UsageError when the settings are impossible. Dahlgaard, Knudsen and Thorup (2017), fast similarity sketching.
    """

    threshold: float = 0.8
    recall: float = 0.999
    num_perm: int = 128
    seed: int = 1

    def __post_init__(self) -> None:
        if not (2 <= self.num_perm <= 4096 and 0 <= self.seed < 1 << 48):
            raise UsageError(f"dedup num_perm {self.num_perm}, seed {self.seed}: expected 2..4096 and 0..2^48 - 1")
        lsh_bands(self.threshold, self.recall, self.num_perm)

    @functools.cached_property
    def shape(self) -> tuple[int, int]:
        "(bands, rows of a band)."
        return lsh_bands(self.threshold, self.recall, self.num_perm)

    @property
    def bands(self) -> int:
        "How many band hashes a document has."
        return self.shape[0]

    def bins(self, texts: Sequence[str]) -> np.ndarray:
        "Sketch values uint32 [n, num_perm]: the share of equal ones estimates J; all ones where there is no shingle."
        return np.concatenate([np.empty((0, self.num_perm), np.uint32), *_blocks(texts, self.num_perm, self.seed)])

    def band_hashes(self, bins: np.ndarray) -> np.ndarray:
        "Band hashes uint64 [n, bands] of sketch values; never zero, but for a text without a shingle, where all are."
        return _hash_bands(bins, *self.shape)

    def sign_batch(self, texts: Sequence[str]) -> np.ndarray:
        "Band hashes uint64 [len(texts), bands]; a row of zeros for a text without a shingle."
        blocks = _blocks(texts, self.num_perm, self.seed)
        return np.concatenate([np.empty((0, self.bands), np.uint64), *map(self.band_hashes, blocks)])

    def sign(self, text: str) -> np.ndarray:
        "Band hashes uint64 [bands] of one text; length 0 when it has no shingle."
        row = self.sign_batch([text])[0]
        return row if row[0] else row[:0]


# %%
signer = Signer()
batch = several + [story, story + " \n", story.replace("垂天", "遮天"), " "]
signed = signer.sign_batch(batch)
assert signed.shape == (len(batch), 25) and signed.dtype == np.uint64
for text, bands in zip(batch, signed):  # alone or in company, here or in another process
    alone = pickle.loads(pickle.dumps(signer)).sign(text)
    assert (alone == bands).all() if shingles(text).size else (len(alone) == 0 and not bands.any())
assert (signed[10] == signed[11]).all() and 3 < (signed[10] == signed[12]).sum() < 25
assert signer.sign_batch([]).shape == (0, 25) and (Signer(seed=2).sign(story) != signer.sign(story)).all()
for bad in (dict(num_perm=1), dict(seed=-1), dict(threshold=0.05, num_perm=8)):
    try:
        raise AssertionError(f"{bad} was accepted: {Signer(**bad)}")
    except UsageError as error:
        print(error)

# %% [markdown]
# ## Theory and practice
# We plant edits of known size in texts, measure the true $J$ of each pair, and look whether their bands meet. The dotted curve is what
# `datasketch` chooses for 0.8 when it is left to its default of equal weights.

# %%
settings = [signer.shape, ((default := MinHashLSH(threshold=0.8, num_perm=128)).b, default.r)]
pairs = [(a := "".join(rng.choices(letters, k=400)), edited(a, k % 50)) for k in range(1500)]
true_j = np.array([jaccard(shingles(a), shingles(b)) for a, b in pairs])
same = signer.bins([a for a, _ in pairs]) == signer.bins([b for _, b in pairs])
met = {(b, r): same[:, : b * r].reshape(-1, b, r).all(2).any(1) for b, r in settings}
above = true_j >= 0.8
for (bands, rows), hits in met.items():
    print(f"{bands} bands of {rows}: found {hits[above].mean():.1%} of {above.sum()} pairs with J >= 0.8")
assert met[25, 5][above].all()
meeting = (signer.sign_batch([a for a, _ in pairs]) == signer.sign_batch([b for _, b in pairs])).any(1)
assert (meeting == met[25, 5]).all(), "a band hash stands for its band"

# %%
fig, ax = plt.subplots(figsize=(6.4, 3))
grid, edges = np.linspace(0, 1, 200), np.linspace(0.05, 1, 20)
for ((bands, rows), hits), line in zip(met.items(), ("-", ":")):
    ax.plot(grid, collision_probability(grid, bands, rows), line, label=f"theory, {bands} bands of {rows}")
    which = np.digitize(true_j, edges)
    groups = [w for w in range(20) if (which == w).sum() >= 10]
    ax.plot([true_j[which == w].mean() for w in groups], [hits[which == w].mean() for w in groups], "o",
            color=ax.lines[-1].get_color(), label=f"measured, {bands} bands of {rows}")
ax.axvline(0.8, color="k", lw=0.8)
ax.set(xlabel="true Jaccard similarity of the pair", ylabel="share of pairs found", title="What the bands find")
ax.legend(fontsize=8)
plt.show()

# %% [markdown]
# The dots lie on the curves: theory can be trusted. Ours (solid) has everything at the threshold, and pays with candidates between 0.4 and 0.8; the balanced setting (dotted) misses more than half of the pairs at
# 0.8 itself.
#
# ## Verdict
# | question | verdict | measured |
# |---|---|---|
# | is a sketch made in one pass as good as 128 permutations? | holds | errors centred, spread at or below that of datasketch's MinHash from 10 to 3,000 characters |
# | do the bands find what theory says? | holds | every pair with J >= 0.8 met in one of 25 bands of 5 |
# | are a library's default bands good enough? | does not hold | one pair in six above the threshold is missed |
#
# What this does not cover: whether a pair that meets is really alike is decided by its sets (the next notebook), and an excerpt within a long text has a small $J$ and is not found this way at all (the notebook on passages).
