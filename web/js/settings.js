// The pack's setting; prestartup_script.py reads it from ComfyUI's settings before the next start.
import { app } from "../../../scripts/app.js";

app.registerExtension({
  name: "comfy_sage2.settings",
  settings: [
    {
      id: "comfy_sage2.sageattention",
      category: ["SageAttention2", "Other packs", "sageattention"],
      name: "Serve packs that import sageattention",
      tooltip:
        "For packs that never ask a node, such as WanVideoWrapper. From ComfyUI's next start on; an installed " +
        "sageattention that works stays in its place.",
      type: "boolean",
      defaultValue: false,
    },
  ],
});
