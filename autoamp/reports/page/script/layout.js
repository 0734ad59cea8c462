// Places the items of each group by dagre, with every group inside it closed.
//
// The layout of a group is made once.  `stretch.js` makes room for groups that are opened
// inside, so that opening a module moves the other boxes apart and never shuffles them.

const FAR = 5; // an edge across more ranks than this takes the lane at the left

/** The closed layout of every group of one side of a graph, made when asked for. */
class Layouts {
  constructor(graph, side) {
    Object.assign(this, { graph, side, closed: new Map() });
  }

  /** The closed layout of a group: `boxes`, `edges`, `rows` and `ports`. */
  closedOf(group) {
    let found = this.closed.get(group.index);
    if (!found) this.closed.set(group.index, (found = this.placed(group)));
    return found;
  }

  itemsOf(group) {
    const { counts } = this.graph.sides[this.side];
    return [
      ...group.children.filter((g) => counts[g.index].nodes),
      ...group.nodes.filter((n) => isDrawn(n, this.side)),
    ].sort((a, b) => this.first(a) - this.first(b));
  }

  /** Position of an item in graph order, so that dagre starts from the order of the code. */
  first(item) {
    return item.isGroup ? Math.min(...item.nodes.map((n) => n.index),
      ...item.children.map((g) => this.first(g))) : item.index;
  }

  placed(group) {
    const items = this.itemsOf(group);
    const edges = this.graph.sides[this.side].edges[group.index].map((edge) => ({ ...edge }));
    const placing = new dagre.graphlib.Graph({ multigraph: false });
    placing.setGraph({
      rankdir: "TB", nodesep: 16, edgesep: 12, ranksep: 28,
      ranker: items.length > 60 ? "longest-path" : "network-simplex",
    });
    placing.setDefaultEdgeLabel(() => ({}));
    const boxes = new Map();
    for (const item of items) {
      const box = { item, ...boxOf(this.graph, this.side, item) };
      boxes.set(item.id, box);
      placing.setNode(item.id, { width: box.w, height: box.h });
    }
    const far = farEdges(items, edges);
    for (const edge of edges) {
      const casts = castsWithin(this.graph, edge);
      const text = casts.length ? plural(casts.length, "cast") : "";
      edge.label = text && { text, casts, w: widthOf(text, SUB_FONT) + 16, h: 18 };
      edge.isFar = far.has(edge);
      if (edge.isFar) continue;
      placing.setEdge(edge.from, edge.to, {
        weight: boxes.has(edge.from) && boxes.has(edge.to) ? 2 : 1,
        ...(text ? { width: edge.label.w, height: edge.label.h, labelpos: "c" } : {}),
      });
    }
    holdPorts(placing, items);
    dagre.layout(placing);
    return finished(placing, boxes, edges);
  }
}

/**
 * The edges across many ranks.  Each of them would get a track of its own through all of
 * these ranks, which takes dagre long and makes the graph wide; the lane is shared.
 */
function farEdges(items, edges) {
  const found = new Set();
  if (items.length <= 2 * FAR) return found;
  const ranks = ranksOf(items, edges);
  const span = ({ from, to }) => ranks.get(to) - ranks.get(from);
  const near = new Set();
  for (const edge of edges) {
    if (span(edge) > FAR) found.add(edge);
    else near.add(edge.from).add(edge.to);
  }
  // An item that has only far edges keeps the shortest, so that dagre can place the item.
  for (const edge of [...found].sort((a, b) => span(a) - span(b))) {
    if (near.has(edge.from) && near.has(edge.to)) continue;
    near.add(edge.from).add(edge.to);
    found.delete(edge);
  }
  return found;
}

/** Each item to its rank: below all items that it reads, ports at the ends. */
function ranksOf(items, edges) {
  const operands = new Map(items.map((item) => [item.id, []]));
  for (const { from, to } of edges) if (from !== "in" && to !== "out") operands.get(to).push(from);
  const ranks = new Map();
  const open = new Set();
  const rankOf = (id) => {
    if (ranks.has(id)) return ranks.get(id);
    if (open.has(id)) return 0; // a loop of modules that call each other
    open.add(id);
    const rank = 1 + Math.max(0, ...operands.get(id).map(rankOf));
    ranks.set(id, rank);
    return rank;
  };
  for (const item of items) rankOf(item.id); // in graph order, so that no chain is deep
  ranks.set("in", 0).set("out", 1 + Math.max(0, ...ranks.values()));
  return ranks;
}

/** Adds the ports, and edges that keep "in" above and "out" below every item. */
function holdPorts(placing, items) {
  const sources = items.filter(({ id }) => !(placing.inEdges(id) ?? []).length);
  const sinks = items.filter(({ id }) => !(placing.outEdges(id) ?? []).length);
  for (const port of ["in", "out"]) {
    if (!placing.hasNode(port)) continue;
    placing.setNode(port, { width: 6, height: 2 });
    for (const { id } of port === "in" ? sources : sinks) {
      placing.setEdge(...(port === "in" ? [port, id] : [id, port]), { weight: 0 });
    }
  }
}

/** The casts at the ends of an edge that stand inside a group. */
function castsWithin({ nodes }, { from, to, pairs }) {
  const seen = new Set();
  for (const [id, end] of [[from, 0], [to, 1]]) {
    if (id[0] !== "g") continue;
    for (const pair of pairs) if (CASTS.has(nodes[pair[end]].kind)) seen.add(pair[end]);
  }
  return [...seen];
}

/** Reads the places that dagre found, as middles of boxes and points of edges. */
function finished(placing, boxes, edges) {
  const heights = new Map();
  for (const [id, box] of boxes) {
    const { x, y } = placing.node(id);
    Object.assign(box, { cx: x, cy: y });
    heights.set(y, Math.max(heights.get(y) ?? 0, box.h));
  }
  for (const edge of edges) {
    if (edge.isFar) continue;
    const { points, x, y } = placing.edge(edge.from, edge.to);
    Object.assign(edge, { points, at: edge.label && { x, y } });
  }
  const rows = [...heights].sort(([a], [b]) => a - b).map(([y, h]) => ({ y, h }));
  const port = (id) => (placing.hasNode(id) ? placing.node(id) : null);
  return { boxes, edges, rows, ports: { in: port("in"), out: port("out") } };
}
