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
      head.dataset.title = head.textContent;  // for print: browsers repeat a header on every page, but not its buttons
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

  // Explanations of headings: a button for mouse, touch and keyboard; Escape or another click closes it.
  const help = make("div", { id: "help", hidden: true });
  help.setAttribute("role", "status");
  document.body.append(help);
  const closeHelp = () => { help.hidden = true; document.querySelectorAll("button.help").forEach((b) => b.setAttribute("aria-expanded", "false")); };
  document.querySelectorAll("th[data-help]").forEach((head) => {
    const title = head.dataset.title ?? head.textContent;
    const button = make("button", { type: "button", className: "help", ariaLabel: `About ${title}`, ariaExpanded: "false" });
    button.addEventListener("click", (event) => {
      event.stopPropagation();
      const open = button.getAttribute("aria-expanded") === "true";
      closeHelp();
      if (open) return;
      const box = button.getBoundingClientRect();
      help.textContent = head.dataset.help;
      help.hidden = false;
      button.setAttribute("aria-expanded", "true");
      help.style.left = `${Math.max(8, Math.min(box.left + scrollX, scrollX + root.clientWidth - help.offsetWidth - 8))}px`;
      help.style.top = `${box.bottom + scrollY + 6}px`;
    });
    head.append(button);
  });
  document.addEventListener("click", closeHelp);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") closeHelp(); });

  // Exports: the table in other formats, and the card.
  document.querySelectorAll("[data-exports]").forEach((place) => {
    const types = { svg: "image/svg+xml", csv: "text/csv", md: "text/markdown", tex: "text/x-tex" };
    place.append("Save as");
    Object.entries(data.exports[place.dataset.exports]).forEach(([label, [name, text]]) => {
      const button = make("button", { type: "button", textContent: label });
      button.addEventListener("click", () => { save(name, text, types[name.split(".").pop()]); announce(`Saved ${name}`); });
      place.append(button);
    });
    place.hidden = false;
  });

  // Which rows and columns of a table are shown.
  document.querySelectorAll("[data-view]").forEach((place) => {
    const table = document.querySelector(`[data-table="${place.dataset.view}"]`);
    const heads = [...table.tHead.rows[0].cells], rows = [...table.tBodies[0].rows];
    const at = heads.findIndex((h) => h.classList.contains("verdict"));
    const box = (label, on, act) => {
      const input = make("input", { type: "checkbox", checked: on });
      input.addEventListener("change", () => act(input.checked));
      return make("label", {}, input, label);
    };
    const panel = (title, choices) => make("details", {}, make("summary", { textContent: title }), make("div", { className: "choices" }, ...choices));
    if (at > 0) {
      const words = [...new Set(rows.map((row) => row.cells[at].dataset.v).filter(Boolean))];
      const off = new Set();
      if (words.length > 1) place.append(panel("Verdicts", words.map((word) => box(word, true, (on) => {
        if (on) off.delete(word); else off.add(word);
        rows.forEach((row) => { row.classList.toggle("filtered", off.has(row.cells[at].dataset.v)); });
        announce(`${rows.filter((row) => !row.classList.contains("filtered")).length} methods shown`);
      }))));
    }
    place.append(panel("Columns", heads.slice(1).map((head, i) => box(head.dataset.title ?? head.textContent, true, (on) => {
      [head, ...rows.map((row) => row.cells[i + 1])].forEach((cell) => { cell.hidden = !on; });
      cues();
    }))));
    place.hidden = false;
  });

  // A click on a method opens its seeds, settings, log, folder and command.
  document.querySelectorAll("[data-details]").forEach((place) => {
    const known = data.details[place.dataset.details];
    const table = document.querySelector(`[data-table="${place.dataset.details}"]`);
    const term = (name, ...value) => [make("dt", { textContent: name }), make("dd", {}, ...value)];
    const open = (name) => {
      const d = known[name];
      const body = make("tbody", {}, ...d.seeds.map(([seed, status, value, folder, reason]) => make("tr", {}, ...[seed, status, shown(value, 3), folder, reason].map((v, i) => make("td", { className: i === 2 ? "num" : "", textContent: String(v) })))));
      const head = make("tr", {}, ...["Seed", "Status", "Value", "Folder", "Reason"].map((t, i) => make("th", { scope: "col", className: i === 2 ? "num" : "", textContent: t })));
      const only = make("button", { type: "button", textContent: "Show its curves" });
      only.addEventListener("click", () => {
        const picker = document.querySelector(`[data-picker="${place.dataset.details}"]`);
        picker.querySelectorAll("[type=checkbox]").forEach((b) => { b.checked = b.value === name || b.value === data.chosen[place.dataset.details].reference; });
        picker.querySelector("[type=checkbox]").dispatchEvent(new Event("change"));
        document.getElementById(`${place.dataset.details}-curves`)?.scrollIntoView();
      });
      const close = make("button", { type: "button", textContent: "Close" });
      close.addEventListener("click", () => { place.hidden = true; });
      place.replaceChildren(
        make("p", {}, make("strong", { textContent: name })),
        make("dl", {}, ...term("Verdict", d.verdict), ...term("Settings", d.settings || "none"), ...(d.code ? term("Python", make("code", { textContent: d.code })) : []), ...(d.command ? term("Command", make("code", { textContent: d.command })) : [])),
        make("div", { className: "lazy", tabIndex: 0, role: "region", ariaLabel: `Seeds of ${name}` }, make("table", { className: "grid" }, make("thead", {}, head), body)),
        ...(d.log ? [make("p", { className: "quiet", textContent: "The end of what the first run printed:" }), make("pre", { textContent: d.log, tabIndex: 0 })] : []),
        make("div", { className: "tools" }, only, close));
      place.hidden = false;
      announce(`Opened ${name}`);
    };
    table.querySelectorAll("th[data-method]").forEach((head) => {
      const name = head.dataset.method, span = head.querySelector(".name > span:last-child");
      if (!(name in known)) return;
      const first = span.firstChild;
      const button = make("button", { type: "button", className: "open", textContent: first.textContent.trim() });
      first.replaceWith(button, " ");
      button.addEventListener("click", () => open(name));
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
  const save = (name, text, type = "text/csv") => {
    const url = URL.createObjectURL(new Blob([text], { type }));
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
      const filter = make("input", { type: "search", placeholder: "Filter", ariaLabel: "Filter the results" });
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
    const scroll = make("div", { className: "lazy", tabIndex: 0, role: "region", ariaLabel: `Numbers of ${name}` }, table);
    place.append(tools, scroll);
  };
  const once = (details, fill) => details.addEventListener("toggle", () => {
    if (details.open && !details.dataset.filled) { details.dataset.filled = "1"; fill(); }
  });
  document.querySelectorAll("details.numbers").forEach((details) => once(details, () => {
    const figure = data.figures[details.dataset.figure];
    lazyTable(details, figure.columns, figure.records, details.dataset.figure);
  }));
  document.querySelectorAll("details.allrows").forEach((details) => once(details, () => {
    const rows = data.rows[details.dataset.rows];
    lazyTable(details, rows.columns, rows.records, `${details.dataset.rows}-rows`);
  }));
  document.querySelectorAll("details.runs").forEach((details) => once(details, () => {
    const runs = data.runs[details.dataset.runs];
    lazyTable(details, runs.columns, runs.records, `${details.dataset.runs}-runs`);
  }));

  // Compare two methods: every metric over the seeds that both have, or in one of them.
  document.querySelectorAll("details.pair").forEach((details) => once(details, () => {
    const { metrics, names, rows } = data.pairs[details.dataset.pair];
    const choice = (label, at) => {
      const select = make("select", { ariaLabel: label }, ...names.map((n) => make("option", { value: n, textContent: n })));
      select.selectedIndex = at;
      return select;
    };
    const one = choice("First method", 0), two = choice("Second method", Math.min(1, names.length - 1));
    const seed = make("select", { ariaLabel: "Seed" });
    const body = make("tbody"), what = make("p", { className: "quiet" }), differing = make("tbody");
    const settings = make("table", { className: "grid" }, make("thead", {}, make("tr", {}, ...["Settings that differ", "First", "Second"].map((t) => make("th", { scope: "col", textContent: t })))), differing);
    const head = make("tr", {}, ...["Metric", "First", "Second", "Difference", "SD of differences", "Shared seeds"].map((t, i) => make("th", { scope: "col", textContent: t, className: i ? "num" : "" })));
    const mean = (v) => v.reduce((a, b) => a + b, 0) / v.length;
    const fill = () => {
      const a = rows[one.value], b = rows[two.value];
      const shared = Object.keys(a.seeds).filter((s) => s in b.seeds);
      const kept = shared.includes(seed.value) ? seed.value : "";
      seed.replaceChildren(make("option", { value: "", textContent: `all ${shared.length} shared seeds` }), ...shared.map((s) => make("option", { value: s, textContent: `seed ${s}` })));
      seed.value = kept;
      const used = kept ? [kept] : shared;
      body.replaceChildren(...metrics.map((metric, i) => {
        const pairs = used.map((s) => [a.seeds[s][i], b.seeds[s][i]]).filter(([x, y]) => x !== null && y !== null);
        const differences = pairs.map(([x, y]) => x - y);
        const m = pairs.length ? mean(differences) : null;
        const sd = pairs.length > 1 ? Math.sqrt(differences.reduce((t, d) => t + (d - m) ** 2, 0) / (pairs.length - 1)) : null;
        const values = [pairs.length ? mean(pairs.map((p) => p[0])) : null, pairs.length ? mean(pairs.map((p) => p[1])) : null, m, sd];
        return make("tr", {}, make("th", { scope: "row", textContent: metric.title }), ...values.map((v) => make("td", { className: "num", textContent: shown(v, metric.digits) })), make("td", { className: "num", textContent: String(pairs.length) }));
      }));
      const keys = [...new Set([...Object.keys(a.settings), ...Object.keys(b.settings)])].filter((k) => a.settings[k] !== b.settings[k]);
      differing.replaceChildren(...keys.map((k) => make("tr", {}, make("th", { scope: "row", textContent: k }), make("td", { textContent: a.settings[k] ?? "not set" }), make("td", { textContent: b.settings[k] ?? "not set" }))));
      what.textContent = `First: ${a.what}${a.cost ? `, ${a.cost.toFixed(2)}x` : ""}. Second: ${b.what}${b.cost ? `, ${b.cost.toFixed(2)}x` : ""}. Differences are first minus second, seed by seed, and not tested here.`;
    };
    [one, two, seed].forEach((select) => select.addEventListener("change", fill));
    details.append(make("div", { className: "tools" }, one, two, seed), make("div", { className: "lazy", tabIndex: 0, role: "region", ariaLabel: "Compare two methods" }, make("table", { className: "grid" }, make("thead", {}, head), body)), make("div", { className: "lazy", tabIndex: 0, role: "region", ariaLabel: "Settings that differ" }, settings), what);
    fill();
  }));

  // The picker of a table says which rows its charts draw. A chart without any of them is not shown.
  const chosen = {};
  Object.entries(data.chosen).forEach(([key, { first }]) => { chosen[key] = new Set(first); });
  const tableOf = (figure) => figure.split("-")[0];
  const picked = (spec, key) => {
    const names = chosen[key], known = new Set(data.chosen[key].rows);
    let left = false, any = false;
    const visit = (node) => {
      if (!node || typeof node !== "object") return;
      if (node.data && Array.isArray(node.data.values) && node.data.values.some((v) => v && known.has(v.row))) {
        any = true;
        node.data.values = node.data.values.filter((v) => !known.has(v.row) || names.has(v.row));
        left = left || node.data.values.length > 0;
      }
      const scale = node.scale;
      if (scale && Array.isArray(scale.domain) && Array.isArray(scale.range) && scale.domain.some((n) => known.has(n))) {
        const keep = scale.domain.map((n) => !known.has(n) || names.has(n));
        scale.domain = scale.domain.filter((_, i) => keep[i]);
        scale.range = scale.range.filter((_, i) => keep[i]);
      }
      Object.entries(node).forEach(([k, v]) => { if (k !== "values") visit(v); });
    };
    visit(spec);
    if (spec.layer) spec.layer = spec.layer.filter((l) => !(l.data && Array.isArray(l.data.values) && !l.data.values.length));
    return left || !any;
  };
  const smoothed = (spec, weight) => {
    const visit = (node) => {
      if (!node || typeof node !== "object") return;
      if (node.data && Array.isArray(node.data.values)) {
        const state = {};
        node.data.values = node.data.values.map((v) => {
          if (v.mean === undefined) return v;
          const line = `${v.row} ${v.part ?? ""}`;
          const own = state[line] ?? (state[line] = { n: 0 });
          own.n += 1;
          const out = { ...v };
          ["mean", "low", "high"].forEach((k) => {  // an exponential average without a start from zero
            own[k] = weight * (own[k] ?? 0) + (1 - weight) * v[k];
            out[k] = own[k] / (1 - weight ** own.n);
          });
          return out;
        });
      }
      Object.entries(node).forEach(([k, v]) => { if (k !== "values") visit(v); });
    };
    visit(spec);
  };
  const smoothing = {};
  document.querySelectorAll("[data-smooth]").forEach((slider) => {
    slider.closest("p").hidden = false;
    slider.addEventListener("input", () => {
      smoothing[slider.dataset.smooth] = Number(slider.value);
      slider.parentElement.querySelector("output").textContent = slider.value;
      redraw((place) => place.dataset.figure === slider.dataset.smooth);
    });
  });
  const single = new Set();
  document.querySelectorAll("[data-seeds]").forEach((box) => {
    box.closest("p").hidden = false;
    box.addEventListener("change", () => {
      if (box.checked) single.add(box.dataset.seeds); else single.delete(box.dataset.seeds);
      redraw((place) => place.dataset.figure === box.dataset.seeds);
    });
  });
  document.querySelectorAll("[data-picker]").forEach((picker) => {
    const key = picker.dataset.picker, boxes = [...picker.querySelectorAll("[type=checkbox]")];
    const count = picker.querySelector(".count");
    const tell = () => { count.textContent = `${chosen[key].size} of ${boxes.length} methods chosen`; };
    const apply = () => {
      chosen[key] = new Set(boxes.filter((b) => b.checked).map((b) => b.value));
      tell();
      redraw((place) => tableOf(place.dataset.figure) === key && !data.figures[place.dataset.figure].fixed);
    };
    const reference = data.chosen[key].first[0];
    const sets = { best: (b) => data.chosen[key].first.includes(b.value), all: () => true, none: (b) => b.value === (data.chosen[key].reference ?? reference) };
    picker.querySelectorAll("[data-set]").forEach((button) => button.addEventListener("click", () => {
      boxes.forEach((b) => { b.checked = sets[button.dataset.set](b); });
      apply();
    }));
    boxes.forEach((b) => b.addEventListener("change", apply));
    picker.querySelector("[type=search]").addEventListener("input", (event) => {
      const text = event.target.value.toLowerCase();
      boxes.forEach((b) => { b.parentElement.hidden = !b.value.toLowerCase().includes(text); });
    });
    picker.hidden = false;
    tell();
  });

  // A table that is wider than its place says so.
  const cues = () => document.querySelectorAll(".scroll").forEach((scroll) => {
    const cut = scroll.scrollWidth > scroll.clientWidth + scroll.scrollLeft + 2;
    scroll.classList.toggle("cut", cut);
    const cue = scroll.nextElementSibling;
    if (cue && cue.classList.contains("cue")) cue.hidden = scroll.scrollWidth <= scroll.clientWidth + 2;
  });
  document.querySelectorAll(".scroll").forEach((scroll) => scroll.addEventListener("scroll", cues, { passive: true }));
  addEventListener("resize", cues);
  cues();

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
      axis: { labelColor: muted, titleColor: muted, gridColor: line, domainColor: color("--line-strong"), tickColor: color("--line-strong"), labelFontSize: 12, titleFontSize: 12, titleFontWeight: 500, titlePadding: 8, gridOpacity: 1, labelFlush: false, labelOverlap: true, labelSeparation: 8 },
      legend: { labelColor: ink, titleColor: muted, labelFontSize: 12, symbolSize: 90, rowPadding: 5, columnPadding: 16 },
      rule: { color: muted }, line: { color: muted }, text: { color: ink, fontSize: 12 },
    };
  };
  const draw = async (place) => {
    const figure = data.figures[place.dataset.figure];
    const spec = themed(figure.panels[Number(place.dataset.panel)]);
    const key = tableOf(place.dataset.figure);
    if (!single.has(place.dataset.figure) && spec.layer) spec.layer = spec.layer.filter((l) => l.name !== "seeds");
    if (smoothing[place.dataset.figure]) smoothed(spec, smoothing[place.dataset.figure]);
    const some = figure.fixed || !(key in chosen) || picked(spec, key);
    place.parentElement.hidden = !some;
    if (!some) { place.dataset.state = "drawn"; place.replaceChildren(); return; }
    spec.config = config();
    breakNames(spec, place.clientWidth);
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
  // Names of methods that would take the plot's room are broken at "(" and "+", and stand beside it, never over it.
  const breakNames = (spec, width) => {
    const axes = [spec, ...(spec.layer || [])].map((l) => l.encoding && l.encoding.y).filter((y) => y && y.field === "row" && y.axis);
    const rows = new Set((spec.layer || [spec]).flatMap((l) => (l.data && l.data.values) || []).map((v) => v.row).filter(Boolean));
    const longest = Math.max(0, ...[...rows].map((n) => n.length));
    if (!axes.length || 6.8 * longest < 0.33 * width) return;
    const broken = "split(replace(replace(replace(datum.label, '(', '~('), ' + ', '~+ '), ' + ', '~+ '), '~')";
    axes.forEach((y) => { Object.assign(y.axis, { labelExpr: broken, labelLimit: Math.round(0.42 * width), labelFontSize: 11, labelLineHeight: 13, ticks: false, domain: false }); });
    spec.height = Math.max(spec.height, 40 * rows.size);
  };
  // On a phone the legend takes fewer columns, and names beside points would be cut: the legend has them.
  const narrow = (spec) => {
    const named = (spec.layer || []).some((l) => l.mark && l.mark.type === "text" && l.encoding.text && l.encoding.text.field === "text");
    if (named) {
      const leads = (l) => l.encoding.y && l.encoding.y.field === "at";  // the names, and the lines that lead to them
      spec.layer = spec.layer.filter((l) => !leads(l));
      spec.layer.forEach((l) => ["color", "shape"].forEach((channel) => {
        if (l.encoding[channel] && l.encoding[channel].field === "row") l.encoding[channel].legend = { title: null, orient: "bottom", columns: 1, labelLimit: 300, symbolLimit: 0 };
      }));
    }
    const visit = (node) => {
      if (!node || typeof node !== "object") return;
      if (node.legend && node.legend.columns) node.legend.columns = Math.max(1, Math.floor(node.legend.columns * 0.7));
      Object.values(node).forEach(visit);
    };
    visit(spec.encoding);
    (spec.layer || []).forEach(visit);
  };
  const places = [...document.querySelectorAll(".chart")];
  places.forEach((place) => {
    const button = make("button", { type: "button", className: "svg", textContent: "Save as SVG" });
    button.addEventListener("click", async () => { if (place.view) save(`${place.dataset.figure}.svg`, await place.view.toSVG(), "image/svg+xml"); });
    place.after(button);
  });
  const pending = new Set(places);
  const redraw = (which = () => true) => places.forEach((place) => { if (!pending.has(place) && which(place)) draw(place); });
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
