"""What runs around a training: boards and alerts by a real Prometheus, launch files without a cluster, the doctor, the comparison of runs."""
from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml

import support
from support import ROOT, TINY, options

from scalelab.core.config import UsageError
from scalelab.trainer import boards, dashboard, prometheus

LAUNCH = ROOT / "launch"
needs_client = pytest.mark.skipif(importlib.util.find_spec("prometheus_client") is None, reason="prometheus_client is not installed: pip install 'scalelab[monitor]'")
needs_server = pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus on PATH (Debian: apt install prometheus)")
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on PATH (Debian: apt install prometheus)")


# ---- the files in the package


@pytest.mark.parametrize("name", dashboard.FILES)
def test_shipped_files_are_what_the_code_makes(name):
    assert (ROOT / "scalelab" / "ops" / name).read_text(encoding="utf-8") == dashboard.FILES[name](), f"run scalelab.trainer.dashboard.write_files('scalelab/ops') for a new {name}"


def test_every_query_asks_for_what_is_exported():
    wrong = {q: dashboard.check_query(q) for _, q in dashboard.queries(dashboard.dashboard()) if dashboard.check_query(q)}
    wrong |= {r["expr"]: found for r in dashboard.alert_rules()["groups"][0]["rules"] if (found := dashboard.check_query(r["expr"]))}
    assert not wrong and not dashboard.without_panel(dashboard.dashboard())


@needs_promtool
def test_promtool_accepts_the_shipped_rules(tmp_path):
    said = dashboard.promtool_check(yaml.safe_load((ROOT / "scalelab/ops/alerts.yaml").read_text()))
    assert "9 rules found" in said and said.count("SUCCESS") == 2


# ---- a real Prometheus


def step_rows(n: int, broken: int = 0):
    for i in range(1, n + 1):
        bad = i == broken
        yield "step", {"loss": float("nan") if bad else 5 / i, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 4e3, "step_seconds": 0.2, "data_seconds": 0.01, "memory_bytes": 2**28,
                       "consumed_tokens": 512 * i, "skipped": bad, "loss_by_domain": {"code": 4 / i}, "global_step": i, "time": time.time()}
        yield "eval", {"bits_per_byte": 3 / i, "bits_per_byte_by_domain": {"code": 2 / i}, "loss": 2.0, "global_step": i, "time": time.time()}
        yield "event", {"event": "checkpoint", "reason": "", "global_step": i, "time": time.time()}
        if bad:
            yield "event", {"event": "skip", "reason": "non-finite gradient", "global_step": i, "time": time.time()}


def ask(port: int, what: str) -> dict:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{what}", timeout=5) as got:
        return json.load(got)["data"]


def query(port: int, expr: str) -> list:
    return ask(port, "query?" + urllib.parse.urlencode({"query": expr.replace("$run", ".*")}))["result"]


def firing(port: int) -> set[str]:
    return {a["labels"]["alertname"] for a in ask(port, "alerts")["alerts"] if a["state"] == "firing"}


@pytest.fixture
def served(tmp_path):
    "A Prometheus that scrapes two sinks with a token every quarter of a second, and judges without waiting; its port and the sinks."
    sinks = [prometheus.PrometheusSink("run1", rank, 0, token="s3cret") for rank in (0, 1)]
    rules = dashboard.alert_rules()
    for rule in rules["groups"][0]["rules"]:
        rule["for"] = "0s"
    config = {
        "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "250ms"}, "rule_files": ["alerts.yaml"],
        "scrape_configs": [{"job_name": "scalelab", "authorization": {"credentials": "s3cret"}, "static_configs": [{"targets": [f"127.0.0.1:{s.port}" for s in sinks]}]}],
    }
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(rules))
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = prometheus.next_free_port("127.0.0.1", 19_090)
    words = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb", f"--web.listen-address=127.0.0.1:{port}"]
    server = support.start(words, tmp_path / "log", cwd=tmp_path)

    def ready():
        try:
            return len(query(port, "up == 1")) == 2
        except OSError:
            return False

    try:
        assert support.wait_until(ready, server, 30, 0.1), (tmp_path / "log").read_text()[-2000:]
        yield port, sinks
    finally:
        server.terminate()
        server.wait(20)
        for sink in sinks:
            sink.close()


@needs_client
@needs_server
def test_a_real_prometheus_fills_every_panel_and_fires_on_a_planted_fault(served):
    port, sinks = served
    for kind, row in step_rows(3):
        for sink in sinks:
            sink.write(kind, row)
    assert support.wait_until(lambda: len(query(port, "scalelab_loss")) == 2, seconds=20, pause=0.1)
    time.sleep(1)
    quiet = firing(port)
    assert quiet <= {"WaitingForData"} and "LossNotFinite" not in quiet, quiet
    for kind, row in step_rows(5, broken=5):
        for sink in sinks:
            sink.write(kind, row)
    assert support.wait_until(lambda: {"LossNotFinite", "StepsSkipped"} <= firing(port), seconds=20, pause=0.1), firing(port)
    empty = [q for _, q in dashboard.queries(dashboard.dashboard()) if not query(port, q)]
    assert not empty, empty
    assert {r["metric"]["rank"] for r in query(port, "scalelab_loss")} == {"0", "1"}
    sinks[1]._server.shutdown()
    sinks[1]._server.server_close()
    assert support.wait_until(lambda: "TrainingUnreachable" in firing(port), seconds=20, pause=0.1)


@needs_client
def test_a_taken_port_names_the_next_free_one():
    first = prometheus.PrometheusSink("a", port=0)
    try:
        with pytest.raises(UsageError, match=rf"port {first.port} .*next free: \d+"):
            boards.open_sinks(boards.MonitorConfig(prometheus_port=first.port), "run")
    finally:
        first.close()


@pytest.mark.parametrize("cfg, package", [({"prometheus_port": 9}, "prometheus_client"), ({"tensorboard": True}, "tensorboard"), ({"wandb_project": "x"}, "wandb")])
def test_a_missing_package_names_the_extra(cfg, package, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"{package} can't be imported .*scalelab\[monitor\]"):
        boards.open_sinks(boards.MonitorConfig(**cfg), tmp_path)


# ---- launch files


def accepted(words: list[str], ranks: int) -> dict:
    "A `torchrun ... -m scalelab.trainer.loop ...` line: torchrun's own parser takes its part, the trainer's dry run the rest; the plan."
    from torch.distributed.run import parse_args

    assert words[0] == "torchrun", words
    parsed = parse_args(words[1:])
    assert parsed.module and parsed.training_script == "scalelab.trainer.loop" and parsed.rdzv_backend == "c10d"
    low = int(str(parsed.nnodes).split(":")[0]) * int(parsed.nproc_per_node)
    assert low == ranks, f"the launcher starts {low} ranks, the trainer expects {ranks}"
    done = support.run([*support.TRAINER, *parsed.training_script_args, "--dry_run", "--json"])
    plan = done.ok().json
    assert plan["ranks"] == ranks
    return plan


def test_slurm_script(tmp_path):
    script = LAUNCH / "slurm.sbatch"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    fake = {"scontrol": 'test "$*" = "show hostnames n[1-2]" && printf "n1\\nn2\\n"', "srun": 'while [ "$1" != torchrun ]; do shift; done; printf "%s\\n" "$@"'}
    for name, body in fake.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "96"}
    done = support.run(["bash", script], cwd=tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}", **variables)
    words = done.ok().out.splitlines()
    assert "--rdzv-endpoint=n1:29400" in words and f"{tmp_path}/runs/7" in words
    assert accepted(words, 16)["parameters"] > 1e9
    directives = re.findall(r"^#SBATCH --([\w-]+)", script.read_text(), re.M)
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "requeue", "signal"} <= set(directives)
    without = support.run(["bash", script], cwd=tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert without.code != 0 and "SLURM_JOB_NODELIST" in without.err or "SLURM_JOB_ID" in without.err  # outside of Slurm: stops at once


def test_kubernetes_file():
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job") and service["spec"]["clusterIP"] == "None"
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = [*container["command"], *container["args"]]
    assert all(isinstance(w, str) for w in words) and all(isinstance(e.get("value", ""), str) for e in container["env"])
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--nnodes={spec['completions']}" in words and f"--nproc-per-node={gpus}" in words and spec["completions"] == spec["parallelism"]
    assert f"--rdzv-endpoint={job['metadata']['name']}-0.{service['metadata']['name']}:29400" in words and pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    accepted(words, spec["completions"] * gpus)


def test_a_wrong_launch_line_is_refused():
    with pytest.raises(AssertionError, match="starts 16 ranks"):
        accepted(shlex.split("torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d -m scalelab.trainer.loop --config node8"), 8)
    with pytest.raises(AssertionError, match="trainer.rank"):
        accepted(shlex.split("torchrun --nnodes=1 --nproc-per-node=8 --rdzv-backend=c10d -m scalelab.trainer.loop --config node8 --trainer.rankz 8"), 8)


def test_dockerfile():
    text = (ROOT / "Dockerfile").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    names = [line.split()[0] for line in lines]
    assert set(names) <= {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD"} and names[:2] == ["ARG", "FROM"]
    for line in lines:
        name, rest = line.split(None, 1)
        if name == "COPY":
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), line
        elif name == "RUN":
            assert subprocess.run(["sh", "-n", "-c", rest]).returncode == 0, line
        elif name in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(w, str) for w in json.loads(rest))
    assert "--constraint constraints.txt" in text and names.index("USER") > max(i for i, n in enumerate(names) if n == "RUN")
    snippet = re.search(r"python -c '([^']+)'", text)[1]
    assert re.fullmatch(r"[0-9a-f]{16}\n", support.run([sys.executable, "-c", snippet]).ok().out)


def test_the_lock_that_the_image_checks():
    snippet = re.search(r"RUN (test -z.*)", (ROOT / "Dockerfile").read_text())[1]
    right = subprocess.run(["sha256sum", "constraints.txt"], cwd=ROOT, capture_output=True, text=True).stdout.split()[0]
    for value, code in (("", 0), (right, 0), ("0" * 64, 1)):
        assert subprocess.run(["sh", "-c", snippet], cwd=ROOT, env=os.environ | {"LOCK_SHA256": value}, capture_output=True).returncode == code


# ---- doctor and compare as programs


def program(function: str, *words) -> support.Done:
    module, name = function.split(":")
    code = f"import sys; from scalelab.core.arguments import run_main; from {module} import {name} as f; sys.exit(run_main(lambda: f(sys.argv[1:])))"
    return support.run([sys.executable, "-c", code, *map(str, words)])


def test_doctor(tmp_path):
    said = program("scalelab.core.doctor:doctor_command", "--json", "--megabytes", 1, "--disk", tmp_path).ok().json
    assert len(said["rows"]) > 20 and not list(tmp_path.iterdir()) and re.fullmatch("[0-9a-f]{16}", said["environment_hash"])
    assert "huge pages" in program("scalelab.core.doctor:doctor_command", "--megabytes", 0).ok().out


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "Four real runs on tiny shards: two rates, two seeds."
    from scalelab.data.shards import ShardWriter

    import numpy as np

    room = tmp_path_factory.mktemp("ops")
    dice = np.random.default_rng(0)
    for split, count in (("train", 60), ("valid", 12)):
        with ShardWriter(room / split, "0" * 32, 64, 0) as writer:
            for i in range(count):
                writer.add((1 + (np.arange(90) * (1 + i % 3) + dice.integers(0, 2, 90)) % 60).astype(np.uint16), 200, ("code", "docs")[i % 2])
    paths = []
    for lr in (0.003, 0.0003):
        for seed in (0, 1):
            keys = TINY | {"data.train": room / "train", "data.valid": room / "valid", "trainer.seed": seed, "data.seed": seed, "optim.lr": lr, "trainer.eval_every": 10}
            path = room / f"lr{lr}-{seed}"
            done = support.call_here("train", "--run", path, *options(keys))
            done.ok()
            paths.append(path)
    return paths


def test_compare_real_runs(trained, tmp_path):
    page = tmp_path / "page.html"
    said = program("scalelab.diagnostics.compare:compare_command", *trained, "--out", page, "--json").ok().json
    assert {r["key"] for r in said["config"]} == {"optim.lr", "trainer.seed", "data.seed"} and len(said["arms"]) == 2
    whole = next(r for r in said["differences"] if r["what"] == "all")
    assert whole["seeds"] == 2 and whole["mean"] > 0 and {r["what"] for r in said["differences"]} == {"all", "code", "docs"}
    from scalelab.diagnostics.page import faults

    assert faults(page.read_text()) == [] and "lr 0.0003" in page.read_text()


def test_compare_refuses(trained, tmp_path):
    run = "scalelab.diagnostics.compare:compare_command"
    program(run, trained[0]).refused("two or more")
    program(run, trained[0], trained[0]).refused("given twice")
    program(run, trained[0], tmp_path).refused("not a run directory")
    program(run, *trained[:2], "--out", tmp_path).refused("--out", "compare.html")
