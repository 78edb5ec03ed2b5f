"""The RayJob and its image: one Ray everywhere, shards on the workers alone, and a command that this program takes."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from whywait import cli

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

yaml = pytest.importorskip("yaml", reason="whywait[yaml] is not installed")
ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "examples" / "04_ray_on_kubernetes"


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((HERE / "rayjob.yaml").read_text())
    return found


def containers(job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [c for g in groups for c in g["template"]["spec"]["containers"]]


def test_it_is_a_ray_job_that_is_not_tried_twice(job):
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["spec"]["backoffLimit"] == 0
    assert job["spec"]["shutdownAfterJobFinishes"] is True


def test_the_entrypoint_is_a_command_of_ours_over_the_cluster_it_runs_in(job):
    program, *argv = shlex.split(job["spec"]["entrypoint"].replace("(", r"\(").replace(")", r"\)"))
    args = cli.parser().parse_args(argv)
    assert program == "whywait"
    assert (args.ray, args.load, args.processes) == ("auto", True, None)
    mounts = [m["mountPath"] for m in containers(job)[0]["volumeMounts"]]
    assert any(args.out.startswith(f"{m}/") for m in mounts)
    assert "127.0.0.1" not in args.url


def test_the_head_leads_and_each_worker_has_one_place_with_whole_cores(job):
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["rayStartParams"]["num-cpus"] == "1"
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    for c in containers(job):
        assert c["resources"]["requests"] == c["resources"]["limits"]


def test_there_is_one_ray_and_it_is_the_one_that_was_tried(job):
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    (tried,) = [p["version"] for p in lock["package"] if p["name"] == "ray"]
    (base,) = re.findall(r"^FROM rayproject/ray:([\d.]+)-py3\d+$", (HERE / "Dockerfile").read_text(), re.MULTILINE)
    images = {c["image"] for c in containers(job)}
    assert len(images) == 1
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == base == tried == images.pop().rpartition(":")[2]
