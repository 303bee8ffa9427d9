"""The JSON Schemas: the readers' keys and no others, every example, and nothing that the readers refuse."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import roost
from roost.config import keys, read_job
from roost.config.keys import PLACEMENT_PATTERN
from roost.config.reference import job_file_page
from roost.config.schema import cluster_schema, job_schema
from roost.errors import Finding, RoostError
from roost.source.keys import Key, Section, switch
from roost.source.yaml import read_text
from roost.topology.keys import ACCELERATORS, CLUSTER_FILE
from roost.topology.load import read_topology

ROOT = Path(__file__).parents[2]
JOB = jsonschema.Draft202012Validator(job_schema())
CLUSTER = jsonschema.Draft202012Validator(cluster_schema())


def plain(text: str) -> Any:
    return read_text(text).plain()


def wrong_in(text: str, validator: jsonschema.Draft202012Validator = JOB) -> list[str]:
    return [error.message for error in validator.iter_errors(plain(text))]


def yaml_blocks() -> Iterator[tuple[str, str]]:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for match in re.finditer(r"^```yaml\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S):
            yield page.name, match[1]


# The readers' keys ------------------------------------------------------------------------------

UNKNOWN = "zz_unknown_zz"
WHERE = {
    "cluster": (f"cluster: {{component_placement: {{a: 0}}, {UNKNOWN}: 1}}", "$defs.cluster"),
    "component": (f"cluster: {{component_placement: {{a: {{placement: 0, {UNKNOWN}: 1}}}}}}", "$defs.component"),
    "layout": (f"cluster: {{layout: {{actor_num_gpus_per_node: 1, {UNKNOWN}: 1}}}}", "$defs.layout"),
    "rollout group": (
        f"cluster: {{layout: {{actor_num_gpus_per_node: 1, rollout_groups: [{{num_gpus: 1, {UNKNOWN}: 1}}]}}}}",
        "$defs.layout.properties.rollout_groups.anyOf.1",
    ),
    "cluster file": (f"nodes: [{{count: 1}}]\n{UNKNOWN}: 1", ""),
    "node": (f"nodes: [{{{UNKNOWN}: 1}}]", "properties.nodes.anyOf.1"),
    "accelerators": (
        f"nodes: [{{accelerators: {{count: 1, {UNKNOWN}: 1}}}}]",
        "properties.nodes.anyOf.1.properties.accelerators.anyOf.1",
    ),
    "node group": (
        f"nodes: [{{count: 1}}]\nnode_groups: [{{label: g, node_ranks: 0, {UNKNOWN}: 1}}]",
        "properties.node_groups.anyOf.1",
    ),
    "environment": (
        f"nodes: [{{count: 1}}]\nnode_groups: [{{label: g, node_ranks: 0, env_configs: [{{node_ranks: 0, {UNKNOWN}: 1}}]}}]",
        "properties.node_groups.anyOf.1.properties.env_configs.anyOf.1",
    ),
    "hardware": (
        f"nodes: [{{count: 1}}]\nnode_groups: [{{label: g, node_ranks: 0, hardware: {{type: T, {UNKNOWN}: 1}}}}]",
        "properties.node_groups.anyOf.1.properties.hardware",
    ),
}


def known_to_the_reader(text: str) -> set[str]:
    """What the reader itself calls known, in the complaint about a key that is not."""
    findings: list[Finding] = []
    tree = read_text(text)
    if tree.get("cluster") is not None:
        read_job(tree, findings)
    else:
        with pytest.raises(RoostError) as caught:
            read_topology(tree, check_hardware=False)
        findings = list(caught.value.findings)
    rules = [finding.rule for finding in findings if UNKNOWN in finding.message]
    assert len(rules) == 1, findings
    return set(rules[0].removeprefix("known keys: ").split(", "))


@pytest.mark.parametrize("where", WHERE)
def test_the_schema_has_the_keys_of_the_reader_and_no_others(where: str) -> None:
    text, path = WHERE[where]
    is_job = text.startswith("cluster:")
    schema: Any = job_schema() if is_job else cluster_schema()
    for key in path.split(".") if path else []:
        schema = schema[int(key)] if isinstance(schema, list) else schema[key]
    assert set(schema["properties"]) == known_to_the_reader(text)
    assert schema["additionalProperties"] is False
    assert wrong_in(text, JOB if is_job else CLUSTER), "an unknown key is wrong"
    assert not wrong_in(
        re.sub(rf",? ?{UNKNOWN}: 1", "", text).replace("[{}]", "[{count: 1}]"), JOB if is_job else CLUSTER
    )


def test_a_declared_key_is_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = Key("colour", switch(), "Paint the engines.", "true")
    monkeypatch.setattr(keys, "ROLLOUT_GROUP", replace(keys.ROLLOUT_GROUP, keys=(*keys.ROLLOUT_GROUP.keys, colour)))
    assert "colour" in known_to_the_reader(WHERE["rollout group"][0])
    assert "colour" in keys.ROLLOUT_GROUP.schema()["properties"]


def test_the_reference_page_is_current() -> None:
    """``make snapshots`` writes it anew."""
    page = ROOT / "docs" / "reference" / "job-file.md"
    if os.environ.get("UPDATE_SNAPSHOTS") == "1":
        page.write_text(job_file_page(), encoding="utf-8")
    assert page.read_text(encoding="utf-8") == job_file_page()


def declared(section: Section) -> Iterator[tuple[Section, Key[Any]]]:
    for key in section.keys:
        yield section, key
        if key.kind.section is not None:
            yield from declared(key.kind.section)


ALL_KEYS = [*declared(keys.JOB), *declared(keys.COMPONENT), *declared(CLUSTER_FILE), *declared(ACCELERATORS)]


@pytest.mark.parametrize(("section", "key"), ALL_KEYS, ids=lambda part: getattr(part, "name", ""))
def test_examples_of_keys_are_right(section: Section, key: Key[Any]) -> None:
    schema: Any = {**section.schema(), "$defs": job_schema()["$defs"]}
    schema = {name: value for name, value in schema.items() if name not in ("required", "if", "else", "anyOf")}
    assert list(jsonschema.Draft202012Validator(schema).iter_errors(plain(key.line))) == []
    findings: list[Finding] = []
    section.open(read_text(key.line), findings).read(key)
    assert findings == []
    assert key.about.endswith((".", "…"))


def described(schema: Any, path: str = "") -> Iterator[str]:
    """Every key of every mapping that has no description."""
    if isinstance(schema, dict):
        for key, value in schema.get("properties", {}).items():
            if (
                isinstance(value, dict)
                and not value.get("description")
                and "$ref" not in value
                and not {"const", "not"} & set(value)
            ):
                yield f"{path}.{key}"
        for key, value in schema.items():
            yield from described(value, f"{path}.{key}")
    elif isinstance(schema, list):
        for index, value in enumerate(schema):
            yield from described(value, f"{path}.{index}")


def test_every_key_has_a_description() -> None:
    assert [*described(job_schema()), *described(cluster_schema())] == []


def test_the_schemas_are_schemas() -> None:
    for schema in (job_schema(), cluster_schema()):
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["$schema"].endswith("2020-12/schema")


# What is right ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_are_right(path: Path) -> None:
    validator = CLUSTER if path.stem.endswith("-cluster") else JOB
    assert wrong_in(path.read_text(encoding="utf-8"), validator) == []


def test_files_of_the_docs_are_right() -> None:
    """Those that show a mistake are as wrong to the schema as to the reader."""
    seen = {"job": 0, "cluster": 0}
    for page, text in yaml_blocks():
        tree = read_text(text)
        kind = "cluster" if tree.get("nodes") else "job" if tree.get("cluster") else ""
        if not kind:
            continue
        seen[kind] += 1
        findings: list[Finding] = []
        if kind == "job":
            read_job(tree, findings)
        wrong = wrong_in(text, CLUSTER if kind == "cluster" else JOB)
        assert bool(wrong) == any(finding.code.startswith("C") for finding in findings), f"{page}:\n{text}"
    assert seen["job"] >= 20
    assert seen["cluster"] >= 1


@pytest.mark.parametrize(
    "text",
    [
        "0", "0-7", "all", "all:0-3", "0-7:0-3", "0-1:0-3,3-5,7-10:7-14", " 0 - 3 : 0 - 1 ", "0-1:0-200,2-3:201-511",
    ],
)  # fmt: skip
def test_placements(text: str) -> None:
    assert re.search(PLACEMENT_PATTERN, text)
    assert wrong_in(f"cluster: {{component_placement: {{actor: '{text}'}}}}") == []


@pytest.mark.parametrize("text", ["", "x", "0-", "-3", "0..7", "0-7;8", "0:all", "0-7:", "0,,1", "0_7", "every"])
def test_what_is_no_placement(text: str) -> None:
    assert not re.search(PLACEMENT_PATTERN, text)
    assert wrong_in(f"cluster: {{component_placement: {{actor: '{text}'}}}}")


@pytest.mark.parametrize(
    "text",
    [
        "cluster: {component_placement: {actor: 0-7}}\nactor: {model: {hidden: 7}}\ngrpo: {steps: 3}\nother: [1, x]",
        "cluster: {component_placement: {'actor, rollout': all}, num_nodes: null}",
        "cluster: {layout: {debug_rollout_only: true, rollout_num_gpus: 8}}",
        "cluster: {layout: {actor_num_gpus_per_node: 8, colocate: yes}}\nrun: train:main",
        "cluster: {component_placement: {a: {placement: 3, node_group: [x, 4090]}}, node_order: 'label:rack'}\nrun: {x: 1}",
    ],
)
def test_right_jobs_are_right_to_the_reader_too(text: str) -> None:
    assert wrong_in(text) == []
    read_job(read_text(text))


# What is wrong ----------------------------------------------------------------------------------

WRONG_JOBS = [
    "actor: 0-7",
    "cluster: {num_nodes: 2}",
    "cluster: {component_placement: {}}",
    "cluster: {component_placement: [actor]}",
    "cluster: {component_placement: {actor: 0-7}, num_nodes: two}",
    "cluster: {component_placement: {actor: 0-7}, num_nodes: -1}",
    "cluster: {component_placement: {actor: 0-7}, placement_mode: colocated}",
    "cluster: {component_placement: {actor: 0-7}, node_order: random}",
    "cluster: {component_placement: {actor: 0-7}, num_node: 1}",
    "cluster: {component_placement: {'1st': 0-7}}",
    "cluster: {component_placement: {all: 0-7}}",
    "cluster: {component_placement: {actor: [0, 1]}}",
    "cluster: {component_placement: {actor: {gpu_share: 0.5}}}",
    "cluster: {component_placement: {actor: {placement: 0, gpu_share: 1.5}}}",
    "cluster: {component_placement: {actor: {placement: 0, gpu_share: half}}}",
    "cluster: {component_placement: {actor: {placement: 0, cpus: 0}}}",
    "cluster: {component_placement: {actor: {placement: 0, worker: Actor}}}",
    "cluster: {component_placement: {actor: {placement: 0, placeholder: 1}}}",
    "cluster: {component_placement: {actor: 0-7}}\nrun: main",
    "cluster: {component_placement: {actor: 0-7}}\nrun: 3",
    "cluster: {component_placement: null}",
    "cluster: {layout: {actor_num_gpus_per_node: null}}",
    "cluster: {layout: {actor_num_gpus_per_node: 8, rollout_groups: [{num_gpus: null}]}}",
    "cluster: {layout: {rollout_num_gpus: 8}}",
    "cluster: {layout: {actor_num_gpus_per_node: 8, mode: shared}}",
    "cluster: {layout: {actor_num_gpus_per_node: 8, rollout_groups: [{num_gpus_per_engine: 2}]}}",
    "cluster: {layout: {actor_num_gpus_per_node: 8.5}}",
]
WRONG_CLUSTERS = [
    "node_groups: []",
    "nodes: 2",
    "nodes: null",
    "nodes: [{accelerators: {ids: all}}]",
    "nodes: [{group: node}]",
    "nodes: [{count: 0}]",
    "nodes: [{count: 2, gpus: 8}]",
    "nodes: [{accelerators: eight}]",
    "nodes: [{accelerators: {count: 8, memory_gib: -1}}]",
    "nodes: [{labels: [r1]}]",
    "nodes: [{hardware: [{robot_ip: 1}]}]",
    "nodes: [{count: 1}]\nnode_groups: [{label: g}]",
    "nodes: [{count: 1}]\nnode_groups: [{label: g, node_ranks: 0, hardware: {configs: []}}]",
    "nodes: [{count: 1}]\nnode_groups: [{label: 'a,b', node_ranks: 0}]",
    "nodes: [{count: 1}]\nnode_groups: [{label: g, node_ranks: [all]}]",
    "nodes: [{count: 1}]\nnode_groups: [{label: g, node_ranks: 0, env_configs: [{node_ranks: 0, env_vars: [{A: 1, B: 2}]}]}]",
]


@pytest.mark.parametrize("text", WRONG_JOBS)
def test_wrong_jobs_are_wrong_to_both(text: str) -> None:
    assert wrong_in(text)
    with pytest.raises(RoostError):
        read_job(read_text(text))


@pytest.mark.parametrize("text", WRONG_CLUSTERS)
def test_wrong_clusters_are_wrong_to_both(text: str) -> None:
    assert wrong_in(text, CLUSTER)
    with pytest.raises(RoostError):
        read_topology(read_text(text), check_hardware=False)


# The command ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"), [((), job_schema), (("job",), job_schema), (("cluster",), cluster_schema)]
)
def test_the_command_prints_it(arguments: tuple[str, ...], expected: Any) -> None:
    command = [sys.executable, "-m", "roost", "schema", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == expected()


def test_a_topology_written_as_json_is_right() -> None:
    text = roost.Topology.parse("2x8:H200+1x4:AMD/MI300+1x0").to_json()
    assert list(CLUSTER.iter_errors(json.loads(text))) == []
