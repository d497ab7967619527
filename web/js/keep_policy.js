// A button on SageAttention2 Make Policy: keeps the policy it made in the workflow, as text in a Load Policy node.
import { app } from "../../../scripts/app.js";

const MAKER = "SageAttention2MakePolicy";
const KEEPER = "SageAttention2LoadPolicy";
const BUTTON = "Keep in this workflow";
const DISTANCE = 40;

function keep(maker) {
  const text = maker.madePolicy;
  if (!text) {
    alert("There is no policy yet: run the workflow first.");
    return;
  }
  const keeper = LiteGraph.createNode(KEEPER);
  keeper.pos = [maker.pos[0] + maker.size[0] + DISTANCE, maker.pos[1]];
  (maker.graph ?? app.graph).add(keeper); // the maker may be inside of a subgraph
  keeper.widgets.find((widget) => widget.name === "text").value = text;
  maker.setDirtyCanvas(true, true);
}

app.registerExtension({
  name: "comfy_sage2.keep_policy",
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (nodeData.name !== MAKER) return;
    const { onNodeCreated, onExecuted } = nodeType.prototype;
    nodeType.prototype.onNodeCreated = function () {
      onNodeCreated?.call(this);
      const button = this.addWidget("button", BUTTON, null, () => keep(this));
      button.serialize = false;
      button.options.serialize = false;
    };
    nodeType.prototype.onExecuted = function (message) {
      onExecuted?.call(this, message);
      this.madePolicy = message.policy?.[0];
    };
  },
});
