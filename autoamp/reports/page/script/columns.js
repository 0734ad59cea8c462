// Lays the rows of a tall group out in columns, so that a window holds more of it.
//
// An edge between two columns runs along the lane at the left of a column, and along the
// band above or below all columns.

const TALL = 1500; // the least height of a group that is laid out in columns
const WIDE = 1.3; // the wanted width of a group over its height
const BAND = 28; // the height of the bands above and below the columns

/** A settled layout with its rows in columns; a layout that is not tall is unchanged. */
function inColumns(layout) {
  const rows = rowsOf(layout.boxes);
  const count = Math.min(rows.length, Math.round(Math.sqrt((WIDE * layout.h) / Math.max(layout.w, 1))));
  if (layout.h < TALL || count < 2) return layout;
  const columns = columnsOf(rows, layout.h, count);
  const homes = new Map(columns.flatMap((c) => c.rows.flatMap((row) => row.boxes.map((box) => [box.item.id, c]))));
  const columnOf = (id) => homes.get(id) ?? (id === "in" ? columns[0] : columns.at(-1));
  const isWithin = (edge) => !edge.isFar && columnOf(edge.from) === columnOf(edge.to);
  let x = 0;
  for (const column of columns) {
    const edges = layout.edges.filter((edge) => isWithin(edge) && columnOf(edge.from) === column);
    const [left, right] = breadth(column, edges);
    Object.assign(column, { lane: x + LANE, dx: x + 2 * LANE - left, dy: BAND - column.top });
    x += right - left + 2 * LANE;
  }
  const h = Math.max(...columns.map(({ top, bottom }) => bottom - top)) + 2 * BAND;
  const [first, last] = [columns[0], columns.at(-1)];
  const moved = (p, { dx, dy }) => p && { x: p.x + dx, y: p.y + dy };
  const { in: above, out: below } = layout.ports;
  const ports = { in: above && { x: above.x + first.dx, y: 0 }, out: below && { x: below.x + last.dx, y: h } };
  const boxes = layout.boxes.map((box) => ({ ...box, ...moved(box, columnOf(box.item.id)) }));
  const places = new Map(boxes.map((box) => [box.item.id, box]));
  const edges = layout.edges.map((edge) => {
    const column = columnOf(edge.from);
    if (!isWithin(edge)) return { ...edge, isFar: true, ...between(edge, { places, ports, columnOf, h }) };
    return { ...edge, points: edge.points.map((p) => moved(p, column)), at: moved(edge.at, column) };
  });
  return { w: x + LANE, h, boxes, edges, ports };
}

/** The rows of boxes, from the top: boxes with one middle height. */
function rowsOf(boxes) {
  const found = new Map();
  for (const box of boxes) {
    const middle = Math.round(box.y + box.h / 2);
    if (!found.has(middle)) found.set(middle, { top: Infinity, bottom: -Infinity, boxes: [] });
    const row = found.get(middle);
    row.boxes.push(box);
    Object.assign(row, { top: Math.min(row.top, box.y), bottom: Math.max(row.bottom, box.y + box.h) });
  }
  return [...found.values()].sort((a, b) => a.top - b.top);
}

/** At most `count` columns of rows, about as low as possible. */
function columnsOf(rows, height, count) {
  for (let most = height / count; ; most *= 1.05) {
    const columns = [];
    for (const row of rows) {
      const column = columns.at(-1);
      if (!column || row.bottom - column.top > most) columns.push({ ...row, rows: [row] });
      else {
        column.rows.push(row);
        column.bottom = Math.max(column.bottom, row.bottom);
      }
    }
    if (columns.length <= count) return columns;
  }
}

/** The least and the largest x of a column: of its boxes, edges and labels. */
function breadth({ rows }, edges) {
  const xs = rows.flatMap(({ boxes }) => boxes.flatMap(({ x, w }) => [x, x + w]));
  for (const { points, at, label } of edges) {
    xs.push(...points.map((p) => p.x));
    if (at) xs.push(at.x - label.w / 2, at.x + label.w / 2);
  }
  return [Math.min(...xs), Math.max(...xs)];
}

/** The points of an edge along lanes and bands, and the place of its label. */
function between({ from, to, at }, { places, ports, columnOf, h }) {
  const [a, b] = [places.get(from), places.get(to)];
  const [lane, other] = [columnOf(from).lane, columnOf(to).lane];
  const [high, low] = [BAND / 2, h - BAND / 2];
  const under = a && a.y + a.h + 9;
  const start = a ? [{ x: a.x + 14, y: a.y + a.h }, { x: a.x + 14, y: under }, { x: lane, y: under }]
    : [{ x: ports.in?.x ?? lane, y: 0 }, { x: ports.in?.x ?? lane, y: high }];
  const end = b ? [{ x: other, y: b.y - 9 }, { x: b.x + 14, y: b.y - 9 }, { x: b.x + 14, y: b.y }]
    : [{ x: ports.out?.x ?? other, y: low }, { x: ports.out?.x ?? other, y: h }];
  let middle = [];
  if (!b) middle = a ? [{ x: lane, y: low }] : [{ x: lane, y: high }, { x: lane, y: low }];
  else if (!a) middle = [{ x: other, y: high }];
  else if (lane !== other) middle = [{ x: lane, y: high }, { x: other, y: high }];
  return { points: [...start, ...middle, ...end], at: at && a ? { x: a.x + a.w / 2, y: under } : null };
}
