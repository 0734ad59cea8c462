// Search: nodes and modules by name, op, module path, source line and reason.

const MOST_FOUND = 40;
const searchBox = document.getElementById("search");
const foundList = document.getElementById("found");
let hits = [];
let chosen = -1;

/** The rank of an item for some words: lower is better; -1 where a word is missing. */
function rankOf(item, words) {
  const name = (item.isGroup ? item.path : item.name).toLowerCase();
  const rest = item.isGroup ? "" : [item.op, item.module, item.source, item.decision?.heading ?? ""].join("\n").toLowerCase();
  let rank = item.isGroup ? 0.5 : 0;
  for (const word of words) {
    const at = name.indexOf(word);
    if (at < 0 && !rest.includes(word)) return -1;
    rank += at === 0 ? 0 : at > 0 ? 1 : 2;
  }
  return rank;
}

function searched(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  const { groups, nodes } = state.graph;
  const items = [...groups.filter((g) => g.path && !g.is_part), ...nodes];
  return items.map((item) => ({ item, rank: rankOf(item, words) })).filter(({ rank }) => rank >= 0)
    .sort((a, b) => a.rank - b.rank).map(({ item }) => item);
}

function showFound() {
  hits = searched(searchBox.value);
  chosen = hits.length ? 0 : -1;
  foundList.replaceChildren(...hits.slice(0, MOST_FOUND).map((item, i) => h("li", {
    role: "option", id: "hit-" + i, "aria-selected": String(i === 0), onpointerdown: (event) => { event.preventDefault(); take(i); },
  }, hitText(item))));
  if (searchBox.value.trim()) {
    const more = hits.length > MOST_FOUND ? `the first ${MOST_FOUND} of ${plural(hits.length, "hit")}` : hits.length ? "" : "nothing found";
    if (more) foundList.append(h("li", { class: "hint", role: "presentation" }, more));
    said.textContent = plural(hits.length, "hit");
  }
  openFound(Boolean(searchBox.value.trim()));
  choose(chosen);
}

function hitText(item) {
  if (item.isGroup) return [h("b", {}, item.path), h("small", {}, item.label.includes(", call ") ? "module" + item.label.slice(item.label.indexOf(",")) : "module")];
  const place = item.after ?? item.before;
  return [h("span", { class: "dot " + (item.kind === "cast" ? "cast" : precisionClass(place.precision)) }),
    h("b", {}, item.name), h("small", {}, [item.kind === "op" ? item.title : item.kind, item.module].filter(Boolean).join(" in "))];
}

function openFound(open) {
  foundList.hidden = !open;
  searchBox.setAttribute("aria-expanded", String(open));
}

function choose(i) {
  chosen = i;
  [...foundList.children].forEach((li, n) => li.getAttribute("role") === "option" && li.setAttribute("aria-selected", String(n === i)));
  foundList.children[i]?.scrollIntoView({ block: "nearest" });
  if (i >= 0) searchBox.setAttribute("aria-activedescendant", "hit-" + i);
  else searchBox.removeAttribute("aria-activedescendant");
}

function take(i) {
  const item = hits[i];
  if (!item) return;
  openFound(false);
  go(item, { focus: true });
}

function listenToSearch() {
  searchBox.addEventListener("input", showFound);
  searchBox.addEventListener("focus", () => searchBox.value.trim() && showFound());
  searchBox.addEventListener("blur", () => openFound(false));
  searchBox.addEventListener("keydown", (event) => {
    const last = Math.min(hits.length, MOST_FOUND) - 1;
    if (event.key === "ArrowDown") choose(Math.min(chosen + 1, last));
    else if (event.key === "ArrowUp") choose(Math.max(chosen - 1, 0));
    else if (event.key === "Enter") take(chosen);
    else if (event.key === "Escape") {
      searchBox.value = "";
      openFound(false);
      searchBox.blur();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  });
}
