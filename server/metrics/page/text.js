// Numbers as people read them, and tables. Texts of jobs are strangers': they become text nodes, never markup.

export function bytes(value) {
  if (value === null || value === undefined || value < 0) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${(value * 1e3).toPrecision(3)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (value < 86400) return `${Math.floor(value / 3600)} h ${Math.floor((value / 60) % 60)} min`;
  return `${Math.floor(value / 86400)} d ${Math.floor((value / 3600) % 24)} h`;
}

export const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`);
export const count = (value) => (value >= 1e9 ? `${(value / 1e9).toFixed(2)} G` : value >= 1e6 ? `${(value / 1e6).toFixed(1)} M` : `${value}`);
export const pace = (value) => (value > 0 ? value.toPrecision(3) : "0");
export const orDash = (text) => (text === "" || text === null || text === undefined ? "–" : `${text}`);
export const clock = (unixMs) => new Date(unixMs).toLocaleString("sv-SE"); // 2026-11-21 09:27:15

export function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

const actions = new WeakMap();

function fillCell(cell, value) {
  const { text, className = "", action = null } = typeof value === "object" ? value : { text: value };
  if (cell.className !== className) cell.className = className;
  let holder = cell;
  if (action) {
    holder = cell.querySelector("button");
    if (!holder) {
      holder = element("button");
      holder.type = "button";
      holder.addEventListener("click", () => actions.get(holder)());
      cell.replaceChildren(holder);
    }
    actions.set(holder, action);
  } else if (cell.firstElementChild) {
    cell.replaceChildren();
  }
  if (holder.textContent !== `${text}`) holder.textContent = `${text}`;
}

// `columns`: [title, class]; `rows`: a list of cells each, a text or {text, className, action}. What has not changed is
// not touched, so that a thousand rows a second cost little, and a selection of text stays.
export function fillTable(table, columns, rows, { empty = "none", selected = null } = {}) {
  if (!table.tHead) {
    const head = table.createTHead().insertRow();
    for (const [title, className = ""] of columns) {
      const cell = element("th", className, title);
      cell.scope = "col";
      head.append(cell);
    }
    table.createTBody();
  }
  const body = table.tBodies[0];
  if (rows.length === 0) {
    const cell = element("td", "", empty);
    cell.colSpan = columns.length;
    body.replaceChildren(element("tr", "", cell));
    return;
  }
  if (body.rows.length === 1 && body.rows[0].cells.length !== columns.length) body.replaceChildren();
  while (body.rows.length > rows.length) body.lastElementChild.remove();
  while (body.rows.length < rows.length) {
    body.append(element("tr", "", ...columns.map(([, className = ""]) => element("td", className))));
  }
  const lines = body.children;
  rows.forEach((row, number) => {
    const cells = lines[number].children;
    row.forEach((value, column) => {
      const base = columns[column][1] ?? "";
      const cell = typeof value === "object" ? value : { text: value };
      fillCell(cells[column], { ...cell, className: [base, cell.className].filter(Boolean).join(" ") });
    });
    if (selected !== null) lines[number].setAttribute("aria-selected", number === selected ? "true" : "false");
  });
}

export function fillText(id, text) {
  const place = document.getElementById(id);
  if (place.textContent !== text) place.textContent = text;
}
