"""Script that writes `gpt2/` with the real library: `python -m tests.huggingface.write_gpt2`.

It needs torch and transformers. The result is a small random GPT-2, with random biases and norms, and its logits of one
sequence.
"""

from pathlib import Path

import numpy as np
import torch
import transformers

DIRECTORY = Path(__file__).parent / "gpt2"


def main() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        tokens = torch.randint(0, 40, (1, 8))
        logits = model(tokens).logits
    model.save_pretrained(DIRECTORY)
    (DIRECTORY / "generation_config.json").unlink(missing_ok=True)
    np.save(DIRECTORY / "tokens.npy", tokens.numpy())
    np.save(DIRECTORY / "logits.npy", logits.numpy())


if __name__ == "__main__":
    main()
