// What belongs together: tensor-parallel groups, and the ways of the weights. Those that cross a node stand out.

/** Every accelerator of a component in rank order, as a transfer plan counts them; -1: a process without one. */
function flowTable(component) {
  if (component.flow) return component.flow;
  const cells = [];
  const ranks = [];
  const starts = [];
  for (let r = 0; r < component.size; r++) {
    starts.push(cells.length);
    const own = cellsOf(component.index, r);
    for (const cell of own.length ? own : [-1]) {
      cells.push(cell);
      ranks.push(r);
    }
  }
  starts.push(cells.length);
  component.flow = { cells, ranks, starts };
  return component.flow;
}

/** The tensor-parallel groups of a component, as lists of accelerators; an engine that does not say is one. */
function groupsOf(component) {
  if (component.tpGroups) return component.tpGroups;
  const { cells } = flowTable(component);
  const perEngine = component.size ? cellsOf(component.index, 0).length * component.members : 0;
  const size = component.tp > 1 ? component.tp : component.isEngine ? perEngine : 1;
  const groups = [];
  if (size > 1 && !component.isReserved && cells[0] >= 0)
    for (let i = 0; i + size <= cells.length; i += size) groups.push(cells.slice(i, i + size));
  component.tpGroups = groups.map((group) => ({ cells: group, crosses: group.some((cell) => nodeOfCell[cell] !== nodeOfCell[group[0]]) }));
  return component.tpGroups;
}

// Weights: the symbolic pieces of the transfer plan, spelled out for one rank or for all
function weightsOf(side) {
  const sizes = { tp: side[0], pp: side[1], dp: side[2] };
  const weights = {};
  let weight = 1;
  for (const axis of side[3].split("-")) {
    weights[axis] = weight;
    weight *= sizes[axis];
  }
  return { sizes, weights };
}
const rankAt = ({ weights }, tp, pp, dp) => tp * weights.tp + pp * weights.pp + dp * weights.dp;
const coordinate = ({ sizes, weights }, rank, axis) => Math.floor(rank / weights[axis]) % sizes[axis];

for (const flow of given.flows) flow.at = flow.sides.map(weightsOf);

function* pairsOf(routes) {
  for (let i = 0; i < routes.length; i += 6) {
    const [start, stop, step, source, sourceStep, link] = routes.slice(i, i + 6);
    for (let k = 0, target = start; target < stop; k++, target += step) yield [target, source + k * sourceStep, link];
  }
}

/** Every hand-over of a flow: [source rank, target rank, link]. */
function edgesOf(flow) {
  if (flow.edges) return flow.edges;
  flow.edges = [];
  for (const [sourceTp, sourceStage, targetTp, targetStage, , routes] of flow.pieces)
    for (const [dp, sourceDp, link] of pairsOf(routes))
      flow.edges.push([rankAt(flow.at[0], sourceTp, sourceStage, sourceDp), rankAt(flow.at[1], targetTp, targetStage, dp), link]);
  return flow.edges;
}

/** What a process gets (end 1) or sends (end 0), by link: bytes and peers. */
function flowsOf(c, r, end) {
  const found = LINKS.map(() => ({ bytes: 0, peers: new Map() }));
  for (const flow of given.flows) {
    if ((end ? flow.target : flow.source) !== c) continue;
    const { starts } = flowTable(components[c]);
    const other = components[end ? flow.source : flow.target];
    const otherRanks = flowTable(other).ranks;
    for (let rank = starts[r]; rank < starts[r + 1]; rank++) {
      const [tp, pp, dp] = ["tp", "pp", "dp"].map((axis) => coordinate(flow.at[end], rank, axis));
      for (const [sourceTp, sourceStage, targetTp, targetStage, bytes, routes] of flow.pieces) {
        if (end ? targetTp !== tp || targetStage !== pp : sourceTp !== tp || sourceStage !== pp) continue;
        for (const [targetDp, sourceDp, link] of pairsOf(routes)) {
          if ((end ? targetDp : sourceDp) !== dp) continue;
          const peerRank = end ? rankAt(flow.at[0], sourceTp, sourceStage, sourceDp) : rankAt(flow.at[1], targetTp, targetStage, targetDp);
          const peer = otherRanks[peerRank];
          found[link].bytes += bytes;
          found[link].peers.set(peer + other.index * 1e9, [other.index, peer]);
        }
      }
    }
  }
  return found;
}
const flowsInto = (c, r) => flowsOf(c, r, 1);
const flowsFrom = (c, r) => flowsOf(c, r, 0);

// Drawing
let linkCanvas = null;

function addLinkCanvas() {
  linkCanvas = make("canvas", "links");
  linkCanvas.setAttribute("aria-hidden", "true");
  map.append(linkCanvas);
}

/** Where an accelerator is on the map, for all that are shown: [x, y, width, height of each component's part]. */
function positions() {
  const origin = map.getBoundingClientRect();
  const found = new Map();
  for (const [cell, element] of view.cells) {
    const box = element.querySelector(".parts").getBoundingClientRect();
    const parts = new Map();
    for (const part of element.querySelectorAll(".part")) {
      const own = part.getBoundingClientRect();
      if (!parts.has(Number(part.dataset.c))) parts.set(Number(part.dataset.c), own.top - origin.top + own.height / 2);
    }
    found.set(cell, [box.left - origin.left + box.width / 2, box.top - origin.top + box.height / 2, box.width, parts]);
  }
  for (const far of view.far) {
    const box = far.canvas.getBoundingClientRect();
    for (const [cell, [x, y]] of far.fields) if (cell >= 0) found.set(cell, [box.left - origin.left + x + far.size / 2, box.top - origin.top + y + far.size / 2, far.size]);
  }
  return found;
}

/** Where the part of a component is in an accelerator; undefined where that is not shown. */
function partAt(at, cell, c) {
  const place = at.get(cell);
  return place && place[3] ? [place[0], place[3].get(c) ?? place[1], place[2]] : place;
}

function arc(pen, from, to, lift) {
  const [dx, dy] = [to[0] - from[0], to[1] - from[1]];
  const length = Math.hypot(dx, dy) || 1;
  const bend = Math.min(26, lift + length * 0.1);
  pen.moveTo(from[0], from[1]);
  pen.quadraticCurveTo((from[0] + to[0]) / 2 + (dy / length) * bend, (from[1] + to[1]) / 2 - (Math.abs(dx) / length) * bend, to[0], to[1]);
}

function stroke(pen, edges, colour, width, alpha, halo = "") {
  if (!edges.length) return;
  for (const [style, extra, strength] of halo ? [[halo, 4, alpha], [colour, 0, alpha]] : [[colour, 0, alpha]]) {
    pen.globalAlpha = strength;
    pen.strokeStyle = style;
    pen.lineWidth = width + extra;
    pen.beginPath();
    for (const [from, to, lift] of edges) arc(pen, from, to, lift);
    pen.stroke();
  }
}

function dots(pen, points, colour, radius) {
  pen.globalAlpha = 1;
  pen.fillStyle = colour;
  pen.beginPath();
  for (const [x, y] of points) {
    pen.moveTo(x + radius, y);
    pen.arc(x, y, radius, 0, 7);
  }
  pen.fill();
}

function drawLinks() {
  if (!linkCanvas) return;
  const pointed = view.pointed;
  const isFar = view.far.length > 0;
  map.classList.toggle("linked", Boolean(view.showsGroups || view.showsWeights));
  if (!view.showsGroups && !view.showsWeights && !(isFar && pointed)) {
    linkCanvas.width = linkCanvas.height = 0;
    linkCanvas.style.width = linkCanvas.style.height = "0";
    return;
  }
  const at = positions();
  const width = map.clientWidth;
  const height = map.scrollHeight;
  const ratio = Math.min(window.devicePixelRatio || 1, 2, 16000 / Math.max(width, height));
  linkCanvas.width = width * ratio;
  linkCanvas.height = height * ratio;
  linkCanvas.style.width = `${width}px`;
  linkCanvas.style.height = `${height}px`;
  const pen = linkCanvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.lineCap = "round";
  if (view.showsGroups) drawGroups(pen, at, isFar, pointed);
  if (view.showsWeights) drawWeights(pen, at, isFar, pointed);
  if (isFar && pointed) {
    pen.strokeStyle = variable("--text");
    pen.globalAlpha = 1;
    pen.lineWidth = 2;
    for (const cell of cellsOf(...pointed)) if (at.has(cell)) pen.strokeRect(at.get(cell)[0] - at.get(cell)[2] / 2 - 1, at.get(cell)[1] - at.get(cell)[2] / 2 - 1, at.get(cell)[2] + 1, at.get(cell)[2] + 1);
  }
}

const isShown = (component) => view.alone === null || view.alone === component.index;

function drawGroups(pen, at, isFar, pointed) {
  for (const component of components.filter(isShown)) {
    const near = [];
    const cross = [];
    const ends = [];
    const mine = pointed && pointed[0] === component.index ? new Set(cellsOf(...pointed)) : null;
    groupsOf(component).forEach((group, index) => {
      if (mine && !group.cells.some((cell) => mine.has(cell))) return;
      const points = group.cells.map((cell) => partAt(at, cell, component.index));
      for (let i = 1; i < points.length; i++) if (points[i - 1] && points[i]) (group.crosses ? cross : near).push([points[i - 1], points[i], isFar ? 0 : 3 + 3 * (index % 2)]);
      if (!isFar || group.crosses) for (const point of points) if (point) ends.push(point);
    });
    const [fill, ink] = component.paint;
    stroke(pen, near, ink, isFar ? 1 : 2, isFar ? 0.6 : 1, isFar ? "" : fill);
    stroke(pen, cross, variable("--cross"), isFar ? 1.5 : 3, isFar ? 0.7 : 1, isFar ? "" : variable("--card"));
    dots(pen, ends, ink, isFar ? 1.2 : 3);
  }
}

function drawWeights(pen, at, isFar, pointed) {
  for (const flow of given.flows) {
    if (!isShown(components[flow.source]) && !isShown(components[flow.target])) continue;
    const [from, to] = [flowTable(components[flow.source]), flowTable(components[flow.target])];
    const concerned = pointed && (pointed[0] === flow.source || pointed[0] === flow.target);
    const byLink = [[], [], []];
    for (const [source, target, link] of edgesOf(flow)) {
      if (concerned && (pointed[0] === flow.source ? from.ranks[source] : to.ranks[target]) !== pointed[1]) continue;
      const [start, end] = [partAt(at, from.cells[source], flow.source), partAt(at, to.cells[target], flow.target)];
      if (start && end) byLink[link].push([start, end, isFar ? 0 : 5]);
    }
    drawInPlace(pen, byLink[0], isFar);
    const fade = (edges) => Math.max(0.15, Math.min(1, 120 / (edges.length || 1)));
    stroke(pen, byLink[1], variable("--near"), isFar ? 0.8 : 1.6, fade(byLink[1]), isFar ? "" : variable("--card"));
    stroke(pen, byLink[2], variable("--cross"), isFar ? 1 : 2.4, fade(byLink[2]), isFar || byLink[2].length > 200 ? "" : variable("--card"));
    if (!isFar) for (const [edges, colour] of [[byLink[1], "--near"], [byLink[2], "--cross"]]) dots(pen, edges.map(([, end]) => end), variable(colour), 3.5);
  }
}

/** Weights that stay on their accelerator: from the one part of it to the other. */
function drawInPlace(pen, edges, isFar) {
  if (isFar) return dots(pen, edges.map(([, end]) => end), variable("--here"), 1.5);
  const moved = edges.map(([start, end]) => [[start[0] - start[2] / 2 + 10, start[1]], [end[0] - end[2] / 2 + 10, end[1]], 0]);
  stroke(pen, moved, variable("--here"), 2, 1, variable("--card"));
  dots(pen, moved.flatMap(([start, end]) => [start, end]), variable("--card"), 4.5);
  dots(pen, moved.flatMap(([start, end]) => [start, end]), variable("--here"), 3.5);
}

/** What the lines mean, with their numbers. */
function sayLinks() {
  const box = document.getElementById("links-say");
  box.replaceChildren();
  const say = (...parts) => box.append(box.childNodes.length ? "  ·  " : "", ...parts);
  if (view.showsGroups) {
    const groups = components.filter(isShown).flatMap(groupsOf);
    const crossing = groups.filter((group) => group.crosses).length;
    say(make("b", "", counted(groups.length, "tensor-parallel group")), crossing ? make("span", "cross", `, ${number(crossing)} cross${crossing === 1 ? "es" : ""} nodes`) : ", none crosses a node");
  }
  if (view.showsWeights) {
    const counts = [0, 0, 0];
    for (const flow of given.flows) for (const edge of edgesOf(flow)) counts[edge[2]]++;
    say(make("b", "", "weights"), `: ${number(counts[0])} on the same ${given.noun}, ${number(counts[1])} inside a node, `, counts[2] ? make("span", "cross", `${number(counts[2])} between nodes`) : "none between nodes");
  }
}
