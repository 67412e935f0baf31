# %% [markdown]
# # Batches ahead of time
#
# > A thread that prepares the next batches and copies them to the device while the model works on this one, and what a batch costs.
#
# A device that waits for data is the most expensive way to read a file. A batch of ours is cheap, but its copy to a GPU and a slow disk are not free, and neither needs the model's attention: both can happen one or two batches ahead.
#
# **The claim we test** (A-stream): a library's loader has uncontrollable memory, memory maps of one's own don't. And what does the convenience of positions, documents and mixtures cost over plain copying?

# %%
#| default_exp data.prefetch

# %%
#| export
from __future__ import annotations

import contextlib
import queue
import threading
from dataclasses import fields

import torch

from scalelab.core.config import UsageError
from scalelab.data.rows import Batch
from scalelab.data.stream import Stream

# %%
#| hide
import json
import shutil
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from scalelab.core.plotting import style
from scalelab.data.mixture import ControlLog
from scalelab.data.shards import Shards, ShardWriter

style()
room = Path(tempfile.mkdtemp(prefix="prefetch-"))


def make_corpus(name, domains, n_docs):
    "Documents of random ids, each domain in one stretch, in one file."
    rng = np.random.default_rng(0)
    with ShardWriter(room / name, "h", 50_000, 0) as w:
        for domain in domains:
            for n in rng.lognormal(7, 1, n_docs // len(domains)).astype(int) + 1:
                w.add(rng.integers(1, 50_000, n), int(n) * 3, domain, source="made")
    return Shards(room / name)


# %% [markdown]
# ## To the device
# A copy from ordinary memory to a GPU stops the program until it is done; from *pinned* memory, which the operating system may not move, it runs by itself. The copy goes through a queue of its own (a CUDA stream), and an event
# tells the model's queue when the batch has arrived. On a CPU nothing is copied; what is left is to work out positions and documents ahead of time.


# %%
#| export
def _prepare(batch: Batch, device: torch.device, side) -> tuple[Batch, object]:
    "The batch with all fields on the device, and the event after which they are there (None on a CPU)."
    if side is None:
        return Batch(*(getattr(batch, f.name) for f in fields(Batch))).to(device), None
    pinned = Batch(*(getattr(batch, f.name).contiguous().pin_memory() for f in fields(Batch)))
    with torch.cuda.stream(side):
        return pinned.to(device, non_blocking=True), side.record_event()


def _work(
    stream: Stream,
    at: int,
    n: int,
    part: tuple[int, int],
    device: torch.device,
    ready: queue.Queue,
    stop: threading.Event,
) -> None:
    "Fill the queue with (batch, event) in order until told to stop; an error is the last thing in it."
    side = torch.cuda.Stream(device) if device.type == "cuda" else None
    while not stop.is_set():
        try:
            item = _prepare(stream.batch(at, n, *part), device, side)
        except BaseException as error:  # whatever it is, it belongs to whoever asks for this batch
            item = error
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.1)
                break
        if isinstance(item, BaseException):
            return
        at += n


# %%
#| hide
shards = make_corpus("one", ["text"], 600)
stream = Stream(shards, 256, seed=3)

# %%
ready, stop = queue.Queue(maxsize=3), threading.Event()
threading.Timer(0.3, stop.set).start()
_work(stream, 16, 8, (0, 1), torch.device("cpu"), ready, stop)
assert ready.qsize() == 3 and torch.equal(ready.get()[0].input_ids, stream.batch(16, 8).input_ids)
assert type(ready.get()[0]) is Batch  # every field is there, nothing is left to be worked out


# %%
#| export
class Prefetcher:
    """The batches of a stream in order, prepared in a background thread: `for batch in Prefetcher(stream, n, device)`.

    n: samples of a global batch. device: where the tensors shall be; on CUDA they travel from pinned memory beside the
    model's work. depth: batches ready ahead. consumed: samples to begin after; it counts on with every batch handed
    out, and is all that a checkpoint needs. rank, world_size: as in Stream.batch. An error comes when the batch that
    caused it is asked for. Use it in a `with` block or call close().
    """

    def __init__(self, stream: Stream, n: int, device: str | torch.device = "cpu", depth: int = 2, consumed: int = 0,
                 rank: int = 0, world_size: int = 1):
        stream.check_batch(n, world_size)
        if depth < 1:
            raise UsageError(f"prefetch depth {depth}: expected 1 or more batches ahead")
        self.device, self.consumed, self._n = torch.device(device), consumed, n
        self._ready, self._stop = queue.Queue(maxsize=depth), threading.Event()
        job = stream, consumed, n, (rank, world_size), self.device, self._ready, self._stop
        self._thread = threading.Thread(target=_work, args=job, daemon=True, name="prefetch")
        self._thread.start()

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> Batch:
        if self._stop.is_set():
            raise UsageError("this prefetcher is closed: make a new one with consumed=" + str(self.consumed))
        item = self._ready.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        batch, event = item
        if event is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_event(event)
            for f in fields(batch):  # the allocator must not reuse them while the model reads
                getattr(batch, f.name).record_stream(now)
        self.consumed += self._n
        return batch

    def close(self) -> None:
        "Stop the thread and let go of what it prepared; `consumed` counts only what was handed out."
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()

    __enter__ = __iter__

    def __exit__(self, *error) -> None:
        self.close()


# %% [markdown]
# The same batches in the same order, on any rank, and a run that is stopped goes on with the integer it kept:

# %%
with Prefetcher(stream, 8, depth=3) as ahead:
    first = [next(ahead) for _ in range(5)]
assert ahead.consumed == 40 and not ahead._thread.is_alive()
with Prefetcher(stream, 8, consumed=ahead.consumed, rank=1, world_size=2) as more:
    first.append(next(more))
for k, batch in enumerate(first):
    want = stream.batch(k * 8, 8) if k < 5 else stream.batch(40, 8, 1, 2)
    for name in ("input_ids", "labels", "position_ids", "document_ids", "domain_ids", "sample_ids"):
        assert torch.equal(getattr(batch, name), getattr(want, name))

# %% [markdown]
# It waits when nobody takes its batches (or it would fill the memory), hands an error to whoever asks for the batch that caused it, and leaves no thread behind:


# %%
class Faulty(Stream):
    "A stream that counts what is asked of it and fails at sample 40."

    asked = 0

    def batch(self, consumed, n, *part):
        Faulty.asked += 1
        if consumed == 40:
            raise UsageError("planted at 40")
        return super().batch(consumed, n, *part)


faulty = Faulty(shards, 256, seed=3)
with Prefetcher(faulty, 8, depth=2) as ahead:
    time.sleep(0.3)
    assert Faulty.asked == 3  # two in the queue, one in the hand
    taken = [next(ahead) for _ in range(5)]
    try:
        next(ahead)
        raise AssertionError("the error was lost")
    except UsageError as e:
        assert "planted at 40" in str(e) and ahead.consumed == 40 and len(taken) == 5
    try:
        next(ahead)
        raise AssertionError("went on after an error")
    except UsageError as e:
        assert "closed" in str(e) and "consumed=40" in str(e)
for wrong, words in (
    ({"n": 10**6}, "lower data.seq_len"),
    ({"n": 8, "depth": 0}, "depth 0"),
    ({"n": 8, "world_size": 3}, "3 ranks"),
):
    try:
        Prefetcher(stream, **wrong)
        raise AssertionError("accepted")
    except UsageError as e:
        assert words in str(e)
assert not [t for t in threading.enumerate() if t.name == "prefetch"]

# %% [markdown]
# On a GPU the same must hold with tensors that live there, under a model's work on another queue:

# %%
#| gpu
with Prefetcher(stream, 8, "cuda") as ahead:
    for k in range(20):
        batch, want = next(ahead), stream.batch(k * 8, 8)
        torch.ones(2_000, 2_000, device="cuda") @ torch.ones(2_000, 2_000, device="cuda")
        assert batch.input_ids.is_cuda and torch.equal(batch.input_ids.cpu(), want.input_ids)
        assert torch.equal(batch.document_ids.cpu(), want.document_ids)

# %% [markdown]
# ## What a batch costs
# The yardstick is `memcpy`: the same windows of 8 x 2,048 tokens, copied as they are from the mapped file. Against it: tokens and labels alone; with positions, documents and samples; the same from a mixture of three domains; and nanoGPT's
# way (random offsets, each window cast and stacked, the file mapped anew for every batch). A clock has no place in a notebook's output: here are generous assertions, and the figures shown are those that `scalelab bench data-stream` saved.

# %%
one, three = make_corpus("one", ["text"], 4_000), make_corpus("three", ["a", "b", "c"], 4_000)
plain = Stream(one, 2_048, seed=1)
mixed = Stream(three, 2_048, seed=1, control=ControlLog().append(from_sample=0, mixture={"a": 3, "b": 2, "c": 1}))
full = plain.plan.window[plain.plan.window >= 0]
places = np.random.default_rng(0).permutation(full)[:2_400].reshape(300, 8).tolist()
target, file = np.empty((8, 2_049), np.uint16), room / "one/00000.bin"


def memcpy(k):
    for row, start in zip(target, places[k]):
        row[:] = one.tokens[0][start : start + 2_049]


def nano(k):
    data = np.memmap(file, np.uint16, mode="r")
    ix = torch.randint(len(data) - 2_048, (8,))
    return [
        torch.stack([torch.from_numpy(data[i + d : i + d + 2_048].astype(np.int64)) for i in ix.tolist()])
        for d in (0, 1)
    ]


def everything(stream):
    def job(k):
        b = stream.batch(k * 8, 8)
        return b.input_ids, b.labels, b.position_ids, b.document_ids, b.domain_ids, b.sample_ids

    return job


jobs = {
    "memcpy": memcpy,
    "tokens and labels": lambda k: plain.batch(k * 8, 8),
    "with documents": everything(plain),
    "mixture, documents": everything(mixed),
    "nanoGPT's way": nano,
}
seconds = {name: [] for name in jobs}
for turn in range(6):
    for name, job in jobs.items():
        begin = time.process_time()
        for k in range(300):
            job(k)
        seconds[name].append(time.process_time() - begin)
ratio = {name: np.median(s[1:]) / np.median(seconds["memcpy"][1:]) for name, s in seconds.items()}
assert (
    ratio["tokens and labels"] < 3
    and ratio["mixture, documents"] < 12
    and ratio["nanoGPT's way"] > 3 * ratio["tokens and labels"]
)

# %%
#| hide
shutil.rmtree(room)

# %%
saved = Path("../10_lab/results/bench-data-stream.json")
rows = json.loads(saved.read_text(encoding="utf-8"))["rows"] if saved.exists() else []
for row in rows:
    print(
        f"{'holds' if row['holds'] else 'MISSED':7} {row['what']}: {row['value']:.2f} {row['unit']} (target "
        f"{row['target']})"
    )
to_copy = [r for r in rows if "/ memcpy" in r["what"]]
fig, ax = plt.subplots(figsize=(5.4, 1.6))
ax.barh([r["what"].split(" / ")[0] for r in to_copy][::-1], [r["value"] for r in to_copy][::-1])
ax.axvline(1, color="k", lw=0.8)
ax.set(xlabel="CPU time of a batch / copying its windows")
plt.show()

# %% [markdown]
# What to see: tokens and labels cost about what copying costs (line), since they are one copy and one widening; telling documents apart costs more than the tokens. Memory: nothing but the batches is held, as the files are mapped.
#
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | A-stream: own memory-mapped chunks instead of a library's loader | holds, as to speed and memory | the saved bench above: ratios to a plain copy and to nanoGPT's way, and start-up and resume that do not grow with the corpus |
#
# What this chapter does not cover: whether a device waits for data in a real run; the trainer logs that.
