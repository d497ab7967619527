// The pack's setting. prestartup_script.py reads it from ComfyUI's settings at the next start.
import { app } from "../../../scripts/app.js";

app.registerExtension({
  name: "comfy_sage2.settings",
  settings: [
    {
      id: "comfy_sage2.sageattention",
      category: ["SageAttention2", "Other packs", "sageattention"],
      name: "Let packs that import sageattention use SageAttention2 (restart needed)",
      tooltip:
        "For packs that call sageattention themselves, such as WanVideoWrapper and KJNodes. Restart ComfyUI " +
        "to apply it. If a working sageattention is installed, these packs keep using that one.",
      type: "boolean",
      defaultValue: false,
    },
  ],
});
