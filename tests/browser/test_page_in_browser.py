"""The page of a plan in a real browser: what it shows, and what it does when one points, types and presses."""

from __future__ import annotations

from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

import roost

ROOT = Path(__file__).parents[2]

CRAMPED = {
    "cluster": {
        "component_placement": {
            "actor": {"placement": "0-7", "gpu_share": 0.5, "memory_gib": 60},
            "rollout": {"placement": "4-7", "gpu_share": 0.5, "memory_gib": 30},
        }
    }
}
CARDS_OF_80 = {"nodes": [{"accelerators": {"count": 8, "model": "A100", "memory_gib": 80}}]}
ACROSS = {
    "cluster": {"component_placement": {"actor": "0-7", "rollout": "8-15:0-3"}},
    "actor": {"model": {"tensor_model_parallel_size": 8}},
}


def example(name: str):
    return roost.load_config(ROOT / "examples" / f"{name}.yaml")


def collocated(open_page):
    return open_page(example("collocated"), "2x8:H200", "collocated.yaml")


def heterogeneous(open_page, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    __import__("examples.robots")
    return open_page(example("heterogeneous"), roost.Topology.load(ROOT / "examples" / "heterogeneous-cluster.yaml"))


def full_job(accelerators: int):
    whole = f"0-{accelerators - 1}"
    components = {"actor": whole, "rollout": f"{whole}:0-{accelerators // 8 - 1}", "inference": whole}
    return {"cluster": {"component_placement": components}, "rollout": {"tensor_parallel_size": 8}}


@pytest.mark.parametrize("accelerators", [8, 8192])
def test_loads_without_complaints(open_page, accelerators, tmp_path):
    page = open_page(full_job(accelerators), f"{accelerators // 8}x8")
    picture = tmp_path / "screenshot.png"
    page.screenshot(picture)
    assert picture.stat().st_size > 10_000
    assert page.path.stat().st_size < 10_000_000
    assert page.complaints == []
    assert page.run("return performance.getEntriesByType('resource').length") == 0


def test_shows_every_accelerator_with_its_letters(open_page):
    page = collocated(open_page)
    assert len(page.all(".cell")) == 16
    assert page.text("#n0g4 .parts").split() == ["A", "4", "R", "2"]
    assert page.text("#n1 .on-node").split("\n")[-1] == "W 1"
    heights = page.run("return [...document.querySelectorAll('#n0g0 .part')].map((part) => part.offsetHeight)")
    assert heights[0] > 3 * heights[1] > 0  # shares of 0.8 and 0.2


def test_groups_racks_models_and_idle_ones_are_labelled(open_page, monkeypatch):
    page = heterogeneous(open_page, monkeypatch)
    assert [title.text for title in page.all(".rack > h2")] == ["rack r1", "rack r2", "nodes 4-7"]
    assert page.text("#n0 .tag") == "a800"
    assert "A800" in page.text("#n0 .model")
    assert len(page.all(".cell.idle")) == len(page.plan.idle_accelerators) == 14
    assert page.text("#n4 .tag") == "robot · Franka"
    assert page.text("#n4 .chip") == "E 0"


def test_hover_shows_the_process(open_page):
    page = collocated(open_page)
    page.hover("#n0g5 .part[data-r='3']")
    details = page.text("#details")
    assert details.startswith("node 0 GPU 5")
    for words in ("rollout[3]", "actor[5,7]", "3 of 8", "3 of 4 on the node", "ipc", "CUDA_VISIBLE_DEVICES=5,7"):
        assert words in details
    assert len(page.all(".part.same")) == 2  # both accelerators of the engine
    page.hover("h1")
    assert "Point at an accelerator" in page.text("#details")


def test_keyboard_focus_shows_the_process_and_arrows_move(open_page):
    page = collocated(open_page)
    page.run("document.querySelector('.legend button:last-child').focus()")
    page.press(Keys.TAB)
    assert page.text("#details").startswith("node 0 GPU 0")
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    assert page.text("#details").startswith("node 1 GPU 1")
    page.press(Keys.ENTER)
    assert "kept" in page.text("#details")
    page.press(Keys.ESCAPE)
    assert "kept" not in page.text("#details")
    page.press(Keys.END)
    assert page.text("#details").startswith("node 1 GPU 7")


@pytest.mark.parametrize("address", ["actor[0]", "rollout[3]", "env[5]", "agent[300]"])
def test_environments_are_those_of_the_plan(open_page, monkeypatch, address):
    page = heterogeneous(open_page, monkeypatch)
    page.search(address)
    shown = dict(
        line.split("=", 1) for line in page.run("return document.querySelector('#details pre').textContent").split("\n")
    )
    process = page.plan.process(address)
    assert shown == process.environment
    assert process.interpreter in page.text("#details")


def test_the_legend_shows_one_component_alone(open_page):
    page = collocated(open_page)
    page.one(".legend button[data-c='2']").click()
    assert page.one(".legend button[data-c='2']").get_attribute("aria-pressed") == "true"
    assert {part.get_attribute("data-c") for part in page.all(".part:not(.dim)")} == {"2"}
    assert {part.get_attribute("data-c") for part in page.all(".part.dim")} == {"0"}
    page.press(Keys.ESCAPE)
    assert page.all(".dim") == []


def test_search_finds_processes_nodes_and_addresses(open_page, monkeypatch):
    page = heterogeneous(open_page, monkeypatch)
    page.search("rollout[7]")
    assert page.run("return document.activeElement.id") == "n2g7"
    assert [cell.get_attribute("id") for cell in page.all(".cell.found")] == ["n2g7"]
    assert page.run("return document.getElementById('say').textContent") == "rollout[7]: node 2, GPU 7"
    page.search("agent 300")
    assert [chip.text for chip in page.all(".chip.found")] == ["G ×156"]
    page.search("play-1")
    assert [node.get_attribute("id") for node in page.all(".node.found")] == ["n3"]
    page.search("10.1.0.16")
    assert [node.get_attribute("id") for node in page.all(".node.found")] == ["n6"]
    page.one("#search").clear()
    page.one("#search").send_keys("rollout[7000]")
    assert "Nothing of that name" in page.text("#results")
    assert page.complaints == []


def test_links_lead_to_neighbours(open_page):
    page = collocated(open_page)
    page.search("rollout[3]")
    page.one("#details dd a[href='#actor[5]']").click()
    assert page.text("#details .process h3").startswith("A\nactor[5]")
    page.driver.get(f"{page.path.as_uri()}#n1g6")
    assert page.text("#details").split("\n")[1] == "node 1 GPU 6"


def drawn_in(page, name: str) -> int:
    """How many pixels of the links have that colour."""
    return page.run(
        """const canvas = document.querySelector("canvas.links");
        if (!canvas.width) return 0;
        const probe = document.createElement("i");
        probe.style.color = `var(${arguments[0]})`;
        document.body.append(probe);
        const wanted = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        let count = 0;
        for (let i = 0; i < data.length; i += 4)
          if (data[i + 3] > 200 && wanted.every((part, k) => Math.abs(part - data[i + k]) < 6)) count++;
        return count;""",
        name,
    )


def test_groups_and_weights_can_be_switched_on_and_crossing_ones_stand_out(open_page):
    page = open_page(ACROSS, "2x8")
    assert drawn_in(page, "--cross") == 0
    page.one("#show-groups").click()
    assert "5 tensor-parallel groups, none crosses a node" in page.text("#links-say")
    assert drawn_in(page, "--cross") == 0
    page.one("#show-weights").click()
    assert "between nodes" in page.text("#links-say .cross")
    assert drawn_in(page, "--cross") > 100
    page.one("#show-weights").click()
    page.one("#show-groups").click()
    assert drawn_in(page, "--cross") == 0
    assert page.text("#links-say") == ""


def test_a_tensor_parallel_group_over_two_nodes_stands_out(open_page):
    job = {"cluster": {"component_placement": {"actor": "4-11"}}, "actor": {"model": {"tensor_model_parallel_size": 8}}}
    page = open_page(job, "2x8")
    page.one("#show-groups").click()
    assert "1 tensor-parallel group, 1 crosses nodes" in page.text("#links-say")
    assert drawn_in(page, "--cross") > 100
    assert not page.one("#show-weights").is_enabled()


def test_memory_is_red_where_it_exceeds_the_card(open_page):
    page = open_page(CRAMPED, roost.Topology.from_dict(CARDS_OF_80))
    assert [bar.find_element("xpath", "../..").get_attribute("id") for bar in page.all(".cell .bar.over")] == [
        "n0g4", "n0g5", "n0g6", "n0g7",
    ]  # fmt: skip
    assert page.style(".cell .bar.over", "backgroundColor") == "rgb(210, 31, 47)"
    assert "more than it has" in page.one("#n0g4").get_attribute("aria-label")
    page.hover("#n0g4")
    assert "90 of 80 GiB" in page.text("#details")


def test_phases_are_shown_where_components_take_turns(open_page):
    job = {
        "cluster": {
            "placement_mode": "collocated",
            "component_placement": {
                "actor": {"placement": "0-7", "memory_gib": 60},
                "rollout": {"placement": "0-7", "memory_gib": 30},
            },
        }
    }
    page = open_page(job, roost.Topology.from_dict(CARDS_OF_80))
    assert len(page.all("#n0g0 .bar")) == 3
    assert len(page.all("#n0g0 .bar.over")) == 1  # together too much, each alone not
    page.hover("#n0g0")
    rows = page.text("#details .memory").split("\n")
    assert rows == ["together", "90 of 80 GiB", "training", "60 of 80 GiB", "rollout", "30 of 80 GiB"]


def test_problems_lead_to_what_they_concern(open_page):
    page = open_page(CRAMPED, roost.Topology.from_dict(CARDS_OF_80))
    assert "K102" in page.text(".finding.problem")
    assert len(page.all(".cell.bad")) == 4
    page.one(".finding.problem a[data-finding]").click()
    assert [cell.get_attribute("id") for cell in page.all(".cell.found")] == ["n0g4", "n0g5", "n0g6", "n0g7"]
    assert page.text("#details").split("\n")[1] == "node 0 GPU 4"
    page.one(".finding.problem a[data-component]").click()
    assert page.all(".legend button[aria-pressed='true']")


def test_labels_are_text_whatever_is_in_them(open_page):
    evil = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    topology = roost.Topology.from_dict({"nodes": [{"name": evil, "accelerators": {"count": 8, "model": evil}}]})
    groups = [
        {"label": "</script><b>g</b>", "node_ranks": 0, "env_configs": [{"node_ranks": 0, "env_vars": [{"X": evil}]}]}
    ]
    job = {
        "cluster": {
            "node_groups": groups,
            "component_placement": {"actor": {"node_group": "</script><b>g</b>", "placement": "0-7"}},
        }
    }
    page = open_page(job, topology, title=evil)
    page.hover("#n0g0")
    assert page.run("return window.hacked === undefined")
    assert page.text("h1") == evil
    assert evil in page.text("#n0 .node-head")
    assert page.text("#n0 .tag") == "</script><b>g</b>"
    assert f"X={evil}" in page.text("#details pre")
    assert page.all("main img, main b > b, main script") == []
    assert page.complaints == []


def test_dark_follows_the_system_and_the_button(open_page):
    page = collocated(open_page)
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    assert page.style("body", "backgroundColor") == "rgb(244, 246, 249)"
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    page.until("body", "backgroundColor", "rgb(14, 19, 26)")
    page.one("#theme").click()
    assert page.one("#theme").get_attribute("aria-label") == "Colours: light"
    assert page.style("body", "backgroundColor") == "rgb(244, 246, 249)"
    page.one("#theme").click()
    assert page.style("body", "backgroundColor") == "rgb(14, 19, 26)"
    page.run("localStorage.clear()")


def test_prints_on_white_without_tools(open_page):
    page = open_page(CRAMPED, roost.Topology.from_dict(CARDS_OF_80))
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert page.style("body", "backgroundColor") == "rgb(255, 255, 255)"
    assert page.style(".tools", "display") == "none"
    assert page.style(".findings", "display") != "none"


def test_everything_has_a_name(open_page):
    page = collocated(open_page)
    nameless = page.run(
        """return [...document.querySelectorAll("button, [role=button], [role=group], input, section, nav")]
        .filter((one) => !(one.getAttribute("aria-label") || (one.matches("button") && one.textContent.trim())))
        .map((one) => one.outerHTML.slice(0, 80))"""
    )
    assert nameless == []
    assert page.one("#n0g4").get_attribute("aria-label") == "node 0 GPU 4: actor[4], rollout[2]"


def test_a_large_cluster_opens_group_by_group(open_page):
    page = open_page(full_job(8192), "1024x8")
    assert len(page.all(".far")) == 64
    assert page.one(".far").get_attribute("aria-label").startswith("nodes 0-15: 16 nodes, 128 GPUs; actor on 128")
    page.hover(".far[data-rack='2'] canvas")
    assert "actor[" in page.text("#details")
    page.one(".far[data-rack='2']").click()
    assert len(page.all(".cell")) == 128
    assert page.text("#crumbs b") == "nodes 32-47"
    page.press(Keys.ESCAPE)
    assert len(page.all(".far")) == 64
    page.search("rollout[1000]")
    assert [cell.get_attribute("id") for cell in page.all(".cell.found")] == [f"n1000g{i}" for i in range(8)]
    assert "actor[8000-8007]" in page.text("#details")
    page.one("#show-weights").click()
    page.one("#back").click()
    page.one(".legend button[data-c='2']").click()
    assert "1,024 on the same GPU" in page.text("#links-say")
    assert drawn_in(page, "--here") > 1000
    assert page.complaints == []
