"""The workflows of CI run commands that exist here, and only code on main can publish."""

import os
import re
import tomllib

import pytest
import yaml

from tests import ROOT

WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")
}
JOBS = {(flow, name): job for flow, all_of in WORKFLOWS.items() for name, job in all_of["jobs"].items()}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EVERY_JOB = pytest.mark.parametrize("name", JOBS, ids="/".join)
ON_MAIN = "github.event_name == 'push' && github.ref == 'refs/heads/main'"


def commands_of(job):
    """Returns the simple commands of a job's steps, as lists of words."""
    scripts = [step["run"] for step in job["steps"] if "run" in step]
    return [
        part.split() for script in scripts for part in re.split(r"&&|\|\||[;|\n]", script) if part.strip()
    ]


def scripts_missing(job):
    """Returns the files of this project that a job runs, but that are not there or cannot be run."""
    first_words = [words[0] for words in commands_of(job)]
    return [word for word in first_words if "/" in word and not os.access(ROOT / word, os.X_OK)]


def targets_missing(job):
    """Returns the targets of make that a job asks for, but that the Makefile does not have."""
    makes = [words for first, *words in commands_of(job) if first == "make"]
    asked = {word for words in makes for word in words if not word.startswith("-") and "=" not in word}
    return asked - TARGETS


@EVERY_JOB
def test_commands_exist(name):
    assert scripts_missing(JOBS[name]) == []
    assert targets_missing(JOBS[name]) == set()


def test_commands_that_do_not_exist_are_found():
    steps = [{"run": "make -j2 test nothing ARGS=-x && .ci/run\n.ci/missing"}, {"uses": "a/b@v1"}]
    job = {"steps": [*steps, {"run": "Makefile/x; pyproject.toml"}, {"run": "./pyproject.toml"}]}
    assert targets_missing(job) == {"nothing"}
    assert scripts_missing(job) == [".ci/missing", "Makefile/x", "./pyproject.toml"]


def test_what_is_run():
    run = {name: [" ".join(words) for words in commands_of(job)] for name, job in JOBS.items()}
    assert run["tests", "tests"] == [".ci/run"]
    assert run["tests", "newest"] == ["make test-newest PYTHON312=python3"]
    assert run["tests", "dist"] == ["make dist", ".ci/check_wheel"]
    assert "make docs-test" in run["site", "site"]
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^PYTHON312 \?= ", makefile, re.MULTILINE)


@EVERY_JOB
def test_actions_are_of_a_major_version_and_jobs_end(name):
    job = JOBS[name]
    assert job["timeout-minutes"] <= 90
    assert all(
        re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step
    )


def test_pythons_are_those_that_the_project_names():
    matrix = JOBS["tests", "newest"]["strategy"]["matrix"]["python"]
    images = {name: job.get("container") for name, job in JOBS.items()}
    assert images["tests", "newest"] == "python:${{ matrix.python }}-bookworm"
    assert images["tests", "tests"] == images["tests", "dist"] == "python:3.11-bookworm"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: "
    named = [x.removeprefix(prefix) for x in project["classifiers"] if x.startswith(prefix)]
    assert named == ["3.11", *matrix]


@pytest.mark.parametrize("flow", WORKFLOWS)
def test_each_runs_for_pull_requests_and_main(flow):
    on = WORKFLOWS[flow][True]  # YAML 1.1 reads `on` as a boolean
    assert on == {"push": {"branches": ["main"]}, "pull_request": None}
    assert "group" in WORKFLOWS[flow]["concurrency"]


def test_only_main_publishes_and_nothing_else_may_write():
    assert all(flow["permissions"] == {"contents": "read"} for flow in WORKFLOWS.values())
    may_write = {name: job["permissions"] for name, job in JOBS.items() if "permissions" in job}
    assert may_write == {("site", "deploy"): {"pages": "write", "id-token": "write"}}
    deploy, site = JOBS["site", "deploy"], JOBS["site", "site"]
    assert (deploy["if"], deploy["needs"]) == (ON_MAIN, "site")
    (upload,) = [s for s in site["steps"] if s.get("uses", "").startswith("actions/upload-pages-artifact@")]
    assert (upload["if"], upload["with"]) == (ON_MAIN, {"path": "build/site"})
    site_dir = re.search(r"^site_dir: (.*)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)[1]
    assert site_dir == "build/site"
