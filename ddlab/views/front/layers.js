// Backends by layers: a heatmap to walk in, and of the chosen cell the figures, the rows and the masks.

import { colours, el, token } from "./dom.js";

const LOW = -8; // powers of ten between which a cell is coloured, as in layers.py
const HIGH = 0;
const BEFORE = 46; // pixels of the keys before the rows that are drawn
const NODE_METRICS = { error: "error", rms: "RMS", max_abs: "largest", cosine: "cosine", free_rms: "free-running RMS" };

/** A number as a table has room for it. */
export function small(value) {
    if (value === null || value === undefined) return "?";
    if (value === 0) return "0";
    return Math.abs(value) >= 0.01 && Math.abs(value) < 1000 ? value.toPrecision(3) : value.toExponential(1);
}

/** What stands in a cell, how strong its colour is (0 to 1), and which. */
export function cell(layer, key, first) {
    if (!layer || (layer.verdict === "same" && (key === "error" || !key.startsWith("free_"))))
        return { text: "·", shade: 0, wrong: false };
    const value = layer.values[key];
    const wrong = layer.verdict === "wrong" && !["seconds", "peak_bytes"].includes(key);
    if (key === "seconds" || key === "peak_bytes") {
        const base = first?.values[key];
        if (!value || !base) return { text: "?", shade: 0, wrong };
        const ratio = value / base;
        return { text: ratio.toFixed(ratio < 9.95 ? 1 : 0), shade: Math.min(1, ratio / 4), wrong };
    }
    if (value === null) return { text: wrong ? "✕" : "?", shade: wrong ? 1 : 0, wrong };
    if (value <= 0) return { text: wrong ? "✕" : "0", shade: 0, wrong };
    const power = Math.log10(value);
    const shade = Math.min(1, Math.max(0, (power - LOW) / (HIGH - LOW)));
    return { text: wrong && key === "error" ? "✕" : String(Math.round(power)), shade, wrong };
}

export class LayersPanel {
    constructor(root, data) {
        this.root = root;
        this.data = data;
        this.key = "error";
        this.ran = data.backends.filter((backend) => backend.status === "ok");
        this.at = this.begin();
        root.classList.add("ddlab", "inspector", "layers");
        this.select = el(
            "select",
            { "aria-label": "figure", on: { change: () => this.choose(this.select.value) } },
            ...data.metrics.map(({ key, name, how }) => el("option", { value: key }, `${how}: ${name}`)),
        );
        this.scale = el("p", { class: "soft" });
        this.grid = el("div", { class: "box scroll" });
        this.details = el("section", { class: "chosen", "aria-live": "polite" });
        root.replaceChildren(
            el("p", { class: "heading" }, data.head[0]),
            ...data.head.slice(1).map((line) => el("p", { class: line.startsWith("!") ? "note" : "soft" }, line)),
            el("div", { class: "bar" }, el("label", { class: "group" }, "show ", this.select)),
            this.grid,
            this.scale,
            data.found.length ? el("ul", { class: "found" }, ...data.found.map((line) => el("li", {}, line))) : "",
            this.details,
            this.end(),
        );
        this.drawGrid();
        this.draw();
        const dark = matchMedia("(prefers-color-scheme: dark)");
        dark.addEventListener("change", () => this.draw());
    }

    /** The first wrong layer, else the first cell. */
    begin() {
        for (const [line, backend] of this.ran.entries()) {
            const column = this.data.layers.findIndex(({ index }) => backend.layers[index]?.verdict === "wrong");
            if (column >= 0) return { line, column };
        }
        return { line: 0, column: 0 };
    }

    layer(line, column) {
        return this.ran[line]?.layers[this.data.layers[column].index];
    }

    choose(key) {
        this.key = key;
        this.drawGrid();
    }

    // ---- the heatmap

    drawGrid() {
        const { layers } = this.data;
        const head = (name, of, title) =>
            el(
                "tr",
                {},
                el("th", { scope: "row" }, name),
                ...layers.map((layer) => el("th", { scope: "col", title: title(layer) }, of(layer))),
            );
        const body = this.ran.map((backend, line) =>
            el(
                "tr",
                {},
                el("th", { scope: "row" }, backend.name),
                ...layers.map((_, column) => this.square(line, column)),
            ),
        );
        const kinds = head(
            "kind",
            (layer) => el("b", { class: `kind ${layer.letter}` }, layer.letter),
            (layer) => layer.name,
        );
        const numbers = head("layer", (layer) => String(layer.index), (layer) => layer.name);
        const table = el("table", { class: "heat", role: "grid" }, el("thead", {}, numbers, kinds), el("tbody", {}, ...body));
        table.setAttribute("aria-label", this.data.metrics.find(({ key }) => key === this.key).name);
        table.classList.toggle("many", layers.length > 32);
        table.addEventListener("keydown", (event) => this.keyed(event));
        this.grid.replaceChildren(table);
        this.cells = [...table.querySelectorAll("td")];
        const timed = this.key === "seconds" || this.key === "peak_bytes";
        this.scale.textContent = timed
            ? "Multiples of the first backend's. ? was not measured; · is not computed by this backend."
            : "A number is a power of ten; ✕ wrong, beyond what rounding costs there; · not computed by this backend. " +
              "L linear attention, F full attention, S sliding window.";
        this.mark();
    }

    square(line, column) {
        const info = this.data.layers[column];
        const { text, shade, wrong } = cell(this.layer(line, column), this.key, this.layer(0, column));
        const verdict = this.layer(line, column)?.verdict ?? "not compared";
        const name = `${this.ran[line].name}, layer ${info.index}, ${info.name}: ${verdict}`;
        const square = el(
            "td",
            {
                tabindex: "-1",
                title: name,
                "aria-label": `${name}, ${text}`,
                class: wrong ? "wrong" : "",
                on: { click: () => this.go(line, column) },
            },
            text,
        );
        square.style.setProperty("--shade", `${Math.round(6 + 60 * shade)}%`);
        if (text === "·") square.classList.add("none");
        return square;
    }

    go(line, column) {
        this.at = {
            line: Math.min(this.ran.length - 1, Math.max(0, line)),
            column: Math.min(this.data.layers.length - 1, Math.max(0, column)),
        };
        this.mark();
        this.cells[this.at.line * this.data.layers.length + this.at.column].focus();
        this.draw();
    }

    mark() {
        const here = this.at.line * this.data.layers.length + this.at.column;
        for (const [place, square] of this.cells.entries()) {
            square.tabIndex = place === here ? 0 : -1;
            square.classList.toggle("here", place === here);
        }
    }

    keyed(event) {
        const { line, column } = this.at;
        const moves = {
            ArrowLeft: [line, column - 1],
            ArrowRight: [line, column + 1],
            ArrowUp: [line - 1, column],
            ArrowDown: [line + 1, column],
            Home: [line, 0],
            End: [line, this.data.layers.length - 1],
        };
        if (!moves[event.key]) return;
        event.preventDefault();
        this.go(...moves[event.key]);
    }

    // ---- one layer

    draw() {
        const { line, column } = this.at;
        const layer = this.layer(line, column);
        const info = this.data.layers[column];
        const backend = this.ran[line];
        if (!layer) return this.details.replaceChildren();
        const call = this.data.calls[layer.call];
        const where = call.round === null ? "" : ` of round ${call.round}`;
        const listed = layer.rows.length < layer.of ? `the ${layer.rows.length} worst of ${layer.of}` : `all ${layer.of}`;
        const title = el("h4", {}, `${backend.name}, layer ${info.index}: ${info.name}`);
        this.drawn = [];
        return this.details.replaceChildren(
            title,
            el("p", { class: layer.verdict === "wrong" ? "bad" : "" }, this.verdict(layer)),
            el("p", { class: "soft" }, this.figures(layer, line)),
            el(
                "div",
                { class: "parts" },
                el("div", { class: "listed" }, el("p", { class: "soft" }, `Rows${where}, ${listed}:`), this.rows(layer)),
                this.masks(layer, backend, info),
            ),
        );
    }

    verdict(layer) {
        if (layer.verdict === "same") return "Not computed by this backend: as the first backend has it.";
        if (layer.verdict === "not judged") return "No verdict: there is no referee for this layer.";
        const bound = `${small(layer.values.error)}, rounding may cost ${small(layer.band)}`;
        if (layer.verdict !== "wrong") return `Rounding: off by ${bound}.`;
        return `✕ Wrong: off by ${bound}. ${layer.fault ? `These are its numbers when ${layer.fault}.` : "No known fault gives these numbers."}`;
    }

    figures(layer, line) {
        const { values } = layer;
        const apart = (prefix) =>
            `RMS ${small(values[`${prefix}rms`])}, largest ${small(values[`${prefix}max_abs`])}, ` +
            `1 − cosine ${small(values[`${prefix}uncosine`])}`;
        const parts = [];
        if (line > 0) parts.push(`Teacher-forced, from ${this.ran[0].name}: ${apart("")}.`);
        if (line > 0) parts.push(`Free-running: ${apart("free_")}.`);
        if (values.seconds !== null) parts.push(`Time ${(values.seconds * 1e3).toFixed(2)} ms.`);
        if (values.peak_bytes !== null) parts.push(`Peak memory ${(values.peak_bytes / 2 ** 20).toFixed(2)} MiB.`);
        return parts.join(" ");
    }

    rows(layer) {
        const keys = Object.keys(NODE_METRICS).filter((key) => layer.nodes[key]);
        const head = ["row", "token", ...keys.map((key) => NODE_METRICS[key])];
        const lines = layer.rows.map((row, place) => {
            const off = layer.nodes.error?.[place] ?? layer.nodes.rms[place];
            const bad = layer.band !== null && layer.verdict !== "same" && !(off <= layer.band);
            return el(
                "tr",
                { class: bad ? "bad" : "", on: { pointerenter: () => this.light(row), pointerleave: () => this.light(null) } },
                el("th", { scope: "row" }, `${row}${bad ? " ✕" : ""}`),
                el("td", {}, token(this.data.labels[layer.tokens[place]] ?? `[${layer.tokens[place]}]`)),
                ...keys.map((key) => el("td", {}, small(layer.nodes[key][place]))),
            );
        });
        const top = el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)));
        const table = el("table", { class: "nodes" }, el("thead", {}, top), el("tbody", {}, ...lines));
        return el("div", { class: "box nodebox", tabindex: "0", role: "group", "aria-label": "rows of the layer" }, table);
    }

    masks(layer, backend, info) {
        const own = this.data.masks[layer.mask];
        const named = info.linear ? "whose state each row goes on from" : "what each row may see";
        const parts = [this.mask(own, null, `Right: ${named}`)];
        const { fault } = layer;
        if (layer.faulty !== null)
            parts.push(this.mask(this.data.masks[layer.faulty], own, `${backend.name}: ${fault}`));
        const said = own.left ? ` Of ${own.left + own.rows} rows the last ${own.rows}.` : "";
        const differs = layer.faulty === null ? "" : " Hatched and in the warning colour: seen or missed against the rule.";
        const reading = `Left ${own.before} keys before the rows as one band; cells are the rows that a row sees.${differs}${said}`;
        return el("div", {}, el("div", { class: "masks" }, ...parts), el("p", { class: "soft" }, reading));
    }

    /** One mask on a canvas; where it differs from `other` it is hatched. */
    mask(mask, other, title) {
        const canvas = el("canvas", { role: "img", "aria-label": `mask, ${title}` });
        const size = Math.max(2, Math.min(12, Math.floor(190 / mask.rows)));
        const band = mask.before ? BEFORE : 0;
        const width = band + 3 + mask.rows * size;
        const height = mask.rows * size + 1;
        const scale = globalThis.devicePixelRatio || 1;
        canvas.width = Math.round(width * scale);
        canvas.height = Math.round(height * scale);
        canvas.style.width = `${width}px`;
        canvas.style.height = `${height}px`;
        const pen = canvas.getContext("2d");
        pen.scale(scale, scale);
        const paint = (lit) => {
            const colour = colours(this.root, ["panel", "soft", "root", "error", "edge", "bonus"]);
            pen.clearRect(0, 0, width, height);
            pen.fillStyle = colour.panel;
            pen.fillRect(0, 0, width, height);
            const inside = size > 3 ? size - 1 : size;
            for (let row = 0; row < mask.rows; row++) {
                const y = row * size;
                const rule = other ?? mask;
                const [from, to] = mask.spans[row];
                const wrongBand = from !== rule.spans[row][0] || to !== rule.spans[row][1];
                const at = (key) => (mask.before ? (band * key) / mask.before : 0);
                pen.globalAlpha = wrongBand ? 0.8 : 0.5;
                pen.fillStyle = wrongBand ? colour.error : colour.root;
                pen.fillRect(at(from), y, at(to) - at(from), inside);
                pen.globalAlpha = 1;
                const may = new Set(rule.seen[row]);
                for (const column of mask.seen[row]) {
                    const x = band + 3 + column * size;
                    pen.fillStyle = may.has(column) ? colour.soft : colour.error;
                    pen.fillRect(x, y, inside, inside);
                    if (!may.has(column)) hatch(pen, x, y, inside, colour.panel);
                    may.delete(column);
                }
                pen.strokeStyle = colour.error;
                for (const column of may) pen.strokeRect(band + 3.5 + column * size, y + 0.5, inside - 1, inside - 1);
                if (lit === row) {
                    pen.globalAlpha = 0.3;
                    pen.fillStyle = colour.bonus;
                    pen.fillRect(0, y, width, size);
                    pen.globalAlpha = 1;
                }
            }
            pen.strokeStyle = colour.edge;
            pen.strokeRect(band + 2.5, 0.5, mask.rows * size, height - 1);
        };
        paint(null);
        this.drawn.push((row) => paint(row === null ? null : row - mask.left));
        return el("figure", {}, el("figcaption", {}, title), canvas);
    }

    light(row) {
        for (const paint of this.drawn) paint(row);
    }

    // ---- what it comes to

    end() {
        const { head, rows } = this.data.end;
        const top = el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)));
        const lines = rows.map(([name, ...cells]) =>
            el("tr", {}, el("th", { scope: "row" }, name), ...cells.map((said) => el("td", {}, said))),
        );
        const table = el("table", { class: "figures" }, el("thead", {}, top), el("tbody", {}, ...lines));
        const box = el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "in the end" }, table);
        return el("div", {}, el("h4", {}, "In the end"), box, el("p", { class: "soft" }, this.data.after));
    }
}

/** Diagonal lines over a square, so that it can be told without its colour. */
function hatch(pen, x, y, size, colour) {
    if (size < 4) return;
    pen.strokeStyle = colour;
    pen.beginPath();
    pen.moveTo(x, y + size);
    pen.lineTo(x + size, y);
    pen.stroke();
}
