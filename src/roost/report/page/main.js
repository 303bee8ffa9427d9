// Pointer, keyboard and links of the page; the legend, the switches and the colours.
const legend = document.getElementById("legend");

/** Show {process}, {cells} or {nodes} until Esc is pressed; or {rack}. */
function goTo(place) {
  if ("rack" in place) {
    view.kept = view.pointed = null;
    drawMap(place.rack);
    describe();
    map.querySelector(place.rack === null ? ".far" : ".cell, .chip")?.focus({ preventScroll: true });
    return;
  }
  const kept = { ...place };
  if (place.process) kept.cells = cellsOf(...place.process);
  const node = kept.cells && kept.cells.length ? nodeOfCell[kept.cells[0]] : place.process ? components[place.process[0]].node[place.process[1]] : kept.nodes ? kept.nodes[0] : 0;
  view.kept = kept;
  if (isLarge && view.rack !== nodes[node].rack) drawMap(nodes[node].rack);
  markProcess(null);
  markKept();
  describe();
  const target = kept.cells && kept.cells.length ? view.cells.get(kept.cells[0]) : document.getElementById(`n${node}`);
  if (target) {
    if (target.classList.contains("cell")) reach(target, !place.isQuiet);
    target.scrollIntoView({ block: "nearest" });
  }
}

/** The text of the panel while nothing is selected. */
function describe() {
  const kept = view.kept;
  if (!kept) showHelp();
  else if (kept.process) showProcess(...kept.process, true);
  else if (kept.cells && kept.cells.length) showCell(kept.cells[0], null, true);
  else if (kept.nodes) showNode(nodes[kept.nodes[0]], true);
}

/** Make an accelerator the one that Tab reaches, and optionally focus it. */
function reach(element, withFocus) {
  for (const other of map.querySelectorAll('.cell[tabindex="0"]')) other.tabIndex = -1;
  element.tabIndex = 0;
  if (withFocus) element.focus({ preventScroll: true });
}

function pointAt(target) {
  const chip = target.closest(".chip");
  if (chip) {
    const process = [Number(chip.dataset.c), Number(chip.dataset.r)];
    markProcess(process);
    return Number(chip.dataset.count) > 1 ? showNode(nodes[components[process[0]].node[process[1]]], false) : showProcess(...process, false);
  }
  const cell = target.closest(".cell");
  if (cell) {
    const part = target.closest(".part");
    const process = part ? [Number(part.dataset.c), Number(part.dataset.r)] : null;
    markProcess(process || processesOn(Number(cell.dataset.cell))[0] || null);
    return showCell(Number(cell.dataset.cell), process, false);
  }
  const head = target.closest(".node-head");
  if (head) showNode(nodes[Number(head.parentElement.dataset.node)], false);
}

map.addEventListener("mouseover", (event) => {
  if (!view.kept) pointAt(event.target);
});
map.addEventListener("mousemove", (event) => {
  if (!view.far.length || view.kept) return;
  const cell = farCellAt(event);
  if (cell === view.farCell) return;
  view.farCell = cell;
  if (cell === null) return;
  if (cell < 0) showNode(nodes[-1 - cell], false);
  else {
    markProcess(processesOn(cell)[0] || null);
    showCell(cell, null, false);
  }
});
map.addEventListener("mouseleave", () => {
  if (view.kept) return;
  markProcess(null);
  describe();
});
map.addEventListener("focusin", (event) => {
  if (view.kept && view.kept.cells?.includes(Number(event.target.dataset.cell))) return;
  if (event.target.matches(".cell, .chip") && event.target.matches(":focus-visible")) {
    view.kept = null;
    markKept();
    pointAt(event.target);
  }
});

map.addEventListener("click", (event) => {
  const far = event.target.closest(".far");
  if (far) return goTo({ rack: Number(far.dataset.rack) });
  const chip = event.target.closest(".chip");
  if (chip) return goTo(Number(chip.dataset.count) > 1 ? { nodes: [components[chip.dataset.c].node[chip.dataset.r]] } : { process: [Number(chip.dataset.c), Number(chip.dataset.r)] });
  const cell = event.target.closest(".cell");
  if (cell) {
    const part = event.target.closest(".part");
    return goTo(part ? { process: [Number(part.dataset.c), Number(part.dataset.r)], isQuiet: true, cell: Number(cell.dataset.cell) } : { cells: [Number(cell.dataset.cell)], isQuiet: true });
  }
  const head = event.target.closest(".node-head");
  if (head) goTo({ nodes: [Number(head.parentElement.dataset.node)] });
});

const STEPS = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
map.addEventListener("keydown", (event) => {
  const here = event.target.closest(".cell, .far");
  if (!here) return;
  const all = [...map.querySelectorAll(here.classList.contains("cell") ? ".cell" : ".far")];
  if (event.key === "Enter" || event.key === " ") {
    if (here.classList.contains("cell")) {
      goTo({ cells: [Number(here.dataset.cell)] });
      event.preventDefault();
    }
    return;
  }
  let next = null;
  if (event.key in STEPS) next = all[Math.max(0, Math.min(all.length - 1, all.indexOf(here) + STEPS[event.key]))];
  else if (event.key === "ArrowDown" || event.key === "ArrowUp") next = nearest(here, all, event.key === "ArrowDown" ? 1 : -1);
  if (!next) return;
  event.preventDefault();
  if (next.classList.contains("cell")) reach(next, true);
  else next.focus();
});

/** The element below or above another. */
function nearest(here, all, direction) {
  const from = here.getBoundingClientRect();
  let best = null;
  let distance = Infinity;
  for (const other of all) {
    const box = other.getBoundingClientRect();
    const down = (box.top - from.top) * direction;
    const score = down * 3 + Math.abs(box.left - from.left);
    if (down > 4 && score < distance) [best, distance] = [other, score];
  }
  return best;
}

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest("input");
  if (event.key === "/" && !isTyping) {
    searchBox.focus();
    searchBox.select();
    event.preventDefault();
  } else if (event.key === "Escape") {
    if (view.kept) {
      view.kept = null;
      markProcess(null);
      markKept();
      describe();
    } else if (view.alone !== null) setAlone(null);
    else if (isLarge && view.rack !== null) goTo({ rack: null });
  }
});

// The legend
function setAlone(index) {
  view.alone = view.alone === index ? null : index;
  legend.classList.toggle("isolated", view.alone !== null);
  for (const button of legend.children) button.setAttribute("aria-pressed", String(Number(button.dataset.c) === view.alone));
  markAlone();
  sayLinks();
}

function drawLegend() {
  for (const component of components) {
    const what = [component.isReserved ? "reserved" : component.isEngine && component.looks[0][2] >= 0 ? counted(Math.floor(component.size / component.members), "engine") : counted(component.size, "process")];
    if (component.role !== component.name) what.push(component.role);
    if (component.share !== null) what.push(`${component.share} of a ${given.noun}`);
    if (component.memory !== null) what.push(`${number(component.memory)} GiB`);
    const button = make("button", "", letterOf(component.index), make("span", "", component.name, " ", make("small", "", what.join(" · "))));
    button.dataset.c = component.index;
    legend.append(button);
  }
  let idle = 0;
  for (let cell = 0; cell < accelerators; cell++) if (crowdStart[cell] === crowdStart[cell + 1]) idle++;
  if (idle) {
    const button = make("button", "", make("span", "letter idle", "·"), make("span", "", "idle ", make("small", "", counted(idle, given.noun))));
    button.dataset.c = -1;
    legend.append(button);
  }
  for (const button of legend.children) {
    button.type = "button";
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => setAlone(Number(button.dataset.c)));
  }
}

// The switches
function addSwitch(id, field, isThere, why) {
  const button = document.getElementById(id);
  button.disabled = !isThere;
  if (!isThere) button.title = why;
  button.addEventListener("click", () => {
    view[field] = !view[field];
    button.setAttribute("aria-pressed", String(view[field]));
    drawLinks();
    sayLinks();
  });
}

// Light and dark
const THEMES = { auto: ["◐", "as the system has them"], light: ["☀", "light"], dark: ["☾", "dark"] };
const system = window.matchMedia("(prefers-color-scheme: dark)");
let theme = "auto";
function setTheme(name) {
  theme = name in THEMES ? name : "auto";
  document.documentElement.dataset.theme = theme === "auto" ? (system.matches ? "dark" : "light") : theme;
  const button = document.getElementById("theme");
  button.firstElementChild.textContent = THEMES[theme][0];
  button.setAttribute("aria-label", `Colours: ${THEMES[theme][1]}`);
  button.title = `Colours: ${THEMES[theme][1]}`;
  paintOverview();
  drawLinks();
}
function kept(name, value) {
  try {
    if (value === undefined) return window.localStorage.getItem(name);
    window.localStorage.setItem(name, value);
  } catch {
    // a page from disk may have no storage
  }
  return null;
}
document.getElementById("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(theme) + 1) % names.length]);
  kept("roost-theme", theme);
});
system.addEventListener("change", () => setTheme(theme));

// Links of the page: #n0g3, #n0, #actor[3]; and links from problems to their places
function followHash() {
  const hash = decodeURIComponent(location.hash.slice(1));
  const place = /^n(\d+)(?:g(\d+))?$/.exec(hash);
  if (place) {
    const node = nodes[Number(place[1])];
    if (!node) return;
    if (place[2] === undefined) goTo({ nodes: [node.rank], isFound: true });
    else if (Number(place[2]) < node.kind.count) goTo({ cells: [node.first + Number(place[2])], isFound: true });
    return;
  }
  const process = /^(.*)\[(\d+)\]$/.exec(hash);
  const component = process && components.find((one) => one.name === process[1]);
  if (component && Number(process[2]) < component.size) goTo({ process: [component.index, Number(process[2])], isFound: true });
}
window.addEventListener("hashchange", followHash);
document.addEventListener("click", (event) => {
  const link = event.target.closest("a");
  if (!link) return;
  if (link.dataset.finding !== undefined) {
    const cells = given.findings[Number(link.dataset.finding)][1];
    const own = cells.filter(([, local]) => local >= 0).map(([node, local]) => cellOf(node, local));
    goTo(own.length ? { cells: own, isFound: true } : { nodes: cells.map(([node]) => node), isFound: true });
    event.preventDefault();
  } else if (link.dataset.component !== undefined) {
    const component = components.find((one) => one.name === link.dataset.component);
    if (component && view.alone !== component.index) setAlone(component.index);
    event.preventDefault();
  } else if (link.getAttribute("href") === location.hash) followHash();
});

let waiting = 0;
window.addEventListener("resize", () => {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(drawLinks);
});

setTheme(kept("roost-theme") || "auto");
drawLegend();
addSwitch("show-groups", "showsGroups", components.some((component) => groupsOf(component).length), "No component has tensor-parallel groups");
addSwitch("show-weights", "showsWeights", given.flows.length > 0, "The plan has no transfer schedule: that takes exactly one trainer, whose parallel sizes fit, and engines");
drawMap(null);
describe();
followHash();
