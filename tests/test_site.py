"""The book's site, opened from disk in a browser that can't reach any network: pages, search, mathematics, Chinese."""
from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from browser import console_page, dump_dom, dump_dom_and_hosts, read_result, require_chromium, screenshot

ROOT = Path(__file__).resolve().parent.parent


def load_tool():
    "tools/site.py as a module; its name is that of a standard module, so it gets another one."
    spec = importlib.util.spec_from_file_location("book_site", ROOT / "tools/site.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["book_site"] = module
    spec.loader.exec_module(module)
    return module


tool = load_tool()
HAS_DOCS = all(importlib.util.find_spec(name) for name in ("sphinx", "myst_nb", "furo"))


def lacks(reason: str):
    if os.environ.get("SCALELAB_REQUIRE_ALL") == "1":
        pytest.fail(f"{reason}, and SCALELAB_REQUIRE_ALL=1 forbids skipping")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def site() -> Path:
    "`_docs`, built now unless it is up to date. Warnings, dead links and loads from the network fail the build."
    if not HAS_DOCS:
        lacks("the site needs the docs extra: pip install 'scalelab[docs]'")
    out = ROOT / "_docs"
    done = subprocess.run([sys.executable, str(ROOT / "tools/site.py"), "build"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def pages(site: Path) -> dict[str, str]:
    return {str(p.relative_to(site)): p.read_text(encoding="utf-8") for p in sorted(site.rglob("*.html"))}


# ---- what can be seen without a browser


def test_every_notebook_and_module_has_its_page(site):
    built = pages(site)
    for path in (ROOT / "nbs").rglob("*.ipynb"):
        if ".ipynb_checkpoints" not in path.parts:
            assert f"{tool.page_of(path)}.html" in built
    for module in tool.read_package().values():
        page = built[f"api/{module.name}.html"] if module.symbols else ""
        for name, _ in module.symbols:
            assert f'id="{module.name}.{name}"' in page, f"{module.name}.{name} is exported but has no entry"


def test_hidden_cells_and_directives_stay_out(site):
    built = pages(site)
    for path in (ROOT / "nbs").rglob("*.ipynb"):
        page = re.sub(r"<[^>]+>", "", built[f"{tool.page_of(path)}.html"])
        assert not re.search(r"^\s*#\|", page, re.M), path
        assert "default_exp" not in page, path


def test_plot_code_folds_and_exports_are_marked(site):
    text = "".join(pages(site).values())
    assert "tag_hide-input" in text and "tag_exported" in text
    for block in re.findall(r'<div class="cell tag_hide-input[^"]*"[^>]*>.*?</div>', text, re.S)[:20]:
        assert "<details" in block


def test_ledger_has_every_verdict(site):
    page = pages(site)["ledger.html"]
    rows = page.count("<tr") - page.count("<thead")
    want = 0
    for path in (ROOT / "nbs").rglob("*.ipynb"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            texts = [cell["source"]] if cell["cell_type"] == "markdown" else []
            texts += [o.get("data", {}).get("text/markdown") or o.get("text", "") for o in cell.get("outputs", [])]  # tables made from verdict files
            for lines in ("".join(text).splitlines() for text in texts):
                heads = [i for i, line in enumerate(lines) if re.match(r"\|\s*claim\s*\|\s*verdict\s*\|", line)]
                if heads:
                    want += sum(line.startswith("|") for line in lines[heads[0] + 2 :])
    assert rows == want > 0


def test_a_dead_link_and_a_network_load_are_found(tmp_path):
    "The audit can fail: a page with one of each fault."
    (tmp_path / "a.html").write_text('<a href="b.html">x</a><a href="#nowhere">y</a><img src="https://example.org/x.png"><a href="https://example.org">fine</a>', encoding="utf-8")
    found = tool.audit(tmp_path)
    assert len(found) == 3 and any("b.html" in f for f in found) and any("#nowhere" in f for f in found) and any("network" in f for f in found)


def test_names_link_only_where_they_are_certain():
    modules = tool.read_package()
    names = tool.Names(modules)
    assert names.resolve("atomic_write", "", set()) == "scalelab.core.config.atomic_write"
    assert names.resolve("scalelab.core.config", "", set()) == "scalelab.core.config"
    assert names.resolve("no_such_name", "", set()) is None
    assert names.resolve("style", "scalelab.core.plotting", set()) == "scalelab.core.plotting.style"
    assert names.resolve("style", "scalelab.data.stream", set()) is None  # a word like any other, there
    assert names.resolve("style", "scalelab.data.stream", {"scalelab.core.plotting.style"}) == "scalelab.core.plotting.style"


def test_table_rows_split_at_borders_only():
    assert tool.split_row("| a `x | y` | b \\| c | |") == ["a `x | y`", "b \\| c", ""]
    assert tool.outside_code("a\n```\na\n```\na", lambda t: t.replace("a", "b")) == "b\n```\na\n```\nb"


# ---- what needs a browser


def test_pages_open_from_disk(site):
    require_chromium()
    dom, hosts = dump_dom_and_hosts(site / "index.html")
    assert "<h1>scalelab" in dom and "Foundations" in dom
    assert not hosts, f"the page asked for {hosts}"


def test_search_finds_a_word(site):
    require_chromium()
    dom = dump_dom((site / "search.html").as_uri() + "?q=safetensors")
    assert "Search finished" in dom
    assert re.search(r'<a href="model/hf\.html[^"]*"', dom), "the chapter on the Hugging Face layout isn't among the results"
    nothing = dump_dom((site / "search.html").as_uri() + "?q=zyzzogeton")
    assert "did not match any documents" in nothing


def test_mathematics_is_drawn(site):
    require_chromium()
    with_math = {name: text for name, text in pages(site).items() if 'class="math ' in text}
    assert with_math
    with ThreadPoolExecutor(2) as pool:
        drawn = dict(zip(with_math, pool.map(lambda name: dump_dom_and_hosts(site / name), with_math)))
    for name, (dom, hosts) in drawn.items():
        formulas = len(re.findall(r'<(?:span|div) class="math ', with_math[name]))
        assert dom.count("<mjx-container") >= formulas > 0, f"{name}: {dom.count('<mjx-container')} of {formulas} formulas are drawn"
        assert "data-mjx-error" not in dom, f"{name}: {re.findall(r'data-mjx-error=.([^>]*)', dom)}"
        assert not hosts, f"{name} asked for {hosts}"


DRAW = """
await document.fonts.ready;
const draw = async (character, family) => {
  await document.fonts.load('40px ' + family, character);
  const canvas = document.createElement('canvas'); canvas.width = canvas.height = 60;
  const context = canvas.getContext('2d'); context.font = '40px ' + family; context.fillText(character, 8, 46);
  return context.getImageData(0, 0, 60, 60).data.join();
};
"""


def test_chinese_glyphs_of_the_page(site, tmp_path):
    "With the page's own font stack, different characters give different pictures, and none that of a missing glyph."
    require_chromium()
    everything = "".join(pages(site).values())
    characters = sorted({c for c in everything if "\u4e00" <= c <= "\u9fff"})
    assert len(characters) > 100, "the book shows Chinese"
    script = DRAW + """
    const family = getComputedStyle(document.body).getPropertyValue('--font-stack');
    const box = await draw('\\u{10fffe}', family), seen = new Map(); result = {boxes: [], same: []};
    for (const c of CHARACTERS) {
      const picture = await draw(c, family);
      if (picture === box) result.boxes.push(c);
      if (seen.has(picture)) result.same.push(seen.get(picture) + c);
      seen.set(picture, c);
    }
    """.replace("CHARACTERS", json.dumps("".join(characters)))
    css = (site / "_static/custom.css").as_uri()
    page = tmp_path / "glyphs.html"
    page.write_text(console_page("<p>中文</p>", script, f'<link rel="stylesheet" href="{css}">'), encoding="utf-8")
    result = read_result(dump_dom(page, 30_000))
    assert not result["boxes"], f"no glyph for {result['boxes']}"
    assert len(result["same"]) <= len(characters) // 50, f"drawn alike: {result['same']}"


def test_the_book_brings_its_own_glyphs(site):
    "The web font holds every Chinese character that a page shows, so a reader without Chinese fonts sees them too."
    from fontTools.ttLib import TTFont

    font = TTFont(site / "_static/book-cjk.woff")
    have = set(font.getBestCmap())
    want = {ord(c) for text in pages(site).values() for c in text if "\u4e00" <= c <= "\u9fff"}
    source = set(TTFont(tool.installed(*tool.CJK_FONT)).getBestCmap())
    assert not (want & source) - have
    assert len(want - source) <= 3, f"not in the font that we cut: {[chr(c) for c in want - source]}"


def test_the_books_font_is_loaded_from_disk(site, tmp_path):
    require_chromium()
    script = DRAW + "result = [await draw('训', '\"Book CJK\"'), await draw('练', '\"Book CJK\"'), await document.fonts.check('40px \"Book CJK\"', '训')]; result = [result[0] !== result[1], result[2], [...document.fonts].map(f => f.status)]"
    page = tmp_path / "font.html"
    page.write_text(console_page("", script, f'<link rel="stylesheet" href="{(site / "_static/custom.css").as_uri()}">'), encoding="utf-8")
    different, ready, status = read_result(dump_dom(page, 10_000))
    assert different and ready and status == ["loaded"]


def test_light_and_dark_differ(site, tmp_path):
    require_chromium()
    import matplotlib.image as image

    light = image.imread(screenshot(site / "ledger.html", tmp_path / "light.png"))
    dark = image.imread(screenshot(site / "ledger.html", tmp_path / "dark.png", dark=True))
    assert light[..., :3].mean() > 0.8 and dark[..., :3].mean() < 0.4
    assert light[..., :3].std() > 0.05, "an empty page"


def test_chinese_in_plots():
    "The house style draws Chinese with no glyph missing, and two characters differ from each other and from the empty box."
    code = """
import warnings; warnings.simplefilter("error")
import matplotlib; matplotlib.use("Agg")
import matplotlib.pyplot as plt, numpy as np
from scalelab.core.plotting import has_cjk_font, style
if not has_cjk_font():
    print("no font"); raise SystemExit
style()
def draw(text):
    fig = plt.figure(figsize=(1, 1)); fig.text(0.2, 0.3, text, fontsize=30); fig.canvas.draw()
    picture = np.asarray(fig.canvas.buffer_rgba()).copy(); plt.close(fig); return picture
one, two = draw("训"), draw("练")
try:
    draw("\\U0010fffe"); raise SystemExit("a missing glyph gave no warning: this test could not fail")
except UserWarning:
    warnings.simplefilter("ignore"); box = draw("\\U0010fffe")
assert (one != two).any() and (one != box).any() and (two != box).any() and (one < 128).any()
print("drawn")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    if "no font" in done.stdout:
        lacks("no Chinese font for plots (Debian: apt-get install fonts-noto-cjk; pip install 'scalelab[docs]')")
