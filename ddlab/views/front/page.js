// A page: every element that asks for an inspector, a replay or a comparison gets one, with the data that stands beside it.

import { Inspector } from "./inspector.js";
import { LayersPanel } from "./layers.js";
import { ReplayPanel } from "./replay.js";

export function openPage(page) {
    for (const root of page.querySelectorAll("[data-run]")) {
        const run = JSON.parse(page.getElementById(root.dataset.run).textContent);
        const panels = root.dataset.panels.split(" ");
        const inspector = new Inspector(root, run, { round: Number(root.dataset.round), panels });
        // columns of the charts of that run lead to their rounds
        for (const column of page.querySelectorAll(`[data-goto="${root.dataset.run}"]`)) {
            column.addEventListener("click", () => {
                inspector.go(Number(column.dataset.number));
                root.scrollIntoView();
            });
        }
    }
    for (const root of page.querySelectorAll("[data-replay]"))
        new ReplayPanel(root, JSON.parse(page.getElementById(root.dataset.replay).textContent));
    for (const root of page.querySelectorAll("[data-layers]"))
        new LayersPanel(root, JSON.parse(page.getElementById(root.dataset.layers).textContent));
    globalThis.addEventListener("beforeprint", () => {
        for (const rounds of page.querySelectorAll("details.rounds")) rounds.open = true;
    });
    // what is too wide for the page can be scrolled with keys too
    for (const wide of page.querySelectorAll(".scroll")) if (wide.scrollWidth > wide.clientWidth) wide.tabIndex = 0;
}
