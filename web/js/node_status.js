// Shows the status of this pack's nodes: a badge in the title, advice in a toast, and a report's text on its node.
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";

const REPORT = "SageAttention2Report";
const WIDTH = 420; // of a new node: shows the report's picture at half its size
const COLORS = { good: "#1d6b34", warning: "#8a5300", plain: "#464b55" };

export const isOurs = ({ name }) => name?.startsWith("SageAttention2");

// The classic design draws badges above the title, where another node may lie. This one goes to the title's right end.
const titleBadge = (options) =>
  new (class extends LGraphBadge {
    getWidth(context) {
      return this.isDrawn ? super.getWidth(context) : 0; // no width, so that the other badges do not move
    }
    draw(context, x, y) {
      this.isDrawn = true;
      super.draw(context, x - this.getWidth(context), y + 27);
      this.isDrawn = false;
    }
  })(options);

function addBadge(node) {
  const height = node.size[1];
  // A hidden widget, neither saved nor sent: the newer design redraws a badge when a widget's value changes.
  const words = node.addWidget("text", "badge", "", () => {}, { hidden: true, serialize: false });
  Object.assign(words, { hidden: true, serialize: false, computeSize: () => [0, -4] });
  // No text on a muted or bypassed node, which did nothing in the last run.
  const text = () => (node.mode === 0 ? words.value : "");
  node.badges?.push(() => titleBadge({ text: text(), fgColor: "white", bgColor: COLORS[node.sageTone] }));
  node.setSize([Math.max(node.size[0], WIDTH), height]); // a workflow file sets its own size
}

function showBadge(node, text, tone) {
  node.sageTone = tone;
  node.widgets.find(({ name }) => name === "badge").value = text;
  node.setDirtyCanvas(true, true);
}

function say(node, detail) {
  app.extensionManager.toast.add({ severity: "warn", summary: node.title, detail, life: 20000 });
}

// Shows a line about the workflow file.
export function notify(node, line) {
  showBadge(node, "saved by another version", "warning");
  node.isNotified = true;
  say(node, line);
}

function showReport(node, text) {
  let widget = node.widgets.find(({ name }) => name === "status");
  if (!widget) {
    ({ widget } = app.widgets.STRING(node, "status", ["STRING", { multiline: true }], app));
    (widget.element ?? widget.inputEl).readOnly = true;
    // The shown text belongs neither in the workflow nor in the prompt.
    widget.serialize = widget.options.serialize = false;
    widget.options.getMinHeight = () => 68; // four lines in the classic design
  }
  if (widget.value === text) return;
  widget.value = text;
  // Grow in height, only as far as needed, and never in width: another node may stand beside this one.
  node.setSize([node.size[0], Math.max(node.size[1], node.computeSize()[1])]);
}

// When a node runs, it replaces a workflow value that this version does not know. Until the user chooses another value,
// the node has the border of a node with an error; the workflow file does not store that border.
const UNKNOWN = "[SA-401]";

function hasUnknownValue(node) {
  return (node.widgets ?? []).some(
    ({ value, options }) => Array.isArray(options?.values) && !options.values.includes(value),
  );
}

function mark(node, text = "") {
  const isMarked = hasUnknownValue(node) || text.includes(UNKNOWN);
  if (!isMarked && !node.markedBySage) return;
  node.has_errors = node.markedBySage = isMarked;
  node.setDirtyCanvas(true, true);
}

// Yields each node with its id in a prompt: "57:3" is node 3 of the subgraph in node 57.
function* numbered(graph, prefix = "") {
  for (const node of graph.nodes) {
    const number = prefix + node.id;
    yield [number, node];
    if (node.subgraph) yield* numbered(node.subgraph, `${number}:`);
  }
}

const rootGraph = () => app.rootGraph ?? app.graph;

// Shows the status of a node in this graph. Returns the node, or undefined when it is not in this graph.
function show(isNews, { workflow, node: number, type, text, badge, tone }) {
  const graph = rootGraph();
  const node = graph?.id === workflow ? new Map(numbered(graph)).get(number) : undefined;
  if (node?.type !== type) return undefined;
  mark(node, text);
  if (isNews || !node.isNotified) showBadge(node, badge, tone);
  if (type === REPORT) showReport(node, text);
  return node;
}

// The server keeps the statuses from before this page was loaded.
async function refresh() {
  const graph = rootGraph();
  if (!graph?.id) return;
  const answer = await api.fetchApi(`/comfy_sage2/node_status?${new URLSearchParams({ workflow: graph.id })}`);
  if (answer.ok) (await answer.json()).forEach((entry) => show(false, entry));
}

app.registerExtension({
  name: "comfy_sage2.node_status",
  setup() {
    const said = new Set(); // each text is shown only once while this page is open
    api.addEventListener("comfy_sage2.status", ({ detail }) => {
      const node = show(true, detail);
      if (!node || node.type === REPORT || !detail.text || said.has(detail.text)) return;
      said.add(detail.text);
      say(node, detail.text);
    });
  },
  afterConfigureGraph: refresh,
  nodeCreated(node) {
    if (!isOurs({ name: node.comfyClass })) return;
    addBadge(node);
    for (const widget of node.widgets) {
      const { callback } = widget;
      widget.callback = (...chosen) => {
        callback?.apply(widget, chosen);
        mark(node);
      };
    }
  },
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!isOurs(nodeData)) return;
    const { onConfigure, onExecuted } = nodeType.prototype;
    nodeType.prototype.onConfigure = function (...values) {
      onConfigure?.apply(this, values);
      mark(this);
    };
    if (nodeData.name !== REPORT) return;
    nodeType.prototype.onExecuted = function (message) {
      onExecuted?.call(this, message);
      if (message?.text) showReport(this, message.text.join("\n\n")); // also on a cache hit in another workflow
    };
  },
});
