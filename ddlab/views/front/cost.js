// What rounds cost by a measured table: `CostModel.seconds_of` of ddlab/cost.py, and plain decoding beside it.

/** The value at `x` on a line through points, linear in between; null beyond them. */
function between(x, xs, ys) {
    const last = xs.length - 1;
    if (x < xs[0] || x > xs[last]) return null;
    if (last === 0) return ys[0];
    const at = Math.min(Math.max(xs.findIndex((point) => point >= x) - 1, 0), last - 1);
    return ys[at] + ((ys[at + 1] - ys[at]) / (xs[at + 1] - xs[at])) * (x - xs[at]);
}

/** Their sum without the rounding of its steps (Neumaier): a tie in the last digit shown falls as `math.fsum` has it. */
export function sum(values) {
    let [total, lost] = [0, 0];
    for (const value of values) {
        const next = total + value;
        lost += Math.abs(total) >= Math.abs(value) ? total - next + value : value - next + total;
        total = next;
    }
    return total + lost;
}

/** levels: seconds at each measured prefix. Below the shortest its own; beyond the longest as between the last two. */
function along(prefixes, levels, prefix) {
    if (prefixes.length === 1) return levels[0];
    const above = prefixes.findIndex((point) => point >= prefix);
    const at = above < 0 ? prefixes.length - 2 : Math.max(above - 1, 0);
    const [low, high] = [levels[at], levels[at + 1]];
    const share = Math.max((prefix - prefixes[at]) / (prefixes[at + 1] - prefixes[at]), 0);
    return share <= 1 ? low + share * (high - low) : high + (share - 1) * Math.max(high - low, 0);
}

/** Seconds of a round with so many rows (the root counted), tokens before it, and new tokens; null: not measured. */
export function roundSeconds(cost, rows, prefix, emitted) {
    let seconds = cost.noise_seconds * emitted;
    const launched = cost.rows.find((size) => size >= rows) ?? rows;  // captured launches come in measured sizes
    for (const [phase, table] of cost.seconds.entries()) {
        const size = phase === cost.rounds_up ? launched : rows;
        const levels = table.map((line) => between(size, cost.rows, line));
        if (levels.includes(null)) return null;
        seconds += along(cost.prefixes, levels, prefix);
    }
    return seconds;
}

/** Seconds of plain decoding from one position of a text to another, a token a round; null: not measured. */
export function plainSeconds(cost, from, to) {
    if (!cost.plain) return null;
    const round = (_, i) => along(cost.prefixes, cost.plain, from + i) + cost.noise_seconds;
    return sum(Array.from({ length: Math.max(0, to - from) }, round));
}
