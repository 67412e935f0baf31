# %% [markdown]
# # scalelab
#
# **A laboratory for training language models well on a limited budget, written as a book that runs.**
#
# Every chapter is a notebook: it explains one part of the craft, tries it on real text, tests it, draws what it found, and exports the code that the full training then uses. You can read it as a book, `import scalelab` in a
# script, or run the command line on a cluster. It is the same code.
#
# ![The page that the closed loop writes: stages, funnel, curves, bits per byte, samples](../docs/images/report.png)
#
# ## Try it
#
# With Python 3.11 or newer and `make`, from a fresh clone:
#
# ```
# make demo     # raw text to a trained, diagnosed, compressed, exported model, on two CPU cores
# make test     # everything that can fail
# make help     # the other targets
# ```
#
# `make demo` makes `.venv`, installs what it needs, and walks the *closed loop*: it reads the samples of this repository and the Python standard library's own sources and help texts (`make demo DATA="my/texts/*.jsonl.zst"` for
# yours), cleans them with an account of every document it leaves out, trains a tokenizer, writes shards, trains a small decoder on one process and again on two, kills a run and resumes it to the same bits,
# finds a planted bad batch from the logs alone, squeezes the model into int8, exports it, and proves that `transformers` computes the same logits. At the end stand a table of stages and `runs/loop/report.html`, the page above.
# (On Linux, `make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu` takes the small CPU build of torch.)
#
# ## What a run of it showed

# %%
#| echo: false
import json
from pathlib import Path

rows = json.loads(Path("10_lab/results/loop_stages.json").read_text(encoding="utf-8"))
for r in rows:
    print(f"{'pass' if r['ok'] else 'skip' if r['ok'] is None else 'FAIL'} {r['seconds']:6.1f} s  {r['name']:20} {r['summary']}")
print(f"     {sum(r['seconds'] for r in rows):6.1f} s  in all")

# %%
#| hide
assert len(rows) == 11 and all(r["ok"] is not False for r in rows)

# %% [markdown]
# ## Three ways in
#
# **As a reader**: open `nbs/` in JupyterLab (`make lab`), or build the book (`make docs`, then open `_docs/index.html`).
#
# **As an engineer**: each chapter is a module. Near-duplicates, for example, are never guessed; every pair is verified by its exact similarity:

# %%
from scalelab.data.dedup import find_duplicates

rain = "The rain stopped before noon, and by two o'clock the stones of the square were dry again, except where the shade of the town hall lay."
docs = [{"id": "a", "text": rain}, {"id": "b", "text": rain.replace("noon", "dawn")}, {"id": "c", "text": "A recipe for bread needs four things and patience."}]
for d in find_duplicates(docs).removed:
    print(f"{d.id} is a {d.kind} duplicate of {d.of}: Jaccard {d.jaccard:.3f}")

# %% [markdown]
# Whether a configuration is what it is called can be told before a GPU is booked. The second of the two articles that this laboratory tests calls 24 layers of width 2048 a model of three billion parameters:

# %%
from scalelab.model.transformer import ModelConfig, parameters_by_formula

shape = ModelConfig(vocab_size=32_000, d_model=2048, n_layers=24, n_heads=16, n_kv_heads=16, d_ff=0, max_seq_len=2048, tie_embeddings=False)
print(f"{parameters_by_formula(shape)['total'] / 1e9:.2f} billion parameters")

# %%
#| hide
assert 1.3e9 < parameters_by_formula(shape)["total"] < 1.4e9
assert [d.id for d in find_duplicates(docs).removed] == ["b"]

# %% [markdown]
# **As an operator**: one program with a command for each step, typed configuration, and errors of one line.
#
# ```
# scalelab data clean my/texts --out clean               # what went, by which rule, with examples
# scalelab data tokenize clean/documents --out tokens    # split without leaks, tokenizer, shards
# scalelab train --config gpu24 --run runs/a --data.train tokens/shards/train --data.valid tokens/shards/valid
# torchrun --nproc-per-node 4 -m scalelab.trainer.loop --config gpu24x4 --run_dir runs/b --data.train tokens/shards/train
# scalelab train --config node8 --dry_run                # parameters, tokens, memory per rank
# scalelab evaluate runs/a                               # bits per byte by domain
# scalelab diagnose runs/a                               # named faults with their evidence
# scalelab compress quantize runs/a --out small
# scalelab export runs/a --format hf --out model         # with the proof that it is the same model
# ```
#
# A run that is stopped, killed or moved is gone on with by the same command. It ends with the same bits on the same number of ranks, and with the same data in the same order on any other number.
#
# ## The rooms
#
# | room | chapters |
# |---|---|
# | `core` | configuration and atomic files, the run directory, environment, plots, arguments |
# | `data` | reading broken files without losing good lines, statistics, quality rules for Chinese, English and code, verified deduplication, tokenizer, shards, the order of samples, the pipeline |
# | `model` | a decoder in the Llama layout, HF's layout, generation |
# | `precision` | number formats bit by bit, policies, memory to the byte |
# | `distributed` | ranks that compute what one would |
# | `trainer` | optimizer, schedule, checkpoints, planted faults, evaluation, settings, the loop |
# | `diagnostics` | faults named from logs alone, the report page |
# | `compression`, `deploy` | int8 with its price, exports with their proof |
# | `lab` | the closed loop, benchmarks |
#
# ## The claims
#
# The laboratory starts from two articles by practitioners, both in Chinese and without formal references. The first (codes `A-…`) describes the training of foundation models as systems engineering: data, precision, communication,
# an auditable trainer, failures at three in the morning. The second (codes `B-…`), *Better Language Models Without Massive Compute*, says how a small team gets good models. Both are full of numbers, some of them right. Each chapter
# tests the claims that it touches and ends with a table: the claim in our words, a verdict (*holds*, *holds in part*, *does not hold*, *open*), and what was measured. The site collects all of them on one page, the ledger.
#
# ## What it is not, yet
#
# Data parallelism only (DDP): sharded training, fp16 with its scaler in the loop, monitors that roll back, exporters for dashboards, pruning and distillation, ONNX and GGUF, and cleaning corpora larger than memory are the next
# chapters. Each notebook ends with what it does not cover. Nothing here has been run on a GPU by its authors so far; the code is written for them and says where it is untested.
#
# Apache-2.0. How a chapter is written, run and released: [CONTRIBUTING.md](../CONTRIBUTING.md).
