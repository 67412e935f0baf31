"""The book's site: stage the notebooks, write the pages that are made from them, and let Sphinx build it all.

    python tools/site.py build [--force] [--out _docs]   build unless what is there is up to date
    python tools/site.py check                           build from nothing into a temporary folder and keep nothing

Nothing is executed and nothing is downloaded. A warning of Sphinx, a link that leads nowhere and a page that would load something
from the network are errors. Exit code 0 or 1.
"""
from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
NBS, PACKAGE, DOCS = ROOT / "nbs", ROOT / "scalelab", ROOT / "docs"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
STAGED, CACHE = DOCS / "_staged", DOCS / "_build"
ROOMS = {  # title of each folder of nbs/; their order is that of the numbers in front
    "core": "Foundations", "data": "Data", "model": "The model", "precision": "Precision", "distributed": "Many processes",
    "trainer": "Training", "diagnostics": "Diagnostics", "compression": "Compression", "deploy": "Deployment", "plan": "Planning", "lab": "The laboratory",
}
MATHJAX = ("django-static-mathjax", "mathjax/static/mathjax/es5/tex-svg-full.js", "214c3da890b16db3d1319684cc04f3fd4e72ea59d5eb3863f256146015fb1783")
CJK_FONT = ("pylopdf-fonts-zh-cn", "pylopdf_fonts_zh_cn/NotoSansSC-Regular.otf")
CJK = re.compile("[\u2e80-\u9fff\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef]")


class SiteError(Exception):
    "The site can't be built; the message is one line that says where and what to do."


# ---- What the package exports ---------------------------------------------------------------------------------------------


@dataclass
class Module:
    "A module of the package as its source text shows it; nothing is imported."

    name: str
    doc: str
    symbols: list[tuple[str, ast.AST]]  # in the order of the file
    lines: list[str]
    chapter: str = ""  # page of the notebook that exports it
    cells: dict[str, str] = field(default_factory=dict)  # symbol -> label of the cell that defines it


def read_module(path: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    found, public = {}, None
    for node in tree.body:
        names = [node.name] if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else []
        if isinstance(node, ast.Assign):
            names = [t.id for t in node.targets if isinstance(t, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        if names == ["__all__"]:
            public = ast.literal_eval(node.value)
        found.update((name, node) for name in names)
    keep = [n for n in found if n in public] if public is not None else [n for n in found if not n.startswith("_")]
    return Module(".".join(path.relative_to(ROOT).with_suffix("").parts), ast.get_docstring(tree) or "", [(n, found[n]) for n in keep], text.splitlines())


def read_package() -> dict[str, Module]:
    paths = sorted(p for p in PACKAGE.rglob("*.py") if not p.name.startswith("_") or p.name == "__main__.py")
    return {m.name: m for m in map(read_module, paths)}


def public_members(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [n for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and not n.name.startswith("_")]


class Names:
    "From a name in prose to the full name of what it means, or None where that is not certain."

    def __init__(self, modules: dict[str, Module]):
        self.full: dict[str, set[str]] = {}
        self.modules = modules
        for module in modules.values():
            for name, node in module.symbols:
                self._add(f"{module.name}.{name}")
                for member in public_members(node) if isinstance(node, ast.ClassDef) else []:
                    self._add(f"{module.name}.{name}.{member.name}", least=2)

    def _add(self, full: str, least: int = 1) -> None:
        parts = full.split(".")
        for n in range(least, len(parts) + 1):
            self.full.setdefault(".".join(parts[-n:]), set()).add(full)

    def resolve(self, text: str, home: str, imported: set[str]) -> str | None:
        name = text.removesuffix("()")
        if name in self.modules:
            return name
        options = self.full.get(name, set())
        own = {o for o in options if o.startswith(f"{home}.")} or {o for o in options if o in imported}
        if own:
            return own.pop() if len(own) == 1 else None
        telling = text.endswith("()") or "_" in name or "." in name or not name.islower()  # a bare word may be a mere word
        return next(iter(options)) if len(options) == 1 and telling else None


# ---- Notebooks ------------------------------------------------------------------------------------------------------------


@dataclass
class Chapter:
    source: Path
    page: str  # name of the staged page, without suffix
    room: str
    module: str = ""
    title: str = ""
    lede: str = ""
    verdicts: list[list[str]] = field(default_factory=list)
    open_ends: str = ""


def page_of(path: Path) -> str:
    "`nbs/01_data/420_dedup.ipynb` -> `data/dedup`, the name that the module has."
    parts = [re.sub(r"^\d+[_-]", "", part) for part in path.relative_to(NBS).with_suffix("").parts]
    return "/".join(parts)


def outside_code(text: str, change) -> str:
    "`text` with `change` applied to the stretches that are no fenced block."
    parts = re.split(r"(^(`{3,}|~{3,})[^\n]*\n.*?^\2[`~]*[ \t]*$)", text, flags=re.M | re.S)
    return "".join(part if i % 3 == 1 else change(part) for i, part in enumerate(parts) if i % 3 != 2)


def split_row(line: str) -> list[str]:
    "Cells of a table row; a bar in code or behind a backslash is no border."
    cells, current, code = [], "", False
    for i, char in enumerate(line.strip().strip("|")):
        code ^= char == "`"
        if char == "|" and not code and not current.endswith("\\"):
            cells.append(current.strip())
            current = ""
        else:
            current += char
    return [*cells, current.strip()]


def directives(source: str) -> tuple[dict[str, str], str]:
    "The `#|` lines of a cell as a dict, and the cell without them."
    found, rest = {}, []
    for line in source.splitlines():
        match = re.match(r"\s*#\|\s*([\w-]+):?\s*(.*)$", line)
        if match:
            found[match[1]] = match[2].strip()
        else:
            rest.append(line)
    return found, "\n".join(rest).strip("\n")


def only_imports(source: str) -> bool:
    try:
        return all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(source).body)
    except SyntaxError:  # a cell may hold a line for the shell
        return False


def without_comments(text: str) -> str:
    "Comments of HTML are for readers of the raw notebook."
    return re.sub(r"<!--.*?-->", "", text, flags=re.S)


class Stage:
    "Everything that is written into the staged folder."

    def __init__(self, out: Path):
        self.out = out
        self.modules = read_package()
        self.names = Names(self.modules)
        self.chapters: list[Chapter] = []
        self.problems: list[str] = []
        self.text: set[str] = set()  # every character of every page

    def write(self, name: str, text: str) -> None:
        path = self.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        self.text.update(text)

    # -- one notebook

    def link_names(self, text: str, chapter: Chapter, imported: set[str]) -> str:
        def one(match: re.Match) -> str:
            full = self.names.resolve(match[2], chapter.module, imported)
            role = "mod" if full in self.modules else "obj"
            return f"{match[1]}{{py:{role}}}`{match[2]} <{full}>`" if full else match[0]

        def prose(part: str) -> str:
            lines = part.split("\n")  # headings stay plain: their text becomes an anchor
            return "\n".join(ln if ln.startswith("#") else re.sub(r"(^|[^`\[\\}])`([A-Za-z_][\w.]*(?:\(\))?)`(?!`)", one, ln) for ln in lines)

        return outside_code(text, prose)

    def fix_links(self, text: str, source: Path) -> str:
        "Links between notebooks lead to pages, pictures and other files come along; a link to nothing is a problem."

        def target(match: re.Match) -> str:
            before, link, after = match.groups()
            if re.match(r"[a-z]+:|#|/|$", link) or link.startswith("attachment:"):
                return match[0]
            link, _, anchor = link.partition("#")
            path = (source.parent / unquote(link)).resolve()
            if not path.exists():
                self.problems.append(f"{source.relative_to(ROOT)}: the link {link} leads nowhere")
                return match[0]
            if path.suffix == ".ipynb" and path.is_relative_to(NBS):
                return f"{before}/{page_of(path)}.ipynb{'#' + anchor if anchor else ''}{after}"
            if path == CONTRIBUTING:
                return f"{before}/contributing.md{'#' + anchor if anchor else ''}{after}"
            if path.suffix == ".md" and path.parent == DOCS:
                return f"{before}/{path.name}{'#' + anchor if anchor else ''}{after}"
            if path.is_dir() or not path.is_relative_to(ROOT):
                return re.sub(r"^\[(.*)\]\($", r"\1", before) if before.startswith("[") else match[0]
            copy = Path("_files") / path.relative_to(ROOT)
            (self.out / copy).parent.mkdir(parents=True, exist_ok=True)
            if path.suffix.lower() in (".png", ".svg", ".jpg", ".jpeg", ".gif", ".webp"):
                shutil.copy(path, self.out / copy)
                return f"{before}/{copy}{after}"
            shutil.copy(path, self.out / f"{copy}.txt")  # a file for reading, not a page
            return f"{before}/{copy}.txt{after}"

        def prose(part: str) -> str:
            part = re.sub(r"(!?\[[^\]\n]*\]\()([^)\s]+)((?:\s+\"[^\"]*\")?\))", target, part)
            return re.sub(r"(<img\b[^>]*?\bsrc=\")([^\"]+)(\")", target, part)

        return outside_code(text, prose)

    def notebook(self, path: Path) -> Chapter:
        nb = json.loads(path.read_text(encoding="utf-8"))
        parts = path.relative_to(NBS).parts
        chapter = Chapter(path, page_of(path), re.sub(r"^\d+[_-]", "", parts[0]) if len(parts) > 1 else "")
        sources = ["".join(c["source"]) for c in nb["cells"]]
        for source in sources:
            module = directives(source)[0].get("default_exp")
            if module:
                chapter.module = f"scalelab.{module}"
        imported = set()
        for match in re.finditer(r"^\s*from (scalelab[\w.]*) import ([^#\n(]+|\([^)]*\))", "\n".join(sources), re.M):
            imported.update(f"{match[1]}.{name.strip(' ()').split(' as ')[0]}" for name in match[2].replace("\n", " ").split(","))
        cells, n_export = [], 0
        for source, cell in zip(sources, nb["cells"]):
            if cell["cell_type"] == "markdown":
                cells += self.prose_cell(source, chapter, imported)
            elif cell["cell_type"] == "code":
                label = f"cell-{chapter.page.replace('/', '-')}-{n_export}"
                cells += self.code_cell(source, cell, chapter, label)
                n_export += "export" in directives(source)[0]
        if not chapter.title:
            self.problems.append(f"{path.relative_to(ROOT)}: no title; its first cell must begin with `# Title`")
            chapter.title = chapter.page
        if chapter.module in self.modules:
            self.modules[chapter.module].chapter = chapter.page
        self.collect_verdicts(sources, nb["cells"], chapter)
        for i, cell in enumerate(cells):
            cell["id"] = f"c{i}"
        meta = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}, "language_info": {"name": "python", "pygments_lexer": "python"}}
        self.write(f"{chapter.page}.ipynb", json.dumps({"cells": cells, "metadata": meta, "nbformat": 4, "nbformat_minor": 5}, ensure_ascii=False, indent=1))
        return chapter

    def prose_cell(self, source: str, chapter: Chapter, imported: set[str]) -> list[dict]:
        def cell(text: str) -> dict:
            return {"cell_type": "markdown", "metadata": {}, "source": text}

        found, source = directives(source)
        if "hide" in found or not source.strip():
            return []
        source = outside_code(self.link_names(self.fix_links(source, chapter.source), chapter, imported), without_comments)
        heading = re.search(r"^# +(.+)$", source, re.M)
        if chapter.title or not heading:
            return [cell(source)]
        chapter.title = heading[1].strip()
        lede = re.search(r"^> ?(.+(?:\n> ?.+)*)", source, re.M)
        chapter.lede = re.sub(r"\n> ?", " ", lede[1]) if lede else ""
        place = f"`{chapter.source.relative_to(ROOT)}`"
        if chapter.module in self.modules:
            place = f"{{py:mod}}`{chapter.module}` · made from {place}"
        if chapter.source.stem == "index":
            return [cell(source)]
        cut = lede.end() if lede else heading.end()
        return [cell(f"{source[:cut]}\n\n{{.chapter-meta}}\n{place}\n\n{source[cut:].lstrip()}")]

    def code_cell(self, source: str, cell: dict, chapter: Chapter, label: str) -> list[dict]:
        found, source = directives(source)
        if "hide" in found or "default_exp" in found or found.get("include") == "false" or not source.strip():
            return []
        outputs = [] if found.get("output") == "false" else [o for o in cell["outputs"] if o.get("name") != "stderr"]
        tags = set(cell["metadata"].get("tags", []))
        before = []
        if any(d in found for d in ("export", "exports", "exporti")):
            tags.add("exported")
            defined = re.findall(r"^(?:async def|def|class) (\w+)|^(\w+)\s*(?::[^=\n]+)?=", source, re.M)
            if chapter.module in self.modules and defined:
                self.modules[chapter.module].cells.update({a or b: label for a, b in defined})
                before = [{"cell_type": "markdown", "metadata": {}, "source": f"({label})="}]
        if any("image/png" in o.get("data", {}) or "image/svg+xml" in o.get("data", {}) for o in outputs) or found.get("code-fold") == "true":
            tags.add("hide-input")
        if source.count("\n") > 5 and only_imports(source):
            tags.add("hide-input")  # a list of names to scroll past
        if found.get("echo") == "false":
            tags.add("remove-input")
        metadata = {"tags": sorted(tags)} if tags else {}
        return [*before, {"cell_type": "code", "execution_count": None, "metadata": metadata, "outputs": outputs, "source": source}]

    def collect_verdicts(self, sources: list[str], cells: list[dict], chapter: Chapter) -> None:
        inside = False
        for source, cell in zip(sources, cells):
            if cell["cell_type"] != "markdown":
                shown = ["".join(o["data"]["text/markdown"]) for o in cell.get("outputs", []) if "text/markdown" in o.get("data", {})]
                if not shown:
                    continue
                source = "\n".join(shown)  # a table made from the files of the verdicts
            rows = [split_row(line) for line in source.splitlines() if line.lstrip().startswith("|")]
            if rows and [cell.lower() for cell in rows[0][:2]] == ["claim", "verdict"]:  # other tables answer questions of our own
                for row in rows[2:]:
                    if len(row) != 3:
                        self.problems.append(f"{chapter.source.relative_to(ROOT)}: a verdict needs claim, verdict and measure, found {len(row)} columns: {row[0][:60]}")
                    else:
                        chapter.verdicts.append(row)
            heading = re.search(r"^## +(.+)$", source, re.M)
            if heading:
                inside = heading[1].strip().lower().startswith(("verdict", "what this does not cover"))
                source = source[heading.end() :]
            if inside:
                rest = "\n".join(line for line in source.splitlines() if not line.lstrip().startswith("|")).strip()
                chapter.open_ends = f"{chapter.open_ends}\n\n{rest}".strip()

    # -- the pages that are made, not written

    def ledger(self) -> None:
        judged = [c for c in self.chapters if c.verdicts]
        counts = Counter(kind_of(row[1]) for c in judged for row in c.verdicts)
        total = sum(counts.values())
        text = ["# The claims ledger", "", "> Every claim that a chapter has tried, with its verdict and what was measured, collected from the ends of the chapters.", ""]
        text += [f"{total} claims from {len(judged)} chapters: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind]) + ".", ""] if total else ["No chapter has a verdict yet.", ""]
        for room in dict.fromkeys(c.room for c in judged):
            text += [f"## {room_title(room)}", "", "| claim | verdict | measured | chapter |", "|---|---|---|---|"]
            for chapter in (c for c in judged if c.room == room):
                for row in chapter.verdicts:
                    cells = [self.fix_links(self.link_names(cell, chapter, set()), chapter.source) for cell in row[:3]]
                    text.append(f"| {' | '.join(cells)} | [{chapter.title}](/{chapter.page}.ipynb) |")
            text.append("")
        ends = [c for c in judged if c.open_ends]
        if ends:
            text += ["## What is still open", ""]
            for c in ends:
                text += [f"[{c.title}](/{c.page}.ipynb)", f": {outside_code(c.open_ends, lambda t: re.sub(chr(10) + '+', ' ', self.fix_links(t, c.source)))}", ""]
        self.write("ledger.md", "\n".join(text))

    def api(self) -> None:
        rows = []
        for module in self.modules.values():
            if not module.symbols and not module.doc:
                continue
            self.write(f"api/{module.name}.md", ApiPage(module).text)
            rows.append(f"| {{py:mod}}`{module.name}` | {escape(module.doc.splitlines()[0]) if module.doc else ''} |")
        pages = "\n".join(m.name for m in self.modules.values() if m.symbols or m.doc)
        head = "# API\n\n> Every module, class and function that the notebooks export; each entry leads back to the cell that builds it.\n"
        self.write("api/index.md", f"{head}\n| module | holds |\n|---|---|\n" + "\n".join(rows) + f"\n\n```{{toctree}}\n:hidden:\n:titlesonly:\n\n{pages}\n```\n")

    def index(self) -> None:
        rooms = dict.fromkeys(c.room for c in self.chapters if c.room)
        loose = [c for c in self.chapters if not c.room and c.page != "index"]
        pages = sorted(["contributing.md", *(p.name for p in DOCS.glob("*.md") if p.name != "index.md")])
        text = ["## Chapters", ""]
        for room in rooms:
            text += [f"**{room_title(room)}**", ""]
            text += [f"- [{c.title}](/{c.page}.ipynb)\\\n  {c.lede}".rstrip("\\\n ") for c in self.chapters if c.room == room] + [""]
        for caption, entries in [*((room_title(r), [f"/{c.page}" for c in self.chapters if c.room == r]) for r in rooms),
                                 ("Reference", [*(f"/{c.page}" for c in loose), "/ledger", *(f"/{p[:-3]}" for p in pages), "/api/index"])]:
            text += ["```{toctree}", ":hidden:", ":titlesonly:", f":caption: {caption}", "", *entries, "```", ""]
        listing = "\n".join(text)
        path = self.out / "index.ipynb"
        if path.exists():
            nb = json.loads(path.read_text(encoding="utf-8"))
            nb["cells"].append({"cell_type": "markdown", "id": "chapters", "metadata": {}, "source": listing})
            path.write_text(json.dumps(nb, ensure_ascii=False, indent=1), encoding="utf-8")
        else:
            summary = re.search(r'^description = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)[1]
            self.write("index.md", f"# scalelab\n\n> {summary}.\n\n{listing}")

    def static(self) -> None:
        folder = self.out / "_static"
        (folder / "mathjax").mkdir(parents=True)
        shutil.copy(DOCS / "custom.css", folder)
        shutil.copy(installed(*MATHJAX[:2], MATHJAX[2]), folder / "mathjax/tex-svg-full.js")
        characters = "".join(sorted(c for c in self.text if CJK.match(c)))
        subset_font(installed(*CJK_FONT), characters, folder / "book-cjk.woff")

    def run(self) -> None:
        for path in sorted(p for p in NBS.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts):
            self.chapters.append(self.notebook(path))
        for path in DOCS.glob("*.md"):
            self.write(path.name, self.fix_links(path.read_text(encoding="utf-8"), path))
        self.write("contributing.md", self.fix_links(CONTRIBUTING.read_text(encoding="utf-8"), CONTRIBUTING))
        self.ledger()
        self.api()
        self.index()
        self.static()


KINDS = ("hold", "hold under a condition that the verdict names", "hold in part", "do not hold", "are open or not tested yet")


def kind_of(verdict: str) -> str:
    "The row of the summary that a verdict belongs to; its own words stand in the table."
    text = verdict.strip(" .*_`").lower()
    if re.match(r"(does not|doesn't|do not|don't) hold|refuted|wrong|false", text):
        return KINDS[3]
    if re.match(r"holds? (only )?in part|partly", text):
        return KINDS[2]
    if text in ("holds", "hold", "confirmed"):
        return KINDS[0]
    return KINDS[1] if text.startswith("hold") else KINDS[4]


def room_title(room: str) -> str:
    return ROOMS.get(room, room.replace("_", " ").capitalize() or "The book")


# ---- API pages ------------------------------------------------------------------------------------------------------------


def escape(text: str) -> str:
    "Plain text as Markdown; what stands in backticks stays code."
    parts = re.split(r"(`[^`\n]+`)", text)
    return "".join(p if i % 2 else re.sub(r"([\\`*_\[\]<>{}$|#~^!&])", r"\\\1", p) for i, p in enumerate(parts))


class ApiPage:
    "One module as Markdown with the directives of Sphinx's Python domain."

    def __init__(self, module: Module):
        self.module = module
        body = [f"# `{module.name}`", "", f"> {escape(' '.join(module.doc.split()))}" if module.doc else "", ""]
        if module.chapter:
            body += [f"Built and tested in [](/{module.chapter}.ipynb).", ""]
        body += [f"```{{py:module}} {module.name}", "```", ""]
        for name, node in module.symbols:
            body += self.symbol(name, node)
        self.text = "\n".join(body) + "\n"

    def symbol(self, name: str, node: ast.AST) -> list[str]:
        if isinstance(node, ast.ClassDef):
            return self.cls(node)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return self.directive("function", f"{name}{signature(node)}", [], [*self.doc(node, parameters(node)), *self.source(name)])
        value = ast.unparse(node.value) if node.value is not None else ""
        written = ast.get_source_segment("\n".join(self.module.lines), node.value) if value else ""
        if written and "\\u" in written and "\n" not in written:  # a bound of a range such as \u9fff has no glyph to show
            value = written
        if value[:1] in ("'", '"') and (value is written or not isinstance(node.value, ast.Constant)):  # YAML: what begins like a quoted scalar must be one
            value = json.dumps(value, ensure_ascii=False)
        options = [f":value: {value}"] if value and len(value) <= 90 else []
        if isinstance(node, ast.AnnAssign):
            options.append(f":type: {ast.unparse(node.annotation)}")
        comment, line = [], node.lineno - 2
        while line >= 0 and self.module.lines[line].startswith("# ") and not self.module.lines[line].startswith("# %%"):
            comment.insert(0, self.module.lines[line][2:])
            line -= 1
        return self.directive("data", name, options, [escape(" ".join(comment)), "", *self.source(name)])

    def cls(self, node: ast.ClassDef) -> list[str]:
        methods = {n.name: n for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
        fields = [n for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name) and not n.target.id.startswith("_")]
        dataclass_ = any("dataclass" in ast.unparse(d) for d in node.decorator_list)
        bases = [ast.unparse(b) for b in node.bases]
        if "__init__" in methods:
            sig, names = signature(methods["__init__"], method=True).split(" -> ")[0], parameters(methods["__init__"])
        elif dataclass_ or "NamedTuple" in bases:
            sig, names = "(" + ", ".join(field_text(f) for f in fields if "ClassVar" not in ast.unparse(f.annotation)) + ")", {f.target.id for f in fields}
        else:
            sig, names = "", set()
        body = ["", f"Bases: {', '.join(f'`{b}`' for b in bases)}", ""] if bases else []
        body += [*self.doc(node, names | {f.target.id for f in fields} | set(methods)), *self.source(node.name)]
        for member in public_members(node):
            marks = {ast.unparse(d).split("(")[0].split(".")[-1] for d in member.decorator_list}
            if marks & {"setter", "deleter", "overload"}:
                continue
            if marks & {"property", "cached_property"}:
                options = [f":type: {ast.unparse(member.returns)}"] if member.returns else []
                body += self.directive("property", member.name, options, self.doc(member, set()), 4)
            else:
                options = [f":{mark}:" for mark in ("classmethod", "staticmethod") if mark in marks]
                text = signature(member, method="staticmethod" not in marks)
                body += self.directive("method", f"{member.name}{text}", options, self.doc(member, parameters(member)), 4)
        return self.directive("class", f"{node.name}{sig}", [], body, 6)

    def source(self, name: str) -> list[str]:
        label = self.module.cells.get(name)
        return ["", "{.source-link}", f"[where it is built](#{label})", ""] if label else []

    @staticmethod
    def directive(kind: str, head: str, options: list[str], body: list[str], fence: int = 5) -> list[str]:
        return ["`" * fence + f"{{py:{kind}}} {' '.join(head.split())}", *options, "", *body, "`" * fence, ""]

    @staticmethod
    def doc(node: ast.AST, names: set[str]) -> list[str]:
        "A docstring as Markdown: paragraphs keep their lines, and `name: what it means` shows the name as code."
        text = ast.get_docstring(node)
        if not text:
            return [""]
        listed = r"(?:(?<=^)|(?<=; )|(?<=\. )|(?<=, ))((?:%s)(?:, (?:%s))*)(?=: )" % (("|".join(map(re.escape, sorted(names, key=len, reverse=True))),) * 2)
        out: list[str] = []
        for paragraph in re.split(r"\n\s*\n", text):
            lines = paragraph.split("\n")
            if re.match(r"(Args|Attributes|Returns|Raises|Yields):$", lines[0]) and len(lines) > 1:
                out += [f"**{lines[0][:-1].replace('Args', 'Arguments')}**", ""]
                for line in lines[1:]:
                    key, colon, rest = line.strip().partition(": ")
                    if colon and re.fullmatch(r"[\w.*, ]+", key):
                        out.append(f"- `{key}`: {escape(rest)}")
                    elif out[-1].startswith("- "):
                        out[-1] += f" {escape(line.strip())}"
                    else:
                        out.append(escape(line.strip()) + "\\")
                out.append("")
                continue
            shown = []
            for line in lines:
                pieces = re.split(listed, line.strip()) if names else [line.strip()]
                shown.append("".join("`" + p.replace(", ", "`, `") + "`" if i % 2 else escape(p) for i, p in enumerate(pieces)))
            shown = [re.sub(r"^(\d+)([.)])|^([-+:=%(])", lambda m: f"{m[1]}\\{m[2]}" if m[1] else f"\\{m[3]}", s) for s in shown]
            joined = shown[0]
            for before, line in zip(shown, shown[1:]):  # a line that ends a sentence stays a line, others flow
                joined += ("\\\n" if before[-1:] in ".:;" else " ") + line
            out += [joined, ""]
        return out


def parameters(node: ast.FunctionDef) -> set[str]:
    a = node.args
    return {p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg)))} - {"self", "cls"}


def signature(node: ast.FunctionDef, method: bool = False) -> str:
    args = ast.parse(f"def f({ast.unparse(node.args)}): 0").body[0].args
    if method and (args.posonlyargs or args.args):
        (args.posonlyargs or args.args).pop(0)
    return f"({ast.unparse(args)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")


def field_text(node: ast.AnnAssign) -> str:
    text = f"{node.target.id}: {ast.unparse(node.annotation)}"
    if node.value is None:
        return text
    value = node.value
    if isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] == "field":
        keys = {k.arg: k.value for k in value.keywords}
        if "default_factory" in keys:
            made = keys["default_factory"]
            return f"{text} = {ast.unparse(made.body) if isinstance(made, ast.Lambda) else ast.unparse(made) + '()'}"
        return f"{text} = {ast.unparse(keys['default'])}" if "default" in keys else text
    return f"{text} = {ast.unparse(value)}"


# ---- Files from elsewhere -------------------------------------------------------------------------------------------------


def installed(package: str, name: str, sha256: str = "") -> Path:
    "A file of an installed distribution, found without importing it."
    try:
        path = Path(importlib.metadata.distribution(package).locate_file(name))
    except importlib.metadata.PackageNotFoundError:
        raise SiteError(f"{package} is not installed; the site takes {Path(name).name} from it: pip install 'scalelab[docs]'") from None
    if not path.is_file():
        raise SiteError(f"{package} {importlib.metadata.version(package)} does not hold {name}; install the version that constraints.txt names")
    if sha256 and hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise SiteError(f"{path.name} of {package} {importlib.metadata.version(package)} is another file than the one we know; look at it, then change MATHJAX in tools/site.py")
    return path


def subset_font(source: Path, characters: str, target: Path) -> None:
    "The glyphs of `characters` as a web font; kept from build to build, as cutting it takes longer than the rest."
    key = hashlib.sha256(f"{source.stat().st_size} {characters}".encode()).hexdigest()[:16]
    kept = CACHE / f"cjk-{key}.woff"
    if not kept.exists():
        import logging

        from fontTools import subset

        logging.getLogger("fontTools").setLevel(logging.ERROR)
        options = subset.Options(flavor="woff", layout_features=[], hinting=False, desubroutinize=True, notdef_outline=True)
        font = subset.load_font(str(source), options, lazy=True)
        cutter = subset.Subsetter(options)
        cutter.populate(text=characters or "\u4e00")
        cutter.subset(font)
        CACHE.mkdir(parents=True, exist_ok=True)
        for old in CACHE.glob("cjk-*.woff"):
            old.unlink()
        subset.save_font(font, str(kept), options)
    shutil.copy(kept, target)


# ---- Building and looking at what was built -------------------------------------------------------------------------------


def fingerprint() -> str:
    "Hash of everything that the site is made from."
    digest = hashlib.sha256()
    paths = [*NBS.rglob("*.ipynb"), *PACKAGE.rglob("*.py"), *DOCS.glob("*.*"), Path(__file__), ROOT / "pyproject.toml"]
    for path in sorted(p for p in paths if p.is_file() and ".ipynb_checkpoints" not in p.parts):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    for package in ("sphinx", "myst-nb", "myst-parser", "furo", MATHJAX[0], CJK_FONT[0]):
        try:
            digest.update(f"{package} {importlib.metadata.version(package)}".encode())
        except importlib.metadata.PackageNotFoundError:
            raise SiteError(f"{package} is not installed: pip install 'scalelab[docs]'") from None
    return digest.hexdigest()


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag, attrs):
        at = dict(attrs)
        self.ids.update(filter(None, (at.get("id"), at.get("name") if tag == "a" else None)))
        if tag == "a" and at.get("href"):
            self.links.append(at["href"])
        self.loads += [at[k] for k in ("src", "data") if at.get(k) and tag != "a"]
        if tag == "link" and at.get("href"):
            self.loads.append(at["href"])


def audit(site: Path) -> list[str]:
    "Links that lead nowhere, and anything that a page would load from the network."
    pages, problems = {}, []
    for path in site.rglob("*.html"):
        pages[path.resolve()] = parser = Links()
        parser.feed(path.read_text(encoding="utf-8"))
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        problems += [f"{name} loads {link} from the network" for link in page.loads if re.match(r"(https?:)?//", link)]
        for link in {*page.links, *page.loads}:
            if re.match(r"[a-z][a-z0-9+.-]*:|//", link):
                continue
            target, _, anchor = link.partition("#")
            file = (path.parent / unquote(target.split("?")[0])).resolve() if target else path
            if not file.exists():
                problems.append(f"{name}: {link} leads to no file")
            elif anchor and file in pages and unquote(anchor) not in pages[file].ids:
                problems.append(f"{name}: {link} leads to no place on that page")
    for path in site.rglob("*.css"):
        problems += [f"{path.relative_to(site)} loads {m} from the network" for m in re.findall(r"url\([\"']?((?:https?:)?//[^)\"']+)", path.read_text(encoding="utf-8"))]
    return sorted(problems)


def build(out: Path) -> list[str]:
    "Build into `out`, replacing it only when all went well; the problems otherwise."
    shutil.rmtree(STAGED, ignore_errors=True)
    STAGED.mkdir(parents=True)
    stage = Stage(STAGED)
    stamp = fingerprint()
    stage.run()
    out.parent.mkdir(parents=True, exist_ok=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as tmp:  # a folder that git ignores
        site = Path(tmp) / "site"
        command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", "-E", "-j", str(min(4, os.cpu_count() or 1)), "-c", str(DOCS), "-d", f"{tmp}/trees", str(STAGED), str(site)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONWARNINGS": "ignore", "NO_COLOR": "1"})
        said = [line.replace(f"{STAGED}/", "") for line in (done.stdout + done.stderr).splitlines() if line.strip() and "treated as errors" not in line]
        problems = stage.problems + (said or ["sphinx-build failed"] if done.returncode else [])
        if site.is_dir() and not done.returncode:
            shutil.rmtree(site / ".doctrees", ignore_errors=True)
            problems += audit(site)
        if problems:
            return problems
        (site / ".stamp").write_text(stamp, encoding="utf-8")
        (site / ".nojekyll").touch()
        if out.exists():
            shutil.move(out, Path(tmp) / "old")
        shutil.move(site, out)
    return []


def is_fresh(out: Path) -> bool:
    stamp = out / ".stamp"
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == fingerprint()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(dest="command", required=True)
    make = sub.add_parser("build")
    make.add_argument("--force", action="store_true", help="build even if nothing has changed")
    make.add_argument("--out", type=Path, default=ROOT / "_docs", help="where the site goes")
    sub.add_parser("check")
    args = parser.parse_args(argv)
    started = time.perf_counter()
    try:
        if args.command == "check":
            with tempfile.TemporaryDirectory() as tmp:
                out = Path(tmp) / "site"
                problems, size, pages = build(out), *weigh(out)
        else:
            out = args.out.resolve()
            if not args.force and is_fresh(out):
                print(f"site: {out / 'index.html'} is up to date")
                return 0
            problems, size, pages = build(out), *weigh(out)
    except SiteError as err:
        problems, size, pages = [str(err)], 0, 0
    for problem in problems[:60]:
        print(problem, file=sys.stderr)
    if problems:
        print(f"site: {len(problems)} problems, nothing was replaced", file=sys.stderr)
        return 1
    where = "" if args.command == "check" else f": open {out / 'index.html'}"
    print(f"site: {pages} pages, {size / 1e6:.1f} MB, {time.perf_counter() - started:.0f} s{where}")
    return 0


def weigh(out: Path) -> tuple[int, int]:
    files = [p for p in out.rglob("*") if p.is_file()]
    return sum(p.stat().st_size for p in files), sum(p.suffix == ".html" for p in files)


if __name__ == "__main__":
    sys.exit(main())
