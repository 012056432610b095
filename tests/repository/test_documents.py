"""Documents stay true where a machine can tell: links, figures, flags, variables, metrics and deployment files."""

from __future__ import annotations

import configparser
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

import pytest
import yaml

from sglang_replayssm import __version__, arguments, boundaries, metrics, seams

ROOT = Path(__file__).resolve().parents[2]
DEPLOYMENT = ROOT / "docs" / "deployment"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
needs_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here")


def documents() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.split() if name.endswith(".md") and (ROOT / name).is_file()]


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(document: Path) -> Iterator[str]:
    """Targets of the links outside of code."""
    prose = [line for line in document.read_text().splitlines() if not line.startswith(("    ", "\t"))]
    yield from LINK.findall(re.sub(r"`[^`\n]*`", "`", "\n".join(prose)))


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links(document: Path) -> None:
    for link in links(document):
        target, _, anchor = link.partition("#")
        if "://" in link:
            parts = urlparse(link)
            assert parts.scheme == "https" and "." in parts.netloc, link
            continue
        file = (document.parent / target).resolve() if target else document
        assert file.is_relative_to(ROOT) and file.exists(), f"{link}: there is no such file"
        if anchor:
            assert anchor in anchors(file.read_text()), f"{link}: there is no such heading"


def test_every_document_is_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        document = waiting.pop()
        if document in reached or not document.is_file():
            continue
        reached.add(document)
        if document.suffix == ".md":
            local = [link.partition("#")[0] for link in links(document) if "://" not in link]
            waiting += [(document.parent / link).resolve() for link in local if link]
    wanted = {
        path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".svg") or path.parent == DEPLOYMENT
    }
    assert {path.relative_to(ROOT) for path in wanted - reached} == set()


def test_the_walk_passes_every_seam() -> None:
    text = (ROOT / "docs" / "walk.md").read_text()
    for seam in seams.SEAMS:
        if seam.use == "override":
            owner, name = seam.target.split(".")[-2:]
            assert f"`{name}`" in text or f"`{owner}.{name}`" in text, seam.target


def test_every_metric_and_variable_is_documented() -> None:
    operating = (ROOT / "docs" / "operating.md").read_text()
    named = set(re.findall(r"sglang:replayssm_(\w+)", metrics.__doc__)) | {"state_slots_used"}
    assert len(named) >= 8
    assert all(f"`{metrics.PREFIX}{name}" in operating for name in named)
    everything = "".join(path.read_text() for path in documents())
    variables = {arguments.DISABLE_ENV, arguments.U_DTYPE_ENV, arguments.DIRECT_BATCH_ENV, boundaries.ENV}
    mentioned = set(re.findall(r"SGLANG_REPLAYSSM_[A-Z_]+", everything))
    assert mentioned == variables


def test_the_figures_can_be_drawn_again(tmp_path: Path) -> None:
    script = ROOT / "docs" / "figures" / "draw.py"
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path)]
    subprocess.run(command, check=True, timeout=200, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"})
    drawn = {path.name for path in tmp_path.glob("*.svg")}
    assert len(drawn) == 3
    assert drawn <= {path.name for path in script.parent.glob("*.svg")}
    for name in drawn:
        ours, new = (folder.joinpath(name).read_text() for folder in (script.parent, tmp_path))
        words = [re.findall(r">([^<>\s][^<>]*)</text>", text) for text in (ours, new)]
        assert words[0] == words[1] != [], f"{name} is out of date: python docs/figures/draw.py"


# -- deployment -------------------------------------------------------------------------------------------------------


def parsed(server_args: list[str]) -> None:
    """SGLang's own parser takes these arguments."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    known, unknown = parser.parse_known_args(server_args)
    assert unknown == [] and known.enable_linear_replayssm and known.enable_metrics


@needs_sglang
def test_the_systemd_unit() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOYMENT / "sglang-replayssm.service")
    assert set(unit) >= {"Unit", "Service", "Install"}
    command = shlex.split(unit["Service"]["ExecStart"])
    assert command[1:3] == ["-m", "sglang.launch_server"] and "127.0.0.1" in command
    parsed(command[3:])
    assert unit["Service"]["ExecStartPre"].endswith("/bin/sglang-replayssm-check")


@needs_sglang
def test_the_kubernetes_manifest() -> None:
    objects = list(yaml.safe_load_all((DEPLOYMENT / "kubernetes.yaml").read_text()))
    kinds = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert ("Deployment", "sglang-replayssm") in kinds and ("Service", "sglang") in kinds
    by_name = {name: each for (_, name), each in zip(kinds, objects, strict=True) if each["kind"] == "Deployment"}
    server = by_name["sglang-replayssm"]["spec"]["template"]
    (container,) = server["spec"]["containers"]
    parsed(container["args"])
    (router,) = by_name["sglang-router"]["spec"]["template"]["spec"]["containers"]
    words = router["args"][0].split()
    assert words[words.index("--selector") + 1] == "app=" + server["metadata"]["labels"]["app"]
    assert int(words[words.index("--service-discovery-port") + 1]) == container["ports"][0]["containerPort"]
    (service,) = (each for each in objects if each["kind"] == "Service")
    assert service["spec"]["selector"] == by_name["sglang-router"]["spec"]["selector"]["matchLabels"]
    for name, each in by_name.items():
        template = each["spec"]["template"]
        assert each["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items(), name
        volumes = {volume["name"] for volume in template["spec"].get("volumes", ())}
        for one in template["spec"]["containers"]:
            assert {mount["name"] for mount in one.get("volumeMounts", ())} <= volumes


@needs_sglang
def test_the_containerfile() -> None:
    text = (DEPLOYMENT / "Containerfile").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    steps = dict(line.split(" ", 1) for line in lines if line.split()[0] in ("ENTRYPOINT", "CMD"))
    parsed([*json.loads(steps["ENTRYPOINT"])[3:], *json.loads(steps["CMD"])])
    for line in lines:
        if line.startswith("COPY"):
            assert all((ROOT / source).exists() for source in line.split()[1:-1]), line
    assert seams.TESTED_SGLANG[0] in lines[0] and "pip install --no-deps" in text


def test_deployment_files_name_this_version() -> None:
    for file in DEPLOYMENT.iterdir():
        found = re.findall(r"sglang.replayssm[:_-](\d+\.\d+\.\d+)", file.read_text())
        assert set(found) <= {__version__}, file.name
