// The data of the page, expanded into tables with fast lookups.
const given = JSON.parse(document.getElementById("data").textContent);
const components = given.components;
const DISTANCES = ["same", "node", "network"];

/** [first, count, first, count, …] as a list of ranks. */
function spelled(spans) {
  const ranks = [];
  for (let i = 0; i < spans.length; i += 2) for (let k = 0; k < spans[i + 1]; k++) ranks.push(spans[i] + k);
  return ranks;
}

/** Ascending ranks as text: 0-3,5. */
function ranksText(ranks, most = 12) {
  const parts = [];
  for (let i = 0; i < ranks.length;) {
    let k = i;
    while (k + 1 < ranks.length && ranks[k + 1] === ranks[k] + 1) k++;
    parts.push(i === k ? `${ranks[i]}` : `${ranks[i]}-${ranks[k]}`);
    i = k + 1;
  }
  return parts.length <= most ? parts.join(",") : `${parts.slice(0, most).join(",")},…`;
}

const number = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 1 });
const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : noun.endsWith("s") ? "es" : "s"}`;

// Nodes, racks, groups
const nodes = [];
for (const [count, kind, name, address] of given.nodes.rows)
  for (let k = 0; k < count; k++) nodes.push({ rank: nodes.length, kind: given.nodes.kinds[kind], name, address, groups: [], rack: 0, first: 0, bare: [] });
let accelerators = 0;
for (const node of nodes) {
  node.first = accelerators;
  accelerators += node.kind.count;
}
const racks = given.racks.map(([title, spans], index) => {
  const members = spelled(spans).map((rank) => nodes[rank]);
  for (const node of members) node.rack = index;
  return { index, title, nodes: members };
});
const hardwareOf = new Map(); // of groups that count robots or other devices
for (const [label, spans, hardware] of given.groups) {
  hardwareOf.set(label, hardware);
  for (const rank of spelled(spans)) nodes[rank].groups.push(label);
}
const nodeOfCell = new Int32Array(accelerators);
for (const node of nodes) nodeOfCell.fill(node.rank, node.first, node.first + node.kind.count);
const cellOf = (node, local) => nodes[node].first + local;

// Processes: for each component, the node of every rank, that node's number within the component, and the rank's
// looks: a row that equal processes share (see page_data.py)
for (const [index, component] of components.entries()) {
  component.index = index;
  component.node = new Int32Array(component.size);
  component.nodeRank = new Int32Array(component.size);
  component.looks = new Array(component.size);
  let rank = 0;
  for (let i = 0; i < component.runs.length; i += 4) {
    const [first, count, nodeRank, shape] = component.runs.slice(i, i + 4);
    for (let k = 0; k < count; k++)
      for (const looks of given.shapes[shape]) {
        component.node[rank] = first + k;
        component.nodeRank[rank] = nodeRank + k;
        component.looks[rank++] = looks;
      }
  }
}

// The processes on each accelerator, as flat pairs (component, rank); and the processes without one, by node
const crowdStart = new Int32Array(accelerators + 1);
for (const c of components)
  for (let r = 0; r < c.size; r++)
    if (c.looks[r][2] >= 0) for (const local of c.looks[r][0]) crowdStart[cellOf(c.node[r], local) + 1]++;
for (let i = 0; i < accelerators; i++) crowdStart[i + 1] += crowdStart[i];
const crowd = new Int32Array(2 * crowdStart[accelerators]);
{
  const filled = crowdStart.slice();
  for (const c of components)
    for (let r = 0; r < c.size; r++) {
      if (c.looks[r][2] < 0) {
        const bare = nodes[c.node[r]].bare;
        const last = bare[bare.length - 1];
        if (last && last.component === c.index) last.ranks.push(r);
        else bare.push({ component: c.index, ranks: [r] });
        continue;
      }
      for (const local of c.looks[r][0]) {
        const at = 2 * filled[cellOf(c.node[r], local)]++;
        crowd[at] = c.index;
        crowd[at + 1] = r;
      }
    }
}

/** The processes on an accelerator, as [component, rank]. */
function processesOn(cell) {
  const found = [];
  for (let i = crowdStart[cell]; i < crowdStart[cell + 1]; i++) found.push([crowd[2 * i], crowd[2 * i + 1]]);
  return found;
}

/** The accelerators of a process. */
function cellsOf(c, r) {
  const component = components[c];
  const looks = component.looks[r];
  return looks[2] < 0 ? [] : looks[0].map((local) => cellOf(component.node[r], local));
}

/** The processes that share an accelerator with a process, each once. */
function neighbours(c, r) {
  const found = new Map();
  for (const cell of cellsOf(c, r))
    for (const [oc, or] of processesOn(cell)) if (oc !== c || or !== r) found.set(`${oc}/${or}`, [oc, or]);
  return [...found.values()].sort((a, b) => a[0] - b[0] || a[1] - b[1]);
}

const processName = (c, r) => `${components[c].name}[${r}]`;
const localOf = (cell) => cell - nodes[nodeOfCell[cell]].first;
const cellName = (cell) => `node ${nodeOfCell[cell]} ${nodes[nodeOfCell[cell]].kind.noun} ${localOf(cell)}`;

/** The environment of a process, from its template, in which numbers are slots. */
function environmentOf(c, r) {
  const component = components[c];
  const [locals, visible, first, localRank, localSize, template] = component.looks[r];
  const seen = visible === 0 ? locals.map(String) : visible;
  const slots = [r, component.nodeRank[r], first, localRank, localSize, seen.join(",")];
  const [interpreter, group, variables] = given.templates[template];
  return { interpreter, group, variables: variables.map(([name, value]) => [name, typeof value === "number" ? String(slots[value]) : value]) };
}

/** The part of an accelerator that each of its processes has: its declared share, or an equal part of the rest. */
function partsOf(cell) {
  const found = processesOn(cell);
  const declared = found.map(([c]) => components[c].share);
  const sum = declared.reduce((total, share) => total + (share || 0), 0);
  const open = declared.filter((share) => share === null).length;
  const left = open ? Math.max(1 - sum, 0.15 * open) / open : 0;
  const parts = found.map(([c, r], i) => ({ c, r, size: declared[i] === null ? left : declared[i] }));
  return { parts, rest: open ? 0 : Math.max(0, 1 - sum), declared: open === 0 };
}

/** The declared memory on an accelerator: title, processes and sum, for all together and for each phase. */
function memoryOf(cell) {
  const needs = processesOn(cell).filter(([c]) => components[c].memory !== null && !components[c].isReserved);
  if (!needs.length) return null;
  const card = nodes[nodeOfCell[cell]].kind.card;
  const phase = (title, chosen) => ({ title, parts: chosen, sum: chosen.reduce((total, [c]) => total + components[c].memory, 0) });
  const phases = [phase("together", needs)];
  const trains = needs.filter(([c]) => components[c].trains);
  const generates = needs.filter(([c]) => components[c].generates);
  if (given.takesTurns && (trains.length < needs.length || generates.length < needs.length))
    phases.push(phase("training", trains), phase("rollout", generates));
  for (const one of phases) one.over = card !== null && one.sum > card + 1e-6;
  return { card, phases, over: phases[0].over };
}

// Problems lead to accelerators and nodes
const badCells = new Set();
const badNodes = new Set();
for (const [isProblem, cells] of given.findings)
  if (isProblem) for (const [node, local] of cells) local < 0 ? badNodes.add(node) : badCells.add(cellOf(node, local));
