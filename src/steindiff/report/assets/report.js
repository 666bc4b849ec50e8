"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const methods = Object.fromEntries(data.methods.map((m) => [m.key, m]));
  const state = { seed: 0, nfe: data.start };

  // ---- small helpers -------------------------------------------------------------------------------------------
  const element = (tag, attributes = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  };
  const svg = (tag, attributes = {}, text = "") => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text) made.textContent = text;
    return made;
  };
  const colour = (key) => (typeof key === "number"
    ? `color-mix(in oklab, var(--m-calibrated) ${Math.round(100 * key)}%, var(--m-edm))`
    : `var(--m-${key})`);
  const short = (v) => {
    if (v === 0) return "0";
    const size = Math.abs(v);
    if (size >= 1e4 || size < 1e-3) {
      const power = Math.floor(Math.log10(size) + 1e-9);
      const lead = +(v / 10 ** power).toPrecision(2);
      return (lead === 1 ? "10" : `${lead}·10`) + String(power).replace(/./g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);
    }
    return String(+v.toPrecision(3));
  };

  // ---- pictures ------------------------------------------------------------------------------------------------
  const nfe = () => data.nfes[state.nfe];
  const row = (key) => data.rows.find((r) => r.method === key && (key === data.reference || r.nfe === nfe()));
  const shown = () => data.methods.filter((m) => row(m.key));
  const picture = (key, seed) => data.pictures[row(key).index][seed];
  const describe = (key, seed) => `Seed ${data.seeds[seed]}, ${methods[key].title}, ${row(key).nfe} evaluations`;
  const place = (image, key, seed) => {
    image.src = picture(key, seed);
    image.alt = describe(key, seed);
  };

  const drawCards = () => {
    $("cards").replaceChildren(...shown().map((m) => {
      const image = element("img", { class: "pixels" });
      place(image, m.key, state.seed);
      const r = row(m.key);
      const cost = r.backward_passes ? `${r.network_calls} calls + ${r.backward_passes} backward` : `${r.network_calls} calls`;
      const caption = element("figcaption", {}, element("b", {}, m.title), cost);
      const card = element("figure", { class: "card", "data-method": m.key }, image, caption);
      card.style.setProperty("--c", colour(m.key));
      return card;
    }));
  };
  const drawSwipe = () => {
    for (const side of ["left", "right"]) {
      const key = row($(side).value) ? $(side).value : shown()[0].key;
      place($(`swipe-${side}`), key, state.seed);
    }
  };
  const drawSheet = () => {
    $("sheet").replaceChildren(...shown().map((m) => {
      const strip = element("div", { class: "strip" }, element("span", {}, m.title));
      strip.style.setProperty("--c", colour(m.key));
      data.seeds.forEach((seed, i) => {
        const image = element("img", { class: "pixels" });
        place(image, m.key, i);
        const button = element("button", { type: "button", "aria-pressed": String(i === state.seed) }, image);
        button.addEventListener("click", () => { $("seed").value = i; choose(); });
        strip.append(button);
      });
      return strip;
    }));
  };
  const markSeed = () => {
    for (const strip of $("sheet").children) {
      [...strip.querySelectorAll("button")].forEach((b, i) => b.setAttribute("aria-pressed", String(i === state.seed)));
    }
  };

  // ---- table ---------------------------------------------------------------------------------------------------
  const drawTable = () => {
    const head = element("tr", {}, ...data.columns.map((c) => element("th", { scope: "col" }, c.title)));
    const rows = data.rows.map((r) => {
      const current = r.method === data.reference || r.nfe === nfe();
      const line = element("tr", current ? { class: "current" } : {});
      line.style.setProperty("--c", colour(r.method));
      data.columns.forEach((c, i) => {
        const value = r[c.key];
        const best = data.best[c.key]?.includes(r.index);
        const cell = element(i ? "td" : "th", i ? (best ? { class: "best" } : {}) : { scope: "row" });
        cell.textContent = typeof value === "number" && c.digits !== null ? value.toFixed(c.digits) : value;
        line.append(cell);
      });
      return line;
    });
    $("numbers").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
  };

  // ---- charts --------------------------------------------------------------------------------------------------
  const ticks = (low, high, log) => {
    if (log) {
      const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
      const every = Math.max(1, Math.ceil((last - first + 1) / 6));
      const decades = [];
      for (let p = first; p <= last; p += every) decades.push(10 ** p);
      if (decades.length > 2) return decades;
      const fine = [];
      for (let p = first - 1; p <= last; p++) for (const m of [1, 2, 5]) fine.push(m * 10 ** p);
      const inside = fine.filter((v) => v >= low * 0.999 && v <= high * 1.001);
      if (inside.length > 2) return inside;
    }
    const span = high - low || 1;
    const raw = span / 5, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
    const out = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) out.push(+v.toPrecision(10));
    return out;
  };
  const extent = (values, axis) => {
    const always = axis.include ?? [];
    const low = Math.min(...values, ...always), high = Math.max(...values, ...always);
    if (axis.log) return low === high ? [low / 1.5, high * 1.5] : [low / 1.12, high * 1.12];
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [low - room, high + room];
  };
  const drawChart = (box, chart) => {
    const drawable = ([a, b]) => (!chart.x.log || a > 0) && (!chart.y.log || b > 0);
    const series = (chart.frames[String(nfe())] ?? chart.frames["*"] ?? [])
      .map((s) => ({ ...s, points: s.points.filter(drawable) })).filter((s) => s.points.length);
    const old = box.querySelector("details");
    const open = old ? old.open : false;
    box.replaceChildren(element("h3", {}, chart.title), element("p", {}, chart.caption));
    if (!series.length) { box.hidden = true; return; }
    box.hidden = false;
    const width = Math.max(260, box.clientWidth - 36), categories = chart.y.categories;
    const height = categories ? 34 * series.length + 56 : Math.round(Math.min(300, width * 0.62));
    const margin = { left: categories ? 104 : 52, right: 14, top: 10, bottom: 42 };
    const points = series.flatMap((s) => s.points);
    const xr = extent(points.map((p) => p[0]), chart.x);
    const yr = categories ? [-0.5, series.length - 0.5] : extent(points.map((p) => p[1]), chart.y);
    const scale = ([low, high], log, from, to) => (v) => {
      const f = log ? Math.log : (u) => u;
      return from + (to - from) * (f(v) - f(low)) / (f(high) - f(low));
    };
    let [left, right] = [margin.left, width - margin.right];
    if (chart.x.reverse) [left, right] = [right, left];
    const x = scale(xr, chart.x.log, left, right);
    const y = categories ? scale(yr, false, margin.top, height - margin.bottom)
      : scale(yr, chart.y.log, height - margin.bottom, margin.top);
    const frame = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${chart.title}. ${chart.caption}` });
    const bottom = height - margin.bottom;
    frame.append(svg("line", { class: "axis", x1: margin.left, x2: width - margin.right, y1: bottom, y2: bottom }));
    const seen = [];
    for (const v of chart.x.ticks?.filter((t) => t >= xr[0] && t <= xr[1]) ?? ticks(...xr, chart.x.log)) {
      if (seen.some((u) => Math.abs(u - x(v)) < 30)) continue;
      seen.push(x(v));
      frame.append(svg("line", { class: "guide", x1: x(v), x2: x(v), y1: margin.top, y2: bottom }));
      frame.append(svg("text", { x: x(v), y: bottom + 17, "text-anchor": "middle" }, short(v)));
    }
    frame.append(svg("text", { x: (margin.left + width - margin.right) / 2, y: height - 4, "text-anchor": "middle" }, chart.x.label));
    if (categories) {
      series.forEach((s, i) => frame.append(svg("text", { x: margin.left - 10, y: y(i) + 4, "text-anchor": "end" }, s.name)));
    } else {
      for (const v of ticks(...yr, chart.y.log)) {
        frame.append(svg("line", { class: "guide", x1: margin.left, x2: width - margin.right, y1: y(v), y2: y(v) }));
        frame.append(svg("text", { x: margin.left - 8, y: y(v) + 4, "text-anchor": "end" }, short(v)));
      }
    }
    series.forEach((s, i) => {
      const at = s.points.map(([a, b]) => [x(a), categories ? y(i) : y(b)]);
      const group = svg("g");
      group.style.setProperty("--c", colour(s.style));
      if (at.length > 1) group.append(svg("polyline", { class: "curve", points: at.map((p) => p.map((v) => v.toFixed(1)).join(",")).join(" ") }));
      if (at.length <= 24) at.forEach(([a, b], k) => {
        const dot = svg("circle", { class: "dot", cx: a.toFixed(1), cy: b.toFixed(1), r: 4.5 });
        const [u, v] = s.points[k];
        dot.append(svg("title", {}, categories ? `${s.name}: ${short(u)}` : `${s.name}: ${short(u)}, ${short(v)}`));
        group.append(dot);
      });
      frame.append(group);
    });
    box.append(frame);
    if (!categories) box.append(element("ul", { class: "legend" }, ...series.map((s) => {
      const item = element("li", {}, s.name);
      item.style.setProperty("--c", colour(s.style));
      return item;
    })));
    const body = series.flatMap((s) => s.points.map(([a, b]) => element("tr", {}, element("th", { scope: "row" }, s.name),
      element("td", {}, short(a)), ...(categories ? [] : [element("td", {}, short(b))]))));
    body.forEach((line, k) => line.style.setProperty("--c", colour(series.flatMap((s) => s.points.map(() => s.style))[k])));
    const heads = ["series", chart.x.label, ...(categories ? [] : [chart.y.label])];
    const table = element("table", {}, element("thead", {}, element("tr", {}, ...heads.map((h) => element("th", { scope: "col" }, h)))),
      element("tbody", {}, ...body));
    const details = element("details", {}, element("summary", {}, "As a table"), element("div", { class: "scroll", tabindex: "0" }, table));
    details.open = open;
    box.append(details);
  };
  const boxes = data.charts.map((chart) => element("figure", { class: "chart", id: `chart-${chart.id}` }));
  const drawCharts = () => data.charts.forEach((chart, i) => drawChart(boxes[i], chart));

  // ---- putting it together -------------------------------------------------------------------------------------
  const drawTiles = () => {
    const frame = data.tiles[String(nfe())] ?? [];
    $("tiles").replaceChildren(...frame.map(({ before, after, label }) => element("div", { class: "tile" },
      element("b", {}, ...(before ? [element("s", {}, `${before} → `), after] : [after])), element("span", {}, label))));
  };
  const choose = () => {
    const moved = state.nfe !== +$("nfe").value;
    state.seed = +$("seed").value;
    state.nfe = +$("nfe").value;
    $("seed-value").textContent = data.seeds[state.seed];
    $("nfe-value").textContent = nfe();
    $("seed").setAttribute("aria-valuetext", `seed ${data.seeds[state.seed]}`);
    $("nfe").setAttribute("aria-valuetext", `${nfe()} evaluations`);
    drawCards();
    drawSwipe();
    if (moved) { drawSheet(); drawTable(); drawCharts(); drawTiles(); } else markSeed();
  };
  const split = () => $("stage").style.setProperty("--at", `${$("split").value}%`);

  $("version").textContent = data.version;
  $("lead").textContent = data.lead;
  $("blur").textContent = data.blur;
  $("seed").max = data.seeds.length - 1;
  $("nfe").max = data.nfes.length - 1;
  $("nfe").value = state.nfe;
  $("nfe").disabled = data.nfes.length < 2;
  for (const side of ["left", "right"]) {
    $(side).replaceChildren(...data.methods.map((m) => element("option", { value: m.key }, m.title)));
    $(side).value = data[side];
    $(side).addEventListener("change", drawSwipe);
  }
  $("settings").replaceChildren(...data.settings.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  $("charts").replaceChildren(...boxes);
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  $("seed").addEventListener("input", choose);
  $("nfe").addEventListener("input", choose);
  $("split").addEventListener("input", split);
  const drag = (event) => {
    if (event.type === "pointermove" && !event.buttons) return;
    const box = $("stage").getBoundingClientRect();
    $("split").value = Math.round(100 * (event.clientX - box.left) / box.width);
    split();
  };
  $("stage").addEventListener("pointerdown", drag);
  $("stage").addEventListener("pointermove", drag);
  choose();
  drawSheet();
  drawTable();
  drawCharts();
  drawTiles();
  split();
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; drawCharts(); } });
})();
