# %% [markdown]
# # The page of a review
#
# > One HTML file that shows a text at a time, takes three keys, and gives the labels back: no network, no server, no hint of what was kept.
#
# A rater judges best where nothing else is to be seen and nothing has to be installed. So the review of a cleaned
# corpus is a file that can be sent by mail.

# %%
#| default_exp data.review_page

# %%
#| export
from __future__ import annotations

import html
import json

import xxhash

# %% [markdown]
# ## Which draw is this?
# Labels without their cards are worthless, so the cards have a name, and every label carries it.

# %%
#| export
LABELS = ("good", "bad", "unsure")


def sample_name(cards: list[dict]) -> str:
    "A short name that is equal for equal cards."
    return xxhash.xxh3_64_hexdigest(json.dumps(cards, ensure_ascii=False).encode("utf-8", "surrogatepass"))[:12]

# %%
assert sample_name([{"card": 1, "text": "天"}]) == sample_name([{"card": 1, "text": "天"}]) != sample_name([])
assert len(sample_name([{"card": 1, "text": "\ud800"}])) == 12

# %% [markdown]
# ## The page
# One file that needs no network and no server: the cards, three keys, and a download of the labels. What was judged
# so far lives in the browser's storage, so that a coffee break costs nothing. The page knows no more than the rater
# does.

# %%
#| export
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fff; --line: #ccc; --soft: #f4f4f2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #1a1b1e; --line: #444; --soft: #26282c; } }
body { font: 16px/1.6 system-ui, sans-serif; color: var(--ink); background: var(--paper); }
body { max-width: 50rem; margin: auto; padding: 1rem; }
pre, button, input { font: inherit; color: inherit; background: var(--soft); border: 1px solid var(--line);
  border-radius: 6px; padding: .4rem .8rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; min-height: 16rem; max-height: 60vh; overflow-y: auto; }
button[aria-pressed=true] { outline: 3px solid #0072b2; }
kbd { border: 1px solid var(--line); border-radius: 3px; padding: 0 .3em; font-size: .85em; }
nav { display: flex; gap: .5rem; flex-wrap: wrap; align-items: center; margin: .8rem 0; }
progress { width: 100%; accent-color: #0072b2; }
"""
_BODY = """
<h1>Good or bad?</h1>
<p>Would you want a language model to read this? Judge the text alone. <b>Good</b>: a person could learn something
from it, the language or a fact. <b>Bad</b>: advertising, menus, damage, empty repetition.</p>
<nav><label>Your name <input id="rater" autocomplete="off"></label><span id="at"></span></nav>
<progress id="done" value="0" max="1"></progress>
<pre id="text" tabindex="0"></pre>
<nav><button data-label="good">Good <kbd>1</kbd></button><button data-label="bad">Bad <kbd>2</kbd></button>
<button data-label="unsure">Unsure <kbd>3</kbd></button><button id="back">Back <kbd>←</kbd></button>
<button id="next">Next <kbd>→</kbd></button></nav>
<nav><button id="json">Download labels (JSON)</button><button id="csv">Download labels (CSV)</button></nav>
"""

# %%
#| export
_SCRIPT = """
const data = JSON.parse(document.getElementById("cards").textContent);
const cards = data.cards, store = "review-" + data.sample;
const $ = id => document.getElementById(id), keys = {"1": "good", "2": "bad", "3": "unsure"};
let labels = {}, at = 0;
try {
  const old = JSON.parse(localStorage.getItem(store) || "{}");
  labels = old.labels || {}; $("rater").value = old.rater || "";
} catch (error) {}
const first = cards.findIndex(c => !(c.card in labels));
at = first < 0 ? 0 : first;
function save() {
  try { localStorage.setItem(store, JSON.stringify({labels, rater: $("rater").value})); } catch (error) {}
}
function show() {
  const card = cards[at], n = Object.keys(labels).length;
  $("text").textContent = card.text; $("text").scrollTop = 0;
  $("at").textContent = `card ${at + 1} of ${cards.length}, ${n} judged`;
  $("done").max = cards.length; $("done").value = n;
  for (const b of document.querySelectorAll("[data-label]"))
    b.setAttribute("aria-pressed", labels[card.card] === b.dataset.label);
}
function move(by) { at = Math.min(Math.max(at + by, 0), cards.length - 1); show(); }
function judge(label) { labels[cards[at].card] = label; save(); at + 1 < cards.length ? move(1) : show(); }
function rows() {
  const rater = $("rater").value.trim() || "anonymous";
  const judged = cards.filter(c => c.card in labels);
  return judged.map(c => ({sample: data.sample, rater, card: c.card, label: labels[c.card]}));
}
function download(name, text, type) {
  const a = document.createElement("a");
  a.href = URL.createObjectURL(new Blob([text], {type})); a.download = name; a.click();
}
const quote = v => '"' + String(v).replaceAll('"', '""') + '"';
$("json").onclick = () => download("labels.json", JSON.stringify(rows()), "application/json");
$("csv").onclick = () => download("labels.csv", ["sample,rater,card,label",
  ...rows().map(r => [r.sample, r.rater, r.card, r.label].map(quote).join(","))].join("\\n") + "\\n", "text/csv");
for (const b of document.querySelectorAll("[data-label]")) b.onclick = () => judge(b.dataset.label);
$("back").onclick = () => move(-1); $("next").onclick = () => move(1); $("rater").oninput = save;
document.addEventListener("keydown", e => {
  if (e.target === $("rater") || e.ctrlKey || e.metaKey || e.altKey) return;
  if (e.key in keys) judge(keys[e.key]);
  else if (e.key === "ArrowLeft") move(-1); else if (e.key === "ArrowRight") move(1); else return;
  e.preventDefault();
});
show();
"""

# %%
#| export
def review_page(cards: list[dict], title: str = "Review") -> str:
    "The cards as one HTML page without outside parts; it holds no hint of what was kept."
    data = json.dumps({"sample": sample_name(cards), "cards": cards}, ensure_ascii=False).replace("<", "\\u003c")
    data = data.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate can't be written
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<style>{_STYLE}</style></head><body>{_BODY}\n<script type="application/json" id="cards">{data}</script>\n'
        f"<script>{_SCRIPT}</script></body></html>\n")

# %%
page = review_page([{"card": 1, "text": "</script><b>天气</b>"}])
assert page.count("</script>") == 2 and "http" not in page.replace("http-equiv", "") and "天气" in page
assert review_page([{"card": 1, "text": "\ud800"}]).encode()

# %% [markdown]
# The tests of the project open the page in a browser without a network, press the keys, and read back what it
# downloads.
#
# ## Verdict
# The page is an instrument and claims nothing; what a review finds is the next chapter's.
