// The text as rounds made it, and the details of one node.

import { button, el, fixed, percent, token } from "./dom.js";
import { OWN, ROLES } from "./round.js";

const KINDS = ["p", "f", "d", "b"]; // classes of the stylesheet: prompt, first token, draft, the target's own
const SAID = [
    "prompt",
    "first token, from the prompt's own forward",
    "accepted draft",
    "the target's own token, one a round",
];

export class TextPanel {
    constructor(store) {
        this.store = store;
        this.text = el("div", { class: "text", dir: "ltr", role: "group", "aria-label": "text by round" });
        this.said = el(
            "p",
            { class: "soft said" },
            "Point at a token, or walk with ← →, for what the drafter would have had.",
        );
        const word = (kind) => el("span", { class: "text" }, el("bdi", { class: KINDS[kind] }, "word"));
        const entry = (said, kind) => el("span", {}, word(kind), ` ${said}`);
        const tints = el("span", {}, "a tint and a number for each round");
        const legend = el("div", { class: "legend" }, ...SAID.map(entry), tints);
        this.element = el("div", { class: "panel" }, this.text, legend, this.said);
        const at = (event) => event.target.closest("[data-at]");
        this.text.addEventListener("pointerover", (event) => at(event) && this.tell(at(event)));
        this.text.addEventListener("focusin", (event) => at(event) && this.tell(at(event)));
        this.text.addEventListener("click", (event) => at(event) && this.open(at(event)));
        this.text.addEventListener("keydown", (event) => this.key(event));
    }

    /** Draws the whole text: when the run has more rounds than before, or fewer. */
    draw() {
        const { run } = this.store;
        let last = -1;
        const parts = [];
        this.spans = [];
        run.text.forEach(([kind, round, place, shown], at) => {
            if (round >= 0 && round !== last) parts.push(el("sup", { "aria-hidden": "true" }, String(round)));
            last = round;
            const tint = round < 0 ? "" : ` t${round % 4}`;
            const span = el("bdi", { class: `${KINDS[kind]}${tint}`, "data-at": at, tabindex: "-1" });
            if (shown === null) span.append(el("i", {}, run.tokens[place][1]));
            else shown.split("\n").forEach((line, i) => span.append(...(i ? [el("i", {}, "↵"), "\n"] : []), line));
            parts.push(span);
            this.spans.push(span);
        });
        this.text.replaceChildren(...parts);
        if (this.spans.length) this.spans[0].tabIndex = 0;
        this.mark();
    }

    /** Which round and node a token of the text belongs to: [round, node], or null. */
    origin(at) {
        const { run } = this.store;
        const [kind, number] = run.text[at];
        if (number < 0) return null;
        let first = at;
        while (first > 0 && run.text[first - 1][1] === number) first--;
        return [number, kind === 2 ? run.rounds[number].path[at - first + 1] : OWN, at - first];
    }

    tell(span) {
        const at = Number(span.dataset.at);
        const [kind, number, place] = this.store.run.text[at];
        const { run } = this.store;
        const said = [run.tokens[place][1], SAID[kind]];
        const origin = this.origin(at);
        if (origin) {
            const { best, best_log_prob: scores } = run.rounds[number];
            const row = origin[2]; // depth - 1
            said.push(`round ${number}, depth ${row + 1}`);
            if (best[row]?.length) {
                const first = `${run.tokens[best[row][0]][1]} (${percent(scores[row][0])})`;
                const right = best[row][0] === place;
                said.push(
                    right
                        ? `the drafter's first choice (${percent(scores[row][0])})`
                        : `the drafter's first choice was ${first}`,
                );
            }
        }
        this.said.replaceChildren(token(said[0]), `  ${said.slice(1).join(" · ")}`);
    }

    open(span) {
        const origin = this.origin(Number(span.dataset.at));
        if (origin) this.store.go(origin[0], origin[1]);
    }

    key(event) {
        const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        const span = event.target.closest("[data-at]");
        if (!span) return;
        if (event.key === "Enter" || event.key === " ") this.open(span);
        else if (by) {
            const next = this.spans[Number(span.dataset.at) + by];
            if (!next) return;
            span.tabIndex = -1;
            next.tabIndex = 0;
            next.focus();
        } else return;
        event.preventDefault();
    }

    mark() {
        const { run, tree, masks } = this.store;
        const number = tree || masks.length ? this.store.number : -1; // nothing else is shown of a round
        let seen = null;
        this.spans.forEach((span, at) => {
            const here = number >= 0 && run.text[at][1] === number;
            span.classList.toggle("here", here);
            if (here) seen ??= span;
        });
        if (seen) this.text.scrollTop = seen.offsetTop - this.text.offsetTop - 30;
    }
}

/** Everything known of one node. `acts`: what may be done to it, [label, name, action] each. */
export function details(store, acts = []) {
    const { round, shown: node, run, walk, budget } = store;
    const own = node === OWN;
    const end = own ? walk.path.at(-1) : node;
    const place = own ? walk.bonus : round.tokens[node];
    const [id, label] = run.tokens[place];
    const bytes = round.bytes(place);
    const depth = round.depth[end] + (own ? 1 : 0);
    const role = ROLES[own ? "own" : (round.roles(walk, budget)[node] ?? "")];
    const rows = [
        ["token id", id < 0 ? "not given" : String(id)],
        ["bytes", bytes === null ? "none: an id without a token" : bytes || "none: empty"],
        ["depth, position", `${depth}, ${round.start + depth}`],
    ];
    if (own) {
        rows.push(
            ["target probability", percent(round.choice_log_prob[end])],
            ["margin", `${fixed(round.margin[end])} logits`],
        );
        const row = round.best[depth - 1] ?? [];
        if (row.length)
            rows.push([
                "drafter's first choice",
                `${run.tokens[row[0]][1]} (${percent(round.best_log_prob[depth - 1][0])})`,
            ]);
        rows.push(["why here", round.near(end, budget) || walk.stop]);
    } else {
        if (node) {
            const rank = round.rank[node] < 0 ? "" : `, #${round.rank[node] + 1} at depth ${depth}`;
            rows.push(["draft probability", percent(round.draftLogProb(node)) + rank]);
            rows.push([
                "log-prob. of the path",
                `${fixed(round.log_prob[node])} (${percent(round.log_prob[node])}): product of per-depth marginals`,
            ]);
            rows.push(["target probability", `${percent(round.node_log_prob[node])} after its parent`]);
        }
        const sure = `(${percent(round.choice_log_prob[node])}), margin ${fixed(round.margin[node])}`;
        const known = round.choice[node] >= 0; // a replayed round knows it along the text only
        const choice = known ? `${round.label(round.choice[node])} ${sure}` : "not known: off the text";
        rows.push(["target's choice here", choice]);
        const near = round.near(node, budget);
        if (near) rows.push(["that choice", near]);
    }
    const list = el(
        "dl",
        {},
        ...rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, el("bdi", {}, value))]),
    );
    const buttons = acts.map(([text, name, act]) => button(text, name, act));
    const head = el(
        "p",
        { class: "headline" },
        token(label),
        el("span", { class: "soft" }, own ? role : `node ${node}, ${role}`),
    );
    return [head, list, el("div", { class: "acts" }, ...buttons)];
}
