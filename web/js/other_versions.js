// Opens workflow files from another version of this pack, whose nodes had other inputs. A node keeps the values of the
// inputs that it still has, matched by name, and reports the dropped ones in one line.
import { app } from "../../../scripts/app.js";
import { isOurs, notify } from "./node_status.js";

// Widget name -> value in the file; undefined when the file has no names and its values match no list of widgets.
function namedValues(widgets, { inputs, widgets_values, widgets_values_named: named }) {
  const values = named ?? widgets_values ?? [];
  if (!Array.isArray(values)) return Object(values);
  const saved = (inputs ?? []).filter(({ widget }) => widget).map(({ widget }) => widget.name);
  const names = [saved, widgets.map(({ name }) => name)].find(({ length }) => length > 0 && length === values.length);
  return names && Object.fromEntries(names.map((name, place) => [name, values[place]]));
}

const isChoice = ({ options }) => Array.isArray(options?.values);

// An unknown choice counts too: it is shown, and marks the node.
const isOfType = (value, widget) => isChoice(widget) || typeof value === typeof widget.value;

const fits = (value, widget) =>
  isChoice(widget) ? widget.options.values.includes(value) : isOfType(value, widget);

// The file's values in the order of `widgets`, which still hold their defaults.
function valuesFor(widgets, named, values) {
  return widgets.map((widget, place) => {
    const value = named ? named[widget.name] : values[place];
    const isKept = named ? widget.name in named && isOfType(value, widget) : fits(value, widget);
    return isKept ? value : widget.value;
  });
}

// Names of the saved inputs that the node lacks, or whose value has another type.
function droppedInputs(known, widgets, named, inputs) {
  const connected = (inputs ?? []).filter(({ link }) => link != null).map(({ name }) => name);
  const unknown = [...Object.keys(named), ...connected].filter((name) => !known.has(name));
  const changed = widgets.filter((widget) => widget.name in named && !isOfType(named[widget.name], widget));
  return [...new Set([...unknown, ...changed.map(({ name }) => name)])];
}

app.registerExtension({
  name: "comfy_sage2.other_versions",
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!isOurs(nodeData)) return;
    const known = new Set(Object.keys({ ...nodeData.input?.required, ...nodeData.input?.optional }));
    const { configure, onAfterGraphConfigured } = nodeType.prototype;
    nodeType.prototype.configure = function (saved, ...rest) {
      const widgets = (this.widgets ?? []).filter(({ serialize }) => serialize !== false);
      const { widgets_values_named, ...unnamed } = saved;
      const named = namedValues(widgets, saved);
      const dropped = droppedInputs(known, widgets, named ?? {}, saved.inputs);
      const widgets_values = valuesFor(widgets, named, saved.widgets_values ?? []);
      configure.call(this, { ...unnamed, widgets_values }, ...rest);
      if (dropped.length > 0) notify(this, `Saved by another version of this pack. Dropped: ${dropped.join(", ")}.`);
      else if (!named && saved.widgets_values)
        notify(this, "Saved by another version of this pack. Check the values: the file does not name them.");
    };
    // The frontend keeps unknown inputs as sockets. Their links can be removed only once all nodes exist.
    nodeType.prototype.onAfterGraphConfigured = function (...values) {
      onAfterGraphConfigured?.apply(this, values);
      for (let slot = this.inputs.length - 1; slot >= 0; slot--) {
        if (!known.has(this.inputs[slot].name)) this.removeInput(slot);
      }
    };
  },
});
