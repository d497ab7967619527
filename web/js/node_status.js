// What a node of this pack says: a few words in its title, what to do in a message, and a report's text on the node.
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";

const REPORT = "SageAttention2Report";
const WIDTH = 420; // of a new node: the report's picture is drawn at half of its size
const COLORS = { good: "#1d6b34", warning: "#8a5300", plain: "#464b55" };

export const isOurs = ({ name }) => name?.startsWith("SageAttention2");

// The classic design draws badges above the title, where another node may lie. This one lies in the title's right end.
const titleBadge = (options) =>
  new (class extends LGraphBadge {
    getWidth(context) {
      return this.isDrawn ? super.getWidth(context) : 0; // the other badges stay where they are
    }
    draw(context, x, y) {
      this.isDrawn = true;
      super.draw(context, x - this.getWidth(context), y + 27);
      this.isDrawn = false;
    }
  })(options);

function addBadge(node) {
  const height = node.size[1];
  // Neither shown nor saved nor sent. The newer design draws a badge anew when the value of a widget changes.
  const words = node.addWidget("text", "badge", "", () => {}, { hidden: true, serialize: false });
  Object.assign(words, { hidden: true, serialize: false, computeSize: () => [0, -4] });
  // A node that is muted or bypassed did nothing in the last run.
  const text = () => (node.mode === 0 ? words.value : "");
  node.badges?.push(() => titleBadge({ text: text(), fgColor: "white", bgColor: COLORS[node.sageTone] }));
  node.setSize([Math.max(node.size[0], WIDTH), height]); // a workflow's file has a size of its own
}

function showBadge(node, text, tone) {
  node.sageTone = tone;
  node.widgets.find(({ name }) => name === "badge").value = text;
  node.setDirtyCanvas(true, true);
}

function say(node, detail) {
  app.extensionManager.toast.add({ severity: "warn", summary: node.title, detail, life: 20000 });
}

// A line about the workflow's file.
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
    // What was shown belongs neither to the workflow nor to the prompt.
    widget.serialize = widget.options.serialize = false;
    widget.options.getMinHeight = () => 68; // four lines in the classic design
  }
  if (widget.value === text) return;
  widget.value = text;
  // Only as high as it has to be, and never wider: another node may stand beside it.
  node.setSize([node.size[0], Math.max(node.size[1], node.computeSize()[1])]);
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

// Nodes by the numbers that they have in a prompt: "57:3" is node 3 of the subgraph in node 57.
function* numbered(graph, prefix = "") {
  for (const node of graph.nodes) {
    const number = prefix + node.id;
    yield [number, node];
    if (node.subgraph) yield* numbered(node.subgraph, `${number}:`);
  }
}

const rootGraph = () => app.rootGraph ?? app.graph;

// Shows what a node of this graph has said; the node, or undefined.
function show(isNews, { workflow, node: number, type, text, badge, tone }) {
  const graph = rootGraph();
  const node = graph?.id === workflow ? new Map(numbered(graph)).get(number) : undefined;
  if (node?.type !== type) return undefined;
  mark(node, text);
  if (isNews || !node.isNotified) showBadge(node, badge, tone);
  if (type === REPORT) showReport(node, text);
  return node;
}

// The server knows what the nodes have said before this page was loaded.
async function refresh() {
  const graph = rootGraph();
  if (!graph?.id) return;
  const answer = await api.fetchApi(`/comfy_sage2/node_status?${new URLSearchParams({ workflow: graph.id })}`);
  if (answer.ok) (await answer.json()).forEach((entry) => show(false, entry));
}

app.registerExtension({
  name: "comfy_sage2.node_status",
  setup() {
    const said = new Set(); // what a run said is not said again while this page is open
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
      if (message?.text) showReport(this, message.text.join("\n\n")); // from the cache, in another workflow, too
    };
  },
});
