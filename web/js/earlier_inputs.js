// Workflow files store a node's values by position. Those of earlier versions had SageAttention2's inputs in another
// order, and its guard in two of them: a switch, and what it checks. Rotation was a switch in all nodes that have it.
import { app } from "../../../scripts/app.js";

// In the order of those versions; each of them had some of the first ones.
const EARLIER = [
  "mode",
  "smooth_v",
  "start_percent",
  "end_percent",
  "apply_to",
  "backend",
  "measure_quality",
  "guard",
  "rotate",
  "when",
  "guard_level",
  "skip",
  "respect_model_attention",
  "sparse",
  "dense_percent",
];

const ROTATING = ["SageAttention2", "SageAttention2Calibrate", "SageAttention2AutoPolicy"];

// The second value was `smooth_v`, a switch; now it is `sparse`, a text.
const isEarlier = (values) => Array.isArray(values) && typeof values[1] === "boolean";

const stored = (widgets) => widgets.filter(({ serialize }) => serialize !== false);

// The values in the order of `widgets`, which have their defaults still.
function inPresentOrder(values, widgets) {
  const known = Object.fromEntries(values.map((value, place) => [EARLIER[place], value]));
  if (typeof known.guard === "boolean") known.guard = known.guard ? (known.guard_level ?? "values") : "off";
  delete known.guard_level;
  return stored(widgets).map(({ name, value }) => known[name] ?? value);
}

function withRotationInWords(values, widgets) {
  const place = stored(widgets).findIndex(({ name }) => name === "rotate");
  return values.map((value, at) => (at === place && typeof value === "boolean" ? (value ? "on" : "off") : value));
}

app.registerExtension({
  name: "comfy_sage2.earlier_inputs",
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!ROTATING.includes(nodeData.name)) return;
    const { configure } = nodeType.prototype;
    nodeType.prototype.configure = function (saved, ...others) {
      const widgets = this.widgets ?? [];
      let values = saved.widgets_values;
      if (nodeData.name === "SageAttention2" && isEarlier(values)) values = inPresentOrder(values, widgets);
      if (Array.isArray(values)) values = withRotationInWords(values, widgets);
      return configure.call(this, { ...saved, widgets_values: values }, ...others);
    };
  },
});
