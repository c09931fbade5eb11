"""LoRA adapters saved by peft itself, and the weights that peft makes of them: tests/fixtures/peft_adapter.

    pip install peft==0.21.2
    python tools/make_peft_adapter.py

`plain` targets a list of modules; `patterns` a regular expression, ranks and alphas by pattern, rank-stabilised scale,
and a module that is saved whole. The truth is peft's own merge, of the saved files loaded into a float64 base.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import nn

HERE = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "peft_adapter"
CONFIGS = {
    "plain": LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "up_proj"]),
    "patterns": LoraConfig(
        r=2,
        lora_alpha=5,
        target_modules=r".*layers\.\d+\.(attn\.(q|v)_proj|mlp\..*)",
        rank_pattern={"q_proj": 3, "layers.1.mlp.up_proj": 5},
        alpha_pattern={r"mlp\.(up|down)_proj": 7},
        modules_to_save=["action_out"],
        use_rslora=True,
    ),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({name: nn.Linear(16, 12, bias=False) for name in ("q_proj", "v_proj")})
        self.mlp = nn.ModuleDict({"up_proj": nn.Linear(16, 24), "down_proj": nn.Linear(24, 16)})


class Model(nn.Module):
    """Names and shapes only: nothing is run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.action_out = nn.Linear(16, 8)


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    torch.manual_seed(0)
    base = Model().to(torch.bfloat16).state_dict()
    HERE.mkdir(parents=True)
    save_file(base, HERE / "base.safetensors")
    for name, config in CONFIGS.items():
        tuned = get_peft_model(_model(base), config)
        with torch.no_grad():
            for parameter in (p for p in tuned.parameters() if p.requires_grad):
                parameter.copy_(torch.randn_like(parameter))
        tuned.save_pretrained(HERE / name)
        (HERE / name / "README.md").unlink(missing_ok=True)
        merged = PeftModel.from_pretrained(_model(base).double(), str(HERE / name)).merge_and_unload()
        save_file(merged.state_dict(), HERE / f"{name}.merged.safetensors")
    about = {"made by": "tools/make_peft_adapter.py", "peft": peft.__version__, "torch": torch.__version__}
    (HERE / "fixture.json").write_text(json.dumps(about, indent=1) + "\n")


def _model(state: dict[str, torch.Tensor]) -> nn.Module:
    model = Model()
    model.load_state_dict(state)
    return model


if __name__ == "__main__":
    main()
