"""What keeps the notebooks, the package and the book in step.

    python tools/house.py author SRC.py NB.ipynb   py:percent text to a notebook, exported, executed, cleaned, stamped
    python tools/house.py execute [--all] [NB ...] run notebooks again (by default those whose outputs are stale)
    python tools/house.py stale                    list notebooks whose code changed since they were executed
    python tools/house.py sync                     is scalelab/ exactly what the notebooks export?
    python tools/house.py clean [--check]          strip volatile metadata from notebooks; with --check only look
    python tools/house.py test                     nbdev_test over every notebook, and the count is asserted
    python tools/house.py readme [--check]         README.md from nbs/index.ipynb

Every check prints one line and exits 1 when something is out of step.
"""
from __future__ import annotations

import argparse
import base64
import filecmp
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
PNG_LIMIT = 40_000  # bytes a plot may weigh in a committed notebook


def notebooks() -> list[Path]:
    "Every notebook of the book, in reading order."
    return sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)


def read(path: Path):
    import nbformat

    return nbformat.read(path, as_version=4)


def code_hash(nb) -> str:
    "Hash of the source of all code cells: what the outputs depend on."
    text = "\0".join(c.source for c in nb.cells if c.cell_type == "code")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_stale(path: Path) -> bool:
    nb = read(path)
    return nb.metadata.get("scalelab", {}).get("executed") != code_hash(nb)


def clean(paths: list[Path]) -> None:
    for path in paths:
        subprocess.run(["nbdev_clean", "--fname", str(path)], check=True, cwd=ROOT)


def execute(path: Path, timeout: int = 240) -> None:
    "Run a notebook in its own folder, strip what changes from run to run, stamp it with the hash of its code."
    import nbformat
    from nbclient import NotebookClient

    nb = read(path)
    nb.metadata["kernelspec"] = {"display_name": "python3", "language": "python", "name": "python3"}
    skip = re.compile(r"^#\|\s*(slow|gpu|eval:\s*false)", re.M)
    kept = [c.source for c in nb.cells]
    for cell in nb.cells:  # cells that tests skip are not run here either, their saved outputs stay
        if cell.cell_type == "code" and skip.search(cell.source):
            cell.metadata["kept_outputs"] = cell.outputs
            cell.source = ""
    env = os.environ | {"PYTHONHASHSEED": "0", "COLUMNS": "120"}
    os.environ.update(env)
    client = NotebookClient(nb, timeout=timeout, coalesce_streams=True, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}})
    client.execute()
    for cell, source in zip(nb.cells, kept):
        cell.source = source
        if cell.cell_type != "code":
            continue
        if "kept_outputs" in cell.metadata:
            cell["outputs"] = cell.metadata.pop("kept_outputs")
        cell.outputs = [o for o in cell.outputs if not (o.output_type == "stream" and o.name == "stderr")]
        for out in cell.outputs:
            png = out.get("data", {}).get("image/png")
            if png and len(base64.b64decode(png)) > PNG_LIMIT:
                print(f"{path}: a plot weighs {len(base64.b64decode(png)) // 1000} kB, the limit is {PNG_LIMIT // 1000} kB")
            if "/tmp/" in str(out) or str(ROOT) in str(out) or re.search(r"at 0x[0-9a-f]{6,}", str(out)):
                print(f"{path}: an output holds a path or an address; print something stable instead: {str(out)[:200]}")
    nb.metadata["scalelab"] = {"executed": code_hash(nb)}
    nbformat.write(nb, path)
    clean([path])


def author(source: Path, target: Path) -> None:
    "Turn py:percent text into a notebook (keeping the outputs of untouched cells), export it, run it, clean it."
    from nbdev.export import nb_export

    target.parent.mkdir(parents=True, exist_ok=True)
    update = ["--update"] if target.exists() else []
    subprocess.run(["jupytext", "-q", *update, "--to", "ipynb", "-o", str(target), str(source)], check=True, cwd=ROOT)
    os.chdir(ROOT)
    nb_export(target, lib_path=ROOT / "scalelab")
    execute(target)


def sync() -> bool:
    "Export into an emptied package in a temporary copy and compare with what is here."
    with tempfile.TemporaryDirectory() as tmp:
        copy = Path(tmp) / "house"
        shutil.copytree(ROOT / "nbs", copy / "nbs", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
        shutil.copy(ROOT / "settings.ini", copy)
        shutil.copy(ROOT / "pyproject.toml", copy)
        (copy / "scalelab").mkdir()
        subprocess.run(["nbdev_export"], check=True, cwd=copy, stdout=subprocess.DEVNULL)
        ours = {p.relative_to(ROOT / "scalelab") for p in (ROOT / "scalelab").rglob("*.py")}
        fresh = {p.relative_to(copy / "scalelab") for p in (copy / "scalelab").rglob("*.py")}
        wrong = [f"{p}: in scalelab/ but no notebook exports it (a renamed default_exp?)" for p in sorted(ours - fresh)]
        wrong += [f"{p}: exported by a notebook but missing in scalelab/" for p in sorted(fresh - ours)]
        wrong += [f"{p}: differs from its notebook" for p in sorted(ours & fresh) if not filecmp.cmp(ROOT / "scalelab" / p, copy / "scalelab" / p, shallow=False)]
    print("\n".join(wrong) if wrong else f"sync: scalelab/ is what the notebooks export ({len(fresh)} files)")
    if wrong:
        print("run `make sync` (an edit in scalelab/ goes back to its notebook with `nbdev_update` first)")
    return not wrong


def clean_check() -> bool:
    "Would cleaning change a committed notebook?"
    with tempfile.TemporaryDirectory() as tmp:
        shutil.copytree(ROOT / "nbs", Path(tmp) / "nbs")
        shutil.copy(ROOT / "settings.ini", tmp)
        subprocess.run(["nbdev_clean", "--fname", "nbs"], check=True, cwd=tmp)
        dirty = [p for p in notebooks() if not filecmp.cmp(p, Path(tmp) / p.relative_to(ROOT), shallow=False)]
    print("\n".join(f"{p.relative_to(ROOT)}: not clean, run `make clean-outputs`" for p in dirty) or "clean: every notebook is clean")
    return not dirty


def stale() -> bool:
    rows = [p for p in notebooks() if is_stale(p)]
    print("\n".join(f"{p.relative_to(ROOT)}: code changed since it was executed, run `make notebooks`" for p in rows) or f"stale: outputs of {len(notebooks())} notebooks belong to their code")
    return not rows


def test(limit: int = 900) -> bool:
    "nbdev_test exits 0 when it ran nothing and has no time limit; here the count is asserted and the time bounded."
    want = len(notebooks())
    done = subprocess.run(["timeout", str(limit), "nbdev_test", "--n_workers", "2", "--timing", "--do_print"], cwd=ROOT, capture_output=True, text=True)
    text = done.stdout + done.stderr
    ran = set(re.findall(r"(?:Starting|- Completed) (\S+\.ipynb)", text))
    names = {str(Path(n).resolve()) for n in ran}
    missing = [str(p.relative_to(ROOT)) for p in notebooks() if str(p) not in names]
    print(text if done.returncode else "\n".join(line for line in text.splitlines() if "Completed" in line or "took" in line))
    print(f"notebooks: {want - len(missing)} of {want} ran, exit code {done.returncode}" + (f"; did not run: {missing}" if missing else ""))
    return done.returncode == 0 and not missing and want > 0


def readme(check: bool = False) -> bool:
    "README.md from nbs/index.ipynb, without its hidden cells."
    import nbformat
    from nbconvert import MarkdownExporter

    nb = read(ROOT / "nbs/index.ipynb")
    nb.cells = [c for c in nb.cells if not (c.cell_type == "code" and re.match(r"#\|\s*hide\b", c.source))]
    for cell in nb.cells:  # `#| echo: false` shows what was printed and not how
        if cell.cell_type == "code" and re.match(r"#\|\s*echo:\s*false\b", cell.source):
            cell.update(cell_type="markdown", source="```\n" + "".join(o.get("text", "") for o in cell.outputs).rstrip() + "\n```")
    nb.metadata["language_info"] = {"name": "python"}
    text = MarkdownExporter().from_notebook_node(nbformat.from_dict(nb))[0]
    text = re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
    text = text.replace("](../", "](")  # the notebook stands one folder deeper
    if check:
        same = (ROOT / "README.md").read_text(encoding="utf-8") == text
        print("readme: README.md is nbs/index.ipynb" if same else "README.md differs from nbs/index.ipynb, run `make sync`")
        return same
    (ROOT / "README.md").write_text(text, encoding="utf-8")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(dest="command", required=True)
    p = sub.add_parser("author"); p.add_argument("source", type=Path); p.add_argument("target", type=Path)
    p = sub.add_parser("execute"); p.add_argument("--all", action="store_true"); p.add_argument("paths", nargs="*", type=Path)
    for name in ("stale", "sync", "test"):
        sub.add_parser(name)
    for name in ("clean", "readme"):
        sub.add_parser(name).add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.command == "author":
        author(args.source.resolve(), args.target.resolve())
    elif args.command == "execute":
        for path in args.paths or [p for p in notebooks() if args.all or is_stale(p)]:
            print(f"executing {path}")
            execute(path.resolve())
    elif args.command == "clean" and not args.check:
        clean(notebooks())
    else:
        checks = {"stale": stale, "sync": sync, "test": test, "clean": clean_check, "readme": lambda: readme(args.check)}
        return 0 if checks[args.command]() else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
