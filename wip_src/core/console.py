# %% [markdown]
# # Answers
#
# > What a command prints: a table for a person, one JSON object for a program.
#
# A command computes a dictionary and hands it over here at the end. Results go to stdout and everything else to stderr, so that `scalelab ... --json | jq` works whatever happens on the way.

# %%
#| default_exp core.console

# %%
#| export
from __future__ import annotations

import io
import json
import os
import sys

from scalelab.core.runs import encode_numbers

# %%
#| hide
import contextlib

# %% [markdown]
# ## One object, or lines

# %%
#| export
JSON = {"--json": {"action": "store_true", "help": "print one JSON object on stdout"}}


def inputs_flag(what: str) -> dict:
    "The positional words INPUT... of a command, for `parse_config(flags=...)`."
    return {"inputs": {"nargs": "+", "type": str, "help": what}}


def answer(result: dict, as_json: bool, lines: list[str]) -> None:
    "Print `result` as one JSON object on stdout (non-finite numbers as strings), or the lines."
    print(json.dumps(encode_numbers(result), ensure_ascii=False, default=str, allow_nan=False) if as_json else "\n".join(lines))


# %%
out = io.StringIO()
with contextlib.redirect_stdout(out):
    answer({"loss": float("nan"), "字": 1}, True, [])
assert json.loads(out.getvalue()) == {"loss": "NaN", "字": 1}

# %% [markdown]
# ## A table
# Integers get their thousands separated, floats four digits, and a text may hold square brackets without being taken for markup.

# %%
#| export
def _cell(value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value if value is not None else "").replace("[", r"\[")


def table(rows: list[dict], title: str = "") -> str:
    "Rows of dicts as a text table as wide as the terminal (140 columns elsewhere); a column of numbers is right-aligned."
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title or None, title_justify="left")
    columns = list(dict.fromkeys(k for r in rows for k in r))
    for c in columns:
        numbers = all(isinstance(r.get(c), (int, float)) for r in rows)
        shown.add_column(c, justify="right" if numbers else "left", overflow="fold")
    for r in rows:
        shown.add_row(*(_cell(r.get(c)) for c in columns))
    width = int(os.environ.get("COLUMNS", 0)) or (None if sys.stdout.isatty() else 140)
    console = Console(width=width, file=io.StringIO(), record=True, force_jupyter=False)
    console.print(shown)
    return console.export_text().rstrip()


# %%
rows = [{"domain": "code", "documents": 12000, "bits per byte": 2.34567}, {"domain": "zh [draft]", "documents": 7, "bits per byte": 3.0}]
print(table(rows))
assert "12,000" in table(rows) and "2.346" in table(rows) and "[draft]" in table(rows)
