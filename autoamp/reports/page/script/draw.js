// Draws a layout as SVG.  Every text of the report is set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

/** A new SVG element with attributes, in `parent`. */
function svg(parent, name, attributes = {}, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text) element.textContent = text;
  parent.append(element);
  return element;
}

/** Draws the layout of the root group; returns the boxes by item id, with their places. */
function drawAll(parent, graph, side, layout) {
  const shown = new Map();
  const edges = [];
  parent.replaceChildren();
  drawLevel(parent, { graph, side, shown, edges }, layout, 0, 0);
  return { shown, edges };
}

function drawLevel(parent, drawing, layout, dx, dy) {
  const lines = svg(parent, "g", { class: "edges" });
  for (const edge of layout.edges) drawEdge(lines, drawing, layout, edge, dx, dy);
  for (const box of layout.boxes) drawBox(parent, drawing, box, dx + box.x, dy + box.y);
  // Labels stand above boxes that an edge may pass.
  for (const edge of layout.edges) if (edge.at) drawLabel(parent, edge, dx, dy);
}

function drawEdge(parent, drawing, layout, edge, dx, dy) {
  const points = edge.points.map((p) => ({ x: p.x + dx, y: p.y + dy }));
  if (edge.from === "in" && layout.ports.in) points[0] = { x: layout.ports.in.x + dx, y: dy };
  if (edge.to === "out" && layout.ports.out) {
    points[points.length - 1] = { x: layout.ports.out.x + dx, y: layout.h + dy };
  }
  // The edges that leave an open module start where its port meets the border.
  const from = layout.boxes.find((box) => box.item.id === edge.from);
  if (from?.inner?.ports.out && !edge.isFar) {
    const x = from.x + (from.w - from.inner.w) / 2 + from.inner.ports.out.x;
    points[0] = { x: x + dx, y: from.y + from.h + dy };
  }
  const isPort = edge.to === "out";
  const path = svg(parent, "path", {
    class: "edge" + (isPort ? " to-port" : "") + (edge.isFar ? " far-edge" : ""),
    d: edge.isFar ? cornered(points) : smooth(points),
  });
  drawing.edges.push({ path, pairs: edge.pairs });
}

/** A path through points with round corners. */
function smooth(points) {
  const at = (p) => p.x.toFixed(1) + " " + p.y.toFixed(1);
  const middle = (p, q) => ({ x: (p.x + q.x) / 2, y: (p.y + q.y) / 2 });
  if (points.length < 3) return "M" + points.map(at).join("L");
  let d = "M" + at(points[0]) + "L" + at(middle(points[0], points[1]));
  for (let i = 1; i < points.length - 1; i++) {
    d += "Q" + at(points[i]) + " " + at(middle(points[i], points[i + 1]));
  }
  return d + "L" + at(points[points.length - 1]);
}

/** A path along straight lines with small round corners. */
function cornered(points) {
  const toward = (p, q) => {
    const length = Math.hypot(q.x - p.x, q.y - p.y) || 1;
    const step = Math.min(6, length / 2) / length;
    return { x: p.x + (q.x - p.x) * step, y: p.y + (q.y - p.y) * step };
  };
  const at = (p) => p.x.toFixed(1) + " " + p.y.toFixed(1);
  let d = "M" + at(points[0]);
  for (let i = 1; i < points.length - 1; i++) {
    d += "L" + at(toward(points[i], points[i - 1])) + "Q" + at(points[i]) + " " + at(toward(points[i], points[i + 1]));
  }
  return d + "L" + at(points.at(-1));
}

function drawLabel(parent, { at, label }, dx, dy) {
  const g = svg(parent, "g", { class: "edge-label" });
  const [x, y] = [at.x + dx, at.y + dy];
  svg(g, "rect", { x: x - label.w / 2, y: y - label.h / 2, width: label.w, height: label.h, rx: 9 });
  svg(g, "text", { x, y: y + 4 }, label.text);
}

function drawBox(parent, drawing, box, x, y) {
  const { item } = box;
  const g = svg(parent, "g", {
    id: item.id, class: classOf(drawing, box), role: "button", tabindex: "-1",
    "aria-label": spoken(drawing, box), transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`,
  });
  if (item.isGroup) g.setAttribute("aria-expanded", String(Boolean(box.inner)));
  drawing.shown.set(item.id, { item, x, y, w: box.w, h: box.h, element: g, isOpen: Boolean(box.inner) });
  if (item.folds && !box.inner) drawStack(g, box);
  drawShape(g, item, box);
  if (box.inner) {
    svg(g, "path", { class: "header", d: `M0 30V10q0 -10 10 -10h${box.w - 20}q10 0 10 10v20z` });
    drawChevron(g, box, true);
    svg(g, "text", { class: "title", x: 30, y: 20 }, box.lines[0]);
    const inset = (box.w - box.inner.w) / 2;
    drawLevel(parent, drawing, box.inner, x + inset, y + SIZES.header);
    return;
  }
  const middle = item.isGroup ? 30 : box.w / 2;
  const anchor = item.isGroup ? "start" : "middle";
  const first = box.lines.length > 1 ? 19 : 18.5;
  svg(g, "text", { class: "title", x: middle, y: item.isGroup ? 23 : first, "text-anchor": anchor }, box.lines[0]);
  if (box.lines[1]) {
    svg(g, "text", { class: "sub", x: middle, y: item.isGroup ? 40 : 34, "text-anchor": anchor }, box.lines[1]);
  }
  if (item.isGroup) {
    const counts = drawing.graph.sides[drawing.side].counts[item.index];
    drawChevron(g, box, false);
    drawShare(g, box, counts);
    if (counts.islands.size) drawBadge(g, box, counts.islands.size);
  }
}

/** The number of islands in a closed group, seen while islands are filtered. */
function drawBadge(g, box, number) {
  svg(g, "circle", { class: "badge", cx: box.w - 4, cy: 4, r: 11 });
  svg(g, "text", { class: "badge", x: box.w - 4, y: 8 }, String(number));
}

/** Two more boxes behind a closed fold. */
function drawStack(g, { w, h }) {
  for (const by of [8, 4]) svg(g, "rect", { class: "stacked", x: by, y: by, width: w, height: h, rx: 10 });
}

function drawShape(g, item, { w, h }) {
  if (item.kind === "cast") {
    const p = 11;
    const points = [[p, 0], [w - p, 0], [w, h / 2], [w - p, h], [p, h], [0, h / 2]];
    svg(g, "polygon", { class: "shape", points: points.map((c) => c.join(",")).join(" ") });
    return;
  }
  const round = { input: h / 2, output: h / 2, use: h / 2, weight: 3, constant: 3, state: 3 }[item.kind];
  svg(g, "rect", { class: "shape", width: w, height: h, rx: round ?? (item.isGroup ? 10 : 7) });
}

function drawChevron(g, box, isOpen) {
  const y = box.inner ? 15 : 20;
  const d = isOpen ? `M12 ${y - 2.5} l5 5 l5 -5` : `M14 ${y - 5} l5 5 l-5 5`;
  svg(g, "path", { class: "chevron", d });
}

/** The share of ops in low precision and in fp32, as a bar on a closed group. */
function drawShare(g, box, { low, fp32 }) {
  const [x, width] = [30, box.w - 44];
  if (!(low + fp32)) return;
  const part = (width * low) / (low + fp32);
  if (low) svg(g, "rect", { class: "share low", x, y: 48, width: part, height: 5, rx: 2.5 });
  if (fp32) svg(g, "rect", { class: "share fp32", x: x + part, y: 48, width: width - part, height: 5, rx: 2.5 });
}

function classOf({ side, graph }, box) {
  const { item } = box;
  if (item.isGroup) return box.inner ? "item group open" : "item group";
  const kept = item.cast && !item.cast.every_call ? " kept" : "";
  return `item node ${item.kind} ${precisionClass(item[side].precision)}${kept}`;
}

/** The words of an item for a screen reader. */
function spoken({ side, graph }, box) {
  const { item } = box;
  if (item.isGroup) {
    return "module " + (item.path || item.label) + (item.is_part ? ", " + item.label : "") +
      ", " + linesOf(graph, side, item)[1].replaceAll("\u00b7", ",");
  }
  const words = [item.kind === "cast" ? item.cast.kind + " cast to " + item.cast.dtype : item.title];
  words.push(item.kind === "op" || item.kind === "cast" ? item.name : item.kind);
  if (item[side].precision) words.push(item[side].precision);
  if (item.module) words.push("in " + item.module);
  return words.join(", ");
}
