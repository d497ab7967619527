// Opens files that another version of this pack saved, whose nodes had other inputs. A node keeps the values of the
// inputs that it still has, found by name, and says in one line what it dropped.
import { app } from "../../../scripts/app.js";
import { isOurs, notify } from "./node_text.js";

// Name -> value of the widgets in a file. Files that name no widgets store values by position alone: undefined.
function namedValues({ inputs, widgets_values: values = [], widgets_values_named: named }) {
  if (named) return named;
  const names = (inputs ?? []).filter(({ widget }) => widget).map(({ widget }) => widget.name);
  if (names.length === 0 || names.length !== values.length) return undefined;
  return Object.fromEntries(names.map((name, place) => [name, values[place]]));
}

function fits(value, { value: initial, options }) {
  return Array.isArray(options?.values) ? options.values.includes(value) : typeof value === typeof initial;
}

// The file's values in the order of `widgets`, which hold their defaults still.
function valuesFor(widgets, saved) {
  const named = namedValues(saved);
  if (named) return widgets.map(({ name, value }) => (name in named ? named[name] : value));
  const values = saved.widgets_values ?? [];
  const isSameCount = values.length === widgets.length;
  return widgets.map((widget, place) =>
    isSameCount || fits(values[place], widget) ? values[place] : widget.value,
  );
}

function droppedInputs(known, saved) {
  const connected = (saved.inputs ?? []).filter(({ link }) => link != null).map(({ name }) => name);
  return [...new Set([...Object.keys(namedValues(saved) ?? {}), ...connected])].filter((name) => !known.has(name));
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
      const dropped = droppedInputs(known, saved);
      configure.call(this, { ...unnamed, widgets_values: valuesFor(widgets, saved) }, ...rest);
      if (dropped.length > 0) notify(this, `Saved by another version of this pack. Dropped: ${dropped.join(", ")}.`);
      else if (!namedValues(saved) && (saved.widgets_values?.length ?? widgets.length) !== widgets.length)
        notify(this, "Saved by another version of this pack. Check the values: the file does not name them.");
    };
    // The frontend keeps unknown inputs as sockets. Their links can be removed once all nodes are there.
    nodeType.prototype.onAfterGraphConfigured = function (...values) {
      onAfterGraphConfigured?.apply(this, values);
      for (let slot = this.inputs.length - 1; slot >= 0; slot--) {
        if (!known.has(this.inputs[slot].name)) this.removeInput(slot);
      }
    };
  },
});
