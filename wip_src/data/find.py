# %% [markdown]
# # Where does this come from?
#
# > `scalelab data find TEXT`: where a string stands in the corpus, so that an output can be traced back to what was read.
#
# A model says something odd, and somebody asks where it read that. The index of the last chapter answers; this one keeps it up to date and prints.

# %%
#| default_exp data.find

# %%
#| export
from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from scalelab.core.arguments import parse_config
from scalelab.core.config import UsageError
from scalelab.core.console import JSON, answer
from scalelab.data.documents import Rejects, find_files
from scalelab.data.stores import is_url
from scalelab.data.text_index import TextIndex, build_index, scan

# %%
#| hide
import contextlib
import io
import json
import tempfile

from scalelab.data.documents import write_documents

# %% [markdown]
# ## The command
# `scalelab data find TEXT --in FILES` reads everything; with `--index DIR` it looks there, and builds or renews the index first when that is needed.


# %%
#| export
def open_index(folder: str, inputs: Sequence[str], rejects: Rejects) -> TextIndex:
    "The index in `folder`, built anew when there is none, when it is of other inputs, or when a file changed since."
    if not (Path(folder) / "index.json").is_file():
        if not inputs:
            raise UsageError(f"--index {folder}: there is no index yet; give the documents with --in to build it")
        build_index(inputs, folder, rejects=rejects)
        return TextIndex(folder)
    index = TextIndex(folder)
    named = [str(Path(i).resolve()) if not is_url(i) else i for i in inputs]
    changed = (
        f"made of {', '.join(index.about['inputs'])}" if named and named != index.about["inputs"] else index.changed()
    )
    if not changed:
        return index
    try:
        find_files(inputs or index.about["inputs"])
    except UsageError as error:
        print(f"scalelab: --index {folder} may be out of date: {error}", file=sys.stderr)
        return index
    print(f"scalelab: --index {folder} is built again: {changed} changed", file=sys.stderr)
    build_index(inputs or index.about["inputs"], folder, rejects=rejects)
    return TextIndex(folder)


# %%
#| export
def find_command(argv: list[str]) -> int:
    "scalelab data find TEXT [--in FILES...] [--index DIR]"
    flags = JSON | {
        "text": {"type": str, "help": "the string, exactly as it stands in the documents (several lines are fine)"},
        "--in": {"nargs": "+", "type": str, "default": [], "help": "files, folders or globs of documents"},
        "--index": {
            "type": str,
            "default": None,
            "help": "folder of an index; built when it is not there or out of date",
        },
        "--first": {"type": int, "default": 20, "help": "occurrences to show"},
        "--context": {"type": int, "default": 40, "help": "characters to show on both sides"},
    }
    _, given = parse_config(None, argv, "scalelab data find", "Where does a string stand in the corpus?", flags)
    text, inputs = given["text"], given["in"]
    if not text:
        raise UsageError("data find: TEXT is empty and would be found everywhere; give at least one character")
    if not inputs and not given["index"]:
        raise UsageError("data find: nothing to search in; give documents with --in, an index with --index, or both")
    if given["first"] < 0 or given["context"] < 0:
        raise UsageError(f"data find: --first {given['first']} and --context {given['context']} must be 0 or more")
    rejects = Rejects()
    if given["index"]:
        found = open_index(given["index"], inputs, rejects).find(text, given["first"], given["context"])
    else:
        found = scan(inputs, text, given["first"], given["context"], rejects)
    for warning in rejects.warnings:
        print(f"scalelab: {warning}", file=sys.stderr)
    lines = [
        f"{o.file}: {o.id}, character {o.offset}, line {o.line}: {_plain(o.before)}[{_plain(text)}]{_plain(o.after)}"
        for o in found.shown
    ]
    more = f", the first {len(found.shown)} shown" if found.count > len(found.shown) else ""
    answer(asdict(found), given["json"], [*lines, f"{found.count:,} occurrences{more}"])
    return 0


def _plain(text: str) -> str:
    "One line, without control characters that a terminal would obey."
    return "".join(c if c.isprintable() else {"\n": "\u23ce", "\t": " "}.get(c, "\u00b7") for c in text)


# %%
def refused(call, *words):
    try:
        call()
    except UsageError as error:
        assert all(w in str(error) for w in words), str(error)
        return
    raise AssertionError("accepted")


def command(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert find_command(list(words)) == 0
    return out.getvalue(), err.getvalue()


folder = tempfile.TemporaryDirectory()
corpus, store = Path(folder.name) / "corpus", Path(folder.name) / "index"
corpus.mkdir()
write_documents(corpus / "a.jsonl", [{"id": "story", "text": "北冥有鱼，其名为鲲。\n鲲之大，不知其几千里也。"}])
print(command("鲲", "--in", str(corpus), "--context", "5")[0].replace(folder.name, ""))
found = [
    json.loads(command("鲲", "--json", *where)[0])
    for where in (["--in", str(corpus)], ["--index", str(store), "--in", str(corpus)], ["--index", str(store)])
]
assert found[0]["count"] == 2 and found[0]["shown"] == found[1]["shown"] == found[2]["shown"]
write_documents(corpus / "a.jsonl", [{"id": "story", "text": "鲲鲲鲲"}])
out, err = command("鲲", "--index", str(store))
assert "3 occurrences" in out and "built again" in err
refused(lambda: find_command(["", "--in", str(corpus)]), "empty")
refused(lambda: find_command(["x"]), "--in", "--index")
refused(lambda: find_command(["x", "--index", str(store) + "2"]), "no index yet")
folder.cleanup()

# %% [markdown]
# ## Verdict
# | question | verdict | measured |
# |---|---|---|
# | an index follows its documents | holds | built when it is missing, again when a file changed; used with a warning when the files are gone |
#
# What this does not cover: patterns, and documents that a recipe changed after the index was built (build it from what the model was trained on).
