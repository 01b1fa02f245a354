// Tree, mask, text and details of one run in one layout. What is focused in one is lit in the others.

import { button, colours, el } from "./dom.js";
import { MaskPanel } from "./mask.js";
import { OWN, Round } from "./round.js";
import { TextPanel, details } from "./text.js";
import { TreePanel } from "./tree.js";

let made = 0;

export class Inspector {
    /**
     * root: an empty element. run: what data.py makes of a trace. options: `round` to begin with, `panels` to show
     * ("tree", "mask", "text"), `live` ({ acts(store), controls(store), changed(store) }) where a kernel listens,
     * `whole` where trees are always shown whole, because another budget means other rounds.
     */
    constructor(root, run, { round = 0, panels = ["text", "tree", "mask"], live = null, whole = false } = {}) {
        this.prefix = `ddlab${++made}`;
        this.run = run;
        this.live = live;
        this.whole = whole;
        this.rounds = []; // Round objects, made when they are first shown
        this.focused = 0;
        this.hovered = null;
        this.query = "";
        this.found = [];
        this.playing = null;
        this.gone = new AbortController(); // ends what listens outside of the element
        this.palette = null; // colours for the canvases
        this.maskRoom = 460; // pixels, until it is known
        this.maskTall = panels.length === 1 ? 700 : 428;
        this.root = root;
        root.classList.add("ddlab", "inspector", ...(panels.length === 1 ? ["alone"] : []));
        this.tree = panels.includes("tree") ? new TreePanel(this) : null;
        this.masks = panels.includes("mask") ? run.layers.filter((l) => l.seen).map((l) => new MaskPanel(this, l)) : [];
        this.text = panels.includes("text") ? new TextPanel(this) : null;
        this.details = el("section", { class: "details", "aria-label": "details of the node" });
        this.heading = el("p", { class: "heading", "aria-live": "polite" });
        this.outcome = el("p", { class: "wide" });
        const bar = this.bar(panels);
        root.replaceChildren(...this.parts(bar));
        root.addEventListener("keydown", (event) => this.key(event));
        this.show(Math.min(round, run.rounds.length - 1));
        this.watch = new ResizeObserver(() => this.resized());
        this.watch.observe(root);
        const dark = matchMedia("(prefers-color-scheme: dark)");
        dark.addEventListener("change", () => this.recolour(), { signal: this.gone.signal });
    }

    parts(bar) {
        const notes = this.run.notes.map((said) => el("p", { class: "note" }, el("b", {}, "! "), said));
        const linear = this.run.layers
            .filter((layer) => !layer.seen)
            .map((layer) => el("p", { class: "soft" }, layer.name));
        const masks = el("div", { class: "masks" }, ...this.masks.map((panel) => panel.element));
        const reading =
            "What each node attends to. Left the committed text as one band, right the tree, a row a node; " +
            "cells are the nodes it sees, coloured where the row is on the accepted path.";
        const left = el("div", {}, this.tree?.element);
        if (this.masks.length) left.append(masks, el("p", { class: "soft" }, reading), ...linear);
        const keys =
            "Keys in the tree: ← → parent and child, ↑ ↓ siblings, p along the accepted path, Home root, " +
            "Enter folds a subtree, [ ] rounds, + − 0 size.";
        if (!this.tree && !this.masks.length) return [...notes, this.text.element];
        return [
            ...notes,
            this.text?.element,
            bar,
            this.heading,
            this.outcome,
            el("div", { class: "columns" }, left, this.details),
            this.tree ? el("p", { class: "soft keys" }, keys) : null,
        ].filter(Boolean);
    }

    bar(panels) {
        const one = this.run.rounds.length < 2 && !this.live && !this.whole;
        this.previous = button("‹", "previous round", () => this.go(this.number - 1));
        this.next = button("›", "next round", () => this.go(this.number + 1));
        this.play = button("▶", "play the rounds", () => this.toggle());
        this.jump = el("select", { "aria-label": "round", on: { change: () => this.go(Number(this.jump.value)) } });
        const rounds = el("span", { class: "group" }, this.previous, this.jump, this.next, this.play);
        this.slider = el("input", { type: "range", min: "0", "aria-label": "budget" });
        this.slider.addEventListener("input", () => this.setBudget(Number(this.slider.value)));
        this.budgetSaid = el("output", {});
        const budget = el("label", { class: "group" }, "budget ", this.slider, this.budgetSaid);
        this.search = el("input", { type: "search", placeholder: "find a token or id", "aria-label": "find a token" });
        this.search.addEventListener("input", () => this.find(this.search.value));
        this.search.addEventListener("keydown", (event) => event.key === "Enter" && this.nextFound());
        this.foundSaid = el("output", { class: "soft" });
        const find = el("span", { class: "group" }, this.search, this.foundSaid);
        const controls = this.live ? this.live.controls(this) : [];
        return el(
            "div",
            { class: "bar" },
            ...controls,
            one ? null : rounds,
            this.whole ? null : budget,
            panels.includes("tree") ? find : null,
        );
    }

    // ---- what is shown

    get round() {
        return (this.rounds[this.number] ??= new Round(this.run, this.run.rounds[this.number]));
    }

    /** The node that the details are about: the one under the pointer, else the focused one. */
    get shown() {
        return this.hovered ?? this.focused;
    }

    /** Another round, or the same after its data changed. */
    show(number, focused = 0) {
        this.number = number;
        this.hovered = null;
        this.tree?.collapsed.clear();
        this.slider.max = String(Math.max(0, (this.run.rounds[number]?.parents.length ?? 1) - 1));
        this.fillJump();
        this.root.classList.toggle("empty", number < 0);
        if (number < 0) return this.empty();
        this.focused = focused;
        this.search.disabled = this.slider.disabled = false;
        this.text?.draw();
        return this.setBudget(this.round.size - 1);
    }

    empty() {
        this.heading.textContent = this.live ? "No round yet: step makes the first one." : "No round was needed.";
        this.outcome.textContent = "";
        this.search.disabled = this.slider.disabled = true;
        this.text?.draw();
    }

    fillJump() {
        const { rounds } = this.run;
        if (this.jump.length !== rounds.length) {
            const names = rounds.map(
                (round) => `round ${round.index} · ${round.path.length - 1} accepted · ${round.stop}`,
            );
            this.jump.replaceChildren(...names.map((name, value) => el("option", { value }, name)));
        }
        this.jump.value = String(this.number);
        this.previous.disabled = this.number <= 0;
        this.next.disabled = this.number >= rounds.length - 1;
    }

    go(number, focused = 0) {
        if (number < 0 || number >= this.run.rounds.length) return;
        if (number === this.number) return this.focus(focused);
        this.show(number, focused);
        this.live?.changed(this);
    }

    setBudget(budget) {
        const { round } = this;
        this.budget = Math.min(budget, round.size - 1);
        this.walk = round.walk(this.budget);
        if (this.focused > this.budget || (this.focused === OWN && this.walk.bonus === null)) this.focused = 0;
        this.hovered = null;
        this.slider.value = String(this.budget);
        const whole = this.budget === round.size - 1;
        this.budgetSaid.textContent = whole ? `${this.budget}` : `${this.budget} of ${round.size - 1}`;
        this.heading.textContent =
            (whole ? "" : `With budget ${this.budget}: `) + round.heading(this.walk, this.budget);
        this.heading.classList.toggle("edited", round.edited.length > 0);
        if (round.edited.length) this.heading.append(` · edited: ${round.edited.join(", ")}`);
        this.outcome.textContent = round.outcome(this.walk, this.budget);
        this.find(this.query, false);
        this.tree?.draw();
        this.redrawMasks();
        this.update();
        this.tree?.reveal(this.focused);
    }

    focus(node) {
        this.focused = node;
        this.hovered = null;
        this.tree?.reveal(node);
        this.update();
        for (const panel of this.masks) panel.reveal();
        this.live?.changed(this);
    }

    hover(node) {
        if (node === this.hovered) return;
        this.hovered = node;
        this.update();
    }

    /** Everything that follows the focus. */
    update() {
        if (this.number < 0) return;
        this.tree?.mark();
        this.text?.mark();
        for (const panel of this.masks) panel.mark();
        this.details.replaceChildren(...details(this, this.acts()));
    }

    acts() {
        const node = this.focused;
        if (!this.tree || node === OWN || this.shown !== node) return [];
        const folds = this.round.children(node, this.budget).length;
        const fold = this.tree.collapsed.has(node) ? "unfold" : "fold";
        const own = folds && node ? [[fold, `${fold} the subtree`, () => this.tree.toggle(node)]] : [];
        return [...own, ...(this.live ? this.live.acts(this) : [])];
    }

    /** The masks fit the room that they have, also where the page had none when they were made. */
    resized() {
        const room = this.masks[0]?.box.clientWidth;
        if (!room || room === this.maskRoom || this.number < 0) return;
        this.maskRoom = room;
        this.redrawMasks();
    }

    /** The theme around it has changed. */
    recolour() {
        this.palette = null;
        if (this.number >= 0) this.redrawMasks();
    }

    redrawMasks() {
        this.palette ??= colours(this.root, ["root", "accepted", "bonus", "soft", "panel", "edge"]);
        for (const panel of this.masks) panel.draw();
    }

    // ---- search, play, keys

    find(query, move = true) {
        this.query = query;
        const wanted = query.trim().toLowerCase();
        const { round } = this;
        const is = (place) =>
            round.label(place).toLowerCase().includes(wanted) || String(this.run.tokens[place][0]) === wanted;
        const nodes = wanted ? round.tokens.keys() : [];
        this.found = [...nodes].filter((node) => node <= this.budget && is(round.tokens[node]));
        this.foundSaid.textContent = wanted ? `${this.found.length} found` : "";
        if (move) this.tree?.mark();
        if (move && this.found.length) this.tree?.reveal(this.found[0]);
    }

    nextFound() {
        const next = this.found.find((node) => node > this.focused) ?? this.found[0];
        if (next !== undefined) this.focus(next);
    }

    toggle() {
        if (this.playing) return this.stop();
        if (this.number >= this.run.rounds.length - 1) this.go(0);
        this.playing = setInterval(() => {
            if (this.number >= this.run.rounds.length - 1 || !this.root.isConnected) this.stop();
            else this.go(this.number + 1);
        }, 1000);
        this.playSaid("❚❚", "pause");
    }

    stop() {
        clearInterval(this.playing);
        this.playing = null;
        this.playSaid("▶", "play the rounds");
    }

    playSaid(mark, name) {
        this.play.textContent = mark;
        this.play.title = name;
        this.play.setAttribute("aria-label", name);
    }

    key(event) {
        const typing = event.target.matches("input, select");
        const by = { "[": -1, "]": 1, PageUp: -1, PageDown: 1 }[event.key];
        if (!by || typing) return;
        event.preventDefault();
        this.go(this.number + by);
    }

    dispose() {
        this.stop();
        this.gone.abort();
        this.watch.disconnect();
    }

    /** New data of the same run: rounds were added, taken back or made again. */
    replace(run, number) {
        this.run = run;
        this.rounds = [];
        this.text?.draw();
        this.jump.replaceChildren();
        this.show(Math.min(number, run.rounds.length - 1));
    }
}
