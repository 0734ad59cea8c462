// Fills the page and listens to the user.

function start() {
  const title = document.getElementById("title");
  title.append(h("b", {}, "autoamp"), " " + report.model);
  title.title = report.model;
  listenToTabs();
  showTab("overview");
  document.getElementById("help").addEventListener("click", ACTIONS["?"]);
  document.getElementById("theme").addEventListener("click", switchTheme);
  if (!report.graphs.length) return showEmpty();
  listGraphs();
  isRestoring = true;
  showGraph(0);
  isRestoring = false;
  showLegend();
  listen();
}

/** Shows why a report has no graphs, and hides the controls of a graph. */
function showEmpty() {
  const empty = document.getElementById("empty");
  empty.hidden = false;
  empty.textContent = report.skipped.length ? "Not converted: the model runs in fp32."
    : "No graph captured yet: call the model once, then ask again.";
  for (const id of ["graph-field", "heat", "save", "islands", "plumbing", "search", "expand-all", "collapse-all"]) {
    document.getElementById(id).hidden = true;
  }
  document.querySelector(".switch").hidden = true;
  document.querySelector(".zoom").hidden = true;
  document.getElementById("overview").append(...verdict(), ...nextSteps(), report.skipped.length ? part("Not converted", skipped()) : "");
}

function listGraphs() {
  const select = document.getElementById("graph");
  select.append(...report.graphs.map((g, i) => h("option", { value: String(i) }, g.title)));
  select.addEventListener("change", () => chooseGraph(Number(select.value)));
}

function chooseGraph(number) {
  document.getElementById("graph").value = String(number);
  showGraph(number);
  showLegend();
}

function listen() {
  const on = (id, action) => document.getElementById(id).addEventListener("click", action);
  on("side-before", () => showSide("before"));
  on("side-after", () => showSide("after"));
  on("islands", () => filterIslands(!state.islands));
  on("plumbing", () => showPlumbing(!state.plumbing));
  on("heat", () => showHeat(!state.heat));
  on("save", saveSvg);
  on("expand-all", expandAll);
  on("collapse-all", collapseAll);
  on("zoom-in", () => zoomBy(1.25));
  on("zoom-out", () => zoomBy(0.8));
  on("zoom-fit", () => fitTo(whole()));
  listenToView();
  listenToSearch();
  listenToKeys();
  listenToMap();
  listenToAddress();
  canvas.addEventListener("click", (event) => {
    const element = event.target.closest(".item");
    if (!element) {
      if (state.picked) pick(null);
      return;
    }
    const { item, isOpen: open } = state.shown.get(element.id);
    // A click on the header closes an open module; a click on its background does nothing.
    if (open && !event.target.closest(".header, .title, .chevron")) return;
    state.at = item.id;
    act(item);
  });
  canvas.addEventListener("focusin", (event) => {
    const element = event.target.closest(".item");
    if (element) state.at = element.id;
  });
}

start();
