// Makes the timelines of a report zoomable. Without it they stand as drawn. Text goes in as text, nothing is loaded.
"use strict";
(() => {
  const source = document.getElementById("timelines-data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const LEAST_US = 200; // no stretch is shorter
  const BESIDE = 16; // neighbours that are named
  // Places in a row of the data.
  const ID = 0, LANE = 1, BEGIN = 2, OUTCOME = 3, CLASS = 4, REPLICA = 5, PROMPT = 6, OUTPUT = 7, COUNT = 8, SPANS = 9, CHUNKS = 10,
    SPENT = 11, GAP = 12; // by phase; [from, length, the usual, shared, whose]

  const make = (name, attributes, ...inside) => {
    const [kind, svg] = name.startsWith("svg:") ? [name.slice(4), true] : [name, false];
    const made = svg ? document.createElementNS(SVG, kind) : document.createElement(kind);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    made.append(...inside);
    return made;
  };
  const figures = (value) => {
    if (!value) return "0";
    const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(Number(value.toPrecision(3))))));
    return value.toLocaleString("en-US", { minimumFractionDigits: Math.min(digits, 6), maximumFractionDigits: Math.min(digits, 6) });
  };
  const ms = (us) => (Math.abs(us) >= 1e7 ? `${figures(us / 1e6)} s` : `${figures(us / 1e3)} ms`);
  const share = (part) => `${(100 * part).toFixed(part >= 0.1 || !part ? 0 : 1)} %`;

  const spansOf = (row) => {
    const found = [];
    for (let i = 0; i < row[SPANS].length; i += 3)
      found.push({ phase: row[SPANS][i], from: row[SPANS][i + 1], to: row[SPANS][i + 1] + row[SPANS][i + 2] });
    return found;
  };
  const stampsOf = (row) => {
    let at = 0;
    return row[CHUNKS].map((delta) => (at += delta));
  };
  // The account, not what is drawn: of many stalls the longest are, and what is too short is not.
  const tookOf = (row) => row[SPENT].reduce((sum, us) => sum + us, 0);
  const endOf = (row) => row[BEGIN] + tookOf(row);

  const ticks = (from, to, most) => {
    const raw = (to - from) / most, unit = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * unit).find((s) => s >= raw);
    const found = [];
    for (let i = Math.ceil(from / step - 1e-9); i * step <= to + 1e-9 * step; i++) found.push(i * step);
    return { found, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
  };

  class Timeline {
    constructor(box, point) {
      this.box = box;
      this.point = point;
      this.svg = box.querySelector("svg[role=img]");
      this.height = Number(this.svg.getAttribute("height"));
      this.panels = [...this.svg.children].filter((e) => e.tagName === "svg" && e.hasAttribute("viewBox"));
      this.groups = new Map([...this.svg.querySelectorAll("g[data-r]")].map((g) => [Number(g.dataset.r), g]));
      this.byId = new Map(point.requests.map((row) => [row[ID], row]));
      this.chosen = null;
      this.tools();
      this.panel = make("div", { class: "chosen", "aria-live": "polite" });
      box.append(this.panel);
      this.plot = box.querySelector(".plot");
      this.plot.tabIndex = 0;
      this.plot.setAttribute("role", "group");
      this.plot.setAttribute("aria-label", `Timeline at ${point.name}: plus and minus zoom, arrows move, 0 shows all`);
      this.pointer();
      this.plot.addEventListener("keydown", (event) => this.key(event));
      [this.from, this.to] = [0, point.us]; // as it stands drawn
    }

    tools() {
      const button = (text, label, act) => {
        const made = make("button", { type: "button", "aria-label": label, title: label }, text);
        made.addEventListener("click", act);
        return made;
      };
      const slowest = [...this.point.requests].sort((a, b) => tookOf(b) - tookOf(a));
      const id = `${this.box.id}-request`;
      this.select = make("select", { id }, make("option", { value: "" }, "none"));
      for (const row of slowest)
        this.select.append(make("option", { value: row[ID] }, `#${row[ID]}, ${ms(tookOf(row))}, ${row[OUTCOME]}`));
      this.select.addEventListener("change", () => (this.select.value === "" ? this.forget() : this.choose(Number(this.select.value))));
      this.box.prepend(make("div", { class: "tools noprint", role: "toolbar", "aria-label": `Zoom of the timeline at ${this.point.name}` },
        button("+", "Zoom in", () => this.zoom(0.5)),
        button("−", "Zoom out", () => this.zoom(2)),
        button("←", "Earlier", () => this.move(-0.25)),
        button("→", "Later", () => this.move(0.25)),
        button("All", "Show all of it", () => this.show(0, this.point.us)),
        make("label", { for: id }, "Zoom to request (slowest first)"), this.select,
        make("span", { class: "note" }, "or click a request; drag over a stretch; ctrl and wheel")));
    }

    key(event) {
      const acts = { "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), "0": () => this.show(0, this.point.us),
        ArrowLeft: () => this.move(-0.25), ArrowRight: () => this.move(0.25), Escape: () => this.forget() };
      if (event.ctrlKey || event.metaKey || event.altKey || !acts[event.key]) return;
      event.preventDefault();
      acts[event.key]();
    }

    pointer() {
      const at = (event) => {
        const r = this.svg.getBoundingClientRect();
        return Math.min(Math.max((event.clientX - r.left) / r.width, 0), 1);
      };
      let from = null, brush = null;
      this.svg.addEventListener("pointerdown", (event) => {
        if (event.button === 0) from = { share: at(event), x: event.clientX };
      });
      this.svg.addEventListener("pointermove", (event) => {
        if (!from || Math.abs(event.clientX - from.x) < 6) return;
        if (!brush) {
          brush = make("svg:rect", { class: "brush", y: 0, height: this.height });
          this.svg.append(brush);
          this.svg.setPointerCapture(event.pointerId);
        }
        const [a, b] = [from.share, at(event)].sort((x, y) => x - y);
        brush.setAttribute("x", `${100 * a}%`);
        brush.setAttribute("width", `${100 * (b - a)}%`);
      });
      const end = (event) => {
        if (brush) {
          brush.remove();
          const [a, b] = [from.share, at(event)].sort((x, y) => x - y), whole = this.to - this.from;
          if (event.type === "pointerup" && b > a) this.show(this.from + a * whole, this.from + b * whole);
        } else if (from && event.type === "pointerup") {
          const lane = event.target.closest("g[data-r]");
          if (lane) this.choose(Number(lane.dataset.r));
        }
        from = brush = null;
      };
      this.svg.addEventListener("pointerup", end);
      this.svg.addEventListener("pointercancel", end);
      this.svg.addEventListener("wheel", (event) => {
        if (!event.ctrlKey) return;
        event.preventDefault();
        this.zoom(event.deltaY > 0 ? 1.25 : 0.8, at(event));
      }, { passive: false });
    }

    zoom(times, around = 0.5) {
      const whole = this.to - this.from, length = Math.max(whole * times, LEAST_US), middle = this.from + around * whole;
      this.show(middle - around * length, middle + (1 - around) * length);
    }

    move(by) {
      const length = this.to - this.from;
      const from = Math.min(Math.max(this.from + by * length, 0), Math.max(this.point.us - length, 0));
      this.show(from, from + length);
    }

    show(from, to) {
      if (to - from < LEAST_US) to = from + LEAST_US;
      this.from = Math.max(0, from);
      this.to = Math.max(Math.min(this.point.us, to), this.from + 1);
      this.draw();
    }

    place(us) {
      return Math.min(Math.max((us - this.from) / (this.to - this.from), 0), 1);
    }

    bars(spans, y, height) {
      const out = [];
      for (const s of spans) {
        const a = this.place(s.from), b = this.place(s.to);
        if (b - a > 1e-4)
          out.push(make("svg:rect", { x: `${100 * a}%`, y, width: `${100 * (b - a)}%`, height, class: `f-${data.phases[s.phase][0]}` }));
      }
      return out;
    }

    draw() {
      const thick = this.point.thick;
      for (const row of this.point.requests) {
        const g = this.groups.get(row[ID]);
        if (!g) continue;
        g.replaceChildren(g.querySelector("title"), ...this.bars(spansOf(row), row[LANE] * thick + 0.5, thick - 1));
        const end = endOf(row);
        if (row[OUTCOME] !== "ok" && end >= this.from && end <= this.to)
          g.append(make("svg:svg", { x: `${100 * this.place(end)}%`, y: row[LANE] * thick + thick / 2 },
            make("svg:path", { d: "M-3-3 3 3M3-3-3 3", class: "cross" })));
        g.classList.toggle("is-chosen", this.chosen === row);
        g.classList.toggle("is-dim", this.chosen !== null && this.chosen !== row);
      }
      for (const panel of this.panels)
        panel.setAttribute("viewBox", `${(1000 * this.from) / this.point.us} 0 ${(1000 * (this.to - this.from)) / this.point.us} ${this.height}`);
      this.axis();
      if (this.chosen) this.detail();
    }

    axis() {
      const g = this.svg.querySelector("g.x-axis"), start = this.point.from_s;
      const [from, to] = [start + this.from / 1e6, start + this.to / 1e6], { found, digits } = ticks(from, to, 8);
      g.replaceChildren(make("svg:line", { x1: 0, y1: this.height, x2: "100%", y2: this.height, class: "axis" }));
      for (const t of found) {
        const x = `${(100 * (t - from)) / (to - from)}%`;
        g.append(make("svg:line", { x1: x, y1: 0, x2: x, y2: this.height + 4, class: "rule" }),
          make("svg:text", { x, y: this.height + 16, class: "tick", "text-anchor": "middle" }, t.toFixed(Math.min(digits, 6))));
      }
      g.append(make("svg:text", { x: "100%", y: this.height + 31, class: "tick", "text-anchor": "end" }, "seconds since the point began"));
    }

    choose(id) {
      const row = this.byId.get(id);
      if (!row) return;
      this.chosen = row;
      this.select.value = String(id);
      const room = 0.04 * (endOf(row) - row[BEGIN]);
      this.show(row[BEGIN] - room, endOf(row) + room);
      try {
        history.replaceState(null, "", `#request-${this.point.point}-${id}`);
      } catch { /* a page that may not have an address keeps what it has */ }
    }

    forget() {
      this.chosen = null;
      this.select.value = "";
      this.panel.replaceChildren();
      this.show(0, this.point.us);
    }

    beside() {
      const row = this.chosen, end = endOf(row);
      return this.point.requests
        .filter((r) => r !== row && r[REPLICA] === row[REPLICA] && r[BEGIN] < end && endOf(r) > row[BEGIN])
        .map((r) => ({ row: r, shared: Math.min(endOf(r), end) - Math.max(r[BEGIN], row[BEGIN]) }))
        .sort((a, b) => b.shared - a.shared);
    }

    gap() {
      if (!this.chosen[GAP]) return "";
      const [from, longest, usual, shared, whose] = this.chosen[GAP];
      const why = whose === null ? "" : `, ${ms(shared)} of it in the prefill of #${whose}`;
      return ` Gaps are usually ${ms(usual)}; the longest is ${ms(longest)}, ${ms(from - this.chosen[BEGIN])} after its beginning${why}.`;
    }

    detail() {
      const row = this.chosen, total = tookOf(row), spent = row[SPENT], stamps = stampsOf(row), beside = this.beside();
      const facts = [row[OUTCOME], row[CLASS] && `class ${row[CLASS]}`, row[PROMPT] !== null && `${row[PROMPT]} prompt tokens`,
        row[OUTPUT] !== null && `${row[OUTPUT]} output tokens`, `${row[COUNT]} chunks`].filter(Boolean).join(", ");
      const some = stamps.length < row[COUNT] ? ` ${stamps.length} of its ${row[COUNT]} chunks are drawn.` : "";
      const text = `Request ${row[ID]} (${facts}) took ${ms(total)}.${this.gap()}${some} ${beside.length} of the requests drawn were in flight with it.`;
      const strip = make("svg:svg", { width: "100%", height: 40, "aria-hidden": "true" }, ...this.bars(spansOf(row), 0, 26));
      for (const t of stamps)
        if (t >= this.from && t <= this.to) {
          const x = `${100 * this.place(t)}%`;
          strip.append(make("svg:line", { x1: x, x2: x, y1: 26, y2: 34, class: "bound" }));
        }
      const plot = make("div", { class: "plot" }, strip);
      plot.style.padding = "4px 16px 0 50px";
      const known = spent.map((us, i) => [data.phases[i][1], us]).filter(([, us]) => us > 0);
      const rows = known.map(([name, us]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, ms(us)), make("td", {}, share(us / total))));
      const head = make("tr", {}, ...["phase", "time", "share"].map((h) => make("th", { scope: "col" }, h)));
      const table = make("table", {}, make("caption", {}, `Phases of request ${row[ID]}`), make("thead", {}, head), make("tbody", {}, ...rows));
      const names = beside.slice(0, BESIDE).map(({ row: other, shared }) => {
        const made = make("button", { type: "button" }, `#${other[ID]}`);
        made.title = `${ms(shared)} together, ${other[OUTCOME]}`;
        made.addEventListener("click", () => this.choose(other[ID]));
        return make("li", {}, made);
      });
      const list = names.length ? [make("p", { class: "note" }, "Longest beside it:"), make("ul", { class: "beside" }, ...names)] : [];
      this.panel.replaceChildren(make("p", { class: "reading" }, text), plot, make("div", { class: "cols" }, table, make("div", {}, ...list)));
    }
  }

  const found = new Map();
  for (const point of data.points) {
    const box = document.getElementById(`timeline-${point.point}`);
    if (box && point.requests.length) found.set(String(point.point), new Timeline(box, point));
  }
  const follow = () => {
    const wanted = /^#request-(-?\d+)-(-?\d+)$/.exec(location.hash);
    const timeline = wanted && found.get(wanted[1]);
    if (!timeline) return;
    const fold = timeline.box.closest("details");
    if (fold) fold.open = true;
    timeline.choose(Number(wanted[2]));
    timeline.box.scrollIntoView();
  };
  window.addEventListener("hashchange", follow);
  follow();
})();
