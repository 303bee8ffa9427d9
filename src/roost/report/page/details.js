// The panel with the details of an accelerator, a process or a node. It sets textContent only, never HTML.
const TRANSPORTS = {
  ipc: "in place: the trainer is on the same accelerators",
  shared_memory: "through host memory: the trainer is on the same node",
  broadcast: "by a collective: the trainer is on other accelerators",
  file: "through files: the trainer's accelerators are of another vendor",
};
const PLACES = ["the same accelerator", "the same node", "other nodes"];
const panel = document.getElementById("details");

/** An element with a class, texts and children. */
function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.filter((child) => child !== null));
  return element;
}

function painted(element, c) {
  element.style.setProperty("--fill", components[c].paint[0]);
  element.style.setProperty("--ink", components[c].paint[1]);
  return element;
}

const letterOf = (c) => painted(make("span", "letter", components[c].letter), c);

/** A link to a place of the page: a process, an accelerator, a node. */
function leadTo(hash, text) {
  const link = make("a", "", text);
  link.href = `#${hash}`;
  return link;
}

function listed(items, most = 8) {
  const span = make("span");
  items.slice(0, most).forEach((item, i) => span.append(i ? ", " : "", item));
  if (items.length > most) span.append(`, … ${number(items.length - most)} more`);
  return span;
}

/** Processes as links, those of one component together: actor[0-7], env[3]. */
function grouped(processes, most) {
  const byComponent = new Map();
  for (const [c, r] of processes) byComponent.set(c, [...(byComponent.get(c) || []), r]);
  return listed([...byComponent].map(([c, ranks]) => leadTo(`${encodeURIComponent(components[c].name)}[${ranks[0]}]`, `${components[c].name}[${ranksText(ranks, 6)}]`)), most);
}

function facts(rows) {
  const list = make("dl");
  for (const [name, value] of rows) if (value !== null && value !== "") list.append(make("dt", "", name), make("dd", "", value));
  return list;
}

function processCard(c, r, isOpen) {
  const component = components[c];
  const looks = component.looks[r];
  const node = nodes[component.node[r]];
  const environment = environmentOf(c, r);
  const cells = cellsOf(c, r);
  const shared = neighbours(c, r);
  const what = component.isReserved ? "reserved, not started" : component.role === component.name ? "" : component.role;
  const card = make("article", "process", make("h3", "", letterOf(c), processName(c, r), make("small", "", what)));
  const noun = node.kind.noun || "GPU";
  const where = cells.length
    ? make("span", "", leadTo(`n${node.rank}`, `node ${node.rank}`), ", ", listed(cells.map((cell) => leadTo(`n${node.rank}g${localOf(cell)}`, `${noun} ${localOf(cell)}`))))
    : make("span", "", leadTo(`n${node.rank}`, `node ${node.rank}`), hardwareOf.get(environment.group) ? `, ${hardwareOf.get(environment.group)} ${ranksText(looks[0])}` : `, no ${noun}`);
  const engine = component.members > 1 ? `${Math.floor(r / component.members)}, member ${r % component.members} of ${component.members}` : component.isEngine ? `${r}` : "";
  card.append(
    facts([
      ["on", where],
      ["shares with", shared.length ? grouped(shared) : cells.length ? "nobody" : ""],
      ["rank", `${r} of ${number(component.size)}`],
      ["local rank", `${looks[3]} of ${looks[4]} on the node`],
      ["engine", engine],
      ["share", component.share === null ? "" : `${component.share} of ${cells.length > 1 ? "each " : "the "}${noun}`],
      ["memory", component.memory === null ? "" : `${number(component.memory)} GiB${cells.length > 1 ? ` on each ${noun}` : ""}`],
      ["CPUs", component.cpus === null ? "" : number(component.cpus)],
      ["weights", weightFacts(c, r)],
      ["ports", component.isReserved ? "" : "leased on its node at launch"],
      ["rule", make("code", "", component.rule)],
      ["interpreter", environment.interpreter],
    ]),
  );
  const fold = make("details", "", make("summary", "", "Environment"), make("pre", "", environment.variables.map(([name, value]) => `${name}=${value}`).join("\n")));
  fold.open = isOpen;
  card.append(fold);
  return card;
}

/** The weights of a process in words: their transports, senders and receivers. */
function weightFacts(c, r) {
  const looks = components[c].looks[r];
  const parts = [];
  for (const text of looks[6] ? looks[6].split(", ") : []) {
    parts.push(make("div", "", `${text}: ${TRANSPORTS[text.split(" ").pop()]}`)); // such as "1/2 ipc"
  }
  for (const [sent, byDistance] of [[false, flowsInto(c, r)], [true, flowsFrom(c, r)]]) {
    const total = byDistance.reduce((sum, one) => sum + one.bytes, 0);
    byDistance.forEach((one, distance) => {
      if (!one.peers.size) return;
      const peers = [...one.peers.values()].sort((a, b) => a[0] - b[0] || a[1] - b[1]);
      const share = sent || one.bytes === total ? "" : `${Math.round((100 * one.bytes) / total)} % `;
      parts.push(make("div", distance === 2 ? "far-link" : "", `${sent ? "to" : `${share}from`} `, grouped(peers), make("span", distance === 2 ? "cross" : "", ` (${PLACES[distance]})`)));
    });
  }
  return parts.length ? make("div", "", ...parts) : "";
}

function memoryRows(cell) {
  const memory = memoryOf(cell);
  if (!memory) return null;
  const box = make("div", "memory");
  for (const one of memory.phases) {
    const text = memory.card === null ? `${number(one.sum)} GiB` : `${number(one.sum)} of ${number(memory.card)} GiB`;
    box.append(make("div", one.over ? "row over" : "row", make("span", "", one.title), bar(one, memory.card), make("b", "", text)));
  }
  return box;
}

/** A bar of the memory that a phase needs; red if it exceeds that of the accelerator. */
function bar(one, card) {
  const element = make("div", one.over ? "bar over" : "bar");
  const full = card === null ? one.sum : Math.max(card, one.sum);
  for (const [c] of one.parts) {
    const part = painted(make("i"), c);
    part.dataset.c = c;
    part.style.width = `${(100 * components[c].memory) / full}%`;
    element.append(part);
  }
  return element;
}

function show(title, line, pinned, ...children) {
  panel.replaceChildren();
  if (pinned) panel.append(make("span", "pinned", "kept · Esc"));
  panel.append(make("h2", "", title), make("p", "", line), ...children.filter((child) => child !== null));
}

function showCell(cell, process, pinned) {
  const node = nodes[nodeOfCell[cell]];
  const found = processesOn(cell);
  const first = process ? found.findIndex(([c, r]) => c === process[0] && r === process[1]) : -1;
  if (first > 0) found.unshift(...found.splice(first, 1));
  const id = node.kind.ids ? `id ${node.kind.ids[localOf(cell)]}` : "";
  const line = [node.kind.model || node.kind.vendor, node.name, node.address, id].filter(Boolean).join(" · ");
  const cards = found.slice(0, 12).map(([c, r], i) => processCard(c, r, i === 0));
  const rest = found.length > 12 ? make("p", "", `… ${found.length - 12} more processes`) : null;
  show(cellName(cell), found.length ? line : `${line ? `${line} · ` : ""}idle: nobody uses it`, pinned, memoryRows(cell), ...cards, rest);
}

function showProcess(c, r, pinned) {
  const cells = cellsOf(c, r);
  const node = nodes[components[c].node[r]];
  const title = `node ${node.rank}${cells.length ? ` ${node.kind.noun} ${ranksText(cells.map(localOf))}` : ""}`;
  const line = [cells.length ? node.kind.model || node.kind.vendor : "without an accelerator", node.name, node.address];
  const others = neighbours(c, r).slice(0, 8).map(([oc, or]) => processCard(oc, or, false));
  if (others.length) others.unshift(make("p", "beside", "On the same " + (cells.length > 1 ? `${node.kind.noun}s` : node.kind.noun)));
  show(title, line.filter(Boolean).join(" · "), pinned, cells.length ? memoryRows(cells[0]) : null, processCard(c, r, true), ...others);
}

function showNode(node, pinned) {
  const kind = node.kind;
  const idle = Array.from({ length: kind.count }, (_, i) => node.first + i).filter((cell) => crowdStart[cell] === crowdStart[cell + 1]);
  const counts = components.map((c) => {
    const ranks = [];
    for (let r = 0; r < c.size; r++) if (c.node[r] === node.rank) ranks.push(r);
    return ranks;
  });
  const rows = counts.map((ranks, c) => [components[c].name, ranks.length ? `${counted(ranks.length, "process")}: ${ranksText(ranks)}` : ""]);
  const hardware = kind.count ? `${kind.count} x ${kind.model || kind.noun}${kind.card === null ? "" : `, ${number(kind.card)} GiB each`}` : "no accelerators";
  const labels = Object.entries(kind.labels).map(([key, value]) => `${key}: ${value}`).join(", ");
  show(
    `node ${node.rank}${node.name ? ` · ${node.name}` : ""}`, [hardware, node.address].filter(Boolean).join(" · "), pinned,
    facts([
      ["groups", node.groups.join(", ")], ["labels", labels], ["hardware", kind.hardware.join(", ")],
      ["CPUs", kind.cpus === null ? "" : number(kind.cpus)], ["memory", kind.memory === null ? "" : `${number(kind.memory)} GiB`],
      ["idle", idle.length ? `${kind.noun} ${ranksText(idle.map(localOf))}` : ""], ...rows,
    ]),
  );
}

function showHelp() {
  panel.replaceChildren(make("h2", "", "Point at an accelerator"), make("ul", "how",
    make("li", "", "Point at one, or reach it with Tab and the arrow keys, to see its processes. Press to keep them here."),
    make("li", "", "Press a component above to see it alone."),
    make("li", "", "Press / and type rollout[3], a node or an address.")));
}
