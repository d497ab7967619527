"""The files of the demo model: the trained one when the repository carries it, else a random one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .captions import CaptionEncoder
from .tiny_wan import dit_shapes, vae_shapes, write_checkpoint

DIT_FILE = "demo_wan21_t2v_fp16.safetensors"
VAE_FILE = "demo_wan21_vae_fp16.safetensors"
CAPTIONS_FILE = "demo_captions.safetensors"

REPOSITORY = Path(__file__).resolve().parents[2]
TRAINED_FOLDER = REPOSITORY / "lab" / "models" / "demo"


@dataclass(frozen=True)
class DemoModel:
    """Three files, each in a folder named as ComfyUI's for its kind, and whether their weights mean anything."""

    folder: Path
    trained: bool

    @property
    def dit(self) -> Path:
        return self.folder / "diffusion_models" / DIT_FILE

    @property
    def vae(self) -> Path:
        return self.folder / "vae" / VAE_FILE

    @property
    def captions(self) -> Path:
        return self.folder / "text_encoders" / CAPTIONS_FILE

    @property
    def files(self) -> tuple[Path, Path, Path]:
        return self.dit, self.vae, self.captions

    def make_folders(self) -> None:
        """Make the folders that the files are to be written to."""
        for path in self.files:
            path.parent.mkdir(parents=True, exist_ok=True)


def demo_model(scratch: Path, trained_folder: Path = TRAINED_FOLDER) -> DemoModel:
    """The trained model of `trained_folder`, or a random one written to `scratch` when a file of it is missing."""
    trained = DemoModel(trained_folder, trained=True)
    if all(path.is_file() for path in trained.files):
        return trained
    tiny = DemoModel(scratch, trained=False)
    tiny.make_folders()
    write_checkpoint(tiny.dit, dit_shapes(), seed=1)
    write_checkpoint(tiny.vae, vae_shapes(), seed=2)
    CaptionEncoder.random(seed=3).save(tiny.captions)
    return tiny
