# %% [markdown]
# # The command line
#
# > One program, `scalelab`, with a command for each arrow of the house; every command checks its words before it touches anything.
#
# The notebooks explain, the package computes, and this chapter gives an operator the handles. Names are stable, results go to stdout and messages to stderr, `--json` prints one object, and the exit code says what
# happened: 0 done, 1 it ran and found something wrong, 2 the call can't be used, 130 stopped by Ctrl-C.

# %%
#| default_exp cli

# %%
#| export
from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scalelab.core.arguments import parse_config, run_main
from scalelab.core.config import CheckFailed, UsageError, did_you_mean, human_bytes
from scalelab.core.console import JSON, answer, inputs_flag, table

# %%
#| hide
import contextlib
import glob
import io
import subprocess
import matplotlib.pyplot as plt
from scalelab.core.plotting import COLORS, style

# %%
#| export
AT = {"--at": {"type": str, "default": "best", "help": "which checkpoint of a run: best, latest, or a step"}}

# %% [markdown]
# ## Data
# `clean`, `tokenize`, `inspect`.

# %%
#| export
def data_clean(argv: list[str]) -> int:
    "scalelab data clean INPUT... --out DIR"
    from scalelab.data.pipeline import CleanConfig, clean
    from scalelab.diagnostics.report import write_report

    flags = inputs_flag("files, folders or globs of JSONL(.gz/.zst), Parquet, CSV, text or code") | JSON | {
        "--out": {"type": str, "required": True, "help": "folder for documents/, rejects.jsonl.zst, report.json, report.html"},
        "--engine": {"type": str, "default": "local", "help": "local; ray is not built yet"}}
    argv = ["--config" + w[len("--recipe"):] if w.startswith("--recipe") else w for w in argv]
    config, given = parse_config(CleanConfig, argv, "scalelab data clean", "Read, judge, remove duplicates, and account for every document. --recipe FILE is --config FILE.", flags)
    if given["engine"] != "local":
        raise UsageError(f"--engine {given['engine']}: not built yet; use --engine local with --workers N")
    report = clean(given["inputs"], given["out"], config)
    page = write_report(given["out"])
    for warning in report["warnings"]:
        print(f"scalelab: {warning}", file=sys.stderr)
    rows = [{"stage": s["name"], "in": s["in"], "out": s["out"], "removed": ", ".join(f"{k} {v}" for k, v in s["removed"].items())} for s in report["stages"]]
    answer(report, given["json"], [table(rows), f"{given['out']}: {report['documents']:,} documents, {human_bytes(report['bytes'])}; {page} shows what went and why"])
    return 0


def data_tokenize(argv: list[str]) -> int:
    "scalelab data tokenize INPUT... --out DIR"
    from scalelab.data.pipeline import TokenizeConfig, tokenize
    from scalelab.diagnostics.report import write_report

    flags = inputs_flag("cleaned documents") | JSON | {
        "--out": {"type": str, "required": True, "help": "folder for tokenizer.json and shards/{train,valid}"},
        "--tokenizer": {"type": str, "default": None, "help": "existing tokenizer.json instead of training one"}}
    config, given = parse_config(TokenizeConfig, argv, "scalelab data tokenize", "Split by near-duplicate cluster, train a tokenizer on the training side, write shards.", flags)
    report = tokenize(given["inputs"], given["out"], config, given["tokenizer"])
    write_report(given["out"])
    for warning in report["warnings"]:
        print(f"scalelab: {warning}", file=sys.stderr)
    rows = [{"domain": d, "train tokens": report["tokens"]["train"].get(d, 0), "valid tokens": report["tokens"]["valid"].get(d, 0), "bytes per token": report["bytes_per_token"][d]} for d in report["bytes_per_token"]]
    answer(report, given["json"], [table(rows), f"{given['out']}: vocabulary {report['vocab_size']:,}, padding {report['waste']['packing']:.2%} of the slots, {len(report['leaks'])} near-duplicates across the split"])
    return 1 if report["leaks"] else 0


def data_inspect(argv: list[str]) -> int:
    "scalelab data inspect INPUT..."
    from scalelab.core.config import progress
    from scalelab.data.documents import Rejects, read_documents
    from scalelab.data.shards import Shards
    from scalelab.data.statistics import summarize

    flags = inputs_flag("documents, or folders of shards") | JSON | {"--html": {"type": str, "default": None, "help": "also write a page"}}
    _, given = parse_config(None, argv, "scalelab data inspect", "What is in these documents or shards?", flags)
    folders = [p for p in given["inputs"] if (Path(p) / "index.json").is_file()]
    if folders:
        if len(folders) < len(given["inputs"]):
            raise UsageError(f"data inspect: give shards or documents, not both ({folders[0]} holds shards)")
        rows = [{"shards": f, "domain": d, **t} for f in folders for d, t in Shards(f).totals.items()]
        result = {"shards": {f: {"totals": Shards(f, verify=False).totals, "index": {k: v for k, v in Shards(f, verify=False).index.items() if k != "shards"}} for f in folders}}
    else:
        rejects = Rejects()
        summary = summarize(progress(read_documents(given["inputs"], rejects), desc="read", unit="doc"))
        rows = summary.rows()
        result = summary.to_dict() | {"rejected": dict(rejects.counts), "notes": dict(rejects.notes), "warnings": rejects.warnings}
        for warning in rejects.warnings:
            print(f"scalelab: {warning}", file=sys.stderr)
        if rejects.total:
            print(f"scalelab: {rejects.total} rejected: {', '.join(f'{k} {v}' for k, v in rejects.counts.items())}", file=sys.stderr)
    if given["html"]:
        import html

        from scalelab.core.config import atomic_write

        atomic_write(given["html"], f"<!doctype html><meta charset=utf-8><title>scalelab inspect</title><pre>{html.escape(table(rows))}</pre>")
    answer(result, given["json"], [table(rows)])
    return 0


# %% [markdown]
# ## Which model?
# `RUN`, a checkpoint, an int8 folder or a HF folder: each command that reads a model takes them all.

# %%
#| export
def trained_as(place: str, at: str = "best") -> dict:
    "The resolved configuration that the checkpoint behind `place` was trained with; {} for a model from elsewhere."
    from scalelab.trainer.checkpoint import read_manifest, resolve

    if (Path(place) / "config.json").exists() or (Path(place) / "model.safetensors").exists():
        return {}
    return read_manifest(resolve(place, at)).get("config", {})


def free_folder(out: str, source: str, made_by: Callable[[dict], bool], mark: str) -> None:
    """UsageError unless `out` may be replaced: it is absent, empty, or holds an earlier output of the same command.

    made_by: judges the JSON file `mark` in it. The source, or a folder that holds it, is never replaced.
    """
    place, origin = Path(out).resolve(), Path(source).resolve()
    if place == origin or place in origin.parents:
        raise UsageError(f"--out {out}: is the source itself or a folder around it; give another folder")
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return
    try:
        ours = made_by(json.loads((place / mark).read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError):
        ours = False
    if not ours:
        raise UsageError(f"--out {out}: holds files that this command did not make and would replace; give an empty or a new folder")


def need_tokenizer(path, place: str):
    "The tokenizer of a model; UsageError if it has none."
    from scalelab.data.tokenizer import TextTokenizer

    if path is None:
        raise UsageError(f"{place}: has no tokenizer.json beside the model; train on shards made by `scalelab data tokenize`")
    return TextTokenizer.load(path)


# %%
#| export
def _held_out(config: dict, data: list[str], tokenizer_path, place: str, folder: str):
    "Shards to evaluate on: texts given, tokenized into `folder`, or the run's own held-out shards."
    from scalelab.data.documents import Rejects, read_documents
    from scalelab.data.shards import Shards, ShardWriter

    if not data:
        valid = config.get("data", {}).get("valid")
        if not valid:
            raise UsageError(f"{place}: names no held-out shards; give texts with --data")
        return Shards(valid)
    tokenizer, rejects = need_tokenizer(tokenizer_path, place), Rejects()
    docs = sorted((d for d in read_documents(data, rejects) if d["text"]), key=lambda d: str(d.get("domain")))
    if not docs:
        raise UsageError(f"--data {' '.join(map(str, data))}: no documents in it{'; ' + rejects.warnings[0] if rejects.warnings else ''}")
    with ShardWriter(Path(folder) / "shards", tokenizer.hash, tokenizer.vocab_size, tokenizer.eot_id) as writer:
        for doc in docs:
            writer.add(tokenizer.encode(doc["text"]), len(doc["text"].encode("utf-8", "replace")), str(doc.get("domain") or "unknown"))
    return Shards(Path(folder) / "shards")


def evaluate_command(argv: list[str]) -> int:
    "scalelab evaluate RUN|CHECKPOINT [--data INPUT...]"
    from scalelab.deploy.export import open_model
    from scalelab.trainer.evaluation import evaluate

    flags = {"model": {"type": str, "help": "run, checkpoint, int8 or HF folder"}} | AT | JSON | {
        "--data": {"nargs": "+", "type": str, "default": [], "help": "texts to evaluate on; by default the run's held-out shards"}}
    _, given = parse_config(None, argv, "scalelab evaluate", "Bits per byte by domain.", flags)
    model, tokenizer = open_model(given["model"], given["at"])
    config = trained_as(given["model"], given["at"])
    with tempfile.TemporaryDirectory() as folder:
        shards = _held_out(config, given["data"], tokenizer, given["model"], folder)
        if shards.vocab_size > model.cfg.vocab_size:
            raise UsageError(f"{given['model']}: its vocabulary has {model.cfg.vocab_size} tokens, the shards were made with {shards.vocab_size}; evaluate on texts with --data")
        result = evaluate(model, shards, config.get("data", {}).get("seq_len") or model.cfg.max_seq_len)
    rows = [{"domain": d, "bits per byte": v, "nats per token": result["loss_by_domain"][d]} for d, v in result["bits_per_byte_by_domain"].items()]
    answer(result, given["json"], [table([*rows, {"domain": "all", "bits per byte": result["bits_per_byte"], "nats per token": result["loss"]}])])
    return 0


# %% [markdown]
# ## Looking, shrinking, handing over

# %%
#| export
def diagnose_command(argv: list[str]) -> int:
    "scalelab diagnose RUN"
    from scalelab.core.runs import Run
    from scalelab.diagnostics.fingerprint import diagnose

    _, given = parse_config(None, argv, "scalelab diagnose", "Named faults with evidence, from the run directory alone. Exit code 1 if any.", {"run": {"type": str, "help": "run directory"}} | JSON)
    findings = [f.to_dict() for f in diagnose(Run(given["run"]))]
    lines = [f"{f['kind']} at step {f['step']} (confidence {f['confidence']:.2f})\n  evidence: {', '.join(f'{k} {v}' for k, v in f['evidence'].items())}\n  advice: {f['advice']}" for f in findings]
    answer({"run": given["run"], "findings": findings}, given["json"], lines or [f"{given['run']}: nothing found"])
    return 1 if findings else 0


def report_command(argv: list[str]) -> int:
    "scalelab report RUN"
    from scalelab.diagnostics.report import write_report

    _, given = parse_config(None, argv, "scalelab report", "Write RUN/report.html, one file that needs no network.", {"run": {"type": str, "help": "run directory"}} | JSON)
    if not Path(given["run"]).is_dir():
        raise UsageError(f"{given['run']}: no such run directory")
    path = write_report(given["run"])
    answer({"report": str(path)}, given["json"], [str(path)])
    return 0


def quantize_command(argv: list[str]) -> int:
    "scalelab compress quantize RUN|CHECKPOINT --out DIR"
    import numpy as np

    from scalelab.compression.quantize import benchmark, compare, quantize_model, save_quantized, verdict
    from scalelab.data.stream import Stream
    from scalelab.deploy.export import open_model

    flags = {"model": {"type": str, "help": "run or checkpoint"}} | AT | JSON | {
        "--out": {"type": str, "required": True, "help": "folder of the int8 model"},
        "--data": {"nargs": "+", "type": str, "default": [], "help": "texts to compare on; by default the run's held-out shards"}}
    _, given = parse_config(None, argv, "scalelab compress quantize", "int8 linear layers, with what it costs.", flags)
    model, tokenizer = open_model(given["model"], given["at"])
    config = trained_as(given["model"], given["at"])
    if hasattr(model, "quantization"):
        raise UsageError(f"{given['model']}: is quantised already")
    free_folder(given["out"], given["model"], lambda m: m.get("kind") == "int8-dynamic", "manifest.json")
    small = quantize_model(model)
    with tempfile.TemporaryDirectory() as folder:
        shards = _held_out(config, given["data"], tokenizer, given["model"], folder)
        stream = Stream(shards, min(config.get("data", {}).get("seq_len") or 10**9, model.cfg.max_seq_len), mode="best_fit")
        quality = compare(model, small, [stream.gather(np.arange(i, min(i + 8, stream.n_rows))) for i in range(0, stream.n_rows, 8)])
    speed = benchmark(model, small)
    result = {**quality, "speed": speed, **verdict(quality, speed)}
    save_quantized(given["out"], small, tokenizer, result)
    rows = [{"what": k, "value": v} for k, v in result.items() if isinstance(v, (int, float)) and not isinstance(v, bool)] + [{"what": f"{k} speed, after / before", "value": speed[k]} for k in ("scoring", "decoding")]
    answer(result, given["json"], [table(rows), f"{'paid' if result['paid'] else 'did not pay'}: {result['reason']}"])
    return 0


# %%
#| export
def export_command(argv: list[str]) -> int:
    "scalelab export RUN|CHECKPOINT --format hf --out DIR"
    from scalelab.deploy.export import export_hf
    from scalelab.trainer.checkpoint import resolve

    flags = {"model": {"type": str, "help": "run or checkpoint"}} | AT | JSON | {
        "--format": {"type": str, "default": "hf", "help": "hf; onnx and gguf are not built yet"}, "--out": {"type": str, "required": True, "help": "folder for the model and proof.json"}}
    _, given = parse_config(None, argv, "scalelab export", "A directory for other programs, with the proof that it is the same model.", flags)
    if given["format"] != "hf":
        known = "not built yet" if given["format"] in ("onnx", "gguf") else "unknown"
        raise UsageError(f"--format {given['format']}: {known}; use --format hf")
    free_folder(given["out"], given["model"], lambda p: p.get("format") == 1 and "greedy_tokens_equal" in p, "proof.json")
    proof = export_hf(resolve(given["model"], given["at"]), given["out"])
    answer(proof, given["json"], [table([{"proof": k, "value": v} for k, v in proof.items() if not isinstance(v, (dict, list))])])
    return 0 if proof["ok"] else 1


def generate_command(argv: list[str]) -> int:
    "scalelab generate RUN|CHECKPOINT|HF_DIR --prompt TEXT"
    import time

    from scalelab.deploy.export import open_model
    from scalelab.model.generate import generate

    flags = {"model": {"type": str, "help": "run, checkpoint, int8 or HF folder"}} | AT | JSON | {
        "--prompt": {"type": str, "default": "", "help": "text to continue"}, "--max_new_tokens": {"type": int, "default": 100, "help": "most tokens to add"},
        "--temperature": {"type": float, "default": 0.8, "help": "0 takes the likeliest token"}, "--top_k": {"type": int, "default": 50, "help": "sample among so many tokens"},
        "--top_p": {"type": float, "default": 0.95, "help": "sample among the likeliest with this probability"}, "--seed": {"type": int, "default": 0, "help": "of the sampling"}}
    _, given = parse_config(None, argv, "scalelab generate", "Continue a text.", flags)
    if given["max_new_tokens"] < 1:
        raise UsageError(f"--max_new_tokens {given['max_new_tokens']}: must be at least 1")
    model, path = open_model(given["model"], given["at"])
    tokenizer = need_tokenizer(path, given["model"])
    settings = {k: given[k] for k in ("temperature", "top_k", "top_p", "seed")}
    begin = time.perf_counter()
    new = generate(model, [tokenizer.eot_id, *tokenizer.encode(given["prompt"]).tolist()], given["max_new_tokens"], eot_id=tokenizer.eot_id, greedy=settings["temperature"] == 0, **settings)
    seconds = time.perf_counter() - begin
    text = tokenizer.decode(new)
    print(f"scalelab: {len(new)} tokens, {len(new) / seconds:.0f} a second, {settings}", file=sys.stderr)
    answer({"prompt": given["prompt"], "text": text, "settings": settings, "tokens": len(new), "tokens_per_second": len(new) / seconds}, given["json"], [given["prompt"] + text])
    return 0


# %% [markdown]
# ## The loop, and measurements

# %%
#| export
@dataclass
class LoopWords:
    """The closed loop.

    Args:
        limit_mb: stop reading after this many megabytes of text
        vocab_size: of the tokenizer
        steps: updates of each training
        recipe: configuration of the model and the training
        require_export: fail when transformers is not installed instead of skipping the proof of the export
    """

    limit_mb: float = 3.2
    vocab_size: int = 4096
    steps: int = 120
    recipe: str = "loop"
    require_export: bool = False


def loop_command(argv: list[str]) -> int:
    "scalelab loop [--data PATH...] [--run DIR]"
    from scalelab.core.arguments import find_config
    from scalelab.lab.loop import run_loop, stage_table
    from scalelab.lab.stages import Loop

    flags = JSON | {"--data": {"nargs": "+", "type": str, "default": [], "help": "files, folders or globs; by default the samples and the Python standard library"},
                    "--run": {"type": str, "default": "runs/loop", "help": "folder of the loop"}}
    words, given = parse_config(LoopWords, argv, "scalelab loop", "Raw text to a trained, diagnosed, compressed, exported model.", flags)
    for key, low in (("limit_mb", 0.05), ("vocab_size", 257), ("steps", 20)):
        if getattr(words, key) < low:
            raise UsageError(f"{key}: {getattr(words, key)} must be at least {low}")
    find_config(words.recipe)
    loop = Loop(Path(given["run"]), given["data"], words.limit_mb, words.vocab_size, words.steps, words.recipe, words.require_export)
    if given["data"]:
        from scalelab.data.documents import find_files

        find_files(given["data"])  # a path that is not there is refused before anything is written
    result = run_loop(loop, lambda text: print(f"scalelab: {text}", file=sys.stderr, flush=True))
    if given["json"]:
        answer(result, True, [])
    else:
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 140).print(stage_table(result["stages"]))
        print(f"{'all stages held' if result['ok'] else 'some stages failed'} in {result['seconds']:.0f} s, peak memory {human_bytes(result['peak_bytes'])}; open {result['report']}")
    return 0 if result["ok"] else 1


def bench_command(argv: list[str]) -> int:
    "scalelab bench NAME [--quick] [--out FILE]"
    from scalelab.core.config import atomic_write
    from scalelab.lab.bench import BENCHES, run_bench

    flags = {"name": {"type": str, "nargs": "?", "default": None, "help": f"one of {', '.join(BENCHES)}; without it the list"}} | JSON | {
        "--quick": {"action": "store_true", "help": "smaller work, the same rows, within a minute"}, "--data": {"type": str, "default": None, "help": "folder of texts, where a bench can use one"},
        "--out": {"type": str, "default": None, "help": "also write the rows to this JSON file"}}
    _, given = parse_config(None, argv, "scalelab bench", "Measurements side by side, with targets. Exit code 1 if a target does not hold.", flags)
    if given["name"] is None:
        rows = [{"name": k, "what it measures": what, "needs": needs or "nothing"} for k, (_, what, needs) in BENCHES.items()]
        answer({"benches": rows}, given["json"], [table(rows)])
        return 0
    rows = run_bench(given["name"], given["quick"], given["data"])
    if given["out"]:
        atomic_write(given["out"], json.dumps({"command": f"scalelab bench {given['name']}{' --quick' if given['quick'] else ''}{' --data DIR' if given['data'] else ''}", "rows": rows}, ensure_ascii=False, indent=1))
    answer({"name": given["name"], "rows": rows}, given["json"], [table(rows)])
    return 0 if all(r["holds"] for r in rows) else 1


# %% [markdown]
# ## The program
# Words pick a command; a wrong word gets its nearest neighbour. Nothing heavy is imported before the command is known, so `scalelab --help` answers at once.

# %%
#| export
def _claims(argv: list[str]) -> int:
    from scalelab.lab.claims import claims_command

    return claims_command(argv)


def _train(argv: list[str]) -> int:
    from scalelab.trainer.loop import train_command

    return train_command(argv)


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "loop": (loop_command, "the closed loop: raw text to an exported model, a few minutes"),
    "data clean": (data_clean, "read, judge, deduplicate, account for every document"),
    "data tokenize": (data_tokenize, "split, train a tokenizer, write shards"),
    "data inspect": (data_inspect, "statistics of documents or shards"),
    "train": (_train, "train on shards, alone or under torchrun"),
    "evaluate": (evaluate_command, "bits per byte by domain"),
    "diagnose": (diagnose_command, "named faults with evidence, from a run directory"),
    "compress quantize": (quantize_command, "int8 linear layers, with what it costs"),
    "export": (export_command, "a HF directory, with the proof that it is the same model"),
    "generate": (generate_command, "continue a text"),
    "report": (report_command, "one HTML page of a run"),
    "claims": (_claims, "what the sources claim and what experiments said"),
    "bench": (bench_command, "measurements side by side, with targets"),
}
LATER = ("compare", "doctor", "derive", "plan", "compress prune", "compress distill", "data review", "data find")


def usage() -> str:
    "The list of commands."
    from scalelab import __version__

    lines = [f"scalelab {__version__}: train language models well on a limited budget", "", "usage: scalelab COMMAND [words] [--key VALUE ...]", ""]
    lines += [f"  {name:18} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join([*lines, "", "scalelab COMMAND --help shows every word of a command with its default. --json: one JSON object; --debug: tracebacks.", "exit codes: 0 done, 1 found something wrong, 2 unusable call, 130 stopped"])


def find_command(argv: list[str]) -> tuple[str, list[str]]:
    "The command's name and its own words. UsageError for an unknown one, with the nearest."
    for n in (2, 1):
        name = " ".join(argv[:n])
        if name in COMMANDS:
            return name, argv[n:]
    word = " ".join(w for w in argv[:2] if not w.startswith("-"))
    for n in (2, 1):
        if " ".join(argv[:n]) in LATER:
            raise UsageError(f"{' '.join(argv[:n])}: not built yet; `scalelab --help` lists what is")
    inside = [c for c in COMMANDS if c.startswith(f"{argv[0]} ")]
    if inside:
        raise UsageError(f"{word}: {argv[0]} needs one of {', '.join(c.split()[1] for c in inside)}{did_you_mean(word, inside)}")
    raise UsageError(f"{argv[0]}: unknown command{did_you_mean(argv[0], [c.split()[0] for c in COMMANDS])}; known: {', '.join(COMMANDS)}")


def main(argv: list[str] | None = None) -> int:
    "Entry of the program `scalelab`; the exit code."
    argv = list(sys.argv[1:] if argv is None else argv)
    # Before torch is loaded: threads that wait for each other sleep instead of spinning, which on a shared machine can cost ten times the work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not argv or argv[0] in ("-h", "--help", "help"):
        return run_main(lambda: print(usage()))
    if argv[0] in ("--version", "version"):
        from scalelab import __version__

        print(__version__)
        return 0

    def command() -> int:
        name, words = find_command(argv)
        return COMMANDS[name][0](words)

    return run_main(command, debug="--debug" in argv)


# %%
print(usage())

# %% [markdown]
# What happens to wrong words, one call each; every answer is one line with a way out:

# %%
def call(*words):
    "Exit code, stdout, stderr of a call in this process."
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(words))
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()

for words in (["trian"], ["data", "tokenise"], ["data"], ["plan"], ["train", "--model.d_modell", "3"], ["generate", "no/such/run", "--prompt", "x"], ["export", "x", "--format", "gguf", "--out", "y"],
              ["diagnose", "no/such/run"], ["bench", "dta-dedup"], ["data", "clean", "no/such/file", "--out", "nowhere"], ["loop", "--steps", "3"]):
    code, out, err = call(*words)
    assert code == 2 and out == "" and err.count("\n") == 1, (words, code, out, err)
    print(err.strip()[:150])
assert not Path("nowhere").exists()

# %% [markdown]
# ## Text in, model out
# The commands in their order, on the samples, small enough for a notebook. `--json` is what scripts read.

# %%
TMP = tempfile.TemporaryDirectory()
HERE = Path(TMP.name)
code, out, err = call("data", "clean", *sorted(glob.glob("../data_samples/*.jsonl")), "--out", str(HERE / "clean"), "--json")
report = json.loads(out)
assert code == 0 and all(s["in"] == s["out"] + sum(s["removed"].values()) for s in report["stages"]) and (HERE / "clean" / "report.html").exists()
code, out, err = call("data", "tokenize", str(HERE / "clean" / "documents"), "--out", str(HERE / "tokens"), "--vocab_size", "512", "--seq_len", "64")
assert code == 0
print(out.replace(str(HERE), "…"))

# %%
small = ["--model.d_model", "32", "--model.n_layers", "2", "--model.n_heads", "2", "--model.n_kv_heads", "2", "--model.d_ff", "64", "--model.max_seq_len", "64", "--data.seq_len", "64",
         "--trainer.steps", "24", "--trainer.eval_every", "12", "--trainer.checkpoint_every", "12", "--schedule.warmup_steps", "4", "--trainer.device", "cpu", "--optim.lr", "0.01"]
code, out, err = call("train", "--run", str(HERE / "run"), "--data.train", str(HERE / "tokens/shards/train"), "--data.valid", str(HERE / "tokens/shards/valid"), *small)
assert code == 0, err
code, out, err = call("evaluate", str(HERE / "run"), "--json")
by_shards = json.loads(out)
assert code == 0 and 0 < by_shards["bits_per_byte"] < 8
code, out, err = call("evaluate", str(HERE / "run"), "--data", "../data_samples/dialogue.jsonl")
assert code == 0 and "dialogue" in out

# %%
code, out, err = call("generate", str(HERE / "run"), "--prompt", "今天", "--max_new_tokens", "8", "--json")
assert code == 0 and json.loads(out)["tokens"] <= 8
code, out, err = call("compress", "quantize", str(HERE / "run"), "--out", str(HERE / "int8"), "--json")
quality = json.loads(out)
assert code == 0 and quality["bytes_after"] < quality["bytes_before"] and quality["top1_agreement"] > 0.8
code, out, err = call("evaluate", str(HERE / "int8"), "--data", "../data_samples/dialogue.jsonl", "--json")
assert code == 0
code, out, err = call("export", str(HERE / "run"), "--out", str(HERE / "hf"), "--json")
assert code == 0 and json.loads(out)["ok"], err
for words in (("export", str(HERE / "run"), "--out", str(HERE / "clean")), ("export", str(HERE / "run"), "--out", str(HERE / "run")), ("compress", "quantize", str(HERE / "run"), "--out", str(HERE / "tokens"))):
    code, out, err = call(*words)
    assert code == 2 and "--out" in err, err  # a folder with other people's work, the run itself, its own shards
assert (HERE / "run" / "metrics.jsonl").exists() and (HERE / "tokens" / "tokenizer.json").exists()
assert call("export", str(HERE / "run"), "--out", str(HERE / "hf"))[0] == 0  # its own earlier output may be replaced
code, out, err = call("generate", str(HERE / "hf"), "--prompt", "今天", "--max_new_tokens", "8", "--temperature", "0")
assert code == 0 and out.startswith("今天")

# %%
code, out, err = call("diagnose", str(HERE / "run"), "--json")
assert code in (0, 1) and isinstance(json.loads(out)["findings"], list)
code, out, err = call("report", str(HERE / "run"))
assert code == 0 and (HERE / "run" / "report.html").stat().st_size > 5000
code, out, err = call("data", "inspect", "../data_samples/code.jsonl")
print(out)

# %% [markdown]
# ## How the held-out text fares
# Twenty-four steps are not much, but enough to see which domain is hardest for a tiny model.

# %%
style()
fig, ax = plt.subplots(figsize=(5, 2.2))
values = by_shards["bits_per_byte_by_domain"]
ax.bar(list(values), list(values.values()), color=COLORS[0])
ax.axhline(8, color="k", lw=0.8, ls="--")
ax.set(ylabel="bits per byte (dashed: no model)")
plt.show()
print({k: round(v, 2) for k, v in values.items()})

# %% [markdown]
# What to see: after so few steps the model knows little but frequencies, and the bars are near each other. (The values are printed, since bars this alike are hard to read.)
#
# ## Verdict
# | question | answer |
# |---|---|
# | can a wrong word start something? | no: eleven wrong calls above end with code 2, one line, and nothing written |
# | is `torchrun -m scalelab.trainer.loop` another program than `scalelab train`? | no: both are the same function |

# %%
#| hide
TMP.cleanup()
