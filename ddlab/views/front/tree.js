// The tree of a round as a picture: drawn whole when the round changes, marked when only the focus moves.

import { button, el, percent, shorten, svg } from "./dom.js";
import { OWN, ROLES, layout } from "./round.js";

const COLUMN = 96; // pixels of a depth and of a row
const ROW = 30;
const LEFT = 12;
const TOP = 22;
const ROWS_AT_ONCE = 150; // larger trees are filled in where they are looked at
const MARGIN = 30; // rows beyond the box that are filled in too
const SHAPES = {
    root: { d: "M0-5.5l5.5 5.5-5.5 5.5-5.5-5.5z" },
    accepted: { d: "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z" },
    own: { d: "M-4-4h8v8h-8z" },
    missed: { d: "M-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0-6.4 0z" },
    near: { d: "M-3.2-3.2h6.4v6.4h-6.4z" },
    "": { d: "M-2.4 0a2.4 2.4 0 1 0 4.8 0a2.4 2.4 0 1 0-4.8 0z" },
};
export class TreePanel {
    /** `store` holds round, budget, focus; `store.prefix` makes ids of elements unique in a page. */
    constructor(store) {
        this.store = store;
        this.zoom = 1;
        this.collapsed = new Set();
        this.box = el("div", { class: "box treebox", role: "tree", tabindex: "0", "aria-label": "draft tree" });
        this.box.addEventListener("click", (event) => this.atPointer(event, (node) => store.focus(node)));
        this.box.addEventListener("dblclick", (event) => this.atPointer(event, (node) => this.toggle(node)));
        this.box.addEventListener("pointerover", (event) => this.atPointer(event, (node) => store.hover(node)));
        this.box.addEventListener("pointerleave", () => store.hover(null));
        this.box.addEventListener("keydown", (event) => this.key(event));
        this.box.addEventListener("scroll", () => this.store.number >= 0 && this.drawRows());
        const { signal } = store.gone;
        globalThis.addEventListener("beforeprint", () => this.store.number >= 0 && this.drawRows(true), { signal });
        const zooms = el(
            "span",
            { class: "zoom" },
            button("−", "smaller", () => this.setZoom(this.zoom / 1.25)),
            button("+", "larger", () => this.setZoom(this.zoom * 1.25)),
            button("fit", "fit the width", () => this.fit()),
        );
        this.element = el("div", { class: "panel" }, this.box, el("div", { class: "under" }, legend(), zooms));
    }

    atPointer(event, act) {
        const item = event.target.closest("[data-node]");
        if (item) act(Number(item.dataset.node));
    }

    draw() {
        const { round, budget, walk } = this.store;
        const { place, rows } = layout(round, walk, budget, this.collapsed);
        this.place = place;
        this.rows = rows;
        this.roles = round.roles(walk, budget);
        const deepest = [...place.values()].reduce((most, [depth]) => Math.max(most, depth), 0);
        this.width = LEFT + (deepest + 1) * COLUMN + 60;
        this.height = TOP + rows * ROW;
        this.trail = svg("path", { class: "trail" });
        this.hits = svg("path", { class: "hits" });
        this.ring = svg("circle", { class: "ring", r: 9 });
        this.edges = svg("g", { class: "edges" });
        this.items = svg("g", { role: "none" });
        // one over the other: what marks nodes, lines, then the nodes, which are the tree items for a reader
        this.picture = svg("svg", { role: "none" }, this.trail, this.hits, this.ring, this.edges, this.items);
        this.drawn = null;
        this.box.replaceChildren(this.picture);
        this.setZoom(this.zoom);
        this.mark();
    }

    /** Fills in the rows that can be seen and some around them; all of them in a tree of ordinary size. */
    drawRows(all = this.rows <= ROWS_AT_ONCE) {
        const scale = ROW * this.zoom;
        const top = Math.floor(this.box.scrollTop / scale);
        const bottom = top + Math.ceil((this.box.clientHeight || 430) / scale);
        if (this.drawn && top >= this.drawn[0] && bottom <= this.drawn[1] && !(all && this.drawn[1] < Infinity)) return;
        const [from, to] = (this.drawn = all ? [0, Infinity] : [Math.max(0, top - MARGIN), bottom + MARGIN]);
        const edges = [];
        const items = [];
        for (const [node, [, row]] of this.place) {
            const role = node === OWN ? "own" : this.roles[node];
            const parent = node === OWN ? this.store.walk.path.at(-1) : this.store.round.parents[node];
            if (row >= from && row <= to) items.push(this.item(node, role));
            if (node !== 0 && row >= from && this.place.get(parent)[1] <= to) edges.push(this.edge(node, parent, role));
        }
        this.edges.replaceChildren(...edges);
        this.items.replaceChildren(...items);
        this.select();
    }

    at(node) {
        const [depth, row] = this.place.get(node);
        return [LEFT + depth * COLUMN, TOP + row * ROW];
    }

    edge(node, parent, role) {
        const { round } = this.store;
        const [x, y] = this.at(node);
        const [px, py] = this.at(parent);
        const bend = py === y ? `M${px} ${py}H${x}` : `M${px} ${py}V${y - 5}q0 5 5 5H${x}`;
        const logProb = node === OWN ? round.choice_log_prob[parent] : round.draftLogProb(node);
        const width = logProb === null ? 1 : 0.7 + 4.3 * Math.exp(logProb);
        return svg("path", { d: bend, class: role || "plain", "stroke-width": width.toFixed(2) });
    }

    item(node, role) {
        const { round, walk, budget, prefix } = this.store;
        const [x, y] = this.at(node);
        const name = round.name(node, walk);
        const folded = this.collapsed.has(node) && round.children(node, budget).length;
        const parts = [svg("path", { ...SHAPES[role], class: `shape ${role || "plain"}` })];
        const bold = role === "root" || role === "accepted" || role === "own";
        const label = svg("text", { x: 7, y: -4, class: bold ? "on" : "" }, shorten(name, 13));
        parts.push(label);
        const open = node === OWN ? [] : round.children(node, budget);
        if (folded) parts.push(svg("text", { x: 7, y: 11, class: "soft" }, `▸ ${this.hidden(node)} below`));
        else if (
            node !== OWN &&
            node !== walk.path.at(-1) &&
            round.choice[node] >= 0 &&
            !open.some((c) => round.tokens[c] === round.choice[node])
        ) {
            const choice = svg("text", { x: 7, y: open.length ? 10 : 9, class: "choice" });
            choice.append(`→ ${shorten(round.label(round.choice[node]), 12)}`);
            parts.push(choice);
        }
        const draft = node > 0 ? `, draft ${percent(round.draftLogProb(node))}` : "";
        const attributes = {
            id: `${prefix}n${node}`,
            role: "treeitem",
            transform: `translate(${x} ${y})`,
            "data-node": node,
            "aria-level": this.place.get(node)[0] + 1,
            "aria-label": `${name}, ${ROLES[role]}${draft}`,
            "aria-selected": "false",
            "aria-expanded": open.length ? String(!folded) : null,
        };
        const target = svg("rect", { class: "target", x: -8, y: -15, width: COLUMN - 6, height: ROW - 1 });
        return svg("g", attributes, target, ...parts);
    }

    hidden(node) {
        let count = 0;
        const open = [node];
        while (open.length) {
            const more = this.store.round.children(open.pop(), this.store.budget);
            count += more.length;
            open.push(...more);
        }
        return count;
    }

    /** Shows focus, the way from the root to it, and what a search has found. */
    mark() {
        const { focused, shown, found, round, walk } = this.store;
        this.select();
        const trail = shown === OWN ? [...walk.path, OWN] : round.trail(shown);
        const visible = trail.filter((node) => this.place.has(node)).map((node) => this.at(node));
        const line = visible.map(([x, y], i) => (i ? `V${y}H${x}` : `M${x} ${y}`));
        this.trail.setAttribute("d", line.join("") || "M0 0");
        this.hits.setAttribute(
            "d",
            found
                .filter((node) => this.place.has(node))
                .map((node) => this.frame(node))
                .join(""),
        );
        const seen = this.place.has(focused);
        if (seen) this.ring.setAttribute("transform", `translate(${this.at(focused)})`);
        this.ring.toggleAttribute("hidden", !seen);
    }

    select() {
        const { focused, prefix } = this.store;
        this.items.querySelector('[aria-selected="true"]')?.setAttribute("aria-selected", "false");
        const item = this.items.querySelector(`[data-node="${focused}"]`);
        item?.setAttribute("aria-selected", "true");
        if (item) this.box.setAttribute("aria-activedescendant", `${prefix}n${focused}`);
        else this.box.removeAttribute("aria-activedescendant");
    }

    frame(node) {
        const [x, y] = this.at(node);
        return `M${x - 7} ${y - 14}h${COLUMN - 8}v${ROW - 3}h-${COLUMN - 8}z`;
    }

    /** Brings a node into the box, opening what hides it. */
    reveal(node) {
        const { round } = this.store;
        const hiding =
            node === OWN
                ? []
                : round
                      .trail(node)
                      .slice(0, -1)
                      .filter((above) => this.collapsed.has(above));
        if (hiding.length) {
            for (const above of hiding) this.collapsed.delete(above);
            this.draw();
        }
        if (!this.place.has(node)) return;
        const [x, y] = this.at(node).map((value) => value * this.zoom);
        const { box } = this;
        const room = { x: COLUMN * this.zoom, y: ROW * this.zoom };
        if (x - room.x < box.scrollLeft) box.scrollLeft = x - room.x;
        else if (x + room.x > box.scrollLeft + box.clientWidth) box.scrollLeft = x + room.x - box.clientWidth;
        if (y - room.y < box.scrollTop) box.scrollTop = y - 2 * room.y;
        else if (y + room.y > box.scrollTop + box.clientHeight) box.scrollTop = y + 2 * room.y - box.clientHeight;
        this.drawRows();
    }

    toggle(node) {
        if (node === OWN || !this.store.round.children(node, this.store.budget).length) return;
        if (!this.collapsed.delete(node)) this.collapsed.add(node);
        this.draw();
        this.store.update();
    }

    setZoom(zoom) {
        if (this.store.number < 0) return;
        this.zoom = Math.min(3, Math.max(0.2, zoom));
        this.picture.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
        this.picture.setAttribute("width", Math.round(this.width * this.zoom));
        this.picture.setAttribute("height", Math.round(this.height * this.zoom));
        this.drawRows();
    }

    fit() {
        if (this.store.number < 0) return;
        this.setZoom((this.box.clientWidth - 4) / this.width);
        this.reveal(this.store.focused);
    }

    key(event) {
        if (event.ctrlKey || event.metaKey || event.altKey || this.store.number < 0) return;
        const action = KEYS[event.key];
        if (!action) return;
        const next = action(this, this.store.focused);
        if (next !== undefined && next !== null) this.store.focus(next);
        event.preventDefault();
        event.stopPropagation();
    }

    /** The nearest sibling `by` places on, of the node or of the nearest ancestor that has one. */
    sibling(node, by) {
        const { round, budget } = this.store;
        for (let at = node === OWN ? this.store.walk.path.at(-1) : node; at > 0; at = round.parents[at]) {
            const row = round.children(round.parents[at], budget);
            const next = row[row.indexOf(at) + by];
            if (next !== undefined) return next;
        }
        return null;
    }
}

const KEYS = {
    ArrowRight(panel, node) {
        if (node === OWN) return null;
        if (panel.collapsed.has(node)) return panel.toggle(node);
        const { round, budget, walk } = panel.store;
        return round.children(node, budget)[0] ?? (node === walk.path.at(-1) && walk.bonus !== null ? OWN : null);
    },
    ArrowLeft(panel, node) {
        const { round, walk } = panel.store;
        return node === OWN ? walk.path.at(-1) : node ? round.parents[node] : null;
    },
    ArrowDown: (panel, node) => panel.sibling(node, 1),
    ArrowUp: (panel, node) => panel.sibling(node, -1),
    Enter: (panel, node) => panel.toggle(node),
    " ": (panel, node) => panel.toggle(node),
    Home: () => 0,
    End: (panel) => panel.store.walk.path.at(-1),
    p(panel, node) {
        const { path, bonus } = panel.store.walk;
        const next = path[path.indexOf(node) + 1]; // from anywhere else: the path's start
        return next ?? (node === OWN ? 0 : bonus === null ? 0 : OWN);
    },
    "+": (panel) => panel.setZoom(panel.zoom * 1.25),
    "-": (panel) => panel.setZoom(panel.zoom / 1.25),
    0: (panel) => panel.fit(),
    "[": (panel) => panel.store.go(panel.store.number - 1),
    "]": (panel) => panel.store.go(panel.store.number + 1),
};

function legend() {
    const entry = ([role, text]) => {
        const shape = svg("path", { ...SHAPES[role], class: `shape ${role || "plain"}` });
        return el(
            "span",
            {},
            svg("svg", { viewBox: "-7 -7 14 14", width: 13, height: 13, "aria-hidden": "true" }, shape),
            text,
        );
    };
    const lines = el("span", {}, "line width: draft probability");
    return el("div", { class: "legend" }, ...Object.entries(ROLES).map(entry), lines);
}
