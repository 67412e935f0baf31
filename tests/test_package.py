"""The package from outside: what importing it costs, what it says of itself, which room may use which, and the recipes it ships."""
from __future__ import annotations

import ast
import configparser
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import support
from support import ROOT, options

PACKAGE = ROOT / "scalelab"
MODULES = sorted(".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in PACKAGE.rglob("*.py") if p.name != "_modidx.py")
FLOORS = [{"core"}, {"data", "model"}, {"precision", "distributed"}, {"trainer"}, {"compression", "deploy", "plan", "diagnostics"}, {"lab"}, {"cli"}]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
HEAVY = ("prometheus_client", "tensorboard", "wandb", "nbdev", "fastcore", "execnb", "IPython", "ipykernel", "jupyter", "jupyter_core", "jupyterlab", "nbformat", "ray", "transformers", "matplotlib", "pandas", "pyarrow", "datasketch", "pywt")

# Imported in one fresh interpreter, module after module, while the names in HEAVY can't be imported at all.
IMPORT_ALL = """
import importlib, importlib.abc, json, sys
heavy = set(json.loads(sys.argv[1]))
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in heavy:
            raise ModuleNotFoundError(f"{name} is blocked by this test", name=name)
sys.meta_path.insert(0, Blocked())
failed = {}
for name in json.loads(sys.argv[2]):
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = f"{type(error).__name__}: {error}"
print(json.dumps(failed))
"""


def fresh(code: str, *args: str) -> str:
    done = support.run([sys.executable, "-c", code, *args])
    assert done.code == 0, done.err
    return done.out


def test_every_module_imports_without_the_extras():
    assert len(MODULES) > 30
    assert json.loads(fresh(IMPORT_ALL, json.dumps(HEAVY), json.dumps(MODULES))) == {}


def test_the_block_blocks():
    found = json.loads(fresh(IMPORT_ALL, json.dumps(["safetensors"]), json.dumps(["safetensors.torch"])))
    assert "blocked by this test" in found["safetensors.torch"]


def test_importing_the_package_is_cheap():
    loaded = json.loads(fresh("import json, sys; import scalelab; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"))
    assert "scalelab" in loaded and not set(loaded) & {*HEAVY, "tokenizers", "rich", "jsonargparse"}
    everything = f"import importlib, json, sys; [importlib.import_module(m) for m in {MODULES!r}]; print(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    loaded = json.loads(fresh(everything))
    assert "torch" in loaded and not set(loaded) & set(HEAVY)


def test_the_command_list_needs_no_torch():
    done = fresh("import sys; from scalelab.cli import main; code = main(['--help']); print('torch' in sys.modules, code)")
    assert done.splitlines()[-1] == "False 0"


# ---- what the project says of itself


def settings() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    return parser["DEFAULT"]


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_settings_and_pyproject_agree(cli):
    import scalelab

    ini, toml = settings(), project()
    assert ini["lib_name"] == toml["name"] == "scalelab"
    assert ini["description"] == toml["description"]
    assert toml["requires-python"] == f">={ini['min_python']}"
    assert ini["keywords"].split() == toml["keywords"]
    assert ini["version"] == scalelab.__version__ and "version" in toml["dynamic"]
    assert ini["license"] == "apache2" and toml["license"] == "Apache-2.0" and "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert ini["author"] == toml["authors"][0]["name"] and ini["author_email"] == toml["authors"][0]["email"]
    assert cli("--version").ok().out.strip() == scalelab.__version__


def test_constraints_satisfy_every_requirement():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = re.fullmatch(r"([^=\s;]+)==([^\s;]+).*", line).groups()
            pins[canonicalize_name(name)] = version
    toml, wrong = project(), []
    extras = toml["optional-dependencies"]
    wanted = {extra: [Requirement(text) for text in texts] for extra, texts in {"": toml["dependencies"], **extras}.items()}
    in_dev = {"", "dev"} | {e for r in wanted["dev"] if r.name == "scalelab" for e in r.extras}
    for extra, requirements in wanted.items():
        for r in requirements:
            pin = pins.get(canonicalize_name(r.name))
            if r.name == "scalelab" or (pin is None and extra not in in_dev):  # what `make setup` doesn't install may go unpinned
                continue
            if pin is None or not r.specifier.contains(pin, prereleases=True):
                wrong.append(f"[{extra}] {r}: pinned {pin}")
    assert not wrong
    assert pins["torch"] == "2.13.0"


def test_no_entry_point_is_missing():
    assert project()["scripts"]["scalelab"] == "scalelab.cli:main"


# ---- rooms and floors


def imports_of(path: Path) -> list[tuple[int, str]]:
    "(line, full module name) of everything a file imports, at the top and inside functions."
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, a.name) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            name = ".".join(filter(None, [base, node.module or ""]))
            found += [(node.lineno, name)] + [(node.lineno, f"{name}.{a.name}") for a in node.names]
    return found


def room_of(module: str) -> str:
    return module.split(".")[1] if module.startswith("scalelab.") else ""


def upward(path: Path) -> list[str]:
    room = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    bad = []
    for line, name in imports_of(path):
        other = room_of(name)
        if room not in FLOOR or other not in FLOOR:
            continue  # scalelab itself (its version) and modules outside the house
        if FLOOR[other] > FLOOR[room] or (room == "diagnostics" and other not in ("core", "diagnostics")):
            bad.append(f"{path.relative_to(ROOT)}:{line} {room} imports {name}")
    return bad


def test_rooms_import_only_downward():
    paths = [p for p in PACKAGE.rglob("*.py") if p.name not in ("__init__.py", "_modidx.py")]
    assert {room_of(".".join(p.relative_to(ROOT).with_suffix("").parts)) for p in paths} <= set(FLOOR), "a room without a floor"
    assert not [b for p in paths for b in upward(p)]


def test_an_upward_import_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "scalelab" / "data").mkdir(parents=True)
    (tmp_path / "scalelab" / "diagnostics").mkdir(parents=True)
    low, watch = tmp_path / "scalelab" / "data" / "a.py", tmp_path / "scalelab" / "diagnostics" / "b.py"
    low.write_text("def f():\n    from ..trainer.loop import fit\n    from scalelab import lab\n")
    watch.write_text("from ..data import shards\nfrom ..core import runs\n")
    assert len(upward(low)) == 3  # the module, the name in it, and the room by `from scalelab import`
    assert len(upward(watch)) == 2


def test_nothing_is_unpickled():
    "No pickle module, no torch.load, no allow_pickle anywhere, but for the bench that measures us against torch.load and the experiment that shows what a pickle can do."
    bad, shown = [], PACKAGE / "lab" / "stream_claims.py"
    for path in PACKAGE.rglob("*.py"):
        tree, where = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(ROOT)
        bad += [f"{where}:{line} imports {name}" for line, name in imports_of(path) if path != shown and name.split(".")[0] in ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")]
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name, keys = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            if name.endswith("torch.load") and path != shown and not (path.name == "bench_trainer.py" and keys.get("weights_only") == "True"):
                bad.append(f"{where}:{node.lineno} {name}")
            if keys.get("allow_pickle", "False") != "False" or name.endswith(("read_pickle", "checkpoint.load", "dcp.load")):
                bad.append(f"{where}:{node.lineno} {ast.unparse(node)[:80]}")
    assert not bad


# ---- recipes


def recipe_names() -> list[str]:
    return sorted(p.stem for p in (PACKAGE / "recipes").glob("*.yaml"))


def test_the_recipes_that_are_promised_exist():
    assert set(recipe_names()) >= {"loop", "gpu24", "gpu24x4", "node8"}


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_dry_run(name, call):
    plan = call("train", "--config", name, "--dry_run", "--json").ok().json
    text = call("train", "--config", name, "--dry_run").ok().out
    for word in ("parameters", "tokens", "ranks", "memory per rank"):
        assert re.search(rf"^{word}\s+\S", text, re.M), text
    config = (PACKAGE / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    batch, seq, steps = (int(re.search(rf"{k}: (\d+)", config)[1]) for k in ("global_batch", "seq_len", "steps"))
    assert plan["tokens"] == batch * seq * steps
    assert plan["parameters"] == sum(v for k, v in plan["parameters_by_part"].items() if k != "total")
    memory = plan["memory_per_rank"]
    assert memory["total"] == sum(v for k, v in memory.items() if k != "total")
    assert memory["parameters"] == 4 * plan["parameters"] and memory["optimizer"] == 8 * plan["parameters"]
    ranks, fits = {"loop": (1, 2), "gpu24": (1, 24), "gpu24x4": (4, 24), "node8": (8, 80)}[name]
    assert plan["ranks"] == ranks and memory["total"] < 0.9 * fits * 1e9, "does not fit the machine it is named after"


@pytest.mark.parametrize("name", recipe_names())
def test_the_recipe_says_its_own_size(name, call):
    "The comment at its head states parameters and tokens; they are those of the dry run."
    head = (PACKAGE / "recipes" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    plan = call("train", "--config", name, "--dry_run", "--json").ok().json
    for number, unit, what in re.findall(r"([\d.]+) ([MB]) (parameters|tokens)", head):
        stated, real = float(number) * {"M": 1e6, "B": 1e9}[unit], plan[what]
        assert abs(stated - real) < 0.06 * real, f"{head}: {what} are {real:,}"


def test_the_recipes_are_packaged():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert "recipes/*.yaml" in tool["package-data"]["scalelab"]


ARTICLE = """\
model:
  arch: transformer
  hidden_size: 2048
  num_layers: 24
  num_heads: 16
  vocab_size: 32000
data:
  train_files: [train.jsonl]
  valid_files: [valid.jsonl]
  max_length: 2048
training:
  total_steps: 100000
  batch_size_per_gpu: 8
  gradient_accumulation_steps: 4
  learning_rate: 2e-4
  warmup_steps: 2000
  lr_scheduler: cosine
  optimizer: adamw
  weight_decay: 0.01
deepspeed:
  enable: true
  config: ds_config_zero2.json
precision: fp16
gradient_clipping: 1.0
checkpoint_activations: true
"""


def test_the_articles_configuration_loads(call, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(ARTICLE, encoding="utf-8")
    done = call("train", "--config", file, "--dry_run", "--json").ok()
    plan = done.json
    assert 1.2e9 < plan["parameters"] < 1.45e9
    assert plan["tokens_per_update"] == 8 * 4 * 4 * 2048 and plan["ranks"] == 4
    assert "1.3 B" in done.err and "not the 3 B" in done.err and "1.34 B" in done.err
    for key in ("train_files", "valid_files", "deepspeed", "fp16", "gradient_accumulation_steps"):
        assert key in done.err, f"{key} changed its meaning without a word"
    assert all(line.startswith("scalelab: ") for line in done.err.splitlines())


def test_the_articles_configuration_key_by_key(call, tmp_path):
    import yaml

    file = tmp_path / "config.yaml"
    file.write_text(ARTICLE, encoding="utf-8")
    ours = yaml.safe_load(call("train", "--config", file, "--print_config").ok().out)
    assert (ours["model"]["d_model"], ours["model"]["n_layers"], ours["model"]["n_heads"], ours["model"]["vocab_size"]) == (2048, 24, 16, 32000)
    assert ours["data"]["seq_len"] == 2048 and ours["trainer"]["steps"] == 100000 and ours["trainer"]["micro_batch"] == 8
    assert ours["optim"]["lr"] == 2e-4 and ours["optim"]["weight_decay"] == 0.01 and ours["optim"]["clip"] == 1.0
    assert ours["schedule"]["kind"] == "cosine" and ours["schedule"]["warmup_steps"] == 2000 and ours["activation_checkpointing"] is True
    file.write_text(ARTICLE.replace("warmup_steps", "warmup_stepz"), encoding="utf-8")
    call("train", "--config", file, "--dry_run").refused("training.warmup_stepz", "training.warmup_steps")
    file.write_text(ARTICLE.replace("optimizer: adamw", "optimizer: lion"), encoding="utf-8")
    call("train", "--config", file, "--dry_run").refused("optimizer", "lion", "adamw")


def test_our_own_configuration_makes_the_round_trip(call, tmp_path):
    "What --print_config prints is a configuration file that gives the same again."
    words = options({"config": "gpu24", "trainer.steps": 777, "optim.lr": 1.5e-5})
    first = call("train", *words, "--print_config").ok().out
    (tmp_path / "c.yaml").write_text(first, encoding="utf-8")
    assert call("train", "--config", tmp_path / "c.yaml", "--print_config").ok().out == first and "777" in first and "steps: 778" not in first
    assert "steps: 778" in call("train", "--config", tmp_path / "c.yaml", "--trainer.steps", 778, "--print_config").ok().out


def test_git_ignores_what_runs_make():
    "A run in the checkout leaves it clean."
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    for path in ("runs/loop/report.html", ".venv/x", "_docs/index.html", "scalelab/__pycache__/x.pyc", "scalelab.egg-info/PKG-INFO"):
        assert subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT).returncode == 0, f"{path} is not ignored"
