"""Every file of deploy/ that another program reads, checked by a validator of that program's format."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from executor.launch.commands import parsed

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
COMPOSE = sorted((DEPLOY / "docker").glob("compose*.yaml"))
OVERLAYS = ("base", "gpu")


def run(*command: str | Path, rc: int = 0) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=60, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == rc, said
    return said


def needs(program: str) -> str:
    """Its path; a machine without this program of the system does without the test."""
    return shutil.which(program) or pytest.skip(f"{program} is not installed")


# ---------------------------------------------------------------- containers


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_dockerfiles_are_clean(name):
    run(BIN / "hadolint", "--failure-threshold", "style", DEPLOY / "docker" / name)


def test_a_bad_dockerfile_would_be_found(tmp_path):
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python\nRUN cd /x && pip install torch\n")
    assert "DL3006" in run(BIN / "hadolint", bad, rc=1)


def test_both_images_differ_only_in_what_gpus_need():
    def lines(name: str) -> set[str]:
        text = (DEPLOY / "docker" / name).read_text()
        return {line for line in text.splitlines() if not line.startswith("#")}

    cuda, cpu = lines("Dockerfile"), lines("Dockerfile.cpu")
    assert all(re.search("NVIDIA|TORCH|CMD|pip install", line) for line in cuda - cpu)
    assert all(re.search("TORCH|CMD|pip install", line) for line in cpu - cuda)


def test_the_images_torch_is_the_one_that_is_tested():
    setup = (DEPLOY / "setup.sh").read_text()
    (torch,) = re.findall(r"torch==[0-9.]+", setup.split("TORCH:-")[1])
    for name in ("Dockerfile", "Dockerfile.cpu"):
        assert f"ARG TORCH={torch}" in (DEPLOY / "docker" / name).read_text()


def test_compose_files_fit_their_schema():
    assert {file.stem for file in COMPOSE} == {"compose.cpu", "compose.mps", "compose.two-gpu"}
    run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", *COMPOSE)


@pytest.mark.parametrize("file", COMPOSE, ids=lambda file: file.stem)
def test_what_compose_names_is_there(file):
    made = yaml.safe_load(file.read_text())
    for name, service in made["services"].items():
        build = service["build"]
        assert (file.parent / build["context"] / build["dockerfile"]).is_file()
        assert set(service.get("depends_on", {})) <= set(made["services"])
        for namespace in (service.get("ipc", ""), service.get("pid", "")):
            if namespace.startswith("service:"):
                assert made["services"][namespace.removeprefix("service:")]["ipc"] == "shareable"
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in made["volumes"], name
        check_command([str(word) for word in service["command"]])
        check_probe(service.get("healthcheck", {}).get("test", [])[1:])


def check_command(words: list[str]) -> None:
    """Words that a container of ours is started with: a command that there is, with its own options."""
    if not words:
        return
    command, *options = words
    assert command in ("serve", "speculator", "launch")
    if command == "launch":
        assert (DEPLOY / "topologies" / Path(options[0]).name).is_file()
    parsed(command, options)


def check_probe(words: list[str]) -> None:
    """Words by which a container is asked how it is, if that is by a command of ours."""
    if words[:1] == ["speclane"]:
        assert words[1] == "ping"
        parsed(words[1], words[2:])


# ---------------------------------------------------------------- systemd and Slurm


@pytest.mark.parametrize("unit", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda unit: unit.name)
def test_units_are_valid_and_confined(unit, tmp_path):
    analyze = needs("systemd-analyze")
    here = tmp_path / unit.name
    text = unit.read_text()
    assert "/opt/speclane/bin/speclane " in text
    here.write_text(text.replace("/opt/speclane/bin/speclane", "/bin/true"))
    instance = tmp_path / unit.name.replace("@", "@cpu")
    assert run(analyze, "verify", here if here == instance else instance) == ""
    run(analyze, "security", "--offline=true", "--threshold=25", "--no-pager", here)
    words = next(line for line in text.splitlines() if line.startswith("ExecStart=")).split()[1:]
    parsed(words[0], words[1:])


def test_a_bad_unit_would_be_found(tmp_path):
    bad = tmp_path / "bad.service"
    bad.write_text("[Service]\nExecStart=/bin/true\nWatchdogSecs=3\n")
    done = subprocess.run(
        [needs("systemd-analyze"), "verify", str(bad)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "WatchdogSecs" in done.stderr


def test_scripts_are_clean():
    run(BIN / "shellcheck", *sorted(DEPLOY.glob("*.sh")), *sorted((DEPLOY / "slurm").glob("*.sbatch")))


# ---------------------------------------------------------------- Kubernetes


@pytest.fixture(scope="module", params=OVERLAYS)
def manifests(request, tmp_path_factory) -> list[dict]:
    """As kustomize makes them, where it is installed; else the base's files as they are."""
    directory = DEPLOY / "k8s" / request.param
    if shutil.which("kubectl"):
        text = run("kubectl", "kustomize", directory)
    elif request.param == "base":
        names = yaml.safe_load((directory / "kustomization.yaml").read_text())["resources"]
        text = "\n---\n".join((directory / name).read_text() for name in names)
    else:
        pytest.skip("kubectl is not installed")
    file = tmp_path_factory.mktemp("k8s") / "all.yaml"
    file.write_text(text)
    run(BIN / "kubernetes-validate", "--strict", file)
    return list(yaml.safe_load_all(text))


def test_a_bad_manifest_would_be_found(tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("apiVersion: v1\nkind: Service\nmetadata: {name: x}\nspec: {prots: []}\n")
    assert "prots" in run(BIN / "kubernetes-validate", "--strict", bad, rc=1)


def test_the_pod_is_ready_without_its_speculator(manifests):
    (deployment,) = (each for each in manifests if each["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    target, speculator = pod["containers"]
    assert (target["name"], speculator["name"]) == ("target", "speculator")
    assert "readinessProbe" not in speculator
    assert "--attach=later" in target["args"]
    check_probe(speculator["livenessProbe"]["exec"]["command"])
    assert speculator["livenessProbe"]["exec"]["command"][2] in " ".join(speculator["args"])
    assert target["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert target["livenessProbe"]["httpGet"]["path"] == "/health"
    assert target["startupProbe"]["httpGet"]["path"] == "/ready"
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in (target, speculator):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert container["securityContext"]["readOnlyRootFilesystem"]
        check_command(container["args"])
    (service,) = (each for each in manifests if each["kind"] == "Service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    grace = pod["terminationGracePeriodSeconds"]
    drain = next(word for word in target["args"] if word.startswith("--shutdown-timeout="))
    assert grace > float(drain.partition("=")[2]) + 10


# ---------------------------------------------------------------- all of them


def test_all_yaml_is_tidy():
    rules = "{extends: relaxed, rules: {line-length: {max: 120}, comments-indentation: enable}}"
    assert run(BIN / "yamllint", "--strict", "-d", rules, DEPLOY) == ""


def test_the_image_has_all_that_it_is_built_from():
    allowed = (ROOT / ".dockerignore").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for package in ("executor", "ipc", "workers"):
        assert f"!{package}\n" in allowed
    for name in (project["project"]["readme"], "pyproject.toml", *project["project"]["license-files"]):
        assert f"!{name}\n" in allowed
