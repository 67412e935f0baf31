"""Headless Chromium for tests: a page's DOM after its scripts ran, a screenshot, and the hosts that it asked for."""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
OWN_HOSTS = ("google.com", "googleapis.com", "gvt1.com", "gstatic.com")  # the browser's own errands, not a page's


def find_chromium() -> str | None:
    "Path of a Chromium or Chrome, or None. The variable CHROMIUM names one that is not on the path."
    return next(filter(None, (shutil.which(name) for name in (os.environ.get("CHROMIUM", ""), *NAMES) if name)), None)


def require_chromium() -> str:
    "The browser; without one the test is skipped, or fails where skipping is forbidden (SCALELAB_REQUIRE_ALL=1)."
    found = find_chromium()
    if found:
        return found
    reason = "no Chromium on this machine (Debian: apt-get install chromium)"
    if os.environ.get("SCALELAB_REQUIRE_ALL") == "1":
        pytest.fail(f"{reason}, and SCALELAB_REQUIRE_ALL=1 forbids skipping")
    pytest.skip(reason)


def as_url(page: str | Path) -> str:
    text = str(page)
    return text if "://" in text else Path(text).resolve().as_uri()


def _run(page: str | Path, *options: str, budget_ms: int = 8000) -> subprocess.CompletedProcess:
    "One start of the browser with a profile of its own, every host name made unresolvable, and time that runs as fast as it can."
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        command = [
            require_chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={profile}", f"--virtual-time-budget={budget_ms}", *options, as_url(page),
        ]
        return subprocess.run(command, capture_output=True, timeout=120, check=True)


def dump_dom(page: str | Path, budget_ms: int = 8000) -> str:
    "The page as HTML after its scripts have run for `budget_ms` of virtual time."
    return _run(page, "--dump-dom", budget_ms=budget_ms).stdout.decode("utf-8", "replace")


def dump_dom_and_hosts(page: str | Path, budget_ms: int = 8000) -> tuple[str, set[str]]:
    "The same, and the hosts that the page tried to reach."
    with tempfile.TemporaryDirectory() as tmp:
        log = Path(tmp) / "net.json"
        dom = _run(page, "--dump-dom", f"--log-net-log={log}", budget_ms=budget_ms).stdout.decode("utf-8", "replace")
        text = log.read_text(encoding="utf-8", errors="replace")
    hosts = set()
    for part in text.split('"url":"')[1:]:
        url = part.split('"', 1)[0]
        if url.startswith(("http://", "https://", "ws://", "wss://")):
            hosts.add(url.split("/")[2].split(":")[0])
    return dom, {h for h in hosts if not h.endswith(OWN_HOSTS)}


def screenshot(page: str | Path, png: str | Path, size: tuple[int, int] = (1280, 900), dark: bool = False, budget_ms: int = 8000) -> Path:
    "A picture of the page, `size` in pixels, in the light or the dark scheme."
    scheme = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    _run(page, *scheme, f"--window-size={size[0]},{size[1]}", f"--screenshot={Path(png).resolve()}", budget_ms=budget_ms)
    return Path(png)


def console_page(body: str, script: str, head: str = "") -> str:
    "A page whose script writes `result` as JSON into an element that `read_result` finds in the dumped DOM."
    return f'<!doctype html><meta charset="utf-8">{head}<body>{body}<pre id="result"></pre><script>(async () => {{ let result; {script}; document.getElementById("result").textContent = JSON.stringify(result); }})()</script></body>'


def read_result(dom: str):
    text = dom.split('<pre id="result">', 1)[1].split("</pre>", 1)[0]
    return json.loads(text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
