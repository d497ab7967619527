// A button on SageAttention2 Report: the node shows a summary, and this opens the whole chart.
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";

const BUTTON = "Show the full chart";

function show(node) {
  if (!node.fullChart) {
    alert("There is no chart yet: run the workflow first.");
    return;
  }
  window.open(api.apiURL(`/view?${new URLSearchParams(node.fullChart)}`), "_blank");
}

app.registerExtension({
  name: "comfy_sage2.full_chart",
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (nodeData.name !== "SageAttention2Report") return;
    const { onNodeCreated, onExecuted } = nodeType.prototype;
    nodeType.prototype.onNodeCreated = function () {
      onNodeCreated?.call(this);
      const button = this.addWidget("button", BUTTON, null, () => show(this));
      button.serialize = false;
      button.options.serialize = false;
    };
    nodeType.prototype.onExecuted = function (message) {
      onExecuted?.call(this, message);
      this.fullChart = message?.chart?.[0];
    };
  },
});
