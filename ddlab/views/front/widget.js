// The same inspector on a live kernel: the kernel owns the run, this shows it and asks for rounds.

import { button, el } from "./dom.js";
import { Inspector } from "./inspector.js";

export function renderWidget({ model, el: root }) {
    const live = model.get("live");
    const ask = (what, more = {}) => model.send({ do: what, ...more });
    const said = el("p", { class: "note", role: "status", hidden: true });
    const place = el("div");
    const buttons = [];
    let running = false;

    const controls = () => {
        if (!live) return [];
        buttons.push(
            button("step", "decode the next round", () => ask("step")),
            button("back", "undo the last round", () => ask("back")),
            button("run", "decode round after round", () => setRunning(!running)),
        );
        return [el("span", { class: "group" }, ...buttons)];
    };
    const acts = (inspector) => {
        const { number, focused } = inspector;
        if (!live || !focused) return [];
        const edit = (what) => ask(what, { round: number, node: focused });
        return [
            ["prune", "make this round again without this branch", () => edit("prune")],
            ["force", "make this round again with this branch only", () => edit("force")],
        ];
    };
    const changed = ({ number, focused }) => {
        model.set({ round: number, selection: { round: number, node: focused } });
        model.save_changes();
    };

    const inspector = new Inspector(place, model.get("data"), {
        round: model.get("round"),
        live: { controls, acts, changed },
    });
    place.prepend(said);
    place.setAttribute("data-lm-suppress-shortcuts", "true"); // or JupyterLab takes arrow keys and Enter for its cells
    root.append(place);
    follow(place, inspector);

    function setRunning(on) {
        running = on && !model.get("finished");
        if (live) buttons[2].textContent = running ? "pause" : "run";
        if (running && !model.get("busy")) ask("step");
    }
    function update() {
        const busy = model.get("busy");
        const finished = model.get("finished");
        const message = model.get("message");
        if (live) {
            buttons[0].disabled = busy || Boolean(finished);
            buttons[1].disabled = busy || !model.get("data").rounds.length;
            buttons[2].disabled = Boolean(finished);
        }
        said.hidden = !message;
        said.textContent = message;
        if (running && (finished || message)) setRunning(false);
        else if (running && !busy) ask("step");
    }
    function newData() {
        inspector.replace(model.get("data"), model.get("round"));
    }
    function newRound() {
        if (inspector.number !== model.get("round"))
            inspector.show(Math.min(model.get("round"), inspector.run.rounds.length - 1));
    }
    function newBudget() {
        if (model.get("budget") !== null && inspector.number >= 0) inspector.setBudget(model.get("budget"));
    }
    const heard = [
        ["change:data", newData],
        ["change:round", newRound],
        ["change:budget", newBudget],
        ["change:busy change:finished change:message", update],
    ];
    for (const [event, listener] of heard) model.on(event, listener);
    update();
    return () => {
        running = false;
        inspector.dispose();
        for (const [event, listener] of heard) model.off(event, listener);
    };
}

/** Takes the theme of the application around it, which need not be the system's. */
function follow(root, inspector) {
    const { body } = document;
    const set = () => {
        const dark = body.dataset.jpThemeLight === "false" || body.dataset.vscodeThemeKind?.includes("dark");
        const known = body.dataset.jpThemeLight !== undefined || body.dataset.vscodeThemeKind !== undefined;
        root.style.colorScheme = known ? (dark ? "dark" : "light") : "";
        inspector.recolour();
    };
    set();
    const watch = new MutationObserver(set);
    watch.observe(body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-vscode-theme-kind"] });
    inspector.gone.signal.addEventListener("abort", () => watch.disconnect());
}
