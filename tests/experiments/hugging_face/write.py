"""Write the fixtures: `python -m tests.experiments.hugging_face.write`, with torch and transformers installed.

Each fixture is a directory as `save_pretrained` leaves it, with the logits of some tokens beside it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.experiments.hugging_face.cases import DAILY, arguments

FIXTURES = Path(__file__).parent / "fixtures"
TOKENS_BxT = np.random.default_rng(1).integers(0, 64, (2, 24))


def make_model(name: str) -> Any:
    """Return a small random model of transformers, float32, in which every parameter matters."""
    model_type, options = arguments(name)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **options, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("_bias"):  # are initialised to ones or zeros
                # Some gates and ups of GPT-OSS exceed the limit, to which they are clamped.
                parameter += (3.0 if name.endswith("gate_up_proj_bias") else 0.2) * torch.randn(parameter.shape)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):  # are initialised to zeros and ones
                buffer += 0.2 * torch.randn(buffer.shape)
    return model


def compute_logits(model: Any, tokens_BxT: np.ndarray) -> np.ndarray:
    """Return logits of the next token, (B, T, V)."""
    with torch.no_grad():
        return model(torch.tensor(tokens_BxT)).logits.numpy()


def main() -> None:
    """Write every daily case."""
    for name in DAILY:
        model = make_model(name)
        model.save_pretrained(FIXTURES / name)
        np.save(FIXTURES / name / "logits.npy", compute_logits(model, TOKENS_BxT))
        print(name, sum(path.stat().st_size for path in (FIXTURES / name).iterdir()) // 1000, "kB")


if __name__ == "__main__":
    main()
