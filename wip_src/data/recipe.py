# %% [markdown]
# # The recipe
#
# > A cleaning run as one YAML file: stages by name, in order, each with its options, checked before the first byte is read.
#
# Cleaning text is a list of decisions: which rules, at which thresholds, in which order. When they live in code and flags, nobody can say afterwards what was done to the corpus. Here the
# list is a file, the file is copied into the product, and every stage has the same small interface, so that a new one is a class of twenty lines.

# %%
#| default_exp data.recipe

# %%
#| export
from __future__ import annotations

import dataclasses
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from scalelab.core.arguments import recipe_dir
from scalelab.core.config import UsageError, did_you_mean, load_yaml

# %%
#| hide
import pickle
import tempfile

# %% [markdown]
# ## What a stage says about a document
# A stage looks at one document and answers with an `Outcome`: the document, perhaps changed, or `None` with a reason. It also reports the numbers that it looked at, so that the report can draw
# where the threshold lies in the distribution and not only how many fell.

# %%
#| export
@dataclass
class Outcome:
    """What a stage decided about one document.

    Args:
        document: the document as it goes on, the same object or a changed copy; None when it is removed
        reason: why it was removed, in snake_case; the report counts by it
        note: one line of evidence for a person
        values: the statistics that were looked at, by name
    """

    document: dict[str, Any] | None
    reason: str = ""
    note: str = ""
    values: dict[str, float] = field(default_factory=dict)

    def __post_init__(self):
        if self.document is None and not self.reason:
            raise ValueError("a removed document needs a reason")


class DocumentStage(ABC):
    """A stage that judges each document by itself; a dataclass whose fields are the options of the recipe.

    `apply` depends on the document and the options only, so that documents can be judged in any process and in any order.
    A stage is pickled to worker processes; what is costly to build is made at the first call.
    """

    name: ClassVar[str] = ""

    @abstractmethod
    def apply(self, doc: dict[str, Any]) -> Outcome:
        "Judge one document."


# %%
@dataclass
class Shortest(DocumentStage):
    "Removes documents below a length."

    name: ClassVar[str] = "shortest"
    least: int = 3

    def apply(self, doc):
        n = len(doc["text"])
        return Outcome(doc, values={"characters": n}) if n >= self.least else Outcome(None, "short", f"{n} characters", {"characters": n})


stage = pickle.loads(pickle.dumps(Shortest(2)))
assert stage.apply({"text": "ab"}).document and stage.apply({"text": "a"}).reason == "short"
try:
    Outcome(None)
    raise AssertionError("a removal without a reason passed")
except ValueError:
    pass

# %% [markdown]
# ## Names and options
# Modules are named as text and imported when a recipe asks for them: a recipe without toxicity never loads its word lists. Options are checked against the dataclass; a typing error costs one line, not a night.
#
# Some stages must see the whole corpus: duplicates, templates, passages. Their options are dataclasses too, and the pipeline knows how to run them.

# %%
#| export
DOCUMENT_STAGES: dict[str, str] = {
    "extract": "scalelab.data.extract:Extract",
    "repair": "scalelab.data.quality:Repair",
    "language": "scalelab.data.quality:Language",
    "rules": "scalelab.data.quality:Rules",
    "length": "scalelab.data.quality:Length",
    "privacy": "scalelab.data.privacy:Privacy",
    "toxicity": "scalelab.data.toxicity:Toxicity",
    "classifier": "scalelab.data.classifier:Classifier",
    "perplexity": "scalelab.data.perplexity:Perplexity",
    "decontaminate": "scalelab.data.decontaminate:Decontaminate",
}
KEEP_POLICIES = ("longest", "first", "newest", "best")


def _fraction(stage: str, key: str, value: float) -> None:
    if not 0 < value <= 1:
        raise UsageError(f"stages.{stage}.{key}: {value} is outside (0, 1]")


def _one_of(stage: str, key: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise UsageError(f"stages.{stage}.{key}: {value!r} is not one of {', '.join(known)}{did_you_mean(value, known)}")


@dataclass
class Exact:
    """Exact duplicates, after Unicode and white space are normalised.

    Args:
        keep: which of a group stays: longest, first, newest, best (largest `quality`)
    """

    name: ClassVar[str] = "exact"
    keep: str = "longest"

    def __post_init__(self):
        _one_of(self.name, "keep", self.keep, KEEP_POLICIES)


@dataclass
class Near:
    """Near duplicates, every pair verified.

    Args:
        threshold: exact Jaccard similarity of character 5-grams from which two documents say the same
        keep: which of a group stays: longest, first, newest, best (largest `quality`)
        recall: chance that a pair at the threshold is found
        known: folder of a stored index of older documents; what is near to one of them is removed too
    """

    name: ClassVar[str] = "near"
    threshold: float = 0.8
    keep: str = "longest"
    recall: float = 0.999
    known: str = ""

    def __post_init__(self):
        _fraction(self.name, "threshold", self.threshold)
        _fraction(self.name, "recall", self.recall)
        _one_of(self.name, "keep", self.keep, KEEP_POLICIES)


@dataclass
class Templates:
    """Lines that many documents of one source share.

    Args:
        min_documents: a line in so many documents is part of a template
        min_share: and in this share of the documents of its source
        min_left: a document that keeps fewer characters is removed
    """

    name: ClassVar[str] = "templates"
    min_documents: int = 10
    min_share: float = 0.05
    min_left: int = 50

    def __post_init__(self):
        _fraction(self.name, "min_share", self.min_share)
        if self.min_documents < 2 or self.min_left < 0:
            raise UsageError(f"stages.templates: min_documents {self.min_documents} must be at least 2 and min_left {self.min_left} at least 0")


@dataclass
class Passages:
    """Passages that stood in an earlier document.

    Args:
        min_chars: a shared passage of so many characters is cut
        min_left: a document that keeps fewer characters is removed
        block_mb: text that is searched at once, which bounds memory
    """

    name: ClassVar[str] = "passages"
    min_chars: int = 200
    min_left: int = 50
    block_mb: float = 64.0

    def __post_init__(self):
        if self.min_chars < 10 or self.min_left < 0 or self.block_mb <= 0:
            raise UsageError(f"stages.passages: min_chars {self.min_chars} must be at least 10, min_left {self.min_left} at least 0, block_mb {self.block_mb} above 0")


GLOBAL_STAGES: dict[str, type] = {s.name: s for s in (Exact, Near, Templates, Passages)}
STAGES = (*DOCUMENT_STAGES, *GLOBAL_STAGES)

# %%
#| export
def stage_class(name: str, where: str = "stages") -> type:
    "The class behind a stage's name; UsageError with the nearest name for an unknown one."
    if name in GLOBAL_STAGES:
        return GLOBAL_STAGES[name]
    if name not in DOCUMENT_STAGES:
        raise UsageError(f"{where}: there is no stage {name!r}{did_you_mean(str(name), STAGES)}; known: {', '.join(STAGES)}")
    module, cls = DOCUMENT_STAGES[name].split(":")
    return getattr(importlib.import_module(module), cls)


_PLAIN = {"int": int, "float": (int, float), "str": str, "bool": bool}


def build_stage(name: str, options: Mapping[str, Any] | None = None, where: str = "stages"):
    """The stage `name` with `options`.

    Raises UsageError naming the key for an unknown stage or option, a value of the wrong type, or one that the stage refuses.
    """
    cls, options = stage_class(name, where), dict(options or {})
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    for key, value in options.items():
        if key not in fields:
            raise UsageError(f"{where}.{name}: there is no option {key!r}{did_you_mean(str(key), fields)}; options: {', '.join(fields) or 'none'}")
        wanted = _PLAIN.get(str(fields[key].type))
        if wanted and (not isinstance(value, wanted) or isinstance(value, bool) and wanted is not bool):
            raise UsageError(f"{where}.{name}.{key}: expected {fields[key].type}, found {value!r}")
    try:
        return cls(**options)
    except TypeError as error:  # a missing option that has no default
        raise UsageError(f"{where}.{name}: {error}") from error


# %%
def refused(call, *words) -> str:
    "The message of the UsageError that `call` raises; it holds `words`."
    try:
        call()
    except UsageError as error:
        assert all(w in str(error) for w in words), str(error)
        return str(error)
    raise AssertionError("accepted")


assert build_stage("near", {"threshold": 0.9}) == Near(0.9)
print(refused(lambda: build_stage("naer"), "naer", "did you mean 'near'"))
print(refused(lambda: build_stage("near", {"treshold": 0.9}), "treshold", "threshold"))
print(refused(lambda: build_stage("near", {"threshold": "high"}), "expected float", "'high'"))
print(refused(lambda: build_stage("near", {"threshold": 1.5}), "outside"))
print(refused(lambda: build_stage("passages", {"min_chars": True}), "expected int"))

# %% [markdown]
# ## The whole recipe
# `stages` is a list, because order matters: repair before the rules, privacy before anything is stored, exact duplicates before near ones. An entry is a name or a name with options.

# %%
#| export
Stage = Any  # a DocumentStage or one of GLOBAL_STAGES


@dataclass
class Recipe:
    """How a corpus is cleaned.

    Args:
        stages: (name, options) in order
        seed: of everything that draws at random: permutations of MinHash, samples for review
        source: where the recipe was read from, for messages
    """

    stages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    seed: int = 1
    source: str = "recipe"

    def build(self) -> list[Stage]:
        "The stages as objects; UsageError names the entry that can't be used."
        return [build_stage(name, options, f"{self.source}: stages[{i}]") for i, (name, options) in enumerate(self.stages)]

    def to_dict(self) -> dict:
        "As it is written to YAML."
        return {"seed": self.seed, "stages": [{name: options} if options else name for name, options in self.stages]}


def parse_stages(entries: Iterable[Any], where: str) -> list[tuple[str, dict[str, Any]]]:
    "Entries of a YAML list as (name, options); UsageError for one that is neither a name nor a name with options."
    if isinstance(entries, (str, Mapping)):
        raise UsageError(f"{where}: stages must be a list (lines that begin with a dash), found {entries!r}")
    stages = []
    for i, entry in enumerate(entries):
        if isinstance(entry, str):
            entry = {entry: {}}
        if not isinstance(entry, Mapping) or len(entry) != 1 or not isinstance(next(iter(entry.values())), (Mapping, type(None))):
            raise UsageError(f"{where}: stages[{i}] is {entry!r}; expected a name, or a name with its options indented below it")
        ((name, options),) = entry.items()
        stages.append((str(name), dict(options or {})))
    return stages


def load_recipe(path: str | Path) -> Recipe:
    """Read and check a recipe: a YAML file, or the name of one that ships with the package (`scalelab/recipes/data`).

    Raises UsageError for a missing file, an unknown key, stage or option.
    """
    file = Path(path)
    if not file.is_file():
        shipped = sorted(p.stem for p in (recipe_dir() / "data").glob("*.yaml"))
        file = recipe_dir() / "data" / f"{path}.yaml"
        if not file.is_file():
            raise UsageError(f"--recipe {path}: neither a file nor a recipe{did_you_mean(str(path), shipped)}; recipes: {', '.join(shipped) or 'none'}")
    tree = load_yaml(file)
    for key in tree:
        if key not in ("seed", "stages"):
            raise UsageError(f"{file}: unknown key {key!r}{did_you_mean(str(key), ('seed', 'stages'))}; a recipe has seed and stages")
    if isinstance(tree.get("seed", 1), bool) or not isinstance(tree.get("seed", 1), int) or tree.get("seed", 1) < 0:
        raise UsageError(f"{file}: seed is {tree['seed']!r}; expected a whole number from 0")
    recipe = Recipe(parse_stages(tree.get("stages") or [], str(file)), tree.get("seed", 1), str(file))
    recipe.build()
    return recipe


# %%
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "r.yaml"
    file.write_text("seed: 3\nstages:\n  - exact\n  - near:\n      threshold: 0.85\n      keep: newest\n")
    recipe = load_recipe(file)
    assert recipe.build() == [Exact(), Near(0.85, "newest")] and recipe.seed == 3
    assert recipe.to_dict() == {"seed": 3, "stages": ["exact", {"near": {"threshold": 0.85, "keep": "newest"}}]}
    for text, words in {
        "stages:\n  - exakt\n": ["stages[0]", "did you mean 'exact'"], "stages:\n  - exact: 3\n": ["stages[0]", "expected a name"],
        "stages: exact\n": ["must be a list"], "stage: []\n": ["did you mean 'stages'"], "seed: -1\n": ["seed", "-1"],
    }.items():
        file.write_text(text)
        refused(lambda: load_recipe(file), *words)
    refused(lambda: load_recipe("no-such-recipe"), "neither a file nor a recipe")

# %% [markdown]
# ## Verdict
# A recipe is data, not code: it is copied into the product, two of them can be compared with `diff`, and a wrong one is refused before anything is read. It claims nothing that could be
# measured; the stages do, each in its chapter.
