// A text under any budget, builder and depth limit: controls, what comes of them, and an inspector of those rounds.

import { plainSeconds, roundSeconds, sum } from "./cost.js";
import { button, el, svg } from "./dom.js";
import { BUILDERS, replay, unpack } from "./drafts.js";
import { Inspector } from "./inspector.js";

const ENOUGH_ROUNDS = 30; // as in ddlab/trace.py
const TALL = 44; // pixels of the tallest bar
const NAMES = {
    best_first: "best first (DDTree)",
    chain: "chain (DFlash)",
    fixed_width: "fixed width",
    cost_aware: "cost aware",
};
const STOPS = { mismatch: "×", exhausted: "|", stop_token: "■", length: "▲" };

/** Replayed rounds as an inspector's run, in the form of data.py. What only a forward of the target tells is null. */
export function asRun(data, rows, rounds) {
    const piece = (kind, number, at) => [kind, number, data.text[at][0], data.text[at][1]];
    const text = data.text.slice(0, data.prompt + 1).map((_, at) => piece(at < data.prompt ? 0 : 1, -1, at));
    rounds.forEach(({ start, path, gained }, number) => {
        for (let i = 0; i < gained; i++) text.push(piece(i < path.length - 1 ? 2 : 3, number, start + 1 + i));
    });
    const { tokens, layers, notes } = data;
    return { text, rounds: rounds.map((round, index) => asRound(data, rows, round, index)), tokens, layers, notes };
}

function asRound(data, rows, { start, nodes, deep, path, bonus, stop, gained }, index) {
    const nothing = () => nodes.map(() => null);
    const round = { index, start, path, stop, edited: [], rank: nodes.map((node) => node.rank) };
    round.parents = nodes.map((node) => node.parent?.number ?? -1);
    round.tokens = nodes.map((node) => node.place ?? data.text[start][0]);
    round.log_prob = nodes.map((node) => node.score);
    round.choice = nodes.map(() => -1); // unknown, but along the text
    round.choice_log_prob = nothing();
    round.margin = nothing();
    round.node_log_prob = nothing();
    path.slice(0, gained).forEach((node, i) => {
        const [place, , logProb, margin] = data.text[start + 1 + i];
        round.choice[node] = place;
        round.choice_log_prob[node] = logProb;
        round.margin[node] = margin;
        if (i + 1 < path.length) round.node_log_prob[path[i + 1]] = logProb;
    });
    round.bonus = bonus === null ? null : data.text[start + gained][0];
    const drafted = rows[start - data.prompt].slice(0, deep);
    round.best = drafted.map((row) => row.places);
    round.best_log_prob = drafted.map((row) => row.logProbs);
    return round;
}

/** What rounds come to. `seconds` is predicted: null without a cost table, or where it does not reach. */
export function count(rounds, cost) {
    const costs = cost ? rounds.map((r) => roundSeconds(cost, r.nodes.length, r.start, r.gained)) : [null];
    return {
        rounds: rounds.length,
        gained: sum(rounds.map((round) => round.gained)),
        drafted: sum(rounds.map((round) => round.nodes.length - 1)),
        seconds: costs.includes(null) ? null : sum(costs),
    };
}

function speed({ gained, seconds }) {
    return seconds ? gained / seconds : null;
}

export class ReplayPanel {
    /** root: an empty element. data: what `replay_data` in replayed.py makes. */
    constructor(root, data) {
        this.data = data;
        this.rows = unpack(data.drafts, data.tokens);
        this.ids = data.text.map(([place]) => data.tokens[place][0]);
        const names = Object.keys(BUILDERS).map((name) => el("option", { value: name }, NAMES[name]));
        this.builder = el("select", {}, ...names);
        this.builder.value = data.builder;
        this.budget = el("input", { type: "range", min: "0", max: data.kept, value: data.budget });
        this.limit = el("input", { type: "range", min: "0", max: data.depth, value: data.limit ?? data.depth });
        this.width = el("input", { type: "number", min: "1", max: data.kept, step: "1", value: "2" });
        this.cost = el("input", { type: "number", min: "0", max: "1", step: "any", value: "0.02" });
        this.budgetSaid = el("output", {});
        this.limitSaid = el("output", {});
        const group = (name, ...parts) => el("label", { class: "group" }, name, ...parts);
        this.widthGroup = group("children a node, at most ", this.width);
        this.costGroup = group("price of a row, in tokens ", this.cost);
        const bar = el(
            "div",
            { class: "bar", role: "group", "aria-label": "what is replayed" },
            group("builder ", this.builder),
            group("budget ", this.budget, this.budgetSaid),
            this.widthGroup,
            this.costGroup,
            group("depths used ", this.limit, this.limitSaid),
        );
        this.said = el("p", { class: "wide", role: "status" });
        this.table = el("div", { class: "scroll" });
        const place = el("div");
        root.classList.add("ddlab", "replay");
        root.replaceChildren(el("div", { class: "inspector" }, bar, this.said, this.table), place);
        this.inspector = new Inspector(place, asRun(data, this.rows, []), { whole: true });
        this.anchor = this.shown = data.prompt; // position of the text that stays in view
        for (const input of [this.builder, this.limit, this.width, this.cost])
            input.addEventListener("input", () => this.change());
        this.budget.addEventListener("input", () => this.draw());
        this.change();
    }

    get settings() {
        const [width, cost] = [this.width, this.cost].map((input) => input.valueAsNumber);
        return {
            builder: this.builder.value,
            budget: this.budget.valueAsNumber,
            limit: this.limit.valueAsNumber,
            width: Number.isInteger(width) && width >= 1 ? width : 1,
            cost: cost >= 0 ? cost : 0,
        };
    }

    run(settings) {
        return replay(this.data, this.rows, this.ids, settings);
    }

    /** Something other than the budget is new: other budgets come to something else too. */
    change() {
        const { builder } = this.settings;
        const most = builder === "chain" ? this.data.depth : this.data.kept;
        this.budget.max = most;
        this.widthGroup.hidden = builder !== "fixed_width";
        this.costGroup.hidden = builder !== "cost_aware";
        this.drawTable(most);
        this.draw();
    }

    draw() {
        const settings = this.settings;
        const { depth } = this.data;
        this.budgetSaid.textContent = `${settings.budget}`;
        this.limitSaid.textContent = settings.limit === depth ? `all ${depth}` : `${settings.limit} of ${depth}`;
        const rounds = this.run(settings);
        const { inspector } = this;
        const before = inspector.run.rounds[inspector.number]?.start;
        if (before !== undefined && before !== this.shown) this.anchor = before; // the reader has moved
        const number = Math.max(0, rounds.findLastIndex(({ start }) => start <= this.anchor));
        this.shown = rounds[number]?.start;
        inspector.replace(asRun(this.data, this.rows, rounds), number);
        this.tell(rounds);
        for (const cell of this.table.querySelectorAll("[data-budget]"))
            cell.classList.toggle("here", Number(cell.dataset.budget) === settings.budget);
    }

    tell(rounds) {
        const { cost } = this.data;
        const counted = count(rounds, cost);
        const { gained, drafted } = counted;
        const n = rounds.length;
        const few = n < ENOUGH_ROUNDS;
        this.said.classList.toggle("soft", few);
        if (!n) return (this.said.textContent = "No round is decided by this text.");
        const ends = Object.entries(STOPS).map(([stop, mark]) => {
            const ended = rounds.filter((round) => round.stop === stop).length;
            return ended ? `${mark} ${stop} ${ended}` : "";
        });
        const parts = [
            `τ, tokens per round: ${(gained / n).toFixed(2)} (${rounded(n)}, ${gained} new tokens)`,
            `${(drafted / n).toFixed(1)} nodes drafted a round`,
            `ends: ${ends.filter(Boolean).join(", ")}`,
            cost ? this.predicted(speed(counted)) : "",
            few ? `fewer than ${ENOUGH_ROUNDS} rounds, too few to rest on` : "",
        ];
        const left = this.ids.length - 1 - this.data.prompt - gained;
        if (left) parts.push(`${left} tokens at the end are left: the text was not finished`);
        return (this.said.textContent = parts.filter(Boolean).join(" · "));
    }

    predicted(rate) {
        if (rate === null) return `no prediction: up to ${this.data.cost.rows.at(-1)} rows a round were measured`;
        const { prompt, cost } = this.data;
        const seconds = plainSeconds(cost, prompt, this.ids.length - 1);
        const plain = seconds ? `, plain decoding ${((this.ids.length - 1 - prompt) / seconds).toFixed(1)}` : "";
        return `predicted: ${rate.toFixed(1)} tokens/s${plain} (${cost.said})`;
    }

    /** What other budgets come to, a column each: its button replays it. */
    drawTable(most) {
        const { cost } = this.data;
        const budgets = [0];
        for (let budget = 1; budget < most; budget *= 2) budgets.push(budget);
        if (most) budgets.push(most);
        const counts = budgets.map((budget) => count(this.run({ ...this.settings, budget }), cost));
        const taus = counts.map(({ rounds, gained }) => (rounds ? gained / rounds : 0));
        const highest = Math.max(...taus, 1);
        const bar = (tau) => {
            const tall = (TALL * tau) / highest;
            const size = { y: (TALL - tall).toFixed(1), width: 26, height: tall.toFixed(1) };
            const column = svg("rect", { class: "tau", ...size });
            return svg("svg", { width: 26, height: TALL, "aria-hidden": "true" }, column);
        };
        const go = (budget) => button(String(budget), `replay with budget ${budget}`, () => this.go(budget));
        const figures = [
            ["τ, tokens per round", ({ rounds }, i) => (rounds ? taus[i].toFixed(2) : "–")],
            ["rounds", ({ rounds }) => String(rounds)],
            ["nodes a round", ({ rounds, drafted }) => (rounds ? (drafted / rounds).toFixed(1) : "–")],
        ];
        const rates = counts.map(speed);
        const best = Math.max(...rates);
        const rate = (_, i) => (rates[i] === null ? "–" : `${rates[i].toFixed(1)}${rates[i] === best ? " ★" : ""}`);
        if (cost) figures.push(["predicted tokens/s, ★ the most", rate]);
        const few = (i) => (counts[i].rounds < ENOUGH_ROUNDS ? "few" : "");
        const columns = (tag, cell) =>
            budgets.map((budget, i) => el(tag, { "data-budget": budget, class: few(i) }, cell(counts[i], i)));
        const head = columns("th", (_, i) => go(budgets[i]));
        for (const cell of head) cell.setAttribute("scope", "col");
        const line = ([name, cell]) => el("tr", {}, el("th", { scope: "row" }, name), ...columns("td", cell));
        const bars = el("tr", { "aria-hidden": "true" }, el("td"), ...columns("td", (_, i) => bar(taus[i])));
        const top = el("thead", {}, el("tr", {}, el("th", { scope: "row" }, "budget"), ...head));
        const body = el("tbody", {}, bars, ...figures.map(line));
        this.table.replaceChildren(el("table", { class: "figures" }, top, body));
    }

    go(budget) {
        this.budget.value = String(budget);
        this.draw();
    }
}

function rounded(n) {
    return `${n} round${n === 1 ? "" : "s"}`;
}
