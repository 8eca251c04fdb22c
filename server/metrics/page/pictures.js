// Pictures as plain SVG. Whatever comes from outside becomes text or a number, never markup.

const NS = "http://www.w3.org/2000/svg";
const WIDTH = 640;

export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const round = (value) => Math.round(value * 10) / 10;

// The least round number that is not less.
function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

function label(seconds) {
  return seconds < 90 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`;
}

// Samples over time. `series`: one or more functions of a sample, drawn as areas upon each other, or as one curve;
// `format`: of a value at the axis; `classOf`: an area's colour. A sample whose value is null is a gap. `show`: called
// with the sample below the pointer, or null.
export class Curves {
  constructor(place, { series, stacked, format, classOf, show }) {
    Object.assign(this, { series, stacked, format, classOf, show, samples: [], at: null });
    this.height = 170;
    this.root = svg("svg", { viewBox: `0 0 ${WIDTH} ${this.height}`, role: "img" });
    place.replaceChildren(this.root);
    this.root.addEventListener("pointermove", (event) => this.#point(event));
    this.root.addEventListener("pointerleave", () => this.#leave());
  }

  #x(time) {
    return round(48 + ((time - this.from) / (this.to - this.from)) * (WIDTH - 56));
  }
  #y(value) {
    return round(this.height - 22 - (Math.min(value, this.top) / this.top) * (this.height - 34));
  }

  draw(samples) {
    this.samples = samples;
    const values = samples.map((sample) => this.series.map((of) => of(sample)));
    const sums = values.filter((each) => each[0] !== null).map((each) => each.reduce((a, b) => a + b, 0));
    this.to = samples.length ? samples[samples.length - 1].time : 1;
    this.from = Math.min(samples.length ? samples[0].time : 0, this.to - 60_000);
    this.top = niceTop(Math.max(0, ...sums) * 1.05);
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const y = this.#y(this.top * share);
      parts.push(svg("line", { class: "grid", x1: 48, x2: WIDTH - 8, y1: y, y2: y }));
      parts.push(svg("text", { x: 42, y: y + 4, "text-anchor": "end" }, this.format(this.top * share)));
    }
    const ago = label((this.to - this.from) / 1000);
    parts.push(svg("text", { x: 48, y: this.height - 5 }, ago));
    parts.push(svg("text", { x: WIDTH - 8, y: this.height - 5, "text-anchor": "end" }, "now"));
    parts.push(...(this.stacked ? this.#areas(values) : [this.#curve(values)]));
    if (this.at !== null && samples[this.at]) {
      const x = this.#x(samples[this.at].time);
      parts.push(svg("line", { class: "cursor", x1: x, x2: x, y1: 12, y2: this.height - 22 }));
    }
    this.root.replaceChildren(...parts);
    this.show(this.at === null ? null : (samples[this.at] ?? null));
  }

  // Of samples without a gap between them.
  #runs(values) {
    const runs = [[]];
    values.forEach((each, index) => {
      if (each[0] === null) runs.push([]);
      else runs[runs.length - 1].push(index);
    });
    return runs.filter((run) => run.length);
  }
  #areas(values) {
    const base = values.map(() => 0);
    return this.series.map((_, number) => {
      let path = "";
      for (const run of this.#runs(values)) {
        const upper = run.map((i) => [this.#x(this.samples[i].time), this.#y(base[i] + values[i][number])]);
        const lower = run.map((i) => [this.#x(this.samples[i].time), this.#y(base[i])]).reverse();
        path += `M${[...upper, ...lower].map((point) => point.join(" ")).join("L")}Z`;
        for (const i of run) base[i] += values[i][number];
      }
      return svg("path", { class: this.classOf(number), d: path });
    });
  }
  #curve(values) {
    const path = this.#runs(values)
      .map((run) => `M${run.map((i) => `${this.#x(this.samples[i].time)} ${this.#y(values[i][0])}`).join("L")}`)
      .join("");
    return svg("path", { class: "curve", d: path });
  }

  #point(event) {
    if (!this.samples.length) return;
    const box = this.root.getBoundingClientRect();
    const time = this.from + (((event.clientX - box.left) / box.width) * WIDTH - 48) / (WIDTH - 56) * (this.to - this.from);
    const far = (sample) => Math.abs(sample.time - time);
    this.at = this.samples.reduce((best, sample, i) => (far(sample) < far(this.samples[best]) ? i : best), 0);
    this.draw(this.samples);
  }
  #leave() {
    this.at = null;
    this.draw(this.samples);
  }
}

// A square for each rank; a changed state changes one attribute.
export class RankMap {
  constructor(place) {
    this.place = place;
    this.squares = [];
  }
  draw(classes, titles) {
    if (this.squares.length !== classes.length) this.#make(classes.length);
    classes.forEach((name, rank) => {
      const { square, title } = this.squares[rank];
      if (square.getAttribute("class") !== name) square.setAttribute("class", name);
      if (title.textContent !== titles[rank]) title.textContent = titles[rank];
    });
  }
  #make(count) {
    const side = count <= 32 ? 34 : count <= 256 ? 20 : 12;
    const columns = Math.max(1, Math.floor(WIDTH / side));
    const rows = Math.max(1, Math.ceil(count / columns));
    this.squares = Array.from({ length: count }, (_, rank) => {
      const title = svg("title");
      const x = (rank % columns) * side;
      const y = Math.floor(rank / columns) * side;
      const square = svg("rect", { x, y, width: side - 2, height: side - 2, rx: 2, "data-rank": rank }, title);
      return { square, title };
    });
    const root = svg("svg", { viewBox: `0 0 ${WIDTH} ${rows * side}`, role: "img" });
    root.append(...this.squares.map(({ square }) => square));
    this.place.replaceChildren(root);
  }
}

// A bar for each device, with a piece for each purpose; `bars`: [{name, total, pieces: [{bytes, class, title}], planned}].
export function drawBars(place, bars, format) {
  const height = 34;
  const most = Math.max(1, ...bars.map((bar) => Math.max(bar.total, bar.planned)));
  const root = svg("svg", { viewBox: `0 0 ${WIDTH} ${Math.max(1, bars.length) * height}`, role: "img" });
  const scale = (bytes) => round((bytes / most) * (WIDTH - 190));
  bars.forEach((bar, row) => {
    const y = row * height + 6;
    root.append(svg("text", { x: 0, y: y + 15 }, bar.name));
    let x = 80;
    for (const piece of bar.pieces) {
      const width = scale(piece.bytes);
      root.append(svg("rect", { class: piece.class, x, y, width: Math.max(0, width - 1), height: 22 }, svg("title", {}, piece.title)));
      x += width;
    }
    if (bar.planned > bar.total) {
      root.append(svg("rect", { class: "planned", x: 80, y, width: scale(bar.planned), height: 22 }));
    }
    root.append(svg("text", { x: 80 + scale(Math.max(bar.total, bar.planned)) + 8, y: y + 15 }, format(bar.total)));
  });
  place.replaceChildren(root);
}

export function swatch(name) {
  return svg("svg", { viewBox: "0 0 10 10" }, svg("rect", { class: name, width: 10, height: 10, rx: 2 }));
}
