// Small helpers: elements made from data, numbers as they are read. Text only ever becomes text nodes.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. Attributes are set as they are named; `on` holds listeners; children are text or nodes. */
export function el(name, attributes = {}, ...children) {
    return fill(document.createElement(name), attributes, children);
}

/** The same for SVG. */
export function svg(name, attributes = {}, ...children) {
    return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(node, { on = {}, ...attributes }, children) {
    for (const [key, value] of Object.entries(attributes)) {
        if (value !== null && value !== undefined && value !== false)
            node.setAttribute(key, value === true ? "" : value);
    }
    for (const [event, listener] of Object.entries(on)) node.addEventListener(event, listener);
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
}

export function button(label, name, action, attributes = {}) {
    const named = name ? { "aria-label": name, title: name } : {};
    return el("button", { type: "button", ...named, ...attributes, on: { click: action } }, label);
}

/** A token's label, its reading direction kept to itself. */
export function token(label, style = "") {
    return el("bdi", { class: `tok ${style}`.trim() }, label);
}

export function shorten(label, characters = 12) {
    const all = [...label];
    return all.length <= characters ? label : `${all.slice(0, characters - 1).join("")}…`;
}

/** A probability from its logarithm; null stands for unknown. */
export function percent(logProb) {
    if (logProb === null || logProb === undefined) return "?";
    const prob = Math.exp(logProb);
    return prob >= 0.001 || prob === 0 ? `${(100 * prob).toFixed(1)}%` : "<0.1%";
}

export function fixed(value, digits = 2) {
    return value === null || value === undefined ? "?" : value.toFixed(digits);
}

/** The colours of the stylesheet as they are now, for a canvas: custom properties alone keep `light-dark()`. */
export function colours(root, names) {
    const probe = root.appendChild(el("span", { hidden: true }));
    const found = {};
    for (const name of names) {
        probe.style.color = `var(--${name})`;
        found[name] = getComputedStyle(probe).color;
    }
    probe.remove();
    return found;
}
