// The texts of nodes and groups, and the sizes of the boxes around them.

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
  if (values.length) return [item.title, values[0] + more];
  return item.title === item.kind ? [item.title] : [item.title, KINDS[item.kind]];
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
