// The pack's setting; prestartup_script.py reads it from ComfyUI's settings before the next start.
import { app } from "../../../scripts/app.js";

app.registerExtension({
  name: "comfy_sage2.settings",
  settings: [
    {
      id: "comfy_sage2.sageattention",
      category: ["SageAttention2", "Other packs", "sageattention"],
      name: "Let packs that import sageattention use SageAttention2 (restart needed)",
      tooltip:
        "For packs that call sageattention themselves, such as WanVideoWrapper and KJNodes. It takes effect when " +
        "ComfyUI starts again. Where a sageattention that works is installed, they go on to use that one.",
      type: "boolean",
      defaultValue: false,
    },
  ],
});
