"""The job scripts, with a Slurm that only writes down what it is asked to start."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "scripts" / "slurm").iterdir())
SRUN = """#!/bin/bash
printf '%s\\n' "$@" > "$RECORD"
env > "$RECORD.env"
exec sleep "${SRUN_SLEEPS:-0}"
"""
SCONTROL = """#!/bin/bash
if [[ "$1" == show ]]; then echo node07; [[ "$3" == *,* ]] && echo node08; exit 0; fi
echo "$@" > "$RECORD.scontrol"
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Path:
    """`srun` and `scontrol` on PATH; returns where srun's arguments go."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    settings = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "RECORD": str(tmp_path / "record"),
        "SLURM_JOB_ID": "1234567",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_CPUS_PER_TASK": "64",
        "SLURM_GPUS_ON_NODE": "8",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "record"


def submit(script: str, monkeypatch, nodes: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    monkeypatch.setenv("SLURM_JOB_NODELIST", nodes)
    monkeypatch.setenv("SLURM_NNODES", str(len(nodes.split(","))))
    command = ["bash", str(ROOT / "scripts" / "slurm" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_syntax(path):
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=60)


@pytest.mark.parametrize("stage, settings", [("sft", ["rows=runs/rows", "backend=fsdp"]), ("grpo", ["tasks=16"])])
@pytest.mark.parametrize("nodes", ["node07", "node07,node08"])
def test_one_agent_per_node_meets_on_the_first(slurm, monkeypatch, stage, settings, nodes):
    from torch.distributed.run import get_args_parser

    from memcompiler.cli import app

    done = submit(f"{stage}.sbatch", monkeypatch, nodes, *settings)
    assert done.returncode == 0, done.stderr
    arguments = slurm.read_text().splitlines()
    at = arguments.index("torchrun")
    assert "--ntasks-per-node=1" in arguments[:at]
    launched = get_args_parser().parse_args(arguments[at + 1 :])  # torchrun's own parser
    assert launched.nnodes == str(len(nodes.split(","))) and launched.nproc_per_node == "8"
    assert (launched.rdzv_backend, launched.rdzv_id) == ("c10d", "1234567-0")
    assert launched.rdzv_endpoint == f"node07:{20000 + 1234567 % 10000}"
    assert launched.module and launched.training_script == "memcompiler"
    assert launched.training_script_args[:2] == ["train", stage]
    asked = launched.training_script_args[2:]
    assert asked[-2:] == ["--on-exists", "resume"] and asked[asked.index("--out") + 1] == f"runs/{stage}"
    monkeypatch.chdir(ROOT)
    printed = CliRunner().invoke(app, ["train", stage, *asked, "--print-config"])  # our own
    assert printed.exit_code == 0, printed.output
    for setting in settings:
        assert setting.replace("=", ": ") in printed.output
    environment = Path(f"{slurm}.env").read_text()
    assert "HF_HUB_OFFLINE=1\n" in environment and "MEMCOMPILER_DIST_TIMEOUT=60\n" in environment


STAND_IN = """#!/bin/bash
until [[ -s "$RECORD.env" ]]; do sleep 0.05; done
echo "$(basename "$0") $*" >> "$RECORD.calls"
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch, slurm) -> Path:
    """A repository of these scripts, whose programs only write down what they are asked; returns where."""
    folder = tmp_path / "my wörk" / "checkout"
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / "scripts").symlink_to(ROOT / "scripts")
    for name in ("ray", "python", "memcompiler"):
        path = folder / ".venv" / "bin" / name
        path.write_text(STAND_IN)
        path.chmod(0o755)
    monkeypatch.setenv("SLURM_SUBMIT_DIR", str(folder))
    return Path(f"{slurm}.calls")


@pytest.mark.parametrize("nodes", ["node07", "node07,node08"])
def test_ray_runs_on_every_node_and_a_command_on_it(slurm, checkout, monkeypatch, nodes):
    from memcompiler.cli import app

    command = ["train", "grpo", "-c", "grpo/paper", "cluster=ray", "--out", "runs/grpo"]
    done = submit("ray.sh", monkeypatch, nodes, *command)
    assert done.returncode == 0, done.stderr
    number = len(nodes.split(","))
    assert checkout.read_text().splitlines() == [
        f"python -m runtime.cluster {number}",
        "memcompiler " + " ".join(command),
    ]
    arguments = slurm.read_text().splitlines()
    assert "--ntasks-per-node=1" in arguments and "--kill-on-bad-exit=0" in arguments
    started = Path(f"{slurm}.env").read_text()  # what the nodes' part is started with
    told = dict(line.partition("=")[::2] for line in started.splitlines())
    head = f"node07:{20000 + 1234567 % 10000}"
    assert told["RAY_HEAD"] == head and told["RAY_AUTH_MODE"] == "token" and len(told["RAY_AUTH_TOKEN"]) == 64
    assert told["RAY_AUTH_TOKEN"] not in done.stdout + done.stderr + slurm.read_text() + checkout.read_text()
    checkout.unlink()
    for node in range(number):
        own = {**os.environ, **told, "SLURM_NODEID": str(node)}
        subprocess.run(arguments[-2:], check=True, timeout=60, env=own)
    head_call = (
        f"ray start --head --port={head.partition(':')[2]} --include-dashboard=false --disable-usage-stats --block"
    )
    joins = [f"ray health-check --address={head}", f"ray start --address={head} --disable-usage-stats --block"]
    assert checkout.read_text().splitlines() == [head_call, *joins[: 2 * (number - 1)]]
    monkeypatch.chdir(ROOT)
    printed = CliRunner().invoke(app, [*command, "--print-config"])
    assert printed.exit_code == 0 and "cluster: ray" in printed.output


def test_a_command_that_fails_on_ray_fails_the_job(slurm, checkout, monkeypatch, tmp_path):
    (tmp_path / "my wörk" / "checkout" / ".venv" / "bin" / "memcompiler").write_text("#!/bin/bash\nexit 7\n")
    assert submit("ray.sh", monkeypatch, "node07", "eval").returncode == 7


def test_a_failing_step_fails_the_job(slurm, monkeypatch, tmp_path):
    (tmp_path / "bin" / "srun").write_text("#!/bin/bash\nexit 7\n")
    assert submit("sft.sbatch", monkeypatch, "node07").returncode == 7


def test_the_job_requeues_itself_before_its_time_is_up(slurm, monkeypatch):
    for name, value in {"SRUN_SLEEPS": "60", "SLURM_JOB_NODELIST": "node07", "SLURM_NNODES": "1"}.items():
        monkeypatch.setenv(name, value)
    job = subprocess.Popen(
        ["bash", str(ROOT / "scripts/slurm/grpo.sbatch")], stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 30
        while not Path(f"{slurm}.env").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(30) == 0
    finally:
        os.killpg(job.pid, signal.SIGKILL)  # the sleeping srun, too
    assert Path(f"{slurm}.scontrol").read_text() == "requeue 1234567\n"
