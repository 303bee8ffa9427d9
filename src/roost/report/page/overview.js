// The whole of a large cluster: a small canvas per rack, a row per node, a field per accelerator.
const FAR_COLUMNS = 8;

const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function fieldSize() {
  if (accelerators > 40000) return 4;
  return accelerators > 1024 ? 11 : 14;
}

function drawOverview() {
  const size = fieldSize();
  const pitch = size + Math.ceil(size / 5); // nodes are told apart by the space between their rows
  const box = make("div", "overview");
  for (const rack of racks) {
    const fields = new Map();
    let row = 0;
    let columns = 1;
    for (const node of rack.nodes) {
      const count = Math.max(1, node.kind.count);
      for (let i = 0; i < node.kind.count; i++) fields.set(node.first + i, [(i % FAR_COLUMNS) * size, row * pitch + Math.floor(i / FAR_COLUMNS) * size]);
      if (!node.kind.count) fields.set(-1 - node.rank, [0, row * pitch]);
      columns = Math.max(columns, Math.min(FAR_COLUMNS, count));
      row += Math.ceil(count / FAR_COLUMNS);
    }
    const canvas = make("canvas");
    const button = make("button", "far", make("span", "", rack.title), canvas);
    button.type = "button";
    button.dataset.rack = rack.index;
    button.title = rack.title;
    button.setAttribute("aria-label", rackLabel(rack));
    if (rack.nodes.some((node) => badNodes.has(node.rank)) || [...fields.keys()].some((cell) => cell >= 0 && isBad(cell))) button.classList.add("bad");
    box.append(button);
    view.far.push({ rack: rack.index, element: button, canvas, fields, width: columns * size, height: row * pitch, size, pitch });
  }
  box.style.setProperty("--far", `${Math.max(84, ...view.far.map((far) => far.width + 20))}px`);
  map.append(box);
  paintOverview();
}

const overCells = new Set(components.some((component) => component.memory !== null) ? Array.from({ length: accelerators }, (_, cell) => cell).filter((cell) => memoryOf(cell)?.over) : []);
const isBad = (cell) => badCells.has(cell) || overCells.has(cell);

function rackLabel(rack) {
  const counts = components.map(() => 0);
  let idle = 0;
  let total = 0;
  for (const node of rack.nodes) {
    total += node.kind.count;
    for (let cell = node.first; cell < node.first + node.kind.count; cell++) {
      if (crowdStart[cell] === crowdStart[cell + 1]) idle++;
      for (const c of new Set(processesOn(cell).map(([found]) => found))) counts[c]++;
    }
  }
  const parts = counts.map((count, c) => (count ? `${components[c].name} on ${number(count)}` : "")).filter(Boolean);
  return `${rack.title}: ${counted(rack.nodes.length, "node")}, ${counted(total, given.noun)}; ${parts.join(", ") || "nobody"}${idle ? `; ${number(idle)} idle` : ""}`;
}

function paintOverview() {
  if (!view.far.length) return;
  const ratio = Math.min(2, window.devicePixelRatio || 1);
  const colours = { line: variable("--line-strong"), soft: variable("--line"), bad: variable("--bad") };
  for (const far of view.far) {
    far.canvas.width = far.width * ratio;
    far.canvas.height = far.height * ratio;
    far.canvas.style.width = `${far.width}px`;
    far.canvas.style.height = `${far.height}px`;
    const pen = far.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    for (const [cell, [x, y]] of far.fields) paintField(pen, cell, x, y, far.size - 1, colours);
  }
}

function paintField(pen, cell, x, y, size, colours) {
  if (cell < 0) return paintBare(pen, nodes[-1 - cell], x, y, size, colours);
  const first = crowdStart[cell];
  const count = crowdStart[cell + 1] - first;
  if (!count) {
    pen.globalAlpha = view.alone !== null && view.alone >= 0 ? 0.3 : 1;
    pen.strokeStyle = colours.line;
    pen.lineWidth = 1;
    pen.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
    pen.globalAlpha = 1;
    return;
  }
  let top = y;
  const { parts, rest } = partsOf(cell);
  const total = parts.reduce((sum, part) => sum + part.size, rest) || 1;
  pen.fillStyle = colours.soft;
  pen.fillRect(x, y, size, size);
  for (const { c, size: part } of parts) {
    const height = (size * part) / total;
    pen.globalAlpha = view.alone === null || view.alone === c ? (components[c].isReserved ? 0.4 : 1) : 0.12;
    pen.fillStyle = components[c].paint[0];
    pen.fillRect(x, top, size, height);
    top += height;
  }
  pen.globalAlpha = 1;
  if (isBad(cell)) {
    pen.strokeStyle = colours.bad;
    pen.lineWidth = 2;
    pen.strokeRect(x + 1, y + 1, size - 2, size - 2);
  }
}

/** A node without accelerators: what runs on it, in a row. */
function paintBare(pen, node, x, y, size, colours) {
  pen.fillStyle = colours.soft;
  pen.fillRect(x, y, size * FAR_COLUMNS, size);
  node.bare.slice(0, FAR_COLUMNS).forEach(({ component }, i) => {
    pen.globalAlpha = view.alone === null || view.alone === component ? 1 : 0.12;
    pen.fillStyle = components[component].paint[0];
    pen.beginPath();
    pen.arc(x + (size + 1) * i + size / 2, y + size / 2, size / 2.5, 0, 7);
    pen.fill();
  });
  pen.globalAlpha = 1;
}

/** The accelerator under the pointer, in the canvas of a rack. */
function farCellAt(event) {
  const far = view.far.find((one) => one.canvas === event.target);
  if (!far) return null;
  const box = far.canvas.getBoundingClientRect();
  const x = event.clientX - box.left;
  const y = event.clientY - box.top;
  let found = null; // the space below a field belongs to it
  for (const [cell, at] of far.fields) if (x >= at[0] && x < at[0] + far.size && y >= at[1] && y < at[1] + far.pitch) found = cell;
  return found;
}
