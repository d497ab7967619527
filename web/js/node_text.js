// Shows the text that a node of this pack reports on the node itself.
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";

const WIDGET = "status";
const WIDTH = 420; // of a new node, so that its text can be read

export const isOurs = ({ name }) => name.startsWith("SageAttention2");

function textWidget(node) {
  const existing = node.widgets?.find((widget) => widget.name === WIDGET);
  if (existing) return existing;
  const { widget } = app.widgets.STRING(node, WIDGET, ["STRING", { multiline: true }], app);
  (widget.element ?? widget.inputEl).readOnly = true;
  // What was shown belongs neither to the workflow nor to the prompt.
  widget.serialize = false;
  widget.options.serialize = false;
  return widget;
}

// A value of a workflow file that this version does not know is replaced when the node runs; until the user chooses
// another one the node has the border of a node with an error, which is not stored in the file.
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

function show(node, text) {
  mark(node, text);
  const widget = textWidget(node);
  const shown = [node.sageNotice, text].filter(Boolean).join("\n");
  if (widget.value === shown) return;
  widget.value = shown;
  // Only as high as it has to be, and never wider: another node may stand beside it.
  node.setSize([node.size[0], Math.max(node.size[1], node.computeSize()[1])]);
  node.setDirtyCanvas(true, true);
}

// Shows a line above the node's text until the workflow is opened again.
export function notify(node, line) {
  node.sageNotice = line;
  show(node, "");
}

// Nodes by the numbers that they have in a prompt: "57:3" is node 3 of the subgraph in node 57.
function* numbered(graph, prefix = "") {
  for (const node of graph.nodes) {
    const number = prefix + node.id;
    yield [number, node];
    if (node.subgraph) yield* numbered(node.subgraph, `${number}:`);
  }
}

// The server knows what the nodes have said after the sampling, and before this page was loaded.
async function refresh() {
  const graph = app.rootGraph ?? app.graph;
  if (!graph?.id) return;
  const answer = await api.fetchApi(`/comfy_sage2/node_status?${new URLSearchParams({ workflow: graph.id })}`);
  if (!answer.ok) return;
  const nodes = new Map(numbered(graph));
  for (const { node: number, type, text } of await answer.json()) {
    const node = nodes.get(number);
    if (node?.type === type) show(node, text);
  }
}

app.registerExtension({
  name: "comfy_sage2.node_text",
  setup() {
    for (const event of ["execution_success", "execution_error", "execution_interrupted"]) {
      api.addEventListener(event, refresh);
    }
  },
  afterConfigureGraph: refresh,
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!isOurs(nodeData)) return;
    const { onExecuted, onConfigure, onNodeCreated } = nodeType.prototype;
    nodeType.prototype.onConfigure = function (...values) {
      onConfigure?.apply(this, values);
      mark(this);
    };
    nodeType.prototype.onNodeCreated = function (...values) {
      onNodeCreated?.apply(this, values);
      this.setSize([Math.max(this.size[0], WIDTH), this.size[1]]); // a workflow's file has a size of its own
      for (const widget of this.widgets ?? []) {
        const { callback } = widget;
        widget.callback = (...chosen) => {
          callback?.apply(widget, chosen);
          mark(this);
        };
      }
    };
    nodeType.prototype.onExecuted = function (message) {
      onExecuted?.call(this, message);
      const text = (message?.text ?? []).join("\n\n");
      if (text) show(this, text);
    };
  },
});
