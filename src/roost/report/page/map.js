// Racks, nodes and accelerators as elements, for a small cluster and for one rack of a large cluster.
const map = document.getElementById("map");
const view = { rack: null, alone: null, kept: null, pointed: null, showsGroups: false, showsWeights: false, cells: new Map(), far: [] };
const isLarge = accelerators > 256 || nodes.length > 48;

function cellElement(cell) {
  const { parts, rest } = partsOf(cell);
  const element = make("div", parts.length ? "cell" : "cell idle");
  element.id = `n${nodeOfCell[cell]}g${localOf(cell)}`;
  element.dataset.cell = cell;
  element.tabIndex = -1;
  element.setAttribute("role", "button");
  const box = make("div", "parts");
  if (!parts.length) box.append("idle");
  const many = parts.length > 4;
  const rows = many ? [...new Set(parts.map((part) => part.c))].map((c) => parts.filter((part) => part.c === c)) : parts.map((part) => [part]);
  for (const row of rows) {
    const { c, r } = row[0];
    const label = row.length > 1 ? `×${row.length}` : `${r}`;
    const part = painted(make("span", components[c].isReserved ? "part reserved" : "part", make("span", "label", make("b", "", components[c].letter), label)), c);
    part.dataset.c = c;
    part.dataset.r = r;
    part.style.flexGrow = Math.max(0.01, row.reduce((sum, one) => sum + one.size, 0));
    box.append(part);
  }
  if (rest > 0.01 && parts.length) {
    const empty = make("span", "rest");
    empty.style.flexGrow = rest;
    box.append(empty);
  }
  element.append(make("span", "index", `${localOf(cell)}`), box);
  const memory = memoryOf(cell);
  if (memory) {
    const bars = make("div", "bars");
    memory.phases.forEach((one, i) => {
      const line = bar(one, memory.card);
      if (i) line.classList.add("thin");
      bars.append(line);
    });
    element.append(bars);
  }
  if (badCells.has(cell) || (memory && memory.over)) element.classList.add("bad");
  element.setAttribute("aria-label", cellLabel(cell, parts, memory));
  return element;
}

function cellLabel(cell, parts, memory) {
  const names = parts.slice(0, 6).map(({ c, r }) => processName(c, r));
  if (parts.length > 6) names.push(`${parts.length - 6} more`);
  const memoryText = memory ? `; ${number(memory.phases[0].sum)}${memory.card === null ? "" : ` of ${number(memory.card)}`} GiB${memory.over ? ", more than it has" : ""}` : "";
  return `${cellName(cell)}: ${names.join(", ") || "idle"}${memoryText}${badCells.has(cell) ? "; has a problem" : ""}`;
}

function nodeElement(node) {
  const kind = node.kind;
  const head = make("div", "node-head", make("b", "", `node ${node.rank}`));
  if (node.name) head.append(make("span", "", node.name));
  if (node.address) head.append(make("span", "address", node.address));
  for (const label of node.groups) head.append(make("span", "tag", [label, hardwareOf.get(label)].filter(Boolean).join(" · ")));
  const model = kind.model || (kind.count ? kind.vendor : "");
  head.append(make("span", "model", [model, kind.card === null ? "" : `${number(kind.card)} GiB`, [...new Set(kind.hardware)].join(", ")].filter(Boolean).join(" · ")));
  const element = make("section", badNodes.has(node.rank) ? "node bad" : "node", head);
  element.id = `n${node.rank}`;
  element.dataset.node = node.rank;
  element.setAttribute("role", "group");
  element.setAttribute("aria-label", `node ${node.rank}${node.name ? `, ${node.name}` : ""}${model ? `, ${kind.count} x ${model}` : ""}`);
  if (kind.count) {
    const cells = make("div", "cells");
    for (let i = 0; i < kind.count; i++) {
      const cell = cellElement(node.first + i);
      view.cells.set(node.first + i, cell);
      cells.append(cell);
    }
    element.append(cells);
  }
  if (node.bare.length) element.append(bareElement(node));
  return element;
}

/** The processes of a node that have no accelerator. */
function bareElement(node) {
  const box = make("div", "on-node", make("small", "", "on the node"));
  for (const { component: c, ranks } of node.bare) {
    const shown = ranks.length <= 4 ? ranks.map((rank) => [rank]) : [ranks];
    for (const some of shown) {
      const text = some.length > 1 ? `${components[c].letter} ×${number(some.length)}` : `${components[c].letter} ${some[0]}`;
      const chip = painted(make("button", "chip", text), c);
      chip.type = "button";
      chip.dataset.c = c;
      chip.dataset.r = some[0];
      chip.dataset.count = some.length;
      const name = some.length > 1 ? `${components[c].name}: ${number(some.length)} processes, ranks ${ranksText(some)}` : processName(c, some[0]);
      chip.setAttribute("aria-label", `on node ${node.rank}: ${name}`);
      box.append(chip);
    }
  }
  return box;
}

/** Draw the overview of a large cluster, or one rack, or all racks if they are few. */
function drawMap(rack) {
  view.rack = rack;
  view.cells = new Map();
  view.far = [];
  map.replaceChildren();
  map.classList.toggle("few", accelerators <= 64);
  if (isLarge && rack === null) drawOverview();
  else {
    const shown = rack === null ? racks : [racks[rack]];
    for (const one of shown) {
      const box = make("div", "nodes");
      for (const node of one.nodes) box.append(nodeElement(node));
      const section = make("section", "rack");
      if (shown.length > 1) section.append(make("h2", "", one.title));
      section.append(box);
      section.setAttribute("aria-label", one.title);
      map.append(section);
    }
    const first = map.querySelector(".cell");
    if (first) first.tabIndex = 0;
  }
  drawCrumbs();
  addLinkCanvas();
  markAlone();
  markKept();
}

function drawCrumbs() {
  const crumbs = document.getElementById("crumbs");
  crumbs.hidden = !isLarge;
  if (!isLarge) return;
  crumbs.replaceChildren();
  if (view.rack === null) {
    crumbs.append(make("b", "", "Cluster"), make("small", "", `${counted(racks.length, "group")} of nodes; press one to look inside`));
    return;
  }
  const button = (text, label, act, isOff) => {
    const element = make("button", "", text);
    element.type = "button";
    element.setAttribute("aria-label", label);
    element.disabled = isOff;
    element.addEventListener("click", act);
    return element;
  };
  const rack = racks[view.rack];
  const back = button("← Cluster", "Back to the whole cluster", () => goTo({ rack: null }), false);
  back.id = "back";
  crumbs.append(
    back, make("b", "", rack.title),
    button("‹", "The one before", () => goTo({ rack: view.rack - 1 }), view.rack === 0),
    button("›", "The next one", () => goTo({ rack: view.rack + 1 }), view.rack === racks.length - 1),
    make("small", "", `${view.rack + 1} of ${number(racks.length)}`),
  );
}

/** Show one component alone, or all. */
function markAlone() {
  const alone = view.alone;
  for (const element of map.querySelectorAll(".part, .chip, .bar i")) element.classList.toggle("dim", alone !== null && Number(element.dataset.c) !== alone);
  for (const element of map.querySelectorAll(".cell.idle")) element.classList.toggle("dim", alone !== null && alone >= 0);
  paintOverview();
  drawLinks();
}

/** Outline all accelerators of the selected process, and its parts of them. */
function markProcess(process) {
  for (const element of map.querySelectorAll(".same")) element.classList.remove("same");
  view.pointed = process;
  if (process) {
    for (const cell of cellsOf(...process)) {
      const element = view.cells.get(cell);
      const part = element && element.querySelector(`.part[data-c="${process[0]}"][data-r="${process[1]}"]`);
      if (part) part.classList.add("same");
    }
  }
  if (view.showsGroups || view.showsWeights || view.far.length) drawLinks();
}

function markKept() {
  for (const element of map.querySelectorAll(".found, .chosen")) element.classList.remove("found", "chosen");
  const kept = view.kept;
  if (!kept) return;
  for (const cell of kept.cells || []) if (view.cells.has(cell)) view.cells.get(cell).classList.add(kept.isFound ? "found" : "chosen");
  for (const rank of kept.nodes || []) {
    const element = document.getElementById(`n${rank}`);
    if (element) element.classList.add("found");
  }
  if (kept.process) {
    const [c, r] = kept.process;
    const chips = [...map.querySelectorAll(`#n${components[c].node[r]} .chip[data-c="${c}"]`)];
    const chip = chips.find((one) => Number(one.dataset.count) > 1 || Number(one.dataset.r) === r);
    if (chip) chip.classList.add("found");
    markProcess(kept.process);
  }
  for (const far of view.far) far.element.classList.toggle("found", (kept.cells || []).some((cell) => nodes[nodeOfCell[cell]].rack === far.rack) || (kept.nodes || []).some((rank) => nodes[rank].rack === far.rack));
}
