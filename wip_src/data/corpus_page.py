# %% [markdown]
# # A page to look at before training
#
# > The statistics of a corpus as a table, as JSON, and as one HTML page with the pictures that a person would ask for.
#
# Five pictures: where the bytes are, how long documents are, what script they are in, from which years, and what each
# vocabulary costs. They are drawn as SVG inside one file that needs no network, readable by day and by night.

# %%
#| default_exp data.corpus_page

# %%
#| export
from __future__ import annotations

import html
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from scalelab.core.arguments import parse_config
from scalelab.core.config import UsageError, atomic_write, progress
from scalelab.core.console import JSON, answer, inputs_flag, table
from scalelab.data.corpus import Inspection, Vocabulary, label_noise
from scalelab.data.documents import Rejects, read_documents
from scalelab.data.shards import Shards
from scalelab.data.statistics import Summary

# %%
#| hide
import contextlib
import io
import json
import tempfile

from IPython.display import SVG, display

from scalelab.data.tokenizer import train_tokenizer

# %% [markdown]
# ## The pictures
# %%
#| export
def _bars(ax, names: list[str], series: dict[str, list[float]], label: str) -> None:
    "Horizontal bars, one group a name; the first name on top."
    place, height = np.arange(len(names))[::-1], 0.8 / max(len(series), 1)
    for i, (name, values) in enumerate(series.items()):
        ax.barh(place + 0.4 - height * (i + 0.5), values, height, label=name)
    ax.set_yticks(place, names)
    ax.set(xlabel=label)
    ax.grid(False, axis="y")
    if len(series) > 1:
        ax.legend(fontsize=8)


def _lengths(ax, summary: Summary, names: list[str]) -> None:
    q = np.linspace(0, 1, 80)
    for name in names:
        ax.plot([max(summary.domains[name].length.quantile(x), 1) for x in q], q, label=name)
    ax.set(xscale="log", xlabel="document length (characters)", ylabel="share of documents up to it")
    ax.legend(fontsize=8)


def _scripts(ax, parts: dict[str, dict], names: list[str]) -> None:
    place, base = np.arange(len(names))[::-1], np.zeros(len(names))
    for script in parts[names[0]]["scripts"]:
        share = np.array([parts[name]["scripts"][script] for name in names])
        ax.barh(place, share, left=base, label=script)
        base += share
    ax.set_yticks(place, names)
    ax.set(xlabel="share of characters", xlim=(0, 1))
    ax.grid(False, axis="y")
    ax.legend(fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))


def _years(ax, summary: Summary) -> None:
    years = {int(y): n for y, n in summary.total().years.items() if y.lstrip("-").isdecimal()}
    first, last = min(years), max(years)
    width = max(1, -(-(last - first + 1) // 60))
    bins = np.arange(first, last + width + 1, width)
    ax.hist(list(years), bins=bins, weights=list(years.values()))
    ax.set(xlabel=f"year ({width} to a bar)", ylabel="documents")


# %%
#| export
def corpus_figures(inspection: Inspection, most: int = 12) -> dict[str, str]:
    "Inline SVG pictures by caption, of the `most` domains with most bytes; what the documents don't say is left out."
    import matplotlib.pyplot as plt

    from scalelab.core.plotting import figure_svg, style

    style()
    summary, tokens = inspection.domains()
    parts = summary.to_dict()["domains"]
    names = list(parts)[:most]
    drawn: dict[str, str] = {}

    def picture(caption: str, draw: Callable[[Any], None], height: float) -> None:
        fig, ax = plt.subplots(figsize=(6.4, height))
        draw(ax)
        drawn[caption] = figure_svg(fig)

    if not names:
        return drawn
    tall, shown = 0.9 + 0.28 * len(names), dict.fromkeys(names)
    sizes = {"bytes": [parts[name]["bytes"] / 1e6 for name in names]}
    picture("Where the text is", lambda ax: _bars(ax, names, sizes, "megabytes of UTF-8"), tall)
    picture("How long documents are", lambda ax: _lengths(ax, summary, names), 3.2)
    picture("What the text is written in", lambda ax: _scripts(ax, parts, names), tall + 0.6)
    if any(part["years"] for part in parts.values()):
        picture("From which years", lambda ax: _years(ax, summary), 2.6)
    kinds = {"fertility": "tokens a word or Chinese character", "fragments": "share of tokens that are fragments"}
    for key, label in kinds.items():
        series = {
            v.name: [tokens[name][v.name].to_dict()[key] if v.name in tokens.get(name, {}) else 0.0 for name in shown]
            for v in inspection.vocabularies}
        if series:
            height = tall + 0.2 * len(series)
            picture(f"Vocabularies: {label}", lambda ax, s=series, t=label: _bars(ax, names, s, t), height)
    return drawn

# %%
#| export
_PAGE_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fff; --line: #ccc; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --paper: #1a1b1e; --line: #444; }
  figure svg { filter: invert(1) hue-rotate(180deg); }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); }
body { max-width: 60rem; margin: auto; padding: 1rem; }
table { border-collapse: collapse; font-size: .9rem; display: block; overflow-x: auto; }
td, th { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: right; }
td:first-child, th:first-child { text-align: left; }
figure { margin: 1.5rem 0; } figure svg { max-width: 100%; height: auto; }
"""


def corpus_page(inputs: list[str], tables: dict[str, list[dict]], figures: dict[str, str], notes: list[str]) -> str:
    "One HTML page without outside parts: tables of rows by title, pictures by caption, notes."

    def cell(value: Any) -> str:
        text = f"{value:,.3g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
        return f"<td>{html.escape(text)}</td>"

    body = [f"<h1>What is in these documents</h1><p>{html.escape(', '.join(inputs))}</p>"]
    body += [f"<p>{html.escape(note)}</p>" for note in notes]
    for title, rows in tables.items():
        columns = list(dict.fromkeys(key for row in rows for key in row))
        head = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
        lines = "".join("<tr>" + "".join(cell(row.get(c, "")) for c in columns) + "</tr>" for row in rows)
        body.append(f"<h2>{html.escape(title)}</h2><table><tr>{head}</tr>{lines}</table>")
    body += [f"<figure><figcaption>{html.escape(t)}</figcaption>{svg}</figure>" for t, svg in figures.items()]
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>scalelab inspect</title>'
            f'<meta name="viewport" content="width=device-width"><style>{_PAGE_STYLE}</style></head>'
            f"<body>{''.join(body)}</body></html>\n").encode("utf-8", "replace").decode("utf-8")

# %%
work = tempfile.TemporaryDirectory()
samples = [str(p) for p in sorted(Path("../../data_samples").glob("*.jsonl"))]
corpus = list(read_documents(samples))
files = []
for name, chosen in (("english", [d for d in corpus if d["lang"] != "zh"]), ("both", corpus)):
    files.append(Path(work.name) / f"{name}.json")
    train_tokenizer([d["text"] for d in chosen], 1000).save(files[-1])
whole = Inspection(map(Vocabulary, files))
for doc in corpus:
    whole.add(doc)
figures = corpus_figures(whole)
display(SVG(figures["What the text is written in"]))
print(list(figures))
assert all(svg.startswith("<svg") for svg in figures.values()) and len(figures) == 6
assert corpus_figures(Inspection()) == {}
page = corpus_page(["a<b"], {"T": [{"domain": "x<y", "n": 1234, "s": 0.5}]}, figures, ["a note"])
assert "x&lt;y" in page and "1,234" in page and "http" not in page.replace("http://www.w3.org", "")

# %% [markdown]
# ## The command
# `scalelab data inspect INPUT... [--tokenizer FILE...] [--html FILE]`. Folders of shards are named by their totals,
# as they were.

# %%
#| export
def _shard_rows(folders: list[str]) -> tuple[dict, list[dict]]:
    rows, result = [], {}
    for folder in folders:
        shards = Shards(folder)
        rows += [{"shards": folder, "domain": d, **t} for d, t in shards.totals.items()]
        index = {k: v for k, v in shards.index.items() if k != "shards"}
        result[folder] = {"totals": shards.totals, "index": index}
    return {"shards": result}, rows


def token_rows(told: dict[str, Any]) -> list[dict]:
    "A row for each language and vocabulary: what a table shows."
    keys = ("tokens", "fertility", "bytes_per_token", "entropy_bits", "used", "fragments", "oov")
    return [
        {"language": lang, "vocabulary": name} | {k: "none" if counts[k] is None else counts[k] for k in keys}
        for lang, part in (told["languages"] | {"all": told["total"]}).items()
        for name, counts in part.get("tokens", {}).items()]

# %%
#| export
def inspect_command(argv: list[str], judge: Callable[[list[str]], list[str]] | None = None) -> int:
    """scalelab data inspect INPUT...

    judge: a second opinion on the labels of the documents (column `label`); without one label noise is not measured.
    """
    flags = inputs_flag("documents, or folders of shards") | JSON | {
        "--html": {"type": str, "default": None, "help": "also write a page"},
        "--tokenizer": {"nargs": "+", "type": str, "default": [], "help": "tokenizer.json files to compare"},
        "--token_every": {"type": int, "default": 1, "help": "tokenize one document in so many"}}
    _, given = parse_config(None, argv, "scalelab data inspect", "What is in these documents or shards?", flags)
    inputs = given["inputs"]
    folders = [p for p in inputs if (Path(p) / "index.json").is_file()]
    if folders and len(folders) < len(inputs):
        raise UsageError(f"data inspect: give shards or documents, not both ({folders[0]} holds shards)")
    if given["token_every"] < 1:
        raise UsageError(f"data inspect: --token_every {given['token_every']} must be at least 1")
    figures, notes = {}, []
    if folders:
        result, rows = _shard_rows(folders)
        tables = {"Shards": rows}
    else:
        result, tables, figures, notes = _inspect(inputs, given, judge)
    if given["html"]:
        atomic_write(given["html"], corpus_page(inputs, tables, figures, notes))
    shown = [table(rows, title if len(tables) > 1 else "") for title, rows in tables.items()]
    answer(result, given["json"], [*shown, *notes])
    return 0

# %%
#| export
def _inspect(
    inputs: list[str], given: dict, judge: Callable | None
) -> tuple[dict, dict[str, list[dict]], dict[str, str], list[str]]:
    "(result, tables, figures, notes) of documents; problems go to stderr."
    inspection, rejects = Inspection(map(Vocabulary, given["tokenizer"]), given["token_every"]), Rejects()
    for doc in progress(read_documents(inputs, rejects), desc="read", unit="doc"):
        inspection.add(doc)
    noise = label_noise(read_documents(inputs), judge) if judge else None
    told = {"rejected": dict(rejects.counts), "notes": dict(rejects.notes), "warnings": rejects.warnings}
    result = inspection.to_dict() | {"label_noise": noise} | told
    for warning in rejects.warnings:
        print(f"scalelab: {warning}", file=sys.stderr)
    if rejects.total:
        told = ", ".join(f"{k} {v}" for k, v in rejects.counts.items())
        print(f"scalelab: {rejects.total} rejected: {told}", file=sys.stderr)
    tables = {"By domain": inspection.domains()[0].rows()}
    if given["tokenizer"]:
        tables["By language and vocabulary"] = token_rows(result)
    notes = ["label noise: not measured (it needs a second opinion: a classifier given as a function)"]
    if noise:
        notes = [f"labels: {noise['share']:.1%} disagree with a second opinion on {noise['n']} documents"
                 f" (95%: {noise['low']:.1%} to {noise['high']:.1%})"]
    figures = corpus_figures(inspection) if given["html"] else {}
    return result, tables, figures, notes if given["html"] or noise else []

# %%
page = Path(work.name) / "page.html"
words = ["--tokenizer", str(files[0]), str(files[1]), "--html", str(page), "--json"]
with contextlib.redirect_stdout(io.StringIO()) as out:
    inspect_command([*samples, *words], judge=lambda texts: texts)
told = json.loads(out.getvalue())
assert told["total"]["documents"] == 185 and set(told["domains"]["legal"]["tokens"]) == {"english.json", "both.json"}
assert told["label_noise"]["n"] == 0 and told["rejected"] == {} and "legal" in page.read_text(encoding="utf-8")
for wrong in (["--tokenizer", samples[0]], ["--token_every", "0"]):
    try:
        inspect_command([samples[0], *wrong])
        raise AssertionError(f"{wrong} was accepted")
    except UsageError as error:
        print(str(error)[:90])
work.cleanup()

# %% [markdown]
# ## Verdict
# The page shows what the chapter before it measures, and claims nothing of its own.
