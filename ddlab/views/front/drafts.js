// Drafts of a whole text, and the rounds of any budget cut from them. No drawing here; what ddlab/replay.py decides,
// this decides too, to the last bit: log-probabilities are doubles on a grid, on which sums are exact.

const GRID = 2 ** 38;
const RAW = 63; // in the place of a shift: the row's numbers are not on the grid

/** Rows of candidates by position: [{ ids, places, logProbs }, one a depth]. Undoes `pack` in replayed.py. */
export function unpack(packed, tokens) {
    const places = new Varints(packed.tokens);
    const numbers = new Varints(packed.numbers);
    const raw = new DataView(bytes(packed.raw).buffer);
    let rawAt = 0;
    const row = () => {
        const n = places.next();
        const here = { ids: new Int32Array(n), places: new Int32Array(n), logProbs: new Float64Array(n) };
        for (let i = 0; i < n; i++) {
            here.places[i] = places.next();
            here.ids[i] = tokens[here.places[i]][0];
        }
        if (!n) return here;
        const shift = numbers.next();
        if (shift === RAW) {
            for (let i = 0; i < n; i++, rawAt += 8) here.logProbs[i] = raw.getFloat64(rawAt, true);
            return here;
        }
        let units = numbers.next();
        for (let i = 0; i < n; i++) {
            if (i) units += numbers.next() * 2 ** shift; // below 2 ** 53: exact
            here.logProbs[i] = 0 - units / GRID;
        }
        return here;
    };
    return packed.depths.map((depth) => Array.from({ length: depth }, row));
}

class Varints {
    constructor(encoded) {
        this.bytes = bytes(encoded);
        this.at = 0;
    }

    next() {
        let value = 0;
        for (let scale = 1; ; scale *= 128) {
            const byte = this.bytes[this.at++];
            value += (byte & 127) * scale;
            if (byte < 128) return value;
        }
    }
}

function bytes(encoded) {
    return Uint8Array.from(atob(encoded), (character) => character.charCodeAt(0));
}

/** The order of a tree's nodes: the higher score, then the shallower, then the smaller path of token ids. */
function before(a, b) {
    if (a.score !== b.score) return a.score > b.score;
    if (a.depth !== b.depth) return a.depth < b.depth;
    let order = 0;
    for (; a !== b; a = a.parent, b = b.parent) if (a.id !== b.id) order = a.id - b.id;
    return order < 0;
}

class Heap {
    constructor() {
        this.items = [];
    }

    push(item) {
        const { items } = this;
        let at = items.length;
        while (at) {
            const above = (at - 1) >> 1;
            if (!before(item, items[above])) break;
            items[at] = items[above];
            at = above;
        }
        items[at] = item;
    }

    pop() {
        const { items } = this;
        const first = items[0];
        const item = items.pop();
        if (!items.length) return first;
        let at = 0;
        for (;;) {
            let below = 2 * at + 1;
            if (below >= items.length) break;
            if (below + 1 < items.length && before(items[below + 1], items[below])) below++;
            if (!before(items[below], item)) break;
            items[at] = items[below];
            at = below;
        }
        items[at] = item;
        return first;
    }
}

/**
 * The `budget` best prefixes of the product of each row's `width` first candidates, best first; node 0 is the root.
 * A node waits in the heap once its parent is in and its better siblings are: neither can come after it.
 */
function grow(rows, budget, width) {
    const nodes = [{ parent: null, number: 0, depth: 0, rank: -1, score: 0 }];
    const heap = new Heap();
    /** Children of `parent` from `rank` on: the next one, and those whose score is the same. */
    const offer = (parent, rank) => {
        const row = rows[parent.depth];
        const end = row ? Math.min(width, row.ids.length) : 0;
        if (rank >= end) return;
        const score = parent.score + row.logProbs[rank];
        if (!(score >= -Number.MAX_VALUE)) return;
        let node;
        for (; rank < end && parent.score + row.logProbs[rank] === score; rank++) {
            node = { parent, depth: parent.depth + 1, rank, score, id: row.ids[rank], place: row.places[rank] };
            heap.push(node);
        }
        node.next = rank; // where its siblings go on
    };
    offer(nodes[0], 0);
    while (nodes.length <= budget && heap.items.length) {
        const node = heap.pop();
        node.number = nodes.length;
        nodes.push(node);
        if (node.next) offer(node.parent, node.next);
        offer(node, 0);
    }
    return nodes;
}

/** The trees of ddlab/builders.py: (rows, budget, options) -> nodes. */
export const BUILDERS = {
    best_first: (rows, budget) => grow(rows, budget, budget),
    chain: (rows, budget) => grow(rows, rows.length, 1).slice(0, budget + 1),
    fixed_width: (rows, budget, { width }) => grow(rows, budget, Math.min(width, budget)),
    cost_aware(rows, budget, { cost }) {
        const nodes = grow(rows, budget, budget); // exp and numpy.exp may differ in the last bit
        return nodes.filter((node) => !node.number || Math.exp(node.score) >= cost);
    },
};

/**
 * The rounds of a text. `text`: token ids; `data`: what `replay_data` in replayed.py makes, `rows` unpacked from it.
 * One round: { start, nodes, deep, path, bonus, stop, gained }; `bonus` null where the text was cut before it.
 */
export function replay(data, rows, text, { builder, budget, limit, ...options }) {
    const stops = new Set(data.stops);
    const rounds = [];
    let start = data.prompt;
    while (start < text.length - 1) {
        let deep = Math.min(limit ?? data.depth, data.depth);
        if (data.positions !== null) deep = Math.min(deep, data.positions - start - 1);
        const kept = rows[start - data.prompt].slice(0, Math.max(0, deep));
        const nodes = BUILDERS[builder](kept, budget, options);
        const taken = walk(nodes, (depth) => text[start + 1 + depth], stops, data.end - start - 1);
        if (taken.bonus === undefined) break; // an unfinished text does not decide this round
        const gained = taken.path.length - (taken.bonus === null ? 1 : 0);
        rounds.push({ start, nodes, deep: kept.length, ...taken, gained });
        start += gained;
    }
    return rounds;
}

/** Follows the text from the root while its tokens were drafted. `at`: the token of the text at a depth. */
function walk(nodes, at, stops, room) {
    const below = nodes.map(() => []);
    for (const node of nodes) if (node.parent) below[node.parent.number].push(node);
    const path = [0];
    for (;;) {
        const end = path.at(-1);
        const token = at(path.length - 1);
        const child = below[end].find((node) => node.id === token);
        const ended = stops.has(token);
        if (!child) {
            const stop = ended ? "stop_token" : below[end].length ? "mismatch" : "exhausted";
            return { path, bonus: token, stop };
        }
        const full = path.length === room;
        path.push(child.number);
        if (ended || full) return { path, bonus: null, stop: ended ? "stop_token" : "length" };
    }
}
