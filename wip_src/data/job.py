# %% [markdown]
# # A job: steps, passes, a folder of work
#
# > What a cleaning run is between its call and its products: steps gathered in passes, a locked folder that only the same job finds again, and a funnel whose sums are checked.
#
# A configuration or a recipe becomes steps; steps are gathered in passes over the text; passes are run by an engine in a folder that belongs to this job alone. All that is left for the command is to write the products.

# %%
#| default_exp data.job

# %%
#| export
from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import scalelab
from scalelab.core.config import UsageError, atomic_write, did_you_mean
from scalelab.data.decide import Known, decide
from scalelab.data.engine import Engine, watching
from scalelab.data.parts import Plan, Source, marked
from scalelab.data.passes import Corpus, MapTask, Task, map_task, read_task
from scalelab.data.products import Gone
from scalelab.data.quality import QualityConfig, Repair, Rules
from scalelab.data.recipe import KEEP_POLICIES, Exact, Near, Passages, Recipe, Templates
from scalelab.data.sketch import Signer
from scalelab.data.strip import CountTask, Strip, count_shape, count_task
from scalelab.data.templates import LineCounts

# %%
#| hide
import tempfile

import matplotlib.pyplot as plt

from scalelab.core.plotting import COLORS, style
from scalelab.data.documents import stdlib_documents, write_documents
from scalelab.data.recipe import parse_stages

# %% [markdown]
# ## What to do
# Without a recipe a small configuration serves: our own rules, then duplicates. A recipe (see its chapter) names any stages in any order. Both become a list of steps, each with the name under which the report counts it.

# %%
#| export
@dataclass
class CleanConfig:
    """How documents are cleaned.

    Args:
        quality: rules, their thresholds and which are off
        near_threshold: Jaccard similarity of 5-character runs from which two are the same; 0 keeps near-duplicates
        keep: which of a group of duplicates stays: longest, first, newest or best (largest column `quality`)
        seed: of the permutations of MinHash and of the texts drawn for review
        workers: processes; 0 means one for each core
        limit_bytes: stop reading after this many bytes of text; 0 reads everything
        part_mb: text after which a part is finished, from which a killed run goes on
        file_mb: size of an output file before it is packed
    """

    quality: QualityConfig = field(default_factory=QualityConfig)
    near_threshold: float = 0.8
    keep: str = "longest"
    seed: int = 1
    workers: int = 0
    limit_bytes: int = 0
    part_mb: float = 8.0
    file_mb: float = 256.0

    def __post_init__(self):
        if not 0 <= self.near_threshold <= 1:
            raise UsageError(f"near_threshold: {self.near_threshold} is outside [0, 1]; 0.8 is usual, 0 turns it off")
        if self.keep not in KEEP_POLICIES:
            raise UsageError(
                f"keep: {self.keep!r} is not one of {', '.join(KEEP_POLICIES)}{did_you_mean(self.keep, KEEP_POLICIES)}")
        for key, low in (("workers", 0), ("limit_bytes", 0), ("seed", 0), ("part_mb", 0.01), ("file_mb", 0.01)):
            if not getattr(self, key) >= low:
                raise UsageError(f"{key}: {getattr(self, key)} must be at least {low}")

    def facts(self) -> dict[str, Any]:
        "What of it decides the bytes of the result: all but the number of workers."
        return {k: v for k, v in asdict(self).items() if k != "workers"}


Steps = list[tuple[str, Any]]  # (name in the report, stage)


# %%
#| export
def steps_of(config: CleanConfig, recipe: Recipe | None = None) -> Steps:
    "The stages in order with their names in the report: the recipe's, or those that the configuration stands for."
    if recipe is not None:
        named = [(name, stage) for (name, _), stage in zip(recipe.stages, recipe.build())]
        old = {id(s): [(name, Known(s.known))] for name, s in named if isinstance(s, Near) and s.known}
        return [step for name, s in named for step in [*old.get(id(s), []), (name, s)]]
    rules = Rules("scalelab", config.quality.thresholds, config.quality.off)
    steps: Steps = [("quality", Repair())] if config.quality.repair else []
    steps += [("quality", rules), ("dedup", Exact(config.keep))]
    return steps + [("dedup", Near(config.near_threshold, config.keep))] if config.near_threshold else steps


# %%
assert [(label, type(stage).__name__) for label, stage in steps_of(CleanConfig())] == [("quality", "Repair"),
    ("quality", "Rules"), ("dedup", "Exact"), ("dedup", "Near")]
assert [label
    for label, _ in steps_of(CleanConfig(),
    Recipe(parse_stages(["repair", {"rules": {"set": "gopher"}}, "near"], "x")))] == ["repair", "rules", "near"]
for wrong in ({"near_threshold": 2}, {"keep": "longst"}, {"limit_bytes": -5}):
    try:
        CleanConfig(**wrong)
    except UsageError as error:
        print(error)
    else:
        raise AssertionError(wrong)

# %% [markdown]
# Steps are gathered in passes over the text. A stage that decides on columns (exact, near) ends nothing: the next one reads other columns. A stage that judges documents after such a decision, or that changes texts in the
# light of others, begins a new pass.

# %%
#| export
@dataclass
class Pass:
    "One pass over the text: stages that map documents, then stages that decide on the columns it leaves."

    maps: Steps = field(default_factory=list)
    decisions: Steps = field(default_factory=list)

    def signer(self, seed: int) -> Signer | None:
        "What makes the hashes of bands that its near stage needs."
        near = [stage for _, stage in self.decisions if isinstance(stage, Near)]
        return Signer(near[0].threshold, near[0].recall, seed=seed) if near else None


def passes_of(steps: Steps) -> list[Pass]:
    "The steps as passes; UsageError for two near stages on the same texts."
    passes = [Pass()]
    for label, stage in steps:
        if isinstance(stage, (Exact, Near)):
            if isinstance(stage, Near) and any(isinstance(s, Near) for _, s in passes[-1].decisions):
                raise UsageError("recipe: two near stages stand together; the one with the lower threshold is enough")
            passes[-1].decisions.append((label, stage))
            continue
        if passes[-1].decisions or isinstance(stage, (Templates, Passages)):
            passes.append(Pass())
        passes[-1].maps.append((label, stage))
    return passes


# %%
shape = [(len(p.maps), len(p.decisions))
    for p in passes_of(steps_of(CleanConfig(),
    Recipe([(n, {}) for n in ("repair", "rules", "exact", "near", "passages", "length", "near")])))]
assert shape == [(2, 2), (2, 1)] and passes_of([])[0].signer(1) is None
assert passes_of(steps_of(CleanConfig()))[0].signer(1).bands > 0

# %% [markdown]
# ## A job and its folder
# The identity of a job is made of its inputs (names, sizes and times, or what the object store calls a version), its settings and the version of the package. The result is written under it; unfinished work lies in
# `OUT/work` under the same name and a hash of the code, and is thrown away when another job comes.

# %%
#| export
@dataclass
class Job:
    "A cleaning run: where, from what, how."

    out: Path
    sources: list[Source]
    steps: Steps
    config: CleanConfig
    engine: Engine
    seed: int
    told: dict[str, Any]  # the recipe, as the report tells it
    mark: str = ""
    warnings: list[str] = field(default_factory=list)
    funnel: list[dict[str, Any]] = field(default_factory=list)
    cost: Counter = field(default_factory=Counter)

    @property
    def work(self) -> Path:
        "The folder of unfinished work."
        return self.out / "work"

    def count(self, name: str, n_in: int, n_out: int, removed: dict[str, int]) -> None:
        """A line of the funnel, together with the one before if that has the same name; ValueError if a document is
        unaccounted for.
        """
        if n_in != n_out + sum(removed.values()):
            raise ValueError(
                f"stage {name}: {n_in} in, {n_out} out, {sum(removed.values())} removed: "
                f"{n_in - n_out - sum(removed.values())} unaccounted for")
        if self.funnel and self.funnel[-1]["name"] == name:
            last, removed = self.funnel.pop(), Counter(removed)
            removed.update(last["removed"])  # not a sum of Counters, which drops what is below zero
            n_in = last["in"]
        self.funnel.append({"name": name, "in": n_in, "out": n_out, "removed": dict(sorted(removed.items()))})


def fingerprint(sources: Sequence[Source], facts: Any) -> str:
    "16 hex digits of the inputs and of `facts`."
    files = [(s.path, s.size, s.version) for s in sources]
    return hashlib.sha256(json.dumps([files, facts, scalelab.__version__], default=str,
        sort_keys=True).encode()).hexdigest()[:16]


# %%
job = Job(Path("x"), [], [], CleanConfig(), Engine(), 1, {})
job.count("read", 3, 2, {"bad": 1})
job.count("dedup", 2, 2, {})
job.count("dedup", 2, 1, {"near": 1})
assert job.funnel == [{"name": "read", "in": 3, "out": 2, "removed": {"bad": 1}},
    {"name": "dedup", "in": 2, "out": 1, "removed": {"near": 1}}]
try:
    job.count("rules", 2, 1, {})
except ValueError as error:
    print(error)
else:
    raise AssertionError("a document vanished")

# %%
#| export
def code_hash() -> str:
    "A hash of the data chapter's code: unfinished work of other code is of no use."
    return hashlib.sha256(b"".join(p.read_bytes() for p in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()[:16]


@contextlib.contextmanager
def at_work(out: Path, mark: str) -> Iterator[Path]:
    """The folder of unfinished work, locked; emptied when it is of another job.

    A folder that this call made goes again when the call is refused. Raises UsageError when another process works
    there.
    """
    made, work = not out.exists(), out / "work"
    try:
        work.mkdir(parents=True, exist_ok=True)
        with open(work / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                made = False
                raise UsageError(
                    f"--out {out}: another run is at work there; wait for its end, or give another folder") from None
            job = work / "job.json"
            if not job.exists() or json.loads(job.read_text())["job"] != mark:
                old = [p for p in work.iterdir() if p.name != "lock"]
                if old:
                    print(f"scalelab: {work}: was left by another job (other inputs, settings or code); begun anew",
                        file=sys.stderr)
                for path in old:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                atomic_write(job, json.dumps({"job": mark}))
            _sweep(work)
            try:
                yield work
            finally:
                _sweep(work)  # on a full disk they take the room that the next run needs
    except UsageError:
        if made:
            shutil.rmtree(out, ignore_errors=True)
        raise


# %%
#| export
def _sweep(work: Path) -> None:
    "Remove the files that killed workers left unfinished."
    for path in work.rglob(".*.tmp*"):
        path.unlink(missing_ok=True)


# %%
with tempfile.TemporaryDirectory() as folder:
    out = Path(folder, "out")
    with at_work(out, "one") as work:
        (work / "pass-0").mkdir()
        try:
            with at_work(out, "one"):
                raise AssertionError("two at once")
        except UsageError as error:
            assert "another run" in str(error)
    with at_work(out, "one") as work:
        assert (work / "pass-0").exists()
    with at_work(out, "two") as work:
        assert not (work / "pass-0").exists()
    try:
        with at_work(Path(folder, "new"), "three"):
            raise UsageError("no documents")
    except UsageError:
        assert not Path(folder, "new").exists() and out.exists()

# %% [markdown]
# ## The passes
# Inputs come in all sizes: one dump of a terabyte, or a source tree of a hundred thousand small files. A large file is a task; small ones are put together, for a part has its price. The longest tasks go out first, so that no worker begins the longest one when the others are done.

# %%
#| export
def tasks_of(sources: Sequence[Source], plan: Plan, limit: tuple[int, int] | None = None) -> list[Task]:
    "The tasks of a first pass: runs of files that together have the size of a part, or one larger file."
    tasks: list[Task] = []
    room = 0
    for source in sources:
        if not tasks or source.size > room:
            tasks.append(Task(f"t{len(tasks):07d}", [], plan, limit))
            room = plan.part_bytes
        tasks[-1].sources.append(source)
        room -= source.size
    return tasks


def _blocks(corpus: Corpus, alive: np.ndarray, plan: Plan) -> list[MapTask]:
    "The tasks of a later pass: parts one by one, or in blocks where passages are searched."
    first = plan.stages[0][1] if plan.stages else None
    most = first.block_mb * 2**20 if isinstance(first, Passages) else 0
    tasks: list[MapTask] = []
    room = 0.0
    for part, bits in zip(corpus.parts, corpus.split(alive)):
        if not tasks or part.mark["bytes"] > room:
            tasks.append(MapTask(str(corpus.folder), [], [], plan))
            room = most
        tasks[-1].names.append(part.name)
        tasks[-1].alive.append(np.packbits(bits).tobytes())
        room -= part.mark["bytes"]
    return tasks


# %%
#| export
def _stripping(job: Job, number: int, plan: Plan, before: Corpus, alive: np.ndarray) -> None:
    "Count the lines of what is left, and put the stage that takes templates off in the place of its options."
    label, options = plan.stages[0]
    path, packed = job.work / f"counts-{number}.npz", [np.packbits(a).tobytes() for a in before.split(alive)]
    if not path.exists():
        width, every = count_shape(int(before.column("bytes")[alive].sum()))
        n, names = min(len(packed), 2 * job.engine.workers), [p.name for p in before.parts]
        tasks = [CountTask(str(before.folder), names[k::n], packed[k::n],
            str(job.work / f"counts-{number}-{k}-{n}.npz"), width, every) for k in range(n)]
        counts = LineCounts(width, every)
        for done in job.engine.run(count_task, tasks, lambda task: task.names[0]):
            counts.merge(LineCounts.load(done))
        counts.save(path)
    plan.stages[0] = (label, Strip(options, str(path)))


def run_pass(job: Job, number: int, step: Pass, before: Corpus | None, alive: np.ndarray | None,
        limit: tuple[int, int] | None = None) -> Corpus:
    "Map the inputs, or what is left of the pass before, to the parts of this pass."
    folder = job.work / f"pass-{number}"
    folder.mkdir(exist_ok=True)
    plan = Plan(str(folder), list(step.maps), step.signer(job.seed), seed=job.seed,
        part_bytes=int(job.config.part_mb * 2**20))
    if before is None:
        tasks = sorted(tasks_of(job.sources, plan, limit), key=lambda task: -sum(s.size for s in task.sources))
        total, function, name_of = sum(s.guess for s in job.sources), read_task, lambda task: ", ".join(s.name
            for s in task.sources[:3])
    else:
        if plan.stages and isinstance(plan.stages[0][1], Templates):
            _stripping(job, number, plan, before, alive)
        tasks, total, function, name_of = _blocks(before, alive, plan), sum(p.mark["bytes"]
            for p in before.parts), map_task, lambda task: task.names[0]
    with watching(lambda: len(marked(folder)) * plan.part_bytes, total, f"pass {number + 1}"):
        job.engine.run(function, tasks, name_of)
    return Corpus(folder)


# %%
plan = Plan("x", part_bytes=100)
tasks = tasks_of([Source(i, "", "", "", size) for i, size in enumerate((30, 30, 50, 500, 10, 90, 1))], plan)
assert [[s.size for s in t.sources] for t in tasks] == [[30, 30], [50], [500], [10, 90], [1]]
assert tasks[1].name == "t0000001"

# %% [markdown]
# Each pass is counted from its marks, then each decision. The funnel that comes out is what the report shows first: a line a stage, each beginning where the one before ended.

# %%
#| export
def _count_pass(job: Job, step: Pass, corpus: Corpus, first: bool) -> None:
    marks = [p.mark for p in corpus.parts]
    if first:
        read = sum((Counter(m["read"]) for m in marks), Counter())
        n = read.pop("in", 0)
        job.count("read", n + sum(read.values()), n, read)
    for k, (label, _) in enumerate(step.maps):
        removed: Counter = Counter()
        for m in marks:
            removed.update(m["stages"][k][1])
        n_in = sum(m["stages"][k][0] for m in marks)
        job.count(label, n_in, n_in - sum(removed.values()), removed)
    for m in marks:
        job.cost.update(m["cost"])
        job.warnings += m["warnings"]


def all_passes(job: Job, limit: tuple[int, int] | None) -> tuple[list[Corpus], np.ndarray, list[tuple[int, Gone]]]:
    """Run what is missing of every pass and decision: the corpora, who of the last one is left, and who went by a
    decision.
    """
    corpora: list[Corpus] = []
    gone: list[tuple[int, Gone]] = []
    alive = None
    for number, step in enumerate(passes_of(job.steps)):
        corpora.append(corpus := run_pass(job, number, step, corpora[-1] if corpora else None, alive, limit))
        _count_pass(job, step, corpus, number == 0)
        alive, signer = np.ones(corpus.n, bool), step.signer(job.seed)
        for k, (label, stage) in enumerate(step.decisions):
            begin = time.process_time()
            rows = decide(corpus, alive, stage, signer, job.work / f"pass-{number}-{k}.npy")
            job.cost[stage.name] += time.process_time() - begin
            alive[rows["doc"]] = False
            reason = f"{stage.name}_duplicate"
            gone.append((number, Gone(corpus, label, reason, rows["doc"], rows["of"], rows["jaccard"])))
            job.count(label, int(alive.sum()) + len(rows), int(alive.sum()), {reason: len(rows)} if len(rows) else {})
    return corpora, alive, gone


# %% [markdown]
# A small corpus goes through, twice: the second time nothing is done, and a third time with the last mark taken away only that part is made again.

# %%
room = tempfile.TemporaryDirectory()
texts = [*stdlib_documents(500_000)]
write_documents(f"{room.name}/a.jsonl.zst",
    [*texts, texts[3] | {"id": "twin"}, texts[5] | {"id": "near", "text": texts[5]["text"] + " and so on."}])
sources = [Source(0, f"{room.name}/a.jsonl.zst", "a.jsonl.zst", "a", 10**6)]
config = CleanConfig(part_mb=0.1)


def run():
    job = Job(Path(room.name, "out"), sources, steps_of(config), config, Engine("local", 1), 1, {})
    with at_work(job.out, "job"):
        return job, *all_passes(job, None)


job, (corpus,), alive, gone = run()
assert [s["name"] for s in job.funnel] == ["read", "quality", "dedup"] and job.funnel[0]["in"] == len(texts) + 2
assert job.funnel[-1]["out"] == alive.sum()
assert job.funnel[-1]["removed"]["exact_duplicate"] == 1 and job.funnel[-1]["removed"]["near_duplicate"] >= 1
assert sum(len(g.docs) for _, g in gone) == (~alive).sum()
before = {p: p.stat().st_mtime_ns for p in job.work.rglob("*.part")}
Path(corpus.folder, f"{corpus.parts[-1].name}.json").unlink()
again, *_ = run()
changed = [p.name for p, t in before.items() if p.stat().st_mtime_ns != t]
assert again.funnel == job.funnel and changed == [f"{corpus.parts[-1].name}.part"]

# %% [markdown]
# ## The funnel
# Documents that are left after each stage of that run.

# %%
style()
figure, axes = plt.subplots(figsize=(6, 1.6))
axes.barh([s["name"] for s in job.funnel][::-1], [s["out"] for s in job.funnel][::-1], color=COLORS[0])
axes.set(xlabel="documents left")
plt.show()
room.cleanup()

# %% [markdown]
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | a stage rerun does only what is missing | holds | in this notebook: with one mark taken away one part is written again, and the funnel is the same |
#
# Not covered: several machines without a common folder for the work.
