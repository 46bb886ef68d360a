// The report page: expands the plans and runs of a record (page_data.py describes them), and draws
// them. `expand` needs no document, so tests run it outside of a browser. Texts of the record reach
// the document by `textContent` only.
"use strict";

// Expansion: plans × runs → rectangles (buffers from begin to end), rows, links, slices.

const ROLES = ["constant", "input", "output", "copy", "evicted", "scratch", "other"];
const RELEASED = ["until the end", "freed by the plan", "released outside of plans", "moved",
  "evicted", "end of the program", "the run failed"];
const [KEPT, FREED, DROPPED, MOVED, EVICTED, SCRATCH_END, STOPPED] = RELEASED.keys();

function roleOf(origin) {
  if (/^(constant|parameter|state)/.test(origin)) return 0;
  if (origin.startsWith("input ")) return 1;
  return origin.startsWith("output ") ? 2 : 6;
}

function expand(run) {
  const { texts, plans, kinds, spaces } = run, T = (i) => (i < 0 ? "" : texts[i]);
  const out = {
    run, T, spaces: spaces.map((s) => ({
      name: s[0], banks: s[1], base: s[2], limit: s[3], peak: 0, least: 0, used: 0,
      live: new Map(), samples: { t: [], used: [], hole: [], holes: [] } })),
    // Rectangles, by column.
    space: [], address: [], size: [], begin: [], end: [], origin: [], desc: [], role: [],
    released: [], why: [], first: [],
    rows: [], marks: [], proofs: new Map(), links: new Map(), programs: new Map(),
    slices: { track: [], begin: [], end: [], name: [], t: [] }, tracks: ["programs"],
    runs: { t: [], plan: [] }, clock: [], groups: [],
    counts: { allocations: 0, copies: 0, nbytes: 0, seconds: 0, programSeconds: 0, programs: 0,
      runs: 0, reads: 0, readNbytes: 0, events: 0 },
  };
  const total = run.events.reduce((n, [times, part]) => n + times * part.reduce((m, id) =>
    m + (kinds[id][0] === 2 ? plans[kinds[id][1]].steps.length : 1), 0), 0);
  const { counts } = out, trackOf = new Map([["programs", 0]]), roles = plans.map(rolesIn);
  let t = 0, clock = 0, times = 1, isFirst = true, nextSample = 0;

  function beginRectangle(o, role, why, isNew) {
    out.space.push(o.space); out.address.push(o.address); out.size.push(o.size);
    out.begin.push(t); out.end.push(-1); out.origin.push(o.origin); out.desc.push(o.desc);
    out.role.push(role); out.released.push(KEPT); out.why.push(why); out.first.push(isNew ? 1 : 0);
    o.rect = out.space.length - 1;
  }
  function endRectangle(o, how) {
    if (o.rect < 0) return;
    out.end[o.rect] = t; out.released[o.rect] = how;
    if (o.row && how !== MOVED) { o.row.end = t; o.row.released = how; }
  }
  function put(o, role, why, isNew) {
    const space = out.spaces[o.space], there = space.live.get(o.address);
    if (there) remove(there, DROPPED);
    space.live.set(o.address, o);
    space.used += o.size;
    if (space.used > space.peak) space.peak = space.used;
    beginRectangle(o, role, why, isNew);
    return o;
  }
  function remove(o, how) {
    const space = out.spaces[o.space];
    if (space.live.get(o.address) === o) { space.live.delete(o.address); space.used -= o.size; }
    endRectangle(o, how);
  }
  function made(space, address, size, origin, desc) {
    return { space, address, size, origin, desc, rect: -1, row: null, maker: -1, via: null };
  }
  function allocated(o, role, why) {
    counts.allocations++;
    put(o, role, why, true);
    if (isFirst) o.row = row({ kind: "allocation", name: o.origin, nbytes: o.size * out.spaces[o.space].banks,
      address: o.address, space: o.space, seconds: 0, reason: why, desc: o.desc });
  }
  function row(values) {
    const one = { begin: t, end: t + 1, times, released: KEPT, proof: 0, ...values };
    if (one.kind === "allocation") one.end = -1;
    out.rows.push(one);
    return one;
  }
  function slice(track, seconds, name) {
    let number = trackOf.get(track);
    if (number === undefined) { trackOf.set(track, number = out.tracks.length); out.tracks.push(track); }
    const s = out.slices;
    s.track.push(number); s.begin.push(clock); s.end.push(clock + seconds); s.name.push(name); s.t.push(t);
    clock += seconds;
  }
  function count(nbytes, seconds) {
    counts.copies++; counts.nbytes += nbytes; counts.seconds += seconds;
  }
  function prove(step, kind, nbytes) {
    const key = step, known = out.proofs.get(key);
    if (known) known.times += 1;
    else out.proofs.set(key, { step, kind, nbytes, t, times: 1 });
  }
  function sample() {
    nextSample = t + total / 600;
    for (const space of out.spaces) {
      const ends = Float64Array.from(space.live.keys()).sort();
      let at = space.base, hole = 0, holes = 0;
      for (const address of ends) {
        if (address > at) { holes++; hole = Math.max(hole, address - at); }
        at = Math.max(at, address + space.live.get(address).size);
      }
      if (space.limit > at) { holes++; hole = Math.max(hole, space.limit - at); }
      const s = space.samples;
      s.t.push(t); s.used.push(space.used); s.hole.push(hole); s.holes.push(holes);
      nextSample += ends.length * total / 3e6;
    }
  }

  function step(plan, s, numbers, role) {
    if (s[0] === 0) {
      const b = s[1], o = made(b[1], b[2], b[3], b[5], b[4]);
      numbers.set(b[0], o);
      if (b[2] >= 0) allocated(o, role.get(b[0]) ?? roleOf(T(b[5])), -1);
    } else if (s[0] === 1) {
      const o = numbers.get(s[1]);
      if (o && o.rect >= 0) remove(o, o.leaves ? EVICTED : FREED);
      numbers.delete(s[1]);
    } else if (s[0] === 2) copy(s, numbers);
    else if (s[0] === 3) relocate(s, numbers);
    else execute(plan, s, numbers);
  }
  function copy(s, numbers) {
    const [, kindText, from, to, sourceDesc, targetDesc, nbytes, seconds, reason, proof, advice] = s;
    const source = numbers.get(from), target = numbers.get(to), kind = T(kindText);
    count(nbytes, seconds);
    if (isFirst) row({ kind, name: source ? source.origin : -1, nbytes, seconds, reason, proof,
      address: target ? target.address : -1, space: target ? target.space : -1,
      fromDesc: sourceDesc, desc: targetDesc });
    if (target) {
      if (target.rect >= 0 && kind !== "copy") out.role[target.rect] = kind === "evict" ? 4 : 3;
      if (target.rect >= 0) out.why[target.rect] = reason;
      target.maker = source ? source.maker : -1;
      target.via = { sourceDesc, nbytes, seconds, advice, origin: source ? source.origin : -1 };
    }
    if (source && kind === "evict") source.leaves = true;
    if (source && target && (kind !== "copy") && source.rect >= 0) {
      out.marks.push({ t, kind, space: source.space, a0: source.address, a1: target.address,
        to: target.space, size: source.size });
    }
    if (proof) prove(s, kind, nbytes);
    const names = [source, target].map((o) => (o ? out.spaces[o.space].name : "host"));
    slice(names.join(" → "), seconds, kindText);
  }
  function relocate(s, numbers) {
    const [, space, targets, stage, nbytes, seconds, reason, proof] = s;
    const kind = stage < 0 ? "move" : "bounce";
    const moved = targets.map(([number, address, own]) => {
      const o = numbers.get(number);
      if (!o) return null;
      remove(o, MOVED);
      return [o, address, own, o.address];
    });
    for (const one of moved) {
      if (!one) continue;
      const [o, address, own, before] = one, role = o.rect < 0 ? 6 : out.role[o.rect];
      const part = nbytes ? seconds * own / nbytes : seconds / targets.length;
      o.address = address;
      put(o, role, reason, false);
      count(own, part);
      if (isFirst) row({ kind, name: o.origin, nbytes: own, seconds: part, reason, proof, address,
        space, from: before, desc: o.desc });
      out.marks.push({ t, kind, space, a0: before, a1: address, to: space, size: o.size });
    }
    if (proof || kind === "bounce" || isFirst) prove(s, kind, nbytes);
    slice(stage < 0 ? `${out.spaces[space].name} → ${out.spaces[space].name}`
      : `${out.spaces[space].name} → ${out.spaces[stage].name} → ${out.spaces[space].name}`,
    seconds, reason);
  }
  function execute(plan, s, numbers) {
    const [, number, inputs, inDescs, outputs, outDescs, scratch] = s, work = plan.works[number];
    const [name, , seconds, inNames, outNames] = work, needed = out.spaces.map(() => 0);
    const seen = new Set();
    counts.programs++; counts.programSeconds += seconds;
    const program = out.programs.get(name) ?? { name, runs: 0, seconds: 0 };
    program.runs++; program.seconds += seconds;
    out.programs.set(name, program);
    const need = (o) => {
      if (o && o.rect >= 0 && !seen.has(o)) { seen.add(o); needed[o.space] += o.size; }
    };
    inputs.forEach((buffer, i) => {
      const o = numbers.get(buffer);
      need(o);
      if (o) link(o, name, inNames[i] ?? -1, inDescs[i]);
    });
    outputs.forEach((buffer, i) => {
      const o = numbers.get(buffer);
      need(o);
      if (!o) return;
      o.maker = [name, outNames[i] ?? -1]; o.via = null;
      if (o.rect >= 0 && out.desc[o.rect] < 0) out.desc[o.rect] = outDescs[i];
    });
    if (scratch) {
      const [space, address, size] = scratch, there = out.spaces[space];
      const o = made(space, address, size, name, -1);
      needed[space] += size;
      beginRectangle(o, 5, -1, false);
      out.end[o.rect] = t + 1; out.released[o.rect] = SCRATCH_END;
      there.peak = Math.max(there.peak, there.used + size);
    }
    needed.forEach((size, i) => { out.spaces[i].least = Math.max(out.spaces[i].least, size); });
    slice("programs", seconds, name);
  }
  function link(o, to, slot, desc) {
    const via = o.via, maker = o.maker, source = via ? via.sourceDesc : desc;
    const from = maker === -1 ? (via ? via.origin : o.origin) : maker[0];
    const key = `${from},${maker === -1 ? -2 : maker[1]},${to},${slot},${source},${desc}`;
    let one = out.links.get(key);
    if (!one) {
      one = { from, output: maker === -1 ? -2 : maker[1], to, slot, source, desc, times: 0,
        copies: 0, nbytes: 0, seconds: 0, advice: -1 };
      out.links.set(key, one);
    }
    one.times++;
    if (via && !via.counted) {
      via.counted = true;
      one.copies++; one.nbytes += via.nbytes; one.seconds += via.seconds; one.advice = via.advice;
    }
  }

  function runPlan(index, done) {
    const plan = plans[index], numbers = new Map(), role = roles[index];
    counts.runs++;
    out.runs.t.push(t); out.runs.plan.push(index);
    for (const [number, space, address, size, desc, origin] of plan.buffers) {
      let o = address < 0 ? undefined : out.spaces[space].live.get(address);
      if (!o || o.size !== size) {
        o = made(space, address, size, origin, desc);
        if (address >= 0) put(o, roleOf(T(origin)), -1, false);
      } else if (out.desc[o.rect] < 0) {
        out.desc[o.rect] = o.desc = desc;
        if (!T(o.origin)) {
          out.origin[o.rect] = o.origin = origin; out.role[o.rect] = roleOf(T(origin));
        }
      }
      numbers.set(number, o);
    }
    for (const at of done ?? plan.steps.keys()) {
      out.clock.push(clock);
      if (t >= nextSample) sample();
      step(plan, plan.steps[at], numbers, role);
      t++;
    }
  }
  function stop(index, done) {
    // The record lists afterwards what the completed steps left: show the steps, then go back.
    const before = out.spaces.map((s) => new Map([...s.live].map(([a, o]) => [a, { ...o }])));
    runPlan(index, done);
    out.spaces.forEach((space, i) => {
      for (const o of [...space.live.values()]) {
        const old = before[i].get(o.address);
        if (!old || old.rect !== o.rect) remove(o, STOPPED);
      }
      for (const [address, o] of before[i]) {
        if (!space.live.has(address)) put(o, out.role[o.rect], out.why[o.rect], false);
      }
    });
  }
  function event(e) {
    counts.events++;
    if (e[0] === 2) return runPlan(e[1], null);
    if (e[0] === 3) return stop(e[1], e[2]);
    out.clock.push(clock);
    if (t >= nextSample) sample();
    if (e[0] === 0) allocated(made(e[1], e[2], e[3], e[4], -1), roleOf(T(e[4])), -1);
    else if (e[0] === 1) {
      const o = out.spaces[e[1]].live.get(e[2]);
      if (o) remove(o, DROPPED);
    } else if (e[0] === 4) {
      count(e[1], e[3]);
      if (isFirst) row({ kind: "write", name: -1, nbytes: e[1], seconds: e[3], address: -1,
        space: -1, desc: e[2], reason: -1 });
      slice("host writes", e[3], -1);
    } else { counts.reads++; counts.readNbytes += e[1]; }
    t++;
  }

  for (const [n, part] of run.events) {
    const group = { begin: t, end: t, times: n };
    for (let pass = 0; pass < n; pass++) {
      times = n; isFirst = pass === 0;
      for (const id of part) event(kinds[id]);
      if (isFirst) group.end = t;
    }
    if (n > 1 && part.some((id) => kinds[id][0] === 2)) out.groups.push(group);
  }
  sample();
  out.total = Math.max(1, t);
  out.clock.push(clock);
  out.seconds = clock;
  for (let i = 0; i < out.end.length; i++) if (out.end[i] < 0) out.end[i] = out.total;
  for (const one of out.rows) if (one.end < 0) one.end = out.total;
  return out;
}

// What writes each buffer that a plan allocates decides its colour.
function rolesIn(plan) {
  const role = new Map();
  const first = (buffer, value) => { if (!role.has(buffer)) role.set(buffer, value); };
  for (const s of plan.steps) {
    if (s[0] === 2) first(s[3], 3);
    if (s[0] === 4) s[4].forEach((buffer) => first(buffer, 2));
  }
  return role;
}

// Who read a rectangle: the runs that overlap it are read again.
function readersOf(out, rect) {
  const { t, plan } = out.runs, readers = new Map(), [b, e] = [out.begin[rect], out.end[rect]];
  let low = 0, high = t.length;
  while (low < high) { const mid = (low + high) >> 1; if (t[mid] <= b) low = mid + 1; else high = mid; }
  for (let i = Math.max(0, low - 1), n = 0; i < t.length && t[i] < e && n < 3000; i++, n++) {
    const p = out.run.plans[plan[i]], here = (space, address) =>
      space === out.space[rect] && address === out.address[rect];
    let number = p.buffers.find((x) => here(x[1], x[2]))?.[0] ?? -1;
    p.steps.forEach((s, at) => {
      const now = t[i] + at;
      if (s[0] === 0 && here(s[1][1], s[1][2])) number = s[1][0];
      if (s[0] === 3) for (const [x, a] of s[2]) if (here(s[1], a)) number = x;
      if (now < b || now >= e || number < 0) return;
      let who = null;
      if (s[0] === 4 && s[2].includes(number)) {
        const work = p.works[s[1]];
        who = `${out.T(work[0])}, input ${out.T(work[3][s[2].indexOf(number)] ?? -1)}`;
      } else if (s[0] === 2 && s[2] === number) who = `${out.T(s[1])} (a copy)`;
      if (who) readers.set(who, (readers.get(who) ?? 0) + 1);
    });
  }
  return readers;
}

if (typeof module !== "undefined") module.exports = { expand, readersOf };

// Words.

const SVG = "http://www.w3.org/2000/svg";
// Okabe and Ito's colours, by role; they differ for colour-blind readers, on white and on black.
const COLOURS = ["#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#999999", "#F0E442"];
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

function shown(text, most = 300) {
  const clean = text.replace(HIDDEN, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
  return clean.length > most ? `${clean.slice(0, most)} … (${clean.length} characters)` : clean;
}
// Of a text of several lines, which `pre-wrap` shows.
const paragraph = (text) => text.split("\n").map((line) => shown(line, 2000)).join("\n");
const grouped = (n) => Math.round(n).toLocaleString("en-US");
function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let at = 0, value = n;
  while (value >= 1024 && at < 3) { value /= 1024; at++; }
  return at ? `${value.toFixed(value < 10 ? 2 : 1)} ${units[at]}` : `${grouped(n)} B`;
}
const compact = (n) => n.toLocaleString("en-US", n < 1e5 ? { maximumSignificantDigits: 6 } : { notation: "compact" });
const micros = (s) => `${(s * 1e6).toLocaleString("en-US", { maximumFractionDigits: s < 1e-3 ? 2 : 0 })} µs`;
const hex = (n) => (n < 0 ? "outside" : `0x${n.toString(16)}`);

function el(tag, fields = {}, ...children) {
  const e = document.createElement(tag);
  for (const [key, value] of Object.entries(fields)) {
    if (key.startsWith("on")) e.addEventListener(key.slice(2), value);
    else if (key === "data") for (const [k, v] of Object.entries(value)) e.dataset[k] = v;
    else e.setAttribute(key, value);
  }
  e.append(...children.filter((c) => c !== null && c !== undefined));
  return e;
}
function svg(tag, fields = {}, text) {
  const e = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(fields)) e.setAttribute(key, value);
  if (text !== undefined) e.textContent = text;
  return e;
}
const scrolled = (wide, label) => el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, wide);
function table(caption, heads, rows) {
  return scrolled(el("table", {}, el("caption", {}, caption),
      el("thead", {}, el("tr", {}, ...heads.map((h, i) => el("th", { scope: "col", class: rows[0]?.cells[i]?.classList.contains("n") ? "n" : "" }, h)))),
      el("tbody", {}, ...rows)), caption);
}
const cell = (content, kind = "") => el("td", kind ? { class: kind } : {}, content);
function section(id, title, ...children) {
  return el("section", { id, "aria-labelledby": `${id}-h` }, el("h2", { id: `${id}-h` }, title), ...children);
}
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Rectangles on a canvas: x is a moment or a time, y an address or a track.

class Rectangles {
  // shapes: {x0, x1, y0, y1, colour, length, label(i), describe(i)}; x0 ascends. `shared` is the
  // window in x, which several of these may share.
  constructor(shapes, { label, y0, y1, height, shared, yText, xText, breaks, onPick, marks, ticks }) {
    Object.assign(this, { shapes, shared, yText, xText, breaks, onPick, marks, ticks, h: height });
    this.whole = { y0, y1 };
    this.y0 = y0; this.y1 = y1; this.selected = -1; this.drawn = 0;
    this.canvas = el("canvas", { class: "map", tabindex: 0, role: "application",
      "aria-roledescription": "map", "aria-label": `${label}. Arrow keys walk through the rectangles, `
      + "Enter shows one, plus and minus zoom, 0 shows all." });
    this.canvas.style.height = `${height}px`;
    shared.views.push(this); this.canvas.view = this;
    const c = this.canvas;
    c.addEventListener("keydown", (e) => this.key(e));
    c.addEventListener("wheel", (e) => this.wheel(e), { passive: false });
    c.addEventListener("pointerdown", (e) => this.drag(e));
    c.addEventListener("focus", () => this.draw());
    c.addEventListener("blur", () => this.draw());
  }
  get box() { return { l: 74, t: 6, w: Math.max(20, this.width - 80), h: this.h - 28 }; }
  sx(x) { const b = this.box, s = this.shared; return b.l + (x - s.x0) / (s.x1 - s.x0) * b.w; }
  sy(y) { const b = this.box; return b.t + b.h - (y - this.y0) / (this.y1 - this.y0) * b.h; }
  ux(px) { const b = this.box, s = this.shared; return s.x0 + (px - b.l) / b.w * (s.x1 - s.x0); }
  uy(py) { const b = this.box; return this.y0 + (b.t + b.h - py) / b.h * (this.y1 - this.y0); }

  draw() {
    const c = this.canvas, dpr = window.devicePixelRatio || 1;
    this.width = c.clientWidth || c.parentElement?.clientWidth || 800;
    c.width = Math.round(this.width * dpr); c.height = Math.round(this.h * dpr);
    const g = c.getContext("2d"), b = this.box;
    g.scale(dpr, dpr);
    g.font = "11px system-ui, sans-serif";
    const { x0, x1 } = this.shared, s = this.shapes, seen = this.seen ??= new Int32Array(s.length);
    let n = 0;
    for (let i = 0; i < s.length; i++) {
      if (s.x0[i] > x1) break;
      if (s.x1[i] >= x0 && s.y1[i] >= this.y0 && s.y0[i] <= this.y1) seen[n++] = i;
    }
    this.drawn = n;
    g.save();
    g.beginPath(); g.rect(b.l, b.t, b.w, b.h); g.clip();
    if (this.breaks) for (const [low, high, text] of this.breaks) this.drawBreak(g, low, high, text);
    if (n > 20000) this.pixels(g, seen, n, dpr);
    else for (let k = 0; k < n; k++) this.rectangle(g, seen[k]);
    if (this.marks) this.drawMarks(g);
    if (this.shared.moment !== null) {
      g.strokeStyle = css("--ink"); g.setLineDash([5, 3]); g.beginPath();
      const x = this.sx(this.shared.moment); g.moveTo(x, b.t); g.lineTo(x, b.t + b.h); g.stroke(); g.setLineDash([]);
    }
    if (this.selected >= 0) {
      const [x, y, w, h] = this.pixelBox(this.selected);
      g.lineWidth = 3; g.strokeStyle = css("--focus"); g.strokeRect(x - 1, y - 1, w + 2, h + 2);
      g.lineWidth = 1; g.strokeStyle = css("--paper"); g.strokeRect(x + 1, y + 1, Math.max(0, w - 2), Math.max(0, h - 2));
    }
    g.restore();
    this.axes(g);
  }
  pixelBox(i) {
    const s = this.shapes, x = this.sx(s.x0[i]), y = this.sy(s.y1[i]);
    return [x, y, Math.max(1, this.sx(s.x1[i]) - x), Math.max(1, this.sy(s.y0[i]) - y)];
  }
  rectangle(g, i) {
    const [x, y, w, h] = this.pixelBox(i), c = this.shapes.colour[i];
    g.fillStyle = COLOURS[c];
    g.fillRect(x, y, w, h);
    if (w > 3 && h > 3) { g.strokeStyle = "#00000088"; g.lineWidth = .7; g.strokeRect(x + .35, y + .35, w - .7, h - .7); }
    if (w > 46 && h > 11) {
      const left = Math.max(x, this.box.l), room = Math.min(x + w, this.box.l + this.box.w) - left - 8;
      const most = Math.floor(room / 5.6), text = shown(this.shapes.label(i), 200);
      if (most < 4) return;
      g.fillStyle = c === 0 ? "#fff" : "#111";
      g.fillText(text.length > most ? `${text.slice(0, most - 1)}…` : text, left + 4, y + Math.min(h / 2 + 4, 14));
    }
  }
  pixels(g, seen, n, dpr) {
    const b = this.box, w = Math.round(b.w * dpr), h = Math.round(b.h * dpr), s = this.shapes;
    const image = new ImageData(w, h), pixel = new Uint32Array(image.data.buffer);
    const rgba = COLOURS.map((c) => 0xff000000 | parseInt(c.slice(5, 7) + c.slice(3, 5) + c.slice(1, 3), 16));
    const { x0, x1 } = this.shared, kx = w / (x1 - x0), ky = h / (this.y1 - this.y0);
    // Passes narrower than a pixel draw the same boxes again and again: by top row, the last one.
    const boxes = new Float64Array(h + 1).fill(-1);
    for (let k = 0; k < n; k++) {
      const i = seen[k], colour = rgba[s.colour[i]];
      const l = Math.max(0, Math.floor((s.x0[i] - x0) * kx)), top = Math.max(0, Math.floor(h - (s.y1[i] - this.y0) * ky));
      const r = Math.min(w, Math.max(l + 1, Math.floor((s.x1[i] - x0) * kx)));
      const low = Math.min(h, Math.max(top + 1, Math.floor(h - (s.y0[i] - this.y0) * ky)));
      const box = ((l * 4096 + r) * 4096 + low) * 8 + s.colour[i];
      if (boxes[top] === box) continue;
      boxes[top] = box;
      if (r - l > 8) for (let y = top; y < low; y++) pixel.fill(colour, y * w + l, y * w + r);
      else for (let y = top * w; y < low * w; y += w) for (let x = l; x < r; x++) pixel[y + x] = colour;
    }
    const off = new OffscreenCanvas(w, h);
    off.getContext("2d").putImageData(image, 0, 0);
    g.drawImage(off, b.l, b.t, b.w, b.h);
  }
  drawBreak(g, low, high, text) {
    const b = this.box, y = this.sy(high), h = this.sy(low) - y;
    g.fillStyle = css("--panel"); g.fillRect(b.l, y, b.w, h);
    g.strokeStyle = css("--faint"); g.setLineDash([2, 4]); g.beginPath();
    g.moveTo(b.l, y); g.lineTo(b.l + b.w, y); g.moveTo(b.l, y + h); g.lineTo(b.l + b.w, y + h); g.stroke();
    g.setLineDash([]);
    g.fillStyle = css("--faint"); if (h > 9) g.fillText(text, b.l + 6, y + h / 2 + 4);
  }
  drawMarks(g) {
    const { x0, x1 } = this.shared, seen = this.marks.filter((m) => m.x >= x0 && m.x <= x1);
    if (seen.length > 3000) return;
    for (const m of seen) {
      const x = this.sx(m.x), from = this.sy(m.y0), to = m.y1 === null ? this.box.t + 7 : this.sy(m.y1);
      const colour = m.kind === "move" ? "#000" : COLOURS[m.kind === "evict" ? 4 : 5];
      g.beginPath(); g.moveTo(x - 7, from); g.bezierCurveTo(x + 9, from, x - 9, to, x + 5, to);
      // A white rim: the arrow crosses rectangles of every colour.
      g.strokeStyle = "#fff"; g.lineWidth = 5; g.stroke();
      g.setLineDash(m.kind === "bounce" ? [6, 3] : []);
      g.strokeStyle = colour; g.lineWidth = 2.5; g.stroke();
      g.setLineDash([]); g.beginPath(); g.moveTo(x + 9, to); g.lineTo(x + 1, to - 4); g.lineTo(x + 1, to + 4); g.fillStyle = g.strokeStyle; g.fill();
    }
    g.lineWidth = 1;
  }
  axes(g) {
    const b = this.box, s = this.shared;
    g.fillStyle = g.strokeStyle = css("--faint");
    g.strokeRect(b.l + .5, b.t + .5, b.w, b.h);
    g.textAlign = "right";
    let last = Infinity;
    const ticks = this.ticks ? this.ticks() : [0, 1, 2, 3, 4].map((i) => this.y0 + (this.y1 - this.y0) * i / 4);
    for (const y of ticks) {
      const py = this.sy(y);
      const at = Math.min(b.t + b.h, Math.max(b.t + 9, py + 4));
      if (py < b.t - 1 || py > b.t + b.h + 1 || last - at < 12) continue;
      last = at;
      g.fillText(this.yText(y), b.l - 5, at);
    }
    const most = Math.max(1, Math.min(8, Math.floor(b.w / 140))), part = (s.x1 - s.x0) / most;
    // Moments are whole numbers.
    const isWhole = s.least >= 1, step = isWhole ? Math.max(1, Math.ceil(part)) : part;
    for (let x = isWhole ? Math.ceil(s.x0) : s.x0; x <= s.x1 + step / 1e6; x += step) {
      const px = this.sx(x);
      g.textAlign = px < b.l + 40 ? "left" : px > b.l + b.w - 40 ? "right" : "center";
      g.fillText(this.xText(x), px, this.h - 7);
    }
    g.textAlign = "left";
  }

  at(px, py) {
    const x = this.ux(px), y = this.uy(py), s = this.shapes, pad = 3 * (this.shared.x1 - this.shared.x0) / this.box.w;
    let near = -1;
    for (let i = 0; i < s.length && s.x0[i] <= x + pad; i++) {
      if (s.y0[i] > y || s.y1[i] < y) continue;
      if (s.x0[i] <= x && s.x1[i] > x) return i;
      if (s.x1[i] > x - pad) near = i;
    }
    return near;
  }
  select(i, show = true) {
    for (const view of this.shared.views) if (view !== this && view.selected >= 0) { view.selected = -1; view.draw(); }
    this.selected = i;
    const s = this.shapes, w = this.shared;
    if (i >= 0 && (s.x1[i] < w.x0 || s.x0[i] > w.x1)) {
      const middle = (s.x0[i] + s.x1[i]) / 2, half = (w.x1 - w.x0) / 2;
      this.window(middle - half, middle + half);
    } else this.draw();
    if (show && this.onPick) this.onPick(i);
  }
  step(direction) {
    const n = this.shapes.length;
    if (n) this.select(this.selected < 0 ? (direction > 0 ? 0 : n - 1) : Math.min(n - 1, Math.max(0, this.selected + direction)));
  }
  climb(direction) {
    const s = this.shapes, now = this.selected;
    if (now < 0) return this.step(1);
    let best = -1;
    for (let i = 0; i < s.length && s.x0[i] < s.x1[now]; i++) {
      if (s.x1[i] <= s.x0[now] || (s.y0[i] - s.y0[now]) * direction <= 0) continue;
      if (best < 0 || (s.y0[best] - s.y0[i]) * direction > 0) best = i;
    }
    if (best >= 0) this.select(best);
  }
  key(e) {
    const keys = { ArrowRight: () => this.step(1), ArrowLeft: () => this.step(-1), ArrowUp: () => this.climb(1),
      ArrowDown: () => this.climb(-1), "+": () => this.zoom(.5), "=": () => this.zoom(.5), "-": () => this.zoom(2),
      0: () => this.reset(), Home: () => this.select(0), End: () => this.select(this.shapes.length - 1),
      Enter: () => this.onPick?.(this.selected, true), Escape: () => this.select(-1) };
    if (!keys[e.key] || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    keys[e.key]();
  }
  zoom(factor, at = null, vertical = false) {
    const s = this.shared, i = this.selected;
    if (vertical) {
      const y = at ?? (this.y0 + this.y1) / 2, k = Math.min(factor, (this.whole.y1 - this.whole.y0) / (this.y1 - this.y0));
      const y0 = Math.max(this.whole.y0, y - (y - this.y0) * k), high = y + (this.y1 - y) * k;
      this.y0 = y0; this.y1 = Math.min(this.whole.y1, Math.max(high, y0 + 1e-9));
      return this.draw();
    }
    const x = at ?? (i >= 0 ? (this.shapes.x0[i] + this.shapes.x1[i]) / 2 : (s.x0 + s.x1) / 2);
    const span = Math.max(s.least, (s.x1 - s.x0) * factor), f = span / (s.x1 - s.x0);
    return this.window(x - (x - s.x0) * f, x + (s.x1 - x) * f);
  }
  reset() { this.y0 = this.whole.y0; this.y1 = this.whole.y1; this.window(this.shared.from, this.shared.to); }
  window(x0, x1) {
    const s = this.shared, span = Math.min(x1 - x0, s.to - s.from);
    s.x0 = Math.min(Math.max(s.from, x0), s.to - span); s.x1 = s.x0 + span;
    const began = performance.now();
    for (const view of s.views) view.draw();
    stitchReport.lastDraw = performance.now() - began;
  }
  wheel(e) {
    if (!e.ctrlKey && !e.metaKey && document.activeElement !== this.canvas) return;
    e.preventDefault();
    const r = this.canvas.getBoundingClientRect(), factor = Math.exp(Math.sign(e.deltaY) * .3);
    if (e.shiftKey) this.zoom(factor, this.uy(e.clientY - r.top), true);
    else this.zoom(factor, this.ux(e.clientX - r.left));
  }
  drag(e) {
    if (e.button) return;
    const start = { x: e.clientX, y: e.clientY, x0: this.shared.x0, x1: this.shared.x1, y0: this.y0, y1: this.y1 };
    let moved = false;
    const move = (m) => {
      const dx = m.clientX - start.x, dy = m.clientY - start.y;
      if (!moved && Math.abs(dx) + Math.abs(dy) < 4) return;
      moved = true;
      const kx = (start.x1 - start.x0) / this.box.w, ky = (start.y1 - start.y0) / this.box.h;
      const shift = Math.min(this.whole.y1 - start.y1, Math.max(this.whole.y0 - start.y0, dy * ky));
      this.y0 = start.y0 + shift; this.y1 = start.y1 + shift;
      this.window(start.x0 - dx * kx, start.x1 - dx * kx);
    };
    const end = (m) => {
      removeEventListener("pointermove", move); removeEventListener("pointerup", end);
      const r = this.canvas.getBoundingClientRect();
      if (!moved) this.select(this.at(m.clientX - r.left, m.clientY - r.top));
    };
    addEventListener("pointermove", move); addEventListener("pointerup", end);
  }
}
function makeShared(from, to, least) {
  return { from, to, x0: from, x1: to, least, views: [], moment: null };
}
function tools(view) {
  return el("div", { class: "tools" },
    ...[["Zoom in", .5], ["Zoom out", 2]].map(([text, f]) => el("button", { type: "button", onclick: () => view.zoom(f) }, text)),
    el("button", { type: "button", onclick: () => view.reset() }, "Show all"));
}

// The address axis: whole capacity, or with the ranges that nothing ever used drawn short.

function addressAxis(space, ranges, whole) {
  const merged = [];
  for (const [low, high] of [...new Map(ranges.map((r) => [`${r[0]},${r[1]}`, r])).values()].sort((a, b) => a[0] - b[0])) {
    const last = merged[merged.length - 1];
    if (last && low <= last[1]) last[1] = Math.max(last[1], high);
    else merged.push([low, high]);
  }
  const capacity = space.limit - space.base, used = merged.reduce((n, [a, b]) => n + b - a, 0);
  const gaps = [];
  let at = space.base;
  for (const [low, high] of [...merged, [space.limit, space.limit]]) {
    if (low > at) gaps.push([at, low]);
    at = Math.max(at, high);
  }
  const cut = whole || !used || used * 6 > capacity ? []
    : gaps.filter(([a, b]) => b - a > used / 4).sort((p, q) => q[1] - q[0] - p[1] + p[0]).slice(0, 6).sort((a, b) => a[0] - b[0]);
  const kept = capacity - cut.reduce((n, [a, b]) => n + b - a, 0), short = kept * .09;
  const parts = [];
  let y = 0;
  at = space.base;
  const part = (low, high, height, isCut) => {
    if (high > low) { parts.push({ low, high, y, height, isCut }); y += height; }
  };
  for (const [low, high] of cut) { part(at, low, low - at, false); part(low, high, short, true); at = high; }
  part(at, space.limit, space.limit - at, false);
  if (!parts.length) parts.push({ low: space.base, high: space.base + 1, y: 0, height: 1, isCut: false });
  const find = (test) => parts.find(test) ?? parts[parts.length - 1];
  return {
    isCut: cut.length > 0, height: parts[parts.length - 1].y + parts[parts.length - 1].height,
    y(a) { const p = find((q) => a <= q.high); return p.y + (a - p.low) / (p.high - p.low) * p.height; },
    address(v) { const p = find((q) => v <= q.y + q.height); return p.low + (v - p.y) / p.height * (p.high - p.low); },
    breaks: parts.filter((p) => p.isCut).map((p) => [p.y, p.y + p.height, `${bytes(p.high - p.low)} never used`]),
    edges: parts.flatMap((p) => (p.isCut ? [p.y, p.y + p.height] : [0, 1, 2, 3, 4].map((i) => p.y + p.height * i / 4))).sort((a, b) => a - b),
  };
}

// Panels.

const stitchReport = { ready: false, counts: null, maps: {}, lastDraw: 0, firstPicture: 0, error: null };
const PAGE_ROWS = 400;

function headline(out, body) {
  const { counts, T } = out, cards = [];
  const card = (title, value, note) => cards.push(el("div", { class: "card" }, title, el("b", {}, value), el("span", { class: "faint" }, note)));
  card("Copies", grouped(counts.copies), `${grouped(counts.nbytes)} B (${bytes(counts.nbytes)})`);
  const least = out.run.least_seconds;
  card("Copies, simulated", micros(counts.seconds), least ? `lower bound of copies: ${micros(least)}` : "no lower bound known");
  card("Programs, simulated", micros(counts.programSeconds), `${grouped(counts.programs)} program runs, ${grouped(counts.runs)} plan runs`);
  for (const s of out.spaces) {
    if (!s.peak) continue;
    const capacity = s.limit - s.base, bar = el("i"), mark = el("u", { title: "lower bound" });
    bar.style.width = `${Math.min(100, s.peak / capacity * 100)}%`;
    mark.style.left = `${Math.min(99, s.least / capacity * 100)}%`;
    cards.push(el("div", { class: "card", data: { space: s.name, peak: s.peak } }, `Peak of ${s.name}`, el("b", {}, bytes(s.peak)),
      el("div", { class: "bar" }, bar, s.least ? mark : null),
      el("span", { class: "faint" }, `of ${bytes(capacity)} in each of ${s.banks} bank${s.banks > 1 ? "s" : ""} (${(s.peak / capacity * 100).toFixed(1)} %)`
        + (s.least ? `; at least ${bytes(s.least)} for one program` : ""))));
  }
  for (const [text, kept] of body.budgets) {
    cards.push(el("div", { class: "card" }, shown(text), el("b", { class: kept ? "good" : "bad" }, kept ? "kept" : "broken")));
  }
  return el("section", { id: "headline", "aria-label": "Headline" },
    el("p", {}, `Machine ${shown(T(out.run.machine))}. Sizes in memory spaces are per bank; a copy counts its tensor once.`),
    el("div", { class: "cards" }, ...cards));
}

function describe(out, i) {
  const name = out.T(out.origin[i]) || "allocated outside of plans";
  return `${out.role[i] === 5 ? `scratch of ${name}` : name}, ${grouped(out.size[i])} B at ${hex(out.address[i])}`;
}

function details(out, i) {
  const list = [], T = out.T, add = (k, v) => { if (v) list.push(el("dt", {}, k), el("dd", {}, v)); };
  const origin = T(out.origin[i]), location = T(new Map(out.run.locations).get(out.origin[i]) ?? -1);
  const [b, e] = [out.begin[i], out.end[i]];
  add("made by", shown(origin) || "allocated outside of plans");
  add("source", location ? shown(location) : null);
  add("kind", ROLES[out.role[i]]);
  add("layout", out.desc[i] >= 0 ? shown(T(out.desc[i])) : null);
  const space = out.spaces[out.space[i]];
  add("memory", `${space.name} ${hex(out.address[i])} to ${hex(out.address[i] + out.size[i])}, ${grouped(out.size[i])} B in each of ${space.banks} banks`);
  add("lives", `moments ${b} to ${e} (${micros(out.clock[b])} to ${micros(out.clock[Math.min(e, out.clock.length - 1)])} simulated)`);
  add(out.first[i] ? "why copied" : "why here", out.why[i] >= 0 ? shown(T(out.why[i])) : null);
  const readers = [...readersOf(out, i)];
  add("read by", readers.slice(0, 12).map(([who, n]) => shown(who) + (n > 1 ? ` × ${n}` : "")).join("; ")
    + (readers.length > 12 ? `; and ${readers.length - 12} more` : "") || (out.role[i] === 5 ? "" : "no program while it was here"));
  add("released", RELEASED[out.released[i]]);
  return el("dl", {}, ...list);
}

function memoryMaps(out, body) {
  const shared = makeShared(0, out.total, Math.min(4, out.total)), box = el("div", { id: "details", role: "status", "aria-live": "polite" },
    el("p", { class: "faint" }, "Choose a rectangle: click it, or walk with the arrow keys."));
  // Of passes that repeat, the first view has one in full.
  const folds = [...out.groups].sort((a, b) => b.times * (b.end - b.begin) - a.times * (a.end - a.begin)).slice(0, 3).map((g) =>
    el("button", { type: "button", data: { fold: g.times }, onclick: () => shared.views[0]?.window(g.begin, g.end) }, `One pass of × ${grouped(g.times)}, from moment ${grouped(g.begin)}`));
  const [most] = [...out.groups].sort((a, b) => b.times - a.times);
  if (most && most.times > 4) { shared.x0 = Math.max(0, most.begin - (most.end - most.begin)); shared.x1 = most.end; }
  const parts = [], clockText = (t) => {
    const at = Math.max(0, Math.min(out.total, Math.round(t)));
    return `${grouped(at)} · ${micros(out.clock[at] ?? out.seconds)}`;
  };
  out.spaces.forEach((space, number) => {
    const ids = [];
    for (let i = 0; i < out.space.length; i++) if (out.space[i] === number) ids.push(i);
    if (!ids.length) return;
    let view;
    const holder = el("div");
    const make = (whole) => {
      const axis = addressAxis(space, ids.map((i) => [out.address[i], out.address[i] + out.size[i]]), whole);
      const pick = (f) => Float64Array.from(ids, f);
      const shapes = { length: ids.length, x0: pick((i) => out.begin[i]), x1: pick((i) => out.end[i]),
        y0: pick((i) => axis.y(out.address[i])), y1: pick((i) => axis.y(out.address[i] + out.size[i])),
        colour: Uint8Array.from(ids, (i) => out.role[i]), label: (i) => out.T(out.origin[ids[i]]), ids };
      const marks = out.marks.filter((m) => m.space === number).map((m) => ({ kind: m.kind, x: m.t, y0: axis.y(m.a0 + m.size / 2),
        y1: m.to === number ? axis.y(m.a1 + m.size / 2) : null }));
      view = new Rectangles(shapes, { label: `Memory map of ${space.name}`, y0: 0, y1: axis.height, height: 270, shared,
        yText: (y) => hex(Math.round(axis.address(y))), xText: clockText, breaks: axis.breaks, marks, ticks: () => axis.edges,
        onPick: (i) => { box.replaceChildren(i < 0 ? el("p", { class: "faint" }, "Nothing chosen.") : details(out, ids[i])); } });
      stitchReport.maps[space.name] = view;
      holder.replaceChildren(view.canvas);
      return axis.isCut;
    };
    const isCut = make(false);
    const toggle = el("button", { type: "button", "aria-pressed": "false", onclick: () => {
      const whole = toggle.getAttribute("aria-pressed") === "false";
      toggle.setAttribute("aria-pressed", String(whole));
      shared.views.splice(shared.views.indexOf(view), 1);
      make(whole);
      view.draw();
    } }, "Whole capacity as the axis");
    const bar = tools({ zoom: (f) => view.zoom(f), reset: () => view.reset() });
    if (isCut) bar.append(toggle);
    parts.push(el("h3", {}, `${space.name}: ${grouped(space.limit - space.base)} B per bank, ${hex(space.base)} to ${hex(space.limit)}`), bar, holder);
  });
  const legend = el("div", { class: "legend" }, ...ROLES.map((role, i) => {
    const e = el("span", {}, role === "other" ? "other (background: free)" : role);
    e.style.setProperty("--c", COLOURS[i]);
    return e;
  }), el("em", {}, "arrows: — move, — eviction to DRAM (orange-red), - - bounce (pink)"));
  const now = el("div", { id: "moment-table" });
  const slider = el("input", { type: "range", id: "moment", min: 0, max: out.total, value: out.total, "aria-label": "Moment", oninput: () => {
    shared.moment = Number(slider.value);
    for (const view of shared.views) view.draw();
    now.replaceChildren(momentTable(out, shared.moment, clockText));
  } });
  return [section("memory", "Memory map", el("p", { class: "faint" }, "Left to right: moments, one for each step of a plan and each allocation outside of plans. Bottom to top: addresses. Drag to pan; with a map focused, wheel or + and − zoom, shift and wheel zoom the addresses, arrows walk."),
    el("div", { class: "tools" }, ...folds), legend, ...parts, el("div", { class: "tools" }, el("label", { for: "moment" }, "Moment"), slider), now, box), shared];
}

function momentTable(out, t, clockText) {
  const rows = [];
  out.spaces.forEach((space, number) => {
    let used = 0;
    const there = [];
    for (let i = 0; i < out.begin.length && out.begin[i] <= t; i++) {
      if (out.space[i] === number && out.end[i] > t) { there.push(i); used += out.size[i]; }
    }
    if (!there.length) return;
    there.sort((a, b) => out.address[a] - out.address[b]);
    let at = space.base, hole = 0;
    const line = (address, size, what, kind) => { if (rows.length < 300) rows.push(el("tr", { data: { hole: kind } }, cell(space.name), cell(hex(address), "n mono"), cell(grouped(size), "n"), cell(what, "name"))); };
    for (const i of there) {
      if (out.address[i] > at) { line(at, out.address[i] - at, "(free)", "1"); hole = Math.max(hole, out.address[i] - at); }
      line(out.address[i], out.size[i], shown(describe(out, i).replace(/, [\d,]+ B at .*$/, ""), 120), "0");
      at = Math.max(at, out.address[i] + out.size[i]);
    }
    if (space.limit > at) { line(at, space.limit - at, "(free)", "1"); hole = Math.max(hole, space.limit - at); }
    rows.push(el("tr", {}, cell(space.name), cell(""), cell(grouped(used), "n"), cell(`in use; largest hole ${grouped(hole)} B`)));
  });
  return table(`Memory at moment ${clockText(t)}`, ["space", "address", "B per bank", "contents"], rows);
}

function marked(text, other) {
  const mine = shown(text).split(":"), theirs = shown(other).split(":");
  return el("span", { class: "mono" }, ...mine.flatMap((part, i) => [i ? ":" : "", part === theirs[i] ? part : el("mark", {}, part)]));
}
function links(out) {
  const T = out.T, list = [...out.links.values()].sort((a, b) => b.nbytes - a.nbytes || b.times - a.times);
  const who = (l) => (l.output === -2 ? T(l.from) || "the host" : `${T(l.from)}, output ${T(l.output)}`);
  const rows = list.slice(0, 300).map((l) => el("tr", { data: { link: l.copies ? "copied" : "stitched" } },
    cell(shown(who(l), 120), "name"), cell(shown(`${T(l.to)}, input ${T(l.slot)}`, 120), "name"),
    cell(marked(T(l.source), T(l.desc))), cell(marked(T(l.desc), T(l.source))),
    cell(grouped(l.times), "n"), cell(grouped(l.copies), "n"), cell(grouped(l.nbytes), "n"), cell(micros(l.seconds), "n"),
    l.advice >= 0 ? el("td", {}, el("code", {}, shown(T(l.advice), 400))) : cell(!l.copies ? "no copy" : l.output === -2 ? "brings the array of a call to the device" : "")));
  return section("links", "Links between programs", table(
    `${list.length} links, the costliest first${list.length > 300 ? " (300 shown)" : ""}; the fields that differ are marked`,
    ["from", "to", "is", "wanted", "uses", "copies", "bytes", "simulated", "to avoid the copy"], rows));
}

function rowTable(out, body) {
  const T = out.T, kinds = [...new Set(out.rows.map((r) => r.kind))];
  const holder = el("div"), state = { at: 0, kind: "", text: "" };
  const line = (r) => {
    const space = r.space >= 0 ? out.spaces[r.space].name : "host";
    const what = r.kind === "allocation" ? space : r.from !== undefined ? `${space} ${hex(r.from)} → ${hex(r.address)}`
      : shown(r.fromDesc !== undefined ? `${T(r.fromDesc)} → ${T(r.desc)}` : T(r.desc));
    return el("tr", { data: { kind: r.kind, nbytes: r.nbytes, address: r.address, begin: r.begin, end: r.end, times: r.times } },
      cell(grouped(r.begin), "n"), cell(r.kind + (r.times > 1 ? ` × ${grouped(r.times)}` : "")), cell(shown(T(r.name), 160), "name"),
      cell(what, "mono"), cell(hex(r.address), "n mono"), cell(grouped(r.nbytes), "n"), cell(r.seconds ? micros(r.seconds) : "", "n"),
      cell(r.kind === "allocation" ? `${RELEASED[r.released]} at ${grouped(r.end)}` : shown(T(r.reason), 400), "why"));
  };
  const render = () => {
    const rows = out.rows.filter((r) => (!state.kind || r.kind === state.kind)
      && (!state.text || `${T(r.name)} ${T(r.reason ?? -1)}`.toLowerCase().includes(state.text)));
    const page = rows.slice(state.at, state.at + PAGE_ROWS), move = (n) => () => { state.at = n; render(); };
    holder.replaceChildren(table(`Rows ${page.length ? state.at + 1 : 0} to ${state.at + page.length} of ${grouped(rows.length)}. Passes that repeat are one: their first pass in full, with × and their number.`,
      ["moment", "what", "tensor", "where", "address", "bytes", "simulated", "why, or when released"], page.map(line)),
    el("div", { class: "tools" }, state.at ? el("button", { type: "button", onclick: move(Math.max(0, state.at - PAGE_ROWS)) }, "Earlier rows") : null,
      state.at + PAGE_ROWS < rows.length ? el("button", { type: "button", onclick: move(state.at + PAGE_ROWS) }, "Later rows") : null));
  };
  const kind = el("select", { "aria-label": "Kind of rows", onchange: () => { state.kind = kind.value; state.at = 0; render(); } },
    el("option", { value: "" }, "all kinds"), ...kinds.map((k) => el("option", { value: k }, k)));
  const search = el("input", { type: "search", placeholder: "search", "aria-label": "Search names and reasons", oninput: () => {
    state.text = search.value.toLowerCase(); state.at = 0; render();
  } });
  render();
  return section("copies", "Copies and allocations", el("div", { class: "tools" }, kind, search), holder);
}

function proofPanel(out) {
  const T = out.T, list = [...out.proofs.values()].slice(0, 60).map((p) => proofCard(out, p, T));
  if (!list.length) return null;
  return section("proofs", "Moves, evictions and bounces, with their proofs", ...list);
}
function proofCard(out, p, T) {
  const s = p.step, isCopy = s[0] === 2, reason = T(isCopy ? s[8] : s[6]), seconds = isCopy ? s[7] : s[5], proof = isCopy ? s[9] : s[7];
  const card = el("div", { class: "proof", data: { proof: proof ? proof[0] : "none", kind: p.kind } },
    el("h3", {}, `${p.kind}${p.times > 1 ? ` × ${grouped(p.times)}` : ""}: ${grouped(p.nbytes)} B, ${micros(seconds)}, first at moment ${grouped(p.t)}`),
    el("p", { class: "why" }, shown(reason, 500)));
  if (!isCopy) card.append(transfersPicture(out, s));
  if (!proof) { card.append(el("p", { class: "faint" }, "Nothing had to leave the space: no proof is needed.")); return card; }
  const [kind, pieces, gaps, cyclic, free, through, inside] = proof, sum = (list) => list.reduce((a, b) => a + b, 0);
  const words = {
    capacity: `The pieces take ${grouped(sum(pieces))} B per bank, the gaps hold ${grouped(sum(gaps))} B: they cannot fit.`,
    packing: `The pieces take ${grouped(sum(pieces))} B and the gaps hold ${grouped(sum(gaps))} B, but no assignment of pieces to gaps exists (the search tree is in the record).`,
    undecided: `The search for a packing of ${grouped(sum(pieces))} B into ${grouped(sum(gaps))} B reached its limit.`,
    cycle: `The moves form a cycle and the space has no free byte: ${grouped(sum(pieces))} B per bank step out.`,
    no_path: `The machine has no path inside the space: ${grouped(sum(pieces))} B per bank go through another.`,
    cost: `${grouped(free)} B per bank are free beside a cycle of ${grouped(cyclic)} B. Through another space it takes ${micros(through)}. Inside, each byte moved once takes ${micros(inside)}, and the checker finds no sequence of such moves that is cheaper.`,
  };
  card.append(el("p", {}, el("b", {}, `Proof: ${kind}. `), words[kind] ?? ""));
  if (pieces.length || gaps.length) card.append(barsPicture([["pieces", pieces, "#D55E00"], ["gaps", gaps, "#009E73"]], (size) => `${grouped(size)} B`, "in bytes per bank"));
  if (inside) card.append(barsPicture([["through", [through], "#CC79A7"], ["inside ≥", [inside], "#0072B2"]], micros, "simulated"));
  return card;
}
function barsPicture(heads, text, unit) {
  const most = Math.max(...heads.flatMap((h) => h[1]), 1e-12), count = heads.reduce((n, [, list]) => n + Math.max(1, Math.min(12, list.length)), 0), h = count * 17 + 8;
  const picture = svg("svg", { viewBox: `0 0 620 ${h}`, width: 620, height: h, role: "img", "aria-label": `${heads.map(([name, list]) => `${name} ${list.slice(0, 12).map(text).join(", ") || "none"}`).join(" beside ")}, ${unit}` });
  let y = 3;
  for (const [name, list, colour] of heads) {
    picture.append(svg("text", { x: 0, y: y + 11 }, list.length ? name : `${name}: none`));
    for (const [i, size] of list.slice(0, 12).entries()) {
      const w = Math.max(2, size / most * 400);
      picture.append(svg("rect", { x: 60, y, width: w, height: 13, fill: colour }),
        svg("text", { x: 66 + w, y: y + 11 }, text(size) + (i === 11 && list.length > 12 ? ` and ${list.length - 12} more` : "")));
      y += 17;
    }
    if (!list.length) y += 17;
  }
  return scrolled(picture, "Proof");
}
function transfersPicture(out, s) {
  const ways = s[8].slice(0, 24), names = [...new Set(ways.flatMap((w) => [w[0], w[2]]))], w = 720, h = ways.length * 20 + 26;
  const picture = svg("svg", { viewBox: `0 0 ${w} ${h}`, width: w, height: h, role: "img",
    "aria-label": ways.map((x) => `${grouped(x[4])} B from ${out.spaces[x[0]].name} ${hex(x[1])} to ${out.spaces[x[2]].name} ${hex(x[3])}`).join("; ") });
  const x = (space) => 80 + names.indexOf(space) * (names.length > 1 ? 330 / (names.length - 1) : 0);
  for (const space of names) picture.append(svg("text", { x: x(space) - 12, y: 12, "font-weight": "bold" }, out.spaces[space].name));
  ways.forEach(([from, a0, to, a1, nbytes], i) => {
    const y = 30 + i * 20, x0 = x(from), x1 = from === to ? x0 + 60 : x(to), colour = from === to ? "#0072B2" : "#CC79A7";
    picture.append(svg("text", { x: 0, y }, `${i + 1}.`), svg("line", { x1: x0, y1: y - 4, x2: x1, y2: y - 4, stroke: colour, "stroke-width": 2.5 }),
      svg("circle", { cx: x0, cy: y - 4, r: 3, fill: colour }),
      svg("path", { d: `M${x1} ${y - 9}L${x1 + (x1 > x0 ? 8 : -8)} ${y - 4}L${x1} ${y + 1}Z`, fill: colour }),
      svg("text", { x: 440, y }, `${hex(a0)} → ${hex(a1)}, ${grouped(nbytes)} B`));
  });
  if (s[8].length > 24) picture.append(svg("text", { x: 620, y: 12 }, `${s[8].length - 24} more`));
  return scrolled(picture, "Transfers");
}

// Slices {x0, x1, track, text(i), told(i)} on named tracks, one below the other.
function tracksPanel(id, title, names, s, end, xText, ...more) {
  const shared = makeShared(0, end, end / 1e7), n = names.length, short = (name) => (name.length > 13 ? `${name.slice(0, 12)}…` : name);
  const told = el("p", { role: "status", "aria-live": "polite", class: "faint" }, "Choose a slice.");
  const view = new Rectangles({ length: s.x0.length, x0: s.x0, x1: s.x1, label: s.text,
    y0: Float64Array.from(s.track, (t) => n - 1 - t + .08), y1: Float64Array.from(s.track, (t) => n - t - .08),
    colour: Uint8Array.from(s.track, (t) => [2, 3, 1, 4, 5, 0, 6, 7][t % 8]) },
  { label: title, y0: 0, y1: n, height: 44 + 32 * n, shared, yText: (y) => short(names[n - 1 - Math.floor(y)] ?? ""), xText,
    ticks: () => names.map((_, i) => i + .42),
    onPick: (i) => told.replaceChildren(i < 0 ? "" : `${shown(names[s.track[i]])}: ${shown(s.text(i))}, ${xText(s.x0[i])} to ${xText(s.x1[i])}`) });
  return section(id, title, tools(view), view.canvas, told, ...more);
}
function timeline(out) {
  const s = out.slices;
  if (!s.begin.length || !out.seconds) return null;
  const totals = out.tracks.map((name) => [name, 0, 0]);
  s.track.forEach((t, k) => { totals[t][1]++; totals[t][2] += s.end[k] - s.begin[k]; });
  return tracksPanel("timeline", "Timeline, simulated", out.tracks, { x0: s.begin, x1: s.end, track: s.track, text: (i) => out.T(s.name[i]) }, out.seconds, micros,
    table("Time by track", ["track", "slices", "simulated"], totals.map(([name, n, sec]) => el("tr", {}, cell(name), cell(grouped(n), "n"), cell(micros(sec), "n")))));
}
function wallClock(tracks) {
  const names = Object.keys(tracks), all = names.flatMap((name, t) => tracks[name].map((x) => [t, ...x])).sort((a, b) => a[2] - b[2]);
  if (!all.length) return null;
  return tracksPanel("wall", "Devices, wall clock", names, { track: all.map((x) => x[0]), x0: all.map((x) => x[2]), x1: all.map((x) => x[3]), text: (i) => all[i][1] },
    all.reduce((m, x) => Math.max(m, x[3]), 1), (x) => micros(x / 1e6));
}

function programGraph(out) {
  const T = out.T, edges = new Map(), names = new Set(out.programs.keys());
  for (const l of out.links.values()) {
    if (l.output === -2 || !names.has(l.from) || l.from === l.to) continue;
    const key = `${l.from},${l.to}`, e = edges.get(key) ?? { from: l.from, to: l.to, nbytes: 0, times: 0 };
    e.nbytes += l.nbytes; e.times += l.times;
    edges.set(key, e);
  }
  if (names.size < 1 || names.size > 150) return names.size ? section("graph", "Graph of programs", el("p", {}, `${names.size} programs: too many for a picture. The links are in the table above.`)) : null;
  const layer = new Map([...names].map((n) => [n, 0])), order = [...names];
  for (let pass = 0; pass < order.length; pass++) {
    let changed = false;
    for (const e of edges.values()) {
      if (order.indexOf(e.from) < order.indexOf(e.to) && layer.get(e.to) < layer.get(e.from) + 1) { layer.set(e.to, layer.get(e.from) + 1); changed = true; }
    }
    if (!changed) break;
  }
  const columns = [];
  for (const n of order) (columns[layer.get(n)] ??= []).push(n);
  const w = 215, h = 58, width = columns.length * w + 10, height = Math.max(...columns.map((c) => c.length)) * h + 16;
  const place = new Map(columns.flatMap((c, x) => c.map((n, y) => [n, [x * w + 8, y * h + 12]])));
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": "Programs and the tensors between them" });
  const most = Math.max(1, ...[...edges.values()].map((e) => e.nbytes));
  for (const e of edges.values()) {
    const [x0, y0] = place.get(e.from), [x1, y1] = place.get(e.to), [a, b] = [x0 + 140, y0 + 18], d = x1, f = y1 + 18, back = x1 <= x0;
    picture.append(svg("path", { d: back ? `M${x0 + 70} ${y0 + 36}C${x0 + 70} ${y0 + 62} ${x1 + 70} ${y1 + 62} ${x1 + 70} ${y1 + 36}` : `M${a} ${b}C${a + 25} ${b} ${d - 25} ${f} ${d} ${f}`,
      fill: "none", stroke: e.nbytes ? "#D55E00" : "#009E73", "stroke-width": 1.5 + 4 * e.nbytes / most }),
    svg("text", { x: back ? (x0 + x1) / 2 + 74 : (a + d) / 2, y: back ? Math.max(y0, y1) + 56 : (b + f) / 2 - 5, "text-anchor": "middle" }, e.nbytes ? bytes(e.nbytes) : "0 B"));
  }
  for (const n of order) {
    const [x, y] = place.get(n), p = out.programs.get(n), name = shown(T(n), 40);
    picture.append(svg("rect", { x, y, width: 140, height: 36, rx: 5, fill: "#56B4E933", stroke: "#0072B2" }),
      svg("text", { x: x + 7, y: y + 15 }, name.length > 20 ? `${name.slice(0, 19)}…` : name),
      svg("text", { x: x + 7, y: y + 30 }, `× ${grouped(p.runs)}, ${micros(p.seconds)}`));
  }
  return section("graph", "Graph of programs", el("p", { class: "faint" }, "Edges: bytes copied between two programs; green where the tensor was used as it lay."), scrolled(picture, "Graph of programs"));
}

// Lines, by uPlot.

const plots = [];
function plot(title, x, series, xLabel, values = (u, v) => v.map((y) => (y === null ? "" : y.toLocaleString("en-US", { maximumSignificantDigits: 4 })))) {
  const holder = el("div", { role: "img", "aria-label": `${title}: ${series.map((s) => s.label).join(", ")}` });
  plots.push(() => {
    const ink = css("--faint"), grid = { stroke: css("--line"), width: 1 }, axis = { stroke: ink, grid, ticks: grid };
    holder.replaceChildren();
    new uPlot({ title, width: Math.max(240, holder.clientWidth), height: 230, scales: { x: { time: false } },
      series: [{ label: xLabel }, ...series.map((s, i) => ({ label: s.label, stroke: COLOURS[[1, 4, 2][i % 3]], width: 2, dash: i % 3 === 1 ? [6, 3] : undefined, points: { show: x.length < 40 } }))],
      axes: [{ ...axis, label: xLabel, values: (u, v) => v.map(compact) }, { ...axis, values, size: 74 }] }, [x, ...series.map((s) => s.values)], holder);
  });
  return holder;
}
function fragmentation(out) {
  const list = out.spaces.filter((s) => s.peak && s.samples.t.length > 1);
  if (!list.length) return null;
  const size = (u, v) => v.map((y) => bytes(y));
  return section("fragmentation", "Fragmentation over time", el("p", { class: "faint" }, "Bytes per bank in use, and the largest hole: what the next buffer can take without a move."),
    ...list.map((s) => plot(s.name, s.samples.t, [{ label: "in use", values: s.samples.used }, { label: "largest hole", values: s.samples.hole }], "moment", size)));
}
function training(curves) {
  const names = Object.keys(curves);
  if (!names.length) return null;
  return section("training", "Training", ...names.map((name) => plot(shown(name, 80), curves[name].map((_, i) => i + 1), [{ label: shown(name, 80), values: curves[name] }], "step")));
}
function sweepPanel(s) {
  const [figure, ...names] = Object.keys(s), heads = [figure, ...names].map((n) => shown(n, 80));
  if (!figure) return null;
  const rows = s[figure].map((_, i) => el("tr", { data: { point: i } }, ...[figure, ...names].map((n) => cell(s[n][i] === null ? "" : s[n][i].toLocaleString("en-US"), "n"))));
  return section("sweep", `One pass over ${heads[0]}`, ...names.map((n, i) => plot(heads[i + 1], s[figure], [{ label: heads[i + 1], values: s[n] }], heads[0])),
    table("One simulated pass for each value; without numbers, it cannot run", heads, rows));
}
function differencePanel(d) {
  if (!d.lines) return null;
  const sign = (n, text) => `${n > 0 ? "+" : n < 0 ? "−" : "±"}${text}`;
  const rows = d.lines.map(([more, times, kind, nbytes, seconds, route, why]) => el("tr", { data: { diff: more ? "more" : "fewer" } },
    cell(el("b", { class: more ? "bad" : "good" }, more ? "more" : "fewer")), cell(`${kind} × ${grouped(times)}`), cell(grouped(nbytes), "n"), cell(micros(seconds), "n"), cell(shown(route), "mono"), cell(shown(why), "why")));
  const [copies, nbytes, seconds] = d.added;
  return section("difference", "Difference from the older run", el("p", {}, `${sign(copies, grouped(Math.abs(copies)))} copies, ${sign(nbytes, grouped(Math.abs(nbytes)))} B, ${sign(seconds, micros(Math.abs(seconds)))} of copies.`),
    ...(d.unequal ?? []).map(([name, old, now]) => el("p", {}, `The runs have different lengths: ${shown(name)} ran ${grouped(old)} and ${grouped(now)} times.`)),
    table(rows.length ? "Copies of one run that the other lacks" : "Both runs made the same copies", ["", "copy", "bytes each", "simulated each", "route", "why"], rows));
}

// The page.

function render(body, chosen) {
  const main = document.getElementById("report"), title = main.querySelector("h1");
  plots.length = 0; stitchReport.maps = {};
  if (!body.runs.length) {
    main.replaceChildren(title, ...body.notes.map((n) => el("p", { class: "note" }, paragraph(n))), sweepPanel(body.sweep));
    stitchReport.redraw = () => { for (const p of plots) p(); };
    return stitchReport.redraw();
  }
  const out = expand(body.runs[chosen]);
  const [memory, shared] = memoryMaps(out, body), parts = [headline(out, body), differencePanel(body.difference), memory, proofPanel(out), links(out),
    programGraph(out), timeline(out), wallClock(body.tracks), training(body.curves), fragmentation(out), rowTable(out, body)];
  const chooser = body.runs.length < 2 ? null : el("p", {}, el("label", { for: "run" }, "Run shown: "),
    el("select", { id: "run", onchange: (e) => render(body, Number(e.target.value)) }, ...body.runs.map((r, i) => {
      const o = el("option", { value: i }, shown(r.name, 80));
      if (i === chosen) o.setAttribute("selected", "");
      return o;
    })));
  main.replaceChildren(title, ...(body.error ? [el("p", { class: "error", role: "alert" }, `The run failed: ${paragraph(body.error)}\nThe page shows what ran before.`)] : []),
    ...body.notes.map((n) => el("p", { class: "note" }, paragraph(n))), ...(chooser ? [chooser] : []), ...parts.filter((p) => p));
  const canvases = () => { for (const view of views()) view.draw(); for (const p of plots) p(); };
  const views = () => [...Object.values(stitchReport.maps), ...others];
  const others = [...main.querySelectorAll("canvas.map")].map((c) => c.view).filter((v) => v && !Object.values(stitchReport.maps).includes(v));
  canvases();
  stitchReport.redraw = canvases;
  stitchReport.out = out;
  stitchReport.showAll = () => { shared.views[0]?.reset(); return stitchReport.lastDraw; };
  stitchReport.zoom = (f) => { shared.views[0]?.zoom(f); return stitchReport.lastDraw; };
  const maps = Object.values(stitchReport.maps);
  stitchReport.counts = { ...out.counts, rectangles: out.space.length, rows: out.rows.length, total: out.total,
    drawn: maps.reduce((n, m) => n + m.drawn, 0), drawnAllocations: maps.reduce((n, m) => n + m.shapes.ids.filter((i) => out.first[i]).length, 0),
    peaks: Object.fromEntries(out.spaces.map((s) => [s.name, s.peak])) };
  return out;
}
async function start() {
  const began = performance.now(), status = document.getElementById("status");
  try {
    const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const body = JSON.parse(await new Response(stream).text());
    render(body, 0);
    stitchReport.firstPicture = performance.now() - began;
    stitchReport.ready = true;
    let waiting = 0;
    const again = () => { clearTimeout(waiting); waiting = setTimeout(() => stitchReport.redraw(), 60); };
    addEventListener("resize", again);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  } catch (error) {
    stitchReport.error = String(error);
    status?.replaceChildren(`This page cannot be shown: ${error}. It needs a browser of 2023 or later.`);
  }
}
if (typeof document !== "undefined") { window.stitchReport = stitchReport; start(); }
