"""ComfyUI's frontend in a browser: open workflows, run them, look at them."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

from PIL import Image

from .chromium import Chromium

# The frontend's first start would open its template browser over the graph.
SETTINGS = {
    "Comfy.TutorialCompleted": True,
    "Comfy.Minimap.Visible": False,
    "Comfy.Graph.CanvasInfo": False,
    "Comfy.Workflow.ShowMissingModelsWarning": False,
}
# The frontend opens a workflow of its own while it starts, which would replace one that is loaded before.
READY = (
    "window.LiteGraph?.registered_node_types.SageAttention2 && window.app?.graph"
    " && app.extensionManager.workflow.activeWorkflow && !app.extensionManager.spinner"
)


def write_settings(base: Path) -> None:
    """Set the frontend up, in a server's base folder, for pictures of the graph alone."""
    folder = base / "user" / "default"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "comfy.settings.json").write_text(json.dumps(SETTINGS))


def open_frontend(browser: Chromium, address: str) -> None:
    """Load the frontend of the server at `address`."""
    browser.open(address)
    browser.wait_for(READY)


def load(browser: Chromium, workflow: dict[str, Any]) -> None:
    """Show a workflow."""
    browser.evaluate(f"app.loadGraphData({json.dumps(workflow)}).then(() => true)")


def unknown_nodes(browser: Chromium) -> list[str]:
    """The types of nodes in the graph that the frontend does not know."""
    known = "n => n.type in LiteGraph.registered_node_types || n.isVirtualNode"
    result: list[str] = browser.evaluate(f"app.graph.nodes.filter(n => !(({known})(n))).map(n => n.type)")
    return result


def choose_design(browser: Chromium, vue: bool) -> None:
    """Draw nodes by Vue ("Nodes 2.0"), or on the canvas."""
    browser.evaluate(f"app.extensionManager.setting.set('Comfy.VueNodes.Enabled', {json.dumps(vue)}).then(() => true)")


def red_nodes(browser: Chromium) -> list[str]:
    """The types of nodes that the frontend marks as wrong."""
    result: list[str] = browser.evaluate("app.graph.nodes.filter(n => n.has_errors).map(n => n.type)")
    return result


def missing_models(browser: Chromium, names: set[str], seconds: float = 60.0) -> list[dict[str, Any]]:
    """What the frontend lists as missing models of the graph: nodeType, widgetName, name, directory, url, …

    It looks for them after a graph was loaded: waits until files of these names are listed.
    """
    state = "document.querySelector('#vue-app').__vue_app__.config.globalProperties.$pinia.state.value"
    listed = f"({state}.missingModel.missingModelCandidates ?? [])"
    browser.wait_for(f"{json.dumps(sorted(names))}.every(name => {listed}.some(model => model.name === name))", seconds)
    result: list[dict[str, Any]] = json.loads(browser.evaluate(f"JSON.stringify({listed})"))
    return result


def prompt(browser: Chromium) -> dict[str, Any]:
    """The graph as the frontend would send it to the server, without its notes for people."""
    output = browser.evaluate("app.graphToPrompt().then(p => p.output)")
    return {name: {k: v for k, v in node.items() if k != "_meta"} for name, node in output.items()}


def run(browser: Chromium, finished: str, seconds: float = 300.0) -> None:
    """Queue the graph and wait until the JavaScript expression `finished` is true."""
    browser.evaluate("app.queuePrompt(0).then(() => true)")
    browser.wait_for(finished, seconds)


def picture(browser: Chromium, types: tuple[str, ...] = (), margin: int = 20, settle: float = 1.0) -> Image.Image:
    """The nodes of these types without wires, or the whole graph, as large as the window allows, and nothing else.

    settle: seconds that pictures in nodes get to load, after the graph was drawn anew.
    """
    browser.evaluate(f"({_FIT})({json.dumps(types)}, {margin})")
    browser.evaluate(_DRAWN)
    time.sleep(settle)
    left, top, right, bottom = browser.evaluate(f"({_FRAME})({json.dumps(types)}, {margin})")
    whole = Image.open(io.BytesIO(browser.screenshot())).convert("RGB")
    return whole.crop((max(left, 0), max(top, 0), min(right, whole.width), min(bottom, whole.height)))


_CHOSEN = """
const nodes = app.graph.nodes.filter(n => types.length === 0 || types.includes(n.type));
const title = LiteGraph.NODE_TITLE_HEIGHT;
const left = Math.min(...nodes.map(n => n.pos[0])), right = Math.max(...nodes.map(n => n.pos[0] + n.size[0]));
const top = Math.min(...nodes.map(n => n.pos[1] - title)), bottom = Math.max(...nodes.map(n => n.pos[1] + n.size[1]));
"""
# The side bar and the tabs cover the left and the upper edge of the canvas.
_FIT = f"""(types, margin) => {{ {_CHOSEN}
const free = {{x: 70, y: 120, width: innerWidth - 90, height: innerHeight - 140}};
const scale = Math.min((free.width - 2 * margin) / (right - left), (free.height - 2 * margin) / (bottom - top), 1.0);
app.canvas.links_render_mode = types.length ? LiteGraph.HIDDEN_LINK : LiteGraph.SPLINE_LINK;
const ds = app.canvas.ds;
ds.scale = scale;
ds.offset[0] = (free.x + margin) / scale - left;
ds.offset[1] = (free.y + margin) / scale - top;
app.canvas.setDirty(true, true);
}}"""
# In the first frame the canvas draws what changed before; the second one begins when that is done.
_DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
_FRAME = f"""(types, margin) => {{ {_CHOSEN}
const {{scale, offset}} = app.canvas.ds, box = app.canvas.canvas.getBoundingClientRect();
const x = value => Math.round((value + offset[0]) * scale + box.left);
const y = value => Math.round((value + offset[1]) * scale + box.top);
return [x(left) - margin, y(top) - margin, x(right) + margin, y(bottom) + margin];
}}"""
