"""ComfyUI's frontend in a headless Chromium: open workflows, run them, inspect them."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, ConsoleMessage, Page

from tools.comfyui.server import ComfyServer, Prompt

NO_BROWSER = "no Chromium was found: install one, or name it in CHROMIUM_PATH"
# The folder in which the tests save their pictures, if set. web/docs/images has those of the nodes.
PICTURES = os.environ.get("COMFY_SAGE2_PICTURES")
WINDOW: Any = {"width": 1800, "height": 1200}
# TutorialCompleted: the frontend's first start would open its template browser over the graph.
SETTINGS = {
    "Comfy.TutorialCompleted": True,
    "Comfy.Minimap.Visible": False,
    "Comfy.Graph.CanvasInfo": False,
    "Comfy.Workflow.ShowMissingModelsWarning": False,
    # The defaults. In its first start, frontend 1.27 sets them before it knows these settings, which is a page error.
    "Comfy.Canvas.LeftMouseClickBehavior": "panning",
    "Comfy.Canvas.MouseWheelScroll": "zoom",
}
# While it starts, the frontend opens its own workflow, which would replace one that was loaded earlier.
READY = (
    "window.LiteGraph?.registered_node_types.SageAttention2 && window.app?.graph"
    " && app.extensionManager.workflow.activeWorkflow && !app.extensionManager.spinner"
)
# Console errors of the frontend itself: files that a new installation lacks, the template list that 1.27 expects and
# newer template packages lack, an early access to the graph while 1.49 starts, and the sizes of missing models, for
# which 1.49 asks Hugging Face although ComfyUI's content security policy forbids it.
OWN_ERRORS = (
    "Failed to load resource",
    "Error fetching workflow templates",
    "ComfyApp graph accessed before initialization",
    "Connecting to 'https://huggingface.co/",
    "Fetch API cannot load https://huggingface.co/",
)
STORE = "document.getElementById('vue-app').__vue_app__.config.globalProperties.$pinia._s.get({name!r})"


def find_chromium() -> str | None:
    """The browser that CHROMIUM_PATH names, or the first usual one on the PATH."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return os.environ.get("CHROMIUM_PATH") or next((path for path in map(shutil.which, names) if path), None)


@contextmanager
def opened(chromium: Browser, server: ComfyServer) -> Iterator[Page]:
    """A page with the frontend of `server`. An error in its console fails the last test that uses it."""
    page = chromium.new_page(viewport=WINDOW)
    page.set_default_timeout(100_000)  # milliseconds: the server is slow on a busy machine
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    console: list[ConsoleMessage] = []
    page.on("console", lambda line: console.append(line))
    reopen(page, server)
    yield page
    page.close()
    errors += [line.text for line in console if line.type == "error" and not line.text.startswith(OWN_ERRORS)]
    assert errors == [], errors


def write_settings(base: Path) -> None:
    """Write frontend settings into a server's base folder, so that pictures show only the graph."""
    folder = base / "user" / "default"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "comfy.settings.json").write_text(json.dumps(SETTINGS))


def reopen(page: Page, server: ComfyServer) -> None:
    """Reload the frontend."""
    page.goto(f"http://127.0.0.1:{server.port}/")
    page.wait_for_function(READY)


def set_setting(page: Page, name: str, value: object) -> None:
    page.evaluate("([name, value]) => app.extensionManager.setting.set(name, value)", [name, value])


def load(page: Page, workflow: dict[str, Any]) -> None:
    """Show a workflow."""
    page.evaluate("async workflow => { await app.loadGraphData(workflow) }", workflow)


def load_prompt(page: Page, prompt: Prompt) -> dict[str, Any]:
    """Show an API prompt; return the workflow that the frontend makes of it."""
    page.evaluate("async prompt => { await app.loadApiJson(prompt, 'test') }", prompt)
    return saved(page)


def saved(page: Page) -> dict[str, Any]:
    """The workflow as the frontend saves it."""
    workflow: dict[str, Any] = json.loads(page.evaluate("JSON.stringify(app.graph.serialize())"))
    return workflow


def prompt_of(page: Page) -> Prompt:
    """The prompt that the frontend would send to the server, without `_meta`."""
    output = page.evaluate("async () => (await app.graphToPrompt()).output")
    return {name: {k: v for k, v in node.items() if k != "_meta"} for name, node in output.items()}


def unknown_nodes(page: Page) -> list[str]:
    """The types of nodes in the graph that the frontend does not know."""
    known = "n.type in LiteGraph.registered_node_types || n.isVirtualNode"
    result: list[str] = page.evaluate(f"app.graph.nodes.filter(n => !({known})).map(n => n.type)")
    return result


def red_nodes(page: Page) -> list[str]:
    """The types of nodes that the frontend marks as wrong."""
    result: list[str] = page.evaluate("app.graph.nodes.filter(n => n.has_errors).map(n => n.type)")
    return result


def missing_models(page: Page, names: set[str]) -> list[dict[str, Any]]:
    """The graph's missing models, as the frontend lists them: nodeType, widgetName, name, directory, url, …

    The frontend looks for them only after it has loaded the graph, so this waits until it lists `names`.
    """
    state = "document.querySelector('#vue-app').__vue_app__.config.globalProperties.$pinia.state.value"
    listed = f"({state}.missingModel.missingModelCandidates ?? [])"
    page.wait_for_function(f"names => names.every(name => {listed}.some(m => m.name === name))", arg=sorted(names))
    result: list[dict[str, Any]] = json.loads(page.evaluate(f"JSON.stringify({listed})"))
    return result


def run(page: Page, finished: str) -> None:
    """Queue the graph and wait until the JavaScript expression `finished` is true."""
    page.evaluate("async () => { await app.queuePrompt(0) }")
    page.wait_for_function(finished)


def report() -> str:
    """A JavaScript expression for the text on the first report node."""
    return _value("SageAttention2Report", "status")


def badge(kind: str) -> str:
    """A JavaScript expression for the badge in the title of the first node of this type."""
    return _value(kind, "badge")


def _value(kind: str, widget: str) -> str:
    return f"app.graph.nodes.find(n => n.type === {kind!r})?.widgets?.find(w => w.name === {widget!r})?.value"


def messages(page: Page) -> list[str]:
    """The texts of the messages beside the graph, which close by themselves."""
    result: list[str] = page.evaluate("[...document.querySelectorAll('[role=alert]')].map(alert => alert.innerText)")
    return result


def natural_width(page: Page, address: str) -> int:
    """The width of the picture at an address."""
    width: int = page.evaluate(
        "address => new Promise((done, failed) => { const i = new Image(); i.onload = () => done(i.naturalWidth);"
        " i.onerror = failed; i.src = address; })",
        address,
    )
    return width


def keep_picture(page: Page, name: str, *kinds: str) -> Image.Image:
    """Take a picture of the nodes of these types, or of the whole graph, and save it if PICTURES is set.

    A blank picture is an error: nothing was drawn.
    """
    image = picture(page, kinds, settle=0 if PICTURES is None else 1000)
    assert len(image.getcolors(maxcolors=1 << 24) or ()) > 50
    if PICTURES is not None:
        image.save(Path(PICTURES) / f"{name}.png", optimize=True)
    return image


def picture(page: Page, kinds: tuple[str, ...] = (), margin: int = 30, settle: int = 1000) -> Image.Image:
    """A picture of only the nodes of these types, without wires, or of the whole graph, as large as the window allows.

    settle: milliseconds to wait after the graph is redrawn, so that pictures in nodes load.
    """
    for _ in range(3):  # a node grows to show its picture only when it is drawn
        page.evaluate(_FIT, [kinds, margin])
        page.evaluate(DRAWN)
    page.wait_for_timeout(settle)
    left, top, right, bottom = page.evaluate(_FRAME, [kinds, margin])
    whole = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    return whole.crop((max(left, 0), max(top, 0), min(right, whole.width), min(bottom, whole.height)))


_CHOSEN = """
const nodes = app.graph.nodes.filter(n => types.length === 0 || types.includes(n.type));
const title = LiteGraph.NODE_TITLE_HEIGHT;
const left = Math.min(...nodes.map(n => n.pos[0])), right = Math.max(...nodes.map(n => n.pos[0] + n.size[0]));
const shown = n => document.querySelector(`[data-node-id="${n.id}"]`)?.offsetHeight ?? 0;  // Nodes 2.0 only; with title
const height = n => Math.max(n.size[1], shown(n) - title);
const top = Math.min(...nodes.map(n => n.pos[1] - title)), bottom = Math.max(...nodes.map(n => n.pos[1] + height(n)));
"""
# The side bar and the tabs cover the left and the upper edge of the canvas.
_FIT = f"""([types, margin]) => {{ {_CHOSEN}
const free = {{x: 70, y: 120, width: innerWidth - 90, height: innerHeight - 140}};
const scale = Math.min((free.width - 2 * margin) / (right - left), (free.height - 2 * margin) / (bottom - top), 1.0);
app.canvas.links_render_mode = types.length ? LiteGraph.HIDDEN_LINK : LiteGraph.SPLINE_LINK;
const ds = app.canvas.ds;
ds.scale = scale;
ds.offset[0] = (free.x + margin) / scale - left;
ds.offset[1] = (free.y + margin) / scale - top;
app.canvas.setDirty(true, true);
}}"""
# The canvas draws earlier changes in the first frame, and has drawn them when the second begins.
DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
_FRAME = f"""([types, margin]) => {{ {_CHOSEN}
const {{scale, offset}} = app.canvas.ds, box = app.canvas.canvas.getBoundingClientRect();
const x = value => Math.round((value + offset[0]) * scale + box.left);
const y = value => Math.round((value + offset[1]) * scale + box.top);
return [x(left) - margin, y(top) - margin, x(right) + margin, y(bottom) + margin];
}}"""
