// Shows the text that a node of this pack reports on the node itself.
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";

const NODES = new Set([
  "SageAttention2",
  "SageAttention2Report",
  "SageAttention2AutoPolicy",
  "SageAttention2Calibrate",
  "SageAttention2MakePolicy",
  "SageAttention2LoadPolicy",
  "SageAttention2Capture",
  "SageAttention2SaveCapture",
  "SageAttention2DemoBaseline",
]);
const WIDGET = "status";
const MINIMUM_WIDTH = 420;

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

function show(node, text) {
  const widget = textWidget(node);
  if (widget.value === text) return;
  widget.value = text;
  const [width, height] = node.computeSize();
  node.setSize([Math.max(node.size[0], width, MINIMUM_WIDTH), Math.max(node.size[1], height)]);
  node.setDirtyCanvas(true, true);
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
    if (!NODES.has(nodeData.name)) return;
    const onExecuted = nodeType.prototype.onExecuted;
    nodeType.prototype.onExecuted = function (message) {
      onExecuted?.call(this, message);
      show(this, (message?.text ?? []).join("\n\n"));
    };
  },
});
