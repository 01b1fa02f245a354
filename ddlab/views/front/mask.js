// What each node may attend to, drawn from the tree's parents: a band of committed text, then the tree block.

import { el } from "./dom.js";
import { OWN } from "./round.js";

const BAND = 84; // pixels of the committed text, however long it is
const GAP = 4;

/** Where the committed text begins for a node: 0, or the edge of its window, counted in positions. */
export function bandStart(round, node, window) {
    return window === null ? 0 : Math.max(0, round.start + round.depth[node] - window + 1);
}

/** The nodes that a node attends to, nearest first, itself included. */
export function seen(round, node, window) {
    const out = [];
    for (let at = node; at >= 0; at = round.parents[at]) {
        if (window !== null && round.depth[node] - round.depth[at] >= window) break;
        out.push(at);
    }
    return out;
}

/** One kind of layer: a canvas with the mask, one over it with what is lit. */
export class MaskPanel {
    constructor(store, layer) {
        this.store = store;
        this.layer = layer;
        this.base = el("canvas", { role: "img" });
        this.over = el("canvas", { class: "over", "aria-hidden": "true" });
        const stack = el("div", { class: "stack" }, this.base, this.over);
        this.box = el("div", { class: "box maskbox", tabindex: "0", role: "group", "aria-label": layer.name }, stack);
        this.said = el("p", { class: "soft" });
        this.element = el("div", { class: "panel" }, el("h4", {}, layer.name), this.box, this.said);
        stack.addEventListener("pointermove", (event) => this.point(event, (row) => store.hover(row)));
        stack.addEventListener("pointerleave", () => store.hover(null));
        stack.addEventListener("click", (event) => this.point(event, (row) => store.focus(row)));
        this.box.addEventListener("keydown", (event) => {
            const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
            if (!by) return;
            event.preventDefault();
            store.focus(Math.min(this.rows - 1, Math.max(0, store.focused + by)));
        });
    }

    point(event, act) {
        const row = Math.floor((event.clientY - this.base.getBoundingClientRect().top) / this.cell);
        if (row >= 0 && row < this.rows) act(row);
    }

    draw() {
        const { round, budget, walk } = this.store;
        this.rows = Math.min(budget + 1, round.size);
        const room = this.store.maskRoom - 8;
        this.band = round.start ? BAND : 0;
        this.left = this.band ? BAND + GAP : 0;
        const fits = Math.floor((room - this.left) / this.rows);
        const tall = Math.max(3, Math.floor(this.store.maskTall / this.rows)); // in the box, if it can
        this.cell = Math.max(1, Math.min(11, fits, tall));
        this.width = this.left + this.rows * this.cell + 1;
        this.height = this.rows * this.cell + 1;
        const colour = this.store.palette;
        const pen = this.pen(this.base);
        this.light = this.pen(this.over);
        const on = new Set(walk.path);
        pen.fillStyle = colour.panel;
        pen.fillRect(0, 0, this.band, this.height);
        pen.fillRect(this.left, 0, this.rows * this.cell, this.height);
        const inside = this.cell > 3 ? this.cell - 1 : this.cell;
        for (let node = 0; node < this.rows; node++) {
            const y = node * this.cell;
            const [x, width] = this.committed(node);
            pen.globalAlpha = on.has(node) ? 0.75 : 0.35;
            pen.fillStyle = colour.root;
            pen.fillRect(x, y, width, inside);
            pen.globalAlpha = 1;
            pen.fillStyle = on.has(node) ? colour.accepted : colour.soft;
            for (const other of seen(round, node, this.layer.window)) {
                pen.fillRect(this.left + other * this.cell, y, inside, inside);
            }
        }
        pen.strokeStyle = colour.edge;
        pen.strokeRect(this.left + 0.5, 0.5, this.rows * this.cell, this.height - 1);
        const kind = this.layer.window === null ? "" : ` The window reaches ${this.layer.window} positions back.`;
        const text = `${this.layer.name}: ${round.start} committed tokens as a band, then ${this.rows} nodes.${kind}`;
        this.base.setAttribute("aria-label", `mask of ${text}`);
        this.mark();
    }

    committed(node) {
        const { round } = this.store;
        const share = round.start ? Math.min(1, bandStart(round, node, this.layer.window) / round.start) : 1;
        return [this.band * share, this.band * (1 - share)];
    }

    pen(canvas) {
        const scale = globalThis.devicePixelRatio || 1;
        canvas.width = Math.round(this.width * scale);
        canvas.height = Math.round(this.height * scale);
        canvas.style.width = `${this.width}px`;
        canvas.style.height = `${this.height}px`;
        const pen = canvas.getContext("2d");
        pen.scale(scale, scale);
        return pen;
    }

    /** Lights the row of the node in question and the columns of its ancestors. */
    mark() {
        const { shown, walk, round } = this.store;
        const node = shown === OWN ? walk.path.at(-1) : shown;
        const pen = this.light;
        pen.clearRect(0, 0, this.width, this.height);
        const nodes = seen(round, node, this.layer.window);
        pen.fillStyle = this.store.palette.bonus;
        pen.globalAlpha = 0.22;
        const y = node * this.cell;
        pen.fillRect(0, y, this.width, Math.max(2, this.cell));
        for (const other of nodes) pen.fillRect(this.left + other * this.cell, 0, Math.max(2, this.cell), this.height);
        pen.globalAlpha = 1;
        for (const other of nodes)
            pen.fillRect(this.left + other * this.cell, y, Math.max(2, this.cell), Math.max(2, this.cell));
        const from = bandStart(round, node, this.layer.window);
        const hidden =
            from >= round.start ? "none of the committed text" : `committed positions ${from} to ${round.start - 1}`;
        const committed = round.start ? hidden : "no committed text";
        const own =
            nodes.length === 1 ? "itself" : `${nodes.length} nodes: ${nodes.slice().reverse().slice(0, 24).join(", ")}`;
        const where = `Row ${node} at position ${round.start + round.depth[node]}`;
        this.said.textContent = `${where} sees ${committed} and ${own}.`;
    }

    reveal() {
        const { shown } = this.store;
        const y = Math.max(0, shown) * this.cell;
        if (y < this.box.scrollTop) this.box.scrollTop = y;
        else if (y + this.cell > this.box.scrollTop + this.box.clientHeight)
            this.box.scrollTop = y - this.box.clientHeight / 2;
    }
}
