"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const methods = Object.fromEntries(data.methods.map((m) => [m.key, m]));
  const state = { seed: 0, nfe: data.start };
  const PALETTE = 8;
  let ready = false;

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
  // A method's colour is its place among the methods; a step's runs from blue over green to red.
  const few = data.methods.filter((m) => !m.reference).map((m) => m.key);
  const colour = (key) => {
    if (Array.isArray(key)) return `oklch(var(--step) 0.15 ${Math.round(270 - 240 * key[0] / Math.max(1, key[1] - 1))})`;
    if (methods[key]?.reference) return "var(--reference)";
    const i = Math.max(0, few.indexOf(key));
    return i < PALETTE ? `var(--c${i})` : `oklch(var(--step) 0.14 ${(137.5 * i) % 360})`;
  };
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
  const row = (key) => data.rows.find((r) => r.method === key && (r.reference || r.nfe === nfe()));
  const shown = () => data.methods.filter((m) => row(m.key));
  const picture = (key, seed) => data.pictures[row(key).index][seed];
  const budget = (key) => `${row(key).nfe} evaluations`;
  const describe = (key, seed) => `Seed ${data.seeds[seed]}, ${methods[key].title}, ${budget(key)}`
    + (data.captions[seed] ? `: ${data.captions[seed]}` : "");
  const place = (image, key, seed) => {
    image.src = picture(key, seed);
    image.alt = describe(key, seed);
  };

  const drawCards = () => {
    $("cards").replaceChildren(...shown().map((m) => {
      const image = element("img", { class: "pixels" });
      place(image, m.key, state.seed);
      const r = row(m.key);
      const cost = r.network_calls === undefined ? budget(m.key)
        : `${r.network_calls} calls` + (r.backward_passes ? ` + ${r.backward_passes} backward` : "");
      const caption = element("figcaption", {}, element("b", {}, m.title), cost);
      const button = element("button", { type: "button", title: "Enlarge" }, image);
      button.addEventListener("click", () => enlarge(m.key));
      const card = element("figure", { class: "card", "data-method": m.key }, button, caption);
      card.style.setProperty("--c", colour(m.key));
      return card;
    }));
  };
  const enlarge = (key) => {
    place($("zoom-image"), key, state.seed);
    $("zoom").style.setProperty("--ratio", $("swipe-left").naturalWidth / $("swipe-left").naturalHeight || 1);
    $("zoom-text").textContent = describe(key, state.seed);
    $("zoom").showModal();
  };
  const side = (name) => (row($(name).value) ? $(name).value : shown()[0].key);
  const drawSwipe = () => {
    for (const name of ["left", "right"]) {
      place($(`swipe-${name}`), side(name), state.seed);
      $(`tag-${name}`).textContent = `${methods[side(name)].title}, ${budget(side(name))}`;
    }
  };
  // One tab stop for the whole grid: arrows move, the picture in focus is chosen.
  const drawSheet = () => {
    const held = $("sheet").contains(document.activeElement);
    const strips = shown().map((m, line) => {
      const strip = element("div", { class: "strip" }, element("span", {}, m.title));
      strip.style.setProperty("--c", colour(m.key));
      data.seeds.forEach((seed, i) => {
        const image = element("img", { class: "pixels", draggable: "false" });
        place(image, m.key, i);
        const button = element("button", { type: "button" }, image);
        button.addEventListener("click", () => { state.line = line; pick(i); });
        strip.append(button);
      });
      return strip;
    });
    $("sheet").replaceChildren(...strips);
    state.line = Math.min(state.line ?? 0, strips.length - 1);
    markSeed();
    if (held) focusSeed();
  };
  const seedButton = () => $("sheet").children[state.line].querySelectorAll("button")[state.seed];
  const focusSeed = () => seedButton().focus();
  const markSeed = () => {
    [...$("sheet").children].forEach((strip, line) => strip.querySelectorAll("button").forEach((b, i) => {
      b.setAttribute("aria-pressed", String(i === state.seed));
      b.tabIndex = i === state.seed && line === state.line ? 0 : -1;
    }));
  };
  const pick = (seed) => { $("seed").value = seed; choose(); };
  $("sheet").addEventListener("keydown", (event) => {
    const lines = $("sheet").children.length, last = data.seeds.length - 1;
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -last], End: [0, last] };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    state.line = Math.min(lines - 1, Math.max(0, state.line + move[0]));
    pick(Math.min(last, Math.max(0, state.seed + move[1])));
    focusSeed();
  });

  // ---- sharing -------------------------------------------------------------------------------------------------
  const say = (text) => { $("status").textContent = text; };
  const loadImage = (uri) => new Promise((done, fail) => {
    const image = new Image();
    image.onload = () => done(image);
    image.onerror = fail;
    image.src = uri;
  });
  // This seed by every method, titled, on a canvas.
  const compose = async () => {
    const keys = shown().map((m) => m.key);
    const images = await Promise.all(keys.map((key) => loadImage(picture(key, state.seed))));
    const height = Math.max(256, Math.min(512, images[0].naturalHeight)), zoom = height / images[0].naturalHeight;
    const width = Math.round(zoom * images[0].naturalWidth), gap = 12, top = 56;
    const canvas = element("canvas", { width: keys.length * (width + gap) + gap, height: height + top + gap });
    const pen = canvas.getContext("2d"), css = getComputedStyle(document.body);
    pen.fillStyle = css.backgroundColor;
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.imageSmoothingEnabled = document.body.classList.contains("smooth");
    keys.forEach((key, i) => {
      const at = gap + i * (width + gap);
      pen.drawImage(images[i], at, top, width, height);
      pen.fillStyle = css.color;
      pen.font = `600 17px ${css.fontFamily}`;
      pen.fillText(methods[key].title, at, 24, width);
      pen.font = `15px ${css.fontFamily}`;
      pen.fillText(`${budget(key)}, seed ${data.seeds[state.seed]}`, at, 45, width);
    });
    return canvas;
  };
  $("save").addEventListener("click", async () => {
    const name = `steindiff-seed-${data.seeds[state.seed]}-nfe-${nfe()}.png`;
    element("a", { href: (await compose()).toDataURL("image/png"), download: name }).click();
    say(`Saved ${name}.`);
  });
  $("copy").addEventListener("click", async () => {
    try {
      const blob = compose().then((canvas) => new Promise((done) => canvas.toBlob(done, "image/png")));
      await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
      say("Copied the picture.");
    } catch { say("The browser does not allow copying here: save the picture instead."); }
  });
  $("link").addEventListener("click", async () => {
    remember();
    try {
      await navigator.clipboard.writeText(location.href);
      say("Copied the link to this view.");
    } catch { say("The link to this view is in the address bar."); }
  });
  // Seed, budget and both sides live in the address: a link shows what its sender saw.
  const remember = () => {
    const view = { seed: data.seeds[state.seed], nfe: nfe(), left: $("left").value, right: $("right").value, at: $("split").value };
    history.replaceState(null, "", `#${new URLSearchParams(view)}`);
  };
  const recall = () => {
    const view = new URLSearchParams(location.hash.slice(1));
    const seed = data.seeds.indexOf(view.get("seed")), place = data.nfes.indexOf(+view.get("nfe"));
    if (seed >= 0) $("seed").value = seed;
    if (place >= 0) $("nfe").value = place;
    for (const name of ["left", "right"]) if (methods[view.get(name)]) $(name).value = view.get(name);
    if (view.has("at")) $("split").value = view.get("at");
  };

  // ---- table ---------------------------------------------------------------------------------------------------
  const drawTable = () => {
    const head = element("tr", {}, ...data.columns.map((c) => {
      const cell = element("th", { scope: "col" }, c.title);
      cell.style.minWidth = `${Math.min(10, c.title.length / 5)}rem`;
      return cell;
    }));
    const rows = data.rows.map((r) => {
      const current = r.reference || r.nfe === nfe();
      const line = element("tr", current ? { class: "current" } : {});
      line.style.setProperty("--c", colour(r.method));
      data.columns.forEach((c, i) => {
        const value = r[c.key];
        const best = data.best[c.key]?.includes(r.index);
        const cell = element(i ? "td" : "th", i ? (best ? { class: "best" } : {}) : { scope: "row" });
        const print = (v) => (typeof v === "number" && c.digits !== null ? v.toFixed(c.digits) : v ?? "–");
        cell.textContent = print(value);
        const range = r[`${c.key}_interval`];
        if (range) cell.append(element("small", {}, range.map(print).join(" – ")));
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
  // The point nearest to the pointer, with its values.
  const hover = (plot, frame, spots, lines) => {
    const tip = element("div", { class: "tip", hidden: "" });
    const mark = svg("circle", { class: "dot mark", r: 6, visibility: "hidden" });
    const leave = () => { tip.hidden = true; mark.setAttribute("visibility", "hidden"); };
    const move = (event) => {
      const box = frame.getBoundingClientRect(), zoom = box.width / frame.viewBox.baseVal.width;
      const px = (event.clientX - box.left) / zoom, py = (event.clientY - box.top) / zoom;
      const far = (s) => Math.hypot(s.a - px, s.b - py);
      const spot = spots.reduce((one, two) => (far(two) < far(one) ? two : one));
      if (far(spot) > 60) { leave(); return; }
      for (const e of [tip, mark]) e.style.setProperty("--c", colour(spot.series.style));
      mark.setAttribute("cx", spot.a);
      mark.setAttribute("cy", spot.b);
      mark.setAttribute("visibility", "visible");
      tip.replaceChildren(element("b", {}, spot.series.name), ...lines(spot).flatMap((l, i) => (i ? [element("br"), l] : [l])));
      tip.hidden = false;
      const half = tip.offsetWidth / 2;
      tip.style.left = `${Math.min(box.width - half, Math.max(half, spot.a * zoom))}px`;
      tip.style.top = `${spot.b * zoom}px`;
    };
    frame.append(mark);
    plot.append(tip);
    for (const name of ["pointermove", "pointerdown"]) frame.addEventListener(name, move);
    frame.addEventListener("pointerleave", leave);
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
    const points = series.flatMap((s) => s.points.flatMap(([a, ...bs]) => bs.filter((b) => !chart.y.log || b > 0).map((b) => [a, b])));
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
    const spots = [];
    series.forEach((s, i) => {
      const at = s.points.map(([a, b]) => [x(a), categories ? y(i) : y(b)]);
      at.forEach(([a, b], k) => spots.push({ a, b, series: s, point: s.points[k] }));
      const group = svg("g");
      group.style.setProperty("--c", colour(s.style));
      if (at.length > 1) group.append(svg("polyline", { class: "curve", points: at.map((p) => p.map((v) => v.toFixed(1)).join(",")).join(" ") }));
      s.points.forEach(([a, , low, high]) => {
        if (low !== undefined) group.append(svg("line", { class: "whisker", x1: x(a), x2: x(a), y1: y(Math.max(low, yr[0])), y2: y(high) }));
      });
      if (at.length <= 24) at.forEach(([a, b]) => group.append(svg("circle", { class: "dot", cx: a.toFixed(1), cy: b.toFixed(1), r: 4.5 })));
      frame.append(group);
    });
    const plot = element("div", { class: "plot" }, frame);
    hover(plot, frame, spots, (spot) => {
      const [u, v, low, high] = spot.point;
      const value = categories ? [] : [`${chart.y.label} ${short(v)}` + (low === undefined ? "" : ` (${short(low)} – ${short(high)})`)];
      return [`${chart.x.label} ${short(u)}`, ...value];
    });
    box.append(plot);
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
    const moved = ready && state.nfe !== +$("nfe").value;
    state.seed = +$("seed").value;
    state.nfe = +$("nfe").value;
    $("seed-value").textContent = data.seeds[state.seed];
    $("nfe-value").textContent = nfe();
    $("seed").setAttribute("aria-valuetext", `seed ${data.seeds[state.seed]}`);
    $("nfe").setAttribute("aria-valuetext", `${nfe()} evaluations`);
    $("caption").textContent = data.captions[state.seed] ?? "";
    $("caption").hidden = !data.captions[state.seed];
    drawCards();
    drawSwipe();
    if (moved) drawBudget(); else if (ready) markSeed();
    if (ready) remember();
  };
  const drawBudget = () => {
    $("headline").textContent = data.headlines[String(nfe())] ?? document.title;
    drawSheet();
    drawTable();
    drawCharts();
    drawTiles();
  };
  const split = () => $("stage").style.setProperty("--at", `${$("split").value}%`);

  $("version").textContent = data.version;
  $("lead").textContent = data.lead;
  $("command").textContent = data.command;
  $("made").hidden = !data.command;
  $("notes").replaceChildren(...data.notes.map((text) => element("p", { class: "notice" }, text)));
  $("links").replaceChildren(...data.links.map(([name, url]) => element("a", { href: url, rel: "noreferrer" }, name)));
  $("chart-section").hidden = !data.charts.length;
  $("setting-section").hidden = !data.settings.length;
  $("seed").max = data.seeds.length - 1;
  $("nfe").max = data.nfes.length - 1;
  $("nfe").value = state.nfe;
  $("controls").classList.toggle("single", data.nfes.length < 2);
  for (const name of ["left", "right"]) {
    $(name).replaceChildren(...data.methods.map((m) => element("option", { value: m.key }, m.title)));
    $(name).value = data[name];
    $(name).addEventListener("change", () => { drawSwipe(); remember(); });
  }
  $("settings").replaceChildren(...data.settings.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  $("charts").replaceChildren(...boxes);
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  $("seed").addEventListener("input", choose);
  $("nfe").addEventListener("input", choose);
  $("split").addEventListener("input", split);
  $("split").addEventListener("change", () => remember());
  $("smooth").checked = data.smooth;
  const soften = () => document.body.classList.toggle("smooth", $("smooth").checked);
  $("smooth").addEventListener("input", soften);
  const drag = (event) => {
    const box = $("stage").getBoundingClientRect();
    $("split").value = Math.round(100 * (event.clientX - box.left) / box.width);
    split();
  };
  $("stage").addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse" && event.button) return;
    $("stage").setPointerCapture(event.pointerId);
    drag(event);
  });
  $("stage").addEventListener("pointermove", (event) => { if ($("stage").hasPointerCapture(event.pointerId)) drag(event); });
  $("stage").addEventListener("pointerup", () => remember());
  $("zoom").addEventListener("click", (event) => { if (event.target === $("zoom")) $("zoom").close(); });
  recall();
  choose();
  drawBudget();
  split();
  soften();
  ready = true;
  window.addEventListener("hashchange", () => { recall(); choose(); split(); });
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; drawCharts(); } });
})();
