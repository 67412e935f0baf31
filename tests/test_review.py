"""The review of a cleaned folder: the page judged by keys and clicks in a browser, its downloads scored, nothing given away."""
from __future__ import annotations

import json
from pathlib import Path

import browser
import pytest
import zstandard
from scalelab.core.config import UsageError
from scalelab.data.review import open_review, review_command, score

# Judges every card by its text: keys for most, a click for some, a step back to change one; then presses both download buttons.
RATER = """
<script>
(async () => {
  const press = key => document.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
  const blobs = [], result = {};
  URL.createObjectURL = blob => { blobs.push(blob); return "blob:x"; };
  HTMLAnchorElement.prototype.click = function () { (result.names ??= []).push(this.download); };
  document.getElementById("rater").value = "Ann, \\"A\\"";
  document.getElementById("rater").dispatchEvent(new Event("input"));
  const n = JSON.parse(document.getElementById("cards").textContent).cards.length;
  for (let i = 0; i < n; i++) {
    const bad = document.getElementById("text").textContent.includes("秒杀");
    if (i % 7 == 0) press("3");
    else if (i % 3 == 0) document.querySelector(`[data-label=${bad ? "bad" : "good"}]`).click();
    else press(bad ? "2" : "1");
  }
  for (let i = 0; i < n; i++) press("ArrowLeft");
  result.first = document.querySelector("[aria-pressed=true]").dataset.label;
  press("2");
  result.at = document.getElementById("at").textContent;
  document.getElementById("json").click(); document.getElementById("csv").click();
  result.texts = await Promise.all(blobs.map(b => b.text()));
  const out = document.createElement("pre"); out.id = "result"; out.textContent = JSON.stringify(result); document.body.append(out);
})();
</script></body>"""


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zstandard.compress("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()))


@pytest.fixture
def run(tmp_path) -> Path:
    "A cleaned folder: a tenth of the kept texts and half of what `repeated_lines` removed are advertising."
    folder = tmp_path / "cleaned"
    text = lambda i, bad: f"限时秒杀{i}！<b>全国包邮</b></script>" if bad else f"第{i}篇：今天天气很好。\n\n我们去散步。"
    kept = [{"id": f"kept-{i}", "text": text(i, i % 10 == 0)} for i in range(120)]
    write(folder / "documents/00000.jsonl.zst", kept[:50])
    write(folder / "documents/00001.jsonl.zst", kept[50:])
    rows = [{"id": f"spam-{i}", "text": text(i, True), "stage": "rules", "reason": "keyword_spam"} for i in range(40)]
    rows += [{"id": f"line-{i}", "text": text(i, i % 2), "stage": "rules", "reason": "repeated_lines"} for i in range(40)]
    rows += [{"id": f"twin-{i}", "text": text(i, False), "stage": "near", "reason": "near_duplicate"} for i in range(40)]
    write(folder / "samples.jsonl.zst", rows)
    return folder


def test_a_rater_in_a_browser(run, tmp_path, capsys):
    browser.require_chromium()
    assert review_command([str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    page = Path(told["page"]).read_text(encoding="utf-8")
    assert told["cards"] == 160 and not any(word in page for word in ("keyword_spam", "repeated_lines", "near_duplicate", "kept-", "spam-"))
    judged = tmp_path / "judged.html"
    judged.write_text(page.replace("</body>", RATER), encoding="utf-8")
    dom, hosts = browser.dump_dom_and_hosts(judged)
    assert hosts == set()
    result = browser.read_result(dom)
    assert result["names"] == ["labels.json", "labels.csv"] and result["first"] == "unsure" and result["at"] == "card 2 of 160, 160 judged"

    for name, text in zip(result["names"], result["texts"]):
        (tmp_path / name).write_text(text, encoding="utf-8")
    labels = json.loads(result["texts"][0])
    assert len(labels) == 160 and labels[0]["rater"] == 'Ann, "A"' and labels[0]["label"] == "bad"
    assert review_command([str(run), "--labels", str(tmp_path / "labels.json"), "--json"]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert review_command([str(run), "--labels", str(tmp_path / "labels.csv"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == scored, "the CSV says the same, and the last label of a rater counts once"
    assert len((run / "review/labels.jsonl").read_text().splitlines()) == 320, "labels are only ever added"

    spam, lines, kept = scored["rules"]["keyword_spam"], scored["rules"]["repeated_lines"], scored["kept"]
    assert spam["share"] == 1.0 and spam["low"] > 0.8 and spam["judged"] + spam["unsure"] == 30
    assert lines["low"] < 0.5 < lines["high"] and kept["low"] < 0.1 < kept["high"] and set(scored["rules"]) == {"keyword_spam", "repeated_lines"}


def test_the_page_can_be_looked_at(run, tmp_path):
    browser.require_chromium()
    image = pytest.importorskip("matplotlib.image")
    review_command([str(run), "--out", str(tmp_path / "page.html")])
    means = [image.imread(browser.screenshot(tmp_path / "page.html", tmp_path / f"{dark}.png", dark=dark))[..., :3].mean() for dark in (False, True)]
    assert means[0] > 0.8 > 0.4 > means[1], f"light and dark pages, mean brightness {means}"


def test_two_raters_and_a_terminal(run, monkeypatch, capsys):
    cards, key = open_review(run, 5, 10, 1)
    for rater, wrong in (("a", 0), ("b", 4)):
        replies = iter(["3" if wrong and i % wrong == 0 else "2" if "秒杀" in c["text"] else "1" for i, c in enumerate(cards)])
        monkeypatch.setattr("builtins.input", lambda replies=replies: next(replies))
        assert review_command([str(run), "--terminal", "--rater", rater, "--per_rule", "5", "--kept", "10"]) == 0
    out = capsys.readouterr().out
    assert "a and b: kappa 1.00 on 15 cards" in out and "keyword_spam" in out and "(kept)" in out
    assert score({}, key)["kept"]["judged"] == 0


def test_snippets_serve_where_no_whole_texts_are(run, capsys):
    (run / "samples.jsonl.zst").unlink()
    write(run / "rejects.jsonl.zst", [{"file": "f", "line": i, "id": f"x{i}", "stage": "rules", "reason": "too_short", "snippet": f"好{i}"} for i in range(9)])
    assert review_command([str(run), "--kept", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cards"] == 12
    with pytest.raises(UsageError, match="labels of sample"):
        bad = run / "other.json"
        bad.write_text(json.dumps([{"sample": "other", "rater": "a", "card": 1, "label": "bad"}]))
        review_command([str(run), "--kept", "3", "--labels", str(bad)])


@pytest.mark.parametrize("words, said", [(["/no/such"], "rejects.jsonl.zst"), (["RUN", "--per_rule", "0"], "per_rule"), (["RUN", "--labels", "/no/such.json"], "no labels in it")])
def test_what_is_refused(run, words, said):
    with pytest.raises(UsageError, match=said):
        review_command([str(run) if w == "RUN" else w for w in words])
    assert not (run / "review/labels.jsonl").exists()
