// The map: the whole graph in a corner, with a frame around the part in the window.

const map = document.getElementById("map");
const MAP_KINDS = ["open", "none", "fp32", "low", "other", "cast"];
const mapFrame = svg(map, "rect", { class: "frame" });

/** Draws all boxes, one path for each colour; a graph of thousands takes milliseconds. */
function drawMap() {
  const { w, h: height } = whole();
  const paths = new Map(MAP_KINDS.map((kind) => [kind, []]));
  for (const { x, y, w: wide, h: high, element, isOpen: open } of state.shown.values()) {
    const kind = open ? "open" : MAP_KINDS.find((each) => element.classList.contains(each)) ?? "none";
    paths.get(kind).push(`M${x.toFixed()} ${y.toFixed()}h${wide.toFixed()}v${high.toFixed()}h-${wide.toFixed()}z`);
  }
  map.setAttribute("viewBox", `0 0 ${w} ${height}`);
  map.replaceChildren();
  for (const [kind, parts] of paths) if (parts.length) svg(map, "path", { class: kind, d: parts.join("") });
  map.append(mapFrame);
}

/** Moves the frame; the map is hidden while the window shows the whole graph. */
function frameMap() {
  const { w, h: height } = whole();
  const [width, high] = [canvas.clientWidth / view.k, canvas.clientHeight / view.k];
  const [x, y] = [-view.x / view.k, -view.y / view.k];
  map.classList.toggle("idle", x <= 0 && y <= 0 && x + width >= w && y + high >= height);
  const [left, top] = [Math.max(x, 0), Math.max(y, 0)];
  const sizes = { x: left, y: top, width: Math.min(x + width, w) - left, height: Math.min(y + high, height) - top };
  for (const [key, size] of Object.entries(sizes)) mapFrame.setAttribute(key, Math.max(size, 0));
}

function listenToMap() {
  const move = (event) => {
    if (!event.buttons) return;
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(map.getScreenCTM().inverse());
    view.x = canvas.clientWidth / 2 - at.x * view.k;
    view.y = canvas.clientHeight / 2 - at.y * view.k;
    applyView();
  };
  map.addEventListener("pointerdown", (event) => { map.setPointerCapture(event.pointerId); move(event); });
  map.addEventListener("pointermove", move);
}
