"use strict";
// Asks for the state while the page is visible, and draws it. Everything that came from the server
// is put in as text, never as markup.
(() => {
  const INTERVAL_MS = 500;
  const RETRY_MS = 2000;
  const ROWS = 60;
  const FREE = 0;
  const CACHED = 1;
  const HELD = 2;
  const STATUS = {
    serving: ["good", ""],
    draining: ["warn", "The server is shutting down: requests in flight are being finished."],
    loading: ["warn", "The model is loading."],
    busy: ["warn", "The engine is in a long step, or its process is stopped."],
    asleep: ["warn", "The server is asleep: POST /wake_up wakes it."],
    reloading: ["warn", "The engine is waking up or loading other weights."],
    restarting: ["bad", "The engine is restarting; its requests continue afterwards."],
    gone: ["bad", "The engine has failed for good: restart the server."],
    paused: ["warn", ""],
    unreachable: ["bad", "The server does not answer. Retrying."],
  };
  const $ = (id) => document.getElementById(id);
  const count = new Intl.NumberFormat("en");
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

  let state = null; // the newest answer with a snapshot in it
  let engine = Number(new URLSearchParams(location.search).get("engine")) || 0; // of several
  let paused = false;
  let timer = 0;
  let asking = false;
  let filter = "all";
  let showsAll = false;
  let pinned = null; // id of the request whose blocks are picked out
  let pointed = null; // the same, while the pointer is over its row
  let chosenStep = null; // place from the end, of the step that is told
  let key = remembered();

  // ---------------------------------------------------------------- asking

  function remembered() {
    try { return sessionStorage.getItem("quire-key") || ""; } catch { return ""; }
  }

  function remember(value) {
    key = value;
    try { sessionStorage.setItem("quire-key", value); } catch { /* kept for this page alone */ }
  }

  async function ask() {
    clearTimeout(timer);
    if (asking || paused || document.hidden) return;
    asking = true;
    const asked = engine;
    let next = INTERVAL_MS;
    try {
      const headers = key ? { authorization: `Bearer ${key}` } : {};
      const answer = await fetch(`dashboard/state?engine=${asked}`, { headers, cache: "no-store" });
      const news = answer.ok ? await answer.json() : null;
      if (asked !== engine || paused) {
        next = 0; // another one has been chosen meanwhile, or nothing is to change
      } else if (answer.status === 401 || answer.status === 403) {
        askForKey(key ? (answer.status === 401 ? "Unknown key." : "This key does not have the scope admin.") : "");
        next = 0;
      } else if (answer.status === 400 && engine) {
        look(0); // there are not so many engines
        next = 0;
      } else if (!answer.ok) {
        tellStatus("unreachable");
        next = RETRY_MS;
      } else {
        $("key-form").hidden = true;
        take(news);
      }
    } catch {
      tellStatus("unreachable");
      next = RETRY_MS;
    }
    asking = false;
    if (asked !== engine) ask();
    else if (next && !paused && !document.hidden) timer = setTimeout(ask, next);
  }

  // At another engine, from now on: nothing of the one before stays.
  function look(number) {
    engine = number;
    state = null;
    pinned = pointed = chosenStep = null;
    document.body.classList.add("empty");
    history.replaceState(null, "", number ? `?engine=${number}` : location.pathname);
    pause(false);
  }

  function pause(wanted) {
    paused = wanted;
    $("pause").setAttribute("aria-pressed", String(paused));
    put($("pause"), paused ? "Resume" : "Pause");
    if (paused) tellStatus("paused"); else ask();
  }

  function askForKey(problem) {
    const form = $("key-form");
    if (form.hidden) { form.hidden = false; $("key").focus(); }
    $("key-problem").textContent = problem;
    tellStatus("locked", "warn");
  }

  function take(news) {
    tellStatus(news.status);
    $("version").textContent = `Quire ${news.version}.`;
    offerEngines(news.engines || 1);
    const model = news.model;
    if (model) {
      const size = model.num_parameters ? `${compact.format(model.num_parameters)} parameters, ` : "";
      $("model").textContent = `${model.name} — ${model.architecture}, ${size}${model.dtype} on ${model.device}`;
      document.title = `Quire: ${model.name}`;
    }
    if (news.totals) {
      state = news;
      document.body.classList.remove("empty");
      draw();
    }
  }

  function offerEngines(count) {
    const choice = $("engine");
    choice.hidden = count < 2;
    for (let i = choice.options.length; i < count; i++) choice.add(new Option(`engine ${i}`, i));
    choice.value = String(engine);
  }

  function tellStatus(status, look) {
    const [kind, notice] = STATUS[status] || [look, ""];
    const pill = $("status");
    if (pill.textContent !== status) pill.textContent = status;
    pill.className = `status ${kind}`;
    if ($("notice").textContent !== notice) $("notice").textContent = notice;
    $("notice").hidden = !notice;
  }

  // ---------------------------------------------------------------- drawing

  function draw() {
    if (!state) return;
    drawTiles();
    drawRate();
    drawBlocks();
    drawSteps();
    drawRequests();
  }

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  }

  function hueOf(id) {
    let hash = 2166136261;
    for (const char of id) hash = Math.imul(hash ^ char.codePointAt(0), 16777619) >>> 0;
    return Math.round((hash * 137.508) % 360);
  }

  function colourOf(id) {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    return `hsl(${hueOf(id)} 62% ${dark ? 58 : 46}%)`;
  }

  // A canvas of this height in CSS pixels, cleared, sharp on any screen.
  function prepare(canvas, height) {
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth;
    canvas.style.height = `${height}px`;
    const w = Math.round(width * ratio);
    const h = Math.round(height * ratio);
    if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    return [pen, width];
  }

  // Per second, over the last whole seconds.
  function rates(over) {
    const recent = state.seconds.filter(([ago]) => ago >= 1 && ago <= over);
    const time = Math.max(1, Math.min(over, Math.floor(state.watched_s)));
    const sum = (at) => recent.reduce((total, second) => total + second[at], 0) / time;
    return { steps: sum(1), prompt: sum(2), told: sum(3) };
  }

  function drawTiles() {
    const { totals, blocks, steps } = state;
    const rate = rates(5);
    const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}` : "–");
    const durations = steps.map((step) => step[1]).sort((a, b) => a - b);
    const middle = durations[durations.length >> 1];
    const step = middle === undefined ? "–" : middle < 10 ? middle.toFixed(1) : Math.round(middle);
    const restarts = `${totals.restarts} engine restart${totals.restarts === 1 ? "" : "s"}`;
    const tiles = [
      ["Output", count.format(Math.round(rate.told)), " tokens/s", `${count.format(Math.round(rate.steps))} steps/s`],
      ["Prompts", count.format(Math.round(rate.prompt)), " tokens/s", "computed"],
      ["Running", count.format(totals.running), ` of ${count.format(totals.max_running)}`, "sequences"],
      ["Waiting", count.format(totals.waiting), "", "in the queue"],
      ["KV blocks", percent(blocks.held, blocks.total), "% in use", `${count.format(blocks.held)} of ${count.format(blocks.total)}`],
      ["Prefix cache", percent(totals.prefix_hits, totals.prefix_queries), "% hit", `${compact.format(totals.prefix_hits)} of ${compact.format(totals.prefix_queries)}`],
      ["Step", step, step === "–" ? "" : " ms", "median, recent steps"],
      ["Preempted", count.format(totals.preemptions), "", totals.restarts ? restarts : "since start"],
    ];
    if (totals.draft_tokens) {
      tiles.push(["Drafts", percent(totals.accepted_tokens, totals.draft_tokens), "% accepted", `${compact.format(totals.accepted_tokens)} tokens`]);
    }
    const into = $("tiles");
    while (into.children.length > tiles.length) into.lastChild.remove();
    tiles.forEach(([title, value, unit, note], place) => {
      let tile = into.children[place];
      if (!tile) {
        tile = make("div", "tile");
        const number = make("b");
        number.append("", make("i"));
        tile.append(make("small"), number, make("small"));
        into.append(tile);
      }
      const [head, number, foot] = tile.children;
      put(head, title);
      put(number.firstChild, String(value));
      put(number.lastChild, unit);
      put(foot, note);
    });
  }

  function drawRate() {
    const canvas = $("rate");
    const lane = 84;
    const [pen, width] = prepare(canvas, 2 * lane + 12);
    const span = Math.max(20, Math.min(120, Math.floor(state.watched_s)));
    const lanes = [["output", 3, "decode"], ["prompts", 2, "prefill"]];
    lanes.forEach(([title, at, name], place) => {
      const values = new Array(span).fill(0);
      for (const second of state.seconds) {
        if (second[0] >= 1 && second[0] <= span) values[span - second[0]] = second[at];
      }
      const top = place * (lane + 12);
      const most = Math.max(1, ...values);
      const room = lane - 18;
      const x = (index) => (index * width) / (span - 1);
      const y = (value) => top + lane - (value / most) * room;
      pen.beginPath();
      pen.moveTo(0, top + lane);
      values.forEach((value, index) => pen.lineTo(x(index), y(value)));
      pen.lineTo(width, top + lane);
      pen.closePath();
      pen.globalAlpha = 0.18;
      pen.fillStyle = colour(name);
      pen.fill();
      pen.globalAlpha = 1;
      pen.beginPath();
      values.forEach((value, index) => (index ? pen.lineTo(x(index), y(value)) : pen.moveTo(x(index), y(value))));
      pen.lineWidth = 1.5;
      pen.strokeStyle = colour(name);
      pen.stroke();
      label(pen, title, 0, top + 11);
      label(pen, `peak ${count.format(Math.max(0, ...values))}`, width, top + 11, "right");
    });
    const rate = rates(5);
    canvas.setAttribute("aria-label", `Throughput: ${Math.round(rate.told)} output tokens and ${Math.round(rate.prompt)} prompt tokens a second`);
  }

  function label(pen, text, x, y, align = "left") {
    pen.fillStyle = colour("quiet");
    pen.textAlign = align;
    pen.fillText(text, x, y);
  }

  const grid = { columns: 1, size: 8 }; // of the map, as it was last drawn

  function drawBlocks() {
    if (!state) return;
    const canvas = $("blocks");
    const { blocks, requests } = state;
    const cells = blocks.owners.length;
    const width = canvas.clientWidth;
    let size = 18;
    while (size > 4 && Math.ceil(cells / Math.floor(width / size)) * size > 172) size -= 1;
    grid.size = size;
    grid.columns = Math.max(1, Math.floor(width / size));
    const [pen] = prepare(canvas, Math.max(1, Math.ceil(cells / grid.columns)) * size);
    const gap = size > 6 ? 2 : 1;
    const free = colour("free");
    const cached = colour("cached");
    const panel = colour("panel");
    const colours = new Map();
    const picked = pointed || pinned;
    blocks.owners.forEach((owner, cell) => {
      const x = (cell % grid.columns) * size;
      const y = Math.floor(cell / grid.columns) * size;
      const side = size - gap;
      if (owner < HELD) {
        pen.fillStyle = owner === CACHED ? cached : free;
        pen.globalAlpha = picked ? 0.4 : 1;
        pen.fillRect(x, y, side, side);
      } else {
        const request = requests[owner - HELD];
        const id = request ? request.id : "";
        if (!colours.has(owner)) colours.set(owner, colourOf(id));
        pen.globalAlpha = picked && picked !== id ? 0.2 : 1;
        pen.fillStyle = free;
        if (blocks.num_held[cell] < blocks.per_cell) pen.fillRect(x, y, side, side);
        // Of several blocks in a cell, the part that is held fills it from below.
        const part = Math.max(1, Math.round((side * blocks.num_held[cell]) / blocks.per_cell));
        pen.fillStyle = colours.get(owner);
        pen.fillRect(x, y + side - part, side, part);
        if (blocks.references[cell] > 1) {
          const dot = Math.max(2, Math.round(side / 3));
          pen.fillStyle = panel;
          pen.fillRect(x + (side - dot) / 2, y + (side - dot) / 2, dot, dot);
        }
      }
    });
    pen.globalAlpha = 1;
    const told = `${count.format(blocks.held)} in use (${count.format(blocks.shared)} shared), ${count.format(blocks.cached)} with a cached prefix, of ${count.format(blocks.total)} blocks of ${blocks.block_size} tokens`;
    put($("blocks-summary"), blocks.per_cell > 1 ? `${told}; a cell is ${blocks.per_cell} blocks` : told);
    canvas.setAttribute("aria-label", `Map of the KV blocks: ${told}`);
  }

  function tellBlock(x, y) {
    if (!state) return "";
    const { blocks, requests } = state;
    const column = Math.floor(x / grid.size);
    const cell = Math.floor(y / grid.size) * grid.columns + column;
    if (column >= grid.columns || cell < 0 || cell >= blocks.owners.length) return "";
    const first = cell * blocks.per_cell;
    const last = Math.min(blocks.total, first + blocks.per_cell) - 1;
    const name = first === last ? `Block ${first}` : `Blocks ${first} to ${last}`;
    const owner = blocks.owners[cell];
    if (owner === FREE) return `${name}: free`;
    if (owner === CACHED) return `${name}: free, with a cached prefix`;
    const request = requests[owner - HELD];
    const sharing = blocks.references[cell];
    return `${name}: used by ${request ? request.id : "a request"}${sharing > 1 ? `, shared by ${sharing}` : ""}`;
  }

  // ---------------------------------------------------------------- steps

  const bars = { left: 0, width: 1 };

  function drawSteps() {
    const canvas = $("steps");
    const lanes = [
      { title: "decoding rows, accepted drafts", parts: [[2, "decode"], [6, "accepted"]], unit: "" },
      { title: "prompt tokens", parts: [[4, "prefill"]], unit: "" },
      { title: "milliseconds", parts: [[1, "duration"]], unit: " ms" },
    ];
    const lane = 62;
    const [pen, width] = prepare(canvas, lanes.length * lane);
    const steps = state.steps;
    const places = 120;
    bars.width = width / places;
    bars.left = width - steps.length * bars.width;
    lanes.forEach(({ title, parts, unit }, row) => {
      const bottom = (row + 1) * lane - 4;
      const room = lane - 22;
      const most = Math.max(0, ...steps.map((step) => parts.reduce((sum, [at]) => sum + step[at], 0)));
      steps.forEach((step, index) => {
        let y = bottom;
        for (const [at, name] of parts) {
          if (!step[at] || !most) continue;
          const height = Math.max(1, (step[at] / most) * room);
          pen.fillStyle = colour(step[8] && row === 0 ? "preempted" : name);
          pen.globalAlpha = chosenStep === null || steps.length - 1 - chosenStep === index ? 1 : 0.45;
          pen.fillRect(bars.left + index * bars.width, y - height, Math.max(1, bars.width - 1), height);
          y -= height;
        }
      });
      pen.globalAlpha = 1;
      pen.fillStyle = colour("line");
      pen.fillRect(0, bottom, width, 1);
      label(pen, title, 0, bottom - room - 4);
      label(pen, `peak ${most < 10 && unit ? most.toFixed(1) : count.format(Math.round(most))}${unit}`, width, bottom - room - 4, "right");
    });
    put($("step-told"), chosenStep === null ? "" : tellStep(chosenStep));
  }

  function tellStep(fromEnd) {
    const step = state && state.steps[state.steps.length - 1 - fromEnd];
    if (!step) return "";
    const [ago, ms, decodes, prompts, promptTokens, drafts, accepted, passes, preempted, told] = step;
    const parts = [`${decodes} decode`];
    if (prompts) parts.push(`${prompts} prompt${prompts > 1 ? "s" : ""} of ${count.format(promptTokens)} tokens`);
    if (drafts) parts.push(`${accepted} of ${drafts} drafts accepted`);
    if (passes > 1) parts.push(`${passes} passes`);
    if (preempted) parts.push(`${preempted} preempted`);
    return `Step ${fromEnd ? `${fromEnd} before the last` : "last"}, ${duration(ago)} ago: ${ms.toFixed(1)} ms, ${parts.join(", ")}, ${told} output token${told === 1 ? "" : "s"}`;
  }

  // ---------------------------------------------------------------- requests

  const rows = new Map(); // by id

  function chosen() {
    const ended = (request) => request.ended_ago_ms !== null;
    const { requests } = state;
    if (filter === "live") return requests.filter((request) => !ended(request));
    if (filter === "ended") return requests.filter(ended);
    if (filter === "slow") {
      return requests.filter((request) => request.why).sort((a, b) => b.total_ms - a.total_ms);
    }
    return requests;
  }

  function drawRequests() {
    const wanted = chosen();
    const shown = showsAll ? wanted : wanted.slice(0, ROWS);
    const longest = Math.max(1, ...shown.map((request) => request.total_ms));
    const body = $("requests");
    const seen = new Set();
    shown.forEach((request, place) => {
      // Ids are cut: two that end alike are told apart by their order.
      let name = request.id;
      while (seen.has(name)) name += "'";
      seen.add(name);
      let row = rows.get(name);
      if (!row) rows.set(name, (row = makeRow()));
      fillRow(row, request, longest);
      if (body.children[place] !== row) body.insertBefore(row, body.children[place] || null);
    });
    for (const [name, row] of rows) {
      if (!seen.has(name)) { row.remove(); rows.delete(name); }
    }
    const { running, waiting } = state.totals;
    put($("requests-summary"), `${running} running, ${waiting} waiting, ${state.requests.filter((request) => request.ended_ago_ms !== null).length} recently finished`);
    const none = !state.requests.length;
    $("none").hidden = !none;
    if (none) {
      put($("try"), `curl ${location.origin}/v1/completions -H 'Content-Type: application/json' -d '{"model": "${state.model.name}", "prompt": "Once upon a time", "max_tokens": 200}'`);
    }
    const more = $("more");
    more.hidden = wanted.length <= ROWS;
    put(more, showsAll ? `Show the first ${ROWS}` : `Show all ${wanted.length}`);
  }

  function makeRow() {
    const row = make("tr");
    row.setAttribute("role", "row");
    for (const name of ["id", "", "number", "number", "number", "number", "", "why"]) {
      const cell = make("td", name);
      cell.setAttribute("role", "cell");
      row.append(cell);
    }
    const button = make("button");
    button.type = "button";
    button.title = "Highlight its blocks";
    button.append(make("i"), make("span"));
    row.children[0].append(button, make("small"));
    row.children[2].append("", make("small"));
    row.children[3].append("", make("small"));
    const life = make("div", "life");
    life.setAttribute("role", "img");
    row.children[6].append(life);
    button.addEventListener("click", () => {
      pinned = pinned === row.dataset.id ? null : row.dataset.id;
      draw();
    });
    row.addEventListener("pointerenter", () => { pointed = row.dataset.id; drawBlocks(); });
    row.addEventListener("pointerleave", () => { pointed = null; drawBlocks(); });
    return row;
  }

  function fillRow(row, request, longest) {
    const ended = request.ended_ago_ms !== null;
    row.dataset.id = request.id;
    row.classList.toggle("ended", ended);
    const [id, status, prompt, output, blocks, time, life, why] = row.children;
    const button = id.firstChild;
    button.setAttribute("aria-pressed", String(pinned === request.id));
    button.firstChild.style.background = colourOf(request.id);
    put(button.lastChild, request.id);
    put(id.lastChild, [request.tenant, request.background ? "batch" : ""].filter(Boolean).join(", "));
    put(status, request.status === "failed" ? request.error || "failed" : request.status);
    status.className = request.status === "failed" ? "failed" : request.status === "preempted" ? "preempt" : "";
    put(prompt.firstChild, count.format(request.prompt_tokens));
    put(prompt.lastChild, request.cached_tokens ? ` (${count.format(request.cached_tokens)} cached)` : "");
    put(output.firstChild, count.format(request.output_tokens));
    put(output.lastChild, ended ? "" : ` of ${count.format(request.max_output_tokens)}`);
    put(blocks, request.blocks ? count.format(request.blocks) : "");
    put(time, duration(request.total_ms));
    put(why, request.why);
    fillLife(life.firstChild, request, longest);
  }

  function fillLife(bar, request, longest) {
    bar.style.width = `${Math.max(1, (100 * request.total_ms) / longest)}%`;
    const { phases } = request;
    while (bar.children.length > phases.length) bar.lastChild.remove();
    phases.forEach(([kind, ms], place) => {
      const part = bar.children[place] || bar.appendChild(make("span"));
      part.className = kind;
      part.style.flexGrow = String(Math.max(ms, 0.01));
    });
    const told = phases.map(([kind, ms]) => `${kind} ${duration(ms)}`).join(", ");
    bar.setAttribute("aria-label", told);
    bar.dataset.tip = phases.map(([kind, ms]) => `${kind} ${duration(ms)}`).join("\n");
  }

  function duration(ms) {
    if (ms < 1000) return `${Math.round(ms)} ms`;
    if (ms < 100000) return `${(ms / 1000).toFixed(1)} s`;
    return `${Math.floor(ms / 60000)} min ${Math.round((ms % 60000) / 1000)} s`;
  }

  // ---------------------------------------------------------------- small things

  function make(tag, name = "") {
    const element = document.createElement(tag);
    if (name) element.className = name;
    return element;
  }

  function put(node, text) {
    if (node.textContent !== text) node.textContent = text;
  }

  function tip(event, text) {
    const box = $("tip");
    box.hidden = !text;
    if (!text) return;
    put(box, text);
    box.style.left = `${Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8)}px`;
    box.style.top = `${Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 8)}px`;
  }

  function choose(place) {
    const last = state ? state.steps.length - 1 : -1;
    chosenStep = place === null || last < 0 ? null : Math.max(0, Math.min(last, place));
    if (state) drawSteps();
  }

  function stepAt(event) {
    if (!state) return null;
    const index = Math.floor((event.offsetX - bars.left) / bars.width);
    return index < 0 || index >= state.steps.length ? null : state.steps.length - 1 - index;
  }

  $("blocks").addEventListener("pointermove", (event) => tip(event, tellBlock(event.offsetX, event.offsetY)));
  $("steps").addEventListener("pointermove", (event) => choose(stepAt(event)));
  $("steps").addEventListener("pointerleave", () => choose(null));
  $("steps").addEventListener("blur", () => choose(null));
  $("steps").addEventListener("keydown", (event) => {
    const move = { ArrowLeft: 1, ArrowRight: -1 }[event.key];
    if (move) { event.preventDefault(); choose((chosenStep === null ? -1 : chosenStep) + move); }
    if (event.key === "Escape") choose(null);
  });
  $("requests").addEventListener("pointermove", (event) => {
    const bar = event.target.closest(".life");
    tip(event, bar ? bar.dataset.tip : "");
  });
  for (const id of ["blocks", "requests"]) $(id).addEventListener("pointerleave", (event) => tip(event, ""));
  $("filters").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    filter = button.dataset.filter;
    for (const other of $("filters").children) other.setAttribute("aria-pressed", String(other === button));
    if (state) drawRequests();
  });
  $("more").addEventListener("click", () => { showsAll = !showsAll; drawRequests(); });
  $("engine").addEventListener("change", () => look(Number($("engine").value)));
  $("pause").addEventListener("click", () => pause(!paused));
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    remember($("key").value.trim());
    ask();
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
  addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  ask();
})();
