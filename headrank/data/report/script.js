"use strict";
(() => {
  // ColorBrewer's RdYlBu, reversed: matplotlib's RdYlBu_r, from -1 to 1.
  const STOPS = ["#313695", "#4575b4", "#74add1", "#abd9e9", "#e0f3f8", "#ffffbf", "#fee090", "#fdae61", "#f46d43", "#d73027", "#a50026"];
  const RGB = STOPS.map((stop) => [1, 3, 5].map((at) => parseInt(stop.slice(at, at + 2), 16)));
  const LOOKS = { qk: "where heads look", ov: "what heads write" };
  const MARGIN = 28; // around the heatmap, for its heads' numbers
  const ROOM = 34; // a cell of so many pixels holds its number
  const NONE = "–";
  const FRAME = 40; // the least width of a layer's small picture
  const DEAD = "#ebebeb";

  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("document").textContent);
  const now = { model: 0, circuit: data.circuits[0], layer: 0, row: 0, column: 0 };

  const layersOf = (model) => data.models[model].circuits[now.circuit].layers;
  const layerNow = () => layersOf(now.model)[now.layer];
  const nameOf = (model) => (model.scale ? `${model.label} (${model.scale})` : model.label);
  const written = (value, digits) => (value === null || value === undefined ? NONE : value.toFixed(digits).replace("-", "−"));
  const clamped = (value, last) => Math.min(Math.max(value, 0), last);

  // Whether black on a colour has more contrast than white on it (WCAG's relative luminance).
  function isLight(color) {
    const [r, g, b] = color.map((part) => (part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179;
  }

  function rgb(value) {
    const place = ((clamped(value + 1, 2) / 2) * (RGB.length - 1));
    const low = Math.min(Math.floor(place), RGB.length - 2);
    return RGB[low].map((from, i) => Math.round(from + (place - low) * (RGB[low + 1][i] - from)));
  }

  function svgElement(name, attributes, text) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }

  // A matrix as a picture, about so many pixels wide: sharp where it is drawn larger, which printers blur.
  function paint(picture, layer, width) {
    const H = layer.n_head;
    const side = Math.ceil(width / H);
    picture.width = picture.height = side * H;
    if (layer.similarity === null) return;
    const brush = picture.getContext("2d");
    const dead = new Set(layer.dead_heads);
    for (let i = 0; i < H; i++) {
      for (let j = 0; j < H; j++) {
        brush.fillStyle = dead.has(i) || dead.has(j) ? DEAD : `rgb(${rgb(layer.similarity[i][j])})`;
        brush.fillRect(j * side, i * side, side, side);
      }
    }
  }

  // Heatmap: the picture, and over it what stays sharp at any size

  const heatmap = byId("heatmap");
  const canvas = heatmap.querySelector("svg");
  const picture = heatmap.querySelector("canvas");
  let cells = []; // the two outlines of the current cell
  let size = 0; // of a cell, in the drawing's units

  function drawHeatmap() {
    const layer = layerNow();
    const H = layer.n_head;
    const width = clamped(heatmap.clientWidth || 480, 640);
    size = (width - MARGIN) / H;
    canvas.replaceChildren();
    canvas.setAttribute("viewBox", `0 0 ${width} ${width}`);
    paint(picture, layer, 1024);
    picture.hidden = layer.similarity === null;
    picture.style.width = picture.style.height = `${100 * (1 - MARGIN / width)}%`;
    cells = [];
    if (layer.similarity === null) {
      drawReason(layer.reason || "no numbers", width);
      return;
    }
    const dead = new Set(layer.dead_heads);
    const hatches = [];
    for (let i = 0; i < H; i++) {
      for (let j = 0; j < H; j++) {
        const [x, y, value] = [MARGIN + j * size, i * size, layer.similarity[i][j]];
        if (dead.has(i) || dead.has(j)) {
          hatches.push(`M${x} ${y + size}L${x + size} ${y}`);
        } else if (size >= ROOM) {
          const color = rgb(value);
          const place = { x: x + size / 2, y: y + size / 2, "text-anchor": "middle", "dominant-baseline": "central", class: isLight(color) ? "dark" : "light" };
          canvas.append(svgElement("text", place, written(value, 2)));
        }
      }
    }
    canvas.append(svgElement("path", { d: hatches.join(""), class: "hatch" }));
    drawGroups(layer, H);
    let step = 1;
    while (step * size < 18) step *= 2;
    for (let head = 0; head < H; head += step) {
      const middle = (head + 0.5) * size;
      canvas.append(svgElement("text", { x: MARGIN - 7, y: middle, "text-anchor": "end", "dominant-baseline": "central" }, head));
      canvas.append(svgElement("text", { x: MARGIN + middle, y: H * size + 16, "text-anchor": "middle" }, head));
    }
    cells = [0, 1].map(() => canvas.appendChild(svgElement("rect", { class: "cell", width: Math.max(size, 5), height: Math.max(size, 5) })));
  }

  // Heads that read the same keys and values stand in one outline.
  function drawGroups(layer, H) {
    if (layer.n_kv_head >= H || layer.n_kv_head < 2) return;
    const length = (H / layer.n_kv_head) * size;
    for (let group = 0; group < layer.n_kv_head; group++) {
      canvas.append(svgElement("rect", { x: MARGIN + group * length, y: group * length, width: length, height: length, class: "groups" }));
    }
  }

  function drawReason(reason, width) {
    canvas.setAttribute("viewBox", `0 0 ${width} ${width / 3}`);
    const words = reason.split(" ");
    const lines = [""];
    for (const word of words) {
      if ((lines.at(-1) + word).length > width / 9) lines.push("");
      lines[lines.length - 1] += `${word} `;
    }
    lines.forEach((line, i) => canvas.append(svgElement("text", { x: 0, y: 18 + 18 * i, class: "reason" }, line.trim())));
  }

  // What is said of the current cell, the layer, and all layers

  function showCell() {
    const layer = layerNow();
    const [i, j] = [now.row, now.column];
    const value = layer.similarity === null ? null : layer.similarity[i][j];
    byId("value").textContent = written(value, 3);
    byId("pair").textContent = value === null ? "This layer has no numbers." : pairText(layer, i, j, value);
    cells.forEach((cell) => {
      cell.setAttribute("x", MARGIN + j * size);
      cell.setAttribute("y", i * size);
    });
    byId("scale-mark").hidden = value === null;
    byId("scale-mark").style.left = `${50 * ((value ?? 0) + 1)}%`;
  }

  function pairText(layer, i, j, value) {
    if (layer.dead_heads.includes(i) || layer.dead_heads.includes(j)) return `Heads ${i} and ${j} of layer ${layer.key}: ${layer.dead_heads.includes(i) ? i : j} is dead.`;
    if (i === j) return `Head ${i} of layer ${layer.key} with itself.`;
    const angle = Math.round((Math.acos(clamped(value + 1, 2) - 1) * 180) / Math.PI);
    const perGroup = layer.n_head / layer.n_kv_head;
    const isShared = layer.n_kv_head < layer.n_head && Math.floor(i / perGroup) === Math.floor(j / perGroup);
    return `Similarity of heads ${i} and ${j} of layer ${layer.key}, an angle of ${angle}°.${isShared ? " They share a KV head." : ""}`;
  }

  function showLayer() {
    const model = data.models[now.model];
    const layer = layerNow();
    const { circuit } = now;
    byId("layer-name").textContent = layer.key;
    byId("layer").setAttribute("aria-valuetext", `Layer ${layer.key}`);
    byId("state").textContent = `${nameOf(model)}, layer ${layer.key}. ${circuit.toUpperCase()}: ${LOOKS[circuit]}, from ${data.source}`;
    for (const row of document.querySelectorAll("#statistics tbody tr")) {
      ["uncentered", "centered"].forEach((kind, i) => {
        const value = layer[kind][row.dataset.of];
        const digits = Number(row.dataset.digits);
        row.cells[i + 1].textContent = Array.isArray(value) ? value.map((end) => written(end, digits)).join(" – ") : written(value, digits);
        row.cells[i + 1].title = layer[kind].reason || "";
      });
    }
    byId("mean").textContent = written(layer.mean_off_diagonal, 3);
    const most = layer.most_similar;
    byId("most").textContent = most ? `${most.heads[0]} and ${most.heads[1]}, S = ${written(most.similarity, 3)}` : NONE;
    byId("most").disabled = !most;
    byId("dead").textContent = layer.similarity === null ? NONE : layer.dead_heads.join(", ") || "none";
    drawHeatmap();
    drawSpectrum(layer);
    const rank = layer.uncentered.effective_rank;
    byId("trace-dot").hidden = rank === null;
    byId("trace-dot").style.left = `${(100 * now.layer) / Math.max(layersOf(now.model).length - 1, 1)}%`;
    byId("trace-dot").style.top = `${100 * (1 - (rank ?? 0) / model.n_head)}%`;
    for (const frame of document.querySelectorAll(".frame")) {
      frame.classList.toggle("now", Number(frame.dataset.model) === now.model && Number(frame.dataset.layer) === now.layer);
    }
    now.row = clamped(now.row, layer.n_head - 1);
    now.column = clamped(now.column, layer.n_head - 1);
    showCell();
  }

  // The curve above the slider: its points stand where the slider's thumb stops.
  function drawTrace() {
    const model = data.models[now.model];
    const layers = layersOf(now.model);
    byId("trace").setAttribute("viewBox", `0 0 ${Math.max(layers.length - 1, 1)} ${model.n_head}`);
    let isDrawing = false;
    const path = layers.map((layer, x) => {
      const rank = layer.uncentered.effective_rank;
      const command = rank === null ? "" : `${isDrawing ? "L" : "M"}${x} ${model.n_head - rank}`;
      isDrawing = rank !== null;
      return command;
    });
    byId("trace").querySelector("path").setAttribute("d", path.join(""));
  }

  function drawSpectrum(layer) {
    const plot = byId("spectrum");
    const [width, height, left, bottom] = [plot.clientWidth || 360, 160, 30, 18];
    plot.replaceChildren();
    plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const { eigenvalues } = layer.uncentered;
    plot.setAttribute("aria-label", eigenvalues ? `Eigenvalues: ${eigenvalues.map((value) => written(value, 2)).join(", ")}` : "no eigenvalues");
    if (!eigenvalues) return;
    const top = Math.max(eigenvalues[0], 1) * 1.05;
    const step = (width - left) / eigenvalues.length;
    const y = (value) => 4 + (height - bottom - 4) * (1 - value / top);
    eigenvalues.forEach((value, i) => {
      plot.append(svgElement("rect", { x: left + (i + 0.15) * step, y: y(value), width: 0.7 * step, height: y(0) - y(value) }));
    });
    plot.append(svgElement("line", { x1: left, x2: width, y1: y(0), y2: y(0) }));
    plot.append(svgElement("line", { x1: left, x2: width, y1: y(1), y2: y(1), class: "one" }));
    layer.centered.eigenvalues.forEach((value, i) => {
      plot.append(svgElement("circle", { cx: left + (i + 0.5) * step, cy: y(value), r: Math.min(3.4, 0.4 * step) }));
    });
    const marks = eigenvalues[0] > 1.6 ? [0, 1, eigenvalues[0]] : [0, 1];
    for (const mark of marks) plot.append(svgElement("text", { x: left - 5, y: y(mark) + 4, "text-anchor": "end" }, mark % 1 ? written(mark, 1) : mark));
    let every = 1;
    while (every * step < 20) every *= 2;
    for (let i = 0; i < eigenvalues.length; i += every) {
      plot.append(svgElement("text", { x: left + (i + 0.5) * step, y: height - 3, "text-anchor": "middle" }, i + 1));
    }
  }

  // A small picture of every layer of every model.
  function drawFilms() {
    const films = data.models.map((model, m) => {
      const film = document.createElement("div");
      film.className = "film";
      const title = document.createElement("p");
      title.textContent = `${nameOf(model)}, ${now.circuit.toUpperCase()}`;
      const frames = document.createElement("div");
      frames.className = "frames";
      frames.setAttribute("aria-hidden", "true"); // the slider reaches the same
      frames.append(...layersOf(m).map((layer, place) => frameOf(layer, m, place)));
      film.append(title, frames);
      return film;
    });
    byId("films").replaceChildren(...films);
    layOutFilms();
  }

  // Rows of equal length: as many frames in one as fit, and no short last row.
  function layOutFilms() {
    const most = Math.max(...data.models.map((_, m) => layersOf(m).length));
    const fitting = Math.max(Math.floor(byId("films").clientWidth / FRAME), 1);
    byId("films").style.setProperty("--columns", Math.max(Math.ceil(most / Math.ceil(most / fitting)), Math.min(fitting, 12)));
  }

  function frameOf(layer, model, place) {
    const frame = document.createElement("div");
    frame.className = "frame";
    Object.assign(frame.dataset, { model, layer: place });
    const small = document.createElement("canvas");
    paint(small, layer, 96);
    const number = document.createElement("b");
    number.textContent = layer.key;
    const rank = document.createElement("span");
    rank.textContent = written(layer.uncentered.effective_rank, 1);
    frame.append(small, number, rank);
    return frame;
  }

  // Choices

  function choose(change) {
    const before = { ...now };
    Object.assign(now, change);
    const layers = layersOf(now.model);
    if (now.model !== before.model) {
      // The same layer where both have it, else the same depth.
      const same = layers.findIndex((layer) => layer.key === data.models[before.model].circuits[now.circuit].layers[before.layer].key);
      if (change.layer === undefined) now.layer = same >= 0 ? same : layers.length - 1;
    }
    now.layer = clamped(now.layer, layers.length - 1);
    byId("model").value = now.model;
    byId("layer").max = layers.length - 1;
    byId("layer").value = now.layer;
    byId("layer").disabled = layers.length === 1;
    document.querySelector(`#circuits input[value="${now.circuit}"]`).checked = true;
    if (now.circuit !== before.circuit) drawFilms();
    drawTrace();
    showLayer();
  }

  function moveTo(row, column) {
    const last = layerNow().n_head - 1;
    [now.row, now.column] = [clamped(row, last), clamped(column, last)];
    showCell();
  }

  function goToMostSimilar() {
    const most = layerNow().most_similar;
    if (most) moveTo(...most.heads);
  }

  heatmap.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const last = layerNow().n_head - 1;
    const moves = {
      ArrowUp: () => moveTo(now.row - 1, now.column),
      ArrowDown: () => moveTo(now.row + 1, now.column),
      ArrowLeft: () => moveTo(now.row, now.column - 1),
      ArrowRight: () => moveTo(now.row, now.column + 1),
      Home: () => moveTo(now.row, 0),
      End: () => moveTo(now.row, last),
      PageUp: () => choose({ layer: now.layer - 1 }),
      PageDown: () => choose({ layer: now.layer + 1 }),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  });

  function pointAt(event) {
    const box = canvas.getBoundingClientRect();
    const scale = canvas.viewBox.baseVal.width / box.width;
    const column = Math.floor(((event.clientX - box.left) * scale - MARGIN) / size);
    const row = Math.floor(((event.clientY - box.top) * scale) / size);
    const H = layerNow().n_head;
    if (cells.length && row >= 0 && column >= 0 && row < H && column < H && (row !== now.row || column !== now.column)) moveTo(row, column);
  }
  heatmap.addEventListener("pointermove", pointAt);
  heatmap.addEventListener("pointerdown", pointAt);
  byId("most").addEventListener("click", goToMostSimilar);
  byId("layer").addEventListener("input", (event) => choose({ layer: Number(event.target.value) }));
  byId("model").addEventListener("change", (event) => choose({ model: Number(event.target.value) }));
  byId("films").addEventListener("click", (event) => {
    const frame = event.target.closest(".frame");
    if (frame) choose({ model: Number(frame.dataset.model), layer: Number(frame.dataset.layer) });
  });
  document.querySelector(".controls").addEventListener("submit", (event) => event.preventDefault());

  data.models.forEach((model, i) => byId("model").add(new Option(nameOf(model), i)));
  byId("circuits").append(
    ...data.circuits.map((circuit) => {
      const label = document.createElement("label");
      const input = document.createElement("input");
      Object.assign(input, { type: "radio", name: "circuit", value: circuit });
      input.addEventListener("change", () => choose({ circuit }));
      label.append(input, `${circuit.toUpperCase()}: ${LOOKS[circuit]}`);
      return label;
    }),
  );
  byId("scale-bar").style.background = `linear-gradient(to right, ${STOPS.join(", ")})`;
  const hasIntervals = data.models.some((model) => Object.values(model.circuits).some(({ layers }) => layers.some((layer) => layer.uncentered.interval)));
  document.querySelector('[data-of="interval"]').hidden = !hasIntervals; // from weights there are none
  byId("explorer").hidden = false;
  drawFilms();
  choose({ layer: Math.floor(layersOf(0).length / 2) });
  goToMostSimilar();
  // A box that has all its contents in sight is no stop on the way of the Tab key.
  function setStops() {
    for (const box of document.querySelectorAll(".scroll")) {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    }
  }
  setStops();

  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    drawHeatmap();
    showCell();
    drawSpectrum(layerNow());
    layOutFilms();
    setStops();
  });
})();
