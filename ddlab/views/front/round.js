// One round as data: the tree, the target's choices, the walk, also under a smaller budget. No drawing here.

import { fixed, percent } from "./dom.js";

export const OWN = -1; // stands for the target's own token at the end of the path, which is no node

export const ROLES = {
    root: "root",
    accepted: "accepted draft",
    own: "the target's own token",
    missed: "the target's choice there, never reached",
    near: "near miss: the right token under another parent",
    "": "not taken",
};

export class Round {
    /** `json` is one of `run.rounds` (made in data.py); tokens in it are places in `run.tokens`. */
    constructor(run, json) {
        Object.assign(this, json);
        this.run = run;
        this.size = this.parents.length; // nodes, the root counted
        this.depth = new Int32Array(this.size);
        this.below = Array.from({ length: this.size }, () => []); // children, one on the path first
        const taken = new Set(this.path);
        for (let node = 1; node < this.size; node++) {
            const parent = this.parents[node];
            this.depth[node] = this.depth[parent] + 1;
            if (taken.has(node)) this.below[parent].unshift(node);
            else this.below[parent].push(node);
        }
    }

    label(place) {
        return this.run.tokens[place][1];
    }

    /** Bytes of a token in hexadecimal, "" for none, null for an id without a token. Ordinary labels spell them. */
    bytes(place) {
        const [, label, hex] = this.run.tokens[place];
        if (hex === null) return null;
        const spelled = () => [...new TextEncoder().encode(label.replaceAll("␣", " "))].map(asHex);
        const all = hex === undefined ? spelled() : (hex.match(/../g) ?? []);
        return all.join(" ").toUpperCase();
    }

    name(node, walk) {
        return this.label(node === OWN ? walk.bonus : this.tokens[node]);
    }

    children(node, budget = this.size - 1) {
        return this.below[node].filter((child) => child <= budget);
    }

    /** Nodes from the root to `node`, both included. */
    trail(node) {
        const path = [];
        for (let at = node; at >= 0; at = this.parents[at]) path.unshift(at);
        return path;
    }

    /** Log-probability of the node's token in its depth's draft distribution. */
    draftLogProb(node) {
        const path = this.log_prob[node];
        return node && path !== null ? path - this.log_prob[this.parents[node]] : null;
    }

    /**
     * Where the walk ends in the tree of a smaller budget. That tree is a prefix of this one in recorded order, and
     * the target's choices do not depend on it, so the walk is the recorded one up to the first node that is missing.
     */
    walk(budget = this.size - 1) {
        const missing = this.path.findIndex((node) => node > budget);
        if (missing < 0) return { path: this.path, bonus: this.bonus, stop: this.stop };
        const path = this.path.slice(0, missing);
        const end = path.at(-1);
        return { path, bonus: this.choice[end], stop: this.children(end, budget).length ? "mismatch" : "exhausted" };
    }

    /** What each node is: root, accepted, missed (the target would choose it there), near (see `near`) or "". */
    roles(walk, budget = this.size - 1) {
        const roles = new Array(Math.min(budget + 1, this.size)).fill("");
        for (let node = 1; node < roles.length; node++) {
            if (this.choice[this.parents[node]] === this.tokens[node]) roles[node] = "missed";
        }
        for (const node of walk.path) roles[node] = node ? "accepted" : "root";
        if (walk.bonus !== null) for (const node of this.elsewhere(walk.path.at(-1), budget)) roles[node] ||= "near";
        return roles;
    }

    /** Nodes at the next depth that hold the target's choice after `node`, but under another parent. */
    elsewhere(node, budget = this.size - 1) {
        const found = [];
        for (let other = 1; other <= budget && other < this.size; other++) {
            const there = this.depth[other] === this.depth[node] + 1 && this.parents[other] !== node;
            if (there && this.tokens[other] === this.choice[node]) found.push(other);
        }
        return found;
    }

    /** Why the target's choice after `node` is not among its children, as far as the draft can tell; "" if it is. */
    near(node, budget = this.size - 1) {
        if (this.children(node, budget).some((child) => this.tokens[child] === this.choice[node])) return "";
        if (this.choice[node] < 0) return ""; // not known
        const below = this.depth[node]; // row of the draft that proposes the node's children
        if (!this.best.length) return "";
        if (below >= this.best.length) return `the draft ended at depth ${this.best.length}`;
        const said = [];
        const others = this.elsewhere(node, budget);
        if (others.length) {
            const parents = others.map((other) => `${this.name(this.parents[other])} (node ${other})`);
            said.push(`drafted after ${parents.slice(0, 3).join(", ")}${parents.length > 3 ? ", …" : ""} instead`);
        }
        const rank = this.best[below].indexOf(this.choice[node]);
        if (rank < 0) {
            if (!others.length)
                said.push(`not among the drafter's first ${this.best[below].length} at depth ${below + 1}`);
        } else {
            const last = Math.min(budget, this.size - 1);
            const score = this.log_prob[node] === null ? null : this.log_prob[node] + this.best_log_prob[below][rank];
            const prob = percent(this.best_log_prob[below][rank]);
            const here = `the drafter's #${rank + 1} at depth ${below + 1} (${prob})`;
            const known = score !== null && last > 0 && this.log_prob[last] !== null;
            const scores = `: path ${fixed(score)}, the last node drafted has ${fixed(this.log_prob[last])}`;
            said.push(here + (known ? scores : ""));
        }
        return said.join("; ");
    }

    heading(walk, budget = this.size - 1) {
        const drafted = Math.min(budget, this.size - 1);
        const accepted = walk.path.length - 1;
        const gained = accepted + (walk.bonus === null ? 0 : 1);
        const bonus = walk.bonus === null ? "" : " + bonus";
        const where = `round ${this.index}, root at position ${this.start}`;
        return `${where}: ${drafted} drafted, ${accepted} accepted${bonus} = ${gained} new tokens`;
    }

    /** Why the path ended, in words. The text form of the tree view says the same of the recorded round. */
    outcome(walk, budget = this.size - 1) {
        const end = walk.path.at(-1);
        if (walk.bonus === null) {
            const what = walk.stop === "stop_token" ? "a stop token was accepted" : "the length was reached";
            return `${walk.stop}: ${what}, nothing comes after it`;
        }
        const why = {
            mismatch: "was not drafted here",
            exhausted: budget && this.size > 1 ? "comes after a leaf" : "comes next: nothing was drafted",
            stop_token: "ends the text",
            edited: "came after a hook had ended the round",
            length: "is the last token asked for",
        };
        const own = this.label(this.choice[end]);
        const sure = `${percent(this.choice_log_prob[end])}, margin ${fixed(this.margin[end])}`;
        const near = walk.stop === "mismatch" || walk.stop === "exhausted" ? this.near(end, budget) : "";
        return `${walk.stop}: the target's own ${own} (${sure}) ${why[walk.stop] ?? ""}${near ? `; ${near}` : ""}`;
    }
}

function asHex(byte) {
    return byte.toString(16).padStart(2, "0");
}

/** Places of the tree's nodes: depth to the right, a row for every leaf, so that no two subtrees share a row. */
export function layout(round, walk, budget, collapsed) {
    const place = new Map(); // node -> [depth, row]
    const end = walk.path.at(-1);
    let rows = 0;
    const stack = [0];
    while (stack.length) {
        const node = stack.pop();
        place.set(node, [round.depth[node], rows]);
        const open = collapsed.has(node) ? [] : round.children(node, budget);
        const own = node === end && walk.bonus !== null;
        if (own) place.set(OWN, [round.depth[node] + 1, rows]); // the target's own token goes straight on
        if (own || !open.length) rows++;
        for (let i = open.length - 1; i >= 0; i--) stack.push(open[i]);
    }
    return { place, rows };
}
