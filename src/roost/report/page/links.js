// Lines on the map: tensor-parallel groups, and transfers of weights. Lines that cross nodes stand out.

/** The accelerators of a component in rank order; -1 for a process without one. */
function cellsInOrder(component) {
  const cells = [];
  for (let r = 0; r < component.size; r++) {
    const own = cellsOf(component.index, r);
    cells.push(...(own.length ? own : [-1]));
  }
  return cells;
}

/** The tensor-parallel groups of a component, as lists of accelerators. An engine without a size is one group. */
function groupsOf(component) {
  if (component.tpGroups) return component.tpGroups;
  const cells = cellsInOrder(component);
  const perEngine = component.size ? cellsOf(component.index, 0).length * component.members : 0;
  const size = component.tp > 1 ? component.tp : component.isEngine ? perEngine : 1;
  const groups = [];
  if (size > 1 && !component.isReserved && cells[0] >= 0)
    for (let i = 0; i + size <= cells.length; i += size) groups.push(cells.slice(i, i + size));
  component.tpGroups = groups.map((group) => ({ cells: group, crosses: group.some((cell) => nodeOfCell[cell] !== nodeOfCell[group[0]]) }));
  return component.tpGroups;
}

// Weights: the plan's transfer schedules. The sender is a rank of the trainer; receivers are numbered per schedule.
for (const flow of given.flows) {
  const [tp, pp, dp, order] = flow.side;
  const sizes = { tp, pp, dp };
  flow.strides = {};
  let stride = 1;
  for (const axis of order.split("-")) {
    flow.strides[axis] = stride;
    stride *= sizes[axis];
  }
  flow.processes = []; // [component, rank] of each receiver
  for (let i = 0; i < flow.receivers.length; i += 4) {
    const [component, first, step, count] = flow.receivers.slice(i, i + 4);
    for (let k = 0; k < count; k++) flow.processes.push([component, first + k * step]);
  }
  flow.receiverOf = new Map(flow.processes.map(([component, rank], receiver) => [`${component}/${rank}`, receiver]));
}
const senderOf = ({ strides }, tp, pp, dp) => tp * strides.tp + pp * strides.pp + dp * strides.dp;

/** Every transfer of a schedule: [sender, receiver, distance, bytes]. */
function edgesOf(flow) {
  if (flow.edges) return flow.edges;
  flow.edges = [];
  for (const [tp, stage, bytes, routes] of flow.parts)
    for (let i = 0; i < routes.length; i += 6) {
      const [start, stop, step, source, sourceStep, distance] = routes.slice(i, i + 6);
      for (let k = 0, receiver = start; receiver < stop; k++, receiver += step) flow.edges.push([senderOf(flow, tp, stage, source + k * sourceStep), receiver, distance, bytes]);
    }
  return flow.edges;
}

/** What a process receives (isTarget) or sends, by distance: bytes and the other processes. */
function flowsOf(c, r, isTarget) {
  const found = DISTANCES.map(() => ({ bytes: 0, peers: new Map() }));
  for (const flow of given.flows) {
    const wanted = isTarget ? flow.receiverOf.get(`${c}/${r - (r % components[c].members)}`) : flow.source === c ? r : undefined;
    if (wanted === undefined) continue;
    for (const [sender, receiver, distance, bytes] of edgesOf(flow)) {
      if ((isTarget ? receiver : sender) !== wanted) continue;
      const peer = isTarget ? [flow.source, sender] : flow.processes[receiver];
      found[distance].bytes += bytes;
      found[distance].peers.set(peer.join("/"), peer);
    }
  }
  return found;
}
const flowsInto = (c, r) => flowsOf(c, r, true);
const flowsFrom = (c, r) => flowsOf(c, r, false);

// Drawing
let linkCanvas = null;

function addLinkCanvas() {
  linkCanvas = make("canvas", "links");
  linkCanvas.setAttribute("aria-hidden", "true");
  map.append(linkCanvas);
}

/** The places of all accelerators that are shown: [x, y, width, y of each component's part]. */
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

/** The place of a component's part of an accelerator; undefined if the accelerator is not shown. */
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
  const firstCell = (c, r) => (components[c].looks[r][2] < 0 ? -1 : cellOf(components[c].node[r], components[c].looks[r][2]));
  const byDistance = [[], [], []];
  for (const flow of given.flows) {
    const isPointedSource = pointed && pointed[0] === flow.source;
    const isPointedTarget = pointed && flow.processes.some(([c]) => c === pointed[0]);
    const wanted = isPointedTarget ? flow.receiverOf.get(`${pointed[0]}/${pointed[1] - (pointed[1] % components[pointed[0]].members)}`) : undefined;
    for (const [sender, receiver, distance] of edgesOf(flow)) {
      const [c, r] = flow.processes[receiver];
      if (!isShown(components[flow.source]) && !isShown(components[c])) continue;
      if (isPointedSource && sender !== pointed[1]) continue;
      if (isPointedTarget && receiver !== wanted) continue;
      const from = firstCell(flow.source, sender);
      const [start, end] = [partAt(at, from, flow.source), partAt(at, distance === 0 ? from : firstCell(c, r), c)];
      if (start && end) byDistance[distance].push([start, end, isFar ? 0 : 5]);
    }
  }
  const [same, node, network] = byDistance;
  drawInPlace(pen, same, isFar);
  const fade = (edges) => Math.max(0.15, Math.min(1, 120 / (edges.length || 1)));
  stroke(pen, node, variable("--near"), isFar ? 0.8 : 1.6, fade(node), isFar ? "" : variable("--card"));
  stroke(pen, network, variable("--cross"), isFar ? 1 : 2.4, fade(network), isFar || network.length > 200 ? "" : variable("--card"));
  if (!isFar) for (const [edges, colour] of [[node, "--near"], [network, "--cross"]]) dots(pen, edges.map(([, end]) => end), variable(colour), 3.5);
}

/** Weights that stay on their accelerator: a line from the sender's part to the receiver's. */
function drawInPlace(pen, edges, isFar) {
  if (isFar) return dots(pen, edges.map(([, end]) => end), variable("--here"), 1.5);
  const moved = edges.map(([start, end]) => [[start[0] - start[2] / 2 + 10, start[1]], [end[0] - end[2] / 2 + 10, end[1]], 0]);
  stroke(pen, moved, variable("--here"), 2, 1, variable("--card"));
  dots(pen, moved.flatMap(([start, end]) => [start, end]), variable("--card"), 4.5);
  dots(pen, moved.flatMap(([start, end]) => [start, end]), variable("--here"), 3.5);
}

/** Show what the lines mean, with their numbers. */
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
