# %% [markdown]
# # One page about a run
#
# > A single self-contained HTML file that shows what a run did: stages, funnel, curves, bits per byte, tensors, samples, findings.
#
# The last two chapters made the parts and the sections; here they become a file. The page reads what stages left behind as JSON and never runs anything. A file that is missing costs its section, and the page says so; a plain `scalelab train`
# run, a folder of `scalelab data clean` and the closed loop get the same page with more or less on it.

# %%
#| default_exp diagnostics.report

# %%
#| export
from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from scalelab.core.config import UsageError, atomic_write
from scalelab.core.runs import Run, decode_numbers
from scalelab.diagnostics.fingerprint import diagnose
from scalelab.diagnostics.page import shell, text
from scalelab.diagnostics.sections import (
    census_section,
    compress_section,
    curves_section,
    domains_section,
    environment_section,
    evaluation_section,
    findings_section,
    funnel_section,
    header,
    lengths_section,
    proof_section,
    ranks_section,
    samples_section,
    stages_section,
    tokens_section,
)

# %%
#| hide
import tempfile

import numpy as np
from IPython.display import SVG, display

from scalelab.diagnostics.findings import synthetic_steps, write_run
from scalelab.diagnostics.page import chart, faults, standalone

# %% [markdown]
# ## What the page reads
# `load` gathers the JSON files that are there. One that can't be parsed is treated like one that is missing, with the reason kept for the page's foot. The logs are
# read through `Run`, which finds them in the directory or in its `train/` folder.
#
# A data folder has one file, `report.json`, whoever wrote it; what it holds says whether documents were cleaned or tokenized there.

# %%
#| export
FILES = {
    "stages": "stages.json",
    "clean": "data/clean/report.json",
    "tokens": "data/tokens/report.json",
    "ranks": "compare_ranks.json",
    "evaluation": "evaluation.json",
    "census": "census.json",
    "compress": "compress.json",
    "proof": "proof.json",
    "resume": "resume.json",
    "samples": "samples.json",
    "findings": "findings.json",
}


def _read_files(root: Path, notes: list[str]) -> dict:
    "A key of `FILES` for each readable JSON file in `root`, in its train/ folder, or for the report.json of a data folder."
    found = {}

    def read(file: Path, name: str):
        "The decoded JSON, or None and a note."
        try:
            return decode_numbers(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, OSError) as error:
            notes.append(f"{name} can't be read: {error}")
            return None

    for key, name in FILES.items():
        file = next((f for f in (root / name, root / "train" / name) if f.is_file()), None)
        if file and (value := read(file, name)) is not None:
            found[key] = value
    if (root / "report.json").is_file():
        value = read(root / "report.json", "report.json")
        key = None
        if isinstance(value, dict):
            key = "clean" if "stages" in value else "tokens" if "bytes_per_token" in value else None
        if key:
            found.setdefault(key, value)
        elif value is not None:
            notes.append("report.json is neither of `scalelab data clean` nor of `scalelab data tokenize`")
    for rejects in ("rejects.jsonl.zst", "data/clean/rejects.jsonl.zst"):
        if (root / rejects).is_file():
            found.setdefault("rejects", rejects)
    return found

# %%
tmp = tempfile.TemporaryDirectory()
root = Path(tmp.name)
(root / "broken").mkdir()
(root / "broken/stages.json").write_text("[{")
(root / "broken/report.json").write_text("[1]")
notes = []
assert _read_files(root / "broken", notes) == {} and "stages.json can't be read" in notes[0] and "neither" in notes[1]

# %% [markdown]
# With the logs, and with a diagnosis when none was stored:

# %%
#| export
def load(run_dir: str | Path) -> dict:
    """What a run directory holds for the page: a key of `FILES` for each readable JSON file (in it, or in its train/ folder); steps, evals, events, config, environment where there are logs;
    `rejects`: the file of removed documents; `notes`: what could not be read. The folders of `scalelab data clean` and `data tokenize` are read as well.
    Raises UsageError when the directory holds nothing at all."""
    root = Path(run_dir)
    if not root.is_dir():
        raise UsageError(f"{run_dir}: no such run directory")
    data: dict = {"name": root.resolve().name, "notes": []}
    data |= _read_files(root, data["notes"])
    try:
        run = Run(root)
    except UsageError:
        run = None
    if run is not None:
        data |= {"steps": run.metrics("step"), "evals": run.metrics("eval"), "events": run.events(), "config": run.config, "environment": run.environment}
        if run.bad_lines.get("metrics.jsonl"):
            data["notes"].append(f"metrics.jsonl: {len(run.bad_lines['metrics.jsonl'])} unreadable lines were passed over")
        if "findings" not in data and data["steps"]:
            data["findings"] = [f.to_dict() for f in diagnose(run)]
    if (root / "train-fault" / "metrics.jsonl").is_file():
        data["fault_steps"] = Run(root / "train-fault").metrics("step")
    if len(data) == 2 and not data["notes"]:
        raise UsageError(
            f"{run_dir}: nothing to report on; expected metrics.jsonl of `scalelab train`, stages.json of `scalelab loop` or report.json of `scalelab data clean`"
        )
    return data

# %%
plain = write_run(root / "plain", synthetic_steps(120), [{"event": "checkpoint", "global_step": 60}])
assert len(load(plain)["steps"]) == 120 and load(plain)["findings"] == [] and "stages.json" in load(root / "broken")["notes"][0]
(root / "void").mkdir()
for bad in ("absent", "void"):
    try:
        load(root / bad)
    except UsageError as error:
        print(str(error).replace(str(root), "…"))
    else:
        raise AssertionError(f"{bad} was accepted")

# %% [markdown]
# ## The page
# The sections in their order, each with a sentence for the reader and the file that it is made of.

# %%
#| export
SECTIONS: list[tuple[str, str, str, Callable[[dict], str]]] = [
    ("Stages", "What ran, whether it held, and how long it took.", "stages.json", stages_section),
    (
        "Funnel", "Documents left after each step; open a rule to see two of the documents it removed. Orange bars are scaled to the rule that removed most.",
        "data/clean/report.json", funnel_section,
    ),
    ("Domains", "What is left, by domain.", "data/clean/report.json", domains_section),
    ("Lengths", "How long the documents are: from a low quantile to the longest, the tick is the median.", "data/clean/report.json", lengths_section),
    ("Tokens", "What tokenizing made of it, on both sides of the split.", "data/tokens/report.json", tokens_section),
    ("Curves", "The training run, step by step.", "metrics.jsonl", curves_section),
    ("Bits per byte", "Held-out text, by domain, beside two compressors that never learned anything. Lower is better.", "evaluation.json", evaluation_section),
    ("Diagnosis", "Found from the logs alone. Confidence is 0.5 where a detector begins to speak.", "findings.json", findings_section),
    ("One rank, two ranks", "The same steps on one process and on two. Differences are rounding, or a bug.", "compare_ranks.json", ranks_section),
    ("Samples", "The prompt in colour, what the model made of it after.", "samples.json", samples_section),
    ("Compression", "The same model, smaller.", "compress.json", compress_section),
    ("Proofs", "What was checked, and what came out.", "proof.json", proof_section),
    ("Tensor census", "Shape, type and range of what flows through each stage; black is the mean, the thin line zero.", "census.json", census_section),
    ("Environment", "What this ran on and with.", "environment.json", environment_section),
]

# %% [markdown]
# A section whose file has an unexpected form must not cost the whole page, so each is built on its own, and what went wrong is said at the foot. A data folder is not blamed for the curves and samples that it can't have.

# %%
#| export
_FORM = (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError)  # what a file of another form raises
_DATA = ("Funnel", "Domains", "Lengths", "Tokens")


def render(data: dict) -> str:
    "The whole page for what `load` returned."
    parts, absent = [], list(data["notes"])
    only_data = not ({"steps", "stages"} & data.keys()) and bool({"clean", "tokens"} & data.keys())
    for title, lead, source, build in SECTIONS:
        try:
            body = build(data)
        except _FORM as error:  # costs its section only
            absent.append(f"{title}: {source} has not the expected form ({type(error).__name__}: {error})")
            continue
        if body:
            name = re.sub("[^a-z]+", "-", title.lower())
            parts.append(f'<section id="{name}"><h2>{text(title)}</h2><p class="lead">{text(lead)}</p>{body}</section>')
        elif not only_data:
            absent.append(f"{title}: no {source} in this run")
        elif title in _DATA and ("clean" if title != "Tokens" else "tokens") in data:
            absent.append(f"{title}: not in the report.json of this folder")
    try:
        head = header(data)
    except _FORM:  # the tiles want well-formed files, the name does not
        head = header({"name": data["name"]})
    foot = f"<footer>Left out: <ul>{''.join(f'<li>{text(a)}</li>' for a in absent)}</ul></footer>" if absent else ""
    return shell(f"{data['name']} · scalelab", f"{head}{''.join(parts)}{foot}")


def write_report(run_dir: str | Path) -> Path:
    "Write `run_dir`/report.html, one self-contained file, and return its path. Raises UsageError when there is nothing to report on."
    path = Path(run_dir) / "report.html"
    atomic_write(path, render(load(run_dir)))
    return path

# %%
def titles(page):
    return re.findall(r"<h2>(.*?)</h2>", page)

page = write_report(plain).read_text(encoding="utf-8")
assert titles(page) == ["Curves", "Diagnosis", "Environment"] and faults(page) == [] and "Funnel: no data/clean/report.json in this run" in page

# %% [markdown]
# A plain training run has a page: header, curves, diagnosis, environment. How large does it get when the run was long? Thinned paths keep it in bounds:

# %%
long = write_run(root / "long", synthetic_steps(6_000))
size = len(write_report(long).read_text(encoding="utf-8")) / 1000
print(f"120 steps: {len(page) / 1000:.0f} kB, 6,000 steps: {size:.0f} kB")
assert size < 600

# %% [markdown]
# ## A data folder
# `scalelab data clean --out DIR` leaves `report.json`, the rejects and the documents. Its page shows the funnel with examples, the domains, the lengths, and the warnings of the reader:

# %%
#| hide
def dump(root, name, value):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def stage(name, n_in, n_out, **removed):
    return {"name": name, "in": n_in, "out": n_out, "removed": removed}


def lengths(low, mid, high, top):
    return {"q0.05": low, "q0.5": mid, "q0.95": high, "q0.995": top, "max": top}


CLEAN = {
    "fingerprint": "0", "documents": 1031, "bytes": 7_412_000, "repaired": 3, "warnings": ["page.html.gz: breaks off after 12 kB"], "notes": {"byte order mark": 2}, "recipe": {"near_threshold": 0.8},
    "stages": [stage("read", 1210, 1204, bad_json=4, bad_utf8=2), stage("quality", 1204, 1121, too_short=48, mojibake=9, repeated_lines=15, boilerplate=11),
               stage("dedup", 1121, 1031, exact_duplicate=31, near_duplicate=59)],
    "examples": {"mojibake": [{"id": "zh-031", "snippet": "è¿™æ˜¯ä¸€æ®µ 乱码"}, {"id": "zh-044", "snippet": "ï¿½ï¿½ï¿½ 锟斤拷锟斤拷"}],
                 "too_short": [{"id": "en-7", "snippet": "ok"}, {"id": "x", "snippet": "<script>document.title='owned'</script>"}]},
    "domains": {"code": {"documents": 420, "bytes": 4_100_000, "languages": {"code": 1.0}, "length": lengths(310, 4_200, 31_000, 88_000)},
                "<zh>": {"documents": 611, "bytes": 3_312_000, "languages": {"zh": 0.9, "en": 0.1}, "length": lengths(40, 620, 9_000, 20_100)}},
    "length_limits": {"code": {"limit": 80_000, "n": 420, "enough": True}, "<zh>": {"limit": 20_100, "n": 611, "enough": False}},
}
TOKENS = {
    "fingerprint": "0", "vocab_size": 4096, "tokens": {"train": {"code": 1_400_000, "<zh>": 700_000}, "valid": {"code": 120_000, "<zh>": 80_000}}, "bytes_per_token": {"code": 2.7, "<zh>": 4.2},
    "valid_half_width": {"code": 0.03, "<zh>": None}, "leaks": [], "seq_len": 256, "documents": {"train": 960, "valid": 71}, "warnings": [],
    "waste": {"padding": 0.31, "packing": 0.001, "by_mode": {m: {"padding": p, "rows": 9_000, "slots": 1, "pieces_per_row": 1.0} for m, p in (("pad", 0.31), ("concat", 0.001), ("best_fit", 0.004))}},
}

# %%
dump(root, "clean/report.json", CLEAN)
(root / "clean/rejects.jsonl.zst").write_bytes(b"")
page = write_report(root / "clean").read_text(encoding="utf-8")
print(titles(page))
assert titles(page) == ["Funnel", "Domains", "Lengths"] and faults(page) == [] and "Left out" not in page
assert all(s in page for s in ("1,031 documents cleaned", "documents kept of 1,210", "zh-031", "breaks off after 12 kB", "rejects.jsonl.zst", "&lt;zh&gt;", "<td class=\"r\">80,000</td>"))

# %% [markdown]
# A folder of `scalelab data tokenize` shows the tokens. And an older `report.json` without domains has the funnel and a line about the rest.

# %%
dump(root, "tokens/report.json", TOKENS)
page = write_report(root / "tokens").read_text(encoding="utf-8")
assert titles(page) == ["Tokens"] and faults(page) == [] and "2.1 M training tokens" in page and "31.0%" in page and "Left out" not in page
dump(root, "older/report.json", {"stages": CLEAN["stages"]})
page = write_report(root / "older").read_text(encoding="utf-8")
assert titles(page) == ["Funnel"] and "Lengths: not in the report.json of this folder" in page and faults(page) == []

# %% [markdown]
# ## Everything at once
# A made-up closed loop with everything in it, some of it hostile: a document with a script, a run name with markup, Chinese, code, a NaN. (Numbers are invented; the
# hidden cell that writes them is long because a loop leaves a lot behind.)

# %%
#| hide
STAGES = [
    ("read", 1.9, "1,204 documents, 7.9 MB, 6 domains"), ("clean", 9.4, "1,031 kept, 173 removed"), ("tokenize", 4.2, "4,096 tokens, 2.9 bytes a token"),
    ("shard", 1.8, "2.1 M + 0.2 M tokens, 0 pairs across"), ("train", 71.3, "loss 8.33 to 3.71, data 31x ahead"), ("ranks", 38.0, "20 steps within 3e-07"),
    ("evaluate", 12.5, "2.46 bits per byte, unigram 4.83"), ("resume", 41.2, "killed at 57, bit-identical"), ("diagnose", 22.4, "bad batch named at step 60"),
    ("compress", 6.1, "2.3x smaller, 1.4x faster"), ("export", 8.8, "logits within 2e-06"), ("generate", 3.3, "3 prompts, 412 tokens/s"),
]
CENSUS = [
    ("batch", "input_ids", [16, 256], "int64", 0, 811.2, 4095), ("batch", "labels", [16, 256], "int64", -100, 809.9, 4095), ("batch", "position_ids", [16, 256], "int64", 0, 61.3, 255),
    ("forward", "embedding", [16, 256, 128], "float32", -0.081, 1e-5, 0.079), ("forward", "blocks.0", [16, 256, 128], "float32", -1.9, 0.01, 2.2),
    ("forward", "logits", [16, 256, 4096], "float32", -11.2, -3.3, 14.8), ("gradient", "embedding.weight", [4096, 128], "float32", -0.031, 1e-8, 0.027),
]
HOT = dict(temperature=0.8, top_k=50, top_p=0.95, seed=0)
LEFT = {
    "stages.json": [dict(name=n, ok=True, seconds=t, summary=s, detail={"documents": 1204, "bytes": 7_900_123} if i < 2 else None) for i, (n, t, s) in enumerate(STAGES)],
    "data/clean/report.json": CLEAN, "data/tokens/report.json": TOKENS,
    "evaluation.json": {"overall": dict(bytes=812_000, model=2.461, unigram=4.83, xz=2.512), "note": "xz -9 compresses the text of a domain as one file.", "domains": {
        "code": dict(bytes=412_000, model=1.93, unigram=4.71, xz=1.88), "docs": dict(bytes=210_000, model=2.40, unigram=4.52, xz=2.61),
        "prose": dict(bytes=96_000, model=2.71, unigram=4.38, xz=3.02), "zh": dict(bytes=94_000, model=3.42, unigram=5.91, xz=3.75)}},
    "census.json": [dict(zip(("stage", "name", "shape", "dtype", "min", "mean", "max"), row)) for row in CENSUS],
    "compress.json": {"what": "dynamic int8 of the linear layers", "paid": True, "verdict": "2.3 times smaller and 1.4 times faster for 0.004 bits per byte", "rows": [
        dict(name="size on disk", unit="bytes", before=5_140_000, after=2_230_000, better="lower"), dict(name="generation", unit="tokens/s", before=412.0, after=577.0, better="higher"),
        dict(name="held out", unit="bits per byte", before=2.461, after=2.465, better="lower")]},
    "proof.json": {"format": "hf", "max_abs_logit_difference": 2.1e-6, "tolerance": 1e-5, "greedy_tokens_equal": True, "ok": True, "files": {"model.safetensors": 5_140_112, "config.json": 712}},
    "resume.json": {"killed_at_step": 57, "resumed_from_step": 40, "tensors": 38, "bit_identical": True, "ok": True},
    "samples.json": [
        dict(prompt="今天天气", text="很好，我们一起去公园散步。路边的花开了，孩子们在草地上放风筝。", language="zh", settings=HOT, tokens_per_second=401.2),
        dict(prompt="The library is open", text=" from nine in the morning. <script>alert(1)</script>", language="en", settings=HOT, tokens_per_second=418.9),
        dict(prompt="def mean(values):\n", text='    """The mean."""\n    return sum(values) / len(values)\n', language="code", settings=HOT, tokens_per_second=415.0)],
}


def invented_loop(root):
    rng = np.random.default_rng(0)
    differ = {name: [0.0, *np.abs(e * 1.12 ** np.arange(39) * rng.normal(1, 0.5, 39)).tolist()] for name, e in (("fp32", 1e-8), ("fp64", 4e-16))}
    runs = {name: dict(steps=list(range(40)), difference=d, compared=20, largest=max(d[:20]), holds=True) for name, d in differ.items()}
    for name, value in (LEFT | {"compare_ranks.json": {"tolerances": {"fp32": 1e-5, "fp64": 1e-9}, "runs": runs}}).items():
        dump(root, name, value)
    steps, fault = synthetic_steps(300), synthetic_steps(100)
    for s in steps:
        s["loss_by_domain"] = {d: s["loss"] * f * float(rng.normal(1, 0.02)) for d, f in (("code", 0.82), ("docs", 0.95), ("prose", 1.05), ("zh", 1.17))}
    evals = [dict(schema=1, kind="eval", attempt=0, global_step=s, loss=steps[s - 1]["loss"] * 1.03, bits_per_byte=2.5) for s in range(25, 301, 25)]
    events = [dict(event="start", global_step=0, reason="fresh"), dict(event="resume", global_step=150, reason="killed at 157"), dict(event="finish", global_step=300)]
    write_run(root / "train", steps + evals, events, {"python": "3.11.2", "torch": "2.13.0", "threads": 2, "git": {"commit": "0123456789abcdef", "diff": "--- a\n+++ b\n<b>"}})
    (root / "train/config.yaml").write_text("model:\n  d_model: 128\n  n_layers: 4\n")
    fault[59]["loss"] *= 1.7
    fault[59]["grad_norm"] *= 4
    write_run(root / "train-fault", fault)
    dump(root, "findings.json", {"planted": {"kind": "bad_batch", "step": 60}, "findings": [f.to_dict() for f in diagnose(root / "train-fault")]})
    return root

# %%
path = write_report(invented_loop(root / "loop"))
page = path.read_text(encoding="utf-8")
print(f"{len(page) // 1000} kB, sections: {', '.join(titles(page))}")
assert titles(page) == [title for title, *_ in SECTIONS] and "Left out" not in page and path.name == "report.html"
assert faults(page) == [] and page.count("&lt;script&gt;") >= 2 and "found as planted" in page

# %% [markdown]
# Names of folders, events and environments are as hostile as documents:

# %%
evil = write_run(root / "<img src=x onerror=alert(1)>", synthetic_steps(40), [{"event": "<script>", "global_step": 3, "reason": "</table><script>"}], {"a": "</dl><script>"})
assert faults(write_report(evil).read_text(encoding="utf-8")) == []

# %% [markdown]
# Every file in turn is removed, then every file in turn is replaced by nonsense of the wrong form: each time there is a page, with a line at its foot. (The run is cut to its first steps here: what is tested is the form of the other files.)

# %%
whole = load(root / "loop")
whole |= {"steps": whole["steps"][:12], "evals": [], "fault_steps": whole["fault_steps"][:12]}
for key in FILES:
    page = render({k: v for k, v in whole.items() if k != key})
    assert faults(page) == [], key
    assert page.count("<section") >= 11, key
assert "Funnel: no data/clean/report.json in this run" in render({k: v for k, v in whole.items() if k != "clean"})
for i, key in enumerate(FILES):
    for nonsense in (({"stages": 3, "rows": 3, "domains": 3, "runs": 3, "findings": 3, "tokens": 3}, 7), ([1, 2], "text"))[i % 2]:
        page = render(whole | {key: nonsense})
        assert faults(page) == [] and page.count("<section") >= 11, (key, nonsense)
assert "Funnel: data/clean/report.json has not the expected form" in render(whole | {"clean": {"stages": 3}})

# %% [markdown]
# What does a page of everything weigh, and which sections? Charts are the heavy part; the rest is text.

# %%
page = path.read_text(encoding="utf-8")
weights = [len(part) / 1000 for part in page.split("<section")[1:]]
for title, kb in sorted(zip(titles(page), weights), key=lambda row: -row[1])[:4]:
    print(f"{title:20} {kb:5.0f} kB")
cut = chart([{"name": "kilobytes", "x": range(1, len(weights) + 1), "y": weights, "kind": "dots"}], height=200, x_label="section, in order", y_label="kB of HTML", zero=True)
display(SVG(standalone(cut)))
assert sum(weights) < 400

# %% [markdown]
# What to see: one peak, the curves with their six charts; all other sections together weigh less than half of them.

# %%
#| hide
tmp.cleanup()

# %% [markdown]
# ## Verdict
# | question | answer | measured |
# |---|---|---|
# | can a document of the corpus run in the page? | no | text is escaped everywhere, a policy in the head forbids scripts, and the judge finds none in a page full of hostile strings |
# | does it need a network? | no | nothing is fetched: no links, fonts, pictures or scripts |
# | does a missing or malformed file cost the page? | no | each of the 11 files removed, and replaced by two kinds of nonsense |
# | does a data folder have a page? | yes | the funnel with examples, domains, lengths and warnings of `data clean`; tokens, padding and leaks of `data tokenize` |
#
# Not here: curves of several runs in one picture, zooming, and tensors over time (the census is one snapshot). The look in a browser is checked in the tests of the site.
