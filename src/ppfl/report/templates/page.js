const { charts, clients } = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const views = [];
const column = (name) => clients.columns.find((one) => one.name === name);
const text = (value, kind) =>
  value === null || value === undefined ? "–"
  : kind === "percent" ? `${(100 * value).toFixed(2)}%`
  : kind === "share" ? value.toFixed(2)
  : kind === "number" ? String(Number(value.toPrecision(3))) : value;
const make = (kind, content, more = {}) => Object.assign(document.createElement(kind), { textContent: content }, more);

// ---- the table of clients: search, sorting, more rows
const ids = clients?.columns[0].values ?? [];
const place = new Map(ids.map((id, i) => [id, i]));
let chosen = -1, shown = 50, sorting = null, downwards = true, rows = ids.map((_, i) => i);

function arrange() {
  const wanted = at("search").value.trim().toLowerCase();
  rows = ids.map((_, i) => i).filter((i) => ids[i].toLowerCase().includes(wanted));
  if (sorting !== null) {
    const { values, kind } = clients.columns[sorting];
    const sign = downwards ? -1 : 1;
    const order = kind === "text"
      ? (a, b) => sign * values[a].localeCompare(values[b], undefined, { numeric: true })
      : (a, b) => (values[a] === null) - (values[b] === null) || sign * (values[a] - values[b]) || a - b;
    rows.sort(order);
  }
  at("count").textContent = wanted ? `${rows.length.toLocaleString("en")} found` : "";
  draw();
}

function draw() {
  const body = document.querySelector("#clients tbody");
  body.replaceChildren(...rows.slice(0, shown).map((i) => {
    const line = document.createElement("tr");
    clients.columns.forEach(({ values, kind }, j) => {
      const cell = make(j ? "td" : "th", text(values[i], kind));
      if (j) cell.className = kind === "text" ? "" : "number";
      line.append(cell);
    });
    line.tabIndex = 0;
    line.setAttribute("aria-selected", String(i === chosen));
    line.onclick = () => choose(i);
    line.onkeydown = (event) => { if (event.key === "Enter") choose(i); };
    return line;
  }));
  at("more").hidden = rows.length <= shown;
}

// ---- one client in every view
const marks = {
  bars: (i) => [{ at: i + 0.5 }],
  simplex: (i) => {
    const c = clients.models.map((name) => column(name).values[i]);
    if (c.includes(null)) return [];
    const along = (axis) => c.reduce((sum, share, k) => sum + share * clients.corners[k][axis], 0);
    return [{ x: along(0), y: along(1) }];
  },
  scores: (i) => scores(i).map(([label, value]) => ({ label, value })),
  pairs: (i) => {
    const found = new Map(scores(i));
    const [y, x] = (clients.pair ?? []).map((label) => found.get(label));
    return x === undefined || y === undefined ? [] : [{ x, y }];
  },
};

function scores(i) {
  const own = clients.columns.slice(clients.columns.length - clients.labels.length);
  return clients.labels.map((label, j) => [label, own[j].values[i]]).filter(([, value]) => value !== null);
}

function choose(i) {
  chosen = i;
  for (const { view, kind } of views) {
    if (kind) view.data("chosen", i < 0 ? [] : marks[kind](i)).run();
  }
  at("card").hidden = i < 0;
  if (i >= 0) describe(i);
  if (at("search")) draw();
}

function describe(i) {
  at("card-id").textContent = ids[i];
  const shares = clients.models.map((name) => column(name).values[i] ?? 0);
  at("card-bar").replaceChildren(...shares.map((share, k) => {
    const part = document.createElement("i");
    part.style.cssText = `width:${100 * share}%;background:${clients.colours[k]}`;
    return part;
  }));
  at("card-facts").replaceChildren(...clients.columns.slice(1).flatMap(({ name, kind, values }) => [
    make("dt", name), make("dd", text(values[i], kind)),
  ]));
  document.querySelector("#card svg")?.remove();
  if (clients.history) at("card").append(over_rounds(clients.history.map((step) => step[i])));
}

function over_rounds(steps) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${steps.length - 1} 1`);
  svg.setAttribute("preserveAspectRatio", "none");
  let low = steps.map(() => 0);
  clients.models.forEach((_, k) => {
    const high = low.map((edge, t) => edge + steps[t][k]);
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    const there = high.map((y, t) => `${t} ${1 - y}`).join("L");
    const back = low.map((y, t) => `${t} ${1 - y}`).reverse().join("L");
    path.setAttribute("d", `M${there}L${back}Z`);
    path.setAttribute("fill", clients.colours[k]);
    svg.append(path);
    low = high;
  });
  return svg;
}

// ---- begin
if (at("search")) {
  at("search").oninput = () => { shown = 50; arrange(); };
  at("search").onkeydown = (event) => { if (event.key === "Enter" && rows.length) choose(rows[0]); };
  at("more").onclick = () => { shown += 200; draw(); };
  document.querySelectorAll("#clients thead th").forEach((head, j) => {
    const sort = make("button", head.textContent, { type: "button" });
    sort.onclick = () => {
      downwards = sorting === j ? !downwards : clients.columns[j].kind !== "text";
      sorting = j;
      document.querySelectorAll("#clients thead th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", downwards ? "descending" : "ascending");
      arrange();
    };
    head.replaceChildren(...head.querySelectorAll(".swatch"), sort);
  });
  arrange();
}
if (clients) at("card-close").onclick = () => choose(-1);
document.onkeydown = (event) => { if (event.key === "Escape" && chosen >= 0) choose(-1); };

// a chart in a closed part has no width until the part is opened
document.querySelectorAll("details").forEach((part) => {
  part.ontoggle = () => window.dispatchEvent(new Event("resize"));
});

const options = { renderer: "svg", actions: false, ast: true };
for (const element of document.querySelectorAll("[data-chart]")) {
  const spec = charts[element.dataset.chart];
  const { view } = await window.vegaEmbed(element, spec, options);
  views.push({ view, kind: spec.usermeta?.chosen });
  view.addEventListener("click", (_, item) => {
    const datum = item?.datum ?? {};
    const i = spec.usermeta?.chosen === "bars" && datum.at !== undefined ? datum.at : place.get(datum.client);
    if (i !== undefined && clients) choose(i);
  });
}
document.body.dataset.ready = "yes";
