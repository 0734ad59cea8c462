// Places the items of each open group by dagre, groups inside groups.
//
// A layout is relative to its group.  The layouts are kept until a group inside is opened
// or closed, so opening one module places only that module and the modules around it.

const SIZES = { header: 30, pad: 14, line: 15, node: 44, small: 28, group: 62 };
const TITLE_FONT = "600 13px system-ui, sans-serif";
const SUB_FONT = "11px system-ui, sans-serif";
const MOST_TEXT = 230;

const measuring = document.createElement("canvas").getContext("2d");
const widths = new Map();

/** Width of a text in pixels. */
function widthOf(text, font) {
  const key = font + text;
  let width = widths.get(key);
  if (width === undefined) {
    measuring.font = font;
    widths.set(key, (width = measuring.measureText(text).width));
  }
  return width;
}

/** `text`, cut with an ellipsis to fit into `most` pixels. */
function fitted(text, font, most = MOST_TEXT) {
  if (widthOf(text, font) <= most) return text;
  let [least, length] = [0, text.length];
  while (least < length) {
    const middle = (least + length + 1) >> 1;
    if (widthOf(text.slice(0, middle) + "\u2026", font) <= most) least = middle;
    else length = middle - 1;
  }
  return text.slice(0, least) + "\u2026";
}

/** The one or two lines of text of a node or of a closed group. */
function linesOf(graph, side, item) {
  if (item.isGroup) {
    const counts = graph.sides[side].counts[item.index];
    const ops = counts.low + counts.fp32;
    const parts = [ops ? plural(ops, "op") : plural(counts.nodes, "node")];
    if (counts.casts) parts.push(plural(counts.casts, "cast"));
    return [item.label, parts.join("  \u00b7  ")];
  }
  if (item.kind === "cast") return ["\u2192 " + item.cast.dtype];
  if (item.kind === "use") return ["uses"];
  const values = item[side].values;
  const more = values.length > 1 ? "  +" + (values.length - 1) : "";
  return [item.title, values.length ? values[0] + more : item.kind];
}

/** The lines of an item as they are drawn, and the size of its box. */
function boxOf(graph, side, item) {
  const lines = linesOf(graph, side, item);
  const texts = lines.map((line, i) => fitted(line, i ? SUB_FONT : TITLE_FONT));
  const text = Math.max(...texts.map((t, i) => widthOf(t, i ? SUB_FONT : TITLE_FONT)));
  if (item.isGroup) return { lines: texts, w: Math.max(120, text + 54), h: SIZES.group };
  const isSmall = texts.length === 1;
  return {
    lines: texts,
    w: Math.ceil(Math.max(isSmall ? 58 : 76, text + (isSmall ? 34 : 26))),
    h: isSmall ? SIZES.small : SIZES.node,
  };
}

/** Places groups and nodes; `isOpen(group)` says which groups are open. */
class Layouts {
  constructor(graph, side, isOpen) {
    Object.assign(this, { graph, side, isOpen, kept: new Map() });
  }

  /** Forgets the layouts of a group and of the groups around it. */
  forget(group) {
    for (let g = group.index; g >= 0; g = this.graph.groups[g].parent) this.kept.delete(g);
  }

  /** The layout of an open group: `w`, `h`, `boxes` and `edges`. */
  of(group) {
    let found = this.kept.get(group.index);
    if (!found) this.kept.set(group.index, (found = this.placed(group)));
    return found;
  }

  itemsOf(group) {
    const { counts } = this.graph.sides[this.side];
    return [
      ...group.children.filter((g) => counts[g.index].nodes),
      ...group.nodes.filter((n) => n[this.side]),
    ].sort((a, b) => this.first(a) - this.first(b));
  }

  /** Position of an item in graph order, so that dagre starts from the order of the code. */
  first(item) {
    return item.isGroup ? Math.min(...item.nodes.map((n) => n.index),
      ...item.children.map((g) => this.first(g))) : item.index;
  }

  sized(item) {
    if (!item.isGroup || !this.isOpen(item)) return boxOf(this.graph, this.side, item);
    const inner = this.of(item);
    const label = fitted(item.label, TITLE_FONT, 320);
    return {
      lines: [label], inner,
      w: Math.max(inner.w + 2 * SIZES.pad, widthOf(label, TITLE_FONT) + 60),
      h: inner.h + SIZES.header + SIZES.pad,
    };
  }

  placed(group) {
    const items = this.itemsOf(group);
    const edges = this.graph.sides[this.side].edges[group.index];
    const placing = new dagre.graphlib.Graph({ multigraph: false });
    placing.setGraph({
      rankdir: "TB", nodesep: 16, edgesep: 12, ranksep: items.length > 200 ? 26 : 34,
      ranker: items.length > 120 ? "tight-tree" : "network-simplex",
    });
    placing.setDefaultEdgeLabel(() => ({}));
    const boxes = new Map();
    for (const item of items) {
      const box = { item, ...this.sized(item) };
      boxes.set(item.id, box);
      placing.setNode(item.id, { width: box.w, height: box.h });
    }
    for (const edge of edges) {
      const casts = this.hiddenCasts(edge, boxes);
      const text = casts ? plural(casts, "cast") : "";
      edge.label = text && { text, w: widthOf(text, SUB_FONT) + 16, h: 18 };
      placing.setEdge(edge.from, edge.to, {
        weight: boxes.has(edge.from) && boxes.has(edge.to) ? 2 : 1,
        ...(text ? { width: edge.label.w, height: edge.label.h, labelpos: "c" } : {}),
      });
    }
    this.holdPorts(placing, items, edges);
    dagre.layout(placing);
    return finished(placing, boxes, edges);
  }

  /** Adds the ports, and edges that keep "in" above and "out" below every item. */
  holdPorts(placing, items, edges) {
    const [reading, read] = [new Set(), new Set()];
    for (const { from, to } of edges) {
      if (from !== "in") reading.add(to);
      if (to !== "out") read.add(from);
    }
    for (const [port, busy] of [["in", reading], ["out", read]]) {
      if (!placing.hasNode(port)) continue;
      placing.setNode(port, { width: 6, height: 2 });
      for (const item of items) {
        const [a, b] = port === "in" ? [port, item.id] : [item.id, port];
        if (!busy.has(item.id) && !placing.hasEdge(a, b)) placing.setEdge(a, b, { weight: 0 });
      }
    }
  }

  /** The number of casts of an edge that no box shows at present. */
  hiddenCasts(edge, boxes) {
    const seen = new Set();
    for (const [port, end] of [[edge.from, 0], [edge.to, 1]]) {
      const box = boxes.get(port);
      if (!box || !box.item.isGroup) continue;
      for (const pair of edge.pairs) {
        const node = this.graph.nodes[pair[end]];
        if (CASTS.has(node.kind) && !this.isShown(node, box.item)) seen.add(node.index);
      }
    }
    return seen.size;
  }

  /** Whether every group from the node's own up to `group` is open. */
  isShown(node, group) {
    for (let g = node.group; ; g = this.graph.groups[g].parent) {
      if (!this.isOpen(this.graph.groups[g])) return false;
      if (g === group.index) return true;
    }
  }
}

/** Reads the places that dagre found, and moves them so that the least is 0. */
function finished(placing, boxes, edges) {
  let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
  const reach = (x, y) => {
    [left, right] = [Math.min(left, x), Math.max(right, x)];
    [top, bottom] = [Math.min(top, y), Math.max(bottom, y)];
  };
  for (const [id, box] of boxes) {
    const { x, y } = placing.node(id);
    Object.assign(box, { x: x - box.w / 2, y: y - box.h / 2 });
    reach(box.x, box.y);
    reach(box.x + box.w, box.y + box.h);
  }
  const drawn = edges.map((edge) => {
    const { points, x, y } = placing.edge(edge.from, edge.to);
    for (const point of points) reach(point.x, point.y);
    if (edge.label) for (const s of [-1, 1]) reach(x + (s * edge.label.w) / 2, y);
    return { ...edge, points, at: edge.label && { x, y } };
  });
  if (!boxes.size) return { w: 0, h: 0, boxes: [], edges: [] };
  // The edge to a port ends on the line of the port, above and below all boxes.
  top -= placing.hasNode("in") ? 12 : 4;
  bottom += placing.hasNode("out") ? 14 : 4;
  for (const box of boxes.values()) Object.assign(box, { x: box.x - left, y: box.y - top });
  for (const edge of drawn) {
    edge.points = edge.points.map((p) => ({ x: p.x - left, y: p.y - top }));
    if (edge.at) edge.at = { x: edge.at.x - left, y: edge.at.y - top };
  }
  const port = (id) => placing.hasNode(id) ? placing.node(id).x - left : null;
  return {
    w: right - left, h: bottom - top, boxes: [...boxes.values()], edges: drawn,
    ports: { in: port("in"), out: port("out") },
  };
}
