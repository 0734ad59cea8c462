// The graph as an SVG file of its own, as it is drawn: opened modules, side, theme, heat.

const SAVED_STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap",
  "stroke-linejoin", "opacity", "font-family", "font-size", "font-weight", "text-anchor"];
const SAVED_PAD = 20;

/** The text of the file.  Styles are written out, since other programs know no variables. */
function svgText() {
  const { w, h: height } = whole();
  const box = [-SAVED_PAD, -SAVED_PAD, w + 2 * SAVED_PAD, height + 2 * SAVED_PAD];
  const found = document.createElementNS(SVG, "svg");
  found.setAttribute("viewBox", box.join(" "));
  found.setAttribute("width", box[2]);
  found.setAttribute("height", box[3]);
  svg(found, "title", {}, report.model + ", " + state.graph.raw.title);
  const rules = new Map();
  const style = svg(found, "style");
  const marker = document.getElementById("arrow");
  svg(found, "defs").append(copyOf(marker, rules));
  const ground = getComputedStyle(document.body).backgroundColor;
  svg(found, "rect", { x: box[0], y: box[1], width: box[2], height: box[3], fill: ground });
  found.append(copyOf(viewElement, rules));
  style.textContent = [...rules].map(([rule, name]) => `.${name}{${rule}}`).join("\n");
  return new XMLSerializer().serializeToString(found);
}

/** A copy of an element with what is drawn inside it; equal styles share a class. */
function copyOf(element, rules) {
  const found = element.cloneNode(false);
  for (const name of [...found.getAttributeNames()]) if (/^(class|style|role|tabindex|aria-.*)$/.test(name)) found.removeAttribute(name);
  if (element === viewElement) found.removeAttribute("transform");
  const style = getComputedStyle(element);
  if (element.childElementCount === 0) {
    let rule = SAVED_STYLES.map((key) => key + ":" + style.getPropertyValue(key)).join(";");
    if (style.markerEnd !== "none") rule += ";marker-end:url(#arrow)";
    if (!rules.has(rule)) rules.set(rule, "s" + rules.size);
    found.setAttribute("class", rules.get(rule));
    found.append(element.textContent);
  } else if (style.opacity !== "1") found.setAttribute("opacity", style.opacity);
  for (const child of element.children) if (getComputedStyle(child).display !== "none") found.append(copyOf(child, rules));
  return found;
}

function saveSvg() {
  const zoom = view.k; // so that names and numbers are saved that are hidden from afar
  view.k = 1;
  applyView();
  const link = h("a", { href: URL.createObjectURL(new Blob([svgText()], { type: "image/svg+xml" })), download: fileName() });
  view.k = zoom;
  applyView();
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), COPIED_FOR);
  said.textContent = "The graph is saved as " + link.download;
}

const fileName = () => (report.model + "-" + state.graph.raw.key).replace(/[^\w.-]+/g, "-").slice(0, 80) + ".svg";
