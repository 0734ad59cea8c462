// Moves and zooms the graph; where the zoom is small, names the modules in readable size.

const view = { x: 0, y: 0, k: 1 };
const canvas = document.getElementById("canvas");
const viewElement = document.getElementById("view");
const LEAST_ZOOM = 0.08;
const MOST_ZOOM = 2.5;
const LEGIBLE = 0.9; // below this zoom the smaller texts are hard to read
const FAR_ZOOM = 0.5; // below this zoom the titles in the graph are hard to read
const LEAST_NAMED = 50; // the least height of a module, in the window, that is named then
const NAME_FONT = "600 11px system-ui, sans-serif";
const names = document.getElementById("names");

function applyView() {
  viewElement.setAttribute("transform", `translate(${view.x} ${view.y}) scale(${view.k})`);
  canvas.classList.toggle("far", view.k < 0.4);
  nameFar();
  frameMap();
}

/** Names the innermost open modules that have room for a name. */
function nameFar() {
  names.replaceChildren();
  if (view.k >= FAR_ZOOM) return;
  const found = new Map();
  for (const { item, x, y, w, h, isOpen: open } of state.shown.values()) {
    if (!open || h * view.k < LEAST_NAMED) continue;
    const name = tailOf(item, w * view.k - 10);
    if (name) found.set(item.index, { item, name, x, y });
  }
  for (const { item } of [...found.values()]) found.delete(item.parent);
  for (const { name, x, y } of found.values()) {
    svg(names, "text", { x: x * view.k + view.x + 5, y: y * view.k + view.y + 12 }, name);
  }
}

/** The end of a module's path that fits in some pixels; "" for none, or a number alone. */
function tailOf({ path, label }, room) {
  const parts = (path || label).split(".");
  for (let i = 0; i < parts.length; i++) {
    const name = parts.slice(i).join(".");
    if (widthOf(name, NAME_FONT) <= room) return /^\d+$/.test(name) ? "" : name;
  }
  return "";
}

/** Zooms by a factor about a point of the canvas, by default its middle. */
function zoomBy(factor, x = canvas.clientWidth / 2, y = canvas.clientHeight / 2) {
  const k = Math.min(MOST_ZOOM, Math.max(LEAST_ZOOM, view.k * factor));
  view.x = x - ((x - view.x) * k) / view.k;
  view.y = y - ((y - view.y) * k) / view.k;
  view.k = k;
  applyView();
}

/** Shows a whole rectangle of the graph, or its top where the whole would be illegible. */
function fitTo({ x, y, w, h }, least = LEAST_ZOOM) {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const [room, legend] = [28, 36]; // the legend covers the bottom
  const [inX, inY] = [width - 2 * room, height - 2 * room - legend];
  const whole = Math.min(inX / w, inY / h, 1.15);
  view.k = Math.max(whole, least);
  view.x = (width - w * view.k) / 2 - x * view.k;
  view.y = (height - legend - h * view.k) / 2 - y * view.k;
  if (h * view.k > inY) view.y = room - y * view.k;
  if (w * view.k > inX) view.x = room - x * view.k;
  applyView();
}

/** Moves a box into the window by the shortest way; with `middle`, to the middle. */
function bringIn(box, { middle = false } = {}) {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const [left, top] = [box.x * view.k + view.x, box.y * view.k + view.y];
  const [w, h] = [box.w * view.k, box.h * view.k];
  const room = 24;
  const isIn = left >= room && top >= room && left + w <= width - room && top + h <= height - room;
  if (isIn) return;
  const move = (start, size, all) => {
    if (size > all - 2 * room) return room - start;
    if (middle) return all / 2 - start - size / 2;
    return Math.max(room - start, Math.min(0, all - room - start - size));
  };
  view.x += move(left, w, width);
  view.y += move(top, h, height - 36); // the legend covers the bottom
  applyView();
}

function listenToView() {
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const at = canvas.getBoundingClientRect();
    if (event.ctrlKey || event.metaKey) {
      zoomBy(Math.exp(-event.deltaY * 0.006), event.clientX - at.left, event.clientY - at.top);
    } else {
      view.x -= event.shiftKey ? event.deltaY : event.deltaX;
      view.y -= event.shiftKey ? 0 : event.deltaY;
      applyView();
    }
  }, { passive: false });
  let from = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button === 0) from = { x: event.clientX, y: event.clientY, view: { ...view }, moved: false };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!event.buttons) from = null;
    if (!from) return;
    const [dx, dy] = [event.clientX - from.x, event.clientY - from.y];
    if (!from.moved && Math.hypot(dx, dy) < 4) return;
    if (!from.moved) canvas.setPointerCapture(event.pointerId);
    from.moved = true;
    Object.assign(view, { x: from.view.x + dx, y: from.view.y + dy });
    applyView();
  });
  // A drag ends with a click, which must not select the node under the pointer.
  canvas.addEventListener("click", (event) => {
    if (from?.moved) event.stopPropagation();
    from = null;
  }, true);
  canvas.addEventListener("pointercancel", () => { from = null; });
}
