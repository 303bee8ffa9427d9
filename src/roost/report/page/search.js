// Finding a process, a node or an address.
const searchBox = document.getElementById("search");
const results = document.getElementById("results");
const MOST_RESULTS = 10;
const PROCESS = /^\s*(.+?)\s*(?:\[\s*(\d+)\s*\]?|\s(\d+))\s*$/;
let found = [];
let marked = 0;

/** Everything that a text may mean, the best first. */
function lookUp(text) {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return [];
  const hits = [];
  const match = PROCESS.exec(text);
  if (match) {
    const [name, rank] = [match[1].toLowerCase(), Number(match[2] ?? match[3])];
    for (const c of components) if (c.name.toLowerCase().startsWith(name) && rank < c.size) hits.push(processHit(c.index, rank));
    if (name === "node" && rank < nodes.length) hits.push(nodeHit(nodes[rank]));
  }
  const node = /^(?:node[\s-]?)?(\d+)$/.exec(wanted);
  if (node && Number(node[1]) < nodes.length && !(match && match[1].toLowerCase() === "node")) hits.push(nodeHit(nodes[Number(node[1])]));
  const exact = nodes.filter((one) => one.name.toLowerCase() === wanted || one.address.toLowerCase() === wanted);
  const near = nodes.filter((one) => !exact.includes(one) && ((one.name && one.name.toLowerCase().includes(wanted)) || (one.address && one.address.toLowerCase().includes(wanted))));
  for (const one of [...exact, ...near]) if (hits.length < MOST_RESULTS && !hits.some((hit) => hit.node === one.rank)) hits.push(nodeHit(one));
  for (const one of nodes) {
    if (hits.length >= MOST_RESULTS) break;
    const local = one.kind.ids ? one.kind.ids.findIndex((id) => id.toLowerCase() === wanted) : -1;
    if (local >= 0) hits.push({ text: one.kind.ids[local], more: cellName(one.first + local), go: { cells: [one.first + local] } });
  }
  for (const c of components) if (c.name.toLowerCase().includes(wanted) && hits.length < MOST_RESULTS) hits.push({ text: c.name, more: `${counted(c.size, "process")}, alone`, alone: c.index });
  return hits.slice(0, MOST_RESULTS);
}

function processHit(c, r) {
  const component = components[c];
  const cells = cellsOf(c, r);
  const noun = nodes[component.node[r]].kind.noun;
  const where = `node ${component.node[r]}${cells.length ? `, ${noun} ${ranksText(cells.map(localOf))}` : ""}`;
  const shared = neighbours(c, r).map(([oc, or]) => processName(oc, or));
  return { text: processName(c, r), more: where, say: `${processName(c, r)}: ${where}${shared.length ? `, shared with ${shared.slice(0, 4).join(", ")}` : ""}`, go: { process: [c, r] } };
}

const nodeHit = (node) => ({ text: node.name || `node ${node.rank}`, more: [`node ${node.rank}`, node.address].filter(Boolean).join(" · "), node: node.rank, go: { nodes: [node.rank] } });

function listResults() {
  found = lookUp(searchBox.value);
  marked = 0;
  results.replaceChildren();
  found.forEach((hit, i) => {
    const item = make("li", "", make("span", "", hit.text), make("small", "", hit.more));
    item.id = `result-${i}`;
    item.setAttribute("role", "option");
    item.addEventListener("mousedown", (event) => {
      event.preventDefault();
      take(i);
    });
    results.append(item);
  });
  if (searchBox.value.trim() && !found.length) results.append(make("li", "", make("small", "", "Nothing of that name is in this plan")));
  openResults(Boolean(searchBox.value.trim()));
  markResult();
}

function openResults(isOpen) {
  results.hidden = !isOpen;
  searchBox.setAttribute("aria-expanded", String(isOpen));
}

function markResult() {
  [...results.querySelectorAll("[role=option]")].forEach((item, i) => item.setAttribute("aria-selected", String(i === marked)));
  if (found.length) searchBox.setAttribute("aria-activedescendant", `result-${marked}`);
  else searchBox.removeAttribute("aria-activedescendant");
}

function take(index) {
  const hit = found[index];
  if (!hit) return;
  openResults(false);
  document.getElementById("say").textContent = hit.say || `${hit.text}: ${hit.more}`;
  if (hit.alone !== undefined) setAlone(hit.alone);
  else {
    if (view.alone !== null && hit.go.process && hit.go.process[0] !== view.alone) setAlone(null);
    goTo({ ...hit.go, isFound: true });
  }
}

searchBox.addEventListener("input", listResults);
searchBox.addEventListener("focus", () => searchBox.value && listResults());
searchBox.addEventListener("blur", () => openResults(false));
searchBox.addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    marked = (marked + (event.key === "ArrowDown" ? 1 : found.length - 1)) % Math.max(1, found.length);
    markResult();
    event.preventDefault();
  } else if (event.key === "Enter") take(marked);
  else if (event.key === "Escape") {
    searchBox.value = "";
    openResults(false);
    event.stopPropagation();
  }
});
