# %% [markdown]
# # From words to a typed configuration
#
# > Dataclasses as configuration: YAML files and dotted overrides, checked before anything is written, with errors of one line.
#
# A training run has some fifty settings. Each of them can be misspelt, and a misspelt key that is silently ignored costs a week of computing with a default. So every word on the command line
# and every key of a YAML file must be one that we know, of the type we expect. `jsonargparse` builds the parser from dataclasses; this chapter adds recipes, the order of precedence, and errors that
# name the key and its nearest neighbour.

# %%
#| default_exp core.arguments

# %%
#| export
from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scalelab.core.config import CheckFailed, UsageError, did_you_mean, dump_yaml, load_yaml

# %%
#| hide
import contextlib
import io
import tempfile
from dataclasses import dataclass, field
from typing import Literal
import matplotlib.pyplot as plt
from scalelab.core.plotting import COLORS, style

# %% [markdown]
# ## Files into dotted keys
# `{"model": {"d_model": 128}}` and `--model.d_model 128` are the same statement. Flattening the first into the second gives one list to check and one order in which later words win.

# %%
#| export
def flatten(tree: dict, prefix: str = "", leaves: Sequence[str] = ()) -> dict[str, Any]:
    "`{'a': {'b': 1}}` -> `{'a.b': 1}`. Empty dicts vanish; lists are values, and so are the dicts of keys in `leaves`."
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and f"{prefix}{key}" not in leaves:
            flat |= flatten(value, f"{prefix}{key}.", leaves)
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def unflatten(flat: dict[str, Any]) -> dict:
    "The inverse of `flatten`."
    tree: dict = {}
    for key, value in flat.items():
        *groups, last = key.split(".")
        place = tree
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value
    return tree


# %%
tree = {"model": {"d_model": 128, "rope": {"theta": 1e4}}, "seed": 0, "betas": [0.9, 0.95]}
assert flatten(tree) == {"model.d_model": 128, "model.rope.theta": 1e4, "seed": 0, "betas": [0.9, 0.95]}
assert unflatten(flatten(tree)) == tree

# %% [markdown]
# ## Recipes
# A recipe is a YAML file that ships with the package, found by its name. A name that is neither a recipe nor a file is answered with what there is.

# %%
#| export
def recipe_dir() -> Path:
    "Where the recipes that ship with the package stand."
    import scalelab

    return Path(scalelab.__file__).resolve().parent / "recipes"


def recipes() -> list[str]:
    "Names of the recipes that ship with the package."
    return sorted(p.stem for p in recipe_dir().glob("*.yaml"))


def find_config(name: str) -> Path:
    "The file behind `--config NAME|FILE`: a path that exists, else a recipe's name."
    for path in (Path(name), recipe_dir() / f"{name}.yaml"):
        if path.is_file():
            return path
    raise UsageError(f"--config {name}: neither a file nor a recipe{did_you_mean(name, recipes())}; recipes: {', '.join(recipes()) or 'none'}")


# %%
try:
    find_config("no_such_recipe")
except UsageError as error:
    assert "neither a file nor a recipe" in str(error)
else:
    raise AssertionError("found what is not there")

# %% [markdown]
# ## The parser
# One function from a dataclass and some words to a filled dataclass. Precedence, weakest first: the defaults of the dataclass, the file, the command line. Keys of the file are checked first, alone, so
# that an error can say which file it is in.

# %%
#| export
def _parser(cls: type | None, prog: str, description: str, flags: dict[str, dict]):
    import jsonargparse

    parser = jsonargparse.ArgumentParser(prog=prog, description=description, exit_on_error=False)
    parser.add_argument("--config", metavar="NAME|FILE", help="a recipe's name or a YAML file; the command line wins over it; add --print_config to see the result")
    parser.add_argument("--show", action="store_true", help=argparse.SUPPRESS)  # --print_config; jsonargparse keeps that name to itself
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    for name, options in flags.items():
        parser.add_argument(name, **options)
    if cls is not None:
        parser.add_class_arguments(cls)
    return parser


def _words(flat: dict[str, Any]) -> list[str]:
    "Dotted keys as command-line words; strings as they are, everything else as JSON."
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in flat.items()]


def _plain(error: Exception) -> str:
    "One line from a parser's error: the key, what was found, what was expected."
    text = " ".join(str(error).split())
    for old, new in (("Parser key ", ""), ("<class '", ""), ("'>", ""), ("typing.", ""), ("Expected a ", "expected "), ("Got value:", "found")):
        text = text.replace(old, new)
    return text


def _keys(parser) -> list[str]:
    "Every dotted key that the parser knows."
    return list(parser.get_defaults(skip_validation=True).keys())


def _parse(parser, words: Sequence[str], where: str):
    keys = [*_keys(parser), "config", "show", "debug", "help"]
    groups = {k.rsplit(".", 1)[0] for k in keys if "." in k}
    for word in words:
        key = word[2:].split("=", 1)[0]
        if word.startswith("--") and len(key) > 0 and key not in keys:
            if key in groups:
                raise UsageError(f"{where}: {key} is a group of keys; give one of {', '.join(k for k in keys if k.startswith(key + '.'))}")
            near = did_you_mean(key, keys)
            group = key.rsplit(".", 1)[0] + "."
            listed = [] if near else [k for k in keys if k.startswith(group)]
            known = f"; keys of this group: {', '.join(listed)}" if listed else "" if near else "; --help lists every key"
            raise UsageError(f"{where}: unknown key {key!r}{near}{known}")
    import jsonargparse

    try:
        with open(os.devnull, "w") as null:
            stderr, sys.stderr = sys.stderr, null
            try:
                return parser.parse_args(list(words))
            finally:
                sys.stderr = stderr
    except (jsonargparse.ArgumentError, ValueError, TypeError) as error:
        raise UsageError(f"{where}: {_plain(error)}") from None


# %%
#| export
def parse_config(
    cls: type | None, argv: Sequence[str], prog: str, description: str = "", flags: dict[str, dict] | None = None,
    translate: Callable[[dict, str], dict] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """A filled `cls` from `--config NAME|FILE` and dotted overrides, and the values of the plain `flags`.

    cls: dataclass of dataclasses, each field documented; None for a command that has flags only. flags: name -> options of `add_argument`, e.g. `{"--run": {"type": str}}`.
    translate: turns a foreign file's mapping into ours, called with (mapping, file name) before its keys are checked.
    With `--print_config` prints the configuration and raises SystemExit(0). Raises UsageError for an unknown key, a wrong type or an unreadable file.
    """
    parser = _parser(cls, prog, description, flags or {})
    words = ["--show" if word == "--print_config" else word for word in argv]
    if "-h" in words or "--help" in words:
        parser.print_help()
        raise SystemExit(0)
    chosen = [w.split("=", 1)[1] if "=" in w else words[i + 1] if i + 1 < len(words) else "" for i, w in enumerate(words) if w == "--config" or w.startswith("--config=")]
    base: list[str] = []
    for name in chosen:
        path = find_config(name)
        tree = load_yaml(path)
        if translate:
            tree = translate(tree, str(path))
        base += _words(flatten(tree, leaves=_keys(parser)))
        _parse(_parser(cls, prog, description, {}), base, str(path))  # without the flags: a required one is not the file's business
    space = _parse(parser, [*base, *words], prog)
    if cls is None:
        return None, space.as_dict()
    if space.show:
        config = {k: v for k, v in space.as_dict().items() if k in {f.name for f in dataclasses.fields(cls)}}
        print(dump_yaml(config), end="")
        raise SystemExit(0)
    values = (parser.instantiate if hasattr(parser, "instantiate") else parser.instantiate_classes)(space)  # renamed in jsonargparse 4.49
    names = [f.name for f in dataclasses.fields(cls)]
    config = cls(**{name: values[name] for name in names})
    return config, {k: v for k, v in space.as_dict().items() if k not in names}


# %% [markdown]
# A small configuration to try it on. The docstrings of the fields become the help text.

# %%
@dataclass
class ToyModel:
    """Shape.

    Args:
        d_model: width of the residual stream
        kind: the layout
    """
    d_model: int = 128
    kind: Literal["llama", "fast"] = "llama"

@dataclass
class Toy:
    """A toy.

    Args:
        model: the model
        lr: peak learning rate
        limits: a table of its own, whose keys are data and not settings
    """
    model: ToyModel = field(default_factory=ToyModel)
    lr: float = 1e-3
    limits: dict[str, float] = field(default_factory=dict)

config, flags = parse_config(Toy, ["--model.d_model", "64", "--run", "r1"], "toy", flags={"--run": {"type": str}})
assert config == Toy(ToyModel(64)) and flags["run"] == "r1"

# %%
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "c.yaml"
    file.write_text("model:\n  d_model: 96\nlr: 3e-4\n")
    config, _ = parse_config(Toy, ["--config", str(file), "--lr", "0.1"], "toy")
    assert config == Toy(ToyModel(96), 0.1)  # the command line wins over the file, the file over the default
    file.write_text("limits:\n  too_short: 5\n")
    assert parse_config(Toy, ["--config", str(file)], "toy")[0].limits == {"too_short": 5.0}
    assert parse_config(Toy, ['--limits={"symbols": 0.5}'], "toy")[0].limits == {"symbols": 0.5}
    for text, words in (("model:\n  d_modle: 96\n", []), ("lr: fast\n", []), ("", ["--model.kind", "bert"]), ("", ["--lrr", "1"]), ("", ["--model.d_model", "wide"])):
        file.write_text(text or "lr: 1.0\n")
        try:
            parse_config(Toy, ["--config", str(file), *words], "toy")
        except UsageError as error:
            assert "\n" not in str(error)
            print(str(error).replace(folder, "…"))
        else:
            raise AssertionError(f"accepted {text!r} {words}")

# %% [markdown]
# Each line names where, the key, what was found and what would have been right.
#
# `--help` shows every field with its meaning and default; `--print_config` prints a file that reproduces the call:

# %%
def printed(*words):
    "What the toy prints for these words."
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        parse_config(Toy, words, "toy")
    return out.getvalue()

help_text = printed("--help")
assert "width of the residual stream" in help_text and "default: 128" in help_text
text = printed("--lr", "0.5", "--print_config")
print(text)
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "p.yaml").write_text(text)
    again, _ = parse_config(Toy, ["--config", str(Path(folder) / "p.yaml")], "toy")
assert again == Toy(lr=0.5)

# %% [markdown]
# ## The last line of defence
# `run_main` stands around every command and turns what can go wrong into an exit code and one line: 2 for a call that makes no sense, 1 for a finding, 130 for Ctrl-C. A full disk is the
# user's fact of life and not a defect, so it gets a line too. An error that is *ours* keeps its traceback: hiding a defect helps nobody.

# %%
#| export
def _say_warning(message, category, *_, **__) -> None:
    "A line for people, without source code; what libraries tell developers about their future is not for them."
    if issubclass(category, UserWarning):
        print(f"scalelab: {message}", file=sys.stderr)


def run_main(main: Callable[[], int | None], debug: bool = False) -> int:
    """Run a command; its exit code. Errors that a user can cause become one line on stderr.

    2: UsageError. 1: CheckFailed, a full disk, no permission. 130: Ctrl-C. 141: the reader of our output went away. Anything else is a defect and is raised.
    """
    warnings.showwarning = _say_warning
    try:
        code = main() or 0
        sys.stdout.flush()  # here, where a reader that went away can still be told from a defect
        return code
    except BrokenPipeError:
        with contextlib_suppress_stdout():
            return 141
    except UsageError as error:
        caught, code, message = error, 2, str(error)
    except CheckFailed as error:
        caught, code, message = error, 1, str(error)
    except (PermissionError, IsADirectoryError, NotADirectoryError, FileNotFoundError, FileExistsError) as error:
        caught, code, message = error, 2, f"{error.filename or ''}: {error.strerror or error}"
    except OSError as error:
        if error.errno not in (27, 28, 122):  # file too large, no space, quota
            raise
        caught, code, message = error, 1, f"{error.filename or 'while writing'}: {error.strerror} (free some space and run the same command again; what was finished is kept)"
    except Exception as error:  # libraries wrap a full disk in exceptions of their own
        if "No space left on device" not in str(error):
            raise
        caught, code, message = error, 1, "while writing: No space left on device (free some space and run the same command again; what was finished is kept)"
    except KeyboardInterrupt as error:
        caught, code, message = error, 130, "stopped by Ctrl-C; run the same command again to go on"
    if debug:
        traceback.print_exception(caught)
    print(f"scalelab: {message}", file=sys.stderr)
    return code


class contextlib_suppress_stdout:  # noqa: N801 - reads as a statement
    "Point stdout at nothing, so that Python's flush at exit does not complain about a closed pipe."

    def __enter__(self):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def __exit__(self, *exc):
        return False


# %%
def code_of(error):
    "Exit code and message for an error."
    def main():
        raise error
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        code = run_main(main)
    return code, err.getvalue().strip()

for error in (UsageError("model.d_model: …"), CheckFailed("2 stages failed"), KeyboardInterrupt(), OSError(28, "No space left on device", "x.bin"), FileNotFoundError(2, "No such file or directory", "a.jsonl")):
    print(code_of(error))
assert [code_of(e)[0] for e in (UsageError(""), CheckFailed(""), KeyboardInterrupt(), OSError(28, "full"))] == [2, 1, 130, 1]
assert run_main(lambda: None) == 0 and run_main(lambda: 1) == 1
try:
    run_main(lambda: 1 / 0)
except ZeroDivisionError:
    pass
else:
    raise AssertionError("a defect was hidden")

# %% [markdown]
# ## How good is the neighbour?
# Twelve keys of the training configuration, damaged by random edits: how often does the suggestion name the key that was meant?

# %%
import random
from scalelab.core.config import did_you_mean

names = "model.d_model model.n_layers model.n_heads model.n_kv_heads data.seq_len data.seed trainer.steps trainer.global_batch trainer.micro_batch optim.lr optim.weight_decay schedule.warmup_steps".split()
def damage(word, edits, rng):
    "Delete, double or replace letters after the dot."
    for _ in range(edits):
        i = rng.randrange(word.index(".") + 1, len(word))
        word = rng.choice([word[:i] + word[i + 1 :], word[:i] + word[i] + word[i:], word[:i] + rng.choice("abcdefgh_") + word[i + 1 :]])
        word += "" if word[-1] != "." else "x"
    return word

rng = random.Random(0)
rates = []
for edits in range(1, 6):
    typos = [(n, damage(n, edits, rng)) for n in names for _ in range(40)]
    typos = [(n, t) for n, t in typos if t not in names]
    rates.append(sum(f"{n!r}" in did_you_mean(t, names) for n, t in typos) / len(typos))
assert rates[0] > 0.9 and rates == sorted(rates, reverse=True)
style()
fig, ax = plt.subplots(figsize=(4.5, 2.2))
ax.plot(range(1, 6), rates, "o-")
ax.set(xlabel="random edits to the key", ylabel="right key suggested", ylim=(0, 1.05), xticks=range(1, 6))
plt.show()

# %% [markdown]
# What to see: one slip of the finger is nearly always understood, and the rate falls gently. Where no suggestion is made, the keys of the group are listed.
#
# ## Verdict
# | question | answer |
# |---|---|
# | can a misspelt key be ignored in silence? | no: every word and every key of a file is checked before anything is written |
# | does one wrong letter get the right suggestion? | in more than nine of ten cases |
