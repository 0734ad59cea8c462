// Makes room for open groups in a closed layout.
//
// A row of boxes becomes as high as its highest box, and a box that grew wider pushes the
// boxes and edges of its row aside, half of the growth to each side.

const LANE = 16; // distance of the lane of far edges from the boxes, and of its bends

/** The layouts of the open groups, kept until a group inside is opened or closed. */
class OpenLayouts {
  constructor(graph, side, isOpen, isWrapped) {
    Object.assign(this, { graph, isOpen, isWrapped, kept: new Map(), layouts: new Layouts(graph, side) });
  }

  /** Forgets the layouts of a group and of the groups around it. */
  forget(group) {
    for (let g = group.index; g >= 0; g = this.graph.groups[g].parent) this.kept.delete(g);
  }

  /** The layout of an open group: `w`, `h`, `boxes`, `edges` and `ports`. */
  of(group) {
    let found = this.kept.get(group.index);
    if (!found) this.kept.set(group.index, (found = this.stretched(group)));
    return found;
  }

  stretched(group) {
    const closed = this.layouts.closedOf(group);
    const boxes = new Map();
    for (const [id, box] of closed.boxes) {
      boxes.set(id, box.item.isGroup && this.isOpen(box.item) ? { ...box, ...this.openBox(box.item) } : { ...box });
    }
    const rows = grownRows(closed, boxes);
    const down = (y) => moved(rows, y);
    const aside = pushes(closed, boxes);
    for (const [id, box] of boxes) {
      const { cx, cy } = closed.boxes.get(id);
      box.cx = cx + aside(cx, cy);
      Object.assign(box, { x: box.cx - box.w / 2, y: down(cy) - box.h / 2 });
    }
    const ports = Object.fromEntries(Object.entries(closed.ports).map(([id, port]) =>
      [id, port && { x: port.x, y: down(port.y) }]));
    const edges = closed.edges.map((edge) => edge.isFar ? { ...edge }
      : this.routed(edge, { closed, boxes, ports, rows, down, aside }));
    const found = settled(boxes, edges, ports);
    return this.isWrapped ? inColumns(found) : found;
  }

  openBox(group) {
    const inner = this.of(group);
    const label = fitted(group.label, TITLE_FONT, 320);
    return {
      lines: [label], inner,
      w: Math.max(inner.w + 2 * SIZES.pad, widthOf(label, TITLE_FONT) + 60),
      // An edge to the port below reaches the border; without one there is a margin.
      h: inner.h + SIZES.header + (inner.ports.out ? 0 : SIZES.pad),
    };
  }

  routed(edge, { closed, boxes, ports, rows, down, aside }) {
    const points = edge.points.slice(1, -1).flatMap((p) => {
      const x = p.x + aside(p.x, p.y);
      const row = rows.find((r) => Math.abs(r.y - p.y) < 0.5);
      if (!row?.grown) return [{ x, y: down(p.y) }];
      // Beside a box that grew, the edge runs straight from the row's top to its bottom.
      return [{ x, y: row.top }, { x, y: row.top + row.h + row.grown }];
    });
    const end = (id, point, other) => {
      const box = boxes.get(id);
      if (!box) return ports[id];
      const was = closed.boxes.get(id);
      const reach = Math.max(box.w / 2 - 12, 0);
      const x = box.cx + Math.min(reach, Math.max(-reach, point.x - was.cx));
      return { x, y: other.y > was.cy ? box.y + box.h : box.y };
    };
    const { points: all } = edge;
    return {
      ...edge,
      points: [end(edge.from, all[0], all[1]), ...points, end(edge.to, all.at(-1), all.at(-2))],
      at: edge.at && edge.label.casts.some((n) => !this.isShown(n, edge)) ? { x: edge.at.x, y: down(edge.at.y) } : null,
    };
  }

  /** Whether cast `n`, at an end of an edge, is drawn: all groups around it are open. */
  isShown(n, { from, to }) {
    for (let g = this.graph.nodes[n].group; ; g = this.graph.groups[g].parent) {
      const group = this.graph.groups[g];
      if (!this.isOpen(group)) return false;
      if (group.id === from || group.id === to) return true;
    }
  }
}

/** The rows with `grown`, the height they grew by, and `top`, their new place. */
function grownRows(closed, boxes) {
  const heights = new Map();
  for (const [id, box] of boxes) {
    const { cy } = closed.boxes.get(id);
    heights.set(cy, Math.max(heights.get(cy) ?? 0, box.h));
  }
  let sum = 0;
  return closed.rows.map(({ y, h }) => {
    const grown = Math.max(0, heights.get(y) - h);
    const row = { y, h, grown, top: y - h / 2 + sum };
    sum += grown;
    return row;
  });
}

/** The new place of a height of the closed layout. */
function moved(rows, y) {
  let sum = 0;
  for (const row of rows) {
    const top = row.y - row.h / 2;
    if (y <= top) break;
    sum += row.grown * Math.min(1, (y - top) / row.h);
  }
  return y + sum;
}

/** A function from a point (x, y) of the closed layout to the distance it moves aside. */
function pushes(closed, boxes) {
  const byRow = new Map();
  for (const [id, box] of boxes) {
    const { cx, cy, w } = closed.boxes.get(id);
    if (box.w <= w) continue;
    if (!byRow.has(cy)) byRow.set(cy, []);
    byRow.get(cy).push({ cx, by: (box.w - w) / 2 });
  }
  return (x, y) => (byRow.get(y) ?? []).reduce((sum, { cx, by }) => sum + Math.sign(x - cx) * by, 0);
}

/** Routes the far edges, and moves everything so that the least place is 0. */
function settled(boxes, edges, ports) {
  let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
  const reach = (x, y) => {
    [left, right] = [Math.min(left, x), Math.max(right, x)];
    [top, bottom] = [Math.min(top, y), Math.max(bottom, y)];
  };
  for (const box of boxes.values()) {
    reach(box.x, box.y);
    reach(box.x + box.w, box.y + box.h);
  }
  for (const { points, at, label } of edges) {
    for (const point of points ?? []) reach(point.x, point.y);
    if (at) for (const sign of [-1, 1]) reach(at.x + (sign * label.w) / 2, at.y);
  }
  if (!boxes.size) return { w: 0, h: 0, boxes: [], edges: [], ports: { in: null, out: null } };
  if (!ports.in) top -= SIZES.pad;
  if (edges.some((edge) => edge.isFar)) {
    left -= LANE;
    for (const edge of edges) if (edge.isFar) edge.points = laneOf(edge, boxes, ports, left, top, bottom);
    left -= 4;
  }
  const move = (p) => p && { x: p.x - left, y: p.y - top };
  for (const box of boxes.values()) Object.assign(box, { x: box.x - left, y: box.y - top });
  for (const edge of edges) Object.assign(edge, { points: edge.points.map(move), at: move(edge.at) });
  return {
    w: right - left, h: bottom - top, boxes: [...boxes.values()], edges,
    ports: { in: move(ports.in), out: move(ports.out) },
  };
}

/** The points of an edge along the lane at the left. */
function laneOf({ from, to }, boxes, ports, lane, top, bottom) {
  const [a, b] = [boxes.get(from), boxes.get(to)];
  const start = a ? [{ x: a.x + 14, y: a.y + a.h }, { x: a.x + 14, y: a.y + a.h + 9 }, { x: lane, y: a.y + a.h + 9 }]
    : [{ x: ports.in?.x ?? lane, y: top }, { x: lane, y: top + 4 }];
  const end = b ? [{ x: lane, y: b.y - 9 }, { x: b.x + 14, y: b.y - 9 }, { x: b.x + 14, y: b.y }]
    : [{ x: lane, y: bottom - 4 }, { x: ports.out?.x ?? lane, y: bottom }];
  return [...start, ...end];
}
