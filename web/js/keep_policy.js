// A button that keeps a policy in the workflow: on Auto Policy in its own input, on Make Policy in a Load Policy node
// that takes the place of Make Policy's output.
import { app } from "../../../scripts/app.js";
import { numbered, statuses } from "./node_text.js";

const AUTO = "SageAttention2AutoPolicy";
const MAKER = "SageAttention2MakePolicy";
const KEEPER = "SageAttention2LoadPolicy";
const USER = "SageAttention2";
const POLICY = "policy"; // the user's input, the maker's output, the text input of Auto Policy
const BUTTON = "Keep in this workflow";
const DISTANCE = 40;

function say(severity, text) {
  const toast = app.extensionManager?.toast;
  if (toast) toast.add({ severity, summary: "SageAttention2", detail: text, life: 6000 });
  else if (severity !== "success") alert(text);
}

function setText(node, name, text) {
  const widget = node.widgets.find((found) => found.name === name);
  widget.value = text;
  widget.callback?.(text);
}

function covers(left, top, width, height, node) {
  const [x, y, w, h] = node.getBounding();
  return left < x + w && x < left + width && top < y + h && y < top + height;
}

// Beside `maker`, as far down as no other node is in the way.
function freePlace(graph, maker, [width, height]) {
  const left = maker.pos[0] + maker.size[0] + DISTANCE;
  const title = LiteGraph.NODE_TITLE_HEIGHT;
  let top = maker.pos[1];
  for (let tries = 0; tries <= graph.nodes.length; tries++) {
    const around = [left - DISTANCE / 2, top - title, width + DISTANCE, height + title + DISTANCE];
    const blocks = graph.nodes.filter((node) => covers(...around, node));
    if (blocks.length === 0) break;
    top = Math.max(...blocks.map((node) => node.pos[1] + node.size[1])) + title + DISTANCE;
  }
  return [left, top];
}

// Puts `keeper` where `link` of the maker's policy leads: to a node, or out of the subgraph.
function relink(graph, keeper, link) {
  const user = graph.getNodeById(link.target_id);
  if (user) keeper.connect(0, user, link.target_slot);
  else if (link.target_id === graph.outputNode?.id) {
    graph.outputNode.slots[link.target_slot]?.connect(keeper.outputs[0], keeper);
  }
}

// Connects `keeper` in the place of the maker's policy; where that feeds nothing, to the only node that could take it.
function connect(graph, maker, keeper) {
  const ids = maker.outputs.find((output) => output.name === POLICY)?.links ?? [];
  const links = ids.map((id) => graph.getLink?.(id) ?? graph.links[id]).filter(Boolean);
  for (const link of links) relink(graph, keeper, link);
  if (links.length > 0) return;
  const open = graph.nodes
    .filter((node) => node.type === USER)
    .map((node) => [node, node.inputs.findIndex((input) => input.name === POLICY)])
    .filter(([node, slot]) => slot >= 0 && node.inputs[slot].link == null);
  if (open.length === 1) keeper.connect(0, ...open[0]);
}

function keepInOwnNode(maker, text) {
  const graph = maker.graph ?? app.graph; // the maker may be inside of a subgraph
  let keeper = graph.getNodeById(maker.policyKeeper);
  if (keeper?.type !== KEEPER) {
    keeper = LiteGraph.createNode(KEEPER);
    graph.add(keeper);
    keeper.pos = freePlace(graph, maker, keeper.size);
    maker.policyKeeper = keeper.id;
  }
  setText(keeper, "text", text);
  connect(graph, maker, keeper);
  app.canvas.selectNodes?.([keeper]);
  const kept = keeper.outputs[0].links?.length > 0;
  say(
    kept ? "success" : "warn",
    kept
      ? "The policy is in a Load Policy node, which feeds SageAttention2. You can mute the nodes of the calibration now."
      : "The policy is in a Load Policy node: connect it to SageAttention2.",
  );
}

// The policy of what `node` sampled last in this workflow. The server knows it after the sampling; what came with the
// node's own run, which is before, is of the run before.
async function made(node) {
  if (node.comfyClass !== AUTO) return node.madePolicy;
  const graph = app.rootGraph ?? app.graph;
  const [number] = [...numbered(graph)].find(([, found]) => found === node) ?? [];
  const entry = (await statuses()).find((found) => found.node === number && found.type === AUTO);
  return entry ? entry.policy : node.madePolicy;
}

async function keep(node) {
  const text = await made(node);
  if (!text) {
    say("warn", "There is no policy yet: run the workflow first.");
    return;
  }
  if (node.comfyClass === AUTO) {
    setText(node, POLICY, text);
    say("success", "The policy is in this node now. Save the workflow to keep it.");
  } else {
    keepInOwnNode(node, text);
  }
  (node.graph ?? app.graph).setDirtyCanvas(true, true);
}

app.registerExtension({
  name: "comfy_sage2.keep_policy",
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (nodeData.name !== MAKER && nodeData.name !== AUTO) return;
    const { onNodeCreated, onExecuted } = nodeType.prototype;
    nodeType.prototype.onNodeCreated = function () {
      onNodeCreated?.call(this);
      const button = this.addWidget("button", BUTTON, null, () => keep(this));
      button.serialize = false;
      button.options.serialize = false;
    };
    nodeType.prototype.onExecuted = function (message) {
      onExecuted?.call(this, message);
      this.madePolicy = message?.policy?.[0];
    };
  },
});
