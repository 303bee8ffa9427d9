"""The page and the picture of a plan, without a browser: the same bytes, small, and safe to open."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import roost
from roost.cli import main
from roost.report.letters import COLOURS, component_letters
from roost.report.page import draw_page, embed
from roost.report.page_data import finding_rows, page_data
from roost.report.palette import PALETTE
from roost.report.racks import racks_of
from roost.report.svg import draw_svg

ROOT = Path(__file__).parents[2]


def plan_of(name="collocated", machines="2x8:H200"):
    config = roost.load_config(ROOT / "examples" / f"{name}.yaml")
    return roost.Plan.resolve(config, roost.Topology.parse(machines))


def large(job, accelerators=8192):
    whole, nodes = f"0-{accelerators - 1}", accelerators // 8
    agents = {"node_group": "node", "placement": f"0-{nodes - 1}:0-{4 * nodes - 1}"}
    components = {"actor": whole, "rollout": f"{whole}:0-{nodes - 1}", "inference": whole, "agent": agents}
    return job(components, rollout={"tensor_parallel_size": 8})


def data_in(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def spelled(data, component):
    """Every process that the page's data says of a component: (node, node rank, looks)."""
    rows = []
    runs = component["runs"]
    for i in range(0, len(runs), 4):
        node, count, node_rank, shape = runs[i : i + 4]
        rows += [(node + k, node_rank + k, looks) for k in range(count) for looks in data["shapes"][shape]]
    return rows


def test_equal_plans_give_the_same_bytes():
    assert draw_page(plan_of(), "job") == draw_page(plan_of(), "job")
    assert draw_svg(plan_of()) == draw_svg(plan_of())
    code = (
        "import roost; from roost.report.page import draw_page; import hashlib\n"
        "plan = roost.Plan.resolve(roost.load_config('examples/collocated.yaml'), roost.Topology.parse('2x8:H200'))\n"
        "print(hashlib.sha256(draw_page(plan).encode()).hexdigest())"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(hashes) == 1


def test_the_page_needs_nothing_beside_it():
    page = draw_page(plan_of())
    assert not re.search(r"(?:src|href)=[\"'](?!#|data:)", page)
    assert "url(" not in page
    assert "default-src 'none'" in html.unescape(page)
    assert "innerHTML" not in page
    assert "insertAdjacentHTML" not in page


@pytest.mark.parametrize(
    "evil", ["</script><script>alert(1)</script>", "<!--", "]]>", "\u2028\u2029", "&lt;", "\ud800"]
)
def test_texts_stay_texts(job, evil):
    topology = roost.Topology((roost.Node(0, evil, evil, accelerator_ids=("0",), accelerator_model=evil),))
    plan = roost.Plan.resolve(job({"actor": "0"}), topology)
    page = draw_page(plan, evil)
    assert page.count("<script") == 2
    assert data_in(page)["nodes"]["rows"] == [[1, 0, evil, evil]]
    page.encode()
    ElementTree.fromstring(draw_svg(plan))  # noqa: S314
    ElementTree.fromstring(plan._repr_html_().replace(">", "/>"))  # noqa: S314


def test_embedded_json_has_no_signs_of_html():
    text = embed({"a": "<b>&\u2028\u2029é"})
    assert re.search(r"[<>&\u2028\u2029]", text) is None
    assert json.loads(text) == {"a": "<b>&\u2028\u2029é"}


def test_a_page_of_8192_accelerators_is_small(job):
    plan = roost.Plan.resolve(large(job), roost.Topology.parse("1024x8"))
    assert len(draw_page(plan).encode()) < 250_000


def test_an_irregular_page_of_8192_accelerators_is_still_small(job):
    nodes = [
        {"name": f"host-{i}.example", "address": f"10.{i // 256}.{i % 256}.7", "accelerators": {"count": 8}}
        for i in range(1024)
    ]
    first, segments = 0, []
    for node in range(1024):  # nodes of 8 processes, of 4, and of 2
        count = 8 >> node % 3
        segments.append(f"{8 * node}-{8 * node + 7}:{first}-{first + count - 1}")
        first += count
    components = {"actor": ",".join(segments), "rollout": "1-8190:0-8189", "reward": "0-8191"}
    plan = roost.Plan.resolve(job(components), roost.Topology.from_dict({"nodes": nodes}))
    assert len(draw_page(plan).encode()) < 2_000_000


@pytest.mark.parametrize(("name", "machines"), [("collocated", "2x8"), ("disaggregated", "3x8"), ("hybrid", "1x8")])
def test_the_data_says_what_the_plan_says(name, machines):
    plan = plan_of(name, machines)
    data = page_data(plan)
    for component, told in zip(plan.components, data["components"], strict=True):
        rows = spelled(data, told)
        assert len(rows) == component.world_size
        for placement, (node, node_rank, looks) in zip(component.placements, rows, strict=True):
            assert (node, node_rank) == (placement.cluster_node_rank, placement.placement_node_rank)
            assert looks[0] == list(placement.local_hardware_ranks)
            assert looks[2:5] == [placement.local_accelerator_rank, placement.local_rank, placement.local_world_size]
            process = plan.process(component.name, placement.rank)
            assert looks[6] == (plan.transport_texts(component.name)[placement.rank] if process.transport else 0)
            seen = [str(local) for local in looks[0]] if looks[1] == 0 else looks[1]
            slots = [placement.rank, node_rank, looks[2], looks[3], looks[4], ",".join(seen)]
            variables = data["templates"][looks[5]][2]
            assert {n: str(slots[v]) if isinstance(v, int) else v for n, v in variables} == process.environment


def test_letters_and_hues_are_those_of_the_terminal():
    plan = plan_of()
    told = page_data(plan)["components"]
    letters = component_letters([component.name for component in plan.components])
    assert [c["letter"] for c in told] == [letters[component.name] for component in plan.components]
    assert [c["paint"] for c in told] == [PALETTE[colour] for colour in COLOURS[:3]]
    assert set(PALETTE) == set(COLOURS)


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("fill", "ink"), PALETTE.values(), ids=PALETTE)
def test_letters_can_be_read_on_every_colour(fill, ink):
    light, dark = sorted((luminance(fill), luminance(ink)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_racks_follow_labels_or_runs_of_nodes():
    entry = {"accelerators": {"count": 8}}
    labelled = [{**entry, "labels": {"rack": rack}} for rack in ("a", "b", "a")]
    racks = racks_of(roost.Topology.from_dict({"nodes": [*labelled, entry]}))
    assert [(rack.title, rack.node_ranks) for rack in racks] == [("rack a", (0, 2)), ("rack b", (1,)), ("node 3", (3,))]
    assert [rack.title for rack in racks_of(roost.Topology.parse("33x8"))] == ["nodes 0-15", "nodes 16-31", "node 32"]
    assert [len(rack.node_ranks) for rack in racks_of(roost.Topology.parse("4x128"))] == [2, 2]


def test_findings_lead_to_what_they_name(job):
    components = {
        "actor": {"placement": "0-7,8-11", "gpu_share": 0.8},
        "rollout": {"placement": "4-11", "gpu_share": 0.4},
    }
    plan = roost.Plan.resolve(job(components), roost.Topology.parse("2x8"))
    rows = {row["code"]: row for row in finding_rows(plan, plan.check())}
    assert rows["K101"]["cells"] == [[0, i] for i in (4, 5, 6, 7)] + [[1, i] for i in range(4)]
    assert rows["N101"]["cells"] == [[1, i] for i in (4, 5, 6, 7)]
    assert rows["K101"]["is_problem"]


def test_a_plan_shows_itself_in_a_notebook():
    shown = plan_of()._repr_html_()
    assert shown.startswith('<img alt="collocated: 2 nodes x 8 GPUs (H200)')


def test_plans_from_anywhere_show_themselves():
    code = "from roost.plan import Plan\nimport roost.plan.plan, roost.topology as t\nprint(Plan(t.Topology.parse('1x1'), ())._repr_html_()[:4])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "<img\n"


def test_the_picture_of_the_readme_is_current():
    """``make pictures`` writes it anew."""
    assert (ROOT / "docs" / "pictures" / "plan.svg").read_text(encoding="utf-8") == draw_svg(plan_of())


def test_pictures_of_many_nodes_fold_them(job):
    drawn = draw_svg(roost.Plan.resolve(large(job), roost.Topology.parse("1024x8")))
    assert "nodes 0-1023" in drawn
    assert len(drawn) < 20_000


def test_the_command_writes_both_and_says_where(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["plan", str(ROOT / "examples" / "collocated.yaml"), "--cluster", "2x8"]
    assert main([*command, "--html", "plan.html", "--svg", "plan.svg"]) == 0
    assert capsys.readouterr().out.endswith("wrote plan.html and plan.svg\n")
    assert "<h1>collocated.yaml</h1>" in Path("plan.html").read_text(encoding="utf-8")
    assert main([*command, "--json", "--html", "plan.html"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["format"]
    assert printed.err == "wrote plan.html\n"
    assert main([*command, "--svg", "missing/plan.svg"]) == 2
