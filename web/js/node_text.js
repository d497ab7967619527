// Shows the text that a node of this pack reports on the node itself.
import { app } from "../../../scripts/app.js";

const NODES = new Set([
  "SageAttention2",
  "SageAttention2Report",
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

app.registerExtension({
  name: "comfy_sage2.node_text",
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!NODES.has(nodeData.name)) return;
    const onExecuted = nodeType.prototype.onExecuted;
    nodeType.prototype.onExecuted = function (message) {
      onExecuted?.call(this, message);
      const text = (message.text ?? []).join("\n\n");
      const widget = textWidget(this);
      widget.value = text;
      const [width, height] = this.computeSize();
      this.setSize([Math.max(this.size[0], width, MINIMUM_WIDTH), Math.max(this.size[1], height)]);
      this.setDirtyCanvas(true, true);
    };
  },
});
