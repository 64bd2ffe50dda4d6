// Sorting, themes, charts on demand, numbers behind every chart. No network, except in a live page: its own server.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const announce = (text) => { document.getElementById("announce").textContent = text; };
  const make = (tag, props = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), props);
    node.append(...children);
    return node;
  };

  // Theme: system, light, dark; remembered where the browser lets a page remember.
  const store = {
    get() { try { return localStorage.getItem("dampen-theme"); } catch { return null; } },
    set(value) { try { localStorage.setItem("dampen-theme", value); } catch { /* private mode: not remembered */ } },
  };
  const themes = ["system", "light", "dark"];
  const system = matchMedia("(prefers-color-scheme: dark)");
  let theme = themes.includes(store.get()) ? store.get() : "system";
  const dark = () => (theme === "system" ? system.matches : theme === "dark");
  const themeButton = document.getElementById("theme");
  const applyTheme = () => {
    if (theme === "system") root.removeAttribute("data-theme"); else root.dataset.theme = theme;
    themeButton.textContent = `Theme: ${theme}`;
  };
  applyTheme();
  themeButton.hidden = false;
  themeButton.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    store.set(theme);
    applyTheme();
    redraw();
  });
  system.addEventListener("change", () => { if (theme === "system") redraw(); });

  // Tables sort by the value behind a cell (data-v): numbers as numbers, the rest as text; empty cells stay last.
  const key = (text) => (text !== "" && Number.isFinite(Number(text)) ? Number(text) : text);
  const order = (a, b, sign) => {
    if (a === "" || b === "") return a === b ? 0 : a === "" ? 1 : -1;
    const cmp = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
    return sign * cmp;
  };
  const sortButtons = (table, sort) => {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, i) => {
      const button = make("button", { type: "button", className: "sort", textContent: head.textContent });
      head.textContent = "";
      head.append(button);
      button.addEventListener("click", () => {
        const first = head.classList.contains("num") ? "descending" : "ascending";
        const other = first === "descending" ? "ascending" : "descending";
        const next = head.getAttribute("aria-sort") === first ? other : first;
        heads.forEach((h) => h.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", next);
        sort(i, next === "ascending" ? 1 : -1);
        announce(`Sorted by ${button.textContent}, ${next}`);
      });
    });
  };
  document.querySelectorAll("table.sortable").forEach((table) => {
    sortButtons(table, (i, sign) => {
      const body = table.tBodies[0];
      const rows = [...body.rows].map((row) => [key(row.cells[i].dataset.v ?? ""), row]);
      rows.sort((a, b) => order(a[0], b[0], sign));
      const all = !body.querySelector("[data-more][hidden]");
      rows.forEach(([, row], place) => { if (!all) row.hidden = place >= Number(table.dataset.most); body.append(row); });
    });
  });
  document.querySelectorAll("button.more").forEach((button) => {
    button.addEventListener("click", () => {
      button.closest("section").querySelectorAll("tr[hidden]").forEach((row) => { row.hidden = false; });
      button.parentElement.remove();
    });
  });

  // A table from records, made only when someone opens it.
  const shown = (value, digits) => (value === null || value === undefined ? "" : typeof value === "number" && digits !== null ? value.toFixed(digits) : String(value));
  const csv = (columns, rows) => {
    const cell = (v) => {
      let text = v === null || v === undefined ? "" : String(v);
      if (typeof v === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`; // not a formula
      return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    return [columns.map((c) => cell(c.title)), ...rows.map((r) => r.map(cell))].map((r) => r.join(",")).join("\r\n");
  };
  const save = (name, text) => {
    const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    make("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  };
  const lazyTable = (place, columns, rows, name, page = 100) => {
    let view = rows, start = 0;
    const body = make("tbody");
    const head = make("tr", {}, ...columns.map((c) => make("th", { scope: "col", textContent: c.title, className: c.digits === null ? "" : "num" })));
    const table = make("table", { className: "grid" }, make("thead", {}, head), body);
    const where = make("span");
    const back = make("button", { type: "button", textContent: "Previous" });
    const forth = make("button", { type: "button", textContent: "Next" });
    const draw = () => {
      body.replaceChildren(...view.slice(start, start + page).map((r) => make("tr", {}, ...r.map((v, i) => make("td", { textContent: shown(v, columns[i].digits), className: columns[i].digits === null ? "" : "num" })))));
      const end = Math.min(start + page, view.length);
      where.textContent = view.length ? `${start + 1} to ${end} of ${view.length}` : "nothing found";
      back.disabled = start === 0;
      forth.disabled = end >= view.length;
    };
    sortButtons(table, (i, sign) => { view = [...view].sort((a, b) => order(a[i] ?? "", b[i] ?? "", sign)); start = 0; draw(); });
    back.addEventListener("click", () => { start -= page; draw(); });
    forth.addEventListener("click", () => { start += page; draw(); });
    const tools = make("div", { className: "tools" });
    if (rows.length > 20) {
      const filter = make("input", { type: "search", placeholder: "Filter", ariaLabel: "Filter the rows" });
      filter.addEventListener("input", () => {
        const text = filter.value.toLowerCase();
        view = rows.filter((r) => r.some((v) => String(v ?? "").toLowerCase().includes(text)));
        start = 0;
        draw();
      });
      tools.append(filter);
    }
    const download = make("button", { type: "button", textContent: "Save as CSV" });
    download.addEventListener("click", () => save(`${name}.csv`, csv(columns, rows)));
    tools.append(download);
    if (rows.length > page) tools.append(back, forth);
    tools.append(where);
    draw();
    const scroll = make("div", { className: "lazy", tabIndex: 0, role: "region", ariaLabel: "Numbers" }, table);
    place.append(tools, scroll);
  };
  const once = (details, fill) => details.addEventListener("toggle", () => {
    if (details.open && !details.dataset.filled) { details.dataset.filled = "1"; fill(); }
  });
  document.querySelectorAll("details.numbers").forEach((details) => once(details, () => {
    const figure = data.figures[details.dataset.figure];
    lazyTable(details, figure.columns, figure.records, details.dataset.figure);
  }));
  document.querySelectorAll("details.runs").forEach((details) => once(details, () => {
    const runs = data.runs[details.dataset.runs];
    lazyTable(details, runs.columns, runs.records, `${details.dataset.runs}-runs`);
  }));

  // Charts: drawn when near the view, then the others when there is time (for printing and for search).
  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const themed = (spec) => {
    let text = JSON.stringify(spec);
    if (dark()) data.colors.forEach(([light, other]) => { text = text.replaceAll(light, other); });
    return JSON.parse(text);
  };
  const config = () => {
    const ink = color("--ink"), muted = color("--muted"), line = color("--line");
    const font = getComputedStyle(document.body).fontFamily;
    return {
      background: null, font, view: { stroke: null }, padding: 2,
      axis: { labelColor: muted, titleColor: muted, gridColor: line, domainColor: color("--line-strong"), tickColor: color("--line-strong"), labelFontSize: 12, titleFontSize: 12, titleFontWeight: 500, titlePadding: 8, gridOpacity: 1, labelFlush: false, labelOverlap: true },
      legend: { labelColor: ink, titleColor: muted, labelFontSize: 12, symbolSize: 90, rowPadding: 5, columnPadding: 16 },
      rule: { color: muted }, line: { color: muted }, text: { color: ink, fontSize: 12 },
    };
  };
  const draw = async (place) => {
    const figure = data.figures[place.dataset.figure];
    const spec = themed(figure.panels[Number(place.dataset.panel)]);
    spec.config = config();
    if (place.clientWidth < 460) narrow(spec);
    place.dataset.state = "drawing";
    try {
      if (place.view) place.view.finalize();
      const made = await vegaEmbed(place, spec, { actions: false, renderer: "svg", ast: true, defaultStyle: false, tooltip: { disableDefaultStyle: true } });
      place.view = made.view;
      place.dataset.state = "drawn";
    } catch (error) {
      place.dataset.state = "failed";
      place.textContent = "This chart could not be drawn; its numbers are below.";
      console.error(error);
    }
  };
  // On a phone the legend takes fewer columns and long row names give way to the plot.
  const narrow = (spec) => {
    const visit = (node) => {
      if (!node || typeof node !== "object") return;
      if (node.legend && node.legend.columns) node.legend.columns = Math.max(1, Math.floor(node.legend.columns * 0.7));
      if (node.axis && node.axis.labelLimit) node.axis.labelLimit = 110;
      Object.values(node).forEach(visit);
    };
    visit(spec.encoding);
    (spec.layer || []).forEach(visit);
  };
  const places = [...document.querySelectorAll(".chart")];
  const pending = new Set(places);
  const redraw = () => places.forEach((place) => { if (!pending.has(place)) draw(place); });
  if ("IntersectionObserver" in window) {
    const watcher = new IntersectionObserver((entries) => {
      entries.filter((e) => e.isIntersecting && pending.has(e.target)).forEach((e) => {
        pending.delete(e.target);
        watcher.unobserve(e.target);
        draw(e.target);
      });
    }, { rootMargin: "300px" });
    places.forEach((place) => watcher.observe(place));
  }
  const idle = window.requestIdleCallback || ((work) => setTimeout(work, 60));
  const next = () => {
    const [place] = pending;
    if (!place) { root.dataset.charts = "done"; return; }
    pending.delete(place);
    draw(place).finally(() => idle(next));
  };
  addEventListener("load", () => idle(next));

  // A live page asks its own server whether something new was recorded.
  if (root.dataset.live) {
    const look = async () => {
      try {
        const answer = await fetch("version", { cache: "no-store" });
        if (answer.ok && (await answer.text()) !== root.dataset.live) { location.reload(); return; }
      } catch { document.querySelector(".live").textContent = "server stopped"; return; }
      setTimeout(look, 2000);
    };
    setTimeout(look, 2000);
  }
})();
