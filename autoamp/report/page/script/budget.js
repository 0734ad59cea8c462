// The placements within reach of a budget for error: predicted time against predicted error.

const PLOT = { width: 340, height: 220, left: 58, right: 12, top: 12, bottom: 40 };

/** The part of the overview on a budget, or nothing where there was none. */
function budgetPart(found) {
  if (!found) return [];
  const plots = Object.keys(found.limits).map((measure) => budgetPlot(found, measure));
  return [part("Within the budget for error", ...found.sentences.map((text) => h("p", {}, text)), ...plots)];
}

/** One plot: across, the share of fp32's time; upwards, the error, in powers of ten. */
function budgetPlot(found, measure) {
  const { width, height, left, right, top, bottom } = PLOT;
  const seen = [...found.points, ...found.marks].filter((point) => point.errors[measure] > 0);
  const errors = [...seen.map((point) => point.errors[measure]), found.limits[measure]];
  const least = Math.floor(Math.log10(Math.min(...errors))), most = Math.ceil(Math.log10(Math.max(...errors)) + 1e-9);
  const fastest = Math.min(...seen.map((point) => point.share), 1);
  const from = fastest - 0.04 * (1 - fastest || 1), to = 1 + 0.04 * (1 - fastest || 1);
  const x = (share) => left + ((share - from) / (to - from)) * (width - left - right);
  const y = (error) => {
    const power = error > 0 ? Math.max(Math.log10(error), least) : least;
    return height - bottom - ((power - least) / Math.max(most - least, 1)) * (height - top - bottom);
  };
  const holder = h("figure", { class: "budget" });
  const text = `${measure}: ${found.points.length} placements`;
  const plot = svg(holder, "svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": text });
  const line = (x1, y1, x2, y2, name) => svg(plot, "line", { class: name, x1, y1, x2, y2 });
  const label = (at, up, anchor, words) => svg(plot, "text", { x: at, y: up, "text-anchor": anchor }, words);
  for (let power = least; power <= most; power++) {
    line(left, y(10 ** power), width - right, y(10 ** power), "grid");
    label(left - 6, y(10 ** power) + 4, "end", `1e${power}`);
  }
  for (const share of [fastest, (1 + fastest) / 2, 1]) label(x(share), height - bottom + 16, "middle", share.toFixed(2));
  label((left + width - right) / 2, height - 6, "middle", "predicted time, fp32 = 1");
  line(left, y(found.limits[measure]), width - right, y(found.limits[measure]), "limit");
  const path = found.points.map((point, i) => `${i ? "L" : "M"}${x(point.share)},${y(point.errors[measure] || 0)}`).join("");
  svg(plot, "path", { class: "frontier", d: path });
  found.points.forEach((point, i) => dot(plot, x(point.share), y(point.errors[measure] || 0), i === found.chosen ? "chosen" : "point",
    `${point.low} low ops: ${errorText(point.errors[measure])}`));
  for (const mark of found.marks) dot(plot, x(mark.share), y(mark.errors[measure] || 0), "mark", `${mark.name}: ${errorText(mark.errors[measure])}`, mark.name);
  holder.append(h("figcaption", {}, `Error of the ${measure}. The dashed line is the budget, the large dot the placement chosen.`));
  return holder;
}

const errorText = (value) => (value ? value.toPrecision(2) : "no error");

function dot(plot, cx, cy, name, title, words = "") {
  const circle = svg(plot, "circle", { class: name, cx, cy, r: name === "chosen" ? 6 : name === "mark" ? 4.5 : 3 });
  svg(circle, "title", {}, title);
  const isRight = cx > PLOT.width / 2;
  if (words) svg(plot, "text", { x: cx + (isRight ? -8 : 8), y: cy + (words === "all low" ? -8 : 16), "text-anchor": isRight ? "end" : "start" }, words);
}
