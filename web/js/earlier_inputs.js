// Workflow files store a node's values by position. Those of earlier versions had SageAttention2's inputs in another
// order, and its guard in two of them: a switch, and what it checks.
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

// The second value was `smooth_v`, a switch; now it is `sparse`, a text.
const isEarlier = (values) => Array.isArray(values) && typeof values[1] === "boolean";

// The values in the order of `widgets`, which have their defaults still.
function inPresentOrder(values, widgets) {
  const known = Object.fromEntries(values.map((value, place) => [EARLIER[place], value]));
  if (typeof known.guard === "boolean") known.guard = known.guard ? (known.guard_level ?? "values") : "off";
  delete known.guard_level;
  return widgets.filter(({ serialize }) => serialize !== false).map(({ name, value }) => known[name] ?? value);
}

app.registerExtension({
  name: "comfy_sage2.earlier_inputs",
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (nodeData.name !== "SageAttention2") return;
    const { configure } = nodeType.prototype;
    nodeType.prototype.configure = function (saved, ...others) {
      const values = saved.widgets_values;
      const data = isEarlier(values)
        ? { ...saved, widgets_values: inPresentOrder(values, this.widgets ?? []) }
        : saved;
      return configure.call(this, data, ...others);
    };
  },
});
